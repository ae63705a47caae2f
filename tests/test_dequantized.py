"""Quantized checkpoints: each published format, packed here from its definition, is read as what it means."""

import copy
import json
import math
import shutil

import jax
import numpy as np
import pytest
import torch
from conftest import CHECKPOINTS, dequantize
from ml_dtypes import bfloat16, float8_e4m3fn
from processes import finish, start
from safetensors.numpy import load_file, save_file

import model
from checkpoints.checkpoint import open_checkpoint
from checkpoints.dequantized import dequantized
from checkpoints.loading import load
from checkpoints.tensor_files import MappedFile, TensorFile
from convert_checkpoint import convert, verify
from distributed.exchange import warn
from feedback.errors import UserError
from quantize import INT8, PerGroup, QuantizedArray, ungroup
from sharding.mesh import make_mesh

LLAMA3 = CHECKPOINTS / "tiny-llama3"
GROUP = 32
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each value in a word, the lowest first


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Integers [..., n] -> int32 [..., n * bits / 32]: their low bits, from the lowest on."""
    single = (values[..., None] >> np.arange(bits)) & 1
    stream = np.packbits(single.reshape(*values.shape[:-1], -1).astype(np.uint8), -1, bitorder="little")
    padded = np.pad(stream, [(0, 0)] * (values.ndim - 1) + [(0, -stream.shape[-1] % 4)])
    return padded.view("<i4")


def grouped(w: np.ndarray, bits: int, group: np.ndarray, symmetric: bool, rng, dtype=np.float16, least=1):
    """-> unsigned values [N, C], zero points and scales [N, G], and what they stand for."""
    count = group.max() + 1
    largest = np.stack([np.abs(w[:, group == g]).max(1) for g in range(count)], 1)
    scales = (2 * largest / (2**bits - 2)).astype(dtype)
    middle = 2 ** (bits - 1)
    zeros = np.full(scales.shape, middle) if symmetric else rng.integers(least, middle + 1, scales.shape)
    step = scales.astype(np.float32)[:, group]
    values = np.clip(np.round(w / step) + zeros[:, group], 0, 2**bits - 1).astype(int)
    return values, zeros, scales, ((values - zeros[:, group]).astype(np.float32) * step)


def groups(C: int, rng, ordered: bool) -> np.ndarray:
    even = np.arange(C) // GROUP
    return rng.permutation(even) if ordered else even


def gptq(bits=4, version="gptq", ordered=False, told=True, symmetric=False, says=None, **more):
    """Zero points from 0 on, which version 1 stores less 1. says: the version in the config, if another.

    more: fields of the config.
    """
    config = dict(quant_method="gptq", bits=bits, group_size=GROUP, desc_act=ordered, sym=symmetric) | more
    config |= {} if (says or version) == "gptq" else {"checkpoint_format": says or version}

    def make(w, rng):
        group = groups(w.shape[1], rng, ordered)
        values, zeros, scales, meant = grouped(w, bits, group, symmetric, rng, least=0)
        stored = zeros - (version == "gptq")  # -1 is 2**bits - 1 in the file
        parts = dict(
            qweight=pack(values, bits).T, qzeros=pack(stored.T, bits), scales=scales.T,
            g_idx=group.astype(np.int32),
        )  # fmt: skip
        return parts if ordered or told else {k: v for k, v in parts.items() if k != "g_idx"}, meant

    return config, make


def awq():
    def make(w, rng):
        values, zeros, scales, meant = grouped(w, 4, groups(w.shape[1], rng, False), False, rng)

        def in_their_order(x):  # [C, N]
            return pack(x.reshape(len(x), -1, 8)[..., AWQ_COLUMNS].reshape(x.shape), 4)

        return dict(qweight=in_their_order(values.T), qzeros=in_their_order(zeros.T), scales=scales.T), meant

    return dict(quant_method="awq", bits=4, group_size=GROUP, version="gemm", zero_point=True), make


def compressed(form: str, **weights):
    config = dict(
        quant_method="compressed-tensors", format=form, quantization_status="compressed", ignore=["lm_head"],
        version="0.9", config_groups=dict(group_0=dict(targets=["Linear"], weights=weights)),
    )  # fmt: skip
    return config


def w4a16(bits=4, symmetric=True, ordered=False, channel=False, dtype=np.float16):
    sizes = dict(strategy="channel") if channel else dict(strategy="group", group_size=GROUP)

    def make(w, rng):
        group = np.zeros(w.shape[1], int) if channel else groups(w.shape[1], rng, ordered)
        values, zeros, scales, meant = grouped(w, bits, group, symmetric, rng, dtype)
        parts = dict(weight_packed=pack(values, bits), weight_scale=scales, weight_shape=np.array(w.shape))
        if not symmetric:
            parts |= dict(weight_zero_point=pack(zeros.T, bits).T)
        if ordered:
            parts |= dict(weight_g_idx=group.astype(np.int32))
        return parts, meant

    sizes |= dict(actorder="group") if ordered else {}
    return compressed("pack-quantized", num_bits=bits, type="int", symmetric=symmetric, **sizes), make


def bytes_of(kind: str, height: int | None, width: int | None, name="weight_scale", **config):
    """Values of a byte, int8 or FP8, with a scale for each block; None: for all there are."""

    def make(w, rng):
        rows, columns = (
            np.arange(n) // (size or n) for n, size in zip(w.shape, (height, width), strict=True)
        )
        scales = rng.uniform(0.001, 0.01, (rows[-1] + 1, columns[-1] + 1)).astype(bfloat16)
        step = scales.astype(np.float32)[rows][:, columns]
        x = w / step
        values = np.clip(np.round(x), -128, 127).astype(np.int8) if kind == "int" else x.astype(float8_e4m3fn)
        parts = {"weight": values, name: scales.reshape(1) if scales.size == 1 else scales}
        if config.get("activation_scheme") == "static":  # Ministral 3; its scales are scalars
            parts |= {name: scales.reshape(()), "activation_scale": np.float32(0.1).reshape(())}
        return parts, values.astype(np.float32) * step

    strategy = {(1, None): "channel", (None, None): "tensor"}.get((height, width), "block")
    sizes = dict(block_structure=[height, width]) if strategy == "block" else {}
    form = {"int": "int-quantized", "float": "float-quantized"}[kind]
    scheme = compressed(form, num_bits=8, type=kind, symmetric=True, strategy=strategy, **sizes)
    return config or scheme, make


E2M1 = [0.5 * m if e == 0 else 2.0 ** (e - 1) * (1 + m / 2) for e in range(4) for m in (0, 1)]
E2M1 = np.float32(E2M1 + [-x for x in E2M1])  # of each code: a sign, two bits of exponent, one of fraction


def mx_blocks(codes: np.ndarray, exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """MXFP4 as the OCP Microscaling specification defines it: codes [..., C], exponents of 2 [..., C/32].

    -> two codes a byte, the first in the low bits; the exponents + 127 in a byte each; what they stand for.
    """
    packed = (codes[..., ::2] | (codes[..., 1::2] << 4)).astype(np.uint8)
    meant = E2M1[codes] * np.repeat(2.0**exponents, 32, -1).astype(np.float32)
    return packed, (exponents + 127).astype(np.uint8), meant


def mxfp4_packed():
    def make(w, rng):
        exponents = np.floor(np.log2(np.abs(w).reshape(len(w), -1, 32).max(-1))).astype(int) - 2
        distance = np.abs(w[..., None] / np.repeat(2.0**exponents, 32, -1)[..., None] - E2M1)
        packed, scales, meant = mx_blocks(distance.argmin(-1), exponents)
        return dict(weight_packed=packed, weight_scale=scales), meant

    scheme = dict(num_bits=4, type="float", symmetric=True, strategy="group", group_size=32)
    return compressed("mxfp4-pack-quantized", **scheme, scale_dtype="torch.uint8", zp_dtype=None), make


FORMATS = {
    "gptq": gptq(),
    "gptq, without g_idx": gptq(told=False),
    "gptq, ordered": gptq(ordered=True),
    "gptq_v2": gptq(version="gptq_v2"),
    "gptq, 8 bits": gptq(bits=8),
    "gptq, 2 bits": gptq(bits=2),
    "gptq_v2, 3 bits, ordered": gptq(bits=3, version="gptq_v2", ordered=True),
    "gptq, symmetric": gptq(symmetric=True),
    "gptq, some weights": gptq(
        method="gptq", format="gptq", dynamic={"lm_head": {}, "-:.*attn.*": {}, "-:.*mtp.*": {"bits": 8}}
    ),
    "gptq_v2, called gptq": gptq(bits=8, version="gptq_v2", symmetric=True, says="gptq"),
    "gptq, called gptq_v2": gptq(symmetric=True, says="gptq_v2"),
    "awq": awq(),
    "w4a16": w4a16(),
    "w4a16, bfloat16": w4a16(dtype=bfloat16),
    "w4a16, asymmetric": w4a16(symmetric=False),
    "w4a16, ordered": w4a16(ordered=True),
    "w4a16, asymmetric and ordered": w4a16(symmetric=False, ordered=True),
    "w4a16, channels": w4a16(channel=True),
    "w8a16": w4a16(bits=8),
    "int8": bytes_of("int", 1, None),
    "FP8, channels": bytes_of("float", 1, None),
    "FP8, tensors": bytes_of("float", None, None),
    "FP8, blocks": bytes_of("float", 64, 48),
    "fp8": bytes_of("float", 48, 128, "weight_scale_inv", quant_method="fp8", weight_block_size=[48, 128]),
    "fp8, tensors": bytes_of(
        "float",
        None,
        None,
        "weight_scale_inv",
        quant_method="fp8",
        weight_block_size=None,
        activation_scheme="static",
    ),
    "fbgemm_fp8": bytes_of("float", 1, None, quant_method="fbgemm_fp8", activation_scale_ub=1200.0),
    "mxfp4": mxfp4_packed(),
}


CALLED_OTHERWISE = [("gptq_v2, called gptq", True), ("gptq, called gptq_v2", True)]


def write(folder, more: dict, tensors: dict) -> None:
    shutil.copytree(LLAMA3, folder)
    config = json.loads((folder / "config.json").read_text()) | more
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: np.asarray(x, order="C") for name, x in tensors.items()}  # scalars stay scalars
    save_file(tensors, folder / "model.safetensors")


def publish(folder, name: str, fault=lambda config, tensors: None):
    """The tiny model in this format, and with the floats that it stands for, in two folders.

    fault: changes what is written.
    """
    rng, (config, make) = np.random.default_rng(0), copy.deepcopy(FORMATS[name])
    theirs, floats = {}, {}
    for key, x in load_file(LLAMA3 / "model.safetensors").items():
        if key.endswith("proj.weight"):
            parts, floats[key] = make(x.astype(np.float32), rng)
            theirs |= {f"{key.removesuffix('.weight')}.{end}": part for end, part in parts.items()}
        else:
            theirs[key], floats[key] = x, x.astype(np.float32)
    fault(config, theirs)
    write(folder / "theirs", dict(quantization_config=config), theirs)
    write(folder / "floats", {}, floats)
    return folder / "theirs", folder / "floats"


@pytest.mark.parametrize("name", FORMATS)
def test_read(name, tmp_path):
    """Every weight, whole and in part, is what its parts stand for."""
    theirs, floats = (open_checkpoint(str(x)) for x in publish(tmp_path, name))
    rng = np.random.default_rng(1)
    for key in floats.sources:
        source = theirs.sources[key]
        shape = source.info.shape
        ends = [np.sort(rng.choice(n + 1, 2, replace=False)) for n in shape]
        for box in ([(0, n) for n in shape], [(int(lo), int(hi)) for lo, hi in ends]):
            expected = floats.sources[key].read(tuple(box))
            np.testing.assert_array_equal(source.read(tuple(box)).astype(np.float32), expected)
    assert theirs.dtype == "bfloat16" and floats.dtype == "float32"
    assert theirs.checksums()["weights"] != floats.checksums()["weights"]


@pytest.mark.parametrize(("name", "warns"), [("gptq", False), ("gptq, symmetric", False)] + CALLED_OTHERWISE)
def test_version_of_gptq(name, warns, tmp_path, capsys):
    """One line says that the zero points are those of the other version than the config says."""
    warn.cache_clear()
    open_checkpoint(str(publish(tmp_path, name)[0]))
    err = capsys.readouterr().err
    assert err.count("\n") == err.count("warning: ") == err.count("zero points of gptq") == warns


def quantized(theirs, floats, format, mesh):
    """Yields of each weight that is held in the format: its declaration, itself, and the floats to expect."""
    ours = load(theirs, mesh, "float32", format, show=False)
    exact = load(floats, mesh, "float32", None, show=False)
    for info, x, expected in zip(
        jax.tree.leaves(model.weight_infos(theirs.config, format=format)),
        jax.tree.leaves(ours, is_leaf=lambda x: isinstance(x, QuantizedArray)),
        jax.tree.leaves(exact),
        strict=True,
    ):
        if isinstance(x, QuantizedArray) and x.format == format:
            yield info, x, expected


def test_what_is_int4_already_stays(tmp_path):
    """Symmetric W4A16 in our groups, bit for bit: the search for scales finds theirs."""
    theirs, floats = (open_checkpoint(str(x)) for x in publish(tmp_path, "w4a16, bfloat16"))
    mesh = make_mesh(theirs.config, devices=jax.devices()[:1])
    found = list(quantized(theirs, floats, PerGroup(GROUP), mesh))
    assert len(found) >= 7 * 4
    for info, x, expected in found:
        np.testing.assert_array_equal(ungroup(x, info.contracted_axes), expected)


def test_what_is_int8_already_stays(tmp_path):
    """Channels' int8 down to -128, whether or not they use all of it; loaded, converted, and on a mesh."""
    folder, floats = publish(tmp_path, "int8")
    published = load_file(folder / "model.safetensors")
    converted, anew = tmp_path / "converted", tmp_path / "anew"
    convert(str(folder), str(converted), INT8)
    verify(str(converted), str(folder))
    convert(str(floats), str(anew), INT8)
    with pytest.raises(UserError, match="layers.0.attention.q is not what"):
        verify(str(anew), str(folder))
    theirs, ours, floats = (open_checkpoint(str(x)) for x in (folder, converted, floats))
    for checkpoint, degrees in ((theirs, (1, 1, 1)), (theirs, (1, 1, 4)), (ours, (1, 1, 1))):
        mesh = make_mesh(theirs.config, *degrees, devices=jax.devices()[: math.prod(degrees)])
        down = load(checkpoint, mesh, "float32", INT8, show=False).layers[0].feed_forward.down
        name = "model.layers.0.mlp.down_proj.weight"
        np.testing.assert_array_equal(down.values, published[name])
        np.testing.assert_array_equal(down.scale, published[name + "_scale"][:, 0].astype(np.float32))
        peak = np.abs(np.int32(down.values)).max(1)
        assert down.values.min() == -128 and peak.min() < 127
        for info, x, expected in quantized(checkpoint, floats, INT8, mesh):
            if ".layers." in info.stored.name:  # the embedding and the unembedding were floats
                np.testing.assert_array_equal(dequantize(x, info.contracted_axes), expected)


@pytest.mark.deep
def test_two_processes(tmp_path):
    """They compare the model, and answer as with its floats."""
    answers = []
    for folder in publish(tmp_path, "w4a16"):
        options = "--dtype", "float32", "--json", "--prompt", "How much is 3 plus 4?"
        (code, out, err), (other, nothing, _) = finish(start(2, 1, "--checkpoint", folder, *options))
        assert (code, other, nothing) == (0, 0, ""), err
        answers.append(json.loads(out)["responses"])
    assert answers[0] == answers[1]


NAME = "model.layers.0.mlp.up_proj"


def without(end, base=NAME + "."):
    return lambda config, tensors: tensors.pop(base + end)


def changed(end, change, base=NAME + "."):
    return lambda config, tensors: tensors.update({base + end: change(tensors[base + end])})


def weights(**changes):
    return lambda config, _: config["config_groups"]["group_0"]["weights"].update(changes)


WRONG = [
    ("gptq", lambda config, _: config.update(quant_method="bitsandbytes"), "quant_method = 'bitsandbytes'"),
    ("gptq", lambda config, _: config.update(bits=5), "bits = 5 "),
    ("gptq", lambda config, _: config.update(checkpoint_format="marlin"), "checkpoint_format = 'marlin'"),
    ("gptq", lambda config, _: config.update(dynamic={"lm_head": {"bits": 8}}), "dynamic 'lm_head' ="),
    ("gptq", lambda config, _: config.update(format="marlin"), "format = 'marlin'"),
    ("gptq", lambda config, _: config.update(group_size=-2), "group_size = -2"),
    ("gptq", without("scales"), f"{NAME}.scales is missing"),
    ("gptq", without("qweight"), f"{NAME}.qweight is missing"),
    ("gptq", changed("qzeros", lambda x: x[1:]), f"{NAME}.qzeros has shape (3, 32), not (4, 32)"),
    ("gptq", changed("qweight", np.float32), f"{NAME}.qweight has type F32, not I32"),
    ("gptq, ordered", without("g_idx"), f"{NAME}.g_idx is missing"),
    ("gptq, ordered", changed("scales", lambda x: x[1:]), f"{NAME}.g_idx has groups from 0 to 3"),
    ("gptq, without g_idx", lambda config, _: config.update(group_size=48), "no groups of 48"),
    ("awq", lambda config, _: config.update(version="gemv"), "version = 'gemv'"),
    ("awq", lambda config, _: config.update(group_size=64), "scales has shape (8, 128), not (4, 128)"),
    ("w4a16", weights(actorder="dynamic"), "actorder = 'dynamic'"),
    ("w4a16", weights(strategy="tensor_group"), "strategy = 'tensor_group'"),
    ("w4a16", weights(group_size=64), "weight_scale has shape"),
    ("w4a16", weights(num_bits=3), "num_bits = 3"),
    ("w4a16", weights(symmetric=False), "weight_zero_point is missing"),
    ("w4a16", lambda config, _: config.update(format="marlin-24"), "format = 'marlin-24'"),
    ("w4a16", lambda config, _: config.update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    ("w4a16", lambda config, _: config.update(sparsity_config={"format": "sparse-24"}), "'sparse-24'"),
    ("w4a16", lambda config, _: config["config_groups"].update(other=dict(weights={})), "config_groups"),
    ("fp8", lambda config, _: config.update(scale_fmt="e5m2"), "scale_fmt = 'e5m2'"),
    ("fp8", without("weight_scale_inv"), f"{NAME}.weight has type F8_E4M3"),
    ("fp8", without("weight"), f"{NAME}.weight is missing"),
    ("FP8, channels", without("weight_scale"), f"{NAME}.weight has type F8_E4M3"),
    ("FP8, blocks", changed("weight_scale", lambda x: x[:1]), "weight_scale has shape (1, 3), not (4, 3)"),
    ("int8", weights(symmetric=False), "symmetric = False"),
    ("mxfp4", weights(group_size=16), "group_size = 16"),
    ("mxfp4", weights(num_bits=8), "num_bits = 8"),
    ("mxfp4", without("weight_scale"), f"{NAME}.weight_scale is missing"),
    ("mxfp4", changed("weight_packed", np.int8), f"{NAME}.weight_packed has type I8, not U8"),
    ("mxfp4", changed("weight_scale", lambda x: x[:, 1:]), "weight_scale has shape (256, 3), not (256, 4)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fault", "message"), WRONG)
def test_refused(name, fault, message, tmp_path):
    folder, _ = publish(tmp_path, name, fault)
    with pytest.raises(UserError) as error:
        open_checkpoint(str(folder))
    assert message in str(error.value) and str(folder) in str(error.value)


EXPERTS = "model.layers.0.mlp.experts.down_proj"


def experts_in_mxfp4(folder, fault=lambda config, tensors: None) -> tuple[dict, np.ndarray]:
    """The tensors of 3 experts as gpt-oss publishes them, opened, and what they stand for: [3,6,96]."""
    rng = np.random.default_rng(0)
    packed, scales, meant = mx_blocks(rng.integers(0, 16, (3, 6, 96)), rng.integers(-40, 40, (3, 6, 3)))
    tensors = {EXPERTS + "_blocks": packed.reshape(3, 6, 3, 16), EXPERTS + "_scales": scales}
    tensors |= {EXPERTS + "_bias": np.zeros((3, 6), np.float32)}
    fault(None, tensors)
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    config = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
    return dequantized(TensorFile(MappedFile(folder / "model.safetensors")).tensors, config), meant


def test_blocks_of_experts(tmp_path):
    """gpt-oss: exactly, whole and some experts at a time, and as transformers reads them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found, meant = experts_in_mxfp4(tmp_path)
    assert found.keys() == {EXPERTS + "_mxfp4", EXPERTS + "_bias"}
    tensor = found[EXPERTS + "_mxfp4"]
    assert tensor.shape == meant.shape and tensor.mxfp4
    np.testing.assert_array_equal(tensor.values, meant)
    np.testing.assert_array_equal(tensor.rows(1, 2), meant[1:2])
    stored = (torch.from_numpy(part.values.copy()) for part in tensor.parts)
    theirs = convert_moe_packed_tensors(*stored, dtype=torch.float32)  # [E, C, N]
    np.testing.assert_array_equal(tensor.values, theirs.swapaxes(1, 2))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (without("_scales", EXPERTS), "_scales is missing"),
        (without("_blocks", EXPERTS), "_blocks is missing"),
        (changed("_scales", lambda x: x[:, 1:], EXPERTS), "_scales has shape (3, 5, 3), not (3, 6, 3)"),
        (changed("_blocks", lambda x: x[..., 1:], EXPERTS), "(3, 6, 3, 15), not (any, any, any, 16)"),
        (changed("_blocks", np.int8, EXPERTS), "_blocks has type I8, not U8"),
        (changed("_scales", lambda x: x | 255, EXPERTS), "_scales has a scale of 255, that is NaN"),
    ],
)
def test_blocks_that_are_refused(fault, message, tmp_path):
    with pytest.raises(UserError) as error:
        experts_in_mxfp4(tmp_path, fault)[0][EXPERTS + "_mxfp4"].rows(1, 2)
    assert message in str(error.value) and "model.safetensors: tensor " + EXPERTS in str(error.value)
    assert "\n" not in str(error.value)
