"""Sampling on a sharded vocabulary: exact sets, the right frequencies, and the same draws on every mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import llama4_config, mesh_of
from jax.sharding import PartitionSpec as P
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import model
from model import Sampling

CFG = llama4_config()
LOGITS = np.random.default_rng(0).standard_normal((6, CFG.V)).astype(np.float32) * 2


def draw(logits, sampling, name="1", seed=0):
    """One token per row, the vocabulary padded and sharded as in the model."""
    mesh = mesh_of(CFG, name)
    width = -(-CFG.V // model.mesh_size(mesh, model.MODEL)) * model.mesh_size(mesh, model.MODEL)
    padded = np.pad(logits, ((0, 0), (0, width - CFG.V)), constant_values=-np.inf)
    rows = np.arange(len(logits))

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data", model.MODEL), P("data"), P("data")), out_specs=P("data")
    )
    def on_device(logits, seeds, positions):
        return model.sample(logits, seeds, positions, sampling, CFG)

    return np.asarray(on_device(padded, np.full(len(logits), seed, np.uint32), rows))


def kept(logits, sampling) -> np.ndarray:
    """The probabilities that transformers leaves, [B,V]."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, torch.tensor(logits))
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return torch.softmax(scores, -1).numpy()


@pytest.mark.parametrize("name", ["1", "tp8"])
def test_greedy(name):
    """The first of equals, wherever the shards lie."""
    logits = LOGITS.copy()
    logits[0, [3, 70]] = 50
    np.testing.assert_array_equal(draw(logits, Sampling(), name), logits.argmax(-1))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(1.0, top_k=5),
        Sampling(1.5, top_p=0.6),
        Sampling(1.0, 20, 0.8),
        Sampling(2.0, 1),
    ],
)
def test_frequencies(sampling):
    """20,000 draws of one row: nothing outside the kept set, and chi-square within what chance allows."""
    n = 20_000
    expected = kept(LOGITS[:1], sampling)[0] * n
    tokens = draw(np.repeat(LOGITS[:1], n, 0), sampling, "dp8")
    observed = np.bincount(tokens, minlength=CFG.V)
    assert not observed[expected == 0].any()
    often = expected > 5
    chi_square = ((observed - expected)[often] ** 2 / expected[often]).sum()
    # Mean often - 1, standard deviation sqrt(2 (often - 1)): five of them is one chance in a million.
    freedom = max(often.sum() - 1, 0)
    assert chi_square <= freedom + 5 * np.sqrt(2 * freedom) + 1e-9


@pytest.mark.parametrize("sampling", [Sampling(0.9), Sampling(1.0, 7, 0.9)])
def test_same_draws_on_every_mesh(sampling):
    alone = draw(LOGITS, sampling)
    np.testing.assert_array_equal(draw(LOGITS, sampling, "tp8"), alone)
    assert (draw(LOGITS, sampling, seed=1) != alone).any()


@pytest.mark.parametrize("target", [1e-46, 0.001, 0.3, 0.95, 0.999999, 0.99999999])
def test_kept_set_is_exact(target):
    """Against sorting, at masses from less than a token's to all; negative and positive logits."""
    mesh = mesh_of(CFG)
    mass = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    kept = jax.shard_map(
        lambda x, m: model.top(x, m, target), mesh=mesh,
        in_specs=(P("data", model.MODEL),) * 2, out_specs=P("data", model.MODEL),
    )(jnp.asarray(LOGITS), jnp.asarray(mass))  # fmt: skip
    for row_mass, row_kept in zip(mass, np.asarray(kept), strict=True):
        falling = -np.sort(-row_mass)
        n = row_kept.sum()
        assert n >= 1
        np.testing.assert_array_equal(-np.sort(-row_mass[row_kept]), falling[:n])
        # Sums of float32 in two orders: they may disagree by rounding on which token reaches the target.
        assert n == CFG.V or falling[:n].sum() >= target - 1e-6
        assert falling[: n - 1].sum() < target + 1e-6


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1e-40), Sampling(1.0, top_p=1e-46), Sampling(1.0, 1), Sampling(1e-9, 10**9, 0.99999999)],
)
def test_extremes_are_greedy(sampling):
    np.testing.assert_array_equal(draw(LOGITS, sampling), LOGITS.argmax(-1))


@pytest.mark.parametrize("wrong", [dict(temperature=-1), dict(top_k=-1), dict(top_p=0), dict(top_p=1.1)])
def test_wrong_values(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)).replace("_", "-")):
        Sampling(**wrong)
