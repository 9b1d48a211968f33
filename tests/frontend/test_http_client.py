"""Connections to a server: when one is used again, and what is sent a second time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from quire.frontend.http_client import Connection, ConnectionLost, Origin, Pool

pytestmark = pytest.mark.anyio


class Server:
    """Answers so many requests on each connection, and closes it when it has read the next. asked: their methods."""

    def __init__(self, answers: int = 1, more: bytes = b"") -> None:
        self.answers, self.more = answers, more
        self.asked: list[str] = []
        self.connections = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            for turn in range(self.answers + 1):
                head = await reader.readuntil(b"\r\n\r\n")
                self.asked.append(head.decode().partition(" ")[0])
                if turn < self.answers:
                    writer.write(b"HTTP/1.1 200 OK\r\n" + self.more + b"content-length: 2\r\n\r\nok")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def pool(server: Server) -> AsyncIterator[Pool]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    made = Pool(Origin.parse(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"))
    try:
        yield made
    finally:
        made.close()
        listening.close()


async def ask(pool: Pool, method: str) -> Connection:
    connection = await pool.exchange(method, "/", [], b"")
    while await connection.read():
        pass
    pool.give_back(connection)
    return connection


@pytest.mark.parametrize("method", ["POST", "DELETE", "PUT"])
async def test_what_changes_something_is_sent_once_on_a_kept_connection(method: str) -> None:
    server = Server()
    async with pool(server) as one:
        await ask(one, "GET")
        with pytest.raises(ConnectionLost, match="without an answer") as broken:
            await ask(one, method)
        assert server.asked == ["GET", method] and broken.value.code == "upstream_died"


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_what_changes_nothing_is_sent_again_on_a_fresh_connection(method: str) -> None:
    server = Server()
    async with pool(server) as one:
        await ask(one, "GET")
        connection = await one.exchange(method, "/", [], b"")
        assert connection.status == 200
        connection.close()
        assert server.asked == ["GET", method, method] and server.connections == 2


async def test_a_connection_that_the_server_has_closed_is_not_used_even_before_the_event_loop_hears_of_it() -> None:
    server = Server(answers=9)
    async with pool(server) as one:
        await ask(one, "POST")
        server.writers[0].get_extra_info("socket").shutdown(1)  # and no turn of the event loop until the next request
        await ask(one, "POST")
        assert server.asked == ["POST", "POST"] and server.connections == 2


async def test_a_connection_is_not_used_when_the_server_is_about_to_close_it(monkeypatch: pytest.MonkeyPatch) -> None:
    server, loop = Server(answers=9), asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    async with pool(server) as one:
        await ask(one, "POST")
        await ask(one, "POST")
        assert server.connections == 1
        monkeypatch.setattr(loop, "time", lambda: now + 4.5)
        await ask(one, "POST")
        assert server.connections == 2


async def test_a_connection_rests_no_longer_than_its_server_says() -> None:
    server = Server(answers=9, more=b"Keep-Alive: timeout=1, max=100\r\n")
    async with pool(server) as one:
        await ask(one, "POST")
        await ask(one, "POST")
        assert server.connections == 2


async def test_a_connection_rests_no_longer_because_its_server_would_wait_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, loop = Server(answers=9, more=b"Keep-Alive: timeout=100\r\n"), asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    async with pool(server) as one:
        await ask(one, "POST")
        monkeypatch.setattr(loop, "time", lambda: now + 4.5)
        await ask(one, "POST")
        assert server.connections == 2


@pytest.mark.parametrize(("names", "taken"), [(1, True), (7, True), (8, False), (9, False)])
async def test_the_header_fields_of_an_answer_have_a_limit_in_all(names: int, taken: bool) -> None:
    fields = b"".join(b"x-%d: " % i + b"y" * ((8 << 10) - 3) + b"\r\n" for i in range(names))
    server = Server(more=fields)
    async with pool(server) as made:
        if taken:
            assert len((await ask(made, "GET")).headers) == names + 1
        else:
            with pytest.raises(ConnectionLost, match="header fields are too long") as broken:
                await ask(made, "GET")
            assert broken.value.code == "upstream_malformed"
