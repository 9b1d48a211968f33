"""Token ids as arrays, and the masks of a step as lines of one array that is copied to a device at once."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from quire.scheduler.plan import Mask
from quire.types import TokenIds


class MaskTable(Sequence[list[Mask]]):
    """The masks of masked spans as lines of one array, which can be copied at once: [span][sample] -> Mask.

    lines int32 [N, ceil(V / 32)], reused by the next step. places: for each span, the line of each of its samples; -1
    allows all.
    """

    def __init__(self, lines: npt.NDArray[np.int32], places: list[list[int]]) -> None:
        self.lines, self.places = lines, places

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, span: int) -> list[Mask]: ...

    @overload
    def __getitem__(self, span: slice) -> list[list[Mask]]: ...

    def __getitem__(self, span: int | slice) -> list[Mask] | list[list[Mask]]:
        if isinstance(span, slice):
            return [self[i] for i in range(*span.indices(len(self)))]
        return [None if line < 0 else self.lines[line].tobytes() for line in self.places[span]]


def mask_table(masks: Sequence[Sequence[Mask]], words: int) -> MaskTable:
    """Masks of spans as lines of `words` words."""
    lines = np.zeros((sum(map(len, masks)), words), dtype=np.int32)
    places: list[list[int]] = []
    end = 0
    for span in masks:
        places.append([])
        for mask in span:
            places[-1].append(-1 if mask is None else end)
            if mask is not None:
                write_mask(mask, lines[end])
                end += 1
    return MaskTable(lines[:end], places)


def write_mask(mask: bytes, line: npt.NDArray[np.int32]) -> None:
    """Write a mask to a line of words; what is beyond its end is forbidden."""
    bits = line.view(np.uint8)
    bits[: len(mask)] = np.frombuffer(mask[: len(bits)], dtype=np.uint8)
    bits[len(mask) :] = 0


def token_array(tokens: Collection[int]) -> npt.NDArray[np.int64]:
    """Token ids as an array, in a quarter of the time that numpy takes. Raises struct.error beyond 64 bits."""
    packed = tokens.packed if isinstance(tokens, TokenIds) else struct.pack(f"{len(tokens)}q", *tokens)
    return np.frombuffer(packed, dtype=np.int64)
