"""Three masks, and which slot of the cache holds which position: computed by the masks of model.py."""

import numpy as np

from images.drawing import pyplot, redraw
from model import BlockLocal, Full, Mask, Window

MASKS = {
    "Full()": Full(),
    "BlockLocal(6)": BlockLocal(6),
    "Window(6, spare=4)": Window(6, spare=4),
}
POSITIONS = 18
LENGTHS = (4, 6, 7, 10, 12, 13, 18)  # tokens that a row has read
HIDDEN, HELD, VISIBLE, NEW = "#ffffff", "#d9d9d9", "#9ecae1", "#f58518"


def visible(mask: Mask, positions: int) -> np.ndarray:
    """[query position, key position] bool: whether the query sees the key."""
    query, key = np.arange(positions)[:, None], np.arange(positions)
    return (mask.first_visible(query) <= key) & (key <= query)


def slots(mask: Mask, length: int, capacity: int) -> np.ndarray:
    """The position that each slot holds after a row has read `length` tokens, -1 for an empty slot."""
    size = mask.ring or capacity
    held = np.full(size, -1)
    for position in range(length):
        held[position % size] = position
    return held


def draw():
    figure, axes = pyplot().subplots(2, 3, figsize=(9.5, 6.4), height_ratios=(1, 0.62))
    for column, (name, mask) in enumerate(MASKS.items()):
        draw_mask(axes[0, column], name, mask)
        draw_slots(axes[1, column], mask)
    axes[0, 0].set_ylabel("position of the query")
    axes[1, 0].set_ylabel("tokens read")
    figure.tight_layout()
    patch = pyplot().Rectangle
    colors = {
        "the token itself": NEW,
        "other tokens that it sees": VISIBLE,
        "in the cache, but not seen by the newest token": HELD,
    }
    handles = [patch((0, 0), 1, 1, facecolor=color, edgecolor="#555", lw=0.5) for color in colors.values()]
    figure.subplots_adjust(bottom=0.13)
    figure.legend(handles, colors, loc="lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def cell(axes, x: float, y: float, color: str, text: str = "") -> None:
    axes.add_patch(
        pyplot().Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, edgecolor="#999", linewidth=0.4)
    )
    if text:
        axes.text(x, y, text, ha="center", va="center", fontsize=6.5)


def draw_mask(axes, name: str, mask: Mask) -> None:
    for (query, key), sees in np.ndenumerate(visible(mask, POSITIONS)):
        if key <= query:
            cell(axes, key, query, (NEW if key == query else VISIBLE) if sees else HIDDEN)
    axes.set(xlim=(-0.6, POSITIONS - 0.4), ylim=(POSITIONS - 0.4, -0.6), aspect="equal")
    axes.set_title(name, fontsize=11, family="monospace", weight="bold")
    axes.set_xlabel("position of the key", fontsize=9)
    axes.set_xticks(range(0, POSITIONS, 6))
    axes.set_yticks(range(0, POSITIONS, 6))
    axes.tick_params(labelsize=8)
    axes.spines[:].set_visible(False)


def draw_slots(axes, mask: Mask) -> None:
    for y, length in enumerate(LENGTHS):
        newest = length - 1
        for slot, position in enumerate(slots(mask, length, POSITIONS)):
            if position < 0:
                cell(axes, slot, y, HIDDEN)
            else:
                seen = VISIBLE if position >= mask.first_visible(newest) else HELD
                cell(axes, slot, y, NEW if position == newest else seen, str(position))
    axes.set(xlim=(-0.6, POSITIONS - 0.4), ylim=(len(LENGTHS) - 0.4, -0.6))
    size = f"ring of {mask.ring} slots: position % {mask.ring}" if mask.ring else "a slot for each position"
    axes.set_title(f"The cache, {size}", fontsize=9)
    axes.set_xlabel("slot", fontsize=9)
    axes.set_xticks(range(0, mask.ring or POSITIONS, 3))
    axes.set_yticks(range(len(LENGTHS)), [str(length) for length in LENGTHS])
    axes.tick_params(labelsize=8)
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    redraw("attention")
