"""Names for pages of tokens, in place of the tokens: equal beginnings keep equal names, and nothing else is left.

Decisions depend on token ids in two ways only: whether pages are equal from the beginning on, and whether a token ends
its request. So a page is named by a keyed hash of everything up to its end (as Mooncake's traces name blocks, USENIX
FAST'25, but with a key), and the key is drawn anew for each recording and written nowhere.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b

STOP = 1
"""The disguise of a token that ends its request; 0 is that of any other but a page's last, which is the page's name."""


class HashChain:
    """The pages of one sequence, named one after another."""

    __slots__ = ("_hash",)

    def __init__(self, hash: blake2b) -> None:
        self._hash = hash

    def name(self, tokens: Sequence[int]) -> int:
        """Of the next page, which has these tokens; 2 or more."""
        hash = self._hash
        hash.update(array("q", tokens))
        return int.from_bytes(hash.copy().digest(), "little") >> 1 | 2

    def copy(self) -> HashChain:
        return HashChain(self._hash.copy())


class Anonymizer:
    """Of one recording. page_size in tokens; MANY: pages are never full, and need no names."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._key = secrets.token_bytes(32)
        self._root = blake2b(digest_size=8, key=self._key)

    def chain(self) -> HashChain:
        """Of a sequence none of whose pages has a name."""
        return HashChain(self._root.copy())

    def begun(self, tokens: Sequence[int]) -> tuple[HashChain, list[int]]:
        """Of a sequence that begins with these tokens, and the names of their full pages."""
        size, chain = self.page_size, self.chain()
        return chain, [chain.name(tokens[end - size : end]) for end in range(size, len(tokens) + 1, size)]

    def pages(self, tokens: Sequence[int]) -> list[int]:
        """Names of the full pages of these tokens, which are a sequence's from its beginning."""
        return self.begun(tokens)[1]

    def salt(self, salt: str) -> str:
        """Of a salt; an empty one stays so."""
        return blake2b(salt.encode(), digest_size=8, key=self._key, person=b"salt").hexdigest() if salt else ""


def anonymized_tokens(tokens: int, names: Sequence[int], page_size: int) -> list[int]:
    """So many tokens whose full pages have these names."""
    out = [0] * tokens
    for i, name in enumerate(names, 1):
        out[i * page_size - 1] = name
    return out
