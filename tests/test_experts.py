"""Routed experts against a dense loop over all of them, on every mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, dequantize, llama4_config, mesh_of
from jax.sharding import PartitionSpec as P

import model


def dense_loop(x, w, active):
    """Every expert sees every token, in float64; the router's weight is 0 where it was not chosen."""
    float64 = partial(np.asarray, dtype=np.float64)
    logits = x @ float64(w.router)
    # On equal logits the smaller index wins.
    chosen = np.argsort(-logits, -1, kind="stable")[..., :active]
    weight = np.zeros_like(logits)
    np.put_along_axis(weight, chosen, 1 / (1 + np.exp(-np.take_along_axis(logits, chosen, -1))), -1)
    total = np.zeros_like(x)
    for e in range(logits.shape[-1]):
        scaled = x * weight[..., e : e + 1]
        gate, up = scaled @ float64(w.gate[e]), scaled @ float64(w.up[e])
        total += (gate / (1 + np.exp(-gate)) * up) @ float64(w.down[e])
    return total


@pytest.fixture
def rows_of_no_group_are_nan(monkeypatch):
    """A kernel may leave anything in the rows that belong to no local expert."""
    ragged_dot = jax.lax.ragged_dot

    def poisoned(x, w, sizes, **options):
        y = ragged_dot(x, w, sizes, **options)
        return jnp.where(jnp.arange(len(y))[:, None] < jnp.sum(sizes), y, jnp.nan)

    monkeypatch.setattr(jax.lax, "ragged_dot", poisoned)


@pytest.mark.usefixtures("rows_of_no_group_are_nan")
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("routing", ["all to one expert", "spread"])
@pytest.mark.parametrize("active", [1, 2])
def test_no_token_is_dropped(name, routing, active):
    cfg = llama4_config(A=active, layers=(model.LayerKind(moe=True),))
    quantized = name == "ep2-tp4"
    mesh = mesh_of(cfg, name)
    w = model.init_weights(jax.random.key(0), cfg, mesh, quantized=quantized).layers[0].feed_forward
    info = model.weight_infos(cfg).layers[0].feed_forward
    # A router of zeros ties: every token goes to the first expert(s), the worst imbalance there is.
    router = w.router * (0 if routing == "all to one expert" else 3)
    w = model.MoE(router=router, gate=w.gate, up=w.up, down=w.down, shared=w.shared)
    x = np.random.default_rng(0).standard_normal((8, 5, cfg.D))

    layouts = P("data"), model.specs(info, w)

    @partial(jax.shard_map, mesh=mesh, in_specs=layouts, out_specs=P("data"))
    def experts(x, w):
        return jax.lax.psum(model.experts(x, w, cfg), model.MODEL)

    whole = w
    if quantized:
        float_arrays = {
            n: dequantize(getattr(w, n), getattr(info, n).contracted_axes) for n in ("gate", "up", "down")
        }
        whole = model.MoE(router=router, shared=w.shared, **float_arrays)
    result = jax.jit(experts)(jnp.float32(x), w)
    np.testing.assert_allclose(result, dense_loop(x, whole, active), atol=1e-5)
