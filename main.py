"""Generate text: python3 main.py [--checkpoint DIR_OR_ID] [--prompt TEXT]... or --chat, or --serve

With no arguments, a tiny model that ships with this repository answers three prompts. On several hosts, run
the same command on each: they find one another, and the first one prints.
"""
# ruff: noqa: E402  an interrupt is heard before the imports that take long

import gc

from terminal.command_line import hear_signals

if __name__ == "__main__":
    hear_signals()
    gc.disable()  # until start_engine is done

import argparse
import sys
from functools import partial

import jax

from checkpoints.errors import UserError
from checkpoints.progress import progress
from serving.memory import Deployment, fit_cache
from terminal.answers import Reply, answer, ask_all, refuse_longer, say_refused
from terminal.chat import chat
from terminal.command_line import run
from terminal.launch import Startup, device_count, join_hosts, keep_compiled
from terminal.models import open_models, start_engine
from terminal.options import parse_arguments
from terminal.output_file import digest, output_file
from terminal.printers import choose_printer, show_progress
from terminal.prompts import Asker, Prompt, share_prompts
from terminal.report import report


def main() -> None:
    args, startup = parse_arguments(), Startup()
    startup.lap("imports")
    keep_compiled()
    join_hosts(args)
    n_devices = device_count()
    prompts = [] if args.chat or args.serve else share_prompts(args)
    models, tokenizer = open_models(args, n_devices)
    asker = Asker(args, models[0].checkpoint, tokenizer, [x.cfg for x in models])
    try:
        if args.chat:
            chat(args, models, asker, startup)
        elif args.serve:
            from terminal.serve import serve  # its packages are not everyone's

            serve(args, models, asker, startup)
        else:
            reply_to(args, prompts, models, asker, startup)
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        raise UserError(
            "out of device memory: try fewer --rows, a smaller --max-len, --quantize int8 or more devices"
        ) from e


def reply_to(
    args: argparse.Namespace, prompts: list[Prompt], models: list[Deployment], asker: Asker, startup: Startup
) -> None:
    """Answer or score the prompts. Exit code 1 if some were refused."""
    every = ask_all(asker, prompts, args.n)
    startup.lap("tokenizer")
    content = partial(Reply.as_json, logprobs=args.logprobs, score=args.score)
    with output_file(args, every, digest(args, asker, models[0]), content) as (file, replies):
        positions = [reply.request.positions for reply in replies if reply.error is None]
        rows, max_len = fit_cache(models, positions, args.rows, args.max_len) if positions else (0, 0)
        refuse_longer(replies, max_len)
        answered = len(every) - len(replies)  # by an earlier run
        say_refused(replies, answered)
        show = choose_printer(args, replies, file, content)
        requests = [reply.request for reply in replies if reply.error is None]
        if not requests:
            show(replies)
        else:
            engine = start_engine(args, models, rows, max_len, requests, startup)
            first, in_lines = (
                jax.process_index() == 0,
                bool(args.output or args.prompt_file) and not args.json,
            )
            with progress("answers", len(every), answered, first and in_lines, "answer") as bar:
                for done in answer(engine, replies):
                    if engine.stats.prefilled:
                        startup.lap("prefill")
                    show_progress(bar, engine.stats, show, done)
            if first:
                report(args, models[0], engine, replies, content, startup)
    if any(reply.error is not None for reply in replies):
        sys.exit(1)


if __name__ == "__main__":
    run(main)
