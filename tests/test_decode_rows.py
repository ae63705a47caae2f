"""Decode steps of some rows of a batch: the same tokens, in place, by the smallest program that suffices."""

import dataclasses
import threading
from functools import partial

import jax
import numpy as np
import pytest
from conftest import CHECKPOINTS, engine_of, llama3_config, mesh_of, rings
from test_ahead import shapes_of
from test_generation import MAX_LEN, ask, assert_as_alone, deep, mixed, subject
from test_generation import two_shapes as two_shapes  # a fixture
from test_grammar import Classes
from test_meshes import TOLERANCE, assigned, shapes
from test_speculation import drafts_for, steps_of

import model
from deployment import ahead
from deployment.ahead import ProgramsOnShapes
from generation.llm import load
from server import loop
from server.metrics import Metrics
from serving import programs
from serving.engine import Engine
from serving.executors import few_layers, one_program
from serving.needed import ChooseTokens, demand_of, faster_programs, needed_programs, warm_up
from serving.programs import Programs
from serving.requests import Request
from serving.speculation import DraftModel, PromptLookup
from serving.steps import DecodeStep, PrefillChunk
from sharding.sampling import Sampling

ROWS = 8


def powers_of_two(mesh, rows: int) -> tuple[int, ...]:
    """As serving.programs.decode_rows on one CPU device, for any mesh."""
    return tuple(2**i for i in range(10) if 2**i <= rows // mesh.shape["data"])


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [("1", "float32"), deep("dp2-ep2-tp2", "int8")],
)
@pytest.mark.parametrize("drafted", [0, deep(3)])
def test_some_rows(name, kv_dtype, drafted):
    """A step of some rows, in any order, does to them what a step of all does, and nothing to the others."""
    (weights, cfg, mesh), rng = subject("ring", name), np.random.default_rng(0)
    static, shards = dict(cfg=cfg, mesh=mesh), mesh.shape["data"]
    texts, read = rng.integers(0, cfg.V, (ROWS, 48), np.int32), np.int32([0, 2, 4, 5, 7, 8, 13, 19])
    sampling = Sampling(
        seed=np.arange(ROWS, dtype=np.uint32),
        temperature=np.float32([0.9] * ROWS),
        repetition_penalty=np.linspace(0.01, 0.1, ROWS, dtype=np.float32),  # each prefers what it has read
    )
    drafts = rng.integers(0, cfg.V, (ROWS, drafted), np.int32) if drafted else None

    def select(tree, at: np.ndarray):
        return jax.tree.map(lambda x: np.asarray(x)[at], tree)

    def start():
        chunk = PrefillChunk(rows=None, count=read, width=32)
        return one_program(chunk, weights, assigned(texts, kv_dtype=kv_dtype, **static), **static)[1]

    each, close = ROWS // shards, partial(np.testing.assert_allclose, atol=TOLERANCE)
    rows = np.tile(np.int32([2, 0, each - 1]), shards)
    chosen = rows + np.repeat(np.arange(shards), 3) * each
    count = np.zeros(ROWS, np.int32)
    count[chosen[1:]] = 1 + drafted  # the first one is idle
    step = DecodeStep(count=count, drafts=drafts, sampling=sampling)
    expected, after_all = one_program(step, weights, start(), **static)
    fewer = dataclasses.replace(select(step, chosen), rows=rows)
    found, after = one_program(fewer, weights, start(), **static)
    busy = np.flatnonzero(count[chosen])
    jax.tree.map(close, select(found, busy), select(expected, chosen[busy]))
    jax.tree.map(close, after, after_all)


def every_kind(cfg) -> list[Request]:
    """Greedy requests, and drawn ones with unlike penalties, long and short."""
    requests = mixed(cfg, 30)
    for i in range(0, 30, 3):
        how = Sampling(temperature=0.8, seed=i, repetition_penalty=1.5 + i / 10)
        requests[i] = dataclasses.replace(requests[i], sampling=how)
        repeated = np.resize(requests[i + 1].prompt[:5], 30).tolist()
        requests[i + 1] = dataclasses.replace(requests[i + 1], prompt=repeated)
    return requests


@pytest.mark.parametrize("speculation", [None, deep("lookup"), deep("draft")])
def test_the_smallest_program(speculation, monkeypatch, compiled):
    """Requests come and end: each is answered as alone, by the program of the fewest rows that hold all."""
    monkeypatch.setattr(programs, "decode_rows", powers_of_two)
    weights, cfg, devices = subject("ring", "1")
    how = PromptLookup(3) if speculation else None
    if speculation == "draft":
        how = DraftModel(Programs(weights, cfg, devices, 4, MAX_LEN, "float32"), 3)
    requests = every_kind(cfg)
    engine = engine_of(Programs(weights, cfg, devices, 4, MAX_LEN, "float32", how), requests)
    sizes = powers_of_two(devices, 4)
    warm_up(engine.programs, later := faster_programs(engine.programs, demand_of(requests)))
    engine.use(later)
    steps, decode = [], engine.programs.decode
    shards = engine.programs.shards

    def spied(count, sampling, rows):
        busy = (count.reshape(shards, -1) > 0).sum(1).max()
        steps.append((busy, count.size // shards, rows is None))
        return decode(count, sampling, rows)

    monkeypatch.setattr(engine.programs, "decode", spied)
    compiled.clear()
    answers, waiting = [], list(requests)
    while waiting or engine.busy:
        if waiting and (len(steps) % 3 == 0 or not engine.busy):
            answers.append(engine.add(waiting.pop(0)))
        engine.advance()
    assert not compiled
    assert_as_alone(answers, "ring")
    if speculation == "lookup":  # in the texts of these rows
        drafts = zip(answers, drafts_for(answers, speculation, how), strict=True)
        expected = sum(steps_of(*each, rings(engine.programs.masks)) for each in drafts)
        assert engine.stats.row_steps == expected
    if speculation == "draft":  # by the model itself, from the texts and the caches of these rows
        assert engine.stats.accepted == engine.stats.drafted > 0
    assert {1, 2} <= {n for _, n, _ in steps} <= set(sizes)  # drafts end answers before all rows are busy
    for busy, n, is_all in steps:
        assert n == min(size for size in sizes if size >= busy) and is_all == (n == sizes[-1])


def test_rows_with_grammars():
    """Each row's mask is its own, also where the rows of a step are not the first ones."""
    requests = [Request([9, 8, 7 + i], 8 - i, grammar=Classes(3 + i, 99)) for i in range(4)]
    engine = engine_of(Programs(*subject("ring", "1"), 4, MAX_LEN, "float32"), requests)
    expected = [answer.tokens for answer in ask(engine, requests)]
    later = faster_programs(engine.programs, demand_of(requests))
    assert [program.rows for program in later] == [1, 2]
    engine.use(later)
    for i in (3, 2, 0):
        assert [answer.tokens for answer in ask(engine, [requests[i]])] == [expected[i]]
    assert [answer.tokens for answer in ask(engine, requests[1:3])] == expected[1:3]


@pytest.mark.parametrize(("rows", "n", "max_len"), [([0], 1, 32768), ([1, 5, 3, 4], 8, 16384)])
@pytest.mark.parametrize("drafted", [0, deep(3)])
def test_no_copy_of_the_cache(rows, n, max_len, drafted):
    """A step of some rows writes the cache in place: its temporaries are small beside one row's cache."""
    cfg = llama3_config(depth=1)
    mesh, rows = mesh_of(cfg), np.int32(rows)
    weights, batch = shapes(cfg, mesh, n, max_len)
    drafts = np.zeros((rows.size, drafted), np.int32) if drafted else None
    step = DecodeStep(count=np.ones(rows.size, np.int32), drafts=drafts, rows=rows)
    one = one_program.lower(step, weights, batch, cfg=cfg, mesh=mesh)
    count = np.ones(rows.size, np.int32)
    chunk = model.chunk_at(count, count, 1 + drafted, rows)
    x = np.zeros((rows.size, 1 + drafted, cfg.D), np.float32)
    several = few_layers.lower(x, weights.layers, batch.cache.layers, chunk, kinds=cfg.layers, mesh=mesh)
    one_row = 4 * batch.cache.layers[0].values.size / n
    for lowered in (one, several):
        assert lowered.compile().memory_analysis().temp_size_in_bytes < one_row / 2


SETS = [frozenset(), frozenset({"seed", "temperature"})]
DEMAND = demand_of([Request([1] * 8, 1)], option_sets=SETS)


def programs_of_a_server() -> tuple[Programs, ProgramsOnShapes]:
    weights, cfg, mesh = subject("ring", "1")
    sizes = cfg, mesh, 2, MAX_LEN, "float32"
    return Programs(weights, *sizes), ProgramsOnShapes(shapes_of(weights), *sizes)


@pytest.mark.parametrize("ends", [True, False])
def test_programs_that_a_server_does_not_compile(ends, monkeypatch, capsys):
    """One that ends says nothing of them; one that cannot compile a program goes on, and says why."""
    (_, shapes), server = programs_of_a_server(), loop.EngineLoop(4, 4, 60, Metrics())

    def fail(*arguments, **static):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")

    monkeypatch.setattr(ahead, "compile_on_shapes", fail)
    if ends:
        shapes.give_up()
    loop.compile_later(shapes, faster_programs(shapes, DEMAND), server, lambda: None)
    assert server.inbox.empty()
    why = "a decode program for 2 rows was not compiled: RESOURCE_EXHAUSTED: no room\n"
    assert capsys.readouterr().err == ("" if ends else why)


def test_a_server_compiles_the_rest(monkeypatch, compiled):
    """A server starts with the general program, compiles the others while it is idle, and then uses them."""
    monkeypatch.setattr(loop, "IDLE", 0.01)
    made, shapes = programs_of_a_server()
    later = faster_programs(shapes, DEMAND)
    expected = [(2, 0), (1, 0), (1, 1)]
    assert later == [ChooseTokens(rows, SETS[i]) for rows, i in expected]
    first = [program for program in needed_programs(made, DEMAND) if program not in later]
    warm_up(made, first)
    engine = Engine(made, first)
    assert engine.decode_programs == [ChooseTokens(2, SETS[1])]
    server = loop.EngineLoop(4, 4, 60, Metrics())
    server.open_jobs = 1  # it is not idle
    arguments = shapes, later, server, server.wait_until_idle
    thread = threading.Thread(target=loop.compile_later, args=arguments)
    thread.start()
    thread.join(0.2)
    assert server.inbox.empty()
    server.open_jobs = 0
    thread.join()
    assert len(engine.decode_programs) == 1  # what the engine uses is decided in its own thread
    commands = [server.inbox.get() for _ in later]
    compiled.clear()
    server.engine = engine
    for program, command in zip(later, commands, strict=True):
        assert command == ("program", program) and not server._execute([command])
    finished = ask(engine, [Request([9, 8, 7], 8)])
    assert not compiled and engine.decode_programs[0] == ChooseTokens(1, SETS[0])
    assert len(engine.decode_programs) == 4
    assert_as_alone(finished, "ring")


def test_answers_at_a_time(compiled):
    """In Python the programs for a number of answers are compiled when that many come, and no others."""
    llm = load(CHECKPOINTS / "tiny-llama3", rows=4, max_len=128, n_devices=1)
    prompts = ["Who are you?", "What is 12 + 34?", "Add 20 and 22."]
    options = dict(max_new_tokens=8, temperature=0)
    whole = [llm.generate(prompt, **options).text for prompt in prompts]
    engine = llm.engine
    assert {program.rows for program in engine.decode_programs} == {1}
    assert {shape.rows for shape in engine.chunk_shapes} == {1}
    streams = [llm.stream(prompt, **options) for prompt in prompts]
    firsts = [next(stream) for stream in streams]
    assert [first + "".join(stream) for first, stream in zip(firsts, streams, strict=True)] == whole
    assert {x.rows for x in engine.decode_programs} == {1, 2, 4} and llm.engine is engine
    assert {shape.rows for shape in engine.chunk_shapes} == {1, 4}
    compiled.clear()
    assert [answer.text for answer in llm.generate(prompts[:2], **options)] == whole[:2]
    assert not compiled
