"""Streams: their shapes, that they say what whole answers say, and what happens when they break off."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.errors import QuireError, Unavailable
from quire.frontend.interface import Call, Delta
from quire.frontend.processor import ActiveRequest
from quire.server.calls import Job
from quire.server.limits import Limits
from quire.server.outputs import CompletionChunks
from quire.server.stream import DONE, EventStream, answer_all
from quire.types import RequestStepOutput
from tests.server.doubles import ANSWER, HI, TOKENIZER, Served, events, says, served

pytestmark = pytest.mark.anyio


def texts(said: list[dict[str, Any]], index: int = 0) -> str:
    """One choice's text, from either API's chunks."""
    mine = [c for e in said for c in e["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in mine)


async def test_completion_chunks_have_vllms_shape() -> None:
    async with served() as server:
        said = await server.stream("/v1/completions", prompt="the", max_tokens=64)
    assert {tuple(e) for e in said} == {("id", "object", "created", "model", "choices")}
    assert len({e["id"] for e in said}) == 1
    assert said[0]["id"].startswith("cmpl-")
    assert {e["object"] for e in said} == {"text_completion"}
    assert said[0]["choices"] == [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": None, "stop_reason": None}
    ]
    assert [e["choices"][0]["finish_reason"] for e in said] == [None] * (len(said) - 1) + ["stop"]
    assert texts(said) == ANSWER


async def test_chat_chunks_have_openais_shape() -> None:
    async with served() as server:
        said = await server.stream("/v1/chat/completions", messages=HI)
    assert {e["object"] for e in said} == {"chat.completion.chunk"}
    first, second, last = said[0]["choices"][0], said[1]["choices"][0], said[-1]["choices"][0]
    assert first == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert second == {"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", None)
    assert texts(said) == ANSWER


async def test_each_choice_begins_with_a_role() -> None:
    async with served() as server:
        said = await server.stream("/v1/chat/completions", messages=HI, n=3)
    assert [e["choices"][0]["index"] for e in said if e["choices"][0]["delta"].get("role")] == [0, 1, 2]
    assert [texts(said, i) for i in range(3)] == [ANSWER, ANSWER + " 1", ANSWER + " 2"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_usage_comes_last_and_only_on_request(path: str) -> None:
    fields = {"prompt": "the", "max_tokens": 64} if path == "/v1/completions" else {"messages": HI}
    async with served() as server:
        plain = await server.stream(path, **fields)
        said = await server.stream(path, **fields, stream_options={"include_usage": True})
        every = await server.stream(
            path, **fields, stream_options={"include_usage": True, "continuous_usage_stats": True}
        )
        whole = (await server.post(path, **fields)).json()
    assert not any("usage" in e for e in plain)
    assert not any("usage" in e for e in said[:-1])
    assert said[-1]["choices"] == []
    assert said[-1]["usage"] == every[-1]["usage"] == whole["usage"]
    counts = [e["usage"]["completion_tokens"] for e in every]
    assert counts == sorted(counts)
    assert counts[-1] == len(says(ANSWER))


async def test_usage_needs_a_stream() -> None:
    async with served() as server:
        response = await server.post("/v1/completions", prompt="a", stream_options={"include_usage": True})
    assert response.json()["error"]["param"] == "stream_options"


@given(
    text=st.text(alphabet='ab é😀\n"\\', max_size=20),
    stop=st.lists(st.text(alphabet="ab \n", min_size=1, max_size=2), max_size=2),
    n=st.integers(1, 2),
    prompts=st.integers(1, 2),
    echo=st.booleans(),
    logprobs=st.sampled_from([None, 0, 2]),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_a_stream_says_what_the_whole_answer_says(
    text: str, stop: list[str], n: int, prompts: int, echo: bool, logprobs: int | None
) -> None:
    fields = {"prompt": ["the dog", "a boat"][:prompts], "n": n, "stop": stop, "echo": echo}
    fields |= {"logprobs": logprobs, "max_tokens": 40, "seed": 1}

    async def both() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        async with served(lambda r: says(text + str(r.choice))) as server:
            return await server.complete(**fields), await server.stream("/v1/completions", **fields)

    whole, said = asyncio.run(both())
    for choice in whole["choices"]:
        mine = [c for e in said for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if logprobs is not None:
            for column, values in choice["logprobs"].items():
                assert [v for c in mine for v in c["logprobs"][column]] == values


async def test_chat_logprobs_stream_token_by_token() -> None:
    async with served() as server:
        whole = await server.chat(logprobs=True, top_logprobs=1)
        said = await server.stream("/v1/chat/completions", messages=HI, logprobs=True, top_logprobs=1)
    taken = [one for e in said if (lp := e["choices"][0]["logprobs"]) for one in lp["content"]]
    assert taken == whole["choices"][0]["logprobs"]["content"]


async def test_completion_logprobs_stream_only_where_they_are_asked_for() -> None:
    async with served() as server:
        whole = (await server.complete(logprobs=1))["choices"][0]["logprobs"]
        said = await server.stream("/v1/completions", prompt="the", max_tokens=64, logprobs=1)
        plain = await server.stream("/v1/completions", prompt="the", max_tokens=64)
    taken = [one for e in said for c in e["choices"] if (one := c["logprobs"])]
    assert whole["tokens"] and taken
    for field in whole:
        assert [x for one in taken for x in one[field]] == whole[field], field
    assert all(c["logprobs"] is None for e in plain for c in e["choices"])


async def test_token_ids_stream_too() -> None:
    async with served() as server:
        said = await server.stream("/v1/completions", prompt="the", max_tokens=64, return_token_ids=True)
        chat = await server.stream("/v1/chat/completions", messages=HI, return_token_ids=True)
    for got in (said, chat):
        ids = [t for e in got for t in e["choices"][0].get("token_ids", [])]
        assert ids == says(ANSWER)
    assert said[0]["choices"][0]["prompt_token_ids"] == list(TOKENIZER.encode("the"))
    assert chat[0]["choices"][0]["prompt_token_ids"] == list(server.port.submitted[1].prompt)


async def test_a_prompt_scored_alone_streams_nothing_else() -> None:
    async with served() as server:
        fields = {"prompt": "the dog", "echo": True, "logprobs": 0, "max_tokens": 0}
        said = await server.stream("/v1/completions", **fields, stream_options={"include_usage": True})
    assert texts(said) == "the dog"
    assert said[-1]["usage"]["completion_tokens"] == 0


async def test_a_refusal_keeps_its_status_in_streams() -> None:
    async with served(max_queued=1) as server:
        response = await server.post("/v1/completions", prompt=["a", "b"], stream=True)
    assert response.status_code == 429
    assert "retry-after" in response.headers


async def test_an_engine_that_dies_ends_a_stream_with_an_error() -> None:
    async with served(None) as server:
        task = asyncio.ensure_future(server.post("/v1/completions", prompt="a", stream=True))
        await submitted(server)
        server.port.say(server.port.submitted[0], *TOKENIZER.encode("the"))
        for _ in range(10):
            await asyncio.sleep(0)
        server.port.die("signal 9")
        said = events((await task).text)
    assert said[0]["choices"][0]["text"] == "the"
    assert set(said[-1]) == {"error"}
    assert said[-1]["error"]["type"] == "service_unavailable_error"
    assert "signal 9" in said[-1]["error"]["message"]


class Part:
    """The answer to one prompt: what each call of `take` brings, or raises."""

    def __init__(self, *takes: list[Delta] | QuireError | None) -> None:
        self.takes, self.closed = list(takes), False

    def subscribe(self, news: Callable[[], None]) -> None:
        """Nothing is new: everything is there."""

    def take(self) -> list[Delta] | None:
        found = self.takes[0] if len(self.takes) == 1 else self.takes.pop(0)
        if isinstance(found, QuireError):
            raise found
        return found

    def close(self) -> None:
        self.closed = True


class Answering:
    def __init__(self, parts: list[Part]) -> None:
        self.left = iter(parts)

    def admit(self, more: int, coming: int = 0) -> None:
        """There is always room."""

    def answer(self, call: Any) -> Part:
        return next(self.left)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_what_is_ready_of_one_prompt_is_sent_before_another_fails(order: tuple[int, ...]) -> None:
    """Unless the failure is met first: then nothing has been taken yet from those behind it."""
    fails = Part(Unavailable("it is gone"))
    parts = [Part([Delta(0, "a")], [Delta(0, "b")], None), fails, Part([Delta(0, "c")], None)]
    placed = [parts[i] for i in order]
    before = order[: order.index(1)]
    both = answer_all(Answering(placed), [cast(Any, SimpleNamespace(beams=None, sampling=SimpleNamespace(n=1)))] * 3, 1)  # type: ignore[arg-type]
    if before:
        taken = both.take()
        want = [("a" if i == 0 else "c", order.index(i)) for i in before]
        assert [(delta.text, delta.index) for delta in taken or ()] == want
        if 0 in before:
            assert [delta.text for delta in both.take() or ()] == ["b"]
    with pytest.raises(Unavailable, match="gone"):
        both.take()
    both.close()
    assert all(part.closed for part in parts)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_answers_to_several_prompts_end_with_the_last_of_them_whichever_it_is(late: int) -> None:
    parts = [Part([Delta(0, "a")], None) for _ in range(3)]
    parts[late] = Part([Delta(0, "b")], [], [Delta(0, "c")], None)
    merged = answer_all(
        Answering(parts), [cast(Any, SimpleNamespace(beams=None, sampling=SimpleNamespace(n=1)))] * 3, 1
    )  # type: ignore[arg-type]
    assert len(merged.take() or ()) == 3
    assert merged.take() == []
    assert [(delta.index, delta.text) for delta in merged.take() or ()] == [(late, "c")]
    assert merged.take() is None


async def test_an_engine_that_dies_before_the_first_token_is_unavailable() -> None:
    async with served(None) as server:
        task = asyncio.ensure_future(server.post("/v1/completions", prompt="a", stream=True))
        await submitted(server)
        server.port.die("signal 9")
        response = await task
    assert response.status_code == 503
    assert response.json()["error"]["message"].endswith("signal 9")


async def test_a_silent_stream_is_kept_alive() -> None:
    async with served(None, limits=Limits(keep_alive=0.01)) as server:
        task = asyncio.ensure_future(server.post("/v1/chat/completions", messages=HI, stream=True))
        await submitted(server)
        await asyncio.sleep(0.05)
        server.port.say(server.port.submitted[0], *says("dog"), finish="stop", stop_token=1)
        text = (await task).text
    assert text.startswith("data: ")  # the role comes first, whatever goes out first
    assert ": keep-alive\n\n" in text
    assert texts(events(text.replace(": keep-alive\n\n", ""))) == "dog"


async def test_a_stream_that_holds_a_call_back_is_kept_alive_too() -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    async with served(None, room=1024, limits=Limits(keep_alive=0.01)) as server:
        task = asyncio.ensure_future(server.post("/v1/chat/completions", messages=HI, stream=True, tools=tools))
        await submitted(server)
        request = server.port.submitted[0]
        for token in TOKENIZER.encode("<tool_call>\n{"):
            server.port.say(request, token)
            await asyncio.sleep(0.02)
        server.port.say(request, *TOKENIZER.encode('"name": "now"}</tool_call>'), 1, finish="stop", stop_token=1)
        text = (await task).text
    assert text.count(": keep-alive\n\n") >= 2
    said = events(text.replace(": keep-alive\n\n", ""))
    assert all(chunk["choices"][0]["delta"] or chunk["choices"][0]["finish_reason"] for chunk in said)


async def test_tokens_that_are_ready_together_leave_in_one_write() -> None:
    async with served(None) as server:
        raw = Raw(server, "/v1/completions", prompt="a", stream=True)
        await submitted(server)
        request = server.port.submitted[0]
        server.port.say(request, *TOKENIZER.encode("the"))
        raw.readable.clear()  # the reader is slow from here on
        for word in ("dog", "boat"):
            await asyncio.sleep(0.001)
            server.port.say(request, *TOKENIZER.encode(word))
        server.port.say(request, 1, finish="stop", stop_token=1)
        await asyncio.sleep(0.001)
        raw.readable.set()
        await raw.ended
    assert [body.count(b'"text"') for body in raw.bodies] == [1, 1, 2, 0]  # "dog" was on its way when "boat" came


async def test_a_token_is_written_by_the_step_that_brings_it() -> None:
    async with served(None) as server:
        raws = [Raw(server, "/v1/completions", prompt="a", n=2, stream=True) for _ in range(3)]
        while len(server.port.submitted) < 6:
            await asyncio.sleep(0)
        step = [RequestStepOutput(request.id, TOKENIZER.encode("the")) for request in server.port.submitted]
        server.port.on_tokens(step)
        assert [[body.count(b'"text":"the"') for body in raw.bodies] for raw in raws] == [[2]] * 3
        for raw in raws:
            raw.left.set()
            await raw.ended


async def test_a_stream_whose_client_is_gone_takes_no_other_with_it() -> None:
    async with served(None) as server:
        broken, whole = (Raw(server, "/v1/completions", prompt="a", stream=True) for _ in range(2))
        while len(server.port.submitted) < 2:
            await asyncio.sleep(0)
        broken.fails = True
        server.port.on_tokens(
            [RequestStepOutput(request.id, TOKENIZER.encode("the")) for request in server.port.submitted]
        )
        assert len(whole.bodies) == 1
        with pytest.raises(ConnectionError):
            await broken.ended
        assert server.port.aborted == [server.port.submitted[0].id]
        whole.left.set()
        await whole.ended


@pytest.mark.parametrize("expected", [True, False])
async def test_an_error_in_a_stream_is_sent_and_an_unexpected_one_is_raised_for_the_log(
    expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> bytes:
        raise Unavailable("it stopped") if expected else ValueError("a bug")

    async with served(None) as server:
        raw = Raw(server, "/v1/completions", prompt="a", stream=True)
        await submitted(server)
        server.port.say(server.port.submitted[0], *TOKENIZER.encode("the"))
        monkeypatch.setattr(CompletionChunks, "encode", fail)
        server.port.say(server.port.submitted[0], *TOKENIZER.encode("dog"))
        if expected:
            await raw.ended
        else:
            with pytest.raises(ValueError, match="a bug"):
                await raw.ended
    said = raw.bodies[-1] or raw.bodies[-2]
    assert b'"error":{' in said and said.endswith(DONE)
    assert (b"it stopped" in said, b"a bug" in said) == (expected, False)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_ended_leaves_no_reference_cycles(stream: bool) -> None:
    def alive() -> list[object]:
        return [one for one in gc.get_objects() if type(one) in (ActiveRequest, EventStream, Job, Call)]

    async with served() as server:
        gc.collect()
        gc.disable()
        try:
            others = alive()  # of other tests, whose fixtures hold them
            for prompt in ("the", ["the dog", "a boat"]):
                said = await server.post("/v1/completions", prompt=prompt, n=2, max_tokens=64, stream=stream)
                assert said.status_code == 200
            await asyncio.sleep(0)
            kept = [type(one).__name__ for one in alive() if not any(one is other for other in others)]
        finally:
            gc.enable()
    assert kept == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_disconnects_frees_its_blocks(stream: bool) -> None:
    async with served(None) as server:
        raw = Raw(server, "/v1/completions", prompt=["a", "b"], n=2, stream=stream)
        await submitted(server)
        server.port.say(server.port.submitted[0], *TOKENIZER.encode("the"))
        await asyncio.sleep(0)
        raw.left.set()
        await asyncio.wait_for(raw.ended, 100)
        assert sorted(server.port.aborted) == sorted(request.id for request in server.port.submitted)
        assert len(server.port.aborted) == 4


class Raw:
    """A request on bare ASGI, whose client can be slow (`readable`) and can leave (`left`)."""

    def __init__(self, server: Served, path: str, **body: Any) -> None:
        self.left, self.readable = asyncio.Event(), asyncio.Event()
        self.readable.set()
        self.fails = False
        self.bodies: list[bytes] = []
        self._unread = [json.dumps(body).encode()]
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        self.ended = asyncio.ensure_future(server.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._unread:
            return {"type": "http.request", "body": self._unread.pop(), "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.readable.wait()
        if self.fails:
            raise ConnectionError("the client is gone")
        if message["type"] == "http.response.body":
            self.bodies.append(message["body"])


async def submitted(server: Served) -> None:
    while not server.port.submitted:
        await asyncio.sleep(0)
