"""What passes is what came, in whole events, however it was cut; and what is counted is what was said."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InvalidConfig, Unavailable
from quire.frontend.http_client import ConnectionLost, Origin
from quire.frontend.upstream_response import MAX_HELD_BYTES, UpstreamResponse
from tests.frontend.stub import EVENTS, event

TRICKY = event('data: {"usage": {"completion_tokens": 99}} "finish_reason": "stop"')
CHAT = [
    b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"role":"assistant"},"finish_reason":null}],"usage":null}',
    b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}],'
    b'"usage":{"prompt_tokens":2,"completion_tokens":1}}',
    b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{},"finish_reason":"length"}],'
    b'"usage":{"prompt_tokens":2,"completion_tokens":3}}',
    b"data: [DONE]",
]


class Wire:
    """A connection that has come with these pieces, and then ends, or breaks."""

    def __init__(
        self, *pieces: bytes, breaks: bool = False, until_closed: bool = False, kind: str = "text/event-stream"
    ):
        self.pieces, self.breaks, self.until_closed = list(pieces), breaks, until_closed
        self.status, self.headers = 200, [(b"content-type", kind.encode())]

    async def read(self) -> bytes:
        if self.pieces:
            return self.pieces.pop(0)
        if self.breaks:
            raise ConnectionLost("it is gone")
        return b""


class Heard:
    def __init__(self) -> None:
        self.made = 0
        self.over: list[str | None] = []

    def on_tokens(self, tokens: int) -> None:
        self.made += tokens

    def on_end(self, response: UpstreamResponse, error: str | None) -> None:
        self.over.append(error)


def passed(wire: Wire) -> tuple[list[bytes], UpstreamResponse, Heard, str]:
    """The pieces that went on, the response, what was heard, and the error at the end."""
    heard = Heard()
    response = UpstreamResponse(wire, lambda connection: None, heard, "there")  # type: ignore[arg-type]
    pieces: list[bytes] = []

    async def read() -> str:
        try:
            while data := await response.read():
                pieces.append(data)
        except Unavailable as error:
            return str(error)
        return ""

    return pieces, response, heard, asyncio.run(read())


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % len(data) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.lists(st.integers(0, 10_000), max_size=40), st.sampled_from([b"\n\n", b"\r\n\r\n"]))
def test_any_cut_passes_whole_events_and_counts_the_same(places: list[int], end: bytes) -> None:
    stream = b"".join([*EVENTS[:3], TRICKY, *EVENTS[3:]]).replace(b"\n\n", end)
    pieces, response, heard, error = passed(Wire(*cut(stream, places)))
    assert b"".join(pieces) == stream and not error
    assert all(piece.endswith(end) for piece in pieces)
    assert (response.tokens, response.prompt_tokens, response.finish, response.id) == (4, 3, "length", "cmpl-7")
    assert heard.made == 5 and heard.over == [None]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_an_event_passes_as_soon_as_it_is_whole_whatever_ends_its_lines(end: bytes) -> None:
    events = [b"data: " + str(i).encode() + end for i in range(4)]
    pieces, *_ = passed(Wire(*(event + b"data:" for event in events)))
    assert pieces == [events[0], *(b"data:" + event for event in events[1:]), b"data:"]


@given(st.integers(1, 10_000))
def test_a_death_anywhere_cuts_no_event(place: int) -> None:
    stream = b"".join(EVENTS)
    kept = stream[: place % len(stream)]
    pieces, _, heard, error = passed(Wire(*cut(kept, [7, 100, 200]) if kept else [], breaks=True))
    assert b"".join(pieces) == kept[: kept.rfind(b"\n\n") + 2 if b"\n\n" in kept else 0]
    assert error == "there broke off this answer: it is gone" and heard.over == [error]


def test_usage_with_every_event_is_the_last_ones() -> None:
    _, response, heard, _ = passed(Wire(b"\n\n".join([*CHAT, b""])))
    assert (response.tokens, response.prompt_tokens, response.finish) == (3, 2, "length")
    assert heard.made == 3


@pytest.mark.parametrize(
    "last",
    [
        {"type": "response.completed", "response": {"usage": {"input_tokens": 5, "output_tokens": 6}}},
        {"type": "message_delta", "usage": {"input_tokens": 5, "output_tokens": 6}},
    ],
)
def test_usage_is_found_where_other_apis_put_it(last: dict[str, Any]) -> None:
    stream = b"event: x\ndata: {}\n\nevent: y\ndata: " + json.dumps(last).encode() + b"\n\n"
    _, response, _, _ = passed(Wire(stream))
    assert (response.tokens, response.prompt_tokens) == (6, 5)


@pytest.mark.parametrize("more", [{}, {"input_tokens": 0}])
def test_the_prompt_that_the_first_event_reports_is_not_forgotten(more: dict[str, int]) -> None:
    """Anthropic's API names the prompt's tokens at the beginning, and at the end perhaps only the answer's."""
    first = {"type": "message_start", "message": {"id": "msg_1", "usage": {"input_tokens": 5, "output_tokens": 1}}}
    last = {"type": "message_delta", "usage": {"output_tokens": 6, **more}}
    stream = b"".join(b"event: x\ndata: " + json.dumps(each).encode() + b"\n\n" for each in (first, last))
    _, response, _, _ = passed(Wire(stream))
    assert (response.tokens, response.prompt_tokens) == (6, 5)


def test_an_event_without_end_is_held_only_so_long() -> None:
    pieces, _, _, _ = passed(Wire(*[b"x" * (MAX_HELD_BYTES // 4)] * 6))
    assert [len(piece) for piece in pieces] == [MAX_HELD_BYTES, MAX_HELD_BYTES // 2]


def test_data_that_come_as_the_server_ends_are_not_counted_after_the_end() -> None:
    """The request has been reported, and observers know it no longer."""

    class Closing(Wire):
        async def read(self) -> bytes:
            response.close()
            return await super().read()

    heard = Heard()
    response = UpstreamResponse(Closing(CHAT[0] + b"\n\n"), lambda connection: None, heard, "there")  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="shutting down"):
        asyncio.run(response.read())
    assert (heard.made, heard.over) == (0, [""])


def test_a_stream_that_is_cut_short_differs_from_one_that_ends() -> None:
    *_, error = passed(Wire(EVENTS[0], until_closed=True))
    assert "in the middle of its answer" in error
    *_, error = passed(Wire(*EVENTS, until_closed=True))
    assert not error


@pytest.mark.parametrize(
    ("url", "means"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://host:1/v1/", "http://host:1"),
        ("https://host/a/v1", "https://host:443/a"),
        ("http://[::1]:7", "http://[::1]:7"),
    ],
)
def test_addresses_are_read_as_people_write_them(url: str, means: str) -> None:
    assert str(Origin.parse(url)) == means


@pytest.mark.parametrize(
    "url", ["", "http://", "http://h:x", "http://h:99999", "ftp://h", "http://me@h", "http://h?a=1"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfig, match="upstream"):
        Origin.parse(url)


LINES = [
    b'{"model":"m","message":{"role":"assistant","content":"a"},"done":false}\n',
    b'{"model":"m","message":{"role":"assistant","content":" \\"done\\":true"},"done":false}\n',
    b'{"model":"m","message":{"role":"assistant","content":""},"done":true,"done_reason":"length",'
    b'"prompt_eval_count":7,"eval_count":5}\n',
]


@given(places=st.lists(st.integers(1, 10_000), max_size=12))
def test_any_cut_of_ollamas_lines_passes_whole_lines_and_counts_the_same(places: list[int]) -> None:
    data = b"".join(LINES)
    pieces, response, heard, error = passed(Wire(*cut(data, places), kind="application/x-ndjson", until_closed=True))
    assert b"".join(pieces) == data and not error and all(piece.endswith(b"\n") for piece in pieces)
    assert response.streams and response.lines
    assert (heard.made, response.tokens, response.prompt_tokens, response.finish) == (2, 5, 7, "length")


def test_ollamas_lines_that_end_early_are_cut_short() -> None:
    assert passed(Wire(*LINES[:2], kind="application/x-ndjson", until_closed=True))[3]
    assert passed(Wire(b"".join(LINES)[:-9], kind="application/x-ndjson", breaks=True))[0] == [b"".join(LINES[:2])]


def test_the_counts_of_ollamas_whole_answers_are_read() -> None:
    for text in ({"response": "a text"}, {"message": {"role": "assistant", "content": "a"}}):
        whole = json.dumps({**text, "done": True, "prompt_eval_count": 3, "eval_count": 2}).encode()
        _, response, _, _ = passed(Wire(whole, kind="application/json"))
        assert (response.prompt_tokens, response.reported_tokens) == (3, 2)
