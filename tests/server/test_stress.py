"""Tests of what is stored, streamed and relayed hold however threads and the event loop take turns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = (
    *("response_state", "response_store", "batches", "batch_folder", "proxy", "upstream_events", "upstream_pages"),
    *("live_page", "app", "messages", "responses", "tools", "ollama", "beams", "media", "serve"),
)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_tests_hold_where_work_in_threads_is_slow(seed: int) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.stress",
        *(f"tests/server/test_{name}.py" for name in FILES),
    ]
    done = subprocess.run(
        command, check=False, cwd=ROOT, env={**os.environ, "STRESS_SEED": str(seed)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:]
