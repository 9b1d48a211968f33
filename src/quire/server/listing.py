"""OpenAI's list objects, a page at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequest
from quire.server.error_responses import offloaded_json


async def page(
    request: Request, documents: Callable[[], list[dict[str, Any]]], cost: int, *, most: int, default: int
) -> Response:
    """A page of what `documents` returns, each with an id. cost: of that (`frontend.offload`).

    The query parameters are `limit`, at most `most`, and `after`, the id of the last document of the page before.
    Raises InvalidRequest.
    """
    given, after = request.query_params.get("limit", str(default)), request.query_params.get("after")
    limit = 0
    with suppress(ValueError):
        limit = int(given)
    if not 1 <= limit <= most:
        raise InvalidRequest(f"limit must be a number between 1 and {most}", param="limit")

    def make() -> dict[str, Any]:
        left = documents()
        if after is not None:
            ids = [one["id"] for one in left]
            if after not in ids:
                raise InvalidRequest(f"after: there is no {after[:64]!r} in this list", param="after")
            left = left[ids.index(after) + 1 :]
        data = left[:limit]
        ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
        return {"object": "list", "data": data, **ends, "has_more": len(left) > limit}

    return await offloaded_json(cost, make)


def oldest_first(request: Request, default: str = "desc") -> bool:
    """Whether the query parameter `order` is asc. Raises InvalidRequest."""
    order = request.query_params.get("order", default)
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be asc or desc, not {order[:40]!r}", param="order")
    return order == "asc"
