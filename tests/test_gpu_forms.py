"""benchmarks/gpu_forms.py on a CPU: its forms, interpreted and small, agree; what it says and refuses."""

import json

import gpu_forms
import jax.numpy as jnp
import pytest
from conftest import invoke
from test_gpu import as_on_a_gpu  # noqa: F401  (a fixture)

SMALL = {"q, k and v": (256, (128, 64, 64)), "down": (384, (128,)), "gate and up": (256, (64, 64))}


@pytest.mark.deep
@pytest.mark.parametrize("part", ["products", "prefill", "experts"])
def test_forms_agree(part, monkeypatch, as_on_a_gpu):  # noqa: F811
    monkeypatch.setattr(gpu_forms, "LLAMA_8B", SMALL)
    monkeypatch.setattr(gpu_forms, "EXPERTS", {"few": (4, 2, 256, 64)})
    monkeypatch.setattr(gpu_forms, "CALLS", 1)
    as_on_a_gpu()
    cases = {
        "products": lambda: gpu_forms.products_of_few((1, 5)),
        "prefill": lambda: gpu_forms.products((300,), gpu_forms.OF_MANY_ROWS, counted=True),
        "experts": lambda: gpu_forms.experts((1, 3)),
    }[part]()
    for case in cases:
        found = gpu_forms.measure(case, 1, 1, 1e9, 1e9)
        assert all(x["ok"] and x["seconds"] > 0 for x in found["forms"].values()), found
        assert gpu_forms.line(found).startswith(case.name)


@pytest.mark.deep
def test_attention_agrees(monkeypatch, as_on_a_gpu):  # noqa: F811
    """cuDNN is not here: it is told, and not wrong."""
    monkeypatch.setattr(gpu_forms, "CALLS", 1)
    as_on_a_gpu()
    short = [case for case in gpu_forms.attention() if "1 rows, 1 queries to 1024" in case.name]
    for case, names in zip(short, (5, 4), strict=True):
        found = gpu_forms.measure(case, 1, 1, 1e9, 1e9)
        assert len(found["forms"]) == names and all(x["ok"] for x in found["forms"].values()), found
        assert ("cuDNN" in gpu_forms.line(found)) == (names == 5)


def test_a_wrong_form_is_told():
    """Beside one that fails; the fastest form is one that is right."""

    def fails(x):
        raise ValueError("no such kernel")

    forms = {"used": lambda x: x, "wrong": lambda x: x + 1, "absent": fails}
    case = gpu_forms.Case("work", forms, lambda key: (jnp.ones(3),), 12)
    found = gpu_forms.measure(case, 1, 1, 1.0, 1.0)
    assert [x["ok"] for x in found["forms"].values()] == [True, False, True]
    line = gpu_forms.line(found)
    assert (
        line.startswith("work: used ") and "; WRONG wrong " in line and line.endswith("no such kernel: used")
    )
    case = gpu_forms.Case("work", {"used": fails, "other": lambda x: x}, lambda key: (jnp.ones(3),), 12)
    found = gpu_forms.measure(case, 1, 1, 1.0, 1.0)
    assert [x["ok"] for x in found["forms"].values()] == [False, True]


def test_there_must_be_a_gpu(monkeypatch, capsys, tmp_path):
    file = tmp_path / "forms.json"
    code, out, err = invoke(monkeypatch, capsys, gpu_forms, "--only", "products", "--json", str(file))
    assert (code, out, err) == (1, "", "error: the platform is cpu: these are forms for GPUs\n")


def test_all_is_kept(monkeypatch, capsys, tmp_path):
    """Each line is in the file as soon as it is known."""
    one = gpu_forms.Case("work", {"used": lambda x: x, "other": lambda x: 2 * x / 2}, lambda key: (key,), 8)
    one = gpu_forms.dataclasses.replace(one, make=lambda key: (jnp.ones(3),))
    monkeypatch.setattr(gpu_forms, "PARTS", {"products": lambda: [one]})
    monkeypatch.setattr(gpu_forms.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu_forms.speed, "measure_bandwidth", lambda: 3e12)
    monkeypatch.setattr(gpu_forms.speed, "measure_flops", lambda dtype: 7e14)
    file = tmp_path / "forms.json"
    code, out, err = invoke(monkeypatch, capsys, gpu_forms, "--json", str(file), "--repeat", "1")
    assert code == 0 and "a copy 3.00 TB/s, products 700 TFLOP/s" in out and out.count("\n") == 2, (out, err)
    (case,) = json.loads(file.read_text())["cases"]
    assert case["name"] == "work" and list(case["forms"]) == ["used", "other"]
