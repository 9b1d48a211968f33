"""An OpenAI-compatible server that does what its request's prompt says, faults above all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from quire.frontend.supervisor import free_port

WORDS = ["Once", " upon", " a", " time"]


class Asked(NamedTuple):
    """One request. head: its request line and header fields as they came, duplicates included."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int
    head: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Stub:
    """asked: requests but looks at its health. left: prompts whose client hung up. connections: those ever taken."""

    def __init__(self, key: str | None = None) -> None:
        self.key = key
        self.asked: list[Asked] = []
        self.left: list[str] = []
        self.connections = 0
        self.healthy = True
        self.hold = asyncio.Event()
        self.port = free_port()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def close(self) -> None:
        """As if it were killed: nothing listens, and every connection is reset."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    def hang_up(self) -> None:
        """Close idle connections, as servers do after a while."""
        for writer in list(self._writers):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        number = self.connections
        try:
            while not writer.is_closing():
                await self._answer(await _read(reader, number), reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if asked.path == "/health":
            writer.write(plain(200 if self.healthy else 503, b""))
            return
        self.asked.append(asked)
        if self.key is not None and asked.headers.get("authorization") != f"Bearer {self.key}":
            writer.write(plain(401, b'{"error": {"message": "wrong key", "type": "auth"}}'))
        elif asked.path == "/v1/models":
            writer.write(plain(200, b'{"object": "list", "data": [{"id": "stub", "object": "model"}]}'))
        elif asked.path == "/metrics":
            writer.write(plain(200, b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3.0\n"))
        elif asked.method == "POST":
            await getattr(self, "do_" + asked.json.get("prompt", "fine").replace(" ", "_"))(asked, reader, writer)
        else:
            writer.write(plain(404, b'{"detail": "Not Found"}'))

    # ---------------------------------------------------------------- what prompts ask for

    async def do_fine(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if asked.json.get("stream"):
            writer.write(HEAD + b"".join(chunk(one) for one in EVENTS) + b"0\r\n\r\n")
        else:
            writer.write(plain(200, WHOLE))

    async def do_dies(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Two events and a half; or half an answer."""
        if asked.json.get("stream"):
            writer.write(HEAD + chunk(EVENTS[0]) + chunk(EVENTS[1]) + chunk(EVENTS[2][:20]))
        else:
            writer.write(plain(200, WHOLE)[:-30])
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.transport.abort()

    async def do_mute(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async def do_poison(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The whole server dies of it."""
        await self.close()

    async def do_error(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(500, b'{"error": {"message": "out of memory", "type": "server_error", "code": 500}}'))

    async def do_html(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(502, b"<html>Bad\n gateway</html>", kind=b"text/html"))

    async def do_busy(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(429, b'{"error": {"message": "slow down", "type": "rate"}}', more=b"retry-after: 7\r\n"))

    async def do_bad_chunk(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(EVENTS[0]) + b"zz\r\nwhat\r\n")

    async def do_no_http(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH\r\n")

    async def do_huge(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(HUGE) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def do_drip(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Each byte in a packet of its own, or nearly."""
        writer.transport.set_write_buffer_limits(0)
        for byte in HEAD + b"".join(chunk(one) for one in EVENTS) + b"0\r\n\r\n":
            writer.write(bytes([byte]))
            await asyncio.sleep(0)

    async def do_trailers(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(b"".join(EVENTS)) + b"0\r\nx-checksum: 1\r\n\r\n")

    async def do_continue(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" + plain(200, WHOLE))

    async def do_until_closed(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + b"".join(EVENTS))
        writer.close()

    async def do_cut_short(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + EVENTS[0])
        writer.close()

    async def do_too_much(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(200, WHOLE) * 2)

    async def do_one(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One event, and then none until it is resumed, or the client disconnects."""
        writer.write(HEAD + chunk(EVENTS[0]) if asked.json.get("stream") else b"")
        gone, resumed = asyncio.ensure_future(reader.read(1)), asyncio.ensure_future(self.hold.wait())
        await asyncio.wait((gone, resumed), return_when=asyncio.FIRST_COMPLETED)
        for task in (gone, resumed):
            task.cancel()
        await asyncio.gather(gone, resumed, return_exceptions=True)
        if not self.hold.is_set():
            self.left.append("one")
            raise ConnectionError
        writer.write(b"".join(chunk(one) for one in EVENTS[1:]) + b"0\r\n\r\n")


def plain(status: int, body: bytes, *, kind: bytes = b"application/json", more: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %d X\r\ncontent-type: %s\r\nx-kept: yes\r\n%scontent-length: %d\r\n\r\n"
    more += b"access-control-allow-origin: *\r\n"  # as upstreams may say
    return head % (status, kind, more, len(body)) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "cmpl-7", "choices": [choice]}).encode() + b"\n\n"


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
EVENTS = [
    *(event(word, "length" if word == WORDS[-1] else None) for word in WORDS),
    b"data: " + json.dumps({"id": "cmpl-7", "choices": [], "usage": _USAGE}).encode() + b"\n\n",
    b"data: [DONE]\n\n",
]
HUGE = event("x" * (3 << 20))
WHOLE = json.dumps(
    {
        "id": "cmpl-8",
        "model": "stub",
        "choices": [{"index": 0, "text": "".join(WORDS), "finish_reason": "length"}],
        "usage": _USAGE,
    }
).encode()


async def _read(reader: asyncio.StreamReader, number: int) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(method, path, headers, body, number, head)


@asynccontextmanager
async def stub(key: str | None = None) -> AsyncIterator[Stub]:
    server = Stub(key)
    await server.open()
    try:
        yield server
    finally:
        await server.close()
