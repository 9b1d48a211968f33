"""Load from several client processes at once: what they saw, raw, and in figures."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from quire.bench.load import Job
from quire.observability.histogram import percentile

Part = dict[str, Any]
"""One process's `load.Tally`, as plain JSON."""


def run(job: Job, processes: int, told: Callable[[int], None] = lambda n: None) -> list[Part]:
    """Share a job out among at most `processes`, and let them begin together, soon. told: hears how many more
    requests have ended, from threads."""
    workers = max(1, min(processes, job.streams, len(job.prompts)))
    begin = time.time() + 1.0 + 0.25 * workers
    running = []
    for i in range(workers):
        share = replace(
            job,
            streams=job.streams // workers + (i < job.streams % workers),
            prompts=job.prompts[i::workers],
            new=job.new[i::workers],
            due=job.due[i::workers],
            begin=begin,
            told=True,
        )
        argv = [sys.executable, "-m", "quire.bench.load"]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        with process.stdin as asked:
            asked.write(json.dumps(asdict(share)).encode())
        running.append(process)
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(partial(_heard, told=told), running))


def _heard(process: subprocess.Popen[bytes], told: Callable[[int], None]) -> Part:
    """What a process saw: behind a dot for each request that ended."""
    assert process.stdout is not None
    with process.stdout as said:
        while (first := said.read(1)) == b".":
            told(1)
        found: Part = json.loads(first + said.read())
    process.wait()
    return found


def figures(parts: Sequence[Part]) -> dict[str, Any]:
    """tokens/s from the first process's begin to the last one's end, and quantiles [p50, p99] in milliseconds."""
    seconds = max(part["ended"] for part in parts) - min(part["began"] for part in parts)
    tokens, events = sum(part["tokens"] for part in parts), sum(part["events"] for part in parts)
    first = [x for part in parts for x in part["first"]]
    gaps = [x for part in parts for x in part["gaps"]]
    return {
        "failed": sum(part["failed"] for part in parts),
        "seconds": seconds,
        "tokens": tokens,
        "prompted": sum(part["prompted"] for part in parts),
        "tokens_s": tokens / seconds,
        "tokens_an_event": tokens / max(1, events),
        "ttft_ms": [1e3 * percentile(first, q) for q in (50, 99)],
        "itl_ms": [1e3 * percentile(gaps, q) for q in (50, 99)],
        "ms_a_token_mean": 1e3 * sum(gaps) / max(1, tokens - len(first)),
    }
