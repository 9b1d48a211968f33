"""Prints what users can name: options, request fields, metrics, commands, HTTP routes, `quire.__all__`, wire fields.

Two versions are compared by what it prints in each tree: `PYTHONPATH=src:. python tools/surface.py > surface.json`
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import click

import quire


def document(*modules: str) -> set[str]:
    """Names in code quotes in the first cells of the tables that `python -m` prints for the first module there is."""
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
                sys.argv = [module]
                runpy.run_module(module, run_name="__main__")
            rows = [line.split("|")[1:4] for line in out.getvalue().splitlines() if line.startswith("|")]
            return {name for row in rows for cell in row[:2] for name in re.findall(r"`([^`]+)`", cell)}
    raise SystemExit(f"none of {modules} is there")


def commands(command: click.Command, path: str) -> dict[str, list[str]]:
    """Flags of every command and subcommand."""
    context = click.Context(command, info_name=path)
    found = {path: sorted(flag for parameter in command.get_params(context) for flag in parameter.opts)}
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None:
                found.update(commands(below, f"{path} {name}"))
    return found


def names(schema: Any) -> set[str]:
    """Names of properties anywhere in a JSON schema."""
    found: set[str] = set()
    if isinstance(schema, dict):
        found.update(schema.get("properties", {}))
        schema = list(schema.values())
    if isinstance(schema, list):
        found.update(*(names(part) for part in schema), set())
    return found


def main() -> None:
    """Prints JSON, sorted."""
    from quire.cli import main as cli
    from quire.server.openapi import document as openapi

    spec = json.loads(openapi(""))
    proto = next(Path(quire.__file__).parents[2].rglob("executor.proto"), None)
    found = {
        "all": sorted(quire.__all__),
        "commands": commands(cli, "quire"),
        "options": sorted(document("tools.options_page", "quire.config.document", "quire.config.options")),
        "requests": sorted(document("tools.requests_page", "quire.server.document", "quire.server.openapi")),
        "metrics": sorted(document("tools.metrics_page", "quire.observability.document", "quire.observe.document")),
        "routes": {path: sorted(methods) for path, methods in spec["paths"].items()},
        "fields": sorted(names(spec)),
        "proto": proto.read_text().splitlines() if proto else [],
    }
    print(json.dumps(found, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
