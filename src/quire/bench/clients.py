"""Load from several client processes at once: what they saw, raw, and in figures."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from quire.bench.load import Job
from quire.observe.histogram import percentile

Part = dict[str, Any]
"""One process's `load.Tally`, as plain JSON."""


def run(
    host: str,
    port: int,
    model: str,
    ids: list[list[int]],
    new: list[int],
    *,
    streams: int,
    processes: int,
    salt: str = "",
    key: str = "",
    tls: bool = False,
) -> list[Part]:
    """Ask for all of it, `streams` at once, shared out among at most `processes`. new: tokens for each prompt.

    salt: of the prefix cache. key: the server's.
    """
    workers = min(processes, streams)
    begin = time.time() + 1.0 + 0.25 * workers
    running = []
    for i in range(workers):
        job = Job(
            host=host,
            port=port,
            model=model,
            streams=streams // workers + (i < streams % workers),
            prompts=ids[i::workers],
            new=new[i::workers],
            begin=begin,
            salt=salt,
            key=key,
            tls=tls,
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "quire.bench.load"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(job)))
        process.stdin.close()
        process.stdin = None
        running.append(process)
    return [json.loads(process.communicate()[0]) for process in running]


def figures(parts: Sequence[Part]) -> dict[str, Any]:
    """tokens/s from the first process's begin to the last one's end, and quantiles [p50, p99] in milliseconds."""
    seconds = max(part["ended"] for part in parts) - min(part["began"] for part in parts)
    tokens, events = sum(part["tokens"] for part in parts), sum(part["events"] for part in parts)
    first = [x for part in parts for x in part["first"]]
    gaps = [x for part in parts for x in part["gaps"]]
    return {
        "failed": sum(part["failed"] for part in parts),
        "tokens": tokens,
        "prompted": sum(part["prompted"] for part in parts),
        "tokens_s": tokens / seconds,
        "tokens_an_event": tokens / max(1, events),
        "ttft_ms": [1e3 * percentile(first, q) for q in (50, 99)],
        "itl_ms": [1e3 * percentile(gaps, q) for q in (50, 99)],
        "ms_a_token_mean": 1e3 * sum(gaps) / max(1, tokens - len(first)),
    }
