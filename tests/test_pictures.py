"""What the pictures of the chapters show, and some figures of their texts, is what the code does."""

import math
import pathlib
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import llama3_config, mesh_of
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import model
from families.registry import FAMILIES
from images import attention_picture, batching, families, formats_picture, page, quantization, roofline
from images import sharding as product_picture
from ops.kv_cache import KV, key_beside_value
from planner.floor import needed
from planner.job import Job
from planner.published_models import read_model
from planner.topologies import CHIPS
from quantize import FORMATS, FP8, INT8
from sharding import mesh as axes
from sharding.mesh import SHARDED_BY, mesh_shape
from sharding.slots import slot_mapping, visible_slots

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_the_table_of_letters():
    """docs/sharding.md says of each letter over which axes it is cut, as SHARDED_BY does."""
    rows = re.findall(
        r"^\| ([A-Z](?:, [A-Z])*) \|.*\| (.*?) \|$", (ROOT / "docs/sharding.md").read_text(), re.M
    )
    stated = {}
    for letters, cell in rows:
        letters, names = letters.split(", "), re.findall(r"`([A-Z]+)`|never", cell)
        names = names * len(letters) if len(names) == 1 else names
        stated |= dict(zip(letters, names, strict=True))
    assert set(stated) >= set("BTSDKGHCFVEAMLRP")
    for letter, name in stated.items():
        assert SHARDED_BY.get(letter.lower()) == (getattr(axes, name) if name else None), letter


def test_the_picture_of_a_product_is_a_product():
    """Each device's part is the product of its shards, and the parts add up to the whole."""
    h, down = product_picture.arrays()
    mesh = AbstractMesh((4,), ("tensor",))
    ours, theirs = (product_picture.shards(x, P(None, "tensor"), mesh) for x in (h, down))
    np.testing.assert_array_equal(np.concatenate(ours, 1), h)
    parts, sums = product_picture.product(ours, theirs)
    for i, part in enumerate(parts):
        np.testing.assert_array_equal(part, h[:, 2 * i : 2 * i + 2] @ down[:, 2 * i : 2 * i + 2].T)
    for total in sums:
        np.testing.assert_array_equal(total, h @ down.T)


def test_where_decode_becomes_bound_by_computation():
    """As docs/roofline.md says: from 167 rows of 1024 positions, and never with 8192."""
    cfg, v5e = read_model("llama3.1-70b"), CHIPS["v5e"]
    ridge = v5e.flops / v5e.bandwidth
    by_rows = {n: roofline.intensity(cfg, n, 1024) for n in range(160, 172)}
    assert [n for n, x in by_rows.items() if x > ridge][0] == 167
    assert 117 < roofline.intensity(cfg, 10**6, 8192) < 118 < ridge
    assert roofline.intensity(cfg, 1, 1024, tokens=128) > ridge > roofline.intensity(cfg, 1, 1024, tokens=112)
    assert roofline.attainable(ridge / 2, v5e) == pytest.approx(v5e.flops / 2)


def test_what_every_chip_holds_whole():
    """Norms and the scales of o and down: 7.4 MB of 16 chips' reads are above the floor."""
    cfg = read_model("llama3.1-70b")

    def read(n: int) -> float:
        shape = mesh_shape(cfg, tensor=n)
        return needed(Job(cfg, 8, 8192), AbstractMesh(tuple(shape.values()), tuple(shape)))[0]

    whole = len(cfg.layers) * 2 * (2 * cfg.D + 4 * cfg.D) + 2 * cfg.D + 2 * 4 * 8
    assert read(16) - read(1) / 16 == whole * 15 / 16
    assert round(whole * 15 / 16 / 1e6, 1) == 7.4


def test_the_tables_that_are_drawn():
    """Each row of the document's tables is a format with its own number of bits."""
    for name in quantization.MODELS:
        found = quantization.measured(name)
        assert {label for label, *_ in found} >= set(FORMATS) - {"none", "mxfp4"}  # which is of experts only
        for label, bits, kl in found:
            format = FORMATS[label.split(",")[0]]
            stated = format.bits + (16 / format.group_size if format.scheme == "int4" else 0)
            assert bits == stated and 0 < kl < 1
    assert 127 == len(quantization.representable(INT8, 20001)) - 1
    assert math.isclose(quantization.magnitudes().max(), 1)


def test_errors_of_formats():
    """Half of the last bit for floats that are not too small; half a step of 127 for int8."""
    weights = np.geomspace(1e-3, 1, 5000, dtype=np.float32)
    for format, bits in ((FP8, jnp.finfo(jnp.float8_e4m3fn).nmant), (formats_picture.E5M2, 2)):
        assert (
            0.88 * 2.0**-bits / 2 < formats_picture.relative_errors(format, weights).max() <= 2.0**-bits / 2
        )
    assert (formats_picture.relative_errors(INT8, weights) * weights).max() <= 0.5 / 127 + 1e-6


def test_the_page():
    """The picture of model.py has a place for each section and for each collective, with a psum's letters."""
    text = page.source()
    assert {x.name for x in page.collectives(text)} == set(page.COLLECTIVES)
    assert all(x.letters for x in page.collectives(text) if x.name == "psum")
    page.draw()  # raises where a section or a collective has no place


@pytest.mark.parametrize("name", attention_picture.MASKS)
def test_rings_of_the_picture(name):
    """The slots that a decode step writes and sees, for every length."""
    mask, n = attention_picture.MASKS[name], attention_picture.POSITIONS

    @partial(jax.shard_map, mesh=mesh_of(llama3_config()), in_specs=P(), out_specs=P(), check_vma=False)
    def on_device(read):
        """A row that has read so many tokens reads one more."""
        chunk = model.chunk_at(read, jnp.ones_like(read), 1)
        return slot_mapping(chunk, mask, n), visible_slots(chunk, mask, read + 1)

    written, (length, gap) = jax.tree.map(np.asarray, on_device(jnp.arange(n)))
    held = np.full(mask.ring or n, -1)
    sees = attention_picture.visible(mask, n)
    for position in range(n):
        held[written[position, 0]] = position
        assert attention_picture.slots(mask, position + 1, n).tolist() == held.tolist()
        slots = np.arange(held.size)
        seen = slots < length[position, 0]
        if gap is not None:
            seen &= (slots < gap[0][position, 0]) | (slots >= gap[1][position, 0])
        assert sorted(held[seen]) == np.flatnonzero(sees[position]).tolist()


@pytest.mark.parametrize("name", attention_picture.MASKS)
def test_masks_of_the_picture(name):
    """What the tokens of one chunk see of one another: a key is seen if it changes what attention returns."""
    mask, n, layout = attention_picture.MASKS[name], attention_picture.POSITIONS, key_beside_value(8)
    rng = np.random.default_rng(0)
    q, kv = rng.normal(size=(1, n, 1, 1, 8)), rng.normal(size=(1, 1, n, 16))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh_of(llama3_config()), in_specs=P(), out_specs=P(), check_vma=False)
    def attended(q, values):
        chunk = model.chunk_at(jnp.zeros(1, int), jnp.full(1, n), n)
        return model.attend_to_chunk(q, KV(values, None, layout), chunk, mask)[0]

    usual = attended(jnp.float32(q), jnp.float32(kv))
    for key in range(n):
        other = kv.copy()
        other[0, 0, key] += 1
        differs = (np.asarray(attended(jnp.float32(q), jnp.float32(other)) != usual)).any((0, 2, 3, 4))
        assert differs.tolist() == attention_picture.visible(mask, n)[:, key].tolist()


def test_the_recorded_run():
    """The engine still does what images/batching.csv says."""
    assert batching.record() == batching.read()


def test_every_family_is_in_the_picture():
    """Each layer has one attention, one mask and one feed-forward of the columns; no family is left out."""

    shown = {fields["model_type"] for fields in families.FAMILIES.values()}
    assert shown == {family.model_type for family in FAMILIES}
    for own in families.grid().values():
        for columns in (
            ("Attention", "LatentAttention"),
            ("Full", "BlockLocal", "Window"),
            ("MLP", "GeluMLP", "MoE"),
        ):
            counts, depths = zip(*(own[column] for column in columns), strict=True)
            assert {sum(counts)} == set(depths)
