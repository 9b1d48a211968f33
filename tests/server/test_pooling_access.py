"""Keys, rates, metrics and batches of what pools: scores, reranking, classes, vectors."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quire.server.access import Rates
from tests import encoders
from tests.live import Live, serving
from tests.server.doubles import served
from tests.server.test_access import Clock

KEYS = ("sesame", "other")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/score": {"text_1": "what dog runs", "text_2": ["a red dog", "fish"]},
    "/score": {"text_1": "what dog runs", "text_2": "fish"},
    "/v1/rerank": {"query": "what dog runs", "documents": ["a red dog", "fish"]},
    "/v2/rerank": {"query": "what dog runs", "documents": ["a red dog"]},
    "/rerank": {"query": "what dog runs", "documents": ["a red dog"]},
    "/classify": {"input": "fish"},
    "/v1/classify": {"input": ["fish", "a red dog"]},
    "/pooling": {"input": "fish"},
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("access")
    encoders.write(folder / "model", "bert", labels=1)
    flags = ["--dtype", "float32", "--batch-dir", str(folder / "batches")]
    keys = [flag for key in KEYS for flag in ("--api-key", key)]
    with serving(folder, str(folder / "model"), *flags, *keys, "--served-model-name", "m") as made:
        made.http.headers["authorization"] = f"Bearer {KEYS[0]}"
        yield made


def test_every_path_wants_a_key(live: Live) -> None:
    for headers in ({"authorization": "Bearer wrong"}, {"authorization": ""}):
        for path, body in BODIES.items():
            answer = live.http.post(path, json=body, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key", path


def test_tokens_and_requests_are_counted(live: Live) -> None:
    before = live.metric("vllm:prompt_tokens_total"), live.metric("vllm:request_success_total")
    told = prompts = 0
    for path, body in BODIES.items():
        answer = live.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        told += usage.get("prompt_tokens", usage["total_tokens"])
        prompts += max(len(one) if isinstance(one, list) else 1 for one in body.values())
    live.settled()
    after = live.metric("vllm:prompt_tokens_total"), live.metric("vllm:request_success_total")
    assert (after[0] - before[0], after[1] - before[1]) == (told, prompts)


def test_lines_of_batches_are_answered_as_the_endpoints_answer(live: Live) -> None:
    for path in ("/v1/score", "/v1/rerank"):
        body = {"model": "m", **BODIES[path]}
        lines = [{"custom_id": name, "method": "POST", "url": path, "body": body} for name in ("a", "b")]
        lines.append({"custom_id": "bad", "method": "POST", "url": path, "body": {"model": "m"}})
        text = "\n".join(map(json.dumps, lines)).encode()
        file = live.http.post("/v1/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"}).json()
        asked = {"input_file_id": file["id"], "endpoint": path, "completion_window": "24h"}
        batch = live.http.post("/v1/batches", json=asked).json()
        deadline = time.monotonic() + 200
        while batch["status"] not in ("completed", "failed") and time.monotonic() < deadline:
            time.sleep(0.1)
            batch = live.http.get(f"/v1/batches/{batch['id']}").json()
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}, batch
        made = live.http.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
        wanted = live.http.post(path, json=body).json()
        for one in map(json.loads, made):
            answer = one["response"]["body"]
            assert {k: v for k, v in answer.items() if k not in ("id", "created")} == {
                k: v for k, v in wanted.items() if k not in ("id", "created")
            }
    refused = live.http.post("/v1/batches", json={**asked, "endpoint": "/classify"})
    assert refused.status_code == 400 and "/v1/rerank" in refused.json()["error"]["message"]


@pytest.mark.anyio
async def test_requests_are_limited_whatever_they_ask() -> None:
    clock = Clock()
    async with served(rates=Rates(requests=len(BODIES), clock=clock)) as server:
        for _ in range(2):
            said = [(await server.post(path, **body)).status_code for path, body in BODIES.items()]
            assert 429 not in said
            said = [(await server.post(path, **body)).status_code for path, body in BODIES.items()]
            assert set(said) == {429}
            clock.now += 60.0
