"""Where these tests run: on the card if there is one, else in the interpreter."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

T = TypeVar("T")


def moved(record: T) -> T:
    """A dataclass with its tensors on the device."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}  # type: ignore[arg-type]
    return type(record)(**{n: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for n, v in values.items()})
