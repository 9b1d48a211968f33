"""The folder of stored responses: restarts, damage, full disks, other servers; and what a long conversation costs."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from quire.errors import InvalidConfig
from quire.frontend.offload import LARGE
from quire.observability.observer import FrontendObserver
from quire.server.error_responses import NotFound
from quire.server.response_store import FORMAT, Content, Entry, ResponseStore
from tests.server.doubles import ANSWER, check_error
from tests.server.test_response_state import slow, stateful, until

pytestmark = pytest.mark.anyio


def number(i: int) -> str:
    return f"resp_{i:032x}"


def entry(i: int, previous: int | None = None, owner: str = "", **rest: Any) -> Entry:
    before = None if previous is None else number(previous)
    return Entry(**{"id": number(i), "owner": owner, "created": i, "status": "completed", "previous": before, **rest})


CONTENT = Content(b'"hi"', b'[{"type":"message","role":"assistant","content":"ho"}]', b'{"id":"x","output":null}')


def store(folder: Path, **bounds: Any) -> ResponseStore:
    return ResponseStore(folder=folder, **bounds)


# ---------------------------------------------------------------- restarts


async def test_conversations_outlive_the_server_and_keys_that_change_places(tmp_path: Path) -> None:
    async with stateful(folder=tmp_path, keys=("a", "b")) as here:
        first = await here.client("a").responses.create(model="tiny", input="one")
        assert stat.S_IMODE(tmp_path.stat().st_mode) & 0o077 == 0
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(files) == 3 and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
        for path in files:
            assert b"secret" not in path.read_bytes()
    async with stateful(folder=tmp_path, keys=("new", "b", "a")) as here:
        assert (await here.client("a").responses.retrieve(first.id)).to_dict() == first.to_dict()
        second = await here.client("a").responses.create(model="tiny", input="two", previous_response_id=first.id)
        for other in ("b", "new"):
            with pytest.raises(openai.NotFoundError):
                await here.client(other).responses.retrieve(first.id)
        assert ANSWER in here.prompt() and "one" in here.prompt()
    async with stateful(folder=tmp_path) as here:
        with pytest.raises(openai.NotFoundError):
            await here.client().responses.retrieve(second.id)


async def test_events_outlive_the_server(tmp_path: Path) -> None:
    async with stateful(folder=tmp_path) as here:
        client = here.client()
        made = await client.responses.create(model="tiny", input="hi", background=True, stream=True)
        events: list[Any] = [event async for event in made]
        await until(client, events[0].response.id, "completed")
    async with stateful(folder=tmp_path) as here:
        again = await here.client().responses.retrieve(events[-1].response.id, stream=True, starting_after=1)
        assert [event.to_dict() async for event in again] == [event.to_dict() for event in events[2:]]


def test_a_smaller_bound_evicts_the_oldest_at_the_start(tmp_path: Path) -> None:
    first = store(tmp_path)
    for i in range(10):
        first.put(entry(i), CONTENT)
    first.close()
    second = store(tmp_path, most=3)
    assert len(second) == 3 == len(list((tmp_path / "responses").iterdir()))
    assert second.find(number(9), "").created == 9
    with pytest.raises(NotFound):
        second.find(number(6), "")
    second.close()


# ---------------------------------------------------------------- damage


def damages(path: Path) -> dict[str, Any]:
    whole = path.read_bytes()
    return {
        "empty": b"",
        "cut in the head": whole[:20],
        "cut in the content": whole[:-3],
        "longer": whole + b"x",
        "another byte": whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:],
        "not JSON": b"\xff" + whole[1:],
        "deep": b"[" * 100_000 + b"\n",
        "of another id": whole.replace(number(1).encode(), number(2).encode()),
        "null": b"null\n",
    }


DAMAGES = (
    *("empty", "cut in the head", "cut in the content", "longer", "another byte", "not JSON", "deep"),
    *("of another id", "null", "a folder"),
)


@pytest.fixture(autouse=True)
def logs_are_seen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Logging as it is before a server sets it up, which tests before this one may have done."""
    for name in ("uvicorn", "uvicorn.error"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)
    with caplog.at_level(logging.WARNING, logger="uvicorn.error"):
        yield


@pytest.mark.parametrize("when", ["before the start", "while it runs"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_missing_response_logged_by_its_id(
    tmp_path: Path, damage: str, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = store(tmp_path)
    first.put(entry(0), CONTENT)
    first.put(entry(1, previous=0), CONTENT)
    path = tmp_path / "responses" / f"{number(1)}.response"
    if when == "before the start":
        first.close()
    whole = damages(path) | {"a folder": None}
    path.unlink()
    if whole[damage] is None:
        path.mkdir()
    else:
        path.write_bytes(whole[damage])
    with caplog.at_level(logging.WARNING):
        again = store(tmp_path) if when == "before the start" else first
        with pytest.raises(NotFound, match=number(1)):
            again.read(again.find(number(1), ""))
    harmless = damage == "a folder" and when == "before the start"
    assert harmless or number(1) in caplog.text
    assert again.read(again.find(number(0), "")) == CONTENT
    assert len(again) == 1
    again.close()


def test_what_is_written_again_between_look_up_and_reading_is_read_as_it_is_now(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.put(entry(0, status="in_progress"), CONTENT)
    found = kept.find(number(0), "")
    kept.put(entry(0), again := CONTENT._replace(output=b"[1,2,3]"))
    assert kept.read(found) == again == kept.read(kept.find(number(0), ""))
    assert len(kept) == 1
    kept.close()


def test_files_of_others_are_left_alone_and_unfinished_writes_removed(tmp_path: Path) -> None:
    store(tmp_path).close()
    folder = tmp_path / "responses"
    (folder / "notes.txt").write_text("mine")
    (folder / f"{number(3)}.new").write_text("half")
    again = store(tmp_path)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"] and len(again) == 0
    again.close()


def test_a_response_in_progress_when_the_process_was_killed_has_failed(tmp_path: Path) -> None:
    first = store(tmp_path)
    first.put(entry(0, status="in_progress", background=True), CONTENT)
    first.close()
    again = store(tmp_path)
    kept = again.find(number(0), "")
    assert kept.status == "failed" and b"before this response was complete" in again.read(kept).response
    again.close()


@pytest.mark.parametrize(
    ("noted", "words"),
    [
        (f"quire responses, format {FORMAT + 1}\n", f"responses of format {FORMAT + 1}, .* reads format {FORMAT}"),
        ("quire batches, format 1\n", "holds batches of format 1, .* reads responses of format"),
    ],
)
def test_a_folder_of_another_format_is_refused_by_name(tmp_path: Path, noted: str, words: str) -> None:
    (tmp_path / "lock").write_text(noted)
    with pytest.raises(InvalidConfig, match=f"{words}.*--state-dir"):
        store(tmp_path)


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    first = store(tmp_path)
    with pytest.raises(InvalidConfig, match=r"is in use by another server: choose another --state-dir"):
        store(tmp_path)
    first.close()
    store(tmp_path).close()


def test_a_folder_that_cannot_be_used_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match="--state-dir"):
        store(tmp_path / "file")
    (tmp_path / "salt").write_text("short")
    with pytest.raises(InvalidConfig, match="salt is damaged"):
        store(tmp_path)

    def refused(*args: Any, **rest: Any) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("os.open", refused)
    with pytest.raises(InvalidConfig, match=r"--state-dir.*Read-only"):
        store(tmp_path / "other")


# ---------------------------------------------------------------- a full disk


class Full:
    """`write_all` on a disk that is full until `free`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tries = 0
        self._patch = monkeypatch
        monkeypatch.setattr("quire.server.folder.write_all", self)

    def __call__(self, file: Any, data: bytes) -> None:
        self.tries += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def free(self) -> None:
        self._patch.undo()


async def test_a_full_disk_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with stateful(folder=tmp_path) as here:
        disk = Full(monkeypatch)
        made = await here.client().responses.create(model="tiny", input="a secret")
        assert made.output_text == ANSWER and made.to_dict()["store"] is False and made.id in caplog.text
        assert "a secret" not in caplog.text
        refused = await here.ask("POST", "/v1/responses", input="hi", background=True)
        check_error(refused, 503, words="No space left")
        assert len(here.store) == 0 and here.server.backend.load() == 0
        disk.free()
        assert (await here.client().responses.create(model="tiny", input="hi")).to_dict()["store"] is True
        assert not list(tmp_path.rglob("*.new"))


async def test_a_background_response_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.response_state._DISK", 0.01)
    async with stateful(folder=tmp_path, port=slow()) as here:
        client = here.client()
        made = await client.responses.create(model="tiny", input="hi", background=True)
        disk = Full(monkeypatch)
        here.server.port.stepping.set()
        done = await until(client, made.id, "completed")
        async with asyncio.timeout(60):
            while disk.tries < 3:
                await asyncio.sleep(0.01)
        disk.free()
        async with asyncio.timeout(60):
            while here.state._running:
                await asyncio.sleep(0.01)
    async with stateful(folder=tmp_path) as here:
        assert (await here.client().responses.retrieve(made.id)).to_dict() == done.to_dict()


async def test_a_full_disk_delays_no_cancel_and_no_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stateful(folder=tmp_path, port=slow()) as here:
        client = here.client()
        made = [await client.responses.create(model="tiny", input="hi", background=True) for _ in range(2)]
        Full(monkeypatch)
        async with asyncio.timeout(60):
            assert (await client.responses.cancel(made[0].id)).status == "cancelled"
            assert (await client.responses.retrieve(made[0].id)).status == "cancelled"
            for one in made:
                await client.responses.delete(one.id)
                check_error(await here.ask("GET", f"/v1/responses/{one.id}"), 404)
        assert here.state._running == {} and not list(tmp_path.rglob("*.response"))


async def test_what_cannot_be_deleted_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **rest: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    async with stateful(folder=tmp_path, most=2) as here:
        client = here.client()
        made = await client.responses.create(model="tiny", input="hi")
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", refused)
            check_error(await here.ask("DELETE", f"/v1/responses/{made.id}"), 503, words="Read-only")
            assert (await client.responses.retrieve(made.id)).id == made.id
            for _ in range(3):
                await client.responses.create(model="tiny", input="hi")
            assert len(here.store) == 2, "what cannot be removed from disk is forgotten all the same"


# ---------------------------------------------------------------- cost


@pytest.mark.parametrize("where", ["memory", "folder"])
async def test_a_long_conversation_is_read_in_a_thread(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop looks up one entry, however many a conversation has; all of it is read and rendered elsewhere."""
    async with stateful(folder=tmp_path if where == "folder" else None, room=1 << 20) as here:
        reads: list[tuple[str, str]] = []

        def seen(name: str) -> None:
            inner = getattr(ResponseStore, name)

            def wrapped(self: ResponseStore, *args: Any, **rest: Any) -> Any:
                reads.append((name, threading.current_thread().name))
                return inner(self, *args, **rest)

            monkeypatch.setattr(ResponseStore, name, wrapped)

        for i in range(300):
            before = None if not i else here.store.find(number(i - 1), "")
            here.store.put(entry(i, None if before is None else i - 1, earlier=before.items if before else 0), CONTENT)
        seen("find")
        seen("read")
        await here.client().responses.create(model="tiny", input="hi", previous_response_id=number(299), store=False)
        assert here.prompt().count("assistant") == 301
        on_loop = [name for name, thread in reads if not thread.startswith("offload")]
        assert on_loop == ["find"] and len(reads) == 600
        assert here.store.find(number(299), "").items > LARGE


def test_a_chain_that_runs_in_circles_ends(tmp_path: Path) -> None:
    """Only files that others have changed can do so."""
    kept = store(tmp_path)
    kept.put(entry(0, previous=1), CONTENT)
    kept.put(entry(1, previous=0), CONTENT)
    assert len(kept.conversation(kept.find(number(0), ""))) == 4
    kept.close()


def test_a_conversation_whose_responses_are_evicted_while_it_is_read_is_never_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that are evicted leave the index first, and can be read a little longer."""
    kept = ResponseStore()
    for i in range(4):
        kept.put(entry(i, i - 1 if i else None), CONTENT)
    monkeypatch.setattr(kept._medium, "remove", lambda id: None)
    find, found = kept.find, list[str]()

    def evicting(id: str, owner: str, param: str = "id") -> Entry:
        one = find(id, owner, param)
        found.append(id)
        if found == [number(2)]:
            for i in (0, 2, 3):
                kept.delete(find(number(i), ""))
        return one

    last = kept.find(number(3), "")
    monkeypatch.setattr(kept, "find", evicting)
    with pytest.raises(NotFound, match=f"continues {number(0)}, which is no longer stored"):
        kept.conversation(last)
    assert found == [number(2), number(1)]


def test_the_numbers_of_the_metrics_are_the_last_ones_whichever_thread_comes_late() -> None:
    class Slow(FrontendObserver):
        """Another response is put while the first number is on its way."""

        def __init__(self) -> None:
            self.last = (0, 0)

        def on_stored_responses(self, responses: int, size: int) -> None:
            if responses == 1 and not other.ident:
                other.start()
                other.join(0.05)
            self.last = responses, size

    observer = Slow()
    kept = ResponseStore(observer=observer)
    other = threading.Thread(target=kept.put, args=(entry(1), CONTENT))
    kept.put(entry(0), CONTENT)
    other.join()
    assert observer.last == (2, kept.bytes)


def test_threads_put_read_and_delete_at_once(tmp_path: Path) -> None:
    kept = store(tmp_path, most=50)
    failures: list[BaseException] = []

    def work(owner: int) -> None:
        try:
            for i in range(60):
                one = entry(1000 * owner + i, owner=str(owner))
                kept.put(one, CONTENT)
                try:
                    assert kept.read(kept.find(one.id, one.owner)) == CONTENT
                    if i % 3 == 0:
                        kept.delete(kept.find(one.id, one.owner))
                except NotFound:
                    continue
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(owner,)) for owner in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and len(kept) <= 50
    assert len(list((tmp_path / "responses").iterdir())) == len(kept)
    assert kept.bytes == sum(one.bytes for owned in kept._owned.values() for one in owned.values())
    kept.close()
