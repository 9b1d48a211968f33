"""A server on a Unix socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from quire.assembly.server import first_request, listen_socket
from quire.config import Settings
from quire.errors import InvalidConfig
from quire.server.serve import listen_unix, serve, url
from tests.server.doubles import ANSWER, served

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A path that is short enough for a socket."""
    return str(tmp_path_factory.mktemp("u") / "s")


@asynccontextmanager
async def running(path: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server on `path`."""
    async with served() as server:
        sock = listen_unix(path)
        ready = asyncio.get_running_loop().create_future()
        serving = serve(server.app, server.backend, sock, log_level="error", on_ready=ready.set_result)
        task = asyncio.ensure_future(serving)
        assert await asyncio.wait_for(ready, 100) == f"unix:{path}"
        transport = httpx.AsyncHTTPTransport(uds=path)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=100) as client:
            yield client
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, 100)


async def test_it_answers_and_streams_and_leaves_no_file(path: str) -> None:
    for _ in range(2):
        async with running(path) as client:
            ask = {"prompt": "the", "max_tokens": 64}
            said = await client.post("/v1/completions", json=ask)
            assert said.json()["choices"][0]["text"] == ANSWER
            streamed = await client.post("/v1/completions", json={**ask, "stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
        assert not Path(path).exists()


async def test_its_clients_are_on_this_machine_unless_a_proxy_speaks_for_others(path: str) -> None:
    async with running(path) as client:
        assert (await client.post("/reset_prefix_cache")).status_code == 200
        other = await client.post("/reset_prefix_cache", headers={"X-Forwarded-For": "192.0.2.1"})
        assert (other.status_code, other.json()["error"]["code"]) == (403, "not_this_machine")


async def test_options_name_it_and_the_log_shows_how_to_ask(path: str) -> None:
    with listen_socket(Settings.of(uds=path, port=80).server) as sock:
        assert (sock.family, url(sock)) == (socket.AF_UNIX, f"unix:{path}")
        assert first_request("m", url(sock), chats=True).startswith(
            f"curl --unix-socket {path} http://localhost/v1/chat/completions "
        )


async def test_a_file_of_a_server_that_has_ended_is_replaced_and_nothing_else(path: str) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(path)
    left.close()
    with listen_unix(path), pytest.raises(InvalidConfig, match=f"cannot listen on {path}: a server listens there"):
        listen_unix(path)
    Path(path).unlink()
    Path(path).write_text("kept")
    with pytest.raises(InvalidConfig, match="Address already in use"):
        listen_unix(path)
    assert Path(path).read_text() == "kept"
    with pytest.raises(InvalidConfig, match="AF_UNIX path too long"):
        listen_unix(path + "x" * 200)
