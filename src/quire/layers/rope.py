"""Rotary embedding as data: read off a config, printed, compared. Torch-free; `basic.Rotary` computes with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """How positions turn a head's first `dim` numbers. `dim` 0: not at all.

    theta: base of the wavelengths. kind: "default"; "linear", every wavelength `factor` times as long; "llama3",
    only those above `original` / `high`, in full above `original` / `low`. original: context length, in tokens, that
    the model was first trained for.
    """

    dim: int
    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 0


STILL = Rope(dim=0)
"""No rotary embedding."""
