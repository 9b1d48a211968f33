"""Which web pages may use this server through the browsers of their readers: host names, origins, this machine.

A page on another site can have its own name resolve to this server's address (DNS rebinding): the browser then takes
the server for a part of that site, and lets the page read its answers. The Host field still says the page's name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import InvalidRequest, QuireError
from quire.server import error_responses

_PROXIED = ("forwarded", "via", "x-forwarded-for", "x-real-ip")
"""Header fields that proxies add."""


_IN_PROCESS = ("::1", 0)
"""Where ASGI names no client, the application is called without a connection."""


class ForeignHost(QuireError):
    """Who asks may not: a page of another site, or another machine."""

    status = 403
    kind = "permission_error"


def loopback(host: str) -> bool:
    """Whether a name or an address, in brackets or not, is always this machine."""
    name = _name(host)
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _name(host: str) -> str:
    """A host as names are compared: lower case, no brackets, not the dot of a fully qualified name."""
    return host.lower().removeprefix("[").removesuffix("]").removesuffix(".")


def _host(field: str) -> str:
    """The name in a Host field, without the port."""
    if not field.startswith("["):
        return _name(field.partition(":")[0])
    address, _, port = field.partition("]")
    return _name(address if not port or port.startswith(":") else field)


class Hosts:
    """The names by which a server may be asked.

    allowed: beside the names of this machine; `*.example.com` stands for every name below example.com, `*` for any.
    None: nothing is looked at. IP addresses are always allowed: a page whose own host is an address was served from
    there. So is a request without a host (HTTP/1.0), which no browser sends.
    """

    def __init__(self, allowed: Collection[str] | None = None) -> None:
        names = [_name(one) for one in allowed or ()]
        self._off = allowed is None
        self._any = self._off or "*" in names
        self._names = {one for one in names if not one.startswith("*")}
        self._below = tuple(one[1:] for one in names if one.startswith("*."))

    def known(self, field: str) -> bool:
        """Whether a Host field holds an address, a name of this machine or one that was allowed by name."""
        name = _host(field)
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return self._off or not name or loopback(name) or name in self._names or name.endswith(self._below)
        return True

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises Foreign for a request by a name that is not allowed."""
        field = headers.get("host", "")
        if not (self._any or self.known(field)):
            name = _host(field)[:255]
            raise ForeignHost(
                f"this server is not asked by the name {name!r}: if that is its name, start it with "
                f"--allowed-hosts {name}",
                code="host_not_allowed",
            )

    def check_local(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Raises Foreign unless a request came from this machine, through no proxy that says so, by a known name."""
        address = (scope.get("client", _IN_PROCESS) or ("",))[0]  # None: it has already hung up
        proxied = any(field in headers for field in _PROXIED)
        if proxied or not loopback(address) or not self.known(headers.get("host", "")):
            raise ForeignHost(
                "without an admin key, only the machine that the server runs on may ask for this: start it with "
                "--admin-key and send that key",
                code="not_this_machine",
            )


def refuse_cross_site(scope: Scope) -> None:
    """Raises Foreign for what a page of another site asks, unless its origin is allowed.

    For POSTs that carry no JSON: those any page may send, also to a server on its reader's machine, and no browser asks
    beforehand (Fetch, CORS-safelisted requests). Browsers say so themselves; other clients say nothing.
    """
    if Headers(scope=scope).get("sec-fetch-site") == "cross-site" and not scope.get("allowed_origin"):
        raise ForeignHost("pages of other sites cannot ask for this", code="cross_site")


class CrossOrigin(CORSMiddleware):
    """CORS: pages of these origins (`https://chat.example.com`; `*`: of any) may use the server, with keys of their
    own. Cookies are not taken from them. A preflight that fails says why in an error object."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=[origin.lower() for origin in origins],
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("x-request-id", "retry-after"),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            origin = Headers(scope=scope).get("origin")
            scope["allowed_origin"] = origin is not None and self.is_allowed_origin(origin)
        await super().__call__(scope, receive, send)

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        origin = request_headers["origin"][:255]
        why = f"pages of {origin!r} may not ask for this ({bytes(response.body).decode()}): see --allowed-origins"
        kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        text = error_responses.body(why, InvalidRequest.kind, code="cors")
        return Response(text, response.status_code, kept, "application/json")
