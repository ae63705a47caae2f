"""How a model is placed on devices: its mesh, and the number formats of weights, activations and cache."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from checkpoints.checkpoint import Checkpoint
from deployment.chips import Topology
from deployment.estimates import expected_collectives, resource_seconds, step_seconds
from deployment.floor import needed
from deployment.job import Job
from deployment.memory import HEADROOM
from distributed.exchange import gather, hostname
from feedback.errors import UserError
from model import Config
from quantize import FORMATS, Format
from sharding.mesh import make_mesh

Given = tuple[int | None, int | None, int | None]
WORTH_COPYING = 0.95  # of a step's cost, at most: some of the collectives that copies spare are hidden anyway


@dataclasses.dataclass(frozen=True)
class Choice:
    """A mesh of these degrees of parallelism, and what is known before compiling of a decode step on it.

    copies: of each key/value head's cache, see sharding/mesh.py. stored_bytes: of weights and cache, on one
    device. bytes_read: by one device. seconds: what each resource alone takes; estimated_step_seconds: what
    they take together. Both are None where the devices' data sheet is not known.
    """

    dp: int
    ep: int
    tp: int
    pp: int
    copies: int
    fits: bool
    stored_bytes: float
    bytes_read: float
    seconds: dict[str, float] | None
    estimated_step_seconds: float | None

    @property
    def cost(self) -> float:
        """What a step takes: seconds, or bytes where these are all that is known."""
        return self.estimated_step_seconds or self.bytes_read

    def __str__(self) -> str:
        """In the words of the command line."""
        return f"--dp {self.dp} --ep {self.ep} --tp {self.tp}" + f" --pp {self.pp}" * (self.pp > 1)

    def make(self, cfg: Config, topology: Topology) -> Mesh:
        return make_mesh(cfg, self.dp, self.ep, self.tp, list(topology.devices), self.pp, self.copies)


def rank_meshes(
    job: Job,
    topology: Topology,
    given: Given = (None, None, None),
    stages: tuple[int, ...] = (1,),
    have: float | None = None,
) -> list[Choice]:
    """The meshes of all devices that the model and the given degrees allow, the best first.

    Of meshes that differ in nothing but the copies of caches, one is among them. given: (dp, ep, tp), None
    where any degree will do. stages: the numbers of them to consider, the best first. have: bytes of a
    device; default: its data sheet's. With several slices the model's weights stay within one, if they fit,
    and the slices become data shards, or else stages. A batch that the shards do not divide is rounded up.
    Raises UserError if there is no such mesh.
    """
    n, chip, choices, reasons = len(topology.devices), topology.chip, {}, []
    have = chip.hbm if have is None else have
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    for pp, ep, tp, copies in itertools.product(stages, divisors, divisors, divisors):
        dp, rest = divmod(n, pp * ep * tp)
        if rest or any(x not in (None, y) for x, y in zip(given, (dp, ep, tp), strict=True)):
            continue
        try:
            mesh = make_mesh(job.cfg, dp, ep, tp, list(topology.devices), pp, copies)
        except ValueError as e:
            reasons.append(str(e))
            continue
        rounded = dataclasses.replace(job, batch=-(-job.batch // (dp * pp)) * dp * pp)
        stored = sum(size for *_, size in rounded.shards(mesh)) + rounded.waiting_bytes(mesh)
        bytes_read, flops = needed(rounded, mesh)
        seconds = in_all = None
        if chip:
            collectives = expected_collectives(rounded, mesh, topology)
            seconds = resource_seconds(bytes_read, flops, collectives, chip)
            in_all = step_seconds(seconds)
        choice = Choice(dp, ep, tp, pp, copies, stored < have, stored, bytes_read, seconds, in_all)
        fewer = choices.setdefault((dp, ep, tp, pp), choice)
        if choice.fits and choice.cost < WORTH_COPYING * fewer.cost:
            choices[dp, ep, tp, pp] = choice
    if not choices:
        asked = [f"--{name} {x}" for name, x in zip(("dp", "ep", "tp"), given, strict=True) if x]
        asked += [f"--pp {stages[0]}"] if stages[0] > 1 else []
        reasons.append("--dp x --ep x --tp x --pp must be the number of devices")
        raise UserError(f"{' '.join(asked) or 'the default mesh'} on {n} devices: {reasons[0]}")

    def order(x: Choice) -> tuple:
        crosses = x.ep * x.tp > n // topology.slices  # the slow network between slices
        rounded_up = job.batch % (x.dp * x.pp) > 0
        missing = 0 if x.fits else x.stored_bytes
        # Costs that differ by about a hundredth count as equal. Of such meshes the one with the most experts
        # in a shard is better, because routers load experts less evenly than the estimate assumes.
        return missing, crosses, stages.index(x.pp), rounded_up, round(100 * math.log(x.cost)), x.ep, x.cost

    return sorted(choices.values(), key=order)


def choose_mesh(
    job: Job, topology: Topology, given: Given, stages: tuple[int, ...], have: int
) -> tuple[Choice, Job]:
    """The best mesh for the job's rows, or else for half of them, and so on: -> (it, the job with its rows).

    have: bytes of a device, of which HEADROOM is left over if it can be. If not even one row fits, it is the
    mesh that comes closest: fit_cache will say how much memory is missing.
    """
    counts = [job.batch >> i for i in range(job.batch.bit_length())]
    for left_over, rows in itertools.product((HEADROOM, 0), counts):
        placed = dataclasses.replace(job, batch=rows)
        best = rank_meshes(placed, topology, given, stages, have * (1 - left_over))[0]
        if best.fits:
            break
    return best, placed


def slice_count() -> int:
    """The number of slices: sets of devices with a fast network, between which the network is slow.

    A slice is a TPU slice or, of other devices, a host. 1 if the slices have unlike sizes. All processes must
    call this.
    """
    hosts = gather(hostname())
    sizes = collections.Counter(
        x.slice_index if x.platform == "tpu" else hosts[x.process_index] for x in jax.devices()
    )
    return len(sizes) if len(set(sizes.values())) == 1 else 1


def choose_format(
    asked: str | None, checkpoint: Checkpoint | None, log: Callable[[str], None]
) -> Format | None:
    """The format of the weights: the one asked for, else the checkpoint's. UserError if they conflict.

    Experts that were published in MXFP4 are held so unless another format, or none, is asked for.
    Where a platform has no fast product of a format, weights are held in another, and `log` is told.
    """
    there = checkpoint and checkpoint.format
    wanted = FORMATS[asked] if asked else checkpoint and checkpoint.natural_format
    if there and wanted != there:
        where = checkpoint.name
        raise UserError(f"--quantize {asked}: the weights in {where} are {there}; use the original model")
    held = wanted and wanted.on(jax.default_backend())
    if held != wanted:
        log(f"{wanted} weights are held as {held.scheme}: on this platform {wanted} is slower")
    return held


def choose_dtypes(dtype: str | None, kv_dtype: str | None, format: Format | None) -> tuple[str, str]:
    """The types of activations and cache: those that the user asks for, else those that are fast here."""
    on_cpu = jax.default_backend() == "cpu"
    dtype = dtype or ("float32" if on_cpu and not format else "bfloat16")
    return dtype, kv_dtype or ("float32" if on_cpu else dtype)


def set_precision(dtype: str) -> None:
    """Let matmuls of float32 activations be exact: by default TPUs and GPUs round their inputs."""
    if dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
