"""Which program attends to what: lists of pieces and of shared prefixes, made on the device once a forward.

The launches of a graph cannot depend on lengths, so lengths become data. A span's query heads that share a K/V head are
laid out as rows, query by query; a tile is up to `rows` of them, and a piece is a tile and some of the K/V blocks that
it sees. Tiles of few rows are bound by reading. Each is cut into pieces of about equal length, as long as there are
programs enough for them; else all are laid end to end and cut into equal shares, one for each program that the GPU
holds at once. Where a tile is cut, the program that ends last combines its pieces (Flash-Decoding, Dao et al. 2023, and
Stream-K, Osama et al. 2023, with lengths read on the device).

Shared prefixes are found from block tables alone. The block tables of a step are the paths of a tree, and a node is
worth its depth times the spans that are saved reading it. Each span takes the best node on its path; those that take
the same one are a group, which reads it together. Only blocks wholly in the past count: they are the same for all and
are not written any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.ragged import RaggedBatch, fields_of
from quire.ops.triton.cells import cell_of, first_block, num_cells
from quire.ops.triton.launch import DeviceInfo, block, kernel
from quire.types import UNLIMITED

PREFIX_FIELDS = 6
"""Numbers a piece has: where its tokens begin among `members`, how many those are, a span that has the pages, first
unit, end unit, and which run it is."""

MIN_GROUP = 4
"""Spans of a group."""

MOST_RUNS = 8
"""Pieces that a group's pages are cut into."""

MAX_RUN_TOKENS = 1024
"""Tokens a piece has at most, as far as there may be more runs."""


class PrefixSharing(NamedTuple):
    """What the lists depend on, besides block tables and lengths.

    unit: tokens, of which all depths are multiples and of which a block's size is a divisor. members: spans that a
    program attends for. runs: pieces that a group's blocks are cut into if they are short. worth: tokens that a group
    must save.
    """

    unit: int
    members: int
    runs: int
    worth: int

    def bound(self, spans: int) -> int:
        """The most pieces that there can be."""
        return (-(-spans // self.members) + spans // MIN_GROUP) * MOST_RUNS


class SharedPrefixes(NamedTuple):
    """begun [2, S] int32: tokens of each span that its group reads, and the number of pieces they are cut into. members
    [S] int32: the groups' tokens, group by group. pieces [bound, PREFIX_FIELDS] int32. counts [2] int32: pieces,
    members."""

    begun: Tensor
    members: Tensor
    pieces: Tensor
    counts: Tensor


class PrefixPartials(NamedTuple):
    """Partial results of groups over the blocks that they share. parts [MOST_RUNS, T, H, D] and sums [MOST_RUNS, T, H]
    float32: for each piece and query the weighted mean of v, and the base-2 logarithm of the sum of weights."""

    parts: Tensor
    sums: Tensor
    prefixes: SharedPrefixes
    sharing: PrefixSharing


@kernel(do_not_specialize=["spans", "worth"])
def depth_kernel(
    query_start, kv_len, table, chosen, spans, columns, worth,
    PAGE: tl.constexpr, UNIT: tl.constexpr, LEAST: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Program i: the best node on span i's path, as (depth in units, first span below it); depth 0 is none."""
    mine = tl.program_id(0)
    s, p = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_P)
    inside = s < spans
    n = tl.load(query_start + s + 1, mask=inside, other=0) - tl.load(query_start + s, mask=inside, other=0)
    whole = (tl.load(kv_len + s, mask=inside & (n == 1), other=1) - 1) // PAGE
    agreed = tl.minimum(whole, tl.sum(tl.where(s == mine, whole, 0), 0))
    begin, reach = 0, tl.max(tl.where(s == mine, 0, agreed), 0)
    while begin < reach:
        at = begin + p
        theirs = tl.load(table + s[:, None] * columns + at[None, :], mask=at[None, :] < agreed[:, None], other=0)
        own = tl.load(table + mine * columns + at, mask=at < reach, other=0)
        differs = (theirs != own[None, :]) & (at[None, :] < agreed[:, None])
        agreed = tl.minimum(agreed, tl.min(tl.where(differs, at[None, :], 1 << 30), 1))
        begin += BLOCK_P
        reach = tl.max(tl.where((s == mine) | (agreed < begin), 0, agreed), 0)
    units = agreed * PAGE // UNIT
    depth, best = 0, 0
    deep = tl.max(units, 0)
    while deep > 0:
        count = tl.sum((units >= deep).to(tl.int32), 0)
        spared = tl.where((count >= LEAST) & (deep * (count - 1) * UNIT >= worth), deep * (count - 1), 0)
        depth, best = tl.where(spared > best, deep, depth), tl.maximum(spared, best)
        deep = tl.max(tl.where(units < deep, units, 0), 0)
    tl.store(chosen + mine, depth)
    tl.store(chosen + spans + mine, tl.min(tl.where(units >= depth, s, BLOCK_S), 0))


@kernel(do_not_specialize=["spans", "worth"])
def gather_kernel(
    query_start, chosen, begun, members, pieces, counts, spans, worth,
    UNIT: tl.constexpr, MEMBERS: tl.constexpr, RUNS: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr,
    LONG: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Program i: the group whose first member is span i, if there is one. Its place in the lists does not matter."""
    mine = tl.program_id(0)
    s = tl.arange(0, BLOCK_S)
    depth, first = tl.load(chosen + mine), tl.load(chosen + spans + mine)
    same = tl.load(chosen + s, mask=s < spans, other=-1) == depth
    same &= tl.load(chosen + spans + s, mask=s < spans, other=-1) == first
    same = tl.where(depth > 0, same, s == mine)
    if tl.min(tl.where(same, s, BLOCK_S), 0) < mine:
        return
    count = tl.sum(same.to(tl.int32), 0)
    depth = tl.where((count >= LEAST) & (depth * UNIT * (count - 1) >= worth), depth, 0)
    runs = tl.minimum(tl.maximum((depth * UNIT + LONG - 1) // LONG, RUNS), MOST)
    size = tl.maximum((depth + runs - 1) // runs, 1)
    runs = (depth + size - 1) // size
    tl.store(begun + s, depth * UNIT, mask=same)
    tl.store(begun + spans + s, runs, mask=same)
    if depth == 0:
        return
    tiles = (count + MEMBERS - 1) // MEMBERS
    offset = tl.atomic_add(counts + 1, count)
    rank = tl.cumsum(same.to(tl.int32), 0) - 1
    tl.store(members + offset + rank, tl.load(query_start + s, mask=same, other=0), mask=same)
    t = tl.arange(0, BLOCK_T)
    tile, run, here = t // runs, t % runs, t < tiles * runs
    to = pieces + (tl.atomic_add(counts, tiles * runs) + t) * FIELDS
    tl.store(to, offset + tile * MEMBERS, mask=here)
    tl.store(to + 1, tl.minimum(count - tile * MEMBERS, MEMBERS), mask=here)
    tl.store(to + 2, mine, mask=here)
    tl.store(to + 3, run * size, mask=here)
    tl.store(to + 4, tl.minimum(run * size + size, depth), mask=here)
    tl.store(to + 5, run, mask=here)


def find_shared_prefixes(batch: RaggedBatch, sharing: PrefixSharing) -> SharedPrefixes:
    """The lists for a batch. Nothing is read back, so it can be captured."""
    spans = len(batch.kv_len)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=batch.kv_len.device)

    chosen, begun, members = ints(2, spans), ints(2, spans), ints(spans)
    pieces, counts = ints(sharing.bound(spans), PREFIX_FIELDS), ints(2).zero_()
    size, most = block(spans, 16), -(-spans // sharing.members) * MOST_RUNS
    depth_kernel[(spans,)](
        *(batch.query_start, batch.kv_len, batch.page_table, chosen, spans, batch.page_table.stride(0), sharing.worth),
        PAGE=batch.page_size, UNIT=sharing.unit, LEAST=MIN_GROUP, BLOCK_S=size, BLOCK_P=16, num_warps=4,
    )  # fmt: skip
    gather_kernel[(spans,)](
        *(batch.query_start, chosen, begun, members, pieces, counts, spans, sharing.worth),
        UNIT=sharing.unit, MEMBERS=sharing.members, RUNS=sharing.runs, MOST=MOST_RUNS, LEAST=MIN_GROUP,
        LONG=MAX_RUN_TOKENS, BLOCK_S=size, BLOCK_T=block(most), FIELDS=PREFIX_FIELDS, num_warps=4,
    )  # fmt: skip
    return SharedPrefixes(begun, members, pieces, counts)


FIELDS = 9
"""Numbers a piece has: first token, queries, first row, K/V length, first block, end block, span, in one number its
place among the tile's pieces and, from bit 16 on, how many those are, and how many parts of `Begun` it goes on from."""


class Tiling(NamedTuple):
    """What a list of pieces depends on, besides lengths. The same for every layer of most models.

    share: query heads per K/V head. rows, columns: a tile's size, columns being tokens. least, most: queries of the
    spans that it is for. spread: programs among which blocks are divided, each span being one tile; 0: a piece is a
    tile. run: the least blocks of a program, twice as many where a span has more than `short`. window, chunk: as in
    `Scores`. sharing: how spans share prefixes, after which they begin; None: they do not. causal: no token sees a
    later one; otherwise a piece may go on to its span's end, and ends where its tokens see no more.
    """

    share: int
    rows: int
    columns: int
    least: int
    most: int
    spread: int
    run: int
    window: int
    sharing: PrefixSharing | None = None
    chunk: int = UNLIMITED
    causal: bool = True
    cells: tuple[int, int] = (0, 0)
    short: int = UNLIMITED

    def bound(self, batch: RaggedBatch) -> int:
        """The most pieces that there can be."""
        spans, tokens = len(batch.kv_len), len(batch.positions)
        at_most = min(spans, tokens // self.least)
        if self.most * self.share > self.rows and at_most:
            at_most += tokens * self.share // self.rows
        if self.cells[0]:
            return max(1, at_most * num_cells(-(-batch.max_kv // self.columns), *self.cells))
        return max(1, at_most + self.spread)


MOST_PIECES = 64
"""Of one tile, and one more."""

FEW_SPANS = 16
"""Spans above which a program may have several pieces; up to it all pieces are at work at once."""

MIN_SHARE_BLOCKS = 6
"""The least blocks of an equal share: with fewer, starting pieces costs more than balance gains (measured, H200)."""

ALONE = 6
"""Quarters of an even share that pieces may be long if every program then has at most one: two take the latency twice
(measured, H200)."""


GAP = 3
"""Blocks that a piece of several queries costs besides those it has, less than MIN_SHARE_BLOCKS: 64 tokens beside 16
sequences take 144 to 162 us after 32,000 instead of 188 (H200)."""


class AttentionSchedule(NamedTuple):
    """pieces [bound + 1, FIELDS] int32, of which `total` [1] are used. arrived [bound, G] int32, all 0 between kernels.
    several: a program may have several. starts [spread + 1] int32: the first piece of each program; None: each has one,
    or every so many-th."""

    pieces: Tensor
    total: Tensor
    arrived: Tensor
    starts: Tensor | None
    several: bool


@triton.jit
def put(
    pieces, at, here, token, n, row, length, begin, end, span, part, splits, parts, FIELDS: tl.constexpr
):  # fmt: skip
    """Write a piece of each span that is `here` into the list."""
    to = pieces + at * FIELDS
    tl.store(to, token, mask=here)
    tl.store(to + 1, n, mask=here)
    tl.store(to + 2, row, mask=here)
    tl.store(to + 3, length, mask=here)
    tl.store(to + 4, begin, mask=here)
    tl.store(to + 5, end, mask=here)
    tl.store(to + 6, span, mask=here)
    tl.store(to + 7, part + splits * 65536, mask=here)
    tl.store(to + 8, tl.where(part == 0, parts, 0), mask=here)


@triton.jit
def spans_of(query_start, kv_len, s, spans, least, most):
    """Of spans s: the first token, their number, the K/V length, and whether the list is for spans of that many
    queries."""
    inside = s < spans
    token = tl.load(query_start + s, mask=inside, other=0)
    n = tl.load(query_start + s + 1, mask=inside, other=0) - token
    return token, n, tl.load(kv_len + s, mask=inside, other=0), inside & (n >= least) & (n <= most)


@triton.jit
def first_visible(position, window, chunk):
    """The first position that queries at `position` see, which is not negative; see `Scores`."""
    return tl.maximum(position - window + 1, position // chunk * chunk)


@triton.jit
def alone(seen, each, SPREAD: tl.constexpr, ALONE: tl.constexpr):
    """The length of pieces, of spans that see so many blocks, with which each program has at most one; `each`, if that
    is too long."""
    longer = each
    for _ in range(8):
        longer += tl.where(tl.sum((seen + longer - 1) // longer, 0) > SPREAD, longer // 8 + 1, 0)
    enough = tl.sum((seen + longer - 1) // longer, 0) <= SPREAD
    return tl.where(enough & (4 * longer <= ALONE * each), longer, each)


@kernel
def tiles_kernel(
    query_start, kv_len, pieces, count, spans, window, chunk, least, most,
    SHARE: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_S: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """One program: all spans at once, a tile of each at a time. Long spans come first, so that none ends alone."""
    s = tl.arange(0, BLOCK_S)
    token, n, length, chosen = spans_of(query_start, kv_len, s, spans, least, most)
    total = tl.where(chosen, (n * SHARE + ROWS - 1) // ROWS, 0)
    seen = tl.where(chosen, length - first_visible(length - n, window, chunk), 0)
    if BLOCK_S <= 512:
        longer = (seen[:, None] > seen[None, :]) | ((seen[:, None] == seen[None, :]) & (s[:, None] < s[None, :]))
        first = tl.sum(tl.where(longer, total[:, None], 0), 0)
    else:
        first = tl.cumsum(total, 0) - total
    tl.store(count, tl.sum(total, 0))
    for j in range(tl.max(total, 0)):
        tile = total - 1 - j
        low = tile * ROWS // SHARE
        high = tl.minimum((tile * ROWS + ROWS - 1) // SHARE, n - 1) if CAUSAL else n - 1
        begin = first_visible(length - n + low, window, chunk) // COLUMNS
        end = (length - n + high) // COLUMNS + 1
        put(pieces, first + j, j < total, token, n, tile * ROWS, length, begin, end, s, s * 0, s * 0 + 1, s * 0, FIELDS)


@kernel
def shares_kernel(
    query_start, kv_len, begun, pieces, count, starts, spans, window, chunk, least, most,
    COLUMNS: tl.constexpr, SPREAD: tl.constexpr, RUN: tl.constexpr, SHORT: tl.constexpr, MOST: tl.constexpr,
    LONG: tl.constexpr, ALONE: tl.constexpr, GAP: tl.constexpr, MANY: tl.constexpr, BEGUN: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """One program: all spans at once, a piece of each at a time. Spans are cut into pieces of up to `each` blocks; or,
    MANY and too many for that, program w has blocks w * each to (w + 1) * each of all spans laid end to end, GAP blocks
    apart."""
    s, w = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_W)
    token, n, length, chosen = spans_of(query_start, kv_len, s, spans, least, most)
    behind = tl.load(begun + s, mask=s < spans, other=0) if BEGUN else 0
    parts = tl.load(begun + spans + s, mask=s < spans, other=0) if BEGUN else s * 0
    low = tl.maximum(first_visible(length - n, window, chunk), behind) // COLUMNS
    seen = tl.where(chosen, (length + COLUMNS - 1) // COLUMNS - low, 0)
    end, blocks = tl.cumsum(tl.where(seen > 0, seen + GAP, 0), 0), tl.sum(seen, 0)
    begin, room = end - seen, tl.max(end, 0)
    longest = tl.max(seen, 0)
    least = tl.where(longest > SHORT, 2 * RUN, RUN)
    each = tl.maximum((blocks + SPREAD - 1) // SPREAD, tl.maximum((longest + MOST - 1) // MOST, least))
    each = alone(seen, each, SPREAD, ALONE)
    splits = (seen + each - 1) // each
    even = tl.where(each >= LONG, tl.sum(splits, 0), 0) > (SPREAD if MANY else 1 << 30)
    each = tl.where(even, tl.maximum(each, (room + SPREAD - 1) // SPREAD), each)
    mine, shift = tl.where(even, begin // each, 0), tl.where(even, begin, 0)
    size = tl.where(even, each, (seen + splits - 1) // tl.maximum(splits, 1))
    splits = tl.where(even & (seen > 0), (end - 1) // each - mine + 1, splits)
    first, total = tl.cumsum(splits, 0) - splits, tl.sum(splits, 0)
    tl.store(count, total)
    if MANY:
        busy = tl.where(even, (room + each - 1) // each, 0)
        tl.store(starts + w, tl.where(even, total, w * total // SPREAD), mask=(w <= SPREAD) & (w >= busy))
    for j in range(tl.max(splits, 0)):
        since, until = (mine + j) * size - shift, (mine + j + 1) * size - shift
        here = j < splits
        put(
            pieces, first + j, here, token, n, s * 0, length, low + tl.maximum(since, 0), low + tl.minimum(until, seen),
            s, s * 0 + j, splits, parts, FIELDS)  # fmt: skip
        if MANY:
            tl.store(starts + mine + j, first + j, mask=here & (since >= tl.where(even, -GAP, 1 << 30)))


@kernel
def cells_kernel(
    query_start, kv_len, pieces, count, spans, window, chunk, least, most,
    COLUMNS: tl.constexpr, FINE: tl.constexpr, COARSE: tl.constexpr, BLOCK_S: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """One program: all spans at once, a cell of each at a time."""
    s = tl.arange(0, BLOCK_S)
    token, n, length, chosen = spans_of(query_start, kv_len, s, spans, least, most)
    low, high = first_visible(length - n, window, chunk) // COLUMNS, (length + COLUMNS - 1) // COLUMNS
    since = cell_of(low, FINE, COARSE)
    splits = tl.where(chosen & (high > low), cell_of(high - 1, FINE, COARSE) + 1 - since, 0)
    first = tl.cumsum(splits, 0) - splits
    tl.store(count, tl.sum(splits, 0))
    for j in range(tl.max(splits, 0)):
        begin, end = first_block(since + j, FINE, COARSE), first_block(since + j + 1, FINE, COARSE)
        put(
            pieces, first + j, j < splits, token, n, s * 0, length, tl.maximum(begin, low), tl.minimum(end, high), s,
            s * 0 + j, splits, s * 0, FIELDS)  # fmt: skip


@kernel(do_not_specialize=["spans", "bound"])
def parts_kernel(
    query_start, kv_len, starts, lengths, owners, spans, bound,
    MOST: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One program: parts of up to MOST queries of all spans at once, one of each at a time, and behind them parts
    without any. owners: the span that each is of; 0 where there is none."""
    s, p = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_P)
    token, n, length, there = spans_of(query_start, kv_len, s, spans, 1, 1 << 30)
    parts = tl.where(there, (n + MOST - 1) // MOST, 0)
    first, total = tl.cumsum(parts, 0) - parts, tl.sum(parts, 0)
    tl.store(starts + p, tl.load(query_start + spans), mask=(p >= total) & (p <= bound))
    tl.store(lengths + p, 0, mask=(p >= total) & (p < bound))
    for j in range(tl.max(parts, 0)):
        tl.store(starts + first + j, token + j * MOST, mask=j < parts)
        tl.store(lengths + first + j, length - n + tl.minimum(j * MOST + MOST, n), mask=j < parts)
        tl.store(owners + first + j, s, mask=j < parts)


class TokenSpans(NamedTuple):
    """Tokens as spans of their own. spans [T] int32: the batch's span that each is of. lengths [T] int32: positions up
    to its own; 0: it is of none. plans: of some tokens each, one after the other, without their block tables."""

    spans: Tensor
    lengths: Tensor
    plans: Sequence[AttentionPlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan(RaggedBatch):
    """A batch and the lists that its layers share: made by the first that asks, used by the rest. spans: of recurrent
    layers, see `chunked.py`. by_token: see `indexer.py`. parts: see `in_spans_of`."""

    lists: dict[tuple[Tiling, int], AttentionSchedule] = field(default_factory=dict)
    lasts: dict[int, Tensor | None] = field(default_factory=dict)
    cascades: dict[PrefixSharing, SharedPrefixes] = field(default_factory=dict)
    spans: dict[str, Tensor] = field(default_factory=dict)
    by_token: dict[int, TokenSpans] = field(default_factory=dict)
    parts: dict[int, AttentionPlan] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: RaggedBatch) -> AttentionPlan:
        """A batch without lists."""
        return cls(**fields_of(batch))

    def work(self, tiling: Tiling, groups: int) -> tuple[AttentionSchedule, bool]:
        """The list for a tiling, and whether it has just been made."""
        window, chunk = (size if size < self.max_kv else UNLIMITED for size in (tiling.window, tiling.chunk))
        tiling = tiling._replace(window=window, chunk=chunk)
        fresh = (tiling, groups) not in self.lists
        if fresh:
            self.lists[tiling, groups] = make_schedule(self, tiling, groups)
        return self.lists[tiling, groups], fresh

    def last(self, ahead: int) -> Tensor | None:
        """As `RaggedBatch.last_seen`, int32."""
        if ahead not in self.lasts:
            last = self.last_seen(ahead)
            self.lasts[ahead] = None if last is None else last.int()
        return self.lasts[ahead]

    def in_spans_of(self, most: int) -> AttentionPlan:
        """The same tokens, causal, as spans of up to `most` queries, and behind them padding spans. Nothing is read
        back, so it can be captured."""
        if most not in self.parts:
            spans = len(self.kv_len)
            bound = spans + len(self.positions) // most
            starts, lengths = (self.kv_len.new_empty(bound + more) for more in (1, 0))
            owners = self.kv_len.new_zeros(bound)  # also while kernels are compiled ahead, and none runs
            parts_kernel[(1,)](
                *(self.query_start, self.kv_len, starts, lengths, owners, spans, bound),
                MOST=most, BLOCK_S=block(spans, 16), BLOCK_P=block(bound + 1), num_warps=4,
            )  # fmt: skip
            table = self.page_table.index_select(0, owners)
            cut = {"query_start": starts, "kv_len": lengths, "page_table": table, "max_query": most}
            self.parts[most] = AttentionPlan(**{**fields_of(self), **cut})
        return self.parts[most]

    def prefixes(self, sharing: PrefixSharing) -> tuple[SharedPrefixes, bool]:
        """The shared prefixes, and whether they have just been found."""
        fresh = sharing not in self.cascades
        if fresh:
            self.cascades[sharing] = find_shared_prefixes(self, sharing)
        return self.cascades[sharing], fresh


def make_schedule(batch: AttentionPlan, tiling: Tiling, groups: int) -> AttentionSchedule:
    """The list of pieces for a batch. Nothing is read back, so it can be captured."""
    device, spans = batch.kv_len.device, len(batch.kv_len)
    bound, size = tiling.bound(batch), block(spans, 16)
    pieces = torch.empty(bound + 1, FIELDS, dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    arrived = torch.zeros(bound, groups, dtype=torch.int32, device=device)
    divided = tiling.spread > 0 and spans > FEW_SPANS and not tiling.cells[0]
    starts = torch.empty(tiling.spread + 1, dtype=torch.int32, device=device) if divided else None
    about = tiling.window, tiling.chunk, tiling.least, tiling.most
    same = {"COLUMNS": tiling.columns, "BLOCK_S": size, "FIELDS": FIELDS, "num_warps": max(1, min(8, size // 32))}
    if tiling.cells[0]:
        fine, coarse = tiling.cells
        cells_kernel[(1,)](
            *(batch.query_start, batch.kv_len, pieces, count, spans, *about), FINE=fine, COARSE=coarse, **same
        )
        return AttentionSchedule(pieces, count, arrived, None, bound > 2 * tiling.spread)
    if tiling.spread:
        begun = batch.prefixes(tiling.sharing)[0].begun if tiling.sharing else batch.kv_len
        shares_kernel[(1,)](
            *(batch.query_start, batch.kv_len, begun, pieces, count, count if starts is None else starts),
            *(spans, *about),
            SPREAD=tiling.spread, RUN=tiling.run, SHORT=tiling.short, MOST=MOST_PIECES, LONG=MIN_SHARE_BLOCKS,
            ALONE=ALONE, GAP=GAP if tiling.most > 1 else 0, MANY=divided, BEGUN=tiling.sharing is not None,
            BLOCK_W=block(tiling.spread + 1), **same,
        )  # fmt: skip
    else:
        tiles_kernel[(1,)](
            *(batch.query_start, batch.kv_len, pieces, count, spans, *about),
            SHARE=tiling.share,
            ROWS=tiling.rows,
            CAUSAL=tiling.causal,
            **same,
        )
    return AttentionSchedule(pieces, count, arrived, starts, divided)


def spread(card: DeviceInfo, groups: int, a_card: int) -> int:
    """Programs of each K/V head with which a multiprocessor has `a_card` over all heads."""
    return max(card.sms * a_card // groups, min(1, card.sms * a_card))
