"""Expert weights that the busiest chip reads in a decode step, by the planner's expectation."""

import math

import model
from deployment.memory import active_experts
from images.drawing import pyplot, redraw, tidy
from planner.published_models import read_model

MODEL, CHIPS = "llama4-scout", 16
DEGREES = {"tp 16": 1, "ep 4 x tp 4": 4, "ep 16": 16}  # ways to divide the chips, by expert shards
COLORS = ("#4c78a8", "#f58518", "#54a24b")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


def expert_bytes() -> float:
    """Bytes of one layer's routed experts, int8 without their scales, on each chip: the same for all."""
    cfg = read_model(MODEL)
    infos = model.weight_infos(cfg).layers[0].feed_forward
    return sum(math.prod(info.shape) for info in (infos.gate, infos.up, infos.down)) / CHIPS


def shares(shards: int) -> list[float]:
    """The expected fraction of the busiest chip's experts that a step of so many rows reads."""
    cfg = read_model(MODEL)
    return [active_experts(cfg, float(rows), shards) for rows in ROWS]


def draw():
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(9.5, 3.9))
    size = expert_bytes() / 1e6
    base = shares(1)
    for (name, shards), color in zip(DEGREES.items(), COLORS, strict=True):
        share = shares(shards)
        style = dict(marker="o", markersize=4, color=color, label=name)
        left.plot(ROWS, [size * x for x in share], **style)
        right.plot(ROWS, [x / y for x, y in zip(share, base, strict=True)], **style)
    left.axhline(size, color="#999", linewidth=0.8, linestyle=":")
    left.text(1, size * 1.02, f"all experts of the chip: {size:.1f} MB", fontsize=8, color="#555")
    left.set_ylabel("MB per layer, on the busiest chip")
    left.set_ylim(0, size * 1.12)
    left.set_title("Expert weights read in a step", fontsize=10)
    right.set_ylabel("multiple of what tp 16 reads")
    right.set_title("The same, divided by tp 16", fontsize=10)
    right.set_yscale("log", base=2)
    right.set_yticks((1, 2, 4, 8, 16), ("1", "2", "4", "8", "16"))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ROWS, [str(rows) for rows in ROWS])
        axes.set_xlabel("rows of the batch")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    tidy(figure)
    return figure


if __name__ == "__main__":
    redraw("experts")
