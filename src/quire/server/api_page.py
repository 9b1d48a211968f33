"""`/docs`: the routes of `/openapi.json` and the fields of their requests, as one page of HTML without scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from typing import Any

import msgspec

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Quire: HTTP API</title>
<link rel="icon" href="ui/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="ui/api.css">
</head>
<body>
<header><h1>HTTP API of Quire {version}</h1>
<nav><a href="ui">Chat and engine view</a> <a href="openapi.json">OpenAPI document</a></nav></header>
<main>
{routes}
</main>
</body>
</html>
"""


@cache
def page(document: bytes) -> bytes:
    """The page of an OpenAPI document."""
    described = msgspec.json.decode(document)
    schemas: Mapping[str, Any] = described["components"]["schemas"]
    routes = [
        _route(method, path, operation, schemas)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]
    return _PAGE.format(version=escape(described["info"]["version"]), routes="\n".join(routes)).encode()


def _route(method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """A route, folded: its parameters, and the fields of its body."""
    head = f"<code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}"
    rows = [_row(each["name"], each["schema"], each.get("required", False)) for each in operation["parameters"]]
    rest = ""
    for kind in operation.get("requestBody", {}).get("content", {}).values():
        schema = _resolve(kind["schema"], schemas)
        required = schema.get("required", ())
        fields = schema.get("properties", {})
        honoured = [name for name, one in fields.items() if "description" not in one]
        rows += [
            _row(name, fields[name], name in required) for name in sorted(honoured, key=lambda n: n not in required)
        ]
        rest = "".join(
            f"<p>{title}: {', '.join(f'<code>{escape(name)}</code>' for name in names)}</p>"
            for title, mark in (("No effect", "no effect: "), ("Refused unless they ask for nothing", "refused: "))
            if (names := [name for name, one in fields.items() if one.get("description", "").startswith(mark)])
        )
    if not rows:
        return f"<p>{head}</p>"
    columns = '<tr><th scope="col">field</th><th scope="col">value</th></tr>'
    return f"<details><summary>{head}</summary><table>{columns}{''.join(rows)}</table>{rest}</details>"


def _resolve(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a reference refers to; other schemas as they are."""
    found: Mapping[str, Any] = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    return found


def _row(name: str, schema: Mapping[str, Any], required: bool) -> str:
    value = escape(" or ".join(dict.fromkeys(_values(schema))) + ", required" * required)
    return f"<tr><td><code>{escape(name)}</code></td><td>{value}</td></tr>"


def _values(schema: Mapping[str, Any]) -> Iterator[str]:
    """What a schema takes, besides null."""
    if "anyOf" in schema:
        for each in schema["anyOf"]:
            yield from _values(each)
    elif "enum" in schema:
        yield " | ".join(str(each) for each in schema["enum"] if each is not None)
    elif "$ref" in schema or schema.get("type") == "object":
        yield "object"
    elif schema.get("type") == "array":
        yield f"list of {' or '.join(dict.fromkeys(_values(schema.get('items', {}))))}"
    elif schema.get("type") != "null":
        bounds = [f"{word} {schema[key]:,}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema]
        yield " ".join([schema.get("type", "any"), *bounds])
