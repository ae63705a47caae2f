"""The pictures in images/ and the tables in docs/: python3 benchmarks/plots.py [MEASURED PICTURE]

MEASURED has one object of `plan.py --json` per line, or is what `--json FILE` of speed.py or quality.py
wrote; for quality.py there is a table only. Without arguments, the command makes all pictures and tables
again from the files in images/, and draws one layer's shards from what model.py declares.
"""

import json
import math
import pathlib

import jax.numpy as jnp
import quality
import results
import speed
from jax.sharding import AbstractMesh

import model
from feedback.errors import UserError
from planner.job import PARTS
from planner.models import read_model
from sharding.arrays import ArrayInfo
from sharding.mesh import SHARDED_BY, mesh_shape, mesh_size
from terminal.command_line import OneLineParser, run

COLORS = {
    "attention": "#4c78a8", "mlp": "#72b7b2", "experts": "#f58518", "other": "#9d9d9d",
    "kv_cache": "#e45756", "embedding": "#b279a2",  # parts of a plan
    "embed": "#eeca3b", "unembed": "#b279a2", "sample": "#54a24b", "collectives": "#e45756",  # of a profile
}  # fmt: skip


def title(plan: dict) -> str:
    return f"{plan['model']} on {plan['topology']}, {plan['batch']} x {plan['context']}"


def pyplot():
    """matplotlib.pyplot, imported here because tables do not need it."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "the same picture of the same numbers"
    return pyplot


def save(figure, file: pathlib.Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def draw_plans(plans: list[dict], file: pathlib.Path) -> None:
    """One bar per plan: the gigabytes that each part of the model moves, and a mark for the floor."""
    figure, axes = pyplot().subplots(figsize=(9.5, 0.36 * len(plans) + 1.2))
    places = range(len(plans))
    left = [0.0] * len(plans)
    for part in PARTS:
        sizes = [plan["hbm_bytes_by_part"][part] / 1e9 for plan in plans]
        axes.barh(places, sizes, left=left, color=COLORS[part], label=part.replace("_", " "), height=0.62)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    floors = [plan["floor_bytes_per_step"] / 1e9 for plan in plans]
    axes.scatter(floors, places, marker="|", s=260, color="black", label="floor", zorder=3)
    axes.set_yticks(places, [title(plan) for plan in plans])
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel("GB moved per device and decode step, as compiled")
    axes.legend(
        markerscale=0.6, ncols=7, loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False, fontsize=8
    )
    save(figure, file)


def draw_speed(result: dict, file: pathlib.Path) -> None:
    """Decode over the batch with the share of the memory bandwidth, and where the time of each row goes."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(9.5, 3.6), width_ratios=(2, 3))
    decode = [row for row in result["rows"] if row["phase"] == "decode"]
    for i, context in enumerate(sorted({row["context"] for row in decode})):
        line = [row for row in decode if row["context"] == context]
        batches, rates = ([row[name] for row in line] for name in ("batch", "tokens_per_second"))
        left.plot(batches, rates, marker="o", markersize=4, label=f"{context} positions")
        for row in line:
            point = row["batch"], row["tokens_per_second"]
            left.annotate(
                f"{row['mbu']:.0%}", point, (-9, 5 - 15 * i), textcoords="offset points", fontsize=7
            )
    left.set_xscale("log", base=2)
    left.set_xticks(batches, batches)
    left.set_ylim(0)
    left.set_xlabel("rows")
    left.set_ylabel("decoded tokens/s, % of the bandwidth")
    left.legend(frameon=False, fontsize=8)
    rows = [row for row in result["rows"] if row["components"]]
    at = [0.0] * len(rows)
    names = [f"{row['phase']} {speed.size(row)}" for row in rows]
    for part in (*speed.COMPONENTS, "collectives", "other"):
        shares = [100 * row["components"].get(part, 0) for row in rows]
        if any(shares):
            right.barh(names, shares, left=at, color=COLORS[part], label=part, height=0.62)
        at = [a + b for a, b in zip(at, shares, strict=True)]
    right.invert_yaxis()
    right.set_xlabel("% of the busy time")
    right.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False, fontsize=8)
    save(figure, file)


class Shards:
    """The shards of one device of a tensor-parallel mesh, from what model.py declares."""

    def __init__(self, cfg: model.Config, tensor: int, batch: int):
        shape = mesh_shape(cfg, tensor=tensor)
        self.mesh = AbstractMesh(tuple(shape.values()), tuple(shape))
        records = cfg, cfg.heads, cfg.layers[0].feed_forward
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


def draw_layer(file: pathlib.Path, name="llama3.1-70b", tensor=16, batch=8, context=8192) -> None:
    """One layer of a decode step on one device, where there are more devices than key/value heads."""
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
        "The chips of a column share one key/value head (axes *_heads).",
        "Each has its part of the head's queries (g), of its columns in k and",
        "v (h) and of its cache slots (s): axes *_slots. All chips split f.",
        "",
        f"{name}, tensor {tensor}: a decode step of {batch} rows of {context} positions.",
        "Shapes and bytes are those of one chip, weights and cache int8.",
    )
    for i, line in enumerate(notes):
        axes.text(541, 415 + 28 * slots + 17 * i, line, va="center", fontsize=8)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def plans_table(plans: list[dict]) -> str:
    """The plans as a table in Markdown."""
    head = ["model", "TPU, mesh", "batch x context", "peak memory", "HBM per step", "floor"]
    lines = []
    for plan in plans:
        mesh = "".join(f", {name} {n}" for name, n in plan["mesh"].items() if n > 1)
        collectives = ", ".join(f"{n} {kind}" for kind, n in plan["collectives_per_layer"].items()) or "none"
        lines.append([
            plan["model"], f"{plan['topology']}{mesh}", f"{plan['batch']} x {plan['context']}",
            f"{plan['peak_bytes'] / 2**30:.2f} of {plan['hbm_capacity_bytes'] / 2**30:.2f} GiB",
            f"{plan['hbm_bytes_per_step'] / 1e6:,.0f} MB", f"{plan['floor_bytes_per_step'] / 1e6:,.0f} MB",
            collectives, f"{plan['estimated_step_seconds'] * 1e3:.2f} ms, "
            f"{plan['tokens_per_second_per_sequence']:.0f} tokens/s per row",
        ])  # fmt: skip
    return results.table([*head, "collectives per layer", "estimate"], lines)


def read_plans(file: pathlib.Path) -> list[dict]:
    """The plans of a file, one per line. Raises UserError for a line that is no plan or does not fit."""
    plans = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            plans.append(json.loads(line))
            fits = plans[-1]["fits"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{file}, line {number}: not what plan.py --json prints") from None
        if not fits:
            raise UserError(f"{file}, line {number}: a plan that does not fit moves no bytes; leave it out")
    if not plans:
        raise UserError(f"{file}: no plan in it")
    return plans


def program_of(file: pathlib.Path) -> str:
    """The benchmark that wrote a file of measurements: speed, quality or plan."""
    text = file.read_text()
    return "speed" if '"rows"' in text else "quality" if '"max_over_rms"' in text else "plan"


def tables(file: pathlib.Path) -> str:
    """The tables in Markdown of a file of measurements."""
    match program_of(file):
        case "speed":
            return speed.report(speed.read_result(file))
        case "quality":
            return quality.report(json.loads(file.read_text()), top=3)
    return plans_table(read_plans(file))


def draw(file: pathlib.Path, picture: pathlib.Path) -> None:
    """Draw the picture of a file of measurements, if its benchmark has one."""
    match program_of(file):
        case "speed":
            draw_speed(speed.read_result(file), picture)
        case "plan":
            draw_plans(read_plans(file), picture)


def main() -> None:
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("files", nargs="*", metavar="FILE", help="MEASURED and PICTURE, or neither")
    files = parser.parse_args().files
    if len(files) not in (0, 2):
        parser.error("give both MEASURED and PICTURE, or neither")
    images = results.ROOT / "images"
    jobs = [list(map(pathlib.Path, files))] if files else [
        (file, file.with_suffix(".svg")) for file in sorted(images.glob("*.json*"))
    ]  # fmt: skip
    for file, picture in jobs:
        draw(file, picture)
        print(tables(file), end="\n\n")
    if not files:
        draw_layer(images / "layer.svg")


if __name__ == "__main__":
    run(main)
