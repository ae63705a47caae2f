"""benchmarks/first_hour.py and kernel_checks.py: what is right passes, and what is wrong is named."""

import dataclasses
import functools
import json

import first_hour
import jax
import jax.numpy as jnp
import kernel_checks
import numpy as np
import pytest
from conftest import invoke
from test_gpu import as_on_a_gpu  # noqa: F401  fixtures
from test_kernels import as_on_a_tpu  # noqa: F401

import ragged_attention
from deployment import deploy
from ops import attention, cpu, gpu_attention, gpu_products, matmul
from ops.platform import choose, plain_kinds


@pytest.fixture
def in_float32(monkeypatch):
    """Only attention in decode with a cache of float32 is checked; nothing else is run or measured."""
    checks = kernel_checks.checks

    def one(platform: str) -> list:
        decode = [check for check in checks(platform) if check.job == "attention in decode"]
        return [check for check in decode if check.option.endswith("float32")]

    monkeypatch.setattr(kernel_checks, "checks", one)
    monkeypatch.setattr(first_hour, "check_models", lambda most: [])
    monkeypatch.setattr(first_hour, "check_answers", list)
    monkeypatch.setattr(first_hour, "measure_steps", lambda measurement: [])
    monkeypatch.setattr(first_hour, "measure_rates", lambda dtypes, chip: (1.0, {}))


@pytest.fixture
def one_slot_less(monkeypatch):
    """A kernel that does not see the last slot."""
    kernel = cpu.attend_cached

    @functools.wraps(kernel)
    def wrong(q, kv, length, *rest):
        return kernel(q, kv, jnp.maximum(length - 1, 1), *rest)

    monkeypatch.setitem(ragged_attention.KERNELS, ("cpu", attention.attend_cached), wrong)


def run(monkeypatch, capsys, folder, *options) -> tuple[int, str, dict]:
    """(exit code, stdout, what the JSON file has) of a quick run."""
    file = folder / "found.json"
    code, out, err = invoke(monkeypatch, capsys, first_hour, "--quick", "--json", file, *options)
    assert "Traceback" not in err
    return code, out, json.loads(file.read_text())


def test_a_run(monkeypatch, capsys, tmp_path):
    """Of the kernels, the small models and the formats one: what is reported is right, and in the file."""
    checks = [next(kernel_checks.checks("cpu"))]
    monkeypatch.setattr(kernel_checks, "checks", lambda platform: checks)
    monkeypatch.setattr(first_hour, "FORMAT_NAMES", ("none",))
    monkeypatch.setattr(first_hour, "TINY", first_hour.TINY[:1])
    code, out, found = run(monkeypatch, capsys, tmp_path, "--profile", tmp_path / "traces")
    assert code == 0 and found["ok"] and "WRONG" not in out
    assert found["summary"] in out and found["machine"]["device"] in out
    (kernel,) = found["kernels"]
    assert kernel["name"] in out and 0 < kernel["share"] <= 1
    (small,) = found["models"]
    assert small["name"] == "a model with heads of 128, --quantize int8 --kv-cache-dtype int8"
    assert f"ok     {small['name']}: error " in out and 0 < small["share"] <= 1
    assert "; 1 of 1 models with random weights agree with a CPU; " in found["summary"]
    assert [x["prompt"] for x in found["answers"]] == list(first_hour.PROMPTS)
    assert all(x["ok"] and x["tokens"] > 0 for x in found["answers"])
    assert [(x["phase"], x["batch"]) for x in found["steps"]] == [
        ("decode", 1),
        ("decode", 2),
        ("prefill", 1),
    ]
    assert all(x["planned"] > 0 and x["seconds"] > 0 and x["components"] for x in found["steps"])
    assert found["bandwidth"] > 0 and found["machine"]["versions"]["jax"] == jax.__version__
    assert len(list((tmp_path / "traces").rglob("perfetto_trace.json.gz"))) == 3


@pytest.mark.usefixtures("in_float32", "one_slot_less")
def test_a_wrong_kernel_and_what_avoids_it(monkeypatch, capsys, tmp_path):
    code, out, found = run(monkeypatch, capsys, tmp_path)
    (line,) = [line for line in out.splitlines() if line.startswith("WRONG  ")]
    assert line.startswith(
        "WRONG  attention in decode, --kv-cache-dtype float32, by cpu.attend_cached: error "
    )
    assert line.endswith("LLAMA_JAX_PLAIN=attention computes it without this kernel, more slowly")
    assert code == 1 and not found["ok"] and found["summary"].startswith("WRONG: 1 of 1 kernels")

    monkeypatch.setenv("LLAMA_JAX_PLAIN", "attention")
    code, out, found = run(monkeypatch, capsys, tmp_path)
    assert code == 0 and found["ok"] and "by attention.attend_cached: error" in out
    assert found["machine"]["versions"]["LLAMA_JAX_PLAIN"] == "attention"


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (lambda q, kv, *_: 1 / 0, "ZeroDivisionError: division by zero; LLAMA"),
        (
            lambda q, kv, *_: attention.attend_cached(q * jnp.nan, kv, *_),
            "NaN or Inf where numpy has none, or the reverse;",
        ),
    ],
    ids=["raises", "nan"],
)
def test_a_kernel_without_a_result(kernel, message, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(ragged_attention.KERNELS, ("cpu", attention.attend_cached), kernel)
    code, out, found = run(monkeypatch, capsys, tmp_path)
    (line,) = [line for line in out.splitlines() if line.startswith("WRONG  ")]
    assert message in line and code == 1
    assert found["kernels"][0]["share"] is None


def test_a_wrong_answer(monkeypatch, capsys):
    """What the engine computes otherwise than the forward pass of a CPU."""
    monkeypatch.setattr(first_hour, "TINY", first_hour.TINY[:1])
    forward = first_hour.model.forward
    monkeypatch.setattr(first_hour.model, "forward", lambda *a, **b: -forward(*a, **b))
    found = first_hour.check_answers()
    out = capsys.readouterr().out
    assert not any(x["ok"] for x in found) and out.count("WRONG  tiny-llama3, ") == len(found)
    assert out.count(": token 1 is ") == len(found)


@pytest.mark.parametrize("folder", [None, "traces"])
def test_a_profile_is_made_if_it_is_kept(folder, monkeypatch, tmp_path):
    """It takes a GPU a second program."""

    class Made(Exception):
        pass

    def make(*arguments):
        raise Made(arguments[-1])

    monkeypatch.setattr(first_hour.speed, "Bench", make)
    monkeypatch.setattr(first_hour.model, "init_weights", lambda *_: ())
    cfg, topology = first_hour.read_model(str(first_hour.TINY[0])), first_hour.topology_of(jax.devices(), 1)
    rates, trace = (1.0, dict(float32=1.0)), folder and tmp_path / folder
    measurement = first_hour.Measurement("tiny", cfg, first_hour.QUICK, topology, rates, trace)
    with pytest.raises(Made) as made:
        next(measurement.of_format("none"))
    assert made.value.args == (folder is not None,)


def test_a_step_that_fails(capsys):
    """One that fails is told; one that does not fit is left out."""

    class Failing:
        name = "a model"

        def of_format(self, name: str):
            raise {"none": KeyError("no kernel"), "int8": RuntimeError("RESOURCE_EXHAUSTED")}[name]
            yield

    assert [x["ok"] for x in first_hour.measure_steps(Failing())] == [False]
    first, second = capsys.readouterr().out.splitlines()
    assert first == "WRONG  a step of a model, --quantize none: KeyError: 'no kernel'"
    assert second == "left out: --quantize int8: out of device memory"


@pytest.mark.parametrize(
    ("gib", "name"), [(76, "llama3.1-8b"), (15.75, "llama3.2-3b"), (8, "llama3.2-1b"), (1, "smollm2-135m")]
)
def test_the_model_that_fits(gib, name, monkeypatch):
    """Weights of 16.1, 6.4, 2.5 and 0.3 GB in bfloat16, a cache, and programs; on one device."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(first_hour.launch, "device_count", lambda: 1)
    for module in (first_hour.memory, deploy):
        monkeypatch.setattr(module, "device_memory", lambda: int(gib * 2**30))
    assert first_hour.choose_model(first_hour.ON_ACCELERATOR) == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "llama9"], "--model llama9: no such model or config.json"),
        (["--json", "no/such/folder.json"], "no/such/folder.json"),
        (["--quick", "--model", "none"], "--model none"),
    ],
)
def test_refusals(options, message, monkeypatch, capsys):
    code, out, err = invoke(monkeypatch, capsys, first_hour, *options)
    assert code != 0 and message in err and len(err.splitlines()) == 1 and out == ""


# ------------------------------------------------------------------------------------------- without kernels


def test_kinds_of_kernels(monkeypatch):
    table = {("tpu", "int8"): "kernel"}
    for setting, kinds in {
        "": set(),
        "matmul": {"matmul"},
        "matmul,experts": {"matmul", "experts"},
        "all": {"attention", "matmul", "experts"},
    }.items():
        monkeypatch.setenv("LLAMA_JAX_PLAIN", setting)
        assert plain_kinds() == kinds
        expected = "plain" if "matmul" in kinds else "kernel"
        assert choose("matmul", table, ("tpu", "int8"), "plain") == expected
        assert choose("matmul", table, ("gpu", "int8"), "plain") == "plain"


def test_a_kind_that_there_is_not(monkeypatch):
    monkeypatch.setenv("LLAMA_JAX_PLAIN", "attention,matmuls")
    monkeypatch.setattr(first_hour.launch, "join", lambda *_: None)
    monkeypatch.setattr(first_hour.launch, "watch_aborts", lambda: None)
    with pytest.raises(
        first_hour.UserError, match="say attention, matmul, experts, several with commas, or all$"
    ):
        first_hour.launch.join_hosts(first_hour.parse_arguments([]))


# --------------------------------------------------------------------------------------- what kernels compute


def difference(*arguments) -> tuple[float, float]:
    return kernel_checks.difference(*map(np.float64, arguments))


def test_differences():
    assert difference([1, 2], [1, 2.5], [0.1, 1]) == (0.5, 0.5)
    assert difference([1, np.nan], [1, 2], [1, np.inf]) == (0, 0)  # anything will do
    assert difference([-np.inf], [-np.inf], [1]) == (0, 0)
    for wrong in (np.nan, np.inf, -np.inf):
        assert difference([1, wrong], [1, 2], [1, 1]) == (np.inf, np.inf)
    assert difference([1, 2], [1, -np.inf], [1, 1]) == (np.inf, np.inf)


def one_case(platform: str, job: str, option: str, number: int) -> kernel_checks.Check:
    """A check of a platform, with one of its cases."""
    checks = kernel_checks.checks(platform)
    (check,) = (check for check in checks if check.job == job and check.option.endswith(option))
    return dataclasses.replace(check, cases=[check.cases[number]])


def without_gap(q, kv, length, gap, row):
    return q, kv, length, None, row


def a_slot_too_few(q, kv, length, gap, row):
    return q, kv, length, (gap[0], gap[1] + 1), row


def in_order(q, kv, length, gap, row):
    return q, kv, length, gap, jnp.sort(row)


def the_same_for_all(q, kv, length, gap, row):
    return q, kv, jnp.broadcast_to(jnp.max(length, 1, keepdims=True), length.shape), gap, row


@pytest.mark.parametrize("job", ["attention in decode", "attention in prefill to the cache"])
@pytest.mark.parametrize("fault", [None, without_gap, a_slot_too_few, in_order])
def test_rows_and_gaps(fault, job, monkeypatch):
    """Attention to some rows of a ring: a fault in what a kernel sees is found."""
    kernel = cpu.attend_cached
    if fault:
        wrong = functools.wraps(kernel)(lambda *arguments: kernel(*fault(*arguments)))
        monkeypatch.setitem(ragged_attention.KERNELS, ("cpu", attention.attend_cached), wrong)
    found = kernel_checks.run_check(one_case("cpu", job, "bfloat16", -1), 1)
    assert found["ok"] == (fault is None) and ", by cpu.attend_cached" in found["name"]


@pytest.mark.parametrize("fault", [None, the_same_for_all, in_order])
def test_queries_that_see_different_slots(fault, monkeypatch, as_on_a_gpu):  # noqa: F811
    """A GPU's chunk attends to a cache that has the chunk, each token up to itself."""
    used, kernel = as_on_a_gpu(), gpu_attention.attend_cached
    check = one_case("gpu", "attention in prefill to the cache", "int8", 2)
    if fault:
        wrong = functools.wraps(kernel)(lambda *arguments: kernel(*fault(*arguments)))
        monkeypatch.setitem(ragged_attention.KERNELS, ("gpu", attention.attend_cached), wrong)
    found = kernel_checks.run_check(check, 1)
    assert found["ok"] == (fault is None) and used == {"flash", "merge_parts"}


@pytest.mark.parametrize("wrong", [False, True])
def test_several_matrices(wrong, monkeypatch, as_on_a_gpu):  # noqa: F811
    """Of three products of one kernel, that the last is right is seen; and what does without the kernel."""
    used, multiply = as_on_a_gpu(), gpu_products.joined_dot

    def swapped(*arguments):
        *others, last = multiply(*arguments)
        return [*others, last[..., ::-1]]

    if wrong:
        monkeypatch.setattr(gpu_products, "joined_dot", swapped)
    found = kernel_checks.run_check(one_case("gpu", "matrix product", "int8", -1), 1)
    assert found["ok"] == (not wrong) and found["name"].endswith("by joined_dot") and used == {"joined_dot"}
    assert not wrong or found["remedy"].startswith("LLAMA_JAX_PLAIN=matmul ")


KERNELS = {  # of Pallas
    "cpu": set(),
    "gpu": {"flash", "merge_parts", "grouped_dot", "integer_rows", "joined_dot"},
    "tpu": {
        "ragged_decode", "ragged_attention", "splash_mqa_fwd_segmented_residuals", "take_slots", "put_slots",
        "active_experts", "take_rows",
    },
}  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_all_kernels(platform, monkeypatch, request):
    """Each kernel of a platform, interpreted, then each plain function in its place, is within its error."""
    used = set()
    if platform != "cpu":
        used = request.getfixturevalue(f"as_on_a_{platform}")()
        monkeypatch.setattr(matmul, "platform", lambda: platform)
    for setting, kernels in (("", KERNELS[platform]), ("all", set())):
        monkeypatch.setenv("LLAMA_JAX_PLAIN", setting)
        jax.clear_caches()
        used.clear()
        checks = list(kernel_checks.checks(platform))
        found = [kernel_checks.run_check(check, 1) for check in checks]
        assert [first_hour.kernel_line(x) for x in found if not x["ok"]] == []
        assert used == kernels and all(any(kernel in x["name"] for x in found) for kernel in kernels)
        assert all(check.by in kernel_checks.PLAIN for check in checks) == (setting == "all")
