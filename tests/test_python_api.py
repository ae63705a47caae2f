"""generation/llm.py: `load`, `generate`, `stream` and `score` return what main.py answers, and what a loop
over prefill and decode_step computes.
"""

import functools
import json
import pathlib
import re
import shutil

import jax
import jsonschema
import numpy as np
import processes
import pytest
from conftest import CHECKPOINTS, invoke
from test_command_line import damaged
from test_generation import deep

import main
import model
from conversation import text as tokenizers
from deployment import ahead, memory
from deployment.deploy import ModelOptions, open_models
from feedback.errors import UserError
from generation.llm import LLM, load

LLAMA3, LLAMA4 = CHECKPOINTS / "tiny-llama3", CHECKPOINTS / "tiny-llama4"
PROMPTS = ["Who are you?", "What is 12 + 34?", "Add 20 and 22.", "Tell me your name", "How much is 7 + 5?"]
TOLERANCE = 1e-4  # of log-probabilities, in float32: other widths of prefill chunks


@functools.cache
def opened(name: str = "tiny-llama3", rows: int = 2, **options) -> LLM:
    return load(CHECKPOINTS / name, rows=rows, max_len=256, **dict(n_devices=1) | options)


def loop(llm: LLM, prompt: list[int], new: int) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of a greedy answer, by prefill and decode_step."""
    static, n = dict(cfg=llm.cfg, mesh=llm.mesh), 8  # so many are prefilled: of all prompts the same shape
    cache = model.init_cache(llm.cfg, llm.mesh, 1, 256, "float32")
    logits, cache = model.prefill(np.array([prompt[:n]]), llm.weights, cache, **static)
    for token in prompt[n:]:
        logits, cache = model.decode_step(np.array([token]), llm.weights, cache, **static)
    tokens, logprobs = [], []
    while len(tokens) < new and not (tokens and tokens[-1] in llm.stop_tokens):
        token = int(logits[0].argmax())
        tokens.append(token)
        logprobs.append(float(jax.nn.log_softmax(logits[0])[token]))
        logits, cache = model.decode_step(np.array([token]), llm.weights, cache, **static)
    return tokens, logprobs


@pytest.mark.parametrize("name", ["tiny-llama3", deep("tiny-llama4")])
def test_generate_is_a_loop_of_decode_steps(name):
    """More prompts than rows, in order; the text is that of the tokens."""
    llm = opened(name)
    answers = llm.generate(PROMPTS, max_new_tokens=24)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = llm.encode(prompt)
        expected, logprobs = loop(llm, tokens, 24)
        assert answer.prompt_tokens == tokens and answer.tokens == expected
        np.testing.assert_allclose(answer.logprobs, logprobs, atol=TOLERANCE)
        assert answer.text == str(answer) == llm.tokenizer.decode(expected, skip_special_tokens=True)
        assert answer.finish_reason == ("stop" if expected[-1] in llm.stop_tokens else "length")


def test_answers_are_those_of_the_command(monkeypatch, capsys):
    """Drawn, with a penalty and log-probabilities; scores of texts."""
    llm = opened()
    model_options = ["--checkpoint", LLAMA3, "--dp", "8", "--tp", "1", "--json"]
    prompts = [x for prompt in PROMPTS for x in ("--prompt", prompt)]
    options = dict(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.5, seed=5)
    arguments = [x for k, v in options.items() for x in (f"--{k.replace('_', '-')}", v)]
    arguments += ["--logprobs", "--max-new-tokens", 20]
    code, out, err = invoke(monkeypatch, capsys, main, *model_options, *prompts, *arguments)
    assert code == 0, err
    answers = llm.generate(PROMPTS, max_new_tokens=20, **options)
    for expected, answer in zip(json.loads(out)["responses"], answers, strict=True):
        for name in ("text", "tokens", "prompt_tokens", "finish_reason"):
            assert getattr(answer, name) == expected[name], name
        np.testing.assert_allclose(answer.logprobs, expected["logprobs"], atol=TOLERANCE)
    out = invoke(monkeypatch, capsys, main, *model_options, *prompts, "--score")[1]
    for expected, score in zip(json.loads(out)["responses"], llm.score(PROMPTS), strict=True):
        assert score.tokens == expected["prompt_tokens"]
        np.testing.assert_allclose(score.logprobs, expected["prompt_logprobs"][1:], atol=TOLERANCE)
        np.testing.assert_allclose(score.log_likelihood, expected["log_likelihood"], rtol=1e-4)
        np.testing.assert_allclose(score.perplexity, expected["perplexity"], rtol=1e-4)
    assert llm.score(PROMPTS[0]) == llm.score(PROMPTS)[0]


@pytest.mark.parametrize(
    "options",
    [
        dict(n_devices=None, dp=2, tp=4, lookup=True),
        dict(n_devices=4, pp=2, tp=2, quantize="int8", kv_cache_dtype="int8"),
        dict(draft=str(LLAMA3)),
    ],
    ids=("lookup", "stages", "draft"),
)
def test_the_same_answers(options):
    """On more devices, with draft tokens, and in int8, which the tiny model's answers survive."""
    expected = [x.text for x in opened().generate(PROMPTS, max_new_tokens=16)]
    assert [x.text for x in opened(**options).generate(PROMPTS, max_new_tokens=16)] == expected
    assert expected[1] == "12 + 34 = 46."


def test_tokenizers_that_are_loaded(monkeypatch, tmp_path):
    """The model's once; a draft model's only if its files differ, as their vocabularies may be equal."""
    loaded = []
    for module in (tokenizers, memory):
        real = module.load_tokenizer
        monkeypatch.setattr(module, "load_tokenizer", lambda x, real=real: loaded.append(x) or real(x))
    same, other = (shutil.copytree(LLAMA3, tmp_path / name) for name in ("same", "other"))
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(settings | dict(model_max_length=99)))
    for draft, folders in ((same, [LLAMA3]), (other, [LLAMA3, other])):
        loaded.clear()
        options = ModelOptions(checkpoint=str(LLAMA3), draft=str(draft), rows=2, max_len=256)
        model, _ = open_models(options, 1, print)
        assert model.tokenizer is model.tokenizer and loaded == folders


def test_nothing_is_compiled_for_a_kind_that_was_seen(compiled):
    llm = opened()
    llm.generate(PROMPTS, max_new_tokens=2)  # as many answers at a time as will come
    llm.generate(PROMPTS, temperature=1, max_new_tokens=2)
    llm.generate(PROMPTS, top_logprobs=1, max_new_tokens=2)
    compiled.clear()
    llm.generate(PROMPTS, max_new_tokens=range(3, 8))
    llm.generate(PROMPTS[:3], temperature=0.5, top_p=0.9, seed=7, max_new_tokens=5)
    llm.generate(PROMPTS, presence_penalty=1, max_new_tokens=5)
    assert not compiled
    assert llm.engine.stats.reused_tokens  # prompts share the beginning of the chat template


def test_load_compiles_for_the_first_prompt(monkeypatch, compiled):
    """All programs of a first prompt, while it reads the weights; those of sampling when they are needed."""
    llm = load(LLAMA3, rows=3, max_len=120, n_devices=1)  # sizes that no other test has
    names, compile_one = [], ahead.compile_on_shapes

    def spied(function, *arguments, **static):
        names.append(function.__name__)
        return compile_one(function, *arguments, **static)

    monkeypatch.setattr(ahead, "compile_on_shapes", spied)
    compiled.clear()
    assert llm.generate(PROMPTS[1]).text == "12 + 34 = 46."
    assert not names and not compiled
    llm.generate(PROMPTS[1], temperature=1, max_new_tokens=2)
    assert names


def test_streams():
    """The pieces are the text, of several streams at the same time too; who leaves early frees the row."""
    llm = opened()
    texts = [llm.generate(prompt).text for prompt in PROMPTS]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        pieces = list(llm.stream(prompt))
        assert "".join(pieces) == text and len(pieces) > 1
    streams = [llm.stream(prompt) for prompt in PROMPTS]  # more than rows
    found = [""] * len(streams)
    for _ in range(100):
        for i, stream in enumerate(streams):
            found[i] += next(stream, "")
    assert found == texts
    stream = llm.stream(PROMPTS[0], ignore_eos=True, max_new_tokens=60)
    next(stream)
    sampled = llm.generate(PROMPTS[1], repetition_penalty=1.3)  # other programs, while the stream is open
    assert sampled.finish_reason == "stop" and len("".join(stream)) > len(texts[0])
    for _ in llm.stream(PROMPTS[0], ignore_eos=True, max_new_tokens=60):
        break
    assert not llm.replies.open
    llm.generate(PROMPTS[0])
    assert not llm.engine.busy or all(row.free for row in llm.engine.scheduler.rows)


def test_options():
    """Stop texts, lengths of each prompt, chats, token ids, the system prompt, and text as it is."""
    llm = opened()
    stopped = llm.generate(PROMPTS[0], stop=" am")
    assert stopped.text == "My name is Tiny Llama. I" and stopped.finish_reason == "stop"
    assert [len(x.tokens) for x in llm.generate(PROMPTS, max_new_tokens=[1, 2, 3, 4, 5])] == [1, 2, 3, 4, 5]
    chat = [{"role": "user", "content": PROMPTS[0]}]
    whole = llm.generate(PROMPTS[0])
    assert llm.generate(chat) == whole
    assert llm.generate([chat, PROMPTS[1], llm.encode(PROMPTS[0])])[::2] == [whole, whole]
    assert llm.generate(PROMPTS[0], system="Be brief.").prompt_tokens == llm.encode(
        [{"role": "system", "content": "Be brief."}, *chat]
    )
    text = llm.generate("12 + 34 =", chat_template=False, max_new_tokens=4)
    assert text.prompt_tokens == llm.tokenizer("12 + 34 =").input_ids
    top = llm.generate(PROMPTS[0], top_logprobs=3, max_new_tokens=4)
    assert [max(x, key=x.get) for x in top.top_logprobs] == top.tokens == whole.tokens[:4]
    assert all(len(x) == 3 for x in top.top_logprobs)
    assert llm.generate([]) == []


def test_special_tokens_in_messages():
    """A message that spells one is read as text; with the option, and in a text as it is, it is the token."""
    llm = opened()
    turn, end = "say<|eot_id|>", llm.tokenizer.convert_tokens_to_ids("<|eot_id|>")
    for given, options, counts in (
        (turn, {}, (1, 2)),
        ([{"role": "user", "content": turn}, {"role": "assistant", "content": turn}], {}, (2, 4)),
        (turn, dict(system=turn), (2, 4)),
        (turn, dict(chat_template=False), (1, 1)),
    ):
        for spelled, count in zip((False, True), counts, strict=True):
            asked = options | dict(special_tokens_in_messages=spelled)
            assert llm.encode(given, **asked).count(end) == count
            answer = llm.generate(given, max_new_tokens=1, **asked)
            assert answer.prompt_tokens == llm.encode(given, **asked)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(checkpoint="nowhere"), "nowhere"),
        (dict(quantize="int3"), "quantize 'int3' is not one of"),
        (dict(dtype="float64"), "dtype 'float64' is not one of bfloat16, float32"),
        (dict(max_len=10**6), "max_len 1000000: the model's limit is"),
        (dict(rows=0), "rows 0 is not a number of at least 1"),
        (dict(tp=3), "--tp 3 on 8 devices"),
        (dict(draft=LLAMA3, lookup=True), "draft and lookup exclude each other"),
        (dict(lookup=True, guesses=99), "99 draft tokens"),
    ],
)
def test_wrong_models(options, message):
    with pytest.raises(UserError) as e:
        load(**dict(checkpoint=LLAMA3) | options)
    assert message in str(e.value) and "\n" not in str(e.value)


PICTURE = [{"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "image", "url": "x"}]}]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("", {}, "prompt 0: an empty prompt"),
        (["Hello", " "], {}, "prompt 1: an empty prompt"),
        (["Hello", [1, 10**6]], {}, "prompt 1: token 1000000: the model has tokens 0 to"),
        (["Hello", []], {}, "prompt 1: a prompt is a list of one or more token ids"),
        ("Hello", dict(temperature=-1), "prompt 0: temperature -1 is not a number of at least 0"),
        ("Hello", dict(regex="a", schema={}), "regex and schema exclude each other"),
        ("Hello", dict(schema="{}"), "schema: '{}' is not an object"),
        ("Hello", dict(regex=["a"]), "regex: ['a'] is not a text"),
        ("Hello", dict(regex="(a"), "regex: "),
        ("Hello", dict(schema={"type": "string", "enum": []}), "schema: "),
        ("Hello", dict(warmth=1), "unknown option 'warmth'; known: chat_template, "),
        ("Hello", dict(max_new_tokens=0), "max_new_tokens 0 is not between 1 and 2147483647"),
        ("Hello", dict(max_new_tokens=1000), "tokens, which with 1000 new ones exceed max_len of 256"),
        ("Hello " * 300, {}, "prompt 0: "),
        ("Hello " * 3000, {}, "prompt 0: the prompt has more than the 256 tokens that a row can hold"),
        (["a", "b"], dict(seed=[1]), "seed: 1 values for 2 prompts"),
        ("Hello", dict(stop=""), "stop: a text or a list of texts"),
        ("Hello", dict(top_logprobs=21), "top_logprobs 21 is not between 0 and 20"),
        ("Hello", dict(system="S", chat_template=False), "system: it needs a chat template"),
        ("\ud800", {}, "half a surrogate pair"),
        ([PICTURE], {}, "prompt 0: messages[0]: content of type 'image' is not supported, only text"),
        ([[{"role": "user"}]], {}, "prompt 0: messages[0]: it must be an object"),
    ],
)
def test_wrong_requests(prompts, options, message):
    """One line, and before anything is computed."""
    llm = opened()
    for ask in (llm.generate, llm.stream) if isinstance(prompts, str) else (llm.generate,):
        with pytest.raises(ValueError) as e:
            ask(prompts, **options)
        assert message in str(e.value) and "\n" not in str(e.value)
    assert not llm.replies.open


def test_answers_that_match_something(capsys):
    """A schema, a regular expression or a grammar, greedy and drawn, for one prompt and for several."""
    llm = opened()
    place = {"type": "object", "properties": {"a": {"enum": [1, 25]}, "b": {"type": "boolean"}}}
    place |= dict(required=["a", "b"], additionalProperties=False, uniqueItems=True)
    for options in (dict(temperature=0), dict(temperature=2.0, seed=range(len(PROMPTS)))):
        for answer in llm.generate(PROMPTS, schema=place, **options):
            jsonschema.validate(json.loads(answer.text), place)
            assert answer.finish_reason == "stop" and len(answer.logprobs) == len(answer.tokens)
        assert all(x.text in ("yes", "no") for x in llm.generate(PROMPTS, regex="yes|no", **options))
    lark = 'start: "<" /[0-9]+/ ">"'
    assert re.fullmatch("<[0-9]{1,13}>?", llm.generate("Who?", grammar=lark, max_new_tokens=14).text)
    assert "".join(llm.stream(PROMPTS[0], regex="[a-z]{5}")).isalpha()
    assert "warning: schema: answers may violate uniqueItems" in capsys.readouterr().err
    assert llm.generate(PROMPTS[1], schema=None).text == "12 + 34 = 46."


def test_grammars_leave_no_room_for_reasoning(tmp_path):
    """A template that begins the reasoning: with a grammar it ends in the prompt, or is switched off."""
    folder = shutil.copytree(LLAMA3, tmp_path / "thinking")
    plain = (folder / "chat_template.jinja").read_text()
    begin = "{# <think></think> #}<think>"
    off = "{% if enable_thinking is not defined or enable_thinking %}" + begin + "{% endif %}"
    for end, closed in ((begin, "<think>\n</think>\n\n"), (off, "")):
        (folder / "chat_template.jinja").write_text(plain + end)
        llm = load(folder, rows=2, max_len=256, n_devices=1)
        answer = llm.generate("Who are you?", regex="[a-z]{3}", max_new_tokens=20)
        prompt = llm.tokenizer.decode(answer.prompt_tokens)
        assert prompt == llm.tokenizer.decode(opened().encode("Who are you?")) + closed
        assert re.fullmatch("[a-z]{3}", answer.text) and not answer.reasoning
        assert llm.tokenizer.decode(llm.encode("Who are you?")).endswith("<think>")
        tags = "<think>a</think>b"  # in an answer that must have them they are text
        assert llm.generate("Who are you?", regex=tags, max_new_tokens=30).text == tags


def test_a_model_that_computes_nan(tmp_path):
    """An error for a single prompt; for several, each answer has it."""
    llm = load(damaged(tmp_path / "nan", "tiny-llama3"), rows=2, max_len=256, n_devices=1)
    assert all("NaN" in x.error and x.finish_reason == "error" for x in llm.generate(PROMPTS))
    for ask in (llm.generate, llm.score, lambda prompt: list(llm.stream(prompt))):
        with pytest.raises(UserError, match="NaN"):
            ask(PROMPTS[0])


TWO_PROCESSES = """
import atexit, os, sys, time
slow = os.environ["JAX_PROCESS_ID"] == sys.argv[2]
if slow:
    atexit.register(time.sleep, 3)  # after what jax, which is imported later, does at the end
from distributed.join import join
join(None, None, None, 60)
from generation.llm import load
import serving.programs
serving.programs.SHOW_AFTER = float("inf")  # no bar of progress, which a slow machine would show
llm = load(sys.argv[1], rows=2, max_len=256, tp=2, dp=2)
for answer in llm.generate(["Who are you?", "What is 12 + 34?", "Add 20 and 22."], max_new_tokens=12):
    print(answer.tokens)
if slow:
    time.sleep(3)
    if sys.argv[3:]:
        raise SystemError(sys.argv[3])
"""


def two_processes(folder: pathlib.Path, *arguments) -> list[tuple[int, str, str]]:
    (folder / "program.py").write_text(TWO_PROCESSES)
    path = dict(PYTHONPATH=str(pathlib.Path(main.__file__).parent))
    own = [processes.Own(program=folder / "program.py", variables=path)] * 2
    return processes.finish(processes.start(2, 2, LLAMA3, *arguments, own=own))


@pytest.mark.deep
def test_two_processes(tmp_path):
    """Each makes the same calls, over the devices of both, and has the answers of one process.

    The process that comes to its end first waits for the other, and each leaves without haste.
    """
    expected = [x.tokens for x in opened().generate(PROMPTS[:3], max_new_tokens=12)]
    for code, out, err in two_processes(tmp_path, 1):
        assert (code, err) == (0, "")
        assert [json.loads(line) for line in out.splitlines()] == expected


@pytest.mark.deep
def test_an_exception_in_one_of_two_processes(tmp_path):
    """It has its traceback; the other process ends too, and names the one that failed."""
    (code_0, _, err_0), (code_1, _, err_1) = two_processes(tmp_path, 1, "no more")
    assert code_0 == code_1 == 1
    assert err_1.startswith("Traceback") and err_1.rstrip().endswith("SystemError: no more")
    assert len(processes.errors(err_0)) == 1 and "process 1 of 2" in err_0 and "has failed: no more" in err_0
