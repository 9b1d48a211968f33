"""Operations in plain torch that are batch-invariant: a row's result has the same bits alone, in any batch, chunk or
draft.

`BatchInvariantOps` avoids everything by which torch's own calls let neighbours change a row. Products are computed in
tiles of one shape. Attention reads K/V in runs of KEYS positions counted from the sequence's first one and adds them up
one after the other, so that a run which a query does not see adds an exact zero. Functions that torch rounds in one way
in a vector and in another way in the remainder at its end are composed of steps that it rounds alike everywhere.

`SteadyOps` costs next to nothing, for small models on a CPU that qualifies: it uses the library's own products and
attention where they give a row the same bits in any batch. oneDNN's packed products of up to some thousand columns do,
for so many rows as `stable_rows` finds on this machine; torch's attention does for any number of sequences and for a
multiple of MIN_QUERY_ROWS queries, as long as a query always sees the same number of positions. So each query reads
whole runs of RUN positions up to its own one, masked after it, whatever it is batched with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.matmul import (
    TILE_ROWS,
    can_pack,
    combine_experts_in_order,
    in_order,
    in_pieces,
    in_tiles,
    pack,
    packed_linear,
)
from quire.ops.operands import DeltaInputs, DeltaWeights, ScanInputs, ScanWeights, Scores
from quire.ops.paged_attention import PagedAttentionMetadata, SpanGroup, attention_mask, first_visible, visible
from quire.ops.ragged import LayerKV, LayerState, RaggedBatch, StateSlots
from quire.ops.recurrent import gated_delta, padded, selective_scan, slots_of
from quire.ops.reference import ReferenceOps, finite
from quire.types import UNLIMITED

KEYS = 128
"""Positions of K/V multiplied at a time."""

WIDE = 8
"""Columns that a product's width is a multiple of: MKL sums the rows of [8, 128] by [128, 10] in two ways, by turns."""

NARROW = 16
"""Columns below which a matrix is widened, a router's say, for the same reason."""

AT_ONCE = 256
"""Rows of queries a K/V head attends at once: bounds what a long chunk's scores take."""


def one_by_one(
    rule: Callable[[Sequence[Tensor], LayerState, Tensor, StateSlots], Tensor],
    x: Sequence[Tensor],
    state: LayerState,
    batch: RaggedBatch,
) -> Tensor:
    """A recurrent layer's rule for each token alone. rule: inputs of one token, states, its place and its slots."""
    states = slots_of(batch)
    scratch = LayerState(*(each.new_zeros(2, *each.shape[1:]) for each in state))
    one = torch.tensor([1], device=x[0].device)
    starts, alone = batch.query_start.new_tensor([0, 1]), StateSlots(one, one, one.new_zeros(1))
    begun = [[each[slot].clone() for each in state] for slot in states.source.tolist()]
    nothing = StateSlots(one[:0], one[:0], one[:0])
    kept, parts = dict[int, list[int]](), [rule([each[:0] for each in x], scratch, starts[:1], nothing)]
    for token, slot in zip(*(each.tolist() for each in states.kept()), strict=True):
        kept.setdefault(token, []).append(slot)
    for (start, stop), first in zip(pairwise(batch.query_start.tolist()), begun, strict=True):
        for pool, each in zip(scratch, first, strict=True):
            pool[1] = each
        for t in range(start, stop):
            parts.append(rule([each[t : t + 1] for each in x], scratch, starts, alone))
            for pool, each in zip(state, scratch, strict=True):
                pool[kept.get(t, [])] = each[1]
    return padded(torch.cat(parts), len(x[0]))


class BatchInvariantOps(ReferenceOps):
    """`Ops` as `ReferenceOps`, up to rounding, and batch-invariant."""

    reach = KEYS

    def multiply(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """See `Ops.multiply`."""
        return in_tiles(product, x)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A product in tiles of TILE_ROWS rows."""
        out = len(weight)
        if out < NARROW:
            weight = F.pad(weight, (0, 0, 0, NARROW - out))
            bias = None if bias is None else F.pad(bias, (0, NARROW - out))
        return in_tiles(partial(F.linear, weight=weight, bias=bias), x)[:, :out]

    def add_scaled(self, residual: Tensor, x: Tensor, scale: float) -> Tensor:
        """In two steps: torch multiplies and adds at once in a vector, and not in the remainder at its end."""
        return residual.add_(x) if scale == 1.0 else residual.copy_(residual.float() + x.float() * scale)

    def heads_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `Ops.heads_linear`."""
        return torch.stack([self.product(x[:, i], each.t()) for i, each in enumerate(weight)], 1)

    def gated_delta(self, x: DeltaInputs, weights: DeltaWeights, state: LayerState, batch: RaggedBatch) -> Tensor:
        """Every token alone: slow, and the same bits in any batch and chunk."""
        return one_by_one(lambda token, *rest: gated_delta(DeltaInputs(*token), weights, *rest), x, state, batch)

    def selective_scan(self, x: ScanInputs, weights: ScanWeights, state: LayerState, batch: RaggedBatch) -> Tensor:
        """Every token alone, as `gated_delta`."""
        return one_by_one(lambda token, *rest: selective_scan(ScanInputs(*token), weights, *rest), x, state, batch)

    def rotate(self, first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate pairs without complex products."""
        return first * cos - second * sin, first * sin + second * cos

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.silu_mul`."""
        gate, up = gate_up.chunk(2, -1)
        exact = gate.float()
        return (exact / exact.neg().exp_().add_(1.0)).to(up.dtype).mul_(up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.gelu_mul`."""
        gate, up = gate_up.chunk(2, -1)
        return self.gelu(gate).mul_(up)

    def sigmoid(self, x: Tensor) -> Tensor:
        """Of each number."""
        return (1.0 / x.float().neg().exp_().add_(1.0)).to(x.dtype)

    def gelu(self, x: Tensor) -> Tensor:
        """See `Ops.gelu`."""
        exact = x.float()
        bent = (exact * exact * exact).mul_(0.044715).add_(exact).mul_(math.sqrt(2.0 / math.pi)).tanh_()
        return bent.add_(1.0).mul_(exact).mul_(0.5).to(x.dtype)

    def gelu_erf(self, x: Tensor) -> Tensor:
        """See `Ops.gelu_erf`."""
        exact = x.float()
        return (exact * math.sqrt(0.5)).erf_().add_(1.0).mul_(exact).mul_(0.5).to(x.dtype)

    def combine_experts(self, made: Tensor, weights: Tensor) -> Tensor:
        """See `Ops.combine_experts`."""
        return combine_experts_in_order(made, weights)

    def normalize(self, weights: Tensor, floor: float = 0.0) -> Tensor:
        """Add up a row's weights in order."""
        return weights / in_order(weights.unbind(1))[:, None].clamp(min=floor)

    def index_scores(self, q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        """See `ReferenceOps.index_scores`. Each query by KEYS keys at a time, its heads added up in order."""
        (count, heads, dim), length = q.shape, len(keys)
        runs = F.pad(keys, (0, 0, 0, -length % KEYS)).view(1, -1, KEYS, dim).transpose(-1, -2)
        tall = F.pad(q, (0, 0, 0, -heads % TILE_ROWS)).expand(1, runs.shape[1], -1, -1, -1)
        weighted = products(tall, runs)[0, :, :, :heads].relu_().mul_(weights[:, :, None])
        return finite(in_order(weighted.unbind(2)).transpose(0, 1).reshape(count, -1)[:, :length])

    def attend(self, q: Tensor, kv: LayerKV, paged: PagedAttentionMetadata, i: int, how: Scores) -> Tensor:
        """See `ReferenceOps.attend`."""
        group, (_, heads, dim), groups = paged.groups[i], q.shape, kv.k.shape[1]
        spans, share = len(group.kv_len), heads // groups
        each = max(1, TILE_ROWS // share)
        last = -(-group.longest // KEYS)
        k, v = (x.float() for x in paged.read_kv(kv, i, q, last * KEYS))
        step, parts = max(1, AT_ONCE // (each * share)) * each, []
        sinks = None if how.sinks is None else of_tile(how.sinks.view(groups, share), each)
        for start in range(0, group.n, step):
            part = Queries(start, min(step, group.n - start), each, share, how.window, how.chunk, how.ahead)
            some = q.view(spans, group.n, groups, share, dim)[:, start : start + part.n].float()
            first, seen = visible_runs(paged, i, part)
            keys, values = (x[:, :, first * KEYS : (first + seen.shape[1]) * KEYS] for x in (k, v))
            made = weigh(tiles(some, each), keys, values, seen, how, sinks)[:, :, :, : each * share]
            made = made.reshape(spans, groups, -1, share, v.shape[-1])[:, :, : part.n]
            parts.append(made.permute(0, 2, 1, 3, 4).reshape(spans, part.n, heads, -1))
        return torch.cat(parts, 1).flatten(0, 1).to(q.dtype)


class Queries(NamedTuple):
    """Some of a group's queries and their tiles: `n` from number `start` on, `each` a tile for the `share` heads of a
    K/V head. window, chunk, ahead: as in `Scores`."""

    start: int
    n: int
    each: int
    share: int
    window: int
    chunk: int
    ahead: int


def tiles(q: Tensor, each: int) -> Tensor:
    """q [S, n, G, R, D] -> [S, G, t, M, D]: `each` queries of R heads a tile, padded to a multiple of TILE_ROWS
    rows."""
    spans, n, groups, share, dim = q.shape
    if n % each:
        q = F.pad(q, (0, 0, 0, 0, 0, 0, 0, -n % each))
    tall = q.view(spans, -1, each, groups, share, dim).permute(0, 3, 1, 2, 4, 5)
    tall = tall.reshape(spans, groups, -1, each * share, dim)
    return F.pad(tall, (0, 0, 0, -tall.shape[3] % TILE_ROWS)) if tall.shape[3] % TILE_ROWS else tall


def visible_runs(paged: PagedAttentionMetadata, index: int, part: Queries) -> tuple[int, Tensor]:
    """(The first run of KEYS that a query sees, bool [S, b, t, M, KEYS] from there on), shared by layers with one
    window.

    Padding rows see what the last query sees.
    """
    group, key = paged.groups[index], (index, *part)
    past = group.kv_len - group.n + part.start
    first = first_visible(int(past.min()), part.window, part.chunk) // KEYS
    seen = paged.masks.get(key)
    if seen is None:
        seen = paged.masks[key] = mask(group, past, first, part, paged.last_of(index, part.ahead))
    return first, seen


def mask(group: SpanGroup, past: Tensor, first: int, part: Queries, last: Tensor | None) -> Tensor:
    """Which positions of runs from `first` on each row of the tiles sees. last: as `PagedAttentionMetadata.last_of`."""
    end = group.longest - group.n + part.start + part.n if last is None else group.longest
    until = -(-end // KEYS)
    row = torch.arange(-(-(part.each * part.share) // TILE_ROWS) * TILE_ROWS, device=past.device)
    at = torch.arange(0, part.n, part.each, device=past.device)[:, None] + (row // part.share).clamp(max=part.each - 1)
    at = at.clamp(max=part.n - 1)
    place = (past[:, None, None] + at)[:, None, :, :, None]
    seen_until = None if last is None else last[:, part.start + at][:, None, :, :, None]
    key = torch.arange(first * KEYS, until * KEYS, device=past.device).view(-1, 1, 1, KEYS)
    seen = visible(key, place, part.window, part.chunk, seen_until)
    return seen if last is None else seen & (key < group.kv_len.view(-1, 1, 1, 1, 1))


def of_tile(sinks: Tensor, each: int) -> Tensor:
    """sinks [G, R] -> [G, 1, 1, M, 1], as rows of `tiles` have them."""
    tall = sinks.repeat(1, each)
    return F.pad(tall, (0, -tall.shape[1] % TILE_ROWS))[:, None, None, :, None]


def weigh(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, how: Scores, sinks: Tensor | None) -> Tensor:
    """softmax(q k^T scale) v: q [S, G, t, M, D], k [S, G, b * KEYS, D], v [S, G, b * KEYS, E], seen [S, b, t, M, KEYS],
    sinks [G, 1, 1, M, 1] -> [S, G, t, M, E]."""
    spans, groups, count, rows, dim = q.shape
    runs, wanted = seen.shape[1], v.shape[-1]
    k, v = (x.reshape(spans * groups, runs, KEYS, x.shape[-1]) for x in (k, v))
    wide = q.reshape(spans * groups, 1, count, rows, dim).expand(-1, runs, -1, -1, -1)
    scores = products(wide, k.transpose(-1, -2)).mul_(how.scale)
    if how.soft_cap:
        scores = scores.div_(how.soft_cap).tanh_().mul_(how.soft_cap)
    scores.view(spans, groups, runs, count, rows, KEYS).masked_fill_(~seen[:, None], -math.inf)
    top = scores.amax((1, 4), keepdim=True)
    if sinks is not None:
        sinks = sinks.repeat(spans, 1, 1, 1, 1)
        top = torch.maximum(top, sinks)
    weight = scores.sub_(top).exp_()
    whole, parts = weight.sum(-1, keepdim=True), products(weight, F.pad(v, (0, -wanted % WIDE)))
    total = in_order(whole.unbind(1))
    if sinks is not None:
        total = total + (sinks - top).exp_()[:, 0]
    made = in_order(parts.unbind(1)) / total
    return made[..., :wanted].view(spans, groups, count, rows, wanted)


def products(a: Tensor, b: Tensor) -> Tensor:
    """a [Y, b, t, M, K], b [Y, b, K, N] -> [Y, b, t, M, N]: each [M, K] by its [K, N], products of one shape.

    Batched along whichever dimension is longer: neither copies of b nor a loop over all tiles.
    """
    some, runs, count, rows, inner = a.shape
    if count <= some * runs:
        flat = b.reshape(-1, inner, b.shape[-1])
        each = [torch.bmm(a[:, :, t].reshape(-1, rows, inner), flat) for t in range(count)]
        whole = each[0].unsqueeze(1) if count == 1 else torch.stack(each, 1)
        return whole.view(some, runs, count, rows, -1)
    each = [torch.bmm(a[y, r], b[y, r].expand(count, -1, -1)) for y in range(some) for r in range(runs)]
    return torch.stack(each).view(some, runs, count, rows, -1)


RUN = 64
"""Positions of K/V read at a time."""

MIN_QUERY_ROWS = 4
"""Rows of queries are attended by as many, some of them twice where they are fewer. Torch takes them in blocks of 32 to
256, and makes products of fewer than these, all there are or left over at the end, in ways of their own."""


class SteadyOps(BatchInvariantOps):
    """`Ops` as `ReferenceOps`, up to rounding, and batch-invariant where `stable_rows` finds that so many rows of a
    product at most are."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def multiply(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """See `Ops.multiply`."""
        return in_pieces(product, x, self.rows)

    def prepare(self, batch: RaggedBatch) -> PagedAttentionMetadata:
        """See `Ops.prepare`."""
        return batch if isinstance(batch, PagedAttentionMetadata) else PagedAttentionMetadata.cut(batch, RUN)

    # These are invariant as they are.
    rotate = ReferenceOps.rotate
    silu_mul = ReferenceOps.silu_mul

    def attention(self, q: Tensor, kv: LayerKV, batch: RaggedBatch, how: Scores) -> Tensor:
        """See `Ops.attention`. Spans are cut at the ends of runs for what `attend_runs` computes alone: a piece has no
        positions after its own, and other attention reads more at a time."""
        if not plain(batch, how):
            batch = PagedAttentionMetadata.of(batch, self.reach)
        return super().attention(q, kv, batch, how)

    def attend(self, q: Tensor, kv: LayerKV, paged: PagedAttentionMetadata, i: int, how: Scores) -> Tensor:
        """See `ReferenceOps.attend`."""
        if not plain(paged, how):
            return super().attend(q, kv, paged, i, how)
        return attend_runs(q, kv, paged, i, how)


def plain(batch: RaggedBatch, how: Scores) -> bool:
    """Whether every query sees all positions up to its own, and scores are what they are."""
    return how.is_causal(batch) and not how.soft_cap and min(how.window, how.chunk) >= UNLIMITED and how.sinks is None


def attend_runs(q: Tensor, kv: LayerKV, paged: PagedAttentionMetadata, index: int, how: Scores) -> Tensor:
    """Attention of one group's queries over its blocks -> [S * n, H, E]."""
    group, (_, heads, dim), groups = paged.groups[index], q.shape, kv.k.shape[1]
    spans, n, share = len(group.kv_len), group.n, heads // groups
    k, v = paged.read_kv(kv, index, q)
    rows = n * share
    some = q.view(spans, n, groups, share, dim).permute(0, 2, 3, 1, 4).reshape(spans, groups, rows, dim)
    some = pad_rows(some)
    seen = additive_mask(paged, index, share, how, q.dtype)
    out = F.scaled_dot_product_attention(some, k, v, seen, scale=how.scale)[:, :, :rows]
    return out.reshape(spans, groups, share, n, -1).permute(0, 3, 1, 2, 4).reshape(spans * n, heads, -1)


def pad_rows(x: Tensor) -> Tensor:
    """[S, G, rows, D] with the first rows repeated after the last, up to a multiple of MIN_QUERY_ROWS."""
    rows = x.shape[2]
    return (
        x if rows % MIN_QUERY_ROWS == 0 else x[:, :, torch.arange(-(-rows // MIN_QUERY_ROWS) * MIN_QUERY_ROWS) % rows]
    )


def additive_mask(paged: PagedAttentionMetadata, index: int, share: int, how: Scores, dtype: torch.dtype) -> Tensor:
    """[S, 1, rows or 1, L]: what is added to scores, for rows padded by `pad_rows`."""
    key = (index, share)
    made = paged.masks.get(key)
    if made is None:
        seen = attention_mask(paged.groups[index], how, share)
        assert seen is not None
        made = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)
        made = made if made.shape[2] == 1 else pad_rows(made)
        paged.masks[key] = made
    return made


PRODUCTS = ((512, 256), (1536, 256), (256, 768))
"""Outputs and inputs of matrices that are tried: a library's way to sum depends on both."""

COUNTS = (1, 2, 3, 8, 17, 31, 33, 50, 65, 96, 127, 130, 200)
"""Rows that are tried."""

MANY = 256
"""More rows than any way to sum ends at; products of more are cut."""


@torch.inference_mode()
def stable_rows(threads: int = 1) -> int:
    """The most rows of a product, up to MANY, with which this machine's libraries compute as `SteadyOps` needs; 0: with
    none.

    MKL, which computes float32 attention, does with none. oneDNN does with any number on some processors; on one with
    AMX it sums 768 inputs in other runs from 33 rows on. threads: of torch, which it may depend on, too.
    """
    if not can_pack(torch.bfloat16, torch.device("cpu")):
        return 0
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        random = torch.Generator().manual_seed(0)
        if not has_stable_attention(random):
            return 0
        found = MANY
        for outputs, inputs in PRODUCTS:
            x, weight = (torch.randn(n, inputs, generator=random).bfloat16() for n in (MANY, outputs))
            found = min(found, alike_up_to(partial(packed_linear, weight=pack(weight), bias=None), x))
        return found
    finally:
        torch.set_num_threads(before)


def alike_up_to(product: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """The most rows, MANY or half, a quarter.. of it, up to which any rows of x come out the same; 0: not even few."""
    most = MANY
    while most >= TILE_ROWS:
        if _alike(lambda rows: product(x[rows]), 0, COUNTS, most):
            return most
        most //= 2
    return 0


def has_stable_attention(random: torch.Generator) -> bool:
    """Whether torch's attention gives a query the same bits in any batch: see the module."""
    q, k, v = (torch.randn(3, 4, n, 32, generator=random).bfloat16() for n in (96, 2 * RUN, 2 * RUN))
    seen = torch.zeros(1, 1, 1, 2 * RUN, dtype=q.dtype)
    seen[..., RUN + 7 :] = -math.inf

    def attended(spans: slice, rows: slice) -> Tensor:
        return F.scaled_dot_product_attention(q[spans, :, rows], k[spans], v[spans], seen)

    return all(
        _alike(lambda rows, spans=spans: attended(spans, rows)[0], 1, (MIN_QUERY_ROWS, 8, 36, 68), 96)  # type: ignore[misc]
        and torch.equal(attended(spans, slice(0, 8))[0], attended(slice(0, 3), slice(0, 8))[0])
        for spans in (slice(0, 1), slice(0, 2))
    )


def _alike(way: Callable[[slice], Tensor], rows: int, counts: tuple[int, ...], most: int) -> bool:
    """Whether some rows at a time, along dimension `rows`, have the same bits as `most` at once."""
    whole = way(slice(0, most))
    places = [(min(5, most - n), n) for n in counts if n <= most]
    return all(torch.equal(way(slice(at, at + n)), whole.narrow(rows, at, n)) for at, n in places)
