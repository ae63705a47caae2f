"""Several processes of main.py on this machine."""

import atexit
import contextlib
import functools
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from conftest import FAST

import main

SECONDS = 300  # until a test gives up: processes take 15, but after a fault they may wait for one another


def until(condition, seconds: float = 100):
    """Call the condition until its result is true, and return that result."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Own(NamedTuple):
    """What only one of the processes is started with."""

    arguments: Sequence = ()
    variables: dict = {}
    program: str | pathlib.Path = main.__file__


@functools.cache
def shared_cache() -> str:
    """A folder for compiled programs that all processes use which this one starts; not the user's."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return folder.name


def start(
    count: int, devices: int, *arguments, wrapper=(), stdin="", own=(), logs=(), cached=True
) -> list[subprocess.Popen]:
    """Start processes of the same command, which find one another by jax's environment variables.

    stdin: of the first process; that of the others is empty. wrapper: a program beside this file that runs
    main.py, and its arguments. own: an Own for each process. logs: a file for each process's stderr; without
    them stderr is a pipe. cached: programs that earlier processes have compiled are not compiled again.
    """
    address = f"127.0.0.1:{free_port()}"
    shared = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {FAST}",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
    }
    if cached:
        shared["JAX_COMPILATION_CACHE_DIR"] = shared_cache()
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
    """Wait for the processes: (exit code, stdout, stderr) of each. If one hangs, all are killed."""
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


@contextlib.contextmanager
def serving(log: pathlib.Path, *options, **variables: str) -> Iterator[str]:
    """The address of `main.py --serve`, without the tests' virtual devices, once it is ready.

    log: the file of its stderr. variables: of its environment.
    """
    port = free_port()
    command = [sys.executable, main.__file__, "--serve", "--port", port, *options]
    environment = os.environ | {"XLA_FLAGS": FAST} | variables
    with log.open("w") as stderr:
        server = subprocess.Popen(list(map(str, command)), stderr=stderr, env=environment)
    try:
        for _ in range(SECONDS):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                break
            except OSError:
                assert server.poll() is None, log.read_text()
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def errors(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


def causes(stderr: str) -> list[str]:
    """The errors, without the process that had them: a process may repeat another's error before its own."""
    heard = r"^error: process \d+ of \d+ \(on .*?\) has failed: "
    return [re.sub(heard, "error: ", line) for line in errors(stderr)]
