"""What the server takes from strangers: keys, body sizes, depth of JSON, counts."""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.config import ServerConfig
from quire.errors import InvalidRequest, Overloaded, TooLarge, Unauthorized
from quire.server import error_responses
from quire.server.hosts import ForeignHost, Hosts
from quire.server.rates import Rates
from quire.types import BACKGROUND, TraceContext

PUBLIC_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
"""Paths that need no key, so that whoever restarts servers needs none."""

UNCOUNTED = PUBLIC_PATHS | {"/ping"}
"""Paths that may be asked as often as one likes, in whatever way."""

_CONTAINERS = frozenset({dict, list})

_BETWEEN = re.compile(rb"[\s,;\"']+")
"""What stands between the words of a header field."""

_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on one request. timeout: seconds until an answer ends, where the request does not say; inf for none.

    keep_alive: seconds of silence after which a stream sends a comment. priorities: whether the scheduler minds them.
    max_containers: lists and objects in a body. max_answers: prompts times n, no more than may wait in the queue.
    """

    max_body_bytes: int = ServerConfig().max_body_bytes
    max_depth: int = 32
    max_containers: int = 1 << 15
    max_n: int = 128
    max_answers: int = 1024
    max_logprobs: int = 20
    max_prompts: int = 1024
    max_stop_strings: int = 64
    max_stop_chars: int = 4096
    max_token_ids: int = 4096
    max_bad_words: int = 256
    max_bad_chars: int = 8192
    timeout: float = math.inf
    keep_alive: float = 15.0
    priorities: bool = True


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body. Raises TooLarge as soon as it is known to be, and UnsupportedMedia if it is not JSON,
    or compressed."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise error_responses.UnsupportedMedia(
            f"the body must be JSON: send the header 'Content-Type: application/json', not {kind or 'none'!r}"
        )
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise error_responses.UnsupportedMedia(
            f"the body must be sent as it is, not compressed: Content-Encoding is {coding!r}"
        )
    most = limits.max_body_bytes
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise _too_large(most)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise _too_large(most)
            parts.append(part)
    except ClientDisconnect as gone:
        raise InvalidRequest("the client left before its request was complete") from gone
    return b"".join(parts)


def _too_large(most: int) -> TooLarge:
    return TooLarge(f"the body is larger than this server takes ({most} bytes)", code="body_too_large")


def check_depth(value: Any, limits: Limits) -> None:
    """Raises InvalidRequest for lists and objects nested too deep, or too many of them. Costs nothing per number."""
    level: list[Any] = [value]
    seen = 0
    for _ in range(limits.max_depth):
        seen += len(level)
        if seen > limits.max_containers:
            most = limits.max_containers
            raise InvalidRequest(f"the JSON has more than {most} lists and objects", code="json_too_large")
        deeper: list[Any] = []
        for one in level:
            inside = one.values() if isinstance(one, dict) else one
            if not _CONTAINERS.isdisjoint(map(type, inside)):
                deeper += [x for x in inside if type(x) in _CONTAINERS]
        if not deeper:
            return
        level = deeper
    raise InvalidRequest(f"the JSON is nested more than {limits.max_depth} deep", code="json_too_deep")


def check_answers(prompts: int, n: int | None, limits: Limits) -> None:
    """To be asked before anything is made per answer. Raises InvalidRequest naming n."""
    n = 1 if n is None else n
    if n > limits.max_n:
        raise InvalidRequest(f"n must be between 1 and {limits.max_n} here, not {n}", param="n")
    if prompts * n > limits.max_answers:
        raise InvalidRequest(
            f"{prompts} prompts with n {n} are {prompts * n} answers, and at most {limits.max_answers} go together",
            param="n" if n > 1 else "prompt",
        )


def check_priority_and_timeout(priority: int | None, timeout: float | None, limits: Limits) -> None:
    """When a request is to be answered. Raises InvalidRequest naming the field.

    From IDLE on a priority means something else, and the engine's wire carries no integer of any size.
    """
    if priority and not limits.priorities:
        raise InvalidRequest(
            "priority means nothing here: start the server with --scheduling-policy priority", param="priority"
        )
    if priority and not -BACKGROUND < priority < BACKGROUND:
        raise InvalidRequest(
            f"priority must be between {1 - BACKGROUND} and {BACKGROUND - 1}, lower being sooner, "
            f"not {str(priority)[:24]}",
            param="priority",
        )
    if timeout is not None and not timeout > 0:
        raise InvalidRequest("timeout must be above 0 seconds", param="timeout")


ADMIN = ("/stats", "/load", "/metrics", "/v1/requests", "/v1/recording", "/ui", "/reset_prefix_cache")
"""Paths that tell of other people's requests, or slow them down, and those below them."""

LOCAL = ("/v1/requests", "/v1/recording", "/ui/events", "/reset_prefix_cache")
"""Those of them that show single requests, or change how the server runs, and those below them: without an admin key
they are for the machine that it runs on. Counts (/stats, /load, /metrics) are not, for they are scraped from others."""

ANYONE = -1
"""Who asks, where no key is needed."""

BATCHES = -2
"""Who asks in lines of batches, which belong to everybody with a key."""


def needs_admin_key(path: str) -> bool:
    return _below(path, ADMIN)


def _below(path: str, paths: Collection[str]) -> bool:
    return any(path == one or path.startswith(one + "/") for one in paths)


class Keys:
    """API keys, kept and compared as digests of one length, so that time tells nothing.

    keys: open all but what is for admins. admin: open everything; where there are none, `keys` do.
    """

    def __init__(self, keys: Collection[str] = (), admin: Collection[str] = ()) -> None:
        self._salt = secrets.token_bytes(16)
        self._keys, self._admin = [self._spelled(key) for key in keys], [self._spelled(key) for key in admin]
        self._several = bool(self._keys) and len({*self._keys, *self._admin}) > 1

    def _digest(self, given: bytes) -> bytes:
        return hashlib.blake2b(given, key=self._salt).digest()

    def _spelled(self, key: str) -> tuple[bytes, ...]:
        """Digests of the bytes that clients send for a key: UTF-8, or Latin-1, as browsers and some libraries do."""
        spelled = {key.encode("utf-8", "surrogateescape")}
        with suppress(UnicodeEncodeError):
            spelled.add(key.encode("latin-1"))
        return tuple(self._digest(one) for one in sorted(spelled))

    def _matches(self, given: bytes) -> list[bool]:
        """Of each key, those for admins first, whether it is this one."""
        digest = self._digest(given)
        return [bool(sum(hmac.compare_digest(digest, one) for one in known)) for known in (*self._admin, *self._keys)]

    @property
    def needed(self) -> bool:
        return bool(self._keys)

    def in_field(self, value: bytes) -> bool:
        """Whether the value of a header field holds one of these keys, after whatever scheme or name."""
        if not (self._admin or self._keys):
            return False
        words = _BETWEEN.split(value)
        given = {value, value.partition(b" ")[2].strip(), *words, *(word.partition(b"=")[2] for word in words)}
        return any(any(self._matches(one)) for one in given if one)

    @property
    def apart(self) -> bool:
        """Whether admins have keys of their own."""
        return bool(self._admin)

    @property
    def needed_for_admins(self) -> bool:
        return bool(self._admin or self._keys)

    def tenant(self, key: int) -> str:
        """Among whose requests cached prefixes may be shared, for requests of this key.

        Where several keys ask, how many tokens of a prompt were cached, and how quickly it was read, would tell one
        what another has asked.
        """
        return str(key) if self._several else ""

    def check(self, headers: Mapping[str, str], *, admin: bool = False) -> int:
        """Whose key it is, as a number. Raises Unauthorized unless the bearer token, or x-api-key, is a key for this.

        admin: it is for what is for admins. ANYONE where no key is needed.
        """
        needed = self._admin or self._keys if admin else self._keys
        if not needed:
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
    """The bytes of a header field, which are read as Latin-1; of a text that cannot be one, in UTF-8."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def no_session(path: str, headers: Mapping[str, str]) -> bool:
    """Who else gets in: nobody."""
    return False


class Guard:
    """ASGI middleware: no key, no entry, whatever the path; and every answer and scope carries the request's id.

    admits: who else gets in, by path and headers. rates: what each key may ask for; scope["key"] says which it is.
    hosts: the names by which the server may be asked; health may be asked by any.
    scope["send"] is for bodies: all that handlers have put around theirs looks at heads alone.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        admits: Callable[[str, Mapping[str, str]], bool] = no_session,
        rates: Rates | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self.app, self._keys, self._admits = app, keys, admits
        self._rates = Rates() if rates is None else rates
        self._hosts = Hosts() if hosts is None else hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope["request_id"] = id = request_id(headers)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = id
            await send(message)

        path = scope["path"].removeprefix(scope.get("root_path", ""))
        scope["key"] = ANYONE
        try:
            if path not in PUBLIC_PATHS:
                self._hosts.check(headers)
                if not self._admits(path, headers):
                    scope["key"] = self._keys.check(headers, admin=needs_admin_key(path))
                if _below(path, LOCAL) and not self._keys.apart:
                    self._hosts.check_local(scope, headers)
            scope["tenant"] = self._keys.tenant(scope["key"])
            if scope["method"] == "POST" and path not in UNCOUNTED:
                self._rates.admit(scope["key"])
        except (Unauthorized, Overloaded, ForeignHost) as error:
            await error_responses.response(error, scope["path"])(scope, receive, named)
            return
        await self.app({**scope, "send": send}, receive, named)  # in a copy: the server's own is known to what sends


def deadline(headers: Mapping[str, str]) -> float | None:
    """Seconds an answer may take, by the header X-Request-Timeout. Raises InvalidRequest if that is no time."""
    given = headers.get("x-request-timeout")
    if given is None:
        return None
    with suppress(ValueError):
        if (seconds := float(given)) > 0:  # NaN is not
            return seconds
    raise InvalidRequest("the header X-Request-Timeout must be a number of seconds above 0", param="x-request-timeout")


def origin(scope: Scope) -> TraceContext:
    """Where a request came from, as the Guard let it in."""
    headers = Headers(scope=scope)
    return TraceContext(
        scope.get("request_id", ""),
        headers.get("traceparent", ""),
        headers.get("tracestate", ""),
        scope.get("tenant", ""),
    )


def request_id(headers: Mapping[str, str]) -> str:
    """The client's own X-Request-Id if it is harmless to repeat, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else secrets.token_hex(16)
