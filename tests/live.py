"""A real `quire serve` on loopback, for tests that need the whole server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx

from tests.forked import NAME, Popen, forking, runs

if TYPE_CHECKING:
    from openai import OpenAI

ROOT = Path(__file__).parents[1]
_READY = re.compile(r"is ready at (https?://\S+) after")


class Memory(NamedTuple):
    """Bytes."""

    front: int
    engine: int

    @property
    def total(self) -> int:
        return self.front + self.engine


class Live:
    """A running server. `url` is its address, `log` what it has said."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log
        self.url = self._wait()
        self.http = httpx.Client(base_url=self.url, timeout=600.0, trust_env=False, verify=False)

    @cached_property
    def openai(self) -> OpenAI:
        """OpenAI's own client of it."""
        from openai import OpenAI

        return OpenAI(
            base_url=f"{self.url}/v1", api_key="none", http_client=httpx.Client(trust_env=False, verify=False)
        )

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8")

    def _wait(self, seconds: float = 600.0) -> str:
        deadline = time.monotonic() + seconds
        while (said := _READY.search(self.log)) is None:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log
            time.sleep(0.02)
        return said[1]

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/stats").json()
        return found

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            head, _, value = line.rpartition(" ")
            bare = head.partition("{")[0]
            if bare == name and all(f'{k}="{v}"' in head for k, v in labels.items()):
                total += float(value)
        return total

    def settled(self, seconds: float = 100.0) -> dict[str, Any]:
        """The statistics once nothing runs and no page is held."""
        deadline = time.monotonic() + seconds
        while True:
            stats = self.stats()
            if not (stats["active_requests"] or stats["waiting_requests"] or stats["cache"]["used_pages"]):
                return stats
            assert time.monotonic() < deadline, stats
            time.sleep(0.02)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def memory(self) -> Memory:
        """Resident bytes of the server and its engine."""
        return Memory(resident(self.process.pid), resident(self.engine_pid()))

    def engine_pid(self) -> int:
        """The engine's process: the server's only child, but for what forks it."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(child) for child in children if not runs(child, NAME))

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.http.close()
        if "openai" in self.__dict__:
            self.openai.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(600)


def resident(pid: int) -> int:
    """Bytes of a process that are in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


FOREGROUND = (
    *(sys.executable, "-c"),
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])",
)
"""Runs the arguments after it with SIGINT as in the foreground: jobs in the background ignore it."""


def environment() -> dict[str, str]:
    """No settings but those given, this checkout's code, one thread for the model."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("QUIRE_", "OPENAI_"))}
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "NO_PROXY": "*"}


def ended_server(*args: str) -> subprocess.CompletedProcess[str]:
    """`quire serve` with arguments with which it ends by itself."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", *args]
    with forking():
        return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600, check=False)


def tls_pair(folder: Path) -> tuple[str, str]:
    """Files of a private key and of a certificate of its own for 127.0.0.1, in `folder`."""
    key, certificate = str(folder / "key.pem"), str(folder / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


@contextmanager
def serving(
    folder: Path,
    *args: str,
    ends: int = 0,
    module: str = "quire",
    environ: Mapping[str, str] = MappingProxyType({}),
    start: type[subprocess.Popen[bytes]] = Popen,
) -> Iterator[Live]:
    """`quire serve ARGS` on a port of the system's choice, stopped at the end; its log goes to `folder`.

    ends: the exit code it is to have. module: what is run, with the same arguments. environ: variables besides. No
    engine stands by, which would be a third process of each server. start: what makes the process; by default a fork.
    """
    log = folder / "server.log"
    with log.open("w") as out:
        process = start(
            [sys.executable, "-m", module, "serve", "--port", "0", *args],
            cwd=ROOT,
            stdout=out,
            stderr=out,
            env=environment() | {"QUIRE_STANDBY_ENGINE": "false"} | dict(environ),
        )
    live = None
    try:
        live = Live(process, log)
        yield live
    finally:
        code = live.stop() if live else process.kill()
        process.wait(600)
    assert code == ends, log.read_text()


class Behind(Live):
    """A server and another in front of it: what is asked is asked of the front, steps and pages are those behind it."""

    def __init__(self, front: Live, native: Live) -> None:
        self.front, self.native = front, native
        self.process, self.url, self.http = front.process, front.url, front.http
        self.openai = front.openai  # closed with it

    @property
    def log(self) -> str:
        return self.native.log + self.front.log

    def stats(self) -> dict[str, Any]:
        return self.native.stats()

    def engine_pid(self) -> int:
        return self.native.engine_pid()


@contextmanager
def standing(where: str, folder: Path, *args: str, front: tuple[str, ...] = ()) -> Iterator[Live]:
    """`serving`, asked at the server itself (`native`) or through another (`upstream`) that is started with `front`."""
    with serving(folder, *args) as native:
        if where == "native":
            yield native
            return
        inner = folder / "front"
        inner.mkdir()
        with serving(inner, "--backend", "openai", "--upstream", native.url, *front) as outer:
            yield Behind(outer, native)
