"""Speculative decoding changes how many steps an answer takes, and nothing else."""

import functools
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, engine_of, llama3_config, llama4_config, mesh_of, rings, with_chunks
from test_generation import ROWS, ask, assert_same, deep, subject

import model
from feedback.errors import UserError
from ops import cpu
from serving import chunks, speculation
from serving.engine import Engine
from serving.programs import Programs
from serving.requests import Answer, Request
from serving.speculation import DraftModel, PromptLookup
from sharding.sampling import Sampling

N_DRAFT, MAX_LEN = 4, 96
END = frozenset(range(7))


@pytest.fixture(autouse=True)
def one_shape(monkeypatch):
    """Prefill chunks are compiled in one shape."""
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 32),))


@functools.cache
def requests_for(name: str, sampled: bool) -> list[Request]:
    """48 prompts: half of them repeat a phrase, the others begin like one another."""
    rng = np.random.default_rng(0)
    V, how = subject(name, "1")[1].V, Sampling()
    prompts = [
        np.resize(rng.integers(0, V, rng.integers(1, 9)), rng.integers(4, 40)).tolist() for _ in range(24)
    ]
    family = rng.integers(0, V, 40).tolist()
    prompts += [family[: rng.integers(1, 40)] + rng.integers(0, V, 3).tolist() for _ in range(24)]
    requests = []
    for i, prompt in enumerate(prompts):
        if sampled:
            how = Sampling(seed=i, temperature=0.8, top_p=0.9 if i % 2 else None)
        requests.append(Request(prompt, int(rng.integers(1, 33)), how, END))
    return requests


def answers_to(name: str, mesh: str, sampled: bool, speculation=None) -> tuple[Engine, list[Answer]]:
    requests = requests_for(name, sampled)
    batch = engine_of(Programs(*subject(name, mesh), ROWS, MAX_LEN, "float32", speculation), requests)
    return batch, ask(batch, requests)


@functools.cache
def plain(name: str, sampled: bool) -> list[Answer]:
    return answers_to(name, "1", sampled)[1]


def speculation_by(how: str, name: str, mesh: str) -> PromptLookup | DraftModel:
    """The model itself, or with other chunks; or with other weights, nearly its own; or with other heads."""
    if how.startswith("lookup"):
        return PromptLookup(int(how.split()[1]))
    weights, cfg, devices = subject(name, mesh)
    if how == "chunks":
        cfg = with_chunks(cfg, 6)
    if how == "nearly":
        others = model.init_weights(jax.random.key(1), cfg, devices)
        weights = jax.tree.map(lambda own, other: own + 0.03 * other, weights, others)
    if how == "heads":
        cfg = llama3_config(V=cfg.V, depth=1)
        devices = speculation.mesh_for_draft(cfg, devices)
        weights = model.init_weights(jax.random.key(1), cfg, devices)
    return DraftModel(Programs(weights, cfg, devices, ROWS, MAX_LEN, "float32"), N_DRAFT)


def searched(known: list[int], n_draft: int) -> list[int] | None:
    """What followed the last time that as many as possible, up to 3, of the last tokens stood there."""
    for n in (3, 2, 1):
        for end in range(len(known) - 1, n - 1, -1):
            if known[end - n : end] == known[len(known) - n :]:
                followed = known[end:]
                return [followed[i % len(followed)] for i in range(n_draft)]
    return None


def drafts_for(
    answers: list[Answer], how: str, speculate: PromptLookup | DraftModel
) -> list[Callable[[int], list[int]]]:
    """What is drafted to follow each place of each text. A model: if what came before was accepted."""
    texts = [answer.request.prompt + answer.tokens for answer in answers]
    if how == "itself":
        return [lambda end, text=text: text[end + 1 :][:N_DRAFT] for text in texts]
    if isinstance(speculate, PromptLookup):
        return [lambda end, text=text: searched(text[: end + 1], speculate.n_draft) or [] for text in texts]
    padded = np.array([text + [0] * (MAX_LEN - len(text)) for text in texts], np.int32)
    chosen = np.asarray(
        jnp.argmax(model.forward(padded, speculate.draft.weights, **speculate.draft.static), -1)
    )
    return [lambda end, row=row: row[end : end + speculate.n_draft].tolist() for row in chosen]


def steps_of(answer: Answer, drafted_after: Callable[[int], list[int]], chunks: set[int]) -> int:
    """How many steps an answer takes: a token each, and one more for each accepted draft token.

    None goes beyond the end of a chunk.
    """
    text, end, steps = answer.request.prompt + answer.tokens, len(answer.request.prompt) - 1, 0
    while end < len(text) - 1:
        right = [ours == theirs for ours, theirs in zip(drafted_after(end), text[end + 1 :], strict=False)]
        made = 1 + (right + [False]).index(False)
        end, steps = end + min([made] + [chunk - end % chunk for chunk in chunks]), steps + 1
    return steps


DRAFTS = [
    ("ring", "1", "lookup 4", False),
    ("ring", "1", "itself", False),
    ("ring", "1", "chunks", False),
    ("states", "1", "nearly", False),
    deep("states", "1", "itself", False),
    deep("states", "tp8", "lookup 4", False),
    deep("states", "1", "itself", True),
    deep("plain", "1", "lookup 1", False),
    deep("ring", "tp8", "heads", False),
    deep("ring", "1", "itself", True),
    deep("ring", "1", "chunks", True),
]


@pytest.mark.parametrize(("name", "mesh", "how", "sampled"), DRAFTS)
def test_the_same_answers(name, mesh, how, sampled, capsys):
    """Greedy, and drawn at 0.8, half with top-p, each with a seed of its own; and in few steps."""
    speculate = speculation_by(how, name, mesh)
    batch, answers = answers_to(name, mesh, sampled, speculate)
    assert_same(answers, plain(name, sampled))
    stats = batch.stats
    made = sum(len(answer.tokens) for answer in answers)
    assert stats.tokens == made
    with capsys.disabled():
        rate, steps = stats.acceptance_rate, stats.row_steps
        what = f"{name} on {mesh}, {'sampled' if sampled else 'greedy'}, drafts by {how}"
        print(f"\n{what}: {made / steps:.2f} tokens per step, {rate:.0%} accepted")
    assert 0 < stats.drafted <= steps * speculate.n_draft
    if how == "itself":
        assert stats.accepted == stats.drafted
    if how == "itself" or not sampled:
        drafts = drafts_for(answers, how, speculate)
        chunks = rings(batch.programs.masks)
        assert steps == sum(steps_of(*each, chunks) for each in zip(answers, drafts, strict=True))


@pytest.mark.parametrize("n_draft", [-1, 0, cpu.DECODE, 10**14])
def test_draft_tokens_that_no_step_checks(n_draft):
    for make in (PromptLookup, partial(DraftModel, None)):
        with pytest.raises(UserError, match=f"{n_draft} draft tokens per step are not between 1 and 15"):
            make(n_draft)
    assert PromptLookup(cpu.DECODE - 1).n_draft == 15


def test_a_draft_of_another_vocabulary():
    weights, cfg, mesh = subject("ring", "1")
    other = llama3_config(V=90)
    draft = DraftModel(Programs(None, other, mesh, ROWS, MAX_LEN, "float32"), N_DRAFT)
    with pytest.raises(ValueError, match=f"{other.V} tokens.*{cfg.V}"):
        Programs(weights, cfg, mesh, ROWS, MAX_LEN, "float32", draft)


@pytest.mark.parametrize("name", MESHES)
def test_the_mesh_of_a_draft(name):
    """The same devices in the same order, and as many data shards, though its heads are others."""
    mesh = mesh_of(llama4_config(), name)
    draft = speculation.mesh_for_draft(llama3_config(), mesh)
    assert draft.devices.ravel().tolist() == mesh.devices.ravel().tolist()
    assert draft.shape["data"] == mesh.shape["data"]


@pytest.mark.parametrize(("n_draft", "mesh"), [(1, "1"), (4, "1"), (4, "dp8")])
def test_prompt_lookup(n_draft, mesh):
    """Against a search in a list, in texts of few letters; what is beyond their ends has no meaning."""
    rng, rows = np.random.default_rng(n_draft), 512
    texts = np.stack([rng.integers(0, 1 + row % 7, 24) for row in range(rows)]).astype(np.int32)
    length = rng.integers(0, 24, rows).astype(np.int32)
    count = rng.integers(0, n_draft + 2, rows).astype(np.int32)
    devices = mesh_of(llama3_config(), mesh)
    drafts = speculation.prompt_lookup(count, texts, length, n_draft=n_draft, mesh=devices)
    found, kept = map(np.asarray, drafts)
    hits = 0
    for row in range(rows):
        expected = searched(texts[row, : length[row] + 1].tolist(), n_draft)
        assert kept[row] == (min(count[row], 1) if expected is None else count[row])
        if expected is not None:
            assert found[row].tolist() == expected
            hits += 1
    assert rows / 2 < hits < rows
