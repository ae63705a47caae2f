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
from ops.kv_cache import KV, SlotLayout, key_beside_value
from quantize import quantize

B, T, K, G, H, S = 3, 2, 2, 3, 8, 20


def numpy_attention(q, k, v, mask, scale=None):
    """q [B,T,K,G,H], k, v [B,K,S,H], mask [B,T,S], in float64 -> (o, lse)."""
    scores = np.einsum("BTKGH,BKSH->BTKGS", q, k) * (scale or q.shape[-1] ** -0.5)
    scores = np.where(mask[:, :, None, None], scores, -np.inf)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(scores).sum(-1))
    p = np.exp(scores - np.where(np.isfinite(lse), lse, 0)[..., None])
    return np.einsum("BTKGS,BKSH->BTKGH", p, v), lse


LATENT = SlotLayout(key=576, value=(0, 512), scale=1 / 16)  # of 640 columns, the last of them unused


def kv_of(values, scale=None, columns=None) -> KV:
    """By default keys beside values [B,K,S,2H]."""
    return KV(values, scale, columns or key_beside_value(values.shape[-1] // 2))


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
@pytest.mark.parametrize("gap", [None, (0, 3), (5, 6)])
def test_cached(lengths, block, gap, monkeypatch):
    """Each query its own slots: of a row's first ones, but for a gap that moves on by one."""
    monkeypatch.setattr(attention, "BLOCK", block)
    q, kv = inputs()
    length = np.where([[True, True], [True, False], [False, True]], np.array(lengths)[:, None], 0)
    hidden = gap and tuple(np.full((B, T), at) + np.arange(T) * (at > 0) for at in gap)
    slots = np.arange(S)
    mask = slots < length[..., None]
    if gap:
        mask &= (slots < hidden[0][..., None]) | (slots >= hidden[1][..., None])
    expected = numpy_attention(q, kv[..., :H], kv[..., H:], mask)
    poisoned = kv_of(jnp.float32(np.where(mask.any(1)[:, None, :, None], kv, np.nan)))
    length, hidden = jnp.int32(length), gap and tuple(map(jnp.int32, hidden))
    compare(attention.attend_cached(jnp.float32(q), poisoned, length, hidden), expected)


@pytest.mark.parametrize("lengths", [(0, 1, 20, 7), (3, 4, 0, 5)])
@pytest.mark.parametrize("rows", [None, (2, 0), (1,), (3, 0, 1)])
@pytest.mark.parametrize("gap", [None, (2, 4)])
@pytest.mark.parametrize(("int8", "loops"), [(False, True), (True, True), (False, False)])
def test_cached_on_a_cpu(lengths, rows, gap, int8, loops, monkeypatch):
    """One query per row, of all rows, of some in another order, and of one, in blocks of 4 slots.

    loops: by loops that read pairs of rows in place, or row by row by XLA's products.
    """
    monkeypatch.setattr(attention, "CPU_BLOCK", 4 * K * 2 * H)
    monkeypatch.setattr(attention.cpu, "TERMS", 4)
    monkeypatch.setattr(attention, "on_cpu", lambda: True)
    monkeypatch.setattr(attention.cpu, "reads_in_place", lambda *_: loops)
    q, kv = (np.concatenate([x, -x[:1]]) for x in inputs())
    at, slots = np.array(rows or range(len(q))), np.arange(S)
    mask = slots < np.array(lengths)[:, None]
    if gap:
        mask &= (slots < gap[0]) | (slots >= gap[1])
    cache = quantized_kv(kv) if int8 else kv_of(jnp.float32(kv))
    expected = numpy_attention(q[at][:, :1], *(x[at] for x in exact(cache)), mask[at][:, None])
    if int8:
        poisoned = kv_of(cache.values, jnp.where(mask[:, None, None], cache.scale, jnp.nan))
    else:
        poisoned = kv_of(jnp.where(mask[:, None, :, None], cache.values, jnp.nan))
    length = jnp.int32(lengths)[at][:, None]
    hidden = gap and tuple(jnp.full_like(length, n) for n in gap)
    row = rows and jnp.int32(rows)
    compare(attention.attend_cached(jnp.float32(q)[at][:, :1], poisoned, length, hidden, row), expected)


def quantized_kv(kv: np.ndarray, columns: SlotLayout | None = None) -> KV:
    """[B,K,S,C] float -> int8 with scales [B,K,2,S]: the same ones where the value is a part of the key."""
    parts = 1 if columns else 2
    both = quantize(jnp.float32(kv).reshape(*kv.shape[:3], parts, -1), (4,), jnp.bfloat16)
    scale = jnp.tile(both.scale.swapaxes(2, 3), (1, 1, 2 // parts, 1))
    return kv_of(both.values.reshape(kv.shape), scale, columns)


def exact(kv: KV) -> tuple[np.ndarray, np.ndarray]:
    """The keys and values that a KV stands for, [B,K,S,H] float64."""
    values = np.asarray(kv.values, np.float64)
    both = values[..., : kv.layout.key], values[..., slice(*kv.layout.value)]
    if kv.scale is None:
        return both
    return tuple(x * np.asarray(kv.scale, np.float64)[:, :, i, :, None] for i, x in enumerate(both))


def test_cached_int8():
    """Scales of keys and values each reach their own product; unused ones may be NaN."""
    q, kv = inputs()
    length = np.array([1, 7, 20])
    quantized = quantized_kv(kv)
    used = np.arange(S) < length[:, None]
    poisoned = kv_of(quantized.values, jnp.where(used[:, None, None], quantized.scale, jnp.nan))
    mask = np.repeat(used[:, None], T, 1)
    compare(
        attention.attend_cached(jnp.float32(q), poisoned, jnp.int32(length)[:, None].repeat(T, 1)),
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
    for kv in (kv_of(jnp.float32(both), None), quantized_kv(both)):
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
# Of each case, which slots are hidden: none, the first, some in the middle, all.
GAPS = np.array([(0, 0), (0, 0), (0, 5), (0, 127), (100, 128), (0, 130), (10, 384), (130, 199), (0, 383)])


BLOCKS = [((128, 128), True), ((256, 128), False), ((512, 256), False), ((512, 256), True)]
KINDS = [(64, "int8"), (128, "int8"), (64, "bfloat16"), (128, "float32")]
KINDS += [(576, "bfloat16"), (256, "int8"), (576, "int8"), (576, "float32")]


# Of each kind one, and of the blocks all.
@pytest.mark.parametrize(
    ("width", "dtype", "blocks", "with_gap"),
    [
        pytest.param(*kind, *blocks, marks=[pytest.mark.deep] * (i % 4 != j or i in (4, 5, 7)))
        for i, kind in enumerate(KINDS)
        for j, blocks in enumerate(BLOCKS)
    ],
)
def test_ragged_decode_kernel(width, dtype, blocks, with_gap, monkeypatch, interpret):
    """The kernel against float64 numpy: its attention, its write, and nothing else of the cache touched.

    256 does not divide the 384 slots: the second block overlaps the first.
    """
    monkeypatch.setattr(ragged_attention, "GROUP", 7)  # of 18 rows x heads: the last group has 4
    rng, (B, S, K, G) = np.random.default_rng(0), (len(CASES), 384, 2, 3)
    length = np.array([n for n, _ in CASES])
    place = np.array([S if at is None else at for _, at in CASES])
    low, high = GAPS.T if with_gap else np.zeros((2, B), int)
    slots, columns = np.arange(S), LATENT if width == 576 else None
    q = jnp.asarray(rng.standard_normal((B, 1, K, G, width)), "bfloat16" if dtype == "int8" else dtype)
    C = LATENT.width if columns else 2 * width
    kv, new = rng.standard_normal((B, K, S, C)), rng.standard_normal((B, K, 1, C))
    if dtype == "int8":
        kv, new = quantized_kv(kv, columns), quantized_kv(new, columns)
    else:
        kv, new = (kv_of(jnp.asarray(x, dtype), None, columns) for x in (kv, new))
    mask = (slots < length[:, None]) & ((slots < low[:, None]) | (slots >= high[:, None]))
    unused = (~mask | (slots == place[:, None]))[:, None]  # BKS
    if dtype == "int8":
        poisoned = kv_of(kv.values, jnp.where(unused[:, :, None], jnp.nan, kv.scale), columns)
    else:
        poisoned = kv_of(jnp.where(unused[..., None], jnp.nan, kv.values), None, columns)
    hidden = (jnp.int32(low), jnp.int32(high)) if with_gap else None
    options = dict(new=new, place=jnp.int32(place), blocks=blocks, interpret=interpret)
    (o, lse), cache = ragged_attention.ragged_attention_tpu(q, poisoned, jnp.int32(length), hidden, **options)

    written = attention.write(poisoned, new, jnp.int32(place)[:, None])
    # In the tile of a new float token, slots that nobody reads may have become zeros. All else is as it was.
    beside = (slots // 32 == place[:, None] // 32) & ~mask & (dtype != "int8")
    ours, expected = (np.where(beside[:, None, :, None], 0, np.float32(x.values)) for x in (cache, written))
    np.testing.assert_array_equal(ours, expected)
    if dtype == "int8":
        np.testing.assert_array_equal(np.float32(cache.scale), np.float32(written.scale))
    keys, values = (np.where(mask[:, None, :, None], x, 0) for x in exact(written))
    expected = numpy_attention(np.asarray(q, np.float64), keys, values, mask[:, None], kv.layout.scale)
    # bfloat16 probabilities, and int8 queries of 16 bits: the kernel's products round where float32's do not.
    tolerance = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 1e-2}[dtype]
    compare((o, lse), expected, tolerance)


@pytest.mark.parametrize(
    ("width", "dtype", "with_gap", "blocks"),
    [
        (64, "int8", True, (512, 256)),
        deep(128, "int8", False, (256, 128)),
        deep(64, "bfloat16", False, (256, 128)),
        deep(128, "float32", True, (512, 256)),
    ],
)
def test_cached_by_the_decode_kernel(width, dtype, with_gap, blocks, monkeypatch, interpret):
    """Several queries per row, some of which see nothing, of a cache to which nothing is written."""
    monkeypatch.setattr(attention, "on_tpu", lambda: True)
    monkeypatch.setattr(ragged_attention, "GROUP", 21)
    monkeypatch.setattr(ragged_attention, "SCORES", 9 * 256)  # blocks of 512 are too large
    kernel = partial(ragged_attention.ragged_attention_tpu, blocks=blocks, interpret=interpret)
    monkeypatch.setattr(attention, "ragged_attention_tpu", kernel)
    rng, (B, S, T, K, G) = np.random.default_rng(0), (len(CASES), 384, 3, 2, 3)
    length = np.array([n for n, _ in CASES])
    length = np.where(np.arange(T) < np.arange(B)[:, None] % (T + 1), length[:, None], 0)
    low, high = (x[:, None] + np.arange(T) * (x[:, None] > 0) for x in GAPS.T)  # each query another gap
    mask = np.arange(S) < length[..., None]
    if with_gap:
        mask &= (np.arange(S) < low[..., None]) | (np.arange(S) >= high[..., None])
    used = (np.arange(S) < length.max(1, keepdims=True)) if not with_gap else mask.any(1)
    q = jnp.asarray(rng.standard_normal((B, T, K, G, width)), "bfloat16" if dtype == "int8" else dtype)
    kv = rng.standard_normal((B, K, S, 2 * width))
    kv = quantized_kv(kv) if dtype == "int8" else kv_of(jnp.asarray(kv, dtype), None)
    if dtype == "int8":
        poisoned = kv_of(kv.values, jnp.where(used[:, None, None], kv.scale, jnp.nan))
    else:
        poisoned = kv_of(jnp.where(used[:, None, :, None], kv.values, jnp.nan), None)
    hidden = (jnp.int32(low), jnp.int32(high)) if with_gap else None
    result = attention.attend_cached(q, poisoned, jnp.int32(length), hidden)
    expected = numpy_attention(np.asarray(q, np.float64), *exact(kv), mask)
    compare(result, expected, {"float32": 1e-5, "bfloat16": 1e-2, "int8": 1e-2}[dtype])


@pytest.mark.parametrize("cpu", [False, True])
def test_merge(cpu, monkeypatch):
    """Two halves of the keys, one of them empty for some rows, join to the whole."""
    monkeypatch.setattr(attention, "on_cpu", lambda: cpu)
    q, kv = inputs()
    mask = np.zeros((B, T, S), bool)
    mask[0, :, :15] = mask[1, :, 12:] = True  # row 0 sees both halves, row 1 the second, row 2 nothing
    expected = numpy_attention(q, kv[..., :H], kv[..., H:], mask)
    parts = slice(10), slice(10, S)
    halves = [attention.attend(jnp.float32(q), kv_of(jnp.float32(kv[:, :, s])), mask[..., s]) for s in parts]
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
        *map(jnp.float32, (q, k, v)),
        H**-0.5,
        causal,
        jnp.int32(q_segment),
        jnp.int32(kv_segment),
        interpret=True,
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
    poisoned = kv_of(quantized.values, jnp.where(used[:, None, None], quantized.scale, jnp.nan))
    monkeypatch.setattr(attention, "BLOCK", 256)
    monkeypatch.setattr(attention, "use_splash", lambda q: True)
    monkeypatch.setattr(attention, "splash", partial(attention.splash, interpret=True))
    length = jnp.int32(np.where(sees, length[:, None], 0))
    result = attention.attend_cached(jnp.float32(q), poisoned, length)
    compare(result, numpy_attention(q, *exact(quantized), used[:, None] & sees[..., None]))
