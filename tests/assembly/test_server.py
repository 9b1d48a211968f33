"""What a server is put together from follows from its settings."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.assembly import server
from quire.config import Settings
from quire.engine.executor import Description
from quire.server.limits import Limits
from tests.expected import check


def limits_of(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Limits:
    """The bounds on requests of a server with these options, which is not started."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(server, "create_app", lambda backend, **parts: seen.update(parts))
    monkeypatch.setattr(server, "listen", lambda host, port: SimpleNamespace())
    monkeypatch.setattr(server, "run", lambda *args, **rest: None)
    server.serve(Settings.of(**options))
    found = seen["limits"]
    assert isinstance(found, Limits)
    return found


@pytest.mark.parametrize(("queued", "most"), [(2048, 1024), (1024, 1024), (7, 7)])
def test_no_request_asks_for_more_answers_than_the_queue_could_ever_hold(
    queued: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused as too busy, it would be sent again for ever."""
    assert limits_of(monkeypatch, max_num_queued_reqs=queued).max_answers == most


def seeds_of(monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[int]:
    """The seeds of the first three requests that bring none, of a server with these options."""
    seen: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(server, "create_app", lambda backend, **parts: seen.append(backend))
        patched.setattr(server, "listen", lambda host, port: SimpleNamespace())
        patched.setattr(server, "run", lambda *args, **rest: None)
        server.serve(Settings.of(**options))
    return [seen[0].seeds() for _ in range(3)]


def test_requests_without_a_seed_draw_from_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    first = seeds_of(monkeypatch, seed=7)
    assert len({*first}) == 3
    assert seeds_of(monkeypatch, seed=7) == first
    assert seeds_of(monkeypatch, seed=8) != first
    assert seeds_of(monkeypatch) != seeds_of(monkeypatch)


@pytest.mark.parametrize(("policy", "used"), [("fcfs", False), ("priority", True)])
def test_priorities_are_taken_where_the_policy_uses_them(
    policy: str, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert limits_of(monkeypatch, scheduling_policy=policy).priorities is used


def test_bodies_and_answers_are_bounded_as_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    found = limits_of(monkeypatch, max_body_bytes=12_345, max_n=3)
    assert (found.max_body_bytes, found.max_n) == (12_345, 3)


def wired(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **options: Any) -> str:
    """What a server with these options is made of, as text; it is not started."""
    lines: list[str] = []

    def app(backend: Any, **parts: Any) -> None:
        own, about = backend.engine, backend.model()
        names, parsers = ", ".join(about.names), f"{about.tool_parser} {about.reasoning_parser}"
        lines.append(f"card {names} {about.root} {about.defaults} {parsers}")
        lines.append(
            f"queued {backend.max_queued} observers {[type(one).__name__ for one in backend.observer._observers]}"
        )
        lines.append(f"engine {own.argv[1:]} {own.environment} {own.standby_after} seed {own.settings['seed']}")
        lines.append(f"secrets {[name for name in own.settings if 'key' in name]}")
        lines.extend([f"limits {parts['limits']}", f"origins {parts['origins']} recording {parts['recording']}"])
        lines.append(f"tokenizer {sorted(parts['tokenizer_info'] or ())}")
        keys, rates, hosts = parts["keys"], parts["rates"], parts["hosts"]
        lines.append(f"keys {keys.needed} {keys.has_admin} {len(keys._keys)} {len(keys._admin)}")
        lines.append(f"rates {rates._requests} {rates._tokens}")
        lines.append(f"hosts {hosts._any} {sorted(hosts._names)} {hosts._below}")
        batches = parts["batch_service"]
        lines.append(f"batches {batches and batches._width}")
        if batches:
            asyncio.run(batches.stop())
        stored = parts["state"]._store
        lines.append(f"stored {stored.most} {stored._most_bytes} {stored.read_cost > 0}")
        asyncio.run(parts["state"].stop())

    def served(app: Any, backend: Any, sock: Any, **parts: Any) -> Any:
        parts.pop("batch_service"), parts.pop("on_ready"), parts.pop("log_config")
        lines.append(f"served {parts}")

        async def ran() -> None:
            lines.append("ran")

        return ran()

    async def with_stats(running: Any, stats: Any, log: Any) -> None:
        lines.append("statistics are logged")
        await running

    monkeypatch.setattr(server, "create_app", app)
    monkeypatch.setattr(server, "listen", lambda host, port: lines.append(f"listen {host} {port}"))
    monkeypatch.setattr(server, "serve_app", served)
    monkeypatch.setattr(server, "check_files", lambda access: lines.append(f"files {access.ssl_keyfile}"))
    monkeypatch.setattr(server, "run_with_stats", with_stats)
    monkeypatch.setattr(server.heap, "settled", lambda: lines.append("settled"))
    server.serve(Settings.of(**options))
    return "\n".join(lines).replace(str(tmp_path), "FOLDER")


WIRED: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        "served_model_name": ("name", "also", "name"),
        "enable_tokenizer_info_endpoint": True,
        "host": "0.0.0.0",
        "port": 81,
        "api_key": ("a", "b"),
        "admin_key": "c",
        "allowed_hosts": "x.example, *.y.example",
        "allowed_origins": "https://z.example",
        "max_requests_per_minute": 5,
        "max_tokens_per_minute": 600,
        "max_num_queued_reqs": 9,
        "max_body_bytes": 2048,
        "max_n": 2,
        "scheduling_policy": "priority",
        "enable_log_requests": True,
        "disable_log_stats": True,
        "standby_engine": False,
        "max_connections": 7,
        "max_header_bytes": 4096,
        "timeout_keep_alive": 1.5,
        "read_timeout": 2.5,
        "write_timeout": 3.5,
        "shutdown_timeout": 4.5,
        "uvicorn_log_level": "debug",
        "root_path": "/x",
        "ssl_keyfile": "k",
        "ssl_certfile": "c",
        "batch_concurrency": 3,
        "seed": 11,
        "tool_call_parser": "mistral",
        "reasoning_parser": "qwen3",
    },
    "a key on loopback": {"api_key": "a", "host": "localhost"},
    "a network without keys": {"host": "0.0.0.0"},
    "names on a network": {"host": "10.0.0.1", "allowed_hosts": "x.example"},
}


@pytest.mark.parametrize("name", WIRED)
def test_a_server_is_made_of_what_its_options_say(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = WIRED[name]
    if name == "everything":
        folders = {
            "batch_dir": str(tmp_path / "b"),
            "state_dir": str(tmp_path / "s"),
            "recording_dir": str(tmp_path / "r"),
            "address_file": "FOLDER/a",
        }
        options = options | folders
    text = wired(monkeypatch, tmp_path, **options)
    check(Path(__file__).parent / "expected" / f"server-{name.replace(' ', '-')}.txt", text)


@pytest.mark.parametrize(
    ("blocks", "rows", "said"),
    [
        (24, 8, "(24.00 KiB): 1 sequence of that length at once"),
        (8192, 64, "(8.00 MiB): 64 sequences of that length at once"),
        (33, 64, "(33.00 KiB): 2 sequences of that length at once"),
    ],
)
def test_a_start_says_how_many_of_the_longest_sequences_run_at_once(blocks: int, rows: int, said: str) -> None:
    about = Description(blocks, 16, rows, 256, 100, device="cpu", dtype="bfloat16", block_bytes=1024)
    assert server.capacity(about, 256) == (
        f"on cpu in bfloat16; context 256 tokens; KV cache of {blocks:,} blocks of 16 tokens {said}"
    )
