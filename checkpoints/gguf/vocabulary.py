"""The tokenizer of a GGUF file, written as Hugging Face's tokenizer.json and tokenizer_config.json.

A file has a vocabulary, with the type of each token, and names the rules by which llama.cpp splits a text.
Two kinds of tokenizers are read: byte-level BPE ("gpt2") and SentencePiece's BPE ("llama"). The reader in
transformers 5.24 is not used: it skips special tokens with characters outside GPT-2's byte alphabet, such as
DeepSeek's <｜User｜>, and puts no space before a text that follows a special token.

Sources: ggml-org/llama.cpp, src/llama-vocab.cpp; the regular expressions are from the tokenizer.json or
tiktoken file of the models that the pre-tokenizers are named after.
"""

import collections
import dataclasses
import json
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from distributed.exchange import warn
from feedback.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # types of tokens; 6: a byte
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Tokens that end a turn or a text, whatever their type in the file. llama.cpp also ends at </s> of any type,
# which in Gemma 3 is a tag of HTML that an answer may contain.
ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>",
    "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<EOT>", "[EOT]", "[EOS]",
)  # fmt: skip
CONTROL_ENDS = ("</s>", "<eos>")  # only if their type is CONTROL
HARMONY = {"<|return|>", "<|call|>"}  # where these end an answer, <|end|> ends one of its messages
# Fields after "tokenizer.ggml." that are used, and those that cannot change the tokens of a text.
USED = """add_bos_token add_eos_token add_space_prefix bos_token_id eom_token_id eos_token_id eot_token_id
    merges model padding_token_id pre scores suppress_tokens token_type tokens unknown_token_id"""
NO_EFFECT = {
    "prompts for code that is to be filled in": """fim_mid_token_id fim_pad_token_id fim_pre_token_id
        fim_rep_token_id fim_sep_token_id fim_suf_token_id middle_token_id prefix_token_id suffix_token_id""",
    "models that do not write texts": "cls_token_id mask_token_id seperator_token_id token_type_count",
}
COPIES = ("huggingface.json",)  # of what the other fields say; llama.cpp does not read it


# ------------------------------------------------------------------------------------------ pre-tokenizers


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """What the name of a pre-tokenizer stands for.

    splits: regular expressions; a text is split into words by one after the other.
    whole:  whether a word that is itself a token stays whole; so it is in vocabularies of tiktoken.
    bos:    whether a text begins with the BOS token if the file does not say.
    nfc:    whether a text is first brought into Unicode's normalization form C.
    """

    splits: tuple[str, ...]
    whole: bool = False
    bos: bool = False
    nfc: bool = False


CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
WITH_MARKS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(letters: str, digits: str, after_signs: str = r"[\r\n]*", no_signs: str = r"\p{L}\p{N}") -> str:
    """Words of letters, of so many digits, of signs, and of spaces. no_signs: besides spaces."""
    return "|".join([letters, r"\p{N}" + digits, rf" ?[^\s{no_signs}]+" + after_signs, SPACES])


def _cased(upper: str = UPPER, lower: str = LOWER, contraction: str = CONTRACTION + "?") -> str:
    """Words of letters that end before a capital which follows a small letter."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return f"{first}{upper}*{lower}+{contraction}|{first}{upper}+{lower}*{contraction}"


def _without_chinese(letters: str) -> str:
    return letters.removesuffix("]") + r"&&[^\p{Han}]]"


GPT2 = PreTokenizer((r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",))
LLAMA3 = PreTokenizer((_words(f"{CONTRACTION}|{LETTERS}", "{1,3}"),), whole=True, bos=True)
QWEN2 = PreTokenizer((_words(f"{CONTRACTION}|{LETTERS}", ""),))
GPT4O = PreTokenizer((_words(_cased(), "{1,3}", r"[\r\n/]*"),), whole=True)
PRE_TOKENIZERS = {
    **dict.fromkeys(("default", "gpt-2", "gpt2"), GPT2),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0"), LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4"), PreTokenizer(LLAMA3.splits)),
    "qwen2": dataclasses.replace(QWEN2, nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), QWEN2),
    "qwen35": PreTokenizer(
        (_words(f"{CONTRACTION}|{WITH_MARKS}", "", no_signs=r"\p{L}\p{M}\p{N}"),), nfc=True
    ),
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
    "minimax-m2": PreTokenizer(GPT4O.splits),
    "tekken": PreTokenizer((_words(_cased(contraction=""), "", r"[\r\n/]*"),), whole=True, bos=True),
    "kimi-k2": PreTokenizer(
        (_words(r"\p{Han}+|" + _cased(_without_chinese(UPPER), _without_chinese(LOWER)), "{1,3}"),),
        whole=True,
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": PreTokenizer(
        (
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES,
        )
    ),
    "seed-coder": PreTokenizer((_words(f"{CONTRACTION}|{LETTERS}", "", ""),)),
    "smollm": PreTokenizer((r"\p{N}", *GPT2.splits)),
}


# -------------------------------------------------------------------------------------------- vocabularies


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file, and the type of each."""

    tokens: list[str]
    types: list[int]

    @property
    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    def of(self, *types: int) -> list[str]:
        """The tokens of these types."""
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    @property
    def ends(self) -> list[int]:
        """The tokens that end a turn or a text."""
        control = {*ENDS, *self.of(CONTROL)}
        known = [x for x in (*ENDS, *CONTROL_ENDS) if x in control]
        if HARMONY.issubset(self.tokens):
            known.remove("<|end|>")
        ids = self.ids
        return [ids[x] for x in known if x in ids]

    def special(self, fields: dict[str, Any], name: str) -> int | None:
        """The token that a field names by its number; None, as in llama.cpp, if there is no such token.

        fields: the file's. name: "bos" and the like. Raises UserError if it is no number.
        """
        field = f"tokenizer.ggml.{name}_token_id"
        value = fields.get(field)
        if value is None or type(value) is int and 0 <= value < len(self.tokens):
            return value
        what = f"{field} = {value!r}, but the vocabulary has the tokens 0 to {len(self.tokens) - 1}"
        if type(value) is not int:
            raise UserError(what)
        warn(f"{what}: the field is ignored")
        return None


def read_vocabulary(fields: dict[str, Any]) -> Vocabulary:
    """Raises UserError if a token is in the file twice, or not every token has a type."""
    tokens = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(x, str) for x in tokens):
        raise UserError("tokenizer.ggml.tokens is no list of tokens")
    types = fields.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise UserError(f"tokenizer.ggml.token_type does not give each of {len(tokens)} tokens its type")
    twice = [token for token, count in collections.Counter(tokens).items() if count > 1]
    if twice:
        raise UserError(f"tokenizer.ggml.tokens: {twice[0]!r} is there twice")
    return Vocabulary(tokens, [CONTROL if x in ENDS else kind for x, kind in zip(tokens, types, strict=True)])


# ---------------------------------------------------------------------------------------------- tokenizers


def write_tokenizer(fields: dict[str, Any], folder: pathlib.Path) -> None:
    """Write tokenizer.json and tokenizer_config.json to a folder. fields: the file's. Raises UserError."""
    prefix = "tokenizer."
    settings = {name.removeprefix(prefix): x for name, x in fields.items() if name.startswith(prefix)}
    _refuse_unknown(settings)
    vocabulary = read_vocabulary(fields)
    ids = {name: vocabulary.special(fields, theirs) for name, theirs in SPECIAL.items()}
    special = {name: vocabulary.tokens[i] for name, i in ids.items() if i is not None}
    try:
        tokenizer = _tokenizer(fields["general.architecture"], settings, vocabulary)
        tokenizer.post_processor = _post_processor(settings, special, vocabulary.ids)
    except UserError:
        raise
    except Exception as e:  # tokenizers raises many kinds where the file's description is wrong
        raise UserError(f"no tokenizer can be made of what is said of it ({e})") from None
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(special | _chat_templates(settings)))


def _refuse_unknown(settings: dict[str, Any]) -> None:
    """Raises UserError for a field that is neither used nor known to have no effect, unless it is empty."""
    known = {f"ggml.{name}" for names in (USED, *NO_EFFECT.values()) for name in names.split()}
    for name, value in settings.items():
        is_template = re.match(r"chat_templates?(\.|$)", name)
        if value and not is_template and name not in known and name not in COPIES:
            raise UserError(f"tokenizer.{name} = {str(value)[:40]} is not supported")


def _tokenizer(architecture: str, settings: dict[str, Any], vocabulary: Vocabulary):
    """A tokenizers.Tokenizer that does not add special tokens to texts."""
    from tokenizers import AddedToken

    model = settings.get("ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(pre_tokenizer(settings), settings["ggml.merges"], vocabulary)
    elif model in ("llama", "gemma4"):
        tokenizer = _sentencepiece(architecture, settings, vocabulary)
    else:
        raise UserError(f"tokenizer.ggml.model = {model!r} is not supported (gpt2, llama, gemma4)")
    # They are found in a text before it is split. In the tokens of a chat, the first kind is the template's.
    for types, special in (((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)):
        tokenizer.add_tokens(
            [AddedToken(x, normalized=False, special=special) for x in vocabulary.of(*types)]
        )
    return tokenizer


def pre_tokenizer(settings: dict[str, Any]) -> PreTokenizer:
    """Raises UserError if its name is not known: the model was trained on other tokens than would be made."""
    name = settings.get("ggml.pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise UserError(
            f"tokenizer.ggml.pre = {name!r} is not known, so the tokenizer.json of the model's own "
            "repository is needed: give a folder of that repository"
        )
    return PRE_TOKENIZERS[name]


def _byte_level(pre: PreTokenizer, merges: list[str], vocabulary: Vocabulary):
    """BPE of a text's bytes, which GPT-2's printable letters stand for."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pairs = [(x[: x.index(" ", 1)], x[x.index(" ", 1) + 1 :]) for x in merges]
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, pairs, ignore_merges=pre.whole))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits]
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(architecture: str, settings: dict[str, Any], vocabulary: Vocabulary):
    """BPE of a text's characters, of which those without a token are bytes. ▁ stands for a space."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    # Files of Gemma have real spaces in a token of several spaces.
    spaces = {token: "▁" * len(token) for token in vocabulary.of(NORMAL) if not token.strip(" ")}
    ids = {spaces.get(token, token): i for token, i in vocabulary.ids.items()}
    ordinary = [spaces.get(token, token) for token in vocabulary.of(NORMAL, UNUSED)]
    gemma = architecture in ("gemma3", "gemma4")
    scores = dict(zip(ids, settings["ggml.scores"], strict=True))
    if gemma:  # whose scores are not in the order of its merges
        scores = {token: -i for token, i in ids.items()}
    merges = settings.get("ggml.merges")
    pairs = [tuple(x.split(" ")) for x in merges] if merges else _merges(ordinary, scores)
    unknown = vocabulary.of(UNKNOWN)
    tokenizer = Tokenizer(
        models.BPE(ids, pairs, unk_token=unknown[0] if unknown else None, fuse_unk=True, byte_fallback=True)
    )
    encoding = [normalizers.Replace(" ", "▁")]
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if _flag(settings, "add_space_prefix", not gemma):  # before a text that no other precedes
        encoding.insert(0, normalizers.Prepend("▁"))
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(encoding), decoders.Sequence(decoding)
    return tokenizer


def _merges(tokens: Iterable[str], scores: dict[str, float]) -> list[tuple[str, str]]:
    """The pairs of tokens that make another one, the token with the highest score first.

    scores: of all tokens. Of two pairs that make the same token the one with the longer first token precedes.
    """
    found = []
    for token in tokens:
        pairs = ((token[:i], token[i:]) for i in range(1, len(token)))
        found += [(scores[token], len(x), (x, y)) for x, y in pairs if x in scores and y in scores]
    found.sort(key=lambda pair: pair[:2], reverse=True)
    return [pair for _, _, pair in found]


def _flag(settings: dict[str, Any], name: str, default: bool) -> bool:
    """A field that is true or false. Raises UserError."""
    value = settings.get(f"ggml.{name}", default)
    if not isinstance(value, bool):
        raise UserError(f"tokenizer.ggml.{name} = {str(value)[:40]} is neither true nor false")
    return value


def _post_processor(settings: dict[str, Any], special: dict[str, str], ids: dict[str, int]):
    """A tokenizers.TemplateProcessing that begins and ends a text as the file says.

    special: the special tokens by their names. ids: of all tokens.
    """
    from tokenizers.processors import TemplateProcessing

    # Where a file does not say whether a text begins with the BOS token, llama.cpp's default counts.
    by_default = settings["ggml.model"] in ("llama", "gemma4") or pre_tokenizer(settings).bos
    first = _flag(settings, "add_bos_token", by_default) and special.get("bos_token")
    last = _flag(settings, "add_eos_token", False) and special.get("eos_token")
    return TemplateProcessing(
        single=[token for token in (first, "$A", last) if token],
        special_tokens=[(token, ids[token]) for token in (first, last) if token],
    )


def _chat_templates(settings: dict[str, Any]) -> dict[str, Any]:
    """The chat template, or a list of templates with names, as tokenizer_config.json has them."""
    first = "chat_template."
    named = {name.removeprefix(first): x for name, x in settings.items() if name.startswith(first)}
    default = settings.get("chat_template")
    for name, template in {"": default or "", **named}.items():
        if not isinstance(template, str):
            raise UserError(f"tokenizer.chat_template {name} = {str(template)[:40]} is no text")
    if not named:
        return {} if default is None else {"chat_template": default}
    named |= {} if default is None else {"default": default}
    return {"chat_template": [dict(name=name, template=x) for name, x in named.items()]}
