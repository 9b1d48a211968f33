"""The live page's files, its way in for browsers, and what it asks for; what it shows is tested in a browser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

import quire.server.live_page
from quire.errors import Overloaded
from quire.server.live_page import MOST_SESSIONS, Sessions
from tests.server.doubles import check_error, served

STATIC = Path(quire.server.live_page.__file__).parent / "static"
FILES = sorted(path.name for path in STATIC.iterdir())


class Shown:
    """A view with two frames, or none for the next viewer."""

    def __init__(self, full: bool = False) -> None:
        self.full, self.closed = full, 0

    async def watch(self) -> AsyncGenerator[bytes, None]:
        if self.full:
            raise Overloaded("enough watch already", retry_after=10)
        try:
            yield b'{"at":1}'
            yield b'{"at":2}'
            await asyncio.sleep(3600)
        finally:
            self.closed += 1

    async def explain(self, id: str) -> bytes:
        return b'{"id":"%s"}' % id.encode() if id in ("", "known") else b"null"


async def listen(app: Any, headers: dict[str, str], wanted: int) -> tuple[int, bytes]:
    """Status and the first bytes of /ui/events, until `wanted` events are there; then hang up."""
    said, status, done = b"", 0, asyncio.Event()

    async def receive() -> dict[str, Any]:
        await done.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal said, status
        status = message.get("status", status)
        said += message.get("body", b"")
        if said.count(b"data: ") >= wanted:
            done.set()

    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "GET", "path": "/ui/events", "query_string": b"", "headers": pairs}
    await asyncio.wait_for(app({**scope, "http_version": "1.1", "root_path": ""}, receive, send), 100)
    return status, said


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_served_without_a_key_and_loads_nothing_from_other_sites(name: str) -> None:
    async def story() -> None:
        async with served(api_keys=("sesame",)) as server:
            path = "/ui" if name == "index.html" else f"/ui/{name}"
            answer = await server.client.get(path)
            assert answer.status_code == 200 and answer.content == (STATIC / name).read_bytes()
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            again = await server.client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")

    asyncio.run(story())
    text = (STATIC / name).read_text("utf-8")
    outside = [url for url in re.findall(r"https?://[^\s\"']+", text) if url != "http://www.w3.org/2000/svg"]
    assert outside == []
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text, "no data may become markup"
    assert len(text.splitlines()) <= 350


def test_what_the_page_loads_is_there() -> None:
    for name in FILES:
        text = (STATIC / name).read_text("utf-8")
        for found in re.findall(r"(?:from \"\./|(?:src|href)=\"ui/)([\w.-]+)\"", text):
            assert found in FILES, f"{name} loads {found}"


def test_other_names_are_not_files() -> None:
    async def story() -> None:
        async with served() as server:
            for name in ("page.py", "..%2fpage.py", "nothing.js"):
                check_error(await server.client.get(f"/ui/{name}"), 404)
            assert (await server.client.get("/ui/")).headers["location"] == "../ui"

    asyncio.run(story())


def test_without_keys_there_is_no_sign_in() -> None:
    async def story() -> None:
        async with served() as server:
            assert (await server.client.get("/ui/session")).json() == {"needed": False, "signed_in": True}

    asyncio.run(story())


def test_a_key_shown_once_becomes_a_cookie_that_scripts_cannot_read() -> None:
    async def story() -> None:
        view = Shown()
        async with served(api_keys=("sesame",), view=view) as server:
            client = server.client
            assert (await client.get("/ui/session")).json() == {"needed": True, "signed_in": False}
            assert (await listen(server.app, {}, 1))[0] == 401
            wrong = await client.post("/ui/session", json={"key": "guess"})
            assert "set-cookie" not in wrong.headers
            check_error(wrong, 401)
            check_error(await client.post("/ui/session", json={"token": "sesame"}), 400, "key")
            right = await client.post("/ui/session", json={"key": "sesame"})
            cookie = right.headers["set-cookie"]
            assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "sesame" not in cookie
            assert (await client.get("/ui/session")).json() == {"needed": True, "signed_in": True}
            assert (await client.get("/v1/models")).status_code == 200
            assert (await client.get("/v1/requests/known/explain")).json() == {"id": "known"}
            status, said = await listen(server.app, {"cookie": cookie.split(";")[0]}, 2)
            assert status == 200 and b'data: {"at":1}\n\ndata: {"at":2}\n\n' in said
            assert view.closed == 1
            assert (await client.get("/metrics")).status_code == 401, "a cookie opens what the page needs, no more"
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 401
            assert (await client.delete("/ui/session")).json() == {"signed_in": False}
            assert (await client.get("/v1/models")).status_code == 401

    asyncio.run(story())


def test_sessions_end_and_are_few() -> None:
    short = Sessions(lasts=0.0)
    assert not short.known(short.open())
    sessions = Sessions()
    first = sessions.open()
    assert sessions.known(first) and not sessions.known("") and not sessions.known("guess")
    rest = [sessions.open() for _ in range(MOST_SESSIONS)]
    assert not sessions.known(first) and sessions.known(rest[-1])


def test_one_viewer_too_many_is_refused_with_a_status() -> None:
    async def story() -> None:
        async with served(view=Shown(full=True)) as server:
            check_error(await server.client.get("/ui/events"), 429, words="enough watch")

    asyncio.run(story())


def test_an_unknown_request_is_a_404_and_the_list_is_served() -> None:
    async def story() -> None:
        async with served(view=Shown()) as server:
            check_error(await server.client.get("/v1/requests/x/explain"), 404, words="no request 'x'")
            assert (await server.client.get("/v1/requests")).json() == {"id": ""}

    asyncio.run(story())
