"""The prefix index: which page already holds the K/V of these tokens. Off is NoReuse: a page is never full."""

from __future__ import annotations

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
