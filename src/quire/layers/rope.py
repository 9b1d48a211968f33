"""Rotary embedding as data: read off a config, printed, compared. Torch-free; `basic.Rotary` computes with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions turn a head's first `dim` numbers. `dim` 0: not at all.

    theta: base of the wavelengths. kind: "default"; "linear", every wavelength `factor` times as long; "llama3",
    only those above `original` / `high`, in full above `original` / `low`; "yarn", from those that fit `original`
    fast times, in full from those that fit it slow times on. original: context length, in tokens, that the model was
    first trained for. whole: yarn's two bounds are rounded to whole pairs of dimensions. gain: what turned numbers are
    multiplied by. "factors": each wavelength as many times as long as `factors` says (GGUF's Llama 3.1).
    """

    dim: int
    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 0
    fast: float = 32.0
    slow: float = 1.0
    full_dim: bool = True
    gain: float = 1.0
    factors: tuple[float, ...] = ()


NO_ROPE = RopeConfig(dim=0)
"""No rotary embedding."""
