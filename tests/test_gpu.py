"""The GPU's kernels, interpreted on a CPU, against numpy and the CPU's paths; and the model's lowering."""

import dataclasses
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import llama3_config, llama4_config
from jax._src.lib import triton
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jaxlib.mlir import ir
from test_attention import TOLERANCE, compare, exact, kv_of, numpy_attention, poisoned, slots_seen
from test_int4 import PRODUCTS, weights_like_real_ones
from test_kernels import KINDS, assert_same, generate, interpreted_as_on

import model
import ragged_attention
from ops import gpu, grouped_matmul, matmul
from quantize import INT4, INT8, QuantizedArray, dequantize_groups, quantize, quantize_groups, ungroup
from serving import chunks
from serving.executors import one_program
from serving.steps import DecodeStep, PrefillChunk, batch_infos
from sharding.arrays import abstract
from sharding.mesh import mesh_shape

IN_GROUPS = dict(D=64, H=64, F=192, M=96)  # sizes of which int4 has whole groups


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Switches to the GPU's paths when called; returns the set of kernels that have run since."""

    def switch() -> set[str]:
        # The interpreter mixes what varies over the mesh with what does not; test_lowering checks our part.
        monkeypatch.setattr(model, "declares_vma", lambda mesh, T: False)
        monkeypatch.setattr(matmul, "platform", lambda: "gpu")
        return interpreted_as_on("gpu", monkeypatch, lambda name: True)

    yield switch
    jax.clear_caches()


# Empty, one slot, one less, as many and one more than a block of 64, and full; the last start is beyond.
CASES = [(0, 0), (1, 0), (63, 0), (64, 5), (65, 64), (256, 0), (256, 130), (200, 199), (10, 200)]


# Decode and a piece of a prompt, in two tiles; the slots of a row in one part, or in four.
@pytest.mark.parametrize(
    ("T", "programs", "width", "dtype"),
    [
        pytest.param(*shape, *kind, marks=[pytest.mark.deep] * (i % 3 != j))
        for i, kind in enumerate([(64, "int8"), (128, "int8"), (64, "bfloat16"), (128, "float32")])
        for j, shape in enumerate([(1, 1), (1, 72), (50, 144)])
    ],
)
def test_cached(T, width, dtype, programs, monkeypatch, as_on_a_gpu):
    """Lengths, starts and queries that see nothing, with NaN wherever nothing may be read."""
    monkeypatch.setattr(gpu, "PROGRAMS", programs)
    rng, (B, K, G, S) = np.random.default_rng(0), (len(CASES), 2, 3, 256)
    length, start = np.array(CASES).T
    sees = rng.random((B, T)) < 0.7 if T > 1 else np.ones((B, 1), bool)
    q = jnp.asarray(rng.standard_normal((B, T, K, G, width)), "bfloat16" if dtype == "int8" else dtype)
    kv = kv_of(rng.standard_normal((B, K, S, 2 * width)), dtype)
    gap = np.arange(len(CASES)) % 2 * start // 2, start  # the first slots of some rows, of others the middle
    filled = slots_seen(length, gap, S)
    gap = tuple(jnp.broadcast_to(jnp.int32(x)[:, None], sees.shape) for x in gap)
    used, lengths = as_on_a_gpu(), jnp.int32(np.where(sees, length[:, None], 0))
    result = ragged_attention.attend_cached(q, poisoned(kv, filled), lengths, gap)
    assert used == {"flash"}
    compare(result, numpy_attention(q, *exact(kv), sees[..., None] & filled[:, None]), TOLERANCE[dtype])


@pytest.mark.parametrize("window", [None, 3, 70])
def test_causal(window, as_on_a_gpu):
    """Causal, within a segment, and within a window; blocks and tiles before the first visible slot."""
    rng = np.random.default_rng(0)
    B, T, K, G, H = 3, 150, 2, 3, 64
    q, k, v = (rng.standard_normal((B, T, K, *rest)) for rest in ((G, H), (H,), (H,)))
    segment = np.stack([np.zeros(T, int), np.arange(T) // 100, np.arange(T) * 2 // T * 7])
    back = np.arange(T)[:, None] - np.arange(T)
    mask = (back >= 0) & (back < (window or T)) & (segment[..., None] == segment[:, None])
    used, kv = as_on_a_gpu(), kv_of(np.concatenate([k, v], -1).swapaxes(1, 2))
    result = ragged_attention.attend_causal(jnp.float32(q), kv, jnp.int32(segment), window)
    assert used == {"flash"}
    compare(result, numpy_attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask))


@pytest.mark.parametrize(("dtype", "programs"), [("int8", 1), ("float32", 512), ("int4", 1), ("int4", 512)])
@pytest.mark.parametrize("sizes", [[0, 0, 1, 0], [3, 0, 20, 17], [16, 1, 15, 33], [0, 0, 0, 0]])
def test_grouped_dot(sizes, programs, dtype, monkeypatch, as_on_a_gpu):
    """Rows of unlike many experts, and two of none, with NaN in every expert without rows."""
    monkeypatch.setattr(gpu, "PROGRAMS", programs)
    rng, N, (E, D, M) = np.random.default_rng(0), sum(sizes), (4, 320 if dtype == "int4" else 300, 140)
    x, w = rng.standard_normal((N + 2, D)), rng.standard_normal((E, D, M))
    idle = np.flatnonzero(np.equal(sizes, 0))
    if dtype == "int8":
        given = quantize(jnp.float32(w), (1,)).values
        w = np.float64(given)
    elif dtype == "int4":
        given = quantize_groups(jnp.float32(w), (0, 1), 64)
        w = np.float64(dequantize_groups(given, 2)).reshape(w.shape)
        given = dataclasses.replace(given, scale=given.scale.at[idle].set(jnp.nan))
    else:
        given = jnp.float32(w).at[idle].set(jnp.nan)
    used = as_on_a_gpu()
    result = gpu.grouped_dot(jnp.float32(x), given, jnp.int32(sizes))
    assert used == {"grouped_dot"}
    assert np.isnan(result[N:]).all()  # as the interpreter left them: a tile writes its own rows only
    expert = np.repeat(np.arange(E), sizes)
    np.testing.assert_allclose(result[:N], np.einsum("nd,ndm->nm", x[:N], w[expert]), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize(("spec", "x", "w", "axes"), PRODUCTS)
def test_int4(spec, x, w, axes, monkeypatch, as_on_a_gpu):
    """Few rows by whatever letters; many rows, or an odd number of columns, are multiplied by floats."""
    x = np.random.default_rng(1).standard_normal(x)
    q = quantize_groups(jnp.float32(weights_like_real_ones(*w)), axes, 32)
    expected = np.einsum(spec, x, np.float64(ungroup(q, axes)))
    used = as_on_a_gpu()
    for limit in (6, 5):
        monkeypatch.setattr(matmul, "FEW_ROWS", limit)
        used.clear()
        result = matmul.einsum(spec, jnp.float32(x), q)
        assert used == ({"grouped_dot"} if limit == 6 and expected.shape[-1] % 2 == 0 else set())
        np.testing.assert_allclose(result, expected, atol=1e-4, rtol=1e-5)  # float32 sums of 192 terms


@pytest.mark.parametrize(
    ("cfg", "kv_dtype", "format"),
    [
        pytest.param(llama4_config(H=64, layers=KINDS, A=2), "float32", INT8, marks=pytest.mark.deep),
        pytest.param(
            llama3_config(K=2, G=4, H=64, tied_embeddings=True), "int8", None, marks=pytest.mark.deep
        ),
    ],
    ids=["llama4", "llama3"],
)
def test_whole_model(cfg, kv_dtype, format, monkeypatch, as_on_a_gpu):
    """Prefill in pieces, then decode steps whose lengths differ by row."""
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 32), (1, 128)))
    expected = generate(cfg, kv_dtype, format)
    used = as_on_a_gpu()
    result = generate(cfg, kv_dtype, format)
    assert used == {"flash"} | ({"grouped_dot"} if cfg.moe else set())
    # A difference in the last bit can round a cached value or an activation to the next step of int8.
    assert_same(result, expected, atol=5e-3)


@pytest.fixture
def without_triton(monkeypatch):
    """gpu.py as it is where Pallas' Triton backend cannot be imported."""
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    importlib.reload(gpu)
    yield
    monkeypatch.undo()
    importlib.reload(gpu)


def test_without_triton(without_triton, as_on_a_gpu, capsys):
    """Attention and experts take the forms that are for any device, and one line says so."""
    rng, used = np.random.default_rng(0), as_on_a_gpu()
    q, kv = rng.standard_normal((2, 1, 1, 3, 64)), rng.standard_normal((2, 1, 128, 128))
    x, gate, up, down = (rng.standard_normal(shape) for shape in [(5, 8)] + [(3, 8, 8)] * 3)
    length, expert = jnp.int32([100, 7]), rng.integers(0, 3, 5)
    for _ in range(2):
        attended = ragged_attention.attend_cached(jnp.float32(q), kv_of(kv), length[:, None])
        weights = map(jnp.float32, (gate, up, down))
        rows = jnp.float32(x), expert[:, None], jnp.ones((5, 1))
        mixed = grouped_matmul.expert_mlp(*rows, *weights, (None,) * 3, model.SwiGLU(), "input")
    mask = np.arange(128) < np.array(length)[:, None, None]
    compare(attended, numpy_attention(q, *np.split(kv, 2, -1), mask))
    gate, up = (np.einsum("nd,ndm->nm", x, w[expert]) for w in (gate, up))
    expected = np.einsum("nm,nmd->nd", gate / (1 + np.exp(-gate)) * up, down[expert])
    np.testing.assert_allclose(mixed, expected, atol=1e-3, rtol=1e-4)
    (line,) = capsys.readouterr().err.splitlines()
    assert not used and line.startswith("slow on this GPU: ") and "Triton backend is missing (" in line


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize(
    ("format", "kv_dtype"), [(INT8, "int8"), (None, "bfloat16"), (None, "float32"), (INT4, "int8")]
)
@pytest.mark.parametrize("program", ["decode", "decode with guesses", "prefill", "prefill of one row"])
def test_lowering(program, format, kv_dtype):
    """On 8 GPUs that are not here: shard_map's check passes, and the kernels are valid Triton."""
    cfg = llama4_config(**IN_GROUPS)
    shape = mesh_shape(cfg, 2, 2, 2)
    device = AbstractDevice("NVIDIA H200", None, "gpu")
    mesh = AbstractMesh(
        tuple(shape.values()), tuple(shape), (AxisType.Auto,) * len(shape), abstract_device=device
    )
    dtype = jnp.float32 if kv_dtype == "float32" else jnp.bfloat16
    weights = abstract(model.weight_infos(cfg, format), mesh, dtype)
    batch = abstract(batch_infos(cfg, 4, 256, jnp.dtype(kv_dtype)), mesh)
    count, shards = jax.ShapeDtypeStruct((4,), "int32"), jax.ShapeDtypeStruct((2,), "int32")
    guesses = jax.ShapeDtypeStruct((4, 3), "int32")
    step = {
        "decode": DecodeStep(count=count),
        "decode with guesses": DecodeStep(count=count, drafts=guesses),
        "prefill": PrefillChunk(rows=None, count=count, width=128, score=0),
        "prefill of one row": PrefillChunk(rows=shards, count=shards, width=128, score=0),
    }[program]
    traced = one_program.program(type(step)).trace(step, weights, batch, cfg=cfg, mesh=mesh)
    lowered = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    kernels = []

    def visit(op):
        if op.name == "stablehlo.custom_call" and "triton" in str(op.attributes["call_target_name"]):
            kernels.append(op.attributes["mhlo.backend_config"])
        return ir.WalkResult.ADVANCE

    lowered.operation.walk(visit)
    names = [kernel["name"].value for kernel in kernels]
    leaves = jax.tree.leaves(weights, is_leaf=lambda x: isinstance(x, QuantizedArray))
    int4 = sum(isinstance(x, QuantizedArray) and x.format.scheme == "int4" for x in leaves)
    assert names.count("grouped_dot") == (int4 or 3 * 2)  # matrices, layers
    assert names.count("flash") == (3 if program == "decode" else 6)  # to the cache, or also to the chunk
    with ir.Context() as context:
        triton.dialect.register_dialect(context)
        for kernel in kernels:
            assert ir.Module.parse(kernel["ir"].value_bytes).operation.verify()
