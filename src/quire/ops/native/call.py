"""How Python's objects become arguments of the library's kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor

from quire.ops.base import Norms
from quire.ops.native.library import CMatrix
from quire.ops.panels import PanelMatrix

GATES: Mapping[str, int] = MappingProxyType({"": 0, "silu": 1, "gelu": 2})
"""Those that products have, by what the library calls them."""

FLOATS = (torch.float32, torch.bfloat16)

MOST_DIM, MOST_KEY_DIM = 1024, 512
"""Numbers of a head that the kernels have room for: that are rotated, and of a key that is attended to."""


def address(x: Tensor | None) -> int | None:
    """Where its numbers lie."""
    return None if x is None else x.data_ptr()


def by_heads(norms: Norms, dim: int) -> bool:
    """Whether the kernel norms heads so: by themselves, before they are rotated, q and k alike."""
    weights = (norms.q.weight, norms.k.weight)
    alike = weights[0].dtype is weights[1].dtype and weights[0].dtype in FLOATS
    plain = not norms.after_rope and norms.v_eps is None and not norms.q.centred and not norms.k.centred
    return alike and plain and all(len(weight) == dim for weight in weights)


def handle_of(matrix: PanelMatrix) -> ctypes.Array[CMatrix]:
    """What the kernels know a matrix by."""
    if matrix.handle is None:
        made = CMatrix(
            matrix.outputs,
            matrix.padded,
            matrix.kind,
            matrix.group,
            matrix.scale_kind,
            matrix.zero is not None and matrix.supers is None,
            matrix.weight.data_ptr(),
            *(address(part) for part in (matrix.scale, matrix.zero, matrix.supers, matrix.values)),
        )
        matrix.handle = ctypes.pointer(made)
    return cast("ctypes.Array[CMatrix]", matrix.handle)
