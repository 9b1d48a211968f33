"""A sequence's pages: opened with what the prefix cache has, extended as it grows, published when committed."""

from __future__ import annotations

from quire.core.blocks import BlockPool, Shelf
from quire.core.reuse import NoReuse, RadixReuse, Reuse
from quire.core.sequence import Sequence
from quire.values import MANY


class KV:
    """Page accounting for all sequences. `page_size` is in tokens; contiguous KV is one page as long as the context."""

    def __init__(self, pages: int, page_size: int, reuse: Reuse | None = None, shelf: Shelf | None = None) -> None:
        self.page_size = page_size
        self.reuse: Reuse = NoReuse() if reuse is None else reuse
        self.pool = BlockPool(pages, self.reuse, shelf)
        self.queried = 0
        self.hit = 0

    def pages_for(self, length: int) -> int:
        """Pages a sequence that ends at `length` tokens needs at most: its last token is never fed."""
        return -(-(length - 1) // self.page_size)

    def open(self, seq: Sequence) -> None:
        """Take what the cache has of the tokens, short of the last: it must be fed to have logits.

        Whoever wants logits of its prompt tokens bypasses the hits, for those rows would never be computed.
        """
        known = [] if seq.asks else seq.tokens[:-1]
        seq.blocks, seq.node = self.reuse.match(known, seq.request.salt)
        for page in seq.blocks:
            self.pool.share(page)
        seq.computed = seq.hits = len(seq.blocks) * self.page_size
        seq.unfed, seq.drafting, seq.room = len(seq.tokens) - seq.computed, 0, 0
        seq.mark = (len(seq.blocks) + 1) * self.reuse.every

    def count(self, seq: Sequence) -> None:
        """Put an opened sequence's lookup into the statistics (a lookup that was then put back is not one)."""
        self.queried += len(seq.tokens)
        self.hit += seq.hits

    def need(self, seq: Sequence, upto: int) -> int:
        """Pages missing to write positions below `upto`."""
        return max(0, -(-min(upto, seq.limit - 1) // self.page_size) - len(seq.blocks))

    def extend(self, seq: Sequence, need: int) -> tuple[int, ...]:
        """Take `need` pages; the pages to send: the first time all of them, prefix hits included."""
        sent = seq.room // self.page_size
        take = self.pool.take
        seq.blocks += [take() for _ in range(need)]
        seq.room = len(seq.blocks) * self.page_size
        pages = tuple(seq.blocks[sent:])
        if seq.room >= seq.limit - 1:
            seq.room = MANY
        return pages

    def publish(self, seq: Sequence) -> None:
        """Offer full pages to others: only what is committed, so that a write in flight is always past it."""
        size = self.page_size
        while seq.mark <= seq.computed and seq.node is not None:
            start = seq.mark - size
            page = seq.blocks[start // size]
            seq.node = self.reuse.publish(seq.node, seq.tokens, start, seq.request.salt, page)
            seq.mark += size

    def close(self, seq: Sequence) -> None:
        """Give the pages back tail first, so that leaves are evicted before their parents."""
        drop = self.pool.drop
        for page in reversed(seq.blocks):
            drop(page)
        seq.blocks = []


def prefix_index(page_size: int, enabled: bool) -> Reuse:
    """The index for a switch: RadixReuse, or NoReuse for off."""
    return RadixReuse(page_size) if enabled else NoReuse()
