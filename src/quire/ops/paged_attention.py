"""How plain torch reads and writes KV blocks: index tensors are computed once a forward and shared by all layers.

A pool [N, G, B, D] is seen as N * G tiles of B * D numbers to read and as N * G * B rows of D numbers to write, so that
each layer's gather is one `index_select` whose result is already ordered by head and position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from quire.ops.operands import Scores
from quire.ops.quantized import FLOAT8_MAX, to_fp8
from quire.ops.ragged import LayerKV, RaggedBatch, fields_of

FEW = 32
"""Spans of up to this many queries are attended together with others that have as many, one by one above."""

WORTH = 512
"""Tokens of K/V that cost less to read in vain than a call of its own would: 50 us on one core, at 4 heads of 32."""


@dataclass(frozen=True, slots=True)
class SpanGroup:
    """Spans of `n` queries each, attended in one call.

    rows: where their queries are in the batch (a slice when they are neighbours). kv_len [S]. pages [S, P] int64,
    P the pages of the longest; past a span's own end its first page again, so that nothing foreign is read.
    """

    n: int
    rows: slice | Tensor
    kv_len: Tensor
    longest: int
    pages: Tensor
    even: bool
    """Every span has `longest` tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttentionMetadata(RaggedBatch):
    """A batch sorted into groups, with the indices that its layers share. sort: finds the groups, of which a step that
    kernels attend in needs none. begun [.] int64: blocks that are partly filled.

    The dictionaries hold what layers of one shape have in common: filled by the first, used by the rest.
    """

    sort: Callable[[], tuple[SpanGroup, ...]]
    begun: Tensor
    sorted: list[tuple[SpanGroup, ...]] = field(default_factory=list)
    tiles: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    targets: dict[int, Tensor] = field(default_factory=dict)
    masks: dict[tuple[int, ...], Tensor | None] = field(default_factory=dict)
    beginnings: dict[int, tuple[Tensor, RaggedBatch]] = field(default_factory=dict)

    @property
    def groups(self) -> tuple[SpanGroup, ...]:
        """The groups."""
        if not self.sorted:
            self.sorted.append(self.sort())
        return self.sorted[0]

    @property
    def is_whole(self) -> bool:
        """Whether every span is a whole prompt."""
        return all(group.even and group.n == group.longest for group in self.groups)

    @property
    def order(self) -> Tensor | None:
        """Tokens by group, int64 [T]; None where they are so already."""
        if len(self.groups) == 1 and isinstance(self.groups[0].rows, slice):
            return None
        if 0 not in self.targets:
            whole = torch.arange(len(self.tokens))
            self.targets[0] = torch.cat([whole[group.rows] for group in self.groups])
        return self.targets[0]

    @classmethod
    def of(cls, batch: RaggedBatch, reach: int = 1) -> PagedAttentionMetadata:
        """reach: positions are read in multiples of it; after a span's end, any of its own."""
        return cls._of(batch, partial(together, batch, reach))

    @classmethod
    def cut(cls, batch: RaggedBatch, run: int) -> PagedAttentionMetadata:
        """As `of`, but every query reads all positions up to the end of its own run of `run` and no more, whatever it
        is batched with. Spans that cross the end of a run are cut there."""
        return cls._of(batch, partial(together_in_runs, batch, run))

    @classmethod
    def _of(cls, batch: RaggedBatch, sort: Callable[[], tuple[SpanGroup, ...]]) -> PagedAttentionMetadata:
        table, size = batch.page_table, batch.page_size
        counts = [stop - start for start, stop in pairwise(batch.query_start.tolist())]
        begun = [
            (span, last // size)
            for span, (n, last) in enumerate(zip(counts, batch.kv_len.tolist(), strict=True))
            if n and last % size and last // size * size >= last - n
        ]
        blocks = table.new_empty(0, dtype=torch.int64)
        if begun:
            at = torch.tensor(begun, dtype=torch.int64, device=table.device)
            blocks = table[at[:, 0], at[:, 1]].long()
        return cls(**fields_of(batch), sort=sort, begun=blocks)

    def read(self, pool: Tensor, index: int, scale: float, dtype: torch.dtype) -> Tensor:
        """Group `index`'s part of pool [N, G, B, D], times its scale -> [S, G, P * B, D] of `dtype`."""
        pages, heads, size, dim = pool.shape
        picked = self.groups[index].pages
        tiles = self.tiles.get((index, heads))
        if tiles is None:
            tiles = (picked[:, None, :] * heads + torch.arange(heads, device=pool.device)[:, None]).flatten()
            self.tiles[index, heads] = tiles
        found = pool.view(pages * heads, size * dim).index_select(0, tiles)
        found = found.view(picked.shape[0], heads, -1, dim)
        return found if pool.dtype is dtype else found.to(dtype).mul_(scale)

    def read_kv(self, kv: LayerKV, index: int, q: Tensor, length: int = 0) -> tuple[Tensor, Tensor]:
        """K [S, G, L, D] and V [S, G, L, E] of group `index` for queries q [.., D], of its dtype, as far as `length`, 0
        for the group's longest span. Where less than D is kept of keys, they begin with their values: latents."""
        length = length or self.groups[index].longest
        k, v = self.read(kv.k, index, kv.k_scale, q.dtype), self.read(kv.v, index, kv.v_scale, q.dtype)
        k, v = k[:, :, :length], v[:, :, :length]
        return k if k.shape[-1] == q.shape[-1] else torch.cat((v, k), -1), v

    def clear(self, kv: LayerKV) -> None:
        """Clear blocks that are about to be partly filled: what the last owner left there, if it is NaN, would reach a
        result through a weight of zero."""
        if len(self.begun):
            for pool in kv.pools:
                (pool.view(torch.uint8) if pool.dtype in FLOAT8_MAX else pool).index_fill_(0, self.begun, 0)

    def write(self, kv: LayerKV, k: Tensor, v: Tensor) -> None:
        """Write k [T, G, D] and v [T, G, E] into the batch's slots."""
        self.clear(kv)
        self.put(kv.k, k, kv.k_scale)
        self.put(kv.v, v, kv.v_scale)

    def put(self, pool: Tensor, new: Tensor, scale: float = 1.0) -> None:
        """Write new [T, G, D] into the batch's slots of one of a layer's pools, which `clear` has cleared."""
        pages, heads, size, dim = pool.shape
        rows = self.targets.get(heads)
        if rows is None:
            page, offset = self.slots // size, self.slots % size
            head = torch.arange(0, heads * size, size, device=new.device)
            rows = ((page * heads * size + offset)[:, None] + head).flatten()
            self.targets[heads] = rows
        if pool.dtype in FLOAT8_MAX:  # whose bytes torch moves only as bytes
            new = to_fp8(new, scale, pool.dtype).view(torch.uint8)
            pool = pool.view(torch.uint8)
        pool.view(pages * heads * size, dim).index_copy_(0, rows, new.reshape(-1, dim))

    def beginning(self, position: int, prepare: Callable[[RaggedBatch], RaggedBatch]) -> tuple[Tensor, RaggedBatch]:
        """As `RaggedBatch.below`, prepared."""
        if position not in self.beginnings:
            rows, batch = self.below(position)
            self.beginnings[position] = rows, prepare(batch)
        return self.beginnings[position]

    def mask(self, index: int, how: Scores, repeat: int) -> Tensor | None:
        """[S, 1, repeat * n, L] bool: which of L positions each query sees; None where each sees all."""
        key = (index, how.window, repeat, how.chunk, how.ahead)
        if key not in self.masks:
            self.masks[key] = attention_mask(self.groups[index], how, repeat, self.last_of(index, how.ahead))
        return self.masks[key]

    def last_of(self, index: int, ahead: int) -> Tensor | None:
        """[S, n]: as `RaggedBatch.last_seen`, of the queries of group `index`."""
        group, last = self.groups[index], self.last_seen(ahead)
        return None if last is None else last[group.rows].view(-1, group.n)


def together(batch: RaggedBatch, reach: int) -> tuple[SpanGroup, ...]:
    """The groups of `PagedAttentionMetadata.of`."""
    starts = batch.query_start.tolist()
    lengths = batch.kv_len.tolist()
    found: dict[tuple[int, int], list[int]] = {}
    for span, (start, stop) in enumerate(pairwise(starts)):
        if stop > start:
            found.setdefault((stop - start, 0 if stop - start <= FEW else span), []).append(span)
    return tuple(
        group(batch, spans, n, starts, lengths, reach)
        for (n, _), every in found.items()
        for spans in alike(every, lengths)
    )


def together_in_runs(batch: RaggedBatch, run: int) -> tuple[SpanGroup, ...]:
    """The groups of `PagedAttentionMetadata.cut`."""
    lengths, spans, starts = list[int](), list[int](), [0]
    found: dict[tuple[int, int, int], list[int]] = {}
    ends = batch.kv_len.tolist()
    for span, ((start, stop), end) in enumerate(zip(pairwise(batch.query_start.tolist()), ends, strict=True)):
        first = end - (stop - start)
        while first < end:
            last = first // run + 1
            n = min(end, last * run) - first
            found.setdefault((n, last, 0 if n <= FEW else len(spans)), []).append(len(spans))
            first += n
            spans.append(span)
            lengths.append(first)
            starts.append(starts[-1] + n)
    pieces = batch
    if len(spans) != len(ends):
        at = torch.tensor(spans, dtype=torch.int64, device=batch.page_table.device)  # of none, too
        pieces = replace(
            batch,
            query_start=batch.query_start.new_tensor(starts),
            kv_len=batch.kv_len.new_tensor(lengths),
            page_table=batch.page_table[at],
        )
    whole = [-(-length // run) * run for length in lengths]
    groups = (group(pieces, some, n, starts, whole, run) for (n, _, _), some in found.items())
    return tuple(replace(each, even=False) for each in groups)


def alike(spans: list[int], lengths: list[int]) -> list[list[int]]:
    """Spans of similar length in one group: a group reads as much for each span as for its longest, and one long
    sequence must not make all others as long. lengths: of every span."""
    sizes: dict[tuple[int, int], list[int]] = {}
    for span in spans:
        bits = lengths[span].bit_length()
        sizes.setdefault((bits, lengths[span] >> max(0, bits - 2)), []).append(span)
    found: list[list[int]] = []
    above = 0
    for size in sorted(sizes, reverse=True):
        longest = max(lengths[span] for span in sizes[size])
        if found and len(sizes[size]) * (above - longest) <= WORTH:
            found[-1] += sizes[size]
        else:
            found.append(sizes[size])
            above = longest
    return [sorted(group) for group in found]


def group(batch: RaggedBatch, spans: list[int], n: int, starts: list[int], lengths: list[int], reach: int) -> SpanGroup:
    """The group of some spans of n queries each."""
    table = batch.page_table
    chosen = torch.tensor(spans, dtype=torch.int64, device=table.device)
    adjacent = spans[-1] - spans[0] + 1 == len(spans)
    first = starts[spans[0]]
    rows: slice | Tensor = slice(first, first + n * len(spans))
    if not adjacent:
        offsets = batch.query_start.long()[chosen][:, None]
        rows = (offsets + torch.arange(n, device=table.device)).flatten()
    longest = max(lengths[span] for span in spans)
    count = -(-(-(-longest // reach) * reach) // batch.page_size)
    kv_len = batch.kv_len.long()[chosen]
    pages = table[chosen, :count].long()
    pages = torch.nn.functional.pad(pages, (0, count - pages.shape[1]))
    held = torch.arange(0, count * batch.page_size, batch.page_size, device=table.device) < kv_len[:, None]
    even = all(lengths[span] == longest for span in spans)
    return SpanGroup(n, rows, kv_len, longest, torch.where(held, pages, pages[:, :1]), even)


def attention_mask(group: SpanGroup, how: Scores, repeat: int, last: Tensor | None = None) -> Tensor | None:
    """[S, 1, repeat * n, L] bool: which positions each query sees; None where each sees all. last [S, n]: as
    `PagedAttentionMetadata.last_of`."""
    if group.even and how.sees_all(group.longest, group.n):
        return None
    device = group.kv_len.device
    key = torch.arange(group.longest, device=device)
    query = group.kv_len[:, None] - group.n + torch.arange(group.n, device=device)
    seen = visible(key, query[..., None], how.window, how.chunk, None if last is None else last[..., None])
    if last is not None:
        seen = seen & (key < group.kv_len[:, None, None])
    return (seen if group.n == 1 else seen.repeat(1, repeat, 1))[:, None]


def visible(key: Tensor, query: Tensor, window: int, chunk: int, last: Tensor | None = None) -> Tensor:
    """Whether a query at position `query` sees position `key`; see `Scores`. last: the last position that it sees, None
    for its own, see `RaggedBatch.last_seen`: the caller excludes positions that the span does not have."""
    until = query if last is None else last
    return (key <= until) & (key > query - window) & (key >= query // chunk * chunk)


def first_visible(query: int, window: int, chunk: int) -> int:
    """The first position that a query at position `query` sees."""
    return max(query + 1 - window, query // chunk * chunk)
