"""Attention against plain numpy, and the TPU kernels (interpreted) against the reference.

Wherever nothing may be read there is NaN.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

import ragged_attention
from ops import attention
from ops.attention import masks
from quantize import quantize
from ragged_attention import KV

B, T, K, G, H, S = 3, 2, 2, 3, 8, 20


def numpy_attention(q, k, v, mask):
    """q [B,T,K,G,H], k, v [B,K,S,H], mask [B,T,S], in float64 -> (o, lse)."""
    scores = np.einsum("BTKGH,BKSH->BTKGS", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(mask[:, :, None, None], scores, -np.inf)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(scores).sum(-1))
    p = np.exp(scores - np.where(np.isfinite(lse), lse, 0)[..., None])
    return np.einsum("BTKGS,BKSH->BTKGH", p, v), lse


def inputs():
    rng = np.random.default_rng(0)
    return rng.standard_normal((B, T, K, G, H)), rng.standard_normal((B, K, S, 2 * H))


def compare(result, expected, atol=1e-5):
    for ours, theirs in zip(result, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=atol)


deep = partial(pytest.param, marks=pytest.mark.deep)


# 0 and 1 slots, and one less, as many and one more than whole blocks of 4.
@pytest.mark.parametrize("lengths", [(0, 1, 20), (3, 4, 5), (0, 0, 0), (19, 17, 8)])
@pytest.mark.parametrize("block", [3, 4, 64])
@pytest.mark.parametrize("start", [0, 3])
def test_cached(lengths, block, start, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", block)
    q, kv = inputs()
    length, first = np.array(lengths), np.full(B, start)
    sees = np.array([[True, True], [True, False], [False, True]])
    slots = np.arange(S)
    filled = (slots < length[:, None]) & (slots >= first[:, None])
    expected = numpy_attention(q, kv[..., :H], kv[..., H:], filled[:, None] & sees[..., None])
    poisoned = KV(jnp.float32(np.where(filled[:, None, :, None], kv, np.nan)), None)
    length, first = jnp.int32(length), jnp.int32(first)
    compare(attention.attend_cached(jnp.float32(q), poisoned, length, first, sees), expected)


def quantized_kv(kv: np.ndarray) -> KV:
    """[B,K,S,2H] float -> int8 with scales [B,K,2,S]."""
    both = quantize(jnp.float32(kv).reshape(*kv.shape[:3], 2, -1), (4,), jnp.bfloat16)
    return KV(both.values.reshape(kv.shape), both.scale.swapaxes(2, 3))


def exact(kv: KV) -> tuple[np.ndarray, np.ndarray]:
    """The keys and values that a KV stands for, [B,K,S,H] float64."""
    halves = np.split(np.asarray(kv.values, np.float64), 2, -1)
    if kv.scale is None:
        return tuple(halves)
    return tuple(x * np.asarray(kv.scale, np.float64)[:, :, i, :, None] for i, x in enumerate(halves))


def test_cached_int8():
    """Scales of keys and values each reach their own product; unused ones may be NaN."""
    q, kv = inputs()
    length = np.array([1, 7, 20])
    quantized = quantized_kv(kv)
    used = np.arange(S) < length[:, None]
    poisoned = KV(quantized.values, jnp.where(used[:, None, None], quantized.scale, jnp.nan))
    mask = np.repeat(used[:, None], T, 1)
    compare(
        attention.attend_cached(jnp.float32(q), poisoned, jnp.int32(length)),
        numpy_attention(q, *exact(quantized), mask),
    )


@pytest.mark.parametrize("window", [None, 3])
def test_causal(window):
    """Causal, within a segment, and within a window."""
    rng = np.random.default_rng(0)
    T = 9
    q, k, v = (rng.standard_normal((B, T, K, *rest)) for rest in ((G, H), (H,), (H,)))
    segment = np.array([[0] * 9, [0] * 4 + [1] * 5, [3, 3, 4, 4, 4, 4, 5, 5, 5]])
    expected = [
        [s[j] == s[i] and i - (window or T) < j <= i for j in range(T)] for s in segment for i in range(T)
    ]
    mask = np.array(expected).reshape(B, T, T)
    both = np.concatenate([k, v], -1).swapaxes(1, 2)
    for kv in (KV(jnp.float32(both), None), quantized_kv(both)):
        result = attention.attend_causal(jnp.float32(q), kv, jnp.int32(segment), window)
        compare(result, numpy_attention(q, *exact(kv), mask))


# ----------------------------------------------------------------------------- the TPU kernels, interpreted

# Empty, one slot, one less, as many and one more than a block, and full; and where the new token goes: the
# last slot, one in the middle, or none.
CASES = [
    (0, None),
    (1, 0),
    (127, 126),
    (128, 127),
    (129, 128),
    (384, 383),
    (384, None),
    (300, 200),
    (10, None),
]
STARTS = [0, 0, 5, 127, 128, 130, 384, 199, 383]  # the last one is beyond the row's length


BLOCKS = [((128, 128), True), ((256, 128), False), ((512, 256), False), ((512, 256), True)]
KINDS = [(64, "int8"), (128, "int8"), (64, "bfloat16"), (128, "float32")]


# Of each kind one, and of the blocks all.
@pytest.mark.parametrize(
    ("width", "dtype", "blocks", "with_start"),
    [
        pytest.param(*kind, *blocks, marks=[pytest.mark.deep] * (KINDS.index(kind) != BLOCKS.index(blocks)))
        for kind in KINDS
        for blocks in BLOCKS
    ],
)
def test_ragged_decode_kernel(width, dtype, blocks, with_start, monkeypatch, interpret):
    """The kernel against float64 numpy: its attention, its write, and nothing else of the cache touched.

    256 does not divide the 384 slots: the second block overlaps the first.
    """
    monkeypatch.setattr(ragged_attention, "GROUP", 7)  # of 18 rows x heads: the last group has 4
    rng, (B, S, K, G) = np.random.default_rng(0), (len(CASES), 384, 2, 3)
    length = np.array([n for n, _ in CASES])
    place = np.array([S if at is None else at for _, at in CASES])
    start = np.array(STARTS) if with_start else np.zeros(B, int)
    slots = np.arange(S)
    q = jnp.asarray(rng.standard_normal((B, 1, K, G, width)), "bfloat16" if dtype == "int8" else dtype)
    kv, new = rng.standard_normal((B, K, S, 2 * width)), rng.standard_normal((B, K, 1, 2 * width))
    if dtype == "int8":
        kv, new = quantized_kv(kv), quantized_kv(new)
    else:
        kv, new = (KV(jnp.asarray(x, dtype), None) for x in (kv, new))
    unused = (slots >= length[:, None]) | (slots < start[:, None]) | (slots == place[:, None])
    unused = unused[:, None]  # BKS
    if dtype == "int8":
        poisoned = KV(kv.values, jnp.where(unused[:, :, None], jnp.nan, kv.scale))
    else:
        poisoned = KV(jnp.where(unused[..., None], jnp.nan, kv.values), None)
    starts = jnp.int32(start) if with_start else None
    options = dict(new=new, place=jnp.int32(place), blocks=blocks, interpret=interpret)
    (o, lse), cache = ragged_attention.ragged_attention_tpu(q, poisoned, jnp.int32(length), starts, **options)

    written = attention.write(poisoned, new, jnp.int32(place)[:, None])
    mask = (slots < length[:, None]) & (slots >= start[:, None])
    # In the tile of a new float token, slots that nobody reads may have become zeros. All else is as it was.
    beside = (slots // 32 == place[:, None] // 32) & ~mask & (dtype != "int8")
    ours, expected = (np.where(beside[:, None, :, None], 0, np.float32(x.values)) for x in (cache, written))
    np.testing.assert_array_equal(ours, expected)
    if dtype == "int8":
        np.testing.assert_array_equal(np.float32(cache.scale), np.float32(written.scale))
    keys, values = (np.where(mask[:, None, :, None], x, 0) for x in exact(written))
    expected = numpy_attention(np.asarray(q, np.float64), keys, values, mask[:, None])
    # bfloat16 probabilities, and int8 queries of 16 bits: the kernel's products round where float32's do not.
    tolerance = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 1e-2}[dtype]
    compare((o, lse), expected, tolerance)


@pytest.mark.parametrize(
    ("width", "dtype", "with_start", "blocks"),
    [
        (64, "int8", True, (512, 256)),
        deep(128, "int8", False, (256, 128)),
        deep(64, "bfloat16", False, (256, 128)),
        deep(128, "float32", True, (512, 256)),
    ],
)
def test_cached_by_the_decode_kernel(width, dtype, with_start, blocks, monkeypatch, interpret):
    """Several queries per row, some of which see nothing, of a cache to which nothing is written."""
    monkeypatch.setattr(attention, "on_tpu", lambda: True)
    monkeypatch.setattr(ragged_attention, "GROUP", 21)
    monkeypatch.setattr(ragged_attention, "SCORES", 9 * 256)  # blocks of 512 are too large
    kernel = partial(ragged_attention.ragged_attention_tpu, blocks=blocks, interpret=interpret)
    monkeypatch.setattr(attention, "ragged_attention_tpu", kernel)
    rng, (B, S, T, K, G) = np.random.default_rng(0), (len(CASES), 384, 3, 2, 3)
    length = np.array([n for n, _ in CASES])
    start = np.array(STARTS) if with_start else np.zeros(B, int)
    sees = np.arange(T) < np.arange(B)[:, None] % (T + 1)
    used = (np.arange(S) < length[:, None]) & (np.arange(S) >= start[:, None])
    q = jnp.asarray(rng.standard_normal((B, T, K, G, width)), "bfloat16" if dtype == "int8" else dtype)
    kv = rng.standard_normal((B, K, S, 2 * width))
    kv = quantized_kv(kv) if dtype == "int8" else KV(jnp.asarray(kv, dtype), None)
    if dtype == "int8":
        poisoned = KV(kv.values, jnp.where(used[:, None, None], kv.scale, jnp.nan))
    else:
        poisoned = KV(jnp.where(used[:, None, :, None], kv.values, jnp.nan), None)
    starts = jnp.int32(start) if with_start else None
    result = attention.attend_cached(q, poisoned, jnp.int32(length), starts, jnp.array(sees))
    expected = numpy_attention(np.asarray(q, np.float64), *exact(kv), used[:, None] & sees[..., None])
    compare(result, expected, {"float32": 1e-5, "bfloat16": 1e-2, "int8": 1e-2}[dtype])


def test_merge():
    """Two halves of the keys, one of them empty for some rows, join to the whole."""
    q, kv = inputs()
    mask = np.zeros((B, T, S), bool)
    mask[0, :, :15] = mask[1, :, 12:] = True  # row 0 sees both halves, row 1 the second, row 2 nothing
    expected = numpy_attention(q, kv[..., :H], kv[..., H:], mask)
    q32, k, v = jnp.float32(q), jnp.float32(kv[..., :H]), jnp.float32(kv[..., H:])
    halves = [attention.attend(q32, k[:, :, s], v[:, :, s], mask[..., s]) for s in (slice(10), slice(10, S))]
    compare(attention.merge(*halves), expected)


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
    shape = (T, S)
    causal = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    result = attention.splash(
        *map(jnp.float32, (q, k, v)), causal, jnp.int32(q_segment), jnp.int32(kv_segment), interpret=True
    )
    compare(result, numpy_attention(q, k, v, mask))


def test_cached_by_splash(monkeypatch):
    """A piece of a prompt against an int8 cache, in blocks, the last of which overlaps."""
    rng = np.random.default_rng(0)
    B, T, K, G, H, S = 3, 128, 1, 2, 32, 384
    q, kv = rng.standard_normal((B, T, K, G, H)), rng.standard_normal((B, K, S, 2 * H))
    length = np.array([0, 200, 384])
    used = np.arange(S) < length[:, None]
    sees = np.arange(T) < np.array([128, 50, 128])[:, None]
    quantized = quantized_kv(kv)
    poisoned = KV(quantized.values, jnp.where(used[:, None, None], quantized.scale, jnp.nan))
    monkeypatch.setattr(attention, "BLOCK", 256)
    monkeypatch.setattr(attention, "use_splash", lambda q: True)
    monkeypatch.setattr(attention, "splash", partial(attention.splash, interpret=True))
    result = attention.attend_cached(jnp.float32(q), poisoned, jnp.int32(length), sees=jnp.array(sees))
    compare(result, numpy_attention(q, *exact(quantized), used[:, None] & sees[..., None]))
