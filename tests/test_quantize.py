"""int8 arrays against plain numpy; products, answers and commands of every format."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CHECKPOINTS, ONE_EACH, dequantize, invoke, llama4_config, mesh_of

import convert_checkpoint
import main
import model
from deployment import placement
from ops.matmul import einsum
from quantize import FORMATS, FP8, INT4, INT8, MXFP4, QuantizedArray, Requantized, quantize
from sharding.arrays import abstract
from terminal import launch

ROOT = pathlib.Path(__file__).resolve().parents[1]


def random(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("axes", [(0,), (2,), (0, 1)])
def test_values_scale_and_error_bound(axes):
    x = random(6, 5, 7)
    assert not dequantize(quantize(jnp.zeros_like(x), axes), axes).any()
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


@pytest.mark.parametrize("format", [INT8, FP8])
@pytest.mark.parametrize(
    ("spec", "x", "w", "axes"),
    [
        ("bTD,kgHD->bTkgH", (2, 3, 8), (2, 3, 4, 8), (3,)),
        ("bTkgH,kgHD->bTD", (2, 3, 2, 3, 4), (2, 3, 4, 8), (0, 1, 2)),
        ("bTkgN,kgLN->bTkgL", (2, 3, 2, 2, 8), (2, 2, 5, 8), (3,)),
    ],
)
def test_einsum_applies_the_scale_once(spec, x, w, axes, format):
    x, w = random(*x), quantize(jnp.asarray(random(*w)), axes, format=format)
    expected = np.einsum(spec, x, dequantize(w, axes))
    np.testing.assert_allclose(einsum(spec, jnp.asarray(x), w), expected, atol=1e-5)


def test_declared_scales_fit():
    """What a matmul contracts is quantized along just those axes; norms, router and embedding are not."""
    cfg = llama4_config()
    tree = abstract(model.weight_infos(cfg, format=INT8), mesh_of(cfg), jnp.bfloat16)
    attention, heads, E = tree.layers[0].attention, cfg.layers[0].attention, cfg.moe.E
    assert attention.q.values.shape == (heads.K, heads.G, heads.H, cfg.D)
    assert attention.q.scale.shape == (heads.K, heads.G, heads.H)
    assert attention.o.scale.shape == (cfg.D,)
    moe = tree.layers[0].feed_forward
    assert moe.gate.scale.shape == (E, cfg.moe.M) and moe.down.scale.shape == (E, cfg.D)
    assert tree.unembed.scale.shape == (cfg.V,)
    for whole in (tree.embed, tree.norm, moe.router, tree.layers[0].attention_norm):
        assert not isinstance(whole, QuantizedArray)


# -------------------------------------------------------------------------- shared with the tests of formats


def as_floats(weights: model.Weights, cfg: model.Config, format) -> model.Weights:
    """What quantized weights stand for, without the padding that a mesh needs."""

    def one(info, x):
        if isinstance(x, QuantizedArray):
            x = jax.jit(lambda x: x.format.decode(x, info))(x)
        return jnp.asarray(np.asarray(x)[tuple(map(slice, info.shape))])

    return jax.tree.map(one, model.weight_infos(cfg, format=format), weights)


def check_forward(cfg: model.Config, mesh: str, format, atol=1e-4) -> model.Weights:
    """The logits of random weights are those of the same weights as floats, on one device: -> the weights."""
    weights = model.init_weights(jax.random.key(0), cfg, mesh_of(cfg, mesh), format=format)
    planned = abstract(model.weight_infos(cfg, format=format), mesh_of(cfg, mesh), jnp.float32)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), weights) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), planned
    )
    tokens = jnp.arange(24).reshape(2, 12) % cfg.V
    expected = model.forward(tokens, as_floats(weights, cfg, format), cfg=cfg, mesh=mesh_of(cfg))
    ours = model.forward(tokens, weights, cfg=cfg, mesh=mesh_of(cfg, mesh))
    np.testing.assert_allclose(ours, expected, atol=atol)
    return weights


def assert_same(found, expected) -> None:
    """Two trees of weights are the same, bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, expected)


def read(source) -> np.ndarray:
    """A whole tensor of a checkpoint."""
    return np.array(source.read(tuple((0, n) for n in source.info.shape)))


# ------------------------------------------------------------------------------------ platforms and commands


@pytest.mark.parametrize("format", [INT8, INT4, FP8, MXFP4], ids=str)
def test_what_a_platform_holds(format, monkeypatch):
    """On CPUs a format without a kernel becomes int8."""
    for backend in ("tpu", "gpu", "cpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        held = Requantized(format, INT8) if backend == "cpu" and format != INT8 else format
        assert placement.choose_format(str(format), None, lambda text: None) == held


@pytest.mark.parametrize("format", ["fp8", pytest.param("int4", marks=pytest.mark.deep)])
def test_the_command(format, tmp_path, monkeypatch, capsys):
    """On a CPU these weights are held as int8, and a line says so; a converted folder answers the same."""
    asked = "--prompt", "How much is 12 plus 34?", "--json", "--logprobs", *ONE_EACH
    convert_checkpoint.convert(str(CHECKPOINTS / "tiny-llama3"), str(tmp_path / format), FORMATS[format])
    answers = []
    for options in ((CHECKPOINTS / "tiny-llama3", "--quantize", format), (tmp_path / format,)):
        launch.log_once.cache_clear()
        code, out, err = invoke(monkeypatch, capsys, main, "--checkpoint", *options, *asked)
        assert code == 0 and f"{format} weights are held as int8: on this platform {format} is slower" in err
        answers.append(json.loads(out)["responses"])
    assert answers[0] == answers[1]
    code, _, err = invoke(monkeypatch, capsys, main, "--checkpoint", tmp_path / format, "--quantize", "int8")
    assert code == 1 and "the weights in" in err and f"are {format}; use the original model" in err
