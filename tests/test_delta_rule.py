"""ops/delta_kernels.py: the TPU's kernel, interpreted on a CPU, against the steps one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ops import delta_kernels
from ops.delta_kernels import delta_chunks_tpu, delta_steps_tpu
from ops.delta_rule import delta_chunks, delta_steps


def tokens(B: int, T: int, N: int, X: int, Y: int, seed=0) -> list[jax.Array]:
    """q, k, v, g and beta as a layer has them: keys of the length 1, decays below 0, strengths up to 1."""
    draw = np.random.default_rng(seed).standard_normal
    q, k, v = (draw((B, T, N, width), np.float32) for width in (X, X, Y))
    g, beta = -np.abs(draw((B, T, N), np.float32)), 1 / (1 + np.exp(draw((B, T, N), np.float32)))
    return [jnp.asarray(x) for x in (q, k / np.linalg.norm(k, axis=3, keepdims=True), v, g, beta)]


@pytest.mark.parametrize(
    ("T", "N", "X", "Y", "keep", "row"),
    [
        (1, 2, 128, 128, (1, 0, 1, 1, 0), None),
        (1, 1, 128, 128, (0, 0, 0, 0, 0), None),
        (5, 3, 128, 256, (2, 5, 0, 1, 3), (6, 0, 2, 5, 3)),
        (16, 1, 256, 128, (16, 1, 9, 0, 4), None),
    ],
)
def test_kernel(T, N, X, Y, keep, row, interpret, monkeypatch):
    """Rows that keep some, all or no tokens, in several blocks and groups; before a row begins it has NaN."""
    monkeypatch.setattr(delta_kernels, "BLOCK_BYTES", 4 * X * Y)
    monkeypatch.setattr(delta_kernels, "AHEAD_BYTES", 8 * X * Y)
    monkeypatch.setattr(delta_kernels, "GROUP_BYTES", 4 * 2 * N * max(X, Y) * -(-5 * T // 8) * 8)  # 2 rows
    B, R = len(keep), 5 if row is None else 7
    draw = np.random.default_rng(1).standard_normal
    S = draw((R, N, X, Y), np.float32)
    home, empty = np.arange(B) if row is None else np.array(row), np.arange(B) % 3 == 0
    S[home[empty]] = np.nan
    arguments = *tokens(B, T, N, X, Y), S, empty, jnp.array(keep), None if row is None else jnp.array(row)
    (o, after), (expected, states) = (
        jax.jit(function)(*arguments)
        for function in (lambda *x: delta_steps_tpu(*x, interpret=interpret), delta_steps)
    )
    kept = np.array(keep) > 0
    # The sums of a product of float32 are in another order.
    np.testing.assert_allclose(o[kept], expected[kept], rtol=0, atol=2e-5)
    np.testing.assert_allclose(after, states, rtol=0, atol=2e-5)
    untouched = np.setdiff1d(np.arange(R), home[kept])
    np.testing.assert_array_equal(after[untouched], S[untouched])
    assert np.isfinite(o).all() and np.isfinite(after[home[kept]]).all()


@pytest.mark.parametrize(
    ("T", "J", "each", "Y", "dtype"),
    [(150, 2, 2, 128, jnp.float32), (40, 1, 3, 256, jnp.float32), (300, 1, 1, 128, jnp.bfloat16)],
)
def test_kernel_of_chunks(T, J, each, Y, dtype, interpret):
    """Three rows, of which one begins its text, in five places; the others stay as they are."""
    B, R, N, X = 3, 5, J * each, 128
    q, k, v, g, beta = tokens(B, T, N, X, Y)
    S = np.random.default_rng(1).standard_normal((R, N, X, Y), np.float32)
    row, empty = np.array([3, 0, 2]), np.array([False, True, False])
    S[0] = np.nan
    arguments = q[:, :, :J], k[:, :, :J], v.astype(dtype), g, beta, S, empty, row
    o, after = jax.jit(lambda *x: delta_chunks_tpu(*x, interpret=interpret))(*arguments)
    expected, states = jax.jit(delta_chunks)(*arguments)
    # Factors of 16 bits change a product by up to 2^-16 of its addends.
    atol = 2e-5 if dtype == jnp.float32 else 4e-4
    np.testing.assert_allclose(o, expected, rtol=0, atol=atol)
    np.testing.assert_allclose(after[row], states[row], rtol=0, atol=atol)
    np.testing.assert_array_equal(np.array(after)[[1, 4]], S[[1, 4]])
