"""Several processes are one computation: on a rehearsed pod, main.py plans, refuses, loads and answers as one
process does.
"""

import collections
import contextlib
import json
import math
import pathlib
import shutil
import socket
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CHECKPOINTS, FAST
from jax.experimental import multihost_utils
from pod import KINDS

import main
from benchmarks.models import MODELS
from checkpoints.config_json import read_config
from checkpoints.errors import UserError
from checkpoints.layouts import layout_of
from checkpoints.names import named_infos
from serving import hosts, memory

LLAMA4 = CHECKPOINTS / "tiny-llama4"
PROMPTS = ("Who are you?", "What is 31 + 45?", "Hello", "Add 20 and 22.", "How much is 12 plus 34?")
SECONDS = 300  # for processes that take 15; a fault may leave them waiting for one another


def start(kind: str, processes: int, devices: int, *arguments, stdin: str = "") -> list[subprocess.Popen]:
    """The same command in each process; only the first one's stdin has something in it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count={devices} {FAST}"
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(processes),
    }
    command = [sys.executable, pathlib.Path(__file__).with_name("pod.py"), kind, main.__file__, *arguments]
    started = []
    for i in range(processes):
        process = subprocess.Popen(
            list(map(str, command)), env=environment | {"JAX_PROCESS_ID": str(i)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
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


def together(*arguments, **options) -> tuple[str, str]:
    """What the first process prints; all end well, and the others print nothing to stdout."""
    (code, out, err), *others = finish(start(*arguments, **options))
    assert code == 0, err
    assert [(code, out) for code, out, _ in others] == [(0, "")] * len(others), others
    return out, err


@pytest.fixture(scope="module")
def tokens():
    """The truth: what one process with one device chooses."""
    prompts = [x for prompt in PROMPTS for x in ("--prompt", prompt)]
    command = [sys.executable, main.__file__, "--checkpoint", LLAMA4, "--json", *prompts]
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return answers(done.stdout)


def answers(out: str) -> list[list[int]]:
    return [response["tokens"] for response in json.loads(out)["responses"]]


@pytest.mark.parametrize(
    ("devices", "mesh"),
    [
        pytest.param(1, dict(data=1, expert=1, tensor=2), marks=pytest.mark.deep),
        pytest.param(2, dict(data=1, expert=1, tensor=4), marks=pytest.mark.deep),
        (3, dict(data=3, expert=1, tensor=2)),
        pytest.param(4, dict(data=1, expert=1, tensor=8), marks=pytest.mark.deep),
    ],
)
def test_two_processes_by_default(devices, mesh, tokens):
    """No option but the prompts, which the first process alone can read: as one process answers."""
    arguments = ["--checkpoint", LLAMA4, "--json", "--prompt-file", "-"]
    out, _ = together("cpu", 2, devices, *arguments, stdin="\n".join(PROMPTS))
    assert answers(out) == tokens and json.loads(out)["mesh"] == mesh


REHEARSALS = [("v5e", 2), ("v5e", 4), ("v6e", 2), ("v6e", 4), ("v5p", 2), ("v5p", 4)]


@pytest.mark.parametrize(
    ("kind", "processes"),
    [x if x == ("v5e", 2) else pytest.param(*x, marks=pytest.mark.deep) for x in REHEARSALS],
)
def test_rehearsal(kind, processes, tokens):
    """Hosts of four chips: a mesh along the torus, a plan for their memory, answers, the bandwidth used."""
    arguments = ["--checkpoint", LLAMA4, "--ep", 2, "--prompt-file", "-", "--lookup"]
    out, err = together(kind, processes, 4, *arguments, "--json", stdin="\n".join(PROMPTS))
    assert answers(out) == tokens
    found = json.loads(out)
    assert found["mesh"] == dict(data=1, expert=2, tensor=2 * processes) and found["devices"] == 4 * processes
    assert 0 < found["bandwidth_utilization"] < 1 and "% of the memory bandwidth" in err


@pytest.fixture(scope="module")
def llama_405b(tmp_path_factory) -> pathlib.Path:
    """Llama 3.1 405B as published, but for its numbers: 811 GB of holes in files of one layer each."""
    folder, files = tmp_path_factory.mktemp("405b"), collections.defaultdict(dict)
    shutil.copytree(CHECKPOINTS / "tiny-llama3", folder, dirs_exist_ok=True)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps(MODELS["llama3.1-405b"]))
    for name, info in named_infos(read_config(MODELS["llama3.1-405b"])):
        stored = info.stored[0]
        files["-".join(name.split(".")[:2])][stored.name] = layout_of(info, stored).shape
    for file, tensors in files.items():
        header, end = {}, 0
        for name, shape in tensors.items():
            start, end = end, end + 2 * math.prod(shape)
            header[name] = dict(dtype="BF16", shape=shape, data_offsets=[start, end])
        text = json.dumps(header).encode()
        with open(folder / f"{file}.safetensors", "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            f.truncate(8 + len(text) + end)
    index = {name: f"{file}.safetensors" for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=index)))
    return folder


@pytest.mark.parametrize(
    ("kind", "processes"), [("v5e", 2), *(pytest.param(x, 2, marks=pytest.mark.deep) for x in KINDS)]
)
def test_rehearsal_of_what_does_not_fit(kind, processes, llama_405b):
    """Every process says so at once, with what a device needs and really has, and leaves."""
    for code, out, err in finish(
        start(kind, processes, 4, "--checkpoint", llama_405b, "--dtype", "bfloat16")
    ):
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert (code, out) == (1, "") and len(errors) == 1, err
        # 405.85 billion weights of two bytes on eight devices.
        assert f"needs {405.85e9 * 2 / 8 / 2**30:.1f}" in errors[0]
        assert f"and has {KINDS[kind][1]:.2f} GiB" in errors[0]


def test_what_the_first_process_refuses():
    """An error of the first process, here of its stdin, ends all, in one line each."""
    for code, out, err in finish(start("cpu", 2, 1, "--checkpoint", LLAMA4, "--prompt-file", "-")):
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert (code, out) == (1, "") and errors == ["error: --prompt-file -: no prompt in it"], err


@pytest.fixture
def two_processes(monkeypatch):
    """This process is the second of two alike; what they exchange becomes an array of jax's on the way."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: np.stack([jnp.asarray(x)] * 2))


@pytest.mark.parametrize("gib", [15.75, 31.25, 95.74, 1.5, 0.1])
def test_bytes_are_exact(gib, two_processes, monkeypatch):
    size = int(gib * 2**30)
    assert hosts.gather(size) == [size, size]
    assert hosts.gather({"é": [None, -size, 0.1]}) == [{"é": [None, -size, 0.1]}] * 2
    monkeypatch.setattr(memory, "host_memory", lambda: 16 * size)
    # Two processes of 8 devices each, on one host.
    assert memory.device_memory() == size


def test_memory_of_the_smallest(monkeypatch):
    """Of devices that know theirs, and of CPU devices that share what their host has."""
    found = [
        dict(host="a", own=[None, None], memory=12 * 2**30),
        dict(host="b", own=[None], memory=5 * 2**30),
        dict(host="a", own=[None], memory=12 * 2**30),
    ]
    monkeypatch.setattr(memory, "gather", lambda own: found)
    assert memory.device_memory() == 4 * 2**30
    found[1]["own"] = [3 * 2**30, 2 * 2**30]
    assert memory.device_memory() == 2 * 2**30


def test_errors_of_the_first(two_processes, monkeypatch):
    """Only the first process calls the function; its error ends all, a fault keeps its traceback."""
    sent = []

    def broadcast(x):  # from the first process, which is here too
        sent.append(np.array(jnp.asarray(x)))
        return sent[-1]

    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", broadcast)
    assert hosts.from_first(lambda: {"bytes": 2**40}) == {"bytes": 2**40}

    def fail():
        raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError):
        hosts.from_first(fail)
    replay = iter(sent[-2:])
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda x: next(replay))
    with pytest.raises(UserError, match="no"):
        hosts.from_first(lambda: pytest.fail("called"))
