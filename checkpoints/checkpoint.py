"""Open a checkpoint, published or converted: read its Config, and find the stored tensors of every weight.

A converted folder has the model's own config.json and tokenizer files, the weights in safetensors files whose
layout follows from model.py's declarations and not from a mesh, and an index with all sizes and checksums.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import pathlib
import re
from collections.abc import Callable

from checkpoints.dequantized import Dequantized, dequantized
from checkpoints.folders import (
    INDEX,
    STATE,
    THEIR_FILE,
    THEIR_INDEX,
    ModelFolder,
    companions,
    open_tensors,
    read_index,
    refuse_pickled,
    refuse_unfinished,
    weight_map_in,
)
from checkpoints.gguf.translation import open_gguf
from checkpoints.layouts import Layout, Source, file_layout, layout_of, same_bits
from checkpoints.names import FLOATS, named_infos, renamed, stored_infos, type_name
from checkpoints.remote.hub import find_model
from checkpoints.tensor_files import FLOAT_TYPES, StoredTensor, file_checksum
from checkpoints.threads import WAITING, in_order
from families.family import Family
from families.registry import find_family, read_config
from feedback.errors import UserError, located
from feedback.progress import progress
from model import Config
from quantize import FORMATS, INT8, MXFP4, Format
from sharding.arrays import ArrayInfo, Stored

Tensor = StoredTensor | Dequantized


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    name:      what messages call it: the path of its folder or file, or a URL.
    folder:    the local folder of its small files.
    sources:   the stored tensors of each array, by the names of `stored_infos`. A weight that was published
               in our int8 format has a source of floats, and sources of the int8 values and of the scale.
    converted: whether this is a converted folder. format: of its quantized weights; None: all are floats.
    """

    name: str
    folder: pathlib.Path
    family: Family
    config: Config
    sources: dict[str, Source]
    converted: bool
    format: Format | None

    @property
    def natural_format(self) -> Format | None:
        """The format to hold the weights in, by default: that of the files, or MXFP4 if experts have it."""
        if self.format or not self.config.moe:
            return self.format
        published = any(x.mxfp4 for x in self.tensors if isinstance(x, Dequantized))
        return MXFP4 if published else None

    def stored(self, name: str, info: ArrayInfo) -> dict[str, ArrayInfo]:
        """The declarations of the stored arrays to make a weight of: one of floats, or its components."""
        if self.format:
            return stored_infos(name, dataclasses.replace(info, format=self.format))
        parts = stored_infos(name, info) if info.quantization == INT8 else {}
        return parts if parts and parts.keys() <= self.sources.keys() else {name: info}

    @property
    def remote(self) -> bool:
        """Whether the weights are read over a network."""
        return any(source.remote for source in self.sources.values())

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of all weights, each once."""
        return list(dict.fromkeys(x for source in self.sources.values() for x in source.tensors))

    @property
    def dtype(self) -> str:
        """The float type of the weights that declare none: float32 if one is stored in it, else bfloat16."""
        weights = (source for source in self.sources.values() if source.info.dtype is None)
        stored = (x for source in weights for x in source.tensors if isinstance(x, StoredTensor))
        return "float32" if any(x.dtype == "F32" for x in stored) else "bfloat16"

    def fingerprint(self) -> str:
        """One checksum of all small files and weights, see `checksums`."""
        return hashlib.sha256(repr(sorted(self.checksums().items())).encode()).hexdigest()

    def checksums(self, tensors: int | None = None) -> dict[str, str]:
        """A checksum of each small file, and one, "weights", of samples of all weights.

        At most 64 KiB of a tensor are read. Training, or another model, changes the sampled pages; a change
        of single elements, or of one of more than 16 experts in a tensor, may not. A converted folder's files
        state the checksums of whole tensors, and these count, too.
        tensors: how many to sample; None: all, which may be many thousands.
        """
        every, weights = self.tensors, hashlib.sha256()
        sampled = every[:: -(-len(every) // (tensors or len(every)))]
        for x in every:
            weights.update(repr((x.name, x.dtype, x.shape, x.file.metadata.get(x.name))).encode())
        with progress("looking at the weights", len(sampled), unit="tensor", delay=1) as bar:
            for sample in in_order(lambda x: x.sample(), sampled, ahead=WAITING, workers=WAITING):
                weights.update(sample.encode())
                bar.update()
        files = {x.name: file_checksum(x)[:12] for x in companions(self.folder)}
        return files | {"weights": weights.hexdigest()[:12]}


def open_checkpoint(path_or_id: str, alone: bool = False) -> Checkpoint:
    """Open a converted folder, a Hugging Face folder, a GGUF file, the URL of a folder, or a hub id.

    alone: whether this process alone calls this; otherwise all processes must call it.
    Raises UserError naming the file, tensor or field that is wrong: a checkpoint must have exactly the
    tensors that its config.json implies.
    """
    folder = find_model(path_or_id, alone)
    if isinstance(folder, pathlib.Path):
        small, tensors = open_gguf(folder)
        return _open_published(str(folder), ModelFolder(small), lambda *_: tensors)
    refuse_unfinished(str(folder), [name for name in (STATE, INDEX) if (folder.small / name).exists()])
    if not (folder.small / "config.json").is_file():
        files = sorted(folder.small.glob("*.gguf"))
        if not files:
            refuse_pickled(str(folder), os.listdir(folder.small))
        what = f"give its GGUF file: {files[0]}" if files else "is it a model's folder, and whole?"
        raise UserError(f"{folder}: no config.json in it; {what}")
    if (folder.small / INDEX).exists():
        return _open_ours(folder)
    return _open_published(str(folder), folder, functools.partial(_tensors_in, folder))


def _open_ours(folder: ModelFolder) -> Checkpoint:
    with located(str(folder)):
        content = folder.read_json("config.json")
        config, (family, _) = read_config(content), find_family(content)
    index = read_index(folder)
    sizes = {name: facts.get("bytes") for name, facts in index["files"].items()}
    tensors = open_tensors(folder, index["weight_map"], sizes)
    for name, tensor in tensors.items():
        checksum = index["checksums"].get(name)
        if checksum is None or checksum != tensor.file.metadata.get(name):
            raise UserError(f"{tensor} is not the one that {INDEX} knows")
    parts = collections.defaultdict(list)
    for name in sorted(tensors):  # the number of a part follows a slash
        parts[name.partition("/")[0]].append(tensors[name])
    if (quantize := index["metadata"].get("quantize")) not in FORMATS:
        raise UserError(f"{folder.where(INDEX)}: quantize is {quantize!r}, not {' or '.join(FORMATS)}")
    format, sources = FORMATS[quantize], {}
    for weight, declared in named_infos(config, format=format):
        for name, info in stored_infos(weight, declared).items():
            if name not in parts:
                raise UserError(f"{folder}: tensor {name} is missing; convert the model again")
            dtypes = tuple(dict.fromkeys(type_name(info, dtype) for dtype in FLOATS))
            sources[name] = _source(info, parts.pop(name), file_layout(info), dtypes)
    for tensor in itertools.chain(*parts.values()):
        _no_place(tensor)
    return Checkpoint(str(folder), folder.small, family, config, sources, converted=True, format=format)


def _open_published(
    path: str, folder: ModelFolder, open_tensors: Callable[[dict, Callable[[str], bool]], dict[str, Tensor]]
) -> Checkpoint:
    """Open what others published. path: to name in errors. folder: of config.json and other small files.

    open_tensors: from the content of config.json, and whether the model does not use the tensor of a name, to
    the tensors by their names.
    """
    with located(path):
        content = folder.read_json("config.json")
        config, (family, content) = read_config(content), find_family(content)

    def is_unused(name: str) -> bool:
        name = family.llama_name(name)
        copy = config.tied_embeddings and name == "lm_head.weight"
        return copy or family.ignores(name, config)

    tensors = renamed(open_tensors(content, is_unused), family)
    infos = named_infos(config)
    sources = {name: _find(tensors, path, info, family.places(name, info)) for name, info in infos}
    for name, info in named_infos(config, format=INT8):
        sources |= _int8_parts(name, info, sources[name]) if info.quantization else {}
    used = {tensor.name for source in sources.values() for tensor in source.tensors}
    for name, tensor in tensors.items():
        if config.tied_embeddings and name == "lm_head.weight":
            _check_copy(tensor, sources["embed"])
        elif tensor.name not in used and not family.ignores(name, config):
            _no_place(tensor)
    return Checkpoint(path, folder.small, family, config, sources, converted=False, format=None)


def _tensors_in(folder: ModelFolder, config: dict, is_unused: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors of a published folder. The index may name tensors that no file has, if they are unused."""
    if (folder.small / THEIR_INDEX).exists():
        index = folder.read_json(THEIR_INDEX)
        weight_map = weight_map_in(index, folder.where(THEIR_INDEX))
        tensors = open_tensors(folder, weight_map, is_unused=is_unused)
    elif file := folder.open(THEIR_FILE):
        tensors = file.tensors
    else:
        refuse_pickled(str(folder), os.listdir(folder.small))
        raise UserError(f"{folder}: neither {THEIR_FILE} nor {THEIR_INDEX} in it; is the download complete?")
    if not (quantization := config.get("quantization_config")):
        return tensors
    with located(str(folder)):
        return dequantized(tensors, quantization)


def _find(tensors: dict[str, Tensor], folder: str, info: ArrayInfo, places: list[Stored]) -> Source:
    """The stored tensors of a weight: the first of these places that the folder has."""
    for stored in places:
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
    raise UserError(f"{folder}: tensor {_published_name(places[0].name.format(e=0), tensors)} is missing")


def _published_name(name: str, tensors: dict[str, Tensor]) -> str:
    """What a missing tensor is called in this checkpoint, where another layer has it; else Llama's name."""
    layer, rest = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)", name).groups()
    for other, tensor in tensors.items():
        if layer and re.sub(r"model\.layers\.\d+\.", "", other) == rest:
            return re.sub(r"\d+", layer, tensor.name, count=1)
    return name


def _int8_parts(name: str, info: ArrayInfo, source: Source) -> dict[str, Source]:
    """The values and the scale of a weight that was published in int8 with one scale per channel; else {}."""
    layout, n = source.layout, len(info.contracted)
    summed = layout.axes[-n:]
    rows = math.prod(axis.size for axis in summed) == layout.shape[-1]
    if not rows or {axis.letter for axis in summed} != set(info.contracted.upper()):
        return {}
    if not all(isinstance(x, Dequantized) and x.int8 for x in source.tensors):
        return {}
    values, scales = zip(*(x.int8 for x in source.tensors), strict=True)
    of_rows = Layout(layout.shape[:-1], layout.factors[:-n], layout.axes[:-n])
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
    """An array's stored tensors: parts of its first axis, or one for each expert.

    Raises UserError naming the tensor whose shape or type is wrong.
    """
    shape = layout.shape[1:] if one_per_expert else layout.shape
    rows = sum(tensor.shape[0] for tensor in tensors if tensor.shape)
    for tensor in tensors:
        if (tensor.shape if one_per_expert else (rows, *tensor.shape[1:])) != shape:
            raise UserError(f"{tensor} has shape {tensor.shape}, but config.json asks for {shape}")
        if tensor.dtype not in dtypes:
            raise UserError(f"{tensor} has type {tensor.dtype}, not {' or '.join(dtypes)}")
    return Source(info, tuple(tensors), layout)


def _check_copy(tensor: Tensor, original: Source) -> None:
    """Raises UserError if a stored unembedding is not a copy of the tied embedding."""
    (embedding,), copy = original.tensors, dataclasses.replace(original, tensors=(tensor,))
    same = (tensor.dtype, tensor.shape) == (embedding.dtype, embedding.shape)
    if not same or not all(same_bits(x, y) for _, _, (x, y) in original.read_slices([original, copy])):
        raise UserError(
            f"{tensor} is not {embedding.name}, although config.json says tie_word_embeddings; "
            "set that to false to use both"
        )


def _no_place(tensor: Tensor):
    raise UserError(f"{tensor} has no place in the model that config.json describes")
