"""The tokenizer that a GGUF file describes, as the files that Hugging Face's loaders read."""

import json
import os
import pathlib
from typing import Any

from checkpoints.errors import UserError

LLAMA3 = ("llama3", "llama-v3", "llama-bpe")  # what such a file calls the way to split a text into words
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def write_tokenizer(fields: dict[str, Any], folder: pathlib.Path) -> None:
    """Write tokenizer.json and tokenizer_config.json to a folder. fields: the file's. Raises UserError."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it advises, on import, to install PyTorch
    said = {name.removeprefix("tokenizer."): x for name, x in fields.items() if name.startswith("tokenizer.")}
    try:
        tokenizer, special = _made_by_transformers(fields["general.architecture"], said)
    except ImportError as e:
        raise UserError(f"its tokenizer needs a newer package: pip install -U transformers ({e})") from None
    except Exception as e:  # it raises many kinds, for one reason: what is said of the tokenizer
        raise UserError(f"no tokenizer can be made of what is said of it ({e})") from None
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    template = {"chat_template": said["chat_template"]} if "chat_template" in said else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(special | template))


def _made_by_transformers(architecture: str, said: dict[str, Any]):
    """-> (a tokenizers.Tokenizer, its special tokens by their names)"""
    from tokenizers.processors import TemplateProcessing
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_TOKENIZER_MAPPING,
        convert_gguf_tokenizer,
    )

    known = GGUF_TOKENIZER_MAPPING["tokenizer"]
    tokenizer, _ = convert_gguf_tokenizer(architecture, {known[x]: said[x] for x in known if x in said})
    ids = {name: said.get(f"ggml.{theirs}_token_id") for name, theirs in SPECIAL.items()}
    special = {name: said["ggml.tokens"][i] for name, i in ids.items() if i is not None}
    like_llama3 = said.get("ggml.pre") in LLAMA3
    if like_llama3:
        tokenizer.model.ignore_merges = True  # a word that is a token is that
    # What is not said of the first token is as llama.cpp has it.
    first = said.get("ggml.add_bos_token", like_llama3 or said.get("ggml.model") == "llama")
    around = {"bos_token": first, "eos_token": said.get("ggml.add_eos_token", False)}
    added = {name: [special[name]] if wanted and name in special else [] for name, wanted in around.items()}
    tokenizer.post_processor = TemplateProcessing(
        single=[*added["bos_token"], "$A", *added["eos_token"]],
        special_tokens=[(special[name], ids[name]) for name, tokens in added.items() if tokens],
    )
    return tokenizer, special
