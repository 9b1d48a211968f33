"""Matrices laid out in oneDNN's blocks: what an x86 CPU multiplies by fastest.

Measured on two cores of an EPYC with avx512_bf16, weights read from memory, [3072, 576] at 1, 8 and 64 rows:
bfloat16 77, 88 and 282 us against 124, 143 and 335 us for `F.linear`, which finds a layout anew at each call; float32
133, 162 and 510 us against 384, 451 and 1337 us for `F.linear`, which is MKL there.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 8
"""Rows the layout is chosen for; others work as well."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine gains from packing."""
    if (
        device.type != "cpu"
        or not torch._C._has_mkldnn
        or not torch.backends.cpu.get_cpu_capability().startswith("AVX")
    ):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: Tensor) -> Tensor:
    """[out, in] -> the same numbers in blocks: opaque, read by `packed_linear` only."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)  # type: ignore[no-any-return]


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in], weight from `pack`, bias [out] -> [T, out]."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
