"""Processes join, agree, and end together: whatever happens to one, the others leave and say what it was."""

import contextlib
import json
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import CHECKPOINTS
from processes import Own, causes, errors, finish, free_port, start
from safetensors.numpy import load_file, save_file

import main
from checkpoints.errors import UserError
from distributed import exchange

LLAMA3 = CHECKPOINTS / "tiny-llama3"
TIMEOUT = 12  # seconds; a sign of life takes part of one, the start of a process 4
deep = pytest.mark.deep


class Store:
    """The part of the coordination service's client that exchange.py uses, for threads of one process."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, _) -> bytes:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, timeout=10)
            return self.values[key]


def each(monkeypatch, functions: list) -> list:
    """What each process's function returns, or the exception it raises; threads stand for processes."""
    own, store, results = threading.local(), Store(), [None] * len(functions)

    class State:
        client, num_processes = store, len(functions)
        process_id = property(lambda self: own.index)

    class Numbers:
        def __next__(self) -> int:
            own.number += 1
            return own.number

    def run(index: int) -> None:
        own.index, own.number = index, 0
        try:
            results[index] = functions[index]()
        except Exception as e:
            results[index] = e

    monkeypatch.setattr(exchange, "global_state", State())
    monkeypatch.setattr(exchange, "_exchanges", Numbers())
    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


VALUES = [int(95.74 * 2**30), -(2**40), 0.1, "é", None, [{"a": []}]]  # which exceed an array's 32 bits


def test_gather(monkeypatch):
    def both(value):
        return lambda: [exchange.gather(value), exchange.gather([value])]

    every = [both(value) for value in VALUES]
    assert each(monkeypatch, every) == [[VALUES, [[value] for value in VALUES]]] * len(VALUES)


def test_from_first(monkeypatch):
    """Only the first process calls the function; its error ends all, a fault keeps its type there."""

    def fail():
        raise ZeroDivisionError("no")

    def first(function):
        return lambda: exchange.from_first(function)

    never = first(lambda: pytest.fail("called"))
    assert each(monkeypatch, [first(lambda: VALUES), never, never]) == [VALUES] * 3
    fault, *refused = each(monkeypatch, [first(fail), never, never])
    assert (
        type(fault) is ZeroDivisionError and [(type(e), str(e)) for e in refused] == [(UserError, "no")] * 2
    )


def test_agree(monkeypatch):
    def agree(values):
        return lambda: exchange.agree(values, "mend it")

    same = agree({"a": 1, "b": [2]})
    assert each(monkeypatch, [same, same, same]) == [None] * 3
    monkeypatch.setattr(exchange, "hostname", lambda: "host")
    for other, line in (
        ({"a": 1, "b": [3]}, "b is [2] in process 0 (on host) and [3] in process 2 (on host); mend it"),
        ({"a": 1}, "b is [2] in process 0 (on host) and null in process 2 (on host); mend it"),
        (
            {"a": 1, "b": [2], "c": 0},
            "c is null in process 0 (on host) and 0 in process 2 (on host); mend it",
        ),
    ):
        found = each(monkeypatch, [same, same, agree(other)])
        assert [(type(e), str(e)) for e in found] == [(UserError, line)] * 3


# -------------------------------------------------------------------------------------------------- joining


def alone(*arguments) -> subprocess.CompletedProcess:
    """A process that nobody joins, by options."""
    command = [sys.executable, main.__file__, *map(str, arguments)]
    return subprocess.run(command, env={"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=60)


def of_two(port: int, index: int) -> list:
    return ["--coordinator", f"127.0.0.1:{port}", "--num-processes", 2, "--process-id", index, "--timeout", 3]


@pytest.mark.parametrize("index", [0, 1])
def test_nobody_comes(index):
    port = free_port()
    done = alone(*of_two(port, index))
    waiting, line = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert waiting == f"process {index} of 2 waits for others; process 0 is at 127.0.0.1:{port}"
    what = (
        f"not all 2 processes came to process 0 (on {socket.gethostname()})",
        f"process 0 of 2 did not answer at 127.0.0.1:{port}",
    )
    assert line == f"error: {what[index]} in 3 s; start the same command on every host"


def test_port_in_use():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        done = alone(*of_two(port, 0))
    assert done.returncode == 1
    assert done.stderr == f"error: --coordinator 127.0.0.1:{port}: Address already in use; try another port\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--coordinator", "here"], "--coordinator here: not HOST:PORT"),
        (["--coordinator", "127.0.0.1:70000"], "--coordinator 127.0.0.1:70000: not HOST:PORT"),
        (
            ["--num-processes", 2],
            "could not join other processes (coordinator_address should be defined.); check",
        ),
        (["--process-id", 1, "--num-processes", 2], "could not join other processes (coordinator_address"),
    ],
)
def test_wrong_options(arguments, line):
    defaults = {"--coordinator": "127.0.0.1:9", "--process-id": 0}
    given = [x for pair in defaults.items() if pair[0] not in arguments and line[0] == "-" for x in pair]
    done = alone(*arguments, *given)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {line}"), done.stderr


# ----------------------------------------------------------------------------------------------- agreement


def another_program(folder: pathlib.Path) -> dict:
    root = pathlib.Path(main.__file__).parent
    shutil.copytree(root, folder / "copy", ignore=shutil.ignore_patterns(".git", "images", "__pycache__"))
    with open(folder / "copy" / "model.py", "a") as file:
        file.write("# changed\n")
    return dict(program=folder / "copy" / "main.py")


def another_numpy(folder: pathlib.Path) -> dict:
    """One that says so of itself."""
    (folder / "numpy-9.dist-info").mkdir()
    (folder / "numpy-9.dist-info" / "METADATA").write_text("Name: numpy\nVersion: 9\n")
    return dict(variables={"PYTHONPATH": str(folder)})


def another_model(name: str, change):
    def make(folder: pathlib.Path) -> dict:
        copy = shutil.copytree(LLAMA3, folder / "model")
        change(copy / name)
        return dict(arguments=["--checkpoint", copy])

    return make


def add_spaces(path: pathlib.Path) -> None:
    path.write_text(path.read_text() + " ")


def change_a_tensor(path: pathlib.Path) -> None:
    weights = load_file(path)
    name = min(weights)
    save_file(weights | {name: (1.5 * weights[name]).astype(weights[name].dtype)}, path, {"format": "pt"})


def given(*arguments):
    return lambda _: dict(arguments=arguments)


PRECISION = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
DIFFERENCES = {  # in the second process: what is said, and what it has for itself
    "--dtype is null": given("--dtype", "bfloat16"),
    "--max-new-tokens is null": given("--max-new-tokens", 5),
    "--seed is 0": given("--seed", 1),
    "--lookup is false": given("--lookup"),
    "--stop is []": given("--stop", "a"),
    "JAX_DEFAULT_MATMUL_PRECISION is null": lambda _: dict(variables=PRECISION),
    "numpy is": another_numpy,
    "this program's checksum is": another_program,
    "'s config.json is": another_model("config.json", add_spaces),
    "'s tokenizer.json is": another_model("tokenizer.json", add_spaces),
    "'s weights is": another_model("model.safetensors", change_a_tensor),
}


@pytest.mark.parametrize(
    "what",
    [x if x in ("numpy is", "'s weights is") else pytest.param(x, marks=deep) for x in DIFFERENCES],
)
def test_differences(what, tmp_path):
    """All processes say the same: what differs, where, and both values."""
    own = [Own(), Own(**DIFFERENCES[what](tmp_path))]
    found = finish(start(2, 1, "--timeout", TIMEOUT, own=own))
    assert [(code, out, len(errors(err))) for code, out, err in found] == [(1, "", 1)] * 2, found
    (line,) = {
        line.replace(str(tmp_path / "model"), str(LLAMA3)) for *_, err in found for line in causes(err)
    }
    assert what in line and " in process 0 (on " in line and " in process 1 (on " in line


def test_a_model_that_is_not_everywhere():
    own = [Own(), Own(["--checkpoint", "/nowhere"])]
    (code, _, err), (other_code, _, other_err) = finish(start(2, 1, "--timeout", TIMEOUT, own=own))
    (line,), (other_line,) = errors(err), errors(other_err)
    assert code == other_code == 1 and other_line.startswith("error: /nowhere: no such folder")
    assert line.startswith("error: process 1 of 2 (on ") and "has failed: /nowhere: no such folder" in line


# -------------------------------------------------------------------------------------------------- endings


def held(folder: pathlib.Path, phase: str, *arguments):
    """-> (two processes that have come to this phase; of joining, the second; what each writes to stderr)."""
    options = ["--timeout", TIMEOUT, "--max-new-tokens", 400, "--ignore-eos", *arguments]
    logs = [folder / f"stderr-{i}" for i in range(2)]
    with open(logs[0], "w") as first, open(logs[1], "w") as second:
        processes = start(2, 1, *options, wrapper=["hold.py", phase], logs=[first, second])
    for i in (1,) if phase == "joining" else (0, 1):
        while f"at {phase}\n" not in logs[i].read_text():
            assert processes[i].poll() is None, logs[i].read_text()
            time.sleep(0.1)
    return processes, logs


SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
PHASES = ("joining", "loading", "compiling", "decoding")
SHORT = [("compiling", signal.SIGSTOP, 0), ("decoding", signal.SIGKILL, 1), ("decoding", signal.SIGTERM, 0)]
ENDINGS = [(phase, number, victim) for phase in PHASES for number in SIGNALS for victim in (0, 1)]
WHY = {signal.SIGTERM: "was terminated", signal.SIGKILL: "has ", signal.SIGSTOP: "has not answered for 11 s"}


@pytest.mark.parametrize(
    ("phase", "number", "victim"), [x if x in SHORT else pytest.param(*x, marks=deep) for x in ENDINGS]
)
def test_endings(phase, number, victim, tmp_path):
    """Killed, stopped or told to end, in every phase: the other leaves soon, with one line."""
    processes, logs = held(tmp_path, phase)
    ended, other = processes[victim], processes[1 - victim]
    started = time.monotonic()
    ended.send_signal(number)
    code = other.wait(timeout=5 * TIMEOUT)
    assert time.monotonic() - started < 2 * TIMEOUT  # it is a slow machine with other tests beside
    if number == signal.SIGTERM:
        assert ended.wait(timeout=TIMEOUT) == 143
        assert "terminated" in logs[victim].read_text().splitlines()
    ended.kill()  # for what is stopped
    finish(processes)
    progress = ("at ", "mesh of", "loading weights", "compil", "process ")
    written = logs[1 - victim].read_text().splitlines()
    said = [line for line in written if line and not line.startswith(progress)]
    assert code == 1 and len(said) == 1, said
    if phase == "joining":
        assert "process 0" in said[0] and said[0].endswith("start the same command on every host")
    else:
        assert said[0].startswith(f"error: process {victim} of 2 (on {socket.gethostname()}) {WHY[number]}")


@deep
def test_output_goes_on(tmp_path):
    """What was answered before a host was taken back is in --output; the next run asks for the rest."""
    file, prompts = tmp_path / "answers.jsonl", [f"How much is {i} plus 7?" for i in range(6)]
    options = [*(x for prompt in prompts for x in ("--prompt", prompt)), "--rows", 2, "--output", file]
    processes, _ = held(tmp_path, "decoding", *options)
    while file.read_bytes().count(b"\n") < 2:
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGTERM)
    assert [code for code, *_ in finish(processes)] == [1, 143]
    before = set(file.read_bytes().splitlines(keepends=True))
    for code, _, err in finish(start(2, 1, "--max-new-tokens", 400, "--ignore-eos", *options)):
        assert code == 0, err
    after = file.read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["prompt"] for line in after] == prompts
    assert 2 <= len({line for line in before if line.endswith(b"\n")} & set(after)) < 6


def test_terminated_while_it_compiles():
    """One process alone leaves at once, too."""
    command = [sys.executable, pathlib.Path(__file__).with_name("hold.py"), "compiling", main.__file__]
    process = subprocess.Popen(command, env={"JAX_PLATFORMS": "cpu"}, stderr=subprocess.PIPE, text=True)
    lines = iter(process.stderr.readline, "")
    assert any("at compiling" in line for line in lines)
    process.terminate()
    assert process.wait(timeout=10) == 143 and list(lines)[-1] == "terminated\n"
    process.stderr.close()
