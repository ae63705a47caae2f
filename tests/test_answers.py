"""Files of prompts and answers: order, refusals, interrupted runs, samples and scores."""

import errno
import fcntl
import gc
import io
import json
import math
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import CHECKPOINTS, FAST, invoke, mesh_of
from processes import shared_cache
from questions import sum_question
from test_command_line import small  # noqa: F401  a fixture

import main
from checkpoints import loading
from checkpoints.checkpoint import open_checkpoint
from checkpoints.loading import load
from checkpoints.tensor_files import MappedFile, TensorFile
from conversation.text import encode, load_tokenizer
from convert_checkpoint import convert
from deployment import deploy, memory
from feedback.progress import progress
from generation.replies import Score
from generation.request_builder import RequestBuilder
from terminal import answers, command_line, output_file
from terminal.launch import Startup
from terminal.loaded_models import Session
from terminal.options import parse_arguments
from terminal.prompts import Prompt, make_builder

LLAMA3 = CHECKPOINTS / "tiny-llama3"
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST, "JAX_COMPILATION_CACHE_DIR": shared_cache()}


@pytest.fixture
def ask(small, monkeypatch, capsys, tmp_path):  # noqa: F811
    """Run main.py in tmp_path: -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: invoke(monkeypatch, capsys, main, *arguments)


@pytest.fixture
def held(ask, tmp_path):
    """Answer questions of a file, with some options, in a file: -> (all arguments, the file's content)."""

    def run(n: int, *options) -> tuple[list[str], bytes]:
        (tmp_path / "p").write_text("\n".join(questions(n)))
        arguments = ["--prompt-file", "p", "--output", "o", *options]
        assert ask(*arguments)[0] == 0
        return arguments, (tmp_path / "o").read_bytes()

    return run


def parsed(lines: str) -> list[dict]:
    return [json.loads(line) for line in lines.splitlines()]


def questions(n: int) -> list[str]:
    rng = random.Random(0)
    return [sum_question(rng, held_out=False)[0] for _ in range(n)]


def test_lines_in_order(ask, tmp_path):
    """The lines of --prompt-file, on stdout and in a file, are the responses of --json, in order."""
    (tmp_path / "p").write_text("\n".join(questions(12)))
    code, out, err = ask("--prompt-file", "p")
    assert code == 0, err
    lines = parsed(out)
    assert [line["prompt"] for line in lines] == questions(12)
    assert [line["index"] for line in lines] == list(range(12))
    assert json.loads(ask("--prompt-file", "p", "--json")[1])["responses"] == lines
    code, out, err = ask("--prompt-file", "p", "--output", "o")
    assert code == 0 and out == "" and "o has all 12 lines" in err
    in_file = parsed((tmp_path / "o").read_text())
    assert all(len(line.pop("settings")) == 16 for line in in_file) and in_file == lines


def test_each_prompt_has_its_own_options(ask, tmp_path):
    """A .jsonl file: chats, and options for one prompt, which gets what it would get alone."""
    turns = [{"role": "user", "content": "Who are you?"}]
    parts = [{"type": "text", "text": "Who are"}, {"type": "text", "text": " you?"}]
    asked = [
        {"prompt": "What is\n1 + 2?"},
        {"prompt": "Tell me your name", "max_new_tokens": 3},
        {"messages": [{"role": "user", "content": parts}]},
        {"prompt": "Tell me your name", "temperature": 3.0, "seed": 7, "top_k": 50, "repetition_penalty": 2},
        {"prompt": "Hello", "repetition_penalty": 50},
    ]
    (tmp_path / "p.jsonl").write_text("\n\n".join(map(json.dumps, asked)))
    code, out, err = ask("--prompt-file", "p.jsonl")
    assert code == 0, err
    plain, short, chat, sampled, penalized = parsed(out)
    assert plain["prompt"] == "What is\n1 + 2?" and plain["text"] == "1 + 2 = 3."
    assert len(short["tokens"]) == 3 and short["finish_reason"] == "length"
    assert chat["messages"] == turns and "Tiny Llama" in chat["text"]
    for line, options in (
        (sampled, ["--temperature", "3", "--seed", "7", "--top-k", "50", "--repetition-penalty", "2"]),
        (penalized, ["--repetition-penalty", "50"]),
    ):
        alone = json.loads(ask("--json", "--prompt", line["prompt"], *options)[1])["responses"][0]
        assert alone["tokens"] == line["tokens"]
    greedy = json.loads(ask("--json", "--prompt", "Tell me your name", "--prompt", "Hello")[1])["responses"]
    assert greedy[0]["tokens"] != sampled["tokens"] and greedy[1]["tokens"] != penalized["tokens"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON (Expecting property name"),
        ("[]", "not a JSON object"),
        ("{}", 'not a JSON object with either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'with either "prompt" or "messages"'),
        ('{"prompt": null}', '"prompt" is no text'),
        ('{"prompt": "a", "prompt": "b"}', "prompt is there twice"),
        ('{"prompt": " "}', "an empty prompt"),
        ('{"prompt": "\\ud800"}', "not valid text: half a surrogate pair"),
        ('{"messages": []}', "messages must be a list"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "messages[0]: content of type"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}', "'tools[0]': it must be"),
        ('{"prompt": "a", "tools": []}', "unknown option 'tools'"),
        ('{"prompt": "a", "' + "x" * 5000 + '": 1}', f"unknown option '{'x' * 40}'"),
        ('{"prompt": "a", "temperature": 1' + "0" * 400 + "}", "is not a number of at least 0, in float32"),
        ('{"prompt": "a", "temperature": NaN}', "temperature nan is not"),
        ('{"prompt": "a", "top_p": 0}', "top-p 0 is not above 0"),
        ('{"prompt": "a", "top_k": true}', "top-k True is not"),
        ('{"prompt": "a", "seed": 1' + "0" * 5000 + "}", "not valid JSON (Exceeds the limit"),
        ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens 0 is not between 1 and 2147483647"),
        ('{"prompt": "a", "max_new_tokens": 1' + "0" * 4000 + "}", f"1{'0' * 39} is not between 1 and"),
        ("[" * 100_000, "not valid JSON (maximum recursion depth"),
    ],
)
def test_wrong_lines(line, message, ask, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + line)
    code, out, err = ask("--prompt-file", "p.jsonl")
    assert code == 1 and out == "" and err.count("\n") == 1
    assert err.startswith("error: --prompt-file p.jsonl, line 2: ") and message in err


def test_refused_by_name(ask, tmp_path):
    """What does not fit is named, and has a line that says so; the others are answered; exit code 1."""
    long = "a b " * 400
    (tmp_path / "p").write_text("\n".join(["Hello", long, "Tell me your name"]))
    code, out, err = ask("--prompt-file", "p")
    first, refused, last = parsed(out)
    assert code == 1 and "Hello" in first["text"] and "Tiny Llama" in last["text"]
    assert "error: --prompt-file p, line 2: " in err and "exceed the model's limit of 512" in err
    assert refused["prompt"] == long and "line 2" in refused["error"] and "text" not in refused
    code, out, err = ask("--prompt", "Hello", "--prompt", long)
    assert code == 1 and out.startswith("> Hello\nHello!") and out.count("> ") == 1
    assert "error: --prompt 'a b a" in err and "exceed the model's limit of 512" in err


def test_what_memory_does_not_hold_is_refused(ask, tmp_path, monkeypatch):
    (tmp_path / "p").write_text("\n".join(["Hello", "a b " * 80]))
    fit_cache = memory.fit_cache
    monkeypatch.setattr(main, "fit_cache", lambda models, lengths, *_: fit_cache(models, lengths, None, 128))
    turns = [{"role": "user", "content": "Hello"}]
    room = 128 - len(encode(load_tokenizer(LLAMA3), turns, 512))  # so that the first just fits
    code, out, err = ask("--prompt-file", "p", "--max-new-tokens", room)
    assert code == 1 and "line 2: " in err and "new ones exceed the memory for a row of 128" in err
    assert [("text" in line) for line in parsed(out)] == [True, False]


def test_interrupted_anywhere(ask, held, tmp_path):
    """A file cut at any byte is gone on with, and ends as if nothing had happened; so is one out of order."""
    arguments, whole = held(12, "--temperature", "0.7")
    lines = whole.splitlines(keepends=True)
    for cut in (1, len(lines[0]), len(whole) // 2, len(whole) - 1):
        (tmp_path / "o").write_bytes(whole[:cut])
        assert ask(*arguments)[0] == 0
        assert (tmp_path / "o").read_bytes() == whole
    (tmp_path / "o").write_bytes(b"".join([lines[7], lines[2], lines[11]]) + lines[5][:20])
    assert ask(*arguments)[0] == 0
    assert (tmp_path / "o").read_bytes() == whole
    assert sorted(os.listdir(tmp_path)) == ["o", "p"]


def test_what_an_editor_leaves(ask, held, tmp_path, monkeypatch):
    """Windows' line ends, a byte-order mark, spaces and blank lines are cleaned away; nothing is asked."""
    arguments, whole = held(3)
    monkeypatch.setattr(deploy, "load", lambda *_, **__: pytest.fail("loaded"))
    for left in (b"\xef\xbb\xbf" + whole.replace(b"\n", b"\r\n\r\n"), whole.replace(b"\n", b" \n  ")):
        (tmp_path / "o").write_bytes(left)
        code, _, err = ask(*arguments)
        assert code == 0, err
        assert (tmp_path / "o").read_bytes() == whole


def test_held_answers_are_not_asked_again(ask, held, tmp_path, monkeypatch):
    arguments, whole = held(9)
    with monkeypatch.context() as patch:
        patch.setattr(deploy, "load", lambda *_, **__: pytest.fail("loaded"))
        code, out, err = ask(*arguments)
    assert code == 0 and out == "" and (tmp_path / "o").read_bytes() == whole
    # More prompts at the end are new ones; those that were refused are tried again.
    (tmp_path / "p").write_text("\n".join([*questions(9), "a " * 600, "Hello"]))
    code, _, err = ask(*arguments, "--max-new-tokens", "255")
    assert code == 1 and "made with another model or other options" in err
    for _ in range(2):
        code, _, err = ask(*arguments)
        lines = parsed((tmp_path / "o").read_text())
        assert code == 1 and "line 10: " in err
        assert ["error" in line for line in lines[:10]] == [False] * 9 + [True]
        assert (tmp_path / "o").read_bytes().startswith(whole)
        assert parsed((tmp_path / "o").read_text())[10]["prompt"] == "Hello"
        (tmp_path / "p").write_text("\n".join([*questions(9), "a " * 600, "Hello", "Who are you?"]))
    assert [line["index"] for line in lines] == list(range(12))
    # When only what is refused is left, its line is there all the same.
    code, _, err = ask(*arguments)
    assert code == 1 and "line 10: " in err and parsed((tmp_path / "o").read_text()) == lines


def test_wrong_output_files(ask, held, tmp_path):
    arguments, whole = held(3)
    line = json.loads(whole.splitlines()[0])
    for content, message in (
        ("my notes\n", "line 1: not of an earlier run"),
        ("{}\n", "line 1: not of an earlier run"),
        (json.dumps(line | {"index": 3}) + "\n", "line 1: not an answer to these prompts"),
        (json.dumps(line | {"index": [1]}) + "\n", "line 1: not of an earlier run"),
        (json.dumps(line | {"prompt": "x"}) + "\n", "line 1: not an answer to these prompts"),
        (json.dumps(line | {"settings": "x"}) + "\n", "line 1: made with another model"),
        ('[{"my": "data"}]', "line 1: not of an earlier run"),
        ("\n" + json.dumps(line) + '\n{"inde', None),
    ):
        (tmp_path / "o").write_text(content)
        code, out, err = ask(*arguments)
        if message is None:
            assert code == 0
            continue
        assert code == 1 and out == "" and message in err and err.count("\n") == 1
        assert (tmp_path / "o").read_text() == content  # nothing is lost
    with open(tmp_path / "o", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another process is writing to it" in ask(*arguments)[2]


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.deep)])
def test_interrupt(how, ask, held, tmp_path):
    """A run that is killed leaves whole lines; the next goes on, and ends like an undisturbed one."""
    arguments, undisturbed = held(12, "--rows", "2", "--max-new-tokens", "30")
    (tmp_path / "o").unlink()
    wrapper = CHECKPOINTS.parent / "hold.py"  # from the 20th step on, each takes long
    command = [sys.executable, wrapper, "decoding", main.__file__, *arguments]
    killed = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    while killed.poll() is None and (not (tmp_path / "o").exists() or not (tmp_path / "o").stat().st_size):
        time.sleep(0.005)
    killed.send_signal(how)
    _, err = killed.communicate()
    assert killed.returncode == (130 if how == signal.SIGINT else -9), err
    assert "Traceback" not in err
    left = (tmp_path / "o").read_text()
    assert 0 < len(parsed(left[: left.rfind("\n") + 1])) < 12
    assert ask(*arguments)[0] == 0 and (tmp_path / "o").read_bytes() == undisturbed


def test_samples(ask, tmp_path):
    """--n samples have the seeds S, S + 1, ...: each is what that seed gives alone.

    In a file each has a line, which is held by itself and has its place.
    """
    asked = ["--prompt", "Hello", "--prompt", "Who are you?", "--temperature", "5", "--max-new-tokens", "30"]
    arguments = [*asked, "--n", "3", "--seed", "5", "--output", "o"]
    assert ask(*arguments)[0] == 0
    lines = (tmp_path / "o").read_bytes().splitlines(keepends=True)
    responses = list(map(json.loads, lines))
    assert [(r["index"], r["sample"]) for r in responses] == [(i, j) for i in range(2) for j in range(3)]
    for j in range(3):
        alone = json.loads(ask("--json", *asked, "--seed", str(5 + j))[1])["responses"]
        assert [r["tokens"] for r in alone] == [r["tokens"] for r in responses if r["sample"] == j]
    assert len({tuple(r["tokens"]) for r in responses}) == 6
    (tmp_path / "o").write_bytes(b"".join([lines[5], lines[1], lines[3]]))
    assert ask(*arguments)[0] == 0 and (tmp_path / "o").read_bytes() == b"".join(lines)
    text = ask("--prompt", "Hello", "--temperature", "2", "--n", "2")[1]
    assert "> Hello (1 of 2)\n" in text and "> Hello (2 of 2)\n" in text


def test_a_million_samples_would_not_take_long_to_ask(monkeypatch, capsys):
    """A prompt is encoded once; its samples share it; none has a stream before it is begun; all is told."""
    opened, tokenizer = open_checkpoint(LLAMA3), load_tokenizer(LLAMA3)
    args = parse_arguments(["--temperature", "1", "--seed", str(2**32 - 2), "--n", "4"])
    session = Session(args, [], make_builder(args, opened, tokenizer, [opened.config]), Startup())
    encoded, told = [], []
    monkeypatch.setattr(RequestBuilder, "encode", lambda _, text, tools: encoded.append(text) or [1, 2, 3])
    monkeypatch.setattr(RequestBuilder, "new_stream", lambda _, request: pytest.fail("not begun"))

    def at_once(*facts, delay: float, **more):
        told.append(progress(*facts, **more))
        return told[-1]

    monkeypatch.setattr(answers, "progress", at_once)
    replies = answers.make_replies(session, [Prompt("a", "x"), Prompt("b", "y", {"seed": 5})])
    assert encoded == ["a", "b"] and told[0].n == told[0].total == 8
    assert "requests: 100%" in capsys.readouterr().err
    assert [reply.key for reply in replies] == [(i, j) for i in range(2) for j in range(4)]
    assert [x.request.sampling.seed for x in replies] == [2**32 - 2, 2**32 - 1, 0, 1, 5, 6, 7, 8]
    assert len({id(reply.request.prompt) for reply in replies}) == 2
    args.n = 2**24
    with pytest.raises(ValueError, match="--n 16777216 of 2 prompts: 33554432 answers; ask for at most"):
        answers.make_replies(session, [Prompt("a", "x")] * 2)


def test_stop_strings(ask):
    plain = json.loads(ask("--json", "--prompt", "Tell me your name")[1])["responses"][0]
    ask_with = ["--json", "--prompt", "Tell me your name", "--stop", "Llama", "--stop", "nowhere"]
    stopped = json.loads(ask(*ask_with)[1])["responses"][0]
    assert stopped["text"] == plain["text"][: plain["text"].index("Llama")]
    assert stopped["finish_reason"] == "stop"
    n = len(stopped["tokens"])
    assert stopped["tokens"] == plain["tokens"][:n] and n < len(plain["tokens"])
    # The model as its own draft is always right: what a step says after the stop string is not of the answer.
    guessed = json.loads(ask(*ask_with, "--draft", LLAMA3, "--logprobs")[1])["responses"][0]
    assert all(guessed[x] == stopped[x] for x in stopped) and len(guessed["logprobs"]) == n
    token = plain["tokens"][4]
    by_id = json.loads(ask("--json", "--prompt", "Tell me your name", "--stop-id", token)[1])["responses"][0]
    assert by_id["tokens"] == plain["tokens"][:5] and by_id["finish_reason"] == "stop"
    assert (
        ask("--prompt", "Tell me your name", "--stop", "Llama")[1]
        == f"> Tell me your name\n{stopped['text']}\n\n"
    )


def test_score(ask):
    """A line for each text and one for all; the log-probabilities are tested in test_python_api.py."""
    asked = ["--score", "--prompt", "12 + 34 = 46.", "--prompt", "Hello! Ask me for the sum of two numbers."]
    scores = [x["prompt_logprobs"][1:] for x in json.loads(ask(*asked, "--json")[1])["responses"]]
    lines = [line for line in ask(*asked)[1].splitlines() if "log-likelihood" in line]
    for line, found in zip(lines, [*scores, sum(scores, [])], strict=True):
        likelihood = f"log-likelihood {math.fsum(found):,.4f} of {len(found)} tokens"
        perplexity = f"perplexity {np.exp(-math.fsum(found) / len(found)):,.4f}"
        assert line.removeprefix("all: ") == f"{likelihood}, {perplexity}"


def test_perplexity():
    assert Score([], [-1.0, -2.0, -3.0]).perplexity == pytest.approx(np.e**2)
    assert Score([], []).perplexity is None and Score([], [-2000.0]).perplexity is None


def test_what_a_held_answer_depends_on(ask, tmp_path):
    """Options of one line, of all, or other weights: what was answered otherwise is not taken for this."""
    line = {"prompt": "Hello", "temperature": 1.5}
    (tmp_path / "p.jsonl").write_text(json.dumps(line))
    shutil.copytree(LLAMA3, tmp_path / "model")
    arguments = ["--prompt-file", "p.jsonl", "--output", "o", "--checkpoint", "model"]
    assert ask(*arguments)[0] == ask(*arguments)[0] == ask(*arguments, "--rows", "16")[0] == 0
    for option in (["--seed", "1"], ["--max-new-tokens", "5"], ["--stop", "x"], ["--kv-cache-dtype", "int8"]):
        assert "made with another model or other options" in ask(*arguments, *option)[2]
    (tmp_path / "p.jsonl").write_text(json.dumps(line | {"temperature": 1.6}))
    assert "made with another model or other options" in ask(*arguments)[2]
    (tmp_path / "p.jsonl").write_text(json.dumps(line))
    (tmp_path / "model" / "generation_config.json").write_text("{}")
    assert "made with another model or other options" in ask(*arguments)[2]


@pytest.mark.parametrize("converted", [False, True])
def test_answers_of_other_weights_are_not_mixed(converted, ask, tmp_path):
    """Weights exchanged for others of the same names, shapes and sizes are refused; a fresh copy is not."""
    if converted:
        convert(str(LLAMA3), str(tmp_path / "model"))
    else:
        shutil.copytree(LLAMA3, tmp_path / "model")
    (tmp_path / "p").write_text("\n".join(questions(3)))
    arguments = ["--prompt-file", "p", "--output", "o", "--max-new-tokens", "3"]
    assert ask(*arguments, "--checkpoint", "model")[0] == 0
    held = (tmp_path / "o").read_bytes()
    for name in ("copy", "other"):
        shutil.copytree(tmp_path / "model", tmp_path / name, copy_function=shutil.copyfile)
    weights = next(path for path in (tmp_path / "other").glob("*.safetensors"))
    tensor = next(x for x in TensorFile(MappedFile(weights)).tensors.values() if x.stop - x.start > 2**16)
    with weights.open("r+b") as file:
        file.seek(tensor.start)
        values = file.read(tensor.stop - tensor.start)
        file.seek(tensor.start)
        file.write(values[2**12 :] + values[: 2**12])
    code, out, err = ask(*arguments, "--checkpoint", "other")
    assert code == 1 and out == "" and err.count("\n") == 1 and "made with another model" in err
    for file in (tmp_path / "copy").iterdir():
        os.utime(file, (1, 1))
    (tmp_path / "copy" / "NOTES.md").write_text("no part of the model")
    assert ask(*arguments, "--checkpoint", "copy")[0] == 0
    assert (tmp_path / "o").read_bytes() == held


def test_options_that_ask_for_samples(ask, tmp_path):
    """top_k in a line samples at temperature 1, as --top-k does."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "The moon over", "top_k": 500, "seed": 3}))
    text = ["--no-chat-template", "--max-new-tokens", "8"]  # of which the model is not sure
    line = json.loads(ask("--prompt-file", "p.jsonl", *text)[1])

    def alone(*options: str) -> list[int]:
        found = json.loads(ask("--json", "--prompt", "The moon over", *text, *options)[1])
        return found["responses"][0]["tokens"]

    assert line["tokens"] == alone("--top-k", "500", "--seed", "3") != alone("--temperature", "0")


def test_spaces_belong_to_a_prompt(ask, tmp_path):
    """The last line's too: a text is the same wherever it stands in the file. Windows' line ends do not."""
    (tmp_path / "p").write_bytes(b"\xef\xbb\xbf12 + 34 = \r\n12 + 34 = \n\n  \n")
    first, last = parsed(ask("--prompt-file", "p", "--no-chat-template", "--max-new-tokens", "3")[1])
    assert first["prompt"] == last["prompt"] == "12 + 34 = " and first["tokens"] == last["tokens"]


def test_a_full_disk(ask, held, tmp_path, monkeypatch):
    """One line that says what to do; the next run goes on."""
    arguments, whole = held(9)
    (tmp_path / "o").unlink()
    show = output_file.OutputFile.show

    class Full(io.BytesIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    def show_until_full(self, done):
        show(self, done[:1])
        if done:
            self.file.write(b'{"index": 1, "pro')
            self.file.flush()
            file, self.file = self.file, Full()
            file.close()
            show(self, done[1:])

    monkeypatch.setattr(output_file.OutputFile, "show", show_until_full)
    code, _, err = ask(*arguments)
    assert code == 1 and "error: --output o: No space left on device; run this again" in err
    monkeypatch.setattr(output_file.OutputFile, "show", show)
    assert ask(*arguments)[0] == 0 and (tmp_path / "o").read_bytes() == whole


@pytest.mark.parametrize("closed", ["<&-", pytest.param(">&-", marks=pytest.mark.deep)])
def test_closed_streams(closed):
    """Without stdin, stdout or a terminal's encoding there is no traceback."""
    command = [sys.executable, main.__file__, "--prompt", "How is the weather?", "--max-new-tokens", "4"]
    done = subprocess.run(
        ["bash", "-c", f'exec "$@" {closed}', "-", *command],
        capture_output=True,
        text=True,
        env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout == ("> How is the weather?\nHw?t!\n\n" if closed == "<&-" else "")


def test_no_stdout(ask, monkeypatch):
    """As Python has it where stdout is closed: nothing is printed, and all else is as usual."""
    monkeypatch.setattr(sys, "stdout", None)
    code, out, err = ask("--prompt", "How is the weather?")
    sys.stdout.close()
    assert (code, out) == (0, "") and "Traceback" not in err


def test_garbage_is_not_collected_while_loading(monkeypatch):
    """jax's callback at a collection crashed in the threads that make arrays, with many objects alive."""
    enabled, place = [], loading._place
    monkeypatch.setattr(loading, "_place", lambda *a: enabled.append(gc.isenabled()) or place(*a))
    opened = open_checkpoint(LLAMA3)
    load(opened, mesh_of(opened.config), "float32", None)
    assert enabled and not any(enabled) and gc.isenabled()


def test_garbage_is_not_collected_until_the_programs_are_compiled(ask, monkeypatch):
    monkeypatch.setattr(command_line, "exit_on_signals", lambda: None)
    monkeypatch.setattr(sys, "argv", ["main.py", "--help"])
    try:
        with pytest.raises(SystemExit):
            runpy.run_path(main.__file__, run_name="__main__")
        assert not gc.isenabled()
        assert ask("--prompt", "How is the weather?", "--max-new-tokens", "1")[0] == 0
        assert gc.isenabled() and gc.get_freeze_count()
    finally:
        gc.enable()
        gc.unfreeze()
