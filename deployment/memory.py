"""Memory: what a device has, and what fits into it."""

import collections
import contextlib
import dataclasses
import functools
import logging
import math
import os
import pathlib
import re
import socket

import jax
import jax.numpy as jnp
from jax.dtypes import itemsize_bits
from jax.sharding import Mesh

import model
from checkpoints.checkpoint import Checkpoint
from conversation.text import load_tokenizer
from deployment.program_memory import ProgramBytes, program_bytes
from distributed.exchange import gather, warn
from feedback.errors import UserError
from model import Config, Weights
from ops.platform import platform
from quantize import FORMATS, Format
from serving.steps import Batch, batch_infos
from sharding.arrays import abstract
from sharding.mesh import STAGE, mesh_size
from sharding.stages import in_stages

logger = logging.getLogger(__name__)
DEFAULT_ROWS = 32  # of the batch
ROW_POSITIONS = 4096  # the default length of rows that are made before the prompts are known
CPU_ROWS = 8  # of a batch that waits for requests, on a CPU: steps grow longer with every busy row
# Fractions of the memory that are left over unless the user gives --rows: for programs where their code and
# temporaries are not estimated, and for errors of the estimate where they are.
HEADROOM, ESTIMATE_HEADROOM = 0.1, 0.02


def shard_bytes(tree) -> int:
    """Bytes per device of a tree of arrays or abstract arrays."""
    shards = ((x.sharding.shard_shape(x.shape), itemsize_bits(x.dtype)) for x in jax.tree.leaves(tree))
    return sum(math.prod(shape) * bits for shape, bits in shards) // 8


def host_memory(root: pathlib.Path = pathlib.Path("/")) -> int:
    """Bytes of memory that this process may use: the machine's, or less if a container limits it.

    root: of the file system. Linux keeps the limits in the process's control groups and their parents, in one
    tree (version 2) or a tree per resource (version 1).
    """
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, resources, group = line.split(":", 2)
        if resources and "memory" not in resources.split(","):
            continue
        top = root / ("sys/fs/cgroup/memory" if resources else "sys/fs/cgroup")
        below = top / group.lstrip("/")  # a container may see only its own group, as the top
        for folder in (below, *below.parents):
            limit = folder / ("memory.limit_in_bytes" if resources else "memory.max")
            with contextlib.suppress(
                OSError, ValueError
            ):  # without a limit the file is missing, or says "max"
                sizes.append(int(limit.read_text()))
    return min(sizes)


def free_memory(root: pathlib.Path = pathlib.Path("/")) -> int:
    """Bytes of `host_memory` that other programs leave, as Linux says; on other systems all of it."""
    have, file = host_memory(root), root / "proc/meminfo"
    text = file.read_text() if file.exists() else ""
    found = re.search(r"^MemAvailable: +(\d+) kB$", text, re.MULTILINE)
    return min(have, int(found[1]) * 1024) if found else have


def device_memory() -> int:
    """Bytes of the smallest device memory in any process. CPU devices share the memory of their host."""
    own = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    every = gather(dict(host=socket.gethostname(), own=own, memory=host_memory()))
    sharing = collections.Counter()
    for process in every:
        sharing[process["host"]] += process["own"].count(None)
    shares = [
        process["memory"] // sharing[process["host"]] if own is None else own
        for process in every
        for own in process["own"]
    ]
    return min(shares)


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A model, its mesh and its number formats.

    checkpoint: None for random weights. step_tokens: the most tokens of a row that a decode step reads.
    """

    cfg: Config
    mesh: Mesh
    dtype: str
    format: Format | None
    kv_dtype: str
    checkpoint: Checkpoint | None = None
    step_tokens: int = 1

    @functools.cached_property
    def tokenizer(self):
        """The checkpoint's tokenizer, which is loaded once."""
        return load_tokenizer(self.checkpoint.folder)

    def abstract_weights(self) -> Weights:
        """The shapes, types and shardings of the weights."""
        infos = in_stages(model.weight_infos(self.cfg, self.format), self.mesh.shape[STAGE])
        return abstract(infos, self.mesh, jnp.dtype(self.dtype))

    def weight_bytes(self) -> int:
        return shard_bytes(self.abstract_weights())

    def abstract_batch(self, rows: int, max_len: int) -> Batch:
        """The same of the batch that takes its turn; with several stages of layers, as many wait."""
        stages = self.mesh.shape[STAGE]
        infos = batch_infos(self.cfg, rows, max_len, jnp.dtype(self.kv_dtype), stages)
        return abstract(infos, self.mesh)

    def cache_bytes(self, rows: int, max_len: int) -> int:
        return shard_bytes(self.abstract_batch(rows, max_len)) * self.mesh.shape[STAGE]


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes that each device needs. programs: None where they are not estimated. saved: for saved prefixes,
    which are in the host's memory: 0 unless the device shares it.
    """

    weights: int
    cache: int
    programs: ProgramBytes | None
    saved: int = 0

    @property
    def total(self) -> int:
        programs = self.programs or ProgramBytes()
        return self.weights + self.cache + programs.code + programs.temporaries + self.saved

    def fit(self, have: int, headroom: bool) -> bool:
        """Whether a device with so many bytes has enough, and if `headroom`, some left over."""
        left = (ESTIMATE_HEADROOM if self.programs else HEADROOM) if headroom else 0
        return self.total <= have * (1 - left)

    def sentence(self, cache: str) -> str:
        """All that is needed, in words. cache: what the cache is for."""
        parts = [f"{gib(self.weights)} for weights", f"{gib(self.cache)} for {cache}"]
        if self.programs:
            parts.append(f"{gib(self.programs.code)} for the code of programs")
            parts.append(f"{gib(self.programs.temporaries)} for their temporaries")
        if self.saved:
            parts.append(f"{gib(self.saved)} for saved prefixes")
        return f"{', '.join(parts[:-1])} and {parts[-1]}"


def warn_of_others(needed: Needs, mesh: Mesh) -> None:
    """Say so if other programs hold memory that a model on CPUs needs: the system may swap, or end it."""
    total = needed.total * jax.local_device_count()
    if platform(mesh) == "cpu" and total > (free := free_memory()):
        warn(f"{gib(total)} of memory are needed, and other programs leave {gib(free)}: close some of them")


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def warn_of_saved(saved: int, row: int, mesh: Mesh) -> None:
    """Say so if an accelerator's host has less memory free than saved prefixes may take.

    saved: bytes on all hosts. row: bytes of a whole row.
    """
    own = saved // jax.process_count()
    logger.info("saved prefixes: up to %s of each host's memory; a row has %s", gib(own), gib(row))
    if platform(mesh) != "cpu" and own > (free := free_memory()):
        warn(f"--prefix-cache-gib: prefixes may take {gib(own)} of this host, where {gib(free)} are free")


def needs(models: list[Deployment], rows: int, max_len: int, saved: int = 0) -> Needs:
    """What the models, a cache of so many rows, all programs and saved prefixes need.

    saved: see `fit_cache`.
    """
    cache, mesh = sum(x.cache_bytes(rows, max_len) for x in models), models[0].mesh
    if saved:  # a row of each data shard may be on its way to the host or back
        cache += sum(x.cache_bytes(mesh_size(x.mesh, (STAGE, "data")), max_len) for x in models)
    programs = [program_bytes(x.cfg, x.mesh, rows, x.step_tokens) for x in models]
    if None in programs:
        total = None
    else:  # one program runs at a time
        total = ProgramBytes(sum(x.code for x in programs), max(x.temporaries for x in programs))
    own = saved // mesh.size if platform(mesh) == "cpu" else 0
    return Needs(sum(x.weight_bytes() for x in models), cache, total, own)


def fit_cache(
    models: list[Deployment], lengths: list[int], rows: int | None, max_len: int | None, saved: int = 0
) -> tuple[int, int]:
    """The cache to allocate for requests of these lengths: -> (rows, max_len), its rows and their positions.

    models: the model, and the draft model if there is one. rows, max_len: the user's choice, or None. By
    default there is a row for each request, but at most DEFAULT_ROWS, as long as the longest request; fewer
    if they do not fit, and then shorter rows, into which the longest requests do not fit. saved: bytes of the
    memory of all hosts that saved prefixes may take. Raises UserError if not even the shortest request fits.
    """
    shards, limit = mesh_size(models[0].mesh, (STAGE, "data")), min(x.cfg.max_positions for x in models)

    def rounded(length: int) -> int:
        return min(limit, -(-length // 128) * 128)  # so that few sizes are compiled

    counts = [rows or min(DEFAULT_ROWS, len(lengths))]
    while not rows and counts[-1] > shards:
        counts.append(max(counts[-1] // 2, shards))
    counts = [-(-count // shards) * shards for count in counts]
    choices = [(count, max_len or rounded(max(lengths))) for count in counts]
    if not max_len:
        choices += [(counts[-1], length) for length in sorted({rounded(n) for n in lengths}, reverse=True)]
    have = device_memory()
    for choice in choices:
        needed = needs(models, *choice, saved)
        if needed.fit(have, headroom=not rows):
            cache = f"its share of {choice[0]} x {choice[1]} positions"
            logger.info("each device needs %s, and has %s", needed.sentence(cache), gib(have))
            warn_of_others(needed, models[0].mesh)
            if saved:
                row = sum(x.cache_bytes(shards, choice[1]) * x.mesh.size // shards for x in models)
                warn_of_saved(saved, row, models[0].mesh)
            return choice

    count, length = choices[0] if rows else choices[len(counts) - 1]
    needed = needs(models, count, length, saved)
    if needed.weights > needed.cache:  # suggest what makes the larger of the two smaller
        bits, remedies = max(x.format.bits if x.format else 16 for x in models), []
        for name, format in FORMATS.items():
            if format and (fewer := format.on(platform(models[0].mesh)).bits) < bits:
                remedies, bits = [*remedies, f"--quantize {name}"], fewer
    else:
        remedies = ["--kv-cache-dtype int8"] * (models[0].kv_dtype != "int8")
        remedies += ["fewer --rows"] * (count > shards) + ["a smaller --max-len"]
    remedies += ["a smaller --prefix-cache-gib"] * (needed.saved > 0) + ["more devices"]
    what = needed.sentence(f"its share of {count} x {length} positions")
    raise UserError(f"does not fit: each device needs {what}, and has {gib(have)}; try {', '.join(remedies)}")
