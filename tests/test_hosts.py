"""Several processes are one computation: on a rehearsed pod, main.py plans, refuses, loads and answers as one
process does.
"""

import collections
import json
import math
import pathlib
import shutil
import struct
import subprocess
import sys

import pytest
from conftest import CHECKPOINTS, FAST
from pod import KINDS
from processes import causes, errors, finish, start

import main
from checkpoints.layouts import layout_of
from checkpoints.names import named_infos
from deployment import memory
from families.registry import read_config
from planner.published_models import MODELS

LLAMA4 = CHECKPOINTS / "tiny-llama4"
PROMPTS = ("Who are you?", "What is 31 + 45?", "Hello", "Add 20 and 22.", "How much is 12 plus 34?")


def together(kind: str, *arguments, **options) -> tuple[str, str]:
    """What the first process prints; all end well, and the others print nothing to stdout."""
    (code, out, err), *others = finish(start(*arguments, wrapper=["pod.py", kind], **options))
    assert code == 0, err
    assert [(code, out) for code, out, _ in others] == [(0, "")] * len(others), others
    return out, err


@pytest.fixture(scope="module")
def tokens():
    """The truth: what one process with one device chooses."""
    return answers_of_one(LLAMA4)


def answers_of_one(checkpoint: pathlib.Path) -> list[list[int]]:
    prompts = [x for prompt in PROMPTS for x in ("--prompt", prompt)]
    command = [sys.executable, main.__file__, "--checkpoint", checkpoint, "--json", *prompts]
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return answers(done.stdout)


def answers(out: str) -> list[list[int]]:
    return [response["tokens"] for response in json.loads(out)["responses"]]


@pytest.mark.deep
def test_two_processes_by_default(tokens):
    """No option but the prompts, which the first process alone can read: as one process answers."""
    arguments = ["--checkpoint", LLAMA4, "--json", "--prompt-file", "-"]
    out, _ = together("cpu", 2, 3, *arguments, stdin="\n".join(PROMPTS))
    assert answers(out) == tokens and json.loads(out)["mesh"] == dict(data=1, expert=1, tensor=6, copies=3)


@pytest.mark.deep
@pytest.mark.parametrize(("options", "expert", "tensor"), [([], 1, 4), (["--ep", 4], 4, 1)])
def test_hosts_far_from_one_another(options, expert, tensor, tokens):
    """Tensor parallelism stays within a host, unless asked for."""
    arguments = ["--checkpoint", LLAMA4, "--json", "--prompt-file", "-", *options]
    out, err = together("far", 2, 4, *arguments, stdin="\n".join(PROMPTS))
    assert answers(out) == tokens
    assert json.loads(out)["mesh"] == dict(data=2, expert=expert, tensor=tensor)
    assert "in 2 slices that a slower network joins: --dp 2 " in err


@pytest.mark.deep
@pytest.mark.parametrize(
    ("checkpoint", "processes", "options"),
    [
        ("tiny-llama3", 2, ["--pp", 2]),
        ("tiny-llama3", 4, ["--pp", 2, "--dp", 2, "--rows", 4]),
        ("tiny-llama4", 4, ["--ep", 4, "--lookup"]),
    ],
)
def test_degrees(checkpoint, processes, options):
    """Every kind of parallelism across processes, also with fewer rows than prompts."""
    checkpoint = CHECKPOINTS / checkpoint
    arguments = ["--checkpoint", checkpoint, "--json", "--prompt-file", "-", *options]
    out, _ = together("cpu", processes, 2, *arguments, stdin="\n".join(PROMPTS))
    assert answers(out) == answers_of_one(checkpoint)
    asked = {"--pp": "stage", "--dp": "data", "--ep": "expert"}
    found, given = json.loads(out)["mesh"], dict(zip(options[::2], options[1::2], strict=False))
    assert math.prod(found.values()) == 2 * processes
    assert all(found[name] == given[option] for option, name in asked.items() if option in given)


DEEP = [pytest.param("v6e", 4, 8, marks=pytest.mark.deep), pytest.param("v5p", 2, 1, marks=pytest.mark.deep)]


@pytest.mark.parametrize(("kind", "processes", "copies"), [("v5e", 2, 4), *DEEP])
def test_rehearsal(kind, processes, copies, tokens):
    """Hosts of four chips: a mesh along the torus, a plan for their memory, answers, the bandwidth used."""
    arguments = ["--checkpoint", LLAMA4, "--dp", 1, "--ep", 2, "--prompt-file", "-", "--lookup"]
    out, err = together(kind, processes, 4, *arguments, "--json", stdin="\n".join(PROMPTS))
    assert answers(out) == tokens
    found = json.loads(out)
    several = dict(copies=copies) if copies > 1 else {}
    assert found["mesh"] == dict(data=1, expert=2, tensor=2 * processes) | several
    assert found["devices"] == 4 * processes
    assert 0 < found["bandwidth_utilization"] < 1 and "% of the memory bandwidth" in err


@pytest.fixture(scope="module")
def llama_405b(tmp_path_factory) -> pathlib.Path:
    """Llama 3.1 405B as published, but for its numbers: 811 GB of holes in files of one layer each."""
    folder, files = tmp_path_factory.mktemp("405b"), collections.defaultdict(dict)
    shutil.copytree(CHECKPOINTS / "tiny-llama3", folder, dirs_exist_ok=True)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps(MODELS["llama3.1-405b"]))
    for name, info in named_infos(read_config(MODELS["llama3.1-405b"])):
        stored = info.stored
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


@pytest.mark.parametrize("kind", ["v5e", *(pytest.param(x, marks=pytest.mark.deep) for x in ("v6e", "v5p"))])
def test_rehearsal_of_what_does_not_fit(kind, llama_405b):
    """Every process says so at once, with what a device needs and really has, and leaves."""
    arguments = ["--checkpoint", llama_405b, "--dtype", "bfloat16"]
    for code, out, err in finish(start(2, 4, *arguments, wrapper=["pod.py", kind])):
        assert (code, out, len(errors(err))) == (1, "", 1), err
        # 405.85 billion weights of two bytes on eight devices.
        assert f"needs {405.85e9 * 2 / 8 / 2**30:.1f}" in errors(err)[0]
        assert f"and has {KINDS[kind][1]:.2f} GiB" in errors(err)[0]


def test_what_the_first_process_refuses():
    """An error of the first process, here of its stdin, ends all, in one line each."""
    for code, out, err in finish(start(2, 1, "--checkpoint", LLAMA4, "--prompt-file", "-")):
        assert (code, out, causes(err)) == (1, "", ["error: --prompt-file -: no prompt in it"]), err


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
