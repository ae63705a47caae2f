"""Routed experts against a dense loop over all of them, on every mesh, and the TPU kernel (interpreted)."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, Kind, dequantize, llama4_config, mesh_of, random_weights
from jax.sharding import PartitionSpec as P

import model
from ops import cpu, grouped_matmul
from quantize import INT8, MXFP4, PerGroup, QuantizedArray
from sharding.arrays import ArrayInfo, specs
from sharding.mesh import MODEL

deep = partial(pytest.param, marks=pytest.mark.deep)


def dense_loop(x, w, active, router: model.Router):
    """Every expert sees every token, in float64; the router's weight is 0 where it was not chosen."""
    float64 = partial(np.asarray, dtype=np.float64)
    logits = x @ float64(w.router) + (float64(w.logit_bias) if router.logit_bias else 0)
    # On equal logits the smaller index wins.
    ranked = 1 / (1 + np.exp(-logits)) + float64(w.router_bias) if router.bias else logits
    chosen = np.argsort(-ranked, -1, kind="stable")[..., :active]
    score = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    score = 1 / (1 + np.exp(-logits)) if router.score == "sigmoid" else score
    score = np.take_along_axis(score, chosen, -1)
    score = score / score.sum(-1, keepdims=True) if router.normalized else score
    score = score * router.factor
    weight = np.zeros_like(logits)
    np.put_along_axis(weight, chosen, score, -1)
    none = np.zeros((logits.shape[-1], 1))
    biases = (none if bias is None else float64(bias) for bias in (w.gate_bias, w.up_bias, w.down_bias))
    return sum_of_experts(x, weight, map(float64, (w.gate, w.up, w.down)), biases, router.scales)


def sum_of_experts(x, weight, matrices, biases, scales: str) -> np.ndarray:
    """All experts of all tokens, x [...,D], times weight [...,E]. scales: its place, see model.Router."""
    total = np.zeros_like(x)
    for e, (gate, up, down, *bias) in enumerate(zip(*matrices, *biases, strict=True)):
        factor = weight[..., e : e + 1]
        before, after = (factor, factor > 0) if scales == "input" else (1, factor)
        gate, up = before * x @ gate + bias[0], before * x @ up + bias[1]
        total += after * ((gate / (1 + np.exp(-gate)) * up) @ down + bias[2])
    return total


@pytest.fixture
def rows_of_no_group_are_nan(monkeypatch):
    """A kernel may leave anything in the rows that belong to no local expert."""
    grouped_dot = cpu.grouped_dot

    def poisoned(x, w, sizes):
        y = grouped_dot(x, w, sizes)
        return jnp.where(jnp.arange(len(y))[:, None] < jnp.sum(sizes), y, jnp.nan)

    monkeypatch.setattr(cpu, "grouped_dot", poisoned)


@pytest.mark.usefixtures("rows_of_no_group_are_nan")
@pytest.mark.parametrize(
    ("name", "routing", "active"),
    [
        ("dp2-ep2-tp2", "all to one expert", 1),
        ("ep2-tp4", "spread", 2),
        *(deep(name, "all to one expert", 1) for name in MESHES if name != "dp2-ep2-tp2"),
        *(deep(name, "spread", 2) for name in MESHES if name != "ep2-tp4"),
    ],
)
def test_no_token_is_dropped(name, routing, active):
    assert_like_the_loop(name, routing, active, model.Router())


ROUTERS = [
    model.Router("sigmoid", False, "input"),
    model.Router("sigmoid", True, "output"),
    model.Router("softmax", False, "output"),
    model.Router("softmax", True, "input"),
    # GLM-4.7-Flash's, whose bias chooses experts but does not weight them.
    model.Router("sigmoid", True, "output", bias=True, factor=1.8),
]


@pytest.mark.parametrize("router", ROUTERS)
def test_routers(router):
    assert_like_the_loop("1", "spread", 2, router)


def test_biases():
    """Of the experts and of the router's logits; a bias is added once, however many devices add up."""
    router = model.Router("softmax", True, "output", logit_bias=True)
    assert_like_the_loop("ep2-tp4", "spread", 2, router, bias=True)
    with pytest.raises(ValueError, match="need a router that scales their output"):
        model.MoE(4, 2, 8, model.Router(scales="input"), shared=None, bias=True)


def assert_like_the_loop(name: str, routing: str, active: int, router_kind: model.Router, bias=False) -> None:
    cfg = llama4_config(A=active, layers=(Kind(moe=True),))
    kind = dataclasses.replace(cfg.moe, router=router_kind, bias=bias)
    cfg = dataclasses.replace(cfg, layers=(dataclasses.replace(cfg.layers[0], feed_forward=kind),))
    format = INT8 if name == "ep2-tp4" else None
    mesh = mesh_of(cfg, name)
    w = random_weights(cfg, mesh, format).layers[0].feed_forward
    info = model.weight_infos(cfg).layers[0].feed_forward
    # A router of zeros ties: every token goes to the first expert(s), the worst imbalance there is.
    router = w.router * (0 if routing == "all to one expert" else 3)
    w = dataclasses.replace(w, router=router)
    x, real = np.random.default_rng(0).standard_normal((8, 6, cfg.D)), 5

    layouts = P("data"), specs(info, w)

    @partial(jax.shard_map, mesh=mesh, in_specs=layouts, out_specs=P("data"))
    def experts(x, w):
        start = jnp.zeros_like(x[:, 0, 0], jnp.int32)
        chunk = model.chunk_at(start, start + real, x.shape[1])
        return jax.lax.psum(kind.routed_experts(x, w, chunk), MODEL)

    whole = w
    if format:
        whole = dataclasses.replace(w, **{n: dequantize(getattr(w, n), 1) for n in ("gate", "up", "down")})
    result = jax.jit(experts)(jnp.float32(x), w)
    expected = dense_loop(x, whole, active, router_kind)
    expected[:, real:] = 0  # what is no token goes to no expert
    np.testing.assert_allclose(result, expected, atol=1e-5)


# Of 8 experts here, "8" being elsewhere: one row; two experts each, one of them elsewhere; rows with none;
# all rows on one; more rows than a tile.
CHOICES = {
    "one row": [[5]],
    "mixed": [[2, 8], [7, 2], [0, 7]],
    "none here": [[8], [8]],
    "all on the last": [[7]] * 5,
    "many rows": [[row % 3 * 2] for row in range(12)],
}
# In tiles of 8 and 16 rows: 20 rows on expert 5, and on others 17, 16, 8, 1.
TILES = [[5, 0]] * 13 + [[5, 2]] * 7 + [[0, 8]] * 3 + [[2, 8]] * 10 + [[8, 3]] * 8 + [[8, 7], [8, 8]]
CHOICES["tiles"] = np.random.default_rng(1).permutation(TILES).tolist()
# Each choice once, and each kernel with rows here and elsewhere: int8 that scales outputs and float32 that
# scales inputs are of the same kernel as the other way.
KERNELS = [
    *((choice, "int8", "input", False) for choice in CHOICES),
    *(("mixed", dtype, "output", True) for dtype in ("float32", "int4", "mxfp4")),
    *(("mixed", dtype, "input", False) for dtype in ("int4", "mxfp4")),
    ("tiles", "float32", "output", True),
    *(deep("many rows", dtype, "output", False) for dtype in ("float32", "int4", "mxfp4")),
    *(deep("none here", dtype, "input", False) for dtype in ("int4", "mxfp4")),
    deep("tiles", "int4", "input", False),
    deep("tiles", "mxfp4", "output", False),
]


@pytest.mark.parametrize(("choices", "dtype", "scales", "biased"), KERNELS)
def test_active_experts_kernel(choices, dtype, scales, biased, monkeypatch, interpret):
    """Against numpy, with NaN in every expert that has no row; rows in tiles have a kernel of their own."""
    if choices == "tiles":
        monkeypatch.setattr(grouped_matmul, "FEW_ROWS", 8)
        monkeypatch.setattr(grouped_matmul, "TILES", (8, 16))
    E, D, M = 8, 64, 256
    monkeypatch.setattr(grouped_matmul, "block_width", lambda *_: 128)  # two blocks
    rng = np.random.default_rng(0)
    expert = np.array(CHOICES[choices], np.int32)
    factor = rng.uniform(0.2, 0.9, expert.shape)
    x = rng.standard_normal((len(expert), D))
    weights = [rng.standard_normal(shape) / 8 for shape in ((E, D, M), (E, D, M), (E, M, D))]
    weights[0][:, :32] /= 1000  # unlike scales in a column
    weights[0][:, 40] = 0
    idle = np.setdiff1d(np.arange(E), expert)
    if dtype == "float32":
        exact = whole = [jnp.float32(w) for w in weights]
        given = [w.at[idle].set(jnp.nan) for w in exact]
    else:
        formats = {"int8": [INT8] * 3, "int4": map(PerGroup, (32, 32, 64)), "mxfp4": [MXFP4] * 3}[dtype]
        infos = [ArrayInfo("eDm", "D", shape=(E, D, M))] * 2 + [ArrayInfo("emD", "m", shape=(E, M, D))]
        whole = [f.encode(jnp.float32(w), i) for f, w, i in zip(formats, weights, infos, strict=True)]
        exact = [w.format.decode(w, i) for w, i in zip(whole, infos, strict=True)]
        nan = 255 if dtype == "mxfp4" else jnp.nan
        given = [dataclasses.replace(w, scale=w.scale.at[idle].set(nan)) for w in whole]
    exact = [np.asarray(w) for w in exact]
    biases = (rng.standard_normal((E, M)), rng.standard_normal((E, M)), rng.standard_normal((E, D)))
    arguments = jnp.float32(x), jnp.int32(expert), jnp.float32(factor)
    options = tuple(map(jnp.float32, biases)) if biased else (None,) * 3, model.SwiGLU(), scales
    result = grouped_matmul.active_experts(*arguments, *given, *options, interpret=interpret)
    weight = np.zeros((len(x), E + 1))
    np.put_along_axis(weight, expert, factor, -1)
    biases = biases if biased else [np.zeros((E, 1))] * 3
    expected = sum_of_experts(x, weight[:, :E], exact, biases, scales)
    # Of int4 the activations are rounded to 1 / 65000 of their row's largest, twice.
    np.testing.assert_allclose(result, expected, atol=4e-4 if dtype == "int4" else 1e-5)
    by_sorting = grouped_matmul.sorted_rows(*arguments, *whole, *options)
    np.testing.assert_allclose(by_sorting, expected, atol=1e-5)
    if choices == "tiles" or scales == "input":
        return
    # The addends of the sum: choice by choice, as if each row had no other.
    addends = []
    for choice in range(expert.shape[1]):
        weight = np.zeros((len(x), E + 1))
        np.put_along_axis(weight, expert[:, choice, None], factor[:, choice, None], -1)
        addends.append(sum_of_experts(x, weight[:, :E], exact, biases, scales))
    apart = grouped_matmul.active_experts(*arguments, *given, *options, False, interpret)
    np.testing.assert_allclose(apart, addends, atol=4e-4 if dtype == "int4" else 1e-5)
    np.testing.assert_allclose(
        grouped_matmul.sorted_rows(*arguments, *whole, *options, False), addends, atol=1e-5
    )


@pytest.mark.parametrize(
    "chosen", [[5], [0, 15], [3, 9, 3, 4], list(range(16)), [16, 16], [2, 16, 2], [9, 2] * 80]
)
def test_only_active_experts_are_fetched(chosen, monkeypatch):
    """Scout on 16 chips: walk the kernel's grid by its own index maps, and count each block that changes."""
    E, D, M = 16, 5120, 512
    found = {}

    def capture(kernel, grid_spec, out_shape, **_):
        def call(*arguments):
            weights, scales, _ = arguments[-3:]
            found.update(grid=grid_spec.grid, specs=jax.tree.leaves(grid_spec.in_specs[1:]))
            found.update(arrays=jax.tree.leaves((weights, scales)))
            return jnp.zeros(out_shape.shape, out_shape.dtype)

        return call

    monkeypatch.setattr(grouped_matmul.pl, "pallas_call", capture)

    def matrix(*shape):
        scale = jax.ShapeDtypeStruct((E, shape[-1]), jnp.float32)
        return QuantizedArray(jax.ShapeDtypeStruct((E, *shape), jnp.int8), scale, INT8)

    R = len(chosen)
    x, factor = jax.ShapeDtypeStruct((R, D), jnp.bfloat16), jax.ShapeDtypeStruct((R, 1), jnp.float32)
    expert = jax.ShapeDtypeStruct((R, 1), jnp.int32)
    arguments = x, expert, factor, matrix(D, M), matrix(D, M), matrix(M, D)
    rest = (None,) * 3, model.SwiGLU(), "input"
    jax.eval_shape(lambda *x: grouped_matmul.active_experts(*x, *rest), *arguments)  # none is cached
    active = np.isin(np.arange(E), chosen)
    scalars = grouped_matmul.active_first(jnp.array(active), found["grid"][0])
    before, fetched = {}, 0
    for point in np.ndindex(*found["grid"]):
        for i, (spec, array) in enumerate(zip(found["specs"], found["arrays"], strict=True)):
            index = tuple(map(int, spec.index_map(*point, *map(np.asarray, scalars))))
            if before.get(i) != index:
                before[i] = index
                fetched += np.prod([n or 1 for n in spec.block_shape]) * array.dtype.itemsize
    one_expert = 3 * D * M
    # Scales come along, those of 8 experts at a time. Without any expert here, one block of each matrix.
    assert active.sum() * one_expert <= fetched <= max(1.03 * active.sum(), 0.53) * one_expert


def test_derivative():
    """A CPU's loop over experts can be differentiated, as XLA's product: `forward` says that it can."""
    keys = jax.random.split(jax.random.key(0))
    x, w = (jax.random.normal(key, shape) for key, shape in zip(keys, ((9, 4), (3, 4, 5)), strict=True))
    sizes = jnp.array([2, 0, 6])

    def derivative(dot):
        return jax.grad(lambda x, w: jnp.sum(jnp.sin(dot(x, w, sizes)[:8])), (0, 1))(x, w)

    for ours, theirs in zip(derivative(cpu.grouped_dot), derivative(jax.lax.ragged_dot), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
