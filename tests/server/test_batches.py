"""Files and batches over a scripted engine: what is refused, what is answered, and what a restart finds."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.errors import Interrupted, InvalidConfig, Overloaded, TooLarge, Unavailable
from quire.server.app import create_app
from quire.server.batch_api import batches, files
from quire.server.batch_api.batches import Batches
from quire.server.batch_api.runner import BatchService
from quire.server.batch_api.store import Store, new_id
from quire.server.endpoints import answerer
from quire.server.folder import WriteFailed
from quire.server.limits import Limits
from quire.types import BACKGROUND
from tests.server.doubles import ANSWER, Served, check_error, served

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


def line(id: str, url: str = CHAT, method: str = "POST", **body: Any) -> dict[str, Any]:
    request = {"messages": [{"role": "user", "content": id}], "max_tokens": 64, **body}
    return {"custom_id": id, "method": method, "url": url, "body": request}


def jsonl(*lines: Any) -> bytes:
    return b"".join(x if isinstance(x, bytes) else json.dumps(x).encode() + b"\n" for x in lines)


class Office:
    """A server with a batch service, and what its clients do."""

    def __init__(self, client: httpx.AsyncClient, server: Served, service: BatchService) -> None:
        self.client, self.server, self.service = client, server, service

    async def upload(self, data: bytes, **fields: str) -> httpx.Response:
        return await self.client.post(
            "/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch", **fields}
        )

    async def begin(self, *lines: Any, endpoint: str = CHAT, **rest: Any) -> dict[str, Any]:
        file = (await self.upload(jsonl(*lines))).json()["id"]
        body = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h", **rest}
        response = await self.client.post("/v1/batches", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def about(self, id: str) -> dict[str, Any]:
        return dict((await self.client.get(f"/v1/batches/{id}")).json())

    async def until(self, id: str, *states: str) -> dict[str, Any]:
        async with asyncio.timeout(200):
            while (batch := await self.about(id))["status"] not in states:
                await asyncio.sleep(0.01)
        return batch

    async def lines(self, file: str) -> list[dict[str, Any]]:
        text = (await self.client.get(f"/v1/files/{file}/content")).text
        return [json.loads(one) for one in text.splitlines()]


@asynccontextmanager
async def office(
    folder: Path,
    *,
    limits: Limits | None = None,
    width: int = 3,
    wrap: Callable[[Any], Any] = lambda answer: answer,
    **rest: Any,
) -> AsyncIterator[Office]:
    limits = Limits() if limits is None else limits
    async with served(**rest) as server:
        service = BatchService(folder, wrap(answerer(server.backend, limits, "quire-9.9")), limits, width=width)
        app = create_app(server.backend, limits=limits, batch_service=service)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as client:
            await service.start()
            try:
                yield Office(client, server, service)
            finally:
                await service.stop()


async def test_every_line_is_answered_once_and_as_the_endpoint_would(tmp_path: Path) -> None:
    async with office(tmp_path) as here:
        batch = await here.begin(*(line(f"q{i}") for i in range(9)), line("bad", n=0), metadata={"who": "me"})
        assert (batch["status"], batch["object"]) == ("validating", "batch")
        batch = await here.until(batch["id"], "completed")
        assert batch["request_counts"] == {"total": 10, "completed": 9, "failed": 1}
        assert batch["metadata"] == {"who": "me"}
        assert batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
        made = await here.lines(batch["output_file_id"])
        assert sorted(one["custom_id"] for one in made) == [f"q{i}" for i in range(9)]
        for one in made:
            assert one["error"] is None and one["response"]["status_code"] == 200
            assert one["response"]["body"]["choices"][0]["message"]["content"] == ANSWER
        [bad] = await here.lines(batch["error_file_id"])
        assert bad["response"]["status_code"] == 400 and bad["response"]["body"]["error"]["param"] == "n"
        assert {request.priority for request in here.server.port.submitted} == {BACKGROUND}
        about = (await here.client.get(f"/v1/files/{batch['output_file_id']}")).json()
        assert about["purpose"] == "batch_output" and about["bytes"] > 0


@pytest.mark.parametrize(
    ("url", "body"),
    [("/v1/completions", {"prompt": "the"}), ("/v1/responses", {"input": "the"})],
)
async def test_other_endpoints_take_batches_too(tmp_path: Path, url: str, body: dict[str, Any]) -> None:
    async with office(tmp_path) as here:
        one = {"custom_id": "a", "method": "POST", "url": url, "body": body}
        batch = await here.until((await here.begin(one, endpoint=url))["id"], "completed")
        [made] = await here.lines(batch["output_file_id"])
        assert ANSWER[:3] in json.dumps(made["response"]["body"])


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((), "no requests"),
        ((line("a"), line("a")), "twice"),
        ((b"nothing\n",), "not a request"),
        ((line("a", method="GET"),), "method must be POST"),
        ((line("a", url="/v1/completions"),), "url must be"),
        (({**line("a"), "body": "x" * 600},), "at most 512 bytes"),
        ((line("é" * 513),), "custom_id has at most 512 characters"),
    ],
)
async def test_an_input_with_a_fault_fails_whole_and_says_where(
    tmp_path: Path, lines: tuple[Any, ...], words: str
) -> None:
    limits = Limits(max_body_bytes=512 if "bytes" in words else Limits().max_body_bytes)
    async with office(tmp_path, limits=limits) as here:
        batch = await here.until((await here.begin(*lines))["id"], "failed")
        [error] = batch["errors"]["data"][:1]
        assert words in error["message"] and here.server.port.submitted == []
        assert error["line"] == (len(lines) or None)


async def test_lines_are_numbered_as_an_editor_does_however_many_blank_ones_there_are(tmp_path: Path) -> None:
    blank = b"\n" * 5000 + b"  \n\r\n"
    async with office(tmp_path) as here:
        batch = await here.until((await here.begin(blank, line("a"), b"\n\n", b"nothing\n"))["id"], "failed")
        [error] = batch["errors"]["data"]
        assert error["line"] == 5000 + 2 + 1 + 2 + 1


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-no"}, "id"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": 3}}, "metadata"),
        ({"metadata": {"a" * 65: "x"}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"other": 3}, "other"),
    ],
)
async def test_a_batch_that_cannot_be_is_refused_by_name(tmp_path: Path, change: dict[str, Any], param: str) -> None:
    async with office(tmp_path) as here:
        file = (await here.upload(jsonl(line("a")))).json()["id"]
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h", **change}
        response = await here.client.post("/v1/batches", json=body)
        error = check_error(response, 404 if param == "id" else 400)
        assert error["param"].startswith(param)


async def test_custom_ids_metadata_and_lines_may_be_as_long_as_the_limits_say(tmp_path: Path) -> None:
    metadata = {f"{i:064}": "x" * 512 for i in range(16)}
    longest = jsonl(line("i" * 512)).strip().ljust((1 << 14) - 1) + b"\n"
    async with office(tmp_path, limits=Limits(max_body_bytes=1 << 14)) as here:
        batch = await here.until((await here.begin(longest, metadata=metadata))["id"], "completed", "failed")
        assert (batch["status"], batch["errors"], batch["metadata"]) == ("completed", None, metadata)
        batch = await here.until((await here.begin(b" " + longest))["id"], "completed", "failed")
        assert batch["errors"]["data"][0]["message"] == "a line has at most 16384 bytes"


@pytest.mark.parametrize(
    "broken",
    [b'{"custom_id": "\xff"}\n', b'{"custom_id": "b", "method": "POST", "url": "x", "body": ' + b"[" * 100_000 + b"\n"],
    ids=["not UTF-8", "nested too deep"],
)
async def test_a_line_that_no_parser_takes_fails_the_batch_and_is_named(tmp_path: Path, broken: bytes) -> None:
    async with office(tmp_path) as here:
        batch = await here.until((await here.begin(line("a"), broken))["id"], "failed", "completed")
        [error] = batch["errors"]["data"]
        assert (error["code"], error["line"]) == ("invalid_line", 2) and "not a request" in error["message"]


async def test_a_cancelled_batch_keeps_what_was_answered(tmp_path: Path) -> None:
    began = asyncio.Event()

    def slow(answer: Any) -> Any:
        async def one(path: str, body: bytes) -> Any:
            if b"q5" in body:
                began.set()
                await asyncio.sleep(60)
            return await answer(path, body)

        return one

    async with office(tmp_path, wrap=slow, width=1) as here:
        batch = await here.begin(*(line(f"q{i}") for i in range(9)))
        await asyncio.wait_for(began.wait(), 100)
        busy = await here.client.delete(f"/v1/files/{batch['input_file_id']}")
        check_error(busy, 400, words=batch["id"])
        assert (await here.client.post(f"/v1/batches/{batch['id']}/cancel")).json()["status"] == "cancelling"
        batch = await here.until(batch["id"], "cancelled")
        assert [one["custom_id"] for one in await here.lines(batch["output_file_id"])] == [f"q{i}" for i in range(5)]
        check_error(await here.client.post(f"/v1/batches/{batch['id']}/cancel"), 400, words="already cancelled")
        assert (await here.client.delete(f"/v1/files/{batch['input_file_id']}")).json()["deleted"]


async def test_a_batch_that_is_cancelled_as_its_last_line_ends_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last answer and the files, a client is still told that it is being cancelled."""
    finish = Batches.finish
    reached, go_on = threading.Event(), threading.Event()

    def late(self: Batches, batch: dict[str, Any], status: str) -> None:
        reached.set()
        assert go_on.wait(100)
        finish(self, batch, status)

    monkeypatch.setattr(Batches, "finish", late)
    async with office(tmp_path) as here:
        id = (await here.begin(line("a")))["id"]
        await asyncio.to_thread(reached.wait, 100)
        try:
            assert (await here.client.post(f"/v1/batches/{id}/cancel")).json()["status"] == "cancelling"
        finally:
            go_on.set()
        batch = await here.until(id, "completed", "cancelled")
        assert (batch["status"], batch["completed_at"]) == ("cancelled", None)
        assert [one["custom_id"] for one in await here.lines(batch["output_file_id"])] == ["a"]


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_an_answer_that_was_made_is_recorded_though_its_batch_ends(tmp_path: Path, how: str) -> None:
    """Also where it waits for its turn on the disk, behind other work."""
    disk, made = threading.Event(), asyncio.Event()

    def then_wait(answer: Any) -> Any:
        async def one(path: str, body: bytes) -> Any:
            made_now = await answer(path, body)
            here.service._thread.submit(disk.wait, 100)
            made.set()
            return made_now

        return one

    async with office(tmp_path, wrap=then_wait, width=1) as here:
        id = (await here.begin(line("a"), line("b")))["id"]
        await asyncio.wait_for(made.wait(), 100)
        while not here.service._thread._work_queue.qsize():
            await asyncio.sleep(0.001)
        if how == "cancel":
            assert (await here.client.post(f"/v1/batches/{id}/cancel")).json()["status"] == "cancelling"
            ending = asyncio.create_task(here.until(id, "cancelled"))
            [workers] = [task for task in asyncio.all_tasks() if "_watch" in repr(task.get_coro())]
            await asyncio.wait([workers], timeout=100)
        else:
            ending = asyncio.create_task(here.service.stop())  # type: ignore[arg-type]
            await asyncio.sleep(0.01)
        disk.set()
        await ending
    journals = [*(tmp_path / "batches").glob("*.output"), *(tmp_path / "files").glob("*.data")]
    assert sum(path.read_bytes().count(b'"custom_id":"a"') for path in journals) == 1


async def test_a_batch_goes_on_where_the_last_server_stopped(tmp_path: Path) -> None:
    """A journal whose last line was cut short by a kill, and documents half written."""
    stopped = asyncio.Event()

    def until_four(answer: Any) -> Any:
        async def one(path: str, body: bytes) -> Any:
            if b"q4" in body:
                stopped.set()
                await asyncio.sleep(60)
            return await answer(path, body)

        return one

    async with office(tmp_path, wrap=until_four, width=1) as here:
        batch = await here.begin(*(line(f"q{i}") for i in range(8)))
        await asyncio.wait_for(stopped.wait(), 100)
    journal = tmp_path / "batches" / f"{batch['id']}.output"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-40])
    half = "dead" * 6
    (tmp_path / "batches" / f"batch_{half}.new").write_bytes(b"{")
    (tmp_path / "files" / f"file-{half}.data").write_bytes(b"{")
    async with office(tmp_path) as here:
        batch = await here.until(batch["id"], "completed")
        made = await here.lines(batch["output_file_id"])
        assert sorted(one["custom_id"] for one in made) == [f"q{i}" for i in range(8)]
        assert len(here.server.port.submitted) == 5
    assert not list(tmp_path.rglob(f"*{half}*"))


@pytest.mark.parametrize("when", ["put", "replace", "second put", "second replace", "set_status"])
async def test_killed_while_it_finishes_a_batch_has_its_files_once(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """Nothing after it happens."""

    async with office(tmp_path) as here:
        batches = here.service._batches

        def killed(*args: Any, **rest: Any) -> None:
            raise Killed

        def then(inner: Callable[..., Any], only: Callable[..., bool], first: int) -> Callable[..., Any]:
            """`inner`, but its call number `first` of those that count is where the server is killed."""
            seen = 0

            def call(*args: Any) -> Any:
                nonlocal seen
                seen += only(*args)
                return killed() if only(*args) and seen == first else inner(*args)

            return call

        batch = await here.begin(line("a"), line("b", n=0))
        await here.service.stop()
        document = batches.store.get(batch["id"])
        batches.record_answer(document, "a", 200, {}, "req")
        batches.record_answer(document, "b", 400, {}, "req")
        first = 2 if when.startswith("second") else 1
        if when.endswith("put"):
            monkeypatch.setattr(batches.files, "put", then(batches.files.put, lambda *given: True, first))
        elif when.endswith("replace"):  # the file's document is there, its data not yet
            moved = then(Path.replace, lambda path, target: path.suffix in (".output", ".errors"), first)
            monkeypatch.setattr(Path, "replace", lambda path, target: moved(path, target))
        else:
            turn = batches.set_status
            monkeypatch.setattr(
                batches,
                "set_status",
                lambda b, status, **rest: turn(b, status, **rest) if status == "finalizing" else killed(),
            )
        with pytest.raises(Killed):
            batches.finish(document, "completed")
    monkeypatch.undo()
    async with office(tmp_path) as here:
        batch = await here.until(batch["id"], "completed")
        assert [one["custom_id"] for one in await here.lines(batch["output_file_id"])] == ["a"]
        assert [one["custom_id"] for one in await here.lines(batch["error_file_id"])] == ["b"]
        assert here.server.port.submitted == []
        files = (await here.client.get("/v1/files")).json()["data"]
        assert len(files) == 3 == len(list((tmp_path / "files").glob("*.data")))
        for one in files:
            content = (await here.client.get(f"/v1/files/{one['id']}/content")).content
            assert len(content) == one["bytes"] > 0
    assert not list((tmp_path / "batches").glob("*.output")) and not list((tmp_path / "batches").glob("*.errors"))


@pytest.mark.parametrize("status", ["cancelled", "expired"])
async def test_a_batch_whose_server_was_killed_while_finishing_it_ends_as_it_was_going_to(
    tmp_path: Path, status: str
) -> None:
    async with office(tmp_path) as here:
        await here.service.stop()
        batch = await here.begin(line("a"), line("b"))
        batches = here.service._batches
        batches.record_answer(batch, "a", 200, {}, "req")
        batches.set_status(batches.store.get(batch["id"]), "finalizing", finishes_as=status)
    async with office(tmp_path) as here:
        batch = await here.until(batch["id"], "completed", "cancelled", "expired")
        assert batch["status"] == status and batch[f"{status}_at"] and batch["completed_at"] is None
        assert here.server.port.submitted == []


async def test_lines_left_when_the_completion_window_ends_are_reported_as_expired(tmp_path: Path) -> None:
    async with office(tmp_path) as here:
        await here.service.stop()
        batch = await here.begin(line("a"), line("b"))
        here.service._batches.store.put({**here.service._batches.store.get(batch["id"]), "expires_at": 1})
    async with office(tmp_path) as here:
        batch = await here.until(batch["id"], "expired")
        missed = await here.lines(batch["error_file_id"])
        assert {one["custom_id"]: one["error"]["code"] for one in missed} == dict.fromkeys("ab", "batch_expired")


async def test_a_batch_whose_every_line_is_answered_is_complete_even_when_the_window_has_closed(tmp_path: Path) -> None:
    async with office(tmp_path) as here:
        await here.service.stop()
        batch = await here.begin(line("a"), line("b", n=0))
        batches = here.service._batches
        document = batches.store.get(batch["id"])
        batches.check(document)
        batches.set_status(document, "in_progress")
        batches.record_answer(document, "a", 200, {}, "req")
        batches.record_answer(document, "b", 400, {}, "req")
        batches.store.put({**document, "expires_at": 1})
    async with office(tmp_path) as here:
        batch = await here.until(batch["id"], "completed", "expired")
        assert batch["status"] == "completed" and batch["expired_at"] is None
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        assert [one["custom_id"] for one in await here.lines(batch["output_file_id"])] == ["a"]
        assert [one["custom_id"] for one in await here.lines(batch["error_file_id"])] == ["b"]
        assert here.server.port.submitted == []


async def test_a_line_that_breaks_something_costs_only_itself(tmp_path: Path) -> None:
    def broken(answer: Any) -> Any:
        async def one(path: str, body: bytes) -> Any:
            if b"q1" in body:
                raise ZeroDivisionError("/secret")
            return await answer(path, body)

        return one

    async with office(tmp_path, wrap=broken) as here:
        batch = await here.until((await here.begin(*(line(f"q{i}") for i in range(3))))["id"], "completed")
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        [bad] = await here.lines(batch["error_file_id"])
        assert bad["response"]["status_code"] == 500 and "secret" not in json.dumps(bad)


@pytest.mark.parametrize("error", [Unavailable("the engine is not ready"), Overloaded("the queue is full")])
async def test_a_line_refused_while_the_server_is_busy_or_not_ready_is_asked_again(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.server.batch_api.runner._PAUSE", 0.01)
    refused: list[bytes] = []

    def twice(answer: Any) -> Any:
        async def one(path: str, body: bytes) -> Any:
            if refused.count(body) < 2:
                refused.append(body)
                raise error
            return await answer(path, body)

        return one

    async with office(tmp_path, wrap=twice) as here:
        batch = await here.until((await here.begin(line("a"), line("b")))["id"], "completed")
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        assert len(refused) == 4


async def test_a_line_that_stops_the_engine_each_time_is_given_up_and_costs_no_other(tmp_path: Path) -> None:
    under_way: dict[str, asyncio.Future[None]] = {}
    requested: list[str] = []

    def wrap(answer: Any) -> Any:
        async def stops(path: str, body: bytes) -> Any:
            id = json.loads(body)["messages"][0]["content"]
            requested.append(id)
            under_way[id] = asyncio.get_running_loop().create_future()
            done, _ = await asyncio.wait([under_way[id]], timeout=0.05)
            if id == "bad":
                for one in under_way.values():
                    if not one.done():
                        one.set_result(None)
                raise Interrupted("the engine stopped")
            if done:
                raise Interrupted("the engine stopped")
            return await answer(path, body)

        return stops

    async with office(tmp_path, wrap=wrap) as here:
        batch = await here.begin(line("a"), line("bad"), line("b"), line("c"), line("d"))
        batch = await here.until(batch["id"], "completed")
        assert batch["request_counts"] == {"total": 5, "completed": 4, "failed": 1}
        [failed] = await here.lines(batch["error_file_id"])
        assert failed["custom_id"] == "bad" and failed["response"]["status_code"] == 503
        assert failed["response"]["body"]["error"]["message"] == "the engine stopped"
    assert requested.count("bad") == 4 and max(requested.count(id) for id in "abcd") <= 3


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_part_of_it(tmp_path: Path) -> None:
    store, id = Store(tmp_path, "batch"), new_id("batch_")
    store.add(id, ".output", b"one\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (7, limits[1]))  # then as much is written as fits
        with pytest.raises(WriteFailed, match="cannot write it to disk"):
            store.add(id, ".output", b"three\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    store.add(id, ".output", b"two\n")
    assert store.path(id, ".output").read_bytes() == b"one\ntwo\n"


async def test_while_the_disk_is_full_batches_wait_and_then_answer_every_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.server.batch_api.runner._DISK", 0.01)
    full = iter([True] * 5)
    add, put = Store.add, Store.put

    def added(self: Store, id: str, suffix: str, line: bytes) -> None:
        if next(full, False):
            raise WriteFailed("full")
        add(self, id, suffix, line)

    def replaced(self: Store, document: dict[str, Any], *data: Path, **changes: Any) -> None:
        if changes.get("status") in ("in_progress", "finalizing", "completed") and next(full, False):
            raise WriteFailed("full")
        put(self, document, *data, **changes)

    monkeypatch.setattr(Store, "add", added)
    monkeypatch.setattr(Store, "put", replaced)
    async with office(tmp_path) as here:
        batch = await here.until((await here.begin(*(line(f"q{i}") for i in range(9))))["id"], "completed", "failed")
        assert (batch["status"], batch["request_counts"]["completed"], next(full, None)) == ("completed", 9, None)
        made = await here.lines(batch["output_file_id"])
        assert sorted(one["custom_id"] for one in made) == [f"q{i}" for i in range(9)]


async def test_an_upload_that_does_not_fit_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with office(tmp_path) as here:
        monkeypatch.setattr("os.fsync", sync)
        refused = await here.upload(jsonl(line("a")))
        monkeypatch.undo()
        error = check_error(refused, 503, words="No space left on device")
        assert error["code"] == "storage"
        assert [path.name for path in tmp_path.rglob("file*-*")] == []
        assert (await here.client.get("/v1/files")).json()["data"] == []
        await here.until((await here.begin(line("a")))["id"], "completed")


async def test_pages_of_other_sites_upload_and_cancel_nothing(tmp_path: Path) -> None:
    """A form can send both to a server on its reader's machine without the browser asking."""
    async with office(tmp_path) as here:
        for site, status in (("cross-site", 403), ("same-origin", 200), ("none", 200)):
            headers = {"sec-fetch-site": site}
            sent = {"files": {"file": ("in.jsonl", jsonl(line("a")))}, "data": {"purpose": "batch"}}
            assert (await here.client.post("/v1/files", headers=headers, **sent)).status_code == status
        batch = await here.begin(*(line(f"q{i}") for i in range(9)))
        refused = await here.client.post(f"/v1/batches/{batch['id']}/cancel", headers={"sec-fetch-site": "cross-site"})
        assert check_error(refused, 403, words="other origins")["code"] == "cross_site"


async def test_a_file_may_begin_with_a_mark_of_its_byte_order(tmp_path: Path) -> None:
    async with office(tmp_path) as here:
        file = (await here.upload(b"\xef\xbb\xbf" + jsonl(line("a"), line("b")))).json()["id"]
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        batch = (await here.client.post("/v1/batches", json=body)).json()
        assert (await here.until(batch["id"], "completed", "failed"))["request_counts"]["completed"] == 2


async def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MOST_KEPT", 3)
    monkeypatch.setattr(files, "MOST_FILES", 12)
    async with office(tmp_path) as here:
        made = [(await here.until((await here.begin(line("x")))["id"], "completed"))["id"] for _ in range(5)]
        kept = (await here.client.get("/v1/batches")).json()["data"]
        assert len(kept) == 3 and made[-1] in {one["id"] for one in kept}
        assert len([*(tmp_path / "batches").glob("*.json")]) == 3
        for _ in range(2):
            assert (await here.upload(b"x")).status_code == 200
        check_error(await here.upload(b"x"), 400, words="12 files")


async def test_an_old_batch_that_cannot_be_deleted_does_not_refuse_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has begun, and a client would begin it again."""

    def full(self: Store, id: str) -> None:
        raise WriteFailed("read-only")

    monkeypatch.setattr(batches, "MOST_KEPT", 1)
    async with office(tmp_path) as here:
        await here.until((await here.begin(line("x")))["id"], "completed")
        with monkeypatch.context() as patch:
            patch.setattr(Store, "delete", full)
            await here.until((await here.begin(line("y")))["id"], "completed")
        await here.begin(line("z"))
        assert len((await here.client.get("/v1/batches")).json()["data"]) == 1


async def test_uploads_that_come_at_once_do_not_exceed_the_most_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_FILES", 2)
    async with office(tmp_path) as here:
        sent = await asyncio.gather(*(here.upload(b"x") for _ in range(4)))
        assert sorted(one.status_code for one in sent) == [200, 200, 400, 400]
        assert len((await here.client.get("/v1/files")).json()["data"]) == 2


async def test_a_file_that_is_deleted_while_it_is_asked_for_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = Path.stat

    async with office(tmp_path) as here:
        id = (await here.upload(b"x")).json()["id"]

        def late(self: Path, **rest: Any) -> os.stat_result:
            if self.suffix == ".data" and threading.current_thread() is not threading.main_thread():
                here.service._files._store.delete(id)
            return stat(self, **rest)

        monkeypatch.setattr(Path, "stat", late)
        check_error(await here.client.get(f"/v1/files/{id}/content"), 404, words=id)


async def test_concurrent_uploads_share_the_space_for_files(tmp_path: Path) -> None:
    store = Store(tmp_path, "file")
    incoming = files.Incoming(store, 100)
    one, other = (tmp_path / name for name in ("one", "other"))
    with one.open("wb") as first, other.open("wb") as second:
        incoming.begin(one)
        incoming.begin(other)
        incoming.write(one, first, b"x" * 60)
        incoming.write(other, second, b"x" * 30)
        with pytest.raises(TooLarge, match="no space"):
            incoming.write(other, second, b"x" * 20)
        incoming.end(one)
        incoming.write(other, second, b"x" * 20)
    assert incoming.space == 50


async def test_uploads_that_are_over_take_no_room_beyond_that_of_their_files(tmp_path: Path) -> None:
    """Whether they failed, or their files were kept and deleted."""
    async with office(tmp_path) as here:
        incoming = here.service._files._incoming
        incoming._max_total = 10_000
        for _ in range(4):
            id = (await here.upload(b"x" * 4000)).json()["id"]
            assert (await here.client.delete(f"/v1/files/{id}")).status_code == 200
            check_error(await here.upload(b"x" * 4000, purpose="assistants"), 400, "purpose")
        assert incoming.space == 10_000


async def test_files_are_listed_by_pages_and_deleted(tmp_path: Path) -> None:
    async with office(tmp_path) as here:
        ids = [(await here.upload(b"x" * i)).json()["id"] for i in range(1, 6)]
        listed = (await here.client.get("/v1/files", params={"limit": 2})).json()
        assert len(listed["data"]) == 2 and listed["has_more"]
        rest = (await here.client.get("/v1/files", params={"after": listed["last_id"]})).json()
        assert {one["id"] for one in listed["data"] + rest["data"]} == set(ids) and not rest["has_more"]
        assert (await here.client.delete(f"/v1/files/{ids[0]}")).json() == {
            "id": ids[0],
            "object": "file",
            "deleted": True,
        }
        check_error(await here.client.get(f"/v1/files/{ids[0]}"), 404, words=ids[0])
        check_error(await here.client.get("/v1/files", params={"limit": "no"}), 400, "limit")
        check_error(await here.client.get("/v1/files", params={"after": "no"}), 400, "after")
        check_error(await here.client.get("/v1/files", params={"order": "no"}), 400, "order", words="asc or desc")
        both = [(await here.client.get("/v1/files", params={"order": one})).json()["data"] for one in ("asc", "desc")]
        assert both[0] == both[1][::-1] and len(both[0]) == 4


@pytest.mark.parametrize(("fields", "param"), [({"purpose": "assistants"}, "purpose"), ({"expires": "1"}, "expires")])
async def test_an_upload_that_means_something_else_is_refused(
    tmp_path: Path, fields: dict[str, str], param: str
) -> None:
    async with office(tmp_path) as here:
        check_error(await here.upload(b"x", **fields), 400, param)
        assert (await here.client.get("/v1/files")).json()["data"] == []
    assert not [*(tmp_path / "files").iterdir()]


async def test_one_folder_has_one_server(tmp_path: Path) -> None:
    async with office(tmp_path) as here:
        with pytest.raises(InvalidConfig, match="--batch-dir"):
            BatchService(tmp_path, answerer(here.server.backend, Limits(), "x"), Limits(), width=1)


async def test_without_a_folder_batches_are_a_404_that_names_the_option() -> None:
    async with served() as server:
        for path in ("/v1/files", "/v1/files/x", "/v1/files/x/content", "/v1/batches", "/v1/batches/x/cancel"):
            check_error(await server.client.get(path), 404, words="--batch-dir")
