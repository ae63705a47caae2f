"""Where the bytes of a decode step go: python3 benchmarks/plots.py [PLANS] [PICTURE]

PLANS holds one object of `plan.py --json` per line. Draws the picture and prints the README's table; by
default from images/plans.jsonl to images/decode_bytes.svg.
"""

import json
import pathlib
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

IMAGES = pathlib.Path(__file__).resolve().parent.parent / "images"
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
    figure, axes = plt.subplots(figsize=(9.5, 0.36 * len(plans) + 1.2))
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
        mesh = " ".join(f"{name} {n}" for name, n in plan["mesh"].items() if n > 1)
        collectives = ", ".join(f"{n} {kind}" for kind, n in plan["collectives_per_layer"].items())
        lines.append(
            f"| {plan['model']} | {plan['topology']}, {mesh} | {plan['batch']} x {plan['context']} "
            f"| {plan['peak_bytes'] / 2**30:.2f} of {plan['hbm_capacity_bytes'] / 2**30:.2f} GiB "
            f"| {plan['hbm_bytes_per_step'] / 1e6:,.0f} MB | {plan['floor_bytes_per_step'] / 1e6:,.0f} MB "
            f"| {collectives} | {plan['estimated_step_seconds'] * 1e3:.2f} ms, "
            f"{plan['tokens_per_second_per_sequence']:.0f} tokens/s per row |"
        )
    return "\n".join(lines)


def main() -> None:
    given = [pathlib.Path(argument) for argument in sys.argv[1:]]
    source, picture = (given + [IMAGES / "plans.jsonl", IMAGES / "decode_bytes.svg"][len(given) :])[:2]
    plans = [json.loads(line) for line in source.read_text().splitlines()]
    draw(plans, picture)
    print(table(plans))


if __name__ == "__main__":
    main()
