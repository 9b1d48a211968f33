"""What a server says of itself while it is under load, from /metrics, by the names that vLLM and Quire share."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import MappingProxyType, TracebackType

from prometheus_client.parser import text_string_to_metric_families

from quire.bench.started import fetched

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "vllm:num_requests_running": "running",
        "vllm:num_requests_waiting": "waiting",
        "vllm:kv_cache_usage_perc": "kv",
        "vllm:generation_tokens": "tokens",
        "vllm:num_preemptions": "preemptions",
    }
)
"""Families, and what a sample calls them. A counter's family has no `_total`."""


class Gauges:
    """Reads /metrics in the background. samples: each a time in seconds, and what was there of NAMES' values."""

    def __init__(self, url: str, key: str = "", every: float = 0.5) -> None:
        self.url, self.key, self.every = url.rstrip("/").removesuffix("/v1") + "/metrics", key, every
        self.samples: list[dict[str, float]] = []
        self._over = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Gauges:
        self._reader.start()
        return self

    def _read(self) -> None:
        began = time.monotonic()
        while True:
            said = fetched(self.url, self.key)
            if said is not None:
                self.samples.append({"s": round(time.monotonic() - began, 3), **seen(said.decode("utf-8", "replace"))})
            if self._over.wait(self.every):
                return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._reader.join()


def seen(text: str) -> dict[str, float]:
    """Of a page of metrics: sums over all labels. Nothing, of a page that is none."""
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            if family.name in NAMES:
                found[NAMES[family.name]] = sum(each.value for each in family.samples)
    except ValueError:
        return {}
    return found
