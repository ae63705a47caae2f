"""Tokenizers of each kind of files, against the libraries that made them; and the text of an answer while it
grows: whole characters, stop strings, and nothing else held back."""

import importlib
import json
import re
import shutil

import numpy as np
import pytest
from conftest import CHECKPOINTS
from tokenizers import ByteLevelBPETokenizer

from conversation.streams import TextStream
from conversation.text import PromptTooLong, encode, load_tokenizer, tokenize
from feedback.errors import UserError

TOKENIZER = load_tokenizer(CHECKPOINTS / "tiny-llama4")
TEXTS = (
    "plain words, and a stop.",
    "你好，世界！再見。",
    "🦙 llama 👩‍👩‍👧‍👦 family, flags 🇮🇸🇯🇵, skin 👍🏽",
    "e\u0301 combining, ﷽, ẛ̣, \u202eright to left\u202c, अनुच्छेद",
    " spaces . , ! and\n\nnew lines\t\n ",
    "a zero-width \u200d joiner and \ufffd itself \ufffd",
)


def tokens_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False).input_ids


def stream(tokens, stop=(), silent=frozenset(), tokenizer=TOKENIZER) -> tuple[list[str], TextStream]:
    """What each token and the end give out."""
    text = TextStream(tokenizer, silent, stop)
    parts = [text.add([token]) for token in tokens]
    return [*parts, text.finish()], text


@pytest.mark.parametrize("text", TEXTS)
def test_whole_characters(text):
    """Each part is a part of the text, though its characters are several tokens; and nothing is lost."""
    parts, stream_ = stream(tokens_of(text))
    assert "".join(parts) == text == stream_.text
    sent = 0
    for token_count, part in enumerate(parts, 1):
        assert text[sent:].startswith(part)
        sent += len(part)
        # All characters that these tokens complete, but for a replacement sign that may be half of another.
        whole = b"".join(text_bytes(token) for token in tokens_of(text)[:token_count])
        complete = whole.decode(errors="ignore")
        assert len(complete.rstrip("\ufffd")) <= sent or token_count > len(tokens_of(text))
    assert any(part == "" for part in parts[:-1]) == (len(text.encode()) > len(text))


def text_bytes(token: int) -> bytes:
    """The bytes of a token of a byte-level tokenizer, by its own table."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    back = {sign: byte for byte, sign in bytes_to_unicode().items()}
    return bytes(back[sign] for sign in TOKENIZER.convert_ids_to_tokens(token))


def test_half_a_character_at_the_end():
    """An answer that ends within a character shows that, at its end."""
    parts, text = stream(tokens_of("ab🦙")[:-1])
    assert text.text.startswith("ab") and "".join(parts[:-1]) == "ab" and set(text.text[2:]) == {"\ufffd"}


def test_random_bytes():
    """Of any tokens, the parts make the text that the tokenizer makes of them all."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        tokens = rng.integers(7, len(TOKENIZER), 20).tolist()
        parts, text = stream(tokens)
        assert "".join(parts) == text.text == TOKENIZER.decode(tokens, clean_up_tokenization_spaces=False)


def test_special_tokens_are_silent():
    end = TOKENIZER.eos_token_id
    assert stream([*tokens_of("ab"), end])[1].text == "ab"
    first = tokens_of("ab")[0]
    assert first not in TOKENIZER.all_special_ids
    assert stream([*tokens_of("ab"), first], silent={first})[1].text == TOKENIZER.decode(tokens_of("ab")[1:])


SEVERAL = ("xx", "xyz"), ("xyz", "bxx"), ("yz", "xyz")
STOPS = ("xyz",), ("z",), ("好",), ("nowhere",), ("aa",), ("xxy",), *SEVERAL


@pytest.mark.parametrize("stop", STOPS)
def test_stop_strings(stop):
    """Against cutting the whole text, for every text; nothing of a stop string is ever given out."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        whole = "".join(rng.choice(list("axyzb好 ")) for _ in range(30))
        tokens = tokens_of(whole)
        parts, text = stream(tokens, stop)
        ends = [whole.find(x) for x in stop if x in whole]
        # Of several, the first that is whole; of those whole with the same token, the one further left.
        first = min((whole.find(x) + len(x) for x in stop if x in whole), default=None)
        assert "".join(parts) == text.text
        assert text.stopped == bool(ends)
        if not ends:
            assert text.text == whole and text.used == len(tokens)
        else:
            assert whole.startswith(text.text) and not any(x in text.text for x in stop)
            assert any(whole[len(text.text) :].startswith(x) for x in stop) and len(text.text) < first
            before = TOKENIZER.decode(tokens[: text.used - 1])
            assert not any(x in before for x in stop)
            known = TOKENIZER.decode(tokens[: text.used])
            assert len(text.text) == min(known.find(x) for x in stop if x in known)


def test_tokens_beyond_the_vocabulary():
    ids = tokens_of("ab")
    assert encode(TOKENIZER, "ab", max(ids) + 1)[-len(ids) :] == ids
    with pytest.raises(ValueError, match=f"config.json has {max(ids)} tokens"):
        encode(TOKENIZER, "ab", max(ids))


def test_little_is_held_back():
    """Only what may be the beginning of a stop string: the rest comes with its token."""
    text = TextStream(TOKENIZER, stop_strings=("abc",))
    given = "".join(text.add([token]) for token in tokens_of("xxab"))
    assert given == "xx" and text.add(tokens_of("d")) == "abd" and text.finish() == ""


SPACES = "  two  spaces ", "    four", " ", "  ", "\n", "\n\n x\n "
MORE_TEXTS = (*TEXTS, *SPACES, "▁under", "全角　スペース ﬁ½", "<x>")
SENTENCEPIECE = {  # what the models were made with
    "llama": dict(normalization_rule_name="identity", remove_extra_whitespaces=False),
    "open_llama": {},
    "gemma": dict(normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False),
}


@pytest.fixture(scope="module", params=SENTENCEPIECE)
def sentencepiece_model(request, tmp_path_factory):
    """-> (a folder of a tokenizer.model alone, sentencepiece's own reading of it)."""
    library = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp(request.param)
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS[:1], TEXTS[4], "two spaces, 世界 and a llama"] * 9),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=310,
        byte_fallback=True,
        minloglevel=2,
        **SENTENCEPIECE[request.param],
    )
    (folder / "tokenizer.vocab").unlink()
    return folder, library.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def test_sentencepiece(sentencepiece_model):
    """The library's tokens after <s>, and its text of them, whole and token by token."""
    folder, library = sentencepiece_model
    tokenizer = load_tokenizer(folder)
    rng = np.random.default_rng(0)
    random = ["".join(rng.choice([*"abelmp \n世🦙", "  ", "llama"], 20)) for _ in range(300)]
    exact = folder.name[:-1] != "open_llama"  # which normalizes as NFKC does
    for text in (*MORE_TEXTS, *random):
        text = text if exact else text.replace("\u0323", "")  # as a second mark, `tokenizers` drops it
        tokens = library.encode(text)
        assert tokenizer(text).input_ids == [library.bos_id(), *tokens]
        parts, stream_ = stream([library.bos_id(), *tokens], tokenizer=tokenizer)
        assert "".join(parts) == stream_.text == library.decode(tokens)
        assert not exact or stream_.text == text.replace("▁", " ")


def test_half_a_character_of_single_bytes(sentencepiece_model):
    """The characters before it stay, also where the library that streams takes them back."""
    tokenizer = load_tokenizer(sentencepiece_model[0])
    whole, (a, b, c) = tokenizer("🦙").input_ids[-4:], tokenizer.convert_tokens_to_ids(["a", "l", "▁"])
    assert all(token.startswith("<0x") for token in tokenizer.convert_ids_to_tokens(whole))
    for tokens, text in (
        ([*whole, *whole[:1]], "🦙\ufffd"),
        ([*whole, *whole[:1], a, c, b], "🦙\ufffda l"),
        ([a, *whole[:2], b], "a\ufffd\ufffdl"),
        ([*whole, *whole[:3], b, *whole, *whole, a], "🦙\ufffd\ufffd\ufffdl🦙🦙a"),
    ):
        parts, stream_ = stream(tokens, tokenizer=tokenizer)
        assert "".join(parts) == stream_.text == text
    rng = np.random.default_rng(0)
    for _ in range(300):  # most of them bytes
        parts, stream_ = stream(rng.integers(3, len(tokenizer), 20).tolist(), tokenizer=tokenizer)
        assert "".join(parts) == stream_.text


def test_sentencepiece_special_tokens(sentencepiece_model, tmp_path):
    """<s> and </s> as tokenizer_config.json says; those in a text are tokens, and silent."""
    folder, library = sentencepiece_model
    shutil.copy(folder / "tokenizer.model", tmp_path)
    first, last = library.bos_id(), library.eos_id()
    for says, before, after in (
        ({}, [first], []),
        ({"add_bos_token": True, "add_eos_token": True}, [first], [last]),
        ({"add_bos_token": False}, [], []),
    ):
        named = dict(__type="AddedToken", content="<s>", lstrip=False, normalized=True, rstrip=False)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": named, **says}))
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer("ab").input_ids == [*before, *library.encode("ab"), *after]
        ids = tokenizer("ab</s>", add_special_tokens=False).input_ids
        assert ids == [*library.encode("ab"), last] and stream(ids, tokenizer=tokenizer)[1].text == "ab"
        assert tokenizer.eos_token_id == last


def test_sentencepiece_is_missing(tmp_path, monkeypatch):
    def missing(*_):
        raise ImportError("SentencePieceExtractor requires\nthe SentencePiece library")

    (tmp_path / "tokenizer.model").write_bytes(b"")
    module = importlib.import_module("transformers.convert_slow_tokenizer")
    monkeypatch.setattr(module, "requires_backends", missing)
    with pytest.raises(
        UserError, match=r"^.*its tokenizer.model \(.*: pip install sentencepiece protobuf\)$"
    ):
        load_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """-> (a folder of vocab.json and merges.txt alone, the tokenizer that made them)."""
    folder, made = tmp_path_factory.mktemp("gpt2"), ByteLevelBPETokenizer()
    words = [*TEXTS, " the llama's  words, it'll say 2024 "] * 3
    made.train_from_iterator(words, 400, show_progress=False, special_tokens=["<|endoftext|>"])
    made.save_model(str(folder))
    return folder, made


def test_gpt2(gpt2):
    folder, made = gpt2
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token_id == 0 and tokenizer.chat_template is None
    more = " the llama's  words, it'll say 2024 ", "two.<|endoftext|> more", "<|endoftext|>"
    for text in (*MORE_TEXTS, *more):
        tokens = tokenizer(text).input_ids
        assert tokens == made.encode(text).ids == encode(tokenizer, text, len(tokenizer))
        parts, stream_ = stream(tokens, tokenizer=tokenizer)
        assert "".join(parts) == stream_.text == text.replace("<|endoftext|>", "")


def test_gpt2_of_others(gpt2, tmp_path):
    """Files that do not tell how a text is split are read only if that is known."""
    shutil.copytree(gpt2[0], tmp_path, dirs_exist_ok=True)
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"tokenizer_class": "GPT2Tokenizer", "add_bos_token": true}')
    assert load_tokenizer(tmp_path)("ab").input_ids[0] == 0
    config.write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(UserError, match="a Qwen2Tokenizer's, which needs a tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(UserError, match=f"{re.escape(str(tmp_path))}: no tokenizer in it; download"):
        load_tokenizer(tmp_path)


def test_chat_templates(gpt2, tmp_path):
    """Of several named ones the default; a file before tokenizer_config.json; without any, no turns."""
    folder, turns = tmp_path / "gpt2", [{"role": "user", "content": "a llama"}]
    shutil.copytree(gpt2[0], folder)
    with pytest.raises(UserError, match="no chat template; give a text instead of turns$"):
        encode(load_tokenizer(folder), turns, 1000)
    named = [
        {"name": name, "template": name + "{{ messages[0].content }}"} for name in ("tool_use", "default")
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(encode(tokenizer, turns, 1000)) == "defaulta llama"
    (folder / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(encode(tokenizer, turns, 1000)) == "file a llama"


PROGRAM = """
{#- What published templates use: macros, namespaces, tools, dates, errors, marks for training. -#}
{%- macro text_of(content) -%}
    {%- if content is string -%}{{- content | trim -}}{%- else -%}
        {%- for part in content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set seen = namespace(roles=[]) -%}
{%- if strftime_now is defined -%}{{- strftime_now('%Y') | length -}}{%- endif -%}
{%- if tools -%}{{- tools | tojson -}}{%- endif -%}
{%- for turn in messages -%}
    {%- set seen.roles = seen.roles + [turn['role']] -%}
    {%- if turn.role not in ('system', 'user', 'assistant') -%}
        {{- raise_exception('a turn of ' + turn.role) -}}
    {%- elif turn.role == 'system' -%}{%- continue -%}
    {%- elif turn.role == 'assistant' -%}
        {%- if turn.get('reasoning_content') -%}({{- turn.reasoning_content -}}){%- endif -%}
        {%- generation -%}<{{- text_of(turn.content) -}}>{%- endgeneration -%}
    {%- else -%}[{{- text_of(turn.content) -}}]{%- endif -%}
{%- endfor -%}
{{- seen.roles | join(' ') -}}
{%- if add_generation_prompt -%}{{- ' ' + (effort if effort is defined else 'high') -}}{%- endif -%}
"""


def test_a_template_that_is_a_program(gpt2, tmp_path):
    """All that transformers offers to templates is there; what a chat does not have is not defined."""
    folder = tmp_path / "gpt2"
    shutil.copytree(gpt2[0], folder)
    (folder / "chat_template.jinja").write_text(PROGRAM)
    tokenizer = load_tokenizer(folder)
    texts = dict(system="s", user=" a ", assistant="b")
    turns = [{"role": role, "content": text} for role, text in texts.items()]
    assert tokenizer.decode(encode(tokenizer, turns, 1000)) == "4[a]<b>system user assistant high"
    with pytest.raises(UserError, match="chat template failed: a turn of tool$"):
        encode(tokenizer, [{"role": "tool", "content": "c"}], 1000)


class Counting:
    """A tokenizers.Tokenizer that counts the characters that it tokenizes."""

    def __init__(self, backend):
        self.backend, self.characters = backend, 0

    def encode_batch_fast(self, texts: list[str], **options):
        self.characters += sum(map(len, texts))
        return self.backend.encode_batch_fast(texts, **options)


def test_prompts_that_are_too_long():
    """Those that cannot fit are refused early; of the others not one, whatever their tokens look like."""
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(["-" * 64, " " * 64, "the lazy dog"] * 9, 500, show_progress=False)
    counting = Counting(made._tokenizer)
    for text in ("-" * 64 * 100, " " * 6000, "the lazy dog" * 400, "🦙" * 500, ("-" * 64 + "a\n") * 100):
        exact = made.encode(text).ids
        assert tokenize(counting, text) == exact
        for limit in (len(exact), len(exact) + 1, 10 * len(exact)):
            assert tokenize(counting, text, limit) == exact
        for limit in (1, 5, len(exact) // 50):
            with pytest.raises(PromptTooLong, match=f"more than the {limit} tokens that a row can hold$"):
                tokenize(counting, text, limit)
    assert len(made.encode("-" * 6400).ids) == 100  # tokens that are longer than most
    counting.characters = 0
    with pytest.raises(PromptTooLong):
        tokenize(counting, "the lazy dog " * 100000, 100)
    assert counting.characters < 5000


def test_tokenizer_that_truncates(tmp_path):
    """A tokenizer.json may ask for truncation and padding, of which transformers' tokenizers do neither."""
    shutil.copytree(CHECKPOINTS / "tiny-llama3", tmp_path, dirs_exist_ok=True)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["truncation"] = dict(direction="Right", max_length=4, strategy="LongestFirst", stride=0)
    padding = dict(direction="Right", pad_to_multiple_of=None, pad_id=3, pad_type_id=0, pad_token="x")
    state["padding"] = padding | dict(strategy={"Fixed": 9})
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    tokenizer, text = load_tokenizer(tmp_path), "the lazy dog " * 4
    for text in ("the lazy dog " * 4, "a"):
        assert encode(tokenizer, text, 1000) == load_tokenizer(CHECKPOINTS / "tiny-llama3")(text).input_ids
