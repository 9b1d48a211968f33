"""What each key may ask for, and what only admins may see."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import pytest

from quire.server.access import BATCHES, PUBLIC_PATHS, Keys, Rates
from quire.server.app import create_app
from quire.server.batch_api.runner import BatchService
from quire.server.endpoints import answerer
from quire.server.limits import Limits
from quire.server.openapi import document
from tests.frontend.ports import FakePort
from tests.server.doubles import Served, answers, check_error, says, served, status

pytestmark = pytest.mark.anyio

ADMINS = ("/stats", "/load", "/metrics", "/v1/requests", "/v1/requests/x/explain", "/ui/events")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_a_key_over_its_rate_gets_retry_after_and_others_go_on() -> None:
    clock = Clock()
    async with served(api_keys=("a", "b"), rates=Rates(requests=6, clock=clock)) as server:

        async def ask(key: str) -> Any:
            return await server.client.post("/v1/completions", json={"prompt": "the"}, headers=bearer(key))

        assert [(await ask("a")).status_code for _ in range(8)] == [200] * 6 + [429] * 2
        refused = await ask("a")
        error = check_error(refused, 429, words="6 requests a minute")
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert refused.headers["retry-after"] == "10"
        assert (await ask("b")).status_code == 200
        assert (await server.client.get("/v1/models", headers=bearer("a"))).status_code == 200
        clock.now += 10.0
        assert [(await ask("a")).status_code for _ in range(2)] == [200, 429]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/embeddings",
        "/v1/generate",
        "/v1/messages/count_tokens",
        "/v1/responses/input_tokens",
        "/tokenize",
        "/api/chat",
        "/api/embed",
        "/api/show",
        "/api/pull",
    ],
)
async def test_every_endpoint_counts_towards_a_keys_rate(path: str) -> None:
    async with served(rates=Rates(requests=1, clock=Clock())) as server:
        await server.client.post(path, json={})
        assert (await server.client.post(path, json={})).status_code == 429
        assert (await server.client.post("/ping")).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer "}, {"authorization": "Bearer"}, {"x-api-key": ""}])
async def test_no_key_is_no_key_whatever_the_server_was_given(headers: dict[str, str]) -> None:
    async with served(api_keys=("",), admin_keys=("",)) as server:
        for path in ("/v1/models", "/stats"):
            check_error(await server.client.get(path, headers=headers), 401)


@pytest.mark.parametrize("streamed", [False, True])
async def test_tokens_of_prompts_and_answers_are_counted_and_have_to_be_made_up_for(streamed: bool) -> None:
    clock = Clock()
    async with served(rates=Rates(tokens=60, clock=clock), room=400) as server:
        used = 0
        while (response := await server.post("/v1/completions", prompt="the " * 10, max_tokens=20)).status_code == 200:
            used += response.json()["usage"]["total_tokens"]
        over = used - 60
        assert 0 <= over < used
        assert response.headers["retry-after"] == str(over + 1)  # a token a second, and one is left to ask with
        clock.now += over + 1
        if streamed:
            assert (await server.stream("/v1/completions", prompt="the " * 10, max_tokens=20))[-1]
        else:
            assert (await server.post("/v1/completions", prompt="the " * 10, max_tokens=20)).status_code == 200
        check_error(await server.post("/v1/completions", prompt="the"), 429, words="tokens a minute")


async def test_a_refused_request_costs_no_tokens() -> None:
    async with served(rates=Rates(tokens=60, clock=Clock())) as server:
        for _ in range(5):
            check_error(await server.post("/v1/completions", prompt="the " * 25, max_tokens=2000), 400)
        await server.complete()


async def hung_up(server: Served, tokens: str = "", **body: Any) -> None:
    """Ask for an answer, and leave before any of it could be read; `tokens` are generated before that."""
    before = len(server.port.submitted)
    pending = asyncio.ensure_future(server.post("/v1/completions", prompt="the " * 10, **body))
    async with asyncio.timeout(60):
        while len(server.port.submitted) == before:
            await asyncio.sleep(0)
    if tokens:
        server.port.say(server.port.submitted[-1], *says(tokens)[:-1])
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_admitted_prompt_is_charged_even_if_its_client_disconnects(stream: bool) -> None:
    async with served(None, rates=Rates(tokens=15, clock=Clock())) as server:
        for _ in range(2):
            await hung_up(server, stream=stream)
        assert sum(len(request.prompt) for request in server.port.submitted) > 15
        async with asyncio.timeout(60):
            refused = await server.post("/v1/completions", prompt="the", stream=stream)
        check_error(refused, 429, words="15 tokens a minute")
        assert len(server.port.submitted) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_that_were_generated_are_charged_though_no_text_of_them_was_sent(stream: bool) -> None:
    async with served(None, rates=Rates(tokens=60, clock=Clock())) as server:
        await hung_up(server, "dog " * 60, stream=stream, max_tokens=100, stop=["dog " * 100])
        async with asyncio.timeout(60):
            refused = await server.post("/v1/completions", prompt="the", stream=stream)
        check_error(refused, 429, words="tokens a minute")


async def test_every_prompt_of_a_request_is_charged_and_none_of_a_refused_one() -> None:
    async with served(None, rates=Rates(tokens=60, clock=Clock())) as server:
        check_error(await server.post("/v1/completions", prompt=["the " * 10, "the " * 3000]), 400)
        before = len(server.port.submitted)
        pending = asyncio.ensure_future(server.post("/v1/completions", prompt=["the " * 20] * 4))
        async with asyncio.timeout(60):
            while len(server.port.submitted) < before + 4:
                await asyncio.sleep(0)
            refused = await server.post("/v1/completions", prompt="the")
        check_error(refused, 429, words="tokens a minute")
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)


async def salts(server: Any, *keys: str, **body: Any) -> list[str]:
    """The salt with which the engine looks for a cached prefix, for a request of each key."""
    for key in keys:
        response = await server.client.post("/v1/completions", json={"prompt": "the", **body}, headers=bearer(key))
        assert response.status_code == 200, response.text
    return [request.cache_salt for request in server.port.submitted[-len(keys) :]]


async def test_where_there_are_several_keys_each_has_cached_prefixes_of_its_own() -> None:
    async with served(api_keys=("a", "b"), admin_keys=("boss",)) as server:
        first, second, third, again = await salts(server, "a", "b", "boss", "a")
        assert len({first, second, third}) == 3 and again == first and all((first, second, third))
        salted = await salts(server, "a", "b", "boss", "a", cache_salt="s")
        assert len({first, second, third, *salted}) == 6 and salted[3] == salted[0]
        guessed = {salt for tenant in "012" for salt in await salts(server, "a", cache_salt=tenant)}
        assert not guessed & {second, third}, "no salt of one key's choosing is another key's"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}),
        ("/v1/generate", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": ["hi", "you"], "n": 2}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "hi"}], "stream": False}),
        ("/api/generate", {"prompt": "hi", "stream": False}),
        ("/api/embed", {"input": "hi"}),
    ],
)
async def test_every_route_that_asks_the_engine_keeps_the_prefixes_of_keys_apart(
    path: str, body: dict[str, Any]
) -> None:
    port = FakePort(answers)
    port.about = replace(port.about, supports_pooling=True)
    async with served(api_keys=("a", "b"), port=port) as server:
        seen = []
        for key in ("a", "b"):
            known = len(server.port.submitted)
            await server.client.post(path, json=body, headers=bearer(key))
            seen.append({request.cache_salt for request in server.port.submitted[known:]})
        assert [len(one) for one in seen] == [1, 1] and seen[0] != seen[1] and "" not in seen[0] | seen[1]


@pytest.mark.parametrize(("api_keys", "admin_keys"), [((), ()), (("a",), ()), (("a", "a"), ()), ((), ("boss",))])
async def test_with_one_key_or_none_all_requests_share_cached_prefixes(
    api_keys: tuple[str, ...], admin_keys: tuple[str, ...]
) -> None:
    async with served(api_keys=api_keys, admin_keys=admin_keys) as server:
        assert await salts(server, "a", *(admin_keys or ("a",))) == ["", ""]
        one, other = await salts(server, "a", "a", cache_salt="s")
        assert one == other != ""


async def test_lines_of_batches_share_prefixes_among_themselves_and_with_no_key() -> None:
    async with served(api_keys=("a", "b")) as server:
        seen = set(await salts(server, "a", "b"))
        for tenant in ("-2", ""):
            answer = answerer(server.backend, Limits(), "test", tenant)
            await answer("/v1/completions", b'{"prompt": "the"}')
        batch, shared = (request.cache_salt for request in server.port.submitted[-2:])
        assert batch and batch not in seen and shared == ""
        assert Keys(("a", "b")).tenant(BATCHES) == "-2" and Keys(("a",)).tenant(BATCHES) == ""


@pytest.mark.parametrize("path", ADMINS)
@pytest.mark.parametrize("api_keys", [(), ("client",)])
async def test_where_there_is_an_admin_key_only_it_shows_what_others_ask(path: str, api_keys: tuple[str, ...]) -> None:
    async with served(api_keys=api_keys, admin_keys=("boss",)) as server:
        for headers in ({}, bearer("client"), bearer("")):
            check_error(await server.client.get(path, headers=headers), 401, words="the admin key")
        if path != "/ui/events":  # it would never end
            assert (await server.client.get(path, headers=bearer("boss"))).status_code in (200, 404)
        assert (await server.client.get("/v1/models", headers=bearer("boss"))).status_code == 200
        response = await server.client.get("/v1/models", headers=bearer("client"))
        assert response.status_code == 200
        assert (await server.client.get("/health")).status_code == 200
        browser = await server.client.post("/ui/session", json={"key": "client"})
        check_error(browser, 401)
        assert (await server.client.post("/ui/session", json={"key": "boss"})).status_code == 200


def spellings(path: str) -> list[str]:
    """Of a path, as servers, proxies and routers may or may not take them for the same."""
    first = path[1:2]
    odd = [
        f"/{path}",
        f"{path}/",
        f"{path}//",
        f"/.{path}",
        f"/x/..{path}",
        f"/health/..{path}",
        f"/health/%2e%2e{path}",
    ]
    odd += [
        path.upper(),
        path.title(),
        f"/%{ord(first or '/'):02x}{path[2:]}",
        f"{path};x=y",
        f"{path}%00",
        f"{path}%2f",
    ]
    return [
        path,
        *odd,
        f"{path}?x=/health",
        f"{path}#/health",
        f"http://server{path}",
        f"/health{path}",
        f"\\{path[1:]}",
    ]


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "FROB", "get")


async def test_no_route_in_any_spelling_by_any_method_opens_without_a_key(tmp_path: Path) -> None:
    """But health, the page on which keys are typed in, and that which lists routes."""
    async with served(api_keys=("secret",), admin_keys=("boss",)) as server:
        answer = answerer(server.backend, Limits(), "x")
        service = BatchService(tmp_path, answer, Limits(), width=1)
        app = create_app(server.backend, keys=Keys(("secret",), ("boss",)), batch_service=service)
        routes = {path.replace("{id}", "x") for path in msgspec.json.decode(document("0"))["paths"]}
        open_to_all = set()
        for path in sorted({*routes, "/openapi.json", "/docs", "/", "/nope"}):
            for method in METHODS:
                for spelling in spellings(path):
                    if await status(app, method, spelling) != 401:
                        open_to_all.add(unquote(spelling.partition("?")[0]))
        await service.stop()
        assert open_to_all == PUBLIC_PATHS | {"/docs"}


@pytest.mark.parametrize("path", ["//stats", "/stats/", "/STATS", "/%73tats", "/v1/requests/", "/v1/../stats"])
async def test_no_other_spelling_of_an_admin_path_opens_it(path: str) -> None:
    async with served(admin_keys=("boss",)) as server:
        assert (await server.client.get(f"http://server{path}")).status_code in (401, 404)
