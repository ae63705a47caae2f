"""serving/reuse.py against a ring that is simulated token by token."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import llama3_config, mesh_of
from jax.sharding import PartitionSpec as P

import model
from model import BlockLocal, Full, Mask, Window
from serving.reuse import INT32_MAX, reusable_prefix, rollback_limit
from sharding.slots import slot_mapping, visible_slots

# Of windows, spare slots of an even number and of an odd one, fewer and more than a query sees.
MASKS = [BlockLocal(2), BlockLocal(4), BlockLocal(7), Window(2, 1), Window(3, 4), Window(5, 3), Window(4, 9)]
WRONG = -1  # in the slot of a draft token that was taken back


def visible(mask: Mask, position: int) -> range:
    """The earlier positions that a query sees."""
    if isinstance(mask, BlockLocal):
        return range(position // mask.size * mask.size, position)
    return range(max(0, position - (mask.size - 1)), position)


def can_go_on(mask: Mask, slots: dict[int, int], position: int) -> bool:
    """Whether the ring holds all that the query at this position sees. slots: slot -> position held."""
    return all(slots.get(seen % mask.ring) == seen for seen in visible(mask, position))


def can_take_back(mask: Mask, length: int, n: int) -> bool:
    """Whether a row of this length can read n tokens, the last of which turn out wrong, however many."""
    for kept in range(n):
        slots = {position % mask.ring: position for position in range(length)}
        for position in range(length, length + n):
            slots[position % mask.ring] = position if position < length + kept else WRONG
        if not can_go_on(mask, slots, length + kept):
            return False
    return True


def limit(mask: Mask, length: int) -> int:
    return int(rollback_limit(mask, jnp.int32([length]))[0])


@pytest.mark.parametrize("mask", MASKS)
def test_rollback_limit(mask):
    """In a chunk as many tokens as can be taken back at all; in a window half of the spare slots."""
    for length in range(4 * mask.ring):
        n = limit(mask, length)
        assert can_take_back(mask, length, n)
        assert n == mask.spare // 2 if mask.window else not can_take_back(mask, length, n + 1)


def slots_after(mask: Mask, latest: int) -> dict[int, int]:
    """The ring of a row that has read `latest` tokens, one per step, with as many wrong drafts as it may.

    In the end it reads as many wrong tokens again, and takes back all of them.
    """
    slots = {}
    for length in range(latest + 1):
        assert can_go_on(mask, slots, length)
        for position in range(length, length + limit(mask, length)):
            slots[position % mask.ring] = WRONG
        if length < latest:
            slots[length % mask.ring] = length
    return slots


@pytest.mark.parametrize("mask", MASKS)
def test_reusable_prefix(mask):
    """The longest prefix after which the ring still holds all that the next token sees."""
    for latest in range(4 * mask.ring):
        slots = slots_after(mask, latest)
        for n in range(latest + 1):
            expected = max(length for length in range(n + 1) if can_go_on(mask, slots, length))
            assert reusable_prefix(mask, n, latest) == expected, (n, latest)


def test_a_cache_of_all_tokens():
    """It has no limits."""
    assert limit(Full(), 7) == INT32_MAX
    assert all(reusable_prefix(Full(), n, 9) == n for n in range(10))


@pytest.mark.parametrize("mask", [Full(), *MASKS])
def test_visible_slots(mask):
    """A decode step writes its position's slot of the ring, and sees those that hold what the mask shows."""
    n = 3 * (mask.ring or 6)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh_of(llama3_config()), in_specs=P(), out_specs=P(), check_vma=False)
    def on_device(read):
        """A row that has read so many tokens reads one more."""
        chunk = model.chunk_at(read, jnp.ones_like(read), 1)
        return slot_mapping(chunk, mask, n), visible_slots(chunk, mask, has_chunk=True)

    written, (length, gap) = jax.tree.map(np.asarray, on_device(jnp.arange(n)))
    held = np.full(mask.ring or n, -1)
    for position in range(n):
        assert written[position, 0] == position % held.size
        held[written[position, 0]] = position
        slots = np.arange(held.size)
        seen = slots < length[position, 0]
        if gap is not None:
            seen &= (slots < gap[0][position, 0]) | (slots >= gap[1][position, 0])
        assert sorted(held[seen]) == list(range(mask.first_visible(position), position + 1))
