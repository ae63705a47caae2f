"""int4 weights: rounding, against a search by hand; products, files and meshes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CHECKPOINTS, Kind, invoke, llama3_config, llama4_config, mesh_of
from test_quantize import as_floats, assert_same, check_forward, read

import convert_checkpoint
import model
from checkpoints.checkpoint import open_checkpoint
from checkpoints.folders import INDEX
from checkpoints.loading import load
from checkpoints.names import named_infos
from deployment.memory import shard_bytes
from ops import matmul
from quantize import (
    FORMATS,
    INT4,
    INT8,
    PerGroup,
    Requantized,
    first_axes,
    pack_int4,
    quantize_groups,
    split_groups,
    ungroup,
    unpack_int4,
)
from sharding.arrays import abstract
from sharding.mesh import make_mesh

LLAMA3 = CHECKPOINTS / "tiny-llama3"

# ------------------------------------------------------------------------------------------------- rounding


def weights_like_real_ones(*shape) -> np.ndarray:
    return np.random.default_rng(0).standard_t(4, shape).astype(np.float32)


def squared_error(group: np.ndarray, scale: float) -> float:
    """The least that values from -8 to 7, times a scale, are away from a group."""
    values = np.clip(np.round(group / np.float32(scale or 1)), -8, 7)
    return float(np.sum((values * scale - group).astype(float) ** 2))


def test_scales_have_the_least_error():
    """Of each group, against 800 scales, of either sign, up to a tenth more than what clips nothing."""
    w = weights_like_real_ones(64, 12)
    q = quantize_groups(jnp.asarray(w), (0,), 32)
    assert (q.values.dtype, q.values.shape, q.scale.dtype, q.scale.shape) == (
        jnp.int4, (2, 32, 12), jnp.bfloat16, (2, 12),
    )  # fmt: skip
    rounded, scales = np.asarray(ungroup(q, (0,))), np.asarray(q.scale, np.float32)
    assert (scales < 0).any() and (scales > 0).any()
    for group in range(2):
        for column in range(12):
            x = w[32 * group : 32 * group + 32, column]
            error = squared_error(x, scales[group, column])
            ours = rounded[32 * group : 32 * group + 32, column]
            assert error == pytest.approx(np.sum((ours - x).astype(float) ** 2), rel=1e-5)
            peak = np.abs(x).max()
            every = (np.linspace(0.4, 1.2, 400) * peak / 8)[:, None] * [1, -1]
            best = min(squared_error(x, scale) for scale in every.ravel())
            assert error <= 1.05 * best  # of which 64 were tried


def test_searched_scales_are_better_than_the_nearest():
    w = weights_like_real_ones(256, 64)

    def error(searched: bool) -> float:
        rounded = ungroup(quantize_groups(jnp.asarray(w), (0,), 128, searched=searched), (0,))
        return float(np.linalg.norm(rounded - w) / np.linalg.norm(w))

    nearest = np.asarray(w).reshape(2, 128, 64)
    scale = np.asarray(jnp.asarray(np.abs(nearest).max(1) / 7, jnp.bfloat16), np.float32)[:, None]
    expected = (np.clip(np.round(nearest / scale), -8, 7) * scale).reshape(w.shape)
    assert error(False) == pytest.approx(np.linalg.norm(expected - w) / np.linalg.norm(w), rel=1e-6)
    assert error(True) < 0.9 * error(False)


def test_what_is_four_bits_already_stays():
    random = np.random.default_rng(0)
    values = random.integers(-8, 8, (3, 64, 20)) // random.integers(1, 9, (3, 1, 20))
    scale = jnp.asarray(random.standard_normal((3, 1, 20)), jnp.bfloat16).astype(jnp.float32)
    w = np.asarray(values * scale, np.float32).reshape(192, 20)
    np.testing.assert_array_equal(ungroup(quantize_groups(jnp.asarray(w), (0,), 64), (0,)), w)


@pytest.mark.parametrize("factor", [1e22, 1e-30])
def test_very_large_and_small_weights(factor):
    """Whose squares float32 does not hold."""
    w = weights_like_real_ones(64, 12) * np.float32(2.0 ** round(np.log2(factor)))
    exact = ungroup(quantize_groups(jnp.asarray(weights_like_real_ones(64, 12)), (0,), 32), (0,))
    rounded = ungroup(quantize_groups(jnp.asarray(w), (0,), 32), (0,))
    np.testing.assert_allclose(rounded, exact * np.float32(2.0 ** round(np.log2(factor))), rtol=1e-6)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite(number):
    """It makes its group NaN, and no other; a group of zeros stays zeros."""
    w = weights_like_real_ones(64, 3)
    w[5, 1], w[:32, 2] = number, 0
    rounded = np.asarray(ungroup(quantize_groups(jnp.asarray(w), (0,), 32), (0,)))
    assert np.isnan(rounded[:32, 1]).all() and np.isnan(rounded).sum() == 32
    assert not rounded[:32, 2].any()


def test_packed_bytes():
    values = jnp.asarray([[-8, 7, 1, -1], [0, 3, -2, 5]], jnp.int4)
    packed = pack_int4(values, 1)
    np.testing.assert_array_equal(packed, [[0x78, 0xF1], [0x30, 0x5E]])
    for axis in (0, 1):
        np.testing.assert_array_equal(
            unpack_int4(pack_int4(values, axis), axis).astype(int), values.astype(int)
        )


# ------------------------------------------------------------------------------------------------- products

PRODUCTS = [  # x, w, and what is contracted of w
    ("bTD,kgHD->bTkgH", (2, 3, 64), (2, 3, 4, 64), (3,)),
    ("bTkgH,DkgH->bTD", (2, 3, 2, 3, 32), (8, 2, 3, 32), (1, 2, 3)),
    ("bTf,Df->bTD", (2, 3, 96), (5, 96), (1,)),
]


@pytest.mark.parametrize("on_tpu", [False, True])
@pytest.mark.parametrize(("spec", "x", "w", "axes"), PRODUCTS)
def test_products(spec, x, w, axes, on_tpu, monkeypatch):
    """Against numpy in float64 on the rounded weights; as on TPUs, x has 15 bits of its row's largest."""
    monkeypatch.setattr(matmul, "platform", lambda: "tpu" if on_tpu else None)
    x = np.random.default_rng(1).standard_normal(x).astype(np.float32)
    x.reshape(6, -1)[1, 3] *= 1000  # an outlier
    x.reshape(6, -1)[2] = 0
    w = weights_like_real_ones(*w)
    q = quantize_groups(jnp.asarray(w), axes, 32)
    assert np.linalg.norm(ungroup(q, axes) - w) < 0.2 * np.linalg.norm(w)
    expected = np.einsum(spec, x.astype(float), np.asarray(ungroup(q, axes), float))
    result = matmul.einsum(spec, jnp.asarray(x), q)
    assert result.dtype == jnp.float32
    # Of sums over n entries each is away by half of unit / 254 at most, so that of their root mean square.
    unit = np.abs(x).reshape(2, 3, -1).max(-1) / 127 / 254
    scale = np.sqrt(np.sum(np.square(ungroup(q, axes)), axes).max())
    limit = 3 * (unit if on_tpu else 1e-6 * np.linalg.norm(x.reshape(2, 3, -1), axis=-1)) * scale + 1e-6
    assert (np.abs(result - expected).reshape(2, 3, -1).max(-1) <= limit).all()


def test_many_rows_are_multiplied_as_floats(monkeypatch):
    monkeypatch.setattr(matmul, "platform", lambda: "tpu")
    q = quantize_groups(jnp.asarray(weights_like_real_ones(64, 8)), (0,), 32)
    whole = np.asarray(ungroup(q, (0,)))
    for rows, integers in ((matmul.FEW_ROWS, True), (matmul.FEW_ROWS + 1, False)):
        x = jnp.ones((1, rows, 64))
        jaxpr = str(jax.make_jaxpr(lambda x, q: matmul.einsum("bTD,ND->bTN", x, q))(x, q))
        assert ("preferred_element_type=int32" in jaxpr) == integers
        np.testing.assert_allclose(
            matmul.einsum("bTD,ND->bTN", x, q)[0], np.tile(whole.sum(0), (rows, 1)), atol=2e-3
        )


# --------------------------------------------------------------------------------------------------- models


# Groups of 64 of D, of 32 in a head; 192 are 3 groups of 64, which 8 devices do not divide.
SMALL = llama4_config([Kind(chunk=8, moe=True), Kind(rope=False)], D=64, H=32, F=192, M=96)


def test_forward():
    """Int8 weights, as of the unembedding, are multiplied by activations of 15 bits."""
    weights = check_forward(SMALL, "ep2-tp4", INT4, atol=5e-4)
    layer = weights.layers[0]
    assert layer.attention.q.format == PerGroup(64) and layer.attention.o.format == PerGroup(32)
    assert layer.feed_forward.down.format.scheme == "int4" and weights.unembed.format == INT8
    assert isinstance(weights.embed, jax.Array) and isinstance(layer.attention_norm, jax.Array)


def test_bytes():
    """4 bits a weight and 16 a scale: 4.125 bits in groups of 128, of the weights that are large."""
    cfg = llama3_config(D=256, F=512, H=128, K=2)
    weights = abstract(model.weight_infos(cfg, format=INT4), mesh_of(cfg), jnp.bfloat16)
    down = weights.layers[0].feed_forward.down
    assert down.values.shape == (4, 128, 256) and down.scale.shape == (4, 256)
    assert shard_bytes(down) == 512 * 256 * 4.125 / 8
    for format, bits in (("int4-g64", 4.25), ("int4-g32", 4.5)):
        infos = model.weight_infos(cfg, format=FORMATS[format])
        weights = abstract(infos, mesh_of(cfg), jnp.bfloat16)
        assert shard_bytes(weights.layers[0].feed_forward.down) == 512 * 256 * bits / 8


def test_whole_groups():
    """They need no padding; what no group of 32 divides is int8."""
    cfg = llama3_config(D=256, F=8192)
    down = model.weight_infos(cfg, format=INT4).layers[0].feed_forward.down.components
    assert down.values.padded_shape(mesh_of(cfg, "tp8")) == (64, 128, 256)
    assert down.scale.padded_shape(mesh_of(cfg, "tp8")) == (64, 256)
    cfg = llama3_config(D=64, F=80, H=8)
    layer = model.weight_infos(cfg, format=INT4).layers[0]
    assert layer.feed_forward.down.quantization == layer.attention.o.quantization == INT8
    assert layer.feed_forward.up.quantization == PerGroup(64)


# ---------------------------------------------------------------------------------------------------- files


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model of Hugging Face's whose sizes groups divide, in bfloat16; experts and a shared one."""
    import torch
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    sizes = dict(hidden_size=64, head_dim=32, intermediate_size=96, intermediate_size_mlp=192, vocab_size=101)
    sizes |= dict(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, num_local_experts=4)
    config = Llama4TextConfig(**sizes, interleave_moe_layer_step=2, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("int4") / "source"
    Llama4ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def converted(source):
    folder = source.with_name("converted")
    convert_checkpoint.convert(str(source), str(folder), INT4)
    return folder


def test_a_converted_folder_is_what_loading_makes(source, converted, monkeypatch):
    """Bit for bit, in many slices, on a mesh; and no larger than it says."""
    theirs, ours = open_checkpoint(str(source)), open_checkpoint(str(converted))
    assert ours.format == INT4
    mesh = mesh_of(ours.config, "ep2-tp4")
    expected, found = (load(x, mesh, "bfloat16", INT4, show=False) for x in (theirs, ours))
    assert_same(found, expected)
    total = sum(source.nbytes for source in ours.sources.values())
    planned = abstract(model.weight_infos(ours.config, format=INT4), mesh_of(ours.config), jnp.bfloat16)
    assert total == shard_bytes(planned)
    monkeypatch.setattr("checkpoints.layouts.SLICE_BYTES", 2100)  # no whole blocks
    again = source.with_name("again")
    convert_checkpoint.convert(str(source), str(again), INT4)
    for file in converted.glob("*.safetensors"):
        assert (again / file.name).read_bytes() == file.read_bytes()


def test_as_int8_of_int4(source, converted):
    """As CPUs hold it: its values, rounded once more."""
    theirs, ours = open_checkpoint(str(source)), open_checkpoint(str(converted))
    mesh, format = mesh_of(ours.config, "ep2-tp4"), Requantized(INT4, INT8)
    expected, found = (load(x, mesh, "bfloat16", format, show=False) for x in (theirs, ours))
    assert_same(found, expected)
    with pytest.raises(ValueError, match="is int4, and cannot be int8"):
        load(ours, mesh, "bfloat16", INT8)
    four = load(ours, mesh_of(ours.config), "bfloat16", None, show=False)
    floats, eight = as_floats(four, ours.config, INT4), as_floats(found, ours.config, format)
    for (name, info), x, y in zip(
        named_infos(ours.config, format=format), jax.tree.leaves(floats), jax.tree.leaves(eight), strict=True
    ):
        step = np.abs(x).max(info.contracted_axes, keepdims=True) / 127 if info.quantization else 0
        assert (np.abs(x - y) <= step * 0.51).all(), name


def test_in_stages():
    """A layer of a stage has the same int4 weights as without stages."""
    ours = open_checkpoint(str(LLAMA3))
    mesh = make_mesh(ours.config, 1, 1, 1, jax.devices()[:2], stage=2)
    staged, whole = (load(ours, x, "bfloat16", INT4, show=False) for x in (mesh, mesh_of(ours.config)))
    depth = len(staged.layers)
    assert depth == len(whole.layers) // 2
    for i, layer in enumerate(whole.layers):
        one = jax.tree.map(lambda x, stage=i // depth: x[stage], staged.layers[i % depth])
        assert_same(one, layer)


def test_verify(source, converted):
    """It accepts what was converted, and neither another source nor values that are not the best."""
    lines = convert_checkpoint.verify(str(converted), str(source))
    assert "within half a step of int4 of" in lines[-1]
    ours = open_checkpoint(str(converted))
    for name, info in named_infos(ours.config, format=INT4):
        format = info.quantization
        if name in ("layers.1.attention.o", "layers.1.feed_forward.gate"):
            packed, scale = (read(ours.sources[f"{name}.{part}"]) for part in ("values", "scale"))
            x = read(open_checkpoint(str(source)).sources[name])
            assert format.error(x, packed, scale, info) <= 1
            packed[(0,) * packed.ndim] ^= 1
            assert format.error(x, packed, scale, info) > 1
            packed[(0,) * packed.ndim] ^= 1
            scale[(0,) * scale.ndim] *= 2
            assert format.error(x, packed, scale, info) > 1
            # Rounded rightly, to steps that are twice what they need to be.
            axes, at = first_axes(info), len(first_axes(info))
            q = format.encode(jnp.asarray(x), info, searched=False)
            coarse = jnp.expand_dims(2 * q.scale, at).astype(jnp.float32)
            groups = split_groups(jnp.asarray(x), axes, format.group_size).astype(jnp.float32)
            values = jnp.clip(jnp.round(groups / coarse), -8, 7).astype(jnp.int4)
            packed, scale = np.asarray(pack_int4(values, at)), np.asarray(2 * q.scale)
            assert format.error(x, packed, scale, info) == np.inf


def test_what_is_refused(converted, tmp_path, monkeypatch, capsys):
    code, _, err = invoke(
        monkeypatch, capsys, convert_checkpoint, converted, tmp_path / "x", "--quantize", "int8"
    )
    assert code == 1 and "is int4 already; convert the original model instead" in err
    index = converted / INDEX
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in converted.iterdir():
        (changed / file.name).symlink_to(file)
    (changed / index.name).unlink()
    content = json.loads(index.read_text())
    content["metadata"]["quantize"] = "int3"
    (changed / index.name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="quantize is 'int3', not none or int8 or int4"):
        open_checkpoint(str(changed))
