"""The blocks of sequences: matched with the prefix cache, allocated as they grow, cached once committed."""

from __future__ import annotations

from collections.abc import Iterable

from quire.errors import InvalidRequest
from quire.scheduler.block_pool import BlockPool, EvictionPolicy, Lru, NoPrefixCache, PrefixCache, RadixPrefixCache
from quire.scheduler.kv_offload import ALL_TRIED, NoOffload, Offload
from quire.scheduler.pins import Pins
from quire.scheduler.sequence import PrefixKey, Sequence
from quire.scheduler.snapshots import HybridPrefixCache, NoSnapshots, Snapshots, StateSnapshots
from quire.scheduler.step_time import StepTimeModel
from quire.types import UNLIMITED, WHOLE_PROMPT, Request


class KVCacheManager:
    """Block accounting for all sequences. Contiguous KV is one block as long as the context.

    block_size: tokens of a block. min_shared_tokens: prompt tokens that another sequence is computing, from which on it
    pays to wait for them. max_pinned_blocks: see `Pins`. snapshot_interval: see `StateSnapshots`; used with a
    `HybridPrefixCache`. offload: where evicted blocks go; None: nowhere.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: PrefixCache | None = None,
        eviction_policy: EvictionPolicy | None = None,
        min_shared_tokens: int = 64,
        max_pinned_blocks: int = 0,
        snapshot_interval: int = UNLIMITED,
        offload: Offload | None = None,
    ) -> None:
        self.block_size = block_size
        self.min_shared_tokens = min_shared_tokens
        self.prefix_cache: PrefixCache = NoPrefixCache() if prefix_cache is None else prefix_cache
        self.pins = Pins(Lru() if eviction_policy is None else eviction_policy, max_pinned_blocks)
        self.offload: Offload = NoOffload() if offload is None else offload
        self.block_pool = BlockPool(num_blocks, self.prefix_cache, self.pins, self.offload.evict)
        self.offload.attach(self.block_pool, self.pins)
        self.snapshots: Snapshots = (
            StateSnapshots(self.prefix_cache, self.pins, snapshot_interval)
            if isinstance(self.prefix_cache, HybridPrefixCache)
            else NoSnapshots()
        )
        self.inflight_prefixes: dict[PrefixKey, Sequence] = {}
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_resets = 0

    def blocks_for(self, length: int) -> int:
        """Most blocks of a sequence that ends at `length` tokens: its last token is never fed."""
        return -(-(length - 1) // self.block_size)

    def check_fits(self, request: Request) -> None:
        """Raises InvalidRequest for a request that cannot fit even into an empty pool."""
        need = self.blocks_for(len(request.prompt) + request.max_new_tokens)
        if need > self.block_pool.num_blocks:
            raise InvalidRequest(
                f"prompt ({len(request.prompt)} tokens) and max_tokens ({request.max_new_tokens}) need {need} "
                f"KV blocks, "
                f"and there are {self.block_pool.num_blocks}: shorten either, or give the server more KV memory",
                param="prompt",
            )

    def match_prefix(self, seq: Sequence) -> None:
        """Take the cached blocks of its tokens."""
        known = self._cacheable_tokens(seq)
        seq.blocks, seq.prefix_node = self.prefix_cache.match(known, seq.request.cache_salt)
        for block in seq.blocks:
            self.block_pool.incref(block)
        seq.num_computed = seq.num_cached = len(seq.blocks) * self.block_size
        seq.num_cache_written = 0
        seq.num_unscheduled, seq.num_drafts, seq.capacity = len(seq.tokens) - seq.num_computed, 0, 0
        seq.next_cache_at = (len(seq.blocks) + 1) * self.prefix_cache.block_size

    def _cacheable_tokens(self, seq: Sequence) -> list[int]:
        """All tokens but the last, which must be fed to have logits.

        None for a request that needs something of each prompt token: cached rows are not computed.
        """
        whole = seq.needs_prompt_logits or seq.request.sampling.pooling in WHOLE_PROMPT
        return [] if whole else seq.prefix_tokens[:-1]

    def find_inflight_prefix(self, seq: Sequence) -> tuple[Sequence, int] | None:
        """The running sequence that computes what `seq` would compute next, and up to which length, if that is worth
        waiting for."""
        known = self._cacheable_tokens(seq)
        if not self.inflight_prefixes or len(known) < self.min_shared_tokens:
            return None
        salt, size, cache = seq.request.cache_salt, self.block_size, self.prefix_cache
        places = cache.frontier(known, salt)
        found = ((self.inflight_prefixes.get((id(node), cache.key(known, at, salt))), at) for node, at in places)
        other, length = next(((other, at) for other, at in found if other is not None), (None, 0))
        if other is None:
            return None
        max_length, least = min(len(known), other.prompt_length), places[0][1] + self.min_shared_tokens
        others = other.prefix_tokens
        while length + size <= max_length and known[length : length + size] == others[length : length + size]:
            length += size
        if length >= least:
            length = self.snapshots.shared_length(other, length)
        return (other, length) if length >= least else None

    def fetch(self, seq: Sequence, step_times: StepTimeModel, max_tokens: int, num_queued: int) -> bool:
        """Start to bring back evicted blocks of its prefix, where that is faster than computing them in steps of
        `max_tokens`. num_queued: sequences that could be admitted, this one among them. True: it waits for them."""
        if seq.num_fetches >= ALL_TRIED:
            return False
        return self.offload.fetch(seq, self._cacheable_tokens(seq), step_times, max_tokens, num_queued)

    def record_admission(self, seq: Sequence) -> None:
        """Count the lookup of an admitted sequence, and register the block of its prompt that it computes next."""
        self.num_queried_tokens += len(seq.tokens)
        self.num_hit_tokens += seq.num_cached
        self.offload.admit(seq)
        self.snapshots.admit(seq)
        seq.diverged_at = self._diverged_at(seq)
        self._add_inflight_prefix(seq)

    def _diverged_at(self, seq: Sequence) -> int | None:
        """The first token that differs from the nearest cached prefix; None where nothing cached goes on otherwise."""
        if not seq.prefix_node:
            return None
        known, start = self._cacheable_tokens(seq), seq.num_cached
        more = self.prefix_cache.common_length(seq.prefix_node, known, start, seq.request.cache_salt)
        return None if more is None or start + more >= len(known) else start + more

    def _add_inflight_prefix(self, seq: Sequence) -> None:
        if seq.next_cache_at <= seq.prompt_length:
            start = seq.next_cache_at - self.block_size
            key = id(seq.prefix_node), self.prefix_cache.key(seq.prefix_tokens, start, seq.request.cache_salt)
            if self.inflight_prefixes.setdefault(key, seq) is seq:
                seq.inflight_prefix = key

    def drop_inflight_prefix(self, seq: Sequence) -> None:
        """Another sequence may register the block that this one was about to compute."""
        if seq.inflight_prefix is not None:
            del self.inflight_prefixes[seq.inflight_prefix]
            seq.inflight_prefix = None

    def num_blocks_needed(self, seq: Sequence, length: int) -> int:
        """Blocks missing to write positions below `length`."""
        return max(0, -(-min(length, seq.max_length - 1) // self.block_size) - len(seq.blocks))

    def allocate(self, seq: Sequence, num_blocks: int) -> tuple[int, ...]:
        """Allocate blocks. Returns those that the device does not know yet: the first time all, cached ones
        included."""
        num_sent = seq.capacity // self.block_size
        allocate = self.block_pool.allocate
        seq.blocks += [allocate() for _ in range(num_blocks)]
        seq.capacity = len(seq.blocks) * self.block_size
        new_blocks = tuple(seq.blocks[num_sent:])
        if seq.capacity >= seq.max_length - 1:
            seq.capacity = UNLIMITED
        return new_blocks

    def cache_blocks(self, seq: Sequence) -> None:
        """Put full blocks into the prefix cache, only committed ones: a write in flight is always past them."""
        size = self.block_size
        was_registered = seq.inflight_prefix is not None
        self.drop_inflight_prefix(seq)
        tokens = seq.prefix_tokens
        while seq.next_cache_at <= seq.num_computed and seq.prefix_node is not None:
            start = seq.next_cache_at - size
            block = seq.blocks[start // size]
            seq.prefix_node = self.prefix_cache.insert(seq.prefix_node, tokens, start, seq.request.cache_salt, block)
            # Where another sequence's block of the same tokens is there already, this one is not in the cache.
            if self.prefix_cache.contains(block):
                self.offload.cached(block, seq, start // size)
                seq.num_cache_written += size if seq.next_cache_at <= seq.prompt_length else 0
            seq.next_cache_at += size
        self.snapshots.commit(seq)
        self.offload.computed(seq)
        if was_registered:
            self._add_inflight_prefix(seq)

    def pin(self, seq: Sequence) -> tuple[int, ...]:
        """Pin the prefixes of its prompt that its request asks for, once the prompt is computed.

        Returns how many tokens of each are pinned now.
        """
        request, pool, pinned = seq.request, self.block_pool, list[int]()
        for length, seconds in request.pins:
            blocks, _ = self.prefix_cache.match(seq.prefix_prompt[:length], request.cache_salt)
            for block in blocks:
                pool.incref(block)
            pinned.append(self.pins.pin(blocks, seconds, request.owner) * self.block_size)
            for block in reversed(blocks):
                pool.decref(block)
        return tuple(pinned)

    def free(self, seq: Sequence) -> None:
        """Free the blocks from the last to the first, so that leaves are evicted before their parents."""
        decref = self.block_pool.decref
        for block in reversed(seq.blocks):
            decref(block)
        seq.blocks = []
        self.snapshots.free(seq)

    def reset(self) -> None:
        """Forget all cached contents: the device lost its K/V."""
        for seq in list(self.inflight_prefixes.values()):
            self.drop_inflight_prefix(seq)
        self.pins.clear()
        self.block_pool.clear_cache()
        self.offload.reset()

    def invalidate(self, seqs: Iterable[Sequence]) -> None:
        """Empty the prefix cache; `seqs`, which go on, keep their blocks to themselves."""
        for seq in seqs:
            self.drop_inflight_prefix(seq)
            seq.prefix_node, seq.next_cache_at = None, UNLIMITED
        self.pins.clear()
        self.block_pool.clear_cache()
        self.offload.clear()
        self.num_resets += 1


def make_prefix_cache(block_size: int, enabled: bool, num_snapshots: int | None = None) -> PrefixCache:
    """The prefix cache for an option that is on or off. num_snapshots: slots of a model with recurrent layers."""
    if not enabled:
        return NoPrefixCache()
    return RadixPrefixCache(block_size) if num_snapshots is None else HybridPrefixCache(block_size, num_snapshots)
