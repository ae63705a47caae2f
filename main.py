"""Generate text: python3 main.py [--checkpoint DIR_OR_ID] [--prompt TEXT]...

With no arguments, a tiny model that ships with this repository answers three prompts. On several hosts, run
the same command on each: they find one another, and the first one prints.
"""
# ruff: noqa: E402  an interrupt is heard before the imports that take long

from terminal.command_line import hear_interrupts

if __name__ == "__main__":
    hear_interrupts()

import argparse
import contextlib
import hashlib
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

import model
from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.errors import UserError
from checkpoints.loading import load
from checkpoints.names import TYPES
from checkpoints.progress import progress
from serving.engine import Engine
from serving.hosts import from_first
from serving.memory import BANDWIDTH, ROWS, Plan, bytes_per_step, plan_cache
from serving.speculation import MOST, Draft, Lookup, check_guesses, mesh_for_draft
from serving.text import load_tokenizer
from terminal.answers import (
    LinePrinter,
    OutputFile,
    Reply,
    TextPrinter,
    answer,
    ask_all,
    refuse_longer,
    say_refused,
    score_line,
    show_progress,
)  # fmt: skip
from terminal.chat import converse
from terminal.command_line import OneLineParser, run
from terminal.launch import (
    LAPS,
    choose_dtypes,
    choose_mesh,
    choose_quantized,
    device_count,
    join_hosts,
    keep_compiled,
    lap,
    log,
)  # fmt: skip
from terminal.prompts import NEW_TOKENS, Asker, Prompt, share_prompts

TINY = pathlib.Path(__file__).resolve().parent / "tests" / "checkpoints" / "tiny-llama3"
CHAT_POSITIONS = 4096  # of a conversation, unless --max-len or the model say otherwise


def parse_arguments(arguments: list[str] | None = None):
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    # fmt: off
    add = parser.add_argument_group("the model").add_argument
    add("--checkpoint", default=str(TINY), metavar="DIR_OR_ID",
        help="a converted or Hugging Face folder, or a hub id; default: a tiny model that comes along")
    add("--dtype", choices=tuple(TYPES),
        help="of activations; default: float32 on a CPU, unless the weights are int8; else bfloat16")
    add("--quantize", choices=("int8", "none"), help="the weights; default: as in the checkpoint")
    add("--kv-cache-dtype", choices=("int8", "bfloat16", "float32"),
        help="default: float32 on a CPU, else --dtype")
    add("--dp", type=int, metavar="N", help="data parallelism; default: what --ep and --tp leave")
    add("--ep", type=int, metavar="N", help="expert parallelism; default: 1")
    add("--tp", type=int, metavar="N", help="tensor parallelism; default: what --dp and --ep leave")

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
    add("--seed", type=int, default=0, metavar="S", help="of the sampling; default: 0")

    add = parser.add_argument_group("how to run").add_argument
    add("--rows", type=int, metavar="N", help=f"answered at a time; default: all, but at most {ROWS}")
    add("--max-len", type=int, metavar="N",
        help="positions per row, prompt included; default: as many as needed")
    add("--draft", metavar="DIR_OR_ID", help="a smaller model with the same tokenizer that guesses ahead")
    add("--lookup", action="store_true", help="guess what came after the same tokens before")
    add("--guesses", type=int, default=4, metavar="N",
        help=f"tokens to guess at a time, up to {MOST}; default: 4")

    add = parser.add_argument_group("what to print").add_argument
    add("--output", metavar="FILE", help="write JSON lines to it; what it has is not asked again")
    add("--json", action="store_true", help="print one JSON object")
    add("--logprobs", action="store_true", help="the log-probability of every token, the prompt's too")
    # fmt: on
    args = parser.parse_args(arguments)
    parser.check_positive(args, "max_new_tokens", "max_len", "rows", "n", "dp", "ep", "tp")
    check_together(parser, args)
    check_guesses(args.guesses)  # before anything is loaded
    return args


def check_together(parser: OneLineParser, args: argparse.Namespace) -> None:
    """Refuse options that contradict one another."""
    given = {name for name, value in vars(args).items() if value and value != parser.get_default(name)}
    for name, others in {
        "chat": "prompt prompt_file output score n logprobs json no_chat_template rows",
        "score": "max_new_tokens n draft lookup system stop stop_id",
        "draft": "lookup",
        "output": "json",
        "no_chat_template": "system",
    }.items():
        for other in given.intersection(others.split()):
            if name in given:
                parser.error(f"--{name.replace('_', '-')} and --{other.replace('_', '-')} exclude each other")
    for name, value in vars(args).items():
        if value == "" or isinstance(value, list) and "" in value and name != "prompt":
            parser.error(f"--{name.replace('_', '-')} '': empty")


def open_draft(
    args: argparse.Namespace, target: Checkpoint, mesh: Mesh, tokenizer
) -> tuple[Checkpoint, Mesh]:
    """The draft's checkpoint and its mesh of the same devices. UserError if it does not suit the model."""
    draft = open_checkpoint(args.draft)
    same = load_tokenizer(draft.folder).get_vocab() == tokenizer.get_vocab()
    if not same or draft.config.V != target.config.V:
        raise UserError(f"--draft {args.draft}: its tokenizer is not that of {args.checkpoint}")
    try:
        return draft, mesh_for_draft(draft.config, mesh)
    except ValueError as e:
        raise UserError(f"--draft {args.draft}: {e}") from None


def planned(args: argparse.Namespace, checkpoint: Checkpoint, mesh: Mesh) -> Plan:
    quantized = choose_quantized(args.quantize, checkpoint)
    dtype, kv_dtype = choose_dtypes(args.dtype, args.kv_cache_dtype, quantized)
    return Plan(checkpoint.config, mesh, dtype, quantized, kv_dtype)


def make_engine(
    args: argparse.Namespace, models, plans: list[Plan], rows: int, max_len: int, **options
) -> Engine:
    """Load the models, and compile."""
    show = jax.process_index() == 0
    weights = [
        load(checkpoint, mesh, plan.dtype, plan.quantized, show=show)
        for (checkpoint, mesh), plan in zip(models, plans, strict=True)
    ]
    lap("weights")
    speculate = Lookup(args.guesses) if args.lookup else None
    if args.draft:
        draft = plans[1]
        speculate = Draft(weights[1], draft.cfg, draft.mesh, draft.kv_dtype, args.guesses)
    began, plan = time.perf_counter(), plans[0]
    batch = Engine(
        weights[0], plan.cfg, plan.mesh, rows, max_len, plan.kv_dtype, speculate=speculate, **options
    )
    log(f"compiled in {time.perf_counter() - began:.1f} s")
    lap("compilation")
    return batch


def digest(
    args: argparse.Namespace, asker: Asker, checkpoint: Checkpoint, plan: Plan
) -> Callable[[Reply], str]:
    """A digest of what a reply depends on, for the process that writes --output; others never ask for it."""
    numbers = (
        args.n > 1,
        plan.dtype,
        plan.quantized,
        plan.kv_dtype,
        args.logprobs,
        args.score,
        args.stop,
        sorted(asker.stop),
    )
    writes = args.output and jax.process_index() == 0
    common = [checkpoint.fingerprint() if writes else None, numbers]
    common = hashlib.sha256(json.dumps(common).encode())

    def of(reply: Reply) -> str:
        request, whole = reply.request, common.copy()
        whole.update(
            json.dumps([request.prompt.tolist(), request.max_new_tokens, vars(request.sampling)]).encode()
        )
        return whole.hexdigest()[:16]

    return of


@contextlib.contextmanager
def output_file(args: argparse.Namespace, replies: list[Reply], settings, content):
    """-> (the --output file, of the first process alone, or None; the replies that it does not have)."""
    file = None

    def held() -> list[bool]:
        nonlocal file
        file = OutputFile(args.output, replies, settings, content)
        return [reply.key in file.held for reply in replies]

    are_held = from_first(held) if args.output else [False] * len(replies)
    missing = [reply for reply, is_held in zip(replies, are_held, strict=True) if not is_held]
    with file or contextlib.nullcontext():
        yield file, missing
        if file is not None:
            file.finish()
            log(f"{args.output} has all {len(replies)} lines")


def talk(args: argparse.Namespace, models, asker: Asker) -> None:
    """--chat: one row, in which the conversation stays."""
    if not asker.templated:
        raise UserError(f"--chat: the tokenizer in {args.checkpoint} has no chat template")
    if jax.process_count() > 1:
        raise UserError("--chat works on one host; this is one of several")
    if args.max_len is None:
        asker.limit, asker.why = min(asker.limit, CHAT_POSITIONS), "the room for a conversation, --max-len,"
    asker.new_tokens = asker.limit
    plans = [planned(args, *model) for model in models]
    rows, max_len = plan_cache(plans, [asker.limit], None, asker.limit)
    like = asker.request([0], {})
    batch = make_engine(args, models, plans, rows, max_len, requests=[like], longest=max_len)
    converse(batch, asker)
    if batch.stats.failed:
        sys.exit(1)


def choose_printer(
    args: argparse.Namespace, replies: list[Reply], file: OutputFile | None, content: Callable[[Reply], dict]
) -> Callable[[list[Reply]], None]:
    """What shows replies while they are made; with --json, nothing does."""
    if file is not None:
        return file.show
    if args.json or jax.process_index() != 0:
        return lambda done: None
    if args.prompt_file:
        ascii = sys.stdout.encoding.lower() != "utf-8"
        return LinePrinter(replies, lambda reply: json.dumps(content(reply), ensure_ascii=ascii)).show
    if args.score:
        return LinePrinter(replies, Reply.as_score).show
    return TextPrinter(replies, args.n).show


def reply_to(args: argparse.Namespace, prompts: list[Prompt], models, asker: Asker) -> None:
    """Answer or score the prompts. Exit code 1 if some were refused."""
    first = jax.process_index() == 0
    every = ask_all(asker, prompts, args.n)
    lap("tokenizer")
    plans = [planned(args, *model) for model in models]
    content = partial(Reply.as_json, samples=args.n, logprobs=args.logprobs, score=args.score)
    settings = digest(args, asker, models[0][0], plans[0])
    with output_file(args, every, settings, content) as (file, replies):
        positions = [reply.request.positions for reply in replies if reply.error is None]
        rows, max_len = plan_cache(plans, positions, args.rows, args.max_len) if positions else (0, 0)
        refuse_longer(replies, max_len)
        say_refused(replies, held=len(every) - len(replies))
        show = choose_printer(args, replies, file, content)
        requests = [reply.request for reply in replies if reply.error is None]
        if requests:
            batch = make_engine(args, models, plans, rows, max_len, requests=requests)
            in_lines = bool(args.output or args.prompt_file) and not args.json
            held = len(every) - len(replies)
            with progress("answers", len(every), held, first and in_lines, "answer") as bar:
                answer(batch, replies, partial(show_progress, bar, batch.stats, show))
            if first:
                report(args, plans[0], batch, replies, content)
        else:
            show(replies)
    if any(reply.error is not None for reply in replies):
        sys.exit(1)


def report(args: argparse.Namespace, plan: Plan, batch: Engine, replies: list[Reply], content) -> None:
    """Say how fast it was; with --json, print everything as one object."""
    stats, shards = batch.stats, plan.mesh.shape["data"]
    filled = stats.filled or stats
    seconds, steps = stats.seconds - filled.seconds, stats.steps - filled.steps
    rate, utilization = (stats.tokens - filled.tokens) / seconds if steps else None, None
    bandwidth = BANDWIDTH.get(jax.devices()[0].device_kind)
    answered = [reply for reply in replies if reply.error is None]
    if bandwidth and steps and answered:
        spans = [(len(reply.request.prompt) - 1, len(reply.answer.tokens)) for reply in answered]
        positions = np.concatenate([first + np.arange(count) for first, count in spans])
        rows = stats.row_steps / stats.steps / shards
        needed = bytes_per_step(batch.weights, plan.cfg, plan.mesh, rows, positions, plan.kv_dtype)
        utilization = needed * steps / seconds / bandwidth
    split = ", ".join(f"{what} {seconds:.1f}" for what, seconds in LAPS.items())
    log(f"first tokens after {sum(LAPS.values()):.1f} s of CPU time: {split}")
    parts = [f"prefill {filled.seconds:.3f} s", f"decode {f'{rate:.1f} tokens/s' if rate else 'not needed'}"]
    if utilization:
        parts.append(f"{100 * utilization:.0f}% of the memory bandwidth")
    if stats.reused_tokens:
        parts.append(f"{stats.reused_tokens} of {stats.prompt_tokens} prompt tokens taken from other rows")
    if stats.guessed:
        parts.append(f"{stats.share_guessed_right:.0%} of the guesses right")
        parts.append(f"{stats.tokens_per_step:.2f} tokens per step")
    log(", ".join(parts))
    cut = sum(reply.answer.finish_reason == "length" for reply in answered)
    if cut and not args.score and not args.ignore_eos:
        log(f"{cut} of {len(answered)} answers are cut: they had as many tokens as --max-new-tokens allows")
    scores = [x for reply in answered for x in reply.answer.prompt_logprobs]
    if args.json:
        axes = dict(data="data", expert=model.EXPERT, tensor=model.TENSOR)
        print(json.dumps(dict(
            model=args.checkpoint, mesh={name: model.mesh_size(plan.mesh, x) for name, x in axes.items()},
            devices=jax.device_count(), responses=[content(reply) for reply in replies],
            startup_cpu_seconds=LAPS, prefill_seconds=filled.seconds, decode_tokens_per_second=rate,
            bandwidth_utilization=utilization, prompt_tokens=stats.prompt_tokens,
            prompt_tokens_reused=stats.reused_tokens, decode_steps=stats.steps,
            tokens_per_step=stats.tokens_per_step, guesses_right=stats.share_guessed_right,
        )))  # fmt: skip
    elif args.score and not (args.output or args.prompt_file) and len(answered) > 1:
        print(f"all: {score_line(math.fsum(scores), len(scores))}")
    elif args.logprobs and not (args.output or args.prompt_file):
        print("For log-probabilities by token, use --json. Of each answer as a whole:")
        print(" ".join(f"{math.fsum(reply.answer.logprobs):.4f}" for reply in answered))


def main() -> None:
    args = parse_arguments()
    lap("imports")
    keep_compiled()
    join_hosts()
    devices = device_count()
    prompts = [] if args.chat else share_prompts(args)
    checkpoint = open_checkpoint(args.checkpoint)
    mesh = choose_mesh(checkpoint.config, args.dp, args.ep, args.tp, devices)
    tokenizer = load_tokenizer(checkpoint.folder)
    models = [(checkpoint, mesh)]
    if args.draft:
        models.append(open_draft(args, checkpoint, mesh, tokenizer))
    asker = Asker(args, checkpoint, tokenizer, [model.config for model, _ in models])
    try:
        talk(args, models, asker) if args.chat else reply_to(args, prompts, models, asker)
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        raise UserError(
            "out of device memory: try fewer --rows, a smaller --max-len, --quantize int8 or more devices"
        ) from e


if __name__ == "__main__":
    run(main)
