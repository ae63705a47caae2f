"""What an answer must match: a JSON schema, a regular expression, a grammar. llguidance says which tokens may
come next, on the host; `sample` leaves the others out.
"""

import dataclasses
import json
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from checkpoints.errors import UserError

# As json.dumps writes it. Where a model may put any spaces, a small one goes on with them for ever.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LONGEST = 256 << 10  # characters of a grammar: it takes a thousand times the memory
NO_WAY_ON = "the grammar allows nothing more, or is too complex"


class Constraint:
    """See serving.requests.Constraint."""

    def __init__(self, matcher: LLMatcher):
        self.matcher = matcher

    def write_allowed(self, bits: np.ndarray) -> None:
        self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    def accept(self, token: int) -> bool:
        """UserError where the grammar is too complex to go on."""
        self.matcher.consume_token(token)
        if error := self.matcher.get_error():
            raise UserError(f"{NO_WAY_ON}: {one_line(error)}")
        return self.matcher.is_stopped()


@dataclasses.dataclass(frozen=True)
class Grammar:
    """What `make_grammar` has made of a kind and a text. matcher: at the beginning of a text."""

    kind: str
    what: Any
    matcher: LLMatcher

    def start(self) -> Constraint:
        return Constraint(self.matcher.deep_copy())


def token_bytes(tokenizer, vocabulary: int, ends: frozenset[int]) -> LLTokenizer:
    """A tokenizer as bytes per token, which grammars work with. ends: tokens that end an answer."""
    return from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=sorted(ends) or None)


def make_grammar(tokens: LLTokenizer, kind: str, what) -> Grammar:
    """kind: "json_schema", of which `what` is the object, "regex" or "lark". UserError if nothing matches it.

    It may take seconds, of which Python's other threads lose none.
    """
    text = json.dumps(what) if kind == "json_schema" else what
    if len(text) > LONGEST:
        raise UserError(f"{len(text)} characters are more than {LONGEST}")
    try:
        if kind == "json_schema":
            source = LLMatcher.grammar_from_json_schema(text, defaults=JSON_STYLE)
        else:
            source = dict(regex=LLMatcher.grammar_from_regex, lark=LLMatcher.grammar_from_lark)[kind](text)
    except ValueError as e:
        raise UserError(one_line(str(e))) from None
    matcher = LLMatcher(tokens, source, log_level=0)
    if not matcher.get_error():
        Constraint(matcher).write_allowed(np.zeros(-(-tokens.vocab_size // 32), np.uint32))
    if error := matcher.get_error():
        raise UserError(one_line(error))
    return Grammar(kind, what, matcher)


def one_line(message: str) -> str:
    """Without the state of llguidance's parser."""
    return " ".join(message.partition("<state>")[0].split())[:300]
