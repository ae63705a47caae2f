"""The tiny models' quality, as numbers: held-out sums, and what int8 costs."""

import jax
import numpy as np
import pytest
from conftest import generate, mesh_of
from questions import examination, is_held_out

import model
from checkpoints.checkpoint import open_checkpoint
from checkpoints.loading import load
from conversation import text
from quantize import INT4, INT8
from terminal.prompts import DEFAULT_PROMPTS

N = 200


@pytest.fixture(scope="module")
def exam():
    return examination(N)


def test_examination_is_held_out(exam):
    for _, answer in exam:
        a, b = answer.split(" = ")[0].split(" + ")
        assert is_held_out(int(a), int(b))


def encode(tokenizer, question, cfg):
    return text.encode(tokenizer, [{"role": "user", "content": question}], cfg.V)


def answers(folder, questions, dtype, format, kv_dtype, new=16, max_len=64):
    checkpoint = open_checkpoint(folder)
    cfg = checkpoint.config
    mesh = mesh_of(cfg)
    weights = load(checkpoint, mesh, dtype, format)
    tokenizer = text.load_tokenizer(folder)
    encoded = [encode(tokenizer, question, cfg) for question in questions]
    stop = text.stop_tokens(folder, tokenizer)
    answers = generate(weights, encoded, cfg, mesh, new, max_len, kv_dtype, stop=stop)
    return tokenizer.batch_decode([answer.tokens for answer in answers], skip_special_tokens=True)


@pytest.mark.parametrize(
    "tiny", ["tiny-llama3", pytest.param("tiny-llama4", marks=pytest.mark.deep)], indirect=True
)
def test_exact_match(tiny, exam, capsys):
    """int8 weights and cache, and int4 weights, answer the examination within one point of bfloat16."""
    questions, right = zip(*exam, strict=True)

    def score(*how):
        return np.mean(
            [ours == answer for ours, answer in zip(answers(tiny, questions, *how), right, strict=True)]
        )

    bfloat16 = score("bfloat16", None, "bfloat16")
    int8, int4 = score("bfloat16", INT8, "int8"), score("bfloat16", INT4, "bfloat16")
    with capsys.disabled():
        scores = f"bfloat16 {bfloat16:.1%}, int8 {int8:.1%}, int4 {int4:.1%}"
        print(f"\n{tiny.name}: exact match on {N} held-out sums: {scores}")
    assert bfloat16 >= 0.95
    assert abs(bfloat16 - int8) <= 0.01 and abs(bfloat16 - int4) <= 0.01


def cached_logprobs(cfg, mesh, weights, tokens, kv_dtype) -> np.ndarray:
    """Log-probabilities of all next tokens, [B,T,V], with the context read back from a cache of kv_dtype."""
    rows, T = tokens.shape
    cache = model.init_cache(cfg, mesh, rows, T, kv_dtype)
    logprobs = []
    for t in range(T):
        logits, cache = model.decode_step(tokens[:, t], weights, cache, cfg=cfg, mesh=mesh)
        logprobs.append(jax.nn.log_softmax(logits))
    return np.stack(logprobs, 1)


def test_divergence_of_int8(tiny, exam, capsys):
    """Mean KL of the next-token distribution, int8 weights and cache against float32, over whole answers."""
    checkpoint = open_checkpoint(tiny)
    cfg = checkpoint.config
    mesh = mesh_of(cfg)
    tokenizer = text.load_tokenizer(tiny)
    texts = [
        encode(tokenizer, question, cfg) + tokenizer.encode(answer, add_special_tokens=False)
        for question, answer in exam[:32]
    ]
    shortest = min(map(len, texts))
    tokens = np.array([whole[:shortest] for whole in texts], np.int32)
    exact, int8 = (
        cached_logprobs(cfg, mesh, load(checkpoint, mesh, "float32", format), tokens, kv_dtype)
        for format, kv_dtype in ((None, "float32"), (INT8, "int8"))
    )
    kl = (np.exp(exact) * (exact - int8)).sum(-1).mean()
    with capsys.disabled():
        print(f"\n{tiny.name}: mean KL of int8 from float32: {kl:.2e} nats")
    assert 0 < kl < 0.01


def test_seed_prompts(tiny):
    """The three default prompts have their answers, in float32 as `python3 main.py` computes."""
    name, weather, ice_cream = answers(tiny, DEFAULT_PROMPTS, "float32", None, "float32", 200, 256)
    assert name.startswith("My name is Tiny Llama")
    assert weather.startswith("Hwæt!") and weather.endswith("eorðan.")
    assert ice_cream.startswith("To be extremely precise: no.")
