"""`python -m benchmarks.front` compares two checkouts by processor time, with an engine that has no model."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from benchmarks.front import child, compare, spent
from benchmarks.timed import STEP, timed
from quire.bench.load_client import LoadJob, encode_request
from quire.executors.synthetic import SyntheticExecutor
from quire.scheduler.plan import NewSequence, Plan, Span


def test_ratios_are_of_medians_and_this_tree_comes_first() -> None:
    rows = {"this": [{"front_us": x} for x in (10.0, 9.0, 90.0)], "that": [{"front_us": x} for x in (20.0, 1.0, 30.0)]}
    assert compare(rows) == {"this": {"front_us": 10.0}, "that": {"front_us": 20.0}, "ratios": {"front_us": 0.5}}


def test_there_is_no_ratio_to_nothing() -> None:
    rows = {"this": [{"itl_ms": 1.0}], "that": [{"itl_ms": 0.0}]}
    assert compare(rows) == {"this": {"itl_ms": 1.0}, "that": {"itl_ms": 0.0}, "ratios": {}}


def test_only_processor_time_counts() -> None:
    before = spent(os.getpid())
    time.sleep(0.2)
    slept = spent(os.getpid()) - before
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert slept < 0.1 <= spent(os.getpid()) - before


def test_the_engine_is_the_process_that_the_front_started() -> None:
    front = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()']).pid, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", front], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == child(process.pid)


def test_steps_take_as_long_as_the_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STEP, "20")
    executor = timed(SyntheticExecutor(vocab_size=7))
    assert executor.description.vocab_size == 7
    began = time.monotonic()
    result = executor.launch(Plan((NewSequence(0, (1, 2), 0, 2),), (), (Span(0, 2, 1, 1),))).result()
    assert time.monotonic() - began >= 0.02
    assert len(result.tokens[0]) == 1


def test_a_conversation_goes_where_conversations_go() -> None:
    job = LoadJob(host="h", port=1, model="m", streams=1, prompts=[[7, 8]], output_lens=[3], chat=True)
    asked = encode_request(job, 0)
    assert asked.startswith(b"POST /v1/chat/completions ")
    assert b'"messages": [{"role": "user", "content": "7 8"}]' in asked
