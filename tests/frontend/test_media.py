"""Fetching images of requests: what may be asked, and that nothing else is, however a server or a name behaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quire.errors import InvalidRequest, TooLarge
from quire.frontend.media import MAX_REDIRECTS, MediaFetcher, is_public

PRIVATE = (
    *("127.0.0.1", "127.8.8.8", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
    *("224.0.0.1", "255.255.255.255", "192.0.2.1", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1"),
    *("::ffff:127.0.0.1", "::ffff:8.8.8.8", "::7f00:1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"),
    *("2002:7f00:1::", "2002:c0a8:101::1", "2001:0:4136:e378:8000:63bf:80ff:fffe", "2001:db8::1", "localhost", ""),
)
PUBLIC = ("8.8.8.8", "93.184.216.34", "2606:4700::1111", "64:ff9b::808:808", "2002:808:808::1")


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public_are_not(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are(address: str) -> None:
    assert is_public(address)


Handle = Callable[[str, asyncio.StreamWriter], Any]


class Site:
    """A web server on loopback, and what it was asked for."""

    def __init__(self, answers: dict[str, bytes | Handle]) -> None:
        self.answers, self.asked = answers, list[str]()
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode()
            self.asked.append(head.decode())
            answer = self.answers[path]
            if callable(answer):
                await answer(path, writer)
            else:
                writer.write(answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def url(self, path: str, host: str = "pictures.test") -> str:
        return f"http://{host}:{self.port}{path}"


@asynccontextmanager
async def site(answers: dict[str, bytes | Handle]) -> AsyncIterator[Site]:
    made = Site(answers)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made


def ok(body: bytes, *fields: str) -> bytes:
    return ("\r\n".join(["HTTP/1.1 200 OK", f"content-length: {len(body)}", *fields]) + "\r\n\r\n").encode() + body


def to(url: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Found\r\nlocation: {url}\r\ncontent-length: 0\r\n\r\n".encode()


async def loopback(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


def places(*urls: str) -> dict[str, str]:
    """Addresses with where they stand."""
    return {url: f"input[0].content[{i}]" for i, url in enumerate(urls)}


def fetcher(**changes: Any) -> MediaFetcher:
    """One that takes loopback for public, as the tests' sites are there."""
    fields: dict[str, Any] = {"domains": ("pictures.test", "*.cdn.test"), "max_bytes": 1000, "timeout": 5.0}
    fields |= {"resolve": loopback, "allowed": lambda address: address == "127.0.0.1"}
    return MediaFetcher(**fields | changes)


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 300))


def test_files_are_fetched_in_one_go_and_redirects_followed() -> None:
    async def test() -> None:
        async with site({"/a?b=c%20d": ok(b"one"), "/b": to("/c"), "/c": ok(b"two")}) as web:
            first, second = web.url("/a?b=c d"), web.url("/b", "x.cdn.test")
            assert await fetcher().fetch(places(first, second)) == {first: b"one", second: b"two"}
            assert any(f"host: pictures.test:{web.port}" in head for head in web.asked)
            assert not any("cookie" in head or "authorization" in head for head in web.asked)

    run(test())


@pytest.mark.parametrize(
    "host",
    [
        *("other.test", "pictures.test.evil.test", "evilpictures.test", "cdn.test", "127.0.0.1", "[::1]", "localhost"),
        *(
            "2130706433",
            "0x7f000001",
            "017700000001",
            "[::ffff:127.0.0.1]",
            "user@pictures.test",
            "pictures.test@evil.test",
        ),
    ],
)
def test_hosts_that_are_not_named_are_not_asked(host: str) -> None:
    async def test() -> None:
        async with site({"/": ok(b"secret")}) as web:
            with pytest.raises(InvalidRequest, match="images are not fetched from") as caught:
                await fetcher().fetch(places(web.url("/", host)))
            assert caught.value.code == "media_not_allowed" and not web.asked

    run(test())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "[::1]"])
def test_private_addresses_are_not_asked_even_where_they_are_named(host: str) -> None:
    async def test() -> None:
        async with site({"/": ok(b"secret")}) as web:
            own = MediaFetcher((host.strip("[]"),), 1000, 5.0)
            with pytest.raises(InvalidRequest, match=r"an address that is not public|not known"):
                await own.fetch(places(web.url("/", host)))
            assert not web.asked

    run(test())


@pytest.mark.parametrize(
    "where", ["http://localhost:{port}/x", "http://10.0.0.1/", "file:///etc/passwd", "//127.0.0.1:{port}/x"]
)
def test_redirects_lead_nowhere_else(where: str) -> None:
    async def test() -> None:
        async with site({"/x": ok(b"secret")}) as inner, site({"/": b""}) as web:
            web.answers["/"] = to(where.format(port=inner.port))
            with pytest.raises(InvalidRequest, match=r"not fetched from|not http or https"):
                await fetcher().fetch(places(web.url("/")))
            assert not inner.asked

    run(test())


def test_a_redirect_to_a_name_with_a_private_address_is_refused() -> None:
    async def test() -> None:
        async def public_first(host: str, port: int) -> Sequence[str]:
            return ["127.0.0.1"] if host == "pictures.test" else ["10.1.2.3"]

        async with site({"/": to("http://inner.cdn.test/")}) as web:
            with pytest.raises(InvalidRequest, match="not public"):
                await fetcher(resolve=public_first).fetch(places(web.url("/")))

    run(test())


def test_a_name_that_changes_its_answer_is_asked_at_the_address_that_was_checked_or_refused() -> None:
    answers = [["127.0.0.1"], ["10.0.0.1"]]

    async def changing(host: str, port: int) -> Sequence[str]:
        return answers.pop(0)

    async def test() -> None:
        async with site({"/": to("/again"), "/again": ok(b"secret")}) as web:
            with pytest.raises(InvalidRequest, match="not public"):
                await fetcher(resolve=changing).fetch(places(web.url("/")))
            assert len(web.asked) == 1 and not answers

    run(test())


def test_a_name_of_which_one_address_is_private_is_refused() -> None:
    async def both(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1", "10.0.0.1"]

    async def test() -> None:
        async with site({"/": ok(b"x")}) as web:
            with pytest.raises(InvalidRequest, match="not public"):
                await fetcher(resolve=both).fetch(places(web.url("/")))
            assert not web.asked

    run(test())


@pytest.mark.parametrize("where", ["http://[", "//[::1", "http://a]b/"])
def test_redirects_to_damaged_addresses_are_refused(where: str) -> None:
    async def test() -> None:
        async with site({"/": to(where)}) as web:
            with pytest.raises(InvalidRequest, match="redirected to a damaged address"):
                await fetcher().fetch(places(web.url("/")))

    run(test())


def test_redirects_end() -> None:
    async def test() -> None:
        async with site({"/": to("/")}) as web:
            with pytest.raises(InvalidRequest, match=f"more than {MAX_REDIRECTS} times"):
                await fetcher().fetch(places(web.url("/")))
            assert len(web.asked) == 1 + MAX_REDIRECTS

    run(test())


async def endless(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"100\r\n" + b"x" * 256 + b"\r\n")
        await writer.drain()


async def slow(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def silent(path: str, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(20)


def test_large_bodies_are_not_read_to_their_end() -> None:
    async def test() -> None:
        announced = b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n"
        async with site({"/": endless, "/announced": announced, "/half": ok(b"x" * 600)}) as web:
            for paths in (["/"], ["/announced"], ["/half", "/half?again"]):
                web.answers["/half?again"] = web.answers["/half"]
                with pytest.raises(TooLarge, match="more than 1,000 bytes"):
                    await fetcher().fetch(places(*map(web.url, paths)))

    run(test())


@pytest.mark.parametrize("answer", [slow, silent])
def test_slow_servers_are_given_up(answer: Handle) -> None:
    async def test() -> None:
        async with site({"/": answer}) as web:
            with pytest.raises(InvalidRequest, match=r"did not come within 0.2 s \(--image-fetch-timeout\)"):
                await fetcher(timeout=0.2).fetch(places(web.url("/")))

    run(test())


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "status 404"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "status 204"),
        (ok(b"x", "content-encoding: gzip"), "compressed"),
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
        (b"", "closed the connection"),
        (b"HTTP/1.1 302 Found\r\ncontent-length: 0\r\n\r\n", "more than 3 times"),
    ],
)
def test_other_answers_are_refused(answer: bytes, error: str) -> None:
    async def test() -> None:
        async with site({"/": answer}) as web:
            with pytest.raises(InvalidRequest, match=error):
                await fetcher().fetch(places(web.url("/")))

    run(test())


def test_a_host_that_does_not_answer_is_named_no_further() -> None:
    async def unknown(host: str, port: int) -> Sequence[str]:
        raise OSError("private details")

    with pytest.raises(InvalidRequest, match=r"its host is not known$"):
        asyncio.run(fetcher(resolve=unknown).fetch(places("http://pictures.test/")))
    with pytest.raises(InvalidRequest, match=r"its host does not answer$"):
        asyncio.run(fetcher().fetch(places("http://pictures.test:9/")))
