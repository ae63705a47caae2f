"""What the pictures of masks, of continuous batching and of the families show is what the code does."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import llama3_config, mesh_of
from jax.sharding import PartitionSpec as P

import model
from families.registry import FAMILIES
from images import attention, batching, families
from ops.kv_cache import KV, key_beside_value


@pytest.mark.parametrize("name", attention.MASKS)
def test_rings_of_the_picture(name):
    """The slots that a decode step writes and sees, for every length."""
    mask, n = attention.MASKS[name], attention.POSITIONS

    @partial(jax.shard_map, mesh=mesh_of(llama3_config()), in_specs=P(), out_specs=P(), check_vma=False)
    def on_device(read):
        """A row that has read so many tokens reads one more."""
        chunk = model.chunk_at(read, jnp.ones_like(read), 1)
        return model.slot_mapping(chunk, mask, n), model.visible_slots(chunk, mask, read + 1)

    written, (length, gap) = jax.tree.map(np.asarray, on_device(jnp.arange(n)))
    held = np.full(mask.ring or n, -1)
    sees = attention.visible(mask, n)
    for position in range(n):
        held[written[position, 0]] = position
        assert attention.slots(mask, position + 1, n).tolist() == held.tolist()
        slots = np.arange(held.size)
        seen = slots < length[position, 0]
        if gap is not None:
            seen &= (slots < gap[0][position, 0]) | (slots >= gap[1][position, 0])
        assert sorted(held[seen]) == np.flatnonzero(sees[position]).tolist()


@pytest.mark.parametrize("name", attention.MASKS)
def test_masks_of_the_picture(name):
    """What the tokens of one chunk see of one another: a key is seen if it changes what attention returns."""
    mask, n, columns = attention.MASKS[name], attention.POSITIONS, key_beside_value(8)
    rng = np.random.default_rng(0)
    q, kv = rng.normal(size=(1, n, 1, 1, 8)), rng.normal(size=(1, 1, n, 16))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh_of(llama3_config()), in_specs=P(), out_specs=P(), check_vma=False)
    def attended(q, values):
        chunk = model.chunk_at(jnp.zeros(1, int), jnp.full(1, n), n)
        return model.attend_chunk(q, KV(values, None, columns), chunk, mask)[0]

    usual = attended(jnp.float32(q), jnp.float32(kv))
    for key in range(n):
        other = kv.copy()
        other[0, 0, key] += 1
        differs = (np.asarray(attended(jnp.float32(q), jnp.float32(other)) != usual)).any((0, 2, 3, 4))
        assert differs.tolist() == attention.visible(mask, n)[:, key].tolist()


def test_the_recorded_run():
    """The engine still does what images/batching.csv says."""
    assert batching.record() == batching.read()


def test_every_family_is_in_the_picture():
    """Each layer has one attention, one mask and one feed-forward of the columns; no family is left out."""

    shown = {fields["model_type"] for fields in families.FAMILIES.values()}
    assert shown == {family.model_type for family in FAMILIES}
    for own in families.grid().values():
        for columns in (("Heads", "Latent"), ("Full", "BlockLocal", "Window"), ("Gated", "Plain", "Experts")):
            counts, depths = zip(*(own[column] for column in columns), strict=True)
            assert {sum(counts)} == set(depths)
