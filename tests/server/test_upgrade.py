"""A client may offer to change to another protocol, as Java's does: it is answered as if it had not."""

from __future__ import annotations

import json

import pytest

from tests.contract.wire import Answer, request, send
from tests.server.doubles import ANSWER
from tests.server.test_connection import listening

pytestmark = pytest.mark.anyio

BODY = json.dumps({"prompt": "the", "max_tokens": 64}).encode()
LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (9, BODY[:9], len(BODY) - 9, BODY[9:])
CODING = b"Transfer-Encoding: chunked"
OFFERS = {
    "HTTP/2": (b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AAEAAEAAAAIAAAAB", b"Upgrade: h2c"),
    "WebSocket": (b"upgrade:websocket", b"connection:keep-alive, upgrade", b"Sec-WebSocket-Key: x"),
    "two": (b"Connection: Upgrade", b"Upgrade: TLS/1.3", b"Upgrade: h2c"),
}
LAST = request("GET", "/version")


def post(offer: str, *fields: bytes) -> bytes:
    """The head of a request for a completion."""
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: a", b"Content-Type: application/json", *OFFERS[offer], *fields]
    return b"\r\n".join([*lines, b"", b""])


def check(answers: list[Answer], completions: int = 1) -> None:
    """So many completions, and what the last request asks for."""
    *first, last = answers
    assert [(answer.status, answer.json()["choices"][0]["text"]) for answer in first] == [(200, ANSWER)] * completions
    assert (last.status, last.json()) == (200, {"version": "9.9"})
    assert all("upgrade" not in answer.headers for answer in answers)


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("behind", [True, False], ids=["with its head", "behind its head"])
@pytest.mark.parametrize(("field", "body"), [(LENGTH, BODY), (CODING, CHUNKED)], ids=["length", "chunks"])
async def test_the_body_is_read_and_so_are_the_requests_behind(
    offer: str, behind: bool, field: bytes, body: bytes
) -> None:
    head = post(offer, field)
    one = [head + body] if behind else [head, body[:5], body[5:]]
    async with listening() as (_, port):
        check(await send(port, *one, *one, LAST, pause=0.05), 2)
        check(await send(port, b"".join([*one, *one, *one, LAST])), 3)


async def test_a_head_may_come_byte_by_byte() -> None:
    async with listening() as (_, port):
        whole = post("HTTP/2", LENGTH) + BODY + LAST
        check(await send(port, *(whole[i : i + 1] for i in range(len(whole)))))


@pytest.mark.parametrize("parts", [1, 2])
async def test_the_last_request_of_a_connection_may_offer_too(parts: int) -> None:
    head = post("HTTP/2", LENGTH).replace(b"Upgrade,", b"Upgrade, close,")
    async with listening(read=60.0) as (_, port):
        [answer] = await send(port, *([head + BODY] if parts == 1 else [head, BODY]), pause=0.05)
        assert (answer.status, answer.json()["choices"][0]["text"]) == (200, ANSWER)
        assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("offer", OFFERS)
async def test_a_request_without_a_body_is_answered_and_so_is_the_next(offer: str) -> None:
    get = b"\r\n".join([b"GET /version HTTP/1.1", b"Host: a", *OFFERS[offer], b"", b""])
    async with listening() as (_, port):
        for parts in ([get, get, LAST], [get + get + LAST]):
            heard = await send(port, *parts, pause=0.05)
            assert [answer.json() for answer in heard] == [{"version": "9.9"}] * 3


async def test_a_request_that_offers_is_no_way_around_what_is_refused() -> None:
    for fields, status in (
        ((LENGTH, CODING), 400),
        ((b"Transfer-Encoding: gzip, chunked",), 400),
        ((LENGTH, b"Host: b"), 400),
        ((LENGTH, *(b"X-%d: a" % i for i in range(20))), 431),
    ):
        async with listening(headers=20) as (server, port):
            [answer] = await send(port, post("HTTP/2", *fields) + BODY + LAST)
            assert (answer.status, server.port.submitted) == (status, [])


async def test_the_application_does_not_hear_of_the_offer() -> None:
    seen: list[bytes] = []
    async with listening() as (server, port):
        inner = server.app.app

        async def spied(scope, receive, send_) -> None:  # type: ignore[no-untyped-def]
            seen.extend(name for name, _ in scope["headers"])
            await inner(scope, receive, send_)

        server.app.app = spied
        check(await send(port, post("HTTP/2", LENGTH) + BODY + LAST))
    assert b"upgrade" not in seen
    assert b"http2-settings" in seen
