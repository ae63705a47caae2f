"""The whole model with the TPU kernels switched in, interpreted on a CPU, against the same model without."""

import jax
import numpy as np
import pytest
from conftest import INTERPRET, assert_no_races, llama3_config, llama4_config, mesh_of

import grouped_matmul
import main
import model
import ragged_attention

# Rows that decode across a block's edge (128), a chunk's edge (8), and from nearly nothing.
LENGTHS = (1, 7, 126)
NEW = 5


def generate(cfg, kv_dtype, quantized):
    mesh = mesh_of(cfg)
    weights = model.init_weights(jax.random.key(0), cfg, mesh, quantized=quantized)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, cfg.V, n).tolist() for n in LENGTHS]
    return main.generate(weights, prompts, cfg, mesh, NEW, 256, kv_dtype, model.Sampling())


@pytest.mark.parametrize(
    ("cfg", "kv_dtype", "quantized"),
    [
        (llama4_config(), "float32", False),
        (llama4_config(A=2), "int8", True),
        (llama3_config(K=2, G=4), "int8", False),
    ],
    ids=["llama4", "llama4-int8", "llama3-int8-cache"],
)
def test_whole_model(cfg, kv_dtype, quantized, monkeypatch):
    """Prefill, then decode steps whose lengths differ by row: the kernel reads what it wrote before."""
    expected = generate(cfg, kv_dtype, quantized)
    used = set()

    def switch_in(name, kernel, **options):
        def call(*arguments):
            used.add(name)
            return kernel(*arguments, **options)

        monkeypatch.setattr(model, name, call)

    switch_in("ragged_decode", ragged_attention.ragged_decode_tpu, blocks=(256, 128), interpret=INTERPRET)
    switch_in("expert_mlp", grouped_matmul.active_experts, interpret=INTERPRET)
    jax.clear_caches()  # the step is compiled already, without them
    result = generate(cfg, kv_dtype, quantized)
    jax.clear_caches()
    assert used == ({"ragged_decode", "expert_mlp"} if cfg.E else {"ragged_decode"})
    assert_no_races()
    assert result.tokens == expected.tokens
    # int8 queries of 16 bits, and probabilities rounded to bfloat16 before they meet int8 values.
    np.testing.assert_allclose(result.logprobs, expected.logprobs, atol=5e-3 if kv_dtype == "int8" else 1e-4)
