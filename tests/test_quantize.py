"""int8 arrays against plain numpy."""

import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import dequantize, llama4_config, mesh_of

import model
from ops.matmul import einsum
from quantize import INT8, QuantizedArray, quantize
from sharding.arrays import abstract

ROOT = pathlib.Path(__file__).resolve().parents[1]


def random(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("axes", [(0,), (2,), (0, 1)])
def test_values_scale_and_error_bound(axes):
    x = random(6, 5, 7)
    quantized = quantize(jnp.asarray(x), axes)
    scale = np.abs(x).max(axes, keepdims=True) / 127
    np.testing.assert_allclose(quantized.scale, scale.squeeze(axes), rtol=1e-6)
    np.testing.assert_array_equal(quantized.values, np.round(x / scale))
    error = np.abs(dequantize(quantized, axes) - x)
    assert (error <= scale / 2 * (1 + 1e-5)).all()  # the product rounds once more


def test_bfloat16_scale():
    """The values belong to the scale that is stored, so that rounding it costs at most its own 2^-8."""
    x = random(4, 64)
    quantized = quantize(jnp.asarray(x), (1,), jnp.bfloat16)
    assert quantized.scale.dtype == jnp.bfloat16
    scale = np.asarray(quantized.scale, np.float32)[:, None]
    np.testing.assert_array_equal(quantized.values, np.clip(np.round(x / scale), -127, 127))
    assert (np.abs(quantized.values * scale - x) <= scale / 2 + np.abs(x) * 2**-8).all()


def test_zeros_stay_zeros():
    quantized = quantize(jnp.zeros((3, 4)), (0,))
    assert not dequantize(quantized, (0,)).any()


def test_what_is_no_number_is_noticed():
    """Its channel is NaN, and no other. In optimized code, whose maximum may pass over a NaN."""
    code = """
import jax, numpy as np
from quantize import quantize
rounded = jax.jit(lambda x: quantize(x, (3,)))
x = np.random.default_rng(0).standard_normal((2, 40, 2, 128)).astype(np.float32)
for bad in (np.nan, np.inf):
    for i in range(0, 128, 7):
        y = x.copy()
        y[1, 20, 1, i] = bad
        made = rounded(y)
        with np.errstate(invalid="ignore"):
            wrong = np.isnan(np.asarray(made.values) * np.asarray(made.scale)[..., None]).all(-1)
        assert np.argwhere(wrong).tolist() == [[1, 20, 1]], (bad, i)
"""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)


@pytest.mark.parametrize(
    ("spec", "x", "w", "axes"),
    [
        ("bTD,kgHD->bTkgH", (2, 3, 8), (2, 3, 4, 8), (3,)),
        ("bTkgH,kgHD->bTD", (2, 3, 2, 3, 4), (2, 3, 4, 8), (0, 1, 2)),
        ("bTD,vD->bTv", (2, 3, 8), (5, 8), (1,)),
    ],
)
def test_einsum_applies_the_scale_once(spec, x, w, axes):
    x, w = random(*x), quantize(jnp.asarray(random(*w)), axes)
    expected = np.einsum(spec, x, dequantize(w, axes))
    np.testing.assert_allclose(einsum(spec, jnp.asarray(x), w), expected, atol=1e-5)


def test_declared_scales_fit():
    """What a matmul contracts is quantized along just those axes; norms, router and embedding are not."""
    cfg = llama4_config()
    tree = abstract(model.weight_infos(cfg, format=INT8), mesh_of(cfg), jnp.bfloat16)
    attention, heads, E = tree.layers[0].attention, cfg.attention, cfg.moe.E
    assert attention.q.values.shape == (heads.K, heads.G, heads.H, cfg.D)
    assert attention.q.scale.shape == (heads.K, heads.G, heads.H)
    assert attention.o.scale.shape == (cfg.D,)
    moe = tree.layers[0].feed_forward
    assert moe.gate.scale.shape == (E, cfg.moe.M) and moe.down.scale.shape == (E, cfg.D)
    assert tree.unembed.scale.shape == (cfg.V,)
    for whole in (tree.embed, tree.norm, moe.router, tree.layers[0].attention_norm):
        assert not isinstance(whole, QuantizedArray)
