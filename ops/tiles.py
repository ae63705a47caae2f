"""Tiles of sorted rows: a tile has rows of one group only, and each group may have one that is not full."""

import jax.numpy as jnp
from jax import Array


def tile_rows(rows: int, groups: int, least: int, most: int) -> int:
    """How many rows a tile should have: about the mean of a group, a power of two between least and most."""
    mean = -(-rows // groups)
    return min(most, max(least, 1 << (mean - 1).bit_length()))


def tiles_per_group(sizes: Array, rows: int) -> Array:
    return (sizes + rows - 1) // rows


def find_tile(tile: Array, sizes: Array, rows: int) -> tuple[Array, Array, Array]:
    """The group of each tile, the number of its first row, and where the group's rows end: int32 each.

    tile: numbers of tiles, of `rows` rows each. sizes: rows of each group. A tile beyond the last one gets a
    first row that is not before the end.
    """
    count = tiles_per_group(sizes, rows)
    last_tile, last_row = jnp.cumsum(count), jnp.cumsum(sizes)
    group = jnp.minimum(jnp.sum(tile[..., None] >= last_tile, -1), sizes.size - 1)
    first = (last_row - sizes)[group] + (tile - (last_tile - count)[group]) * rows
    return tuple(x.astype(jnp.int32) for x in (group, first, last_row[group]))
