"""Reads of K/V prefixes that several sequences share, which a step on a GPU does once (see `ops.triton.attention`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Sharing(NamedTuple):
    """When a shared prefix is read once: from `group` sequences that share it, in a step of at least `step` that share
    any. group 0: never."""

    group: int = 0
    step: int = 0


NO_SHARING = Sharing()


class SharedReads:
    """Rows by the blocks that they begin with."""

    def __init__(self, sharing: Sharing) -> None:
        self.sharing = sharing
        self._begins: dict[int, tuple[int, int]] = {}
        """By row: its first block, and its number of cached positions when it was opened."""

    def open(self, row: int, first_block: int, num_cached: int) -> None:
        """A row is opened, with its first `num_cached` positions in the prefix cache."""
        self._begins[row] = first_block, num_cached

    def spared(self, rows: Iterable[int]) -> int:
        """How many positions a decode step of these rows saves by reading shared prefixes once.

        Rows with the same first block are a group, which shares what each of them found in the cache. The row that
        computed the prefix found nothing; its own read serves the others.
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
