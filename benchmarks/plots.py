"""Where the bytes of a decode step go: python3 benchmarks/plots.py [PLANS PICTURE]

PLANS holds one object of `plan.py --json` per line. Draws the picture and prints the README's table; by
default from images/plans.jsonl to images/decode_bytes.svg.
"""
# ruff: noqa: E402  the folder above must be on the path first

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from convert_checkpoint import OneLineParser, run

PARTS = {
    "attention": "#4c78a8",
    "mlp": "#72b7b2",
    "experts": "#f58518",
    "kv_cache": "#e45756",
    "embedding": "#b279a2",
    "other": "#9d9d9d",
}


def title(plan: dict) -> str:
    return f"{plan['model']} on {plan['topology']}, {plan['batch']} x {plan['context']}"


def draw(plans: list[dict], file: pathlib.Path) -> None:
    """One bar per plan: the gigabytes that each part moves, and a mark for the floor."""
    import matplotlib  # here, as the table can do without
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "the same picture of the same plans"
    figure, axes = pyplot.subplots(figsize=(9.5, 0.36 * len(plans) + 1.2))
    places = range(len(plans))
    left = [0.0] * len(plans)
    for part, colour in PARTS.items():
        sizes = [plan["hbm_bytes_by_part"][part] / 1e9 for plan in plans]
        axes.barh(places, sizes, left=left, color=colour, label=part.replace("_", " "), height=0.62)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    floors = [plan["floor_bytes_per_step"] / 1e9 for plan in plans]
    axes.scatter(floors, places, marker="|", s=260, color="black", label="floor", zorder=3)
    axes.set_yticks(places, [title(plan) for plan in plans])
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel("GB moved per device and decode step, as compiled")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        markerscale=0.6, ncols=7, loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False, fontsize=8
    )
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def table(plans: list[dict]) -> str:
    """The plans as a table in Markdown."""
    lines = [
        "| model | TPU, mesh | batch x context | peak memory | HBM per step | floor | collectives per layer "
        "| estimate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for plan in plans:
        mesh = "".join(f", {name} {n}" for name, n in plan["mesh"].items() if n > 1)
        collectives = ", ".join(f"{n} {kind}" for kind, n in plan["collectives_per_layer"].items()) or "none"
        lines.append(
            f"| {plan['model']} | {plan['topology']}{mesh} | {plan['batch']} x {plan['context']} "
            f"| {plan['peak_bytes'] / 2**30:.2f} of {plan['hbm_capacity_bytes'] / 2**30:.2f} GiB "
            f"| {plan['hbm_bytes_per_step'] / 1e6:,.0f} MB | {plan['floor_bytes_per_step'] / 1e6:,.0f} MB "
            f"| {collectives} | {plan['estimated_step_seconds'] * 1e3:.2f} ms, "
            f"{plan['tokens_per_second_per_sequence']:.0f} tokens/s per row |"
        )
    return "\n".join(lines)


def read_plans(file: pathlib.Path) -> list[dict]:
    """The plans of a file, one per line. Raises ValueError for what is none, or does not fit."""
    plans = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            plans.append(json.loads(line))
            fits = plans[-1]["fits"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{file}, line {number}: not what plan.py --json prints") from None
        if not fits:
            raise ValueError(f"{file}, line {number}: a plan that does not fit moves no bytes; leave it out")
    if not plans:
        raise ValueError(f"{file}: no plan in it")
    return plans


def main() -> None:
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("files", nargs="*", metavar="FILE", help="PLANS and PICTURE, or neither")
    files = parser.parse_args().files
    if len(files) not in (0, 2):
        parser.error("give both PLANS and PICTURE, or neither")
    plans, picture = files or [ROOT / "images" / "plans.jsonl", ROOT / "images" / "decode_bytes.svg"]
    plans = read_plans(pathlib.Path(plans))
    draw(plans, pathlib.Path(picture))
    print(table(plans))


if __name__ == "__main__":
    run(main)
