"""One matrix product cut over four devices: what each device holds, computes and gets."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from images.drawing import pyplot, redraw

COLORS = ("#cfe0f1", "#f9dcb4", "#cfe8d5", "#e4d5ee")  # of the devices
SUM = "#f7cfd0"
CELL = 25  # pixels


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Small whole numbers: h [B,F] and down [D,F]."""
    draw = np.random.default_rng(3).integers
    return draw(-2, 3, (2, 8)), draw(-2, 3, (3, 8))


def shards(x: np.ndarray, spec: P, mesh: AbstractMesh) -> np.ndarray:
    """The shards of x, stacked, one per device of a mesh of one axis; jax says how large a shard is."""
    size = NamedSharding(mesh, spec).shard_shape(x.shape)
    cut = [axis for axis in range(x.ndim) if size[axis] < x.shape[axis]]
    return np.stack(np.split(x, mesh.size, *cut) if cut else [x] * mesh.size)


def product(h: np.ndarray, down: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The product of stacked shards: -> (each device's part of the sum, each device's result after the psum).

    jax.vmap with an axis name runs the function that shard_map would run, without devices.
    """

    def on_device(h, down):
        part = jnp.einsum("Bf,Df->BD", h, down)
        return part, jax.lax.psum(part, "tensor")

    return jax.tree.map(np.asarray, jax.vmap(on_device, axis_name="tensor")(h, down))


def draw_array(axes, x: float, y: float, numbers: np.ndarray, colors: list[str]) -> None:
    """A grid of numbers with its left upper corner at (x, y). colors: of its columns."""
    from matplotlib.patches import Rectangle

    for (row, column), number in np.ndenumerate(numbers):
        place = x + CELL * column, y + CELL * row
        axes.add_patch(Rectangle(place, CELL, CELL, facecolor=colors[column], edgecolor="#555", lw=0.6))
        middle = place[0] + CELL / 2, place[1] + CELL / 2
        axes.text(*middle, f"{number}".replace("-", "\N{MINUS SIGN}"), ha="center", va="center", fontsize=9)


def draw():
    """The figure: the global arrays above, below them one row per device."""
    h, down = arrays()
    mesh = AbstractMesh((len(COLORS),), ("tensor",))
    h_shards, down_shards = (shards(x, P(None, "tensor"), mesh) for x in (h, down))
    parts, sums = product(h_shards, down_shards)
    assert all((total == h @ down.T).all() for total in sums)

    figure = pyplot().figure(figsize=(9.5, 6.4))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 950), ylim=(640, 0))
    axes.axis("off")
    columns = [color for color in COLORS for _ in range(h.shape[1] // len(COLORS))]
    shape = "[{},{}]".format

    def label(x: float, y: float, text: str, **style) -> None:
        axes.text(x, y, text, va="center", **(dict(fontsize=9, ha="left") | style))

    label(20, 22, "Global arrays, and how in_specs cuts them", fontsize=11, weight="bold")
    for x, array, name in ((110, h, "h  BF"), (420, down, "down  DF")):
        label(x, 48, f"{name} {shape(*array.shape)}: P(None, 'tensor')")
        draw_array(axes, x, 62, array, columns)
    top, step = 208, 104
    titles = (110, "h  Bf"), (250, "down  Df"), (420, "einsum: a part of the sum"), (690, "after psum")
    label(20, 166, "On each device, inside shard_map", fontsize=11, weight="bold")
    for x, title in titles:
        label(x, 190, title)
    arrow = dict(arrowstyle="-|>", color="#555", lw=1)
    middle = top + step * (len(COLORS) - 1) / 2 + CELL * 1.5
    for i, color in enumerate(COLORS):
        y = top + step * i
        label(20, y + CELL * 1.5, f"device {i}")
        draw_array(axes, 110, y + CELL / 2, h_shards[i], [color] * h_shards.shape[2])
        draw_array(axes, 250, y, down_shards[i], [color] * down_shards.shape[2])
        draw_array(axes, 420, y + CELL / 2, parts[i], [color] * parts.shape[2])
        draw_array(axes, 690, y + CELL / 2, sums[i], [SUM] * sums.shape[2])
        axes.annotate("", (412, y + CELL * 1.5), (308, y + CELL * 1.5), arrowprops=arrow)
        axes.annotate("", (572, middle), (502, y + CELL * 1.5), arrowprops=arrow)
        axes.annotate("", (682, y + CELL * 1.5), (614, middle), arrowprops=arrow)
    label(593, middle, "+", fontsize=20, ha="center")
    label(785, top + CELL * 1.5, "the whole product BD", fontsize=9)
    label(785, top + CELL * 1.5 + 18, f"{shape(*sums.shape[1:])}, the same on", fontsize=9)
    label(785, top + CELL * 1.5 + 36, "every device: P()", fontsize=9)
    return figure


if __name__ == "__main__":
    redraw("sharding")
