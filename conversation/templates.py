"""Chat templates: what a checkpoint's template reads, and messages in the words of that template.

A chat template is a Jinja program of the checkpoint's tokenizer. What differs between models is found in the
template's text, because every chat model has one: models of one family (and so of one config.json) differ in
whether they reason, and a model that was trained from another family's weights brings its own template.
"""

import re
from collections.abc import Sequence

from feedback.errors import UserError

THINK, END_THINK = "<think>", "</think>"  # around the reasoning of Qwen3, DeepSeek R1, SmolLM3, GLM 4.5, ...


def template_text(tokenizer) -> str:
    """The text of the tokenizer's chat template; of several, that of all; "" if there is none."""
    template = tokenizer.chat_template or ""
    return "\n".join(template.values()) if isinstance(template, dict) else template


def mentions(template: str, name: str) -> bool:
    """Whether a template mentions a variable, a field or a role of this name."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def mentions_reasoning(template: str) -> bool:
    """Whether answers may begin with reasoning between the tags. The templates of models that reason have the
    second tag, because they remove the reasoning of earlier turns.
    """
    return END_THINK in template


def ends_within_reasoning(tokenizer, prompt: Sequence[int]) -> bool:
    """Whether the chat template ends a prompt with the tag that begins reasoning. prompt: its token ids."""
    divided = mentions_reasoning(template_text(tokenizer))
    return divided and tokenizer.decode(prompt[-32:]).rstrip().endswith(THINK)


def in_words_of(template: str, messages: list[dict]) -> list[dict]:
    """The messages as this template has them.

    Most templates do not know the role developer, OpenAI's newer name of the role system: it becomes system.
    An assistant's message that only calls tools has the content "", or None for a template that asks whether
    a content is none. Its reasoning is also in the field `thinking` for a template that reads this field, as
    gpt-oss's does.
    """
    found = []
    for message in messages:
        changed = dict(message)
        if message.get("role") == "developer" and not mentions(template, "developer"):
            changed["role"] = "system"
        if message.get("tool_calls") and not message.get("content"):
            if re.search(r"content['\"]?\]?\s+is\s+(not\s+)?none", template):
                changed["content"] = None
            if "reasoning_content" in message and mentions(template, "thinking"):
                changed["thinking"] = message["reasoning_content"]
        found.append(changed)
    return found


def replace_template(tokenizer, template: str, where: str) -> None:
    """Give the tokenizer another chat template. where: the template's file, for errors.

    Raises UserError if the text is not a Jinja template.
    """
    from jinja2 import TemplateSyntaxError

    tokenizer.chat_template = template
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    except TemplateSyntaxError as e:
        raise UserError(f"{where}: not a Jinja template: line {e.lineno}: {e.message}") from None
    except Exception:  # a template may refuse this chat and take others
        pass
