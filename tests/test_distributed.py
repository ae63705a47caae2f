"""Processes join, agree, and end together: whatever happens to one, the others leave and say what it was."""

import contextlib
import json
import pathlib
import re
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
from distributed import exchange
from distributed.roll_call import call_roll, can_connect
from distributed.runtime import ABOUT_PEERS
from feedback.errors import UserError

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
    assert type(fault) is ZeroDivisionError
    assert [(type(e), str(e)) for e in refused] == [(UserError, "no")] * 2


def test_agree(monkeypatch):
    def agree(values):
        return lambda: exchange.agree(values, "mend it")

    same = agree({"a": 1, "b": [2]})
    assert each(monkeypatch, [same, same, same]) == [None] * 3
    monkeypatch.setattr(exchange, "hostname", lambda: "host")
    for other, name, first, third in (
        ({"a": 1, "b": [3]}, "b", "[2]", "[3]"),
        ({"a": 1}, "b", "[2]", "null"),
        ({"a": 1, "b": [2], "c": 0}, "c", "null", "0"),
    ):
        line = f"{name} is {first} in process 0 (on host) and {third} in process 2 (on host); mend it"
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
        f"process 1 of 2 did not come in 3 s; those that came are 0 (on {socket.gethostname()})",
        f"process 0 of 2 did not answer at 127.0.0.1:{port} in 3 s",
    )
    assert line == f"error: {what[index]}; start the same command on every host"


def roll_call(processes: dict, seconds: int = 60, before=None) -> list:
    """What call_roll returns or raises in each process; threads stand for processes, each on its own host.

    processes: (index, count) of each process by its host, process 0 first. before: called with the port when
    process 0 listens.
    """
    port, results = free_port(), {}

    def call(host: str, index: int, count: int) -> None:
        try:
            results[host] = call_roll(f"127.0.0.1:{port}", index, count, host, seconds)
        except UserError as e:
            results[host] = str(e)

    threads = {x: threading.Thread(target=call, args=(x, *process)) for x, process in processes.items()}
    for host, thread in threads.items():
        thread.start()
        if processes[host][0] == 0 and before:
            while not can_connect(f"127.0.0.1:{port}"):
                time.sleep(0.01)
            before(port)
    for thread in threads.values():
        thread.join()
    return [results[host] for host in processes]


def test_roll_call():
    processes = {"a": (0, 4), "d": (3, 4), "b": (1, 4), "c": (2, 4)}
    assert roll_call(processes) == [["a", "b", "c", "d"]] * 4
    assert roll_call({"a": (0, 1)}) == [["a"]]


def test_roll_call_of_one_that_leaves():
    """It may come again; if it does not, it is known where it was."""

    def come_and_leave(count: int):
        def visit(port: int) -> None:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(json.dumps(dict(index=1, count=count, host="b")).encode())
                assert dict(json.loads(connection.makefile().readline())) == {0: "a", 1: "b"}

        return visit

    again = roll_call({"a": (0, 3), "c": (2, 3), "B": (1, 3)}, before=come_and_leave(3))
    assert again == [["a", "B", "c"]] * 3
    (line,) = roll_call({"a": (0, 3)}, seconds=1, before=come_and_leave(3))
    assert line.startswith("processes 1 (it came from b, and left), 2 of 3 did not come in 1 s; ")


@pytest.mark.parametrize("message", [b"", b"GET / HTTP/1.1\r\n\r\n", b"[]", b"5", b'{"index": 1}'])
def test_roll_call_among_strangers(message):
    """A program that connects by mistake is ignored."""

    def intrude(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(message)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""

    assert roll_call({"a": (0, 2), "b": (1, 2)}, before=intrude) == [["a", "b"]] * 2


TWICE = "two processes have --process-id 1: one on [bc], one on [bc]; give each process its own"
OTHER_COUNT = r"--num-processes is 2 in process 0 \(on a\) and 3 in process 1 \(on b\); start the same .*"
WRONG_OPTIONS = {TWICE: {"a": (0, 3), "b": (1, 3), "c": (1, 3)}, OTHER_COUNT: {"a": (0, 2), "b": (1, 3)}}


@pytest.mark.parametrize("line", WRONG_OPTIONS)
def test_roll_call_of_wrong_options(line):
    first, *others = roll_call(WRONG_OPTIONS[line], seconds=2)
    assert re.fullmatch(line, first)
    assert all(re.search("did not come before process 0|did not answer", other) for other in others)


def test_port_in_use():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        done = alone(*of_two(port, 0))
    assert done.returncode == 1
    what_to_do = "stop it, or wait for it, or give --coordinator another port"
    assert done.stderr == f"error: another run is using this machine (port {port}); {what_to_do}\n"


NOT_KNOWN = "not given, and not known from a cluster; give --coordinator (HOST:PORT), "


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--coordinator here --process-id 0", "--coordinator here: not HOST:PORT"),
        ("--coordinator 127.0.0.1:70000 --process-id 0", "--coordinator 127.0.0.1:70000: not HOST:PORT"),
        ("--num-processes 2", f"--coordinator and --process-id: {NOT_KNOWN}"),
        ("--process-id 1 --num-processes 2", f"--coordinator: {NOT_KNOWN}"),
        ("--coordinator 127.0.0.1:9 --process-id 2 --num-processes 2", "--process-id 2: not one of the 2"),
    ],
)
def test_wrong_options(options, line):
    done = alone(*options.split())
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
    said = [line for *_, err in found for line in causes(err)]
    (line,) = {line.replace(str(tmp_path / "model"), str(LLAMA3)) for line in said}
    assert what in line and " in process 0 (on " in line and " in process 1 (on " in line


def test_a_model_that_is_not_everywhere():
    own = [Own(), Own(["--checkpoint", "/nowhere"])]
    (code, _, err), (other_code, _, other_err) = finish(start(2, 1, "--timeout", TIMEOUT, own=own))
    (line,), (other_line,) = errors(err), errors(other_err)
    assert code == other_code == 1 and other_line.startswith("error: /nowhere: no such folder")
    assert line.startswith("error: process 1 of 2 (on ") and "has failed: /nowhere: no such folder" in line


# -------------------------------------------------------------------------------------------------- endings


def held(folder: pathlib.Path, phase: str, *arguments):
    """-> (two processes that have come to this phase, what each writes to stderr).

    Of coming and joining only the second process has: the first waits for it.
    """
    options = ["--timeout", TIMEOUT, "--max-new-tokens", 400, "--ignore-eos", *arguments]
    logs = [folder / f"stderr-{i}" for i in range(2)]
    with open(logs[0], "w") as first, open(logs[1], "w") as second:
        processes = start(2, 1, *options, wrapper=["hold.py", phase], logs=[first, second])
    for i in (1,) if phase in ("coming", "joining") else (0, 1):
        while f"at {phase}\n" not in logs[i].read_text():
            assert processes[i].poll() is None, logs[i].read_text()
            time.sleep(0.1)
    return processes, logs


SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
PHASES = ("coming", "joining", "loading", "compiling", "decoding")
SHORT = [("decoding", signal.SIGKILL, 0), ("compiling", signal.SIGTERM, 1)]
# In every phase each process is the victim of one signal or two, and every signal ends each process in some.
ENDINGS = [(phase, number, (i + j) % 2) for i, phase in enumerate(PHASES) for j, number in enumerate(SIGNALS)]
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
    progress = ("at ", "mesh of", "loading weights", "compil", "process ", "start: ")
    written = logs[1 - victim].read_text().splitlines()
    said = [line for line in written if line and not line.startswith(progress)]
    assert code == 1 and len(said) == 1, said
    host = socket.gethostname()
    if phase == "coming":
        lines = "process 0 of 2 did not answer at 127.0.0.1:", "process 1 of 2 did not come in 12 s; those"
        line = lines[victim]
    elif phase == "joining" and victim == 0 and number != signal.SIGSTOP:
        line = f"process 0 of 2 (on {host}) does not answer at 127.0.0.1:"
    elif phase == "joining":  # jax does not say which; a stopped process 0 still lets others connect
        line = f"not all of the processes 0 (on {host}), 1 (on {host}) joined, though all 2 came: "
    else:
        line = f"process {victim} of 2 (on {host}) {WHY[number]}"
    assert said[0].startswith(f"error: {line}"), said


# What jax 0.10.2 and jax 0.12.0 print when process 0 is killed; long lines are cut. The error has the status
# UNKNOWN in the first version, and UNAVAILABLE with source locations in the second. Before, two of Gloo's
# threads greeted at once.
PEER_LINES = b"""\
[Gloo] Rank [Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1
0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1
1 peer ranks. Expected number of connected peer ranks is : 1
1
E1126 19:39:33.734405    8885 coordination_service_agent.cc:288] Polled an error from coordination service
F1126 19:39:33.734436    8885 client.h:86] Terminating process because the JAX distributed service
Additional GRPC error information from remote target coordination_service while calling /xla.coordination
:UNKNOWN:Error received from peer  {grpc_message:"Socket closed", grpc_status:14}
:UNAVAILABLE:Stream removed (Socket closed)
=== Source Location Trace: ===
external/xla+/xla/pjrt/distributed/coordination/coordination_service_error_util.cc:64

*** Check failure stack trace: ***
    @     0x7fd5498d0894  xla::CoordinationServiceAgent::SetError()
"""
OTHER_LINES = b"""\
E0000 00:00:1795721861.517805    7835 common_lib.cc:860] INVALID_ARGUMENT: Error: unexpected worker hostname
external/xla+/xla/service/gpu/autotuner.cc:64
terminated
12 peers
error: process 0 of 2 (on host) has ended
"""


def test_lines_about_peers():
    """Lines of jax 0.10 and of jax 0.12 about other processes are withheld, other lines are not."""
    assert all(map(ABOUT_PEERS.match, PEER_LINES.splitlines(keepends=True)))
    assert not any(map(ABOUT_PEERS.match, OTHER_LINES.splitlines(keepends=True)))


@deep
def test_output_goes_on(tmp_path):
    """What was answered before a host was taken back is in --output; the next run asks for the rest."""
    file, prompts = tmp_path / "answers.jsonl", [f"How much is {i} plus 7?" for i in range(6)]
    options = [*(x for prompt in prompts for x in ("--prompt", prompt)), "--rows", 2, "--output", file]
    options += ["--max-new-tokens", 100, "--ignore-eos"]
    processes, _ = held(tmp_path, "decoding", *options)
    while file.read_bytes().count(b"\n") < 2:
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGTERM)
    assert [code for code, *_ in finish(processes)] == [1, 143]
    before = set(file.read_bytes().splitlines(keepends=True))
    for code, _, err in finish(start(2, 1, *options)):
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
