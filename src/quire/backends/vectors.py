"""What is told of a text's pooled hidden states."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidRequest


def vector(pooled: bytes, dimensions: int | None = None, *, normalize: bool = True) -> npt.NDArray[np.float32]:
    """The first `dimensions` numbers, all if None, of length 1 unless that is not wanted.

    Raises InvalidRequest for more dimensions than there are.
    """
    numbers: npt.NDArray[np.float32] = np.frombuffer(pooled, dtype="<f4")
    if dimensions is not None and not 1 <= dimensions <= len(numbers):
        what = "at least 1" if dimensions < 1 else f"at most {len(numbers)} for this model"
        raise InvalidRequest(f"dimensions must be {what}", param="dimensions")
    numbers = numbers[:dimensions]
    if normalize:
        numbers = numbers / max(float(np.linalg.norm(numbers)), 1e-12)
    return numbers.astype("<f4")
