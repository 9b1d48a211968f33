"""Chat messages to prompt text, by the model's own template in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

from jinja2 import BaseLoader, Environment, TemplateError, meta, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from quire.errors import InvalidModel, InvalidRequest
from quire.text.tokenizer import read_json
from quire.text.tools.describe import described
from quire.text.tools.styles import Style, style_of

_HERE = "\N{OBJECT REPLACEMENT CHARACTER}quire-continues-here\N{OBJECT REPLACEMENT CHARACTER}"
_ROOM = 1 << 20
"""Characters a template may add of its own, and turns it may take in loops and macros, in one rendering."""

_TURN = "quire:turn"
"""No template can spell this name."""

Looping = TypeVar("Looping", nodes.For, nodes.Macro, nodes.CallBlock)


class _Refused(TemplateError):
    """The template itself said no (`raise_exception`)."""


class _Failed(Exception):
    """The template broke, or was stopped."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; in serving it is only its contents."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own spelling of the interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Templates come with checkpoints, so they are not trusted: no attribute tricks, no giant values."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        longest = max((len(x) for x in (left, right) if isinstance(x, str | list | tuple)), default=0)
        times = max((abs(x) for x in (left, right) if isinstance(x, int)), default=1)
        if longest * times > _ROOM or (operator == "**" and times > 1 << 16):
            raise SecurityError(f"{operator!r} would make too large a value")
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(
            f"it reaches for {attribute!r} of {type(obj).__name__!r}, which is not a template's to touch"
        )


class _Budget:
    """What one rendering may still write and count: templates can nest loops, and must come to an end."""

    def __init__(self, room: int) -> None:
        self._left = room

    def spend(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise SecurityError("it goes on without end")

    def range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self.spend(len(numbers))
        return numbers


class _Alone(BaseLoader):
    """A checkpoint has one template: what others it asks for are not there."""

    def get_source(self, environment: Environment, template: str) -> NoReturn:
        raise SecurityError(f"it asks for another template, {template!r}, and there is none")


class _Metered(NodeTransformer):
    """Every turn of a loop and every call of a macro is counted: they need write nothing to go on for ever."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - jinja's own spelling
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802 - jinja's own spelling
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:  # noqa: N802 - jinja's own spelling
        return self._counted(node)

    def _counted(self, node: Looping) -> Looping:
        self.generic_visit(node)
        turn = nodes.Filter(nodes.Const(1), _TURN, [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        return node


@pass_context
def _turn(context: Context, amount: int) -> None:
    """What was given to the rendering is read, which the template's own `set` does not reach."""
    context.parent[_TURN].spend(amount)


class ChatTemplate:
    """One template, compiled. `tokens` are the special tokens it may name (`bos_token` and so on)."""

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None, style: Style | None = None) -> None:
        """style: how calls of tools are told where the template has no way; by default the one it looks like.

        Raises InvalidModel if `source` is not a template.
        """
        sandbox = _Sandbox(
            loader=_Alone(), trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        sandbox.filters["tojson"] = _tojson
        sandbox.filters[_TURN] = _turn
        del sandbox.globals["lipsum"]  # text without end is all it makes
        sandbox.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        try:
            names = meta.find_undeclared_variables(sandbox.parse(source))
            self._template = sandbox.from_string(_Metered().visit(sandbox.parse(source)))
        except (TemplateSyntaxError, RecursionError) as error:
            raise InvalidModel(f"the chat template does not compile: {_line(error)}") from error
        self._tokens = dict(tokens or {})
        self._knows_developer = "developer" in source
        self._knows_tools = "tools" in names
        self._style = style_of(source) if style is None else style
        self.source = source

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        tokens: Mapping[str, str] | None = None,
        *,
        override: str | Path | None = None,
        style: Style | None = None,
        default: str | None = None,
    ) -> Self | None:
        """`override` (a path, or a template), else chat_template.jinja, else tokenizer_config's, else `default`.

        None where there is none at all. Raises InvalidModel for what is no template.
        """
        source = _own(Path(folder), default) if override is None else _given(override)
        return None if source is None else cls(source, tokens, style)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `continue_final_message` leaves the last message open, for the model to go on with.

        Tools, calls of them and their results are told in words where the template knows nothing of tools.
        Raises InvalidRequest when the template refuses the messages or breaks on them.
        """
        shown = [self._shown(message) for message in messages]
        if not self._knows_tools:
            shown = described(shown, tools, self._style)
        if continue_final_message:
            shown[-1]["content"] = str(shown[-1].get("content") or "") + _HERE
        names = {
            **(chat_template_kwargs or {}),
            "messages": shown,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._run(names)
        except _Refused as error:
            raise InvalidRequest(f"the chat template refuses the messages: {_line(error)}", param="messages") from error
        except _Failed as error:
            raise InvalidRequest(f"the chat template fails: {_line(error)}", param="messages") from error
        if not continue_final_message:
            return text
        before, found, _ = text.rpartition(_HERE)
        if not found:
            raise InvalidRequest(
                "the chat template does not show the final message, so it cannot be continued",
                param="continue_final_message",
            )
        return before

    def try_out(self) -> None:
        """Show it one plain message. Raises InvalidModel where it fails; to refuse what it is shown is its right."""
        try:
            self._run(
                {"messages": [{"role": "user", "content": "Hello"}], "tools": None, "add_generation_prompt": True}
            )
        except _Refused:
            return
        except _Failed as error:
            raise InvalidModel(f"the chat template fails: {_line(error)}; name another with --chat-template") from error

    def _run(self, names: Mapping[str, Any]) -> str:
        """Raises _Refused or _Failed."""
        budget = _Budget(_ROOM + 8 * sum(len(str(message)) for message in names["messages"]))
        told: list[str] = []
        try:
            for piece in self._template.generate({**self._tokens, **names, "range": budget.range, _TURN: budget}):
                budget.spend(len(piece))
                told.append(piece)
        except _Refused:
            raise
        except RecursionError as error:
            raise _Failed("it calls itself without end") from error
        except Exception as error:  # whatever Python the template ran into; it is not ours
            raise _Failed(_line(error)) from error
        return "".join(told)

    def _shown(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as templates of text models expect it: content is one string; `developer` is the new `system`."""
        shown = {**message, "content": text_of(message.get("content"))}
        if shown.get("role") == "developer" and not self._knows_developer:
            shown["role"] = "system"
        return shown


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Message content as one string: the text parts, a line each. Raises InvalidRequest for anything but text."""
    if content is None or isinstance(content, str):
        return content or ""
    _check_parts(content)
    for part in content:
        if part.get("type") != "text":
            raise InvalidRequest(
                f"message content of type {str(part.get('type'))[:40]!r} is not supported: this server reads text only",
                param="messages",
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequest("message content of type 'text' needs a text", param="messages")
    return "\n".join(part["text"] for part in content)


def _check_parts(content: object) -> None:
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise InvalidRequest("message content must be text or a list of text parts", param="messages")


def _own(folder: Path, default: str | None) -> str | None:
    """The template of a folder. Raises InvalidModel where it is none."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _template(path)
    source = read_json(folder / "tokenizer_config.json").get("chat_template", default)
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if source is not None and not isinstance(source, str):
        raise InvalidModel(f"chat_template of tokenizer_config.json is of type {type(source).__name__}: not a template")
    return source


def _given(override: str | Path) -> str:
    """A template given as such (it has a tag in it), or as the path of one."""
    return str(override) if "{" in str(override) else _template(Path(override))


def _template(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise InvalidModel(f"chat template {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidModel(f"chat template {path} is not text: {error}") from error


def _raise(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own filter escapes for HTML, which would reach the model."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
