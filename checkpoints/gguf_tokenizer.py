"""The tokenizer of a GGUF file, written as Hugging Face's tokenizer.json and tokenizer_config.json."""

import json
import os
import pathlib
from typing import Any

from feedback.errors import UserError

LLAMA3 = ("llama3", "llama-v3", "llama-bpe")  # GGUF's names of Llama 3's pre-tokenizer
# Pre-tokenizers of vocabularies that were made with tiktoken: a word that is a token is not split.
WHOLE_WORDS = (*LLAMA3, "gpt-4o", "llama4", "kimi-k2")
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
CONTROL, USER_DEFINED = 3, 4  # types of tokens that are found in a text before it is split
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Pre-tokenizers that transformers does not know: a text is split by one regular expression after the other.
# Sources: the tokenizer.json of DeepSeek-V3 and of SmolLM2, tokenization_kimi.py of Kimi-K2.
SPLITS = {
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "kimi-k2": (
        rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SUFFIX}"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "smollm": (r"\p{N}", GPT2),
}
LIKE_GPT2 = (None, "default", "gpt-2", "gpt2")  # what transformers takes any other pre-tokenizer for


def write_tokenizer(fields: dict[str, Any], folder: pathlib.Path) -> None:
    """Write tokenizer.json and tokenizer_config.json to a folder. fields: the file's. Raises UserError."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # on import it advises to install PyTorch
    prefix = "tokenizer."
    settings = {name.removeprefix(prefix): x for name, x in fields.items() if name.startswith(prefix)}
    try:
        tokenizer = _tokenizer(fields["general.architecture"], settings)
        special = _add_special_tokens(tokenizer, settings)
    except UserError:
        raise
    except ImportError as e:
        raise UserError(f"its tokenizer needs a newer package: pip install -U transformers ({e})") from None
    except Exception as e:  # transformers raises many kinds where the file's description is wrong
        raise UserError(f"no tokenizer can be made of what is said of it ({e})") from None
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    template = {"chat_template": settings["chat_template"]} if "chat_template" in settings else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(special | template))


def _tokenizer(architecture: str, settings: dict[str, Any]):
    """A tokenizers.Tokenizer that does not add special tokens to texts."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS,
        GGUF_TOKENIZER_MAPPING,
        convert_gguf_tokenizer,
    )

    pre = settings.get("ggml.pre")
    if settings.get("ggml.model") == "gpt2":
        if pre in SPLITS:
            return _byte_level(settings, SPLITS[pre])
        if pre not in LIKE_GPT2 and pre not in GGUF_PRE_TOKENIZER_SPLITS:
            raise UserError(
                f"tokenizer.ggml.pre = {pre!r} is not known, so the tokenizer.json of the model's own "
                "repository is needed: give a folder of that repository"
            )
    names = GGUF_TOKENIZER_MAPPING["tokenizer"]
    described = {names[x]: settings[x] for x in names if x in settings}
    tokenizer, _ = convert_gguf_tokenizer(architecture, described)
    if pre in WHOLE_WORDS:
        tokenizer.model.ignore_merges = True
    return tokenizer


def _byte_level(settings: dict[str, Any], splits: tuple[str, ...]):
    """Byte-level BPE of texts that these regular expressions have split, one after the other."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokens, merges = settings["ggml.tokens"], settings["ggml.merges"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
            ignore_merges=settings.get("ggml.pre") in WHOLE_WORDS,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), "isolated") for split in splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = settings.get("ggml.token_type", [])
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        found = [x for x, its_kind in zip(tokens, types, strict=False) if its_kind == kind]
        tokenizer.add_tokens([AddedToken(x, normalized=False, special=special) for x in found])
    return tokenizer


def _add_special_tokens(tokenizer, settings: dict[str, Any]) -> dict[str, str]:
    """Have the tokenizer begin and end a text as the file says -> the special tokens by their names."""
    from tokenizers.processors import TemplateProcessing

    ids = {name: settings.get(f"ggml.{theirs}_token_id") for name, theirs in SPECIAL.items()}
    special = {name: settings["ggml.tokens"][i] for name, i in ids.items() if i is not None}
    # Where a file does not say whether a text begins with the BOS token, llama.cpp's default counts.
    by_default = settings.get("ggml.pre") in LLAMA3 or settings.get("ggml.model") == "llama"
    first = settings.get("ggml.add_bos_token", by_default)
    around = {"bos_token": first, "eos_token": settings.get("ggml.add_eos_token", False)}
    added = {name: [special[name]] if wanted and name in special else [] for name, wanted in around.items()}
    tokenizer.post_processor = TemplateProcessing(
        single=[*added["bos_token"], "$A", *added["eos_token"]],
        special_tokens=[(special[name], ids[name]) for name, tokens in added.items() if tokens],
    )
    return special
