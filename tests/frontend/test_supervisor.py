"""A private server: its start, its log, its deaths, its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.engine.timing import RestartBackoff
from quire.errors import InvalidConfig, Unavailable
from quire.frontend import supervisor
from quire.frontend.http_client import Origin
from quire.frontend.supervisor import PrivateServer, free_port
from quire.frontend.upstream import UpstreamBackend
from quire.observability.live_view import RequestTimeline
from quire.observability.observer import ObserverGroup
from quire.scheduler.routing import RoutingPolicy
from tests.live import Live, ended_server, environment, serving

pytestmark = pytest.mark.anyio

FAKE = """
import http.server, os, sys
print("starting with", *sys.argv[1:], flush=True)
if "--broken" in sys.argv:
    print("ValueError: no such model", flush=True)
    print("shutting down", flush=True)
    sys.exit(3)

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        known = self.path == "/health" or self.headers["authorization"] == "Bearer " + os.environ["VLLM_API_KEY"]
        body = b'{"data": [{"id": "fake"}]}' if known else b"{}"
        self.send_response(200 if known else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    path = tmp_path / "fake vllm.py"
    path.write_text(FAKE)
    return path


def behind(server: PrivateServer, port: int) -> UpstreamBackend:
    return UpstreamBackend(
        [Origin.parse(f"127.0.0.1:{port}")],
        supervisor=server,
        observer=ObserverGroup(),
        request_observer=RequestTimeline("stub"),
        kind="vllm",
        headers=[(b"authorization", b"Bearer k")],
        max_outstanding=8,
        routing=RoutingPolicy(),
        start_timeout=200,
    )


async def until(true: Callable[[], bool], seconds: float = 100.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)


def test_a_free_port_is_none_that_outgoing_connections_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_HANDED_OUT", tmp_path / "range")
    for first, allowed in ((20_000, range(10_000, 20_000)), (1024, range(1024, 1 << 16))):
        (tmp_path / "range").write_text(f"{first}\t60999\n")
        assert all(free_port() in allowed for _ in range(20))
    (tmp_path / "range").unlink()
    assert free_port() > 1023  # a system that does not say


async def test_it_is_restarted_when_it_dies_and_ends_when_closed(fake: Path, tmp_path: Path) -> None:
    port = free_port()
    kept = tmp_path / "log"
    server = PrivateServer(
        [sys.executable, str(fake), "--port", str(port)], {"VLLM_API_KEY": "k"}, kept, backoff=RestartBackoff(0.05)
    )
    backend = behind(server, port)
    await backend.start()
    assert backend.ready() and backend.name == "fake"
    for deaths in (1, 2):
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: not backend.ready())
        await until(backend.ready)
        assert server.restarts == deaths
    last = server.pid
    await backend.close()
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)
    assert kept.read_text().count("starting with --port") == 3


async def test_one_that_ends_before_it_is_ready_is_an_error_with_what_it_said(fake: Path, tmp_path: Path) -> None:
    server = PrivateServer([sys.executable, str(fake), "--broken"], {}, tmp_path / "log")
    backend = behind(server, free_port())
    try:
        with pytest.raises(Unavailable, match=r"ended with code 3 before it was ready; .*ValueError: no such model"):
            await backend.start()
    finally:
        await backend.close()
    assert server.restarts == 0


async def test_what_it_had_started_itself_ends_with_it(tmp_path: Path) -> None:
    """Workers that outlive a server hold the device, and the next one could not start."""
    note = tmp_path / "pid"
    starts = (
        "import pathlib, subprocess, sys\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(999)'])\n"
        "pathlib.Path(sys.argv[1]).write_text(str(worker.pid))"
    )
    server = PrivateServer([sys.executable, "-c", starts, str(note)], {}, tmp_path / "log")
    deaths: list[str] = []
    try:
        await server.start(deaths.append)
        await until(lambda: bool(deaths))
        worker = int(note.read_text())
        await until(lambda: not _lives(worker))
    finally:
        await server.close()


async def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    server = PrivateServer(["no-such-vllm"], {}, tmp_path / "log")
    with pytest.raises(InvalidConfig, match=r"no-such-vllm.*--vllm-command"):
        await server.start(lambda why: None)


def test_serve_starts_it_with_what_follows_the_dashes(fake: Path, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    command = f"'{sys.executable}' '{fake}'"
    flags = ("--max-model-len", "1k", "--no-enable-prefix-caching", "--vllm-command", command, "--vllm-log", str(log))
    names = ("--served-model-name", "a", "--served-model-name", "b")
    rest = (*names, "--", "--tensor-parallel-size", "2", "--odd=a,b")
    with serving(tmp_path, "--backend", "vllm", "--model", "some/model", *flags, *rest) as live:
        assert live.stats()["backend"] == "vllm" and "fake is ready at" in live.log
        assert live.metric("vllm:num_requests_running", model_name="a") == 0
        pid = live.engine_pid()
        said = log.read_text().splitlines()[0]
    assert said.startswith(
        "starting with serve some/model --served-model-name a b --max-model-len 1000 --no-enable-prefix-caching --host "
    )
    assert said.endswith("--tensor-parallel-size 2 --odd=a,b")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_it_does_not_outlive_a_front_that_is_killed(fake: Path, tmp_path: Path) -> None:
    args = ("--backend", "vllm", "--model", "m", "--vllm-command", f"'{sys.executable}' '{fake}'")
    log = tmp_path / "log"
    with log.open("w") as out:
        front = subprocess.Popen(
            [sys.executable, "-m", "quire", "serve", "--port", "0", *args], stderr=out, env=environment()
        )
    try:
        pid = Live(front, log).engine_pid()
    finally:
        front.kill()
        front.wait()
    deadline = time.monotonic() + 50
    while _lives(pid):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    """Whether it is there and no zombie, for who reaps it may be long in coming."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--backend", "openai"), "upstream"),
        (("--backend", "vllm"), "--model"),
        (("--backend", "vlm"), "'vllm'"),
        (("--upstream", "http://x"), "backend openai"),
        (("--backend", "openai", "--upstream", "http://127.0.0.1:9", "--max-num-seqs", "4"), "--max-num-seqs"),
        (("--backend", "vllm", "--model", "m", "--lookahead", "1"), "after --"),
        (("--backend", "openai", "--upstream", "http://127.0.0.1:9", "--batch-dir", "/tmp/b"), "batches"),
        (
            ("--backend", "openai", "--upstream", "http://[::1]:9,127.0.0.1:10", "--upstream-start-timeout", "0"),
            "[::1]:9: nothing listens there; http://127.0.0.1:10: nothing",
        ),
        (("--", "--tensor-parallel-size", "2"), "vllm_args"),
        (("--backend", "openai", "--upstrem", "http://x"), "--upstream"),
        (
            ("--backend", "openai", "--upstream", "http://127.0.0.1:9", "--upstream-start-timeout", "0"),
            "nothing listens",
        ),
    ],
)
def test_what_cannot_start_says_so_in_one_line(args: tuple[str, ...], says: str) -> None:
    done = ended_server(*args)
    asked_wrongly = "nothing" not in says  # 1: what was asked for is in order, and is not there
    assert done.returncode == (2 if asked_wrongly else 1), done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr, done.stderr
