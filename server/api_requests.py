"""Requests of the API: every field is checked, and a field that is not supported is refused."""

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from llguidance import LLTokenizer

from checkpoints.tensor_files import parse_json
from feedback.errors import UserError
from serving.grammar import Grammar, make_grammar
from serving.requests import RESTRICTIONS, Request, check_sampling
from serving.text import TextStream, encode, has_surrogate
from sharding.sampling import MAX_BIASES, MAX_TOP_LOGPROBS, Bias, Sampling

MAX_SAMPLES = 128  # answers of one request: n times its prompts
MAX_STOPS = 16
COMPLETION_TOKENS = 16  # the default max_tokens of completions, as in OpenAI's API
ROLES = ("system", "developer", "user", "assistant", "tool")
USAGE = ("include_usage", "continuous_usage_stats")
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
FORMATS = "text", "json_object"  # types of response_format: OpenAI's, and two more
SOURCE_FORMATS = "json_schema", "regex", "grammar"  # those with a field of this name

COMMON = {
    "model", "stream", "stream_options", "max_tokens", "temperature", *RESTRICTIONS, *PENALTIES, "stop",
    "stop_token_ids", "ignore_eos", "seed", "n", "logprobs", "logit_bias", "response_format", "user",
}  # fmt: skip
CHAT = COMMON | {"messages", "max_completion_tokens", "top_logprobs"}
COMPLETION = COMMON | {"prompt", "echo"}


class BadRequest(Exception):
    """A request that is refused. param: the wrong field, if any. status: HTTP's. code: OpenAI's."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The model that the server has loaded, and its defaults for fields that a request leaves out.

    names: the first is the one that responses have. max_len: positions of a row. stop_ids: tokens that end an
    answer. max_new_tokens: None: what is left of the row, of a completion 16. created: seconds since 1970.
    """

    names: tuple[str, ...]
    tokenizer: Any
    grammar_tokenizer: LLTokenizer
    vocabulary: int
    max_len: int
    stop_ids: frozenset[int]
    sampling: Sampling
    encode_chat: Callable[[list[dict]], list[int]]
    stop: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    created: int = 0


@dataclasses.dataclass(frozen=True)
class ApiRequest:
    """A request of the API, checked.

    chat: whether it is a chat or a completion. requests: of the engine, n samples for each prompt in turn.
    texts: each prompt's text, None if it was given as token ids. stop: texts that end an answer.
    hidden_tokens: token ids that are left out of the text. usage: those of USAGE that are wanted. logprobs:
    how many top log-probabilities to report for each token; None: no log-probabilities at all.
    """

    served: ServedModel
    chat: bool
    requests: list[Request]
    texts: list[str | None]
    stop: tuple[str, ...]
    hidden_tokens: frozenset[int]
    n: int
    stream: bool
    usage: frozenset[str]
    logprobs: int | None
    echo: bool

    def new_stream(self) -> TextStream:
        return TextStream(self.served.tokenizer, self.hidden_tokens, self.stop)


def parse_request(body: bytes, served: ServedModel, chat: bool) -> ApiRequest:
    """The request in a JSON body. Raises BadRequest."""
    try:
        fields = parse_json(body, "the body")
    except (UserError, UnicodeDecodeError) as e:
        raise BadRequest(f"{e}"[:300]) from None
    fields = {name: value for name, value in fields.items() if value is not None}
    if unknown := sorted(set(fields) - (CHAT if chat else COMPLETION)):
        name = unknown[0][:60]
        raise BadRequest(f"{name!r} is not supported", name, code="unsupported_parameter")
    checked = RequestFields(fields)
    checked.check_model(served)
    checked.read("user", "")
    stream, options = checked.read("stream", False), checked.read("stream_options", {})
    if options.keys() - USAGE or not all(isinstance(x, bool) for x in options.values()):
        raise BadRequest(f"'stream_options' takes {' and '.join(USAGE)}, true or false", "stream_options")
    if options and not stream:
        raise BadRequest("'stream_options' needs 'stream': true", "stream_options")
    if chat:
        texts, prompts = [None], [checked.messages(served)]
    else:
        texts, prompts = checked.prompts(served)
    n = checked.integer("n", 1, MAX_SAMPLES, 1)
    if n * len(prompts) > MAX_SAMPLES:
        raise BadRequest(
            f"{len(prompts)} prompts, {n} samples each, are more than {MAX_SAMPLES} answers", "n"
        )
    echo, logprobs = checked.read("echo", False), checked.logprobs(chat)
    stop_ids = frozenset() if checked.read("ignore_eos", False) else served.stop_ids
    stop_ids |= checked.tokens("stop_token_ids", served.vocabulary)
    sampling, grammar = checked.sampling(served, logprobs), checked.grammar(served.grammar_tokenizer)
    seed = checked.integer("seed", -(2**63), 2**64 - 1)
    seed = secrets.randbits(32) if seed is None else seed
    requests = []
    for prompt in prompts:
        new = checked.max_new_tokens(served, len(prompt), chat, echo)
        requests += [
            Request(
                np.array(prompt, np.int32), new,
                dataclasses.replace(sampling, seed=(seed + i) % 2**32) if sampling.temperature else sampling,
                stop_ids, echo and logprobs is not None, grammar,
            )
            for i in range(n)
        ]  # fmt: skip
    return ApiRequest(
        served, chat, requests, texts, checked.stops() or served.stop, stop_ids | served.stop_ids, n, stream,
        frozenset(name for name, wanted in options.items() if wanted), logprobs, echo,
    )  # fmt: skip


@contextlib.contextmanager
def user_errors_as_bad_requests(field: str, prefix: str = "") -> Iterator[None]:
    try:
        yield
    except UserError as e:
        raise BadRequest(f"{prefix}{e}"[:300], field) from None


class RequestFields:
    """The fields of a request, by name. Each method checks one; if it is wrong, it raises BadRequest."""

    def __init__(self, fields: dict[str, Any]):
        self.fields = fields

    def wrong(self, name: str, must: str) -> BadRequest:
        return BadRequest(f"{name!r} must be {must}, not {repr(self.fields.get(name))[:60]}", name)

    def read(self, name: str, default: Any) -> Any:
        """A field of the default's type."""
        value = self.fields.get(name, default)
        if type(value) is not type(default):
            must = {bool: "true or false", str: "a text", dict: "an object"}
            raise self.wrong(name, must[type(default)])
        return value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int | None:
        value = self.fields.get(name, default)
        if value is not default and (type(value) is not int or not low <= value <= high):
            raise self.wrong(name, f"a whole number between {low} and {high}")
        return value

    def check_model(self, served: ServedModel) -> None:
        name = self.read("model", "") or served.names[0]
        if name not in served.names:
            what = f"the model {name[:60]!r} is not served here, but {served.names[0]!r}"
            raise BadRequest(what, "model", 404, "model_not_found")

    def messages(self, served: ServedModel) -> list[int]:
        """The token ids of a chat. The content of a message is a text, or OpenAI's list of texts."""
        value = self.fields.get("messages")
        if not isinstance(value, list) or not value:
            raise self.wrong("messages", 'a list of one or more objects of a "role" and a "content"')
        turns = []
        for i, turn in enumerate(value):
            where = f"'messages[{i}]'"
            if not isinstance(turn, dict) or set(turn) != {"role", "content"}:
                raise BadRequest(f'{where} must be an object of a "role" and a "content"', "messages")
            if turn["role"] not in ROLES:
                raise BadRequest(f"{where}: the role must be one of {', '.join(ROLES)}", "messages")
            turns.append(dict(role=turn["role"], content=self._content(turn["content"], where)))
        with user_errors_as_bad_requests("messages"):
            return served.encode_chat(turns)

    def _content(self, content, where: str) -> str:
        if isinstance(content, list):
            parts = []
            for part in content:
                if not isinstance(part, dict) or set(part) != {"type", "text"} or part["type"] != "text":
                    raise BadRequest(f"{where}: this model reads texts only", "messages")
                parts.append(part["text"])
            content = "".join(x if isinstance(x, str) else "\ud800" for x in parts)
        if not isinstance(content, str) or has_surrogate(content):
            raise BadRequest(f"{where}: its content must be a text", "messages")
        return content

    def prompts(self, served: ServedModel) -> tuple[list[str | None], list[list[int]]]:
        """-> (the text of each prompt, None if it was given as token ids; the token ids of each)."""
        value = self.fields.get("prompt")
        alone = isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int)
        prompts = [value] if alone else value
        if not isinstance(prompts, list) or not prompts or len(prompts) > MAX_SAMPLES:
            raise self.wrong("prompt", f"a text, token ids, or a list of 1 to {MAX_SAMPLES} of either")
        texts, ids = [], []
        for prompt in prompts:
            if isinstance(prompt, str):
                if not prompt or has_surrogate(prompt):
                    raise BadRequest("'prompt' is empty or not a text", "prompt")
                with user_errors_as_bad_requests("prompt"):
                    ids.append(encode(served.tokenizer, prompt, served.vocabulary))
            else:
                check_tokens(prompt, served.vocabulary, "prompt")
                if not prompt:
                    raise BadRequest("'prompt' is empty", "prompt")
                ids.append(prompt)
            texts.append(prompt if isinstance(prompt, str) else None)
        return texts, ids

    def tokens(self, name: str, vocabulary: int) -> frozenset[int]:
        value = self.fields.get(name, [])
        check_tokens(value, vocabulary, name)
        return frozenset(value)

    def max_new_tokens(self, served: ServedModel, prompt: int, chat: bool, echo: bool) -> int:
        """The most tokens to generate after a prompt of `prompt` tokens."""
        room = served.max_len - prompt
        name = "max_completion_tokens" if "max_completion_tokens" in self.fields else "max_tokens"
        if {"max_completion_tokens", "max_tokens"} <= set(self.fields):
            raise BadRequest("'max_tokens' and 'max_completion_tokens' are one thing: give one", name)
        asked = self.integer(name, 0 if echo else 1, 2**31 - 1)
        default = served.max_new_tokens or (max(room, 1) if chat else COMPLETION_TOKENS)
        new = min(default, max(room, 1)) if asked is None else asked
        if new > room:
            what = f"the prompt has {prompt} tokens, which with {new} new ones exceed {served.max_len}"
            raise BadRequest(what, name if room > 0 else None, code="context_length_exceeded")
        return new

    def logprobs(self, chat: bool) -> int | None:
        if not chat:
            return self.integer("logprobs", 0, MAX_TOP_LOGPROBS)
        top = self.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
        if top is not None and not self.read("logprobs", False):
            raise BadRequest("'top_logprobs' needs 'logprobs': true", "top_logprobs")
        return (top or 0) if self.read("logprobs", False) else None

    def stops(self) -> tuple[str, ...]:
        value = self.fields.get("stop", [])
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or len(stops) > MAX_STOPS:
            raise self.wrong("stop", f"a text, or a list of at most {MAX_STOPS}")
        if not all(isinstance(x, str) and x and not has_surrogate(x) for x in stops):
            raise self.wrong("stop", "of texts that are not empty")
        return tuple(stops)

    def sampling(self, served: ServedModel, logprobs: int | None) -> Sampling:
        """The request's sampling options, else the server's. top_k, top_p or min_p imply temperature 1."""
        names = "temperature", *RESTRICTIONS, *PENALTIES
        asked = {name: self.fields[name] for name in names if name in self.fields}
        for name, value in asked.items():
            try:
                check_sampling(name, value)
            except UserError as e:
                raise BadRequest(str(e).replace(name.replace("_", "-"), repr(name), 1), name) from None
        if RESTRICTIONS & set(asked) and "temperature" not in asked and not served.sampling.temperature:
            asked["temperature"] = 1.0
        return dataclasses.replace(
            served.sampling, **asked, bias=self.bias(served.vocabulary), top_logprobs=logprobs
        )

    def bias(self, vocabulary: int) -> Bias | None:
        value = self.read("logit_bias", {})
        if not value:
            return None
        if len(value) > MAX_BIASES:
            raise BadRequest(f"'logit_bias' has {len(value)} tokens, of at most {MAX_BIASES}", "logit_bias")
        tokens, values = np.full(MAX_BIASES, -1, np.int32), np.zeros(MAX_BIASES, np.float32)
        for i, (token, bias) in enumerate(value.items()):
            if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocabulary):
                raise BadRequest(
                    f"'logit_bias': {token[:20]!r} is no token id below {vocabulary}", "logit_bias"
                )
            if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
                raise BadRequest(f"'logit_bias': that of {token} must be between -100 and 100", "logit_bias")
            tokens[i], values[i] = int(token), bias
        return Bias(tokens=tokens, values=values)

    def grammar(self, tokenizer: LLTokenizer) -> Grammar | None:
        """The grammar of response_format; None for text."""
        asked = self.read("response_format", {})
        kind = asked.get("type", None if asked else "text")
        fields = {kind} if kind in SOURCE_FORMATS else set()
        if kind not in (*FORMATS, *SOURCE_FORMATS) or asked.keys() - fields - {"type"}:
            every = ", ".join((*FORMATS, *SOURCE_FORMATS))
            raise self.wrong("response_format", f"an object with a type of {every} and what that needs")
        source = asked.get(kind)
        if kind == "text":
            return None
        if kind == "json_object":
            kind, source = "json_schema", {"type": "object"}
        elif kind == "json_schema":
            source = self._schema(source)
        elif not isinstance(source, str) or has_surrogate(source):
            raise self.wrong("response_format", f"an object whose {kind} is a text")
        with user_errors_as_bad_requests("response_format", "'response_format': "):
            return make_grammar(tokenizer, "lark" if kind == "grammar" else kind, source)

    def _schema(self, given) -> Any:
        known = {"name", "description", "schema", "strict"}
        if not isinstance(given, dict) or set(given) - known or not isinstance(given.get("schema"), dict):
            raise self.wrong("response_format", f"with a json_schema of {', '.join(sorted(known))}")
        return given["schema"]


def check_tokens(value, vocabulary: int, name: str) -> None:
    if not isinstance(value, list):
        raise BadRequest(f"{name!r} must be a list of token ids", name)
    if wrong := [x for x in value if type(x) is not int or not 0 <= x < vocabulary]:
        raise BadRequest(f"{name!r}: {repr(wrong[0])[:20]} is no token id below {vocabulary}", name)
