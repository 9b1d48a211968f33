"""The prefix index: which page already holds the K/V of these tokens. Off is NoReuse: a page is never full."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol, TypeAlias

from quire.values import MANY

Key = tuple[int | str, ...]


Node: TypeAlias = "dict[Key, tuple[int, Node]]"
"""A place in the radix tree: its edges are whole pages of tokens, each leading to (page, next place)."""


class Reuse(Protocol):
    """What the scheduler needs of a prefix index."""

    every: int
    """Tokens after which a page may be published; MANY: never."""

    def key(self, tokens: Seq[int], start: int, salt: str) -> Key:
        """The edge for the page of tokens that begins at `start`."""

    def match(self, tokens: Seq[int], salt: str) -> tuple[list[int], Node | None]:
        """Pages holding the longest known prefix of `tokens`, and where to publish the next one."""

    def publish(self, node: Node, tokens: Seq[int], start: int, salt: str, page: int) -> Node:
        """Offer `page`, which holds tokens[start : start + every]. One already there stays; where the next goes."""

    def forget(self, page: int) -> None:
        """`page` is about to be overwritten."""

    def holds(self, page: int) -> bool:
        """Whether `page` is in the index, so worth keeping when nobody holds it."""

    def clear(self) -> None:
        """The device lost its K/V."""


class NoReuse:
    """Prefix caching off."""

    every = MANY

    def key(self, tokens: Seq[int], start: int, salt: str) -> Key:
        return ()

    def match(self, tokens: Seq[int], salt: str) -> tuple[list[int], Node | None]:
        return [], None

    def publish(self, node: Node, tokens: Seq[int], start: int, salt: str, page: int) -> Node:
        return node

    def forget(self, page: int) -> None:
        pass

    def holds(self, page: int) -> bool:
        return False

    def clear(self) -> None:
        pass


class RadixReuse:
    """A radix tree whose edges are whole pages, as in SGLang's RadixAttention (arXiv:2312.07104), block-granular.

    The salt is part of the first edge's key, so tenants never meet and an unused salt costs nothing.
    """

    def __init__(self, page_size: int) -> None:
        self.every = page_size
        self.root: Node = {}
        self.where: dict[int, tuple[Node, Key]] = {}

    def key(self, tokens: Seq[int], start: int, salt: str) -> Key:
        page = tuple(tokens[start : start + self.every])
        return (salt, *page) if salt and start == 0 else page

    def match(self, tokens: Seq[int], salt: str) -> tuple[list[int], Node | None]:
        node, hit = self.root, []
        for start in range(0, len(tokens) - self.every + 1, self.every):
            found = node.get(self.key(tokens, start, salt))
            if found is None:
                break
            hit.append(found[0])
            node = found[1]
        return hit, node

    def publish(self, node: Node, tokens: Seq[int], start: int, salt: str, page: int) -> Node:
        key = self.key(tokens, start, salt)
        found = node.get(key)
        if found is None:
            found = node[key] = (page, {})
            self.where[page] = (node, key)
        return found[1]

    def forget(self, page: int) -> None:
        if (place := self.where.pop(page, None)) is not None:
            node, key = place
            del node[key]

    def holds(self, page: int) -> bool:
        return page in self.where

    def clear(self) -> None:
        self.root = {}
        self.where.clear()
