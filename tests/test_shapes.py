"""The shapes in the docstrings of model.py and of families/ are checked: tests/conftest.py has it on."""

import re
import types

import jax.numpy as jnp
import pytest
from conftest import CHECKED_FUNCTIONS, llama3_config, mesh_of, random_weights

import model
from sharding.shapes import check_shapes, documented


def test_which_functions_are_checked():
    """All that compute activations, in model.py and in families/."""
    expected = {
        "embed", "normalize", "SoftmaxAttention.__call__", "attend", "Attention.project",
        "Attention.head_outputs", "GatedDeltaNet.__call__", "GatedDeltaNet.project", "MLP.__call__",
        "MoE.routed_experts", "Router.__call__", "local_logits", "rotate", "Norm.__call__", "merge_slots",
        "LatentAttention.project", "GeluMLP.__call__", "LayerNorm.__call__",
    }  # fmt: skip
    assert expected <= set(CHECKED_FUNCTIONS)
    assert check_shapes(model) == []  # not twice


def test_letters_of_a_docstring():
    def function(x, y, count):
        """x: [b,T,D], y: [...,2H] -> (o [b,T], lse [b]). The rest, [b,D], is not returned.

        count: [b] int32.
        """

    arguments = dict(x="b,T,D", y="...,2H", count="b")
    assert documented(function) == (arguments, ["b,T", "b"])
    assert documented(lambda x: x) is None


@pytest.mark.parametrize(
    "x, y, message",
    [
        ((2, 5, 3), (2, 6, 3), "y [2, 6, 3] is not [b,T,D]: axis 1 is 6, T is 5 (axis 1 of x)"),
        ((2, 5, 3), (4, 5, 3), "y [4, 5, 3] is not [b,T,D]: axis 0 is 4, b is 2 (axis 0 of x)"),
        ((2, 5), (2, 5, 3), "x [2, 5] is not [b,T,D]: it has 2 axes"),
    ],
)
def test_what_does_not_fit(x, y, message):
    """The error names the function, the array, the letter, both sizes and where the other one is from."""
    with pytest.raises(ValueError, match=re.escape("model.Residual.__call__: " + message)):
        model.Residual()(jnp.zeros(x), jnp.zeros(y), None, None)


def test_a_result_that_does_not_fit():
    def half(x):
        """x: [b,T,D] -> [b,T,D]."""
        return x[..., ::2]

    module = types.ModuleType(half.__module__)
    module.half = half
    assert check_shapes(module) == [half.__qualname__]
    with pytest.raises(ValueError, match=r"the result \[1, 2, 3\] is not \[b,T,D\]: axis 2 is 3, D is 6"):
        module.half(jnp.zeros((1, 2, 6)))


def test_weights_say_the_sizes():
    """A letter of an activation has the size that it has in the weights."""
    cfg = llama3_config()
    w = random_weights(cfg, mesh_of(cfg)).layers[0].feed_forward
    message = r"x \[1, 2, 31\] is not \[b,T,D\]: axis 2 is 31, D is 32 \(axis 1 of w.gate\)"
    with pytest.raises(ValueError, match=message):
        cfg.layers[0].feed_forward.partial_sum(jnp.zeros((1, 2, 31)), w)
