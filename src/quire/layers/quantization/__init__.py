"""How a matrix is stored. The loader hands named tensors to a format, which owns what is kept and multiplies by it.

`linear` says how a matrix is cut, a format how the cut is kept: the two never know of each other.
"""

from __future__ import annotations

from quire.layers.quantization.base import Format, Matrix, MatrixPart, QuantizedWeight, WeightSlot, WeightStorage
from quire.layers.quantization.packed import SMALL, Packed, packed_if_large
from quire.layers.quantization.plain import Plain

__all__ = [
    "SMALL",
    "Format",
    "Matrix",
    "MatrixPart",
    "Packed",
    "Plain",
    "QuantizedWeight",
    "WeightSlot",
    "WeightStorage",
    "packed_if_large",
]
