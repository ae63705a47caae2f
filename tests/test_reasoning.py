"""Reasoning between tags: apart from the text, wherever the tokenizer divides it; and chat templates."""

import numpy as np
import pytest
import transformers
from conftest import CHECKPOINTS

from conversation.streams import TextStream, ThinkStream, answer_stream
from conversation.templates import in_words_of, mentions, replace_template
from conversation.text import encode, load_tokenizer
from feedback.errors import UserError

# As Qwen3's: earlier reasoning is left out, and an empty block where none is wanted.
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == "assistant" %}{{ message.content.split("</think>")[-1].lstrip("\\n") }}
{%- else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif -%}"""


def tokenizer_with(tags: str):
    """The tiny model's tokenizer. tags: whether each tag is several tokens, a token or a special token."""
    tokenizer = load_tokenizer(CHECKPOINTS / "tiny-llama3")
    tokenizer.chat_template = TEMPLATE
    if tags != "texts":
        tokens = [transformers.AddedToken(tag, special=tags == "special") for tag in ("<think>", "</think>")]
        tokenizer.add_tokens(tokens, special_tokens=tags == "special")
    return tokenizer


@pytest.fixture(scope="module", params=["texts", "tokens", "special"])
def tokenizer(request):
    return tokenizer_with(request.param)


def tokens_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def streamed(tokenizer, answer: str, step: int, stop=(), prompt="<|im_start|>assistant\n") -> TextStream:
    """The stream of an answer of which `step` tokens come at a time."""
    tokens = tokens_of(tokenizer, answer)
    end = np.array(tokens_of(tokenizer, prompt))
    stream = answer_stream(tokenizer, end, frozenset(), stop, None)
    given, thoughts = "", ""
    for i in range(0, len(tokens), step):
        given += stream.add(tokens[i : i + step])
        assert stream.text == given and stream.reasoning.startswith(thoughts)
        thoughts = stream.reasoning
    given += stream.finish()
    assert stream.text == given and stream.reasoning.startswith(thoughts)
    assert stream.finish() == "" and isinstance(stream, ThinkStream)
    return stream


ANSWERS = {  # an answer: (its text, its reasoning)
    "<think>\nThey greet.\n</think>\n\nHello!": ("Hello!", "They greet."),
    "<think>a 🦙\n\nb </thin c</think>你好 🦙": ("你好 🦙", "a 🦙\n\nb </thin c"),
    "\n<think></think>\n\nHello!\n\n": ("Hello!\n\n", ""),
    "<think>\n\n</think>\n\nUse <think> and </think>.": ("Use <think> and </think>.", ""),
    "Use <think> and </think>.": ("Use <think> and </think>.", ""),
    " \n <thin air>": (" \n <thin air>", ""),
    "<think": ("<think", ""),
    "<think>\ncut of </th": ("", "cut of </th"),
    "<think>\ncut of\n": ("", "cut of"),
    "<think>cut after</think>\n": ("", "cut after"),
    "\n": ("\n", ""),
    "": ("", ""),
}


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize("answer", ANSWERS)
def test_tags(answer, step, tokenizer):
    """However many tokens come at a time: what was given stays, and all tokens are counted."""
    stream, (text, reasoning) = streamed(tokenizer, answer, step), ANSWERS[answer]
    text = tokenizer.decode(tokens_of(tokenizer, text), skip_special_tokens=True)
    assert (stream.text, stream.reasoning) == (text, reasoning)
    assert stream.used == len(tokens_of(tokenizer, answer))
    if reasoning:
        assert 0 < stream.reasoning_tokens < stream.used
    elif "<think>" not in answer[:8]:
        assert stream.reasoning_tokens == 0


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize("white", ["", "\n"])
def test_prompts_that_begin_the_reasoning(white, step, tokenizer):
    """As DeepSeek R1's, whose template writes the first tag."""
    prompt = f"<|Assistant|><think>{white}"
    stream = streamed(tokenizer, "They greet.\n</think>\n\nHello!", step, prompt=prompt)
    assert (stream.text, stream.reasoning) == ("Hello!", "They greet.")
    stream = streamed(tokenizer, "cut", step, prompt=prompt)
    assert (stream.text, stream.reasoning, stream.only_reasons) == ("", "cut", True)
    stream = streamed(tokenizer, "Hello!", step, prompt="<|Assistant|><think>\n\n</think>\n\n")
    assert (stream.text, stream.reasoning, stream.only_reasons) == ("Hello!", "", False)


def test_text_arrives_while_it_grows(tokenizer):
    """White space and beginnings of tags are held back, nothing else."""
    tokens = tokens_of(tokenizer, "<think>\nOne two three\n</think>\n\nFour five six")
    stream = answer_stream(tokenizer, np.array([1]), frozenset(), (), None)
    sizes = []
    for token in tokens:
        stream.add([token])
        sizes.append((len(stream.reasoning), len(stream.text)))
    assert len({x for x, _ in sizes}) > 5 and len({y for _, y in sizes}) > 5
    assert stream.text == "Four five six"  # before `finish`


def test_reasoning_tokens():
    """Those between the tags, which are not counted themselves where each is a token."""
    tokenizer = tokenizer_with("tokens")
    stream = streamed(tokenizer, "<think>\nThey greet.\n</think>\n\nHello!", 1)
    assert stream.reasoning_tokens == len(tokens_of(tokenizer, "\nThey greet.\n"))


@pytest.mark.parametrize("step", [1, 100])
def test_stop_strings_are_of_the_text(step, tokenizer):
    stream = streamed(tokenizer, "<think>one two three</think>four two five", step, stop=("two",))
    assert (stream.text, stream.reasoning, stream.stopped) == ("four ", "one two three", True)
    stream = streamed(tokenizer, "<think>one</think>four tw", step, stop=("two",))
    assert (stream.text, stream.stopped) == ("four tw", False)
    stream = streamed(tokenizer, "four two", step, stop=("two",))
    assert (stream.text, stream.stopped) == ("four ", True)


def test_templates_without_tags():
    """Of these no answer is divided."""
    plain = load_tokenizer(CHECKPOINTS / "tiny-llama3")
    stream = answer_stream(plain, np.array([1]), frozenset(), (), None)
    stream.add(tokens_of(plain, "<think>a</think>b"))
    assert type(stream) is TextStream and stream.text + stream.finish() == "<think>a</think>b"


def test_options_reach_the_template(tokenizer):
    """Equal to what transformers makes of them."""
    ask = [dict(role="user", content="Hi")]
    for options in ({}, dict(enable_thinking=False), dict(enable_thinking=True)):
        expected = tokenizer.apply_chat_template(
            ask, add_generation_prompt=True, return_dict=False, **options
        )
        assert encode(tokenizer, ask, len(tokenizer), **options) == expected
    begun = [*ask, dict(role="assistant", content="I am")]
    found = encode(tokenizer, begun, len(tokenizer), continue_final_message=True)
    assert tokenizer.decode(found).endswith("<|im_start|>assistant\nI am")


def test_words_of_templates():
    """Roles and names that a template does not know."""
    developer = [dict(role="developer", content="Be brief.")]
    assert in_words_of("{{ message.role }}", developer) == [dict(role="system", content="Be brief.")]
    assert in_words_of('{% if role == "developer" %}', developer) == developer
    call = dict(role="assistant", content="", reasoning_content="why", tool_calls=[{}])
    assert in_words_of("{{ message.content }}", [call]) == [call]
    for asks in ("message['content'] is none", "message.content is not none"):
        assert in_words_of(asks, [call]) == [call | dict(content=None)]
    assert in_words_of("{{ message.thinking }}", [call]) == [call | dict(thinking="why")]
    assert mentions("{% if enable_thinking %}", "enable_thinking") and not mentions("thinking", "think")


def test_another_template():
    tokenizer = load_tokenizer(CHECKPOINTS / "tiny-llama3")
    ask = [dict(role="user", content="Hi")]
    replace_template(tokenizer, "A{{ messages[0].content }}", "file.jinja")
    assert encode(tokenizer, ask, 512) == tokens_of(tokenizer, "AHi")
    replace_template(tokenizer, "{{ raise_exception('not this chat') }}", "file.jinja")
    with pytest.raises(UserError, match=r"file.jinja: not a Jinja template: line 2: .*end"):
        replace_template(tokenizer, "a\n{% if messages", "file.jinja")
