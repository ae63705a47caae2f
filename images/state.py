"""What a token does to the state of a head: numbers of the gated delta rule, step by step.

Letters: X width of a key, Y width of a value, here 4 each.
"""

from typing import NamedTuple

import numpy as np

from images.drawing import pyplot


class Token(NamedTuple):
    """key, query: [X], of the length 1. value: [Y]. decay: exp(g). strength: beta."""

    key: list[float]
    value: list[float]
    query: list[float]
    decay: float = 1.0
    strength: float = 1.0


BEFORE = (
    Token([0.8, 0.6, 0, 0], [1, 0.5, 0, -0.5], [0] * 4),
    Token([0, 0, 0.6, 0.8], [-0.5, 0, 1, 0.5], [0] * 4),
)
TOKEN = Token([0, 0.6, 0.8, 0], [0, -1, -0.5, 1], [0, 0.6, 0.8, 0], decay=0.75)


class Steps(NamedTuple):
    """The state [X,Y] before, after it has faded, and after the token is written.

    answer: [Y], of the faded state to the key. change: [Y], c. output: [Y], of the state after to the query.
    """

    before: np.ndarray
    faded: np.ndarray
    answer: np.ndarray
    change: np.ndarray
    after: np.ndarray
    output: np.ndarray


def steps(S: np.ndarray, token: Token) -> Steps:
    """What a token does to the state S [X,Y]."""
    key, query = np.array(token.key), np.array(token.query)
    faded = token.decay * S
    answer = key @ faded
    change = token.strength * (token.value - answer)
    after = faded + np.outer(key, change)
    return Steps(S, faded, answer, change, after, query @ after)


def drawn() -> Steps:
    """The steps of the picture: TOKEN, after those of BEFORE."""
    S = np.zeros((4, 4))
    for token in BEFORE:
        S = steps(S, token).after
    return steps(S, TOKEN)


# In pixels: a cell, the first matrix' left edge, the distance of matrices, their upper edge, and that of the
# rows below them.
WIDTH, HEIGHT, LEFT, APART, TOP, BELOW = 35, 29, 16, 189, 112, 248
POSITIVE, NEGATIVE, CHANGED, TEXT = "#4c78a8", "#f58518", "#c0392b", "#555555"


def color(x: float) -> tuple[float, ...]:
    """From white at 0 to blue at 1 and to orange at -1."""
    from matplotlib.colors import to_rgb

    end = to_rgb(POSITIVE if x > 0 else NEGATIVE)
    return tuple(1 - min(abs(x), 1) * (1 - channel) for channel in end)


def draw_numbers(axes, x: float, y: float, numbers: np.ndarray) -> None:
    """numbers: [rows,columns], each in a cell; the upper left corner is at (x, y)."""
    for (row, column), number in np.ndenumerate(numbers):
        left, top = x + WIDTH * column, y + HEIGHT * row
        style = dict(facecolor=color(number), edgecolor="#999", lw=0.5)
        axes.add_patch(pyplot().Rectangle((left, top), WIDTH, HEIGHT, **style))
        if abs(number) > 0.005:
            text = f"{number:.2f}".rstrip("0").rstrip(".").replace("-", "\N{MINUS SIGN}")
            style = dict(ha="center", va="center", fontsize=7.5, color="w" if number > 0.7 else "#222")
            axes.text(left + WIDTH / 2, top + HEIGHT / 2, text, **style)


def draw_panel(axes, i: int, texts: tuple[str, ...], S: np.ndarray, column=None, rows=()) -> None:
    """The state S, a key or query at its left, and rows of numbers below it. column, rows: (name, numbers).

    texts: the title, a formula, and two lines of words.
    """
    x, (title, formula, *words) = LEFT + APART * i, texts
    axes.text(x, 24, title, fontsize=10.5, weight="bold")
    axes.text(x, 46, formula, fontsize=10, style="italic")
    axes.text(x, 62, "\n".join(words), fontsize=8, color=TEXT, va="top", linespacing=1.4)
    draw_numbers(axes, x, TOP, S)
    style = dict(va="center", fontsize=10.5, style="italic")
    if column:
        name, numbers = column
        draw_numbers(axes, x - WIDTH - 7, TOP, np.array(numbers)[:, None])
        axes.text(x - WIDTH / 2 - 7, TOP - 12, name, ha="center", **style)
    for place, (name, numbers) in enumerate(rows):
        y = BELOW + place * (HEIGHT + 8)
        draw_numbers(axes, x, y, np.array(numbers)[None])
        axes.text(x - 9, y + HEIGHT / 2, name, ha="right", **style)


def draw():
    found = drawn()
    key, query = ("k", TOKEN.key), ("q", TOKEN.query)
    rows = ("k S", found.answer), ("v", TOKEN.value), ("c", found.change)
    figure = pyplot().figure(figsize=(9.5, 3.64))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 950), ylim=(364, 0))
    axes.axis("off")
    texts = "before", "S", "rows: numbers of a key,", "columns: of a value"
    draw_panel(axes, 0, texts, found.before)
    texts = "fade", "S = exp(g) S", "all that is remembered", f"becomes smaller: × {TOKEN.decay:g}"
    draw_panel(axes, 1, texts, found.faded)
    texts = "read with the key", "c = β (v − k S)", "the answer k S should", "be v: change it by c"
    draw_panel(axes, 2, texts, found.faded, key, rows)
    texts = "correct", "S = S + k c", "rows change as much as", "the key points to them"
    draw_panel(axes, 3, texts, found.after, key, rows[2:])
    texts = "read with the query", "o = q S", "here q is k and β is 1,", "so the answer is v"
    draw_panel(axes, 4, texts, found.after, query, [("o", found.output)])
    changed = np.flatnonzero(TOKEN.key)
    corner = LEFT + APART * 3, TOP + HEIGHT * changed[0]
    style = dict(fill=False, edgecolor=CHANGED, lw=1.6)
    axes.add_patch(pyplot().Rectangle(corner, 4 * WIDTH, HEIGHT * len(changed), **style))
    return figure
