"""A server that records, what is asked of it, and its recording made again after it was killed."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from quire.cli import main
from quire.observability.recording_format import MAGIC
from quire.server.access import Keys
from quire.server.app import create_app
from tests.live import Live, serving
from tests.observability.test_recorder import only
from tests.observability.test_recorder import run as record
from tests.server.doubles import served

PROMPT = "Once upon a time there was a little dog who lived by the sea, and every morning he "
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}


def again(folder: Path) -> list[dict[str, Any]]:
    done = CliRunner().invoke(main, ["replay", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.output)["recordings"]
    return found


def ask(live: Live, n: int) -> None:
    """Twelve clients: some share a beginning, some want JSON, some want several answers, some hang up."""
    body: dict[str, Any] = {"model": "embedded", "prompt": PROMPT * (1 + n % 3) + str(n), "max_tokens": 40, "seed": n}
    if n % 4 == 1:
        body |= {"structured_outputs": {"json": SCHEMA}, "max_tokens": 24}
    if n % 4 == 2:
        body |= {"n": 2, "prompt_logprobs": 0}
    if n % 4 == 3:
        body |= {"stream": True, "max_tokens": 150, "ignore_eos": True}
        with live.http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_bytes())
    else:
        assert live.http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.anyio
async def test_a_recording_is_for_admins_only(tmp_path: Path) -> None:
    record(tmp_path, requests=2).close()
    data = only(tmp_path).read_bytes()
    async with served() as server:
        keys = Keys(("client",), ("boss",))
        app = create_app(server.backend, keys=keys, recording=tmp_path)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

            async def fetched(path: str, **headers: str) -> httpx.Response:
                return await client.get(path, headers=headers)

            for headers in ({}, {"authorization": "Bearer client"}, {"x-api-key": "client"}, {"authorization": "boss"}):
                for path in ("/v1/recording", "/v1/recording/", "//v1/recording"):
                    refused = await fetched(path, **headers)
                    assert refused.status_code in (401, 404) and not refused.content.startswith(MAGIC)
                assert (await fetched("/v1/recording", **headers)).status_code == 401
            assert (await fetched("/v1/models", authorization="Bearer client")).status_code == 200
            whole = await fetched("/v1/recording", authorization="Bearer boss")
            assert whole.status_code == 200 and whole.content == data.rstrip(b"\0")


def test_what_a_killed_server_decided_is_decided_again(tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    flags = ["--recording-dir", str(folder), "--num-gpu-blocks-override", "24", "--max-num-batched-tokens", "64"]
    drafts = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    with serving(tmp_path, *flags, *drafts, "--max-num-seqs", "8") as live:
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(lambda n: ask(live, n), range(24)))
        live.settled()
        fetched = tmp_path / "fetched.quirerec"
        fetched.write_bytes(live.http.get("/v1/recording").content)
        [said] = again(fetched)
        assert said["requests"] == 30 and not said["notes"] and fetched.stat().st_size < 1 << 20
        body = {"model": "embedded", "prompt": "A", "max_tokens": 350, "ignore_eos": True, "stream": True}
        with live.http.stream("POST", "/v1/completions", json=body) as answer:
            stream = answer.iter_bytes()
            next(stream)
            os.kill(live.engine_pid(), signal.SIGKILL)
            assert b"error" in b"".join(stream)
        deadline = time.monotonic() + 100
        while len(list(folder.glob("*"))) < 2:  # the next engine's own
            assert time.monotonic() < deadline
            time.sleep(0.05)
        live.settled()
    [found, after] = again(folder)
    assert "was not closed" in found["notes"][0] and found["requests"] == 31 and found["ended"]["abort"] >= 1
    assert found["preemptions"]["count"] and found["settings"]["speculation"] == "AdaptiveDrafts"
    assert found["settings"]["pace"] == "LatencyController" and after["requests"] == 0
    text = b"".join(path.read_bytes() for path in folder.iterdir())
    assert b"little dog" not in text and b"maxLength" not in text
