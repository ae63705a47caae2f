"""The GPU's kernels, interpreted on a CPU, against numpy and the CPU's paths; and the model's lowering."""

import dataclasses
import importlib
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Kind, llama3_config, llama4_config
from jax._src.lib import triton
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jaxlib.mlir import ir
from kernel_checks import exact, kv_of, numpy_attention, poisoned
from test_attention import TOLERANCE, check_cached, check_causal, compare, slots_seen
from test_experts import sum_of_experts
from test_int4 import PRODUCTS, weights_like_real_ones
from test_kernels import KINDS, NEW, generate, interpreted_as_on
from test_meshes import assert_same

import model
import ragged_attention
from ops import attention, gpu, gpu_products, grouped_matmul, matmul
from quantize import (
    INT4,
    INT8,
    MXFP4,
    PerGroup,
    QuantizedArray,
    dequantize_groups,
    quantize,
    quantize_groups,
    ungroup,
)
from serving import chunks
from serving.executors import one_program
from serving.steps import DecodeStep, PrefillChunk, batch_infos
from sharding.arrays import ArrayInfo, abstract
from sharding.mesh import mesh_shape

deep = partial(pytest.param, marks=pytest.mark.deep)
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
        (1, 1, 64, "int8"),
        deep(50, 144, 64, "int8"),
        (1, 72, 128, "int8"),
        (50, 144, 64, "bfloat16"),
        deep(1, 72, 64, "bfloat16"),
        (1, 1, 128, "float32"),
    ],
)
def test_cached(T, width, dtype, programs, monkeypatch, as_on_a_gpu):
    """Lengths, starts and queries that see nothing, with NaN wherever nothing may be read."""
    monkeypatch.setattr(gpu, "PROGRAMS", programs)
    rng, (B, K, G, S) = np.random.default_rng(0), (len(CASES), 2, 3, 256)
    length, start = np.array(CASES).T
    sees = rng.random((B, T)) < 0.7 if T > 1 else np.ones((B, 1), bool)
    q = jnp.asarray(rng.standard_normal((B, T, K, G, width)), "bfloat16" if dtype == "int8" else dtype)
    at = np.arange(len(CASES)) % 2 * start // 2, start  # the first slots of some rows, of others the middle
    gap = tuple(np.broadcast_to(x[:, None], sees.shape) for x in at)
    used, length = as_on_a_gpu(), np.where(sees, length[:, None], 0)
    check_cached(q, rng.standard_normal((B, K, S, 2 * width)), length, gap, dtype, TOLERANCE[dtype])
    assert used == {"flash"} | ({"merge_parts"} if programs > 1 else set())


# The token's slot: none, the first, the ends of blocks of 64; and rings that go around, or do not.
TOKENS = [(1, 0), (64, 63), (65, 64), (130, 129)]
IN_RINGS = [(256, 9, 10, 20), (256, 63, 64, 70), (200, 199, 0, 128), (100, 99, 0, 64), (256, 64, 65, 66)]


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", deep("float32")])
@pytest.mark.parametrize(("ring", "programs"), [(False, 64), (True, 64), (False, 1)])
def test_decode(ring, programs, dtype, monkeypatch, as_on_a_gpu):
    """One kernel writes a token of each row, in another order, attends to it, and touches nothing else."""
    monkeypatch.setattr(gpu, "PROGRAMS", programs)
    S = 256 if programs > 1 else 200  # which no block divides
    rows = IN_RINGS if ring else [*TOKENS, (0, S), (S, S), (S, S - 1)]  # and none, the last
    length, place, *gap = np.array(rows).T[..., None]
    rng, (B, K, G, H) = np.random.default_rng(0), (len(length), 2, 3, 64)
    row = rng.permutation(B)
    q = jnp.asarray(rng.standard_normal((B, 1, K, G, H)), "float32" if dtype == "float32" else "bfloat16")
    kv, new = (kv_of(rng.standard_normal((B, K, n, 2 * H)), dtype) for n in (S, 1))
    seen = slots_seen(length, gap or None, S)[:, 0]
    fresh = np.arange(S) == place
    given = poisoned(kv, (seen & ~fresh)[np.argsort(row)])
    after = attention.write(given, new, jnp.int32(place), jnp.int32(row))
    used = as_on_a_gpu()
    limits = jax.tree.map(jnp.int32, (length, place, tuple(gap) or None, row))
    result, found = ragged_attention.ragged_decode(q, new, given, *limits)
    assert used == {"flash"} | ({"merge_parts"} if programs > 1 else set())
    for ours, expected in zip(jax.tree.leaves(found), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(np.float32(ours), np.float32(expected))
    keys, values = (np.where(seen[:, None, :, None], x[row], 0) for x in exact(after))
    compare(result, numpy_attention(q, keys, values, seen[:, None]), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_rows_of_a_cache(dtype, as_on_a_gpu):
    """Queries of some rows, in another order, each of which sees one slot more than the one before it."""
    rng, (B, T, K, G, H, S) = np.random.default_rng(0), (5, 33, 2, 3, 64, 192)
    row, end = np.array([3, 0]), np.array([[70], [150]]) + np.arange(T)
    q, values = rng.standard_normal((2, T, K, G, H)), rng.standard_normal((B, K, S, 2 * H))
    kv, used = kv_of(values, dtype), as_on_a_gpu()
    result = ragged_attention.attend_cached(jnp.float32(q), kv, jnp.int32(end), row=jnp.int32(row))
    seen = np.arange(S) < end[..., None]
    compare(result, numpy_attention(q, *(x[row] for x in exact(kv)), seen), TOLERANCE[dtype])
    assert used == {"flash", "merge_parts"}


@pytest.mark.parametrize("window", [None, 3, 70])
def test_causal(window, as_on_a_gpu):
    """Causal, within a segment, and within a window; blocks and tiles before the first visible slot."""
    at = np.arange(150)
    used = as_on_a_gpu()
    check_causal(np.stack([0 * at, at // 100, at // 75 * 7]), 64, window)
    assert used == {"flash", "merge_parts"}


SIZES = [[3, 0, 20, 17], [0, 0, 1, 0], [16, 1, 15, 33], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("dtype", "programs", "sizes"),
    [
        *(("int8", 1, sizes) for sizes in SIZES),
        ("float32", 512, SIZES[0]),
        *((dtype, programs, SIZES[0]) for dtype in ("int4", "mxfp4") for programs in (1, 512)),
    ],
)
def test_grouped_dot(sizes, programs, dtype, monkeypatch, as_on_a_gpu):
    """Rows of unlike many experts, and two of none, with NaN in every expert without rows; two matrices."""
    monkeypatch.setattr(gpu, "PROGRAMS", programs)
    rng, N, (E, D, M) = np.random.default_rng(0), sum(sizes), (4, 320 if "4" in dtype else 300, 140)
    x, w, units = rng.standard_normal((N + 2, D)), rng.standard_normal((E, D, M)), 1
    idle = np.flatnonzero(np.equal(sizes, 0))
    if dtype == "int8":
        given = quantize(jnp.float32(w), (1,)).values
        w = np.float64(given)
    elif dtype == "int4":
        given = quantize_groups(jnp.float32(w), (0, 1), 64)
        w = np.float64(dequantize_groups(given, 2)).reshape(w.shape)
        given = dataclasses.replace(given, scale=given.scale.at[idle].set(jnp.nan))
    elif dtype == "mxfp4":
        info = ArrayInfo("eDm", "D", shape=w.shape)
        units = 2.0 ** rng.integers(-20, 20, M)
        given = MXFP4.encode(jnp.float32(w * units), info)
        w = np.float64(MXFP4.decode(given, info)) / units
        given = dataclasses.replace(given, scale=given.scale.at[idle].set(255))
    else:
        given = jnp.float32(w).at[idle].set(jnp.nan)
    narrow, used = jax.tree.map(lambda y: y[..., -12:], given), as_on_a_gpu()
    result, beside = gpu_products.grouped_dot(jnp.float32(x), [given, narrow], jnp.int32(sizes))
    assert used == {"grouped_dot"}
    assert np.isnan(result[N:]).all()  # as the interpreter left them: a tile writes its own rows only
    expected = np.einsum("nd,ndm->nm", x[:N], w[np.repeat(np.arange(E), sizes)])
    np.testing.assert_allclose((result / units)[:N], expected, atol=1e-3, rtol=1e-5)
    np.testing.assert_array_equal(beside, result[:, -12:])


@pytest.mark.parametrize(
    ("dtype", "processors"), [("int8", 1), ("int8", 512), ("float32", 6), ("bfloat16", 512)]
)
def test_joined_dot(dtype, processors, monkeypatch, as_on_a_gpu):
    """Several matrices, of sizes that no block divides, whole and in parts."""
    monkeypatch.setattr(gpu_products, "PROCESSORS", processors)
    rng, used, D = np.random.default_rng(0), as_on_a_gpu(), 2100
    x, *matrices = (jnp.asarray(rng.integers(-127, 128, (n, D)), dtype) for n in (3, 100, 1, 64))
    found = gpu_products.joined_dot(x, matrices)
    assert used == {"joined_dot"} and {len(y) > 1 for y in found} == {processors > 20}
    for y, w in zip(found, matrices, strict=True):
        np.testing.assert_array_equal(np.sum(y, 0), np.float64(x) @ np.float64(w).T)  # whole numbers


def rounding(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """What the product of rows x and columns w may be off, if both parts of x have 15 bits of its largest."""
    return np.abs(x).max(1, keepdims=True) / 127 / 254 * np.abs(w).sum(-2) + 1e-4


@pytest.mark.parametrize("rows", [1, 5, 20])
def test_few_rows_of_int8(rows, as_on_a_gpu):
    """By integers, in one kernel; more rows and float32, which integers would round, by floats."""
    x = jnp.asarray(np.random.default_rng(1).standard_t(3, (1, rows, 600)), "bfloat16")
    shapes = {"bTD,kgHD->bTkgH": (2, 3, 8, 600), "bTD,khD->bTkh": (2, 8, 600)}
    weights = {spec: jnp.asarray(weights_like_real_ones(*shape)) for spec, shape in shapes.items()}
    pairs = [(spec, quantize(w, (w.ndim - 1,))) for spec, w in weights.items()]
    used, integers = as_on_a_gpu(), {"joined_dot"} | ({"integer_rows"} if rows > 16 else set())
    for given, kernels in ((x, integers), (jnp.float32(x), set()), (jnp.tile(x, (1, 70, 1)), set())):
        used.clear()
        found = matmul.products(given, *pairs)
        alone = [matmul.einsum(spec, given, w) for spec, w in pairs]
        assert used == kernels
        for (spec, q), y, same in zip(pairs, found, alone, strict=True):
            whole = np.float64(q.values) * np.float64(q.scale)[..., None]
            expected = np.einsum(spec, np.float64(given), whole)
            parts = rounding(np.float64(given)[0], whole.reshape(-1, 600).T).max()
            np.testing.assert_array_equal(np.float64(y), np.float64(same))
            np.testing.assert_allclose(np.float64(y), expected, rtol=2**-7, atol=parts)  # 8 bits, twice


@pytest.mark.parametrize("rows", [1, 20, 70])
def test_function_of_products(rows, as_on_a_gpu):
    """The activation of gate and up, in the kernel of their products, or after the products of many rows."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, rows, 600)), "bfloat16")
    weights = [quantize(jnp.asarray(w), (1,)) for w in weights_like_real_ones(2, 300, 600)]
    used = as_on_a_gpu()
    (found,) = matmul.products(x, *(("bTD,fD->bTf", w) for w in weights), then=model.SwiGLU())
    assert found.dtype == jnp.bfloat16
    assert used == {1: {"joined_dot"}, 20: {"joined_dot", "integer_rows"}, 70: set()}[rows]
    known, whole = np.float64(x[0]), [np.float64(w.values) * np.float64(w.scale)[:, None] for w in weights]
    (gate, up), errors = (known @ w.T for w in whole), [rounding(known, w.T) for w in whole]
    expected = gate / (1 + np.exp(-gate)) * up
    error = 1.1 * errors[0] * np.abs(up) + errors[1] * np.abs(gate)  # silu rises by up to 1.1
    assert (np.abs(np.float64(found[0]) - expected) <= error + 2**-8 * np.abs(expected)).all()


@pytest.mark.parametrize("sizes", [[3, 0, 20, 1], [2, 0, 9, 1], [0, 1, 0, 0]])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_experts_of_integers(dtype, sizes, as_on_a_gpu):
    """Few rows in bfloat16 are multiplied as two rows of integers each; of up to 16 the kernel makes them."""
    rng, N, (E, D, M) = np.random.default_rng(0), sum(sizes), (4, 320, 140)
    x, w = rng.standard_normal((N, D)), jnp.float32(rng.standard_normal((E, D, M)))
    x[0, D // 2 :] = x[-1] = 0  # tiles without a largest number
    x = jnp.asarray(x, "bfloat16")
    if dtype == "int8":
        given = quantize(w, (1,)).values
        whole = np.float64(given)
    else:
        given = quantize_groups(w, (0, 1), 64)
        whole = np.float64(dequantize_groups(given, 2)).reshape(w.shape)
    used = as_on_a_gpu()
    result = gpu_products.ragged_dot(x, [given], jnp.int32(sizes))[0]
    assert used == {"grouped_dot"} | ({"integer_rows"} if N > 16 else set())
    assert result.dtype == jnp.float32
    for row, expert in enumerate(np.repeat(np.arange(E), sizes)):
        known = np.float64(x[row])[None]
        error = np.abs(np.float64(result[row]) - known @ whole[expert])
        assert (error <= rounding(known, whole[expert])).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4", "mxfp4"])
@pytest.mark.parametrize("scales", ["input", "output"])
def test_choices_of_one_row(dtype, scales, monkeypatch, as_on_a_gpu):
    """Experts in any order, one of another device, without sorting; NaN in those that are not chosen."""
    monkeypatch.setattr(grouped_matmul, "sorted_rows", None)
    rng, (E, D, M) = np.random.default_rng(0), (8, 64, 128)
    expert, factor = np.array([[5, 8, 2, 7]]), rng.uniform(0.2, 0.9, (1, 4))
    x = jnp.asarray(rng.standard_normal((1, D)), "float32" if dtype in ("float32", "mxfp4") else "bfloat16")
    weights = [jnp.float32(rng.standard_normal(shape) / 8) for shape in ((E, D, M), (E, D, M), (E, M, D))]
    idle = np.setdiff1d(np.arange(E), expert)
    if format := {"int8": INT8, "int4": PerGroup(32), "mxfp4": MXFP4}.get(dtype):
        infos = [ArrayInfo("eDm", "D", shape=(E, D, M))] * 2 + [ArrayInfo("emD", "m", shape=(E, M, D))]
        given = [format.encode(w, info) for w, info in zip(weights, infos, strict=True)]
        weights = [format.decode(w, info) for w, info in zip(given, infos, strict=True)]
        nan = 255 if dtype == "mxfp4" else jnp.nan
        given = [dataclasses.replace(w, scale=w.scale.at[idle].set(nan)) for w in given]
    else:
        weights = [w.astype(dtype) for w in weights]
        given = [w.at[idle].set(jnp.nan) for w in weights]
    biases = [rng.standard_normal((E, n)) * (scales == "output") for n in (M, M, D)]
    weight = np.zeros((1, E + 1))
    np.put_along_axis(weight, expert, factor, -1)
    exact = [np.float64(w) for w in weights]
    expected = sum_of_experts(np.float64(x), weight[:, :E], exact, biases, scales)
    used = as_on_a_gpu()
    options = tuple(map(jnp.float32, biases)), model.SwiGLU(), scales
    arguments = x, jnp.int32(expert), jnp.float32(factor), *given, *options
    found = grouped_matmul.expert_mlp(*arguments)
    assert used == {"grouped_dot"}
    # Hidden units are rounded to x's type.
    np.testing.assert_allclose(found, expected, atol=1e-5 if x.dtype == jnp.float32 else 1e-2)
    addends = grouped_matmul.expert_mlp(*arguments, False)
    assert addends.shape == (4, 1, D) and not addends[1].any()
    np.testing.assert_allclose(addends.sum(0), found, atol=1e-5)
    gate = given[0].values if dtype == "int8" else given[0]
    (products,) = gpu_products.dot_by_row(jnp.repeat(x, 4, 0), [gate], jnp.int32(expert[0]))
    assert np.isnan(products[1]).all()  # as the interpreter left it: for this choice nothing is read


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_not_finite(number, rows, as_on_a_gpu):
    """Integers have no such numbers, but the result of their row does."""
    x = jnp.ones((rows, 600), "bfloat16").at[1, 300].set(number)
    w = jnp.ones((8, 600))
    as_on_a_gpu()
    quantized = quantize(w, (1,))
    dense = gpu_products.integer_products(x, [quantized.values], [quantized.scale])
    of_experts = gpu_products.ragged_dot(x, [quantize(w.T[None], (1,)).values], jnp.array([rows]))
    for y in (*dense, *of_experts):
        np.testing.assert_array_equal(np.isfinite(y).all(1), np.arange(rows) != 1)


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
        deep(llama4_config(H=64, layers=KINDS, A=2), "float32", INT8),
        deep(llama3_config(K=2, G=4, H=64, tied_embeddings=True), "int8", None),
    ],
    ids=["llama4", "llama3"],
)
def test_whole_model(cfg, kv_dtype, format, monkeypatch, as_on_a_gpu):
    """Prefill in pieces, then decode steps whose lengths differ by row."""
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 32), (1, 128)))
    expected = generate(cfg, kv_dtype, format)
    used = as_on_a_gpu()
    result = generate(cfg, kv_dtype, format)
    assert used == {"flash", "merge_parts"} | ({"grouped_dot"} if cfg.moe else set())
    # A difference in the last bit can round a cached value or an activation to the next step of int8.
    assert_same(result, expected, 5e-3, NEW)


@pytest.fixture
def without_triton(monkeypatch):
    """gpu.py as it is where Pallas' Triton backend cannot be imported."""
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    before = dict(vars(gpu))
    importlib.reload(gpu)
    yield
    vars(gpu).update(before)  # reloaded again, it would have other functions than the tables of kernels


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
    expected = sum_of_experts(x, np.eye(3)[expert], (gate, up, down), [np.zeros((3, 1))] * 3, "output")
    np.testing.assert_allclose(mixed, expected, atol=1e-3, rtol=1e-4)
    (line,) = capsys.readouterr().err.splitlines()
    assert not used and line.startswith("slow on this GPU: ") and "Triton backend is missing (" in line


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize(
    ("program", "format", "kv_dtype"),
    [
        pytest.param(program, *kind, marks=[pytest.mark.deep] * ((i + j) % 2))
        for i, kind in enumerate([(INT8, "int8"), (None, "bfloat16"), (None, "float32"), (INT4, "int8")])
        for j, program in enumerate(
            ["decode", "decode of a row", "decode with guesses", "prefill of one row", "prefill"]
        )
    ],
)
def test_lowering(program, format, kv_dtype):
    """On 8 GPUs that are not here: shard_map's check passes, and the kernels are valid Triton."""
    cfg = llama4_config(layers=(Kind(chunk=8, moe=True), Kind(rope=False)), **IN_GROUPS)
    shape = mesh_shape(cfg, 2, 2, 2)
    device = AbstractDevice("NVIDIA H200", None, "gpu")
    mesh = AbstractMesh(
        tuple(shape.values()), tuple(shape), (AxisType.Auto,) * len(shape), abstract_device=device
    )
    dtype = jnp.float32 if kv_dtype == "float32" else jnp.bfloat16
    weights = abstract(model.weight_infos(cfg, format), mesh, dtype)
    rows = 2 if program == "decode of a row" else 4  # on two shards
    batch = abstract(batch_infos(cfg, rows, 256, jnp.dtype(kv_dtype)), mesh)
    count, shards = jax.ShapeDtypeStruct((rows,), "int32"), jax.ShapeDtypeStruct((2,), "int32")
    guesses = jax.ShapeDtypeStruct((4, 3), "int32")
    step = {
        "decode": DecodeStep(count=count),
        "decode of a row": DecodeStep(count=count),
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
    # A kernel for each matrix, but one for q, k and v of both layers, and for gate and up of a layer, of the
    # shared expert and of all experts; without int4 only the experts have it.
    assert names.count("grouped_dot") == (int4 - 2 * 2 - 3 if int4 else 2)
    # Of the two layers, the one whose cache is a ring attends to the cache and to the chunk.
    assert names.count("flash") == (2 if program in ("decode", "decode of a row") else 3)
    with ir.Context() as context:
        triton.dialect.register_dialect(context)
        for kernel in kernels:
            assert ir.Module.parse(kernel["ir"].value_bytes).operation.verify()
