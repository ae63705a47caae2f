"""Load the weights of a checkpoint onto a mesh."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

import model
from checkpoints.checkpoint import Checkpoint
from checkpoints.layouts import Bounds, Source
from checkpoints.names import in_each_stage, named_infos, type_name
from checkpoints.remote.fetching import release
from checkpoints.tensor_files import DTYPES
from checkpoints.threads import WAITING, WORKERS, in_order, no_garbage_collection
from feedback.progress import progress
from model import Weights
from ops.platform import platform
from quantize import Format, QuantizedArray
from sharding.arrays import ArrayInfo
from sharding.mesh import STAGE
from sharding.stages import in_stages

MOST_FETCHED = 2**28  # bytes of weights that are on their way over a network at a time


def load(
    checkpoint: Checkpoint,
    mesh: Mesh,
    dtype: str,
    format: Format | None = None,
    show: bool = True,
    check: Callable[[], None] = lambda: None,
) -> Weights:
    """Put the weights on the mesh. A process reads what its devices hold; a CPU uses it in place if it can.

    dtype: "bfloat16" or "float32", for what is not quantized and declares no other. format: of what a matmul
    contracts, computed on the devices; None: as in the checkpoint. If the checkpoint has a format, it must be
    stored as that. show: progress, on stderr. check: called after each weight; an exception of it ends the
    loading.
    """
    config, stages, there = checkpoint.config, mesh.shape[STAGE], checkpoint.format
    format = format or there
    if there and format.stored_as != there:
        raise ValueError(f"{checkpoint.name}: is {there}, and cannot be {format}")

    def place(item: tuple[str, ArrayInfo]):
        name, info = item
        parts = checkpoint.stored(name, info)
        wanted = None if info.quantization else DTYPES[type_name(info, dtype)]
        arrays, nbytes = [], 0
        for part, declared in parts.items():
            sources = [checkpoint.sources[x] for x in in_each_stage(part, config, stages)]
            arrays.append(_place(declared, sources, mesh, wanted))
            nbytes += sum(source.nbytes for source in sources)
        return info, arrays, nbytes

    def held_bytes(item: tuple[str, ArrayInfo]) -> int:
        """Bytes of a weight's stored arrays that this process's devices hold."""
        held = 0
        for part, declared in checkpoint.stored(*item).items():
            dtype = DTYPES[checkpoint.sources[part].tensors[0].dtype]
            held += sum(_elements(bounds) for bounds in _local_bounds(declared, mesh)) * dtype.itemsize
        return held

    weights, treedef = [], jax.tree.structure(in_stages(model.weight_infos(config), stages))
    stored = (x for item in named_infos(config, format=format) for x in checkpoint.stored(*item))
    total = sum(checkpoint.sources[x].nbytes for x in stored)
    with progress("loading weights", total, show=show) as bar, no_garbage_collection():
        # What is to be quantized is larger before; an accelerator may have no room for more of that.
        if format != there:
            how = {"ahead": 1}
        elif checkpoint.remote:  # many at a time, or small weights would wait for one another's answers
            how = {"ahead": WAITING, "workers": WAITING, "size": held_bytes, "most": MOST_FETCHED}
        else:
            how = {"ahead": WORKERS}
        for info, arrays, nbytes in in_order(place, named_infos(config, stages, format), **how):
            weights.append(_quantized(arrays, info, mesh) if info.quantization else arrays[0])
            bar.update(nbytes)
            check()
    release()
    return jax.tree.unflatten(treedef, weights)


def _quantized(arrays: list[jax.Array], info: ArrayInfo, mesh: Mesh) -> QuantizedArray:
    """A quantized weight, from a float array, or from the components that are stored."""
    info = dataclasses.replace(info, stored=None)  # those that differ in their names alone share a program
    quantization, components = info.quantization, info.components
    as_stored = len(arrays) > 1 and quantization.stored_components(info) == components
    if as_stored:  # perhaps in the file
        return quantization.unpack(*arrays, info)
    placements = jax.tree.map(lambda component: component.placement(mesh), components)
    return jax.jit(_quantize, static_argnums=1, out_shardings=placements)(arrays, info)


def _quantize(arrays: list[jax.Array], info: ArrayInfo) -> QuantizedArray:
    quantization = info.quantization
    return quantization.encode(*arrays, info) if len(arrays) == 1 else quantization.unpack(*arrays, info)


def _place(info: ArrayInfo, sources: list[Source], mesh: Mesh, dtype: np.dtype | None) -> jax.Array:
    """Put an array on the mesh, padded with zeros to the shape that the mesh needs.

    sources: one, or if an axis p stacks a layer of every stage, one per stage. dtype: None: the stored one.
    """
    padded, parts, local = info.padded_shape(mesh), [], _local_bounds(info, mesh)

    def in_stage(bounds: Bounds) -> tuple[int, Bounds]:
        """-> (the index of a source, the bounds in it)"""
        if len(sources) == 1:
            return 0, bounds
        (stage, _), *bounds = bounds  # p
        return stage, tuple(bounds)

    def without_padding(source: Source, bounds: Bounds) -> Bounds:
        return tuple((lo, min(hi, size)) for (lo, hi), size in zip(bounds, source.info.shape, strict=True))

    @functools.cache
    def together(stage: int) -> tuple[Bounds, np.ndarray] | None:
        """What the devices of this process hold of a remote source, if that is one box.

        A row of the file that has parts for several devices is so fetched once.
        """
        source, every = sources[stage], (in_stage(bounds) for bounds in local)
        boxes = {without_padding(source, bounds) for at, bounds in every if at == stage}
        boxes = {box for box in boxes if _elements(box)}
        around = tuple((min(lo for lo, _ in x), max(hi for _, hi in x)) for x in zip(*boxes, strict=True))
        if source.remote and _elements(around) <= sum(map(_elements, boxes)):
            return around, source.read(around)

    @functools.cache  # devices that hold the same shard ask for the same bounds
    def read(stage: int, bounds: Bounds) -> np.ndarray:
        source = sources[stage]
        inside, shape = without_padding(source, bounds), [hi - lo for lo, hi in bounds]
        wanted = dtype or DTYPES[source.tensors[0].dtype]
        if not _elements(inside):
            return np.zeros(shape, wanted)
        if found := together(stage):
            first = [lo for lo, _ in found[0]]
            part = found[1][tuple(slice(lo - x, hi - x) for (lo, hi), x in zip(inside, first, strict=True))]
        else:
            part = source.read(inside)
        part = part.astype(wanted, copy=False)
        if inside == bounds:
            parts.append((source, part))
            return part
        return np.pad(part, [(0, size) for size in np.subtract(shape, part.shape)])

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        stage, bounds = in_stage(_bounds(index, padded))
        part = read(stage, bounds)
        return part if len(sources) == 1 else part[None]

    array = jax.make_array_from_callback(padded, info.placement(mesh), shard)
    if not (platform(mesh) == "cpu" and any(source.can_stay(part) for source, part in parts)):
        array.block_until_ready()
        for source in sources:
            source.forget()
    return array


def _local_bounds(info: ArrayInfo, mesh: Mesh) -> set[Bounds]:
    """The different parts of a padded array that this process's devices hold."""
    padded = info.padded_shape(mesh)
    indices = NamedSharding(mesh, info.spec).addressable_devices_indices_map(padded).values()
    return {_bounds(index, padded) for index in indices}


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _elements(bounds: Bounds) -> int:
    return math.prod(max(hi - lo, 0) for lo, hi in bounds)
