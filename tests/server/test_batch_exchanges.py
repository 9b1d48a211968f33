"""Files and batches over HTTP: every path with its answers and refusals, and the files that batches write."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.server.batch_api import batches, files
from quire.server.limits import Limits
from tests.expected import check
from tests.server.test_batches import CHAT, Office, jsonl, line, office

pytestmark = pytest.mark.anyio

EXPECTED = Path(__file__).parent / "expected"


class Seconds:
    """Each look at this clock is a second after the one before, so that nothing is made in the same second."""

    def __init__(self) -> None:
        self.now = time.time()

    def time(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture(autouse=True)
def seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Seconds()
    for module in (batches, files):
        monkeypatch.setattr(module, "time", clock)


class Written:
    """What was asked and answered, with ids and times by number."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.lines: list[str] = []
        self.known: dict[str, int] = {}

    def hidden(self, text: str) -> str:
        def number(found: re.Match[str]) -> str:
            return f"{found[1]}#{self.known.setdefault(found[0], len(self.known))}"

        text = re.sub(r"\b((?:file|batch_req|batch|req|chatcmpl|cmpl|resp|msg)[-_])[0-9a-f]{24,32}\b", number, text)
        return re.sub(r'"(\w+_at|created)":1\d{9}\b', r'"\1":TIME', text)

    async def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        response = await self.client.request(method, path, **request)
        shown = {name: value for name, value in request.items() if name != "headers"}
        self.lines += ["", self.hidden(f"{method} {path} {shown}")]
        kind = response.headers.get("content-type", "-")
        extra = {name: value for name, value in response.headers.items() if name in ("content-disposition", "allow")}
        self.lines += [
            self.hidden(f"{response.status_code} {kind} {extra or ''}"),
            *self.hidden(response.text).split("\n"),
        ]
        return response


async def _until(here: Office, id: str) -> None:
    await here.until(id, *batches.FINAL_STATUSES)


UPLOADS: list[tuple[bytes, dict[str, str]]] = [
    (b"x\n", {"purpose": "batch"}),
    (b"", {"purpose": "batch"}),
    (b"x", {"purpose": "fine-tune"}),
    (b"x", {"purpose": "user_data"}),
    (b"x", {}),
    (b"x", {"purpose": "batch", "colour": "red"}),
    (b"x", {"purpose": "batch", "expires_after[seconds]": "3600"}),
    (b"y" * 3000, {"purpose": "batch"}),
]


async def test_files_go_in_and_out_as_written_down(tmp_path: Path) -> None:
    async with office(tmp_path, limits=Limits(max_body_bytes=2048)) as here:
        written = Written(here.client)
        for i, (data, fields) in enumerate(UPLOADS):
            await written.ask("POST", "/v1/files", files={"file": (f"in {i}.jsonl", data)}, data=fields)
        await written.ask("POST", "/v1/files", data={"purpose": "batch"})
        await written.ask("POST", "/v1/files", content=b"{}", headers={"content-type": "application/json"})
        first = (await written.ask("GET", "/v1/files")).json()["data"][-1]["id"]
        for query in ("limit=1", "limit=1&order=asc", f"after={first}&order=asc", "after=file-0", "limit=0", "limit=x"):
            await written.ask("GET", f"/v1/files?{query}")
        for query in ("purpose=batch&limit=10000", "purpose=batch_output", "order=up", "colour=red", "limit=10001"):
            await written.ask("GET", f"/v1/files?{query}")
        for path in (
            f"/v1/files/{first}",
            f"/v1/files/{first}/content",
            "/v1/files/file-0",
            "/v1/files/file-0/content",
        ):
            await written.ask("GET", path)
        await written.ask("DELETE", f"/v1/files/{first}", headers={"sec-fetch-site": "cross-site"})
        for _ in range(2):
            await written.ask("DELETE", f"/v1/files/{first}")
    check(EXPECTED / "files.txt", "\n".join(written.lines))


async def test_batches_go_as_written_down(tmp_path: Path) -> None:
    async with office(tmp_path, width=1) as here:
        written = Written(here.client)
        asked = [line("a"), line("b", max_tokens=2), line("bad", n=0), line("s", stream=True), line("é", model="huge")]
        file = (await here.upload(jsonl(*asked))).json()["id"]
        good: dict[str, Any] = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        refused: list[dict[str, Any]] = [
            {"endpoint": "/v1/models"},
            {"completion_window": "1h"},
            {"input_file_id": "file-0"},
            {"input_file_id": "../x"},
            {"metadata": {str(i): "x" for i in range(17)}},
            {"metadata": {"x" * 65: "y"}},
            {"metadata": {"x": "y" * 513}},
            {"metadata": {"x": 1}},
            {"colour": 1},
            {"endpoint": None},
        ]
        for change in refused:
            await written.ask("POST", "/v1/batches", json=good | change)
        made = await written.ask("POST", "/v1/batches", json=good | {"metadata": {"who": "m" * 512}})
        id = made.json()["id"]
        await _until(here, id)
        batch = (await written.ask("GET", f"/v1/batches/{id}")).json()
        for name in ("output_file_id", "error_file_id"):
            await written.ask("GET", f"/v1/files/{batch[name]}")
            await written.ask("GET", f"/v1/files/{batch[name]}/content")
        await written.ask("POST", f"/v1/batches/{id}/cancel")
        await written.ask("POST", "/v1/batches/batch_0/cancel")
        await written.ask("POST", "/v1/batches", json=good | {"input_file_id": batch["output_file_id"]})
        broken = [line("a"), line("a"), b"\n \n", b"{\n", line("b", url="/v1/x"), line("c", method="GET"), b"[]\n"]
        for lines in (broken, [b"\xef\xbb\xbf\n\n"], [b""], [line("x" * 513)], [{"custom_id": "a"}]):
            id = (await here.begin(*lines))["id"]
            await _until(here, id)
            await written.ask("GET", f"/v1/batches/{id}")
        await written.ask("GET", "/v1/batches?limit=2")
        await written.ask("GET", "/v1/batches?limit=101")
        await written.ask("GET", "/v1/batches/batch_0")
        for sampled in here.server.port.submitted:
            written.lines.append(f"engine: {len(sampled.prompt)} {sampled.max_new_tokens} {sampled.priority}")
    check(EXPECTED / "batches.txt", "\n".join(written.lines))


async def test_a_batch_is_cancelled_in_the_middle_as_written_down(tmp_path: Path) -> None:
    asked = asyncio.Event()

    def wrap(answer: Any) -> Any:
        async def slow(path: str, body: bytes) -> Any:
            if json.loads(body)["messages"][0]["content"] == "q1":
                asked.set()
                await asyncio.sleep(100)
            return await answer(path, body)

        return slow

    async with office(tmp_path, width=1, wrap=wrap) as here:
        written = Written(here.client)
        id = (await here.begin(*(line(f"q{i}") for i in range(4))))["id"]
        await asyncio.wait_for(asked.wait(), 100)
        await written.ask("DELETE", f"/v1/files/{(await here.about(id))['input_file_id']}")
        await written.ask("POST", f"/v1/batches/{id}/cancel", headers={"sec-fetch-site": "cross-site"})
        first = await here.client.post(f"/v1/batches/{id}/cancel")
        assert first.json()["status"] in ("cancelling", "cancelled")
        await _until(here, id)
        batch = (await written.ask("GET", f"/v1/batches/{id}")).json()
        await written.ask("GET", f"/v1/files/{batch['output_file_id']}/content")
        await written.ask("POST", f"/v1/batches/{id}/cancel")
        left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
        written.lines += [written.hidden(name) for name in left]
    check(
        EXPECTED / "batch-cancelled.txt", "\n".join(written.lines[: -len(left)] + sorted(written.lines[-len(left) :]))
    )
