"""GGUF files: written here with the package gguf, they are read as what the package says they hold."""

import dataclasses
import functools
import json
import shutil

import gguf
import jax
import numpy as np
import pytest
import transformers
from conftest import CHECKPOINTS
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from checkpoints.checkpoint import open_checkpoint
from checkpoints.gguf.container import GgufFile
from checkpoints.gguf.translation import floats_of
from checkpoints.loading import plan_weights
from checkpoints.tensor_files import ALIGNMENT
from conversation.text import load_tokenizer
from convert_checkpoint import convert
from families.registry import read_config
from feedback.errors import UserError
from quantize import INT8
from sharding.mesh import make_mesh

LLAMA3 = CHECKPOINTS / "tiny-llama3"
CONFIG = json.loads((LLAMA3 / "config.json").read_text())
TENSORS = load_file(LLAMA3 / "model.safetensors")
HEADS, KV_HEADS, WIDTH = 4, 2, 32
NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 4)
pytestmark = pytest.mark.usefixtures("own_cache")


def their_order(x, heads: int):
    """Rows of q or k as llama.cpp wants them."""
    return x.reshape(heads, 2, len(x) // heads // 2, -1).swapaxes(1, 2).reshape(x.shape)


def published(folder, floats: dict):
    """A folder with the same weights as floats."""
    shutil.copytree(LLAMA3, folder)
    save_file({name: np.ascontiguousarray(x) for name, x in floats.items()}, folder / "model.safetensors")
    return folder


def write(path, kind=Kind.F32, fault=lambda writer: None, fields=True, tensors=True, **split):
    """The tiny model, its matrices of this kind -> what they hold, by their names in a published folder."""
    writer, floats = gguf.GGUFWriter(path, "llama", **split), {}
    if fields:
        rope = CONFIG["rope_parameters"]
        writer.add_block_count(4)
        writer.add_context_length(512)
        writer.add_embedding_length(128)
        writer.add_feed_forward_length(256)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(WIDTH)
        writer.add_vocab_size(512)
        add_tokenizer(writer)
        writer.add_tensor("rope_freqs.weight", rope_factors())
    for name, x in TENSORS.items() if tensors else ():
        x, (base, _, end) = x.astype(np.float32), name.rpartition(".")
        if x.ndim == 1:
            data, floats[name] = x, x
        else:
            data = quantize(x, kind)
            floats[name] = dequantize(data, kind)
            heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
            if heads:
                data = their_order(data, heads)
        writer.add_tensor(f"{NAMES.get_name(base)}.{end}", data, raw_dtype=None if x.ndim == 1 else kind)
    fault(writer)
    finish(writer)
    return floats


def finish(writer) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer) -> None:
    content = json.loads((LLAMA3 / "tokenizer.json").read_text())
    tokens = {x["id"]: x["content"] for x in content["added_tokens"]}
    special = set(tokens)
    tokens |= {i: token for token, i in content["model"]["vocab"].items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([tokens[i] for i in range(len(tokens))])
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(6)
    writer.add_add_bos_token(True)
    writer.add_chat_template((LLAMA3 / "chat_template.jinja").read_text())


@functools.cache
def rope_factors() -> np.ndarray:
    """What Llama 3's scaling divides each frequency by, as transformers computes it."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](transformers.LlamaConfig(**CONFIG), "cpu")
    theta = CONFIG["rope_parameters"]["rope_theta"]
    factors = theta ** -(np.arange(0, WIDTH, 2) / WIDTH) / scaled.numpy()
    return factors.round(5).astype(np.float32)  # 8, not 8.000001


KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q8_0]
MORE_KINDS = [Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]


def everything(source) -> np.ndarray:
    return source.read(tuple((0, n) for n in source.info.shape))


def bytes_to_load(checkpoint) -> int:
    """What the progress of loading counts."""
    mesh = make_mesh(checkpoint.config, devices=jax.devices()[:1])
    return sum(plan.nbytes for plan in plan_weights(checkpoint, mesh, "float32", INT8))


def bytes_of_weights(path) -> int:
    return sum(tensor.nbytes for tensor in GgufFile(path).tensors.values() if "rope" not in tensor.name)


@pytest.mark.parametrize("kind", KINDS)
def test_read(kind, tmp_path):
    """Config, and each weight, whole and in part."""
    floats = write(tmp_path / "model.gguf", kind)
    opened = open_checkpoint(str(tmp_path / "model.gguf"))
    assert opened.config == read_config(CONFIG)
    assert opened.dtype == ("float32" if kind == Kind.F32 else "bfloat16")
    assert bytes_to_load(opened) == bytes_of_weights(tmp_path / "model.gguf")
    folder = published(tmp_path / "floats", floats)
    expected, rng = open_checkpoint(str(folder)), np.random.default_rng(1)
    for name, source in opened.sources.items():
        np.testing.assert_array_equal(
            everything(source).astype(np.float32), everything(expected.sources[name])
        )
        ends = [np.sort(rng.choice(n + 1, 2, replace=False)) for n in source.info.shape]
        box = tuple((int(lo), int(hi)) for lo, hi in ends)
        np.testing.assert_array_equal(source.read(box), expected.sources[name].read(box))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("kind", MORE_KINDS)
def test_read_more_kinds(kind, tmp_path):
    """Blocks of random bytes: of some kinds the package writes none."""
    rng, shape = np.random.default_rng(0), (48, 512)
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (shape[0], shape[1] // block * nbytes), np.uint8)

    def more(writer):
        writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=kind)

    write(tmp_path / "model.gguf", fault=more, tensors=False)
    tensor = GgufFile(tmp_path / "model.gguf").tensors["blk.0.ffn_up.weight"]
    found = floats_of("x", tensor)
    assert found.shape == shape
    np.testing.assert_array_equal(found.rows(3, 40), dequantize(data, kind)[3:40])
    assert found.values.ctypes.data % ALIGNMENT == 0  # XLA on a CPU does not copy it
    with pytest.raises(UserError, match="is Q8_1, which cannot be read"):
        floats_of("x", dataclasses.replace(tensor, kind=Kind.Q8_1))


def test_converted(tmp_path):
    """As the same floats are, with the same tokenizer; what was made of the head is kept."""
    path = tmp_path / "model.gguf"
    folder = published(tmp_path / "floats", write(path, Kind.Q8_0))
    for name in (path, folder):
        convert(str(name), str(tmp_path / f"{name.stem}-int8"), format=INT8)
    ours, expected = (open_checkpoint(str(tmp_path / f"{name.stem}-int8")) for name in (path, folder))
    for name, source in ours.sources.items():
        np.testing.assert_array_equal(everything(source), everything(expected.sources[name]))
    found, theirs = (load_tokenizer(x) for x in (ours.folder, LLAMA3))
    assert (found.bos_token, found.eos_token) == (theirs.bos_token, theirs.eos_token)
    assert found.chat_template == theirs.chat_template
    for text in ("How much is 31 plus 4?", "é 漢 🙂 <|eot_id|>x"):
        assert found(text).input_ids == theirs(text).input_ids
    kept = list((tmp_path / "cache" / "llama-jax" / "gguf").iterdir())
    assert len(kept) == 1 and kept[0] == open_checkpoint(str(path)).folder


def test_small_files_are_made_again(tmp_path):
    """If they are damaged, or gone."""
    path = tmp_path / "model.gguf"
    write(path)
    folder = open_checkpoint(str(path)).folder
    whole = {x.name: x.read_bytes() for x in folder.iterdir()}
    for name in whole:
        (folder / name).write_bytes(whole[name][:10])
        assert {x.name: x.read_bytes() for x in open_checkpoint(str(path)).folder.iterdir()} == whole
        (folder / name).unlink()
        assert {x.name: x.read_bytes() for x in open_checkpoint(str(path)).folder.iterdir()} == whole
    assert [x.name for x in folder.parent.iterdir()] == [folder.name]


def said(name, value):
    stated = {name: gguf.GGUFValue(value, gguf.GGUFValueType.get_type(value))}
    return lambda writer: writer.kv_data[0].update(stated)


def unsaid(name):
    return lambda writer: writer.kv_data[0].pop(name)


def renamed(name, other):
    def fault(writer):
        tensors = writer.tensors[0]
        writer.tensors[0] = {other if x == name else x: info for x, info in tensors.items()}

    return fault


WRONG = [
    (said("general.architecture", "mamba"), "general.architecture = 'mamba' is not supported"),
    (said("llama.expert_count", 4), "field 'num_experts_per_tok' is missing"),
    (said("llama.rope.scaling.type", "yarn"), "rope_freqs.weight beside llama.rope.scaling.type is not"),
    (said("llama.rope.scaling.attn_factor", 1.5), "llama.rope.scaling.attn_factor = 1.5 is not supported"),
    (said("llama.rope.scaling.yarn_attn_factor", 1.2), "yarn_attn_factor = 1.2"),
    (said("llama.rope.scaling.yarn_ext_factor", 0.0), "yarn_ext_factor = 0.0"),
    (said("llama.logit_scale", 0.5), "llama.logit_scale = 0.5"),
    (said("llama.attention.causal", False), "llama.attention.causal = False"),
    (said("llama.attention.key_length", 64), "llama.attention.key_length"),
    (said("llama.block_count", 5), "model.layers.4."),
    (said("llama.block_count", 3), "tensor blk.3.attn_norm.weight has no place in a llama model of 3 layers"),
    (unsaid("llama.block_count"), "field 'num_hidden_layers' is missing"),
    (said("llama.block_count", "4"), "num_hidden_layers = '4' makes no sense"),
    (said("general.alignment", 0), "general.alignment = 0"),
    (said("split.count", 3), "is part 1 of 3, so its name must end in -00001-of-00003.gguf"),
    (said("split.count", "3"), "is part 0 of '3', which makes no sense"),
    (unsaid("llama.embedding_length"), "field 'hidden_size' is missing"),
    (said("llama.attention.head_count_kv", [2, 4]), "head_count_kv differs from layer to layer, which"),
    (unsaid("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens is no list of tokens"),
    (said("tokenizer.ggml.token_type", [1, 1]), "does not give each of 512 tokens its type"),
    (said("tokenizer.ggml.model", "plamo"), "tokenizer.ggml.model = 'plamo' is not supported"),
    (unsaid("tokenizer.ggml.merges"), "no tokenizer can be made"),
    (said("tokenizer.ggml.merges", ["ab"]), "no tokenizer can be made"),
    (said("tokenizer.ggml.eot_token_id", "x"), "eot_token_id = 'x', but the vocabulary has the tokens 0 to"),
    (said("tokenizer.ggml.add_bos_token", "yes"), "add_bos_token = yes is neither true nor false"),
    (said("tokenizer.chat_template", 5), "tokenizer.chat_template  = 5 is no text"),
    (said("tokenizer.ggml.pre", ["llama-bpe"]), "tokenizer.ggml.pre = ['llama-bpe'] is not known"),
    # It would be taken for GPT-2's, and the model would see other tokens than it was trained on.
    (said("tokenizer.ggml.pre", "poro-chat"), "tokenizer.ggml.pre = 'poro-chat' is not known, so the token"),
    (said("general.architecture", ["llama"]), """general.architecture = "['llama']" is not supported"""),
    (said("llama.rope.freq_base", "high"), "rope_theta = 'high' makes no sense"),
    (renamed("blk.0.attn_q.weight", "blk.0.attn_qkv.weight"), "blk.0.attn_qkv.weight has no place"),
    (renamed("token_embd.weight", "token_embd.bias"), "token_embd.weight is missing"),
    (lambda writer: writer.add_tensor("output.bias", np.zeros(512, np.float32)), "lm_head.bias"),
]


@pytest.mark.parametrize(("fault", "message"), WRONG)
def test_refused(fault, message, tmp_path):
    write(tmp_path / "model.gguf", fault=fault)
    refused(tmp_path / "model.gguf", message)


def refused(path, *words, named=None) -> None:
    """Opening the file is refused in one line, which begins with the name of the file to blame."""
    with pytest.raises(UserError) as error:
        open_checkpoint(str(path))
    assert str(error.value).startswith(f"{named or path}: ") and all(x in str(error.value) for x in words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fields_alone", [True, False])
def test_split(fields_alone, tmp_path):
    """Whichever part is given, the model is that of one file. The first part may have no tensors."""
    write(tmp_path / "whole.gguf", Kind.Q8_0)
    write(tmp_path / "model.gguf", Kind.Q8_0, split_max_tensors=9, small_first_shard=fields_alone)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert [x.name[5:] for x in parts[:2]] == [f"-0000{i}-of-0000{len(parts)}.gguf" for i in (1, 2)]
    assert len(parts) > 3 and (not GgufFile(parts[0]).tensors) == fields_alone
    expected = open_checkpoint(str(tmp_path / "whole.gguf"))
    for part in parts:
        opened = open_checkpoint(str(part))
        assert opened.config == expected.config
        assert opened.sources.keys() == expected.sources.keys()
        for name, source in opened.sources.items():
            np.testing.assert_array_equal(everything(source), everything(expected.sources[name]))
    kept = [x.name for x in (tmp_path / "cache" / "llama-jax" / "gguf").iterdir()]
    assert len(kept) == 2 and any(x.startswith(parts[0].stem) for x in kept)


def test_split_refused(tmp_path):
    """Missing, renamed or mixed parts."""
    files = []
    for name, tensors in (("model", 16), ("longer", 17), ("shorter", 15)):
        write(tmp_path / f"{name}.gguf", split_max_tensors=tensors)
        files.append(sorted(tmp_path.glob(f"{name}-*.gguf")))
    parts, longer, shorter = files
    assert [len(x) for x in files] == [3, 3, 3]
    third = parts[2].read_bytes()
    parts[2].unlink()
    refused(parts[0], "no such file", "one of 3 parts", named=parts[2])
    parts[2].write_bytes(parts[1].read_bytes())
    refused(parts[0], "split.no = 1, not 2", named=parts[2])
    refused(parts[2], "is part 2 of 3", "must end in -00002-of-00003.gguf")
    parts[2].write_bytes(longer[2].read_bytes())
    refused(parts[0], "3 parts have 37 tensors, but it says 39")
    parts[1].write_bytes(shorter[1].read_bytes())
    refused(parts[1], "is also in model-00001-of-00003.gguf")
    write(tmp_path / "fewer.gguf", split_max_tensors=16, fault=lambda writer: writer.tensors[0].popitem())
    parts[1].write_bytes((tmp_path / "fewer-00002-of-00003.gguf").read_bytes())
    refused(parts[0], "split.tensors.count = 38, not 39", named=parts[1])
    parts[2].write_bytes(third[:-1])
    refused(parts[2], "cut off")
    parts[1].rename(tmp_path / "second.gguf")
    refused(tmp_path / "second.gguf", "is part 2 of 3, so its name")


def test_damaged(tmp_path):
    """Cut off anywhere, or with any byte of its head changed, it is refused in a line, or it is a model."""
    path, broken = tmp_path / "model.gguf", tmp_path / "broken.gguf"
    write(path)
    content, rng = path.read_bytes(), np.random.default_rng(0)
    head = GgufFile(path).position
    with pytest.raises(UserError, match="no such file$"):
        open_checkpoint(str(broken))
    for length in [0, 3, 4, 8, 23, 24, *rng.integers(24, head, 20), len(content) - 1]:
        broken.write_bytes(content[:length])
        with pytest.raises(UserError, match="broken.gguf: "):
            open_checkpoint(str(broken))
    for place in [4, 8, 16, 24, *rng.integers(24, head, 60)]:
        changed = bytearray(content)
        changed[place] ^= 0xFF
        broken.write_bytes(changed)
        try:
            open_checkpoint(str(broken))
        except UserError as e:
            assert str(broken) in str(e)
