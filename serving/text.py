"""Text to tokens and back: tokenizers, chat templates, and the text of an answer while it grows."""

import os
import pathlib
from typing import Any

from checkpoints.errors import UserError
from checkpoints.folders import read_json


def load_tokenizer(folder: pathlib.Path):
    """The folder's tokenizer. Not AutoTokenizer, which also reads config.json and refuses Scout's."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it advises, on import, to install PyTorch
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as e:  # it raises many kinds, for one reason: files that are not a tokenizer's
        raise UserError(f"{folder}: no tokenizer could be loaded from its tokenizer.json ({e})") from None


def encode(tokenizer, text: str | list[dict], vocabulary: int) -> list[int]:
    """Token ids of a text, or of the turns of a chat, {"role", "content"} each, and the head of an answer.

    Raises UserError if the tokenizer or its chat template fail, or do not suit a model of this vocabulary.
    """
    try:
        if isinstance(text, str):
            ids = tokenizer(text).input_ids
        else:
            ids = tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=False)
    except Exception as e:  # a chat template is a program of the checkpoint's, and may raise anything
        raise UserError(f"the checkpoint's tokenizer or chat template failed: {e}") from None
    if not ids or max(ids) >= vocabulary:
        raise UserError(
            f"the checkpoint's tokenizer makes {ids} of {text!r}; config.json has {vocabulary} tokens"
        )
    return ids


def generation_config(folder: pathlib.Path) -> dict[str, Any]:
    """What generation_config.json says; nothing without one."""
    file = folder / "generation_config.json"
    return read_json(file) if file.exists() else {}


def stop_tokens(folder: pathlib.Path, tokenizer) -> frozenset[int]:
    """The ids that end an answer: generation_config.json's, else config.json's, else the tokenizer's."""
    config = read_json(folder / "config.json")
    for source in (generation_config(folder), config, config.get("text_config") or {}):
        ids = source.get("eos_token_id")
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(isinstance(i, int) and 0 <= i < 2**31 for i in ids):
                raise UserError(f"{folder}: eos_token_id = {ids!r} in its configuration is no list of tokens")
            return frozenset(ids)
    return frozenset() if tokenizer.eos_token_id is None else frozenset([tokenizer.eos_token_id])


class TextStream:
    """The text of an answer, as its tokens come.

    What is given out stays as it is: never half a character, nor what may turn out to be the beginning of a
    stop string. The text ends before the first stop string.

    text: all that has been given out. used: the tokens that it took. stopped: whether a stop string was met.
    """

    def __init__(self, tokenizer, silent: frozenset[int] = frozenset(), stop_strings: tuple[str, ...] = ()):
        """silent: tokens that say nothing, beside the tokenizer's special ones."""
        from tokenizers.decoders import DecodeStream

        self.tokenizer, self.silent, self.stop_strings = tokenizer.backend_tokenizer, silent, stop_strings
        self.stream = DecodeStream(skip_special_tokens=True)
        self.text, self.held, self.tokens, self.used, self.stopped = "", "", [], 0, False

    def add(self, tokens: list[int]) -> str:
        """-> the text that these tokens add for certain."""
        before = len(self.text)
        for token in tokens:
            if self.stopped:
                break
            self.used += 1
            if token not in self.silent:
                self.tokens.append(token)
                self._add(self.stream.step(self.tokenizer, token) or "")
        return self.text[before:]

    def finish(self) -> str:
        """-> the rest of the text, as it is, after the last token."""
        if self.stopped:
            return ""
        before = len(self.text)
        whole = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        self._add(whole[before + len(self.held) :])  # half a character, as its replacement sign
        if not self.stopped:
            self.text, self.held = self.text + self.held, ""
        return self.text[before:]

    def _add(self, new: str) -> None:
        self.held += new
        ends = [self.held.find(stop) for stop in self.stop_strings if stop in self.held]
        if ends:
            self.text, self.held, self.stopped = self.text + self.held[: min(ends)], "", True
            return
        keep = max((_overlap(self.held, stop) for stop in self.stop_strings), default=0)
        certain = len(self.held) - keep
        self.text, self.held = self.text + self.held[:certain], self.held[certain:]


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of text may be the first of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
