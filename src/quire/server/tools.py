"""Tool calling: the tools of a request, what the template shows of them, and the grammar that forces calls."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from quire.errors import InvalidRequest
from quire.parsers.parts import PLAIN, Splitter
from quire.parsers.tools.kinds import properties_of
from quire.parsers.tools.readers import reader_of
from quire.parsers.tools.styles import HERMES, Style, TaggedStyle
from quire.server.fields import check
from quire.server.limits import Limits
from quire.server.nested import check_nested
from quire.structured_output.call_rules import argument_rules, escaped, literal
from quire.structured_output.schema import as_object, prepared
from quire.types import UNLIMITED, StructuredOutputsParams

MAX_TOOLS = 128

# Tool calls in one answer under a grammar.
_MAX_FORCED = 16

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAME_FORM = "1 to 64 letters, digits, dots, dashes and low lines"
_NAMESPACE = ("name", "description", "tools")
_FUNCTION = ("name", "description", "parameters", "strict")
HOSTED = frozenset(
    {
        *("web_search", "web_search_preview", "web_fetch", "file_search", "tool_search", "code_interpreter"),
        *("image_generation", "computer", "computer_use", "computer_use_preview", "local_shell", "shell", "mcp"),
        *("apply_patch", "code_execution", "bash", "text_editor", "memory", "mcp_toolset"),
        *("tool_search_tool_regex", "tool_search_tool_bm25"),
    }
)
"""Kinds of tools that OpenAI or Anthropic run, or whose arguments only their models know. They are left out of requests
that do not insist on them."""

_VERSION = re.compile(r"_\d{4}_?\d{2}_?\d{2}$")
_CHOICES = "auto, none, required, {'type': 'function', 'function': {'name': ...}} or {'type': 'allowed_tools', ...}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSet:
    """The tools of a request, checked.

    for_template: tools as the model's template expects them; None for none. parameters: the properties of the arguments
    of each tool that may be called; schemas: of the arguments. forced: the answer must be tool calls. strict: calls
    must match their schemas. most: calls in one answer. calls_before: calls in the conversation so far. closed: as of
    `Limits.closed_schemas`. grouped: namespace and name of each function of a namespace, by the name that the model
    sees. omitted: kinds of hosted tools that were left out.
    """

    style: Style = HERMES
    for_template: list[dict[str, Any]] | None = None
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    schemas: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    forced: bool = False
    strict: bool = False
    most: int = UNLIMITED
    calls_before: int = 0
    closed: bool = True
    grouped: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    omitted: tuple[str, ...] = ()

    def reader(self) -> Splitter:
        """Reads the tool calls in the text of one choice."""
        return reader_of(self.style, self.parameters, most=self.most) if self.parameters else PLAIN

    def call_id(self, name: str, index: int) -> str:
        """The id of a new call, in the format of the model's family. index: of the call in its answer."""
        random = uuid.uuid4().hex[: self.style.id_length]
        return self.style.call_id.format(name=name, index=self.calls_before + index, random=random)

    def structure(self, wanted: StructuredOutputsParams | None, begin: str = "") -> StructuredOutputsParams | None:
        """The structure of the answer: as `wanted`, or tool calls. begin: what an answer that is no call begins with.

        Raises InvalidRequest for a structure that cannot be combined with tools.
        """
        if not self.parameters or not (self.forced or self.strict or wanted):
            return wanted and replace(wanted, begin=begin)
        if wanted is None and not self.forced:
            return StructuredOutputsParams(grammar=self._free_grammar(), param="tools")
        if wanted is None:
            return StructuredOutputsParams(grammar=self._grammar(None, ""), param="tool_choice")
        if self.forced:
            raise InvalidRequest(
                f"{wanted.param} and a tool_choice that forces calls cannot be used together", param=wanted.param
            )
        if wanted.kind[0] != "json":
            raise InvalidRequest(
                f"{wanted.param} goes with tools only as a JSON schema: send tool_choice none", param=wanted.param
            )
        return StructuredOutputsParams(grammar=self._grammar(wanted, begin), param=wanted.param)

    def _grammar(self, otherwise: StructuredOutputsParams | None, begin: str) -> str:
        """Tool calls in the format of the model's family, or an answer as `otherwise`, in llguidance's Lark.

        Each call has arguments of its tool's schema.
        """
        style, more = self.style, min(self.most, _MAX_FORCED) - 1
        between = f" ({literal(style.between)} call){{0,{more}}}" if more else ""
        rules = [f"calls: {literal(style.before)} call{between} {literal(style.after)}", *self._calls()]
        start = "calls"
        if otherwise is not None:
            start, close = "calls | answer", otherwise.disable_additional_properties
            schema = prepared(json.loads(otherwise.kind[1]), otherwise.param, close=close)
            rules.append(f"answer: {literal(begin)} structure")
            rules.append(f"structure: {_schema(schema, otherwise)}")
        return "\n".join([f"start: {start}", *rules])

    def _free_grammar(self) -> str:
        """Any text; tool calls within it must match their schemas."""
        style = self.style
        mark = style.before.rstrip()
        rest, more = literal(style.before.removeprefix(mark)), min(self.most, _MAX_FORCED)
        one = f"call ({literal(style.between)} call)*" if style.after not in style.between else "call"
        start = f"start: (text {rest} {one} {literal(style.after)}){{0,{more}}} TEXT"
        last = f"TEXT: /(?s:.*)/ & ~/(?s:.*){escaped(mark)}(?s:.*)/"
        text = f"text[suffix={literal(mark)}]: /(?s:.*)/"
        return "\n".join([start, text, last, *self._calls()])

    def _calls(self) -> list[str]:
        """The rules of a call, one for each tool."""
        form = self.style.form if isinstance(self.style, TaggedStyle) else None
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(self.schemas)))]
        for i, (name, schema) in enumerate(self.schemas.items()):
            bound = prepared(schema, f"tools[{i}].function.parameters", close=self.closed)
            # The number of a call is the model's to count.
            head = " /[0-9]{1,4}/ ".join(map(literal, self.style.start.replace("{name}", name).split("{index}")))
            rules.append(f"call_{i}: {head} arguments_{i} {literal(self.style.finish)}")
            rules += argument_rules(f"arguments_{i}", form, bound, _schema)
        return rules


NO_TOOLS = ToolSet()


def _schema(schema: Any, wanted: StructuredOutputsParams | None = None) -> str:
    """A schema within a grammar, with optional white space."""
    compact = wanted is not None and wanted.disable_any_whitespace
    white = None if compact else (wanted.whitespace_pattern if wanted else None) or " "
    options = {"whitespace_flexible": white is not None, "whitespace_pattern": white, "lenient": False}
    return "%json " + json.dumps(as_object(schema) | {"x-guidance": options})


def make_tool_set(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    parallel: bool | None,
    style: Style,
    limits: Limits,
) -> ToolSet:
    """Check the fields tools, tool_choice and parallel_tool_calls. Raises InvalidRequest naming the field."""
    functions: list[dict[str, Any]] = []
    grouped: dict[str, tuple[str, str]] = {}
    omitted: list[str] = []
    for i, tool in enumerate(tools or ()):
        if (kind := hosted_kind(tool)) is not None:
            if limits.strict_tools:
                raise InvalidRequest(f"tools[{i}]: this server has no {kind}: leave it out", param="tools")
            omitted.append(kind)
        elif tool.get("type") == "namespace":
            grouped |= _namespace(tool, f"tools[{i}]", functions)
        else:
            functions.append(_function(tool, f"tools[{i}]"))
    names = [function["name"] for function in functions]
    if len(names) > MAX_TOOLS:
        raise InvalidRequest(f"tools: {len(names)} tools, and at most {MAX_TOOLS} are allowed", param="tools")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"tools: two have the name {twice!r}", param="tools")
    allowed = _allowed_tools(choice, names, omitted)
    named = _named_tool(choice, names, omitted) if allowed is None else None
    left_out = tuple(dict.fromkeys(omitted))
    if not names or choice == "none":
        return ToolSet(style=style, omitted=left_out)
    callable_ = {f["name"]: _object(f.get("parameters")) for f in functions}
    if named is not None:
        callable_ = {named: callable_[named]}
    if allowed is not None:
        callable_ = {name: callable_[name] for name in allowed.names}
    bindable = bool(style.before and not style.bare)
    bound = allowed is not None or any(function.get("strict") for function in functions)
    # Where no grammar can keep a model from calling the others, it does not see them.
    hidden = allowed is not None and not (bindable or allowed.forced)
    shown = [function for function in functions if not hidden or function["name"] in callable_]
    return ToolSet(
        style=style,
        for_template=[{"type": "function", "function": function} for function in shown] or None,
        parameters={name: properties_of(schema) for name, schema in callable_.items()},
        schemas=callable_,
        forced=named is not None or choice == "required" or (allowed is not None and allowed.forced),
        strict=bindable and bound,
        most=1 if parallel is False or named is not None else style.most,
        closed=limits.closed_schemas,
        grouped=grouped,
        omitted=left_out,
    )


def hosted_kind(tool: Mapping[str, Any]) -> str | None:
    """The kind of a tool that OpenAI or Anthropic run or define themselves, without its version; None for others."""
    kind = _VERSION.sub("", str(tool.get("type", "")))
    return kind if kind in HOSTED else None


def joined_name(namespace: str, name: str) -> str:
    """The name by which a model sees a function of a namespace."""
    return f"{namespace.removesuffix('__')}__{name}"


def _namespace(tool: Mapping[str, Any], where: str, functions: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Append the functions of a namespace to `functions`. Returns namespace and name by the names that models see.

    The first function's description begins with that of the namespace.
    """
    check({name: tool[name] for name in tool if name != "type"}, _NAMESPACE, where=f"{where}.")
    namespace, about, inner = tool.get("name"), tool.get("description") or "", tool.get("tools")
    if not isinstance(namespace, str) or not _NAME.fullmatch(namespace):
        raise InvalidRequest(f"{where}.name must be {_NAME_FORM}", param="tools")
    if not isinstance(about, str):
        raise InvalidRequest(f"{where}.description must be text", param="tools")
    if not isinstance(inner, list) or not all(isinstance(one, Mapping) for one in inner):
        raise InvalidRequest(f"{where}.tools must be a list of functions", param="tools")
    grouped = {}
    for i, one in enumerate(inner):
        function = _function(one, f"{where}.tools[{i}]")
        shown = joined_name(namespace, function["name"])
        grouped[shown] = (namespace, function["name"])
        if about:
            function["description"] = "\n\n".join(filter(None, (about, function.get("description"))))
        functions.append({**function, "name": shown})
        about = ""
    return grouped


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The function of one tool, checked."""
    if tool.get("type", "function") != "function":
        kind = str(tool.get("type"))[:40]
        raise InvalidRequest(f"{where}.type {kind!r} is not supported: use function", param="tools")
    if not isinstance(given := tool.get("function"), dict):
        raise InvalidRequest(f"{where}.function is required: an object with a name", param="tools")
    check({name: tool[name] for name in tool if name not in ("type", "function")}, (), where=f"{where}.")
    function = check(given, _FUNCTION, where=f"{where}.function.")
    kinds: dict[str, tuple[type, str]] = {
        "description": (str, "text"),
        "parameters": (dict, "a JSON schema"),
        "strict": (bool, "true or false"),
    }
    for name, (wanted, what) in kinds.items():
        if not isinstance(function.get(name), wanted | None):
            raise InvalidRequest(f"{where}.function.{name} must be {what}", param="tools")
    if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
        raise InvalidRequest(f"{where}.function.name must be {_NAME_FORM}", param="tools")
    parameters = function.get("parameters") or {}
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest(
            f"{where}.function.parameters.type must be object, as arguments are named, not {str(kind)[:40]!r}",
            param="tools",
        )
    if not isinstance(parameters.get("properties", {}), dict):
        raise InvalidRequest(f"{where}.function.parameters.properties must be an object", param="tools")
    return {name: value for name, value in function.items() if value is not None}


def _object(schema: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object whatever it says besides."""
    return {**schema, "type": "object"} if schema else {"type": "object", "properties": {}}


class _Allowed(NamedTuple):
    """An `allowed_tools` choice. names: of the functions that may be called. forced: one of them has to be."""

    names: tuple[str, ...]
    forced: bool


def _allowed_tools(
    choice: str | Mapping[str, Any] | None, names: Sequence[str], omitted: Sequence[str]
) -> _Allowed | None:
    """The tools that `tool_choice` allows of those that the model sees; None where it is another choice."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return None
    given = choice.get("allowed_tools")
    kept = check(given if isinstance(given, Mapping) else {}, ("mode", "tools"), where="tool_choice.allowed_tools.")
    mode, tools = kept.get("mode", "auto"), kept.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list):
        raise InvalidRequest(
            "tool_choice.allowed_tools needs a list of tools, and the mode auto or required", param="tool_choice"
        )
    chosen = []
    for tool in tools:
        if isinstance(tool, Mapping) and hosted_kind(tool) in omitted:
            continue
        chosen.append(_named_tool(tool if isinstance(tool, Mapping) else {}, names, omitted) or "")
    if mode == "required" and not chosen:
        lacks = f": this server has no {omitted[0]}" if omitted else ""
        raise InvalidRequest(f"tool_choice required needs tools{lacks}", param="tool_choice")
    return _Allowed(tuple(dict.fromkeys(chosen)), mode == "required")


def _named_tool(choice: str | Mapping[str, Any] | None, names: Sequence[str], omitted: Sequence[str]) -> str | None:
    """The tool that tool_choice names, if it does. omitted: kinds of hosted tools, none of which can be forced."""
    lacks = f": this server has no {omitted[0]}" if omitted else ""
    if choice == "required" and not names:
        raise InvalidRequest(f"tool_choice required needs tools{lacks}", param="tool_choice")
    if choice is None or choice in ("auto", "none", "required"):
        return None
    if isinstance(choice, Mapping) and (kind := hosted_kind(choice)) is not None:
        raise InvalidRequest(f"tool_choice: this server has no {kind}: choose a function", param="tool_choice")
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not isinstance(choice, Mapping) or not isinstance(function, dict):
        raise InvalidRequest(f"tool_choice must be {_CHOICES}", param="tool_choice")
    check_nested(choice, "choice", "tool_choice")
    check_nested(function, "choice.function", "tool_choice.function")
    if name not in names:
        raise InvalidRequest(f"tool_choice: there is no tool {name[:64]!r} among tools{lacks}", param="tool_choice")
    return name
