"""Hugging Face safetensors -> our checkpoint on disk, and loading either kind straight onto a mesh.

    python3 convert_checkpoint.py SRC DST [--quantize int8|none] [--dtype bfloat16|float32]

SRC is a folder or a hub id. DST gets the model's own config.json and tokenizer, and the weights in the layout
that model.py declares: safetensors files of about 1 GiB or one tensor, independent of any mesh, and an index.
One such file is in memory at a time. DST appears when it is whole.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from ml_dtypes import bfloat16
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import model
from model import ArrayInfo, Config, LayerKind, Rope, Weights
from quantize import QuantizedArray, quantize

INDEX = "weights.safetensors.index.json"  # its presence tells our folders from Hugging Face's
FILE_BYTES = 2**30
DTYPES = {"bfloat16": np.dtype(bfloat16), "float32": np.dtype("float32")}
SAFETENSORS_NAMES = {"bfloat16": "BF16", "float32": "F32"}
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
)

# Published checkpoints call the same tensor by several names.
RENAMES = (
    (re.compile(r"^(model\.)?language_model\.(model\.)?(?!lm_head)"), "model."),
    (re.compile(r"^language_model\.(?=lm_head)"), ""),
    (re.compile(r"\.feed_forward\."), ".mlp."),
)
IGNORED = re.compile(r"^(model\.)?(vision_model|multi_modal_projector)\.|\.rotary_emb\.inv_freq$")

Progress = Callable[[str, int, int], None]  # (what, weights done, weights in all)


def show_progress(what: str, done: int, total: int) -> None:
    """One line on stderr: rewritten in place on a terminal, elsewhere only the last."""
    line = f"{what}: {100 * done // max(total, 1)}% of {total:,} weights"
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done == total:
        print(line, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------- reading a folder


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: its shape and type are known, its values are read when asked for."""

    name: str
    file: pathlib.Path
    handle: object

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.handle.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        return self.handle.get_slice(self.name).get_dtype()

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return self.handle.get_slice(self.name)[index]

    def read(self) -> np.ndarray:
        return self.handle.get_tensor(self.name)

    def check(
        self, shape: tuple[int, ...], dtypes: tuple[str, ...] = ("F32", "F16", "BF16")
    ) -> "StoredTensor":
        if self.shape != shape:
            raise ValueError(
                f"{self.file}: tensor {self.name} has shape {self.shape}, but config.json asks for {shape}"
            )
        if self.dtype not in dtypes:
            raise ValueError(
                f"{self.file}: tensor {self.name} has type {self.dtype}, not {' or '.join(dtypes)}"
            )
        return self


def open_tensors(folder: pathlib.Path, index_name: str, single_name: str) -> dict[str, StoredTensor]:
    """The tensors of the safetensors files that an index lists, or of the one file; only headers are read."""
    index = folder / index_name
    wanted = read_json(index).get("weight_map") if index.exists() else {}
    if not isinstance(wanted, dict):
        raise ValueError(f"{index}: no weight_map in it; download it again")
    for name, file in wanted.items():
        if not isinstance(file, str) or pathlib.PurePath(file).name != file or file in ("", ".", ".."):
            raise ValueError(
                f"{index}: tensor {name} is said to be in {file!r}, which is not a file of this folder"
            )
    files = sorted(set(wanted.values())) or [single_name]
    tensors = {}
    for file in (folder / name for name in files):
        if not file.is_file():
            raise ValueError(f"{file}: no such file; is the download complete?")
        try:
            handle = safe_open(file, framework="numpy")
        except SafetensorError as e:
            raise ValueError(
                f"{file}: not a whole safetensors file ({e}); download or convert it again"
            ) from None
        for name in handle.keys():
            if name in tensors:
                raise ValueError(f"{file}: tensor {name} is also in {tensors[name].file.name}")
            tensors[name] = StoredTensor(name, file, handle)
    missing = sorted(set(wanted) - set(tensors))
    if missing:
        raise ValueError(
            f"{folder / wanted[missing[0]]}: tensor {missing[0]} is missing, though {index_name} lists it"
        )
    return tensors


def read_json(file: pathlib.Path) -> dict:
    """The object in a JSON file. Raises ValueError naming the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ValueError(f"{file}: not valid JSON ({e})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: not a JSON object")
    return value


def find_folder(path_or_id: str) -> pathlib.Path:
    """The folder itself, or where the hub's copy of a model (`owner/name`) was downloaded to."""
    folder = pathlib.Path(os.path.expanduser(path_or_id))
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path_or_id):
        raise ValueError(f"{path_or_id}: no such folder (and a hub id would be OWNER/NAME)")
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return pathlib.Path(
            huggingface_hub.snapshot_download(
                path_or_id, allow_patterns=[*COMPANIONS, "*.safetensors", "*.index.json"]
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as e:
        reason = str(e).strip().split("\n")[0]
        raise ValueError(f"{path_or_id}: no such folder, and the hub did not give it: {reason}") from None


# --------------------------------------------------------------------------------------- reading config.json


class _Fields:
    """A config.json being read: every field is taken, known to have no effect on inference, or refused."""

    FIXED = dict(hidden_act="silu", attention_bias=False, mlp_bias=False)
    NO_EFFECT = frozenset(
        """architectures attention_dropout boi_token_index bos_token_id cache_implementation dtype
        eoi_token_index eos_token_id
        for_llm_compressor image_token_index initializer_range model_type output_router_logits pad_token_id
        pretraining_tp router_aux_loss_coef router_jitter_noise torch_dtype transformers_version unsloth_fixed
        unsloth_version use_cache""".split()
    )
    REQUIRED = object()

    def __init__(self, config: dict):
        self.left = {k: v for k, v in config.items() if k not in self.NO_EFFECT and not k.startswith("_")}

    def take(self, name: str, kind: type | tuple[type, ...], default=REQUIRED):
        """The value of a field, which must be of this type; null is absent, and numbers are positive."""
        value = self.left.pop(name, None)
        if value is None:
            if default is self.REQUIRED:
                raise ValueError(f"config.json: field {name!r} is missing")
            return default
        number = kind in (int, NUMBER)
        if not isinstance(value, kind) or (number and (isinstance(value, bool) or not 0 < value < 2**31)):
            raise ValueError(f"config.json: {name} = {value!r} makes no sense")
        return value

    def finish(self) -> None:
        for name, value in self.left.items():
            # A field that is null, false or empty asks for nothing.
            if value and value != self.FIXED.get(name):
                raise ValueError(f"config.json: {name} = {value!r} is not supported")


NUMBER = (int, float)


def read_config(config: dict) -> Config:
    """Config from a Hugging Face config.json. Raises ValueError naming the field that is wrong."""
    names = config.get("architectures") or []
    for name in names if isinstance(names, list) else [names]:
        if not str(name).endswith(("ForCausalLM", "ForConditionalGeneration")):
            raise ValueError(f"config.json: architecture {name!r} has no language model's head")
    if config.get("model_type") == "llama4":
        if not isinstance(config.get("text_config"), dict):
            raise ValueError("config.json: field 'text_config' is missing")
        around = {k: v for k, v in config.items() if k not in ("text_config", "vision_config")}
        config = around | config["text_config"]
    family = config.get("model_type")
    if family not in ("llama", "llama4_text"):
        raise ValueError(f"config.json: model_type {family!r} is not supported (llama, llama4, llama4_text)")
    fields = _Fields(config)
    take = fields.take
    width, heads = take("hidden_size", int), take("num_attention_heads", int)
    kv_heads = take("num_key_value_heads", int, heads)
    if heads % kv_heads:
        raise ValueError(
            f"config.json: {heads} attention heads are no multiple of {kv_heads} key/value heads"
        )
    special = _llama4_fields(fields) if family == "llama4_text" else _llama3_fields(fields)
    cfg = Config(
        D=width, K=kv_heads, G=heads // kv_heads, H=take("head_dim", int, width // heads),
        V=take("vocab_size", int), norm_eps=take("rms_norm_eps", NUMBER),
        max_positions=take("max_position_embeddings", int),
        tied_embeddings=take("tie_word_embeddings", bool, False),
        rope=_read_rope(fields, interleaved=family == "llama4_text"), **special,
    )  # fmt: skip
    fields.finish()
    if cfg.H < 2 or cfg.H % 2:
        raise ValueError(f"config.json: RoPE needs an even head_dim, not {cfg.H}")
    if cfg.A > cfg.E:
        raise ValueError(f"config.json: num_experts_per_tok = {cfg.A} of {cfg.E} experts")
    return cfg


def _depth(fields: _Fields) -> int:
    depth = fields.take("num_hidden_layers", int)
    if depth > 1000:  # a list of that many layers is about to be made
        raise ValueError(f"config.json: num_hidden_layers = {depth} makes no sense")
    return depth


def _llama3_fields(fields: _Fields) -> dict:
    depth = _depth(fields)
    return dict(F=fields.take("intermediate_size", int), layers=(LayerKind(),) * depth)


def _llama4_fields(fields: _Fields) -> dict:
    take = fields.take
    depth, every = _depth(fields), take("no_rope_layer_interval", int, 4)
    # A 1 in no_rope_layers means that the layer does have RoPE.
    rope = take("no_rope_layers", list, []) or [(i + 1) % every != 0 for i in range(depth)]
    chunked = ["chunked_attention" if has_rope else "full_attention" for has_rope in rope]
    chunked = take("layer_types", list, chunked)
    moe_every = take("interleave_moe_layer_step", int, 1)
    moe = take("moe_layers", list, list(range(moe_every - 1, depth, moe_every)))
    known = all(kind in ("chunked_attention", "full_attention") for kind in chunked)
    if not len(rope) == len(chunked) == depth or not known:
        raise ValueError(f"config.json: no_rope_layers or layer_types do not describe {depth} layers")
    chunk = take("attention_chunk_size", int, None)
    temperature = take("attn_scale", NUMBER, 0.1), take("floor_scale", NUMBER, 8192)
    return dict(
        F=take("intermediate_size_mlp", int), M=take("intermediate_size", int),
        E=take("num_local_experts", int), A=take("num_experts_per_tok", int),
        layers=tuple(
            LayerKind(bool(rope[i]), chunk if chunked[i] == "chunked_attention" else None, i in moe)
            for i in range(depth)
        ),
        qk_norm=take("use_qk_norm", bool, True),
        temperature=temperature if take("attn_temperature_tuning", (bool, int), True) else None,
    )  # fmt: skip


def _read_rope(fields: _Fields, interleaved: bool) -> Rope:
    """RoPE from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    theta = fields.take("rope_theta", NUMBER, 500000.0 if interleaved else 10000.0)
    scaling = fields.take("rope_scaling", dict, {})
    rope = _Fields(fields.take("rope_parameters", dict, scaling))
    theta = rope.take("rope_theta", NUMBER, theta)
    kind = rope.take("type", str, "default")  # the name before it was rope_type
    kind = rope.take("rope_type", str, kind)
    if kind not in ("default", "llama3"):
        raise ValueError(f"config.json: rope_type {kind!r} is not supported (default, llama3)")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    numbers = tuple(float(rope.take(name, NUMBER)) for name in names) if kind == "llama3" else None
    rope.finish()
    return Rope(float(theta), numbers, interleaved)


# ----------------------------------------------------------------------------- from stored tensors to weights


@dataclasses.dataclass(frozen=True)
class Source:
    """The stored tensors that make up one declared weight, and their layout, written as in ArrayInfo.stored.

    One tensor; one per expert; or, in a converted folder, the int8 values and their scale.
    """

    tensors: list[StoredTensor]
    letters: str


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened folder. converted: in our layout; quantized: its matmul weights are int8 already."""

    folder: pathlib.Path
    config: Config
    sources: dict[str, Source]
    converted: bool
    quantized: bool

    @property
    def dtype(self) -> str:
        """The float type of its weights: bfloat16 or float32."""
        return "float32" if self.sources["norm"].tensors[0].dtype == "F32" else "bfloat16"


def named_infos(config: Config) -> Iterator[tuple[str, ArrayInfo]]:
    """Every declared weight with its name in our files, like `layers.0.attention.q`."""
    for path, info in jax.tree_util.tree_leaves_with_path(model.weight_infos(config)):
        yield jax.tree_util.keystr(path, simple=True, separator="."), info


def open_checkpoint(path_or_id: str) -> Checkpoint:
    """Open a converted or a Hugging Face folder, which must hold just the tensors that config.json implies.

    Raises ValueError naming the file, tensor or field that is wrong.
    """
    folder = find_folder(path_or_id)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no config.json in it; is it a model's folder?")
    try:
        config = read_config(read_json(folder / "config.json"))
    except ValueError as e:
        raise ValueError(f"{folder}: {e}") from None
    converted = (folder / INDEX).exists()
    if converted:
        tensors = open_tensors(folder, INDEX, "")
        quantized = any(name.endswith(".scale") for name in tensors)
        sources = {
            name: _find_ours(tensors, folder, name, info, quantized) for name, info in named_infos(config)
        }
    else:
        tensors = _canonical(open_tensors(folder, "model.safetensors.index.json", "model.safetensors"))
        quantized = False
        sources = {name: _find_hugging_face(tensors, folder, info) for name, info in named_infos(config)}
    used = {tensor.name for source in sources.values() for tensor in source.tensors}
    for name, tensor in tensors.items():
        tied_copy = config.tied_embeddings and name == "lm_head.weight"
        if tensor.name not in used and not IGNORED.search(name) and not tied_copy:
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name} has no place in the model that config.json describes"
            )
    return Checkpoint(folder, config, sources, converted, quantized)


def _canonical(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors under the names that model.py declares."""
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, replacement in RENAMES:
            name = pattern.sub(replacement, name)
        if name in renamed:
            raise ValueError(
                f"{tensor.file}: tensors {tensor.name} and {renamed[name].name} are the same one"
            )
        renamed[name] = tensor
    return renamed


def _find_ours(tensors, folder, name: str, info: ArrayInfo, quantized: bool) -> Source:
    wanted = {name: (info.shape, ("F32", "BF16"))}
    if quantized and info.contracted:
        wanted = {name + ".values": (info.shape, ("I8",)), name + ".scale": (info.scale.shape, ("F32",))}
    for part in wanted:
        if part not in tensors:
            raise ValueError(f"{folder}: tensor {part} is missing; convert the model again")
    return Source([tensors[part].check(*expected) for part, expected in wanted.items()], info.letters.upper())


def _find_hugging_face(tensors, folder, info: ArrayInfo) -> Source:
    sizes = _sizes(info)
    for pattern, letters in info.stored:
        names = [pattern.format(e=e) for e in range(sizes["E"])] if "{e}" in pattern else [pattern]
        missing = [name for name in names if name not in tensors]
        if len(missing) == len(names):
            continue
        if missing:
            raise ValueError(f"{folder}: tensor {missing[0]} is missing, though others like it are there")
        shape = tuple(math.prod(sizes[letter] for letter in group) for group in stored_dimensions(letters))
        return Source([tensors[name].check(shape) for name in names], letters)
    raise ValueError(f"{folder}: tensor {info.stored[0][0]} is missing")


def stored_dimensions(letters: str) -> list[str]:
    """The letters of each stored dimension: "D(KGH)" -> ["D", "KGH"]."""
    return [joined or alone for joined, alone in re.findall(r"\((\w+)\)|(\w)", letters)]


def _sizes(info: ArrayInfo) -> dict[str, int]:
    """Sizes by letter; a digit, which picks one of two halves, stands for 2."""
    return dict(zip(info.letters.upper(), info.shape, strict=True)) | {"0": 2, "1": 2}


def to_our_layout(stored: list[np.ndarray], letters: str, info: ArrayInfo) -> np.ndarray:
    """Stored arrays (one, or one per expert) in the layout `letters` -> the declared weight."""
    sizes, ours = _sizes(info), info.letters.upper()
    x = np.stack(stored) if "E" in ours and "E" not in letters else stored[0]
    flat = [*("E" if x is not stored[0] else ""), *"".join(stored_dimensions(letters))]
    x = x.reshape([sizes[letter] for letter in flat])
    for axis, letter in enumerate(flat):
        if letter.isdigit():
            x = x.take(int(letter), axis)
    flat = [letter for letter in flat if letter.isalpha()]
    return x.transpose([flat.index(letter) for letter in ours])


def read_weight(checkpoint: Checkpoint, name: str, info: ArrayInfo, dtype, quantized: bool):
    """One weight in our layout without padding: something to slice, or a QuantizedArray of two such.

    What a converted folder holds as wanted is read only when sliced. All else is read, transposed, quantised
    and cast here, on the host.
    """
    source = checkpoint.sources[name]
    quantized = quantized and bool(info.contracted)
    if checkpoint.quantized and info.contracted:
        return QuantizedArray(*source.tensors)
    if checkpoint.converted and not quantized and source.tensors[0].dtype == SAFETENSORS_NAMES[dtype]:
        return source.tensors[0]
    x = to_our_layout([tensor.read() for tensor in source.tensors], source.letters, info)
    if quantized:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return jax.tree.map(np.asarray, quantize(np.asarray(x, np.float32), info.contracted_axes))
    return x.astype(DTYPES[dtype])


def load(
    checkpoint: Checkpoint, mesh: Mesh, dtype: str, quantized: bool, progress: Progress = show_progress
) -> Weights:
    """Put the weights on the mesh, each device's shard straight from the file where the layout allows.

    dtype: "bfloat16" or "float32", for what is not int8. quantized: int8 where a matmul contracts; an int8
    checkpoint is so anyway.
    """
    infos = list(named_infos(checkpoint.config))
    total, done, arrays = sum(math.prod(info.shape) for _, info in infos), 0, []
    for name, info in infos:
        x = read_weight(checkpoint, name, info, dtype, quantized)
        if isinstance(x, QuantizedArray):
            arrays.append(QuantizedArray(_place(x.values, info, mesh), _place(x.scale, info.scale, mesh)))
        else:
            arrays.append(_place(x, info, mesh))
        done += math.prod(info.shape)
        progress("loading weights", done, total)
    return jax.tree.unflatten(jax.tree.structure(model.weight_infos(checkpoint.config)), arrays)


def _place(x, info: ArrayInfo, mesh: Mesh) -> jax.Array:
    """Give each device its slice of x, [*info.shape], with zeros for the padding that the mesh needs."""
    padded = info.padded_shape(mesh)

    @functools.cache  # devices that hold the same shard ask for the same bounds
    def read(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        inside = tuple(slice(lo, min(hi, size)) for (lo, hi), size in zip(bounds, info.shape, strict=True))
        if any(part.start >= part.stop for part in inside):
            return np.zeros([hi - lo for lo, hi in bounds], x[tuple(slice(0, 1) for _ in inside)].dtype)
        shard = np.asarray(x[inside])
        return np.pad(shard, [(0, hi - lo - n) for (lo, hi), n in zip(bounds, shard.shape, strict=True)])

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        return read(tuple(part.indices(size)[:2] for part, size in zip(index, padded, strict=True)))

    return jax.make_array_from_callback(padded, NamedSharding(mesh, info.spec), shard)


# ---------------------------------------------------------------------------------------------- converting


def convert(
    source: str, destination: str, quantized: bool = False, dtype: str | None = None, progress=show_progress
):
    """Write the model at `source` (a folder or hub id) to the new folder `destination` in our layout."""
    destination = pathlib.Path(os.path.expanduser(destination))
    if destination.exists():
        raise ValueError(f"{destination}: exists already; choose another name or remove it")
    checkpoint = open_checkpoint(source)
    if checkpoint.quantized and (dtype or not quantized):
        raise ValueError(f"{checkpoint.folder}: is int8 already; convert the original model instead")
    partial = destination.with_name(destination.name + ".incomplete")
    if partial.exists():
        raise ValueError(f"{partial}: exists; is another conversion under way? If not, remove it")
    partial.mkdir(parents=True)
    try:
        _write(checkpoint, partial, quantized, dtype or checkpoint.dtype, progress)
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write(
    checkpoint: Checkpoint, folder: pathlib.Path, quantized: bool, dtype: str, progress: Progress
) -> None:
    """Write weights, index and the model's small files into an empty folder."""
    for pattern in COMPANIONS:
        for companion in checkpoint.folder.glob(pattern):
            if companion.is_file():
                shutil.copy(companion, folder)
    infos = list(named_infos(checkpoint.config))
    total, done = sum(math.prod(info.shape) for _, info in infos), 0
    weight_map, file = {}, {}

    def flush():
        name = f"weights-{len(set(weight_map.values())) + 1:05d}.safetensors"
        try:
            save_file(file, folder / name)
        except SafetensorError as e:
            raise ValueError(f"{folder / name}: could not be written ({e}); is the disk full?") from None
        (folder / name).chmod(0o644)  # safetensors' own is for the owner alone
        weight_map.update(dict.fromkeys(file, name))
        file.clear()

    for name, info in infos:
        x = read_weight(checkpoint, name, info, dtype, quantized)
        parts = (
            {name + ".values": x.values, name + ".scale": x.scale}
            if isinstance(x, QuantizedArray)
            else {name: x}
        )
        file.update({part: np.ascontiguousarray(_whole(y)) for part, y in parts.items()})
        if sum(x.nbytes for x in file.values()) >= FILE_BYTES:
            flush()
        done += math.prod(info.shape)
        progress("converting", done, total)
    if file:
        flush()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1) + "\n")


def _whole(x: StoredTensor | np.ndarray) -> np.ndarray:
    return x.read() if isinstance(x, StoredTensor) else x


class OneLineParser(argparse.ArgumentParser):
    """A bad argument is one line on stderr and exit code 2."""

    def check_positive(self, args, *names: str) -> None:
        """Refuse what was given for these options and is less than 1."""
        for name in names:
            if (value := getattr(args, name)) is not None and value < 1:
                self.error(f"--{name.replace('_', '-')} {value} is not at least 1")

    def error(self, message: str):
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def run(main: Callable[[], None]) -> None:
    """Call main; an error that a user can mend is one line on stderr and exit code 1, an interrupt 130."""
    try:
        main()
    except BrokenPipeError:  # whoever read stdout has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError) as e:
        print("error:", " ".join(str(e).split()), file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def main() -> None:
    parser = OneLineParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", metavar="SRC", help="a Hugging Face model folder, or OWNER/NAME on the hub")
    parser.add_argument("destination", metavar="DST", help="the new folder")
    parser.add_argument("--quantize", choices=("int8", "none"), default="none", help="default: none")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of what is not int8; default: the source's")
    args = parser.parse_args()
    convert(args.source, args.destination, args.quantize == "int8", args.dtype)


if __name__ == "__main__":
    run(main)
