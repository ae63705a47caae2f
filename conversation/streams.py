"""The text of an answer while its tokens arrive, with reasoning and calls of tools separated from it."""

import functools
import re

import numpy as np

from conversation.templates import END_THINK, THINK, ends_within_reasoning, mentions_reasoning, template_text
from conversation.tool_calls import CallPiece, CallReader, ToolCall, overlap, tokens_among
from conversation.tools import ToolUse
from families.family import Channels
from families.tool_formats import MessageToolFormat


class TextStream:
    """Incremental detokenization: the text of an answer while its tokens arrive.

    Text that has been returned never changes: an incomplete character is held back, and so is what may be the
    beginning of a stop string. The text ends before the first stop string.

    text: all that has been returned. used: how many tokens were read. stop_string: the one that was found, if
    any. reasoning: see ChannelStream and ThinkStream. reasoning_tokens: how many tokens are of the
    reasoning. only_reasons: whether the answer has no text yet, because it is still in its reasoning. calls:
    takes calls of tools out of the text; None: there are none. Stop strings are searched for only in the
    text. offsets: where the text of each token begins, in characters, for an answer that is only text. Tokens
    of one character have its offset. A token of the stop string may begin after the end of the text.
    """

    reasoning = ""
    reasoning_tokens = 0
    only_reasons = False
    calls: CallReader | None = None

    def __init__(self, tokenizer, hidden: frozenset[int] = frozenset(), stop_strings: tuple[str, ...] = ()):
        """hidden: token ids that are left out of the text, beside the tokenizer's special tokens."""
        from tokenizers.decoders import DecodeStream

        self.tokenizer, self.hidden, self.stop_strings = tokenizer.backend_tokenizer, hidden, stop_strings
        self.new_decoder = functools.partial(DecodeStream, skip_special_tokens=True)
        self.decoder = self.new_decoder()
        self.last, self.pending = [], []  # the last token that completed a character, and those after it
        self.text, self.held_back, self.used = "", "", 0
        self.stop_string: str | None = None
        self.offsets: list[int] = []

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    def add(self, tokens: list[int]) -> str:
        """Add tokens: -> the new text."""
        before = len(self.text)
        for token in tokens:
            if self.stopped:
                break
            self.used += 1
            self._read(token)
        return self.text[before:]

    def finish(self) -> str:
        """After the last token: -> the rest of the text, with what was held back."""
        if self.stopped:
            return ""
        before = len(self.text)
        self._append(self._pending_text(), last=True)
        return self.text[before:]

    def _read(self, token: int) -> None:
        if self.calls and token in self.calls.tokens:
            return self._read_call_token(token)
        self.offsets.append(len(self.text) + len(self.held_back))
        if token in self.hidden:
            return
        self.pending.append(token)
        try:
            new = self.decoder.step(self.tokenizer, token) or ""
        except Exception:  # at some incomplete characters that follow byte tokens
            new, self.decoder = self._pending_text(), self.new_decoder([token])
        if new:
            if len(self.pending) > 1:  # characters that earlier tokens left incomplete come first
                self.offsets[-1] += len(new) - len(new.lstrip("\ufffd"))
            self.last, self.pending = [token], []
        self._append(new)

    @property
    def tool_calls(self) -> list[ToolCall]:
        return self.calls.calls if self.calls else []

    def take_calls(self) -> tuple[CallPiece, ...]:
        """The pieces of calls that have come since this method was last called."""
        return self.calls.take_pieces() if self.calls else ()

    def _read_call_token(self, token: int) -> None:
        """Read a token of the format of calls. If it is special, the decoder would leave out its text."""
        self._append(self._take_pending())
        self._append_text(self.calls.add_token(token), self.calls.inside)

    def _pending_text(self) -> str:
        """The text of the pending tokens, with U+FFFD for an incomplete character."""
        decode = self.tokenizer.decode
        return decode(self.last + self.pending)[len(decode(self.last)) :]

    def _take_pending(self) -> str:
        """The text of the pending tokens. A new decoder reads the tokens after them."""
        text, self.decoder = self._pending_text(), self.new_decoder()
        self.last, self.pending = [], []
        return text

    def _append(self, new: str, last: bool = False) -> None:
        """Add what the model has written. last: the answer ends with it, so nothing is held back."""
        if self.calls:
            new = self.calls.add(new, last)
            last = last or self.calls.inside
        self._append_text(new, last)

    def _append_text(self, new: str, last: bool) -> None:
        self.held_back += new
        ends = [(self.held_back.find(stop), stop) for stop in self.stop_strings if stop in self.held_back]
        if ends:
            end, self.stop_string = min(ends)
            self.text, self.held_back = self.text + self.held_back[:end], ""
            return
        partial = max((overlap(self.held_back, stop) for stop in self.stop_strings), default=0)
        certain = len(self.held_back) - (0 if last else partial)
        self.text, self.held_back = self.text + self.held_back[:certain], self.held_back[certain:]


class ChannelStream(TextStream):
    """The TextStream of an answer in channels, see families.family.Channels.

    text: of the final channel, and of messages that name no channel. Only this text is searched for stop
    strings. reasoning: the text of the other channels. If the text or the reasoning has several messages, an
    empty line separates them. If the answer has none of the channels' tokens, except perhaps one that ends
    it, the whole answer is text, and `finish` returns it.
    """

    def __init__(
        self, tokenizer, hidden: frozenset[int], stop_strings: tuple[str, ...], channels: Channels,
        marks: dict[int, str], tools: ToolUse | None = None,
    ):  # fmt: skip
        """marks: {token id: text} of the channels' tokens. tools: that messages may call; None: none."""
        super().__init__(tokenizer, hidden, stop_strings)
        self.channels, self.marks, self.reasoning = channels, marks, ""
        self.new_message = functools.partial(TextStream, tokenizer, hidden)
        self.header: list[int] | None = []  # the tokens of a message's role and channel; None: there is none
        self.message: TextStream | None = None  # None: before and between messages
        self.final = False  # whether the message is in the final channel
        self.marked = False  # whether the answer has one of the channels' tokens
        self.recipient = tools and tools.format.recipient
        self.calling = False  # whether the message calls a tool
        self.calls = tools and CallReader(tools, tokenizer)

    @property
    def only_reasons(self) -> bool:
        return not self.text

    def _read(self, token: int) -> None:
        if token in self.marks:
            self._mark(token)
        elif self.message is not None:
            self._append(self.message.add([token]))
            self.reasoning_tokens += not (self.final or self.calling)
        elif self.header is not None:
            self.header.append(token)

    def finish(self) -> str:
        before = len(self.text)
        if not self.marked:
            self._begin(final=True)
            self._append(self.message.add(self.header))
        self._end()
        return self.text[before:]

    def _mark(self, token: int) -> None:
        mark = self.marks[token]
        if mark in self.channels.ends and not self.marked:  # an answer without channels ends
            return
        self._end()
        self.marked = True
        if mark == self.channels.message:
            header = self.tokenizer.decode(self.header or [], skip_special_tokens=False)
            _, named, name = header.partition(self.channels.channel)
            recipient = self.recipient and re.search(self.recipient, header)
            self.calling = recipient is not None
            if recipient:
                self.calls.begin_message(recipient[1])
            self._begin(final=not named or re.match(r"\w*", name.strip())[0] == self.channels.final)
        # The channel's token begins a header, too: models leave out the start.
        begins = {self.channels.start: [], self.channels.channel: [*(self.header or []), token]}
        self.header = begins.get(mark)

    def _begin(self, final: bool) -> None:
        self.final, self.message = final, self.new_message(self.stop_strings if final else ())
        if (self.text if final else self.reasoning) and not self.calling:
            self._append("\n\n")

    def _append(self, new: str) -> None:
        if self.calling:
            self.calls.add(new)
        elif self.final:
            self.text, self.stop_string = self.text + new, self.message.stop_string
        else:
            self.reasoning += new

    def _end(self) -> None:
        if self.message is not None:
            self._append(self.message.finish())
            self.message = None


class ThinkStream(TextStream):
    """The TextStream of an answer that begins with reasoning between the tags <think> and </think>.

    The first tag may be the end of the prompt. An answer that does not begin with the first tag is all text,
    and so is everything after the second tag, even if it spells the tags again. White space around the
    reasoning and before the text is left out. Only the text is searched for stop strings.

    The tags are found in the text, since they are one token in some vocabularies and several in others.
    """

    def __init__(self, tokenizer, hidden: frozenset[int], stop_strings: tuple[str, ...], thinking: bool):
        """thinking: whether the prompt ends with the first tag."""
        super().__init__(tokenizer, hidden, stop_strings)
        self.tags = tokens_among((THINK, END_THINK), tokenizer)
        self.section = "reasoning" if thinking else "start"  # then "reasoning", "end" of it, and "text"
        self.undecided = ""  # text that may be part of a tag, or white space that may precede one

    @property
    def only_reasons(self) -> bool:
        return self.section == "reasoning"

    def _read(self, token: int) -> None:
        before = self.section
        if self.section != "text" and token in self.tags:  # the decoder would leave out a special token
            self._append(self._take_pending() + self.tags[token])
        else:
            super()._read(token)
        self.reasoning_tokens += before == self.section == "reasoning"

    def _append(self, new: str, last: bool = False) -> None:
        if self.section == "text":
            return super()._append(new, last)
        self.undecided += new
        if self.section == "start":
            begun = self.undecided.lstrip()
            if begun.startswith(THINK):
                self.section, self.undecided = "reasoning", begun.removeprefix(THINK)
            elif last or not THINK.startswith(begun):
                self._begin_text(self.undecided, last)
        if self.section == "reasoning":
            self._append_reasoning(last)
        if self.section == "end" and (text := self.undecided.lstrip()):
            self._begin_text(text, last)

    def _append_reasoning(self, last: bool) -> None:
        new, tag, after = self.undecided.partition(END_THINK)
        partial = 0 if tag or last else overlap(new, END_THINK)
        new = new if self.reasoning else new.lstrip()
        certain = new[: len(new) - partial].rstrip()
        self.reasoning += certain
        if tag:
            self.section, self.undecided = "end", after
        else:
            self.undecided = new[len(certain) :]

    def _begin_text(self, text: str, last: bool) -> None:
        self.section, self.undecided = "text", ""
        super()._append(text, last)

    def _read_call_token(self, token: int) -> None:
        if self.section in ("start", "end"):
            self._begin_text(self.undecided.strip(), last=False)
        if self.section == "text":
            super()._read_call_token(token)


def answer_stream(
    tokenizer, prompt: np.ndarray, hidden: frozenset[int], stop_strings: tuple[str, ...],
    channels: Channels | None, tools: ToolUse | None = None,
) -> TextStream:  # fmt: skip
    """A stream for the answer to a prompt.

    prompt: token ids. channels: the family's; None: the family has none. tools: that the answer may call;
    None: none.

    The stream is a ChannelStream if the prompt ends with the start of a message, as in a chat. Else it is a
    ThinkStream if the chat template has the tags around reasoning, and otherwise a TextStream.
    """
    if channels is not None:
        needed = {channels.start, channels.message, *channels.ends}
        marks = tokens_among((*needed, channels.channel), tokenizer)
        found = [i for i in map(int, prompt) if i in marks]
        if needed <= set(marks.values()) and found and marks[found[-1]] == channels.start:
            of_messages = tools if tools and isinstance(tools.format, MessageToolFormat) else None
            return ChannelStream(tokenizer, hidden, stop_strings, channels, marks, of_messages)
    if mentions_reasoning(template_text(tokenizer)):
        stream = ThinkStream(tokenizer, hidden, stop_strings, ends_within_reasoning(tokenizer, prompt))
    else:
        stream = TextStream(tokenizer, hidden, stop_strings)
    stream.calls = tools and CallReader(tools, tokenizer)
    return stream
