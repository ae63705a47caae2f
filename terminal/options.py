"""The options of main.py."""

import argparse
import pathlib
import re

from checkpoints.names import FLOATS
from deployment.memory import DEFAULT_ROWS, ROW_POSITIONS
from generation.request_builder import NEW_TOKENS
from quantize import FORMATS
from serving.scheduler import ACCELERATOR_LIMITS, CPU_LIMITS
from serving.speculation import MAX_DRAFT, check_n_draft
from terminal.command_line import OneLineParser
from terminal.diagnostics import PROFILED
from terminal.launch import add_process_options

TINY = pathlib.Path(__file__).resolve().parents[1] / "tests" / "checkpoints" / "tiny-llama3"

EXAMPLES = """examples:
  python3 main.py
      three answers of a tiny model that ships with this repository
  python3 main.py --checkpoint meta-llama/Llama-3.1-8B-Instruct --chat
      a chat with a model of the Hugging Face hub, which is downloaded first
  python3 main.py --checkpoint model.gguf --quantize int8 --prompt "Why is the sky blue?"
      one answer, with int8 weights
  python3 main.py --prompt-file prompts.jsonl --output answers.jsonl --temperature 0.8
      many answers, sampled, as JSON lines
  python3 main.py --checkpoint DIR --tp 8 --kv-cache-dtype int8 --serve
      a server on 8 devices with an int8 cache

docs/usage.md explains all options, docs/tpu-quickstart.md a TPU slice.
"""


def parse_arguments(arguments: list[str] | None = None):
    parser = OneLineParser(
        usage="python3 main.py [--checkpoint DIR_OR_ID] [--prompt TEXT | --chat | --serve] [OPTION]...",
        description="Answer prompts, chat, score texts, or serve an OpenAI-compatible API.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    # fmt: off
    add = parser.add_argument_group("the model").add_argument
    add("--checkpoint", default=str(TINY), metavar="DIR_OR_ID",
        help="a converted or Hugging Face folder, or its gs://, s3:// or https:// URL; a GGUF file; or a hub "
        "id; default: a tiny model")
    add("--dtype", choices=FLOATS,
        help="of activations; default: float32 on a CPU, unless the weights are quantized; else bfloat16")
    add("--quantize", choices=FORMATS, metavar="FORMAT",
        help=f"the weights: {', '.join(FORMATS)}; default: as in the checkpoint")
    add("--kv-cache-dtype", choices=("int8", "bfloat16", "float32"),
        help="default: float32 on a CPU, else --dtype")
    add("--dp", type=int, metavar="N", help="data parallelism; default: the best by estimate")
    add("--ep", type=int, metavar="N", help="expert parallelism; default: the best by estimate")
    add("--tp", type=int, metavar="N", help="tensor parallelism; default: the best by estimate")
    add("--pp", type=int, metavar="N", help="pipeline parallelism: stages of layers; default: 1")

    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", action="append", metavar="TEXT", help="may be given many times")
    add("--prompt-file", metavar="FILE", help="a prompt per line; of a .jsonl file, an object; -: stdin")
    add("--chat", action="store_true", help="chat: each line of the input is a turn")
    add("--system", metavar="TEXT", help="the system prompt")
    add("--no-chat-template", action="store_true",
        help="continue the text itself, even if the tokenizer has a chat template")
    add("--special-tokens-in-messages", action="store_true",
        help="a special token that a chat's message spells is that token; default: it is read as text")
    add("--chat-template", metavar="FILE", help="a Jinja file, instead of the checkpoint's chat template")
    add("--score", action="store_true", help="compute the likelihood of the text instead of continuing it")
    add("--n", type=int, default=1, metavar="N",
        help="samples per prompt, with seeds S, S + 1 and so on; default: 1")

    add = parser.add_argument_group("generation").add_argument
    add("--max-new-tokens", type=int, metavar="N",
        help=f"per answer; default: {NEW_TOKENS}, or what --max-len allows")
    add("--stop", action="append", default=[], metavar="TEXT",
        help="a text that ends an answer; may be given many times")
    add("--stop-id", action="append", default=[], type=int, metavar="ID", help="a token that ends an answer")
    add("--ignore-eos", action="store_true", help="continue after the model's end tokens")
    add("--temperature", type=float, metavar="T",
        help="0: greedy; default: the checkpoint's, or 1 with --top-k, --top-p or --min-p")
    add("--top-k", type=int, metavar="K", help="sample from the K most probable tokens")
    add("--top-p", type=float, metavar="P", help="sample from the most probable tokens that together reach P")
    add("--min-p", type=float, metavar="P", help="sample from tokens at least P as probable as the best")
    add("--repetition-penalty", type=float, metavar="R", help="above 1: makes tokens of the text less likely")
    add("--presence-penalty", type=float, metavar="P", help="above 0: makes tokens of the answer less likely")
    add("--frequency-penalty", type=float, metavar="P", help="the same, for each time that a token occurs")
    add("--seed", type=int, default=0, metavar="S", help="for sampling; default: 0")

    add = parser.add_argument_group("execution").add_argument
    add("--rows", type=int, metavar="N",
        help=f"answers at a time; default: all, but at most {DEFAULT_ROWS}; a server: the same, on a CPU 8")
    add("--max-len", type=int, metavar="N",
        help=f"positions per row, prompt included; default: as needed; chat and server: {ROW_POSITIONS}")
    add("--draft", metavar="DIR_OR_ID", help="a smaller model with the same tokenizer, for speculation")
    add("--lookup", action="store_true", help="prompt lookup: speculate that the text repeats itself")
    add("--guesses", type=int, default=4, metavar="N",
        help=f"draft tokens per step, up to {MAX_DRAFT}; default: 4")
    add("--kept-states", type=int, default=2, metavar="N",
        help="of models with states, how many of each row are kept for texts that begin alike; default: 2")

    add = parser.add_argument_group("server").add_argument
    add("--serve", action="store_true", help="run a server with OpenAI's and Anthropic's APIs")
    add("--host", default="127.0.0.1", metavar="ADDRESS",
        help="to listen on; 0.0.0.0: all addresses; default: 127.0.0.1, for this machine only")
    add("--port", type=int, default=8000, metavar="N", help="0: any free port; default: 8000")
    add("--api-key", metavar="KEY", help="that clients must send; other users of this machine can see it")
    add("--api-key-file", metavar="FILE", help="a file with the key; or set LLAMA_JAX_API_KEY")
    add("--max-queue", type=int, default=256, metavar="N",
        help="requests that may wait for a row before others are refused; default: 256")
    add("--request-timeout", type=int, default=600, metavar="SECONDS",
        help="for a request, waiting included; default: 600")
    add("--prefix-cache-gib", type=float, metavar="GIB",
        help="host memory for the prefixes of earlier requests; default: 1, with --pp 0")
    add("--served-model-name", nargs="+", default=[], metavar="NAME",
        help="names of the model for clients, the first in responses; default: as in --checkpoint")
    add("--strict-fields", action="store_true", help="refuse requests with fields that are not known")
    add("--no-access-log", action="store_true", help="print no line on stderr for each request")
    add("--prefill-budget", type=int, metavar="N",
        help="prompt tokens read per decode step and decoding row, on average; 0: no limit; "
        f"default: {ACCELERATOR_LIMITS.budget}, on a CPU {CPU_LIMITS.budget}")
    add("--cors", action="append", default=[], metavar="ORIGIN",
        help="web origin whose pages may use the API; *: all; may be given many times")

    add = parser.add_argument_group("output").add_argument
    add("--output", metavar="FILE", help="write JSON lines to this file, or complete them")
    add("--json", action="store_true", help="print one JSON object")
    add("--logprobs", action="store_true", help="report the log-probability of each token, of the prompt too")
    add("--verbose", action="store_true",
        help="log on stderr which programs are compiled, and what each turn of the engine does")
    add("--profile", metavar="DIR",
        help=f"write a profile of the first {PROFILED} seconds of generation, for xprof or Perfetto")
    # fmt: on
    add_process_options(parser)
    args = parser.parse_args(arguments)
    parser.check_positive(args, "max_new_tokens", "max_len", "rows", "n", "dp", "ep", "tp", "pp", "timeout",
                          "max_queue", "request_timeout")  # fmt: skip
    if args.prefix_cache_gib is not None and not 0 <= args.prefix_cache_gib < 2**20:
        parser.error(f"--prefix-cache-gib {args.prefix_cache_gib} is not between 0 and {2**20}")
    if args.kept_states < 0:
        parser.error(f"--kept-states {args.kept_states} is not at least 0")
    if args.prefill_budget is not None and args.prefill_budget < 0:
        parser.error(f"--prefill-budget {args.prefill_budget} is not at least 0")
    if not 0 <= args.port < 65536:
        parser.error(f"--port {args.port} is not between 0 and 65535")
    for origin in args.cors:
        if origin != "*" and not re.fullmatch(r"https?://[\w.:\[\]-]+", origin):
            parser.error(f"--cors {origin}: not * nor an origin such as https://example.org:8080")
    if wrong := [name for name in args.served_model_name if not name.isprintable()]:
        parser.error(f"--served-model-name {wrong[0]!r}: not printable")
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
        "score": "max_new_tokens n draft lookup system chat_template special_tokens_in_messages stop stop_id",
        "draft": "lookup",
        "output": "json",
        "no_chat_template": "system chat_template special_tokens_in_messages",
    }.items():
        for other in given.intersection(others.split()):
            if name in given:
                parser.error(f"--{name.replace('_', '-')} and --{other.replace('_', '-')} exclude each other")
    if (args.pp or 1) > 1 and (args.draft or args.lookup):
        parser.error("--pp excludes --draft and --lookup: stages do not pass on how many guesses were right")
    if (args.pp or 1) > 1 and args.prefix_cache_gib:
        parser.error("--pp excludes --prefix-cache-gib: the rows of stages are not saved")
    for name, value in vars(args).items():
        if value == "" or isinstance(value, list) and "" in value and name != "prompt":
            parser.error(f"--{name.replace('_', '-')} '': empty")
