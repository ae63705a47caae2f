"""The prompts of the command line, of text files and of JSON lines."""

import argparse
import dataclasses
import os
import pathlib
import sys
from typing import Any

from checkpoints.checkpoint import Checkpoint
from checkpoints.tensor_files import parse_json
from conversation.messages import has_surrogate, read_messages
from conversation.text import stop_tokens
from conversation.tools import read_definitions
from deployment.memory import ROW_POSITIONS
from distributed.exchange import from_first
from feedback.errors import UserError, located
from generation.request_builder import (
    NEW_TOKENS,
    NOT_TEXT,
    RequestBuilder,
    builder_for,
    check_new_tokens,
    check_text,
    row_length,
)
from model import Config
from serving.requests import SAMPLING_OPTIONS, check_sampling
from terminal.launch import log

DEFAULT_PROMPTS = (
    "Tell me your name",
    "What is the weather like expressed in long prose in Old English",
    "Do you like ice cream, be extremely precise",
)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A text, or the messages of a chat as conversation.messages.read_messages returns them.

    where: its place, for errors. options: of this prompt alone. tools: definitions of the functions that a
    chat offers to the model, as OpenAI's API has them.
    """

    text: str | list[dict[str, Any]]
    where: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    tools: list[dict] = dataclasses.field(default_factory=list)

    @property
    def title(self) -> str:
        return self.text if isinstance(self.text, str) else self.text[-1]["content"]


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    """The prompts of the command line and those of the file, or else the default ones."""
    typed = [
        Prompt(text, f"--prompt {text if len(text) < 40 else text[:36] + '...'!r}")
        for text in args.prompt or ()
    ]
    prompts = typed + ([] if args.prompt_file is None else read_prompt_file(args.prompt_file))
    for prompt in prompts:
        if isinstance(prompt.text, str):
            with located(prompt.where):
                check_text(prompt.text)
    return prompts or [Prompt(text, f"prompt {i}") for i, text in enumerate(DEFAULT_PROMPTS, 1)]


def share_prompts(args: argparse.Namespace) -> list[Prompt]:
    """The first process's prompts, in all processes: others may have neither the file nor its stdin."""
    found = from_first(lambda: [vars(prompt) for prompt in read_prompts(args)])
    return [Prompt(**fields) for fields in found]


def read_prompt_file(name: str) -> list[Prompt]:
    """The prompts of a file, "-" for stdin: one per line; in a .jsonl file an object, see `parse_line`."""
    option = f"--prompt-file {name}"
    try:
        stdin = name == "-"
        data = sys.stdin.buffer.read() if stdin else pathlib.Path(os.path.expanduser(name)).read_bytes()
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{option}: not a UTF-8 text file") from None
    if not text.strip():
        raise UserError(f"{option}: no prompt in it")
    lines = [(f"{option}, line {i}", line.removesuffix("\r")) for i, line in enumerate(text.split("\n"), 1)]
    while not lines[-1][1].strip():
        lines.pop()
    if not name.endswith(".jsonl"):
        return [Prompt(line, where) for where, line in lines]
    return [parse_line(line, where) for where, line in lines if line.strip()]


def parse_line(line: str, where: str) -> Prompt:
    """The prompt of a line: {"prompt": TEXT}, or {"messages": MESSAGES} with or without "tools"; and options.

    Raises UserError that begins with `where`.
    """
    options, tools = parse_json(line, where), []
    if ("prompt" in options) == ("messages" in options):
        raise UserError(f'{where}: not a JSON object with either "prompt" or "messages"')
    if "messages" in options:
        with located(where):
            text, tools = read_messages(options.pop("messages")), options.pop("tools", [])
            read_definitions(tools)
    elif not isinstance(text := options.pop("prompt"), str):
        raise UserError(f'{where}: "prompt" is no text')
    known = {*SAMPLING_OPTIONS, "max_new_tokens"}
    if unknown := sorted(set(options) - known):
        raise UserError(f"{where}: unknown option {unknown[0][:40]!r}; known: {', '.join(sorted(known))}")
    with located(where):
        for name in set(options) & set(SAMPLING_OPTIONS):
            check_sampling(name, options[name])
        check_new_tokens(options.get("max_new_tokens", 1))
    return Prompt(text, where, options, tools)


def make_builder(
    args: argparse.Namespace, checkpoint: Checkpoint, tokenizer, configs: list[Config]
) -> RequestBuilder:
    """The RequestBuilder with the options of the command line. Raises UserError if one does not suit."""
    default = ROW_POSITIONS if args.chat or args.serve else None
    max_len, limit = row_length(args.max_len, configs, default, "--max-len")
    stop = frozenset() if args.ignore_eos else stop_tokens(checkpoint.folder, tokenizer)
    builder = builder_for(
        checkpoint,
        tokenizer,
        {name: getattr(args, name) for name in SAMPLING_OPTIONS},
        "--",
        max_len=max_len,
        limit=limit,
        stop_tokens=stop.union(args.stop_id),
        stop=tuple(args.stop),
        max_new_tokens=0 if args.score else args.max_new_tokens,
        new_tokens=max_len if args.chat else NEW_TOKENS,
        score=args.logprobs or args.score,
        system=args.system,
        chat_template=not (args.no_chat_template or args.score),
        special_tokens_in_messages=args.special_tokens_in_messages,
        divided=not args.no_chat_template,
    )
    if wrong := [i for i in args.stop_id if not 0 <= i < builder.vocabulary]:
        raise UserError(f"--stop-id {wrong[0]}: the model has tokens 0 to {builder.vocabulary - 1}")
    if args.n > 1 and not builder.sampling.temperature:
        log(f"--n {args.n}: greedy answers are all alike; --temperature 1 would make them differ")
    if has_surrogate(args.system or ""):
        raise UserError(f"--system: {NOT_TEXT}")
    if args.system is not None and not tokenizer.chat_template:
        raise UserError(f"--system: the tokenizer in {checkpoint.folder} has no chat template")
    return builder
