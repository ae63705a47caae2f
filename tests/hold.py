"""Run a program that writes a line when it reaches a phase, and then stays in that phase for a while.

python3 tests/hold.py PHASE PROGRAM [ARG]...
"""

import os
import pathlib
import runpy
import sys
import time
from functools import wraps

PHASE, PROGRAM, *ARGUMENTS = sys.argv[1:]
sys.argv, sys.path[0] = [PROGRAM, *ARGUMENTS], str(pathlib.Path(PROGRAM).parent)

from terminal.command_line import exit_on_signals

exit_on_signals()  # main.py also calls it before there are threads

import jax

from deployment import deploy
from distributed import join
from serving.programs import Programs
from terminal import loaded_models


def announced(function, seconds: float, calls: int = 1):
    """The same function, but its n-th call writes a line, and that call and all later ones first wait.

    calls: n.
    """
    count = 0

    @wraps(function)
    def held(*arguments, **options):
        nonlocal count
        count += 1
        if count == calls:
            os.write(2, f"at {PHASE}\n".encode())
        if count >= calls:
            time.sleep(seconds)
        return function(*arguments, **options)

    return held


if PHASE in ("coming", "joining"):
    if os.environ["JAX_PROCESS_ID"] != "0":  # the others, process 0 too, wait for this one
        where, name = {"coming": (join, "call_roll"), "joining": (jax.distributed, "initialize")}[PHASE]
        setattr(where, name, announced(getattr(where, name), 4))
elif PHASE == "loading":
    deploy.load = announced(deploy.load, 2)
elif PHASE == "compiling":
    loaded_models.warm_up = announced(loaded_models.warm_up, 0)
elif PHASE == "decoding":
    Programs.decode = announced(Programs.decode, 0.05, calls=20)
runpy.run_path(PROGRAM, run_name="__main__")
