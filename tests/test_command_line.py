"""main.py and convert_checkpoint.py as a user meets them: wrong inputs, defaults, and JSON."""

import collections
import dataclasses
import gzip
import itertools
import json
import logging
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CHECKPOINTS, FAST, ONE_EACH, invoke, llama4_config
from processes import serving as serving_process
from safetensors.numpy import load_file, save_file

import convert_checkpoint
import main
import model
from checkpoints.checkpoint import open_checkpoint
from conversation.text import load_tokenizer, stop_tokens
from deployment import deploy, memory, step_bytes
from feedback.errors import UserError
from generation.llm import load
from planner.published_models import read_model
from serving import chunks
from serving.requests import SAMPLING_OPTIONS, choose_sampling
from sharding.arrays import abstract
from sharding.mesh import make_mesh
from sharding.sampling import Sampling
from terminal import diagnostics, launch, prompts, summary
from terminal.command_line import run
from terminal.options import parse_arguments
from terminal.prompts import DEFAULT_PROMPTS, make_builder

LLAMA3, LLAMA4 = str(CHECKPOINTS / "tiny-llama3"), str(CHECKPOINTS / "tiny-llama4")


@pytest.fixture
def small(monkeypatch) -> None:
    """main.py has one device, short answers, chunks of one shape, and a small cache unless asked for another.

    So runs share what is compiled, and their steps are short.
    """
    fit_cache = main.fit_cache
    monkeypatch.setattr(main, "device_count", lambda: 1)
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 64),))
    monkeypatch.setattr(prompts, "NEW_TOKENS", 40)

    def fit_small(models, lengths, rows, most):
        return fit_cache(models, lengths, rows or 4, most or 128)

    monkeypatch.setattr(main, "fit_cache", fit_small)


WRONG = {
    "no such folder": (["--checkpoint", "/nowhere/at-all"], "/nowhere/at-all: no such folder"),
    "a folder of something else": (["--checkpoint", str(CHECKPOINTS)], "no config.json"),
    "unknown to the hub": (["--checkpoint", "nobody/nothing"], "nobody/nothing"),
    "too few devices": (["--tp", "16"], "--tp 16"),
    "too few devices used": (["--tp", "2", "--dp", "2"], "--dp 2 --tp 2 on 8 devices"),
    "no experts": (["--ep", "2"], "is for models with experts"),
    "experts not divided": (["--checkpoint", LLAMA4, "--ep", "8"], "4 experts"),
    "too long for --max-len": (
        [*ONE_EACH, "--max-len", "20", "--max-new-tokens", "15"],
        "prompt 1: 15 tokens, which with 15 new ones exceed --max-len of 20 (and 2 more)",
    ),
    "too long for the model": ([*ONE_EACH, "--max-new-tokens", "2000"], "the model's limit of 512"),
    "--max-len beyond the model": ([*ONE_EACH, "--max-len", "1000"], "the model's limit is 512"),
    "long prompt": ([*ONE_EACH, "--prompt", "a b" * 600], "tokens, which with 1 new ones exceed the model"),
    "long text to score": ([*ONE_EACH, "--score", "--prompt", "a b" * 600], "tokens, which exceed the model"),
    "empty prompt": (["--prompt", "a", "--prompt", " "], "--prompt ' ': an empty prompt"),
    "top-p of 0": (["--top-p", "0"], "top-p 0.0"),
    "penalty of 0": (["--repetition-penalty", "0"], "repetition-penalty 0.0"),
    "seed too large": (["--seed", str(2**32)], f"seed {2**32} is not between"),
    "no such token": (["--stop-id", "512"], "--stop-id 512: the model has tokens 0 to 511"),
    "no draft": ([*ONE_EACH, "--draft", "/nowhere/at-all"], "/nowhere/at-all: no such folder"),
    "endless guesses": (["--lookup", "--guesses", "1" + "0" * 4000], f"1{'0' * 39} draft tokens per step"),
    "another tokenizer": ([*ONE_EACH, "--draft", LLAMA4], "its tokenizer is not that of"),
    "no such output folder": ([*ONE_EACH, "--output", "/nowhere/at-all"], "/nowhere/at-all"),
    "no file for output": ([*ONE_EACH, "--output", "/dev/null"], "/dev/null: not a regular file"),
    "no place for a profile": ([*ONE_EACH, "--profile", "/proc/nowhere"], "--profile /proc/nowhere: No such"),
    "a file for a profile": ([*ONE_EACH, "--profile", __file__], f"--profile {__file__}: File exists"),
    "no prompt file": (["--prompt-file", "/nowhere"], "/nowhere"),
    "no chat template": (["--chat-template", "/nowhere"], "--chat-template /nowhere: No such file"),
    "no Jinja": (["--chat-template", __file__], f"--chat-template {__file__}: not a Jinja template: line "),
    "an empty template": (["--chat-template", "/dev/null"], "--chat-template /dev/null: the file is empty"),
}
WRONG_USAGE = {
    "unknown option": ["--silent"],
    "abbreviated option": ["--check", LLAMA3],
    "text for a number": ["--top-k", "many"],
    "no tokens": ["--max-new-tokens", "0"],
    "negative degree": ["--tp", "-1"],
    "a negative budget": ["--serve", "--prefill-budget", "-1"],
    "unknown type": ["--dtype", "float64"],
    "no rows": ["--rows", "0"],
    "endless rows": ["--rows", "1" + "0" * 4000],
    "endless samples": ["--n", str(2**31)],
    "chat with prompts": ["--chat", "--prompt", "Hello"],
    "two kinds of guesses": ["--lookup", "--draft", LLAMA3],
    "a score with stops": ["--score", "--stop", "x"],
    "an empty stop": ["--stop", ""],
    "system without a template": ["--no-chat-template", "--system", "x"],
    "a template and none": ["--no-chat-template", "--chat-template", "x"],
    "file and object": ["--output", "x", "--json"],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_input(wrong, monkeypatch, capsys):
    arguments, message = WRONG[wrong]
    code, out, err = invoke(monkeypatch, capsys, main, *arguments)
    assert code == 1 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


@pytest.mark.parametrize("wrong", WRONG_USAGE)
def test_wrong_usage(wrong, monkeypatch, capsys):
    code, out, err = invoke(monkeypatch, capsys, main, *WRONG_USAGE[wrong])
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1


SUGGESTIONS = {
    "a mistyped option": (main, ["--promt", "x"], "; did you mean --prompt?"),
    "the beginning of an option": (main, ["--temp=1"], "; did you mean --temperature?"),
    "a mistyped folder": (
        main,
        ["--checkpoint", LLAMA3.replace("llama", "lama")],
        "did you mean tiny-llama3?",
    ),
    "a mistyped option of another command": (
        convert_checkpoint,
        ["a", "b", "--quantise", "int8"],
        "--quantize?",
    ),
    "nothing like it": (main, ["--xyzzy"], "unknown argument --xyzzy (see "),
}


@pytest.mark.parametrize("mistyped", SUGGESTIONS)
def test_suggestions(mistyped, monkeypatch, capsys):
    """A mistyped name gets the known one that resembles it."""
    command, arguments, suggestion = SUGGESTIONS[mistyped]
    code, out, err = invoke(monkeypatch, capsys, command, *arguments)
    assert code and out == "" and err.count("\n") == 1 and suggestion in err, err


def test_help_has_examples_that_can_be_parsed(monkeypatch, capsys):
    _, out, _ = invoke(monkeypatch, capsys, main, "--help")
    examples = re.findall(r"^  python3 main.py(.*)$", out, re.MULTILINE)
    assert len(examples) >= 5
    for example in examples:
        parse_arguments(shlex.split(example))


def test_faults_of_ours_keep_their_traceback(capsys):
    """What a user can mend is one line; an error of numpy's, for one, is not that."""
    for error in (UserError("no such\nfolder"), FileNotFoundError(2, "No such file", "x")):

        def fail(error=error):
            raise error

        with pytest.raises(SystemExit) as stop:
            run(fail)
        assert stop.value.code == 1
    refused = "x: no such file; check the path, and who may read and write there"
    assert capsys.readouterr().err == f"error: no such folder\nerror: {refused}\n"
    with pytest.raises(ValueError, match="broadcast"):
        run(lambda: np.zeros(2) + np.zeros(3))


def test_wrong_prompt_files(tmp_path, monkeypatch, capsys):
    file = tmp_path / "prompts"
    for content, message in (
        (b"", "no prompt in it"),
        (b"\xff\xfe\n", "not a UTF-8 text"),
        (b"a\n\nb\n", "line 2: an empty prompt"),
    ):
        file.write_bytes(content)
        code, _, err = invoke(monkeypatch, capsys, main, "--prompt-file", file)
        assert code == 1 and message in err and err.count("\n") == 1


def test_wrong_input_of_the_converter(tmp_path, monkeypatch, capsys):
    assert invoke(monkeypatch, capsys, convert_checkpoint, LLAMA3)[0] == 2
    code, _, err = invoke(monkeypatch, capsys, convert_checkpoint, "/nowhere", tmp_path / "x")
    assert code == 1 and "no such folder" in err and err.count("\n") == 1


def test_int8_checkpoint_cannot_become_float(tmp_path, monkeypatch, capsys):
    int8 = tmp_path / "int8"
    assert invoke(monkeypatch, capsys, convert_checkpoint, LLAMA3, int8, "--quantize", "int8")[0] == 0
    arguments = ["--checkpoint", int8, "--quantize", "none", *ONE_EACH]
    code, _, err = invoke(monkeypatch, capsys, main, *arguments)
    assert code == 1 and "--quantize none" in err


def test_what_does_not_fit_is_refused_before_loading(monkeypatch, capsys):
    """One line with the bytes of weights and cache, and only what would help."""
    monkeypatch.setattr(memory, "device_memory", lambda: 500_000)
    monkeypatch.setattr(deploy, "load", lambda *_: pytest.fail("loaded"))
    for arguments, cache, remedies in (
        ([], "of 8 x 384 positions", "--quantize int8, more devices"),
        (
            [*["--prompt", "a"] * 80, "--rows", "80"],
            "of 80 x ",
            "--kv-cache-dtype int8, fewer --rows, a smaller --max-len, more",
        ),
        (["--quantize", "int8", "--kv-cache-dtype", "int8"], "of 8 x ", "more devices"),
    ):
        code, out, err = invoke(monkeypatch, capsys, main, *ONE_EACH, *arguments)
        assert code == 1 and out == "" and err.startswith("error: does not fit: ") and err.count("\n") == 1
        assert cache in err and f"try {remedies}" in err, err
    monkeypatch.setattr(memory, "platform", lambda mesh: "gpu")  # where 4 bits are less than 8
    for arguments, remedies in (
        ([], "--quantize int8, --quantize int4"),
        (["--quantize", "int8"], "--quantize int4"),
    ):
        arguments = [*arguments, "--kv-cache-dtype", "int8"]
        _, _, err = invoke(monkeypatch, capsys, main, *ONE_EACH, *arguments)
        assert f"try {remedies}, more devices" in err, err


def test_json(small, tmp_path, monkeypatch, capsys):
    """The documented object, from prompts on the command line and in a file."""
    monkeypatch.setattr(main, "device_count", jax.device_count)
    (tmp_path / "prompts").write_text("How much is 12 plus 34?\n")
    arguments = ["--json", "--logprobs", "--prompt", "Who are you?", "--prompt-file", tmp_path / "prompts"]
    arguments += ["--checkpoint", LLAMA4, *"--dp 2 --ep 2 --tp 2 --kv-cache-dtype int8 --rows 2".split()]
    code, out, err = invoke(monkeypatch, capsys, main, *arguments)
    assert code == 0, err
    result = json.loads(out)
    assert result["mesh"] == {"data": 2, "expert": 2, "tensor": 2} and result["devices"] == 8
    assert result["engine_seconds"] > result["prefill_seconds"] > 0 and result["decode_tokens_per_second"] > 0
    assert result["bandwidth_utilization"] is None  # a CPU's bandwidth is not known
    assert [r["prompt"] for r in result["responses"]] == ["Who are you?", "How much is 12 plus 34?"]
    for r in result["responses"]:
        assert r["finish_reason"] == "stop"
        assert len(r["prompt_logprobs"]) == len(r["prompt_tokens"]) and r["prompt_logprobs"][0] is None
        assert len(r["logprobs"]) == len(r["tokens"]) and max(r["logprobs"]) <= 0
    assert result["responses"][1]["text"] == "12 + 34 = 46."


def test_sampling_defaults_come_from_the_checkpoint(tmp_path):

    def chosen(*arguments: str) -> Sampling:
        args = vars(parse_arguments(list(arguments)))
        return choose_sampling({name: args[name] for name in SAMPLING_OPTIONS}, tmp_path)

    assert chosen() == Sampling(seed=0)
    config = dict(do_sample=True, temperature=0.6, top_p=0.9, repetition_penalty=1.1, eos_token_id=[1, 2])
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"eos_token_id": 3, "text_config": {"eos_token_id": 4}}')
    theirs = Sampling(seed=0, temperature=0.6, top_p=0.9, repetition_penalty=1.1)
    assert chosen() == theirs
    assert chosen("--temperature", "0", "--top-k", "7") == dataclasses.replace(theirs, temperature=0, top_k=7)
    assert stop_tokens(tmp_path, None) == {1, 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(config | dict(do_sample=False)))
    assert chosen() == Sampling(seed=0, repetition_penalty=1.1)
    (tmp_path / "generation_config.json").unlink()
    assert stop_tokens(tmp_path, None) == {3}
    assert chosen("--top-p", "0.5") == Sampling(seed=0, temperature=1.0, top_p=0.5)


def damaged(folder: pathlib.Path, name: str, text: str = "") -> pathlib.Path:
    """A copy of a tiny model with a NaN in the embedding of the text's last token, or in the final norm."""
    shutil.copytree(CHECKPOINTS / name, folder)
    tensors = load_file(folder / "model.safetensors")
    wrong = "embed_tokens.weight" if text else "model.norm.weight"
    (tensor,) = [x for name, x in tensors.items() if name.endswith(wrong)]
    tensor[load_tokenizer(folder)(text).input_ids[-1] if text else ...] = np.nan
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_damaged_weights(small, tmp_path, monkeypatch, capsys):
    """Weights that give NaN are an error, not text, and of samples it is said which."""
    folder = damaged(tmp_path / "nan", "tiny-llama3")
    samples = ["--n", "2", "--temperature", "1"]
    for more, every in (([], [""]), (["--score"], [""]), (samples, [" (1 of 2)", " (2 of 2)"])):
        code, out, err = invoke(monkeypatch, capsys, main, "--checkpoint", folder, *more)
        assert code == 1 and out == ""
        assert all(f"error: prompt 1{which}: the model computes NaN" in err for which in every)


def test_a_damaged_token(small, tmp_path, monkeypatch, capsys):
    """The prompt that uses it has an error by name, the others in the same two rows their usual tokens."""
    folder = damaged(tmp_path / "damaged", "tiny-llama4", "Z")
    texts = ["Who are you?", "What is ZZ?", "What is 31 + 45?", "Hello"]
    asked = [x for text in texts for x in ("--prompt", text)]
    error = "--prompt 'What is ZZ?': the model computes NaN: its weights are damaged"

    def responses(checkpoint) -> list[dict]:
        arguments = [*asked, "--checkpoint", checkpoint, "--rows", 2, "--json"]
        code, out, err = invoke(monkeypatch, capsys, main, *arguments)
        assert code == (f"error: {error}" in err) == (checkpoint == folder), err
        return json.loads(out)["responses"]

    usual, found = responses(LLAMA4), responses(folder)
    assert found[1].keys() == {"index", "prompt", "error"} and found[1]["error"].startswith(error)
    assert [x for i, x in enumerate(found) if i != 1] == [x for i, x in enumerate(usual) if i != 1]

    # In a file: it alone is asked again.
    arguments = [*asked, "--rows", 2, "--output", tmp_path / "answers"]
    code, _, err = invoke(monkeypatch, capsys, main, *arguments, "--checkpoint", folder)
    lines = [json.loads(line) for line in (tmp_path / "answers").read_text().splitlines()]
    assert code == 1 and [x.get("text") for x in lines] == [x.get("text") for x in found]
    assert lines[1]["error"].startswith(error) and err.count("error: ") == 1
    code, _, err = invoke(monkeypatch, capsys, main, *arguments, "--checkpoint", folder)
    assert code == 1 and "answers: 100%" in err and f"error: {error}" in err


def test_default_lengths_do_not_depend_on_the_batch():
    """A long prompt takes its own room, not its neighbor's; only the explicit limits are errors."""
    checkpoint = open_checkpoint(LLAMA3)
    tokenizer = load_tokenizer(checkpoint.folder)

    def new_tokens(length: int, *options: str) -> int:
        builder = make_builder(parse_arguments([*options]), checkpoint, tokenizer, [checkpoint.config])
        return builder.request_for([1] * length).max_new_tokens

    assert (new_tokens(10), new_tokens(500)) == (256, 12)
    assert new_tokens(10, "--max-len", "20") == 10
    assert new_tokens(10, "--max-new-tokens", "30") == 30
    with pytest.raises(ValueError, match="exceed --max-len of 20"):
        new_tokens(10, "--max-len", "20", "--max-new-tokens", "11")


def deployment_of(cfg, n_devices=1) -> memory.Deployment:
    mesh = make_mesh(cfg, n_devices, devices=jax.devices()[:n_devices])
    return memory.Deployment(cfg, mesh, "float32", None, "float32")


def test_rows_that_fit(monkeypatch):
    """A row per request up to ROWS; then fewer of them; then shorter ones; by the bytes of real arrays."""
    monkeypatch.setattr(memory, "HEADROOM", 0)
    cfg = open_checkpoint(LLAMA3).config
    deployment = deployment_of(cfg)
    weights = deployment.weight_bytes()
    row = 128 * cfg.layers[0].attention.K * 2 * cfg.layers[0].attention.H * 4 * len(cfg.layers) + 128 * 4 + 4
    assert weights == memory.shard_bytes(model.init_weights(jax.random.key(0), cfg, deployment.mesh))
    assert deployment.cache_bytes(3, 128) == 3 * row

    def choose(rows_in_memory: float, lengths: list[int], rows=None, max_len=None):
        monkeypatch.setattr(memory, "device_memory", lambda: weights + int(rows_in_memory * row))
        return memory.fit_cache([deployment], lengths, rows, max_len)

    assert choose(100, [100] * 3) == (3, 128)
    assert choose(100, [100] * 300) == (memory.DEFAULT_ROWS, 128)
    assert choose(100, [129] * 300) == (memory.DEFAULT_ROWS, 256)
    assert choose(20, [100] * 300) == (16, 128)
    assert choose(1.5, [100] * 300) == (1, 128)
    assert choose(1.5, [100, 400]) == (1, 128)  # the longer one will be refused
    assert choose(20, [100] * 300, rows=7) == (7, 128)
    assert choose(20, [100], max_len=200) == (1, 200)
    for wrong in (dict(rows=30), dict(max_len=512, rows=6)):
        with pytest.raises(ValueError, match="does not fit: each device needs"):
            choose(20, [100] * 300, **wrong)
    with pytest.raises(ValueError, match="does not fit"):
        choose(0.5, [100])
    monkeypatch.setattr(memory, "HEADROOM", 0.5)  # of weights and 32 rows, with half of the memory left over
    assert choose(32.5 + weights / row, [100] * 300)[0] == 16
    monkeypatch.undo()
    assert (
        memory.fit_cache([deployment_of(cfg, 8)], [100] * 3, None, None)[0] == 8
    )  # each data shard has a row


def test_programs_need_memory(monkeypatch, capsys):
    """Code and temporaries count where they are estimated, and so do rows on their way to the host, and what
    is saved there if the device is a CPU.
    """
    deployment = deployment_of(open_checkpoint(LLAMA3).config)
    programs = memory.ProgramBytes(code=2**28, temporaries=2**29)
    monkeypatch.setattr(memory, "program_bytes", lambda *_: programs)

    saved = 5 * deployment.cache_bytes(1, 128)

    def choose(rows_in_memory: float, left=0.0, models=1, **options):
        needed = deployment.weight_bytes() + rows_in_memory * deployment.cache_bytes(1, 128)
        needed = models * (needed + programs.code) + programs.temporaries
        monkeypatch.setattr(memory, "device_memory", lambda: int(needed / (1 - left)))
        return memory.fit_cache([deployment] * models, [100] * 32, options.pop("rows", None), 128, **options)

    assert choose(32.1, memory.ESTIMATE_HEADROOM) == (32, 128)
    assert choose(31.9, memory.ESTIMATE_HEADROOM) == (16, 128)
    assert choose(32.1, memory.ESTIMATE_HEADROOM, models=2) == (32, 128)  # one program runs at a time
    assert choose(31.9, memory.ESTIMATE_HEADROOM, models=2) == (16, 128)
    assert choose(32.1, rows=32) == (32, 128)
    assert choose(38.1, rows=32, saved=saved) == (32, 128)
    parts = "0.25 GiB for the code of programs and 0.50 GiB for their temporaries, and has"
    for rows_in_memory, options in ((31.9, {}), (37.9, dict(saved=saved))):
        with pytest.raises(
            ValueError, match=parts if not options else "0.00 GiB for saved prefixes, and has"
        ):
            choose(rows_in_memory, rows=32, **options)
    monkeypatch.setattr(memory, "platform", lambda mesh: "tpu")
    monkeypatch.setattr(memory, "free_memory", lambda: saved - 1)
    assert choose(33.1, rows=32, saved=saved) == (32, 128)
    assert "prefixes may take 0.00 GiB of this host, where" in capsys.readouterr().err
    with pytest.raises(ValueError, match="does not fit"):
        choose(32.9, rows=32, saved=saved)


def busiest(chosen, E: int, groups: int) -> float:
    """The share of its experts that the busiest group has in use, after tokens that chose these."""
    counts = np.bincount([expert // (E // groups) for expert in set(chosen)])
    return counts.max() / (E // groups)


@pytest.mark.parametrize(
    ("E", "A", "tokens", "groups"), [(4, 1, 1, 2), (4, 1, 4, 2), (6, 2, 3, 3), (6, 2, 2, 2), (5, 2, 3, 1)]
)
def test_active_experts(E, A, tokens, groups):
    """Beside all choices that there are."""
    choices = itertools.product(itertools.combinations(range(E), A), repeat=tokens)
    expected = [busiest(itertools.chain(*choice), E, groups) for choice in choices]
    found = step_bytes.active_experts(llama4_config(E=E, A=A), tokens, groups)
    assert found == pytest.approx(np.mean(expected))


def test_active_experts_of_maverick():
    """Beside tokens that choose at random; of 2.25 tokens on average, one step in four has 3."""
    cfg, rng = llama4_config(E=128, A=1), np.random.default_rng(0)
    drawn = [busiest(rng.integers(0, 128, 40).tolist(), 128, 16) for _ in range(2000)]
    error = np.std(drawn) / len(drawn) ** 0.5
    assert step_bytes.active_experts(cfg, 40, 16) == pytest.approx(np.mean(drawn), abs=4 * error)
    two, mean, three = (step_bytes.active_experts(cfg, tokens, 16) for tokens in (2, 2.25, 3))
    assert mean == pytest.approx(0.75 * two + 0.25 * three) and two < three


V1 = "5:cpu:/a\n4:rdma,memory:/a/b\n0::/a\n"
LIMITS = {
    "no Linux": (None, {}, None),
    "version 2": ("0::/a/b\n", {"a/b/memory.max": "1000\n", "memory.max": "max\n"}, 1000),
    "the group above": ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "70", "memory.max": "80"}, 70),
    "another group": ("0::/a/b\n", {"a/c/memory.max": "1000"}, None),
    "a namespace": ("0::/\n", {"memory.max": "1000"}, 1000),
    "version 1": (V1, {"memory/a/b/memory.limit_in_bytes": "90", "cpu/memory.limit_in_bytes": "1"}, 90),
    "above, version 1": (
        V1,
        {"memory/a/b/memory.limit_in_bytes": str(2**63 - 4096), "memory/a/memory.limit_in_bytes": "90"},
        90,
    ),
    "seen from within": ("4:memory:/docker/1a2b\n", {"memory/memory.limit_in_bytes": "90"}, 90),
    "no limit": (V1, {"memory/a/b/memory.limit_in_bytes": str(2**63 - 4096)}, None),
    "outside": ("0::/../x:y\n", {"memory.max": "90"}, 90),
}


@pytest.mark.parametrize("case", LIMITS)
def test_limits_of_a_container(case, tmp_path, monkeypatch):
    """The least of those of the process' control groups and of all above, of either version."""
    groups, files, limit = LIMITS[case]
    for name, content in {f"sys/fs/cgroup/{name}": text for name, text in files.items()}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory.host_memory(tmp_path) == (limit or physical)
    monkeypatch.setattr(memory, "host_memory", lambda: 8000)
    assert memory.device_memory() == 1000  # of 8 devices


def test_memory_that_others_hold(tmp_path, monkeypatch, capsys):
    """Is no reason to refuse a model, and one to say so."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  1000 kB\n")
    assert memory.free_memory(tmp_path) == 1_024_000
    model = deployment_of(open_checkpoint(LLAMA3).config)
    for free, said in ((10 * 2**30, ""), (2**20, "other programs leave 0.00 GiB: close some of them\n")):
        monkeypatch.setattr(memory, "free_memory", lambda free=free: free)
        assert memory.fit_cache([model], [100], None, None) == (1, 128)
        assert capsys.readouterr().err.endswith(said) and bool(said) == (free == 2**20)


def test_bytes_per_step():
    """The weights, the experts that the busiest devices use, and what each layer sees of the rows."""
    cfg = llama4_config()  # two of its three layers are rings of 8, two have experts
    deployment = deployment_of(cfg)

    def found(batch: float, *positions: int, kv_dtype: str = "float32", mesh=deployment.mesh) -> float:
        weights = abstract(model.weight_infos(cfg), mesh, jnp.float32)
        return step_bytes.bytes_per_step(weights, cfg, mesh, batch, np.array(positions), kv_dtype)

    E, A = cfg.moe.E, cfg.moe.A
    experts = 3 * cfg.D * cfg.moe.M * E * 4
    assert found(999) == pytest.approx(deployment.weight_bytes() - cfg.V * cfg.D * 4)
    assert found(999) - found(2.5) == pytest.approx(2 * experts * (1 - A / E) ** 2.5)
    token = 2 * cfg.layers[0].attention.K * cfg.layers[0].attention.H * 4
    assert found(5, 20) - found(5) == pytest.approx(5 * token * (21 + 5 + 5))
    assert found(5, 20, kv_dtype="int8") - found(5) == pytest.approx(
        5 * token * 31 * (1 + 2 / cfg.layers[0].attention.H) / 4
    )
    rings = np.mean([7, 8, 1, 2])  # what tokens at the positions 6 to 9 see
    assert found(5, 6, 7, 8, 9) - found(5) == pytest.approx(5 * token * (8.5 + 2 * rings))
    # A token reads one expert of one group: half of the two that each group has, and not a quarter.
    groups = make_mesh(cfg, expert=2, devices=jax.devices()[:2])
    assert found(999, mesh=groups) - found(1, mesh=groups) == pytest.approx(2 * experts / 2 / 2)


def test_bytes_per_step_of_a_state():
    """They are read and written, wherever the row ends."""
    cfg = read_model("qwen3.5-0.8b")
    cfg = dataclasses.replace(cfg, layers=cfg.layers[:1])
    mesh = make_mesh(cfg, devices=jax.devices()[:1])
    weights = abstract(model.weight_infos(cfg), mesh, jnp.bfloat16)
    none, few, many = (
        step_bytes.bytes_per_step(weights, cfg, mesh, 3, np.array(positions, int), "int8")
        for positions in ([], [5], [5000, 6000])
    )
    assert few == many == none + 2 * 3 * (4 * 16 * 128 * 128 + 2 * 3 * 3 * 2048 + 4)


def test_utilization_is_of_the_positions_that_were_read(small, monkeypatch, capsys):
    """The first step reads the prompt's last token, the last one the answer's last but one."""
    read = []
    monkeypatch.setitem(summary.BANDWIDTH, "cpu", 1e9)
    monkeypatch.setattr(summary, "bytes_per_step", lambda *given: read.append(given[4]) or 1e6)
    asked = ["--prompt", "Hi", "--prompt", "Who are you?", "--max-new-tokens", "20"]
    code, out, _ = invoke(monkeypatch, capsys, main, *asked, "--json", "--ignore-eos")
    result = json.loads(out)
    lengths = [len(response["prompt_tokens"]) for response in result["responses"]]
    expected = np.concatenate([np.arange(n - 1, n + 19) for n in lengths])
    assert code == 0 and result["bandwidth_utilization"] > 0 and len(set(lengths)) == 2
    np.testing.assert_array_equal(read[0], expected)


DAMAGED = {
    "generation_config.json": ['{"do_sample": true, "top_k": "x"}', '{"eos_token_id": ["6"]}', "[" * 100000],
    "chat_template.jinja": ["{% if", "{{ raise_exception('no') }}", "{% if false %}x{% endif %}"],
    "tokenizer.json": ["{}", ""],
}


@pytest.mark.parametrize(
    ("file", "content"), [(file, c) for file, contents in DAMAGED.items() for c in contents]
)
def test_damaged_companions(file, content, tmp_path, monkeypatch, capsys):
    shutil.copytree(LLAMA3, tmp_path / "damaged")
    (tmp_path / "damaged" / file).write_text(content)
    code, out, err = invoke(monkeypatch, capsys, main, "--checkpoint", tmp_path / "damaged", *ONE_EACH)
    assert code == 1 and out == "" and err.splitlines()[-1].startswith("error: ")


def test_default_command():
    """The README's first command: three answers on stdout, and nothing else there."""
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST}
    done = subprocess.run([sys.executable, main.__file__], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    answers = done.stdout.strip().split("\n\n")
    assert [answer.split("\n")[0] for answer in answers] == [f"> {prompt}" for prompt in DEFAULT_PROMPTS]
    assert "Tiny Llama" in answers[0] and "Hwæt!" in answers[1] and "0 grams" in answers[2]


def test_what_takes_long_is_said(small, monkeypatch, capsys):
    monkeypatch.setattr(launch, "SLOW", 0)
    code, _, err = invoke(monkeypatch, capsys, main, "--prompt", "Hello", "--max-new-tokens", 1)
    assert code == 0 and "compiling, which takes less time at later starts: " in err


# What helps when something is wrong


@pytest.fixture
def logs(monkeypatch):
    """The loggers that --verbose changes are as before afterwards."""
    levels = {logger: logger.level for logger in map(logging.getLogger, diagnostics.LOGGED)}
    for logger in levels:
        monkeypatch.setattr(logger, "handlers", [])
    yield
    for logger, level in levels.items():
        logger.setLevel(level)


def test_verbose(logs, small, monkeypatch, capsys):
    """Lines on stderr: the model and its memory, each program, each turn of the engine, each answer."""
    arguments = ["--prompt", "Who are you?", "--prompt", "What is 12 + 34?", "--max-new-tokens", 5]
    arguments += ["--rows", 1, "--max-len", 104]  # a length that no other test has
    code, quiet, err = invoke(monkeypatch, capsys, main, *arguments)
    assert code == 0 and "serving." not in err and "deployment." not in err
    code, out, err = invoke(monkeypatch, capsys, main, *arguments[:-1], 112, "--verbose")
    assert (code, out) == (0, quiet)
    lines = [line[13:] for line in err.splitlines() if re.match(r"\d\d:\d\d:\d\d\.\d{3} ", line)]
    for pattern in (
        "deployment.deploy: .*tiny-llama3: mesh .*'tensor': 1.*, weights float32, cache float32",
        r"deployment.memory: each device needs .* for its share of 1 x 112 positions, and has .* GiB",
        r"deployment.compilation_cache: jit\(start\): compiled in \d+\.\d\d s",
        r"serving.engine: turn 1: 1 rows assigned, 14 prompt tokens in a chunk of 1 x 64, "
        r"1 of 1 rows decoded, 1 in the queue, \d+\.\d ms",
        r"serving.engine: turn 3: 1 of 1 rows decoded, 1 in the queue, \d+\.\d ms",
        "serving.engine: length: 15 prompt tokens, 0 of them cached, and 5 new ones",
    ):
        assert [line for line in lines if re.fullmatch(pattern, line)], (pattern, err)
    assert sum("serving.engine: length" in line for line in lines) == 2


def test_the_logs_of_a_library(small, caplog):
    """A program that imports it has the same lines from its own logging, and none by default."""
    llm = load(LLAMA3, rows=1, max_len=128, n_devices=1)
    llm.generate("Hello", max_new_tokens=2)
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, logger="serving.engine"):
        llm.generate("Hello", max_new_tokens=2)
    assert {record.name for record in caplog.records} == {"serving.engine"}
    assert caplog.messages[0].startswith("turn ")


def events(folder: pathlib.Path) -> collections.Counter:
    """The names in the only profile of this folder, with their numbers."""
    (file,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    return collections.Counter(x.get("name") for x in json.loads(gzip.open(file).read())["traceEvents"])


def test_profile(small, tmp_path, monkeypatch, capsys):
    """Of the turns of answers or scores, and of nothing before them; the answers are the usual ones."""
    _, usual, _ = invoke(monkeypatch, capsys, main, "--prompt", "Who are you?")
    for seconds, least in ((60, 20), (0, 1)):
        monkeypatch.setattr(diagnostics, "PROFILED", seconds)
        folder = tmp_path / str(seconds) / "below"
        arguments = "--prompt", "Who are you?", "--profile", folder
        code, out, err = invoke(monkeypatch, capsys, main, *arguments)
        assert (code, out) == (0, usual) and err.count(f"profile: {folder}\n") == 1
        found = events(folder)
        assert found["turn"] == least if seconds == 0 else found["turn"] >= least
        assert not [name for name in found if "compile_on_shapes" in str(name)]
    code, _, _ = invoke(monkeypatch, capsys, main, "--score", "--profile", tmp_path / "score")
    assert code == 0 and events(tmp_path / "score")["turn"]


def test_profile_and_log_of_a_server(tmp_path):
    """The profile is written when the server ends."""
    options = "--rows", 1, "--max-len", 64, "--profile", tmp_path / "profile", "--verbose"
    with serving_process(tmp_path / "log", *options) as address:
        ask = urllib.request.Request(
            f"{address}/v1/completions", b'{"prompt": "12 + 34 =", "max_tokens": 4}',
            {"content-type": "application/json"},
        )  # fmt: skip
        urllib.request.urlopen(ask).read()
    log = (tmp_path / "log").read_text()
    assert "serving.engine: turn 1: " in log and f"profile: {tmp_path / 'profile'}\n" in log
    assert events(tmp_path / "profile")["turn"] >= 4
