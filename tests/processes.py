"""Several processes of main.py on this machine."""

import contextlib
import pathlib
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from conftest import FAST

import main

SECONDS = 300  # for processes that take 15; a fault may leave them waiting for one another


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Own(NamedTuple):
    """What a process does not share with the others."""

    arguments: Sequence = ()
    variables: dict = {}
    program: str | pathlib.Path = main.__file__


def start(
    count: int, devices: int, *arguments, wrapper=(), stdin="", own=(), logs=()
) -> list[subprocess.Popen]:
    """The same command in each process, joined by jax's variables; only the first one's stdin has anything.

    wrapper: a program beside this file that runs main.py, and its arguments. own: an Own for each process.
    logs: a file for what each process writes to stderr, which then is in no pipe.
    """
    address = f"127.0.0.1:{free_port()}"
    shared = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {FAST}",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
    }
    wrapper = [pathlib.Path(__file__).with_name(wrapper[0]), *wrapper[1:]] if wrapper else []
    started = []
    for i, (more, variables, program) in enumerate(own or [Own()] * count):
        command = [sys.executable, *wrapper, program, *arguments, *more]
        process = subprocess.Popen(
            list(map(str, command)), env=shared | {"JAX_PROCESS_ID": str(i)} | variables, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=logs[i] if logs else subprocess.PIPE,
        )  # fmt: skip
        process.stdin.write("" if i else stdin)
        process.stdin.close()
        process.stdin = None
        started.append(process)
    return started


def finish(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each; one that hangs takes the others with it."""
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def errors(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


def causes(stderr: str) -> list[str]:
    """What all processes find wrong: one may hear of it from another before it says so itself."""
    heard = r"^error: process \d+ of \d+ \(on .*?\) has failed: "
    return [re.sub(heard, "error: ", line) for line in errors(stderr)]
