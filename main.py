"""Generate text: python3 main.py [--checkpoint DIR_OR_ID] [--prompt TEXT]... or --chat, or --serve

With no arguments, a tiny model that ships with this repository answers three prompts. On several hosts, run
the same command on each: they find one another, and the first one prints.
"""
# ruff: noqa: E402  Ctrl-C works before the imports, which take seconds

import gc
import time

began = time.perf_counter()

from terminal.command_line import exit_on_signals

if __name__ == "__main__":
    exit_on_signals()
    gc.disable()  # Session.start_engine enables it

import sys

import jax

from deployment.compilation_cache import enable_compilation_cache
from deployment.memory import fit_cache
from distributed import watch
from feedback.errors import UserError
from feedback.progress import progress
from serving.needed import demand_of
from terminal.answers import answer, make_replies, refuse_too_long, report_refused
from terminal.chat import chat
from terminal.command_line import OUT_OF_MEMORY, run
from terminal.diagnostics import check_profile_folder, profiled, show_logs
from terminal.launch import Startup, device_count, join_hosts
from terminal.loaded_models import Session, open_session
from terminal.options import parse_arguments
from terminal.output_file import output_file
from terminal.printers import choose_printer, show_progress
from terminal.prompts import Prompt, share_prompts
from terminal.summary import report


def main() -> None:
    args, startup = parse_arguments(), Startup(began)
    enable_compilation_cache()
    with startup.stage("join"):
        join_hosts(args)
        n_devices = device_count()
    first = jax.process_index() == 0
    if args.verbose and first:
        show_logs()
    if args.profile and first:
        check_profile_folder(args.profile)
    with startup.stage("config"):
        prompts = [] if args.chat or args.serve else share_prompts(args)
        session = open_session(args, n_devices, startup)
    try:
        if args.chat:
            chat(session)
        elif args.serve:
            from terminal.serve_command import serve  # needs packages that are optional

            serve(session)
            watch.end()  # a thread may still be compiling programs
        else:
            answer_prompts(session, prompts)
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        raise UserError(OUT_OF_MEMORY) from e


def answer_prompts(session: Session, prompts: list[Prompt]) -> None:
    """Answer or score the prompts. Exit code 1 if any of them has an error."""
    args, startup = session.args, session.startup
    every = make_replies(session, prompts)
    with output_file(session, every) as (file, replies):
        positions = [reply.request.positions for reply in replies if not reply.done]
        rows, max_len = fit_cache(session.models, positions, args.rows, args.max_len) if positions else (0, 0)
        refuse_too_long(replies, max_len)
        answered = len(every) - len(replies)  # in an earlier run
        report_refused(replies, answered)
        show = choose_printer(args, replies, file)
        requests = [reply.request for reply in replies if not reply.done]
        if not requests:
            show(replies)
        else:
            engine, _ = session.start_engine(rows, max_len, demand_of(requests))
            first, in_lines = jax.process_index() == 0, (args.output or args.prompt_file) and not args.json
            with (
                progress("answers", len(every), answered, bool(first and in_lines), "answer") as bar,
                profiled(engine, args.profile),
            ):
                for done in answer(engine, replies):
                    if engine.stats.prefilled:
                        startup.first_tokens()
                    show_progress(bar, engine.stats, show, done)
            if first:
                report(session, engine, replies)
    if any(reply.error is not None for reply in replies):
        sys.exit(1)


def run_to_end() -> None:
    """Run main. After an error the process ends without waiting for a program that is being compiled."""
    try:
        run(main)
    except SystemExit as e:
        if e.code:
            watch.end(e.code)
        raise


if __name__ == "__main__":
    run_to_end()
