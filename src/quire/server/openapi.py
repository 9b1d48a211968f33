"""`/openapi.json`, written from the request types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from quire.server import schemas
from quire.server.access import PUBLIC_PATHS
from quire.server.batch_api.batches import BATCH_ENDPOINTS, BatchRequest
from quire.server.embeddings import ClassifyRequest, EmbeddingsRequest
from quire.server.endpoints import ENDPOINTS, GENERATE_PATHS, OLLAMA_ENDPOINTS, TOKEN_COUNT_ENDPOINTS, Endpoint
from quire.server.error_responses import JSON, OLLAMA_PATHS
from quire.server.fields import NO_OPS, REFUSED_FIELDS
from quire.server.messages import MessagesRequest
from quire.server.ollama_models import REFUSED_PATHS, OllamaPullRequest, OllamaShowRequest
from quire.server.pooling import PoolingRequest
from quire.server.responses import ResponsesRequest
from quire.server.scores import RerankRequest, ScoreRequest
from quire.types import NUMERIC_PARAMETERS

EVENTS = "text/event-stream"
TEXT = "text/plain"
BYTES = "application/octet-stream"
LINES = "application/x-ndjson"

_STATUSES: Mapping[str, str] = {
    "200": "What was asked for",
    "206": "The part that was asked for",
    "400": "A field is wrong, and named",
    "401": "A key is needed",
    "403": "Not for this host name, page or machine",
    "404": "There is none of that name",
    "408": "The request did not get on",
    "413": "The request is too large",
    "415": "The body is of another type",
    "416": "There is no such part",
    "429": "Too many wait, or this key asks too much: see Retry-After",
    "431": "The head of the request is too large",
    "503": "Not now: see Retry-After",
    "504": "Nothing was made in time",
}
_ALWAYS = ("401", "403", "408", "431", "503")
_BODY = ("400", "404", "413", "415", "429")


class Operation(NamedTuple):
    """One method of one path. request_type: of its body. media_types: of its answers. errors: statuses besides those
    of every path. query: its parameters, by name, as JSON schemas. upload: whether it takes a file."""

    method: str
    path: str
    summary: str
    request_type: type[Struct] | None = None
    media_types: Sequence[str] = (JSON,)
    errors: Sequence[str] = ()
    query: Mapping[str, Mapping[str, Any]] = {}
    upload: bool = False


_LIST: Mapping[str, Mapping[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "after": {"type": "string"},
}
_FILES: Mapping[str, Mapping[str, Any]] = {**_LIST, "order": {"enum": ["asc", "desc"]}, "purpose": {"type": "string"}}

_ITEMS: Mapping[str, Mapping[str, Any]] = {**_LIST, "order": {"enum": ["asc", "desc"]}}
_STORED: Mapping[str, Mapping[str, Any]] = {
    "stream": {"type": "boolean"},
    "starting_after": {"type": "integer", "minimum": 0},
}

_RESET: Mapping[str, Mapping[str, Any]] = {
    "reset_running_requests": {"enum": [False]},
    "reset_external": {"enum": [False]},
}

_BOUNDS: Mapping[str, tuple[float, float]] = {each.name: (each.low, each.high) for each in NUMERIC_PARAMETERS}
_MESSAGE: Mapping[str, Any] = {
    "type": "object",
    "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": {"type": "string"}},
    "required": ["role", "content"],
}

_SUMMARIES: Mapping[type, str] = {
    schemas.CompletionRequest: "Complete a prompt",
    schemas.ChatRequest: "Answer a conversation",
    ResponsesRequest: "Answer a conversation: OpenAI's Responses",
    MessagesRequest: "Answer a conversation: Anthropic's Messages",
    EmbeddingsRequest: "Texts to vectors",
    ScoreRequest: "How well texts match others",
    RerankRequest: "Sort documents by how well they match a query",
    ClassifyRequest: "Texts to probabilities of classes",
    PoolingRequest: "Texts to what the model makes of them: vectors, classes or scores",
}


def _answers(endpoint: Endpoint, stream: str) -> tuple[str, ...]:
    """The media types of its answers. stream: that of streams, which not every endpoint has."""
    return (JSON, stream) if endpoint.chunks else (JSON,)


OPERATIONS = (
    *(
        Operation("post", path, _SUMMARIES[one.request_type], one.request_type, _answers(one, EVENTS), ("504",))
        for path, one in ENDPOINTS.items()
    ),
    *(
        Operation("post", path, "Generate, in a short form", schemas.GenerateRequest, (JSON, EVENTS), ("504",))
        for path in GENERATE_PATHS
    ),
    *(
        Operation("post", path, "Count a prompt's tokens", count.request_type)
        for path, count in TOKEN_COUNT_ENDPOINTS.items()
    ),
    *(
        Operation("post", path, "Ollama's API", one.request_type, _answers(one, LINES), ("504",))
        for path, one in OLLAMA_ENDPOINTS.items()
    ),
    Operation("post", "/api/show", "Ollama's API: the model", OllamaShowRequest),
    Operation("post", "/api/pull", "Ollama's API: the served model is there, others are refused", OllamaPullRequest),
    Operation("get", "/api/tags", "Ollama's API: the models served"),
    Operation("get", "/api/ps", "Ollama's API: the models loaded"),
    Operation("get", "/api/version", "Ollama's API: its version"),
    *(
        Operation(method.lower(), path, "Ollama's API: refused, with what to do instead", errors=("400", "429"))
        for path, (method, _) in REFUSED_PATHS.items()
    ),
    Operation("get", "/", "Whether an Ollama is here", None, (TEXT,)),
    Operation("get", "/v1/responses/{id}", "A stored response", None, (JSON, EVENTS), ("400", "404"), _STORED),
    Operation("delete", "/v1/responses/{id}", "Delete a stored response", errors=("404",)),
    Operation("get", "/v1/responses/{id}/input_items", "Its input", errors=("400", "404"), query=_ITEMS),
    Operation("post", "/v1/responses/{id}/cancel", "Cancel a background response", errors=("400", "403", "404", "429")),
    Operation("post", "/tokenize", "Text or messages to token ids", schemas.TokenizeRequest),
    Operation("post", "/detokenize", "Token ids to text", schemas.DetokenizeRequest),
    Operation("get", "/tokenizer_info", "How the tokenizer is configured", errors=("404",)),
    Operation("get", "/v1/models", "What is served"),
    Operation("get", "/v1/models/{id}", "The model served", errors=("404",)),
    Operation("post", "/v1/files", "Upload a file", errors=("403", *_BODY), upload=True),
    Operation("get", "/v1/files", "Files", errors=("400", "404"), query=_FILES),
    Operation("get", "/v1/files/{id}", "A file", errors=("404",)),
    Operation("delete", "/v1/files/{id}", "Delete a file", errors=("400", "404")),
    Operation("get", "/v1/files/{id}/content", "What is in a file", None, (BYTES,), ("206", "400", "404", "416")),
    Operation("post", "/v1/batches", f"A batch of requests to one of {', '.join(BATCH_ENDPOINTS)}", BatchRequest),
    Operation("get", "/v1/batches", "Batches", errors=("400", "404"), query=_LIST),
    Operation("get", "/v1/batches/{id}", "A batch", errors=("404",)),
    Operation("post", "/v1/batches/{id}/cancel", "Cancel a batch", errors=("400", "403", "404", "429")),
    Operation("get", "/v1/requests", "What was decided about requests", errors=("404",)),
    Operation("get", "/v1/requests/{id}/explain", "What was decided about a request", errors=("404",)),
    Operation("get", "/v1/recording", "What the flight recorder has written", None, (BYTES,), ("404",)),
    Operation("get", "/stats", "Counters"),
    Operation("get", "/load", "How many prompts are being answered"),
    Operation("post", "/reset_prefix_cache", "Empty the prefix cache", None, (), ("400", "403", "429"), _RESET),
    Operation("get", "/metrics", "Counters, for Prometheus", None, (TEXT,)),
    Operation("get", "/version", "This server's version"),
    *(Operation("get", path, "Whether it is well") for path in ("/ping", *sorted(PUBLIC_PATHS))),
)


@cache
def document(version: str) -> bytes:
    """The OpenAPI 3.1 document."""
    types = [operation.request_type for operation in OPERATIONS if operation.request_type is not None]
    _, made = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    components = {name: _with_table(schema) for name, schema in made.items()}
    for name, kind in (("Error", "object"), ("OllamaError", "string")):
        components[name] = {"type": "object", "required": ["error"], "properties": {"error": {"type": kind}}}
    key = {"type": "http", "scheme": "bearer"}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Quire", "version": version},
            "paths": paths,
            "components": {"schemas": components, "securitySchemes": {"key": key}},
            "security": [{}, {"key": []}],
        }
    )


def _with_table(schema: dict[str, Any]) -> dict[str, Any]:
    """A request type's schema with the fields of the table: no-ops, and those that are refused for most values."""
    known = schema.get("properties", {})
    rest: dict[str, Any] = {name: {"description": f"no effect: {why}"} for name, why in NO_OPS.items()}
    for name, refusal in REFUSED_FIELDS.items():
        rest[name] = {"description": f"refused: {refusal.why}", "enum": [None, *refusal.no_op]}
    narrowed = {name: _narrowed(name, one) for name, one in known.items()}
    return {**schema, "properties": {**rest, **narrowed}, "additionalProperties": False}


def _narrowed(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field, with the range of its values."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [_narrowed(name, one) for one in schema["anyOf"]]}
    kind = schema.get("type")
    if kind in ("number", "integer") and name in _BOUNDS:
        low, high = _BOUNDS[name]
        return {**schema, "minimum": low, "maximum": high}
    if kind == "array" and name == "messages":
        return {**schema, "items": _MESSAGE, "minItems": 1}
    return {**schema, "minLength": 1} if kind == "string" and name == "prompt" else schema


def _operation(operation: Operation) -> dict[str, Any]:
    errors = {*_ALWAYS, *operation.errors, *(_BODY if operation.request_type is not None else ())}
    keyless: dict[str, Any] = {"security": []} if operation.path in PUBLIC_PATHS else {}
    errors -= {"401"} if keyless else set()
    failed = {"$ref": f"#/components/schemas/{'OllamaError' if operation.path in OLLAMA_PATHS else 'Error'}"}
    responses: dict[str, Any] = {
        status: {"description": _STATUSES[status], "content": {JSON: {"schema": failed}}} for status in sorted(errors)
    }
    if "206" in responses:
        responses["206"]["content"] = {BYTES: {}}
        responses["400"]["content"][TEXT] = responses["416"]["content"][TEXT] = {}
    responses["200"] = {"description": _STATUSES["200"], "content": {kind: {} for kind in operation.media_types}}
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses, **keyless}
    in_path = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    in_query = [{"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()]
    described["parameters"] = (in_path if "{id}" in operation.path else []) + in_query
    if operation.request_type is not None:
        body = {"schema": {"$ref": f"#/components/schemas/{operation.request_type.__name__}"}}
        described["requestBody"] = {"required": True, "content": {JSON: body}}
    if operation.upload:
        parts = {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": ["batch"]}}
        form = {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}
        described["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    return described
