"""Requests too many are refused before they are read, and before those that came with them are."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from quire.server.limits import AdmissionGate
from tests.contract.wire import answers, ask, request
from tests.server.doubles import TOKENIZER, served
from tests.server.test_serve import running

pytestmark = pytest.mark.anyio

ASK = {"prompt": "the", "max_tokens": 64}
JSON = {"content-type": "application/json"}


async def until(what: Any) -> None:
    async with asyncio.timeout(60):
        while not what():
            await asyncio.sleep(0.005)


async def test_requests_beyond_the_queues_limit_are_refused_before_others_are_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 256 requests at once at a queue of 128, nearly all refusals come while the first few are tokenised."""
    encoded: list[str] = []
    encode = TOKENIZER.encode

    def counted(text: str, **options: Any) -> tuple[int, ...]:
        encoded.append(text)
        return encode(text, **options)

    monkeypatch.setattr(TOKENIZER, "encode", counted)
    async with served(None, max_queued=128) as server:
        seen: list[int] = []

        async def one() -> None:
            response = await server.post("/v1/completions", **ASK)
            assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
            seen.append(len(encoded))

        requests = [asyncio.ensure_future(one()) for _ in range(256)]
        await until(lambda: len(seen) == 128)
        assert sorted(seen)[-8] < 16, "refusals waited until others had been read"
        await until(lambda: len(server.port.submitted) == 128)
        assert len(encoded) < 128 + 8, "what is refused is not tokenised"
        for task in requests:
            task.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        assert not server.backend._active


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/generate", "/v1/embeddings"])
async def test_a_full_queue_refuses_before_it_parses(path: str) -> None:
    async with served(None, max_queued=1) as server:
        first = asyncio.ensure_future(server.post("/v1/completions", **ASK))
        await until(lambda: server.port.submitted)
        assert (await server.client.post(path, content=b"this is no JSON", headers=JSON)).status_code == 429
        assert (await server.post("/tokenize", prompt="the")).status_code == 200, "what needs no place is answered"
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert (await server.client.post(path, content=b"this is no JSON", headers=JSON)).status_code == 400


async def test_while_the_engine_starts_again_requests_are_refused_before_they_are_parsed() -> None:
    async with served() as server:
        server.port.die("signal 9")
        response = await server.client.post("/v1/completions", content=b"this is no JSON", headers=JSON)
        assert response.status_code == 503 and "retry-after" in response.headers


async def test_a_full_queue_refuses_before_the_body_has_come() -> None:
    async with running(None, max_queued=1) as (server, where, _):
        port = int(where.rpartition(":")[2])
        first = asyncio.ensure_future(ask(port, "POST", "/v1/completions", ASK))
        await until(lambda: server.port.submitted)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head, _, _ = request("POST", "/v1/completions", ASK).partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        assert answers(await reader.read())[0].status == 429
        writer.close()
        first.cancel()


async def test_bodies_that_come_slowly_do_not_count_as_queued() -> None:
    async with running(max_queued=2) as (_, where, _):
        port = int(where.rpartition(":")[2])
        head, _, _ = request("POST", "/v1/completions", ASK).partition(b"\r\n\r\n")
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        for _, writer in slow:
            writer.write(head + b"\r\n\r\n{")
        assert (await ask(port, "POST", "/v1/completions", ASK)).status == 200
        for _, writer in slow:
            writer.close()


async def test_prompts_that_do_not_fit_together_are_refused_before_any_is_begun() -> None:
    async with served(None, max_queued=8) as server:
        first = asyncio.ensure_future(server.post("/v1/completions", **ASK))
        await until(lambda: server.port.submitted)
        response = await server.post("/v1/completions", prompt=["the"] * 8, max_tokens=4)
        assert response.status_code == 429 and "8 more are asked for" in response.json()["error"]["message"]
        assert len(server.port.submitted) == 1 and not server.port.aborted
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_a_client_that_disconnects_while_waiting_gives_up_its_turn() -> None:
    gate = AdmissionGate(lambda held: None)
    order: list[int] = []

    async def one(number: int) -> None:
        with gate.slot() as place:
            await gate.wait_turn(place)
            order.append(number)

    tasks = [asyncio.ensure_future(one(number)) for number in range(5)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 1, 3, 4] and gate._num_counted == 0


async def test_turns_are_an_iteration_of_the_loop_apart() -> None:
    """Whatever else is ready, such as a socket or an answer under way, is served between two requests."""
    gate, order = AdmissionGate(lambda held: None), []

    async def one(number: int) -> None:
        await gate.wait_turn()
        order.append(number)

    tasks = [asyncio.ensure_future(one(number)) for number in range(8)]
    most = Counter[int]()
    for tick in range(100):
        before = len(order)
        await asyncio.sleep(0)
        most[tick] = len(order) - before
    assert order == list(range(8)) and max(most.values()) == 1
    await asyncio.gather(*tasks)
