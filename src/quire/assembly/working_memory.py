"""What memory there is, and what a step needs beside weights and K/V: pools are sized by it, `quire plan` tells it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from quire.model_runner.memory import GIB, activation_bytes
from quire.models.spec import ModelSpec

LARGEST_GEMM_WORKSPACE = 2048
"""Tokens up to which a step is captured on a GPU. Above, it takes longer than its launches."""

GRAPHS = GIB // 2
"""Set aside for what graphs hold beside tensors, and for the library's workspaces."""


def working_bytes(spec: ModelSpec, dtype: torch.dtype, *, tokens: int, captured: int, rows: int) -> int:
    """The largest step, the largest captured one, whose memory is kept apart, and graphs. captured: 0 for none."""
    projections = (2 * spec.mlp, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)

    def step(fed: int) -> int:
        return activation_bytes(
            tokens=fed, logits=rows, hidden=spec.hidden, widest=max(projections), vocab_size=spec.vocab, dtype=dtype
        )

    return step(tokens) + (step(min(tokens, captured)) + GRAPHS if captured else 0)


def host_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that may still be taken: free or of caches that give way, and within the container's limit.

    Where there is no /proc (macOS), all there is. root: of the file system.
    """
    try:
        told = (root / "proc/meminfo").read_text()
    except OSError:
        known = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        return os.sysconf(known) * os.sysconf("SC_PAGE_SIZE")
    free = 1024 * _number(r"^MemAvailable: +(\d+)", told)
    group = root / "sys/fs/cgroup"
    try:
        limit, used = (group / "memory.max").read_text(), int((group / "memory.current").read_text())
        cached = _number(r"^inactive_file (\d+)", (group / "memory.stat").read_text())
    except OSError:
        return free
    return free if limit.strip() == "max" else max(0, min(free, int(limit) - used + cached))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text, re.MULTILINE)
    return int(found[1]) if found else 0
