"""Which devices are neighbors on the interconnect of a TPU slice, and rings of neighbors."""

import functools
import math

from jax.sharding import AbstractMesh, Mesh

from ops.platform import on_tpu
from sharding.mesh import MODEL, mesh_size


@functools.cache
def ring(mesh: Mesh | AbstractMesh) -> tuple[int, ...] | None:
    """The devices along MODEL, each next to the one before on the interconnect, and the last to the first.

    None if they are no TPUs, or if there is no such order: in a line of chips that does not close, and in a
    box with an odd number of chips along every axis. None too for an abstract mesh, whose devices have no
    places.
    """
    if not on_tpu(mesh) or isinstance(mesh, AbstractMesh):
        return None
    devices = mesh.devices.reshape(-1, mesh_size(mesh, MODEL))[0]
    places = {place_of(device): i for i, device in enumerate(devices)}
    origin = [min(axis) for axis in zip(*places, strict=True)]
    sizes = [1 + max(axis) - low for axis, low in zip(zip(*places, strict=True), origin, strict=True)]
    if len(places) < len(devices) or math.prod(sizes) != len(devices):  # of several slices, or of no box
        return None
    if len(devices) % 2 or (len(devices) > 2 and max(sizes) == len(devices)):
        return None
    return tuple(places[tuple(map(sum, zip(origin, place, strict=True)))] for place in cycle(sizes))


def place_of(device) -> tuple[int, ...]:
    """The coordinates of a TPU core."""
    return (*device.coords, device.core_on_chip)


def cycle(sizes: list[int]) -> list[tuple[int, ...]]:
    """All points of a box of an even size, each beside the one before, and the last beside the first."""
    axes = sorted(range(len(sizes)), key=lambda axis: sizes[axis] % 2)  # an even size first
    rows, columns = sizes[axes[0]], [sizes[axis] for axis in axes[1:]]
    line = path(columns)
    # Back and forth over all of the line but its first point, which is the way back.
    there = [(i, point) for i in range(rows) for point in (line[1:] if i % 2 == 0 else line[:0:-1])]
    points = [(0, line[0]), *there, *((i, line[0]) for i in range(rows - 1, 0, -1))]
    ordered = [(i, *point) for i, point in points]
    return [tuple(point[axes.index(axis)] for axis in range(len(sizes))) for point in ordered]


def path(sizes: list[int]) -> list[tuple[int, ...]]:
    """All points of a box, each beside the one before."""
    if not sizes:
        return [()]
    rest = path(sizes[1:])
    return [(i, *point) for i in range(sizes[0]) for point in (rest if i % 2 == 0 else rest[::-1])]
