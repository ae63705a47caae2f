"""What the pictures of the chapters show, and some figures of their texts, is what the code does."""

import math
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from deployment.chips import CHIPS
from deployment.floor import needed
from deployment.job import Job
from families.registry import FAMILIES
from images import batching, families, page, quantization, roofline, state
from ops.delta_rule import delta_steps
from planner.published_models import MODELS, read_model
from quantize import FORMATS, INT8
from sharding import mesh as axes
from sharding.mesh import SHARDED_BY, mesh_shape

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_the_table_of_letters():
    """docs/sharding.md says of each letter over which axes it is cut, as SHARDED_BY does."""
    rows = re.findall(
        r"^\| ([A-Z](?:, [A-Z])*) \|.*\| (.*?) \|$", (ROOT / "docs/sharding.md").read_text(), re.M
    )
    stated = {}
    for letters, cell in rows:
        letters, cells = letters.split(", "), cell.split("; ")
        cells = cells * len(letters) if len(cells) == 1 else cells
        stated |= dict(zip(letters, cells, strict=True))
    assert set(stated) >= set("BTSDKGZHCFVEAMLRP")
    for letter, cell in stated.items():
        *others, last = [getattr(axes, name) for name in re.findall(r"`([A-Z]+)`", cell)] or [None]
        assert SHARDED_BY.get(letter.lower()) == (sum(others, ()) + last if others else last), letter


def test_where_decode_becomes_bound_by_computation():
    """As docs/roofline.md says: from 167 rows of 1024 positions, and never with 8192."""
    cfg, v5e = read_model("llama3.1-70b"), CHIPS["v5e"]
    ridge = v5e.flops / v5e.bandwidth
    by_rows = {n: roofline.intensity(cfg, n, 1024) for n in range(165, 169)}
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


def test_the_page():
    """The picture of model.py has a place for each section and for each collective, with a psum's letters."""
    text = page.source()
    assert {x.name for x in page.collectives(text)} == set(page.COLLECTIVES)
    assert all(x.letters for x in page.collectives(text) if x.name == "psum")
    page.draw()  # raises where a section or a collective has no place


def test_the_state():
    """What the picture of a token shows is what ops/delta_rule.py computes."""
    tokens = (*state.BEFORE, state.TOKEN)
    q, k, v = (jnp.array([[[getattr(x, name)] for x in tokens]]) for name in ("query", "key", "value"))
    decay, strength = (jnp.array([[[getattr(x, name)] for x in tokens]]) for name in ("decay", "strength"))
    S, empty, all_three = jnp.zeros((1, 1, 4, 4)), jnp.array([True]), jnp.array([3])
    o, S = delta_steps(q, k, v, jnp.log(decay), strength, S, empty, all_three)
    shown = state.drawn()
    np.testing.assert_allclose(shown.after, S[0, 0], atol=1e-6)
    np.testing.assert_allclose(shown.output, o[0, 2, 0], atol=1e-6)
    np.testing.assert_allclose(shown.output, state.TOKEN.value, atol=1e-6)  # as its words say


def test_the_recorded_run():
    """The engine still does what images/batching.csv says."""
    assert batching.record() == batching.read()


def test_every_family_is_in_the_picture():
    """No family is left out, and no column is empty; a layer has one attention, mask and feed-forward."""
    shown = {MODELS[name]["model_type"] for name in families.FAMILIES.values()}
    assert shown == {family.model_type for family in FAMILIES}
    grid = families.grid().values()
    for columns in (
        ("Attention", "LatentAttention", "GatedDeltaNet"),
        ("Full", "BlockLocal", "Window", "Recurrent"),
        ("MLP", "GeluMLP", "MoE"),
    ):
        for own in grid:
            counts, depths = zip(*(own[column] for column in columns), strict=True)
            assert {sum(counts)} == set(depths)
    columns = [column for group in families.COLUMNS.values() for column in group]
    assert not [column for column in columns if not any(own[column][0] for own in grid)]
