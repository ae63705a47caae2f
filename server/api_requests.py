"""Requests of the API: every field that is known is honored or refused, and the others are named."""

import contextlib
import dataclasses
import re
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from llguidance import LLTokenizer

from checkpoints.tensor_files import parse_json
from conversation.grammar import Grammar, make_grammar
from conversation.messages import has_surrogate, read_messages
from conversation.schemas import keep_expressible
from conversation.streams import TextStream
from conversation.templates import mentions, mentions_reasoning, template_text
from conversation.text import PromptTooLong
from conversation.tool_grammar import make_tool_grammar
from conversation.tools import TOOL_FIELDS, ToolUse, read_tool_use
from feedback.errors import UserError
from generation.request_builder import RequestBuilder, samples
from server.formats import FORMAT_FIELDS, read_format
from server.known_fields import NO_EFFECT, UNSUPPORTED
from serving.requests import RESTRICTIONS, Request, check_sampling, override
from sharding.sampling import MAX_BIASES, MAX_TOP_LOGPROBS, Bias, Sampling

MAX_SAMPLES = 128  # answers of one request: n times its prompts
MAX_STOPS = 16
COMPLETION_TOKENS = 16  # the default max_tokens of completions, as in OpenAI's API
USAGE = ("include_usage", "continuous_usage_stats")
STREAM_OPTIONS = {*USAGE, "include_obfuscation"}  # the last one adds noise to OpenAI's chunks
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")

COMMON = {
    "model", "stream", "stream_options", "max_tokens", "temperature", *RESTRICTIONS, *PENALTIES, "stop",
    "stop_token_ids", "ignore_eos", "seed", "n", "best_of", "logprobs", "logit_bias", *FORMAT_FIELDS,
}  # fmt: skip
TEMPLATE = {
    "reasoning_effort", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "add_special_tokens",
}  # fmt: skip
CHAT = COMMON | TEMPLATE | TOOL_FIELDS | {"messages", "max_completion_tokens", "top_logprobs"}
COMPLETION = COMMON | {"prompt", "echo"}
# Fields of chats that this server's other APIs have, too.
SHARED = {
    "model", "stream", "temperature", "top_p", "top_k", "min_p", *PENALTIES, "chat_template_kwargs",
    "ignore_eos", "logit_bias", "seed", "stop_token_ids",
}  # fmt: skip
# Of the variables of chat templates, those that are no client's to choose, or have fields of their own.
NOT_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
# Names under which JSON schemas and the arguments of calls stand, in which null is a value.
WITH_NULLS = {"arguments", "guided_json", "json", "parameters", "schema"}


class BadRequest(Exception):
    """A request that is refused. param: the wrong field, if any. status: HTTP's. code: OpenAI's."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def unsupported(name: str, why: str = "", param: str | None = None) -> BadRequest:
    """A request with a field that is not supported. param: the field of the request; default: this name."""
    message = f"{name[:60]!r} is not supported" + (f": {why}" if why else "")
    return BadRequest(message, param or name[:60], code="unsupported_parameter")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel(RequestBuilder):
    """The model that the server has loaded, and its defaults for fields that a request leaves out.

    names: those that /v1/models lists; the first is the one that responses have. checkpoint: a name that is
    accepted, too, but not listed, because it may be the path of a folder; "": none. created: seconds since
    1970. default_sampling: sampling options that the checkpoint or the command line gives, by name; where
    they give no temperature, the chat page asks for one of its own. strict_fields: whether requests with
    unknown fields are refused.
    """

    names: tuple[str, ...]
    grammar_tokenizer: LLTokenizer
    created: int = 0
    checkpoint: str = ""
    default_sampling: dict[str, float] = dataclasses.field(default_factory=dict)
    strict_fields: bool = False

    def accepts(self, name: str) -> bool:
        """Whether a request may call the model by this name."""
        return bool(name) and name in (*self.names, self.checkpoint)


@dataclasses.dataclass(frozen=True)
class ApiRequest:
    """A request of the API, checked.

    chat: whether it is a chat or a completion. requests: of the engine, n samples for each prompt in turn.
    texts: each prompt's text, None if it was given as token ids. hidden_tokens: token ids that
    are left out of the text. usage: those of USAGE that are wanted. logprobs: how many top log-probabilities
    to report for each token; None: no log-probabilities at all. tools: that the answers may call; None: none.
    ignored: the names of what the request asks for and the server does not know.
    """

    served: ServedModel
    chat: bool
    requests: list[Request]
    texts: list[str | None]
    hidden_tokens: frozenset[int]
    n: int
    stream: bool
    usage: frozenset[str]
    logprobs: int | None
    echo: bool
    tools: ToolUse | None = None
    ignored: tuple[str, ...] = ()

    def new_stream(self, request: Request) -> TextStream:
        """The text of the answer to one of the requests. That of a completion is not divided."""
        builder = dataclasses.replace(self.served, divided=self.chat)
        return builder.new_stream(request, self.hidden_tokens, self.tools)


def parse_request(body: bytes, served: ServedModel, chat: bool) -> ApiRequest:
    """The request in a JSON body. Raises BadRequest."""
    return check_request(parse_body(body), served, chat)


def parse_body(body: bytes) -> dict[str, Any]:
    """The fields of a JSON body. Raises BadRequest."""
    try:
        return parse_json(body, "the body")
    except (UserError, UnicodeDecodeError) as e:
        raise BadRequest(f"{e}"[:300]) from None


def check_translated(
    chat: dict[str, Any], served: ServedModel, names: dict[str, str], ignored: list[str]
) -> ApiRequest:
    """The request of another API whose translation is a chat with these fields. Raises BadRequest.

    names: {a field of chats: what the client has called it}, for errors and the names of what is ignored.
    ignored: what the translation has ignored.
    """
    with errors_in_words_of(names):
        parsed = check_request(chat, served, chat=True, ignored=ignored)
    parts = [name.partition(".") for name in parsed.ignored]
    own = tuple(names.get(first, first) + dot + rest for first, dot, rest in parts)
    return dataclasses.replace(parsed, ignored=own)


@contextlib.contextmanager
def errors_in_words_of(names: dict[str, str]) -> Iterator[None]:
    """Let errors name fields as the client has called them. names: as in `check_translated`."""
    try:
        yield
    except BadRequest as e:
        message = str(e)
        for name, own in names.items():
            message = message.replace(f"'{name}'", f"'{own}'").replace(f"{name}[", f"{own}[")
        raise BadRequest(message, names.get(e.param, e.param), e.status, e.code) from None


def check_request(
    fields: dict[str, Any], served: ServedModel, chat: bool, ignored: Iterable[str] = ()
) -> ApiRequest:
    """The request with these fields. ignored: what it asks for beside them. Raises BadRequest."""
    checked = RequestFields(fields, ignored)
    checked.check_names(CHAT if chat else COMPLETION)
    checked.check_model(served)
    stream, options = checked.read("stream", False), checked.read("stream_options", {})
    checked.ignore(options.keys() - STREAM_OPTIONS, "stream_options.")
    if not all(isinstance(options.get(name, False), bool) for name in USAGE):
        raise BadRequest(f"'stream_options' takes {' and '.join(USAGE)}, true or false", "stream_options")
    grammar = checked.grammar(served.grammar_tokenizer)
    tools = None
    if chat:
        tools = checked.tool_use(served)
        prompt = checked.messages(served, tools, reasons=grammar is None or tools is not None)
        texts, prompts = [None], [prompt]
        if tools:
            grammar = checked.tool_grammar(served, tools, prompt, grammar)
    else:
        texts, prompts = checked.prompts(served)
    n = checked.integer("n", 1, MAX_SAMPLES, 1)
    if fields.get("best_of", n) != n:
        raise BadRequest(f"'best_of' must be equal to 'n', which is {n}", "best_of")
    if n * len(prompts) > MAX_SAMPLES:
        raise BadRequest(
            f"{len(prompts)} prompts, {n} samples each, are more than {MAX_SAMPLES} answers", "n"
        )
    echo, logprobs = checked.read("echo", False), checked.logprobs(chat)
    stop_ids = frozenset() if checked.read("ignore_eos", False) else served.stop_tokens
    stop_ids |= checked.tokens("stop_token_ids", served.vocabulary)
    sampling = checked.sampling(served, logprobs)
    scored, requests = echo and logprobs is not None, []
    for prompt in prompts:
        new = checked.max_new_tokens(served, len(prompt), chat, echo)
        with user_errors_as_bad_requests():
            request = served.request(prompt, sampling, new, stop=stop_ids, score=scored, grammar=grammar)
        requests += samples(request, n)
    usage = frozenset(name for name in USAGE if stream and options.get(name))
    hidden = stop_ids | served.stop_tokens
    served = dataclasses.replace(served, stop=checked.stops() or served.stop)
    ignored = checked.all_ignored(served)
    return ApiRequest(served, chat, requests, texts, hidden, n, stream, usage, logprobs, echo, tools, ignored)


@contextlib.contextmanager
def user_errors_as_bad_requests(field: str | None = None, prefix: str = "") -> Iterator[None]:
    """field: None: an error begins with the name of the field in quotes, perhaps with an index in it."""
    try:
        yield
    except UserError as e:
        code = "context_length_exceeded" if isinstance(e, PromptTooLong) else None
        named = re.match(r"'(\w+)", f"{e}")
        raise BadRequest(f"{prefix}{e}"[:300], field or (named and named[1]), code=code) from None


class RequestFields:
    """The fields of a request, by name. Each method checks one; if it is wrong, it raises BadRequest.

    ignored: the names of what the request asks for and the server does not know, so far.
    """

    def __init__(self, fields: dict[str, Any], ignored: Iterable[str] = ()):
        """Removes fields that are null."""
        drop_nulls(fields)
        self.fields, self.ignored = fields, [*ignored]

    def check_names(self, supported: set[str]) -> None:
        """Remove the fields that are not supported. Raises BadRequest if one asks for another answer."""
        unknown = []
        for name in sorted(self.fields.keys() - supported):
            value = self.fields.pop(name)
            if name not in UNSUPPORTED:
                unknown.append(name)
            elif value not in (values := UNSUPPORTED[name]):
                only = f"only {values[0]!r} is, which changes nothing" if values else ""
                raise unsupported(name, only)
        self.ignore(set(unknown) - NO_EFFECT)

    def ignore(self, names: Iterable[str], prefix: str = "") -> None:
        self.ignored += [prefix + name for name in sorted(names)]

    def all_ignored(self, served: ServedModel) -> tuple[str, ...]:
        """The names of what is ignored, each once. Raises BadRequest if the server ignores nothing."""
        if self.ignored and served.strict_fields:
            raise unsupported(self.ignored[0], "this server ignores no field, see --strict-fields")
        return tuple(dict.fromkeys(self.ignored))

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
        if not served.accepts(name):
            what = f"the model {name[:60]!r} is not served here, but {served.names[0]!r}"
            raise BadRequest(what, "model", 404, "model_not_found")

    def messages(self, served: ServedModel, tools: ToolUse | None, reasons: bool) -> list[int]:
        """The token ids of a chat. tools: None: none are offered. reasons: False if a grammar leaves no room
        for reasoning.
        """
        if self.read("add_special_tokens", False):
            what = "'add_special_tokens': the chat template has those of a chat already"
            raise BadRequest(what, "add_special_tokens")
        template = template_text(served.tokenizer)
        with user_errors_as_bad_requests("messages"):
            messages = read_messages(self.fields.get("messages"), ignored=self.ignored)
        options = self.template_options(served, template, messages)
        with user_errors_as_bad_requests("messages"):
            return served.encode(messages, reasons, tools=self.fields["tools"] if tools else [], **options)

    def tool_use(self, served: ServedModel) -> ToolUse | None:
        with user_errors_as_bad_requests():
            return read_tool_use(self.fields, served.tools, self.ignored)

    def tool_grammar(
        self, served: ServedModel, use: ToolUse, prompt: list[int], form: Grammar | None
    ) -> Grammar:
        with user_errors_as_bad_requests():
            grammar, lost = make_tool_grammar(use, served.tokenizer, served.grammar_tokenizer, prompt, form)
        self.ignore(lost, "tools.")
        return grammar

    def template_options(self, served: ServedModel, template: str, messages: list[dict]) -> dict[str, Any]:
        """What a chat asks of the chat template, beside its messages."""
        asked = self.read("chat_template_kwargs", {})
        if taken := sorted(asked.keys() & NOT_VARIABLES):
            what = f"'chat_template_kwargs': {taken[0]!r} is no variable for requests, but a field of its own"
            raise BadRequest(what, "chat_template_kwargs")
        options = {name: value for name, value in asked.items() if mentions(template, name)}
        self.ignore(asked.keys() - options, "chat_template_kwargs.")
        if effort := self.read("reasoning_effort", ""):
            if mentions(template, "reasoning_effort"):
                options["reasoning_effort"] = effort
            elif effort == "none" and mentions(template, "enable_thinking"):
                options["enable_thinking"] = False
            elif served.channels or mentions_reasoning(template):  # a model without reasoning has no effort
                self.ignore(["reasoning_effort"])
        if self.read("continue_final_message", False):
            if self.read("add_generation_prompt", False):
                what = "'continue_final_message' and 'add_generation_prompt' exclude each other"
                raise BadRequest(what, "add_generation_prompt")
            last = messages[-1]
            if last["role"] != "assistant" or not last["content"] or last.get("tool_calls"):
                what = "'continue_final_message' needs a last message of role assistant with a text"
                raise BadRequest(what, "continue_final_message")
            options["continue_final_message"] = True
        elif not self.read("add_generation_prompt", True):
            options["add_generation_prompt"] = False
        return options

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
                    ids.append(served.encode_text(prompt))
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
        asked = self.integer(name, 0 if echo else 1, 2**31 - 1)
        if self.fields.get("max_tokens", asked) != asked:
            raise BadRequest("'max_tokens' and 'max_completion_tokens' are one thing: give one", name)
        new = asked
        if asked is None:
            new = served.max_new_tokens or (max(room, 1) if chat else COMPLETION_TOKENS)
        return max(min(new, room), min(new, 1))  # if there is no room, the model refuses the prompt

    def logprobs(self, chat: bool) -> int | None:
        if not chat:
            return self.integer("logprobs", 0, MAX_TOP_LOGPROBS)
        top = self.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
        if top and not self.read("logprobs", False):
            raise BadRequest("'top_logprobs' needs 'logprobs': true", "top_logprobs")
        return (top or 0) if self.read("logprobs", False) else None

    def stops(self) -> tuple[str, ...]:
        value = self.fields.get("stop", [])
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or len(stops) > MAX_STOPS:
            raise self.wrong("stop", f"a text, or a list of at most {MAX_STOPS}")
        if not all(isinstance(x, str) and not has_surrogate(x) for x in stops):
            raise self.wrong("stop", "a text, or a list of texts")
        return tuple(filter(None, stops))  # clients send an empty text for none

    def sampling(self, served: ServedModel, logprobs: int | None) -> Sampling:
        """The request's sampling options, else the server's."""
        names = "temperature", *RESTRICTIONS, *PENALTIES
        asked = {name: self.fields[name] for name in names if name in self.fields}
        every_token = asked.get("top_k") in (0, -1)  # as vLLM spells it
        if every_token:
            del asked["top_k"]
        for name, value in asked.items():
            try:
                check_sampling(name, value)
            except UserError as e:
                raise BadRequest(str(e).replace(name.replace("_", "-"), repr(name), 1), name) from None
        seed = self.integer("seed", -(2**63), 2**64 - 1)
        seed = secrets.randbits(32) if seed is None else seed % 2**32
        others = dict(bias=self.bias(served.vocabulary), top_logprobs=logprobs, seed=seed)
        others |= {"top_k": None} if every_token else {}
        return dataclasses.replace(override(served.sampling, asked), **others)

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
        """The grammar of the field that asks for a format; None for text."""
        fields = sorted(FORMAT_FIELDS & self.fields.keys())
        if not fields:
            return None
        if len(fields) > 1:
            raise BadRequest(f"{fields[0]!r} and {fields[1]!r} exclude each other", fields[0])
        (field,) = fields
        with user_errors_as_bad_requests(field, f"{field!r}: "):
            asked = read_format(field, self.fields[field])
            if asked is None:
                return None
            kind, source = asked
            if kind == "json_schema":
                source, lost = keep_expressible(source)
                self.ignore(lost, f"{field}.")
            return make_grammar(tokenizer, kind, source)


def drop_nulls(fields: dict) -> None:
    """Remove fields that are null, at any depth: null means that a field is absent."""
    left = [fields]
    while left:  # without recursion, because a request may be nested deeper than Python calls
        value = left.pop()
        if isinstance(value, dict):
            for name in [name for name, x in value.items() if x is None]:
                del value[name]
            left += [x for name, x in value.items() if name not in WITH_NULLS]
        elif isinstance(value, list):
            left += value


def check_tokens(value, vocabulary: int, name: str) -> None:
    if not isinstance(value, list):
        raise BadRequest(f"{name!r} must be a list of token ids", name)
    if wrong := [x for x in value if type(x) is not int or not 0 <= x < vocabulary]:
        raise BadRequest(f"{name!r}: {repr(wrong[0])[:20]} is no token id below {vocabulary}", name)
