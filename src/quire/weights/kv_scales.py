"""Scales of keys and values in float8 that a checkpoint has, as ModelOpt, compressed-tensors and AutoFP8 write them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from quire.errors import InvalidModel
from quire.weights.entries import TensorEntry
from quire.weights.files import Checkpoint

PATTERNS = ("*.k_scale", "*.v_scale", "*.kv_scale", "*.k_proj.output_scale", "*.v_proj.output_scale")
"""Names of such tensors."""

NAME = re.compile(r"(?:.*\.)?layers\.(\d+)\..*?(?:\.(k|v|kv)_scale|\.(k|v)_proj\.output_scale)")


def published_scales(folder: Path) -> dict[int, tuple[float, float]]:
    """See `kv_scales`. folder: of the checkpoint, or a GGUF file."""
    return kv_scales(Checkpoint(folder).entries)


def kv_scales(entries: Mapping[str, TensorEntry]) -> dict[int, tuple[float, float]]:
    """(k_scale, v_scale), what one stored unit stands for, by layer, of those that have both, or one for both.

    entries: the checkpoint's tensors. Raises InvalidModel for a scale that is no positive number.
    """
    found: dict[int, dict[str, float]] = {}
    for name, entry in entries.items():
        if part := NAME.fullmatch(name):
            scale = float(entry.read(()).float().flatten()[0]) if math.prod(entry.shape) == 1 else math.nan
            if not 0.0 < scale < math.inf:
                raise InvalidModel(
                    f"{name} must be one positive number, the scale of K/V in float8: leave --kv-cache-dtype at auto, "
                    "or use another checkpoint"
                )
            kinds = part[2] or part[3]
            found.setdefault(int(part[1]), {}).update(dict.fromkeys(kinds, scale))
    return {layer: (each["k"], each["v"]) for layer, each in found.items() if len(each) == 2}
