"""One device is the truth for many: the same tokens and log-probabilities, and few collectives."""

import dataclasses
import json
import math
import re
from functools import lru_cache, partial

import conftest
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CHECKPOINTS, Kind, llama3_config, llama4_config, mesh_of
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_transformers import CONFIGS

import model
from checkpoints.checkpoint import open_checkpoint
from checkpoints.loading import load
from families.registry import read_config
from planner.published_models import read_model as read_published
from quantize import INT4, INT8, MXFP4
from serving import chunks, steps
from serving.executors import one_program
from serving.steps import DecodeStep, PrefillChunk, assign_rows, batch_infos, init_batch
from sharding.arrays import ArrayInfo, abstract
from sharding.mesh import COPIES, EXPERT, HEADS, MODEL, SLOTS, TENSOR, mesh_shape, mesh_size
from sharding.sampling import Sampling
from sharding.slots import slot_mapping

LENGTHS = (1, 5, 8, 9, 17, 20, 3, 16)
NEW = 10
# Sums in another order, in float32: 1e-5 was seen.
TOLERANCE = 1e-4
# Both feed-forwards, and both kinds of attention; 2 key/value heads with 5 queries each.
LLAMA4 = llama4_config(layers=(Kind(chunk=8, moe=True), Kind(rope=False)))


random_weights = lru_cache(conftest.random_weights)
deep = partial(pytest.param, marks=pytest.mark.deep)


@pytest.fixture(autouse=True)
def one_shape_of_chunks(monkeypatch):
    """Chunks of two rows, and none of another shape to compile."""
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((2, 32),))


def generate(cfg, mesh, prompts, format=None, kv_dtype="float32", max_len=48):
    weights = random_weights(cfg, mesh, format)
    return conftest.generate(weights, prompts, cfg, mesh, NEW, max_len, kv_dtype, score=True)


def prompts_for(cfg, lengths=LENGTHS):
    rng = np.random.default_rng(0)
    return [rng.integers(0, cfg.V, n).tolist() for n in lengths]


def assert_same(result, expected, atol=TOLERANCE, new=NEW):
    for ours, theirs in zip(result, expected, strict=True):
        assert ours.tokens == theirs.tokens and len(ours.tokens) == new
        assert len(ours.prompt_logprobs) == len(ours.request.prompt) - 1
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=atol)
        np.testing.assert_allclose(ours.prompt_logprobs, theirs.prompt_logprobs, atol=atol)


@pytest.fixture(scope="module")
def expected():
    """Answers of one device, computed once per model."""
    known = {}

    def answer(cfg, **options):
        key = (cfg, *options.items())
        if key not in known:
            known[key] = generate(cfg, mesh_of(cfg), prompts_for(cfg), **options)
        return known[key]

    return answer


@pytest.mark.parametrize(
    ("name", "copies", "format"),
    [
        ("ep4-tp2", 2, None),
        ("ep2-tp4", 1, INT8),
        deep("ep4-tp2", 1, None),
        deep("ep2-tp4", 4, None),
        deep("tp8", 1, None),
        deep("tp8", 2, INT8),
        deep("dp2-ep2-tp2", 2, None),
        deep("dp2-ep2-tp2", 1, None),
    ],
)
def test_llama4(name, copies, format, expected, monkeypatch):
    """Shared heads, copies of them, padded queries, a cache of several blocks: a loop inside shard_map.

    int8 weights and cache: scales are sharded as their arrays are.
    """
    options = dict(format=format, kv_dtype="int8" if format else "float32")
    whole = expected(LLAMA4, **options)
    monkeypatch.setattr("ops.attention.BLOCK", 2)
    monkeypatch.setattr("ops.attention.DECODE_BLOCK", 2)
    # Of another length, so that all is compiled again.
    result = generate(LLAMA4, mesh_of(LLAMA4, name, copies), prompts_for(LLAMA4), max_len=56, **options)
    # A difference in the last bit can round a cached value to the next of its 255 steps.
    assert_same(result, whole, 5e-3 if format else TOLERANCE)


@pytest.mark.parametrize(("name", "copies"), [("tp8", 4), deep("tp8", 8), deep("ep2-tp4", 2)])
def test_copies_of_latents(name, copies, expected):
    """Of the one key/value head: each group of devices has all of its cache, and some of its queries."""
    cfg = read_config(json.loads(CONFIGS["deepseek-v3"].to_json_string()))
    assert_same(generate(cfg, mesh_of(cfg, name, copies), prompts_for(cfg)), expected(cfg))


def test_copies_that_cannot_be():
    with pytest.raises(ValueError, match="4 devices share a key/value head, and cannot have 3 copies of it"):
        mesh_shape(LLAMA4, tensor=8, copies=3)
    unlike = read_published("gemma4-31b")  # where devices have all of some heads, and share others
    with pytest.raises(ValueError, match="cannot have 2 copies"):
        mesh_shape(unlike, tensor=8, copies=2)


@pytest.mark.parametrize(("name", "prompts"), [("tp8", 8), ("dp8", 3)])
def test_llama3(name, prompts, expected, monkeypatch):
    """As many key/value heads as devices; and more data shards than prompts: empty rows leave no trace."""
    cfg = llama3_config(tied_embeddings=True)
    whole = expected(cfg)[:prompts]
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 32),))
    assert_same(generate(cfg, mesh_of(cfg, name), prompts_for(cfg)[:prompts]), whole)


@pytest.mark.parametrize(("name", "kv_dtype"), [("1", "float32"), deep("tp8", "int8")])
def test_unwritten_slots_are_never_read(kv_dtype, name, monkeypatch):
    """A cache that starts full of NaN (or of 127 x NaN) changes nothing, in one piece or in several."""

    def answers():
        return generate(LLAMA4, mesh_of(LLAMA4, name), prompts_for(LLAMA4), kv_dtype=kv_dtype)

    clean = answers()

    def poisoned(*arguments):
        def poison(x):
            return jax.device_put(jnp.full_like(x, 127 if x.dtype == "int8" else jnp.nan), x.sharding)

        batch = init_batch(*arguments)
        return batch.replace(layers=jax.tree.map(poison, batch.cache.layers))

    monkeypatch.setattr(steps, "init_batch", poisoned)
    assert_same(answers(), clean)
    # In pieces a later one reads what an earlier one wrote; to int8 precision if the cache is int8.
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 4),))
    in_pieces = answers()
    if kv_dtype == "float32":
        assert_same(in_pieces, clean)
    assert all(np.isfinite(answer.logprobs + answer.prompt_logprobs).all() for answer in in_pieces)


@pytest.mark.parametrize("name", ["1", "tp8"])
@pytest.mark.parametrize("chunk", [None, 8])
def test_slot_mapping(name, chunk):
    """Each kept token has one slot on one device, though a chunk of 20 tokens goes around a ring of 8."""
    T, capacity = 20, 40
    mask = model.BlockLocal(chunk) if chunk else model.Full()
    mesh = mesh_of(LLAMA4, name)
    slots = mesh_size(mesh, SLOTS)
    start, count = np.array([0, 5, 8, 13]), np.array([20, 0, 3, 17])

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(None, None, MODEL))
    def on_devices(start, count):
        return slot_mapping(model.chunk_at(start, count, T), mask, capacity)[..., None]

    # Devices that differ only in their heads agree; of the others, take each once.
    found = np.asarray(on_devices(start, count)).reshape(4, T, -1, slots)[:, :, 0]
    for b in range(4):
        last = range(start[b], start[b] + count[b])[-(chunk or T) :]
        for t in range(T):
            position = start[b] + t
            slot = position % (chunk or capacity)
            expected = [capacity] * slots
            if position in last:
                expected[slot % slots] = slot // slots
            assert found[b, t].tolist() == expected


def assigned(texts, cfg, mesh, kv_dtype="float32"):
    """A batch whose rows are to read these texts."""
    data = mesh.shape["data"]
    batch, nothing = init_batch(cfg, mesh, *texts.shape, kv_dtype), np.zeros(data, np.int32)
    each = len(texts) // data
    for row in range(each):
        rows = np.full(data, row, np.int32)
        batch = assign_rows(rows, texts[row::each], nothing, None, batch, cfg=cfg, mesh=mesh)
    return batch


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("name", ["1", "dp2-ep2-tp2"])
def test_assign_rows(name, copied):
    """In each data shard one row is another's copy with a text of its own, or none is; the others stay."""
    cfg, rng = LLAMA4, np.random.default_rng(0)
    mesh = mesh_of(cfg, name)
    data, rows = mesh.shape["data"], 4
    each = rows // data
    static = dict(cfg=cfg, mesh=mesh)

    def any_numbers(x):
        return jax.device_put(rng.integers(0, 99, x.shape).astype(x.dtype), x.sharding)

    for row, source in [(each - 1, 0), (0, each - 1), (0, 0), (-1, -1)]:
        batch = jax.tree.map(any_numbers, init_batch(cfg, mesh, rows, 24, "int8"))
        expected = jax.tree.map(np.array, batch)
        text, length = rng.integers(0, cfg.V, (data, 24), np.int32), rng.integers(0, 24, data, np.int32)
        # The last shard's assignment is this one, another shard's the other way round.
        to_rows = np.array([row] + [each - 1 - row if row >= 0 else each - 1] * (data - 1), np.int32)[::-1]
        sources = np.array([source] + [each - 1 - source if row >= 0 else 0] * (data - 1), np.int32)[::-1]
        for shard, (to, of) in enumerate(zip(to_rows, sources, strict=True)):
            if to >= 0:
                at = shard * each + to
                expected.tokens[at], expected.cache.length[at] = text[shard], length[shard]
                for x in jax.tree.leaves(expected.cache.layers) if copied else ():
                    x[at] = x[shard * each + of]
        result = assign_rows(to_rows, text, length, sources if copied else None, batch, **static)
        jax.tree.map(np.testing.assert_array_equal, result, expected)


@pytest.mark.parametrize("name", [deep("1"), "dp2-ep2-tp2"])
def test_prefill_of_all_rows(name):
    """Pieces of unlike counts, of all rows at once and of one at a time: as a forward of each whole text."""
    cfg, rng = LLAMA4, np.random.default_rng(0)
    mesh, one = mesh_of(cfg, name), mesh_of(cfg)
    data, rows, width = mesh.shape["data"], 4, 6
    texts = rng.integers(0, cfg.V, (rows, 24), np.int32)
    # Of each piece, how many tokens of each row: none, one, all; across the edges of chunks of 8.
    counts = np.array([[6, 0, 1, 5], [6, 6, 1, 2], [4, 6, 0, 6], [5, 3, 6, 0]], np.int32)
    weights = random_weights(cfg, mesh)
    static = dict(cfg=cfg, mesh=mesh)
    alone, together, scores = assigned(texts, **static), assigned(texts, **static), [[] for _ in texts]
    assert together.tokens.tolist() == texts.tolist()
    for count in counts:
        chunk = PrefillChunk(rows=None, count=count, width=width, score=0)
        found, together = one_program(chunk, weights, together, **static)
        by_row = []
        for row in range(rows // data):
            own = dict(rows=np.full(data, row, np.int32), count=count[row :: rows // data])
            chunk = PrefillChunk(**own, width=width, score=0)
            parts, alone = one_program(chunk, weights, alone, **static)
            by_row.append(parts.logprobs)
        by_row = np.stack(by_row, 1).reshape(rows, width)
        for row, n in enumerate(count):
            np.testing.assert_allclose(found.logprobs[row, :n], by_row[row, :n], atol=TOLERANCE)
            scores[row] += found.logprobs[row, :n].tolist()
    assert together.cache.length.tolist() == alone.cache.length.tolist() == counts.sum(0).tolist()
    assert together.tokens.tolist() == alone.tokens.tolist() == texts.tolist()
    # All slots: what is nobody's stays zero.
    caches = together.cache.layers, alone.cache.layers
    jax.tree.map(partial(np.testing.assert_allclose, atol=TOLERANCE), *caches)

    whole = jax.nn.log_softmax(model.forward(texts, random_weights(cfg, one), cfg=cfg, mesh=one))
    whole = np.asarray(whole)
    output, _ = one_program(DecodeStep(count=np.ones(rows, np.int32)), weights, together, **static)
    for row, n in enumerate(counts.sum(0)):
        expected = whole[row, np.arange(n), texts[row, 1 : n + 1]]
        np.testing.assert_allclose(scores[row], expected, atol=TOLERANCE)
        assert output.tokens[row].tolist() == [whole[row, n].argmax()]
        np.testing.assert_allclose(output.logprobs[row], [whole[row, n].max()], atol=TOLERANCE)


@pytest.mark.parametrize("kv_dtype", ["int8", deep("bfloat16")])
def test_pieces_of_any_width(kv_dtype):
    """Tokens see one another as the cache holds them, be they read together or one by one.

    In one layer: a later one would round otherwise what is unlike in its last bit.
    """
    cfg, rng = llama4_config(layers=(Kind(chunk=16),)), np.random.default_rng(0)
    mesh, length = mesh_of(cfg), 24
    static, weights = dict(cfg=cfg, mesh=mesh), random_weights(cfg, mesh)
    texts = rng.integers(0, cfg.V, (2, length + 1), np.int32)
    found = []
    for width in (1, 7, length):
        batch, scores = assigned(texts, kv_dtype=kv_dtype, **static), []
        for start in range(0, length, width):
            count = np.full(2, min(width, length - start), np.int32)
            chunk = PrefillChunk(rows=None, count=count, width=width, score=0)
            part, batch = one_program(chunk, weights, batch, **static)
            scores.append(part.logprobs[:, : count[0]])
        found.append(np.concatenate(scores, 1))
    np.testing.assert_allclose(found[1], found[0], atol=TOLERANCE)
    np.testing.assert_allclose(found[2], found[0], atol=TOLERANCE)


@pytest.mark.parametrize("name", [deep("1"), "dp2-ep2-tp2"])
def test_guesses_of_a_step(name):
    """A step's tokens are those of plain steps, whichever guesses are right or looked at; as are the next."""
    cfg, rng, rows, T = LLAMA4, np.random.default_rng(0), 8, 4
    mesh = mesh_of(cfg, name)
    static, weights = dict(cfg=cfg, mesh=mesh), random_weights(cfg, mesh)
    texts = rng.integers(0, cfg.V, (rows, 48), np.int32)
    read = np.array([0, 2, 4, 5, 7, 8, 13, 19], np.int32)
    how = dict(temperature=np.float32([0.9] * rows), repetition_penalty=np.float32([3.0] * rows))
    sampling = Sampling(seed=np.arange(rows, dtype=np.uint32), **how)

    def start():
        chunk = PrefillChunk(rows=None, count=read, width=32)
        return one_program(chunk, weights, assigned(texts, **static), **static)[1]

    def step(count, guesses, batch):
        decode = DecodeStep(count=np.int32(count), drafts=guesses, sampling=sampling)
        output, batch = one_program(decode, weights, batch, **static)
        return jax.tree.map(np.asarray, output), batch

    batch, outputs = start(), []
    for _ in range(T + 2):
        output, batch = step([1] * rows, None, batch)
        outputs.append(output)
    tokens, logprobs = (np.concatenate([getattr(x, y) for x in outputs], 1) for y in ("tokens", "logprobs"))
    # Beyond what is read stands what would no longer be chosen if it counted as text.
    for row, n in enumerate(read):
        texts[row, n + 1 : n + 1 + T] = tokens[row, 1 : 1 + T]
    for i in range(T):
        # The first wrong guess. After it comes what would follow it, if it were right.
        wrong, guesses = (np.arange(rows) + i) % T, tokens[:, : T - 1].copy()
        guesses += np.arange(T - 1) == wrong[:, None]
        output, _ = step([T] * rows, guesses % cfg.V, start())
        guesses = np.where(np.arange(T - 1) == wrong[:, None] + 1, output.tokens[:, : T - 1], guesses % cfg.V)
        count = rng.integers(0, T + 1, rows)
        looked_at = np.minimum(count, 8 - read % 8)  # none beyond the chunk of 8
        kept = np.minimum(looked_at, 1 + wrong)
        output, batch = step(count, guesses, start())
        assert output.count.tolist() == kept.tolist()
        assert output.drafted.tolist() == np.maximum(looked_at - 1, 0).tolist()
        assert batch.cache.length.tolist() == (read + kept).tolist()
        after, batch = step([1] * rows, None, batch)
        for row, n in enumerate(kept):
            assert output.tokens[row, :n].tolist() == tokens[row, :n].tolist()
            np.testing.assert_allclose(output.logprobs[row, :n], logprobs[row, :n], atol=TOLERANCE)
            assert after.tokens[row, 0] == tokens[row, n]
            np.testing.assert_allclose(after.logprobs[row, 0], logprobs[row, n], atol=TOLERANCE)
            text = [*texts[row, : read[row] + 1], *tokens[row, : n + 1]]
            assert batch.tokens[row, : len(text)].tolist() == text


def shapes(cfg, mesh, rows, max_len):
    """Of weights and a batch, in float32: what compiling takes."""
    infos = model.weight_infos(cfg), batch_infos(cfg, rows, max_len, jnp.float32)
    return (abstract(x, mesh, jnp.float32) for x in infos)


@pytest.mark.parametrize(("rows", "n", "max_len"), [(None, 1, 32768), ([3], 8, 16384)])
def test_prefill_does_not_copy_the_cache(rows, n, max_len):
    """A piece needs far less memory than a long cache, which XLA copies if it is read before written."""
    cfg = llama3_config()
    mesh = mesh_of(cfg)
    weights, batch = shapes(cfg, mesh, n, max_len)
    chunk = PrefillChunk(rows=rows and np.array(rows, np.int32), count=np.array([64], np.int32), width=64)
    compiled = one_program.lower(chunk, weights, batch, cfg=cfg, mesh=mesh).compile()
    one_layer = 4 * batch.cache.layers[0].values.size
    assert compiled.memory_analysis().temp_size_in_bytes < one_layer / 2


@pytest.mark.parametrize("name", ["ep2-tp4", deep("dp2-ep2-tp2")])
@pytest.mark.parametrize("format", [None, deep(INT8)])
def test_random_weights_are_the_same_on_every_mesh(name, format):
    cfg, mesh = LLAMA4, mesh_of(LLAMA4, name)
    made = model.init_weights(jax.random.key(0), cfg, mesh, format=format)
    jax.tree.map(np.testing.assert_array_equal, made, random_weights(cfg, mesh, format))


def test_any_order_in_memory(monkeypatch):
    """Weights whose dimensions are stored in the reverse order: the same tokens and log-probabilities.

    Of int8 matrices and their scales, and of the router, the embedding and the norms, which are no int8.
    """
    checkpoint = open_checkpoint(CHECKPOINTS / "tiny-llama4")
    cfg = dataclasses.replace(checkpoint.config, layers=checkpoint.config.layers[:1])
    checkpoint = dataclasses.replace(checkpoint, config=cfg)
    mesh, prompts = mesh_of(cfg, "tp8"), prompts_for(cfg, (3, 20))
    chosen_by_xla = ArrayInfo.placement

    def reverse(info: ArrayInfo, mesh) -> NamedSharding | Format:
        placement, n = chosen_by_xla(info, mesh), len(info.shape)
        is_weight = n > 1 and info.letters[0] != "b"
        return Format(Layout(tuple(reversed(range(n)))), placement) if is_weight else placement

    def answers(step: int) -> list:
        """step: 1 or -1, from one to the next in an array's list of dimensions, the slowest one first."""
        weights = load(checkpoint, mesh, "float32", format=INT8)
        declared = abstract(model.weight_infos(cfg, INT8), mesh, jnp.float32)
        for x, like in zip(*map(jax.tree.leaves, (weights, declared)), strict=True):
            dimensions = tuple(range(x.ndim))[::step]
            assert x.format.layout.major_to_minor == dimensions
            assert like.format.layout == (None if step > 0 or x.ndim < 2 else Layout(dimensions))
        return conftest.generate(weights, prompts, cfg, mesh, NEW, 64, "float32", score=True)

    usual = answers(1)
    monkeypatch.setattr(ArrayInfo, "placement", reverse)
    assert_same(answers(-1), usual)


def mesh_of_tpus(platform: str, tensor: int) -> AbstractMesh:
    """Of devices that are not here. platform: as which they compile."""
    axes = mesh_shape(LLAMA4, tensor=tensor)
    device = AbstractDevice("TPU v5 lite", None, platform)
    return AbstractMesh(tuple(axes.values()), tuple(axes), abstract_device=device)


@pytest.mark.parametrize(
    ("letters", "columns", "platform", "kept"),
    [
        ("emD", 2880, "tpu", True),  # 22.5 tiles of 128 columns
        ("emD", 2880, "cpu", False),
        ("eDm", 2880, "tpu", False),  # divided among devices: 360 columns on each
        ("emD", 2816, "tpu", False),  # 22 tiles
        ("emD", 960, "tpu", False),  # 7.5 tiles: rows of 8 would be 7% longer
    ],
)
def test_rows_that_nearly_fill_tiles_stay_rows(letters, columns, platform, kept):
    """XLA chooses the order of dimensions, except on TPUs where rows nearly fill whole tiles."""
    mesh, info = mesh_of_tpus(platform, 8), ArrayInfo(letters, shape=(4, 64, columns))
    sharding = NamedSharding(mesh, info.spec)
    assert info.placement(mesh) == (Format(Layout((0, 1, 2)), sharding) if kept else sharding)


@pytest.mark.parametrize("format", [INT4, MXFP4])
@pytest.mark.parametrize(
    ("letters", "contracted", "platform", "kept"),
    [
        ("emD", "m", "tpu", True),
        ("eDm", "D", "tpu", True),
        ("emD", "m", "cpu", False),
        ("Df", "f", "tpu", False),
    ],
)
def test_groups_of_experts_keep_their_order(letters, contracted, platform, kept, format):
    """XLA would store the scales of 64 experts on a TPU, [64,1,512], as [1,64,512]."""
    sizes = dict(e=64, D=512, m=128, f=1024)
    info = ArrayInfo(letters, contracted, shape=tuple(sizes[x] for x in letters), format=format)
    for component in jax.tree.leaves(info.components):
        placement = component.placement(mesh_of_tpus(platform, 1))
        assert isinstance(placement, Format) == kept
        assert not kept or placement.layout == Layout(tuple(range(len(component.shape))))


def collectives(cfg: model.Config, name: str) -> dict[str, int]:
    """How often each kind of collective stands in the compiled decode step."""
    mesh = mesh_of(cfg, name)
    step = DecodeStep(count=np.ones(8, np.int32))
    hlo = one_program.lower(step, *shapes(cfg, mesh, 8, 48), cfg=cfg, mesh=mesh).compile().as_text()
    kinds = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
    return {kind: len(re.findall(rf" {kind}(?:-start)?\(", hlo)) for kind in kinds}


DENSE, ROUTED = Kind(), Kind(chunk=8, moe=True)
SHARED_HEADS = {"all-reduce": 2, "all-gather": 1, "all-to-all": 1}


@pytest.mark.parametrize(
    ("kind", "kv_heads", "name", "expected"),
    [
        deep(DENSE, 8, "tp8", {"all-reduce": 2}),
        deep(DENSE, 2, "tp8", SHARED_HEADS),
        (ROUTED, 8, "ep4-tp2", {"all-reduce": 2}),
        (ROUTED, 2, "tp8", SHARED_HEADS),
    ],
)
def test_collectives_per_layer(kind, kv_heads, name, expected):
    """Two all-reduces; where devices share a key/value head, one small all-gather and all-to-all more."""

    def count(depth: int):
        return collectives(llama4_config(K=kv_heads, layers=(kind,) * depth), name)

    one, two = count(1), count(2)
    assert {kind: two[kind] - one[kind] for kind in two if two[kind] > one[kind]} == expected


@pytest.mark.parametrize("n", [2, 4, 16, 32, 64])
@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12])
@pytest.mark.parametrize("copies", [1, 4])
def test_mesh_axes_multiply_out(n, heads, copies):
    """For any degrees that the model allows, heads x copies x slots are the devices of expert x tensor."""
    cfg = llama4_config(K=heads, H=128, E=16)
    for expert in (expert for expert in (1, 2, 4, 8, 16) if n % expert == 0):
        if copies > 1 and (n // math.gcd(n, heads) % copies or heads > math.gcd(n, heads)):
            with pytest.raises(ValueError, match="cannot have 4 copies"):
                mesh_shape(cfg, 1, expert, n // expert, copies=copies)
            continue
        mesh = mesh_shape(cfg, 1, expert, n // expert, copies=copies)
        groups = (HEADS, COPIES, SLOTS, EXPERT, TENSOR)
        by_heads, by_copies, by_slots, *degrees = (math.prod(mesh[axis] for axis in axes) for axes in groups)
        assert degrees == [expert, n // expert] and by_copies == copies
        assert by_heads * copies * by_slots == n and cfg.layers[0].attention.K % by_heads == 0
