"""/openapi.json says what the routes and the table of fields say."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import msgspec
import pytest

from quire.server import api_page
from quire.server.endpoints import ENDPOINTS
from quire.server.fields import NO_OPS, REFUSED_FIELDS
from quire.server.openapi import OPERATIONS
from tests.server.doubles import served

pytestmark = pytest.mark.anyio


async def paths() -> Any:
    async with served() as server:
        answer = await server.client.get("/openapi.json")
        assert answer.headers["content-type"] == "application/json"
        return answer.json(), server.app


async def test_every_route_is_described_but_the_live_page() -> None:
    document, app = await paths()
    routes = {route.path.replace("{id:path}", "{id}") for route in app.app.routes}
    undescribed = {path for path in routes - document["paths"].keys() if not path.startswith("/ui")}
    assert undescribed <= {"/openapi.json", "/docs", "/v1/files/{rest:path}", "/v1/batches/{rest:path}"}
    assert {"/v1/files/{id}/content", "/v1/batches/{id}/cancel", *ENDPOINTS} <= document["paths"].keys()


async def test_each_kind_of_request_says_what_it_is_for_and_only_those_that_stream_have_events() -> None:
    document, _ = await paths()
    kinds: dict[str, set[type]] = {}
    for path, endpoint in ENDPOINTS.items():
        operation = document["paths"][path]["post"]
        kinds.setdefault(operation["summary"], set()).add(endpoint.request_type)
        streams = "text/event-stream" in operation["responses"]["200"]["content"]
        assert streams == ("stream" in endpoint.request_type.__struct_fields__), path
    assert all(len(types) == 1 for types in kinds.values()), kinds


async def test_every_field_of_the_table_is_in_every_request() -> None:
    document, _ = await paths()
    for request_type in (operation.request_type for operation in OPERATIONS if operation.request_type is not None):
        schema = document["components"]["schemas"][request_type.__name__]
        assert schema["additionalProperties"] is False
        assert set(schema["properties"]) == {*request_type.__struct_fields__, *NO_OPS, *REFUSED_FIELDS}
        for name in REFUSED_FIELDS.keys() - set(request_type.__struct_fields__):
            assert schema["properties"][name]["enum"] == [None, *REFUSED_FIELDS[name].no_op]


async def test_what_needs_no_key_says_so_and_everything_else_needs_one() -> None:
    """The document and the server, asked without a key, agree about every path."""
    document, _ = await paths()
    open_to_all = set()
    async with served(api_keys=("secret",), admin_keys=("boss",)) as server:
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                assert "200" in operation["responses"] and operation["summary"], path
                answer = await server.client.request(method, path.replace("{id}", "x"))
                assert (answer.status_code == 401) == ("401" in operation["responses"]), path
                assert (answer.status_code != 401) == (operation.get("security") == []), path
                if answer.status_code != 401:
                    assert answer.status_code == 200
                    open_to_all.add(path)
    assert open_to_all == {"/health", "/health/live", "/health/ready"}
    assert document["security"] == [{}, {"key": []}]


async def test_the_page_has_every_route_and_every_field_and_needs_no_key() -> None:
    document, _ = await paths()
    async with served(api_keys=("secret",)) as server:
        answer = await server.client.get("/docs")
        assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        again = await server.client.get("/docs", headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    shown = [unescape(text) for text in re.findall(r"<code>(.*?)</code>", answer.text)]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            at = shown.index(f"{method.upper()} {path}")
            for kind in operation.get("requestBody", {}).get("content", {}).values():
                name = kind["schema"].get("$ref", "").rpartition("/")[2]
                schema = document["components"]["schemas"][name] if name else kind["schema"]
                listed = shown[at + 1 : at + 1 + len(schema["properties"]) + len(operation["parameters"])]
                assert {*schema["properties"]} <= {*listed}, path


def test_values_on_the_page_are_those_of_the_schemas() -> None:
    body = {"type": "object", "required": ["b"], "properties": {"a<": {"enum": [None, "x"]}, "b": {"$ref": "#/c/B"}}}
    operation = {
        "summary": "S",
        "parameters": [{"name": "q", "schema": {"type": "integer", "minimum": 1, "maximum": 1000}}],
        "requestBody": {"content": {"application/json": {"schema": body}}},
    }
    document = {
        "info": {"version": "<1>"},
        "paths": {"/p": {"post": operation}},
        "components": {"schemas": {"B": {"type": "object"}}},
    }
    text = api_page.page(msgspec.json.encode(document)).decode()
    assert "Quire &lt;1&gt;" in text
    rows = re.findall(r"<tr><td><code>(.*?)</code></td><td>(.*?)</td></tr>", text)
    assert rows == [("q", "integer from 1 to 1,000"), ("b", "object, required"), ("a&lt;", "x")]
