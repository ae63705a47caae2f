"""Programs that are compiled ahead, on shapes: the same ones that run later, each once."""

import collections
import concurrent.futures
import pathlib
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
import test_stages
from conftest import invoke, llama4_config, random_weights
from test_generation import MAX_LEN, deep, subject

import main
from deployment import ahead, deploy
from deployment.ahead import ProgramsOnShapes, compile_programs, programs_at_a_time
from feedback.errors import UserError
from serving import chunks
from serving.engine import Engine
from serving.needed import demand_of, needed_programs
from serving.programs import Programs
from serving.requests import OPTION_SETS, Request
from serving.speculation import DraftModel, PromptLookup
from sharding.sampling import Sampling
from terminal.command_line import OUT_OF_MEMORY

REPOSITORY = pathlib.Path(main.__file__).parent
ROWS = 8


def shapes_of(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def every_kind(cfg) -> list[Request]:
    """Requests that need all widths, scores, and a decode program of every option."""
    prompt = np.random.default_rng(0).integers(0, cfg.V, 100).tolist()
    options = dict(temperature=0.5, top_k=3, repetition_penalty=1.5, seed=1)
    scored = Request(prompt, 2, Sampling(**options, top_logprobs=2), score=True)
    return [Request(prompt, 3), scored, Request(prompt[:20], 4, Sampling(**options))]


@pytest.mark.parametrize(
    ("mesh", "speculation"),
    [
        ("dp2-ep2-tp2", None),
        deep("pp2-tp2", None),
        deep("1", "lookup"),
        deep("dp2-tp4", "draft"),
    ],
)
def test_compiled_ahead(mesh, speculation, monkeypatch, compiled):
    """What was compiled on shapes, where no array is made, is not compiled again with arrays."""
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 8), (1, 64)))
    if mesh == "pp2-tp2":
        cfg = test_stages.config("llama4", 2)
        devices = test_stages.mesh_of(cfg, mesh)
        weights = random_weights(cfg, devices)
    else:
        weights, cfg, devices = subject("ring", mesh)

    def made(kind, weights):
        sizes = cfg, devices, ROWS, MAX_LEN, "float32"
        how = PromptLookup(2) if speculation == "lookup" else None
        if speculation == "draft":
            how = DraftModel(kind(weights, *sizes), 2)
        return kind(weights, *sizes, how)

    requests = every_kind(cfg)
    shapes = made(ProgramsOnShapes, shapes_of(weights))
    demand = demand_of(requests, MAX_LEN, OPTION_SETS)
    needed = needed_programs(shapes, demand, prefix_cache=shapes.stages == 1)
    compile_programs(shapes, needed)
    leaves = jax.tree.leaves((shapes.weights, shapes.batch))
    assert not any(isinstance(x, jax.Array) for x in leaves)
    arrays = made(Programs, weights)
    compiled.clear()
    engine = Engine(arrays, needed, prefix_cache_bytes=2**20)
    answers = [engine.add(request) for request in requests * 5]
    while engine.busy:
        engine.advance()
    assert not compiled
    assert {x.finish_reason for x in answers} == {"length"}


def test_each_program_once(monkeypatch):
    """Of calls that share programs, each program is compiled by one thread; the others wait for it."""
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 8), (1, 64)))
    monkeypatch.setattr(ahead, "programs_at_a_time", lambda layers: 4)
    cfg = llama4_config()
    _, _, mesh = subject("ring", "1")
    names, threads, compile_one = collections.Counter(), set(), ahead.compile_on_shapes
    two = threading.Event()

    def spied(function, *arguments, **static):
        threads.add(threading.current_thread())
        if len(threads) > 1:
            two.set()
        assert two.wait(60), "one thread compiles all programs"
        leaves, tree = jax.tree.flatten(arguments)
        names[function, str(tree), tuple((x.shape, str(x.dtype)) for x in leaves)] += 1
        return compile_one(function, *arguments, **static)

    monkeypatch.setattr(ahead, "compile_on_shapes", spied)
    shapes = ProgramsOnShapes(shapes_of(random_weights(cfg, mesh)), cfg, mesh, ROWS, MAX_LEN, "float32")
    compile_programs(shapes, needed_programs(shapes, demand_of(every_kind(cfg), MAX_LEN, OPTION_SETS)))
    assert set(names.values()) == {1}


def test_a_failure_is_told(monkeypatch):
    """An error of the compiler reaches the caller, also where another call waited for the same program.

    Every later call raises it again, though the programs after the first one were not compiled.
    """

    def fail(*arguments, **static):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")

    monkeypatch.setattr(ahead, "compile_on_shapes", fail)
    monkeypatch.setattr(ahead, "programs_at_a_time", lambda layers: 1)
    weights, cfg, mesh = subject("ring", "1")
    shapes, told = ProgramsOnShapes(shapes_of(weights), cfg, mesh, ROWS, MAX_LEN, "float32"), []
    for _ in range(5):
        with pytest.raises(jax.errors.JaxRuntimeError, match="no room") as raised:
            compile_programs(shapes, needed_programs(shapes, demand_of([Request([1], 1)])))
        told.append(raised.value)
    assert all(error is told[0] for error in told) and not shapes.given_up


@pytest.mark.parametrize(
    ("cores", "gib", "layers", "expected"),
    [(8, 32, 80, 8), (8, 16, 80, 5), (2, 400, 80, 2), (112, 1, 126, 1)],
)
def test_programs_at_a_time(cores, gib, layers, expected, monkeypatch):
    """Half of the memory, at 20 MiB for each layer of a program, and no more programs than cores."""
    monkeypatch.setattr(ahead, "host_memory", lambda: gib * 2**30)
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: cores)
    assert programs_at_a_time(layers) == expected


def test_weights_that_cannot_be_loaded(tmp_path, monkeypatch, capsys):
    """The error does not wait for the programs: one is being compiled, and no other begins."""
    begun, told = [], threading.Event()

    def compile_slowly(function, *arguments, **static):
        begun.append(function)
        assert told.wait(60)
        raise concurrent.futures.CancelledError

    def fail(*arguments, **options):
        while not begun:
            time.sleep(0.01)
        raise UserError("the weights are damaged")

    monkeypatch.setattr(ahead, "compile_on_shapes", compile_slowly)
    monkeypatch.setattr(ahead, "programs_at_a_time", lambda layers: 1)
    monkeypatch.setattr(deploy, "load", fail)
    code, out, err = invoke(monkeypatch, capsys, main, "--prompt", "Hello")
    assert code == 1 and not out and err.splitlines()[-1] == "error: the weights are damaged"
    assert len(begun) == 1
    told.set()


ENDS = """
import time
import main
from feedback.errors import UserError
from deployment import deploy
from terminal import loaded_models

def fail(*arguments):
    raise UserError("wrong weights")

loaded_models.compile_programs = lambda *_: time.sleep(1000)
deploy.load = fail
main.run_to_end()
"""


def test_the_process_ends_at_once():
    """After an error it does not wait for a program that is being compiled."""
    command = [sys.executable, "-c", ENDS, "--prompt", "Hello"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "error: wrong weights"


def test_programs_that_do_not_fit(monkeypatch, capsys):
    """The error does not wait for the weights: loading ends with the next one."""
    asked = []

    def fail(function, *arguments, **static):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")

    def load(checkpoint, mesh, dtype, format, show, check):
        for _ in range(6000):
            asked.append(check)
            check()
            time.sleep(0.01)

    monkeypatch.setattr(ahead, "compile_on_shapes", fail)
    monkeypatch.setattr(deploy, "load", load)
    code, out, err = invoke(monkeypatch, capsys, main, "--prompt", "Hello")
    assert code == 1 and not out and 0 < len(asked) < 6000
    assert err.splitlines()[-1] == f"error: {OUT_OF_MEMORY}"
