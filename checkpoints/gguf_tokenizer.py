"""The tokenizer of a GGUF file, written as Hugging Face's tokenizer.json and tokenizer_config.json."""

import json
import os
import pathlib
from typing import Any

from feedback.errors import UserError

LLAMA3 = ("llama3", "llama-v3", "llama-bpe")  # GGUF's names of Llama 3's pre-tokenizer
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def write_tokenizer(fields: dict[str, Any], folder: pathlib.Path) -> None:
    """Write tokenizer.json and tokenizer_config.json to a folder. fields: the file's. Raises UserError."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # on import it advises to install PyTorch
    prefix = "tokenizer."
    settings = {name.removeprefix(prefix): x for name, x in fields.items() if name.startswith(prefix)}
    try:
        tokenizer, special = _made_by_transformers(fields["general.architecture"], settings)
    except ImportError as e:
        raise UserError(f"its tokenizer needs a newer package: pip install -U transformers ({e})") from None
    except Exception as e:  # transformers raises many kinds where the file's description is wrong
        raise UserError(f"no tokenizer can be made of what is said of it ({e})") from None
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    template = {"chat_template": settings["chat_template"]} if "chat_template" in settings else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(special | template))


def _made_by_transformers(architecture: str, settings: dict[str, Any]):
    """-> (a tokenizers.Tokenizer, its special tokens by their names)"""
    from tokenizers.processors import TemplateProcessing
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_TOKENIZER_MAPPING,
        convert_gguf_tokenizer,
    )

    names = GGUF_TOKENIZER_MAPPING["tokenizer"]
    described = {names[x]: settings[x] for x in names if x in settings}
    tokenizer, _ = convert_gguf_tokenizer(architecture, described)
    ids = {name: settings.get(f"ggml.{theirs}_token_id") for name, theirs in SPECIAL.items()}
    special = {name: settings["ggml.tokens"][i] for name, i in ids.items() if i is not None}
    like_llama3 = settings.get("ggml.pre") in LLAMA3
    if like_llama3:
        tokenizer.model.ignore_merges = True  # a word that is a token is not split
    # Where a file does not say whether a text begins with the BOS token, llama.cpp's default counts.
    first = settings.get("ggml.add_bos_token", like_llama3 or settings.get("ggml.model") == "llama")
    around = {"bos_token": first, "eos_token": settings.get("ggml.add_eos_token", False)}
    added = {name: [special[name]] if wanted and name in special else [] for name, wanted in around.items()}
    tokenizer.post_processor = TemplateProcessing(
        single=[*added["bos_token"], "$A", *added["eos_token"]],
        special_tokens=[(special[name], ids[name]) for name, tokens in added.items() if tokens],
    )
    return tokenizer, special
