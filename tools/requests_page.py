"""Writes docs/reference/requests.md from the request types and the table of fields: `make docs`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence

from msgspec import Struct

from quire.server import schemas
from quire.server.embeddings import EmbeddingsRequest
from quire.server.fields import NO_OPS, REFUSED_FIELDS, Refusal
from quire.server.messages import MessagesRequest
from quire.server.nested import HINTS
from quire.server.ollama import (
    OPTION_HINTS,
    REFUSED_OPTIONS,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    Options,
)
from quire.server.ollama_models import OllamaShowRequest
from quire.server.responses import ResponsesRequest

_ENDPOINTS: Mapping[str, type[Struct]] = {
    "completions": schemas.CompletionRequest,
    "chat": schemas.ChatRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
    "embeddings": EmbeddingsRequest,
    "generate": schemas.GenerateRequest,
    "api/chat": OllamaChatRequest,
    "api/generate": OllamaGenerateRequest,
    "api/embed": OllamaEmbedRequest,
    "api/embeddings": OllamaEmbeddingsRequest,
    "api/show": OllamaShowRequest,
    "tokenize": schemas.TokenizeRequest,
    "detokenize": schemas.DetokenizeRequest,
}

_PAGE = """# Fields of requests

Written by `make docs` from `src/quire/server/{{schemas,responses,messages,embeddings,ollama,fields}}.py`; do not edit.

A field is honoured, a no-op by definition, or refused with a 400 that names it and says why. Anything else is unknown
and refused too, with the nearest known name. `null` is the same as not sent. Names and meanings are OpenAI's, and
vLLM's where OpenAI has none. Defaults are the model's own (`generation_config.json`), then vLLM's.

## Honoured

| field | value | endpoints |
|---|---|---|
{honoured}
## No-ops

Taken, and without effect, because there is nothing to do.

| field | why |
|---|---|
{no_ops}
## Within objects

Of parts of messages, items of Responses, tool calls, choices and formats. They have no effect:

| field | why |
|---|---|
{nested}
Other fields of these objects that have no effect are refused by name.

## Refused

Unless the value asks for nothing.

| field | why | harmless values |
|---|---|---|
{refused}
## Ollama's options

The fields of `options` in [Ollama's API](../guides/ollama.md).

| option | value |
|---|---|
{options}
Taken, and without effect:

| option | why |
|---|---|
{option_hints}
Refused, unless the value asks for nothing:

| option | why | harmless values |
|---|---|---|
{refused_options}"""


def _rows(*rows: Sequence[str]) -> str:
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def markdown() -> str:
    """The text of docs/reference/requests.md."""
    endpoints: dict[tuple[str, str], list[str]] = {}
    for endpoint, kind in _ENDPOINTS.items():
        for name, value in _types(kind).items():
            endpoints.setdefault((name, value), []).append(endpoint)
    names = {name for name, _ in endpoints}
    honoured = _rows(*((f"`{name}`", value, ", ".join(endpoints[name, value])) for name, value in sorted(endpoints)))
    no_ops = _rows(*((f"`{name}`", why) for name, why in NO_OPS.items() if name not in names))
    refused = {name: refusal for name, refusal in REFUSED_FIELDS.items() if name not in names}
    return _PAGE.format(
        honoured=honoured,
        nested=_rows(*((f"`{name}`", why) for name, why in HINTS.items())),
        no_ops=no_ops,
        refused=_refused(refused),
        options=_rows(*((f"`{name}`", value) for name, value in _types(Options).items())),
        option_hints=_rows(*((f"`{name}`", why) for name, why in OPTION_HINTS.items())),
        refused_options=_refused(REFUSED_OPTIONS),
    )


def _refused(table: Mapping[str, Refusal]) -> str:
    return _rows(
        *(
            (f"`{name}`", refusal.why, ", ".join(f"`{json.dumps(value)}`" for value in refusal.no_op))
            for name, refusal in table.items()
        )
    )


def _types(kind: type[Struct]) -> dict[str, str]:
    """Field to type, in words."""
    written: dict[str, str] = {}
    for parent in reversed(kind.__mro__):
        written |= inspect.get_annotations(parent)
    return {name: _in_words(written[name]) for name in kind.__struct_fields__}


def _in_words(annotation: str) -> str:
    parts = [part.strip() for part in annotation.split(" | ") if part.strip() != "None"]
    return " or ".join(_TYPE_WORDS.get(part, part) for part in parts)


_TYPE_WORDS: Mapping[str, str] = {
    "str": "text",
    "int": "whole number",
    "float": "number",
    "bool": "true or false",
    "list[str]": "list of texts",
    "list[int]": "list of whole numbers",
    "dict[str, float]": "object of numbers",
    "dict[str, Any]": "object",
    "list[dict[str, Any]]": "list of objects",
    "Blocks": "text or a list of blocks",
    "Prompt": "text, token ids, or a list of either",
    "StreamOptions": "object: `include_usage`, `continuous_usage_stats`",
    "UsageOptions": "object: `include`",
    "ResponseFormat": "object: `type`, `json_schema` or `schema`",
    "Structure": "object: " + ", ".join(f"`{name}`" for name in schemas.Structure.__struct_fields__),
}


if __name__ == "__main__":
    print(markdown(), end="")
