"""What the programs that draw pictures share.

`images/NAME.py` draws `images/NAME.svg` of data or of what the code declares: its function `draw` returns the
figure. `python3 -m images.NAME` draws one picture again, `python3 benchmarks/plots.py` all of them.
"""

import importlib
import pathlib

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


def redraw(name: str) -> None:
    """Write images/NAME.svg, as images/NAME.py draws it."""
    save(importlib.import_module(f"images.{name}").draw(), IMAGES / f"{name}.svg")


def redraw_all() -> None:
    for file in sorted(IMAGES.glob("*.py")):
        if file.stem != "drawing":
            redraw(file.stem)
