"""What a client may drag out or pile up on its connection, each limit at its edge, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from quire.server.connection import Connection, ResponseTransport, Timeouts
from quire.server.limits import Limits
from tests.contract.wire import Answer, answers, request, send
from tests.server.doubles import ANSWER, Served, says
from tests.server.test_serve import running

pytestmark = pytest.mark.anyio

ASK = {"prompt": "the", "max_tokens": 64}
FINE = request("POST", "/v1/completions", ASK)
KEPT = request("POST", "/v1/completions", ASK, {"Connection": "keep-alive"})
STREAM = request("POST", "/v1/completions", {**ASK, "stream": True}, {"Connection": "keep-alive"})


@asynccontextmanager
async def listening(script: Any = "answers", *, limits: Limits | None = None, **timeouts: Any) -> AsyncIterator[Any]:
    """(the served doubles, the port)."""
    rest: dict[str, Any] = {} if script == "answers" else {"script": script}
    if limits is not None:
        rest["limits"] = limits
    async with running(timeouts=Timeouts(**timeouts), **rest) as (server, where, _):
        yield server, urlsplit(where).port


def padded(size: int) -> bytes:
    """A request whose head is of so many bytes, as they are counted: path, names and values."""
    spent = len("/health") + len("Host127.0.0.1") + len("Connectionclose") + len("X-Pad")
    return request("GET", "/health", None, {"X-Pad": "a" * (size - spent)})


async def test_a_head_may_be_as_large_as_the_limit_and_no_larger() -> None:
    async with listening(header_bytes=4096) as (_, port):
        assert (await send(port, padded(4096)))[0].status == 200
        [refused] = await send(port, padded(4097))
        assert refused.status == 431 and "4096 bytes" in refused.json()["error"]["message"]
        [flooded] = await send(port, padded(8 << 20))
        assert flooded.status == 431


async def test_a_head_that_never_ends_is_refused_when_it_is_too_long() -> None:
    async with listening(header_bytes=4096) as (_, port):
        [refused] = await send(port, b"GET /health HTTP/1.1\r\nX-Pad: ", *[b"a" * 1024] * 8)
        assert refused.status == 431
        [refused] = await send(port, b"GET /" + b"a" * 60_000)
        assert refused.status == 431


async def test_a_head_may_have_so_many_fields() -> None:
    async with listening(headers=20) as (_, port):
        for extra, status in ((18, 200), (19, 431)):
            [answer] = await send(port, request("GET", "/health", None, {f"X-{i}": "v" for i in range(extra)}))
            assert answer.status == status


async def test_trailers_count_and_mean_nothing() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n"
    body = json.dumps(ASK).encode()
    chunk = b"%x\r\n%s\r\n0\r\n" % (len(body), body)
    async with listening(headers=20) as (_, port):
        kind = b"Content-Type: application/json\r\n"
        [late] = await send(port, head + b"\r\n" + chunk + kind + b"\r\n")
        assert late.status == 415
        [fine] = await send(port, head + kind + b"\r\n" + chunk + b"X-T: v\r\n\r\n")
        assert fine.status == 200
        [flood] = await send(port, head + kind + b"\r\n" + chunk + b"X-T: v\r\n" * 50 + b"\r\n")
        assert flood.status in (200, 431)


async def test_a_slow_head_gets_as_long_as_a_head_may_take() -> None:
    drops = [FINE[i : i + 10] for i in range(0, len(FINE), 10)]
    async with listening(read=1.0) as (_, port):
        began = time.monotonic()
        [late] = await send(port, *drops, pause=0.3)
        assert late.status == 408 and time.monotonic() - began >= 1.0
    async with listening(read=100.0) as (_, port):
        [fine] = await send(port, *drops, pause=0.02)
        assert fine.status == 200


async def test_a_silent_connection_is_closed() -> None:
    async with listening(read=0.5) as (_, port):
        began = time.monotonic()
        assert await send(port) == [Answer(0, {}, b"")]
        assert time.monotonic() - began >= 0.5


async def test_a_body_has_to_get_on() -> None:
    large = request("POST", "/v1/completions", {**ASK, "user": "u" * 20_000})
    async with listening(read=2.0) as (server, port):
        parts = [large[i : i + 4000] for i in range(0, len(large), 4000)]
        [stuck], [dripping], [slow] = await asyncio.gather(
            send(port, large[:5000], pause=0.0),
            send(port, large[:5000], *[b"u"] * 100, pause=0.1),
            send(port, *parts, pause=0.8),
        )
        assert stuck.status == 408 and "no data of the request arrived" in stuck.json()["error"]["message"]
        assert dripping.status == 408
        assert slow.status == 200
        assert len(server.port.submitted) == 1


async def test_between_requests_a_connection_waits_so_long() -> None:
    async with listening(keep_alive=0.5, read=0.5) as (_, port):
        began = time.monotonic()
        [one], [first, late] = await asyncio.gather(send(port, KEPT), send(port, KEPT, b"\r\n", pause=0.2))
        assert one.status == 200 and time.monotonic() - began >= 0.4
        assert (first.status, late.status) == (200, 408)


async def test_a_client_can_read_the_refusal_of_a_request_that_it_is_still_sending() -> None:
    big = request("POST", "/v1/completions", b'{"prompt": "' + b"x" * (6 << 20) + b'"}')
    async with listening(limits=Limits(max_body_bytes=1 << 20)) as (server, port):
        [refused] = await send(port, big)
        assert refused.status == 413 and refused.headers["connection"] == "close"
        assert not server.port.submitted


async def accepted() -> None:
    """The server, in the same event loop, has seen what clients have opened and closed: after so many turns, however
    late one of them is."""
    for _ in range(20):
        await asyncio.sleep(0.005)


async def test_beyond_the_limit_of_connections_health_and_metrics_are_answered_and_all_else_is_refused() -> None:
    async with listening(connections=2) as (server, port):
        others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await accepted()
        for path in ("/health", "/health/live", "/health/ready", "/ping", "/metrics", "/health?full=1"):
            [answer] = await send(port, request("GET", path, None, {"Connection": "keep-alive"}))
            assert answer.status == 200 and answer.headers["connection"] == "close", path
        for head in (FINE, request("GET", "/stats"), request("GET", "/healthy"), request("GET", "http://x/load")):
            [refused] = await send(port, head)
            assert refused.status == 503 and refused.headers["retry-after"] == "5"
            assert "try again" in refused.json()["error"]["message"]
        assert (await send(port, request("GET", "http://x/health")))[0].status == 200
        assert not server.port.submitted
        for _, writer in others:
            writer.close()
        await accepted()
        assert (await send(port, FINE))[0].status == 200


async def test_reserved_connections_are_few_and_silent_ones_are_soon_refused() -> None:
    async with listening(connections=1) as (_, port):
        regular = await asyncio.open_connection("127.0.0.1", port)
        await accepted()
        began = time.monotonic()
        reserved = [await asyncio.open_connection("127.0.0.1", port) for _ in range(16)]
        await accepted()
        [refused] = await send(port, request("GET", "/health"))
        assert refused.status == 503
        heard = await asyncio.gather(*(reader.read() for reader, _ in reserved))
        assert {answers(said)[0].status for said in heard} == {503} and time.monotonic() - began >= 2.0
        assert (await send(port, request("GET", "/health")))[0].status == 200
        for _, writer in (regular, *reserved):
            writer.close()


async def test_a_connection_beyond_the_limit_is_like_any_other_once_there_is_space() -> None:
    async with listening(connections=1) as (_, port):
        _, other = await asyncio.open_connection("127.0.0.1", port)
        await accepted()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await accepted()
        other.close()
        await accepted()
        writer.write(FINE)
        assert answers(await reader.read())[0].status == 200
        writer.close()


async def test_requests_in_a_row_are_answered_in_order_however_many() -> None:
    async with listening(keep_alive=0.3) as (_, port):
        heard = await send(port, KEPT * 300 + request("GET", "/health"))
        assert [a.status for a in heard] == [200] * 301
        assert heard[299].json()["choices"][0]["text"] == ANSWER and heard[300].json() == {"status": "ok"}


async def test_a_client_of_http_1_0_gets_streams_without_chunks() -> None:
    async with listening() as (_, port):
        for body in (ASK, {**ASK, "stream": True}):
            modern = request("POST", "/v1/completions", body)
            old = modern.replace(b" HTTP/1.1", b" HTTP/1.0", 1)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(old)
            head, _, heard = (await asyncio.wait_for(reader.read(), 100)).partition(b"\r\n\r\n")
            writer.close()
            [answer] = await send(port, modern)
            assert b"transfer-encoding" not in head.lower() and head.startswith(b"HTTP/1.1 200 ")
            assert unnamed(heard) == unnamed(answer.body)
        assert (await send(port, request("GET", "/v1/models").replace(b"HTTP/1.1", b"HTTP/1.0")))[0].json()["data"]
        assert (await send(port, request("HEAD", "/v1/models").replace(b"HTTP/1.1", b"HTTP/1.0")))[0].body == b""


def unnamed(body: bytes) -> bytes:
    """Without what differs from request to request: its id and time."""
    return re.sub(rb'"id":"[^"]*"|"created":\d+', b"", body)


async def test_rubbish_behind_a_request_spoils_no_answer() -> None:
    async with listening() as (_, port):
        [stream] = await send(port, STREAM + b"\0rubbish\r\n\r\n")
        assert stream.status == 200 and stream.body.endswith(b"data: [DONE]\n\n")
        assert len(await send(port, KEPT * 3 + b"\0rubbish\r\n\r\n")) == 3


async def test_a_client_that_disconnects_is_noticed_whatever_it_has_pipelined() -> None:
    async with listening(None) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(STREAM * 3)
        async with asyncio.timeout(100):
            while not server.port.submitted:
                await asyncio.sleep(0.005)
            writer.transport.abort()
            while not server.port.aborted:
                await asyncio.sleep(0.005)
        assert len(server.port.submitted) == 1


async def deaf(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a stream, and read nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(STREAM)
    return reader, writer


async def say(server: Served, text: str, times: int) -> None:
    for _ in range(times):
        server.port.say(server.port.submitted[0], *says(text))
        await asyncio.sleep(0)


async def test_a_reader_that_takes_nothing_is_hung_up_on_and_its_answer_ended() -> None:
    async with listening(None, write=1.0) as (server, port):
        _, writer = await deaf(port)
        while not server.port.submitted:
            await asyncio.sleep(0.005)
        conn = next(iter(server.backend._requests))
        async with asyncio.timeout(200):
            while not server.port.aborted:
                if len(conn.deltas) < 100:
                    await say(server, "dog " * 20, 50)
                await asyncio.sleep(0.002)
        assert server.port.aborted == [server.port.submitted[0].id]
        writer.close()


async def test_a_slow_reader_that_makes_progress_gets_everything() -> None:
    async with listening(None, write=1.0) as (server, port):
        reader, writer = await deaf(port)
        while not server.port.submitted:
            await asyncio.sleep(0.005)
        for _ in range(12):
            await say(server, "dog " * 20, 20)
            await asyncio.sleep(0.1)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
        server.port.say(server.port.submitted[0], *says("bye"), finish="stop", stop_token=1)
        heard = bytearray()
        while not heard.endswith(b"0\r\n\r\n"):
            heard += await reader.read(1 << 16)
        [answer] = answers(bytes(heard))
        assert answer.body.endswith(b"data: [DONE]\n\n") and b"bye" in answer.body
        writer.close()


class Buffered:
    """A transport that holds what is written to it until a test takes it away."""

    def __init__(self) -> None:
        self.held = b""

    def write(self, data: bytes) -> None:
        self.held += data

    def get_write_buffer_size(self) -> int:
        return len(self.held)


def test_what_has_left_for_a_client_is_what_was_written_and_is_held_no_more() -> None:
    inner = Buffered()
    line = ResponseTransport(inner, lambda: None)  # type: ignore[arg-type]
    line.write(b"12345")
    line.write(b"678")
    assert line.sent == 0
    inner.held = inner.held[6:]
    assert line.sent == 6
    line.write(b"9")
    inner.held = b""
    assert line.sent == 9


def test_a_slow_reader_has_the_whole_timeout_again_after_each_kilobyte() -> None:
    out = SimpleNamespace(sent=0, aborted=0, get_write_buffer_size=lambda: 9999, is_closing=lambda: False)
    out.abort = lambda: setattr(out, "aborted", out.aborted + 1)
    connection: Any = object.__new__(Connection)
    connection.transport, connection._timeouts = out, Timeouts(write=60.0)
    connection._reading, connection._reading_since, connection._reserved = "", 0.0, False
    connection._sent, connection._writing_since = 0, 0.0
    for now, sent in ((0.0, 0), (50.0, 1024), (100.0, 2047), (110.0, 2047)):
        out.sent = sent
        connection.check_timeouts(now)
        assert not out.aborted
    connection.check_timeouts(110.1)
    assert out.aborted == 1


def test_a_body_that_the_server_does_not_read_is_not_late() -> None:
    refused, out = list[Any](), SimpleNamespace(sent=0, get_write_buffer_size=lambda: 0, is_closing=lambda: False)
    connection: Any = object.__new__(Connection)
    connection.transport, connection._timeouts = out, Timeouts(read=20.0)
    connection.flow = SimpleNamespace(read_paused=True)
    connection._reading, connection._reading_since, connection._reserved = "body", 0.0, False
    connection._body_bytes = connection._sent = 0
    connection._refuse = lambda *args: refused.append(args)
    connection.check_timeouts(100.0)
    connection.flow.read_paused = False
    connection.check_timeouts(120.0)
    assert not refused, "it has the whole time again from when it was read last"
    connection.check_timeouts(120.1)
    assert [status for _, status in refused] == [408]


async def test_a_connection_that_is_lost_is_freed_at_once_not_by_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of clients that come and go would otherwise take memory until a full collection."""
    begin, made = Connection.__init__, list[weakref.ref[Connection]]()

    def noted(self: Connection, *args: Any, **rest: Any) -> None:
        begin(self, *args, **rest)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Connection, "__init__", noted)
    gc.collect()
    gc.disable()
    try:
        async with listening(read=0.5) as (_, port):
            for sent in (FINE, request("GET", "/health"), b"garbage\r\n\r\n", b"GET /health HT", b""):
                await send(port, sent, hang_up=sent == b"")
            _, silent = await asyncio.open_connection("127.0.0.1", port)
            silent.close()
            for _ in range(1000):
                if len(made) == 6 and not any(each() for each in made):
                    break
                await asyncio.sleep(0.01)
            assert len(made) == 6 and [each() for each in made] == [None] * 6
    finally:
        gc.enable()
