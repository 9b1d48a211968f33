"""Chat messages to prompt text, by the model's chat template in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from jinja2 import meta
from jinja2.exceptions import TemplateSyntaxError

from quire.errors import InvalidModel, InvalidRequest
from quire.parsers.tools.rendering import describe_tools
from quire.parsers.tools.styles import Style, style_of
from quire.tokenization.template_files import read_template, templates_of
from quire.tokenization.template_sandbox import METER, Budget, Metered, Refused, Sandbox, extent
from quire.tokenization.vocabularies import FOR_TOOLS

_CONTINUE_MARK = "\N{OBJECT REPLACEMENT CHARACTER}quire-continues-here\N{OBJECT REPLACEMENT CHARACTER}"

_PROBE = "quire-shows-this"

RENDERED = frozenset(("messages", "tools", "add_generation_prompt", "continue_final_message"))
"""Arguments of `ChatTemplate.render` by name, which chat_template_kwargs cannot change."""


class _Failed(Exception):
    """The template raised an error or exceeded its budget."""


class ChatTemplate:
    """A compiled template. tokens: the special tokens that it may name (`bos_token` and so on)."""

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str] | None = None,
        style: Style | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """style: the format of tool calls for a template that does not know tools; by default that of its family.
        kwargs: what it gets where a call's chat_template_kwargs do not say.

        Raises InvalidModel if `source` does not compile.
        """
        sandbox = Sandbox()
        try:
            names = meta.find_undeclared_variables(sandbox.parse(source))
            self._template = sandbox.from_string(Metered().visit(sandbox.parse(source)))
        # Python's own errors are those of what jinja makes of the template: a break outside of loops, nesting too deep.
        except (TemplateSyntaxError, SyntaxError, RecursionError) as error:
            raise InvalidModel(f"the chat template does not compile: {_line(error)}") from error
        self.kwargs = dict(kwargs or {})
        self._names = {**(tokens or {}), **self.kwargs}
        self._knows_developer = "developer" in source
        self._knows_tools = "tools" in names
        self.arguments = frozenset(names)
        """The names that it reads."""
        self._style = style_of(source) if style is None else style
        self.source = source
        self._trial_tools: list[dict[str, Any]] | None = None
        self.for_tools: ChatTemplate | None = None
        """What renders requests with tools, where a checkpoint has a template of its own for them."""

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        tokens: Mapping[str, str] | None = None,
        *,
        override: str | Path | None = None,
        style: Style | None = None,
        default: Any = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Self | None:
        """`override` (a path, or a template), else chat_template.jinja, else tokenizer_config's, else `default`; beside
        them what the checkpoint has for requests with tools.

        None where there is none. Raises InvalidModel.
        """
        if override is not None:
            # A template contains a brace.
            source = str(override) if "{" in str(override) else read_template(Path(override))
            return cls(source, tokens, style, kwargs)
        named = templates_of(Path(folder), default)
        if (own := named.get("default")) is None:
            return None
        made = cls(own, tokens, style or style_of(named.get(FOR_TOOLS, own)), kwargs)
        if FOR_TOOLS in named:
            made.for_tools = cls(named[FOR_TOOLS], tokens, style, kwargs)
            made.for_tools._trial_tools = [_trial_tool()]
            made.arguments |= made.for_tools.arguments
        return made

    @property
    def tools_source(self) -> str:
        """The template of requests with tools, which shows how calls are written."""
        return self.source if self.for_tools is None else self.for_tools.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. continue_final_message: end with the last message's text, for the model to continue it.

        Tools, calls and results are written as text where the template does not know tools.
        Raises InvalidRequest when the template refuses the messages or fails, and for chat_template_kwargs that this
        call has as arguments, with another value.
        """
        if tools and self.for_tools is not None:
            return self.for_tools.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
        own = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        _check_kwargs(chat_template_kwargs or {}, own | {"continue_final_message": continue_final_message})
        shown = [self._shown(message) for message in messages]
        if not self._knows_tools:
            shown = describe_tools(shown, tools, self._style, system=self._takes_system)
        if continue_final_message and not isinstance(shown[-1].get("content"), str):
            raise InvalidRequest("a final message with images cannot be continued", param="continue_final_message")
        if continue_final_message:
            shown[-1]["content"] = str(shown[-1].get("content") or "") + _CONTINUE_MARK
        names = {
            **(chat_template_kwargs or {}),
            "messages": list(map(self._form, shown)),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._run(names)
        except (Refused, _Failed) as error:
            does = "refuses the messages" if isinstance(error, Refused) else "fails"
            raise InvalidRequest(f"the chat template {does}: {_line(error)}", param="messages") from error
        if not continue_final_message:
            return text
        before, found, _ = text.rpartition(_CONTINUE_MARK)
        if not found:
            raise InvalidRequest(
                "the chat template does not show the final message, so it cannot be continued",
                param="continue_final_message",
            )
        return before

    def try_out(self) -> None:
        """Render one plain message. Raises InvalidModel where the template fails; refusing the message is allowed."""
        if self.for_tools is not None:
            self.for_tools.try_out()
        try:
            message = self._content({"role": "user", "content": "Hello"})
            self._run({"messages": [message], "tools": self._trial_tools, "add_generation_prompt": True})
        except Refused:
            return
        except _Failed as error:
            raise InvalidModel(f"the chat template fails: {_line(error)}; name another with --chat-template") from error

    @cached_property
    def _takes_system(self) -> bool:
        """Whether a conversation may begin with a system message, which Gemma's first templates refuse."""
        messages = [self._content({"role": role, "content": "Hello"}) for role in ("system", "user")]
        try:
            self._run({"messages": messages, "tools": self._trial_tools, "add_generation_prompt": True})
        except (Refused, _Failed):
            return False
        return True

    @cached_property
    def _needs_parts(self) -> bool:
        """Whether it shows the text of a message only where content is a list of parts."""
        return not self._shows(_PROBE) and self._shows([{"type": "text", "text": _PROBE}])

    def _shows(self, content: str | list[dict[str, str]]) -> bool:
        messages = [{"role": "user", "content": content}]
        try:
            return _PROBE in self._run(
                {"messages": messages, "tools": self._trial_tools, "add_generation_prompt": True}
            )
        except (Refused, _Failed):
            return False

    @cached_property
    def _takes_text(self) -> bool:
        """Whether it joins the arguments of calls to text, so that they must be text themselves."""
        for arguments in ({"a": _PROBE}, f'{{"a": "{_PROBE}"}}'):
            call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
            question: dict[str, Any] = {"role": "user", "content": "Hello"}
            messages = [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
            names = {
                "messages": list(map(self._content, messages)),
                "tools": self._trial_tools,
                "add_generation_prompt": False,
            }
            with suppress(Refused, _Failed):
                return _PROBE in self._run(names) and isinstance(arguments, str)
        return False

    def _form(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with its content and the arguments of its calls in the form that the template reads."""
        shown = self._content(message)
        if shown.get("tool_calls") and self._takes_text:
            shown["tool_calls"] = [_with_text(call) for call in shown["tool_calls"]]
        return shown

    def _content(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with its content in the form that the template reads."""
        content = message.get("content")
        if not content or not isinstance(content, str) or not self._needs_parts:
            return dict(message)
        return {**message, "content": [{"type": "text", "text": content}]}

    def _run(self, names: Mapping[str, Any]) -> str:
        """Raises Refused or _Failed."""
        budget = Budget(extent(list(names.values())))
        pieces: list[str] = []
        try:
            for piece in self._template.generate({**self._names, **names, "range": budget.range, METER: budget}):
                budget.spend(len(piece))
                pieces.append(piece)
        except Refused:
            raise
        # Any error of Python that the template caused.
        except Exception as error:
            causes = {RecursionError: "it calls itself without end", MemoryError: "it takes more memory than there is"}
            raise _Failed(causes.get(type(error), _line(error))) from error
        return "".join(pieces)

    def _shown(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as templates of text models expect it: `content` is one string, and `developer` is `system`."""
        content = message.get("content")
        shown = {**message, "content": content if _has_images(content) else text_of(content)}
        if shown.get("role") == "developer" and not self._knows_developer:
            shown["role"] = "system"
        return shown


def _trial_tool() -> dict[str, Any]:
    """What a template that is for requests with tools is tried out with."""
    schema = {"type": "object", "properties": dict[str, Any]()}
    return {"type": "function", "function": {"name": "f", "description": "", "parameters": schema}}


def _with_text(call: Any) -> Any:
    """A call whose arguments are text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return call
    text = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _has_images(content: object) -> bool:
    """Whether content is a list of parts, which templates of models that read images take, checked."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return False
    _check_parts(content)
    others = [part for part in content if part != {"type": "image"}]
    text_of(others)
    return len(others) < len(content)


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Message content as one string: the text parts, joined by line breaks. Raises InvalidRequest for other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    _check_parts(content)
    for part in content:
        if part.get("type") != "text":
            raise InvalidRequest(
                f"message content of type {str(part.get('type'))[:40]!r} is not supported: text is, and images "
                "where the model reads them",
                param="messages",
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequest("message content of type 'text' needs a field text", param="messages")
    return "\n".join(part["text"] for part in content)


def _check_parts(content: object) -> None:
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise InvalidRequest("message content must be text or a list of text parts", param="messages")


def _check_kwargs(given: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for a value that would not reach the template, since `own` has another by that name."""
    for name, value in own.items():
        if name in given and given[name] != value:
            why = f"chat_template_kwargs.{name}: send {name} as a field of the request, not within chat_template_kwargs"
            raise InvalidRequest(why, param="chat_template_kwargs")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
