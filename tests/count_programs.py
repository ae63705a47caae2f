"""Run a program that at its end says on stderr how many programs it compiled, and read from the cache.

python3 tests/count_programs.py PROGRAM [ARG]...
"""

import atexit
import collections
import json
import pathlib
import runpy
import sys

PROGRAM, *ARGUMENTS = sys.argv[1:]
sys.argv, sys.path[0] = [PROGRAM, *ARGUMENTS], str(pathlib.Path(PROGRAM).parent)

from terminal.command_line import exit_on_signals

exit_on_signals()  # main.py also calls it before there are threads

import jax

EVENTS = collections.Counter()


def count(event: str, *_, **__) -> None:
    EVENTS[event] += 1


def say() -> None:
    # jax has the first event for every program, whether it compiles it or reads it from the cache.
    programs, read = (
        EVENTS["/jax/core/compile/backend_compile_duration"],
        EVENTS["/jax/compilation_cache/cache_hits"],
    )
    counts = {"compiled": programs - read, "read": read}
    print("\nprograms", json.dumps(counts), file=sys.stderr, flush=True)


jax.monitoring.register_event_listener(count)
jax.monitoring.register_event_duration_secs_listener(count)
atexit.register(say)
runpy.run_path(PROGRAM, run_name="__main__")
