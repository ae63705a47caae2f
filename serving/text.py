"""Text to tokens and back: tokenizers, chat templates, and the text of an answer while it grows."""

import functools
import os
import pathlib
from typing import Any

from checkpoints.errors import UserError
from checkpoints.folders import read_json


def load_tokenizer(folder: pathlib.Path):
    """The folder's tokenizer. Not AutoTokenizer, which also reads config.json and refuses Scout's."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it advises, on import, to install PyTorch
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast.from_pretrained
    loaders = {"tokenizer.json": fast, "tokenizer.model": _load_sentencepiece, "merges.txt": _load_gpt2}
    name = next((name for name in loaders if (folder / name).exists()), None)
    if name is None:
        known = "tokenizer.json, tokenizer.model, or vocab.json and merges.txt"
        raise UserError(f"{folder}: no tokenizer in it; download {known}")
    try:
        return loaders[name](folder, local_files_only=True)
    except Exception as e:  # it raises many kinds, for one reason: files that are not a tokenizer's
        raise UserError(f"{folder}: no tokenizer could be loaded from its {name} ({e})") from None


def _load_sentencepiece(folder: pathlib.Path, **options):
    """A tokenizer.model alone. transformers reads its pieces; how it treats spaces is added here."""
    from tokenizers import Regex, decoders, normalizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import SentencePieceExtractor

    try:
        spec = SentencePieceExtractor(str(folder / "tokenizer.model")).proto.normalizer_spec
    except ImportError:
        raise ImportError("two packages are missing: pip install sentencepiece protobuf") from None
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, **options)
    tokenizer.add_bos_token = tokenizer.init_kwargs.get("add_bos_token", True)
    encoding = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.remove_extra_whitespaces:
        encoding.append(normalizers.Replace(Regex(r"\A +| +\z|(?<= ) +"), ""))
    if spec.add_dummy_prefix:
        encoding.append(normalizers.Prepend("▁"))
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([*encoding, normalizers.Replace(" ", "▁")])
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _load_gpt2(folder: pathlib.Path, **options):
    """vocab.json and merges.txt alone, which do not say how a text is split into words: as GPT-2 does."""
    from transformers import GPT2Tokenizer

    file = folder / "tokenizer_config.json"
    kind = read_json(file).get("tokenizer_class") if file.exists() else None
    if kind not in (None, "GPT2Tokenizer", "GPT2TokenizerFast"):
        raise ValueError(f"it is a {kind}'s, which needs a tokenizer.json")
    return GPT2Tokenizer.from_pretrained(folder, **options)


def encode(tokenizer, text: str | list[dict], vocabulary: int) -> list[int]:
    """Token ids of a text, or of the turns of a chat, {"role", "content"} each, and the head of an answer.

    Raises UserError if the tokenizer or its chat template fail, or do not suit a model of this vocabulary.
    """
    if not isinstance(text, str) and not tokenizer.chat_template:
        raise UserError("the checkpoint's tokenizer has no chat template; give a text instead of turns")
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


def is_broken(text: str) -> bool:
    """Whether there is half a surrogate pair in it, which no encoding has.

    Python makes it of bytes that are no text, and JSON may name it.
    """
    return any("\ud800" <= c <= "\udfff" for c in text)


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
        self.new_stream = functools.partial(DecodeStream, skip_special_tokens=True)
        self.stream = self.new_stream()
        self.last, self.pending = [], []  # the last token that gave text, and those after it
        self.text, self.held, self.used, self.stopped = "", "", 0, False

    def add(self, tokens: list[int]) -> str:
        """-> the text that these tokens add for certain."""
        before = len(self.text)
        for token in tokens:
            if self.stopped:
                break
            self.used += 1
            if token not in self.silent:
                self.pending.append(token)
                try:
                    new = self.stream.step(self.tokenizer, token) or ""
                except Exception:  # tokens of single bytes made a character, and then only part of another
                    new, self.stream = self._rest(), self.new_stream([token])
                if new:
                    self.last, self.pending = [token], []
                self._add(new)
        return self.text[before:]

    def finish(self) -> str:
        """-> the rest of the text, as it is, after the last token."""
        if self.stopped:
            return ""
        before = len(self.text)
        self._add(self._rest())
        if not self.stopped:
            self.text, self.held = self.text + self.held, ""
        return self.text[before:]

    def _rest(self) -> str:
        """The text of the pending tokens: half a character, as its replacement sign."""
        decode = self.tokenizer.decode
        return decode(self.last + self.pending)[len(decode(self.last)) :]

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
