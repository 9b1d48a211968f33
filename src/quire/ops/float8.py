"""Floating point in eight bits: e4m3, four bits of exponent and three of mantissa (Micikevicius et al. 2022)."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """x / scale as e4m3, what is too large as the largest there is."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
