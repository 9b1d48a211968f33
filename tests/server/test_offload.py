"""Whatever a client sends or is sent, what it costs grows in other threads than the event loop's.

Nothing here is timed. What runs on the loop's thread is counted, for a large request and for a larger one: as many
calls, of Python and of C, and none of the functions that read or write text has more than a little of it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from quire.frontend import upstream_response
from quire.frontend.interface import Delta
from quire.frontend.offload import LARGE
from quire.frontend.upstream_response import UpstreamResponse
from quire.server import outputs, proxy
from quire.server.access import Keys, Rates
from quire.server.app import create_app
from quire.server.batch_api import batches
from quire.server.batch_api.batches import Batches
from quire.server.batch_api.files import document
from quire.server.batch_api.runner import BatchService
from quire.server.batch_api.store import Store, new_id
from quire.server.calls import Job
from quire.server.endpoints import answerer
from quire.server.limits import Limits
from quire.server.outputs import ChoiceBuilder
from quire.server.proxy import create_relay_app
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.tokenizer import Tokenizer
from quire.types import Request, RequestStepOutput, TokenLogprobs
from tests.frontend.ports import FakePort
from tests.server.doubles import HI, Served, served
from tests.server.test_batches import jsonl, line, office

pytestmark = pytest.mark.anyio

SIZES = (1 << 15, 1 << 18)
"""Bytes of the field that is large, and larger."""

LITTLE = 1 << 13
"""Characters, bytes or tokens that one call on the loop may have."""

SLACK = 500
"""Calls more or less: the loop learns at one point or another that a thread is done."""

HEAVY: tuple[tuple[Any, str, Callable[..., int]], ...] = (
    (msgspec.json, "decode", lambda args, made: len(args[0])),
    (msgspec.json, "encode", lambda args, made: len(made)),
    (json, "loads", lambda args, made: len(args[0])),
    (json, "dumps", lambda args, made: len(made)),
    (hashlib, "blake2b", lambda args, made: len(args[0]) if args else 0),
    (hashlib, "sha256", lambda args, made: len(args[0]) if args else 0),
    (base64, "b64encode", lambda args, made: len(args[0])),
    (Tokenizer, "encode", lambda args, made: len(args[1])),
    (Tokenizer, "decode", lambda args, made: len(args[1])),
    (ChatTemplate, "render", lambda args, made: len(made)),
)


class Work:
    """What one thread did."""

    def __init__(self) -> None:
        self.calls, self.large = 0, list[str]()


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """What this thread does within."""
    work, own = Work(), threading.get_ident()

    def wrapped(name: str, real: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
        def call(*args: Any, **rest: Any) -> Any:
            made = real(*args, **rest)
            if threading.get_ident() == own and size(args, made) > LITTLE:
                work.large.append(f"{name} of {size(args, made)}")
            return made

        return call

    def count(frame: FrameType, event: str, arg: Any) -> None:
        work.calls += event in ("call", "c_call")

    with monkeypatch.context() as patch:
        for owner, name, size in HEAVY:
            patch.setattr(owner, name, wrapped(name, getattr(owner, name), size))
        sys.setprofile(count)
        try:
            yield work
        finally:
            sys.setprofile(None)


async def ask(app: Any, method: str, path: str, body: bytes, kind: str = "application/json") -> int:
    """As a server would ask it of the application, the body in one piece; the status."""
    headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "http_version": "1.1", "scheme": "http", "method": method, "headers": headers}
    scope |= {"root_path": "", "path": path, "raw_path": path.encode(), "query_string": b"", "server": ("x", 80)}
    parts: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
    status: list[int] = []
    stays = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if parts:
            return parts.pop()
        await stays.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            status.append(message["status"])

    await app(scope, receive, send)
    # Background responses are answered on the loop: their calls belong to this request, and none to the next one.
    if background := [task for task in asyncio.all_tasks() if task.get_name().startswith("resp_")]:
        await asyncio.wait(background)
    return status[0]


# -------------------------------------------------------------------- what clients send

TOOL = {
    "name": "now",
    "description": "the time",
    "parameters": {"type": "object", "description": "d", "properties": {"zone": {"type": "string", "enum": ["a"]}}},
}
TOOLS = [{"type": "function", "function": TOOL}]
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
PLAIN: dict[str, Any] = {
    "model": "tiny",
    "stop": ["q"],
    "bad_words": ["x"],
    "cache_salt": "s",
    "user": "u",
    "metadata": {"a": "b"},
    "logit_bias": {"3": 1.0},
    "stop_token_ids": [1],
    "allowed_token_ids": [1, 2, 3],
    "max_tokens": 2,
}
CHAT = {
    **PLAIN,
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "t"}], "name": "n"},
        {"role": "assistant", "content": "a", "reasoning": "r", "tool_calls": [CALL]},
        {"role": "tool", "content": "c", "tool_call_id": "c1"},
        *HI,
    ],
    "tools": TOOLS,
    "chat_template_kwargs": {"a": "x"},
}
SCHEMA = {"type": "object", "description": "d", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "description": "d", "schema": SCHEMA}}
RESPONSE = {
    "model": "tiny",
    "instructions": "i",
    "include": ["message.output_text.logprobs"],
    "metadata": {"a": "b"},
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "t"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
    ],
    "tools": [{"type": "function", **TOOL}],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
}
MESSAGE = {
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "now", "input": {"zone": "z"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "o"}]},
    ],
    "tools": [{"name": "now", "description": "d", "input_schema": TOOL["parameters"]}],
}
OLLAMA = [
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": {"zone": "z"}}}]},
    {"role": "tool", "content": "o", "tool_name": "now"},
]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "unshown tools": ("/v1/chat/completions", {"messages": HI, "tools": TOOLS, "tool_choice": "none"}),
    "one tool": (
        "/v1/chat/completions",
        {"messages": HI, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}},
    ),
    "format": ("/v1/chat/completions", {"messages": HI, "response_format": FORMAT}),
    "completion": ("/v1/completions", {**PLAIN, "prompt": "p"}),
    "completions": ("/v1/completions", {**PLAIN, "prompt": ["p", "q"], "echo": True, "logprobs": 1}),
    "token ids": ("/v1/completions", {"prompt": [3, 4, 5], "return_token_ids": True}),
    "choice": ("/v1/completions", {"prompt": "p", "structured_outputs": {"choice": ["a", "b"]}}),
    "regex": ("/v1/completions", {"prompt": "p", "structured_outputs": {"regex": "a", "whitespace_pattern": " "}}),
    "guided": ("/v1/completions", {"prompt": "p", "guided_json": json.dumps(SCHEMA)}),
    "response": ("/v1/responses", RESPONSE),
    "echoed tools": ("/v1/responses", {"input": "i", "tools": RESPONSE["tools"], "tool_choice": "none"}),
    "labels": ("/v1/responses", {"input": "i", "metadata": {"a": "b"}}),
    "background": ("/v1/responses", {"input": "i", "metadata": {"a": "b"}, "background": True}),
    "message": ("/v1/messages", {**MESSAGE, "max_tokens": 2, "stop_sequences": ["q"]}),
    "message count": ("/v1/messages/count_tokens", MESSAGE),
    "response count": ("/v1/responses/input_tokens", RESPONSE),
    "embeddings": ("/v1/embeddings", {"input": ["a", "b"], "cache_salt": "s"}),
    "embeddings of a chat": ("/v1/embeddings", {"messages": HI, "truncate_prompt_tokens": 9}),
    "score": ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
    "score at the root": ("/score", {"queries": "a", "documents": ["b", "c"]}),
    "rerank": ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}]}),
    "rerank 2": ("/v2/rerank", {"query": "a", "documents": ["b"], "top_n": 1}),
    "rerank at the root": ("/rerank", {"query": "a", "documents": ["b"]}),
    "classify": ("/v1/classify", {"input": ["a", "b"]}),
    "classify at the root": ("/classify", {"input": "a"}),
    "pooling": ("/pooling", {"input": ["a", "b"], "task": "embed"}),
    "ollama chat": ("/api/chat", {"messages": OLLAMA, "tools": TOOLS, "format": SCHEMA, "options": {"stop": ["q"]}}),
    "ollama generate": ("/api/generate", {"prompt": "p", "system": "s", "context": [3, 4], "options": {"num_ctx": 9}}),
    "ollama embed": ("/api/embed", {"input": ["a", "b"], "truncate": True}),
    "ollama embeddings": ("/api/embeddings", {"prompt": "p"}),
    "ollama show": ("/api/show", {"model": "m"}),
    "generate": ("/v1/generate", {"prompt": "p", "stop": ["q"]}),
    "generate at the root": ("/generate", {"prompt": "p", "stop": ["q"]}),
    "tokenize": ("/tokenize", {"prompt": "p", "return_token_strs": True}),
    "tokenize chat": ("/tokenize", {"messages": CHAT["messages"], "tools": TOOLS}),
    "detokenize": ("/detokenize", {"tokens": [3, 4]}),
    "sign in": ("/ui/session", {"key": "k"}),
    "batch": (
        "/v1/batches",
        {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"}},
    ),
}


def grown(value: Any, size: int) -> Iterator[tuple[str, Any]]:
    """The same with one text, one name or one list in it of about `size` bytes, in every place that there is."""
    if isinstance(value, str):
        yield "", ("the dog " * (size // 8))[:size]
    elif isinstance(value, dict):
        yield ".*", {**value, "the dog " * (size // 8): 1}
        for name, one in value.items():
            yield from ((f".{name}{where}", {**value, name: large}) for where, large in grown(one, size))
    elif isinstance(value, list):
        yield "[]", value * (size // len(json.dumps(value)))
        for i, one in enumerate(value):
            yield from ((f"[{i}]{where}", [*value[:i], large, *value[i + 1 :]]) for where, large in grown(one, size))


@contextmanager
def app_with_batches(server: Served, folder: Path) -> Iterator[Any]:
    """The application with files and batches."""
    limits = Limits()
    service = BatchService(folder, answerer(server.backend, limits, "x"), limits, width=1)
    try:
        yield create_app(server.backend, limits=limits, keys=Keys(), batch_service=service)
    finally:
        service._lock.close()


@pytest.mark.parametrize("name", BODIES)
async def test_no_field_of_a_request_costs_the_loop_more_for_being_larger(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = BODIES[name]
    async with served() as server:
        with app_with_batches(server, tmp_path) as app:
            assert await ask(app, "POST", path, msgspec.json.encode(body)) in (200, 400, 401, 404)
            for small, large in zip(grown(body, SIZES[0]), grown(body, SIZES[1]), strict=True):
                calls: list[float] = [math.inf, math.inf]
                for turn in range(10):  # what the loop does beside a request adds calls to some turns
                    where, one = (small, large)[turn % 2]
                    data = msgspec.json.encode(one)
                    with counted(monkeypatch) as work:
                        assert await ask(app, "POST", path, data) < 500
                    assert not work.large, (where, work.large)
                    calls[turn % 2] = min(calls[turn % 2], work.calls)
                    if turn % 2 and calls[1] - calls[0] < SLACK:
                        break
                assert calls[1] - calls[0] < SLACK, (small[0], calls)


async def test_every_path_that_takes_json_is_among_these() -> None:
    async with served() as server:
        paths = {route.path for route in server.app.app.routes if "POST" in (route.methods or ())}
    without = {"/reset_prefix_cache", "/ping", "/v1/files", "/v1/batches/{id}/cancel", "/v1/files/{rest:path}"}
    without |= {
        "/v1/batches/{rest:path}",
        "/api/pull",
        "/api/push",
        "/api/create",
        "/api/copy",
        "/v1/responses/{id}/cancel",
    }
    assert paths - without == {path for path, _ in BODIES.values()}


async def test_an_upload_costs_the_loop_a_call_for_each_piece_and_not_for_each_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
    head += b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    calls = []
    async with served() as server:
        with app_with_batches(server, tmp_path) as app:
            for size in SIZES:
                body = head + b"\n" * size + b"\r\n--x--\r\n"
                with counted(monkeypatch) as work:
                    assert await ask(app, "POST", "/v1/files", body, "multipart/form-data; boundary=x") == 200
                calls.append(work.calls)
    assert calls[1] - calls[0] < SLACK


# -------------------------------------------------------------------- what clients are sent

DOGS = "the dog "
SCORE = TokenLogprobs(5, -1.0, 1, ((5, -1.0),))


class Scored(FakePort):
    """Answers with one token, and makes log-probabilities of a prompt in no time."""

    def _one(self, request: Request, said: list[int]) -> RequestStepOutput:
        scores = (SCORE,) * (len(request.prompt) - 1) if request.sampling.prompt_logprobs is not None else ()
        return RequestStepOutput(request.id, (5,), "length", logprobs=(SCORE,), prompt_logprobs=scores)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "large"),
    [
        ("/v1/completions", {"echo": True, "logprobs": 1, "return_token_ids": True, "n": 2}, "prompt"),
        ("/v1/chat/completions", {"messages": HI, "return_token_ids": True, "tools": TOOLS, "n": 2}, "tools"),
        ("/v1/responses", {"input": "i", "tools": RESPONSE["tools"], "tool_choice": "none"}, "tools"),
        ("/v1/messages", {"messages": HI, "max_tokens": 2}, "system"),
        ("/api/generate", {}, "prompt"),
    ],
)
async def test_what_an_answer_repeats_of_its_request_costs_the_loop_no_more_for_being_larger(
    path: str, body: dict[str, Any], large: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    port = Scored(lambda request: [5], pages=1 << 15, max_model_len=1 << 18)
    async with served(port=port, room=1 << 18) as server:
        for size in SIZES:
            text: Any = DOGS * (size // len(DOGS))
            if large == "tools":
                [tool] = body["tools"]
                text = [
                    {**tool, "description": text}
                    if "name" in tool
                    else {**tool, "function": {**TOOL, "description": text}}
                ]
            data = msgspec.json.encode({**body, large: text, "stream": stream})
            with counted(monkeypatch) as work:
                assert await ask(server.app, "POST", path, data) == 200
            assert not work.large
            calls.append(work.calls)
    assert calls[1] - calls[0] < SLACK, calls


async def test_a_long_answer_with_log_probabilities_is_put_together_in_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, threads = threading.get_ident(), set[int]()
    real = outputs._answer

    def noted(*args: Any) -> Any:
        threads.add(threading.get_ident())
        return real(*args)

    monkeypatch.setattr(outputs, "_answer", noted)
    scores = TokenLogprobs(5, -1.0, 1, tuple((i, -2.0) for i in range(20)))
    async with served(None, room=1 << 12) as server:
        for path, fields in (("/v1/completions", {"prompt": "p", "logprobs": 20}), ("/v1/chat/completions", CHATTY)):
            threads.clear()
            waiting = asyncio.ensure_future(server.post(path, **fields, max_tokens=300))
            before = len(server.port.submitted)
            while len(server.port.submitted) == before:
                await asyncio.sleep(0)
            server.port.say(server.port.submitted[-1], *[5] * 300, finish="length", logprobs=(scores,) * 300)
            assert (await waiting).status_code == 200
            assert threads and own not in threads


CHATTY = {"messages": HI, "logprobs": True, "top_logprobs": 20}


async def test_an_embedding_is_written_in_another_thread() -> None:
    job = Job(id="e", model="m", calls=[], token_text=lambda token: ("", b""))
    made = ChoiceBuilder(job)
    made.add(Delta(0, "", pooled=bytes(4 << 10), finish_reason="length"))
    assert outputs.cost(job, [made]) >= LARGE


# -------------------------------------------------------------------- files and batches


@contextmanager
def threads_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[int]]]:
    """In which threads batches read and write their files."""
    seen: dict[str, set[int]] = {}

    def steps(name: str, real: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def call(*args: Any) -> Iterator[Any]:
            for one in real(*args):
                seen.setdefault(name, set()).add(threading.get_ident())
                yield one

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Batches, "lines", steps("lines", Batches.lines))
        patch.setattr(batches, "whole_lines", steps("whole_lines", batches.whole_lines))
        add = Store.add

        def added(*args: Any) -> None:
            seen.setdefault("add", set()).add(threading.get_ident())
            add(*args)

        patch.setattr(Store, "add", added)
        yield seen


async def test_batches_read_and_write_in_a_thread_of_their_own_also_when_they_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = asyncio.Event()

    def until_four(answer: Any) -> Any:
        async def one(path: str, body: bytes) -> Any:
            if b"q4" in body:
                stopped.set()
                await asyncio.sleep(3600)
            return await answer(path, body)

        return one

    lines = [x for i in range(6) for x in (b"\n \n", b"\n" * 5000, line(f"q{i}"))]
    with threads_of(monkeypatch) as seen:
        async with office(tmp_path, wrap=until_four, width=1) as here:
            batch = await here.begin(*lines)
            await asyncio.wait_for(stopped.wait(), 100)
        async with office(tmp_path) as here:
            batch = await here.until(batch["id"], "completed")
    assert batch["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
    assert set(seen) == {"lines", "whole_lines", "add"}
    assert all(threading.get_ident() not in threads for threads in seen.values()), seen


async def test_millions_of_blank_lines_are_passed_over_many_at_a_time_and_counted(tmp_path: Path) -> None:
    async with office(tmp_path) as here:
        blank = b"\n" * 100_000 + b" \t\r\n" * 10_000
        file = (await here.upload(blank + jsonl(line("a")) + blank + b"no request\n" + blank + b"  ")).json()["id"]
        calls = 0

        def count(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            found = [number for number, _ in here.service._batches.lines({"input_file_id": file})]
        finally:
            sys.setprofile(None)
        assert found == [110_001, 220_002]
        assert calls < 3_000  # of 330,000 lines


async def test_a_list_of_many_files_is_made_in_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    async with office(tmp_path) as here:
        store = here.service._files._store
        for many in (1000, 4000):
            for _ in range(many):
                id = new_id("file-")
                store._known[id] = document(id, 1, "f", "batch")
            with counted(monkeypatch) as work:
                assert (await here.client.get("/v1/files?limit=1")).status_code == 200
            calls.append(work.calls)
    assert calls[1] - calls[0] < SLACK, calls


# -------------------------------------------------------------------- in front of other servers


class Echo:
    """An upstream that is available with what it was sent."""

    upstreams = ()
    keyed, name = False, "m"

    def admit(self) -> None:
        """There is always room."""

    async def send(self, method: str, path: str, headers: Any, body: bytes, about: Any) -> UpstreamResponse:
        connection = SimpleNamespace(status=200, headers=[], until_closed=False, read=self.read)
        self.parts = [
            b"",
            b'{"id": "x", "choices": [{"text": "", "finish_reason": "stop"}], "model": "m", "usage": {}, "a": ',
            body,
        ]
        self.parts = [b"", b"}", body, self.parts[1]]
        return UpstreamResponse(connection, lambda _: None, SimpleNamespace(on_end=lambda *_: None), "u")  # type: ignore[arg-type]

    async def read(self) -> bytes:
        return self.parts.pop()

    def stats(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize", "/v1/generate"])
async def test_a_request_that_is_passed_on_costs_the_loop_no_more_for_being_larger(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        upstream_response,
        "_decoder",
        SimpleNamespace(decode=lambda text: msgspec.json.decode(text, type=upstream_response._UsageEnvelope)),
    )
    monkeypatch.setattr(
        proxy, "_peek", SimpleNamespace(decode=lambda text: msgspec.json.decode(text, type=proxy._PeekedFields))
    )
    app = create_relay_app(
        Echo(),  # type: ignore[arg-type]
        limits=Limits(),
        keys=Keys(),
        rates=Rates(),
        version="x",
        view=None,
    )
    calls = []
    for size in SIZES:
        data = msgspec.json.encode({"prompt": DOGS * (size // len(DOGS))})
        with counted(monkeypatch) as work:
            assert await ask(app, "POST", path, data) in (200, 503)
        assert not work.large
        calls.append(work.calls)
    assert calls[1] - calls[0] < SLACK, calls
