"""What is recorded around a measurement: the GPU's utilization, the server's own metrics, and the environment."""

from __future__ import annotations

import http.client
import json
import os
import platform
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from prometheus_client.parser import text_string_to_metric_families

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "vllm:num_requests_running": "running",
        "vllm:num_requests_waiting": "waiting",
        "vllm:kv_cache_usage_perc": "kv",
        "vllm:generation_tokens": "tokens",
        "vllm:num_preemptions": "preemptions",
    }
)
"""Metric families that vLLM and Quire share, and their names in samples. A counter's family has no `_total`."""


class GPUMonitor:
    """Polls nvidia-smi in the background. samples: (seconds since the start, utilization in %, memory used in MiB)."""

    def __init__(self, interval: float = 0.25) -> None:
        self.interval = interval
        self.samples: list[tuple[float, int, int]] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> GPUMonitor:
        query = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
        try:
            self._process = subprocess.Popen(
                [*query, "-lms", str(int(1e3 * self.interval))],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except FileNotFoundError:
            return self
        self._reader = threading.Thread(target=self._read, args=(self._process, time.monotonic()), daemon=True)
        self._reader.start()
        return self

    def _read(self, process: subprocess.Popen[str], began: float) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            parts = line.split(",")
            if len(parts) == 2 and all(part.strip().isdigit() for part in parts):
                self.samples.append((round(time.monotonic() - began, 2), int(parts[0]), int(parts[1])))

    def __exit__(self, *_: object) -> None:
        if self._process is None or self._reader is None:
            return
        self._process.terminate()
        self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()


class MetricsMonitor:
    """Polls a server's /metrics in the background. samples: seconds since the start as `s`, and values of METRICS."""

    def __init__(self, url: str, key: str = "", interval: float = 0.5) -> None:
        self.url = url.rstrip("/").removesuffix("/v1") + "/metrics"
        self.key = key
        self.interval = interval
        self.samples: list[dict[str, float]] = []
        self._stopped = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> MetricsMonitor:
        self._reader.start()
        return self

    def _read(self) -> None:
        began = time.monotonic()
        while True:
            body = fetch(self.url, self.key)
            if body is not None:
                values = parse_metrics(body.decode("utf-8", "replace"))
                self.samples.append({"s": round(time.monotonic() - began, 3), **values})
            if self._stopped.wait(self.interval):
                return

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._reader.join()


def parse_metrics(text: str) -> dict[str, float]:
    """Values of METRICS, summed over labels; empty where `text` is not Prometheus's format."""
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            if family.name in METRICS:
                found[METRICS[family.name]] = sum(each.value for each in family.samples)
    except ValueError:
        return {}
    return found


def fetch(url: str, key: str = "") -> bytes | None:
    """The body at `url`, None unless the status is 200. key: API key."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return bytes(response.read()) if response.status == 200 else None
    except urllib.error.HTTPError as refused:
        refused.close()  # it holds the connection
        return None
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return None


def served_model(url: str, key: str = "") -> str:
    """Name of the first model that a server lists. Raises ClickException where it lists none."""
    body = fetch(url.rstrip("/").removesuffix("/v1") + "/v1/models", key)
    if body is None:
        raise click.ClickException(
            f"{url} does not answer /v1/models: is a server running there, and does it need a key?"
        )
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise click.ClickException(f"{url} does not speak OpenAI's API: its /v1/models names no model") from error


def revision() -> str:
    """Commit of the working tree that holds this file, "unknown" outside of one."""
    return _output_of(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]) or "unknown"


def environment(secret: str = "") -> dict[str, Any]:
    """Versions, hardware and command line of this process, for a result's file.

    Only variables of vLLM, Quire and CUDA are kept, none with KEY in its name; `secret` is cut from the command line.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("VLLM_", "QUIRE_", "CUDA_")) and "KEY" not in name
    }
    # A load test of a server does not import torch.
    torch = sys.modules.get("torch")
    return {
        "revision": revision(),
        "card": _output_of(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]),
        "torch": torch and torch.__version__,
        "cuda": torch and torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "variables": variables,
        "argv": [each.replace(secret, "...") if secret else each for each in sys.argv[1:]],
    }


def _output_of(command: list[str]) -> str | None:
    """A command's standard output; None where that is empty or the command is missing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
