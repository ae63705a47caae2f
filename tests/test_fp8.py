"""fp8 weights: rounding, against ml_dtypes; files, meshes and platforms."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quality
from conftest import CHECKPOINTS, Kind, llama4_config, mesh_of
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from test_quantize import assert_same, check_forward, read

import convert_checkpoint
import model
from checkpoints.checkpoint import open_checkpoint
from checkpoints.loading import load
from checkpoints.names import named_infos
from deployment.memory import shard_bytes
from quantize import FP8, quantize
from sharding.arrays import abstract
from sharding.mesh import mesh_shape

LLAMA3, LLAMA4 = CHECKPOINTS / "tiny-llama3", CHECKPOINTS / "tiny-llama4"
CONFIG = llama4_config([Kind(chunk=8, moe=True), Kind(rope=False)])


@pytest.mark.parametrize("large", [False, True])
def test_values_and_scale(large):
    x = np.random.default_rng(0).standard_t(3, (6, 5, 70)).astype(np.float32)
    x[..., 3] *= 1e-4  # numbers without an exponent of their own, and zeros
    q = quantize(jnp.asarray(x), (2,), format=FP8, large=large)
    scale = np.abs(x).max(2) / np.float32(448)
    np.testing.assert_array_equal(q.values, (x / scale[..., None]).astype(ml_dtypes.float8_e4m3fn))
    np.testing.assert_allclose(q.scale, scale, rtol=1e-6)
    assert not np.asarray(quantize(jnp.zeros((3, 4)), (1,), format=FP8).values).any()
    nan = quantize(jnp.asarray(x).at[0, 0, 0].set(jnp.nan), (2,), format=FP8)
    assert np.isinf(nan.scale[0, 0]) and np.isfinite(nan.scale).sum() == 6 * 5 - 1


def test_forward():
    check_forward(CONFIG, "ep2-tp4", FP8)


@pytest.fixture(scope="module", params=[LLAMA3, LLAMA4], ids=["llama3", "llama4"])
def converted(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8") / "converted"
    convert_checkpoint.convert(str(request.param), str(folder), FP8)
    return request.param, folder


def test_a_converted_folder_is_what_loading_makes(converted):
    """Bit for bit, on eight devices; and no larger than is planned."""
    theirs, ours = (open_checkpoint(str(folder)) for folder in converted)
    assert ours.format == FP8
    mesh = mesh_of(ours.config, "dp2-ep2-tp2" if ours.config.moe else "tp8")
    expected, found = (load(x, mesh, "bfloat16", FP8, show=False) for x in (theirs, ours))
    assert_same(found, expected)
    planned = abstract(model.weight_infos(ours.config, format=FP8), mesh_of(ours.config), ours.dtype)
    assert sum(source.nbytes for source in ours.sources.values()) == shard_bytes(planned)


def test_verify(converted):
    """It accepts what was converted, and no value that is one step away."""
    source, folder = converted
    assert "within half a step of fp8 of" in convert_checkpoint.verify(str(folder), str(source))[-1]
    theirs, ours = (open_checkpoint(str(x)) for x in (source, folder))
    for name, info in named_infos(ours.config, format=FP8):
        if info.quantization:
            values, scale = (read(ours.sources[f"{name}.{part}"]) for part in ("values", "scale"))
            x = read(theirs.sources[name])
            assert FP8.error(x, values, scale, info) <= 1
            values.view(np.uint8)[(0,) * values.ndim] ^= 1
            assert FP8.error(x, values, scale, info) > 1
            values.view(np.uint8)[(0,) * values.ndim] ^= 1
            assert FP8.error(x, values, 2 * scale, info) == np.inf


def test_quality(converted):
    theirs, ours = (open_checkpoint(str(x)) for x in converted)
    on_load = quality.weight_errors(theirs, FP8)
    for a, b in zip(quality.weight_errors(theirs, FP8, ours), on_load, strict=True):
        assert a["error"] == pytest.approx(b["error"], rel=1e-5)
        assert 0.01 < a["error"] < 2**-4  # 3 bits after the first: at most 2^-4 of an element


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize(
    ("platform", "kind", "target"), [("gpu", "NVIDIA H200", "cuda"), ("tpu", "TPU v5 lite", "tpu")]
)
@pytest.mark.parametrize("program", ["decode", "prefill"])
def test_lowering(program, platform, kind, target):
    """On 8 devices that are not here, by XLA's products where int8 and int4 have kernels."""
    shape = mesh_shape(CONFIG, 2, 2, 2)
    device = AbstractDevice(kind, None, platform)
    axes = (AxisType.Auto,) * len(shape)
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape), axes, abstract_device=device)
    weights = abstract(model.weight_infos(CONFIG, FP8), mesh, jnp.bfloat16)
    cache = abstract(model.cache_infos(CONFIG, 4, 256, jnp.bfloat16), mesh)
    tokens = jax.ShapeDtypeStruct((4,) if program == "decode" else (4, 128), "int32")
    function = model.decode_step if program == "decode" else model.prefill
    traced = function.trace(tokens, weights, cache, cfg=CONFIG, mesh=mesh)
    text = traced.lower(lowering_platforms=(target,)).as_text()
    assert "f8E4M3FN" in text and "active_experts" not in text and "grouped_dot" not in text
