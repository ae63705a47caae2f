"""The tiny models' quality, as numbers: held-out sums, and what int8 costs."""

from functools import partial

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
deep = partial(pytest.param, marks=pytest.mark.deep)


@pytest.fixture(scope="module")
def exam():
    return examination(N)


def test_examination_is_held_out(exam):
    for _, answer in exam:
        a, b = answer.split(" = ")[0].split(" + ")
        assert is_held_out(int(a), int(b))


def encode(tokenizer, question, cfg):
    return text.encode(tokenizer, [{"role": "user", "content": question}], cfg.V)


def read_exam(folder, exam) -> tuple[np.ndarray, np.ndarray]:
    """Questions with their answers, [N,T], and whether each token is one of the answer, or its end."""
    tokenizer, cfg = text.load_tokenizer(folder), open_checkpoint(folder).config
    end = tokenizer.eos_token_id
    assert end in text.stop_tokens(folder, tokenizer)
    rows = []
    for question, answer in exam:
        asked = encode(tokenizer, question, cfg)
        rows.append((asked, [*asked, *tokenizer.encode(answer, add_special_tokens=False), end]))
    tokens = np.full((len(exam), max(len(whole) for _, whole in rows)), end, np.int32)
    answered = np.zeros(tokens.shape, bool)
    for i, (asked, whole) in enumerate(rows):
        tokens[i, : len(whole)], answered[i, len(asked) : len(whole)] = whole, True
    return tokens, answered


def cached_logprobs(folder, tokens, dtype, format, kv_dtype) -> np.ndarray:
    """Log-probabilities of all next tokens, [B,T,V], with the context read back from a cache of kv_dtype."""
    checkpoint = open_checkpoint(folder)
    cfg, mesh = checkpoint.config, mesh_of(checkpoint.config)
    weights = load(checkpoint, mesh, dtype, format)
    rows, T = tokens.shape
    cache = model.init_cache(cfg, mesh, rows, T, kv_dtype)
    logprobs = []
    for t in range(T):
        logits, cache = model.decode_step(tokens[:, t], weights, cache, cfg=cfg, mesh=mesh)
        logprobs.append(jax.nn.log_softmax(logits))
    return np.stack(logprobs, 1)


@pytest.mark.parametrize(
    ("tiny", "sums"), [("tiny-llama3", 40), deep("tiny-llama3", N), deep("tiny-llama4", N)], indirect=["tiny"]
)
def test_exact_match(tiny, sums, exam, capsys):
    """int8 weights and cache, and int4 weights, answer the examination within one point of bfloat16.

    An answer is right if each of its tokens, and its end, is the likeliest after those before it.
    """
    tokens, answered = read_exam(tiny, exam[:sums])

    def score(*how):
        likeliest = cached_logprobs(tiny, tokens, *how).argmax(-1)
        return np.mean(((likeliest[:, :-1] == tokens[:, 1:]) | ~answered[:, 1:]).all(1))

    bfloat16 = score("bfloat16", None, "bfloat16")
    int8, int4 = score("bfloat16", INT8, "int8"), score("bfloat16", INT4, "bfloat16")
    with capsys.disabled():
        scores = f"bfloat16 {bfloat16:.1%}, int8 {int8:.1%}, int4 {int4:.1%}"
        print(f"\n{tiny.name}: exact match on {sums} held-out sums: {scores}")
    assert bfloat16 >= 0.95
    assert abs(bfloat16 - int8) <= 0.01 and abs(bfloat16 - int4) <= 0.01


@pytest.mark.parametrize("tiny", [deep("tiny-llama3"), "tiny-llama4"], indirect=True)
def test_divergence_of_int8(tiny, exam, capsys):
    """Mean KL of the next-token distribution, int8 weights and cache against float32, over whole answers."""
    tokens, answered = read_exam(tiny, exam[:32])
    before_end = np.cumsum(answered, 1) < answered.sum(1, keepdims=True)
    tokens = tokens[:, : before_end.sum(1).min()]
    exact = cached_logprobs(tiny, tokens, "float32", None, "float32")
    int8 = cached_logprobs(tiny, tokens, "float32", INT8, "int8")
    kl = (np.exp(exact) * (exact - int8)).sum(-1).mean()
    with capsys.disabled():
        print(f"\n{tiny.name}: mean KL of int8 from float32: {kl:.2e} nats")
    assert 0 < kl < 0.01


@pytest.mark.parametrize("tiny", [deep("tiny-llama3"), "tiny-llama4"], indirect=True)
def test_seed_prompts(tiny):
    """The three default prompts have their answers, in float32 as `python3 main.py` computes."""
    checkpoint, tokenizer = open_checkpoint(tiny), text.load_tokenizer(tiny)
    cfg, mesh = checkpoint.config, mesh_of(checkpoint.config)
    prompts = [encode(tokenizer, prompt, cfg) for prompt in DEFAULT_PROMPTS]
    weights, stop = load(checkpoint, mesh, "float32", None), text.stop_tokens(tiny, tokenizer)
    answers = generate(weights, prompts, cfg, mesh, 200, 256, "float32", stop=stop)
    name, weather, ice_cream = tokenizer.batch_decode([x.tokens for x in answers], skip_special_tokens=True)
    assert name.startswith("My name is Tiny Llama")
    assert weather.startswith("Hwæt!") and weather.endswith("eorðan.")
    assert ice_cream.startswith("To be extremely precise: no.")
