"""Every layout of a checkpoint gives the same weights; every wrong one is refused by name."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CHECKPOINTS, llama3_config, llama4_config, mesh_of
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

import model
from checkpoints.checkpoint import open_checkpoint
from checkpoints.folders import INDEX
from checkpoints.layouts import Source, file_layout, layout_of, to_file_order
from checkpoints.loading import load
from checkpoints.names import named_infos, stored_infos
from checkpoints.tensor_files import ALIGNMENT
from convert_checkpoint import convert, verify
from quantize import INT8, quantize
from sharding.arrays import ArrayInfo, Stored, abstract

LLAMA3, LLAMA4 = CHECKPOINTS / "tiny-llama3", CHECKPOINTS / "tiny-llama4"


def weights_of(folder, name="1", dtype="float32", format=None):
    checkpoint = open_checkpoint(str(folder))
    return load(checkpoint, mesh_of(checkpoint.config, name), dtype, format)


def assert_equal(a, b):
    """Bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture
def variant(tmp_path):
    """A function that writes a changed tiny-llama4 (or other): `edit` changes tensors and config in place."""

    def write(edit=lambda tensors, config: None, source=LLAMA4, shards=1):
        folder = tmp_path / "variant"
        shutil.copytree(source, folder)
        tensors = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        edit(tensors, config)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").unlink()
        if shards == 1:
            save_file(tensors, folder / "model.safetensors")
            return folder
        names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        weight_map = {tensor: names[i % shards] for i, tensor in enumerate(tensors)}
        for file in names:
            save_file({t: x for t, x in tensors.items() if weight_map[t] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    return write


def wrap_multimodal(tensors, config):
    """As Llama4ForConditionalGeneration is published."""
    for name in list(tensors):
        tensors["language_model." + name] = tensors.pop(name)
    tensors["vision_model.class_embedding"] = np.zeros(3, np.float32)
    tensors["multi_modal_projector.linear_1.weight"] = np.zeros((3, 3), np.float32)
    text = dict(config)
    config.clear()
    architectures = ["Llama4ForConditionalGeneration"]
    config.update(model_type="llama4", architectures=architectures, text_config=text, vision_config={"a": 1})


def newer_multimodal_names(tensors, config):
    wrap_multimodal(tensors, config)
    for name in list(tensors):
        if name.startswith("language_model.model."):
            tensors["model.language_model." + name.removeprefix("language_model.model.")] = tensors.pop(name)
    tensors["lm_head.weight"] = tensors.pop("language_model.lm_head.weight")


def unfuse_experts(tensors, config):
    for name in [name for name in tensors if ".experts." in name]:
        for e, x in enumerate(tensors.pop(name)):
            prefix = name.rsplit(".", 1)[0] + f".{e}."
            if name.endswith("down_proj"):
                tensors[prefix + "down_proj.weight"] = np.ascontiguousarray(x.T)
            else:
                gate, up = np.split(x, 2, -1)
                tensors[prefix + "gate_proj.weight"] = np.ascontiguousarray(gate.T)
                tensors[prefix + "up_proj.weight"] = np.ascontiguousarray(up.T)


def transformers_4_config(tensors, config):
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    config["pretraining_tp"] = 1


@pytest.mark.parametrize(
    ("edit", "shards"),
    [(wrap_multimodal, 3), (newer_multimodal_names, 1), (unfuse_experts, 3), (transformers_4_config, 1)],
)
def test_published_layouts(edit, shards, variant):
    folder = variant(edit, shards=shards)
    assert open_checkpoint(folder).config == open_checkpoint(LLAMA4).config
    assert_equal(weights_of(folder), weights_of(LLAMA4))


def test_llama3_layouts(variant):
    """A config of transformers 4, a copy of the tied embedding, and buffers that old versions saved."""

    def edit(tensors, config):
        transformers_4_config(tensors, config)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)

    folder = variant(edit, LLAMA3)
    assert open_checkpoint(folder).config == open_checkpoint(LLAMA3).config
    assert_equal(weights_of(folder), weights_of(LLAMA3))


def test_unembedding_that_is_not_the_embedding(variant):
    def edit(tensors, config):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["lm_head.weight"][-1, -1] += 1

    with pytest.raises(ValueError, match="lm_head.weight is not model.embed_tokens.weight, although"):
        open_checkpoint(variant(edit, LLAMA3))


@pytest.mark.parametrize("format", [None, INT8])
def test_converted_folder_loads_the_same(tiny, format, tmp_path):
    """From the original folder or a converted one, in one file or many."""
    convert(str(tiny), str(tmp_path / "one"), format)
    convert(str(tiny), str(tmp_path / "many"), format, file_bytes=50_000)
    assert len(list((tmp_path / "many").glob("weights-*"))) > 2
    name = "ep2-tp4" if tiny == LLAMA4 else "tp8"
    expected = weights_of(tiny, name, "bfloat16", format)
    for folder in ("one", "many"):
        assert open_checkpoint(tmp_path / folder).format == format
        assert_equal(weights_of(tmp_path / folder, name, "bfloat16"), expected)
    # int8 from a converted float folder too
    if not format:
        assert_equal(weights_of(tmp_path / "one", format=INT8), weights_of(tiny, format=INT8))
    for companion in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "one" / companion).read_bytes() == (tiny / companion).read_bytes()


def test_a_weight_of_a_type_of_its_own(tmp_path, variant, monkeypatch):
    """Declared float32, it is so in a bfloat16 model: converted, verified, planned, loaded."""

    def edit(tensors, config):
        for name, x in tensors.items():
            tensors[name] = (x * 1.001).astype(np.float32 if name.endswith("router.weight") else bfloat16)

    declared = model.MoEWeights.__dataclass_fields__["router"].metadata["info"]
    declaration = {"info": dataclasses.replace(declared, dtype=jnp.float32)}
    monkeypatch.setattr(model.MoEWeights.__dataclass_fields__["router"], "metadata", declaration)
    theirs = variant(edit)
    source = load_file(theirs / "model.safetensors")["model.layers.0.feed_forward.router.weight"]
    assert (source.astype(bfloat16) != source).any()
    convert(str(theirs), str(tmp_path / "ours"), INT8)
    opened = open_checkpoint(tmp_path / "ours")
    assert {x.dtype for x in opened.sources["layers.0.attention_norm"].tensors} == {"BF16"}
    mesh = mesh_of(opened.config)
    planned = abstract(model.weight_infos(opened.config, format=INT8), mesh, jnp.bfloat16)
    random = model.init_weights(jax.random.key(0), opened.config, mesh, jnp.bfloat16, INT8)
    for weights in (weights_of(folder, "1", "bfloat16", INT8) for folder in (theirs, opened.folder)):
        np.testing.assert_array_equal(weights.layers[0].feed_forward.router, source.T)
        for found in (weights, random):
            assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, planned)
    assert len(verify(str(opened.folder), str(theirs))) == 2
    monkeypatch.undo()  # converted when it was not declared so, it lacks what is wanted
    convert(str(theirs), str(tmp_path / "rounded"), dtype="bfloat16")
    monkeypatch.setattr(model.MoEWeights.__dataclass_fields__["router"], "metadata", declaration)
    with pytest.raises(ValueError, match="router has type BF16, not F32"):
        verify(str(tmp_path / "rounded"))


class Held:
    """Stands for a StoredTensor, with values that are in memory."""

    def __init__(self, values):
        self.values = np.ascontiguousarray(values)
        self.shape = self.values.shape

    remote = False

    def read(self, lo, hi, select):
        part = select(self.values[lo:hi])
        assert np.may_share_memory(part, self.values)
        return part


def test_order_in_our_files():
    """Sharded letters first; what that would leave to single elements in blocks, the place in one last."""
    infos = dict(named_infos(llama4_config()))

    def order(name):
        return "".join(axis.letter for axis in file_layout(infos["layers.0." + name]).axes)

    assert order("attention.o") == "KGDH" and order("feed_forward.gate") == "EMDM"
    down = infos["layers.0.feed_forward.shared.down"]
    assert order("feed_forward.shared.down") == "FDF" and down.shape == (32, 24)
    x = np.arange(32 * 24).reshape(down.shape)
    stored = to_file_order(x, down)
    assert stored.shape == file_layout(down).shape == (8, 32, 3)  # gcd(24, 64) blocks
    for block in range(8):
        np.testing.assert_array_equal(stored[block], x[:, 3 * block : 3 * block + 3])
    whole = Source(down, [Held(stored)], file_layout(down)).read(((0, 32), (0, 24)))
    np.testing.assert_array_equal(whole, x)
    assert whole.ctypes.data % ALIGNMENT == 0  # or XLA would copy it once more


def random_box(rng, shape):
    """Of each letter some elements, and the index of them."""
    bounds = [np.sort(rng.choice(n + 1, 2, replace=False)) for n in shape]
    box = tuple((int(lo), int(hi)) for lo, hi in bounds)
    return box, tuple(slice(lo, hi) for lo, hi in box)


def fused_tensors():
    """(our letters and arrays, stored letters, the tensor that has them all) as models are published."""
    rng, D, K, G, H, V, F, E = np.random.default_rng(0), 5, 3, 2, 4, 6, 7, 2
    q, k, v = (rng.normal(size=shape) for shape in ((K, G, H, D), (K, H, D), (K, H, D)))
    columns = np.concatenate([x.reshape(-1, D) for x in (q, k, v)]).T
    yield ("kgHD", "khD", "khD"), (q, k, v), "D[KGH+KH+KH]", columns
    gate, up = rng.normal(size=(2, F, D))
    yield ("fD", "fD"), (gate, up), "[F+F]D", np.concatenate([gate, up])
    keys, values = rng.normal(size=(K, H, D)), rng.normal(size=(K, V, D))  # unequal parts in each head
    yield ("kHD", "kVD"), (keys, values), "(K[H+V])D", np.concatenate([keys, values], 1).reshape(-1, D)
    gate, up = rng.normal(size=(2, E, D, F))
    yield ("eDf", "eDf"), (gate, up), "ED[F+F]", np.concatenate([gate, up], 2)


@pytest.mark.parametrize(("ours", "arrays", "letters", "tensor"), list(fused_tensors()))
def test_parts_of_a_tensor(ours, arrays, letters, tensor):
    """Any part of each array is read from it; all arrays put in their places make it."""
    rng, again = np.random.default_rng(0), np.zeros_like(tensor)
    sizes = {}
    for names, array in zip(ours, arrays, strict=True):
        sizes |= dict(zip(names.upper(), array.shape, strict=True))
    for part, (names, array) in enumerate(zip(ours, arrays, strict=True)):
        info = ArrayInfo(names, "D", shape=array.shape)
        layout = layout_of(info, Stored("", letters, part, tuple(sizes.items())))
        assert layout.shape == tensor.shape
        source = Source(info, [Held(tensor)], layout)
        for _ in range(5):
            box, index = random_box(rng, info.shape)
            np.testing.assert_array_equal(source.read(box), array[index])
        rows = slice(*layout.rows(0, layout.axes[0].size))
        layout.view(again[rows])[...] = array.transpose(np.argsort(layout.order(info)))
    np.testing.assert_array_equal(again, tensor)


@pytest.mark.parametrize("cfg", [llama3_config(F=72), llama4_config(), llama4_config(M=30, F=45, V=7)])
def test_any_part_of_any_array(cfg):
    """Also what cuts a block or a tensor that is in parts."""
    rng = np.random.default_rng(0)
    for name, declared in named_infos(cfg, format=INT8):
        for info in stored_infos(name, declared).values():
            x = rng.integers(0, 1 << 30, info.shape)
            stored = to_file_order(x, info)
            cuts = np.sort(rng.integers(0, len(stored) + 1, 2))
            tensors = [Held(part) for part in np.split(stored, cuts) if len(part)]
            for _ in range(5):
                box, index = random_box(rng, info.shape)
                found = Source(info, tensors, file_layout(info)).read(box)
                np.testing.assert_array_equal(found, x[index])


def test_padding_is_zeros_and_weights_are_whole(tmp_path):
    """6 query heads on 8 devices: each weight is there once, between zeros."""
    expected = weights_of(LLAMA4)
    sharded = weights_of(LLAMA4, "tp8")
    q, padded = expected.layers[0].attention.q, sharded.layers[0].attention.q
    assert q.shape == (2, 3, 32, 128) and padded.shape == (2, 4, 32, 128)
    np.testing.assert_array_equal(padded[:, :3], q)
    assert not np.asarray(padded[:, 3:]).any()
    assert sum(shard.data.size for shard in padded.addressable_shards) == padded.size


def test_quantized_on_load_equals_quantize():
    """The int8 form of a stored tensor is quantize() of it, in our layout."""
    stored = load_file(LLAMA3 / "model.safetensors")["model.layers.1.self_attn.o_proj.weight"]
    expected = quantize(stored.astype(np.float32).reshape(128, 2, 2, 32), (1, 2, 3))
    o = weights_of(LLAMA3, format=INT8).layers[1].attention.o
    np.testing.assert_array_equal(o.values, expected.values)
    np.testing.assert_array_equal(o.scale, expected.scale)


# --------------------------------------------------------------------------------------- wrong checkpoints


def put(name, x):
    return lambda tensors, config: tensors.update({name: x})


def configure(**fields):
    return lambda tensors, config: config.update(fields)


def without_one_expert(tensors, config):
    unfuse_experts(tensors, config)
    tensors.pop("model.layers.1.feed_forward.experts.2.up_proj.weight")


Q = "model.layers.2.self_attn.q_proj.weight"
WRONG = {
    "missing expert": (without_one_expert, "experts.2.up_proj.weight is missing"),
    "missing tensor": (lambda tensors, config: tensors.pop(Q), Q),
    "extra tensor": (put("model.layers.9.self_attn.q_proj.weight", np.zeros((2, 2), np.float32)), "layers.9"),
    "bias": (put(Q.replace("weight", "bias"), np.zeros(4, np.float32)), "q_proj.bias"),
    "misshapen tensor": (put(Q, np.zeros((128, 192), np.float32)), r"q_proj.weight has shape \(128, 192\)"),
    "integer tensor": (put(Q, np.zeros((192, 128), np.int32)), "q_proj.weight has type I32"),
    "unknown architecture": (
        configure(model_type="mamba"),
        "model_type 'mamba' is not supported \\(deepseek_v3, gemma, .*glm, .*llama4_text, .*smollm3\\)",
    ),
    "unknown head": (configure(architectures=["LlamaForSequenceClassification"]), "SequenceClassification"),
    "attention bias": (configure(attention_bias=True), "attention_bias = True"),
    "quantized source": (configure(quantization_config={"quant_method": "fp7"}), "quant_method = 'fp7'"),
    "unknown field": (configure(logit_softcap=30.0), "logit_softcap = 30.0"),
    "unknown rope": (configure(rope_parameters={"rope_type": "longrope"}), "rope_type 'longrope'"),
    "missing field": (lambda tensors, config: config.pop("hidden_size"), "'hidden_size' is missing"),
    "wrong size": (configure(num_local_experts=8), r"router.weight has shape \(4, 128\)"),
    "text for a number": (configure(num_hidden_layers="four"), "num_hidden_layers"),
    "odd head width": (configure(head_dim=31), "even head_dim"),
    "layer types": (configure(layer_types=[[], [], [], []]), "layer_types do not describe"),
    "too many active": (configure(num_experts_per_tok=5), "5 of 4 experts"),
    "absurd depth": (configure(num_hidden_layers=10**9), "num_hidden_layers"),
    "no heads": (configure(num_key_value_heads=4), "6 attention heads"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_checkpoint(wrong, variant):
    edit, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        open_checkpoint(variant(edit))


@pytest.mark.parametrize("where", ["../x", "/etc/passwd", "a/b", "..", ""])
def test_index_that_leaves_the_folder(where, variant):
    folder = variant(shards=2)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {Q: where}}))
    with pytest.raises(ValueError, match="not a file of this folder"):
        open_checkpoint(folder)


def test_broken_files(variant):
    folder = variant()
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    broken = {
        "cut off: tensor model.norm.weight ends at": whole[:-100],
        "20 bytes, of which [0-9]+ are a header": whole[:20],
        "0 bytes, of which 0 are a header": b"",
        "100 bytes, of which 18446744073709551615 are a header": b"\xff" * 100,
        "model.safetensors: not valid JSON": whole[:8] + b"[" + whole[9:],
        "10 bytes follow tensor model.norm.weight, the last": whole + bytes(10),
    }
    for message, content in broken.items():
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            open_checkpoint(folder)
    file.unlink()
    with pytest.raises(ValueError, match="neither model.safetensors nor"):
        open_checkpoint(folder)
    for text in ("{", "[]", "\x00"):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match="config.json: not"):
            open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="no config.json"):
        open_checkpoint(folder)


def rewrite_header(file, edit):
    """Change a safetensors header: `edit` gets its JSON text and returns another."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = edit(data[8 : 8 + length].decode()).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def with_offsets(name, offsets):
    def edit(text):
        header = json.loads(text)
        header[name]["data_offsets"] = offsets(*header[name]["data_offsets"])
        return json.dumps(header)

    return edit


NORM = "model.norm.weight"
WRONG_HEADERS = {
    f"tensor {NORM} overlaps tensor": with_offsets(NORM, lambda lo, hi: [lo - 256, hi - 256]),
    f"tensor {NORM} has shape (.*) of BF16, but bytes": with_offsets(NORM, lambda lo, hi: [lo, hi - 2]),
    f"tensor {NORM} has no proper dtype, shape and data_offsets": with_offsets(NORM, lambda lo, hi: [-1, hi]),
    f"cut off: tensor {NORM} ends at byte": with_offsets(NORM, lambda lo, hi: [lo + 2**40, hi + 2**40]),
    f"{NORM} is there twice": lambda text: text.rstrip()[:-1] + f', "{NORM}": {{}}}}',
    "there is a gap before tensor": lambda text: json.dumps(dict(list(json.loads(text).items())[2:])),
}


@pytest.mark.parametrize("message", WRONG_HEADERS)
def test_wrong_headers(message, variant):
    folder = variant()
    rewrite_header(folder / "model.safetensors", WRONG_HEADERS[message])
    with pytest.raises(ValueError, match=f"model.safetensors: .*{message}"):
        open_checkpoint(folder)


def test_wrong_shards(variant):
    """A shard that is not there, a tensor that is not where the index says, and one that is in two files."""
    folder = variant(shards=2)
    first, second = sorted(folder.glob("model-*"))
    index, whole = folder / "model.safetensors.index.json", second.read_bytes()
    weight_map = json.loads(index.read_text())["weight_map"]
    second.unlink()
    with pytest.raises(ValueError, match=f"{second.name}: no such file; is the download complete"):
        open_checkpoint(folder)
    second.write_bytes(whole)
    moved = next(name for name, file in weight_map.items() if file == second.name)
    index.write_text(json.dumps({"weight_map": weight_map | {moved: first.name}}))
    with pytest.raises(ValueError, match=f"{first.name}: tensor {moved} is not in it"):
        open_checkpoint(folder)
    index.write_text(json.dumps({"weight_map": weight_map}))
    save_file(load_file(second) | {"model.norm.weight": np.ones(128, np.float32)}, second)
    save_file(load_file(first) | {"model.norm.weight": np.ones(128, np.float32)}, first)
    with pytest.raises(ValueError, match=f"{second.name}: tensor model.norm.weight is also in {first.name}"):
        open_checkpoint(folder)


def test_index_with_absent_tensors(variant):
    """Those that the model does not use need not be in a file; those that it uses must be."""
    folder = variant(wrap_multimodal, shards=2)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    file, expected = weight_map[f"language_model.{Q}"], weights_of(LLAMA4)
    for name in ("vision_model.absent", "language_model.model.layers.0.self_attn.rotary_emb.inv_freq"):
        index.write_text(json.dumps({"weight_map": weight_map | {name: file}}))
        assert_equal(weights_of(folder), expected)
    missing = Q.replace("q_proj", "x_proj")
    index.write_text(json.dumps({"weight_map": weight_map | {missing: file}}))
    with pytest.raises(ValueError, match=f"{file}: tensor {missing} is not in it, though the index says so"):
        open_checkpoint(folder)
    index.write_text(json.dumps({"weight_map": weight_map}))
    save_file({name: x for name, x in load_file(folder / file).items() if Q not in name}, folder / file)
    with pytest.raises(ValueError, match=f"{file}: tensor language_model.{Q} is not in it"):
        open_checkpoint(folder)


def test_index_with_a_tied_unembedding(variant):
    folder = variant(source=LLAMA3, shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = content["weight_map"][NORM]
    index.write_text(json.dumps(content))
    assert_equal(weights_of(folder), weights_of(LLAMA3))


PICKLED = [
    "pytorch_model.bin",
    "pytorch_model-00001-of-00002.bin",
    "consolidated.00.pth",
    "model.pt",
    "x.ckpt",
]


@pytest.mark.parametrize("name", PICKLED)
def test_pickled_weights(name, variant):
    """The error names a file and says what to do; transformers can write the .bin files again."""
    folder = variant()
    (folder / "model.safetensors").unlink()
    (folder / "training_args.bin").write_bytes(b"")
    (folder / name).write_bytes(b"")
    call = f"AutoModelForCausalLM.from_pretrained('{folder}').save_pretrained('NEW_DIR')"
    with pytest.raises(ValueError) as error:
        open_checkpoint(folder)
    assert f"{error.value}".startswith(f"{folder}: has no safetensors files; {name} is pickled")
    assert "\n" not in f"{error.value}" and (call in f"{error.value}") == (name[-4:] == ".bin")


FIRST = "weights-00001.safetensors"
WRONG_INDICES = {
    "has format None, not 1": lambda index: index["metadata"].pop("format"),
    "no files in it": lambda index: index.update(files=[]),
    "no metadata in it": lambda index: index.update(metadata="1"),
    "no weights-00001": lambda index: index["files"].update({FIRST: 5}),
    "its checksums are not of": lambda index: index["checksums"].pop("norm"),
    "bytes, not 5 as": lambda index: index["files"][FIRST].update(bytes=5),
    "tensor norm is not the one that": lambda index: index["checksums"].update(norm="0" * 64),
}


def test_wrong_index(tmp_path):
    """Of a converted folder. Those of another format may have other layouts of the same shape."""
    convert(str(LLAMA3), str(tmp_path / "x"))
    whole = (tmp_path / "x" / INDEX).read_text()
    for message, edit in WRONG_INDICES.items():
        index = json.loads(whole)
        edit(index)
        (tmp_path / "x" / INDEX).write_text(json.dumps(index))
        with pytest.raises(ValueError, match=message):
            open_checkpoint(tmp_path / "x")


MANY_WEIGHTS = """
import jax
import model
import resource
from conftest import llama3_config
from quantize import INT8
from sharding.mesh import make_mesh
compiled = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))

def made(layers: int):
    cfg = llama3_config(D=512, F=4096, depth=layers)
    compiled.clear()
    weights = model.init_weights(jax.random.key(0), cfg, make_mesh(cfg), "bfloat16", INT8)
    programs = sum("backend_compile" in event for event in compiled)
    return weights, programs, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

few, programs, before = made(1)  # with all that compiling takes
many, more_programs, peak = made(5)
weights = 4 * sum(x.size for x in jax.tree.leaves(few.layers))
assert more_programs < programs, (programs, more_programs)
assert peak - before < 2.5 * weights, (before, peak, weights)
"""


def test_init_weights_one_at_a_time():
    """Peak memory has one weight in float32, not all; a deeper model compiles no more programs."""
    root = pathlib.Path(model.__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}", "DEVICES": "1"}
    subprocess.run([sys.executable, "-c", MANY_WEIGHTS], env=environment, check=True)
