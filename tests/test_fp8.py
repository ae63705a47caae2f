"""fp8 weights: rounding, against ml_dtypes; products, files, meshes and platforms; what commands say."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quality
from conftest import CHECKPOINTS, ONE_EACH, invoke, llama3_config, llama4_config, mesh_of
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import convert_checkpoint
import main
import model
from checkpoints.checkpoint import open_checkpoint
from checkpoints.loading import load
from checkpoints.names import named_infos
from deployment import placement
from deployment.memory import shard_bytes
from ops.matmul import einsum
from quantize import FP8, INT8, QuantizedArray, Requantized, quantize
from sharding.arrays import abstract
from sharding.mesh import mesh_shape

LLAMA3, LLAMA4 = CHECKPOINTS / "tiny-llama3", CHECKPOINTS / "tiny-llama4"
CONFIGS = {"llama3": llama3_config(tied_embeddings=True), "llama4": llama4_config()}


def rounded(x: np.ndarray, axes) -> tuple[np.ndarray, np.ndarray]:
    scale = np.abs(x).max(axes, keepdims=True) / np.float32(448)
    return (x / scale).astype(ml_dtypes.float8_e4m3fn), scale


@pytest.mark.parametrize("large", [False, True])
def test_values_and_scale(large):
    x = np.random.default_rng(0).standard_t(3, (6, 5, 70)).astype(np.float32)
    x[..., 3] *= 1e-4  # numbers without an exponent of their own, and zeros
    q = quantize(jnp.asarray(x), (2,), format=FP8, large=large)
    values, scale = rounded(x, 2)
    np.testing.assert_array_equal(np.asarray(q.values), values)
    np.testing.assert_allclose(q.scale, scale[..., 0], rtol=1e-6)
    assert not np.asarray(quantize(jnp.zeros((3, 4)), (1,), format=FP8).values).any()
    nan = quantize(jnp.asarray(x).at[0, 0, 0].set(jnp.nan), (2,), format=FP8)
    assert np.isinf(nan.scale[0, 0]) and np.isfinite(nan.scale).sum() == 6 * 5 - 1


@pytest.mark.parametrize(
    ("spec", "x", "w", "axes"),
    [
        ("bTD,kgHD->bTkgH", (2, 3, 8), (2, 3, 4, 8), (3,)),
        ("bTkgH,kgHD->bTD", (2, 3, 2, 3, 4), (2, 3, 4, 8), (0, 1, 2)),
        ("bTkgN,kgLN->bTkgL", (2, 3, 2, 2, 8), (2, 2, 5, 8), (3,)),
    ],
)
def test_products(spec, x, w, axes):
    x, w = (np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in (x, w))
    values, scale = rounded(w, axes)
    expected = np.einsum(spec, x, values.astype(np.float32) * scale)
    result = einsum(spec, jnp.asarray(x), quantize(jnp.asarray(w), axes, format=FP8))
    np.testing.assert_allclose(result, expected, atol=1e-4)


def as_floats(weights: model.Weights, cfg: model.Config) -> model.Weights:
    """What the weights stand for, by ml_dtypes, without the padding that a mesh needs."""

    def one(info, x):
        if isinstance(x, QuantizedArray):
            assert x.format == FP8 and x.values.dtype == jnp.float8_e4m3fn
            values = np.asarray(x.values).astype(np.float32)
            x = values * np.expand_dims(np.asarray(x.scale), info.contracted_axes)
        return jnp.asarray(np.asarray(x)[tuple(map(slice, info.shape))])

    return jax.tree.map(one, model.weight_infos(cfg, format=FP8), weights)


@pytest.mark.parametrize(
    ("name", "mesh"), [("llama3", "1"), ("llama3", "tp8"), ("llama4", "1"), ("llama4", "ep2-tp4")]
)
def test_forward(name, mesh):
    """The logits are those of the same weights as floats, on one device."""
    cfg = CONFIGS[name]
    weights = model.init_weights(jax.random.key(0), cfg, mesh_of(cfg, mesh), format=FP8)
    planned = abstract(model.weight_infos(cfg, format=FP8), mesh_of(cfg, mesh), jnp.float32)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), weights) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), planned
    )
    tokens = jnp.arange(24).reshape(2, 12) % cfg.V
    expected = model.forward(tokens, as_floats(weights, cfg), cfg=cfg, mesh=mesh_of(cfg))
    ours = model.forward(tokens, weights, cfg=cfg, mesh=mesh_of(cfg, mesh))
    np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.fixture(scope="module", params=[LLAMA3, LLAMA4], ids=["llama3", "llama4"])
def converted(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8") / "converted"
    convert_checkpoint.convert(str(request.param), str(folder), FP8)
    return request.param, folder


def test_a_converted_folder_is_what_loading_makes(converted):
    """Bit for bit, on one device and on eight; and no larger than is planned."""
    theirs, ours = (open_checkpoint(str(folder)) for folder in converted)
    assert ours.format == FP8
    for name in ("1", "dp2-ep2-tp2" if ours.config.moe else "tp8"):
        mesh = mesh_of(ours.config, name)
        expected, found = (load(x, mesh, "bfloat16", FP8, show=False) for x in (theirs, ours))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, expected)
    planned = abstract(model.weight_infos(ours.config, format=FP8), mesh_of(ours.config), ours.dtype)
    assert sum(source.nbytes for source in ours.sources.values()) == shard_bytes(planned)


def test_verify(converted):
    """It accepts what was converted, and no value that is one step away."""
    source, folder = converted
    assert "within half a step of fp8 of" in convert_checkpoint.verify(str(folder), str(source))[-1]
    theirs, ours = (open_checkpoint(str(x)) for x in (source, folder))
    for name, info in named_infos(ours.config, format=FP8):
        if info.quantization:
            parts = [ours.sources[f"{name}.{part}"] for part in ("values", "scale")]
            values, scale = (x.read(tuple((0, n) for n in x.info.shape)).copy() for x in parts)
            x = theirs.sources[name].read(tuple((0, n) for n in info.shape))
            assert FP8.error(x, values, scale, info) <= 1
            values.view(np.uint8)[(0,) * values.ndim] ^= 1
            assert FP8.error(x, values, scale, info) > 1
            values.view(np.uint8)[(0,) * values.ndim] ^= 1
            assert FP8.error(x, values, 2 * scale, info) == np.inf


def test_quality(converted):
    source, folder = converted
    theirs, ours = (open_checkpoint(str(x)) for x in converted)
    on_load = quality.weight_errors(theirs, FP8)
    for a, b in zip(quality.weight_errors(theirs, FP8, ours), on_load, strict=True):
        assert a["error"] == pytest.approx(b["error"], rel=1e-5)
        assert 0.01 < a["error"] < 2**-4  # 3 bits after the first: at most 2^-4 of an element


def test_the_command(converted, monkeypatch, capsys):
    source, folder = converted
    asked = "--prompt", "How much is 12 plus 34?", "--json", "--logprobs", *ONE_EACH
    code, out, err = invoke(monkeypatch, capsys, main, "--checkpoint", source, "--quantize", "fp8", *asked)
    assert code == 0, err
    code, again, err = invoke(monkeypatch, capsys, main, "--checkpoint", folder, *asked)
    assert code == 0, err
    assert json.loads(out)["responses"] == json.loads(again)["responses"]
    code, _, err = invoke(monkeypatch, capsys, main, "--checkpoint", folder, "--quantize", "int8")
    assert code == 1 and "are fp8; use the original model" in err
    said = []
    assert placement.choose_format("fp8", None, said.append) == Requantized(FP8, INT8)
    assert said == ["fp8 weights are held as int8: on this platform fp8 is slower"]
    assert FP8.on("tpu") == FP8.on("gpu") == FP8 and INT8.on("cpu") == INT8


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize(
    ("platform", "kind", "target"), [("gpu", "NVIDIA H200", "cuda"), ("tpu", "TPU v5 lite", "tpu")]
)
@pytest.mark.parametrize("program", ["decode", "prefill"])
def test_lowering(program, platform, kind, target):
    """On 8 devices that are not here, by XLA's products where int8 and int4 have kernels."""
    for cfg in CONFIGS.values():
        shape = mesh_shape(cfg, 2, 2, 2) if cfg.moe else mesh_shape(cfg, 2, 1, 4)
        device = AbstractDevice(kind, None, platform)
        axes = (AxisType.Auto,) * len(shape)
        mesh = AbstractMesh(tuple(shape.values()), tuple(shape), axes, abstract_device=device)
        weights = abstract(model.weight_infos(cfg, FP8), mesh, jnp.bfloat16)
        cache = abstract(model.cache_infos(cfg, 4, 256, jnp.bfloat16), mesh)
        tokens = jax.ShapeDtypeStruct((4,) if program == "decode" else (4, 128), "int32")
        function = model.decode_step if program == "decode" else model.prefill
        traced = function.trace(tokens, weights, cache, cfg=cfg, mesh=mesh)
        text = traced.lower(lowering_platforms=(target,)).as_text()
        assert "f8E4M3FN" in text and "active_experts" not in text and "grouped_dot" not in text
