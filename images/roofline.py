"""Rooflines of two TPU chips, with the decode steps and prefill chunks of a model on them."""

from jax.sharding import AbstractMesh

from deployment.chips import CHIPS, Chip
from deployment.floor import needed
from deployment.job import Job
from images.drawing import pyplot, tidy
from model import Config
from planner.published_models import read_model
from sharding.mesh import mesh_shape

DRAWN = {"v5e": "#4c78a8", "v6e": "#e45756"}
STEPS = (  # label, marker, context, rows and new tokens of each point
    ("decode, 8192 positions: rows", "o", 8192, [(n, 1) for n in (1, 8, 32, 128, 1024)]),
    ("decode, 1024 positions: rows", "s", 1024, [(n, 1) for n in (256, 1024)]),
    ("prefill, one prompt: tokens of a chunk", "^", 1024, [(1, n) for n in (32, 128, 512)]),
)


def intensity(cfg: Config, rows: int, context: int, tokens: int = 1) -> float:
    """Floating-point operations of a step per byte that it must read; int8 weights and cache."""
    shape = mesh_shape(cfg)
    one = AbstractMesh(tuple(shape.values()), tuple(shape))
    job = Job(cfg, rows, context)
    size, operations = needed(job if tokens == 1 else job.prefill(tokens, one), one)
    return operations / size


def attainable(x: float, chip: Chip) -> float:
    """The most operations per second at x operations per byte."""
    return min(chip.flops, x * chip.bandwidth)


def draw(name="llama3.1-70b"):
    """The figure for a model: operations per second that a chip can reach, over operations per byte."""
    cfg = read_model(name)
    figure, axes = pyplot().subplots(figsize=(9.5, 5.2))
    for kind, color in DRAWN.items():
        chip = CHIPS[kind]
        ridge = chip.flops / chip.bandwidth
        line = [1.5, ridge, 3000]
        axes.plot(line, [attainable(x, chip) / 1e12 for x in line], color=color, lw=1.5, zorder=1)
        axes.plot([ridge] * 2, [1, chip.flops / 1e12], color=color, lw=0.8, ls=":", zorder=1)
        axes.text(ridge * 1.04, 1.15, f"{kind}: {ridge:.0f}", color=color, fontsize=9)
        peak = f"{kind}: {chip.flops / 1e12:.0f} TFLOP/s, {chip.bandwidth / 1e9:.0f} GB/s"
        axes.text(3000, chip.flops / 1e12 * 0.7, peak, color=color, fontsize=9, ha="right")
    highest = CHIPS["v6e"]
    for label, marker, context, points in STEPS:
        at = [intensity(cfg, rows, context, tokens) for rows, tokens in points]
        for kind, color in DRAWN.items():
            y = [attainable(x, CHIPS[kind]) / 1e12 for x in at]
            axes.scatter(at, y, marker=marker, s=44, facecolor="white", edgecolor=color, lw=1.4, zorder=2)
        axes.scatter([], [], marker=marker, s=44, facecolor="white", edgecolor="#555", label=label)
        for x, (rows, tokens) in zip(at, points, strict=True):
            place = x, attainable(x, highest) / 1e12
            axes.annotate(rows * tokens, place, (-5, 8), textcoords="offset points", fontsize=8, ha="right")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(1.5, 3000)
    axes.set_ylim(1, 1600)
    ticks = [2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    axes.set_xticks(ticks, ticks)
    axes.set_yticks([1, 10, 100, 1000], [1, 10, 100, 1000])
    axes.minorticks_off()
    axes.set_xlabel(f"operations per byte read: {name}, int8 weights and cache, bfloat16 operations")
    axes.set_ylabel("TFLOP/s of a chip, at most")
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    tidy(figure)
    return figure
