"""A sequence's pages: opened with what the prefix cache has, extended as it grows, published when committed."""

from __future__ import annotations

from collections.abc import Iterable

from quire.core.blocks import BlockPool, Shelf
from quire.core.policy import Pressure, preempt
from quire.core.reuse import NoReuse, RadixReuse, Reuse
from quire.core.sequence import Place, Sequence
from quire.errors import InvalidRequest
from quire.values import MANY, Request


class KV:
    """Page accounting for all sequences. `page_size` is in tokens; contiguous KV is one page as long as the context.

    worth: prompt tokens that another sequence is computing just now, from which on it pays to wait for them. pressure:
    how many pages each is to have before anybody else is let in.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        reuse: Reuse | None = None,
        shelf: Shelf | None = None,
        worth: int = 64,
        pressure: Pressure = preempt,
    ) -> None:
        self.page_size, self.worth, self.pressure = page_size, worth, pressure
        self.reuse: Reuse = NoReuse() if reuse is None else reuse
        self.pool = BlockPool(pages, self.reuse, shelf)
        self.claims: dict[Place, Sequence] = {}
        self.queried = 0
        self.hit = 0
        self.resets = 0

    def pages_for(self, length: int) -> int:
        """Pages a sequence that ends at `length` tokens needs at most: its last token is never fed."""
        return -(-(length - 1) // self.page_size)

    def check(self, request: Request) -> None:
        """Raises InvalidRequest for what can never fit, however empty the pool is."""
        need = self.pages_for(len(request.prompt) + request.max_new)
        if need > self.pool.pages:
            raise InvalidRequest(
                f"prompt ({len(request.prompt)} tokens) and max_tokens ({request.max_new}) need {need} KV blocks, "
                f"and there are {self.pool.pages}: shorten either, or give the server more KV memory",
                param="prompt",
            )

    def open(self, seq: Sequence) -> None:
        """Take what the cache has of its tokens."""
        known = self._known(seq)
        seq.blocks, seq.node = self.reuse.match(known, seq.request.salt)
        for page in seq.blocks:
            self.pool.share(page)
        seq.computed = seq.hits = len(seq.blocks) * self.page_size
        seq.unfed, seq.drafting, seq.room = len(seq.tokens) - seq.computed, 0, 0
        seq.mark = (len(seq.blocks) + 1) * self.reuse.every

    def _known(self, seq: Sequence) -> list[int]:
        """What may be reused: all tokens but the last, which must be fed to have logits.

        Whoever wants something of all its prompt tokens bypasses the hits, for those rows would never be computed.
        """
        return [] if seq.asks or seq.request.sampling.pooling == "mean" else seq.tokens[:-1]

    def coming(self, seq: Sequence) -> tuple[Sequence, int] | None:
        """Who is computing what `seq` would compute next, and up to which length, if that is worth waiting for."""
        known = self._known(seq)
        if not self.claims or len(known) < self.worth:
            return None
        blocks, node = self.reuse.match(known, seq.request.salt)
        start, size = len(blocks) * self.page_size, self.page_size
        other = self.claims.get((id(node), self.reuse.key(known, start, seq.request.salt)))
        if other is None:
            return None
        upto, most = start, min(len(known), other.prompt_length)
        while upto + size <= most and known[upto : upto + size] == other.tokens[upto : upto + size]:
            upto += size
        return (other, upto) if upto - start >= self.worth else None

    def claim(self, seq: Sequence) -> None:
        """It is opened for good: count its lookup, and let others know which page of its prompt it computes next."""
        self.queried += len(seq.tokens)
        self.hit += seq.hits
        self._claim(seq)

    def _claim(self, seq: Sequence) -> None:
        if seq.mark <= seq.prompt_length:
            start = seq.mark - self.page_size
            place = id(seq.node), self.reuse.key(seq.tokens, start, seq.request.salt)
            if self.claims.setdefault(place, seq) is seq:
                seq.claim = place

    def unclaim(self, seq: Sequence) -> None:
        """What it was about to compute is for somebody else to claim."""
        if seq.claim is not None:
            del self.claims[seq.claim]
            seq.claim = None

    def need(self, seq: Sequence, upto: int) -> int:
        """Pages missing to write positions below `upto`."""
        return max(0, -(-min(upto, seq.limit - 1) // self.page_size) - len(seq.blocks))

    def wants(self, seq: Sequence) -> int:
        """Pages missing to what it is to have before anybody else is let in."""
        return self.need(seq, self.pressure(seq, self.page_size))

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
        size, claimed = self.page_size, seq.claim is not None
        self.unclaim(seq)
        while seq.mark <= seq.computed and seq.node is not None:
            start = seq.mark - size
            page = seq.blocks[start // size]
            seq.node = self.reuse.publish(seq.node, seq.tokens, start, seq.request.salt, page)
            seq.mark += size
        if claimed:
            self._claim(seq)

    def close(self, seq: Sequence) -> None:
        """Give the pages back tail first, so that leaves are evicted before their parents."""
        drop = self.pool.drop
        for page in reversed(seq.blocks):
            drop(page)
        seq.blocks = []

    def clear(self) -> None:
        """The device lost its K/V."""
        for seq in list(self.claims.values()):
            self.unclaim(seq)
        self.pool.clear()

    def forget(self, seqs: Iterable[Sequence]) -> None:
        """What was computed until now is found by nobody again; `seqs`, who go on, keep their pages to themselves."""
        for seq in seqs:
            self.unclaim(seq)
            seq.node, seq.mark = None, MANY
        self.pool.clear()
        self.resets += 1


def prefix_index(page_size: int, enabled: bool) -> Reuse:
    """The index for a switch: RadixReuse, or NoReuse for off."""
    return RadixReuse(page_size) if enabled else NoReuse()
