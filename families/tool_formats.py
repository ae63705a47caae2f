"""How models write calls of tools (functions): the conventions that their chat templates teach.

conversation/tool_calls.py reads and writes calls in these formats, and conversation/tool_grammar.py makes
grammars of them. Each text below is exactly what the format's published chat templates render.
"""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """An answer with calls is a text, which may be empty, one of `marks`, and then calls until its end:

        mark, opening, call, separator, call, ..., closing, end of the mark

    A call is: before, the function's name, between, the arguments, after.

    marks: (mark, end) pairs. A mark is a token or a text; the mark "" means that the calls are the whole
    answer. Calls that a request demands begin with the first mark, calls that the model chooses with any.
    arguments: the notation of the arguments, one of conversation.tool_calls.NOTATIONS. several: whether one
    answer may have several calls.
    """

    marks: tuple[tuple[str, str], ...]
    before: str
    between: str
    after: str
    separator: str = ""
    opening: str = ""
    closing: str = ""
    arguments: str = "json"
    several: bool = True

    def usable_marks(self, is_token: Callable[[str], object]) -> list[tuple[str, str]]:
        """The marks of a model: a mark <|...|> is a token, which the vocabulary of the model may lack."""
        return [(mark, end) for mark, end in self.marks if not mark.startswith("<|") or is_token(mark)]


@dataclasses.dataclass(frozen=True)
class MessageToolFormat:
    """Calls as messages of their own in an answer that consists of several, see families.family.Channels.

    thoughts: headers of messages that may precede a call or the answer. answer: the header of the answer for
    the user. calls: headers of a message with a call, NAME being the function's name. between: between two
    messages. recipient: a regular expression that finds the name in a header. body: the format of the text of
    a message with a call; None: that text is the arguments as JSON. "Header" means the text from the role,
    which ends the prompt, to the token that begins the message's text.
    """

    thoughts: tuple[str, ...]
    answer: str
    calls: tuple[str, ...]
    between: str
    recipient: str
    body: ToolFormat | None = None


# Llama 3.1 and later. Source: meta-llama/llama-models, models/llama3_1/prompt_format.md.
LLAMA_JSON = ToolFormat(
    (("", ""), ("<|python_tag|>", "")), '{"name": "', '", "parameters": ', "}", separator="; "
)  # fmt: skip
# Llama 4, some templates of Llama 3.2: [f(a=1), g()]. Source: llama-models, models/llama4/prompt_format.md.
PYTHONIC = ToolFormat(
    (("", ""), ("<|python_start|>", "<|python_end|>")), "", "(", ")",
    separator=", ", opening="[", closing="]", arguments="keywords",
)  # fmt: skip
# Hermes, Qwen 2.5, 3 and 3 Next, SmolLM. Source: NousResearch/Hermes-Function-Calling.
TAGS = ToolFormat(
    (("<tool_call>", ""),), '\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n<tool_call>"
)
# Qwen3-Coder, Qwen 3.5. Source: the chat templates of Qwen.
FUNCTION_TAGS = ToolFormat(
    (("<tool_call>", ""),), "\n<function=", ">\n", "</function>\n</tool_call>",
    separator="\n<tool_call>", arguments="parameter_tags",
)  # fmt: skip
# Mistral 7B Instruct 0.3, Nemo. Source: mistral-common, instruct tokenizer version 3.
MISTRAL_LIST = ToolFormat(
    (("[TOOL_CALLS]", ""),), '{"name": "', '", "arguments": ', "}",
    separator=", ", opening="[", closing="]",
)  # fmt: skip
# Ministral 3. Source: mistral-common, instruct tokenizer version 13.
MISTRAL_ARGS = ToolFormat(
    (("[TOOL_CALLS]", ""),), before="", between="[ARGS]", after="", separator="[TOOL_CALLS]"
)
# DeepSeek V3 and R1, then V3.1. Source: the chat templates of deepseek-ai.
DEEPSEEK = ToolFormat(
    (("<｜tool▁calls▁begin｜>", ""),), "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n",
    "\n```<｜tool▁call▁end｜>", separator="\n", closing="<｜tool▁calls▁end｜>",
)  # fmt: skip
DEEPSEEK_V31 = dataclasses.replace(
    DEEPSEEK,
    before="<｜tool▁call▁begin｜>",
    between="<｜tool▁sep｜>",
    after="<｜tool▁call▁end｜>",
    separator="",
)
# gpt-oss. Source: openai/harmony, docs/format.md.
HARMONY_TOOLS = MessageToolFormat(
    ("<|channel|>analysis<|message|>", "<|channel|>commentary<|message|>"),
    "<|channel|>final<|message|>",
    (
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        " to=functions.NAME<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.NAME<|channel|>commentary json<|message|>",
    ),
    "<|end|><|start|>assistant",
    r"to=functions\.([\w.-]+)",
)
# Muse Glimmer. Source: the chat template of meta-models/Muse-Glimmer-30B, quoted in vLLM pull request 57488.
ATEM = ToolFormat(
    (("", ""),), '<atem:invoke name="', '">\n', "</atem:invoke>",
    separator="\n", opening="<atem:function_calls>\n", closing="\n</atem:function_calls>",
    arguments="atem_parameters",
)  # fmt: skip
MUSE_TOOLS = MessageToolFormat(
    (" to=self<|message|>",), " to=user<|message|>", (" to=NAME<|message|>",),
    "<|eom|><|start|>assistant", r"to=(?!(?:self|user)\b)([\w.-]+)", ATEM,
)  # fmt: skip

# Texts that together show a format, if a chat template has them all. The first line that applies counts.
SIGNS = (
    (("<tool_call>", "<function="), FUNCTION_TAGS),
    (("<tool_call>",), TAGS),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK_V31),
    (('"parameters": dictionary of argument name',), LLAMA_JSON),
    (("[func_name1(",), PYTHONIC),
)
