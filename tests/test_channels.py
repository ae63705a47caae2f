"""Answers in channels, as of gpt-oss: the reasoning apart from the text, wherever answers are shown."""

import io
import json
import re
import sys

import numpy as np
import openai
import pytest
import torch
import transformers
from conftest import CHECKPOINTS, FAST, invoke
from test_chat import Terminal
from test_responses import EVENT
from test_server import post, started

import main
from conversation.streams import ChannelStream, TextStream, answer_stream
from conversation.text import encode, load_tokenizer
from families.gpt_oss import HARMONY
from families.muse_glimmer import RECIPIENTS
from generation.llm import load

# As gpt-oss's own template: the history has final messages only, and a content with channels is refused.
TEMPLATE = """\
<|start|>system<|message|>Reasoning: medium<|end|>
{%- for message in messages -%}
{%- if message.role == "assistant" -%}
{%- if "<|channel|>" in message.content -%}{{ raise_exception("channels in the content") }}{%- endif -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- else -%}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""
MARKS = HARMONY.start, HARMONY.channel, HARMONY.message, *HARMONY.ends, "<|constrain|>"
TURNS = {"Hi": ("They greet.", "Hello!"), "Who?": ("Easy.\n\nNo tools.", "A 🦙.")}


def answer_text(reasoning: str, text: str) -> str:
    """What the model writes after the prompt's "<|start|>assistant"."""
    messages = [f"analysis<|message|>{part}<|end|>" for part in reasoning.split("\n\n")]
    return "<|start|>assistant".join(
        f"<|channel|>{x}" for x in [*messages, f"final<|message|>{text}<|return|>"]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny gpt-oss that has learned the answers of TURNS, with a tokenizer that has Harmony's tokens."""
    folder = tmp_path_factory.mktemp("harmony")
    tokenizer = load_tokenizer(CHECKPOINTS / "tiny-llama3")
    tokenizer.add_special_tokens(dict(additional_special_tokens=list(MARKS)))
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    torch.set_num_threads(1)
    end = tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])
    config = transformers.GptOssConfig(
        vocab_size=len(tokenizer), hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=32, num_local_experts=2, num_experts_per_tok=1,
        max_position_embeddings=256, eos_token_id=end, pad_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config)
    texts, turns = [], []
    for question, (reasoning, text) in TURNS.items():
        turns.append(dict(role="user", content=question))
        prompt = encode(tokenizer, turns, len(tokenizer))
        answer = tokenizer(answer_text(reasoning, text), add_special_tokens=False).input_ids
        texts.append((torch.tensor([prompt + answer]), len(prompt)))
        turns.append(dict(role="assistant", content=text))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(300):
        losses = []
        for tokens, prompt in texts:
            logits = model(tokens).logits[0, prompt - 1 : -1]
            losses.append(torch.nn.functional.cross_entropy(logits, tokens[0, prompt:]))
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        if max(losses) < 0.01:
            break
    assert max(losses) < 0.05  # it answers as it was taught
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(dict(eos_token_id=end)))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def tokens_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def streamed(
    tokenizer, text: str, step: int, stop=(), start="<|start|>assistant", channels=HARMONY
) -> tuple[list[str], TextStream]:
    """What each `step` tokens of an answer and its end give, and the stream. start: the end of the prompt."""
    prompt, tokens = np.array(tokens_of(tokenizer, start)), tokens_of(tokenizer, text)
    stream = answer_stream(tokenizer, prompt, frozenset(), stop, channels)
    parts, thoughts = [], [""]
    for i in range(0, len(tokens), step):
        parts.append(stream.add(tokens[i : i + step]))
        assert stream.reasoning.startswith(thoughts[-1])
        thoughts.append(stream.reasoning)
    parts.append(stream.finish())
    assert "".join(parts) == stream.text
    return parts, stream


SPLIT = {  # a family's channels: {an answer: (its text, its reasoning)}
    "gpt-oss": (HARMONY, {
        answer_text("They greet.", "Hello!"): ("Hello!", "They greet."),
        answer_text("a 🦙\n\nb", "你好 🦙"): ("你好 🦙", "a 🦙\n\nb"),
        "<|channel|>final<|message|>At once<|return|>": ("At once", ""),
        "<|channel|>final <|constrain|>json<|message|>{}<|return|>": ("{}", ""),
        "<|channel|>final<|constrain|>json<|message|>{}<|return|>": ("{}", ""),
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{1}<|call|>": ("", "{1}"),
        "<|channel|>analysis<|message|>cut of": ("", "cut of"),
        "<|channel|>ana": ("", ""),
        "<|message|>no channel<|end|>": ("no channel", ""),
        "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b": ("a\n\nb", ""),
        "of another format 🦙": ("of another format 🦙", ""),
        "of another format<|return|>": ("of another format", ""),
        "": ("", ""),
    }),
    # The recipient of a message is its channel; no token of its own precedes the name.
    "muse-glimmer": (RECIPIENTS, {
        " to=self<|message|>Why?<|eom|><|start|>assistant to=user<|message|>Hi!<|eot|>": ("Hi!", "Why?"),
        " to=user<|message|>It goes to=self, they say.<|eot|>": ("It goes to=self, they say.", ""),
        " to=weather.today<|message|>{1}<|eom|><|start|>assistant to=user<|message|>a": ("a", "{1}"),
        "<|message|>to nobody<|eot|>": ("to nobody", ""),
        " to=self<|message|>cut of": ("", "cut of"),
        "of another format 🦙": ("of another format 🦙", ""),
        "of another format<|eot|>": ("of another format", ""),
    }),
}  # fmt: skip


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize(("family", "answer"), [(name, x) for name, (_, some) in SPLIT.items() for x in some])
def test_channels(family, answer, step):
    """However many tokens come at a time: what was given stays, and all tokens are counted."""
    channels, expected = SPLIT[family]
    tokenizer = load_tokenizer(CHECKPOINTS / "tiny-llama3")
    marks = MARKS if channels is HARMONY else (channels.start, channels.message, *channels.ends)
    tokenizer.add_special_tokens(dict(additional_special_tokens=list(marks)))
    _, stream = streamed(tokenizer, answer, step, channels=channels)
    assert (stream.text, stream.reasoning) == expected[answer]
    assert isinstance(stream, ChannelStream) and stream.used == len(tokens_of(tokenizer, answer))


def test_text_arrives_while_it_grows(tokenizer):
    parts, _ = streamed(tokenizer, answer_text("Why?", "Hello there, who are you?"), 1)
    assert sum(map(bool, parts)) > 5


@pytest.mark.parametrize("step", [1, 100])
def test_stop_strings_are_of_the_text(step, tokenizer):
    _, stream = streamed(tokenizer, answer_text("one two three", "four two five"), step, stop=("two",))
    assert (stream.text, stream.reasoning, stream.stopped) == ("four ", "one two three", True)
    _, stream = streamed(tokenizer, answer_text("one", "four tw"), step, stop=("two",))
    assert (stream.text, stream.stopped) == ("four tw", False)


def test_prompts_that_start_no_message(tokenizer):
    """A text, and a prompt that ends within the final message: the answer is text, as of other families."""
    for start in ("Tell me", "<|start|>assistant<|channel|>final<|message|>I"):
        _, stream = streamed(tokenizer, " am<|return|>", 1, start=start)
        assert type(stream) is TextStream and stream.text == " am"
    plain = load_tokenizer(CHECKPOINTS / "tiny-llama3")  # a tokenizer without these tokens
    _, stream = streamed(plain, "I am", 1)
    assert type(stream) is TextStream and stream.text == "I am"


def test_python(folder, tokenizer):
    """A Completion has both, and its tokens are all that the model wrote."""
    llm = load(str(folder), dtype="float32", rows=2, max_len=128, n_devices=1, show=False)
    turns = []
    for question, (reasoning, text) in TURNS.items():
        turns.append(dict(role="user", content=question))
        found = llm.generate(turns, max_new_tokens=60)
        assert (found.text, found.reasoning, found.finish_reason) == (text, reasoning, "stop")
        assert tokenizer.decode(found.tokens) == answer_text(reasoning, text)
        assert "".join(llm.stream(turns, max_new_tokens=60)) == text
        turns.append(dict(role="assistant", content=found.text))


@pytest.fixture
def ask(folder, monkeypatch, capsys):
    """ask(options) -> (stdout, stderr) of main.py, which runs here on one device, with a pipe as stdin."""
    monkeypatch.setattr(main, "device_count", lambda: 1)

    def asked(*options: str, said: str = "") -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(said))
        subject = "--checkpoint", folder, "--dtype", "float32"
        code, out, err = invoke(monkeypatch, capsys, main, *subject, *options)
        assert code == 0, err
        return out, err

    return asked


def test_prompts(ask):
    """--prompt prints the text alone, --json has both; a line tells of an answer that is all reasoning."""
    reasoning, text = TURNS["Hi"]
    assert ask("--prompt", "Hi")[0] == f"> Hi\n{text}\n\n"
    (found,) = json.loads(ask("--prompt", "Hi", "--json")[0])["responses"]
    assert (found["text"], found["reasoning"]) == (text, reasoning)
    out, err = ask("--prompt", "Hi", "--max-new-tokens", "6")
    assert out == "> Hi\n\n\n"
    assert "1 of 1 answers are cut, 1 of them within the reasoning: they had" in err


def test_chat_over_a_pipe(ask):
    """Only the text is printed, and the second turn, after the first one's text, is answered as taught."""
    out, _ = ask("--chat", "--max-len", "128", said="Hi\nWho?\n")
    assert out == "".join(f"{text}\n" for _, text in TURNS.values())
    out, err = ask("--chat", "--max-len", "128", "--max-new-tokens", "6", said="Hi\n")
    assert out == "\n" and "(cut at 6 tokens, within the reasoning)" in err


def test_chat_in_a_terminal(folder):
    """The reasoning is faint, an empty line follows it, and then comes the text."""
    environment = dict(JAX_PLATFORMS="cpu", XLA_FLAGS=FAST, TERM="xterm", PYTHONUTF8="1")
    terminal = Terminal(environment, "--chat", "--checkpoint", str(folder), "--dtype", "float32")
    terminal.until("> ")
    for question, (reasoning, text) in TURNS.items():
        terminal.type(question + "\n")
        shown = terminal.until(re.escape(text) + "\\s*> ").replace("\r\n", "\n")
        faint = "".join(re.findall(r"\x1b\[2m(.*?)\x1b\[0m", shown, re.S))
        assert faint == reasoning
        assert re.sub(r"\x1b\[2m.*?\x1b\[0m", "", shown, flags=re.S).count("\n\n" + text) == 1
    terminal.type("\x04")
    assert terminal.end() == 0


@pytest.fixture(scope="module")
def server(folder):
    found = started("--checkpoint", str(folder), "--dtype", "float32", "--temperature", "0", "--rows", "2")
    yield found
    found.end()


def test_server(server, folder):
    """Whole and streamed; the message of a response may be sent back as it is, with its reasoning."""
    turns = []
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for question, (reasoning, text) in TURNS.items():
            turns.append(dict(role="user", content=question))
            asked = dict(model=folder.name, messages=turns)
            whole = client.chat.completions.create(**asked).choices[0]
            assert (whole.message.content, whole.message.reasoning_content) == (text, reasoning)
            assert whole.finish_reason == "stop"
            deltas = [part.choices[0].delta for part in client.chat.completions.create(**asked, stream=True)]
            assert "".join(x.content or "" for x in deltas) == text
            assert "".join(getattr(x, "reasoning_content", None) or "" for x in deltas) == reasoning
            assert sum(bool(getattr(x, "reasoning_content", None)) for x in deltas) > 1
            turns.append(whole.message.model_dump(exclude_none=True))
            check_responses_api(client, folder.name, turns, reasoning, text)
    assert all("reasoning_content" in turn for turn in turns[1::2])


def check_responses_api(client, model: str, turns: list[dict], reasoning: str, text: str) -> None:
    """The Responses API has the reasoning as an item before the message; items may be sent back."""
    asked = dict(model=model, input=turns[:-1])
    whole = client.responses.create(**asked)
    thought, message = whole.output
    assert (thought.type, thought.content[0].text) == ("reasoning", reasoning)
    assert message.content[0].text == whole.output_text == text
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    events = list(client.responses.create(**asked, stream=True))
    for event in events:
        EVENT.validate_python(event.model_dump(by_alias=True, exclude_unset=True))
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == reasoning and len(deltas) > 1
    kinds = [event.type for event in events]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]
    again = [*turns[:-1], *(item.model_dump(exclude_unset=True) for item in whole.output)]
    next_turn = dict(role="user", content="Hi")
    chat = client.chat.completions.create(model=model, messages=[*turns, next_turn])
    found = client.responses.create(model=model, input=[*again, next_turn])
    assert found.usage.input_tokens == chat.usage.prompt_tokens


def test_what_the_server_does_not_divide(server, tokenizer):
    """A completion is all that the model writes; so is the text of a grammar, which knows no channels."""
    prompt = encode(tokenizer, [dict(role="user", content="Hi")], len(tokenizer))
    status, reply = post(server, "/v1/completions", dict(prompt=prompt, max_tokens=40))
    assert status == 200 and reply["choices"][0]["text"] == "analysisThey greet.assistantfinalHello!"
    form = dict(type="regex", regex="[ab]{3}")
    asked = dict(messages=[dict(role="user", content="Hi")], response_format=form, max_tokens=8)
    status, reply = post(server, "/v1/chat/completions", asked)
    message = reply["choices"][0]["message"]
    assert status == 200 and re.fullmatch("[ab]{3}", message["content"])
    assert "reasoning_content" not in message
