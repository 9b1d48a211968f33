"""KV blocks: reference counts, eviction, and the prefix cache that finds blocks by their tokens.

A free block keeps its contents, and its place in the prefix cache, until it is allocated again.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from itertools import islice
from typing import Protocol, TypeAlias

from quire.types import UNLIMITED

BlockKey = tuple[int | str, ...]

MOST_COMPARED = 256
"""Edges of a node that are searched for the closest one."""


RadixNode: TypeAlias = "dict[BlockKey, tuple[int, RadixNode]]"
"""A node of the radix tree. Its edges are whole blocks of tokens, each leading to (block, next node)."""


class PrefixCache:
    """What the scheduler needs of an index from tokens to the blocks that hold their K/V. This one never has any."""

    block_size: int = UNLIMITED
    """Tokens of a block; UNLIMITED: none is ever cached."""

    def key(self, tokens: Seq[int], start: int, salt: str) -> BlockKey:
        """The edge of the block whose tokens begin at `start`."""
        return ()

    def match(self, tokens: Seq[int], salt: str) -> tuple[list[int], RadixNode | None]:
        """The blocks that hold the longest known prefix of `tokens`, and the node at which the next one is inserted."""
        return [], None

    def frontier(self, tokens: Seq[int], salt: str) -> Seq[tuple[RadixNode | None, int]]:
        """(node, tokens before it) where another sequence may be computing what follows a match, the match's end
        first."""
        return ((None, 0),)

    def insert(self, node: RadixNode, tokens: Seq[int], start: int, salt: str, block: int) -> RadixNode:
        """Offer `block`, which holds tokens[start : start + block_size]. A block already there stays. The node for
        the next one."""
        return node

    def common_length(self, node: RadixNode, tokens: Seq[int], start: int, salt: str) -> int | None:
        """How many tokens from `start` on the closest block at `node` has in common with `tokens`.

        None: none of this salt is there.
        """
        return None

    def remove(self, block: int) -> None:
        """`block` is about to be overwritten."""

    def contains(self, block: int) -> bool:
        """Whether `block` is in the index, and therefore worth keeping while it is free."""
        return False

    def clear(self) -> None:
        """Forget every block: the device lost its K/V."""


class NoPrefixCache(PrefixCache):
    """Prefix caching is off."""


class RadixPrefixCache(PrefixCache):
    """A radix tree whose edges are whole blocks, as in SGLang's RadixAttention (arXiv:2312.07104).

    The salt is part of the first edge's key: tenants with different salts share nothing, and no salt costs nothing.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root: RadixNode = {}
        self.edges: dict[int, tuple[RadixNode, BlockKey]] = {}

    def key(self, tokens: Seq[int], start: int, salt: str) -> BlockKey:
        """The block's tokens, after the salt for the first block."""
        page = tuple(tokens[start : start + self.block_size])
        return (salt, *page) if salt and start == 0 else page

    def match(self, tokens: Seq[int], salt: str) -> tuple[list[int], RadixNode | None]:
        """Walk from the root, a block at a time."""
        node, hit = self.root, []
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            found = node.get(self.key(tokens, start, salt))
            if found is None:
                break
            hit.append(found[0])
            node = found[1]
        return hit, node

    def frontier(self, tokens: Seq[int], salt: str) -> Seq[tuple[RadixNode | None, int]]:
        """Where the match ends."""
        blocks, node = self.match(tokens, salt)
        return ((node, len(blocks) * self.block_size),)

    def insert(self, node: RadixNode, tokens: Seq[int], start: int, salt: str, block: int) -> RadixNode:
        """Add an edge, unless there is one."""
        key = self.key(tokens, start, salt)
        found = node.get(key)
        if found is None:
            found = node[key] = (block, {})
            self.edges[block] = (node, key)
        return found[1]

    def common_length(self, node: RadixNode, tokens: Seq[int], start: int, salt: str) -> int | None:
        """Compares the newest `MOST_COMPARED` edges only: thousands of prompts may differ in their first block."""
        wanted = self.key(tokens, start, salt)
        salted = int(bool(salt) and start == 0)
        known = [*islice(reversed(node), MOST_COMPARED)]
        # Most differ in their first token, which is seen at once.
        first = wanted[: salted + 1]
        if near := [key for key in known if key[: salted + 1] == first]:
            return max(_common(key, wanted) for key in near) - salted
        alike = any(len(key) == self.block_size + salted and key[:salted] == wanted[:salted] for key in known)
        return 0 if alike else None

    def remove(self, block: int) -> None:
        """Cut the edge to `block`. Blocks below it are found no more, until they are evicted."""
        if (place := self.edges.pop(block, None)) is not None:
            node, key = place
            del node[key]

    def contains(self, block: int) -> bool:
        """Whether an edge leads to `block`."""
        return block in self.edges

    def clear(self) -> None:
        """Cut every edge."""
        self.root = {}
        self.edges.clear()


def _common(a: BlockKey, b: BlockKey) -> int:
    """Length of the common beginning."""
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


class EvictionPolicy(Protocol):
    """The order in which free blocks with cached contents are evicted."""

    def add(self, block: int, allocated_at: int) -> None:
        """`block`, allocated at this count of allocations, is free now."""

    def evict(self) -> int:
        """Take out the block to overwrite."""

    def remove(self, block: int) -> None:
        """`block` is in use again."""

    def __len__(self) -> int: ...


class Lru:
    """Least recently used first. An OrderedDict, since a plain dict searches for its first key past all deleted
    ones."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int, allocated_at: int) -> None:
        """Behind all others."""
        self._blocks[block] = None

    def evict(self) -> int:
        """The first."""
        return self._blocks.popitem(last=False)[0]

    def remove(self, block: int) -> None:
        """Take it out of the order."""
        del self._blocks[block]

    def __len__(self) -> int:
        return len(self._blocks)


class Fifo:
    """Oldest contents first, however often they were used. Removal is lazy: stale heap entries are skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._allocated_at: dict[int, int] = {}

    def add(self, block: int, allocated_at: int) -> None:
        """In the order of allocation."""
        self._allocated_at[block] = allocated_at
        heapq.heappush(self._heap, (allocated_at, block))
        if len(self._heap) > 64 + 4 * len(self._allocated_at):
            self._heap = [(b, p) for p, b in self._allocated_at.items()]
            heapq.heapify(self._heap)

    def evict(self) -> int:
        """The one allocated longest ago."""
        while True:
            allocated_at, block = heapq.heappop(self._heap)
            if self._allocated_at.get(block) == allocated_at:
                del self._allocated_at[block]
                return block

    def remove(self, block: int) -> None:
        """Its heap entry is stale from now on."""
        del self._allocated_at[block]

    def __len__(self) -> int:
        return len(self._allocated_at)


EVICTION_POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {"lru": Lru, "fifo": Fifo}


class BlockPool:
    """Blocks 1..num_blocks with reference counts. Block 0 is NULL_BLOCK and never allocated.

    Free blocks without cached contents are allocated before those with, so that a partial last block never evicts a
    cached prefix. on_evict: called with a cached block that is about to be overwritten.
    """

    def __init__(
        self,
        num_blocks: int,
        prefix_cache: PrefixCache,
        eviction_policy: EvictionPolicy | None = None,
        on_evict: Callable[[int], None] = lambda block: None,
    ) -> None:
        self.num_blocks = num_blocks
        self.prefix_cache = prefix_cache
        self.eviction_policy: EvictionPolicy = Lru() if eviction_policy is None else eviction_policy
        self.on_evict = on_evict
        self.ref_counts = [0] * (num_blocks + 1)
        self.allocated_at = [0] * (num_blocks + 1)
        self.free_list = list(range(num_blocks, 0, -1))
        self.evictions = 0
        self.num_allocated = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self.free_list) + len(self.eviction_policy)

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.num_free

    def allocate(self) -> int:
        """A block with one reference. There must be a free one."""
        if self.free_list:
            block = self.free_list.pop()
        else:
            block = self.eviction_policy.evict()
            self.prefix_cache.remove(block)
            self.on_evict(block)
            self.evictions += 1
        self.num_allocated += 1
        self.allocated_at[block] = self.num_allocated
        self.ref_counts[block] = 1
        return block

    def incref(self, block: int) -> None:
        """One reference more to a cached block."""
        if self.ref_counts[block] == 0:
            self.eviction_policy.remove(block)
        self.ref_counts[block] += 1

    def decref(self, block: int) -> None:
        """One reference fewer; at none the block is free."""
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            if self.prefix_cache.contains(block):
                self.eviction_policy.add(block, self.allocated_at[block])
            else:
                self.free_list.append(block)

    def clear_cache(self) -> None:
        """Forget all cached contents: free blocks at once, others when they become free."""
        self.prefix_cache.clear()
        while len(self.eviction_policy):
            self.free_list.append(self.eviction_policy.evict())
