"""Tests of what is stored, streamed, relayed, transferred and packed hold however threads take turns."""

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
OTHERS = (
    *("executors/test_kv_transfer.py", "executors/test_block_store.py", "executors/test_ranks.py"),
    *("layers/test_deferred.py", "layers/test_mapped.py", "test_disaggregation.py"),
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
        *(f"tests/{name}" for name in OTHERS),
    ]
    done = subprocess.run(
        command, check=False, cwd=ROOT, env={**os.environ, "STRESS_SEED": str(seed)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:]
