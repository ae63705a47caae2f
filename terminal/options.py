"""The options of main.py."""

import argparse
import pathlib
import re

from checkpoints.names import FLOATS
from quantize import FORMATS
from serving.memory import ROWS
from serving.speculation import MAX_DRAFT, check_n_draft
from terminal.command_line import OneLineParser
from terminal.launch import add_processes
from terminal.prompts import NEW_TOKENS

TINY = pathlib.Path(__file__).resolve().parents[1] / "tests" / "checkpoints" / "tiny-llama3"


def parse_arguments(arguments: list[str] | None = None):
    what = "Generate text: python3 main.py [--checkpoint DIR_OR_ID] [--prompt TEXT]..."
    parser = OneLineParser(description=what, allow_abbrev=False)
    # fmt: off
    add = parser.add_argument_group("the model").add_argument
    add("--checkpoint", default=str(TINY), metavar="DIR_OR_ID",
        help="a converted or Hugging Face folder, a GGUF file, or a hub id; default: a tiny model from here")
    add("--dtype", choices=FLOATS,
        help="of activations; default: float32 on a CPU, unless the weights are quantized; else bfloat16")
    add("--quantize", choices=FORMATS, metavar="FORMAT",
        help=f"the weights: {', '.join(FORMATS)}; default: as in the checkpoint")
    add("--kv-cache-dtype", choices=("int8", "bfloat16", "float32"),
        help="default: float32 on a CPU, else --dtype")
    add("--dp", type=int, metavar="N", help="data parallelism; default: what --ep and --tp leave")
    add("--ep", type=int, metavar="N", help="expert parallelism; default: 1")
    add("--tp", type=int, metavar="N", help="tensor parallelism; default: what --dp and --ep leave")
    add("--pp", type=int, metavar="N", help="pipeline parallelism: stages of layers; default: 1")

    add = parser.add_argument_group("what to ask").add_argument
    add("--prompt", action="append", metavar="TEXT", help="may be given many times")
    add("--prompt-file", metavar="FILE", help="a prompt per line; of a .jsonl file, an object; -: stdin")
    add("--chat", action="store_true", help="talk: each line of the input is a turn")
    add("--system", metavar="TEXT", help="what the model is told first")
    add("--no-chat-template", action="store_true",
        help="continue the text itself, even if the tokenizer has a chat template")
    add("--score", action="store_true", help="do not continue the text but say how likely it is")
    add("--n", type=int, default=1, metavar="N",
        help="samples per prompt, with seeds S, S + 1 and so on; default: 1")

    add = parser.add_argument_group("how to answer").add_argument
    add("--max-new-tokens", type=int, metavar="N",
        help=f"per answer; default: {NEW_TOKENS}, or what --max-len allows")
    add("--stop", action="append", default=[], metavar="TEXT",
        help="a text that ends an answer; may be given many times")
    add("--stop-id", action="append", default=[], type=int, metavar="ID", help="a token that ends an answer")
    add("--ignore-eos", action="store_true", help="go on after the model's end tokens")
    add("--temperature", type=float, metavar="T",
        help="0: greedy; default: the checkpoint's, or 1 with --top-k, --top-p or --min-p")
    add("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="sample from the likeliest that hold P of the probability")
    add("--min-p", type=float, metavar="P", help="sample from those at least P as likely as the likeliest")
    add("--repetition-penalty", type=float, metavar="R", help="above 1: makes what the text has less likely")
    add("--presence-penalty", type=float, metavar="P", help="above 0: makes what the answer has less likely")
    add("--frequency-penalty", type=float, metavar="P", help="the same, for each time that the answer has it")
    add("--seed", type=int, default=0, metavar="S", help="of the sampling; default: 0")

    add = parser.add_argument_group("how to run").add_argument
    add("--rows", type=int, metavar="N",
        help=f"answered at a time; default: all, but at most {ROWS}; of a server {ROWS}, on a CPU 8")
    add("--max-len", type=int, metavar="N",
        help="positions per row, prompt included; default: as many as needed; of a server 4096")
    add("--draft", metavar="DIR_OR_ID", help="a smaller model with the same tokenizer that guesses ahead")
    add("--lookup", action="store_true", help="guess what came after the same tokens before")
    add("--guesses", type=int, default=4, metavar="N",
        help=f"tokens to guess at a time, up to {MAX_DRAFT}; default: 4")

    add = parser.add_argument_group("to serve").add_argument
    add("--serve", action="store_true", help="answer the OpenAI API over HTTP, with a page to chat")
    add("--host", default="127.0.0.1", metavar="ADDRESS",
        help="to listen on; 0.0.0.0: on all of this machine; default: 127.0.0.1, for this machine alone")
    add("--port", type=int, default=8000, metavar="N", help="0: a free one; default: 8000")
    add("--api-key", metavar="KEY", help="what clients must show; others of this machine may see it here")
    add("--api-key-file", metavar="FILE", help="the same, from a file; or set LLAMA_JAX_API_KEY")
    add("--max-queue", type=int, default=256, metavar="N",
        help="requests that may wait for a row before others are refused; default: 256")
    add("--request-timeout", type=int, default=600, metavar="SECONDS",
        help="for a request, waiting included; default: 600")
    add("--cors", action="append", default=[], metavar="ORIGIN",
        help="whose pages in a browser may ask; *: all; may be given many times")

    add = parser.add_argument_group("what to print").add_argument
    add("--output", metavar="FILE", help="write JSON lines to it; what it has is not asked again")
    add("--json", action="store_true", help="print one JSON object")
    add("--logprobs", action="store_true", help="the log-probability of every token, the prompt's too")
    # fmt: on
    add_processes(parser)
    args = parser.parse_args(arguments)
    parser.check_positive(args, "max_new_tokens", "max_len", "rows", "n", "dp", "ep", "tp", "pp", "timeout",
                          "max_queue", "request_timeout")  # fmt: skip
    if not 0 <= args.port < 65536:
        parser.error(f"--port {args.port} is not between 0 and 65535")
    for origin in args.cors:
        if origin != "*" and not re.fullmatch(r"https?://[\w.:\[\]-]+", origin):
            parser.error(f"--cors {origin}: not * nor an origin such as https://example.org:8080")
    check_together(parser, args)
    check_n_draft(args.guesses)  # before anything is loaded
    return args


def check_together(parser: OneLineParser, args: argparse.Namespace) -> None:
    """Refuse options that contradict one another."""
    given = {name for name, value in vars(args).items() if value and value != parser.get_default(name)}
    for name, others in {
        "chat": "prompt prompt_file output score n logprobs json no_chat_template rows",
        "api_key": "api_key_file",
        "serve": "chat prompt prompt_file output score n logprobs json no_chat_template seed",
        "score": "max_new_tokens n draft lookup system stop stop_id",
        "draft": "lookup",
        "output": "json",
        "no_chat_template": "system",
    }.items():
        for other in given.intersection(others.split()):
            if name in given:
                parser.error(f"--{name.replace('_', '-')} and --{other.replace('_', '-')} exclude each other")
    if (args.pp or 1) > 1 and (args.draft or args.lookup):
        parser.error("--pp excludes --draft and --lookup: stages do not pass on how many guesses were right")
    for name, value in vars(args).items():
        if value == "" or isinstance(value, list) and "" in value and name != "prompt":
            parser.error(f"--{name.replace('_', '-')} '': empty")
