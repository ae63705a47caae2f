"""The whole model as it runs on a TPU, its kernels interpreted on a CPU, against the same model on a CPU."""

import conftest
import jax
import numpy as np
import pytest
from conftest import Kind, llama3_config, llama4_config, mesh_of
from jax.experimental import pallas
from jax.experimental.pallas import tpu as pltpu
from test_meshes import assert_same, prompts_for

import model
import ragged_attention
from ops import attention, grouped_matmul, tpu
from quantize import INT8
from serving import chunks
from serving.steps import DecodeStep

# A row that begins with a single token, one of several pieces that goes around its ring, and one that decodes
# past a block's edge. Pieces of 128 tokens are what splash attention takes.
LENGTHS = (1, 260, 127)
NEW = 4
KINDS = (
    Kind(chunk=200, moe=True),
    Kind(chunk=200),
    Kind(rope=False, moe=True),
)


def interpreted_as_on(platform: str, monkeypatch, how) -> set[str]:
    """Switch to a platform's paths: -> the set of kernels that have run since.

    how: whether, or by which options, the kernel of a name is interpreted.
    """
    used, pallas_call = set(), pallas.pallas_call

    def interpreted(*arguments, **options):
        used.add(options["name"])
        return pallas_call(*arguments, **options | {"interpret": how(options["name"])})

    monkeypatch.setattr(pallas, "pallas_call", interpreted)
    for module in (grouped_matmul, ragged_attention):
        monkeypatch.setattr(module, "platform", lambda: platform)
    jax.clear_caches()  # what is compiled already is for a CPU
    return used


@pytest.fixture
def as_on_a_tpu(monkeypatch, interpret):
    """Switches to the TPU's paths when called; returns the set of kernels that have run since."""

    def switch() -> set[str]:
        monkeypatch.setattr(pltpu, "with_memory_space_constraint", lambda x, _: x)
        monkeypatch.setattr(tpu, "on_tpu", lambda mesh=None: True)
        # The TPU interpreter does not take the library's kernel under vmap; the plain one does.
        return interpreted_as_on("tpu", monkeypatch, lambda name: name.startswith("splash") or interpret)

    yield switch
    jax.clear_caches()


class Known:
    """Drafts answers that are known. most: how many tokens of each row a step chose, at most."""

    n_draft, draft = NEW - 1, None

    def __init__(self, answers):
        self.tokens = np.array([answer.tokens[:-1] for answer in answers], np.int32)
        self.most = np.zeros(len(answers), int)

    def decode(self, count, sampling, rows, target):
        output = target.step(DecodeStep(count=count, drafts=self.tokens, sampling=sampling, rows=rows))
        self.most = np.maximum(self.most, output.count)
        return output


def generate(cfg, kv_dtype, format, speculation=None):
    mesh = mesh_of(cfg)
    weights = model.init_weights(jax.random.key(0), cfg, mesh, format=format)
    options = dict(score=True, speculation=speculation)
    return conftest.generate(weights, prompts_for(cfg, LENGTHS), cfg, mesh, NEW, 640, kv_dtype, **options)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("cfg", "kv_dtype", "format"),
    [
        (llama4_config(H=64, layers=KINDS), "float32", None),
        (llama3_config(K=2, G=4, H=64, tied_embeddings=True), "int8", INT8),
    ],
    ids=["llama4", "llama3-int8"],
)
def test_whole_model(cfg, kv_dtype, format, monkeypatch, as_on_a_tpu):
    """Prefill in pieces, then decode steps whose lengths differ by row; or one, that checks whole answers."""
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 32), (1, 128)))
    monkeypatch.setattr(attention, "BLOCK", 128)
    expected = generate(cfg, kv_dtype, format)
    used = as_on_a_tpu()
    result = generate(cfg, kv_dtype, format)
    kernels = {"take_slots", "put_slots", "splash_mqa_fwd_segmented_residuals", "ragged_decode"}
    kernels |= {"active_experts"} if cfg.moe else {"take_rows"}
    short_pieces = 32 * cfg.layers[0].attention.G <= ragged_attention.FEW_QUERIES
    kernels |= {"ragged_attention"} if short_pieces else set()
    assert used == kernels
    # int8 queries of 16 bits, and probabilities rounded to bfloat16 before they meet int8 values.
    atol = 5e-3 if kv_dtype == "int8" else 1e-4
    assert_same(result, expected, atol, NEW)
    used.clear()
    known = Known(expected)
    assert_same(generate(cfg, kv_dtype, format, known), expected, atol, NEW)
    assert known.most.tolist() == [NEW] * len(LENGTHS)
    assert "ragged_attention" in used and "ragged_decode" not in used
