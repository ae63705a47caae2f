"""Which mesh a model gets: the same one from main.py as from plan.py, and the one that costs least."""

import collections
import dataclasses
import functools
import importlib.util
import math

import jax
import numpy as np
import pytest

from deployment import deploy, placement
from deployment.chips import CHIPS, Topology, topology_of
from deployment.deploy import ModelOptions, mesh_for
from deployment.estimates import expected_collectives
from deployment.job import Job
from deployment.placement import choose_mesh, rank_meshes
from feedback.errors import UserError
from planner.published_models import MODELS, read_model
from planner.topologies import find_topology
from quantize import INT4
from sharding.mesh import degrees

CPUS = Topology("cpu", None, (), tuple(jax.devices()))
FREE = None, None, None
QWEN = dataclasses.replace(read_model("qwen2.5-7b"), V=4096)  # 4 key/value heads, 28 layers
SHAPES = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"}
deep = functools.partial(pytest.param, marks=pytest.mark.deep)
needs_compiler = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")


def devices_of(chip: str, n: int) -> Topology:
    """So many devices: TPUs in a slice, or GPUs, which CPUs stand for since their arrays are not padded."""
    if CHIPS[chip].ring:
        return find_topology(f"{chip}:{SHAPES[n]}")
    return Topology(chip, CHIPS[chip], (), tuple(np.repeat(jax.devices()[:1], n)))


def on_machine(topology: Topology, options: ModelOptions, job: Job, monkeypatch) -> tuple[dict, list[str]]:
    """What main.py does with such devices: -> (the degrees of its mesh, what it says)."""
    log = []
    monkeypatch.setattr(deploy, "topology_of", lambda devices, slices: topology)
    monkeypatch.setattr(deploy, "slice_count", lambda: topology.slices)
    monkeypatch.setattr(deploy, "device_memory", lambda: topology.chip.hbm)
    return degrees(mesh_for(options, len(topology.devices), job, log.append)), log


@needs_compiler
@pytest.mark.parametrize(
    ("chip", "n"), [("v5e", 4), deep("v5e", 1), deep("v5e", 16), deep("h100", 8), deep("v6e", 32)]
)
def test_the_planners_mesh(chip, n, monkeypatch):
    """Of all published models: no more bytes in a step than on the best mesh of those that fit.

    To fit means that a tenth of the memory is left for programs, which the ranking does not know.
    """
    topology = devices_of(chip, n)
    for name in MODELS:
        cfg = read_model(name)
        job = Job(cfg, 32, min(4096, cfg.max_positions))
        best, *others = rank_meshes(job, topology)
        found, _ = on_machine(topology, ModelOptions(name), job, monkeypatch)
        asked = found["data"], found["expert"], found["tensor"]
        (ours,) = (x for x in (best, *others) if (x.dp, x.ep, x.tp) == asked)
        if best.stored_bytes < topology.chip.hbm * (1 - placement.HEADROOM):
            assert ours.bytes_read <= 1.05 * best.bytes_read, (name, str(best), str(ours))


@needs_compiler
def test_what_it_says(monkeypatch):
    """Of several devices which mesh it is; and what would take less time than the user's, if it is much."""
    topology = devices_of("v5e", 16)
    job = Job(read_model("qwen3-30b-a3b"), 32, 4096)
    say = functools.partial(on_machine, monkeypatch=monkeypatch)
    assert say(topology, ModelOptions(""), job) == (
        dict(data=1, expert=8, tensor=2),
        ["mesh of 16 devices: --dp 1 --ep 8 --tp 2"],
    )
    _, (mesh, hint) = say(topology, ModelOptions("", tp=16), job)
    assert mesh == "mesh of 16 devices: --dp 1 --ep 1 --tp 16"
    ours, best = (rank_meshes(job, topology, given)[0] for given in ((None, None, 16), FREE))
    assert ours.cost > 1.3 * best.cost
    less = f"{1 - best.cost / ours.cost:.0%}"
    assert hint == f"--dp 1 --ep 8 --tp 2 would take an estimated {less} less time in each step"
    _, said = say(topology, ModelOptions("", ep=16), job)  # within 10% of the best
    assert len(said) == 1
    assert say(devices_of("v5e", 1), ModelOptions(""), job)[1] == []


def test_devices_without_a_data_sheet():
    """The fewest bytes. 3 devices cannot share a head."""
    for n, expected in ((1, (1, 1, 1)), (2, (1, 1, 2)), (6, (3, 1, 2)), (8, (1, 1, 8))):
        topology = dataclasses.replace(CPUS, devices=CPUS.devices[:n])
        best = rank_meshes(Job(QWEN, 8, 4096), topology, have=math.inf)[0]
        assert (best.dp, best.ep, best.tp) == expected
    ranking = rank_meshes(Job(read_model("qwen3-30b-a3b"), 8, 4096), CPUS, have=math.inf)
    assert ranking[0].bytes_read == min(x.bytes_read for x in ranking) < max(x.bytes_read for x in ranking)


def test_experts_that_are_loaded_unevenly():
    """Of meshes that are nearly equal, the one with the most experts in a shard."""
    ranking = rank_meshes(Job(read_model("mixtral-8x7b"), 512, 4096), CPUS, have=math.inf)
    near = [x for x in ranking if x.cost < 1.003 * min(x.cost for x in ranking)]
    assert len(near) > 2 and ranking[0].ep == min(x.ep for x in near)


def test_mesh_over_a_slow_network():
    """Two groups of four devices: a replica in each, or a stage, or what is said; else one model over all."""
    odd, topology = dataclasses.replace(QWEN, layers=QWEN.layers[:27]), dataclasses.replace(CPUS, slices=2)

    def mesh(*asked, cfg=QWEN, least=0, pp=None):
        """least: devices among which a model must be divided to fit."""
        job = Job(cfg, 8, 4096)
        one = dataclasses.replace(CPUS, devices=CPUS.devices[:1])
        whole = rank_meshes(job, one, have=math.inf)[0].stored_bytes
        have = 1.1 * whole / least / (1 - placement.HEADROOM) if least else 2 * whole
        best, _ = choose_mesh(job, topology, asked, (pp,) if pp else (1, 2), have)
        return degrees(best.make(cfg, topology))

    assert mesh(*FREE) == mesh(*FREE, least=4) == dict(data=2, expert=1, tensor=4)
    assert mesh(*FREE, least=8) == mesh(*FREE, pp=2) == dict(data=1, expert=1, tensor=4, stage=2)
    assert mesh(*FREE, least=8, pp=1) == mesh(None, None, 8) == dict(data=1, expert=1, tensor=8)
    assert mesh(*FREE, cfg=odd, least=8) == dict(data=1, expert=1, tensor=8)
    assert mesh(*FREE, least=16, pp=1) == dict(data=1, expert=1, tensor=8)  # which says how much it lacks
    assert mesh(4, None, None) == dict(data=4, expert=1, tensor=2)
    with pytest.raises(UserError, match="--dp 3 on 8 devices: --dp x --ep x --tp x --pp must be"):
        mesh(3, None, None)


@needs_compiler
def test_fewer_rows_where_all_do_not_fit():
    """A mesh is chosen for as many rows as fit, and if not even one does, it is the one that lacks least."""
    topology, job = devices_of("v5e", 4), Job(read_model("llama3.1-8b"), 32, 8192)
    meshes = {}
    for have in (16e9, 4e9, 1e9):
        best, placed = choose_mesh(job, topology, FREE, (1,), have)
        meshes[have] = placed.batch, best.fits
        fitting = [x.cost for x in rank_meshes(placed, topology, have=have) if x.fits]
        assert not best.fits or best.cost == min(fitting)
    least = min(x.stored_bytes for x in rank_meshes(placed, topology))
    assert best.stored_bytes == least
    best, _ = choose_mesh(job, topology, FREE, (1,), 1.01 * least)  # which leaves nothing over
    assert best.fits
    assert meshes[16e9] == (32, True) and meshes[1e9] == (1, False)
    assert meshes[4e9][1] and 1 <= meshes[4e9][0] < 32


@needs_compiler
@pytest.mark.parametrize("model", ["llama3.1-8b", deep("qwen3-30b-a3b"), deep("llama4-scout")])
def test_two_slices_of_tpus(model, monkeypatch):
    """A copy of the model in each slice; or, if the user says so, stages, or one model over both slices."""
    topology, job = find_topology("v5e:4x4", 2), Job(read_model(model), 32, 2048)

    def mesh(**asked) -> tuple[dict, str]:
        found, log = on_machine(topology, ModelOptions("", **asked), job, monkeypatch)
        assert log[0].startswith("mesh of 32 devices in 2 slices that a slower network joins: --dp")
        return found

    assert mesh()["data"] > 1
    assert mesh(pp=2)["stage"] == 2
    assert mesh(dp=1, pp=1)["data"] == 1
    for choice in rank_meshes(job, topology, stages=(1, 2)):
        grid = choice.make(job.cfg, topology).devices
        inner = grid.reshape(choice.pp * choice.dp, -1)
        crosses = any(len({x.slice_index for x in shard}) > 1 for shard in inner)
        assert crosses == (choice.ep * choice.tp > 16)


def test_how_devices_are_joined():
    """Of TPUs the sizes of the first slice, wherever in the pod it lies; of others there are none."""
    device = collections.namedtuple("Device", "platform device_kind coords slice_index")
    found = [
        device("tpu", "TPU v5 lite", (16 * i + x, 8 + y, 0), i)
        for i in range(2)
        for x in range(2)
        for y in range(4)
    ]
    joined = topology_of(found, 2)
    assert (joined.chip, joined.sizes, joined.slices) == (CHIPS["v5e"], (2, 4, 1), 2)
    joined = topology_of([device("gpu", CHIPS["h100"].kind, None, None)] * 8, 1)
    assert (joined.chip, joined.sizes) == (CHIPS["h100"], ())
    assert topology_of(jax.devices(), 1).chip is None


def test_slices(monkeypatch):
    """Of TPUs slices, of others hosts; groups of unlike sizes cannot be the same part of a mesh."""
    device = collections.namedtuple("Device", "platform process_index slice_index")
    monkeypatch.setattr(placement, "gather", lambda _: ["a", "a", "b", "b"])
    for platform, slices, expected in (
        ("tpu", [0, 0, 0, 0], 1),
        ("tpu", [0, 1, 0, 1], 2),
        ("tpu", [0, 0, 0, 1], 1),
        ("gpu", [0, 0, 0, 0], 2),
        ("cpu", [0, 1, 2, 3], 2),
    ):
        devices = [device(platform, i, of) for i, of in enumerate(slices)]
        monkeypatch.setattr(jax, "devices", lambda devices=devices: devices)
        assert placement.slice_count() == expected


@needs_compiler
def test_copies():
    """DeepSeek R1 on 64 chips, which share one head: its queries and their results travel among fewer chips.

    For long texts, caches that are stored and read several times would take longer.
    """
    job, topology = Job(read_model("deepseek-r1"), 32, 8192, INT4), devices_of("v5e", 64)
    longer = dataclasses.replace(job, context=131072)
    best, long = (rank_meshes(x, topology, (1, 4, 16))[0] for x in (job, longer))
    assert best.copies > long.copies
    meshes = (dataclasses.replace(best, copies=n).make(job.cfg, topology) for n in (1, best.copies))
    one, several = (expected_collectives(job, mesh, topology) for mesh in meshes)
    assert several < one / best.copies + 2 * 61 * 20e-6  # what remains: two sums in each layer
