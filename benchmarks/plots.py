"""The pictures in images/ and the tables in docs/: python3 benchmarks/plots.py [MEASURED PICTURE]

MEASURED has one object of `plan.py --json` per line, or is what `--json FILE` of speed.py or quality.py
wrote; for quality.py there is a table only. Without arguments, the command makes all pictures and tables
again from the files in images/, and draws what the programs in images/ draw.
"""

import json
import pathlib

import quality
import results
import speed

from deployment.step_bytes import PARTS
from feedback.errors import UserError
from images.drawing import IMAGES, pyplot, redraw, save, tidy
from terminal.command_line import OneLineParser, run

COLORS = {
    "attention": "#4c78a8", "mlp": "#72b7b2", "experts": "#f58518", "other": "#9d9d9d",
    "kv_cache": "#e45756", "embedding": "#b279a2",  # parts of a plan
    "embed": "#eeca3b", "unembed": "#b279a2", "sample": "#54a24b", "collectives": "#e45756",  # of a profile
}  # fmt: skip


LEGEND = dict(loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False, fontsize=8)


def draw_bars(axes, names, parts: dict[str, list[float]]) -> None:
    """Bars below one another, each of stacked parts. parts: of each part, its size in every bar."""
    left = [0.0] * len(names)
    for part, sizes in parts.items():
        if any(sizes):
            label = part.replace("_", " ")
            axes.barh(names, sizes, left=left, color=COLORS[part], label=label, height=0.62)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.invert_yaxis()


def draw_plans(plans: list[dict], file: pathlib.Path) -> None:
    """One bar per plan: the gigabytes that each part of the model moves, and a mark for the floor."""
    figure, axes = pyplot().subplots(figsize=(9.5, 0.36 * len(plans) + 1.2))
    places = range(len(plans))
    draw_bars(axes, places, {x: [plan["hbm_bytes_by_part"][x] / 1e9 for plan in plans] for x in PARTS})
    floors = [plan["floor_bytes_per_step"] / 1e9 for plan in plans]
    axes.scatter(floors, places, marker="|", s=260, color="black", label="floor", zorder=3)
    axes.set_yticks(places, ["{model} on {topology}, {batch} x {context}".format(**plan) for plan in plans])
    axes.margins(y=0.01)
    axes.set_xlabel("GB moved per device and decode step, as compiled")
    axes.legend(markerscale=0.6, ncols=7, **LEGEND)
    tidy(figure)
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
    names = [f"{row['phase']} {speed.size(row)}" for row in rows]
    parts = *speed.COMPONENTS, "collectives", "other"
    draw_bars(right, names, {x: [100 * row["components"].get(x, 0) for row in rows] for x in parts})
    right.set_xlabel("% of the busy time")
    right.legend(ncols=4, **LEGEND)
    tidy(figure)
    save(figure, file)


def plans_table(plans: list[dict]) -> str:
    """The plans as a table in Markdown."""
    head = ["model", "TPU, mesh", "batch x context", "peak memory", "HBM per step", "floor"]
    lines = []
    for plan in plans:
        mesh = "".join(f", {name} {n}" for name, n in plan["mesh"].items() if n > 1)
        collectives = ", ".join(f"{n} {kind}" for kind, n in plan["collectives_per_layer"].items()) or "none"
        estimates = [f"{plan[name] * 1e3:.2f}" for name in ("scheduled_seconds", "cautious_seconds")]
        lines.append([
            plan["model"], f"{plan['topology']}{mesh}", f"{plan['batch']} x {plan['context']}",
            f"{plan['peak_bytes'] / 2**30:.2f} of {plan['hbm_capacity_bytes'] / 2**30:.2f} GiB",
            f"{plan['hbm_bytes_per_step'] / 1e6:,.0f} MB", f"{plan['floor_bytes_per_step'] / 1e6:,.0f} MB",
            collectives,
            f"{' to '.join(dict.fromkeys(estimates))}; {plan['exposed_seconds'] * 1e3:.2f} ms",
            f"{plan['estimated_step_seconds'] * 1e3:.2f} ms, "
            f"{plan['tokens_per_second_per_sequence']:.0f} tokens/s per row",
        ])  # fmt: skip
    estimates = "estimate by the schedule; added by collectives", "estimate without the schedule"
    return results.table([*head, "collectives per layer", *estimates], lines)


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
    jobs = [list(map(pathlib.Path, files))] if files else [
        (file, file.with_suffix(".svg")) for file in sorted(IMAGES.glob("*.json*"))
    ]  # fmt: skip
    for file, picture in jobs:
        draw(file, picture)
        print(tables(file), end="\n\n")
    if not files:
        redraw([])


if __name__ == "__main__":
    run(main)
