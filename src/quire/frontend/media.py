"""Fetches images of requests from other servers: from hosts that are allowed, and never from private addresses.

A name is resolved once for each request that is sent: its addresses are checked, and the connection is made to one that
was checked, so that a name which changes its answer leads nowhere else. Redirects are checked as the first address is.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from quire.errors import InvalidRequest
from quire.frontend.http_client import Connection, ConnectionLost
from quire.multimodal.inputs import check_domain
from quire.multimodal.refusals import refusal, too_many_bytes

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

MAX_REDIRECTS = 3

AT_ONCE = 8
"""Requests whose images are fetched at the same time; others wait."""

_REDIRECTS = (301, 302, 303, 307, 308)

_PATH = "!#$%&'()*+,/:;=?@[]~-._"
"""Characters of paths and queries that are sent as they are."""


class Target(NamedTuple):
    """An address that may be asked."""

    scheme: str
    host: str
    port: int
    path: str


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of a name, as the system knows them."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public network. IPv6 addresses that stand for IPv4 ones are those."""
    try:
        known = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(known, ipaddress.IPv6Address):
        embedded = known.ipv4_mapped or known.sixtofour or (known.teredo or (None, None))[1]
        if embedded is None and known in _NAT64:
            embedded = ipaddress.IPv4Address(int(known) & 0xFFFFFFFF)
        if embedded is not None or known in _COMPATIBLE:
            return embedded is not None and is_public(str(embedded)) and known.ipv4_mapped is None
    return known.is_global and not known.is_multicast


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")


@dataclass(eq=False)
class MediaFetcher:
    """Fetches the images of requests. Used from one event loop.

    domains: hosts that may be asked, see `check_domain`. max_bytes: of all files of a request together. timeout:
    seconds for all of them, with redirects. resolve, allowed: how names become addresses, and which may be asked.
    """

    domains: Sequence[str]
    max_bytes: int
    timeout: float
    resolve: Resolve = resolve
    allowed: Callable[[str], bool] = is_public
    _gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    async def fetch(self, urls: Mapping[str, str]) -> Mapping[str, bytes]:
        """The files at these addresses, each given with where it stands in the request. Raises InvalidRequest, and
        TooLarge, naming what is wrong."""
        left = Allowance(self.max_bytes)
        try:
            async with asyncio.timeout(self.timeout), self._gate, asyncio.TaskGroup() as group:
                tasks = {url: group.create_task(self._fetch(url, where, left)) for url, where in urls.items()}
        except TimeoutError as error:
            first = next(iter(urls.values()))
            raise _failed(first, f"it did not come within {self.timeout:g} s (--image-fetch-timeout)") from error
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        return {url: task.result() for url, task in tasks.items()}

    async def _fetch(self, url: str, where: str, left: Allowance) -> bytes:
        for _ in range(1 + MAX_REDIRECTS):
            target = self._target(url, where)
            connection = await self._connect(target, where)
            try:
                connection.send(_request(target))
                await connection.headed()
                fields = dict(connection.headers)
                if connection.status in _REDIRECTS:
                    url = _redirected(url, fields.get(b"location", b"").decode("latin-1"), where)
                    continue
                return await _body(connection, fields, left, where)
            except ConnectionLost as error:
                raise _failed(where, str(error)) from error
            finally:
                connection.close()
        raise _failed(where, f"it was redirected more than {MAX_REDIRECTS} times")

    def _target(self, url: str, where: str) -> Target:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise _failed(where, "it was redirected to something that is not http or https")
        host = check_domain(url, self.domains, where)
        path = quote(parts.path or "/", safe=_PATH) + ("?" + quote(parts.query, safe=_PATH) if parts.query else "")
        return Target(parts.scheme, host, parts.port or (443 if parts.scheme == "https" else 80), path)

    async def _connect(self, target: Target, where: str) -> Connection:
        """A connection to an address that was checked: all of a name's must be allowed."""
        try:
            addresses = await self.resolve(target.host, target.port)
        except (OSError, UnicodeError) as error:
            raise _failed(where, "its host is not known") from error
        if not addresses or not all(self.allowed(address) for address in addresses):
            why = f"images are not fetched from {target.host[:80]!r}: it has an address that is not public"
            raise refusal(where, why, "media_not_allowed")
        tls = ssl.create_default_context() if target.scheme == "https" else None
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                Connection, addresses[0], target.port, ssl=tls, server_hostname=target.host if tls else None
            )
        except OSError as error:
            raise _failed(where, "its host does not answer") from error
        return connection


@dataclass
class Allowance:
    """Bytes that may still be read, of `whole`."""

    whole: int
    used: int = 0

    def take(self, count: int, where: str) -> None:
        """Raises TooLarge, naming `where`, where there are not so many left."""
        self.used += count
        if self.used > self.whole:
            raise too_many_bytes(where, self.whole)


def _redirected(url: str, location: str, where: str) -> str:
    """Where a redirect leads. Raises InvalidRequest for what is no address."""
    try:
        there = urljoin(url, location)
        urlsplit(there)
    except ValueError as error:
        raise _failed(where, f"it was redirected to a damaged address: {error}") from error
    return there


def _request(target: Target) -> bytes:
    host = f"[{target.host}]" if ":" in target.host else target.host
    usual = target.port == (443 if target.scheme == "https" else 80)
    lines = [
        f"GET {target.path} HTTP/1.1",
        f"host: {host}" + ("" if usual else f":{target.port}"),
        "user-agent: quire",
        "accept: image/*",
        "accept-encoding: identity",
        "connection: close",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii", "replace")


async def _body(connection: Connection, fields: Mapping[bytes, bytes], left: Allowance, where: str) -> bytes:
    if connection.status != 200:
        raise _failed(where, f"its host answered with status {connection.status}")
    if fields.get(b"content-encoding", b"identity").lower() != b"identity":
        raise _failed(where, "its host sent it compressed")
    length = fields.get(b"content-length", b"0")
    if length.isdigit() and int(length[:20]) > left.whole:
        left.take(left.whole + 1, where)
    parts = list[bytes]()
    while data := await connection.read():
        left.take(len(data), where)
        parts.append(data)
    return b"".join(parts)


def _failed(where: str, why: str) -> InvalidRequest:
    return refusal(where, f"the image could not be fetched: {why}", "media_fetch_failed")
