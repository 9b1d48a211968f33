"""K/V that several sequences share, which a step on a GPU reads once (see `ops.triton.attention`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Sharing(NamedTuple):
    """From how many sequences of a group, in a step of how many, what the group shares is read once; group 0: never."""

    group: int = 0
    step: int = 0


NO_SHARING = Sharing()


class SharedReads:
    """Which rows begin with the same blocks."""

    def __init__(self, sharing: Sharing) -> None:
        self.sharing = sharing
        self._begins: dict[int, tuple[int, int]] = {}
        """By row, its first block, and how many positions were found in the prefix cache."""

    def open(self, row: int, first_block: int, num_cached: int) -> None:
        """A row is opened whose first `num_cached` positions were there."""
        self._begins[row] = first_block, num_cached

    def spared(self, rows: Iterable[int]) -> int:
        """Positions that a step in which these rows decode need not read for each of them.

        Rows of one first block count as a group that shares what each of them found; the one that computed it found
        nothing, and reads all of it for the others.
        """
        if not self.sharing.group:
            return 0
        groups: dict[int, list[int]] = {}
        for row in rows:
            if begins := self._begins.get(row):
                groups.setdefault(begins[0], []).append(begins[1])
        if sum(map(len, groups.values())) < self.sharing.step:
            return 0
        return sum(
            sum(found) - (0 if 0 in found else max(found))
            for found in groups.values()
            if len(found) >= self.sharing.group
        )

    def clear(self) -> None:
        """Forget all rows."""
        self._begins.clear()
