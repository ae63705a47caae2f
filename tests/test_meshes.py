"""One device is the truth for many: the same tokens and log-probabilities, and few collectives."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, llama3_config, llama4_config, mesh_of
from jax.sharding import PartitionSpec as P

import main
import model

LENGTHS = (1, 5, 8, 9, 17, 20, 3, 16)
NEW = 10
# Sums in another order, in float32: 1e-5 was seen.
TOLERANCE = 1e-4


def generate(cfg, mesh, prompts, quantized=False, kv_dtype="float32", **options):
    weights = model.init_weights(jax.random.key(0), cfg, mesh, quantized=quantized)
    return main.generate(
        weights, prompts, cfg, mesh, NEW, 48, kv_dtype, model.Sampling(), score=True, **options
    )


def prompts_for(cfg, lengths=LENGTHS):
    rng = np.random.default_rng(0)
    return [rng.integers(0, cfg.V, n).tolist() for n in lengths]


def assert_same(result, expected, prompts, atol=TOLERANCE):
    assert result.tokens == expected.tokens
    np.testing.assert_allclose(result.logprobs, expected.logprobs, atol=atol)
    for i, prompt in enumerate(prompts):
        ours, theirs = result.prompt_logprobs[i], expected.prompt_logprobs[i]
        np.testing.assert_allclose(ours[: len(prompt) - 1], theirs[: len(prompt) - 1], atol=atol)


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


@pytest.mark.parametrize("name", [name for name in MESHES if name != "1"])
def test_llama4(name, expected):
    """2 key/value heads with 5 queries each: shared heads, padded queries, and every kind of layer."""
    cfg = llama4_config()
    assert_same(generate(cfg, mesh_of(cfg, name), prompts_for(cfg)), expected(cfg), prompts_for(cfg))


@pytest.mark.parametrize("name", ["tp8", "ep2-tp4"])
def test_llama4_int8(name, expected):
    """int8 weights and cache: scales are sharded as their arrays are."""
    cfg, options = llama4_config(), dict(quantized=True, kv_dtype="int8")
    result = generate(cfg, mesh_of(cfg, name), prompts_for(cfg), **options)
    # A difference in the last bit can round a cached value to the next of its 255 steps.
    assert_same(result, expected(cfg, **options), prompts_for(cfg), atol=5e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_llama3_whole_heads(tied, expected):
    """As many key/value heads as devices."""
    cfg = llama3_config(tied_embeddings=tied)
    assert_same(generate(cfg, mesh_of(cfg, "tp8"), prompts_for(cfg)), expected(cfg), prompts_for(cfg))


def test_long_cache_is_read_in_blocks(expected, monkeypatch):
    """A cache longer than the reference's block, with shared heads: the loop over blocks inside shard_map."""
    cfg = llama4_config()
    weights = model.init_weights(jax.random.key(0), cfg, mesh := mesh_of(cfg, "ep2-tp4"))
    monkeypatch.setattr("ragged_attention.BLOCK", 2)
    monkeypatch.setattr("ragged_attention.DECODE_BLOCK", 2)
    result = main.generate(
        weights, prompts_for(cfg), cfg, mesh, NEW, 56, "float32", model.Sampling(), score=True
    )  # fmt: skip
    assert_same(result, expected(cfg), prompts_for(cfg))


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", ["1", "tp8"])
def test_unwritten_slots_are_never_read(kv_dtype, name, monkeypatch):
    """A cache that starts full of NaN (or of 127 x NaN) changes nothing, in one piece or in several."""
    cfg = llama4_config()
    clean = generate(cfg, mesh_of(cfg, name), prompts_for(cfg), kv_dtype=kv_dtype)
    init_cache = model.init_cache

    def poisoned(*arguments):
        def poison(x):
            full = {"int8": 127, "int32": 0}.get(x.dtype.name, jnp.nan)
            return jax.device_put(jnp.full_like(x, full), x.sharding)

        return jax.tree.map(poison, init_cache(*arguments))

    monkeypatch.setattr(model, "init_cache", poisoned)
    assert_same(
        generate(cfg, mesh_of(cfg, name), prompts_for(cfg), kv_dtype=kv_dtype), clean, prompts_for(cfg)
    )
    # In pieces a later one reads what an earlier one wrote; to int8 precision if the cache is int8.
    monkeypatch.setattr(model, "PIECE", 16)
    in_pieces = generate(cfg, mesh_of(cfg, name), prompts_for(cfg), kv_dtype=kv_dtype)
    if kv_dtype == "float32":
        assert_same(in_pieces, clean, prompts_for(cfg))
    assert np.isfinite(in_pieces.logprobs).all()


@pytest.mark.parametrize("name", ["1", "tp8"])
@pytest.mark.parametrize("chunk", [None, 8])
def test_places(name, chunk):
    """Each kept token has one place on one device, though a span of 20 goes around a ring of 8."""
    cfg, T, capacity = llama4_config(), 20, 40
    mesh = mesh_of(cfg, name)
    slots = model.mesh_size(mesh, model.SLOTS)
    start, count = np.array([0, 5, 8, 13]), np.array([20, 0, 3, 17])

    @partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(None, None, model.MODEL))
    def on_devices(start, count):
        return model.places(model.span_at(start, count, T, cfg), chunk, capacity)[..., None]

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


def test_prefill_does_not_copy_the_cache():
    """A piece needs far less memory than a long cache, which XLA copies if it is read before written."""
    cfg = llama3_config()
    mesh = mesh_of(cfg)
    weights = model.init_weights(jax.random.key(0), cfg, mesh)
    cache = model.init_cache(cfg, mesh, 1, 32768, "float32")
    seeds, static = np.zeros(1, np.uint32), dict(sampling=model.Sampling(), cfg=cfg, mesh=mesh)
    [piece] = model.pieces([[1] * 64])
    compiled = model.step.lower(piece, seeds, weights, cache, **static).compile()
    one_layer = cache.layers[0].values.nbytes
    assert compiled.memory_analysis().temp_size_in_bytes < one_layer / 2


def test_rows_do_not_see_one_another():
    """Each row of a batch of unlike lengths answers as it does alone."""
    cfg = llama4_config()
    prompts = prompts_for(cfg)
    together = generate(cfg, mesh_of(cfg), prompts)
    for i in (0, 3, 5):
        alone = generate(cfg, mesh_of(cfg), [prompts[i]])
        assert alone.tokens == [together.tokens[i]]
        np.testing.assert_allclose(alone.logprobs, [together.logprobs[i]], atol=TOLERANCE)


def test_prompts_that_fill_no_data_shard():
    """3 prompts on dp8: the rows that pad the batch leave no trace."""
    cfg = llama3_config()
    prompts = prompts_for(cfg, (4, 9, 2))
    assert_same(generate(cfg, mesh_of(cfg, "dp8"), prompts), generate(cfg, mesh_of(cfg), prompts), prompts)


def collectives(cfg: model.Config, name: str) -> dict[str, int]:
    """How often each kind of collective stands in the compiled decode step."""
    mesh = mesh_of(cfg, name)
    weights = model.init_weights(jax.random.key(0), cfg, mesh)
    cache = model.init_cache(cfg, mesh, 8, 48, "float32")
    token = model.Piece(tokens=np.zeros((8, 1), np.int32), count=np.ones(8, np.int32))
    seeds = np.zeros(8, np.uint32)
    lowered = model.step.lower(token, seeds, weights, cache, sampling=model.Sampling(), cfg=cfg, mesh=mesh)
    hlo = lowered.compile().as_text()
    kinds = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
    return {kind: len(re.findall(rf" {kind}(?:-start)?\(", hlo)) for kind in kinds}


@pytest.mark.parametrize("kind", [model.LayerKind(), model.LayerKind(chunk=8, moe=True)])
@pytest.mark.parametrize(
    ("kv_heads", "name", "expected"),
    [
        (8, "tp8", {"all-reduce": 2}),
        (8, "ep4-tp2", {"all-reduce": 2}),
        (2, "tp8", {"all-reduce": 2, "all-gather": 1, "all-to-all": 1}),
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
def test_mesh_axes_multiply_out(n, heads):
    """For any degrees that the model allows, heads x slots and expert x tensor are the same devices."""
    cfg = llama4_config(K=heads, H=128, E=16)
    for expert in (expert for expert in (1, 2, 4, 8, 16) if n % expert == 0):
        mesh = model.mesh_shape(cfg, 1, expert, n // expert)
        groups = (model.HEADS, model.SLOTS, model.EXPERT, model.TENSOR)
        by_heads, by_slots, by_expert, by_tensor = (math.prod(mesh[axis] for axis in axes) for axes in groups)
        assert (by_expert, by_tensor) == (expert, n // expert)
        assert by_heads * by_slots == n and cfg.K % by_heads == 0


@pytest.mark.parametrize(("rows", "width"), [(1, 512), (8, 512), (9, 256), (128, 32), (5000, 16)])
def test_pieces_bound_the_tokens_of_a_step(rows, width):
    """All tokens are in some piece, in order; of many rows the pieces are short."""
    prompts = [[7] * 3] * (rows - 1) + [list(range(600))]
    cut = model.pieces(prompts)
    assert cut[0].tokens.shape == (rows, width)
    assert sum(int(piece.count[0]) for piece in cut) == len(prompts[0])
    assert np.concatenate([piece.tokens[-1, : piece.count[-1]] for piece in cut]).tolist() == prompts[-1]
