"""/openapi.json says what the routes and the table of fields say."""

from __future__ import annotations

from typing import Any

import pytest

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
    assert undescribed <= {"/openapi.json", "/v1/files/{rest:path}", "/v1/batches/{rest:path}"}
    assert {"/v1/files/{id}/content", "/v1/batches/{id}/cancel", *ENDPOINTS} <= document["paths"].keys()


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
