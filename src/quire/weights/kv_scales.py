"""Scales of K/V in float8 from a checkpoint, as written by ModelOpt, compressed-tensors and AutoFP8."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from quire.errors import InvalidModel
from quire.weights.entries import TensorEntry
from quire.weights.files import Checkpoint

PATTERNS = ("*.k_scale", "*.v_scale", "*.kv_scale", "*.k_proj.output_scale", "*.v_proj.output_scale")
"""Names of the tensors of scales."""

NAME = re.compile(r"(?:.*\.)?layers\.(\d+)\..*?(?:\.(k|v|kv)_scale|\.(k|v)_proj\.output_scale)")


def published_scales(folder: Path) -> dict[int, tuple[float, float]]:
    """`kv_scales` of a checkpoint's folder, or of a GGUF file."""
    return kv_scales(Checkpoint(folder).entries)


def kv_scales(entries: Mapping[str, TensorEntry]) -> dict[int, tuple[float, float]]:
    """(k_scale, v_scale) by layer, the factors from stored to actual values. Layers that lack one are left out.

    entries: the checkpoint's tensors. Raises InvalidModel for a scale that is not one positive number.
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
