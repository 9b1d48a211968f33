"""The page pool. A page nobody holds keeps its contents, and its place in the prefix index, until it is taken."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Protocol

from quire.core.reuse import Reuse


class Shelf(Protocol):
    """Cached pages nobody holds, in the order they will be given up."""

    def put(self, page: int, born: int) -> None: ...
    def take(self) -> int: ...
    def remove(self, page: int) -> None: ...
    def __len__(self) -> int: ...


class Lru:
    """Least recently used first. An OrderedDict, for a dict looks for its first key past all that were deleted."""

    def __init__(self) -> None:
        self._pages: OrderedDict[int, None] = OrderedDict()

    def put(self, page: int, born: int) -> None:
        self._pages[page] = None

    def take(self) -> int:
        return self._pages.popitem(last=False)[0]

    def remove(self, page: int) -> None:
        del self._pages[page]

    def __len__(self) -> int:
        return len(self._pages)


class Fifo:
    """Oldest contents first, however often they were used since. Removal is lazy: stale heap entries are skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._born: dict[int, int] = {}

    def put(self, page: int, born: int) -> None:
        self._born[page] = born
        heapq.heappush(self._heap, (born, page))
        if len(self._heap) > 64 + 4 * len(self._born):
            self._heap = [(b, p) for p, b in self._born.items()]
            heapq.heapify(self._heap)

    def take(self) -> int:
        while True:
            born, page = heapq.heappop(self._heap)
            if self._born.get(page) == born:
                del self._born[page]
                return page

    def remove(self, page: int) -> None:
        del self._born[page]

    def __len__(self) -> int:
        return len(self._born)


class BlockPool:
    """Pages 1..pages with reference counts; page 0 (SPARE) belongs to nobody and is never given out.

    Blank pages (contents worth nothing) are given out before cached ones, so a partial last page that was dropped
    never pushes a prefix out of the cache.
    """

    def __init__(self, pages: int, reuse: Reuse, shelf: Shelf | None = None) -> None:
        self.pages = pages
        self.reuse = reuse
        self.shelf: Shelf = Lru() if shelf is None else shelf
        self.refs = [0] * (pages + 1)
        self.born = [0] * (pages + 1)
        self.blank = list(range(pages, 0, -1))
        self.evictions = 0
        self.taken = 0

    @property
    def free(self) -> int:
        """Pages that can be taken now, cached ones included."""
        return len(self.blank) + len(self.shelf)

    @property
    def used(self) -> int:
        """Pages that sequences hold."""
        return self.pages - self.free

    def take(self) -> int:
        """A page for one new holder. There must be a free one."""
        if self.blank:
            page = self.blank.pop()
        else:
            page = self.shelf.take()
            self.reuse.forget(page)
            self.evictions += 1
        self.taken += 1
        self.born[page] = self.taken
        self.refs[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a cached page."""
        if self.refs[page] == 0:
            self.shelf.remove(page)
        self.refs[page] += 1

    def drop(self, page: int) -> None:
        """One holder fewer."""
        self.refs[page] -= 1
        if self.refs[page] == 0:
            if self.reuse.holds(page):
                self.shelf.put(page, self.born[page])
            else:
                self.blank.append(page)

    def clear(self) -> None:
        """Every page that nobody holds is blank, and every other will be: what they hold is not found again."""
        self.reuse.clear()
        while len(self.shelf):
            self.blank.append(self.shelf.take())
