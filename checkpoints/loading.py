"""Load the weights of a checkpoint onto a mesh."""

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import Mesh

import model
from checkpoints.checkpoint import Checkpoint
from checkpoints.layouts import Bounds, Source
from checkpoints.names import in_each_stage, named_infos, type_name
from checkpoints.tensor_files import DTYPES
from checkpoints.threads import WORKERS, in_order, no_garbage_collection
from feedback.progress import progress
from model import Weights
from ops.platform import platform
from quantize import Format, QuantizedArray
from sharding.arrays import ArrayInfo
from sharding.mesh import STAGE
from sharding.stages import in_stages


def load(
    checkpoint: Checkpoint, mesh: Mesh, dtype: str, format: Format | None = None, show: bool = True
) -> Weights:
    """Put the weights on the mesh. A process reads what its devices hold; a CPU uses it in place if it can.

    dtype: "bfloat16" or "float32", for what is not quantized and declares no other. format: of what a matmul
    contracts, computed on the devices; None: as in the checkpoint. If the checkpoint has a format, it must be
    stored as that. show: progress, on stderr.
    """
    config, stages, there = checkpoint.config, mesh.shape[STAGE], checkpoint.format
    format = format or there
    if there and format.stored_as != there:
        raise ValueError(f"{checkpoint.folder}: is {there}, and cannot be {format}")

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

    weights, treedef = [], jax.tree.structure(in_stages(model.weight_infos(config), stages))
    stored = (x for item in named_infos(config, format=format) for x in checkpoint.stored(*item))
    total = sum(checkpoint.sources[x].nbytes for x in stored)
    with progress("loading weights", total, show=show) as bar, no_garbage_collection():
        # What is to be quantized is larger before; an accelerator may have no room for more of that.
        ahead = 1 if format != there else WORKERS
        for info, arrays, nbytes in in_order(place, named_infos(config, stages, format), ahead):
            weights.append(_quantized(arrays, info, mesh) if info.quantization else arrays[0])
            bar.update(nbytes)
    return jax.tree.unflatten(treedef, weights)


def _quantized(arrays: list[jax.Array], info: ArrayInfo, mesh: Mesh) -> QuantizedArray:
    """A quantized weight, from a float array, or from the components that are stored."""
    info = dataclasses.replace(info, stored=None)  # those that differ in their names alone share a program
    quantization, components = info.quantization, info.components
    if len(arrays) > 1 and quantization.declare_stored(info) == components:  # as it is, perhaps in the file
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
    padded, parts = info.padded_shape(mesh), []

    @functools.cache  # devices that hold the same shard ask for the same bounds
    def read(stage: int, bounds: Bounds) -> np.ndarray:
        source = sources[stage]
        inside = tuple((lo, min(hi, size)) for (lo, hi), size in zip(bounds, source.info.shape, strict=True))
        shape = [hi - lo for lo, hi in bounds]
        wanted = dtype or DTYPES[source.tensors[0].dtype]
        if any(lo >= hi for lo, hi in inside):
            return np.zeros(shape, wanted)
        part = source.read(inside).astype(wanted, copy=False)
        if inside == bounds:
            parts.append((source, part))
            return part
        return np.pad(part, [(0, size) for size in np.subtract(shape, part.shape)])

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, padded, strict=True))
        if len(sources) == 1:
            return read(0, bounds)
        (stage, _), *bounds = bounds  # p
        return read(stage, tuple(bounds))[None]

    array = jax.make_array_from_callback(padded, info.placement(mesh), shard)
    if not (platform(mesh) == "cpu" and any(source.can_stay(part) for source, part in parts)):
        array.block_until_ready()
        for source in sources:
            source.forget()
    return array
