"""Servers that a benchmark starts and stops."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from quire.bench.monitor import fetch

READY_TIMEOUT = 900.0
"""Seconds until a server must be ready."""


@contextmanager
def vllm(command: str, model: str, rest: Sequence[str], port: int, log: Path) -> Iterator[str]:
    """`vllm serve MODEL REST`; its address."""
    argv = [*shlex.split(command), "serve", model, "--host", "127.0.0.1", "--port", str(port), *rest]
    with started(argv, f"http://127.0.0.1:{port}", "/health", log) as url:
        yield url


@contextmanager
def through(arguments: Sequence[str], port: int, log: Path) -> Iterator[str]:
    """`quire serve ARGUMENTS`; its address."""
    argv = [sys.executable, "-m", "quire", "serve", "--port", str(port), "--uvicorn-log-level", "info", *arguments]
    with started(argv, f"http://127.0.0.1:{port}", "/health/ready", log) as url:
        yield url


@contextmanager
def started(argv: Sequence[str], url: str, path: str, log: Path) -> Iterator[str]:
    """A process that is ready when `path` answers 200. Raises ClickException with its last words when it is not."""
    with log.open("ab") as said:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)
    try:
        deadline = time.monotonic() + READY_TIMEOUT
        while fetch(url + path) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                last = log.read_text("utf-8", "replace").splitlines()[-8:]
                code = "is not ready" if process.returncode is None else f"ended with code {process.returncode}"
                raise click.ClickException("\n  ".join([f"{shlex.join(argv)} {code}; {log} ends:", *last]))
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def spawned(argv: Sequence[str], port: int, environment: Mapping[str, str] | None = None) -> Iterator[int]:
    """A server on `port`, ready, that shares this process's output; yields its process id.

    Raises ClickException when it ends before it is ready.
    """
    process = subprocess.Popen(argv, env=environment)
    try:
        while fetch(f"http://127.0.0.1:{port}/health") is None:
            if process.poll() is not None:
                raise click.ClickException(f"the server ended with code {process.returncode}")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        process.wait()
