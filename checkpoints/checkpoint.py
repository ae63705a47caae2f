"""A model's folder, Hugging Face's or a converted one: its Config, and its weights loaded onto a mesh.

A converted folder has the model's own config.json and tokenizer, and the weights in the layout that model.py
declares, independent of any mesh: safetensors files, and an index with the sizes and checksums of them all.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import hashlib
import itertools
import math
import os
import pathlib
import re
import resource
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

import model
from checkpoints.config_json import read_config
from checkpoints.errors import UserError
from checkpoints.progress import progress
from checkpoints.tensor_files import ALIGNMENT, DTYPES, StoredTensor, TensorFile, array_bytes, parse_json
from model import ArrayInfo, Config, Weights
from ops.platform import platform
from quantize import QuantizedArray, quantize_large

FORMAT = 1  # of converted folders
INDEX = "weights.safetensors.index.json"  # its presence tells our folders from Hugging Face's
THEIR_INDEX, THEIR_FILE = "model.safetensors.index.json", "model.safetensors"
TYPES = {"bfloat16": "BF16", "float32": "F32"}  # safetensors' names
FLOATS = ("F32", "F16", "BF16")
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
)
WORKERS = min(os.cpu_count() or 1, 8)  # threads that read, and so parts of weights in memory at a time
SAMPLERS = 16  # threads that each wait for a few pages at a time

# Published checkpoints call the same tensor by several names.
RENAMES = (
    (re.compile(r"^(model\.)?language_model\.(model\.)?(?!lm_head)"), "model."),
    (re.compile(r"^language_model\.(?=lm_head)"), ""),
    (re.compile(r"\.feed_forward\."), ".mlp."),
)
IGNORED = re.compile(r"^(model\.)?(vision_model|multi_modal_projector)\.|\.rotary_emb\.inv_freq$")


# ------------------------------------------------------------------------------------------- finding a folder


def read_json(file: pathlib.Path) -> dict:
    """The object in a JSON file. Raises UserError naming the file."""
    return parse_json(file.read_bytes(), file)


def find_folder(path_or_id: str) -> pathlib.Path:
    """The folder itself, or where the hub's copy of a model, OWNER/NAME or OWNER/NAME@REVISION, now is."""
    folder = pathlib.Path(os.path.expanduser(path_or_id))
    if folder.is_dir():
        return folder
    hub_id = re.fullmatch(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?", path_or_id)
    if not hub_id:
        raise UserError(f"{path_or_id}: no such folder (and a hub id would be OWNER/NAME)")
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _download(*hub_id.groups())
    except Exception as e:  # the hub's, and those of the HTTP and Xet libraries that it lets through
        # That a file is not in the cache is no reason; why it could not be fetched is.
        cause = e.__cause__ if type(e) is LocalEntryNotFoundError else None
        reason = " ".join(str(cause or e).split())
        raise UserError(f"{path_or_id}: no such folder, and the hub did not give it: {reason}") from None


def _download(name: str, revision: str | None) -> pathlib.Path:
    """The hub's files that are needed; what is in its cache is not fetched again."""
    from huggingface_hub import snapshot_download

    few = [*COMPANIONS, INDEX, THEIR_INDEX]
    folder = pathlib.Path(snapshot_download(name, revision=revision, allow_patterns=few))
    index = next((folder / name for name in (INDEX, THEIR_INDEX) if (folder / name).exists()), None)
    files = set(weight_map_in(read_json(index), index).values()) if index else {THEIR_FILE}
    # The folder is named after the commit: the branch may have moved on.
    return pathlib.Path(snapshot_download(name, revision=folder.name, allow_patterns=sorted(files)))


def companions(folder: pathlib.Path) -> list[pathlib.Path]:
    """The model's small files."""
    return sorted(path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file())


def allow_open_files() -> None:
    """Let this process hold as many open files as it may: a mapped one is open, there may be thousands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a system may have a limit that it does not tell
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2**16 if hard < 0 else hard), hard))


def weight_map_in(content: dict, index: pathlib.Path) -> dict[str, str]:
    """The file of each tensor, by an index. Raises UserError naming what is no file of the same folder."""
    weight_map = object_in(content, "weight_map", index)
    for name, file in weight_map.items():
        if not isinstance(file, str) or pathlib.PurePath(file).name != file or file in ("", ".", ".."):
            raise UserError(
                f"{index}: tensor {name} is said to be in {file!r}, which is not a file of this folder"
            )
    return weight_map


def object_in(around: dict, name: str, file: pathlib.Path) -> dict:
    """A JSON object in another. Raises UserError naming the file if it is not there, or empty."""
    value = around.get(name)
    if not isinstance(value, dict) or not value:
        raise UserError(f"{file}: no {name} in it; download or convert it again")
    return value


def open_tensors(folder: pathlib.Path, weight_map: dict[str, str]) -> dict[str, StoredTensor]:
    """The tensors of these files, of which only the headers are read; `weight_map` may not know them all."""
    allow_open_files()
    tensors = {}
    for path in (folder / name for name in sorted(set(weight_map.values()))):
        if not path.is_file():
            raise UserError(f"{path}: no such file; is the download complete?")
        for name, tensor in TensorFile(path).tensors.items():
            if name in tensors:
                raise UserError(f"{path}: tensor {name} is also in {tensors[name].file.path.name}")
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.path.name != file:
            raise UserError(f"{folder / file}: tensor {name} is not in it, though the index says so")
    return tensors


# ---------------------------------------------------------------------------------- layouts of stored tensors
#
# Stored letters are written as in ArrayInfo.stored, and a letter that is there twice is split: first the
# number of a block, then the place in it. In our files the sharded letters come first, so that what a device
# holds of a weight is a few long runs: "DkgH" is stored as "KGDH". Where that would leave single elements, a
# letter is split: "Df" is stored as "FDF", and half of f is half of the tensor.

SLAB_BYTES = 2**24  # of an array, converted or compared at a time
BLOCKS = 64  # into which a letter is split: a device's share is whole blocks on up to as many devices


def file_letters(info: ArrayInfo) -> str:
    """The order of a weight's letters in our files."""
    sharded = [letter for letter in info.letters if letter.islower()]
    if "".join(sharded) == info.letters[: len(sharded)]:
        return info.letters.upper()
    whole = [letter for letter in info.letters if letter not in sharded]
    split = [sharded[-1]] if info.letters.endswith(sharded[-1]) else []
    return "".join(sharded + whole + split).upper()


def stored_dimensions(letters: str) -> list[str]:
    """The letters of each stored dimension: "D(KGH)" -> ["D", "KGH"]."""
    return [joined or alone for joined, alone in re.findall(r"\((\w+)\)|(\w)", letters)]


def axes_of(letters: str) -> list[tuple[str, int]]:
    """The axes when all that is joined is taken apart, each with how often its letter came before."""
    flat = "".join(stored_dimensions(letters))
    return [(letter, flat[:i].count(letter)) for i, letter in enumerate(flat)]


def axis_sizes(letters: str, info: ArrayInfo) -> list[int]:
    """The size of each of these axes; of a digit, which picks one of two halves, 2."""
    sizes, axes = dict(zip(info.letters.upper(), info.shape, strict=True)), axes_of(letters)

    def size(letter: str, place: int) -> int:
        if letter.isdigit():
            return 2
        if (letter, 1) not in axes:
            return sizes[letter]
        blocks = math.gcd(sizes[letter], BLOCKS)
        return sizes[letter] // blocks if place else blocks

    return [size(*axis) for axis in axes]


def stored_shape(letters: str, info: ArrayInfo) -> tuple[int, ...]:
    sizes = iter(axis_sizes(letters, info))
    return tuple(math.prod(next(sizes) for _ in joined) for joined in stored_dimensions(letters))


def to_file_order(x, info: ArrayInfo):
    """An array in our layout, all of it or of some of its unsplit letters -> in the order of our files."""
    stored = axes_of(file_letters(info))
    sizes = dict(zip(stored, axis_sizes(file_letters(info), info), strict=True))
    ours, shape = [], []
    for letter, size in zip(info.letters.upper(), x.shape, strict=True):
        parts = [axis for axis in stored if axis[0] == letter]
        ours += parts
        shape += [sizes[axis] for axis in parts] if len(parts) > 1 else [size]
    return x.reshape(shape).transpose([ours.index(axis) for axis in stored])


Box = tuple[tuple[int, int], ...]  # of each letter of a weight, which elements [lo, hi)


@dataclasses.dataclass(frozen=True)
class Source:
    """The stored tensors of one declared array, which follow one another along the first of `letters`."""

    info: ArrayInfo
    tensors: tuple[StoredTensor, ...]
    letters: str

    @property
    def nbytes(self) -> int:
        return array_bytes(self.tensors[0].dtype, self.info.shape)

    def read(self, box: Box) -> np.ndarray:
        """A part of the array in our layout: in place where the file has it so, else copied from there."""
        axes, sizes = axes_of(self.letters), axis_sizes(self.letters, self.info)
        ours = self.info.letters.upper()
        width = dict.fromkeys(ours, 1) | {axis[0]: n for axis, n in zip(axes, sizes, strict=True) if axis[1]}
        blocks = {x: (lo // width[x], -(-hi // width[x])) for x, (lo, hi) in zip(ours, box, strict=True)}
        index = [
            int(letter) if letter.isdigit() else slice(None) if place else slice(*blocks[letter])
            for letter, place in axes
        ]
        x = self._rows(*index, shape=sizes[1:])
        kept = [axis for axis in axes if not axis[0].isdigit()]
        x = x.transpose([i for letter in ours for i, axis in enumerate(kept) if axis[0] == letter])
        x = x.reshape([(hi - lo) * width[letter] for letter, (lo, hi) in blocks.items()])
        first = [lo * width[letter] for letter, (lo, _) in blocks.items()]
        return x[tuple(slice(lo - start, hi - start) for (lo, hi), start in zip(box, first, strict=True))]

    def _rows(self, rows: slice, *rest: slice | int, shape: list[int]) -> np.ndarray:
        """[rows, *rest] of the tensors one after another, each [..., *shape]."""
        parts, first = [], 0
        for tensor in self.tensors:
            x = tensor.values.reshape(-1, *shape)
            lo, hi = (min(max(row - first, 0), len(x)) for row in (rows.start, rows.stop))
            if lo < hi:
                parts.append(x[slice(lo, hi), *rest])
                tensor.read_ahead(parts[-1])
            first += len(x)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def slabs(self) -> tuple[str, list[tuple[int, int]]]:
        """How to read it bit by bit: a letter that is not contracted and nowhere split, and its ranges."""
        axes = axes_of(self.letters)
        unfit = {x for x, place in axes + axes_of(file_letters(self.info)) if place or x.isdigit()}
        unfit |= set(self.info.contracted.upper())
        letter = next(x for x, _ in axes if x not in unfit)
        size = self.info.shape[self.info.letters.upper().index(letter)]
        rows = max(SLAB_BYTES * size // self.nbytes, 1)
        return letter, [(lo, min(lo + rows, size)) for lo in range(0, size, rows)]

    def slab(self, letter: str, lo: int, hi: int) -> np.ndarray:
        """All of the array, but of one letter the elements [lo, hi)."""
        letters = zip(self.info.letters.upper(), self.info.shape, strict=True)
        return self.read(tuple((lo, hi) if x == letter else (0, size) for x, size in letters))

    def can_stay(self, part: np.ndarray) -> bool:
        """Whether XLA on a CPU uses this array where it is: in the file."""
        usable = part.flags.c_contiguous and part.ctypes.data % ALIGNMENT == 0
        return usable and any(np.may_share_memory(part, tensor.values) for tensor in self.tensors)

    def forget(self) -> None:
        """Give back the memory of what was read in place."""
        for tensor in self.tensors:
            tensor.forget()


# ------------------------------------------------------------------------------------------- opening a folder


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened folder. sources: by the names of `stored_infos`. converted: in our layout."""

    folder: pathlib.Path
    config: Config
    sources: dict[str, Source]
    converted: bool
    quantized: bool

    @property
    def dtype(self) -> str:
        """The float type that holds its weights, but those of a type of their own: float32 if any has that,
        else bfloat16.
        """
        weights = (
            source for name, source in self.sources.items()
            if not name.endswith(".scale") and source.info.dtype is None
        )  # fmt: skip
        return "float32" if any(x.dtype == "F32" for y in weights for x in y.tensors) else "bfloat16"

    def fingerprint(self) -> str:
        """A checksum of the small files and of the weights' bytes, wherever they are and since when.

        It reads 64 KiB of a tensor at most, so a change between the sampled pages escapes it: of single
        elements, or of one of more than 16 experts in a tensor; not one of training, or of another model. Of
        a converted folder it has the checksums of whole tensors, too, as the files themselves tell them.
        """
        digest = hashlib.sha256()
        for path in companions(self.folder):
            digest.update(repr((path.name, hashlib.sha256(path.read_bytes()).hexdigest())).encode())
        every = dict.fromkeys(x for source in self.sources.values() for x in source.tensors)
        with (
            progress("looking at the weights", len(every), unit="tensor", delay=1) as bar,
            concurrent.futures.ThreadPoolExecutor(SAMPLERS) as pool,
        ):
            for x, sample in zip(every, pool.map(StoredTensor.sample, every), strict=True):
                facts = x.name, x.dtype, x.shape, x.file.metadata.get(x.name), sample
                digest.update(repr(facts).encode())
                bar.update()
        return digest.hexdigest()


def named_infos(config: Config) -> Iterator[tuple[str, ArrayInfo]]:
    """Every declared weight with its name in our files, like `layers.0.attention.q`."""
    for path, info in jax.tree_util.tree_leaves_with_path(model.weight_infos(config)):
        yield jax.tree_util.keystr(path, simple=True, separator="."), info


def stored_infos(name: str, info: ArrayInfo, quantized: bool) -> dict[str, ArrayInfo]:
    """The arrays that stand for a weight: itself, or its int8 values and their scale."""
    if quantized and info.contracted:
        return {name + ".values": info, name + ".scale": info.scale}
    return {name: info}


def float_type(info: ArrayInfo, dtype: str) -> str:
    """safetensors' name of a weight's float type in a model of `dtype`."""
    return TYPES[dtype if info.dtype is None else np.dtype(info.dtype).name]


def open_checkpoint(path_or_id: str) -> Checkpoint:
    """Open a converted or a Hugging Face folder, which must hold just the tensors that config.json implies.

    Raises UserError naming the file, tensor or field that is wrong.
    """
    folder = find_folder(path_or_id)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no config.json in it; is it a model's folder, and whole?")
    try:
        config = read_config(read_json(folder / "config.json"))
    except UserError as e:
        raise UserError(f"{folder}: {e}") from None
    converted = (folder / INDEX).exists()
    return _open_ours(folder, config) if converted else _open_hugging_face(folder, config)


def _open_ours(folder: pathlib.Path, config: Config) -> Checkpoint:
    index = read_index(folder)
    tensors = open_tensors(folder, index["weight_map"])
    for name, tensor in tensors.items():
        checksum = index["checksums"].get(name)
        if checksum is None or checksum != tensor.file.metadata.get(name):
            raise UserError(f"{tensor.file.path}: tensor {name} is not the one that {INDEX} knows")
    parts = collections.defaultdict(list)
    for name in sorted(tensors):  # what follows the slash numbers the parts
        parts[name.partition("/")[0]].append(tensors[name])
    quantized = any(name.endswith(".scale") for name in parts)
    sources = {}
    for weight, declared in named_infos(config):
        for name, info in stored_infos(weight, declared, quantized).items():
            if name not in parts:
                raise UserError(f"{folder}: tensor {name} is missing; convert the model again")
            dtypes = tuple(dict.fromkeys(float_type(info, dtype) for dtype in TYPES))
            if name != weight:
                dtypes = ("I8",) if name.endswith(".values") else ("F32",)
            sources[name] = _source(info, parts.pop(name), file_letters(info), dtypes)
    for tensor in itertools.chain(*parts.values()):
        _no_place(tensor)
    return Checkpoint(folder, config, sources, converted=True, quantized=quantized)


def _open_hugging_face(folder: pathlib.Path, config: Config) -> Checkpoint:
    if (folder / THEIR_INDEX).exists():
        tensors = open_tensors(folder, weight_map_in(read_json(folder / THEIR_INDEX), folder / THEIR_INDEX))
    elif (folder / THEIR_FILE).is_file():
        tensors = TensorFile(folder / THEIR_FILE).tensors
    else:
        raise UserError(f"{folder}: neither {THEIR_FILE} nor {THEIR_INDEX} in it; is the download complete?")
    tensors = _canonical(tensors)
    sources = {name: _find(tensors, folder, info) for name, info in named_infos(config)}
    used = {tensor.name for source in sources.values() for tensor in source.tensors}
    for name, tensor in tensors.items():
        if config.tied_embeddings and name == "lm_head.weight":
            _check_copy(tensor, sources["embed"].tensors[0])
        elif tensor.name not in used and not IGNORED.search(name):
            _no_place(tensor)
    return Checkpoint(folder, config, sources, converted=False, quantized=False)


def _check_copy(tensor: StoredTensor, original: StoredTensor) -> None:
    """Raises UserError if an unembedding is not the embedding that config.json says to use."""
    same = (tensor.dtype, tensor.shape) == (original.dtype, original.shape)
    rows = max(SLAB_BYTES // (array_bytes(original.dtype, original.shape[1:])), 1)
    for lo in range(0, original.shape[0] if same else 0, rows):
        x, y = (z.values[lo : lo + rows].view(np.uint8) for z in (tensor, original))
        same = same and np.array_equal(x, y)
        for z in (tensor, original):
            z.forget()
    if not same:
        raise UserError(
            f"{tensor.file.path}: tensor {tensor.name} is not {original.name}, although config.json says "
            "tie_word_embeddings; set that to false to use both"
        )


def _no_place(tensor: StoredTensor):
    raise UserError(
        f"{tensor.file.path}: tensor {tensor.name} has no place in the model that config.json describes"
    )


def read_index(folder: pathlib.Path) -> dict:
    """The index of a converted folder, whose files must have the sizes that it says. Raises UserError."""
    path = folder / INDEX
    index = read_json(path)
    weight_map = weight_map_in(index, path)
    metadata, checksums, files = (object_in(index, name, path) for name in ("metadata", "checksums", "files"))
    if metadata.get("format") != FORMAT:
        raise UserError(
            f"{path}: has format {metadata.get('format')}, not {FORMAT}, this program's; convert it again"
        )
    if set(checksums) != set(weight_map):
        raise UserError(f"{path}: its checksums are not of its weight_map's tensors; convert the model again")
    for name in files:
        object_in(files, name, path)
    for name in set(weight_map.values()):
        expected, file = object_in(files, name, path).get("bytes"), folder / name
        if file.is_file() and file.stat().st_size != expected:
            raise UserError(f"{file}: has {file.stat().st_size} bytes, not {expected} as {INDEX} says")
    return index


def _canonical(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors under the names that model.py declares."""
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, replacement in RENAMES:
            name = pattern.sub(replacement, name)
        if name in renamed:
            raise UserError(
                f"{tensor.file.path}: tensors {tensor.name} and {renamed[name].name} are the same one"
            )
        renamed[name] = tensor
    return renamed


def _find(tensors: dict[str, StoredTensor], folder: pathlib.Path, info: ArrayInfo) -> Source:
    """What a Hugging Face folder has of a weight, in the first of its published forms that is there."""
    for pattern, letters in info.stored:
        one_per_expert = "{e}" in pattern
        names = [pattern.format(e=e) for e in range(info.shape[0])] if one_per_expert else [pattern]
        missing = [name for name in names if name not in tensors]
        if len(missing) == len(names):
            continue
        if missing:
            raise UserError(f"{folder}: tensor {missing[0]} is missing, though others like it are there")
        return _source(info, [tensors[name] for name in names], letters, FLOATS, one_per_expert)
    raise UserError(f"{folder}: tensor {info.stored[0][0]} is missing")


def _source(
    info: ArrayInfo, tensors: list[StoredTensor], letters: str, dtypes: tuple[str, ...], one_per_expert=False
) -> Source:
    """Raises UserError naming the tensor whose shape or type is wrong."""
    shape = stored_shape(letters, info)
    parts = len(tensors) > 1 and not one_per_expert
    together = sum(tensor.shape[0] if tensor.shape else 0 for tensor in tensors)
    for tensor in tensors:
        fits = tensor.shape[1:] == shape[1:] and together == shape[0] if parts else tensor.shape == shape
        if not fits:
            raise UserError(
                f"{tensor.file.path}: tensor {tensor.name} has shape {tensor.shape}, "
                f"but config.json asks for {shape}"
            )
        if tensor.dtype not in dtypes:
            raise UserError(
                f"{tensor.file.path}: tensor {tensor.name} has type {tensor.dtype}, not {' or '.join(dtypes)}"
            )
    return Source(info, tuple(tensors), "E" + letters if one_per_expert else letters)


# --------------------------------------------------------------------------------------------------- loading


def in_order(function: Callable, items: Iterable, ahead: int) -> Iterator:
    """The results of function(item), in order, of threads that are at most `ahead` items ahead."""
    pending: collections.deque = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def load(checkpoint: Checkpoint, mesh: Mesh, dtype: str, quantized: bool, show: bool = True) -> Weights:
    """Put the weights on the mesh. A process reads what its devices hold; a CPU uses it in place if it can.

    dtype: "bfloat16" or "float32", for what is not int8 and declares no other. quantized: int8 where a matmul
    contracts, computed on the devices; an int8 checkpoint is so anyway. show: progress, on stderr.
    """

    def place(item: tuple[str, ArrayInfo]):
        name, info = item
        sources = [checkpoint.sources[part] for part in stored_infos(name, info, checkpoint.quantized)]
        as_stored = len(sources) == 2 or quantized and info.contracted
        wanted = None if as_stored else DTYPES[float_type(info, dtype)]
        arrays = [_place(source, mesh, wanted) for source in sources]
        return info, arrays, sum(source.nbytes for source in sources)

    weights, treedef = [], jax.tree.structure(model.weight_infos(checkpoint.config))
    total = sum(source.nbytes for source in checkpoint.sources.values())
    with progress("loading weights", total, show=show) as bar, no_garbage_collection():
        # What is to be int8 is larger before; an accelerator may have no room for more of that.
        ahead = 1 if quantized and not checkpoint.quantized else WORKERS
        for info, arrays, nbytes in in_order(place, named_infos(checkpoint.config), ahead):
            if len(arrays) == 2:
                weights.append(QuantizedArray(*arrays))
            else:
                weights.append(_quantize(arrays[0], info) if quantized and info.contracted else arrays[0])
            bar.update(nbytes)
    return jax.tree.unflatten(treedef, weights)


@contextlib.contextmanager
def no_garbage_collection():
    """jax runs a callback at each collection; where several threads make arrays, it crashes (jax 0.10.2)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _quantize(x: jax.Array, info: ArrayInfo) -> QuantizedArray:
    mesh = x.sharding.mesh
    shardings = QuantizedArray(NamedSharding(mesh, info.spec), NamedSharding(mesh, info.scale.spec))
    return jax.jit(quantize_large, static_argnums=1, out_shardings=shardings)(x, info.contracted_axes)


def _place(source: Source, mesh: Mesh, dtype: np.dtype | None) -> jax.Array:
    """Give each device its part, with zeros for the padding that the mesh needs. dtype: None, as stored."""
    info, parts = source.info, []
    padded = info.padded_shape(mesh)

    @functools.cache  # devices that hold the same shard ask for the same bounds
    def read(bounds: Box) -> np.ndarray:
        inside = tuple((lo, min(hi, size)) for (lo, hi), size in zip(bounds, info.shape, strict=True))
        shape = [hi - lo for lo, hi in bounds]
        wanted = dtype or DTYPES[source.tensors[0].dtype]
        if any(lo >= hi for lo, hi in inside):
            return np.zeros(shape, wanted)
        part = source.read(inside).astype(wanted, copy=False)
        if inside == bounds:
            parts.append(part)
            return part
        whole = np.zeros(shape, wanted)
        whole[tuple(slice(0, size) for size in part.shape)] = part
        return whole

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        return read(tuple(part.indices(size)[:2] for part, size in zip(index, padded, strict=True)))

    array = jax.make_array_from_callback(padded, NamedSharding(mesh, info.spec), shard)
    if not (platform(mesh) == "cpu" and any(map(source.can_stay, parts))):
        array.block_until_ready()
        source.forget()
    return array
