"""Bounds on requests: size and depth of bodies, counts, and how many are read at the same time."""

from __future__ import annotations

import asyncio
import codecs
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request

from quire.config import ServerConfig
from quire.errors import InvalidRequest, TooLarge
from quire.frontend.processor import check_priority
from quire.multimodal.inputs import ImageInputs, NoImages
from quire.server import error_responses
from quire.tokenization.prompt_header import PromptHeader

_CONTAINERS = frozenset({dict, list})

FetchMedia = Callable[[Mapping[str, str]], Awaitable[Mapping[str, bytes]]]
"""From addresses to files. Raises InvalidRequest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on one request.

    timeout: seconds until an answer ends, where the request has no timeout of its own; inf for none. keep_alive:
    seconds of silence after which a stream sends a comment. priorities: whether the scheduling policy uses them.
    max_containers: lists and objects in a body. max_answers: prompts times n, at most what the queue holds.
    closed_schemas: objects of JSON schemas have only the properties that are listed, where the schema does not say.
    prompt_header: the lines that are taken out of first messages. max_new_tokens, default_max_new_tokens: most new
    tokens of an answer, and those where the request does not say; None: as many as the context has room for, and what
    the model or the API says.
    force_usage: streams of completions and chats have their usage in every chunk, whether or not it is asked for.
    strict_tools: hosted tools that this server lacks are refused, not left out.
    images: how those of a request are read; fetch_media: fetches those of other servers, None: none are.
    """

    max_body_bytes: int = ServerConfig().max_body_bytes
    max_depth: int = 64
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
    closed_schemas: bool = True
    strict_tools: bool = False
    force_usage: bool = False
    prompt_header: PromptHeader = field(default_factory=PromptHeader)
    images: ImageInputs = field(default_factory=NoImages, repr=False)
    fetch_media: FetchMedia | None = field(default=None, repr=False)
    max_new_tokens: int | None = None
    default_max_new_tokens: int | None = None


async def read_body(request: Request, limits: Limits, *, any_type: bool = False) -> bytes:
    """The whole body, without a byte order mark: before JSON it means nothing (RFC 8259, 8.1).

    Raises TooLarge as soon as it is, and UnsupportedMedia if it is compressed or not JSON.

    any_type: take a body whatever it is declared to be, but from web pages: their requests name an origin, and a page
    of another site may send anything but JSON without a preflight.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    from_page = "origin" in request.headers or "sec-fetch-site" in request.headers
    if kind != "application/json" and (from_page or not any_type):
        raise error_responses.UnsupportedMedia(
            f"the body must be JSON: send the header 'Content-Type: application/json', not {kind or 'none'!r}"
        )
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise error_responses.UnsupportedMedia(
            f"the body must be sent as it is, not compressed: Content-Encoding is {coding!r}"
        )
    most = limits.max_body_bytes
    too_large = TooLarge(f"the body is larger than this server takes ({most} bytes)", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise too_large
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise too_large
    except ClientDisconnect as gone:
        raise InvalidRequest("the client disconnected before its request was complete") from gone
    return bytes(body).removeprefix(codecs.BOM_UTF8)


def deadline(headers: Mapping[str, str]) -> float | None:
    """Seconds an answer may take, by the header X-Request-Timeout. Raises InvalidRequest for another value."""
    given = headers.get("x-request-timeout")
    if given is None:
        return None
    with suppress(ValueError):
        # False for NaN.
        if (seconds := float(given)) > 0:
            return seconds
    raise InvalidRequest("the header X-Request-Timeout must be a number of seconds above 0", param="x-request-timeout")


def check_depth(value: Any, limits: Limits) -> None:
    """Raises InvalidRequest for lists and objects nested too deep, naming the field, or too many of them. Takes no time
    per number."""
    level: list[Any] = [value]
    seen = 0
    for _ in range(limits.max_depth):
        seen += len(level)
        if seen > limits.max_containers:
            most = limits.max_containers
            raise InvalidRequest(f"the JSON has more than {most} lists and objects", code="json_too_large")
        if not (level := _inside(level)):
            return
    named = value.items() if isinstance(value, dict) else ()
    name = next((name for name, one in named if _deeper(one, limits.max_depth - 1)), None)
    what = "the JSON" if name is None else f"{name[:64]}: the JSON"
    why = f"{what} is nested more than {limits.max_depth} deep: send what is deeper as text"
    raise InvalidRequest(why, param=name and name[:64], code="json_too_deep")


def _inside(level: list[Any]) -> list[Any]:
    """The lists and objects in those of one level."""
    deeper: list[Any] = []
    for one in level:
        inside = one.values() if isinstance(one, dict) else one
        if not _CONTAINERS.isdisjoint(map(type, inside)):
            deeper += [x for x in inside if type(x) in _CONTAINERS]
    return deeper


def _deeper(value: Any, most: int) -> bool:
    """Whether a value is nested more than `most` deep."""
    level = [value] if type(value) in _CONTAINERS else []
    for _ in range(most):
        level = _inside(level)
    return bool(level)


def check_answers(prompts: int, n: int | None, limits: Limits) -> None:
    """Check the number of answers, before anything is made for each. Raises InvalidRequest naming n or prompt."""
    n = 1 if n is None else n
    if n > limits.max_n:
        raise InvalidRequest(f"n must be between 1 and {limits.max_n} here, not {n}", param="n")
    if prompts * n > limits.max_answers:
        raise InvalidRequest(
            f"{prompts} prompts with n {n} are {prompts * n} answers, and at most {limits.max_answers} are "
            "allowed in one request",
            param="n" if n > 1 else "prompt",
        )


def check_priority_and_timeout(priority: int | None, timeout: float | None, limits: Limits) -> None:
    """Raises InvalidRequest naming the field."""
    check_priority(priority, limits.priorities)
    if timeout is not None and not timeout > 0:
        raise InvalidRequest("timeout must be above 0 seconds", param="timeout")


class AdmissionGate:
    """Refuses requests beyond the queue's limit before they are parsed, and parses the others one after another.

    admit: raises Overloaded unless one more request can be queued besides this many that are being read, and
    Unavailable while there is no engine. A gate belongs to one event loop.

    Parsing a request and encoding its prompt takes about a millisecond, refusing it a tenth of that, so a thousand
    requests that come at once must not all be read before the first refusal is written. One is read in each iteration
    of the loop, which also serves every socket that is ready, and the answers in progress.
    """

    def __init__(self, admit: Callable[[int], None]) -> None:
        self._admit = admit
        self._num_counted = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._wake_handle: asyncio.Handle | None = None

    @contextmanager
    def slot(self) -> Iterator[ExitStack]:
        """From a request's head until it is queued, which ends its count. Raises what `admit` raises."""
        self._admit(self._num_counted)
        with ExitStack() as slot:
            yield slot

    async def wait_turn(self, slot: ExitStack | None = None) -> None:
        """Return when a request whose body is complete may be parsed. Raises what `admit` raises.

        From now on it counts as queued, if it has a slot: requests whose bodies come slowly do not.
        """
        if slot is not None:
            self._admit(self._num_counted)
            self._num_counted += 1
            slot.callback(self._uncount)
        loop = asyncio.get_running_loop()
        if self._wake_handle is None:
            self._wake_handle = loop.call_soon(self._wake_next)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _uncount(self) -> None:
        self._num_counted -= 1

    def _wake_next(self) -> None:
        self._wake_handle = None
        while self._waiting and self._wake_handle is None:
            turn = self._waiting.popleft()
            # Done where the request was cancelled: its client has closed the connection.
            if not turn.done():
                turn.set_result(None)
                self._wake_handle = asyncio.get_running_loop().call_soon(self._wake_next)
