"""Text to tokens and back: tokenizers, chat templates, and incremental detokenization."""

import functools
import os
import pathlib
from typing import Any

from checkpoints.folders import read_json
from feedback.errors import UserError


def load_tokenizer(folder: pathlib.Path):
    """A folder's tokenizer. AutoTokenizer would also read config.json, and refuses Scout's."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it advises PyTorch on import
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast.from_pretrained
    loaders = {"tokenizer.json": fast, "tokenizer.model": _load_sentencepiece, "merges.txt": _load_gpt2}
    name = next((name for name in loaders if (folder / name).exists()), None)
    if name is None:
        known = "tokenizer.json, tokenizer.model, or vocab.json and merges.txt"
        raise UserError(f"{folder}: no tokenizer in it; download {known}")
    try:
        return loaders[name](folder, local_files_only=True)
    except Exception as e:  # files that are not a tokenizer's raise exceptions of many types
        raise UserError(f"{folder}: no tokenizer could be loaded from its {name} ({e})") from None


def _load_sentencepiece(folder: pathlib.Path, **options):
    """A tokenizer.model without a tokenizer.json: transformers reads its pieces but not its rules for spaces,
    which are added here.
    """
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
    """vocab.json and merges.txt without a tokenizer.json. They do not say how text is split into words; here
    it is split as by GPT-2.
    """
    from transformers import GPT2Tokenizer

    file = folder / "tokenizer_config.json"
    kind = read_json(file).get("tokenizer_class") if file.exists() else None
    if kind not in (None, "GPT2Tokenizer", "GPT2TokenizerFast"):
        raise ValueError(f"it is a {kind}'s, which needs a tokenizer.json")
    return GPT2Tokenizer.from_pretrained(folder, **options)


def encode(tokenizer, text: str | list[dict], vocabulary: int) -> list[int]:
    """The token ids of a text, or of a chat: messages of {"role", "content"} and the generation prompt.

    Raises UserError if the tokenizer or its chat template fails, or a token is outside the vocabulary.
    """
    if not isinstance(text, str) and not tokenizer.chat_template:
        raise UserError("the checkpoint's tokenizer has no chat template; give a text instead of turns")
    try:
        if isinstance(text, str):
            ids = tokenizer(text).input_ids
        else:
            ids = tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=False)
    except Exception as e:  # a chat template is a program, which may raise any exception
        raise UserError(f"the checkpoint's tokenizer or chat template failed: {e}") from None
    if not ids or max(ids) >= vocabulary:
        raise UserError(
            f"the checkpoint's tokenizer makes {ids} of {text!r}; config.json has {vocabulary} tokens"
        )
    return ids


def has_surrogate(text: str) -> bool:
    """Whether a text has a surrogate code point, which no encoding can represent.

    Python decodes invalid bytes of the command line to surrogates, and JSON can escape a lone one.
    """
    return any("\ud800" <= c <= "\udfff" for c in text)


def generation_config(folder: pathlib.Path) -> dict[str, Any]:
    """The content of generation_config.json; empty if there is none."""
    file = folder / "generation_config.json"
    return read_json(file) if file.exists() else {}


def stop_tokens(folder: pathlib.Path, tokenizer) -> frozenset[int]:
    """Token ids that end an answer: generation_config.json's, else config.json's, else the tokenizer's."""
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
    """Incremental detokenization: the text of an answer while its tokens arrive.

    Text that has been returned never changes: an incomplete character is held back, and so is what may be the
    beginning of a stop string. The text ends before the first stop string.

    text: all that has been returned. used: the tokens that it took. stopped: whether a stop string was found.
    """

    def __init__(self, tokenizer, hidden: frozenset[int] = frozenset(), stop_strings: tuple[str, ...] = ()):
        """hidden: token ids that are left out of the text, beside the tokenizer's special tokens."""
        from tokenizers.decoders import DecodeStream

        self.tokenizer, self.hidden, self.stop_strings = tokenizer.backend_tokenizer, hidden, stop_strings
        self.new_decoder = functools.partial(DecodeStream, skip_special_tokens=True)
        self.decoder = self.new_decoder()
        self.last, self.pending = [], []  # the last token that completed a character, and those after it
        self.text, self.held_back, self.used, self.stopped = "", "", 0, False

    def add(self, tokens: list[int]) -> str:
        """Add tokens: -> the new text."""
        before = len(self.text)
        for token in tokens:
            if self.stopped:
                break
            self.used += 1
            if token not in self.hidden:
                self.pending.append(token)
                try:
                    new = self.decoder.step(self.tokenizer, token) or ""
                except Exception:  # at some incomplete characters that follow byte tokens
                    new, self.decoder = self._pending_text(), self.new_decoder([token])
                if new:
                    self.last, self.pending = [token], []
                self._append(new)
        return self.text[before:]

    def finish(self) -> str:
        """After the last token: -> the rest of the text, with what was held back."""
        if self.stopped:
            return ""
        before = len(self.text)
        self._append(self._pending_text())
        if not self.stopped:
            self.text, self.held_back = self.text + self.held_back, ""
        return self.text[before:]

    def _pending_text(self) -> str:
        """The text of the pending tokens, with U+FFFD for an incomplete character."""
        decode = self.tokenizer.decode
        return decode(self.last + self.pending)[len(decode(self.last)) :]

    def _append(self, new: str) -> None:
        self.held_back += new
        ends = [self.held_back.find(stop) for stop in self.stop_strings if stop in self.held_back]
        if ends:
            self.text, self.held_back, self.stopped = self.text + self.held_back[: min(ends)], "", True
            return
        keep = max((_overlap(self.held_back, stop) for stop in self.stop_strings), default=0)
        certain = len(self.held_back) - keep
        self.text, self.held_back = self.text + self.held_back[:certain], self.held_back[certain:]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of the text that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
