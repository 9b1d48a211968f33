"""Requests that two servers in a row could understand differently are refused, and the connection is closed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.contract.wire import Answer, send
from tests.server.test_connection import listening

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """As in `conftest`, for a server of all tests here."""
    return "asyncio"


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[Any]:
    """(the served doubles, the port), for as long as tests of this module run."""
    async with listening(read=100.0) as served:
        yield served


BODY = json.dumps({"prompt": "the", "max_tokens": 64}).encode()
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = b"Content-Length: %d" % len(BODY)
CODING = b"Transfer-Encoding: chunked"
HOST = b"Host: 127.0.0.1"

SMUGGLED = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
"""What must not be answered when it stands behind a request that was refused."""


def post(*fields: bytes, body: bytes = BODY, host: bytes = HOST, version: bytes = b"HTTP/1.1") -> bytes:
    lines = [b"POST /v1/completions " + version, *([host] if host else []), b"Content-Type: application/json", *fields]
    return b"\r\n".join([*lines, b"", body])


def get(line: bytes, *fields: bytes) -> bytes:
    return b"\r\n".join([line, *fields, b"", b""])


def refused() -> Iterator[tuple[str, bytes]]:
    yield "length and coding", post(LENGTH, CODING, body=CHUNKED)
    yield "coding and length", post(CODING, LENGTH, body=CHUNKED)
    yield "two lengths", post(LENGTH, b"Content-Length: 3")
    yield "the same length twice", post(LENGTH, LENGTH)
    for length in (b"+24", b"-1", b"0x18", b"24, 24", b"2 4", b"", b"9" * 30):
        yield f"length {length!r}", post(b"Content-Length: " + length)
    yield "the same coding twice", post(CODING, CODING, body=CHUNKED)
    yield "another coding first", post(b"Transfer-Encoding: gzip", CODING, body=CHUNKED)
    yield "another coding behind", post(CODING, b"Transfer-Encoding: identity", body=CHUNKED)
    codings = (b"gzip, chunked", b"chunked, chunked", b"chunked, gzip", b", chunked", b"chunked,", b"identity")
    for coding in (*codings, b"xchunked", b'"chunked"', b"chunked;q=1", b"\x0bchunked", b""):
        yield f"coding {coding!r}", post(b"Transfer-Encoding: " + coding, body=CHUNKED)
    yield "a coding in HTTP/1.0", post(CODING, body=CHUNKED, version=b"HTTP/1.0")
    yield "space before a colon", post(b"Content-Length : %d" % len(BODY))
    yield "a folded field", post(LENGTH, b"X-A: b\r\n c")
    yield "a folded coding", post(b"Transfer-Encoding:\r\n chunked", body=CHUNKED)
    yield "a fold before any field", post(LENGTH, host=b" X-A: b\r\n" + HOST)
    yield "line feeds alone", post(LENGTH).replace(b"\r\n", b"\n")
    yield "a line feed alone", post(LENGTH, b"X-A: b\nX-B: c")
    yield "a carriage return alone", post(LENGTH, b"X-A: b\rX-B: c")
    yield "a zero byte", post(LENGTH, b"X-A: b\0c")
    yield "a name with a space", post(LENGTH, b"X A: b")
    yield "a field without a colon", post(LENGTH, b"X-A")
    for chunk in (b"+18", b"0x18", b" 18", b"-1", b"", b"18\n", b"1" + b"0" * 20):
        yield f"chunk {chunk!r}", post(CODING, body=chunk + CHUNKED[2:])
    yield "a coding in a trailer", post(CODING, body=CHUNKED[:-2] + CODING + b"\r\n\r\n")
    yield "two hosts", post(LENGTH, HOST, host=b"Host: other")
    yield "the same host twice", post(LENGTH, HOST)
    yield "no host", post(LENGTH, host=b"")
    for host in (
        b"a b",
        b"a, b",
        b"a/b",
        b"user@a",
        b"a:b",
        b"a:80:80",
        b"[::1",
        b"[g]",
        b"a\tb",
        b"a#b",
        b"a?b",
        b"a\\b",
    ):
        yield f"host {host!r}", post(LENGTH, host=b"Host: " + host)
    yield "HTTP/0.9", b"GET /health\r\n\r\n"
    for version in (b"0.9", b"1.2", b"2.0", b"3", b"1.1x"):
        yield f"HTTP/{version!r}", get(b"GET /health HTTP/" + version, HOST)
    for target in (b"ftp://127.0.0.1/health", b"http://user@127.0.0.1/health", b"http:///health", b"health"):
        yield f"target {target!r}", get(b"GET " + target + b" HTTP/1.1", HOST)
    yield "a tunnel", get(b"CONNECT 127.0.0.1:80 HTTP/1.1", HOST)


REFUSED = dict(refused())


@pytest.mark.parametrize("name", REFUSED)
async def test_an_ambiguous_request_is_refused_and_what_stands_behind_it_is_not_answered(
    name: str, server: Any
) -> None:
    served, port = server
    before = len(served.port.submitted)
    [answer] = await send(port, REFUSED[name] + SMUGGLED, seconds=60)
    assert answer.status == 400, answer
    assert answer.headers["connection"] == "close" and answer.json()["error"]["type"] == "invalid_request_error"
    assert len(served.port.submitted) == before


TAKEN = {
    "a length": post(LENGTH),
    "a length with a space behind": post(LENGTH + b" "),
    "chunks": post(CODING, body=CHUNKED),
    "chunks in capitals": post(b"transfer-encoding: CHUNKED", body=CHUNKED),
    "a chunk with an extension": post(CODING, body=CHUNKED.replace(b"\r\n", b";a=b\r\n", 1)),
    "a host with a port": post(LENGTH, host=b"Host: 127.0.0.1:8000"),
    "an IPv6 host": post(LENGTH, host=b"Host: [::1]:8000"),
    "an empty host": post(LENGTH, host=b"Host:"),
    "HTTP/1.0 without a host": post(LENGTH, host=b"", version=b"HTTP/1.0"),
    "an absolute target": post(LENGTH).replace(b"/v1", b"http://127.0.0.1/v1", 1),
}


@pytest.mark.parametrize("name", TAKEN)
async def test_what_clients_and_proxies_do_send_is_answered(name: str, server: Any) -> None:
    _, port = server
    [answer] = await send(port, TAKEN[name].replace(b"\r\n", b"\r\nConnection: close\r\n", 1), seconds=60)
    assert answer.status == 200, answer


async def test_the_host_of_an_absolute_target_counts_and_the_field_does_not() -> None:
    answer = Answer(0, {}, b"")
    async with listening() as (server, port):
        seen: list[list[bytes]] = []
        inner = server.app.app

        async def spied(scope, receive, send_) -> None:  # type: ignore[no-untyped-def]
            seen.append([value for name, value in scope["headers"] if name == b"host"])
            await inner(scope, receive, send_)

        server.app.app = spied
        line = b"GET http://other.example:81/health HTTP/1.1"
        [answer] = await send(port, get(line, HOST, b"Connection: close"), seconds=60)
    assert (answer.status, seen) == (200, [[b"other.example:81"]])
