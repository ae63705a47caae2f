"""From a prompt to a request: its token ids, its limits and its sampling options.

Everything that is asked of a model passes here: the prompts of the command line and its chat, those of
generation/llm.py, and the requests of the server.
"""

import dataclasses
import numbers
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from checkpoints.checkpoint import Checkpoint
from conversation.messages import has_surrogate, read_messages
from conversation.streams import TextStream, answer_stream
from conversation.templates import END_THINK, ends_within_reasoning, mentions, template_text
from conversation.text import encode, stop_tokens
from conversation.tools import ToolUse, choose_tool_format
from families.family import Channels
from families.tool_formats import MessageToolFormat, ToolFormat
from feedback.errors import UserError
from model import Config
from serving.requests import Request, choose_sampling, override
from sharding.sampling import MAX_TOP_LOGPROBS, Sampling

if TYPE_CHECKING:  # llguidance is optional
    from conversation.grammar import Grammar

NEW_TOKENS = 256  # the default max_new_tokens, if the row has room for as many
MOST_NEW_TOKENS = 2**31 - 1
NOT_TEXT = "not valid text: half a surrogate pair, or bytes that this terminal's encoding does not have"

Messages = list[dict[str, Any]]  # the messages of a chat, see conversation.messages.read_messages
Prompt = str | Messages | Sequence[int]  # a text, a chat, or token ids


def check_text(text: Any) -> str:
    """The text of a prompt. Raises UserError if it is empty, has a surrogate, or is not a text."""
    if not isinstance(text, str) or not text.strip():
        raise UserError("an empty prompt, or one that is not a text")
    if has_surrogate(text):
        raise UserError(NOT_TEXT)
    return text


def read_prompt(given: Prompt) -> str | Messages | list[int]:
    """A prompt, checked: a text, the messages of a chat in the form that templates read, or token ids."""
    if isinstance(given, str):
        return check_text(given)
    if all(isinstance(token, numbers.Integral) for token in given):
        return [int(token) for token in given]
    return read_messages(list(given))


def check_new_tokens(value: Any) -> None:
    """Raise UserError if the value is no number of new tokens that can be asked for."""
    if type(value) is not int or not 1 <= value <= MOST_NEW_TOKENS:
        raise UserError(f"max_new_tokens {str(value)[:40]} is not between 1 and {MOST_NEW_TOKENS}")


def row_length(asked: int | None, configs: list[Config], default: int | None, option: str) -> tuple[int, str]:
    """-> (the positions of a row, what sets this limit).

    default: None: as many as the models have. option: by which `asked` is given.
    """
    limit = min(cfg.max_positions for cfg in configs)
    if asked is None:
        least = default is not None and default < limit
        return (default, f"the default {option}") if least else (limit, "the model's limit")
    if asked > limit:
        raise UserError(f"{option} {asked}: the model's limit is {limit} positions")
    return asked, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestBuilder:
    """Makes requests of prompts, with the options that these prompts have in common.

    channels, tools: of the model's family; how the model divides its answers and writes calls of tools.
    max_len: positions of a row. limit: what sets max_len, for errors. sampling: options that a prompt may
    override. stop_tokens, stop: token ids and texts that end an answer. max_new_tokens: None: `new_tokens`,
    or what the row leaves. score: whether the prompt's tokens are scored. system: the first message of chats
    that do not begin with one of this kind. chat_template: whether a text is a user's message, if the
    tokenizer has a chat template. special_tokens_in_messages: whether a special token that a message spells
    is that token; else it is read as text. divided: whether reasoning is separated from the text.
    """

    tokenizer: Any
    vocabulary: int
    channels: Channels | None
    tools: ToolFormat | MessageToolFormat
    max_len: int
    limit: str
    sampling: Sampling
    stop_tokens: frozenset[int]
    stop: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    new_tokens: int = NEW_TOKENS
    score: bool = False
    system: str | None = None
    chat_template: bool = True
    special_tokens_in_messages: bool = False
    divided: bool = True

    @property
    def templated(self) -> bool:
        """Whether a text is a message of a chat."""
        return self.chat_template and bool(self.tokenizer.chat_template)

    def encode(self, prompt: str | Messages | list[int], /, reasons: bool = True, **options) -> list[int]:
        """The token ids of a prompt that has been read; those of a text through the chat template.

        reasons: False if a grammar leaves the answer to a chat no room for reasoning. options: of a chat, see
        conversation.text.encode.
        """
        if isinstance(prompt, str) and self.templated:
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, str):
            if self.system is not None:
                raise UserError("system: it needs a chat template")
            return self.encode_text(prompt)
        if not prompt or isinstance(prompt[0], int):
            return prompt
        if self.system is not None and prompt[0]["role"] not in ("system", "developer"):
            prompt = [{"role": "system", "content": self.system}, *prompt]
        if not reasons and mentions(template_text(self.tokenizer), "enable_thinking"):
            options.setdefault("enable_thinking", False)
        spelled = self.special_tokens_in_messages
        found = encode(self.tokenizer, prompt, self.vocabulary, self.max_len, spelled, self.tools, **options)
        if not reasons and ends_within_reasoning(self.tokenizer, found):
            found += self.tokenizer(f"\n{END_THINK}\n\n", add_special_tokens=False).input_ids
        return found

    def encode_text(self, text: str) -> list[int]:
        """The token ids of a text as it is."""
        return encode(self.tokenizer, text, self.vocabulary, self.max_len)

    def request_for(
        self,
        prompt: list[int],
        max_new_tokens: int | None = None,
        top_logprobs: int | None = None,
        grammar: "Grammar | None" = None,
        **sampling,
    ) -> Request:
        """The request to continue these token ids, with options of this prompt alone; None: not asked for.

        grammar: what the answer must match.
        """
        if max_new_tokens is not None:
            check_new_tokens(max_new_tokens)
        if not isinstance(top_logprobs or 0, int) or not 0 <= (top_logprobs or 0) <= MAX_TOP_LOGPROBS:
            raise UserError(f"top_logprobs {top_logprobs!r} is not between 0 and {MAX_TOP_LOGPROBS}")
        chosen = dataclasses.replace(override(self.sampling, sampling), top_logprobs=top_logprobs or None)
        return self.request(prompt, chosen, max_new_tokens, grammar=grammar)

    def request(
        self, prompt: list[int], sampling: Sampling, max_new_tokens: int | None = None, **options
    ) -> Request:
        """The request to continue these token ids. options: other fields of Request.

        Raises UserError if anything is out of range: PromptTooLong if the row cannot hold prompt and answer.
        """
        new = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        if new is None:
            new = min(self.new_tokens, max(self.max_len - len(prompt), 1))
        options = dict(stop=self.stop_tokens, score=self.score) | options
        request = Request(prompt, new, sampling, **options)
        request.check_length(self.max_len, self.limit)
        return dataclasses.replace(request, prompt=request.validated(self.vocabulary))

    def new_stream(
        self, request: Request, hidden: frozenset[int] | None = None, tools: ToolUse | None = None
    ) -> TextStream:
        """The text of the answer to a request. hidden: tokens that are left out; None: those that end it.

        tools: that the answer may call; None: none. An answer that must match something is not divided into
        reasoning and text, unless it may call tools, because the grammar of calls allows for reasoning.
        """
        hidden = request.stop if hidden is None else hidden
        if not self.divided or (request.grammar is not None and tools is None):
            return TextStream(self.tokenizer, hidden, self.stop)
        return answer_stream(self.tokenizer, request.prompt, hidden, self.stop, self.channels, tools)


def builder_for(
    checkpoint: Checkpoint, tokenizer, asked: dict[str, Any], where: str, **options
) -> RequestBuilder:
    """The RequestBuilder of a checkpoint. asked, where: see choose_sampling. options: its other fields."""
    options.setdefault("stop_tokens", stop_tokens(checkpoint.folder, tokenizer))
    return RequestBuilder(
        tokenizer=tokenizer,
        vocabulary=checkpoint.config.V,
        channels=checkpoint.family.channels,
        tools=choose_tool_format(tokenizer, checkpoint.family.tools),
        sampling=choose_sampling(asked, checkpoint.folder, where),
        **options,
    )


def samples(request: Request, n: int) -> Iterator[Request]:
    """n requests for answers to one prompt: their seeds follow one another."""
    yield request
    for i in range(1, n):
        sampling = dataclasses.replace(request.sampling, seed=(request.sampling.seed + i) % 2**32)
        yield dataclasses.replace(request, sampling=sampling)
