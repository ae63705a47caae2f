"""Attention against plain numpy, and the TPU kernels (interpreted) against the reference.

Wherever nothing may be read there is NaN.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_checks import exact, kv_of, numpy_attention, poisoned

import ragged_attention
from ops import attention, cpu, tpu
from ops.kv_cache import SlotLayout

B, T, K, G, H, S = 3, 2, 2, 3, 8, 20
LATENT = SlotLayout(key=576, value=(0, 512), scale=1 / 16)  # of 640 columns, the last of them unused

deep = partial(pytest.param, marks=pytest.mark.deep)


def compare(result, expected, atol=1e-5):
    for ours, theirs in zip(result, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=atol)


# Of kernels: bfloat16 probabilities, and int8 queries of 16 bits, round where products of float32 do not.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 1e-2}


def inputs():
    rng = np.random.default_rng(0)
    return rng.standard_normal((B, T, K, G, H)), rng.standard_normal((B, K, S, 2 * H))


def slots_seen(length, gap=None, slots: int = S) -> np.ndarray:
    """Which slots are within a length [...] and outside of a gap of two [...]: [...,slots] bool."""
    at = np.arange(slots)
    seen = at < np.asarray(length)[..., None]
    return seen if gap is None else seen & ((at < gap[0][..., None]) | (at >= gap[1][..., None]))


def check_cached(q, values, length, gap=None, dtype="float32", atol=1e-5, module=ragged_attention) -> None:
    """Queries [B,T,K,G,H] against slots [B,K,S,C], of which each sees the first [B,T], but for a gap."""
    kv, mask = kv_of(values, dtype), slots_seen(length, gap, values.shape[2])
    gap = gap and tuple(map(jnp.int32, gap))
    result = module.attend_cached(q, poisoned(kv, mask.any(1)), jnp.int32(length), gap)
    compare(result, numpy_attention(q, *exact(kv), mask), atol)


# 0 and 1 slots, and one less, as many and one more than whole blocks of 4.
@pytest.mark.parametrize("lengths", [(0, 1, 20), (3, 4, 5), (0, 0, 0), (19, 17, 8)])
@pytest.mark.parametrize(("block", "dtype"), [(3, "float32"), (4, "int8"), (64, "float32")])
@pytest.mark.parametrize("gap", [None, (0, 3), (5, 6)])
def test_cached(lengths, block, dtype, gap, monkeypatch):
    """Each query its own slots: of a row's first ones, but for a gap that moves on by one."""
    monkeypatch.setattr(attention, "BLOCK", block)
    q, values = inputs()
    length = np.where([[True, True], [True, False], [False, True]], np.array(lengths)[:, None], 0)
    gap = gap and tuple(np.full((B, T), at) + np.arange(T) * (at > 0) for at in gap)
    check_cached(jnp.float32(q), values, length, gap, dtype)


@pytest.mark.parametrize(
    ("rows", "gap"), [(None, None), (None, (2, 4)), ((2, 0), (2, 4)), ((1,), None), ((6, 0, 3), (2, 4))]
)
@pytest.mark.parametrize(("dtype", "loops"), [("float32", True), ("int8", True), ("float32", False)])
def test_cached_on_a_cpu(rows, gap, dtype, loops, monkeypatch):
    """One query per row, of all rows, of some in another order, and of one, in blocks of 4 slots.

    loops: by loops that read pairs of rows in place, or row by row by XLA's products.
    """
    lengths = (0, 1, 20, 7, 3, 4, 0, 5)
    monkeypatch.setattr(cpu, "BLOCK", 4 * K * 2 * H)
    monkeypatch.setattr(cpu, "TERMS", 4)
    monkeypatch.setattr(cpu, "reads_in_place", lambda *_: loops)
    monkeypatch.setattr(ragged_attention, "platform", lambda: "cpu")
    q, kv = (np.concatenate([x, -x, 2 * x[:2]]) for x in inputs())
    kv, at = kv_of(kv, dtype), np.array(rows or range(len(q)))
    hidden = gap and tuple(np.full(len(q), n) for n in gap)
    mask = slots_seen(lengths, hidden)
    expected = numpy_attention(q[at][:, :1], *(x[at] for x in exact(kv)), mask[at][:, None])
    hidden = gap and tuple(jnp.int32(x)[at][:, None] for x in hidden)
    length, row = jnp.int32(lengths)[at][:, None], rows and jnp.int32(rows)
    result = ragged_attention.attend_cached(
        jnp.float32(q)[at][:, :1], poisoned(kv, mask), length, hidden, row
    )
    compare(result, expected)


def check_causal(segment: np.ndarray, width: int, window: int | None, dtype="float32") -> None:
    """Each token sees those before it, within its segment [B,T] and within a window."""
    rng, (B, T) = np.random.default_rng(0), segment.shape
    q, kv = rng.standard_normal((B, T, K, G, width)), rng.standard_normal((B, K, T, 2 * width))
    back, kv = np.arange(T)[:, None] - np.arange(T), kv_of(kv, dtype)
    mask = (back >= 0) & (back < (window or T)) & (segment[..., None] == segment[:, None])
    result = ragged_attention.attend_causal(jnp.float32(q), kv, jnp.int32(segment), window)
    compare(result, numpy_attention(q, *exact(kv), mask))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_causal(window, dtype):
    segment = np.array([[0] * 9, [0] * 4 + [1] * 5, [3, 3, 4, 4, 4, 4, 5, 5, 5]])
    check_causal(segment, H, window, dtype)


# ----------------------------------------------------------------------------- the TPU kernels, interpreted

# Empty, one slot, one less, as many and one more than a block, and full; and where the new token goes: the
# last slot, one in the middle, or none, which is the slot after all.
LENGTHS = np.array([0, 1, 127, 128, 129, 384, 384, 300, 10])
PLACES = np.array([384, 0, 126, 127, 128, 383, 384, 200, 384])
# Of each case, which slots are hidden: none, the first, some in the middle, all.
GAPS = np.array([(0, 0), (0, 0), (0, 5), (0, 127), (100, 128), (0, 130), (10, 384), (130, 199), (0, 383)])


# Of each kind one, and of the blocks all; the widest arrays take long.
@pytest.mark.parametrize(
    ("width", "dtype", "blocks", "with_gap"),
    [
        (64, "int8", (512, 256), True),
        (64, "bfloat16", (256, 128), False),
        (128, "float32", (128, 128), True),
        (576, "int8", (512, 256), False),
        deep(64, "int8", (128, 128), True),
        deep(128, "int8", (256, 128), False),
        deep(256, "int8", (512, 256), True),
        deep(576, "bfloat16", (512, 256), True),
        deep(576, "float32", (128, 128), True),
    ],
)
def test_ragged_decode_kernel(width, dtype, blocks, with_gap, monkeypatch, interpret):
    """The kernel against float64 numpy: its attention, its write, and nothing else of the cache touched.

    256 does not divide the 384 slots: the second block overlaps the first.
    """
    monkeypatch.setattr(ragged_attention, "GROUP", 7)  # of 18 rows x heads: the last group has 4
    rng, (B, S, K, G) = np.random.default_rng(0), (len(LENGTHS), 384, 2, 3)
    length, place = LENGTHS, PLACES
    hidden, layout = GAPS.T if with_gap else None, LATENT if width == 576 else None
    q = jnp.asarray(rng.standard_normal((B, 1, K, G, width)), "bfloat16" if dtype == "int8" else dtype)
    C = LATENT.width if layout else 2 * width
    kv, new = (kv_of(rng.standard_normal((B, K, n, C)), dtype, layout) for n in (S, 1))
    mask, slots = slots_seen(length, hidden, S), np.arange(S)
    cache = poisoned(kv, mask & (slots != place[:, None]))
    gap = None if hidden is None else tuple(map(jnp.int32, hidden))
    options = dict(new=new, place=jnp.int32(place), blocks=blocks, interpret=interpret)
    result, found = ragged_attention.ragged_attention_tpu(q, cache, jnp.int32(length), gap, **options)

    written = attention.write(cache, new, jnp.int32(place)[:, None])
    # In the tile of a new float token, slots that nobody reads may have become zeros. All else is as it was.
    beside = (slots // 32 == place[:, None] // 32) & ~mask & (dtype != "int8")
    ours, expected = (np.where(beside[:, None, :, None], 0, np.float32(x.values)) for x in (found, written))
    np.testing.assert_array_equal(ours, expected)
    if dtype == "int8":
        np.testing.assert_array_equal(np.float32(found.scale), np.float32(written.scale))
    keys, values = (np.where(mask[:, None, :, None], x, 0) for x in exact(written))
    compare(result, numpy_attention(q, keys, values, mask[:, None], kv.layout.scale), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("width", "dtype", "with_gap", "blocks"),
    [
        (64, "int8", True, (512, 256)),
        deep(64, "bfloat16", False, (256, 128)),
        deep(128, "float32", True, (512, 256)),
    ],
)
def test_cached_by_the_decode_kernel(width, dtype, with_gap, blocks, monkeypatch, interpret):
    """Several queries per row, some of which see nothing, of a cache to which nothing is written."""
    monkeypatch.setattr(ragged_attention, "platform", lambda: "tpu")
    monkeypatch.setattr(ragged_attention, "GROUP", 21)
    monkeypatch.setattr(ragged_attention, "SCORES", 9 * 256)  # blocks of 512 are too large
    kernel = partial(ragged_attention.ragged_attention_tpu, blocks=blocks, interpret=interpret)
    monkeypatch.setattr(ragged_attention, "ragged_attention_tpu", kernel)
    rng, (B, S, T, K, G) = np.random.default_rng(0), (len(LENGTHS), 384, 3, 2, 3)
    length = np.where(np.arange(T) < np.arange(B)[:, None] % (T + 1), LENGTHS[:, None], 0)
    gap = tuple(x[:, None] + np.arange(T) * (x[:, None] > 0) for x in GAPS.T) if with_gap else None
    q = jnp.asarray(rng.standard_normal((B, T, K, G, width)), "bfloat16" if dtype == "int8" else dtype)
    check_cached(q, rng.standard_normal((B, K, S, 2 * width)), length, gap, dtype, TOLERANCE[dtype])


@pytest.mark.parametrize("stacked", [False, True])
def test_merge(stacked):
    """Two halves of the keys, one of them empty for some rows, join to the whole."""
    q, kv = inputs()
    mask = np.zeros((B, T, S), bool)
    mask[0, :, :15] = mask[1, :, 12:] = True  # row 0 sees both halves, row 1 the second, row 2 nothing
    expected = numpy_attention(q, kv[..., :H], kv[..., H:], mask)
    parts = slice(10), slice(10, S)
    halves = [attention.attend(jnp.float32(q), kv_of(kv[:, :, s]), mask[..., s]) for s in parts]
    halves = [tuple(map(jnp.stack, zip(*halves, strict=True)))] if stacked else halves
    compare(attention.merge(*halves, stacked=stacked), expected)


@pytest.mark.parametrize("window", [None, 100])
def test_splash(window):
    """The library's kernel: scores, scale, masks, segments and log-sum-exp mean what they do in `attend`."""
    rng = np.random.default_rng(0)
    B, T, S, K, G, H = 2, 256, 384, 2, 3, 32
    q = rng.standard_normal((B, T, K, G, H))
    k, v = rng.standard_normal((2, B, K, S, H))
    # Queries of segment 9 see nothing at all.
    q_segment = np.stack([np.arange(T) // 100, np.where(np.arange(T) < 200, 1, 9)])
    kv_segment = np.stack([np.arange(S) // 100, np.arange(S) < 300])
    back = np.arange(T)[:, None] - np.arange(S)
    mask = (back >= 0) & (back < (window or S)) & (q_segment[..., None] == kv_segment[:, None])
    shape, masks = (T, S), tpu.masks
    causal = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    segments = jnp.int32(q_segment), jnp.int32(kv_segment)
    result = tpu.splash(*map(jnp.float32, (q, k, v)), H**-0.5, causal, *segments, interpret=True)
    compare(result, numpy_attention(q, k, v, mask))


def test_cached_by_splash(monkeypatch):
    """A piece of a prompt against an int8 cache, in blocks, the last of which overlaps."""
    rng = np.random.default_rng(0)
    B, T, K, G, H, S = 3, 128, 1, 2, 32, 384
    q, kv = rng.standard_normal((B, T, K, G, H)), rng.standard_normal((B, K, S, 2 * H))
    length = np.where(np.arange(T) < np.array([[128], [50], [128]]), [[0], [200], [384]], 0)
    monkeypatch.setattr(attention, "BLOCK", 256)
    monkeypatch.setattr(tpu, "read_block", lambda kv, B, _, *at: attention.read_block(kv, [(0, B)], *at))
    monkeypatch.setattr(tpu, "splash", partial(tpu.splash, interpret=True))
    check_cached(jnp.float32(q), kv, length, dtype="int8", module=tpu)
