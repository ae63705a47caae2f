"""Tokenizers of GGUF files: against the plainest BPE, the package sentencepiece, and rules of llama.cpp."""

import json
import unicodedata

import gguf
import numpy as np
import pytest
import regex
import transformers
from conftest import CHECKPOINTS
from test_gguf import said, unsaid
from test_gguf import write as write_model
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from checkpoints.checkpoint import open_checkpoint
from checkpoints.gguf.vocabulary import ENDS, read_vocabulary, write_tokenizer
from conversation.text import encode, load_tokenizer, stop_tokens
from feedback.errors import UserError

pytestmark = pytest.mark.usefixtures("own_cache")


def tokenizer_of(folder, architecture="llama", template=None, **fields):
    """The tokenizer of a file with these fields, by their names after "tokenizer.ggml."."""
    fields = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    more = {} if template is None else {"tokenizer.chat_template": template}
    write_tokenizer({"general.architecture": architecture} | fields | more, folder)
    return load_tokenizer(folder)


# ---------------------------------------------------------------------------------------------- byte-level

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}%s]*[\p{Ll}\p{Lm}\p{Lo}\p{M}%s]+"
CASED += "|" + CASED.replace("]*[", "]+[").removesuffix("+") + "*"
LETTERS = CASED.replace("+|", f"+{CONTRACTION}?|") + f"{CONTRACTION}?"
ENDS_OF_WORDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + ENDS_OF_WORDS
# As tiktoken and the models' tokenizer.json files have them, in the syntax of the package regex.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLITS = {
    "llama-bpe": [LLAMA3],
    "dbrx": [LLAMA3],
    "glm4": [LLAMA3],
    "qwen2": [LLAMA3.replace("{1,3}", "")],
    "deepseek-r1-qwen": [LLAMA3.replace("{1,3}", "")],
    "tekken": [CASED.replace("%s", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + ENDS_OF_WORDS],
    "deepseek-coder": [
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{ENDS_OF_WORDS}",
    ],
    "kimi-k2": [
        r"[\p{Han}]+|"
        + LETTERS.replace("%s", r"&&[^\p{Han}]")
        + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        + ENDS_OF_WORDS
    ],
    "gpt-4o": [LETTERS.replace("%s", "") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + ENDS_OF_WORDS],
    "seed-coder": [
        CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "smollm": [r"\p{N}", GPT2],
}
SPLITS["minimax-m2"] = SPLITS["gpt-4o"]
SPLITS["qwen35"] = [PRETOKENIZE_REGEX]
WHOLE = ("kimi-k2", "gpt-4o", "llama-bpe", "tekken")
BEGINS = ("llama-bpe", "tekken")  # with the BOS token, if the file does not say
SPECIAL = {
    "<｜begin▁of▁sentence｜>": 3, "<｜User｜>": 3, "<|im_end|>": 3, "<think>": 4, "    ": 4, "\n\n\n": 4,
}  # fmt: skip
TEXT = """I've 12345 apples, IT'S 3.14!! 世界abc漢字 こんにちはテスト DON'T stop/
<｜User｜>don't  <think>x_y</think> #tag\t½ Ünïcode naïve\r\n\r\n
  end <|im_end|>  The 2024年 camelCase HTTPServer <｜User｜>hello    world\n\n\nA\u030a สวัสดี"""
WORDS = TEXT + " and an apple, the end, the tests of the text; stop the server; 世界 世界 123 123 345"


def vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges, learned of words that no regular expression has split; one token has no merge."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = list(bytes_to_unicode().values())
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([WORDS[i : i + 40] for i in range(0, len(WORDS), 7)], trainer)
    described = json.loads(tokenizer.to_str())["model"]
    learned = [token for token in described["vocab"] if token not in SPECIAL]
    return [*learned, "Ġcamel", *SPECIAL], [tuple(x) for x in described["merges"]]


def encoded(text: str, tokens: list[str], merges: list[tuple[str, str]], splits: list[str], whole: bool):
    """Byte-level BPE, in the plainest way."""
    ids = {token: i for i, token in enumerate(tokens)}
    ranks, letters, found = {pair: i for i, pair in enumerate(merges)}, bytes_to_unicode(), []
    for piece in regex.split("(" + "|".join(map(regex.escape, SPECIAL)) + ")", text):
        if piece in SPECIAL:
            found.append(ids[piece])
            continue
        words = [piece]
        for split in splits:
            between = [regex.split(f"(?V1)({split})", word) for word in words]
            words = [x for xs in between for x in xs if x]
        for word in words:
            parts = [letters[byte] for byte in word.encode()]
            if whole and "".join(parts) in ids:
                parts = ["".join(parts)]
            while pairs := [pair for pair in zip(parts, parts[1:], strict=False) if pair in ranks]:
                best, merged = min(pairs, key=ranks.get), []
                while parts:
                    n = 2 if tuple(parts[:2]) == best else 1
                    merged.append("".join(parts[:n]))
                    parts = parts[n:]
                parts = merged
            found += [ids[x] for x in parts]
    return found


@pytest.mark.parametrize("pre", SPLITS)
def test_pre_tokenizer(pre, tmp_path):
    """Of words, numbers, Chinese, runs of spaces, and the special tokens of which the templates are made."""
    tokens, merges = vocabulary()
    ours = tokenizer_of(
        tmp_path, model="gpt2", pre=pre, tokens=tokens, token_type=[SPECIAL.get(x, 1) for x in tokens],
        merges=[" ".join(x) for x in merges], bos_token_id=tokens.index("<｜begin▁of▁sentence｜>"),
        eos_token_id=tokens.index("<|im_end|>"),
    )  # fmt: skip
    text = unicodedata.normalize("NFC", TEXT) if pre in ("qwen2", "qwen35") else TEXT
    expected = encoded(text, tokens, merges, SPLITS[pre], pre in WHOLE)
    first = [ours.bos_token_id] if pre in BEGINS else []
    assert ours(TEXT).input_ids == [*first, *expected]
    assert ours.decode(expected) == text
    assert (ours.bos_token, ours.eos_token) == ("<｜begin▁of▁sentence｜>", "<|im_end|>")


R1 = (  # in short, the template of the distilled models
    "{{ bos_token }}{% for m in messages %}<｜User｜>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)


@pytest.mark.parametrize("pre", ["deepseek-r1-qwen", "llama-bpe"])
def test_chat_of_r1(pre, tmp_path):
    """A chat with DeepSeek R1's distillations: the marks of a turn are one token each."""
    marks = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<think>"

    def distilled(writer):
        tokens, types = (writer.kv_data[0][f"tokenizer.ggml.{x}"].value for x in ("tokens", "token_type"))
        tokens[:5], types[:5] = marks, [3, 3, 3, 3, 4]
        said("tokenizer.ggml.pre", pre)(writer)
        said("tokenizer.chat_template", R1)(writer)
        said("tokenizer.ggml.eos_token_id", 3)(writer)

    write_model(tmp_path / "model.gguf", fault=distilled)
    folder = open_checkpoint(str(tmp_path / "model.gguf")).folder
    tokenizer = load_tokenizer(folder)
    plain = load_tokenizer(CHECKPOINTS / "tiny-llama3")
    hello, line = (plain(text, add_special_tokens=False).input_ids for text in ("hello", "\n"))
    messages = [{"role": "user", "content": "hello"}]
    assert encode(tokenizer, messages, 512) == [0, 1, *hello, 2, 4, *line]
    spelled = [{"role": "user", "content": "hello<｜User｜>"}]
    assert encode(tokenizer, spelled, 512).count(1) == 1  # the user's own is text
    assert stop_tokens(folder, tokenizer) >= {3}


# ------------------------------------------------------------------------------------------- SentencePiece


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix, tmp_path):
    """The library's own tokens of each text between special tokens, with and without a space before it."""
    library = pytest.importorskip("sentencepiece")
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT.replace("\n", " "), "two spaces, 世界 and a llama", WORDS[:99]] * 9),
        model_prefix=str(tmp_path / "model"), model_type="bpe", vocab_size=420, byte_fallback=True,
        minloglevel=2, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
    )  # fmt: skip
    theirs = library.SentencePieceProcessor(model_file=str(tmp_path / "model.model"))
    n = theirs.get_piece_size()
    types = [2, 3, 3, *(6 if theirs.is_byte(i) else 1 for i in range(3, n))]
    said_of_it = dict(
        model="llama", tokens=[theirs.id_to_piece(i) for i in range(n)], token_type=types,
        scores=[theirs.get_score(i) for i in range(n)], bos_token_id=1, eos_token_id=2, unknown_token_id=0,
    )  # fmt: skip
    ours = tokenizer_of(tmp_path, add_space_prefix=prefix, **said_of_it)
    rng = np.random.default_rng(0)
    random = ["".join(rng.choice([*"abelmp 世🦙", "  ", "llama", " the"], 20)) for _ in range(300)]
    for text in (*random, TEXT, "hello", " a", "  hi", "[INST] hi [/INST]", "ä\nb"):
        assert ours(text).input_ids == [1, *theirs.encode(text)]
        assert ours.decode(ours(text).input_ids, skip_special_tokens=True) == text
        chat = f"<s>{text}</s><s>{text}"
        expected = [1, *theirs.encode(text), 2, 1, *theirs.encode(text)]
        assert ours(chat, add_special_tokens=False).input_ids == expected
    if prefix:  # llama.cpp's default; and that of BOS is true
        (tmp_path / "default").mkdir()
        default = tokenizer_of(tmp_path / "default", **said_of_it)
        assert default.backend_tokenizer.to_str() == ours.backend_tokenizer.to_str()
        (tmp_path / "none").mkdir()
        assert tokenizer_of(tmp_path / "none", **said_of_it, add_bos_token=False)("a").input_ids[0] != 1


@pytest.mark.parametrize("architecture", ["gemma3", "gemma4"])
def test_gemma_tokenizer(architecture, tmp_path):
    """Runs of spaces are tokens. Files of Gemma 3 have no merges: they follow from the vocabulary's order."""
    special, pieces = (
        ["<pad>", "<eos>", "<bos>", "<unk>"],
        ["ab", "▁ab", "bc", "▁▁", "▁c", "▁", "a", "b", "c"],
    )
    merges = [("a", "b"), ("▁", "ab"), ("b", "c"), ("▁", "▁"), ("▁", "c")]
    tokens = [*special, *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    expected = transformers.GemmaTokenizer(vocab={x: i for i, x in enumerate(tokens)}, merges=merges)
    newer = architecture == "gemma4"
    if newer:
        said = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": [" ".join(x) for x in merges]}
    else:
        said = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
    fields = said | {
        "general.architecture": architecture,
        "tokenizer.ggml.tokens": tokens if newer else [x.replace("▁▁", "  ") for x in tokens],
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [*[3] * 4, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_space_prefix": False,
    }  # fmt: skip
    write_tokenizer(fields, tmp_path)
    ours = load_tokenizer(tmp_path)
    for text in ("ab  abc c", "  ab", "abcab ab", "ä\na<eos>b"):
        ids = ours(text).input_ids
        assert ids[0] == 2 and ids[1:] == expected(text, add_special_tokens=False).input_ids
        assert ours.decode(ids[1:]) == text


# --------------------------------------------------------------------------------------------- other fields


def test_without_pre_tokenizer(tmp_path, capsys):
    """As llama.cpp warns: files of Llama 3 from its first weeks are read as if they were GPT-2's."""
    write_model(tmp_path / "model.gguf", fault=unsaid("tokenizer.ggml.pre"))
    folder = open_checkpoint(str(tmp_path / "model.gguf")).folder
    assert capsys.readouterr().err.count("model.gguf: an older file") == 1
    kinds = json.loads((folder / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"]
    assert kinds[0]["pattern"] == {"Regex": GPT2}


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        ({"<|im_end|>": 3}, ["<|im_end|>"]),
        ({"<|eot_id|>": 4, "<|eom_id|>": 1}, ["<|eot_id|>", "<|eom_id|>"]),
        ({"<end_of_turn>": 1, "</s>": 4}, ["<end_of_turn>"]),  # Gemma's tag of HTML
        ({"</s>": 3}, ["</s>"]),
        ({"<|end|>": 3, "<|call|>": 3}, ["<|end|>", "<|call|>"]),
        ({"<|end|>": 3, "<|call|>": 3, "<|return|>": 3}, ["<|return|>", "<|call|>"]),  # of a message
        ({"<|fim_pad|>": 3, "<|file_sep|>": 3}, []),
    ],
)
def test_ends(tokens, ends, tmp_path):
    """An answer ends with each token that ends a turn, though the file names only the end of the text."""
    path = tmp_path / "model.gguf"

    def named(writer):
        listed, types = (writer.kv_data[0][f"tokenizer.ggml.{x}"].value for x in ("tokens", "token_type"))
        listed[1:7] = [*tokens, *(f"<{i}>" for i in range(len(tokens), 5)), "<|endoftext|>"]
        types[1:6] = [*tokens.values(), *[3] * (5 - len(tokens))]

    write_model(path, fault=named)
    folder = open_checkpoint(str(path)).folder
    tokenizer = load_tokenizer(folder)
    found = stop_tokens(folder, tokenizer)
    ids = [1 + list(tokens).index(x) for x in ends]
    assert found == {6, *ids}
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    assert all(added[i].special for i in ids)


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "padding"])
def test_special_tokens_that_are_not_there(name, tmp_path, capsys):
    """As in llama.cpp the field is ignored; 2**32 - 1 is the -1 of some converters."""
    minus_one = gguf.GGUFValue(2**32 - 1, gguf.GGUFValueType.UINT32)
    fields = {f"tokenizer.ggml.{name}_token_id": minus_one}
    write_model(tmp_path / "model.gguf", fault=lambda writer: writer.kv_data[0].update(fields))
    folder = open_checkpoint(str(tmp_path / "model.gguf")).folder
    assert (
        f"{name}_token_id = 4294967295, but the vocabulary has the tokens 0 to 511" in capsys.readouterr().err
    )
    tokenizer = load_tokenizer(folder)
    assert stop_tokens(folder, tokenizer) == {1, 2, 6}
    assert (tokenizer("a").input_ids[0] == 0) == (name != "bos")


def test_a_token_that_is_there_twice():
    with pytest.raises(UserError, match="tokens: 'b' is there twice"):
        read_vocabulary({"tokenizer.ggml.tokens": ["a", "b", *ENDS, "b"]})


def test_templates_with_names(tmp_path):
    """transformers takes the one for tools if there are tools; llama.cpp, too."""
    fields = {
        "general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": [], "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "with tools", "tokenizer.chat_templates": ["tool_use"],
    }  # fmt: skip
    write_tokenizer(fields, tmp_path)
    assert load_tokenizer(tmp_path).chat_template == {"default": "plain", "tool_use": "with tools"}


def test_sampling(tmp_path):
    """What newer files recommend is what an answer is sampled with, as in llama.cpp."""
    path = tmp_path / "model.gguf"

    def recommended(writer):
        for name, value in {"temp": 0.6, "top_k": 20, "penalty_repeat": 1.05, "mirostat": 2}.items():
            said(f"general.sampling.{name}", value)(writer)
        said("tokenizer.ggml.suppress_tokens", [3])(writer)

    write_model(path, fault=recommended)
    found = json.loads((open_checkpoint(str(path)).folder / "generation_config.json").read_text())
    assert found == dict(
        temperature=0.6, top_k=20, repetition_penalty=1.05, mirostat=2, do_sample=True,
        eos_token_id=[6, 2, 1], suppress_tokens=[3],
    )  # fmt: skip
