"""Batches in the whole house: the official client, a kill in the middle, and people who come meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.live import Live, serving

CHAT = "/v1/chat/completions"


def line(i: int, **body: Any) -> bytes:
    asked = {"model": "embedded", "messages": [{"role": "user", "content": f"Tell me of {i} dogs"}], **body}
    return json.dumps({"custom_id": f"q{i}", "method": "POST", "url": CHAT, "body": asked}).encode() + b"\n"


def begin(live: Live, *lines: bytes) -> str:
    file = live.openai.files.create(file=("in.jsonl", b"".join(lines)), purpose="batch")
    return live.openai.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id


def until(live: Live, id: str, *, answered: int = 0, status: str | None = None, seconds: float = 600) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        batch = live.openai.batches.retrieve(id)
        counts: Any = batch.request_counts
        if batch.status == status or (status is None and counts.completed >= answered):
            return batch
        assert time.monotonic() < deadline, batch
        time.sleep(0.01)


def test_killed_in_the_middle_every_line_is_answered_once(tmp_path: Path) -> None:
    args = ("--batch-dir", str(tmp_path / "batches"), "--batch-concurrency", "4", "--dtype", "float32")
    lines = [line(i, max_tokens=40, temperature=0, ignore_eos=True) for i in range(40)]
    with serving(tmp_path, *args, ends=-signal.SIGKILL) as live:
        id = begin(live, *lines)
        seen = until(live, id, answered=6).request_counts
        os.kill(live.process.pid, signal.SIGKILL)
        live.process.wait(100)
        assert seen.completed < 40
    with serving(tmp_path, *args) as live:
        batch = until(live, id, status="completed")
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (40, 40, 0)
        made = [json.loads(one) for one in live.openai.files.content(batch.output_file_id).text.splitlines()]
        assert sorted(one["custom_id"] for one in made) == sorted(f"q{i}" for i in range(40))
        for one in (made[0], made[-1]):  # one answered before the kill, one after it, both as anybody is answered
            body = json.loads(lines[int(one["custom_id"][1:])])["body"]
            told = live.http.post(CHAT, json=body).json()["choices"]
            assert one["response"]["body"]["choices"] == told
        assert live.openai.batches.list().data[0].id == id
        assert {file.purpose for file in live.openai.files.list()} == {"batch", "batch_output"}
        assert live.settled()["cache"]["used_pages"] == 0


def test_people_come_first(tmp_path: Path) -> None:
    """What runs in the gaps stops as soon as somebody asks, and is not lost."""
    with serving(tmp_path, "--batch-dir", str(tmp_path / "batches")) as live:
        id = begin(live, *(line(i, max_tokens=400, temperature=0, ignore_eos=True) for i in range(64)))
        deadline = time.monotonic() + 300
        while live.stats()["active_requests"] < 16:
            assert time.monotonic() < deadline
        ask: dict[str, Any] = {"model": "embedded", "prompt": "Long ago", "max_tokens": 1500, "stream": True}
        with live.http.stream("POST", "/v1/completions", json={**ask, "ignore_eos": True}) as answer:
            lines = answer.iter_lines()  # to be kept: where it ends, so does the request
            next(lines)
            while (alone := live.stats())["active_requests"] != 1:
                assert time.monotonic() < deadline
            assert alone["waiting_requests"] >= 15
        assert live.openai.batches.cancel(id).status in ("cancelling", "cancelled")
        batch = until(live, id, status="cancelled")
        assert batch.request_counts.failed == 0
        live.settled()
