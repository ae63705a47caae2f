"""What a TPU host shows to a program, in a process of CPU devices: python3 tests/pod.py KIND PROGRAM [ARG]...

The devices compute as they do on a CPU. What they say of themselves is a TPU's: kind, memory, and coordinates
in the slice, by which jax puts them into a mesh.
"""

import os
import pathlib
import runpy
import socket
import sys
from functools import wraps

import jax
from jax.experimental import mesh_utils

# device_kind, and the GiB of memory that memory_stats tells.
# Of two more kinds the devices are CPUs: "cpu", and "far" where each process says that it is on another host.
KINDS = {"v5e": ("TPU v5 lite", 15.75), "v6e": ("TPU v6 lite", 31.25), "v5p": ("TPU v5", 95.74)}


def coordinates(kind: str, process: int, place: int) -> tuple[int, int, int]:
    """Of the chip in this place of its host, which has 2x2: v5p's hosts are stacked, others form a square."""
    x, y = place % 2, place // 2
    return (x, y, process) if kind == "v5p" else (2 * (process % 2) + x, 2 * (process // 2) + y, 0)


def pretend(kind: str) -> None:
    name, memory = KINDS[kind]
    device, real = type(jax.devices()[0]), mesh_utils.create_device_mesh
    hosts = [[x for x in jax.devices() if x.process_index == i] for i in range(jax.process_count())]
    places = {chip: place for chips in hosts for place, chip in enumerate(chips)}
    device.memory_stats = lambda self: dict(bytes_limit=int(memory * 2**30), bytes_in_use=0)
    device.device_kind = property(lambda self: name)
    device.coords = property(lambda self: coordinates(kind, self.process_index, places[self]))
    device.core_on_chip = property(lambda self: 0)
    device.slice_index = property(lambda self: 0)
    platform = device.platform

    @wraps(real)
    def create_device_mesh(*arguments, **options):
        device.platform = property(lambda self: "tpu")
        try:
            return real(*arguments, **options)
        finally:
            device.platform = platform

    mesh_utils.create_device_mesh = create_device_mesh


if __name__ == "__main__":
    kind, program, *arguments = sys.argv[1:]
    initialize = jax.distributed.initialize

    def join(**options):
        initialize(**options)
        if kind == "far":
            socket.gethostname = lambda: f"host-{os.environ['JAX_PROCESS_ID']}"
        elif kind != "cpu":
            pretend(kind)

    jax.distributed.initialize = join
    sys.argv, sys.path[0] = [program, *arguments], str(pathlib.Path(program).parent)
    runpy.run_path(program, run_name="__main__")
