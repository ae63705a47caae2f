"""Grammars of answers that call tools, in the format that the model has learned.

See families/tool_formats.py. The arguments of each call match the tool's JSON schema.
"""

import dataclasses
import json
import keyword
import re
from collections.abc import Callable
from functools import partial

from llguidance import LLTokenizer

from conversation.grammar import JSON_STYLE, Grammar, make_grammar
from conversation.schemas import keep_expressible
from conversation.templates import END_THINK, THINK, ends_within_reasoning, mentions_reasoning, template_text
from conversation.tool_calls import MARK_LIKE, AtemParameters, ParameterArguments, ParameterTags
from conversation.tools import ToolUse
from families.tool_formats import MessageToolFormat
from feedback.errors import UserError, located

ANY_TEXT = "/(?s:.*)/"  # in a Lark grammar
DEFINITIONS = {"$defs", "definitions"}  # fields of a JSON schema
AddRule = Callable[[str, str], str]  # from (name, body) of a rule to the name that it gets


def make_tool_grammar(
    use: ToolUse, tokenizer, grammar_tokenizer: LLTokenizer, prompt: list[int], form: Grammar | None
) -> tuple[Grammar, set[str]]:
    """The grammar of an answer that may call tools; and the keywords of the tools' schemas that it lacks.

    prompt: token ids. form: of an answer that calls none.

    Raises UserError that begins with the name of the wrong field of the chat.
    """
    if form and form.kind != "json_schema" and not use.forced:
        raise UserError("'response_format' beside 'tools' must be text, json_object or json_schema")
    tools, lost = [], set()
    for tool in use.tools:
        with located(f"'tools': the parameters of {tool.name!r}"):
            parameters, keywords = keep_expressible(tool.parameters)
        tools.append(dataclasses.replace(tool, parameters=parameters))
        lost.update(keywords)
    use = dataclasses.replace(use, tools=tuple(tools))
    thinking = ends_within_reasoning(tokenizer, prompt)
    try:
        source = tool_grammar(use, tokenizer, grammar_tokenizer, thinking, form.source if form else None)
        return make_grammar(grammar_tokenizer, "lark", source), lost
    except UserError as e:
        for tool in use.tools:
            with located(f"'tools': the parameters of {tool.name!r}"):
                make_grammar(grammar_tokenizer, "lark", f"start: {json_rule(tool.parameters)}")
        raise UserError(f"'tools': {e}") from None


def json_rule(schema: dict) -> str:
    """A JSON schema in a Lark grammar of llguidance."""
    return f"%json {json.dumps(schema | {'x-guidance': JSON_STYLE})}"


def lark_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def definitions(schema: dict) -> dict:
    """The definitions that parts of the schema may refer to."""
    return {name: x for name, x in schema.items() if name in DEFINITIONS}


def is_closed(schema: dict) -> bool:
    """Whether the schema names all properties, and says nothing more of the object."""
    known = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema"}
    return set(schema) <= known | DEFINITIONS and schema.get("additionalProperties") is False


def property_schema(schema: dict, name: str) -> dict:
    """The schema of a property, with the definitions that it may refer to."""
    found = schema["properties"][name]
    return definitions(schema) | (found if isinstance(found, dict) else {})


def optional_sequence(items: dict[str, str], required: set[str], separator: str, add_rule: AddRule) -> str:
    """The items in turn, those that are not required perhaps left out, with separators between them."""
    none, some = "", ""  # what may follow if nothing precedes it, and if something does
    for name, item in reversed(items.items()):
        after = f"{item} {some}".strip()
        if name in required:
            none, some = add_rule("first", after), add_rule("next", f"{lark_text(separator)} {after}")
        else:
            none = add_rule("first", f"{after} | {none}")
            some = add_rule("next", f"{lark_text(separator)} {after} | {some}")
    return none


def keyword_arguments(schema: dict, add_rule: AddRule) -> str:
    """Arguments as `KeywordArguments` reads them."""
    names = schema.get("properties") or {}
    if not is_closed(schema) or not all(x.isidentifier() and not keyword.iskeyword(x) for x in names):
        return f'"**" {json_rule(schema)}'
    values = {}
    for name in names:
        value = property_schema(schema, name)
        constants = {"boolean": '("True" | "False")', "null": '"None"'}
        plain = "enum" not in value and "const" not in value and isinstance(value.get("type"), str)
        values[name] = (constants.get(value["type"]) if plain else None) or json_rule(value)
    items = {name: f'"{name}=" {value}' for name, value in values.items()}
    return optional_sequence(items, set(schema.get("required", ())), ", ", add_rule)


def parameter_arguments(notation: type[ParameterArguments], schema: dict, add_rule: AddRule) -> str:
    """Arguments as the notation reads them. `pattern` and `format` of strings are not enforced."""
    items = {}
    for name in schema.get("properties") or {}:
        value, begin = property_schema(schema, name), lark_text(f"{notation.BEGIN}{name}{notation.NAMED}")
        choices = value.get("enum") or ([value["const"]] if "const" in value else [])
        if value.get("type") != "string":
            rest = f"{json_rule(value)} {lark_text(notation.END)}"
        elif choices:
            rest = f"({' | '.join(map(lark_text, choices))}) {lark_text(notation.END)}"
        else:
            bounds = f"{{{value.get('minLength', 0)},{value.get('maxLength', '')}}}"
            rest = add_rule("text[lazy]", f"/(?s:.{bounds})/ {lark_text(notation.END)}")
        items[name] = f"{begin} {rest}"
    return optional_sequence(items, set(schema.get("required", ())), "", add_rule)


ARGUMENTS = dict(
    json=lambda schema, add_rule: json_rule(schema),
    keywords=keyword_arguments,
    atem_parameters=partial(parameter_arguments, AtemParameters),
    parameter_tags=partial(parameter_arguments, ParameterTags),
)


class GrammarText:
    """The text of a Lark grammar while its rules are added."""

    def __init__(self, tokenizer: LLTokenizer):
        self.tokenizer, self.rules, self.numbers = tokenizer, [], 0

    def add(self, name: str, body: str) -> str:
        """Add a rule: -> its name, made unique. name: with options, as in `head[lazy]`."""
        plain, _, options = name.partition("[")
        self.numbers += 1
        unique = f"{plain}_{self.numbers}"
        self.rules.append(f"{unique}{'[' + options if options else ''}: {body}")
        return unique

    def token(self, text: str) -> str | None:
        """A token of this text that grammars treat as special, as Lark has it; None: there is none."""
        ids = self.tokenizer.tokenize_str(text, parse_special=True)
        special = len(ids) == 1 and self.tokenizer.is_special_token(ids[0])
        return f"<[{ids[0]}]>" if special else None

    def literal(self, text: str) -> str:
        """A text in which marks may be tokens."""
        parts, plain = [], ""
        for part in MARK_LIKE.split(text):
            if part and (token := self.token(part)):
                parts, plain = [*parts, lark_text(plain), token], ""
            else:
                plain += part
        return " ".join(filter(None, [*parts, lark_text(plain)]))


def tool_grammar(
    use: ToolUse, tokenizer, grammar_tokenizer: LLTokenizer, thinking: bool, text_schema: dict | None = None
) -> str:
    """The Lark grammar of an answer that may call tools.

    thinking: whether the prompt ends within the reasoning. text_schema: a JSON schema for the text of answers
    without calls.
    """
    lark = GrammarText(grammar_tokenizer)
    if isinstance(use.format, MessageToolFormat):
        start = message_grammar(lark, use, text_schema)
    else:
        start = text_grammar(lark, use, tokenizer, text_schema)
        start = think_grammar(lark, tokenizer, start, thinking, use.forced)
    return "\n".join([f"start: {start}", *lark.rules, ""])


def message_grammar(lark: GrammarText, use: ToolUse, text_schema: dict | None) -> str:
    shape, calls = use.format, []
    for tool in use.tools:
        body = json_rule(tool.parameters)
        if shape.body:
            body = run_of(lark, dataclasses.replace(use, tools=(tool,), format=shape.body))
        calls += [f"{lark.literal(header.replace('NAME', tool.name))} {body}" for header in shape.calls]
    call, text = lark.add("call", " | ".join(calls)), ANY_TEXT
    thoughts = lark.add("thought", f"({' | '.join(map(lark.literal, shape.thoughts))}) {text}")
    between = lark.literal(shape.between)
    lead = lark.add("lead", f"({thoughts} {between})*")
    if use.forced:
        return f"{lead} {call}"
    answer = f"{lark.literal(shape.answer)} {json_rule(text_schema) if text_schema else text}"
    return f"{lead} ({call} | {answer})"


def text_grammar(lark: GrammarText, use: ToolUse, tokenizer, text_schema: dict | None) -> str:
    shape = use.format
    marks = shape.usable_marks(lark.token)
    if use.forced:
        (mark, end), *_ = marks
        return f"{lark.literal(mark)} {run_of(lark, use)} {lark.literal(end)}"
    choices, text = [], ANY_TEXT
    if any(not mark for mark, _ in marks):
        names = "|".join(re.escape(tool.name) for tool in use.tools)
        head = shape.opening + shape.before, shape.between[:1]
        excluded = rf"\s*{re.escape(head[0])}({names}){re.escape(head[1])}(?s:.*)".replace("/", r"\/")
        text = f"/(?s:.*)/ & ~/{excluded}/"
    lark.rules.append(f"TEXT: {text}")
    for mark, end in marks:
        closing = lark.literal(end)
        if not mark:
            run = json_calls(use) if text_schema else run_of(lark, use, r"/\s*/")
            choices.append(run)
            continue
        run = f"{run_of(lark, use)} {closing}"
        if text_schema:
            choices.append(f"{lark.literal(mark)} {run}")
        elif token := lark.token(mark):
            choices.append(f"TEXT {token} {run}")
        else:
            choices.append(f"{lark.add('head[lazy]', f'TEXT {lark_text(mark)}')} {run}")
    if text_schema:
        return f"({' | '.join([json_rule(text_schema), *choices])})"
    free = free_tokens(lark, tokenizer, [mark for mark, _ in marks])
    lead = f"(TEXT <[{','.join(map(str, free))}]>)*" if free else ""
    return f"{lead} (TEXT | {' | '.join(choices)})"


def free_tokens(lark: GrammarText, tokenizer, marks: list[str]) -> list[int]:
    """Tokens that belong to texts, though grammars treat them as special: the tokenizer has added them, but
    does not call them special.
    """
    taken = {*marks, THINK}
    return sorted(
        i for i, token in tokenizer.added_tokens_decoder.items()
        if not token.special and token.content not in taken and lark.tokenizer.is_special_token(i)
    )  # fmt: skip


def think_grammar(lark: GrammarText, tokenizer, start: str, thinking: bool, forced: bool) -> str:
    """The reasoning that precedes the answer: it must end if the prompt has begun it; else a model that
    chooses whether to call may begin it.
    """
    begin, end = lark.token(THINK), lark.token(END_THINK)
    if thinking:
        thoughts = f"{ANY_TEXT} {end or lark_text(END_THINK)}"
        lead = thoughts if end else lark.add("thoughts[lazy]", thoughts)
        return f"{lead} /\\s*/ {start}" if forced else f"{lead} {start}"
    if begin and end and not forced and mentions_reasoning(template_text(tokenizer)):
        return f"({begin} {ANY_TEXT} {end})? {start}"
    return start


def run_of(lark: GrammarText, use: ToolUse, lead: str = "") -> str:
    """One or more calls, from the text after the mark. lead: a regular expression of what may precede."""
    shape, first, later = use.format, [], []
    head = shape.opening + shape.before
    for tool in use.tools:
        rest = ARGUMENTS[shape.arguments](tool.parameters, lark.add)
        rest = f"{rest} {lark.literal(shape.after)}"
        begin = lark.literal(head + tool.name + shape.between)
        if lead:  # a terminal, as the text is: the longer of the two counts
            begin = lark.add("FIRST", f"{lead} {begin}")
        first.append(f"{begin} {rest}")
        later.append(f"{lark.literal(shape.separator + shape.before + tool.name + shape.between)} {rest}")
    run = lark.add("call", " | ".join(first))
    if use.several and shape.several:
        run += f" ({lark.add('call', ' | '.join(later))})*"
    return f"{run} {lark.literal(shape.closing)}"


def json_calls(use: ToolUse) -> str:
    """Calls in Llama's JSON, as JSON schemas, for answers whose text is JSON, too.

    So a call and a text may begin with the same characters.
    """
    key = re.findall(r'"(\w+)": $', use.format.between)[0]
    found = []
    for tool in use.tools:
        call = dict(type="object", properties={"name": {"const": tool.name}, key: tool.parameters})
        call |= dict(required=["name", key], additionalProperties=False)
        found.append(json_rule(call | definitions(tool.parameters)))
    return " | ".join(found)
