"""The reference attention against plain numpy, with NaN wherever nothing may be read."""

import jax.numpy as jnp
import numpy as np
import pytest

import ragged_attention
from quantize import quantize

B, T, K, G, H, S = 3, 2, 2, 3, 8, 20


def numpy_attention(q, k, v, mask):
    """q [B,T,K,G,H], k, v [B,K,S,H], mask [B,T,S], in float64 -> (o, lse)."""
    scores = np.einsum("BTKGH,BKSH->BTKGS", q, k) / np.sqrt(H)
    scores = np.where(mask[:, :, None, None], scores, -np.inf)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(scores).sum(-1))
    p = np.exp(scores - np.where(np.isfinite(lse), lse, 0)[..., None])
    return np.einsum("BTKGS,BKSH->BTKGH", p, v), lse


def inputs():
    rng = np.random.default_rng(0)
    return rng.standard_normal((B, T, K, G, H)), rng.standard_normal((B, K, 2, S, H))


def compare(result, expected, atol=1e-5):
    for ours, theirs in zip(result, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=atol)


# 0 and 1 slots, and one less, as many and one more than whole blocks of 4.
@pytest.mark.parametrize("lengths", [(0, 1, 20), (3, 4, 5), (0, 0, 0), (19, 17, 8)])
@pytest.mark.parametrize("block", [3, 4, 64])
@pytest.mark.parametrize("start", [0, 3])
def test_cached(lengths, block, start, monkeypatch):
    monkeypatch.setattr(ragged_attention, "BLOCK", block)
    q, kv = inputs()
    length, first = np.array(lengths), np.full((B, T), start) + np.arange(T)
    slots = np.arange(S)
    mask = (slots < length[:, None, None]) & (slots >= first[..., None])
    expected = numpy_attention(q, kv[:, :, 0], kv[:, :, 1], mask)
    poisoned = np.where((slots < length[:, None])[:, None, None, :, None], kv, np.nan)
    q32, kv32 = jnp.float32(q), jnp.float32(poisoned)
    result = ragged_attention.attend_cached(q32, kv32, None, jnp.int32(first), jnp.int32(length))
    compare(result, expected)


def test_decode_int8():
    """Scales of keys and values each reach their own product; unused ones may be NaN."""
    q, kv = inputs()
    length = np.array([1, 7, 20])
    quantized = quantize(jnp.float32(kv), (4,), jnp.bfloat16)
    unused = (np.arange(S) >= length[:, None])[:, None, None]
    scale = jnp.where(unused, jnp.nan, quantized.scale)
    exact = np.asarray(quantized.values, np.float64) * np.asarray(quantized.scale, np.float64)[..., None]
    mask = np.arange(S) < length[:, None, None]
    expected = numpy_attention(q[:, :1], exact[:, :, 0], exact[:, :, 1], mask)
    result = ragged_attention.ragged_decode(jnp.float32(q[:, :1]), quantized.values, scale, jnp.int32(length))
    compare(result, expected)


def test_merge():
    """Two halves of the keys, one of them empty for some rows, join to the whole."""
    q, kv = inputs()
    mask = np.zeros((B, T, S), bool)
    mask[0, :, :15] = mask[1, :, 12:] = True  # row 0 sees both halves, row 1 the second, row 2 nothing
    expected = numpy_attention(q, kv[:, :, 0], kv[:, :, 1], mask)
    q32, k, v = jnp.float32(q), jnp.float32(kv[:, :, 0]), jnp.float32(kv[:, :, 1])
    halves = [
        ragged_attention.attend(q32, k[:, :, s], v[:, :, s], mask[..., s]) for s in (slice(10), slice(10, S))
    ]
    compare(ragged_attention.merge(*halves), expected)
