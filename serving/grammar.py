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
            raise UserError(f"the grammar allows no more: {one_line(error)}")
        return self.matcher.is_stopped()


@dataclasses.dataclass(frozen=True)
class Grammar:
    """What `make_grammar` has made. source: in llguidance's own form."""

    tokens: LLTokenizer
    kind: str
    what: Any
    source: str

    def start(self) -> Constraint:
        return Constraint(LLMatcher(self.tokens, self.source))


def token_bytes(tokenizer, vocabulary: int, ends: frozenset[int]) -> LLTokenizer:
    """A tokenizer as bytes per token, which grammars work with. ends: tokens that end an answer."""
    return from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=sorted(ends) or None)


def make_grammar(tokens: LLTokenizer, kind: str, what) -> Grammar:
    """kind: "json_schema", of which `what` is the object, "regex" or "lark". UserError if it is none."""
    if kind == "json_schema":
        source = LLMatcher.grammar_from_json_schema(json.dumps(what), defaults=JSON_STYLE)
    else:
        source = dict(regex=LLMatcher.grammar_from_regex, lark=LLMatcher.grammar_from_lark)[kind](what)
    failed, messages = LLMatcher.validate_grammar_with_warnings(source, tokens)
    if failed:
        raise UserError(one_line(messages[0]))
    return Grammar(tokens, kind, what, source)


def one_line(message: str) -> str:
    return " ".join(message.split())[:300]
