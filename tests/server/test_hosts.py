"""Which pages, names and machines may use a server: DNS rebinding, CORS, and what is for the server's own machine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.assembly.server import build_hosts
from quire.config import Settings
from quire.errors import InvalidConfig
from quire.server.access import PUBLIC_PATHS, ForeignHost, Hosts, Keys
from quire.server.app import create_app
from quire.server.batch_api.runner import BatchService
from quire.server.endpoints import answerer
from quire.server.error_responses import OLLAMA_PATHS
from quire.server.hosts import loopback
from quire.server.limits import Limits
from quire.server.openapi import OPERATIONS
from tests.contract.wire import request, send
from tests.server.doubles import check_error, served
from tests.server.test_serve import running

pytestmark = pytest.mark.anyio

HERE = (
    *("localhost", "LOCALHOST", "localhost.", "localhost:8000", "app.localhost:3000", "127.0.0.1", "127.0.0.1:8000"),
    *("[::1]", "[::1]:8000", "[::ffff:127.0.0.1]:80", "10.1.2.3:8000", "192.168.0.7", "[2001:db8::1]:8000", ""),
)
ELSEWHERE = (
    *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evillocalhost"),
    *("localhost.evil.example.", "127.0.0.1.nip.io:8000", "quire", "0x7f.1", "2130706433", "[::1].evil.example"),
)


@asynccontextmanager
async def client_of(
    client: str = "127.0.0.1", *, keys: Keys | None = None, service: Any = None, **access: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A server, asked from that address."""
    async with served() as server:
        app = create_app(server.backend, keys=keys, batch_service=service, **access)
        transport = httpx.ASGITransport(app=app, client=(client, 40000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as asks:
            yield asks


@pytest.mark.parametrize("host", HERE)
def test_names_of_this_machine_and_addresses_are_answered(host: str) -> None:
    Hosts(()).check({"host": host})


@pytest.mark.parametrize("host", ELSEWHERE)
def test_other_names_are_refused_and_the_option_is_named(host: str) -> None:
    with pytest.raises(ForeignHost, match="--allowed-hosts"):
        Hosts(()).check({"host": host})
    Hosts(("*",)).check({"host": host})


def test_allowed_hosts_are_names_and_all_names_below_one_in_any_case_with_any_port() -> None:
    hosts = Hosts(("Quire.Example.com", "*.lab.example", "local.example."))
    for host in ("quire.example.com", "QUIRE.example.com.:443", "a.lab.example", "a.b.lab.example:80", "local.example"):
        hosts.check({"host": host})
    for host in ("example.com", "x.quire.example.com", "lab.example", "evil-lab.example", "notlocal.example"):
        with pytest.raises(ForeignHost):
            hosts.check({"host": host})


@pytest.mark.parametrize(
    ("options", "strange", "known"),
    [
        ({}, False, ()),
        ({"host": "localhost"}, False, ()),
        ({"host": "::1"}, False, ()),
        ({"admin_key": "boss"}, False, ()),
        ({"allowed_hosts": "quire.example"}, False, ("quire.example",)),
        ({"allowed_hosts": "*"}, True, ()),
        ({"api_key": "k"}, True, ()),
        ({"host": "0.0.0.0"}, True, ()),
        ({"host": "10.1.2.3"}, True, ()),
        ({"host": "0.0.0.0", "allowed_hosts": "quire.example"}, False, ("quire.example",)),
        ({"host": "box.example", "allowed_hosts": "quire.example"}, False, ("quire.example", "box.example")),
    ],
)
def test_strange_names_are_refused_where_pages_could_use_them(
    options: dict[str, str], strange: bool, known: tuple[str, ...]
) -> None:
    hosts = build_hosts(Settings.of(**options))
    for host in ("127.0.0.1:8000", "localhost", *known):
        hosts.check({"host": host})
    if strange:
        hosts.check({"host": "evil.example"})
    else:
        with pytest.raises(ForeignHost):
            hosts.check({"host": "evil.example"})


async def test_a_page_that_rebinds_its_name_gets_nothing_from_any_route(tmp_path: Path) -> None:
    async with served() as server:
        service = BatchService(tmp_path, answerer(server.backend, Limits(), "x"), Limits(), width=1)
        async with client_of(service=service, hosts=Hosts(())) as client:
            for operation in OPERATIONS:
                path = operation.path.replace("{id}", "x")
                response = await client.request(operation.method, path, headers={"host": "evil.example:8000"})
                assert response.status_code == (200 if path in PUBLIC_PATHS else 403), path
                if path in OLLAMA_PATHS:
                    assert "evil.example" in response.json()["error"]
                elif path not in PUBLIC_PATHS:
                    assert response.json()["error"]["type"] == "permission_error"
            for path in ("/v1/models", "/ui", "/ui/app.js", "/openapi.json", "/nope"):
                error = check_error(await client.get(path, headers={"host": "evil.example"}), 403, words="evil.example")
                assert error["code"] == "host_not_allowed"
        await service.stop()


async def test_http_1_0_needs_no_host_and_probes_may_name_any() -> None:
    async with running() as (server, where, _):
        server.app._hosts = Hosts(())
        port = int(where.rpartition(":")[2])
        [old] = await send(port, b"GET /version HTTP/1.0\r\n\r\n", seconds=60)
        [probe] = await send(port, request("GET", "/health", None, {"Host": "pod.example"}), seconds=60)
        [page] = await send(port, request("GET", "/version", None, {"Host": "evil.example"}), seconds=60)
        [proxy] = await send(port, request("GET", "http://evil.example/version", None), seconds=60)
    assert [answer.status for answer in (old, probe, page, proxy)] == [200, 200, 403, 403]


LOCAL = ("/v1/requests", "/v1/requests/x/explain", "/v1/recording", "/ui/events", "/ui/servers")


@pytest.mark.parametrize("keys", [Keys(), Keys(("client",))])
async def test_without_an_admin_key_single_requests_are_shown_to_this_machine_only(keys: Keys) -> None:
    headers = {"authorization": "Bearer client"}
    async with client_of("10.0.0.9", keys=keys, hosts=Hosts(("*",))) as client:
        for path in LOCAL:
            assert check_error(await client.get(path, headers=headers), 403)["code"] == "not_this_machine"
        check_error(await client.post("/reset_prefix_cache", headers=headers), 403, words="--admin-key")
        for path in ("/stats", "/load", "/metrics", "/v1/models", "/version", "/ui"):
            assert (await client.get(path, headers=headers)).status_code == 200
    for address in ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"):
        async with client_of(address, keys=keys, hosts=Hosts(("*",))) as client:
            for path in LOCAL[:3]:
                assert (await client.get(path, headers=headers)).status_code in (200, 404)
            assert (await client.post("/reset_prefix_cache", headers=headers)).status_code == 200
            for proxied in ("x-forwarded-for", "forwarded", "via", "x-real-ip"):
                check_error(await client.get(LOCAL[0], headers={**headers, proxied: "10.0.0.9"}), 403)
            check_error(await client.get(LOCAL[0], headers={**headers, "host": "evil.example"}), 403)


async def test_an_admin_key_opens_them_from_anywhere_and_only_it() -> None:
    async with client_of("10.0.0.9", keys=Keys((), ("boss",)), hosts=Hosts(("*",))) as client:
        for path in LOCAL[:3]:
            assert (await client.get(path, headers={"authorization": "Bearer boss"})).status_code in (200, 404)
        assert (await client.post("/reset_prefix_cache", headers={"x-api-key": "boss"})).status_code == 200
    async with client_of("127.0.0.1", keys=Keys((), ("boss",))) as client:
        for path in LOCAL:
            check_error(await client.get(path), 401)
        check_error(await client.post("/reset_prefix_cache"), 401)


PAGE = "https://chat.example.com"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


async def test_pages_of_allowed_origins_may_ask_and_read_and_no_others() -> None:
    async with client_of(keys=Keys(("k",)), origins=(PAGE, "http://localhost:3000")) as client:
        asks = await client.options("/v1/chat/completions", headers={"origin": PAGE, **PREFLIGHT})
        assert asks.status_code == 200
        assert asks.headers["access-control-allow-origin"] == PAGE
        assert {"POST", "GET", "DELETE"} <= set(asks.headers["access-control-allow-methods"].split(", "))
        assert asks.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        assert "access-control-allow-credentials" not in asks.headers
        body = {"prompt": "the", "max_tokens": 4, "stream": True}
        for key, status in (("k", 200), ("wrong", 401)):
            headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
            assert "Origin" in answer.headers["vary"]
        for origin in ("https://evil.example", "null", "https://chat.example.com:8443", "http://chat.example.com"):
            refused = await client.options("/v1/chat/completions", headers={"origin": origin, **PREFLIGHT})
            check_error(refused, 400, words="--allowed-origins")
            read = await client.get("/v1/models", headers={"origin": origin, "authorization": "Bearer k"})
            for response in (refused, read):
                assert "access-control-allow-origin" not in response.headers


async def test_any_origin_is_allowed_by_a_star() -> None:
    async with client_of(origins=("*",)) as client:
        asks = await client.options("/v1/models", headers={"origin": PAGE, **PREFLIGHT})
        read = await client.get("/v1/models", headers={"origin": PAGE})
    assert [one.headers["access-control-allow-origin"] for one in (asks, read)] == ["*", "*"]


async def test_no_page_may_ask_by_default() -> None:
    async with client_of() as client:
        check_error(await client.options("/v1/chat/completions", headers={"origin": PAGE, **PREFLIGHT}), 405)
        read = await client.get("/v1/models", headers={"origin": PAGE})
        assert not [name for name in read.headers if name.startswith("access-control")]


@pytest.mark.parametrize(("origins", "status"), [((), 403), (("https://other.example",), 403), ((PAGE,), 200)])
async def test_what_pages_could_send_unasked_is_refused_but_from_allowed_origins(
    origins: tuple[str, ...], status: int
) -> None:
    async with client_of(origins=origins) as client:
        headers = {"origin": PAGE, "sec-fetch-site": "cross-site"}
        assert (await client.post("/reset_prefix_cache", headers=headers)).status_code == status


@pytest.mark.parametrize(
    "values",
    [
        *({"allowed_hosts": name} for name in ("http://a", "a:80", "a/b", "*a", "a.*", "*.", "a b", "ä.example", "..")),
        *(
            {"allowed_origins": name}
            for name in ("a.example", "https://a/", "https://*.a", "null", "https://a:x", '["*"]')
        ),
    ],
)
def test_what_is_no_host_or_origin_is_refused_at_the_start(values: dict[str, str]) -> None:
    [name] = values
    with pytest.raises(InvalidConfig, match="write") as caught:
        Settings.of(**values)
    assert caught.value.param == name


def test_several_hosts_and_origins_are_given_with_commas() -> None:
    access = Settings.of(
        allowed_hosts="a.example,*.b.example,[::1],::1,fd00::7,10.0.0.1,*",
        allowed_origins="https://a.example,http://localhost:3000,http://[::1]:3000,tauri://localhost,*",
    ).access
    assert len(access.allowed_hosts) == 7 and len(access.allowed_origins) == 5


@pytest.mark.parametrize(
    ("host", "here"),
    [("localhost", True), ("127.1.2.3", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("example", False)],
)
def test_which_addresses_are_loopback(host: str, here: bool) -> None:
    assert loopback(host) is here
