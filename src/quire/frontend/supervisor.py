"""Runs a private upstream server as a child process, and restarts it when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from quire.engine.timing import RestartBackoff
from quire.errors import InvalidConfig

log = logging.getLogger("uvicorn.error")

_STOP_TIMEOUT = 10.0
"""Seconds between SIGTERM and SIGKILL."""
_LAST_LINES = 12
_LAST_BYTES = 64 << 10
_DIE_WITH_PARENT = 1
"""prctl's PR_SET_PDEATHSIG."""
_HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last port that Linux gives to outgoing connections, and to servers that ask for any."""


@dataclass(eq=False)
class PrivateServer:
    """One child process: argv, with `environment` added to this process's; its output is appended to `log_path`.

    name: of the server in the log. The child ends with this process (on Linux, even if this process is killed). One
    that ends before it was ever ready is not restarted, since it would fail again.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]
    log_path: Path
    name: str = "vllm"
    backoff: RestartBackoff = field(default_factory=partial(RestartBackoff, 0.5))
    restarts: int = 0
    _process: asyncio.subprocess.Process | None = None
    _watching: asyncio.Task[None] | None = None
    _on_death: Callable[[str], None] = lambda why: None
    _why: str | None = None
    _was_ready: bool = False

    async def start(self, on_death: Callable[[str], None]) -> None:
        """Start it. on_death: called with the reason each time it ends. Raises InvalidConfig."""
        self._on_death = on_death
        await self._spawn()
        log.info("%s runs as process %d; its log is %s", self.name, self.pid, self.log_path)
        self._watching = asyncio.ensure_future(self._watch())

    @property
    def pid(self) -> int:
        """Of the running process, -1 before the first start."""
        return -1 if self._process is None else self._process.pid

    async def close(self) -> None:
        """End it, and its own children."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._process is None or self._process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT)
        except TimeoutError:
            log.warning("%s did not exit within %g s and is killed", self.name, _STOP_TIMEOUT)
        # Its own children, too.
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def failure(self) -> str | None:
        """Why it will never be ready; None while it may be."""
        return self._why

    def on_ready(self) -> None:
        """It has answered: from now on it is restarted."""
        self._was_ready = True

    async def _spawn(self) -> None:
        try:
            with self.log_path.open("ab") as out:
                self._process = await asyncio.create_subprocess_exec(
                    *self.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env={**os.environ, **self.environment},
                    # Ctrl-C reaches this process only, which drains first.
                    start_new_session=True,
                    preexec_fn=_die_with_parent(),
                )
        except OSError as error:
            what = error.filename or self.argv[0]
            raise InvalidConfig(
                f"cannot start {self.argv[0]!r}: {what}: {(error.strerror or str(error)).lower()}; "
                "is it installed? See --vllm-command",
                param="vllm_command",
            ) from error

    async def _watch(self) -> None:
        """Restart the server whenever it ends, after pauses that double while it ends soon after its start."""
        while True:
            process = self._process
            began = time.monotonic()
            assert process is not None
            code = await process.wait()
            # Children that outlived it hold the device.
            self._signal(signal.SIGKILL)
            why = f"{self.name} ended with code {code}"
            self._on_death(why)
            for line in self.last_lines():
                log.error("  | %s", line)
            if not self._was_ready:
                self._why = f"{why} before it was ready; its log is {self.log_path}, and ends: {self._last_output()}"
                return
            self.backoff.on_death(time.monotonic() - began)
            log.error("%s; its log is %s; restart in %.1f s", why, self.log_path, self.backoff.delay)
            await self._restart()

    async def _restart(self) -> None:
        """Start it after a pause, and after longer ones while that fails."""
        while True:
            await asyncio.sleep(self.backoff.next_delay())
            self.restarts += 1
            try:
                await self._spawn()
                return
            except InvalidConfig as error:
                log.error("%s; again in %.1f s", error, self.backoff.delay)

    def last_lines(self, most: int = _LAST_LINES) -> list[str]:
        """The last lines of its log."""
        with self.log_path.open("rb") as file:
            file.seek(max(0, self.log_path.stat().st_size - _LAST_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        return [line.rstrip() for line in lines if line.strip()][-most:]

    def _last_output(self) -> str:
        """The last line of its log that names an error, or else the last."""
        lines = self.last_lines(200)
        errors = [line for line in lines if "error" in line.lower()]
        return ((errors or lines or ["(nothing)"])[-1].strip())[-400:]

    def _signal(self, what: signal.Signals) -> None:
        try:
            os.killpg(self.pid, what)
        except ProcessLookupError:
            return


def _die_with_parent() -> Callable[[], object] | None:
    """Called in the child before it begins, so that it ends with this process; on Linux only."""
    if sys.platform != "linux":
        return None
    return partial(ctypes.CDLL(None).prctl, _DIE_WITH_PARENT, int(signal.SIGTERM))


def free_port() -> int:
    """A loopback port that is free now, and that nothing is given until a server that is yet to start listens there: it
    is none of those that the system hands out, to outgoing connections too."""
    below = range(10_000, int(_HANDED_OUT.read_text().split()[0]) if _HANDED_OUT.exists() else 0)
    for port in (*random.SystemRandom().sample(below, min(100, len(below))), 0):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return int(sock.getsockname()[1])
    raise OSError("no port is free")
