"""A sequence's pages: opened with what the prefix cache has, extended as it grows, published when committed."""

from __future__ import annotations

from collections.abc import Iterable

from quire.errors import InvalidRequest
from quire.scheduler.block_pool import BlockPool, EvictionPolicy, NoPrefixCache, PrefixCache, RadixPrefixCache
from quire.scheduler.sequence import PrefixKey, Sequence
from quire.types import UNLIMITED, Request


class KVCacheManager:
    """Page accounting for all sequences. `page_size` is in tokens; contiguous KV is one page as long as the context.

    worth: prompt tokens that another sequence is computing just now, from which on it pays to wait for them.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: PrefixCache | None = None,
        eviction_policy: EvictionPolicy | None = None,
        min_shared_tokens: int = 64,
    ) -> None:
        self.block_size = block_size
        self.min_shared_tokens = min_shared_tokens
        self.prefix_cache: PrefixCache = NoPrefixCache() if prefix_cache is None else prefix_cache
        self.block_pool = BlockPool(num_blocks, self.prefix_cache, eviction_policy)
        self.inflight_prefixes: dict[PrefixKey, Sequence] = {}
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_resets = 0

    def blocks_for(self, length: int) -> int:
        """Pages a sequence that ends at `length` tokens needs at most: its last token is never fed."""
        return -(-(length - 1) // self.block_size)

    def check_fits(self, request: Request) -> None:
        """Raises InvalidRequest for what can never fit, however empty the pool is."""
        need = self.blocks_for(len(request.prompt) + request.max_new_tokens)
        if need > self.block_pool.num_blocks:
            raise InvalidRequest(
                f"prompt ({len(request.prompt)} tokens) and max_tokens ({request.max_new_tokens}) need {need} "
                f"KV blocks, "
                f"and there are {self.block_pool.num_blocks}: shorten either, or give the server more KV memory",
                param="prompt",
            )

    def match_prefix(self, seq: Sequence) -> None:
        """Take what the cache has of its tokens."""
        known = self._cacheable_tokens(seq)
        seq.blocks, seq.prefix_node = self.prefix_cache.match(known, seq.request.cache_salt)
        for block in seq.blocks:
            self.block_pool.incref(block)
        seq.num_computed = seq.num_cached = len(seq.blocks) * self.block_size
        seq.num_unscheduled, seq.num_drafts, seq.capacity = len(seq.tokens) - seq.num_computed, 0, 0
        seq.next_cache_at = (len(seq.blocks) + 1) * self.prefix_cache.block_size

    def _cacheable_tokens(self, seq: Sequence) -> list[int]:
        """What may be reused: all tokens but the last, which must be fed to have logits.

        Whoever wants something of all its prompt tokens bypasses the hits, for those rows would never be computed.
        """
        return [] if seq.needs_prompt_logits or seq.request.sampling.pooling == "mean" else seq.tokens[:-1]

    def find_inflight_prefix(self, seq: Sequence) -> tuple[Sequence, int] | None:
        """Who is computing what `seq` would compute next, and up to which length, if that is worth waiting for."""
        known = self._cacheable_tokens(seq)
        if not self.inflight_prefixes or len(known) < self.min_shared_tokens:
            return None
        blocks, node = self.prefix_cache.match(known, seq.request.cache_salt)
        start, size = len(blocks) * self.block_size, self.block_size
        other = self.inflight_prefixes.get((id(node), self.prefix_cache.key(known, start, seq.request.cache_salt)))
        if other is None:
            return None
        length, max_length = start, min(len(known), other.prompt_length)
        while length + size <= max_length and known[length : length + size] == other.tokens[length : length + size]:
            length += size
        return (other, length) if length - start >= self.min_shared_tokens else None

    def record_admission(self, seq: Sequence) -> None:
        """It is opened for good: count its lookup, and let others know which page of its prompt it computes next."""
        self.num_queried_tokens += len(seq.tokens)
        self.num_hit_tokens += seq.num_cached
        self._add_inflight_prefix(seq)

    def _add_inflight_prefix(self, seq: Sequence) -> None:
        if seq.next_cache_at <= seq.prompt_length:
            start = seq.next_cache_at - self.block_size
            key = id(seq.prefix_node), self.prefix_cache.key(seq.tokens, start, seq.request.cache_salt)
            if self.inflight_prefixes.setdefault(key, seq) is seq:
                seq.inflight_prefix = key

    def drop_inflight_prefix(self, seq: Sequence) -> None:
        """What it was about to compute is for somebody else to claim."""
        if seq.inflight_prefix is not None:
            del self.inflight_prefixes[seq.inflight_prefix]
            seq.inflight_prefix = None

    def num_blocks_needed(self, seq: Sequence, length: int) -> int:
        """Pages missing to write positions below `upto`."""
        return max(0, -(-min(length, seq.max_length - 1) // self.block_size) - len(seq.blocks))

    def allocate(self, seq: Sequence, num_blocks: int) -> tuple[int, ...]:
        """Take `need` pages; the pages to send: the first time all of them, prefix hits included."""
        num_sent = seq.capacity // self.block_size
        allocate = self.block_pool.allocate
        seq.blocks += [allocate() for _ in range(num_blocks)]
        seq.capacity = len(seq.blocks) * self.block_size
        new_blocks = tuple(seq.blocks[num_sent:])
        if seq.capacity >= seq.max_length - 1:
            seq.capacity = UNLIMITED
        return new_blocks

    def cache_blocks(self, seq: Sequence) -> None:
        """Offer full pages to others: only what is committed, so that a write in flight is always past it."""
        size, claimed = self.block_size, seq.inflight_prefix is not None
        self.drop_inflight_prefix(seq)
        while seq.next_cache_at <= seq.num_computed and seq.prefix_node is not None:
            start = seq.next_cache_at - size
            block = seq.blocks[start // size]
            seq.prefix_node = self.prefix_cache.insert(
                seq.prefix_node, seq.tokens, start, seq.request.cache_salt, block
            )
            seq.next_cache_at += size
        if claimed:
            self._add_inflight_prefix(seq)

    def free(self, seq: Sequence) -> None:
        """Give the pages back tail first, so that leaves are evicted before their parents."""
        decref = self.block_pool.decref
        for block in reversed(seq.blocks):
            decref(block)
        seq.blocks = []

    def reset(self) -> None:
        """The device lost its K/V."""
        for seq in list(self.inflight_prefixes.values()):
            self.drop_inflight_prefix(seq)
        self.block_pool.clear_cache()

    def invalidate(self, seqs: Iterable[Sequence]) -> None:
        """What was computed until now is found by nobody again; `seqs`, who go on, keep their pages to themselves."""
        for seq in seqs:
            self.drop_inflight_prefix(seq)
            seq.prefix_node, seq.next_cache_at = None, UNLIMITED
        self.block_pool.clear_cache()
        self.num_resets += 1


def make_prefix_cache(block_size: int, enabled: bool) -> PrefixCache:
    """The index for a switch: RadixReuse, or NoReuse for off."""
    return RadixPrefixCache(block_size) if enabled else NoPrefixCache()
