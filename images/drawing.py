"""What the programs that draw pictures share: python3 -m images.drawing [NAME ...]

`images/NAME.py` draws `images/NAME.svg` of measurements or of what the code declares: its function `draw`
returns the figure. The command draws the named pictures again, or all that have such a program.
"""

import importlib
import pathlib
import sys

IMAGES = pathlib.Path(__file__).resolve().parent


def pyplot():
    """matplotlib.pyplot, imported here because tables do not need it."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "the same picture of the same numbers"
    return pyplot


def tidy(figure) -> None:
    """Take away the frame's upper and right lines, and fit the axes into the figure."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()


def save(figure, file: pathlib.Path) -> None:
    """Write the figure, an SVG without the date: the same data make the same file."""
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def redraw(names: list[str]) -> None:
    """Write images/NAME.svg, as images/NAME.py draws it; without names, all of them."""
    for name in names or sorted({file.stem for file in IMAGES.glob("*.py")} - {"drawing"}):
        save(importlib.import_module(f"images.{name}").draw(), IMAGES / f"{name}.svg")


if __name__ == "__main__":
    redraw(sys.argv[1:])
