"""The grammar of a request's answers: by a schema, as calls of tools, or both; with what the model thinks before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neurogrid.errors import ConfigurationError
from neurogrid.model.files.tokenizer import Tokenizer
from neurogrid.model.grammars import GrammarText, check_schema
from neurogrid.server.errors import APIError
from neurogrid.server.openai.tools.call_formats import CallFormat, Style, Thinking
from neurogrid.server.openai.tools.message_reader import MARKS
from neurogrid.server.openai.tools.tool_requests import ToolRequest

__all__ = ["answer_grammar"]

_ANYTHING = r"/(.|\n)*/"


def answer_grammar(
    body: Mapping[str, Any],
    tools: ToolRequest,
    thinking: Thinking | None,
    tokenizer: Tokenizer,
) -> tuple[str, str] | None:
    """The grammar that the answers have to be of, and the field that asks for it; None for any text.

    Args:
        body: whose fields are checked.

    Raises:
        APIError: 400, with the field.
    """
    grammar = GrammarText()
    rules = _Rules(grammar, tokenizer)
    answer, param = _by_format(body, grammar)
    if tools.must_call:
        start, param = rules.calls(tools), "tool_choice"
    elif answer is not None and tools.call_format is not None:
        start = f"({answer} | {rules.calls(tools)})"
    elif answer is not None:
        start = answer
    elif tools.is_strict and tools.call_format is not None:
        start, param = rules.text_or_calls(tools), "tools"
    else:
        return None
    grammar.rule("start", rules.thinking(thinking) + start)
    try:
        return grammar.text, param
    except ConfigurationError as exc:
        raise APIError(400, str(exc), param=param, code="invalid_value") from exc


def _by_format(body: Mapping[str, Any], grammar: GrammarText) -> tuple[str | None, str]:
    """Rule of the answer, None where any will do, and the field of the request that says so."""
    outputs = {
        name: value
        for name, value in (body.get("structured_outputs") or {}).items()
        if value is not None and name in ("json", "regex", "choice")
    }
    kind = (body.get("response_format") or {}).get("type", "text")
    if len(outputs) + (kind != "text") > 1:
        raise APIError(
            422,
            f"{_OUTPUTS} can say one of json, regex and choice, without response_format",
            param=_OUTPUTS,
            code="invalid_value",
        )
    if kind == "json_object":
        return grammar.schema({"type": "object"}), "response_format"
    if kind == "json_schema":
        param = "response_format.json_schema.schema"
        given = (body["response_format"].get("json_schema") or {}).get("schema")
        if given is None:
            raise APIError(422, f"{param} is missing", param=param, code="invalid_value")
        return grammar.schema(_checked(given, param)), param
    if "json" in outputs:
        param = f"{_OUTPUTS}.json"
        return grammar.schema(_checked(outputs["json"], param)), param
    if "regex" in outputs:
        return grammar.regex("wanted", outputs["regex"]), f"{_OUTPUTS}.regex"
    if "choice" in outputs:
        choices = " | ".join(map(grammar.literal, outputs["choice"]))
        return f"({choices})", f"{_OUTPUTS}.choice"
    return None, "response_format"


_OUTPUTS = "structured_outputs"
_TAG_END = r'"\n</parameter>\n"'
# What a schema of arguments between tags may have; what is left out says something of all of them together.
_TAGGED_WORDS = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "title",
        "description",
        "$defs",
        "definitions",
        "$schema",
    }
)


def _checked(schema: Mapping[str, Any], param: str) -> Mapping[str, Any]:
    try:
        check_schema(schema)
    except ConfigurationError as exc:
        raise _wrong(str(exc), param) from exc
    return schema


class _Rules:
    """Rules of what the model's own template has answers look like."""

    def __init__(self, grammar: GrammarText, tokenizer: Tokenizer) -> None:
        self._grammar = grammar
        self._tokenizer = tokenizer
        self._schemas: dict[str, str] = {}

    def thinking(self, thinking: Thinking | None) -> str:
        """Rule of the model's thoughts: they go on where the prompt has begun them, and may begin otherwise."""
        if thinking is None:
            return ""
        self._grammar.rule("ANYTHING", _ANYTHING)
        self._grammar.rule("SPACES", r"/\n{0,3}/")
        end = self._marked(thinking.end)
        if self._tokenizer.special_id(thinking.end) is None:
            self._grammar.rule("thought[lazy]", f"ANYTHING {end}")
            thought = "thought SPACES "
        else:
            thought = f"ANYTHING {end} SPACES "
        if thinking.is_open:
            return thought
        return f"({self._marked(thinking.begin)} {thought})? "

    def calls(self, tools: ToolRequest) -> str:
        """One call or several, and nothing else."""
        known = tools.call_format
        assert known is not None
        call = self._any_call(tools, known.call_begin)
        more = ""
        if tools.max_calls is None:
            assert known.separator is not None
            more = f" ({self._marked(known.separator)} {call})*"
        parts = (self._marked(known.begin), call + more, self._marked(known.end))
        return self._grammar.rule("calls", " ".join(part for part in parts if part))

    def text_or_calls(self, tools: ToolRequest) -> str:
        """Any text; what begins as a call is one."""
        known = tools.call_format
        assert known is not None
        self._grammar.rule("ANYTHING", _ANYTHING)
        if not known.trigger:  # an answer that begins as an object is a call
            self._grammar.rule("TEXT", r"/([^{](.|\n)*)?/")
            return f"({self.calls(tools)} | TEXT)"
        begin = known.begin or known.call_begin
        trigger, rest = known.trigger, begin[len(known.trigger) :]
        if self._tokenizer.special_id(trigger) is None:
            self._grammar.rule("head[lazy]", f"ANYTHING {self._grammar.literal(trigger)}")
            head = "head"
        else:
            head = f"ANYTHING {self._marked(trigger)}"
        # The first call of each group begins with what is left of its mark.
        if known.begin:
            call = self._any_call(tools, known.call_begin)
            more = "" if tools.max_calls else f" ({self._marked(known.separator or '')} {call})*"
            body = f"{self._marked(rest)} {call}{more} {self._marked(known.end)}"
        else:
            body = self._any_call(tools, rest)
        repeat = "?" if tools.max_calls else "*"
        return f"({head} {body}){repeat} ANYTHING"

    def _any_call(self, tools: ToolRequest, begin: str) -> str:
        """A call of one of the tools."""
        known = tools.call_format
        assert known is not None
        alternatives = [
            self._call(known, begin, name, schema, number)
            for number, (name, schema) in enumerate(tools.parameters.items())
        ]
        return f"({' | '.join(alternatives)})"

    def _call(
        self, known: CallFormat, begin: str, name: str, schema: Mapping[str, Any], number: int
    ) -> str:
        key = f"call_{number}"
        if known.style is Style.TAGGED:
            body = self._tagged(known, begin, name, schema, key)
        elif known.style is Style.NAMED:
            arguments = self._arguments(key, schema)
            before, after = begin + name + known.name_end, known.call_end
            body = f"{self._marked(before)} {arguments} {self._marked(after)}"
        else:
            arguments = self._arguments(key, schema)
            before = begin + f'{{"name": "{name}", "{known.arguments_key}": '
            body = f"{self._marked(before)} {arguments} {self._marked('}' + known.call_end)}"
        return self._grammar.rule(key, body)

    def _tagged(
        self, known: CallFormat, begin: str, name: str, schema: Mapping[str, Any], key: str
    ) -> str:
        """A call whose arguments are each between tags: texts as they are, other values as JSON."""
        required = set(schema.get("required") or ())
        properties = schema.get("properties") or {}
        unknown = sorted((set(schema) - _TAGGED_WORDS) | (required - set(properties)))
        if unknown:
            raise _wrong(
                f"has {unknown[0]!r} in the parameters of {name!r}, which cannot be held to in this model's format of "
                "calls: arguments are between tags",
                "tools",
            )
        parts = [self._marked(f"{begin}<function={name}>\n")]
        definitions = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
        for number, (parameter, given) in enumerate(properties.items()):
            own = given if isinstance(given, Mapping) else {}
            rule = f"{key}_{number}"
            tag = self._grammar.literal(f"<parameter={parameter}>\n")
            if own.get("type") == "string":
                value = self._plain_text(rule, own, parameter)
            else:
                value = f"{self._grammar.schema({**own, **definitions})} {_TAG_END}"
            self._grammar.rule(rule, f"{tag} {value}")
            parts.append(rule if parameter in required else f"{rule}?")
        parts.append(self._marked("</function>\n" + known.call_end))
        return " ".join(parts)

    def _plain_text(self, rule: str, schema: Mapping[str, Any], parameter: str) -> str:
        """A text without quotes, up to the tag behind it."""
        enum = schema.get("enum")
        if enum is not None or "const" in schema:
            texts = enum or [schema.get("const")]
            literals = " | ".join(self._grammar.literal(str(text)) for text in texts)
            return f"({literals}) {_TAG_END}"
        if not_held := sorted({"pattern", "format"} & set(schema)):
            raise _wrong(
                f"has a {not_held[0]} for {parameter!r}, which cannot be held to in this model's format of calls: "
                "texts are between tags",
                "tools",
            )
        at_least, at_most = schema.get("minLength", 0), schema.get("maxLength", "")
        text = self._grammar.rule(f"{rule}_text".upper(), rf"/(.|\n){{{at_least},{at_most}}}/")
        self._grammar.rule(f"{rule}_value[lazy]", f"{text} {_TAG_END}")
        return f"{rule}_value"

    def _arguments(self, key: str, schema: Mapping[str, Any]) -> str:
        """JSON by a tool's schema; once, however often rules name it."""
        if key not in self._schemas:
            self._schemas[key] = self._grammar.schema(schema)
        return self._schemas[key]

    def _marked(self, text: str) -> str:
        """`text` in a rule, special tokens in it as these."""
        parts = []
        at = 0
        for found in MARKS.finditer(text):
            token_id = self._tokenizer.special_id(found.group())
            if token_id is None:
                continue
            parts += [self._grammar.literal(text[at : found.start()])] * (found.start() > at)
            parts.append(f"<[{token_id}]>")
            at = found.end()
        parts += [self._grammar.literal(text[at:])] * (len(text) > at)
        return " ".join(parts)


def _wrong(what: str, param: str) -> APIError:
    return APIError(400, f"{param} {what}", param=param, code="invalid_value")
