"""The prompts of the command line, of text files and of JSON lines, and the requests made of them."""

import argparse
import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from checkpoints.checkpoint import Checkpoint
from checkpoints.tensor_files import parse_json
from conversation.messages import has_surrogate, read_messages
from conversation.streams import TextStream, answer_stream
from conversation.text import encode, stop_tokens
from conversation.tools import choose_tool_format, read_definitions
from distributed.exchange import from_first
from feedback.errors import UserError, located
from model import Config
from serving.requests import RESTRICTIONS, SAMPLING_OPTIONS, Request, check_sampling, choose_sampling
from sharding.sampling import Sampling
from terminal.command_line import INT32_MAX
from terminal.launch import log

DEFAULT_NEW_TOKENS = 256
INTERACTIVE_LENGTH = 4096  # the default --max-len of --chat and --serve, if the model allows it
DEFAULT_PROMPTS = (
    "Tell me your name",
    "What is the weather like expressed in long prose in Old English",
    "Do you like ice cream, be extremely precise",
)
NOT_TEXT = "not valid text in this terminal's encoding"


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
    read = [] if args.prompt_file is None else read_prompt_file(args.prompt_file)
    for prompt in typed:
        check_text(prompt, NOT_TEXT)
    for prompt in read:
        check_text(prompt, "not valid text, but half a surrogate pair")
    return [*typed, *read] or [Prompt(text, f"prompt {i}") for i, text in enumerate(DEFAULT_PROMPTS, 1)]


def check_text(prompt: Prompt, surrogate: str) -> None:
    """Raise UserError if a text is empty or has a surrogate, with `surrogate` as the message. A chat has been
    checked when it was read.
    """
    if not isinstance(prompt.text, str):
        return
    if not prompt.text.strip():
        raise UserError(f"{prompt.where}: an empty prompt")
    if has_surrogate(prompt.text):
        raise UserError(f"{prompt.where}: {surrogate}")


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
    for name in set(options) & set(SAMPLING_OPTIONS):
        check_sampling(name, options[name], f"{where}: ")
    new = options.get("max_new_tokens", 1)
    if type(new) is not int or not 1 <= new <= INT32_MAX:
        raise UserError(f"{where}: max_new_tokens {str(new)[:40]} is not between 1 and {INT32_MAX}")
    return Prompt(text, where, options, tools)


def row_limit(args: argparse.Namespace, configs: list[Config]) -> tuple[int, str]:
    """The most positions of a row, and what sets this limit."""
    limit = min(cfg.max_positions for cfg in configs)
    if args.max_len is None:
        if (args.chat or args.serve) and limit > INTERACTIVE_LENGTH:
            return INTERACTIVE_LENGTH, "the default --max-len"
        return limit, "the model's limit"
    if args.max_len > limit:
        raise UserError(f"--max-len {args.max_len}: the model's limit is {limit} positions")
    return args.max_len, "--max-len"


class RequestBuilder:
    """Makes requests of prompts, with the options of the command line."""

    def __init__(self, args: argparse.Namespace, checkpoint: Checkpoint, tokenizer, configs: list[Config]):
        self.args, self.tokenizer, self.vocabulary = args, tokenizer, checkpoint.config.V
        self.channels = checkpoint.family.channels
        self.tools = choose_tool_format(tokenizer, checkpoint.family.tools)
        asked = {name: getattr(args, name) for name in SAMPLING_OPTIONS}
        self.sampling = choose_sampling(asked, checkpoint.folder)
        self.templated = bool(tokenizer.chat_template) and not args.no_chat_template and not args.score
        self.limit, self.limit_name = row_limit(args, configs)
        self.new_tokens = self.limit if args.chat else DEFAULT_NEW_TOKENS
        stop = frozenset() if args.ignore_eos else stop_tokens(checkpoint.folder, tokenizer)
        self.stop = stop.union(args.stop_id)
        if wrong := [i for i in args.stop_id if not 0 <= i < self.vocabulary]:
            raise UserError(f"--stop-id {wrong[0]}: the model has tokens 0 to {self.vocabulary - 1}")
        if args.n > 1 and not self.sampling.temperature:
            log(f"--n {args.n}: greedy answers are all alike; --temperature 1 would make them differ")
        if has_surrogate(args.system or ""):
            raise UserError(f"--system: {NOT_TEXT}")
        if args.system is not None and not tokenizer.chat_template:
            raise UserError(f"--system: the tokenizer in {checkpoint.folder} has no chat template")

    def encode(self, text: str | list[dict], /, **options) -> list[int]:
        """The token ids of a text or a chat, through the chat template if there is one.

        options: of a chat, see conversation.text.encode.
        """
        if isinstance(text, str) and self.templated:
            text = [{"role": "user", "content": text}]
        if not isinstance(text, str) and self.args.system and text[0]["role"] not in ("system", "developer"):
            text = [{"role": "system", "content": self.args.system}, *text]
        spelled = self.args.special_tokens_in_messages
        return encode(self.tokenizer, text, self.vocabulary, self.limit, spelled, self.tools, **options)

    def requests(self, prompt: list[int], options: dict, samples: int) -> Iterator[Request]:
        """A request for each sample of a prompt: they differ in their seeds. UserError as in `request`."""
        first = self.request(prompt, options)
        yield first
        for i in range(1, samples):
            sampling = dataclasses.replace(first.sampling, seed=(first.sampling.seed + i) % 2**32)
            yield dataclasses.replace(first, sampling=sampling)

    def request(self, prompt: list[int], options: dict) -> Request:
        """Raises UserError if the prompt and its answer exceed a row."""
        args, left = self.args, self.limit - len(prompt)
        new = options.get("max_new_tokens") or args.max_new_tokens or min(self.new_tokens, max(left, 1))
        new = 0 if args.score else new
        if new > left:
            answer = f", which with {new} new ones" if new else ", which"
            raise UserError(f"{len(prompt)} tokens{answer} exceed {self.limit_name} of {self.limit}")
        asked = vars(self.sampling) | {name: options[name] for name in options if name in SAMPLING_OPTIONS}
        if not asked["temperature"] and args.temperature is None and "temperature" not in options:
            asked["temperature"] = 1.0 if RESTRICTIONS & set(options) else None
        return Request(
            np.array(prompt, np.int32), new, Sampling(**asked), self.stop, args.logprobs or args.score
        )

    def new_stream(self, request: Request) -> TextStream:
        """The text of the answer to a request. The continuation of a text is not divided."""
        if self.args.no_chat_template:
            return TextStream(self.tokenizer, self.stop, tuple(self.args.stop))
        return answer_stream(self.tokenizer, request.prompt, self.stop, tuple(self.args.stop), self.channels)
