"""benchmarks/model_checks.py: its models reach a GPU's kernels, and what is wrong in them is found."""

import functools

import jax
import jax.numpy as jnp
import model_checks
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from test_gpu import as_on_a_gpu  # noqa: F401  fixtures
from test_kernels import as_on_a_tpu  # noqa: F401

import model
import ragged_attention
from ops import attention, gpu_attention
from serving.steps import batch_infos
from sharding.arrays import abstract
from sharding.mesh import mesh_shape

BFLOAT16, INT8, INT4 = model_checks.KINDS


def run(kind: model_checks.Kind) -> dict:
    return model_checks.run_kind(kind, jax.devices("cpu")[0])


@pytest.mark.parametrize("kind", model_checks.KINDS, ids=str)
def test_kernels_of_a_gpu(kind):
    """In each of the two programs, traced for a GPU that is not here."""
    shape = mesh_shape(kind.config)
    axes, device = (AxisType.Auto,) * len(shape), AbstractDevice("NVIDIA H200", None, "gpu")
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape), axes, abstract_device=device)
    weights = abstract(model.weight_infos(kind.config, kind.format), mesh, jnp.bfloat16)
    batch = abstract(batch_infos(kind.config, 3, model_checks.SLOTS, jnp.dtype(kind.cache)), mesh)
    piece, *_, token = model_checks.steps()
    found = [model_checks.kernels_of(step, weights, batch, kind.config, mesh) for step in (piece, token)]
    products = {BFLOAT16: set(), INT8: {"joined_dot"}, INT4: {"joined_dot", "grouped_dot"}}[kind]
    attends = {"flash", "merge_parts"}
    of_a_piece = {"grouped_dot", "integer_rows"} if kind == INT4 else set()
    assert set(found[0]) == attends | of_a_piece
    assert set(found[1]) == attends | products
    # A cache that is no ring has the piece in it; to a ring and to the piece queries attend apart.
    assert [names.count("flash") for names in found] == [3, 2]


@pytest.fixture
def truth_without_kernels(monkeypatch):
    """What is expected is computed without kernels, also while a CPU behaves as another platform."""
    compute = model_checks.expected_logprobs

    @functools.wraps(compute)
    def plainly(*arguments):
        with monkeypatch.context() as context:
            context.setenv("LLAMA_JAX_PLAIN", "all")
            jax.clear_caches()
            found = compute(*arguments)
        jax.clear_caches()
        return found

    monkeypatch.setattr(model_checks, "expected_logprobs", plainly)


@pytest.mark.usefixtures("truth_without_kernels")
@pytest.mark.parametrize(
    "kind", [BFLOAT16, pytest.param(INT8, marks=pytest.mark.deep), pytest.param(INT4, marks=pytest.mark.deep)]
)
def test_as_on_a_gpu(kind, as_on_a_gpu):  # noqa: F811
    """Its kernels, interpreted, compute what a CPU does; their names are told."""
    used, found = as_on_a_gpu(), run(kind)
    assert found["ok"] and found["failure"] is None
    of_int4 = {"joined_dot", "grouped_dot", "integer_rows"}
    products = {BFLOAT16: set(), INT8: {"joined_dot"}, INT4: of_int4}[kind]
    assert used == {"flash", "merge_parts"} | products and all(name in found["name"] for name in used)


@pytest.mark.parametrize("platform", ["cpu", pytest.param("tpu", marks=pytest.mark.deep)])
@pytest.mark.usefixtures("truth_without_kernels")
def test_as_on_others(platform, request):
    if platform == "tpu":
        request.getfixturevalue("as_on_a_tpu")()
    assert run(INT8)["ok"]


@pytest.mark.usefixtures("truth_without_kernels")
@pytest.mark.parametrize("setting", ["", "all"])
def test_a_wrong_kernel(setting, monkeypatch, as_on_a_gpu):  # noqa: F811
    """It reads other rows of the cache: the line says so, and that the model runs without kernels."""
    as_on_a_gpu()

    @functools.wraps(gpu_attention.attend_cached)
    def attend(q, kv, length, gap, row):
        return gpu_attention.attend_cached(q, kv, length, gap, row if row is None else row[::-1])

    monkeypatch.setitem(ragged_attention.KERNELS, ("gpu", attention.attend_cached), attend)
    monkeypatch.setenv("LLAMA_JAX_PLAIN", setting)
    found = run(BFLOAT16)
    assert found["ok"] == (setting == "all")
    if not found["ok"]:
        assert found["failure"].startswith("row 2, token 2, in prefill: a log-probability is off by ")
        assert found["remedy"] == "LLAMA_JAX_PLAIN=all computes it without kernels, more slowly"


def test_a_model_that_raises(monkeypatch):
    monkeypatch.setattr(model_checks.model, "init_weights", lambda *_: 1 / 0)
    found = run(INT8)
    assert not found["ok"] and found["failure"] == "ZeroDivisionError: division by zero"
    monkeypatch.setenv("LLAMA_JAX_PLAIN", "all")
    assert run(INT8)["remedy"].startswith("XLA computes it without a kernel")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, None),
        ((2, 208, 0.2), "row 2, token 209, in decode: a log-probability is off by 0.2"),
        ((0, 70, np.nan), "row 0, token 71, in prefill: a log-probability is off by nan"),
        ((1, 5, 9.0), None),  # a row that is not read
        ((2, 209, 9.0), None),  # behind the last token
    ],
)
def test_comparison(change, message):
    rng = np.random.default_rng(0)
    expected = np.log(rng.dirichlet(np.ones(9), (3, model_checks.SLOTS)))
    tokens = np.roll(expected.argmax(-1), 1, 1)  # each the most probable one
    logprobs = np.roll(expected.max(-1), 1, 1)
    if change:
        logprobs[change[:2]] += change[2]
    assert model_checks.compare(tokens, logprobs, expected) == (None if message else 0, message)
    # One that is less probable is wrong as a choice, not in a prompt.
    for at, phase in ((200, None), (201, "row 2, token 202, in decode: a CPU's choice is more probable by ")):
        worst = expected[2, at - 1].argmin()
        other, known = tokens.copy(), logprobs.copy()
        other[2, at], known[2, at] = worst, expected[2, at - 1, worst]
        found = model_checks.compare(other, known, expected)[1]
        assert message or (found is None if phase is None else found.startswith(phase))
