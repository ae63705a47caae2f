"""model.py as a page: what its head promises."""

import ast
import inspect
import pathlib
import re

import jax
import numpy as np
from conftest import mesh_of

import model

SOURCE = pathlib.Path(model.__file__).read_text()


def functions() -> dict[str, ast.FunctionDef]:
    """The functions and methods of model.py, by name."""
    found = {}
    for node in ast.parse(SOURCE).body:
        for function in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(function, ast.FunctionDef):
                owner = f"{node.name}." if function is not node else ""
                found[owner + function.name] = function
    return found


def test_the_lines_at_the_top():
    """They run as they stand, and on several devices give the same."""
    indented = re.findall(r"(?m)^    (?![A-Z]  )(.*)$", inspect.getdoc(model))
    lines = "\n".join(indented)
    assert lines.startswith("import jax\n")
    names: dict = {}
    exec(lines, names)
    cfg, logits, tokens = names["cfg"], names["logits"], np.array([[1, 2, 3]])
    assert logits.shape == (1, 3, 512) and names["last"].shape == (1, 512)
    text = np.array([[1, 2, 3, logits[0, -1].argmax()]])
    whole = model.forward(text, names["weights"], cfg=cfg, mesh=names["mesh"])
    np.testing.assert_allclose(names["last"], whole[:, -1], atol=1e-4)
    mesh = mesh_of(cfg, "tp8")
    weights = model.init_weights(jax.random.key(0), cfg, mesh)
    np.testing.assert_allclose(model.forward(tokens, weights, cfg=cfg, mesh=mesh), logits, atol=1e-4)


def test_from_the_top_down():
    """A layer comes early, after what calls it, and the declarations come last."""
    line = {name: function.lineno for name, function in functions().items()}
    order = "forward prefill decode_step decoder_layer SoftmaxAttention.__call__ MLP.__call__ MoE.__call__"
    order = [line[name] for name in f"{order} rotate layer_infos".split()]
    assert order == sorted(order) and line["decoder_layer"] < 200
    assert max(line.values()) == line["init_cache"]


def test_where_the_sums_are():
    """In the functions of attention, MLP, experts and the embedding, each over all axes of MODEL."""
    calls = {}
    for name, function in functions().items():
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("psum"):
                calls.setdefault(name, []).append(ast.unparse(node.args[1]))
    names = "SoftmaxAttention.__call__", "MLP.__call__", "MoE.__call__", "embed"
    assert calls == dict.fromkeys(names, ["MODEL"])
    for function in model.forward, model.prefill, model.decode_step:
        assert not {"residual", "device_ring"} & inspect.signature(function).parameters.keys()
