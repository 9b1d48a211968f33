"""Pages that are generated while the site is built: commands, HTTP routes, the Python API, and the examples."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

import quire
from quire import errors
from quire.cli import main
from quire.config import OPTIONS
from quire.server import openapi

EXAMPLES = Path(__file__).parents[1] / "examples"


def cli() -> str:
    """The page of commands: usage, help, and flags beside the options of settings."""
    options = {known.flag for known in OPTIONS.values()}
    parts = [
        "# Commands\n\nGenerated from the commands themselves. Commands that run a model also take the "
        "[options](configuration.md) that concern them; `--help` lists them all.\n"
    ]
    for path, command in _commands(main, "quire"):
        context = click.Context(command, info_name=path)
        usage = " ".join([path, *(word for word in command.collect_usage_pieces(context))])
        parts.append(f"## `{path}`\n\n    {usage}\n\n{inspect.cleandoc(command.help or '')}\n")
        rows = []
        for param in command.params:
            flags = [*param.opts, *param.secondary_opts]
            if isinstance(param, click.Option) and not param.hidden and not options.intersection(flags):
                default = param.to_info_dict().get("default")
                shown = "" if default is None or callable(default) or param.is_flag else f"`{default}`"
                rows.append(f"| {', '.join(f'`{flag}`' for flag in flags)} | {_cell(param.help)} | {_cell(shown)} |")
        if rows:
            parts.append("| flag | description | default |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group, info_name=path)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")
        elif command is not None:
            yield f"{path} {name}", command


def http() -> str:
    """The page of routes: what each does, whether it streams, and which errors it answers with."""
    rows = []
    for path, operations in json.loads(openapi.document(quire.__version__))["paths"].items():
        for method, operation in operations.items():
            statuses = ", ".join(status for status in sorted(operation["responses"]) if status > "299")
            rows.append(f"| `{method.upper()} {path}` | {_cell(operation.get('summary'))} | {statuses} |")
    return (
        "# HTTP routes\n\nGenerated from the server's OpenAPI document, which a server has at `/openapi.json`. "
        "[Serving](../guides/serving.md) describes the routes, [Request fields](requests.md) their fields.\n\n"
        "| route | description | errors |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def python() -> str:
    """The page of `quire.__all__` and of the errors: signatures and docstrings."""
    parts = ["# Python API\n\nGenerated from the docstrings of `quire.__all__` and `quire.errors`.\n"]
    for name in quire.__all__:
        one = getattr(quire, name)
        if inspect.isclass(one) and one.__name__ != name:
            parts.append(f"## `quire.{name}`\n\nThe same as `quire.{one.__name__}`, under vLLM's name.\n")
        elif inspect.isclass(one):
            parts.append(_class(f"quire.{name}", one, deep=name != "QuireError"))
    parts.append("## Errors\n\n| error | HTTP status | meaning |\n|---|---|---|")
    for name, one in vars(errors).items():
        if inspect.isclass(one) and issubclass(one, errors.QuireError):
            parts[-1] += f"\n| `quire.errors.{name}` | {one.status} | {_cell(_first(one))} |"
    return "\n".join(parts) + "\n"


def _class(path: str, one: type, *, deep: bool) -> str:
    parts = [f"## `{path}`\n\n{_text(one)}\n"]
    if deep:
        rows = [f"| `{name}` | `{_cell(kind)}` |" for name, kind in _fields(one)]
        if rows:
            parts.append("| field | type |\n|---|---|\n" + "\n".join(rows) + "\n")
        for name, method in inspect.getmembers(one, lambda each: inspect.isfunction(each) or inspect.ismethod(each)):
            if not name.startswith("_"):
                parts.append(f"### `{name}`\n\n{_signature(name, method)}\n\n{_text(method)}\n")
    return "\n".join(parts)


def _signature(name: str, method: Callable[..., Any]) -> str:
    """A code block with one parameter a line."""
    signature = inspect.signature(getattr(method, "__func__", method))
    lines = [str(each) for each in list(signature.parameters.values())[1:]]
    kinds = [each.kind for each in list(signature.parameters.values())[1:]]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        lines.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    between = ",\n    " if len(lines) > 1 else ""
    inside = f"\n    {between.join(lines)},\n" if len(lines) > 1 else "".join(lines)
    text = f"{name}({inside}) -> {signature.return_annotation}"
    return "```python\n" + text.replace("'", "") + "\n```"


def _fields(one: type) -> Iterator[tuple[str, str]]:
    for name, kind in inspect.get_annotations(one).items():
        if not name.startswith("_"):
            yield name, str(kind)
    for name, known in inspect.getmembers(one, lambda each: isinstance(each, property)):
        yield name, str(inspect.signature(known.fget).return_annotation)


def _text(one: Any) -> str:
    """A docstring, in which `<`, `*` and the like are no markup."""
    return re.sub(r"([<*_])(?![^`\n]*`)", r"\\\1", inspect.getdoc(one) or "")


def _first(one: Any) -> str:
    return (inspect.getdoc(one) or "").split("\n\n")[0]


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("\n", " ")


def examples() -> str:
    """The page of examples: the folder's README, whose links to programs lead to their code below."""
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    parts = [re.sub(r"\]\((\w+)\.py\)", r"](#\1py)", text)]
    for name in re.findall(r"\]\((\w+\.py)\)", text):
        code = (EXAMPLES / name).read_text(encoding="utf-8")
        parts.append(f"## `{name}`\n\n```python\n{code}```\n")
    return "\n".join(parts)


PAGES: Mapping[str, Callable[[], str]] = {
    "examples.md": examples,
    "reference/cli.md": cli,
    "reference/http.md": http,
    "reference/python.md": python,
}
