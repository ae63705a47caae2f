"""Text is text: of a chat, only the control tokens that the chat template writes become control tokens.

A chat template makes one text of all messages. In this text a message that spells "<|eot_id|>" looks like
the template's own end of a turn: the result of a tool could end the user's turn and open a system message. So
the messages are marked before the template renders them, and the rendered text is read by a tokenizer whose
control tokens have secret names:

    message          ignore <|eot_id|> this
    marked           ignore BEGIN<|eot_id|>END this
    rendered         <|user|>ignore BEGIN<|eot_id|>END this<|eot_id|>
    respelled        <|user|>SECRETignore <|eot_id|> this<|eot_id|>SECRET

The whole text is tokenized at once, so words beside a spelled token are split as beside any other text.
Recent versions of transformers have apply_chat_template(sanitize_control_tokens=True), which tokenizes the
text in pieces, and drops from messages the characters that it uses as marks. llama.cpp calls the choice
parse_special.
"""

import functools
import re
import secrets
from typing import Any

from feedback.errors import UserError


@functools.lru_cache(maxsize=4)
def control_tokens(tokenizer, chat_template: str) -> "ControlTokens":
    """The ControlTokens of a tokenizer of transformers and one of its chat templates."""
    return ControlTokens(tokenizer, chat_template)


class ControlTokens:
    """The control tokens of a chat template, and the tokenizer in which they have secret names.

    Control tokens are the tokenizer's special tokens, and of its other added tokens those that the template
    writes, such as Qwen's <think> and <tool_call>. The remaining added tokens are ordinary parts of a text,
    such as Gemma's runs of line feeds.

    backend: the tokenizers.Tokenizer with secret names. It shares its model with the original.
    """

    def __init__(self, tokenizer, chat_template: str):
        from tokenizers import AddedToken, Tokenizer

        original = tokenizer.backend_tokenizer
        # 128 random bits each, which no message can guess. They are digits, because templates and their
        # filters (tojson, upper) leave digits as they are. The suffix of names is not derived from the marks:
        # a template that cuts a text may show a part of a mark to the model.
        self.begin, self.end, self.gap, self.suffix = (f"{secrets.randbits(128):039d}" for _ in range(4))
        self.backend = Tokenizer(original.model)
        if original.normalizer is not None:
            self.backend.normalizer = original.normalizer
        if original.pre_tokenizer is not None:
            self.backend.pre_tokenizer = original.pre_tokenizer

        control, self.original_ids, self.respelled_ids = [], {}, set()
        for token_id, token in sorted(original.get_added_tokens_decoder().items()):
            written = token.content in chat_template and not token.content.isspace()
            is_control = token.special or written
            name = token.content + self.suffix if is_control else token.content
            flags = dict(
                single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip,
                normalized=token.normalized, special=token.special,
            )  # fmt: skip
            self.backend.add_tokens([AddedToken(name, **flags)])
            self.original_ids[self.backend.token_to_id(name)] = token_id
            if is_control:
                control.append(token.content)
                self.respelled_ids.add(self.backend.token_to_id(name))
        self.backend.add_tokens([AddedToken(self.gap, normalized=False, special=True)])
        self.gap_id = self.backend.token_to_id(self.gap)
        # Control tokens in the vocabulary of the tokenizer's model, which may make them of plain text. It is
        # meant to make unk_token.
        known = {original.model.token_to_id(token) for token in control}
        self.model_ids = known - {None, tokenizer.unk_token_id}

        either = "|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)"
        self.spelled = re.compile(either)
        self.marked = re.compile(f"{self.begin}({either}){self.end}|({either})|{self.begin}|{self.end}")

    def mark(self, value: Any) -> Any:
        """The value with marks around each control token that a text or the name of a field in it spells."""
        if isinstance(value, str):
            return self.spelled.sub(f"{self.begin}\\g<0>{self.end}", value)
        if isinstance(value, dict):
            return {self.mark(name): self.mark(x) for name, x in value.items()}
        return [self.mark(x) for x in value] if isinstance(value, (list, tuple)) else value

    def encode(self, marked: str, rendered: str, tokenize) -> list[int]:
        """The token ids of a chat.

        marked, rendered: what the template makes of the marked messages, and of the messages as they are.
        tokenize: called with a tokenizers.Tokenizer and a text, returns token ids. Raises UserError if the
        tokenizer cannot tell spelled control tokens from others.
        """
        parts, tokens = self._split(marked, rendered)
        text = self._respelled(parts, tokens)
        ids = tokenize(self.backend, text)
        if not self.model_ids.isdisjoint(ids):  # Unigram models know their control tokens
            ids = tokenize(self.backend, self._respelled(parts, tokens, self.gap))
        found = sum(i in self.respelled_ids for i in ids)
        if not self.model_ids.isdisjoint(ids) or found != text.count(self.suffix):
            raise UserError(
                "a message spells a special token, which this tokenizer cannot read as text; "
                "remove it, or see --special-tokens-in-messages"
            )
        return [self.original_ids.get(i, i) for i in ids if i != self.gap_id]

    def _split(self, marked: str, rendered: str) -> tuple[list[str], list[tuple[str, bool]]]:
        """-> (the texts between control tokens; the tokens, each with whether it is the template's).

        Only the marked text shows which tokens are the template's. But a template may treat a text with marks
        differently: Qwen's cuts a text after "</think>" and removes the line feeds with which the rest
        begins, but not if a mark precedes them. So the texts are those of the rendered chat, if it has the
        same tokens in the same order.
        """
        # Of each token: the text before it; the token, if it is a message's; the token, if the template's.
        found = self.marked.split(marked)
        parts, pairs = found[::3], list(zip(found[1::3], found[2::3], strict=True))
        # A mark without its other half is an empty token: what it separates does not become one.
        tokens = [(text or control or "", control is not None) for text, control in pairs]
        whole = [token for token in tokens if token[0]]
        if self.spelled.findall(rendered) == [name for name, _ in whole]:
            return self.spelled.split(rendered), whole
        return parts, tokens

    def _respelled(self, parts: list[str], tokens: list[tuple[str, bool]], gap: str = "") -> str:
        """The text in which the template's control tokens have their secret names.

        gap: put after the first character of each of the messages': nothing is tokenized across it.
        """
        names = [name + self.suffix if own else name[:1] + gap + name[1:] for name, own in tokens]
        return "".join(x for pair in zip(parts, [*names, ""], strict=True) for x in pair)
