"""What is told of a text's pooled hidden states."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidRequest


def check(dimensions: int | None, *, pools: bool) -> None:
    """Before anything is computed. pools: whether the executor has hidden states. Raises InvalidRequest."""
    if not pools:
        raise InvalidRequest(
            "this engine gives no embeddings: its executor has no hidden states; serve with --executor local",
            code="unsupported",
        )
    if dimensions is not None and dimensions < 1:
        raise InvalidRequest("dimensions must be at least 1", param="dimensions")


def vector(pooled: bytes, dimensions: int | None = None, *, normalize: bool = True) -> npt.NDArray[np.float32]:
    """The first `dimensions` numbers, all if None, of length 1 unless that is not wanted.

    Raises InvalidRequest for more dimensions than there are.
    """
    numbers: npt.NDArray[np.float32] = np.frombuffer(pooled, dtype="<f4")
    if dimensions is not None and dimensions > len(numbers):
        raise InvalidRequest(f"dimensions must be at most {len(numbers)} for this model", param="dimensions")
    numbers = numbers[:dimensions]
    if normalize:
        numbers = numbers / max(float(np.linalg.norm(numbers)), 1e-12)
    return numbers.astype("<f4")
