"""model.py as a page: its sections in their order, its lines, and each line with a collective."""

import ast
import re
from typing import NamedTuple

from images.drawing import IMAGES, pyplot
from sharding.mesh import SHARDED_BY

# By the function that is called in model.py.
COLLECTIVES = {"psum": "psum", "whole_heads": "all-gather", "merge_slots": "all-to-all"}
FIRST = "docstring and imports"  # the part before the first section
EMBED, ATTENTION, FEED_FORWARD, NORM, CACHE = "#d9d2ea", "#f9dcb4", "#cfe0f1", "#d5e8d4", "#f7cfd0"
OTHER, MARK, TEXT = "#eeeeee", "#c0392b", "#555555"
# How the name of each section begins, its color, and what it has.
SECTIONS = {
    FIRST: (OTHER, "the lines that run a model; the letters"),
    "forward": (OTHER, "what programs call"),
    "a layer": (OTHER, "the order of its parts"),
    "attention": (ATTENTION, "projections, cache, output matrix"),
    "feed-forward": (FEED_FORWARD, "MLP; MoE and its Router"),
    "embed": (EMBED, "what runs before, in and after the layers"),
    "norms": (NORM, "Norm, Rope"),
    "masks": (CACHE, "Full, BlockLocal, Window, Recurrent"),
    "what a model is": (OTHER, "the parts of a layer; LayerKind, Config"),
    "the weights": (OTHER, "each array's letters and name in a checkpoint"),
}
# The steps of a model: a name, a color, and the functions of model.py whose collectives belong to the step.
BEFORE = (("tokens", None, ()), ("embed", EMBED, ("embed",)))
LAYER = (
    ("norm", NORM, ()),
    ("queries, keys, values", ATTENTION, ("Attention.project",)),
    ("RoPE", NORM, ()),
    ("mask, slots of the cache", CACHE, ()),
    ("attend", ATTENTION, ("write_and_attend", "attend")),
    ("output matrix", ATTENTION, ("SoftmaxAttention.__call__",)),
    ("+", None, ()),
    ("norm", NORM, ()),
    ("MLP or MoE", FEED_FORWARD, ("MLP.__call__", "MoE.__call__")),
    ("+", None, ()),
)
AFTER = (("norm", NORM, ()), ("unembed", EMBED, ()), ("logits", None, ()))

# In pixels: the page's first line, a line's height, the page's left edge and width, a character's width.
TOP, LINE, LEFT, WIDTH, CHARACTER = 48, 0.66, 318, 176, 1.5
STEPS, STEP_WIDTH = 764, 228  # the steps' left edge and width
NOTES = (
    "psum  f: each device has a part of the sum over f, and psum adds the parts.",
    "all-gather, all-to-all: only if several devices share a key/value head.",
    "Layers whose memory is a state have another attention: docs/delta-rule.md.",
    "Each step has the color of its section. Gray lines of the page are docstrings.",
)


class Section(NamedTuple):
    """A part of the file: its name, its first line and its last one."""

    name: str
    first: int
    last: int


class Collective(NamedTuple):
    """A call that sums or exchanges arrays of several devices, in a function of model.py.

    letters: what a psum sums, as the comment behind it says.
    """

    name: str
    line: int
    function: str
    letters: tuple[str, ...]

    @property
    def label(self) -> str:
        name = COLLECTIVES[self.name]
        return f"{name}  {', '.join(self.letters)}" if self.letters else name


def source() -> str:
    return (IMAGES.parent / "model.py").read_text()


def sections(text: str) -> list[Section]:
    """The parts of the file, each of which begins with a line `# ---- name`."""
    lines, starts = text.splitlines(), [(1, FIRST)]
    for i, line in enumerate(lines, 1):
        if match := re.fullmatch(r"# -+ (.*)", line):
            starts.append((i, match[1].partition(":")[0]))
    lasts = [first - 1 for first, _ in starts[1:]] + [len(lines)]
    return [Section(name, first, last) for (first, name), last in zip(starts, lasts, strict=True)]


def functions_of(text: str) -> list[tuple[str, ast.FunctionDef]]:
    """The functions and methods of the file with their names; those inside others are not listed."""
    found = []
    for node in ast.parse(text).body:
        inside, prefix = (node.body, f"{node.name}.") if isinstance(node, ast.ClassDef) else ([node], "")
        found += [(prefix + x.name, x) for x in inside if isinstance(x, ast.FunctionDef)]
    return found


def collectives(text: str) -> list[Collective]:
    """The collectives of the file, by line; one in a nested function belongs to the outer function."""
    lines, found = text.splitlines(), []
    for owner, function in functions_of(text):
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func).rpartition(".")[2]
            if name in COLLECTIVES:
                comment = lines[call.end_lineno - 1].partition("#")[2]
                letters = (x for x in re.findall(r"\b[a-z]\b", comment) if x in SHARDED_BY)
                found.append(Collective(name, call.lineno, owner, tuple(letters) if name == "psum" else ()))
    return sorted(found, key=lambda x: x.line)


def docstring_lines(text: str) -> set[int]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            found.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return found


def draw_lines(axes, lines: list[str], numbers: set[int], color: str) -> None:
    """These lines of the file as strokes of their length, all of them as one path."""
    x, y = [], []
    for i in sorted(numbers):
        left, right = len(lines[i - 1]) - len(lines[i - 1].lstrip()), len(lines[i - 1])
        if left < right:
            x += [LEFT + 5 + CHARACTER * left, LEFT + 5 + CHARACTER * right, None]
            y += [TOP + LINE * (i - 0.5)] * 2 + [None]
    axes.plot(x, y, color=color, lw=0.3, solid_capstyle="butt")


def draw_page(axes, text: str) -> None:
    """The sections with their names, their lines, and the collectives."""
    axes.text(LEFT + WIDTH / 2, TOP - 20, "model.py", ha="center", fontsize=11, weight="bold")
    for section in sections(text):
        color, what = next(x for name, x in SECTIONS.items() if section.name.startswith(name))
        y, height = TOP + LINE * (section.first - 1), LINE * (section.last - section.first + 1)
        draw_box(axes, LEFT, y, WIDTH, height, facecolor=color)
        middle = y + height / 2
        axes.text(LEFT - 12, middle - 7, section.name, ha="right", va="center", fontsize=8.5, weight="bold")
        axes.text(LEFT - 12, middle + 7, what, ha="right", va="center", fontsize=8, color=TEXT)
    lines, docstrings = text.splitlines(), docstring_lines(text)
    draw_lines(axes, lines, docstrings, "#aaaaaa")
    draw_lines(axes, lines, set(range(1, len(lines) + 1)) - docstrings, "#222222")
    right = LEFT + WIDTH
    for found in collectives(text):
        y = TOP + LINE * (found.line - 0.5)
        axes.plot([LEFT, right + 12], [y, y], color=MARK, lw=1)
        axes.plot([right + 12], [y], "o", color=MARK, markersize=4)
        axes.text(right + 20, y, found.label, va="center", fontsize=9, color=MARK, weight="bold")
        function = found.function.removesuffix(".__call__")
        axes.text(right + 122, y, function, va="center", fontsize=8, color=TEXT)


def draw_arrow(axes, *points: tuple[float, float]) -> None:
    """A line through these points, with its head at the last one."""
    x, y = zip(*points, strict=True)
    axes.plot(x, y, color=TEXT, lw=0.8)
    arrow = dict(arrowstyle="-|>", color=TEXT, lw=0.8, shrinkA=0, shrinkB=0)
    axes.annotate("", points[-1], points[-2], arrowprops=arrow)


def draw_box(axes, x: float, y: float, width: float, height: float, **style) -> None:
    axes.add_patch(pyplot().Rectangle((x, y), width, height, **dict(edgecolor=TEXT, lw=0.7) | style))


def draw_steps(axes, text: str) -> None:
    """The steps of a model from top to bottom, in the colors of the sections, with the same collectives."""
    labels = {}
    for found in collectives(text):
        labels.setdefault(found.function, []).append(found.label)
    middle, y = STEPS + STEP_WIDTH / 2, TOP
    axes.text(middle, TOP - 20, "a model", ha="center", fontsize=11, weight="bold")
    for steps in (BEFORE, LAYER, AFTER):
        top = y
        for name, color, functions in steps:
            if name == "norm":
                block = y - 9  # where the input of a block branches off, to be added to its output
            if name == "+":
                left, plus = STEPS - 13, y + 7
                draw_arrow(axes, (middle, block), (left, block), (left, plus), (middle - 8, plus))
            if color:
                draw_box(axes, STEPS, y, STEP_WIDTH, 24, facecolor=color)
            height = 24 if color else 14
            axes.text(middle, y + height / 2, name, ha="center", va="center", fontsize=9)
            y += height
            shown = {}  # its collectives, each once, with the class if the step may be one of two
            for function in functions:
                of_class = f"{function.partition('.')[0]}: " if len(functions) > 1 and "." in function else ""
                shown |= {of_class + label: None for label in labels.pop(function)}
            style = dict(va="center", fontsize=8.5, color=MARK, weight="bold")
            for i, found in enumerate(shown):
                axes.text(middle + 6, y + 11 + 14 * i, found, **style)
            if name != "logits":
                length = (20 if shown else 13) + 14 * max(len(shown) - 1, 0) + 16 * ("embed" in functions)
                draw_arrow(axes, (middle, y), (middle, y + length))
                y += length
        if steps is LAYER:
            draw_box(axes, STEPS - 24, top - 16, STEP_WIDTH + 48, y - top + 5, fill=False, linestyle="--")
            axes.text(STEPS + STEP_WIDTH + 20, top - 6, "each layer", ha="right", va="center", fontsize=8)
    if labels:
        raise ValueError(f"the collectives of {', '.join(labels)} belong to no step of the picture")
    for i, line in enumerate(NOTES):
        axes.text(LEFT + WIDTH + 20, y + 50 + 18 * i, line, va="center", fontsize=8.5, color=TEXT)


def draw():
    text = source()
    height = TOP + LINE * len(text.splitlines()) + 16
    figure = pyplot().figure(figsize=(10.2, height / 100))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 1020), ylim=(height, 0))
    axes.axis("off")
    draw_page(axes, text)
    draw_steps(axes, text)
    return figure
