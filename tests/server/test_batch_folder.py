"""The folder of files and batches: a full disk, files of other programs, and who may read it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from quire.errors import InvalidConfig
from quire.server.batch_api.files import listing
from quire.server.batch_api.runner import BatchService
from quire.server.batch_api.store import Store, new_id, newest_first, whole_lines
from quire.server.folder import WriteFailed
from quire.server.limits import Limits
from tests.server.doubles import check_error
from tests.server.test_batches import jsonl, line, office

pytestmark = pytest.mark.anyio


class Disk:
    """`os.fsync` of a disk that is full for some of the writes: `full` says which, counted from 0."""

    def __init__(self, full: set[int]) -> None:
        self.full, self.writes = full, 0

    def __call__(self, file: int) -> None:
        self.writes += 1
        if self.writes - 1 in self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_batch_that_a_full_disk_does_not_let_be_cancelled_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go = asyncio.Event(), asyncio.Event()

    def held(answer: Any) -> Any:
        async def one(path: str, body: bytes) -> Any:
            began.set()
            await go.wait()
            return await answer(path, body)

        return one

    async with office(tmp_path, wrap=held) as here:
        id = (await here.begin(line("a"), line("b")))["id"]
        await began.wait()
        before = await here.about(id)
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", Disk({0}))
            refused = await here.client.post(f"/v1/batches/{id}/cancel")
        assert check_error(refused, 503, words="No space left on device")["code"] == "storage"
        assert await here.about(id) == before and before["status"] == "in_progress"
        assert not list(tmp_path.rglob("*.new"))
        go.set()
        batch = await here.until(id, "completed", "cancelled", "cancelling")
        assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 2)


@pytest.mark.parametrize("at", range(6))
def test_what_a_full_disk_refuses_changes_a_batch_neither_in_memory_nor_on_disk(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever write of its end fails: two states, two journals, two documents of files."""
    service = BatchService(tmp_path, answer, Limits(), width=1)
    store, batches = service._batches.store, service._batches
    batch = {"id": new_id("batch_"), "created_at": 1, "status": "in_progress", "request_counts": {"completed": 0}}
    batch |= {"output_file_id": None, "error_file_id": None, "request_counts": {"completed": 0, "failed": 0}}
    store.put(batch)
    batches.record_answer(batch, "a", 200, {}, "r")
    batches.record_answer(batch, "b", 400, {}, "r")
    disk = Disk({at})
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", disk)
        with pytest.raises(WriteFailed):
            batches.finish(batch, "completed")
    kept = msgspec.json.decode((tmp_path / "batches" / f"{batch['id']}.json").read_bytes())
    assert {**kept, "request_counts": None} == {**batch, "request_counts": None}
    assert batch["status"] == ("in_progress" if at == 0 else "finalizing")
    assert store.get(str(batch["id"])) is batch
    batches.finish(batch, "completed")
    assert batch["status"] == "completed" and "finishes_as" not in batch
    assert len(service._files._store) == 2
    service._lock.close()


async def answer(path: str, body: bytes) -> dict[str, Any]:
    raise AssertionError(f"no line is to be answered here: {path}")


async def test_what_cannot_be_deleted_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **rest: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    async with office(tmp_path) as here:
        id = (await here.upload(jsonl(line("a")))).json()["id"]
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", refused)
            check_error(await here.client.delete(f"/v1/files/{id}"), 503, words="Read-only")
        assert len(await here.lines(id)) == 1
        assert (await here.client.delete(f"/v1/files/{id}")).json()["deleted"] is True
        assert not list((tmp_path / "files").iterdir())


FOREIGN = (
    *("lock", "notes.json", "files/package.json", "files/notes.txt", "files/x.data", "files/y.part", "files/z.new"),
    *(
        "batches/list.json",
        "batches/.hidden.new",
        "files/file-1.json",
        "files/file-short.data",
        "files/a.json/deep.new",
    ),
)


async def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    mine = f"files/{new_id('file-')}"
    broken = (f"{mine}.json", f"{mine}.data", f"batches/{new_id('batch_')}.json")
    for name in (*FOREIGN, *broken):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("[] not ours")
    for folder in ("files", "batches"):
        (tmp_path / folder / f"{new_id('file-')}.data").mkdir()
    for _ in range(2):
        async with office(tmp_path) as here:
            batch = await here.until((await here.begin(line("a")))["id"], "completed")
            assert batch["request_counts"]["completed"] == 1
    assert [name for name in (*FOREIGN, *broken) if (tmp_path / name).read_text() != "[] not ours"] == []


async def test_what_a_killed_server_left_half_written_is_deleted(tmp_path: Path) -> None:
    left = [f"files/{new_id('file-')}.{kind}" for kind in ("part", "data", "new")] + [f"batches/{new_id('batch_')}.new"]
    for name in left:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{")
    async with office(tmp_path):
        assert [name for name in left if (tmp_path / name).exists()] == []


@pytest.mark.parametrize("broken", [b'{"id": "\xff"}', b'{"a": ' + b"[" * 100_000, b"{"])
async def test_a_document_that_cannot_be_read_is_left_alone_and_the_others_are_served(
    tmp_path: Path, broken: bytes
) -> None:
    async with office(tmp_path) as here:
        whole = (await here.upload(jsonl(line("a")))).json()
    path = tmp_path / "files" / f"{new_id('file-')}.json"
    path.write_bytes(broken)
    async with office(tmp_path) as here:
        assert (await here.client.get("/v1/files")).json()["data"] == [whole]
    assert path.read_bytes() == broken


def test_a_document_is_there_once_its_data_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that lists files meanwhile would ask for what is not there, or delete it."""
    store, id, seen = Store(tmp_path, "file"), new_id("file-"), list[int]()
    (made := tmp_path / "made").write_bytes(b"xy")
    replace = Path.replace

    def looking(self: Path, target: Path) -> Path:
        seen.append(len(store))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", looking)
    about = {"id": id, "created_at": 1, "bytes": 2}
    store.put(about, made)
    assert seen == [0, 0] and store.get(id) == about and not made.exists()
    assert store.path(id, ".data").read_bytes() == b"xy"
    monkeypatch.undo()
    # Killed between the two: the next server does not have it until it is put again.
    store.path(id, ".data").rename(made)
    again = Store(tmp_path, "file")
    assert len(again) == again.bytes == 0
    again.put(about, made)
    assert again.get(id) == about and again.path(id, ".data").exists()


def test_a_store_counts_the_bytes_of_its_documents_once_however_often_they_are_replaced(tmp_path: Path) -> None:
    store = Store(tmp_path, "file")
    ids = [new_id("file-") for _ in range(2)]
    for id in ids:
        store.path(id, ".data").touch()
    for size in (10_000, 20_000, 5_000):
        for id in ids:
            store.put({"id": id, "created_at": 1, "bytes": size})
        assert store.bytes == 2 * size == Store(tmp_path, "file").bytes
    for id in ids:
        store.delete(id)
    assert store.bytes == 0


def test_lists_are_in_order_of_creation_and_say_whether_there_are_more(tmp_path: Path) -> None:
    store = Store(tmp_path, "file")
    for id, at in (("c", 1), ("a", 3), ("b", 2), ("d", 2)):
        store.put({"id": f"file-{id * 24}", "created_at": at, "bytes": 0})
    assert [one["id"][-1] for one in newest_first(store.all())] == ["a", "d", "b", "c"]

    def page(query: bytes) -> tuple[str, bool]:
        request = Request({"type": "http", "query_string": query, "headers": []})
        body = json.loads(bytes(asyncio.run(listing(request, store, 10, default=10)).body))
        return "".join(one["id"][-1] for one in body["data"]), body["has_more"]

    assert [page(b"limit=%d" % limit) for limit in (3, 4, 5)] == [("adb", True), ("adbc", False), ("adbc", False)]
    assert page(b"limit=2&after=file-" + b"d" * 24) == ("bc", False) and page(b"limit=1&after=file-" + b"d" * 24) == (
        "b",
        True,
    )
    assert page(b"limit=2&after=file-" + b"c" * 24) == ("", False)


@pytest.mark.parametrize("taken", ["", "files", "batches", "lock/x"])
def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, taken: str) -> None:
    folder = tmp_path / "b"
    (folder / taken).parent.mkdir(parents=True, exist_ok=True)
    (folder / taken).write_text("a file where a folder should be, or the other way round")
    named = rf"--batch-dir: .*b/?{taken.partition('/')[0]}: (it is a file, not a folder|Is a dir|Not a dir)"
    with pytest.raises(InvalidConfig, match=named):
        BatchService(folder, answer, Limits(), width=1)
    if taken not in ("", "lock/x"):  # and the lock is free again
        (folder / taken).unlink()
        BatchService(folder, answer, Limits(), width=1)._lock.close()


def modes(folder: Path) -> set[tuple[str, int]]:
    return {("d" if path.is_dir() else "f", stat.S_IMODE(path.stat().st_mode)) for path in (folder, *folder.rglob("*"))}


async def test_files_and_batches_are_for_the_servers_own_user_alone(tmp_path: Path) -> None:
    """Also those that an earlier version wrote readable for all users, or for a group."""
    before = os.umask(0o022)
    try:
        for mode in (0o644, 0o640, 0o600):
            async with office(tmp_path / "b") as here:
                await here.until((await here.begin(line("a"), line("b", n=0)))["id"], "completed")
                assert modes(tmp_path / "b") == {("d", 0o700), ("f", 0o600)}
            for path in (tmp_path / "b" / "files", *(tmp_path / "b" / "files").iterdir()):
                path.chmod(0o755 if path.is_dir() else mode)
    finally:
        os.umask(before)


async def test_a_folder_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    await BatchService(tmp_path, answer, Limits(), width=1).stop()
    assert (tmp_path / "lock").read_text() == "quire batches, format 1\n"
    await BatchService(tmp_path, answer, Limits(), width=1).stop()
    (tmp_path / "lock").write_text("quire batches, format 2\n")
    with pytest.raises(InvalidConfig, match="holds batches of format 2, and this version of Quire reads format 1"):
        BatchService(tmp_path, answer, Limits(), width=1)


async def test_a_folder_of_a_version_that_noted_no_format_is_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    await BatchService(tmp_path, answer, Limits(), width=1).stop()
    assert (tmp_path / "lock").read_text() == "quire batches, format 1\n"


@pytest.mark.parametrize(
    ("held", "lines"),
    [
        (b"", []),
        (b"a\n", [b"a\n"]),
        (b"a\n\nbc\n", [b"a\n", b"\n", b"bc\n"]),
        (b"a\nbc\nhalf", [b"a\n", b"bc\n"]),
        (b"half", []),
    ],
)
def test_a_journal_keeps_its_whole_lines_and_loses_a_cut_one(tmp_path: Path, held: bytes, lines: list[bytes]) -> None:
    journal = tmp_path / "journal"
    assert list(whole_lines(journal)) == [] and not journal.exists()
    journal.write_bytes(held)
    for _ in range(2):
        assert list(whole_lines(journal)) == lines
        assert journal.read_bytes() == b"".join(lines)
