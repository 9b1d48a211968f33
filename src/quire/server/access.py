"""Which clients may ask for what: host names, origins, API keys and rates, and the middleware that checks them.

A page on another site can have its own name resolve to this server's address (DNS rebinding): the browser then takes
the server for a part of that site, and lets the page read its answers. The Host field still names the page's site.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import InvalidRequest, Overloaded, QuireError, Unauthorized
from quire.server import error_responses
from quire.server.hosts import loopback, normalized
from quire.types import TraceContext

# Paths that need no key: health probes have none.
PUBLIC_PATHS = frozenset({"/health", "/health/live", "/health/ready"})

# Paths without a rate limit, for any method.
UNLIMITED_PATHS = PUBLIC_PATHS | {"/ping"}

# Paths that show other clients' requests, or slow them down, and all below them: they need the admin key, if there is
# one.
ADMIN_PATHS = ("/stats", "/load", "/metrics", "/v1/requests", "/v1/recording", "/ui", "/reset_prefix_cache")

# Those of them that show single requests, or change how the server runs, and all below them: without an admin key, only
# clients on this machine may use them. Counters (/stats, /load, /metrics) are scraped from other machines.
LOCAL_PATHS = ("/v1/requests", "/v1/recording", "/ui/events", "/ui/servers", "/reset_prefix_cache")

# The number of a client where no key is needed, and that of lines of batches, which any key may have submitted.
ANYONE = -1
BATCHES = -2

# Header fields that proxies add.
_PROXY_HEADERS = ("forwarded", "via", "x-forwarded-for", "x-real-ip")

# Stands for the client's address where ASGI gives none: the application is called without a connection.
_IN_PROCESS = ("::1", 0)

_FIELD_SEPARATORS = re.compile(rb"[\s,;\"']+")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


# ---------------------------------------------------------------- hosts and origins


class ForeignHost(QuireError):
    """The client is a page of another site, or on another machine, and may not ask for this."""

    status = 403
    kind = "permission_error"


def _host(field: str) -> str:
    """The name in a Host field, without the port."""
    if not field.startswith("["):
        return normalized(field.partition(":")[0])
    address, _, port = field.partition("]")
    return normalized(address if not port or port.startswith(":") else field)


class Hosts:
    """The host names by which this server may be asked.

    allowed: names besides those of this machine; `*.example.com` matches every name below example.com, `*` any name.
    None: names are not checked. IP addresses are always allowed: a page whose own host is an address was served from
    there. A request without a host (HTTP/1.0) is allowed too: no browser sends one.
    """

    def __init__(self, allowed: Collection[str] | None = None) -> None:
        names = [normalized(one) for one in allowed or ()]
        self._off = allowed is None
        self._any = self._off or "*" in names
        self._names = {one for one in names if not one.startswith("*")}
        self._below = tuple(one[1:] for one in names if one.startswith("*."))

    def known(self, field: str) -> bool:
        """Whether a Host field holds an address, a name of this machine or an allowed name other than `*`."""
        name = _host(field)
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return self._off or not name or loopback(name) or name in self._names or name.endswith(self._below)
        return True

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises ForeignHost for a request by a name that is not allowed."""
        field = headers.get("host", "")
        if not (self._any or self.known(field)):
            name = _host(field)[:255]
            raise ForeignHost(
                f"the Host {name!r} is not allowed: if it is a name of this server, start it with "
                f"--allowed-hosts {name}",
                code="host_not_allowed",
            )

    def check_local(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Raises ForeignHost unless a request came from this machine, without a proxy, by a known name."""
        # The client is None where it has already closed its connection.
        address = (scope.get("client", _IN_PROCESS) or ("",))[0]
        proxied = any(field in headers for field in _PROXY_HEADERS)
        if proxied or not loopback(address) or not self.known(headers.get("host", "")):
            raise ForeignHost(
                "without an admin key, this may only be requested from the server's own machine: start it with "
                "--admin-key and send that key",
                code="not_this_machine",
            )


def refuse_cross_site(scope: Scope) -> None:
    """Raises ForeignHost for a request of a page of another site, unless its origin is allowed.

    For POSTs without JSON: any page may send those, also to a server on its reader's machine, without a preflight
    (Fetch, CORS-safelisted requests). Browsers mark them; other clients send no such field.
    """
    if Headers(scope=scope).get("sec-fetch-site") == "cross-site" and not scope.get("allowed_origin"):
        raise ForeignHost("pages of other origins may not request this", code="cross_site")


class CrossOrigin(CORSMiddleware):
    """CORS: pages of these origins (`https://chat.example.com`; `*`: of any) may use the server, with keys.

    Cookies are not accepted from them. The answer to a preflight that fails is an error object.
    """

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
        """Handles one request, with its origin judged."""
        if scope["type"] == "http":
            origin = Headers(scope=scope).get("origin")
            scope["allowed_origin"] = origin is not None and self.is_allowed_origin(origin)
        await super().__call__(scope, receive, send)

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to an OPTIONS request of a browser."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        origin = request_headers["origin"][:255]
        why = f"pages of {origin!r} may not ask for this ({bytes(response.body).decode()}): see --allowed-origins"
        kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        text = error_responses.body(why, response.status_code, InvalidRequest.kind, code="cors")
        return Response(text, response.status_code, kept, "application/json")


# ---------------------------------------------------------------- API keys


class Keys:
    """API keys, kept and compared as digests of one length, so that comparing takes the same time for any key.

    keys: may use all paths but those for admins. admin: may use every path; where there are none, `keys` may. salt: of
    the digests; random if it is not given.
    """

    def __init__(self, keys: Collection[str] = (), admin: Collection[str] = (), salt: bytes = b"") -> None:
        self._salt = salt or secrets.token_bytes(16)
        self._keys = [self._digests(key) for key in keys]
        self._admin = [self._digests(key) for key in admin]
        # Whether paths that are not for admins need a key; whether those for admins do; whether admins have their own.
        self.needed = bool(self._keys)
        self.needed_for_admins = bool(self._admin or self._keys)
        self.has_admin = bool(self._admin)
        self._several = bool(self._keys) and len({*self._keys, *self._admin}) > 1

    def _digest(self, given: bytes) -> bytes:
        return hashlib.blake2b(given, key=self._salt).digest()

    def _digests(self, key: str) -> tuple[bytes, ...]:
        """Digests of a key as clients encode it: UTF-8, or Latin-1, as browsers and some libraries do."""
        encoded = {key.encode("utf-8", "surrogateescape")}
        with suppress(UnicodeEncodeError):
            encoded.add(key.encode("latin-1"))
        return tuple(self._digest(one) for one in sorted(encoded))

    def _matches(self, given: bytes) -> list[bool]:
        """Whether `given` is each of the keys, those for admins first. All keys are compared."""
        digest = self._digest(given)
        return [bool(sum(hmac.compare_digest(digest, one) for one in known)) for known in (*self._admin, *self._keys)]

    def in_field(self, value: bytes) -> bool:
        """Whether the value of a header field contains one of these keys, after any scheme or name."""
        if not self.needed_for_admins:
            return False
        words = _FIELD_SEPARATORS.split(value)
        given = {value, value.partition(b" ")[2].strip(), *words, *(word.partition(b"=")[2] for word in words)}
        return any(any(self._matches(one)) for one in given if one)

    def tenant(self, key: int) -> str:
        """The tenant within which requests of this key share cached prefixes.

        Where there are several keys each is a tenant: the number of cached tokens, and the time to the first token,
        would otherwise show one client what another has asked.
        """
        return str(key) if self._several else ""

    def owner(self, key: int) -> str:
        """Whose stored responses this key sees: a digest of the key, with one salt the same in every process."""
        return "" if key < 0 else (*self._admin, *self._keys)[key][0].hex()

    def check(self, headers: Mapping[str, str], *, admin: bool = False) -> int:
        """The number of the key in a request's headers: a bearer token, or x-api-key. ANYONE where no key is needed.

        admin: whether the path is for admins. Raises Unauthorized without a key that may use it.
        """
        if not (self.needed_for_admins if admin else self.needed):
            return ANYONE
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if "authorization" not in headers:
            scheme, given = "bearer", headers.get("x-api-key", "")
        given = given.strip(" \t\r\n")
        matches = self._matches(_sent(given))
        matches = matches[: len(self._admin)] if admin and self._admin else matches
        if scheme.lower() != "bearer" or not given or not any(matches):
            which = "the admin key" if admin and self._admin else "an API key"
            raise Unauthorized(
                f"this needs {which}: send the header 'Authorization: Bearer KEY'", code="invalid_api_key"
            )
        return matches.index(True)


def _sent(text: str) -> bytes:
    """The bytes of a header field, which is decoded as Latin-1; UTF-8 for text that cannot be one."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


# ---------------------------------------------------------------- rates


class _Bucket:
    """A token bucket that holds one minute's worth. It may be overdrawn, and then has to fill up again."""

    __slots__ = ("_level", "_rate", "_seen")

    def __init__(self, per_minute: float, now: float) -> None:
        self._rate = per_minute / 60
        self._level = per_minute
        self._seen = now

    def wait(self, least: float, now: float) -> float:
        """Seconds until `least` can be taken; 0: now."""
        if self._rate == math.inf:
            return 0.0
        self._level = min(self._level + (now - self._seen) * self._rate, self._rate * 60)
        self._seen = now
        return max(0.0, (least - self._level) / self._rate)

    def take(self, amount: float) -> None:
        self._level -= amount


class Rates:
    """Rate limits of each key. requests, tokens: per minute, inf for no limit. clock: seconds."""

    def __init__(
        self, requests: float = math.inf, tokens: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._requests = requests
        self._tokens = tokens
        self._clock = clock
        self._by_key: dict[int, tuple[_Bucket, _Bucket]] = {}

    def admit(self, key: int) -> None:
        """Count one request. Raises Overloaded, with the seconds until the key may be used again."""
        requests, tokens = self._buckets(key)
        now = self._clock()
        for bucket, limit, unit in ((requests, self._requests, "requests"), (tokens, self._tokens, "tokens")):
            if wait := bucket.wait(1.0, now):
                message = f"this key may use {limit:g} {unit} a minute"
                raise Overloaded(message, retry_after=wait, code="rate_limit_exceeded")
        requests.take(1.0)

    def spend(self, key: int, tokens: int) -> None:
        """Charge tokens of a prompt that was admitted, or of an answer that was generated."""
        self._buckets(key)[1].take(tokens)

    def meter(self, key: int) -> Callable[[int], None] | None:
        """Charges this key for tokens; None without a limit, so that nothing is counted."""
        return None if self._tokens == math.inf else partial(self.spend, key)

    def _buckets(self, key: int) -> tuple[_Bucket, _Bucket]:
        if key not in self._by_key:
            now = self._clock()
            self._by_key[key] = _Bucket(self._requests, now), _Bucket(self._tokens, now)
        return self._by_key[key]


# ---------------------------------------------------------------- the middleware


def _below(path: str, paths: Collection[str]) -> bool:
    return any(path == one or path.startswith(one + "/") for one in paths)


class Guard:
    """ASGI middleware: checks host name, key and rate of each request, and gives it an id.

    has_session: whether the path and the headers of a request show a browser's session, or need none; then no key is
    checked. The scope gets `request_id`, `key` (the key's number), `tenant`, `owner` (see Keys), and `send`, which is
    the server's own: a handler may use it for bodies, since middleware here looks at heads only.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        has_session: Callable[[str, Mapping[str, str]], bool],
        rates: Rates,
        hosts: Hosts | None = None,
    ) -> None:
        self.app = app
        self._keys = keys
        self._has_session = has_session
        self._rates = rates
        self._hosts = Hosts() if hosts is None else hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request: refuses what its sender may not do."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope["request_id"] = id = request_id(headers)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = id
            await send(message)

        path = scope["path"].removeprefix(scope.get("root_path", ""))
        scope["key"] = ANYONE
        try:
            if path not in PUBLIC_PATHS:
                self._hosts.check(headers)
                if not self._has_session(path, headers):
                    scope["key"] = self._keys.check(headers, admin=_below(path, ADMIN_PATHS))
                if _below(path, LOCAL_PATHS) and not self._keys.has_admin:
                    self._hosts.check_local(scope, headers)
            scope["tenant"] = self._keys.tenant(scope["key"])
            scope["owner"] = self._keys.owner(scope["key"])
            if scope["method"] == "POST" and path not in UNLIMITED_PATHS:
                self._rates.admit(scope["key"])
        except (Unauthorized, Overloaded, ForeignHost) as error:
            await error_responses.response(error, scope["path"])(scope, receive, send_with_id)
            return
        # A copy: the scope of uvicorn's request cycle would refer to its own `send`.
        await self.app({**scope, "send": send}, receive, send_with_id)


def trace_context(scope: Scope) -> TraceContext:
    """The request's id, trace and tenant, from a scope that Guard has passed on."""
    headers = Headers(scope=scope)
    return TraceContext(
        scope.get("request_id", ""),
        headers.get("traceparent", ""),
        headers.get("tracestate", ""),
        scope.get("tenant", ""),
    )


def request_id(headers: Mapping[str, str]) -> str:
    """The client's own X-Request-Id if it is safe to repeat, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
