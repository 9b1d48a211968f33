"""What the GPU did meanwhile, which code it was, and where it ran."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any


class Watch:
    """Polls nvidia-smi in the background. samples: (seconds since the start, utilisation in %, memory used in MiB)."""

    def __init__(self, every: float = 0.25) -> None:
        self.every = every
        self.samples: list[tuple[float, int, int]] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Watch:
        asked = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
        try:
            self._process = subprocess.Popen(
                [*asked, "-lms", str(int(1e3 * self.every))],
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None or self._reader is None:
            return
        self._process.terminate()
        self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()


def revision() -> str:
    """The commit of the tree this code lies in, "unknown" where it lies in none."""
    return _told(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]) or "unknown"


def environment(secret: str = "") -> dict[str, Any]:
    """Where it ran, and with which torch, if any. Of the variables only those that name vLLM's or Quire's options, or
    CUDA's; `secret` is not told."""
    shown = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("VLLM_", "QUIRE_", "CUDA_")) and "KEY" not in name
    }
    torch = sys.modules.get("torch")  # who asks a server needs none
    return {
        "revision": revision(),
        "card": _told(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]),
        "torch": torch and torch.__version__,
        "cuda": torch and torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "variables": shown,
        "argv": [each.replace(secret, "...") if secret else each for each in sys.argv[1:]],
    }


def _told(asked: list[str]) -> str | None:
    """What a command says; None where it says nothing, or is not there."""
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
