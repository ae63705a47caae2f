"""What quantization rounds to, and what it costs: from quantize.py, and from the tables of the document."""

import re

import jax.numpy as jnp
import numpy as np

from checkpoints.checkpoint import open_checkpoint
from checkpoints.names import named_infos
from images.drawing import IMAGES, pyplot, tidy
from quantize import FP8, INT4, INT8, Format
from sharding.arrays import ArrayInfo

CHECKPOINT = IMAGES.parent / "tests" / "checkpoints" / "tiny-llama4"
WEIGHT = "layers.0.feed_forward.shared.gate"
SHOWN = {"int8": INT8, "fp8": FP8, "int4": INT4}
COLORS = {"int8": "#4c78a8", "fp8": "#54a24b", "int4": "#e45756"}
MODELS = {"SmolLM2-135M": "o", "tiny-llama4": "s"}  # first cells of the document's tables, and their markers


def representable(format: Format, count: int) -> np.ndarray:
    """What `count` evenly spaced weights from 0 to 1, in one channel, are rounded to."""
    weights = jnp.linspace(0, 1, count)[None]
    info = ArrayInfo("fD", "D", shape=weights.shape, format=format)
    return np.unique(format.decode(format.encode(weights, info), info))


def magnitudes() -> np.ndarray:
    """The magnitudes of a weight of the tiny model, relative to the largest in the same channel."""
    checkpoint = open_checkpoint(str(CHECKPOINT))
    info = dict(named_infos(checkpoint.config))[WEIGHT]
    x = np.abs(checkpoint.sources[WEIGHT].read(tuple((0, n) for n in info.shape)).astype(np.float32))
    return (x / x.max(info.contracted_axes, keepdims=True)).ravel()


def measured(model: str) -> list[tuple[str, float, float]]:
    """(format, bits per weight, mean KL) of each row of the model's table in docs/quantization.md.

    A format's name may be followed by a mark for a footnote, (*).
    """
    text = (IMAGES.parent / "docs" / "quantization.md").read_text()
    table = re.search(rf"^\| {model}.*?\n\n", text, re.MULTILINE | re.DOTALL)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.strip().splitlines()[2:]]
    return [(name.removesuffix(" (*)"), float(bits), float(kl)) for name, bits, kl in rows]


def draw():
    """Left, the numbers of each format and the weights of a model; right, the divergence of each format."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(9.5, 4.2), width_ratios=(1, 1))
    for row, (name, format) in enumerate(SHOWN.items()):
        values = representable(format, 128 if name == "int4" else 20001)
        left.vlines(values, 2 - row, 2.7 - row, color=COLORS[name], lw=0.8)
    bins = np.linspace(0, 1, 51)
    counts, _ = np.histogram(magnitudes(), bins)
    left.bar(bins[:-1], counts / counts.max() * 0.8, bins[1], 3, align="edge", color="#9d9d9d")
    left.set_yticks([3.4, 2.35, 1.35, 0.35], ["weights", *SHOWN])
    left.tick_params(axis="y", length=0)
    left.set_xlabel("magnitude over the largest in the channel")
    tables = {model: measured(model) for model in MODELS}
    bits = {name: bits for table in tables.values() for name, bits, _ in table}
    names = sorted(bits, key=lambda name: (-bits[name], name != "int8", name))
    for model, marker in MODELS.items():
        at = [names.index(name) for name, *_ in tables[model]]
        colors = [COLORS[re.match(r"\w+", name)[0]] for name, *_ in tables[model]]
        right.scatter([kl for *_, kl in tables[model]], at, marker=marker, s=44, color=colors, zorder=2)
        right.scatter([], [], marker=marker, s=44, color="#555", label=model)
    right.set_yticks(range(len(names)), [f"{name}: {bits[name]:g} bits" for name in names])
    right.invert_yaxis()
    right.grid(axis="y", color="#ddd", lw=0.8)
    right.set_xscale("log")
    right.set_xlabel("mean KL of the next token, nats")
    right.legend(framealpha=1, edgecolor="white", fontsize=9, loc="center left")
    tidy(figure)
    return figure
