"""A server to measure: one that answers by its own clock."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from quire.bench.monitor import fetch
from quire.frontend.supervisor import free_port
from tests.live import environment


@pytest.fixture(scope="session")
def upstream() -> Iterator[str]:
    """Its address: first token after 2 ms, another every millisecond."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.stub", str(port), "2", "1"], env=environment())
    try:
        while fetch(url + "/v1/models") is None:
            time.sleep(0.02)
        yield url
    finally:
        process.terminate()
        process.wait()
