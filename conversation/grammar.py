"""Structured output: answers that match a JSON schema, a regular expression or a grammar.

After each token llguidance computes, on the host, a bitmask of the tokens that may come next;
`sharding.sampling.sample` masks the others.
"""

import dataclasses
import json
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from feedback.errors import UserError

# JSON as json.dumps writes it. Where a grammar allows any whitespace, small models write it without end.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Of a grammar, which takes a thousand times its size in memory; and of all grammars that are kept.
MAX_CHARACTERS = 256 << 10
GRAMMAR_STUCK = "the grammar allows nothing more, or is too complex"


class Constraint:
    """The state of an answer in its grammar."""

    def __init__(self, matcher: LLMatcher):
        self.matcher = matcher

    def fill_bitmask(self, bits: np.ndarray) -> None:
        """Set the bits of the tokens that may come next: [W] uint32, see Sampling.allowed."""
        self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    def accept_token(self, token: int) -> bool:
        """Advance by a token: -> whether the text is complete. UserError if no text can continue it."""
        self.matcher.consume_token(token)
        if error := self.matcher.get_error():
            raise UserError(f"{GRAMMAR_STUCK}: {one_line(error)}")
        return self.matcher.is_stopped()

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next, without advancing by them; none where the grammar leaves a choice.

        They are the tokens that the bitmasks would allow one by one. Where only one text can continue the
        answer, llguidance allows the tokens of that text's own tokenization and no other spelling of it.
        """
        return self.matcher.compute_ff_tokens()


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A compiled grammar. kind, source: the arguments of `make_grammar`. matcher: in the initial state."""

    kind: str
    source: Any
    matcher: LLMatcher

    def start(self) -> Constraint:
        return Constraint(self.matcher.deep_copy())


class KeptGrammars:
    """The grammars that were used last, for later requests with the same schema or tools.

    limit: characters of all of them.
    """

    def __init__(self, limit: int):
        self.limit, self.lock = limit, threading.Lock()
        self.kept: OrderedDict[tuple[LLTokenizer, str, str], Grammar] = OrderedDict()

    def find(self, key: tuple[LLTokenizer, str, str]) -> Grammar | None:
        """The grammar of a tokenizer, kind and text, as the one that was used last."""
        with self.lock:
            if key in self.kept:
                self.kept.move_to_end(key)
            return self.kept.get(key)

    def add(self, key: tuple[LLTokenizer, str, str], grammar: Grammar) -> None:
        with self.lock:
            self.kept[key] = grammar
            while sum(len(text) for _, _, text in self.kept) > self.limit:
                self.kept.popitem(last=False)


KEPT = KeptGrammars(MAX_CHARACTERS)


def grammar_tokenizer(tokenizer, vocabulary: int, stop_ids: frozenset[int]) -> LLTokenizer:
    """llguidance's tokenizer, which knows the bytes of each token. stop_ids: tokens that end an answer."""
    return from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=sorted(stop_ids) or None)


def make_grammar(tokenizer: LLTokenizer, kind: str, source) -> Grammar:
    """A grammar, compiled unless it is kept. kind: "json_schema", whose source is an object, or "regex" or
    "lark", a text.

    It may take seconds, during which other Python threads run. Raises UserError if the grammar is invalid, or
    nothing matches it.
    """
    text = json.dumps(source) if kind == "json_schema" else source
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"{len(text)} characters are more than {MAX_CHARACTERS}")
    if found := KEPT.find(key := (tokenizer, kind, text)):
        return found
    grammar = Grammar(kind, source, compiled_matcher(*key))
    KEPT.add(key, grammar)
    return grammar


def compiled_matcher(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """The matcher of a grammar in its initial state. Raises UserError."""
    try:
        if kind == "json_schema":
            compiled = LLMatcher.grammar_from_json_schema(text, defaults=JSON_STYLE)
        else:
            compiled = dict(regex=LLMatcher.grammar_from_regex, lark=LLMatcher.grammar_from_lark)[kind](text)
    except ValueError as e:
        raise UserError(one_line(str(e))) from None
    matcher = LLMatcher(tokenizer, compiled, log_level=0)
    if not matcher.get_error():
        Constraint(matcher).fill_bitmask(np.zeros(-(-tokenizer.vocab_size // 32), np.uint32))
    if error := matcher.get_error():
        raise UserError(one_line(error))
    return matcher


def one_line(message: str) -> str:
    """llguidance's message without the state of its parser."""
    return " ".join(message.partition("<state>")[0].split())[:300]
