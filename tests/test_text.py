"""The text of an answer while it grows: whole characters, stop strings, and nothing else held back."""

import numpy as np
import pytest
from conftest import CHECKPOINTS

from serving.text import TextStream, encode, load_tokenizer

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


def stream(tokens, stop=(), silent=frozenset()) -> tuple[list[str], TextStream]:
    """What each token and the end give out."""
    text = TextStream(TOKENIZER, silent, stop)
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


@pytest.mark.parametrize(
    "stop",
    [
        ("xyz",),
        ("z",),
        ("xx", "xyz"),
        ("好",),
        ("nowhere",),
        ("xyz", "bxx"),
        ("aa",),
        ("xxy",),
        ("yz", "xyz"),
    ],
)
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
