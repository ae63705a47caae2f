"""One decoder layer on one of many chips: what each holds, computes and sends."""

import math

import jax.numpy as jnp
from jax.sharding import AbstractMesh

import model
from images.drawing import pyplot, redraw
from planner.published_models import read_model
from sharding.arrays import ArrayInfo
from sharding.mesh import SHARDED_BY, mesh_shape, mesh_size


class Shards:
    """The shards of one device of a tensor-parallel mesh, from what model.py declares."""

    def __init__(self, cfg: model.Config, tensor: int, batch: int):
        shape = mesh_shape(cfg, tensor=tensor)
        self.mesh = AbstractMesh(tuple(shape.values()), tuple(shape))
        records = cfg, cfg.attention, cfg.layers[0].feed_forward
        self.sizes = dict(B=batch, T=1) | {x: n for record in records for x, n in vars(record).items()}

    def degree(self, letter: str) -> int:
        return mesh_size(self.mesh, SHARDED_BY.get(letter, ()))

    def size(self, letter: str) -> int:
        return -(-self.sizes[letter.upper()] // self.degree(letter))

    def text(self, letters: str) -> str:
        """An activation's letters and shape."""
        return f"{letters} {[self.size(x) for x in letters]}"

    def array(self, info: ArrayInfo) -> list[str]:
        """The letters, shape and bytes of a declared array; weights are int8."""
        padded = info.padded_shape(self.mesh)
        shape = [n // self.degree(x) for n, x in zip(padded, info.letters, strict=True)]
        width = 1 if info.contracted else jnp.dtype(info.dtype).itemsize
        return [info.letters, str(shape), f"{math.prod(shape) * width / 1e6:.1f} MB"]


WEIGHT, CACHE, SHARERS, ALL = "#cfe0f1", "#f7cfd0", "#f9dcb4", "#d9d2ea"


def draw_box(axes, x: float, y: float, width: float, lines: list[str], color: str | None, height=None):
    """A box with its top at y, centered at x, in pixels, its first line bold. Without a color, text only."""
    if color:
        from matplotlib.patches import FancyBboxPatch

        corner, style = (x - width / 2, y), "round,pad=0,rounding_size=5"
        height = height or 10 + 14 * len(lines)
        axes.add_patch(
            FancyBboxPatch(corner, width, height, style, facecolor=color, edgecolor="#555", lw=0.8)
        )
    for i, line in enumerate(lines):
        weight = "bold" if i == 0 and color else "normal"
        axes.text(x, y + 12 + 14 * i, line, ha="center", va="center", fontsize=8, weight=weight)


def draw_flow(axes, x: float, title: str, *steps) -> None:
    """Boxes below one another. A step is (width, lines, color), or a list of such boxes side by side."""
    axes.text(x, 18, title, ha="center", fontsize=11, weight="bold")
    y, arrow = 30, dict(arrowstyle="-|>", color="#555", lw=0.9, shrinkA=0, shrinkB=0)
    for step in steps:
        boxes = step if isinstance(step, list) else [step]
        left = x - sum(width + 8 for width, *_ in boxes) / 2
        for width, lines, color in boxes:
            middle = left + 4 + width / 2
            draw_box(axes, middle, y, width, lines, color)
            if step is not steps[0]:
                axes.annotate("", (middle, y), (middle, y - 14), arrowprops=arrow)
            left += width + 8
        y += 24 + 14 * max(len(lines) for _, lines, _ in boxes)


def draw(name="llama3.1-70b", tensor=16, batch=8, context=8192):
    """The figure of one layer in a decode step, on one of more devices than there are key/value heads."""
    cfg = read_model(name)
    at, layer = Shards(cfg, tensor, batch), model.weight_infos(cfg).layers[0]
    cache = model.cache_infos(cfg, batch, context, jnp.dtype("int8")).layers[0]
    heads, slots = at.degree("k"), at.degree("h")
    k, g, h, H = (at.size(x) for x in "kghH")
    figure = pyplot().figure(figsize=(9.5, 5.9))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 950), ylim=(590, 0))
    axes.axis("off")

    def weight(name: str, info: ArrayInfo, width: float) -> tuple:
        letters, *rest = at.array(info)
        return width, [f"{name}  {letters}", *rest], WEIGHT

    x = 300, [f"RMS norm of x {at.text('bTD')}, the same on all {tensor}"], None
    values, scales = ("{} {}, {}".format(*at.array(info)) for info in (cache.values, cache.scale))
    attention, mlp = layer.attention, layer.feed_forward
    draw_flow(
        axes, 250, "Attention", x,
        [weight("q", attention.q, 150), weight("k", attention.k, 132), weight("v", attention.v, 132)],
        (420, [f"all-gather among the {slots} that share a head",
               f"bf16 {[batch, 1, k, slots, g * H + 2 * h]}: all queries of the head, whole keys and values"],
         SHARERS),
        (420, [f"q {at.text('bTkGH')}   k, v {at.text('bTkH')}", "RoPE; the new key and value to their slot"],
         None),
        (420, [f"cache  {values}", f"scales {scales}", f"1 in {slots} positions"], CACHE),
        (420, [f"output of these slots {at.text('bTkGH')}, and its log-sum-exp"], None),
        (420, [f"all-to-all among the {slots} that share a head",
               f"f32 {[slots, batch, 1, k, g, H + 1]}: each gets all parts of its own queries"], SHARERS),
        (420, [f"merged by their log-sum-exp: {at.text('bTkgH')}"], None),
        weight("o", attention.o, 190),
        (420, [f"all-reduce among all {tensor}", f"bf16 {at.text('bTD')}: the sum over k and g"], ALL),
        (300, ["x + attention, the same on all"], None),
    )  # fmt: skip
    draw_flow(
        axes, 715, "Feed forward", x, [weight("gate", mlp.gate, 170), weight("up", mlp.up, 170)],
        (348, [f"silu(gate) x up: {at.text('bTf')}"], None), weight("down", mlp.down, 190),
        (348, [f"all-reduce among all {tensor}", f"bf16 {at.text('bTD')}: the sum over f"], ALL),
        (300, ["x + feed forward: to the next layer"], None),
    )  # fmt: skip

    axes.text(715, 361, f"The {tensor} chips", ha="center", fontsize=11, weight="bold")
    for head in range(heads):
        width = 348 / heads
        middle = 541 + width * (head + 0.5)
        axes.text(middle, 383, f"k {head}", ha="center", va="center", fontsize=8)
        draw_box(axes, middle, 393, width - 4, [], SHARERS, 28 * slots + 6)
        for slot in range(slots):
            draw_box(axes, middle, 397 + 28 * slot, width - 10, [], "#ffffff", 22)
            place = middle, 408 + 28 * slot
            axes.text(*place, f"part {slot}", ha="center", va="center", fontsize=7)
    notes = (
        f"The {slots} chips of a column share a key/value head: along the axes",
        "*_slots they divide its queries (g), its columns of k and v (h) and",
        "its cache slots (s). Along *_heads the heads differ. All chips divide f.",
        "",
        f"{name}, tensor {tensor}: a decode step of {batch} rows of {context} positions.",
        "Shapes and bytes are those of one chip, weights and cache int8.",
    )
    for i, line in enumerate(notes):
        axes.text(541, 415 + 28 * slots + 17 * i, line, va="center", fontsize=8)
    return figure


if __name__ == "__main__":
    redraw("layer")
