"""What passes in a layer of a decode step of many rows, with all-reduces and by columns.

`python3 -m images.many_rows` compiles both for v5e:4x4 and writes images/many_rows.csv, of which `draw`
makes the picture. The times are those of the walk through the compiler's schedule, see planner/schedule.py.
"""

import csv
import dataclasses
import itertools
import re
from functools import partial

from deployment.job import Job
from images.drawing import IMAGES, pyplot, save, tidy
from planner.compiled_step import reader_of, sending_seconds
from planner.compiler import compile_programs
from planner.published_models import read_model
from planner.schedule import read_schedule
from planner.topologies import find_topology
from sharding import collective_matmul
from sharding.mesh import make_mesh

NUMBERS = IMAGES / "many_rows.csv"
FIELDS = "way", "what", "microseconds", "part"
WAYS = {"all-reduces": 2**60, "by columns": collective_matmul.LEAST_TOKENS}  # LEAST_TOKENS of each
# What the scopes of a layer are called in the picture, in their order.
PARTS = {"qkv": "q, k, v", "scores": "attention", "output": "o", "feed_forward": "gate, up, down"}
COLORS = dict(memory="#4c78a8", computing="#bab0ac", collectives="#e45756")
NAMES = dict(memory="waits for HBM", computing="computes", collectives="waits for other chips")


def measured(way: str) -> list[list]:
    """What passes in the second of three layers: [what, microseconds, part], equal neighbors as one."""
    collective_matmul.LEAST_TOKENS = WAYS[way]
    topology, cfg = find_topology("v5e:4x4"), read_model("llama3.1-70b")
    job = Job(dataclasses.replace(cfg, layers=cfg.layers[:3]), 128, 8192)
    mesh, timeline = make_mesh(cfg, tensor=16, devices=list(topology.devices)), []
    (program,) = compile_programs(job, mesh)
    reader = reader_of(program, job, mesh, topology)
    read_schedule(reader, topology.chip, partial(sending_seconds, topology), timeline=timeline)
    passed, part = [], ""
    for x in reversed(timeline):  # what is between two parts counts for the next one
        found = re.search(r"/attention/(qkv|scores|output)|/(feed_forward)", x.scope)
        part = (found[1] or found[2]) if found else part
        passed.insert(0, (x.what, x.seconds * 1e6, part))
    pairs = itertools.pairwise(part for *_, part in passed)
    _, begin, end = (0, *(i + 1 for i, pair in enumerate(pairs) if pair == ("feed_forward", "qkv")))[:3]
    alike = itertools.groupby(passed[begin:end], lambda x: (x[0], x[2]))
    return [[what, round(sum(x[1] for x in group), 2), part] for (what, part), group in alike]


def draw():
    """Each way as a line of colored stretches of time, one layer long."""
    with open(NUMBERS, newline="") as file:
        lines = [(x["way"], x["what"], float(x["microseconds"]), x["part"]) for x in csv.DictReader(file)]
    ways = {way: [x[1:] for x in lines if x[0] == way] for way in WAYS}
    figure, frames = pyplot().subplots(len(ways), 1, figsize=(9, 3.4), sharex=True)
    for axes, (way, passed) in zip(frames, ways.items(), strict=True):
        edges = [0, *itertools.accumulate(n for _, n, _ in passed)]
        for (what, n, _), left in zip(passed, edges, strict=False):
            axes.barh(0, n, left=left, height=0.7, color=COLORS[what], linewidth=0)
        for part, name in PARTS.items():
            within = [i for i, x in enumerate(passed) if x[2] == part]
            first, last = edges[within[0]], edges[within[-1] + 1]
            axes.plot([first, last], [0.5, 0.5], color="#555555", lw=1)
            axes.text((first + last) / 2, 0.58, name, ha="center", fontsize=8, color="#555555")
        axes.set_title(f"{way}: {edges[-1]:.0f} microseconds", loc="left", fontsize=10, pad=12)
        axes.set(yticks=[], ylim=(-0.4, 0.9))
        axes.spines["left"].set_visible(False)
    frames[-1].set_xlabel("microseconds of a layer")
    marks = [pyplot().Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    names = [NAMES[what] for what in COLORS]
    figure.legend(marks, names, loc="upper right", ncols=3, frameon=False, fontsize=8)
    tidy(figure)
    return figure


if __name__ == "__main__":
    with open(NUMBERS, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([FIELDS, *([way, *x] for way in WAYS for x in measured(way))])
    save(draw(), IMAGES / "many_rows.svg")
