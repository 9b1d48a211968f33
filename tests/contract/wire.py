"""HTTP as bytes: a client that can be as rude as it likes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

HOST = "127.0.0.1"


class Answer(NamedTuple):
    """status 0: the server closed the connection without a word."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def request(
    method: str, path: str, body: bytes | Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
) -> bytes:
    """One whole request; a mapping is sent as JSON. `Connection: close`, unless the headers say otherwise."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    named = {"Host": HOST, "Connection": "close"}
    if body is not None:
        named |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
    named |= headers or {}
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in named.items()) + "\r\n"
    return head.encode("latin-1") + data


async def send(
    port: int, *parts: bytes, pause: float = 0.0, hang_up: bool = False, seconds: float = 100.0
) -> list[Answer]:
    """Say `parts`, `pause` seconds apart, then listen until the server closes; half-close before if `hang_up`.

    The answers heard, at least one of them: an empty one if there was none. Raises TimeoutError after `seconds`.
    """
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 26)
        heard = bytearray()
        listening = asyncio.ensure_future(_listen(reader, heard))
        try:
            with contextlib.suppress(ConnectionError):  # it does not want to hear more
                for part in parts:
                    if listening.done():
                        break
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(pause)
                if hang_up:
                    writer.write_eof()
            await listening
        finally:
            listening.cancel()
            writer.close()
    return answers(bytes(heard)) or [Answer(0, {}, b"")]


async def _listen(reader: asyncio.StreamReader, heard: bytearray) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 20):
            heard += data


def answers(heard: bytes) -> list[Answer]:
    """The HTTP answers in a connection's bytes."""
    out = []
    while heard:
        head, _, rest = heard.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ")[1])
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
        if status == 100:
            heard = rest
            continue
        if headers.get("transfer-encoding") == "chunked":
            body, heard = _chunks(rest)
        else:
            length = int(headers.get("content-length", 0))
            body, heard = rest[:length], rest[length:]
        out.append(Answer(status, headers, body))
    return out


def _chunks(data: bytes) -> tuple[bytes, bytes]:
    body = bytearray()
    while data:
        size, _, data = data.partition(b"\r\n")
        n = int(size, 16)
        body += data[:n]
        data = data[n + 2 :]
        if n == 0:
            break
    return bytes(body), data


async def ask(port: int, method: str, path: str, body: Any = None, **rest: Any) -> Answer:
    """One request of its own connection."""
    return (await send(port, request(method, path, body, rest.pop("headers", None)), **rest))[0]
