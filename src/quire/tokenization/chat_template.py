"""Chat messages to prompt text, by the model's own template in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jinja2 import meta
from jinja2.exceptions import TemplateSyntaxError

from quire.errors import InvalidModel, InvalidRequest
from quire.parsers.tools.styles import ToolStyle, describe_tools, style_of
from quire.tokenization.template_sandbox import METER, Budget, Metered, Refused, Sandbox, extent
from quire.tokenization.tokenizer import read_json

_HERE = "\N{OBJECT REPLACEMENT CHARACTER}quire-continues-here\N{OBJECT REPLACEMENT CHARACTER}"


class _Failed(Exception):
    """The template broke, or was stopped."""


class ChatTemplate:
    """One template, compiled. `tokens` are the special tokens it may name (`bos_token` and so on)."""

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None, style: ToolStyle | None = None) -> None:
        """style: how calls of tools are told where the template has no way; by default the one it looks like.

        Raises InvalidModel if `source` is not a template.
        """
        sandbox = Sandbox()
        try:
            names = meta.find_undeclared_variables(sandbox.parse(source))
            self._template = sandbox.from_string(Metered().visit(sandbox.parse(source)))
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
        style: ToolStyle | None = None,
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
            shown = describe_tools(shown, tools, self._style)
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
        except Refused as error:
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
        except Refused:
            return
        except _Failed as error:
            raise InvalidModel(f"the chat template fails: {_line(error)}; name another with --chat-template") from error

    def _run(self, names: Mapping[str, Any]) -> str:
        """Raises Refused or _Failed."""
        budget = Budget(extent(list(names.values())))
        told: list[str] = []
        try:
            for piece in self._template.generate({**self._tokens, **names, "range": budget.range, METER: budget}):
                budget.spend(len(piece))
                told.append(piece)
        except Refused:
            raise
        except RecursionError as error:
            raise _Failed("it calls itself without end") from error
        except MemoryError as error:
            raise _Failed("it takes more memory than there is") from error
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


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
