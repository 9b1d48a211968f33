"""The page pool. A page nobody holds keeps its contents, and its place in the prefix index, until it is taken."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Protocol, TypeAlias

from quire.types import UNLIMITED

BlockKey = tuple[int | str, ...]


RadixNode: TypeAlias = "dict[BlockKey, tuple[int, RadixNode]]"
"""A place in the radix tree: its edges are whole pages of tokens, each leading to (page, next place)."""


class PrefixCache(Protocol):
    """What the scheduler needs of a prefix index."""

    block_size: int
    """Tokens after which a page may be published; MANY: never."""

    def key(self, tokens: Seq[int], start: int, salt: str) -> BlockKey:
        """The edge for the page of tokens that begins at `start`."""

    def match(self, tokens: Seq[int], salt: str) -> tuple[list[int], RadixNode | None]:
        """Pages holding the longest known prefix of `tokens`, and where to publish the next one."""

    def insert(self, node: RadixNode, tokens: Seq[int], start: int, salt: str, block: int) -> RadixNode:
        """Offer `page`, which holds tokens[start : start + every]. One already there stays; where the next goes."""

    def remove(self, block: int) -> None:
        """`page` is about to be overwritten."""

    def contains(self, block: int) -> bool:
        """Whether `page` is in the index, so worth keeping when nobody holds it."""

    def clear(self) -> None:
        """The device lost its K/V."""


class NoPrefixCache:
    """Prefix caching off."""

    block_size = UNLIMITED

    def key(self, tokens: Seq[int], start: int, salt: str) -> BlockKey:
        return ()

    def match(self, tokens: Seq[int], salt: str) -> tuple[list[int], RadixNode | None]:
        return [], None

    def insert(self, node: RadixNode, tokens: Seq[int], start: int, salt: str, block: int) -> RadixNode:
        return node

    def remove(self, block: int) -> None:
        pass

    def contains(self, block: int) -> bool:
        return False

    def clear(self) -> None:
        pass


class RadixPrefixCache:
    """A radix tree whose edges are whole pages, as in SGLang's RadixAttention (arXiv:2312.07104), block-granular.

    The salt is part of the first edge's key, so tenants never meet and an unused salt costs nothing.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root: RadixNode = {}
        self.edges: dict[int, tuple[RadixNode, BlockKey]] = {}

    def key(self, tokens: Seq[int], start: int, salt: str) -> BlockKey:
        page = tuple(tokens[start : start + self.block_size])
        return (salt, *page) if salt and start == 0 else page

    def match(self, tokens: Seq[int], salt: str) -> tuple[list[int], RadixNode | None]:
        node, hit = self.root, []
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            found = node.get(self.key(tokens, start, salt))
            if found is None:
                break
            hit.append(found[0])
            node = found[1]
        return hit, node

    def insert(self, node: RadixNode, tokens: Seq[int], start: int, salt: str, block: int) -> RadixNode:
        key = self.key(tokens, start, salt)
        found = node.get(key)
        if found is None:
            found = node[key] = (block, {})
            self.edges[block] = (node, key)
        return found[1]

    def remove(self, block: int) -> None:
        if (place := self.edges.pop(block, None)) is not None:
            node, key = place
            del node[key]

    def contains(self, block: int) -> bool:
        return block in self.edges

    def clear(self) -> None:
        self.root = {}
        self.edges.clear()


class EvictionPolicy(Protocol):
    """Cached pages nobody holds, in the order they will be given up."""

    def add(self, block: int, allocated_at: int) -> None: ...
    def evict(self) -> int: ...
    def remove(self, block: int) -> None: ...
    def __len__(self) -> int: ...


class Lru:
    """Least recently used first. An OrderedDict, for a dict looks for its first key past all that were deleted."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int, allocated_at: int) -> None:
        self._blocks[block] = None

    def evict(self) -> int:
        return self._blocks.popitem(last=False)[0]

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def __len__(self) -> int:
        return len(self._blocks)


class Fifo:
    """Oldest contents first, however often they were used since. Removal is lazy: stale heap entries are skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._allocated_at: dict[int, int] = {}

    def add(self, block: int, allocated_at: int) -> None:
        self._allocated_at[block] = allocated_at
        heapq.heappush(self._heap, (allocated_at, block))
        if len(self._heap) > 64 + 4 * len(self._allocated_at):
            self._heap = [(b, p) for p, b in self._allocated_at.items()]
            heapq.heapify(self._heap)

    def evict(self) -> int:
        while True:
            allocated_at, block = heapq.heappop(self._heap)
            if self._allocated_at.get(block) == allocated_at:
                del self._allocated_at[block]
                return block

    def remove(self, block: int) -> None:
        del self._allocated_at[block]

    def __len__(self) -> int:
        return len(self._allocated_at)


EVICTION_POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {"lru": Lru, "fifo": Fifo}


class BlockPool:
    """Pages 1..pages with reference counts; page 0 (SPARE) belongs to nobody and is never given out.

    Blank pages (contents worth nothing) are given out before cached ones, so a partial last page that was dropped
    never pushes a prefix out of the cache.
    """

    def __init__(
        self, num_blocks: int, prefix_cache: PrefixCache, eviction_policy: EvictionPolicy | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.prefix_cache = prefix_cache
        self.eviction_policy: EvictionPolicy = Lru() if eviction_policy is None else eviction_policy
        self.ref_counts = [0] * (num_blocks + 1)
        self.allocated_at = [0] * (num_blocks + 1)
        self.free_list = list(range(num_blocks, 0, -1))
        self.evictions = 0
        self.num_allocated = 0

    @property
    def num_free(self) -> int:
        """Pages that can be taken now, cached ones included."""
        return len(self.free_list) + len(self.eviction_policy)

    @property
    def num_used(self) -> int:
        """Pages that sequences hold."""
        return self.num_blocks - self.num_free

    def allocate(self) -> int:
        """A page for one new holder. There must be a free one."""
        if self.free_list:
            block = self.free_list.pop()
        else:
            block = self.eviction_policy.evict()
            self.prefix_cache.remove(block)
            self.evictions += 1
        self.num_allocated += 1
        self.allocated_at[block] = self.num_allocated
        self.ref_counts[block] = 1
        return block

    def incref(self, block: int) -> None:
        """One more holder of a cached page."""
        if self.ref_counts[block] == 0:
            self.eviction_policy.remove(block)
        self.ref_counts[block] += 1

    def decref(self, block: int) -> None:
        """One holder fewer."""
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            if self.prefix_cache.contains(block):
                self.eviction_policy.add(block, self.allocated_at[block])
            else:
                self.free_list.append(block)

    def clear_cache(self) -> None:
        """Every page that nobody holds is blank, and every other will be: what they hold is not found again."""
        self.prefix_cache.clear()
        while len(self.eviction_policy):
            self.free_list.append(self.eviction_policy.evict())
