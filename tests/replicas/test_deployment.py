"""`quire serve --replicas` on a real Ray: the same HTTP as of one engine, and a replica that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks import replicas as benchmark
from quire import LLM
from quire.types import SamplingParams
from tests.live import Live, serving
from tests.replicas.test_combinations import check_batch, check_responses, one_engine


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("replicas")
    flags = ["--replicas", "2", "--threads", "1", "--num-gpu-blocks-override", "512", "--admin-key", "admin"]
    kept = ["--batch-dir", str(folder / "batches"), "--state-dir", str(folder / "responses")]
    drafts = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    with serving(folder, *flags, *kept, *drafts) as live:
        live.http.headers["Authorization"] = "Bearer admin"
        yield live


PROMPTS = ("Once upon a time", "The little dog", "One day, Tim", "A big red ball")


def replicas_of(live: Live) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = live.stats()["replicas"]
    return found


def test_answers_are_those_of_one_engine(two: Live) -> None:
    llm = LLM(num_gpu_blocks_override=512, threads=1)
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    expected = [answer.outputs[0].text for answer in llm.generate(list(PROMPTS), greedy)]
    llm.close()
    client = two.openai
    for prompt, text in zip(PROMPTS, expected, strict=True):
        plain = client.completions.create(model="embedded", prompt=prompt, max_tokens=12, temperature=0, n=2)
        assert [choice.text for choice in plain.choices] == [text, text]
        parts = client.completions.create(
            model="embedded", prompt=prompt, max_tokens=12, temperature=0, stream=True, logprobs=1
        )
        assert "".join(part.choices[0].text for part in parts if part.choices) == text
        stopped = client.completions.create(
            model="embedded", prompt=prompt, max_tokens=12, temperature=0, stop=text[6:9]
        )
        assert stopped.choices[0].text == text[: text.index(text[6:9])]
        assert stopped.choices[0].finish_reason == "stop"
    assert {each["rank"] for each in replicas_of(two)} == {0, 1}


def test_responses_are_continued_and_batches_answered_by_whichever_replica(two: Live) -> None:
    told = one_engine()
    check_responses(two, told)
    check_batch(two, told)


def test_each_api_is_served_and_both_replicas_answer(two: Live) -> None:
    asked = {"model": "embedded", "max_tokens": 8, "temperature": 0}
    message = {"messages": [{"role": "user", "content": "Tell me a story."}]}
    chat = two.http.post("/v1/chat/completions", json=asked | message).json()["choices"][0]["message"]["content"]
    made = two.openai.responses.create(model="embedded", input="Tell me a story.", max_output_tokens=8, temperature=0)
    said = two.http.post("/v1/messages", json=asked | message).json()["content"][0]["text"]
    options = {"options": {"num_predict": 8, "temperature": 0}, "stream": False}
    local = two.http.post("/api/chat", json={"model": "embedded", **message, **options}).json()["message"]["content"]
    texts = {chat, made.output_text, said, local}
    assert len(texts) == 1
    with httpx.Client(base_url=two.url, trust_env=False) as anyone:
        assert anyone.get("/stats").status_code == 401
        assert anyone.get("/health").json() == {"status": "ok"}
    deadline = time.monotonic() + 60
    while not all(each["completed_requests"] for each in replicas_of(two)):
        for prompt in PROMPTS:
            two.openai.completions.create(model="embedded", prompt=prompt, max_tokens=2)
        assert time.monotonic() < deadline, two.stats()
    stats = two.stats()
    assert stats["generated_tokens"] == sum(each["generated_tokens"] for each in stats["replicas"])
    assert stats["cache"]["max_pages"] == 2 * 512
    for rank in "01":
        assert two.metric("vllm:generation_tokens_total", engine=rank) > 0


def test_a_request_is_explained_by_the_replica_that_ran_it_and_shown_live(two: Live) -> None:
    answer = two.http.post("/v1/completions", json={"model": "embedded", "prompt": "Tim", "max_tokens": 3}).json()
    [explained] = two.http.get(f"/v1/requests/{answer['id']}-0/explain").json()["answers"]
    assert explained["finish_reason"] == "length" and explained["generated_tokens"] == 3
    listed = two.http.get("/v1/requests").json()["requests"]
    assert f"{answer['id']}-0" in {each["id"] for each in listed}
    assert two.http.get("/v1/requests/none/explain").status_code == 404
    seen: set[int] = set()
    with two.http.stream("GET", "/ui/servers") as frames:
        for line in frames.iter_lines():
            if line.startswith("data: ") and '"whole"' in line:
                number, frame = line[6:].split(" ", 1)
                seen.add(int(number))
                assert json.loads(frame)["whole"]["facts"]["pages"] == 512
            if seen == {0, 1}:
                break
    with two.http.stream("GET", "/ui/events") as frames:
        whole = next(json.loads(line[6:]) for line in frames.iter_lines() if '"whole"' in line)
    assert whole["whole"]["facts"]["servers"] == ["replica 0", "replica 1"]


def test_a_client_that_disconnects_and_a_deadline_end_their_requests(two: Live) -> None:
    body = {"model": "embedded", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with two.http.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_lines())
    two.settled()
    late = two.http.post("/v1/completions", json={**body, "stream": False}, headers={"x-request-timeout": "0.5"})
    assert late.status_code == 200 and late.json()["choices"][0]["finish_reason"] == "timeout"
    two.settled()


@pytest.mark.nightly
def test_a_killed_replica_loses_its_streams_alone_and_who_asks_again_is_answered(two: Live) -> None:
    found = run(two, benchmark.kill, clients=8, tokens=60)
    assert found["replicas"] == 2 and found["streams"] == found["answered_in_the_end"] == 8
    assert found["broken_streams"] == found["broken_with_a_named_error"] == found["on_the_killed_replica"] > 0
    assert found["broken_streams"] < 8
    assert found["answers_as_expected"] == 8
    deadline = time.monotonic() + 60  # a new replica reports within seconds
    while {each["rank"] for each in replicas_of(two)} != {0, 1}:
        assert time.monotonic() < deadline, two.stats()
        time.sleep(0.1)


def run(live: Live, part: Any, **options: Any) -> dict[str, Any]:
    async def work() -> dict[str, Any]:
        async with benchmark.load(live.url, key="admin") as at:
            found: dict[str, Any] = await part(at, **options)
            return found

    return asyncio.run(work())


# ---------------------------------------------------------------- long


@pytest.mark.nightly
def test_it_grows_and_shrinks_without_a_lost_request(tmp_path: Path) -> None:
    flags = ["--replicas", "1", "--max-replicas", "3", "--replica-queued-tokens", "2000", "--threads", "1"]
    with serving(tmp_path, *flags, "--replica-up-delay", "1", "--replica-down-delay", "5") as live:
        found = run(live, benchmark.scale, low=1, high=3, width=24, prompt=600, tokens=4, seconds=600)
    assert found["failed"] == 0 and found["requests"] > 24
    assert found["sizes"][0] == found["sizes"][-1] == 1 and 3 in found["sizes"]


@pytest.mark.nightly
def test_a_rolling_restart_loses_no_request(tmp_path: Path) -> None:
    with serving(tmp_path, "--replicas", "2", "--threads", "1") as live:
        before = {each["pid"] for each in replicas_of(live)}

        async def restart(at: benchmark.Load) -> dict[str, Any]:
            outcomes: list[benchmark.Outcome] = []
            done = asyncio.Event()

            async def client(seed: int) -> None:
                while not done.is_set():
                    outcomes.append(await at.ask(benchmark.prompts(1, 40, seed)[0], 60))

            clients = [asyncio.ensure_future(client(seed)) for seed in range(6)]
            os.kill(live.process.pid, signal.SIGHUP)
            deadline = time.monotonic() + 400
            while before & {each["pid"] for each in (await at.stats())["replicas"]}:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.5)
            await at.until(2, 200)
            done.set()
            await asyncio.gather(*clients)
            return {"failed": [each.errors for each in outcomes if not each.answered], "requests": len(outcomes)}

        found = run(live, restart)
        assert found["failed"] == [] and found["requests"] > 6


@pytest.mark.nightly
def test_prefixes_are_found_as_in_one_cache_and_as_the_simulator_says() -> None:
    found = benchmark.prefixes(benchmark.Prefixes(), replicas=3, blocks=900, repeats=2, seconds=10)
    assert found["of_round_robin"] >= 1.5
    assert found["of_one_engine"] >= 0.95
    for policy, error in found["error"].items():
        measured = found["hit_tokens"][policy]
        assert abs(error) <= max(0.1, 2 * (max(measured) - min(measured)) / max(measured)), policy
