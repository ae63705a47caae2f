"""Load the weights of a checkpoint onto a mesh: first a plan, which is data, then a loop that carries it out.

The plan says for every array which elements of which stored array are read, and which shards they fill. The
loop reads, converts, places and releases array after array; threads do so with several weights at a time.
"""

import collections
import dataclasses
import operator
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

import model
from checkpoints.checkpoint import Checkpoint
from checkpoints.layouts import Bounds, Source, elements
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


@dataclasses.dataclass(frozen=True)
class Read:
    """Elements `bounds` of a stored array, which are read at once, and the shards that they fill.

    shards: by its place in the padded array, which elements of the source a shard gets; its others are zeros.
    One or several devices of this process hold the shard.
    """

    source: Source
    bounds: Bounds
    shards: dict[Bounds, Bounds]


@dataclasses.dataclass(frozen=True)
class ArrayPlan:
    """How an array is made. dtype: on the devices. reads: those of this process.

    sources: one, or one per stage if the array's axis p stacks a layer of every stage.
    """

    info: ArrayInfo
    sources: list[Source]
    dtype: np.dtype
    reads: list[Read]


@dataclasses.dataclass(frozen=True)
class WeightPlan:
    """A declared weight, and the stored arrays that it is made of: floats, or its components."""

    info: ArrayInfo
    arrays: list[ArrayPlan]

    @property
    def nbytes(self) -> int:
        """Bytes of the files, of which this process may read a part."""
        return sum(source.stored_bytes for array in self.arrays for source in array.sources)

    @property
    def read_bytes(self) -> int:
        """Bytes that this process reads."""
        reads = (read for array in self.arrays for read in array.reads)
        return sum(elements(read.bounds) * read.source.dtype.itemsize for read in reads)


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
    there = checkpoint.format
    format = format or there
    if there and format.stored_as != there:
        raise ValueError(f"{checkpoint.name}: is {there}, and cannot be {format}")
    # What is to be quantized is larger before; an accelerator may have no room for more of that.
    if format != there:
        threads = {"ahead": 1}
    elif checkpoint.remote:  # many at a time, or small weights would wait for one another's answers
        size = operator.attrgetter("read_bytes")
        threads = {"ahead": WAITING, "workers": WAITING, "size": size, "most": MOST_FETCHED}
    else:
        threads = {"ahead": WORKERS}

    def place(plan: WeightPlan) -> list[jax.Array]:
        return [_place(array, mesh) for array in plan.arrays]

    plans, weights = list(plan_weights(checkpoint, mesh, dtype, format)), []
    total = sum(plan.nbytes for plan in plans)
    with progress("loading weights", total, show=show) as bar, no_garbage_collection():
        for plan, arrays in zip(plans, in_order(place, plans, **threads), strict=True):
            weights.append(_quantized(arrays, plan.info, mesh) if plan.info.quantization else arrays[0])
            bar.update(plan.nbytes)
            check()
    release()
    declared = in_stages(model.weight_infos(checkpoint.config), mesh.shape[STAGE])
    return jax.tree.unflatten(jax.tree.structure(declared), weights)


def plan_weights(
    checkpoint: Checkpoint, mesh: Mesh, dtype: str, format: Format | None
) -> Iterator[WeightPlan]:
    """The plan of each weight, in the order of the declarations. dtype, format: see `load`."""
    config, stages = checkpoint.config, mesh.shape[STAGE]
    for name, info in named_infos(config, stages, format):
        arrays = []
        for part, declared in checkpoint.stored(name, info).items():
            sources = [checkpoint.sources[x] for x in in_each_stage(part, config, stages)]
            kept = sources[0].dtype if info.quantization else DTYPES[type_name(info, dtype)]
            arrays.append(ArrayPlan(declared, sources, kept, list(_plan_reads(declared, sources, mesh))))
        yield WeightPlan(info, arrays)


def _plan_reads(info: ArrayInfo, sources: list[Source], mesh: Mesh) -> Iterator[Read]:
    """One for each shard; for all shards of a remote source together, if these are one box.

    A row of a remote file that has parts for several devices is so fetched once.
    """
    shards: dict[int, dict[Bounds, Bounds]] = collections.defaultdict(dict)  # by the index of the source
    padded = info.padded_shape(mesh)
    for index in NamedSharding(mesh, info.spec).addressable_devices_indices_map(padded).values():
        place = _bounds(index, padded)
        stage, bounds = (place[0][0], place[1:]) if len(sources) > 1 else (0, place)  # the first letter is p
        ends = zip(bounds, sources[stage].info.shape, strict=True)
        shards[stage][place] = tuple((min(lo, size), min(hi, size)) for (lo, hi), size in ends)
    for stage, filled in shards.items():
        boxes = [x for x in filled.values() if elements(x)]
        around = tuple((min(lo for lo, _ in x), max(hi for _, hi in x)) for x in zip(*boxes, strict=True))
        if sources[stage].remote and elements(around) <= sum(map(elements, boxes)):
            yield Read(sources[stage], around, filled)
        else:
            yield from (Read(sources[stage], bounds, {place: bounds}) for place, bounds in filled.items())


def _place(plan: ArrayPlan, mesh: Mesh) -> jax.Array:
    """Read an array's shards, put them on the mesh, and release the memory of the files."""
    padded, shards, in_place = plan.info.padded_shape(mesh), {}, False
    for read in plan.reads:
        values = read.source.read(read.bounds)
        for place, bounds in read.shards.items():
            starts = (first for first, _ in read.bounds)
            part = values[tuple(slice(lo - x, hi - x) for (lo, hi), x in zip(bounds, starts, strict=True))]
            part = part.astype(plan.dtype, copy=False)
            missing = [hi - lo - n for (lo, hi), n in zip(place[-part.ndim :], part.shape, strict=True)]
            if any(missing):
                part = np.pad(part, [(0, n) for n in missing])
            elif platform(mesh) == "cpu":
                in_place |= read.source.can_stay(part)
            shards[place] = part.reshape([hi - lo for lo, hi in place])  # with the axis p

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        return shards[_bounds(index, padded)]

    array = jax.make_array_from_callback(padded, plan.info.placement(mesh), shard)
    if not in_place:
        array.block_until_ready()
        for source in plan.sources:
            source.forget()
    return array


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


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
