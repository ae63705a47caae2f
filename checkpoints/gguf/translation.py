"""A GGUF file as a Hugging Face folder: config.json, tokenizer files, and tensors with Hugging Face's names.

This undoes what ggml-org/llama.cpp's convert_hf_to_gguf.py does, with the names in architectures.py.
"""

import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from checkpoints.dequantized import Dequantized
from checkpoints.folders import cache_folder, made_once
from checkpoints.gguf.architectures import ARCHITECTURES, NAMES, Architecture
from checkpoints.gguf.container import PLAIN, GgufFile, GgufTensor, open_parts
from checkpoints.gguf.vocabulary import read_vocabulary, write_tokenizer
from checkpoints.tensor_files import StoredTensor, aligned_empty
from distributed.exchange import warn
from families.fields import NUMBER, ConfigFields
from families.registry import read_config
from families.rope_scaling import Llama3Scaling
from feedback.errors import UserError, located

FOLDER = 3  # version of the small files that are written
# The supported values of fields that are not the architecture's. All other fields whose names begin with
# "general." say where the file comes from. Fields with other beginnings than this, "tokenizer.", "split." and
# the architecture's name are notes of the tools that made the file.
GENERAL = {"general.type": "model", "general.quantization_version": 2}
# Fields after "general.sampling." by their names in generation_config.json; others keep their names.
SAMPLING = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
# Tensors of layers with a state, whose rows are those of queries, keys and values, of values, or of heads of
# values; in the file of an architecture that is not `grouped` these heads are in another order. In ssm_out
# they are columns.
QUERIES_KEYS_VALUES, VALUES = ("attn_qkv", "ssm_conv1d"), ("attn_gate", "ssm_out")
VALUE_HEADS = "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"
PIECE = 2**15  # values that are dequantized at a time: few calls, and temporaries fit in a core's cache


def open_gguf(path: pathlib.Path) -> tuple[pathlib.Path, dict[str, StoredTensor | Dequantized]]:
    """-> (a folder with the model's small files, tensors by Hugging Face's names). Raises UserError.

    path: of the file, or of any one of the files NAME-00001-of-00003.gguf that a model is split into.
    """
    file = open_parts(path)
    with located(file.path):
        if file.fields.get("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.pre" not in file.fields:
            warn(
                f"{path}: an older file, which does not say how a text is split into words; GPT-2's way is "
                "taken, with which other models may answer worse: download a newer file"
            )
        architecture, config = _config(file)
        read_config(config)  # before tensors are named and ordered by it
        tensors = dict(_tensors(file, config, architecture))
        return _small_files(file, config), tensors


def _config(file: GgufFile) -> tuple[Architecture, dict[str, Any]]:
    """-> (the file's architecture, a config.json's content)"""
    for name, supported in GENERAL.items():
        if (value := file.fields.get(name, supported)) != supported:
            raise UserError(f"{name} = {value!r} is not supported ({supported!r})")
    name = str(file.fields.get("general.architecture"))
    prefix = f"{name}."
    fields = {x.removeprefix(prefix): y for x, y in file.fields.items() if x.startswith(prefix)}
    experts = bool(fields.get("expert_count"))
    if (name, experts) not in ARCHITECTURES:
        known = ", ".join(name + " with experts" * more for name, more in ARCHITECTURES)
        raise UserError(
            f"general.architecture = {name!r}{' with experts' * experts} is not supported ({known})"
        )
    architecture = ARCHITECTURES[name, experts]
    for x, y in fields.items():
        fields[x] = _shortest(_of_all_layers(prefix + x, y, x in architecture.by_layer))
    config = {"architectures": [architecture.model_class], "model_type": architecture.model_type}
    config |= architecture.config(fields)
    width = fields.pop("rope.dimension_count", None)
    fields.setdefault("attention.key_length", width)
    for other in (width, fields.pop("attention.value_length", None)):
        if other not in (None, fields["attention.key_length"]):
            raise UserError(f"{prefix}attention.key_length and value_length, rope.dimension_count differ")
    # What a field is in llama.cpp, if the file does not say; some families have other values then.
    if "rope_parameters" not in config:
        fields.setdefault("rope.freq_base", 10000.0)
    fields.setdefault("attention.head_count_kv", fields.get("attention.head_count"))
    config |= architecture.config_fields(fields, prefix)
    config |= {field: tensor in file.tensors for field, tensor in architecture.optional.items()}
    if architecture.proportional_rope:
        config["rope_parameters"]["full_attention"] |= _proportional(_factors(file))
    elif "rope_freqs.weight" in file.tensors:
        if config.get("rope_scaling"):
            raise UserError(f"tensor rope_freqs.weight beside {prefix}rope.scaling.type is not supported")
        theta = ConfigFields(config).take("rope_theta", NUMBER)
        config["rope_scaling"] = _llama3_scaling(_factors(file), theta)
    if "token_embd.weight" not in file.tensors:
        raise UserError("tensor token_embd.weight is missing")
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    return architecture, config


def _factors(file: GgufFile) -> np.ndarray:
    """What divides each frequency of RoPE. Raises UserError."""
    if "rope_freqs.weight" not in file.tensors:
        raise UserError("tensor rope_freqs.weight is missing")
    return np.array(file.tensors["rope_freqs.weight"].values)


def _proportional(factors: np.ndarray) -> dict[str, Any]:
    """RoPE of a part of the frequencies, the others of which the file divides by 1e30. Raises UserError."""
    kept = int((factors == 1).sum())
    if not ((factors[:kept] == 1).all() and (factors[kept:] >= 1e29).all()):
        raise UserError("tensor rope_freqs.weight is not that of proportional RoPE")
    return {"rope_type": "proportional", "partial_rotary_factor": kept / len(factors)}


def _of_all_layers(name: str, value: Any, may_differ: bool) -> Any:
    """The number that all layers share, of a field that may give each layer its own.

    may_differ: whether the numbers may differ, which are returned then. If not, raises UserError.
    """
    if not isinstance(value, list) or any(isinstance(x, (bool, str, list)) for x in value):
        return value
    if len(set(value)) == 1:
        return value[0]
    if not may_differ:
        raise UserError(f"{name} differs from layer to layer, which is not supported: {str(value)[:40]}")
    return value


def _shortest(value: Any) -> Any:
    """The shortest decimal of a 32-bit float: 0.00001, not 0.0000099999997. Other values as they are."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _llama3_scaling(factors: np.ndarray, theta: float) -> dict[str, Any]:
    """Llama 3's rope_scaling, found from what divides each frequency. Raises UserError."""
    factor, low, high = float(factors.max()), 1.0, 4.0
    frequencies = theta ** -(np.arange(len(factors)) / len(factors))
    for original in (2**n for n in range(6, 21)):
        scaled = Llama3Scaling(factor, low, high, original)(frequencies, theta)
        if np.allclose(frequencies / scaled, factors, rtol=1e-5):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }  # fmt: skip
    raise UserError("tensor rope_freqs.weight is not that of Llama 3's RoPE with frequency factors 1 and 4")


# ------------------------------------------------------------------------------------------------- tensors


def _tensors(file: GgufFile, config: dict, architecture: Architecture) -> Iterator[tuple[str, Any]]:
    """Yields (Hugging Face's name, tensor); each expert has a tensor of its own."""
    names, depth = NAMES | architecture.names, config["num_hidden_layers"]
    unused = range(depth, depth + config.get("num_nextn_predict_layers", 0))
    # What is not quantized is read from the file as it is if it has the embedding's type. Norms, routers and
    # convolutions are float32 in most files. They must not decide the model's type, so they are converted.
    as_it_is = PLAIN.keys() & {file.tensors["token_embd.weight"].kind}
    for name, raw in file.tensors.items():
        if name == "rope_freqs.weight":
            continue
        layer, what, end = re.fullmatch(r"(?:blk\.(\d+)\.)?(.*?)(\.weight|\.bias|)", name).groups()
        if layer and int(layer) in unused:
            continue
        theirs = names.get(what + end) or (names[what] + end if end and what in names else None)
        if not theirs or layer and int(layer) >= depth:
            raise UserError(f"tensor {name} has no place in a {config['model_type']} model of {depth} layers")
        theirs = (f"model.layers.{layer}." if layer else "") + theirs
        order = _order(what, raw, config, architecture)
        if what == "ffn_gate_inp_shexp":  # which some files have as a vector
            raw = dataclasses.replace(raw, shape=(1, raw.shape[-1]))
        if what == "ssm_conv1d":
            raw = dataclasses.replace(raw, shape=(raw.shape[0], 1, raw.shape[-1]))
        if "{e}" in theirs:
            for e in range(raw.shape[0]):
                yield theirs.format(e=e), floats_of(theirs.format(e=e), raw, expert=e)
        elif architecture.norm_offset and what.endswith("norm") and what != "ssm_norm":
            yield theirs, _less(floats_of(theirs, raw), architecture.norm_offset)
        elif what == "ssm_a":
            yield theirs, _log_of_negative(floats_of(theirs, raw, order))
        elif what == "ssm_out" and order is not None:
            yield theirs, _columns(floats_of(theirs, raw), order)
        elif order is not None:
            yield theirs, floats_of(theirs, raw, order)
        elif raw.kind in as_it_is:
            yield theirs, dataclasses.replace(raw, name=theirs)
        else:
            yield theirs, floats_of(theirs, raw)


def _less(tensor: Dequantized, offset: float) -> Dequantized:
    return dataclasses.replace(tensor, rows=lambda lo, hi: tensor.rows(lo, hi) - np.float32(offset))


def _log_of_negative(tensor: Dequantized) -> Dequantized:
    return dataclasses.replace(tensor, rows=lambda lo, hi: np.log(-tensor.rows(lo, hi)))


def _columns(tensor: Dequantized, order: np.ndarray) -> Dequantized:
    return dataclasses.replace(tensor, rows=lambda lo, hi: tensor.rows(lo, hi)[:, order])


def _order(what: str, raw: GgufTensor, config: dict, architecture: Architecture) -> np.ndarray | None:
    """The index in the file of each row, or of each column of ssm_out; None: the order is the same."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(what)
    if architecture.interleaved and heads:
        return _halves(raw.shape[0], config[heads])
    if architecture.grouped or what not in QUERIES_KEYS_VALUES + VALUES + VALUE_HEADS:
        return None
    names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"
    J, N, X, Y = (config[f"linear_{name}"] for name in names)
    before, width = 2 * J * X * (what in QUERIES_KEYS_VALUES), 1 if what in VALUE_HEADS else Y
    values = np.arange(N * width).reshape(N // J, J, width).swapaxes(0, 1).reshape(-1)
    return np.concatenate([np.arange(before), before + values])


def _halves(rows: int, heads: int) -> np.ndarray:
    """[rows]: the index of each row in a file that interleaves the two halves of a head."""
    if rows % (2 * heads):
        raise UserError(f"q or k has {rows} rows for {heads} heads")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


@functools.cache  # there may be many thousands of experts' tensors
def _can_dequantize(kind: int) -> bool:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    ggml_type = GGMLQuantizationType(kind)
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[ggml_type][1], np.uint8), ggml_type)
    except NotImplementedError:
        return False
    return True


def floats_of(
    name: str, raw: GgufTensor, order: np.ndarray | None = None, expert: int | None = None
) -> Dequantized:
    """A tensor, or one expert's part of it, dequantized. order: the indices of its rows."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind, ggml_type = raw.kind, GGMLQuantizationType(raw.kind)
    block, nbytes = GGML_QUANT_SIZES[ggml_type]

    def floats(x: np.ndarray) -> np.ndarray:
        x = np.ascontiguousarray(x)
        if kind in PLAIN:
            return x.astype(np.float32)
        values = aligned_empty((*x.shape[:-1], x.shape[-1] // nbytes * block), np.float32)
        stored, found, step = x.reshape(-1, nbytes), values.reshape(-1, block), PIECE // block
        for lo in range(0, len(stored), step):  # as one row each: gguf loops over rows, 16 at a time
            piece = dequantize(stored[lo : lo + step].reshape(-1), ggml_type)
            found[lo : lo + step] = piece.reshape(-1, block)
        return values

    if not _can_dequantize(kind):
        raise UserError(f"tensor {raw.name} is {ggml_type.name}, which cannot be read")
    shape = raw.shape if kind in PLAIN else (*raw.shape[:-1], raw.shape[-1] // nbytes * block)
    shape = shape if expert is None else shape[1:]

    def rows(lo: int, hi: int) -> np.ndarray:
        if expert is not None:
            return floats(raw.read(expert, expert + 1, lambda x: x[0, lo:hi]))
        if order is None:
            return floats(raw.read(lo, hi))
        wanted = order[lo:hi]
        first = wanted.min()
        return floats(raw.read(first, wanted.max() + 1)[wanted - first])

    users = 1 if expert is None else raw.shape[0]
    return Dequantized(name, shape, (raw,), rows, mxfp4=ggml_type.name == "MXFP4", users=users)


# --------------------------------------------------------------------------------------------- small files


def _small_files(file: GgufFile, config: dict) -> pathlib.Path:
    """A folder in the cache, written once: config.json, generation_config.json, and the tokenizer's files."""

    def write(folder: pathlib.Path) -> None:
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        (folder / "generation_config.json").write_text(json.dumps(_generation_config(file.fields)))
        write_tokenizer(file.fields, folder)

    version = importlib.metadata.version("transformers")
    name = f"{file.path.stem}-{file.checksum[:16]}-{version}-{FOLDER}"
    return made_once(cache_folder() / "gguf" / name, write)


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The content of a generation_config.json: the tokens that end an answer, and how to sample it."""
    prefix = "general.sampling."
    found = {x.removeprefix(prefix): _shortest(y) for x, y in fields.items() if x.startswith(prefix)}
    sampling = {SAMPLING.get(name, name): value for name, value in found.items()}
    if sampling:
        sampling["do_sample"] = sampling.get("temperature") != 0
    suppressed = fields.get("tokenizer.ggml.suppress_tokens")
    vocabulary = read_vocabulary(fields)
    ends = [vocabulary.special(fields, x) for x in ("eos", "eot", "eom")]
    ends = dict.fromkeys(x for x in [*ends, *vocabulary.ends] if x is not None)
    others = {"eos_token_id": list(ends), "suppress_tokens": suppressed}
    return sampling | {name: value for name, value in others.items() if value}
