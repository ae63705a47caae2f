"""The weights of a checkpoint, put on a mesh."""

import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

import model
from checkpoints.checkpoint import Checkpoint
from checkpoints.layouts import Box, Source
from checkpoints.names import float_type, in_each_stage, named_infos, stored_infos
from checkpoints.progress import progress
from checkpoints.tensor_files import DTYPES
from checkpoints.threads import WORKERS, in_order, no_garbage_collection
from model import Weights
from ops.platform import platform
from quantize import QuantizedArray, quantize_large
from sharding.arrays import ArrayInfo
from sharding.mesh import STAGE


def load(checkpoint: Checkpoint, mesh: Mesh, dtype: str, quantized: bool, show: bool = True) -> Weights:
    """Put the weights on the mesh. A process reads what its devices hold; a CPU uses it in place if it can.

    dtype: "bfloat16" or "float32", for what is not int8 and declares no other. quantized: int8 where a matmul
    contracts, computed on the devices; an int8 checkpoint is so anyway. show: progress, on stderr.
    """

    config, stages = checkpoint.config, mesh.shape[STAGE]

    def place(item: tuple[str, ArrayInfo]):
        name, info = item
        parts = stored_infos(name, info, checkpoint.quantized)
        as_stored = len(parts) == 2 or quantized and info.contracted
        wanted = None if as_stored else DTYPES[float_type(info, dtype)]
        arrays, nbytes = [], 0
        for part, declared in parts.items():
            sources = [checkpoint.sources[x] for x in in_each_stage(part, config, stages)]
            arrays.append(_place(declared, sources, mesh, wanted))
            nbytes += sum(source.nbytes for source in sources)
        return info, arrays, nbytes

    weights, treedef = [], jax.tree.structure(model.weight_infos(config, stages))
    total = sum(source.nbytes for source in checkpoint.sources.values())
    with progress("loading weights", total, show=show) as bar, no_garbage_collection():
        # What is to be int8 is larger before; an accelerator may have no room for more of that.
        ahead = 1 if quantized and not checkpoint.quantized else WORKERS
        for info, arrays, nbytes in in_order(place, named_infos(config, stages), ahead):
            if len(arrays) == 2:
                weights.append(QuantizedArray(*arrays))
            else:
                weights.append(_quantize(arrays[0], info) if quantized and info.contracted else arrays[0])
            bar.update(nbytes)
    return jax.tree.unflatten(treedef, weights)


def _quantize(x: jax.Array, info: ArrayInfo) -> QuantizedArray:
    mesh = x.sharding.mesh
    shardings = QuantizedArray(NamedSharding(mesh, info.spec), NamedSharding(mesh, info.scale.spec))
    return jax.jit(quantize_large, static_argnums=1, out_shardings=shardings)(x, info.contracted_axes)


def _place(info: ArrayInfo, sources: list[Source], mesh: Mesh, dtype: np.dtype | None) -> jax.Array:
    """Give each device its part, with zeros for the padding that the mesh needs.

    sources: of each stage, if the array is of a layer and there are several. dtype: None, as stored.
    """
    padded, parts = info.padded_shape(mesh), []

    @functools.cache  # devices that hold the same shard ask for the same bounds
    def read(stage: int, bounds: Box) -> np.ndarray:
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
        whole = np.zeros(shape, wanted)
        whole[tuple(slice(0, size) for size in part.shape)] = part
        return whole

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, padded, strict=True))
        if len(sources) == 1:
            return read(0, bounds)
        (stage, _), *bounds = bounds  # p
        return read(stage, tuple(bounds))[None]

    array = jax.make_array_from_callback(padded, NamedSharding(mesh, info.spec), shard)
    if not (platform(mesh) == "cpu" and any(source.can_stay(part) for source, part in parts)):
        array.block_until_ready()
        for source in sources:
            source.forget()
    return array
