"""A model's folder, Hugging Face's or a converted one, opened: its Config, and where its weights are.

A converted folder has the model's own config.json and tokenizer, and the weights in the layout that model.py
declares, independent of any mesh: safetensors files, and an index with the sizes and checksums of them all.
"""

import collections
import concurrent.futures
import dataclasses
import hashlib
import itertools
import math
import os
import pathlib
from collections.abc import Callable

import numpy as np

from checkpoints.config_json import read_config
from checkpoints.dequantized import Dequantized, dequantized
from checkpoints.errors import UserError, located
from checkpoints.families import family_of
from checkpoints.folders import (
    INDEX,
    THEIR_FILE,
    THEIR_INDEX,
    companions,
    open_tensors,
    read_index,
    read_json,
    weight_map_in,
)
from checkpoints.gguf_model import open_gguf
from checkpoints.hub import find_folder
from checkpoints.layouts import SLAB_BYTES, Layout, Source, file_layout, layout_of
from checkpoints.names import FLOATS, named_infos, renamed, stored_infos, type_name
from checkpoints.progress import progress
from checkpoints.tensor_files import StoredTensor, TensorFile, array_bytes
from model import Config
from quantize import FORMATS, INT8, Format
from sharding.arrays import ArrayInfo

Tensor = StoredTensor | Dequantized
FLOAT_TYPES = ("F32", "F16", "BF16")
SAMPLERS = 16  # threads that each wait for a few pages at a time


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened folder. sources: by the names of `stored_infos`; a weight that was published in int8 as ours
    is, is there as floats and as that. converted: in our layout. format: of what it holds in that, None for
    floats.
    """

    folder: pathlib.Path
    config: Config
    sources: dict[str, Source]
    converted: bool
    format: Format | None

    def stored(self, name: str, info: ArrayInfo) -> dict[str, ArrayInfo]:
        """The arrays, by their names, from which a weight is to be made: its components, or one of floats."""
        if self.format:
            return stored_infos(name, dataclasses.replace(info, format=self.format))
        parts = stored_infos(name, info) if info.quantization == INT8 else {}
        return parts if parts and parts.keys() <= self.sources.keys() else {name: info}

    @property
    def dtype(self) -> str:
        """The float type that holds its weights, but those of a type of their own: float32 if any has that,
        else bfloat16.
        """
        weights = (source for source in self.sources.values() if source.info.dtype is None)
        stored = (x for source in weights for x in source.tensors if isinstance(x, StoredTensor))
        return "float32" if any(x.dtype == "F32" for x in stored) else "bfloat16"

    def fingerprint(self) -> str:
        """A checksum of what `checksums` says of the small files and of all weights."""
        return hashlib.sha256(repr(sorted(self.checksums().items())).encode()).hexdigest()

    def checksums(self, tensors: int | None = None) -> dict[str, str]:
        """Of each small file, and of the weights' bytes, wherever they are and since when.

        It reads 64 KiB of a tensor at most, so a change between the sampled pages escapes it: of single
        elements, or of one of more than 16 experts in a tensor; not one of training, or of another model. Of
        a converted folder it has the checksums of whole tensors, too, as the files themselves tell them.
        tensors: how many to look at; by default all, which may be many thousands.
        """
        every = list(dict.fromkeys(x for source in self.sources.values() for x in source.tensors))
        looked_at, weights = every[:: -(-len(every) // (tensors or len(every)))], hashlib.sha256()
        for x in every:
            weights.update(repr((x.name, x.dtype, x.shape, x.file.metadata.get(x.name))).encode())
        with (
            progress("looking at the weights", len(looked_at), unit="tensor", delay=1) as bar,
            concurrent.futures.ThreadPoolExecutor(SAMPLERS) as pool,
        ):
            for sample in pool.map(lambda x: x.sample(), looked_at):
                weights.update(sample.encode())
                bar.update()
        files = {x.name: hashlib.sha256(x.read_bytes()).hexdigest()[:12] for x in companions(self.folder)}
        return files | {"weights": weights.hexdigest()[:12]}


def open_checkpoint(path_or_id: str) -> Checkpoint:
    """Open a converted or a Hugging Face folder, or a GGUF file, which must hold just the tensors that its
    config.json implies.

    Raises UserError naming the file, tensor or field that is wrong.
    """
    path = pathlib.Path(os.path.expanduser(path_or_id))
    if path.suffix == ".gguf" and path.is_file():
        folder, tensors = open_gguf(path)
        return _open_published(path, folder, lambda _: tensors)
    folder = find_folder(path_or_id)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no config.json in it; is it a model's folder, and whole?")
    if (folder / INDEX).exists():
        return _open_ours(folder)
    return _open_published(folder, folder, lambda config: _tensors_in(folder, config))


def _open_ours(folder: pathlib.Path) -> Checkpoint:
    with located(folder):
        config = read_config(read_json(folder / "config.json"))
    index = read_index(folder)
    tensors = open_tensors(folder, index["weight_map"])
    for name, tensor in tensors.items():
        checksum = index["checksums"].get(name)
        if checksum is None or checksum != tensor.file.metadata.get(name):
            raise UserError(f"{tensor.file.path}: tensor {name} is not the one that {INDEX} knows")
    parts = collections.defaultdict(list)
    for name in sorted(tensors):  # what follows the slash numbers the parts
        parts[name.partition("/")[0]].append(tensors[name])
    if (quantize := index["metadata"].get("quantize")) not in FORMATS:
        raise UserError(f"{folder / INDEX}: quantize is {quantize!r}, not {' or '.join(FORMATS)}")
    format, sources = FORMATS[quantize], {}
    for weight, declared in named_infos(config, format=format):
        for name, info in stored_infos(weight, declared).items():
            if name not in parts:
                raise UserError(f"{folder}: tensor {name} is missing; convert the model again")
            dtypes = tuple(dict.fromkeys(type_name(info, dtype) for dtype in FLOATS))
            sources[name] = _source(info, parts.pop(name), file_layout(info), dtypes)
    for tensor in itertools.chain(*parts.values()):
        _no_place(tensor)
    return Checkpoint(folder, config, sources, converted=True, format=format)


def _open_published(
    path: pathlib.Path, folder: pathlib.Path, open_tensors: Callable[[dict], dict[str, Tensor]]
) -> Checkpoint:
    """path: the user's. folder: of the small files. open_tensors: by their names, those of a config.json."""
    with located(path):
        content = read_json(folder / "config.json")
        config, (family, content) = read_config(content), family_of(content)
    tensors = renamed(open_tensors(content), family)
    sources = {name: _find(tensors, path, info) for name, info in named_infos(config)}
    for name, info in named_infos(config, format=INT8):
        sources |= _int8_parts(name, info, sources[name]) if info.quantization else {}
    used = {tensor.name for source in sources.values() for tensor in source.tensors}
    for name, tensor in tensors.items():
        if config.tied_embeddings and name == "lm_head.weight":
            _check_copy(tensor, sources["embed"].tensors[0])
        elif tensor.name not in used and not family.ignores(name, len(config.layers)):
            _no_place(tensor)
    return Checkpoint(folder, config, sources, converted=False, format=None)


def _tensors_in(folder: pathlib.Path, config: dict) -> dict[str, Tensor]:
    if (folder / THEIR_INDEX).exists():
        tensors = open_tensors(folder, weight_map_in(read_json(folder / THEIR_INDEX), folder / THEIR_INDEX))
    elif (folder / THEIR_FILE).is_file():
        tensors = TensorFile(folder / THEIR_FILE).tensors
    else:
        raise UserError(f"{folder}: neither {THEIR_FILE} nor {THEIR_INDEX} in it; is the download complete?")
    if not (quantization := config.get("quantization_config")):
        return tensors
    with located(folder):
        return dequantized(tensors, quantization)


def _find(tensors: dict[str, Tensor], folder: pathlib.Path, info: ArrayInfo) -> Source:
    """What a Hugging Face folder has of a weight, in the first of its published forms that is there."""
    for stored in info.stored:
        one_per_expert = "{e}" in stored.name
        names = [stored.name.format(e=e) for e in range(info.shape[0])] if one_per_expert else [stored.name]
        missing = [name for name in names if name not in tensors]
        if len(missing) == len(names):
            continue
        if missing:
            raise UserError(f"{folder}: tensor {missing[0]} is missing, though others like it are there")
        if one_per_expert:
            stored = dataclasses.replace(stored, letters="E" + stored.letters)
        found = [tensors[name] for name in names]
        return _source(info, found, layout_of(info, stored), FLOAT_TYPES, one_per_expert)
    raise UserError(f"{folder}: tensor {info.stored[0].name} is missing")


def _int8_parts(name: str, info: ArrayInfo, source: Source) -> dict[str, Source]:
    """The values and the scale of a weight that was published so, a scale for all that is contracted."""
    layout, n = source.layout, len(info.contracted)
    summed = layout.axes[-n:]
    rows = math.prod(axis.size for axis in summed) == layout.shape[-1]
    if not rows or {axis.letter for axis in summed} != set(info.contracted.upper()):
        return {}
    if not all(isinstance(x, Dequantized) and x.int8 for x in source.tensors):
        return {}
    values, scales = zip(*(x.int8 for x in source.tensors), strict=True)
    of_rows = Layout(layout.shape[:-1], layout.within[:-n], layout.axes[:-n])
    (first, second), components = stored_infos(name, info), info.components
    return {
        first: Source(components.values, values, layout),
        second: Source(components.scale, scales, of_rows),
    }


def _source(
    info: ArrayInfo,
    tensors: list[Tensor],
    layout: Layout,
    dtypes: tuple[str, ...],
    one_per_expert: bool = False,
) -> Source:
    """Raises UserError naming the tensor whose shape or type is wrong."""
    shape = layout.shape[1:] if one_per_expert else layout.shape
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
    return Source(info, tuple(tensors), layout)


def _check_copy(tensor: StoredTensor, original: StoredTensor) -> None:
    """Raises UserError if an unembedding is not the embedding that config.json says to use."""
    same = (tensor.dtype, tensor.shape) == (original.dtype, original.shape)
    rows = max(SLAB_BYTES // (array_bytes(original.dtype, original.shape[1:])), 1)
    for lo in range(0, original.shape[0] if same else 0, rows):
        x, y = (z.rows(lo, lo + rows).view(np.uint8) for z in (tensor, original))
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
