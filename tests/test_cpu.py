"""The products of a CPU against numpy, and what main.py keeps between runs."""

import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import FAST

import main
import quantize
from ops import attention, cpu, matmul
from ops.kv_cache import KV, key_beside_value

# Largest error, of a row's largest entry times a weight's norm: of float32 sums; of bfloat16 entries; of
# entries rounded to 1/127 and 1/254 of that.
TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-8, "fifteen bits": 0.5 / 127 / 254}


@pytest.mark.parametrize(
    "dtype, weights",
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "int8"), ("bfloat16", "int8")],
)
@pytest.mark.parametrize(
    "B, T, avx512", [(1, 1, False), (1, 1, True), (3, 1, True), (2, 3, True), (2, 17, True)]
)
@pytest.mark.parametrize("first", [False, True])
def test_products(dtype, weights, B, T, avx512, first, monkeypatch):
    monkeypatch.setattr(cpu, "has_avx512", lambda: avx512)
    monkeypatch.setattr(cpu, "INT8_WEIGHTS_FIRST", first)
    rng = np.random.default_rng(B)
    x = rng.normal(size=(B, T, 3, 32)).astype(np.float32)
    x[-1, 0] *= 100  # each row has its own scale
    x[0] *= B == 1  # and one of several is zero
    x = np.asarray(jnp.asarray(x, dtype))
    w = rng.integers(-127, 128, (5, 7, 3, 32)).astype(np.int8)
    y = np.asarray(cpu.contract(jnp.asarray(x), jnp.asarray(w, weights), 2))
    exact = np.einsum("BTij,NMij->BTNM", x.astype(np.float64), w.astype(np.float64))
    assert y.dtype == np.float32 and y.shape == exact.shape
    kind = dtype
    if weights == "int8" and T <= 16:
        kind = "fifteen bits" if B * T > 1 else "float32"
    largest = np.abs(x).max((2, 3)).astype(np.float64)[..., None, None]
    norm = np.sqrt(np.square(w.astype(np.float64)).sum((2, 3)))
    # Roundings are independent: of 5 * 7 sums of 96, none is 6 standard deviations (of 1 / sqrt(3)) away.
    bound = 6 / 3**0.5 * TOLERANCE[kind] * largest * norm
    assert (np.abs(y - exact) <= bound).all()
    if kind.endswith("bits"):  # and it is not rounded less: the fast form was taken
        assert np.abs(y - exact).max() > bound.max() / 100


def test_loops_of_attention_copy_nothing():
    """Both products read the cache in one loop each: nothing as large as a block's keys is written."""
    q, cache = jnp.ones((2, 1, 3, 3, 64)), jnp.ones((2, 3, 768, 128))

    def attend(q, cache, first):
        block = jax.lax.dynamic_slice_in_dim(cache, first, 256, 2)
        p = jax.nn.softmax(cpu.scores(q, block[..., :64]))
        return cpu.weighted_sum(p, block[..., 64:])

    hlo = jax.jit(attend).lower(q, cache, 0).compile().as_text()
    results = re.findall(r"= f32\[([\d,]+)\]\S* (?!parameter)", hlo[hlo.index("ENTRY") :])
    assert results and max(math.prod(map(int, shape.split(","))) for shape in results) < 2 * 3 * 256 * 64


def test_the_platform_chooses():
    """Inside a mesh of CPUs, and only there, an einsum is one of these products."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 1, 64)), jnp.float32)
    w = quantize.quantize(jnp.asarray(np.random.default_rng(1).normal(size=(16, 64))), (1,))

    def inside(x):
        return matmul.einsum("bTD,fD->bTf", x, w)

    spec = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec)
    assert "s32" in jax.jit(mapped).lower(x).compile().as_text()
    assert "s32" not in jax.jit(inside).lower(x).compile().as_text()
    # 64 roundings by up to half a step of 1/127 of 3, times weights of about 1: six standard deviations.
    np.testing.assert_allclose(mapped(x), inside(x), atol=6 * 64**0.5 * 3 / 127 / 12**0.5)


def test_an_outlier_leaves_the_rest():
    """One entry a thousand times the others, as in trained models: theirs still counts, to a few bits."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(1, 1, 256)), rng.integers(-127, 128, (16, 256)).astype(np.int8)
    x[..., 7], w[:, 7] = 1000, 0
    for dtype in ("float32", "bfloat16"):
        rows = jnp.asarray(x, dtype)
        exact = np.asarray(rows, np.float64) @ w.T
        error = np.asarray(cpu.contract(rows, jnp.asarray(w), 1)) - exact
        # Steps of 1000 / 127 / 254 are 3% of an entry.
        assert np.abs(error).max() < 0.03 * np.abs(exact).max()


def test_what_a_start_says_and_keeps(tmp_path):
    """How long its parts took; and compiled programs are kept in the cache of the user."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMP")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "XLA_FLAGS": FAST}
    command = [sys.executable, main.__file__, "--prompt", "Hello", "--max-new-tokens", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "start: compile " in done.stderr and " s after the start" in done.stderr
    kept = {file.name.partition("-")[0] for file in (tmp_path / "llama-jax").iterdir()}
    assert {"jit_layers", "jit_assign_rows"} <= kept


@pytest.mark.parametrize(("module", "expected"), [(attention, [0, 1]), (cpu, [0, 0, 1, 2])])
def test_decode_reads_what_is_filled(module, expected, monkeypatch):
    """A long cache costs a step of few positions no more blocks than a short one; on a CPU by pairs."""
    monkeypatch.setattr(cpu, "BLOCK", 128 * 16)
    blocks, read = [], attention.read_block

    def count(kv, runs, block, i):
        jax.debug.callback(lambda i: blocks.append(int(i)), i)
        return read(kv, runs, block, i)

    monkeypatch.setattr(attention, "read_block", count)
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(4, 1, 1, 2, 8)), jnp.float32)
    kv = KV(jnp.asarray(rng.normal(size=(4, 1, 1024, 16)), jnp.float32), None, key_beside_value(8))
    jax.block_until_ready(module.attend_cached(q, kv, jnp.array([[3], [5], [300], [7]])))
    jax.effects_barrier()
    assert sorted(blocks) == expected
