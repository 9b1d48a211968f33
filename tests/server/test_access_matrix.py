"""Who may ask for what: every path by every kind of client, with the status of each, and every form of a Host field
and of a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.errors import Unauthorized
from quire.server.access import Hosts, Keys, request_id
from quire.server.hosts import loopback
from tests.expected import check
from tests.server.doubles import served

pytestmark = pytest.mark.anyio

EXPECTED = Path(__file__).parent / "expected"
PATHS = """
GET /health, GET /health/live, GET /health/ready, GET /ping, POST /ping, GET /version, GET /v1/models, GET /stats,
GET /load, GET /metrics, GET /v1/requests, GET /v1/requests/x/explain, GET /v1/recording, GET /ui,
POST /reset_prefix_cache, POST /v1/completions, GET /openapi.json, GET /statsx, GET /v1/files, OPTIONS /v1/models, GET /
"""
CLIENTS: dict[str, dict[str, str]] = {
    "nobody": {},
    "key": {"authorization": "Bearer sesame"},
    "key in another header": {"x-api-key": "sesame"},
    "admin": {"authorization": "bearer  open "},
    "wrong": {"authorization": "Bearer sesam"},
    "no bearer": {"authorization": "Basic sesame", "x-api-key": "sesame"},
    "empty": {"authorization": "Bearer "},
    "proxied": {"authorization": "Bearer open", "x-forwarded-for": "1.2.3.4"},
    "foreign name": {"authorization": "Bearer open", "host": "evil.example"},
}
SERVERS: dict[str, dict[str, Any]] = {
    "open": {},
    "keys": {"api_keys": ("sesame", "other")},
    "keys and admins": {"api_keys": ("sesame",), "admin_keys": ("open",)},
    "admins": {"admin_keys": ("open",)},
}


@pytest.mark.parametrize("kind", SERVERS)
async def test_each_client_may_ask_for_what_is_written_down(kind: str) -> None:
    lines = []
    async with served(**SERVERS[kind]) as server:
        for address in ("127.0.0.1", "10.0.0.9"):
            transport = httpx.ASGITransport(app=server.app, client=(address, 5))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                for who, headers in CLIENTS.items():
                    said = []
                    for path in map(str.strip, PATHS.split(",")):
                        method, where = path.split()
                        answer = await client.request(method, where, headers=headers)
                        code = answer.json()["error"].get("code") if answer.status_code in (401, 403) else ""
                        said.append(f"  {path} {answer.status_code} {code}".rstrip())
                    lines += [f"{who} at {address}", *said]
    check(EXPECTED / f"access-{kind.replace(' ', '-')}.txt", "\n".join(lines))


HOSTS = """
localhost localhost:8000 LOCALHOST. a.localhost localhost.evil 127.0.0.1 127.9.9.9:80 [::1]:1 ::1 [::ffff:127.0.0.1]
[::ffff:1.2.3.4] 10.0.0.1:80 [fe80::1] [::1]x example.com EXAMPLE.com:5 a.example.com a.b.example.com example.com.evil
badexample.com :80 * 0.0.0.0 127.1 other
"""


def test_host_fields_are_known_as_written_down() -> None:
    servers = {
        "any": Hosts(),
        "local": Hosts(()),
        "named": Hosts(["Example.com.", "*.example.com"]),
        "star": Hosts(["*"]),
    }
    lines = []
    for field in ["", *HOSTS.split()]:
        said = [f"loopback {loopback(field)}"]
        for name, hosts in servers.items():
            try:
                hosts.check({"host": field})
                may = "may"
            except Exception as error:
                may = f"may not ({type(error).__name__} {getattr(error, 'code', '')})"
            said.append(f"{name}: {'known' if hosts.known(field) else 'unknown'}, {may}")
        lines.append(f"{field!r} {'; '.join(said)}")
    check(EXPECTED / "hosts.txt", "\n".join(lines))


FIELDS = [
    "a",
    "é",
    "Bearer a",
    "Bearer é",
    "token=a;b",
    'key="c", x',
    "x a y",
    "Basic a",
    "ab",
    "",
    "Bearer  c ",
    "a=b",
]


def test_keys_are_found_as_written_down() -> None:
    lines = []
    for name, keys in {
        "none": Keys(),
        "one": Keys(["a"]),
        "same twice": Keys(["a"], ["a"]),
        "several": Keys(["a", "é"], ["c"]),
        "admins": Keys([], ["c"]),
    }.items():
        lines.append(
            f"{name}: {keys.needed} {keys.needed_for_admins} {keys.has_admin} {keys.tenant(0)!r} {keys.tenant(1)!r}"
        )
        for field in FIELDS:
            said = [str(keys.in_field(field.encode()))]
            for admin in (False, True):
                try:
                    said.append(str(keys.check({"authorization": field.encode().decode("latin-1")}, admin=admin)))
                except Unauthorized as error:
                    said.append(str(error).split(":")[0])
            lines.append(f"  {field!r} {', '.join(said)}")
    check(EXPECTED / "keys.txt", "\n".join(lines))


def test_a_request_id_is_repeated_where_it_is_safe() -> None:
    for safe in ("a", "A-1.b_c:d", "x" * 128):
        assert request_id({"x-request-id": safe}) == safe
    for unsafe in ("", "x" * 129, "a b", "é", "a\n", "a/b"):
        made = request_id({"x-request-id": unsafe})
        assert made != unsafe and len(made) == 32
