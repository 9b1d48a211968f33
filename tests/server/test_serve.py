"""The real thing on loopback: uvicorn, sockets, signals, and the official client."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from quire.engine.executor import Description
from quire.errors import InvalidConfig
from quire.server.connection import Timeouts
from quire.server.limits import Limits
from quire.server.serve import _check_writable, _written, listen, serve, url
from tests.frontend.ports import FakePort, Script
from tests.server.doubles import ANSWER, TOKENIZER, Served, answers, check_error, says, served

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def running(
    script: Script | None = answers, *, timeouts: Timeouts | None = None, shutdown_timeout: float = 2, **rest: object
) -> AsyncIterator[tuple[Served, str, asyncio.Task[None]]]:
    """A server on a free port, until the test ends it or leaves."""
    async with served(script, **rest) as server:  # type: ignore[arg-type]
        sock = listen("127.0.0.1", 0)
        where, up = url(sock), asyncio.Event()
        task = asyncio.ensure_future(
            serve(
                server.app,
                server.backend,
                sock,
                timeouts=timeouts,
                shutdown_timeout=shutdown_timeout,
                log_level="error",
                on_ready=lambda at: up.set() if at == where else None,
            )
        )
        await asyncio.wait_for(up.wait(), 100)
        try:
            yield server, where, task
        finally:
            if not task.done():
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.wait_for(task, 100)


TALK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


def client(where: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=where + "/v1", api_key="any", max_retries=0)


async def test_the_official_client_works() -> None:
    async with running() as (_, where, _), client(where) as api:
        chat = await api.chat.completions.create(model="tiny", messages=TALK, logprobs=True, top_logprobs=1)
        assert chat.choices[0].message.content == ANSWER
        assert chat.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        assert chat.usage.prompt_tokens_details.cached_tokens is not None
        stream = await api.chat.completions.create(
            model="tiny", messages=TALK, stream=True, n=2, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        said = [c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == 1]
        assert "".join(said) == ANSWER + " 1"
        assert chunks[-1].usage is not None
        done = await api.completions.create(model="tiny", prompt=["the", "dog"], max_tokens=64, extra_body={"top_k": 5})
        assert [choice.text for choice in done.choices] == [ANSWER, ANSWER]
        models = await api.models.list()
        assert [model.id for model in models.data] == ["tiny"]


async def test_the_official_client_sees_typed_errors() -> None:
    async with running() as (server, where, _), client(where) as api:
        with pytest.raises(openai.NotFoundError, match="not served here"):
            await api.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError) as caught:
            await api.completions.create(model="tiny", prompt="a", temperature=-1)
        assert caught.value.param == "temperature"
        server.port.die("signal 9")
        with pytest.raises(openai.InternalServerError):
            await api.completions.create(model="tiny", prompt="a")


async def test_64_streams_do_not_mix_and_none_is_lost() -> None:
    def script(request: object) -> list[int]:
        prompt = TOKENIZER.decode(request.prompt)  # type: ignore[attr-defined]
        return says("dog " * 5 + prompt)

    async with running(script) as (server, where, _), client(where) as api:

        async def one(i: int) -> str:
            stream = await api.completions.create(model="tiny", prompt=f"boat {i}", max_tokens=64, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*map(one, range(64)))
        assert texts == ["dog " * 5 + f"boat {i}" for i in range(64)]
        assert server.port.running == {}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_dropped_connection_frees_its_pages(stream: bool) -> None:
    async with running(None) as (server, where, _):
        body = {"prompt": "a", "stream": stream}
        async with httpx.AsyncClient() as http:
            task = asyncio.ensure_future(http.post(where + "/v1/completions", json=body))
            while not server.port.submitted:
                await asyncio.sleep(0.005)
            task.cancel()
        async with asyncio.timeout(100):
            while not server.port.aborted:
                await asyncio.sleep(0.005)
        assert server.port.aborted == [server.port.submitted[0].id]


async def test_200_streams_opened_and_dropped_leave_nothing() -> None:
    async with running(None) as (server, where, _):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=300) as http:
            body = {"prompt": "a", "stream": True}
            tasks = [asyncio.ensure_future(http.post(where + "/v1/completions", json=body)) for _ in range(200)]
            while len(server.port.submitted) < 200:
                await asyncio.sleep(0.005)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(100):
            while server.port.running:
                await asyncio.sleep(0.005)
        assert server.backend._active == {}


async def test_a_body_of_ten_megabytes_is_refused_and_the_next_request_served() -> None:
    async with running(limits=Limits(max_body_bytes=1 << 20)) as (_, where, _), httpx.AsyncClient() as http:
        big = b'{"prompt": "' + b"a" * (10 << 20) + b'"}'
        headers = {"content-type": "application/json"}
        check_error(await http.post(where + "/v1/completions", content=big, headers=headers), 413)
        response = await http.post(where + "/v1/completions", json={"prompt": "the", "max_tokens": 64})
        assert response.json()["choices"][0]["text"] == ANSWER


@pytest.fixture
def heeded(number: signal.Signals) -> Iterator[None]:
    """Where these tests run under nohup they inherit that SIGHUP is ignored."""
    before = signal.signal(number, signal.SIG_DFL)
    yield
    signal.signal(number, before)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_drains(number: signal.Signals) -> None:
    async with running(None) as (server, where, task), httpx.AsyncClient() as http:
        body = {"prompt": "a", "stream": True}
        old = asyncio.ensure_future(http.post(where + "/v1/completions", json=body))
        while not server.port.submitted:
            await asyncio.sleep(0.005)
        os.kill(os.getpid(), number)
        while (await http.get(where + "/health/ready")).status_code == 200:
            await asyncio.sleep(0.005)
        new = await http.post(where + "/v1/completions", json=body)
        check_error(new, 503, words="shutting down")
        assert "retry-after" in new.headers
        assert not task.done()
        server.port.say(server.port.submitted[0], *says("bye"), finish="stop", stop_token=1)
        assert "bye" in (await old).text
        await asyncio.wait_for(task, 100)
        assert server.port.closed
        with pytest.raises(httpx.ConnectError):
            await http.get(where + "/health")


async def test_a_hang_up_that_is_ignored_stays_so() -> None:
    """As nohup has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        async with running() as (_, where, task), httpx.AsyncClient() as http:
            os.kill(os.getpid(), signal.SIGHUP)
            assert (await http.get(where + "/health/ready")).status_code == 200 and not task.done()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_second_signal_does_not_wait() -> None:
    async with running(None, shutdown_timeout=3600) as (server, where, task), httpx.AsyncClient() as http:
        old = asyncio.ensure_future(http.post(where + "/v1/completions", json={"prompt": "a", "stream": True}))
        while not server.port.submitted:
            await asyncio.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, 100)
        await asyncio.gather(old, return_exceptions=True)
        assert server.port.closed


def test_a_port_in_use_is_reported_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfig, match=rf"cannot listen on 127\.0\.0\.1:{port}.*choose another"):
            listen("127.0.0.1", port)


def test_an_address_of_another_machine_is_reported() -> None:
    with pytest.raises(InvalidConfig, match=r"cannot listen on nowhere\.invalid:1"):
        listen("nowhere.invalid", 1)


async def test_an_engine_that_cannot_start_is_closed_and_reported() -> None:
    class Broken(FakePort):
        async def start(self) -> Description:
            raise InvalidConfig("no such device")

    async with served() as server:
        server.backend.engine = port = Broken()
        with pytest.raises(InvalidConfig, match="no such device"):
            await serve(server.app, server.backend, listen("127.0.0.1", 0))
        assert port.closed


class Recorder:
    """A backend and a batch service that record in which order they are called, and may fail at one of the calls."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self.fails = fails

    async def _record(self, word: str) -> None:
        self.calls.append(word)
        if word == self.fails:
            raise InvalidConfig(f"{word} failed")

    def batch_service(self) -> Any:
        return SimpleNamespace(start=partial(self._record, "batches.start"), stop=partial(self._record, "batches.stop"))

    def backend(self) -> Any:
        async def drain(timeout: float) -> None:
            await self._record(f"backend.drain {timeout:g}")

        return SimpleNamespace(
            start=partial(self._record, "backend.start"), drain=drain, close=partial(self._record, "backend.close")
        )


async def not_asked(scope: object, receive: object, send: object) -> None:
    raise AssertionError("no request came")


async def test_the_batch_service_starts_after_the_backend_and_stops_before_it_drains() -> None:
    recorder, sock = Recorder(), listen("127.0.0.1", 0)
    where = url(sock)

    def ready(at: str) -> None:
        assert at == where
        with socket.create_connection(sock.getsockname()):
            recorder.calls.append("ready")
        os.kill(os.getpid(), signal.SIGTERM)

    await asyncio.wait_for(
        serve(
            not_asked,
            recorder.backend(),
            sock,
            batch_service=recorder.batch_service(),
            shutdown_timeout=7,
            log_level="error",
            on_ready=ready,
        ),
        100,
    )
    begun = ["backend.start", "batches.start", "ready"]
    assert recorder.calls == [*begun, "batches.stop", "backend.drain 7", "batches.stop", "backend.close"]
    assert sock.fileno() == -1


@pytest.mark.parametrize("fails", ["backend.start", "batches.start"])
async def test_what_fails_to_start_is_stopped_and_nothing_listens(fails: str) -> None:
    recorder, sock = Recorder(fails), listen("127.0.0.1", 0)
    with pytest.raises(InvalidConfig, match=fails):
        await serve(not_asked, recorder.backend(), sock, batch_service=recorder.batch_service(), log_level="error")
    begun = ["backend.start", "batches.start"]
    assert recorder.calls == [*begun[: begun.index(fails) + 1], "batches.stop", "backend.close"]
    assert sock.fileno() == -1


async def test_a_batch_service_that_fails_to_stop_does_not_keep_the_backend_from_draining_and_closing() -> None:
    recorder, sock = Recorder("batches.stop"), listen("127.0.0.1", 0)
    with pytest.raises(InvalidConfig, match=r"batches\.stop failed"):
        await asyncio.wait_for(
            serve(
                not_asked,
                recorder.backend(),
                sock,
                batch_service=recorder.batch_service(),
                log_level="error",
                on_ready=lambda at: os.kill(os.getpid(), signal.SIGTERM),
            ),
            100,
        )
    stopped = ["batches.stop", "backend.drain 30", "batches.stop", "backend.close"]
    assert recorder.calls == ["backend.start", "batches.start", *stopped]
    assert sock.fileno() == -1


async def test_a_drain_that_fails_is_one_line_of_the_log_and_the_server_ends(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder("backend.drain 30")
    await asyncio.wait_for(
        serve(
            not_asked,
            recorder.backend(),
            listen("127.0.0.1", 0),
            log_level="error",
            on_ready=lambda at: os.kill(os.getpid(), signal.SIGTERM),
        ),
        100,
    )
    assert recorder.calls == ["backend.start", "backend.drain 30", "backend.close"]
    gc.collect()
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("the shutdown was not clean: InvalidConfig: backend.drain 30 failed")
    assert not caplog.messages


async def test_large_blocks_go_back_and_long_work_has_four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the backend starts, which makes both."""
    sizes: list[int] = []
    names: set[str] = set()
    monkeypatch.setattr("quire.heap.mapped_from", sizes.append)
    recorder, together = Recorder(), threading.Barrier(4)

    def work() -> str:
        together.wait(100)  # as many at once
        return threading.current_thread().name

    async def start() -> None:
        assert sizes == [256 << 10]
        names.update(await asyncio.gather(*(asyncio.to_thread(work) for _ in range(8))))
        raise InvalidConfig("seen")

    backend = recorder.backend()
    backend.start = start
    with pytest.raises(InvalidConfig, match="seen"):
        await serve(
            not_asked, backend, listen("127.0.0.1", 0), batch_service=recorder.batch_service(), log_level="error"
        )
    assert names == {f"server_{i}" for i in range(4)}


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://0.0.0.0:8000", "http://127.0.0.1:8000"),
        ("https://[::]:8443", "https://[::1]:8443"),
        ("https://[::1]:8443", "https://[::1]:8443"),
        ("http://10.0.0.0:80", "http://10.0.0.0:80"),
    ],
)
def test_the_address_file_has_an_address_that_this_machine_reaches(address: str, local: str, tmp_path: Path) -> None:
    file = tmp_path / "address"
    with _written(str(file), address) as shown:
        assert (shown, file.read_text()) == (address, local)
    assert not file.exists()


async def test_a_server_whose_address_file_cannot_be_written_does_not_start(tmp_path: Path) -> None:
    for file, why in ((tmp_path / "no folder" / "address", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(InvalidConfig, match=re.escape(f"address_file: {file} cannot be written: {why}")) as caught:
            async with served(answers) as server:
                await serve(server.app, server.backend, listen("127.0.0.1", 0), address_file=str(file))
        assert caught.value.param == "address_file"
    (tmp_path / "old").write_text("http://127.0.0.1:1")
    for name, there in (("new", False), ("old", True)):
        _check_writable(str(tmp_path / name))
        assert (tmp_path / name).exists() is there


def test_an_address_file_that_can_no_longer_be_written_stops_no_server(tmp_path: Path) -> None:
    with _written(str(tmp_path / "no folder" / "address"), "http://127.0.0.1:1") as shown:
        assert shown == "http://127.0.0.1:1"


async def test_a_server_with_too_few_descriptors_says_how_many_clients_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, said = sys.modules["quire.server.serve"], list[str]()
    monkeypatch.setattr(module, "raise_descriptor_limit", lambda: 128)
    monkeypatch.setattr(module, "log", SimpleNamespace(warning=lambda text, *values: said.append(text % values)))
    for wanted in (48, 100):
        async with running(timeouts=Timeouts(connections=wanted)):
            pass
    [line] = said
    assert line.startswith("at most 48 clients are connected at once, not 100 (--max-connections)")
