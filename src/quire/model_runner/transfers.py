"""Copies between host and device that nothing waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(values: npt.NDArray[Any] | Sequence[int], device: torch.device) -> Tensor:
    """An array on the device, behind what its stream does already."""
    host = torch.from_numpy(np.asarray(values))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def to_host(tensor: Tensor) -> Tensor:
    """A tensor on its way to the host: it is there once the stream is past this."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
