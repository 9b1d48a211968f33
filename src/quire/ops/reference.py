"""The operations in plain torch: the CPU path, and the oracle every kernel is tested against."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.base import Ops
from quire.ops.operands import CLAMP_ALPHA, CLAMP_LIMIT, XIELU, Angles, Gate, Norm, Norms, Scores
from quire.ops.paged_attention import FEW, PagedAttentionMetadata, SpanGroup, first_visible, visible
from quire.ops.ragged import LayerKV, RaggedBatch, without_gates

TILE = 256
"""Queries of one long span attended at once: bounds the mask, and skips the keys after the tile."""


SCORES_AT_ONCE = 1 << 22
"""Products of an indexer's queries and keys at once: bounds memory."""

CHOSEN_AT_ONCE = 1 << 22
"""Numbers of chosen tokens gathered at once: bounds memory."""


class ReferenceOps(Ops):
    """`Ops` in plain torch, for any device, floating-point dtype, number of heads and head dim."""

    reach = 1
    """See `PagedAttentionMetadata.of`."""

    def prepare(self, batch: RaggedBatch) -> PagedAttentionMetadata:
        """See `Ops.prepare`."""
        return batch if isinstance(batch, PagedAttentionMetadata) else PagedAttentionMetadata.of(batch, self.reach)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product of `linear`, without a gate."""
        return F.linear(x, weight, bias)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        """See `Ops.linear`."""
        return self.apply_gate(self.product(x, weight, bias), gate)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See `Ops.norm`."""
        weight, eps, bias, centred = norm
        if weight.dtype is not x.dtype:
            exact = Norm(weight.float(), eps, None if bias is None else bias.float(), centred)
            return self.norm(x.float(), exact).to(x.dtype)
        if centred:
            return F.layer_norm(x, weight.shape, weight, bias, eps)
        return torch.rms_norm(x, weight.shape, weight, eps)

    def add_scaled(self, residual: Tensor, x: Tensor, scale: float) -> Tensor:
        """Add scale times x to residual, in place."""
        return residual.add_(x, alpha=scale)

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Norm | None,
        before: Norm | None = None,
        scale: float = 1.0,
        gain: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.add_norm`."""
        total = self.add_scaled(residual, self.norm(x, before) if before else x, scale)
        if gain is not None:
            total = total.mul_(gain)
        return self.norm(total, norm) if norm else total, total

    def angles(self, positions: Tensor, frequencies: Tensor, gain: float = 1.0) -> tuple[Tensor, Tensor]:
        """See `Ops.angles`."""
        angles = positions.float()[:, None] * frequencies
        return angles.cos() * gain, angles.sin() * gain

    def qk_norm_rope_store_kv(
        self,
        qkv: Tensor,
        heads: int,
        kv: LayerKV,
        batch: RaggedBatch,
        angles: Angles,
        norms: Norms | None = None,
        *,
        gated: bool = False,
    ) -> Tensor:
        """See `Ops.qk_norm_rope_store_kv`."""
        qkv = without_gates(qkv, heads * kv.k.shape[3], heads) if gated else qkv
        q, k, v = self.heads_of(qkv, heads, kv.k.shape[3], angles, norms)
        if k.shape[1]:
            self.write_kv(kv, k, v, batch)
        return q

    def heads_of(
        self, qkv: Tensor, heads: int, dim: int, angles: Angles, norms: Norms | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [T, heads, D] of a projection, normed and rotated."""
        groups = (qkv.shape[-1] // dim - heads) // 2
        q, k, v = torch.split(qkv, [heads * dim, groups * dim, groups * dim], -1)
        q, k, v = q.view(len(q), heads, dim), k.view(len(k), groups, dim), v.view(len(v), groups, dim)
        if norms and not norms.after_rope:
            q, k = self.norm_heads(q, norms.q), self.norm_heads(k, norms.k)
        if norms and norms.v_eps is not None:
            v = self.norm_heads(v, Norm(v.new_ones(dim), norms.v_eps))
        q, k = self.rope(q, k, angles)
        if norms and norms.after_rope:
            q, k = self.norm_heads(q, norms.q), self.norm_heads(k, norms.k)
        if angles.query_gain is not None:
            q = (q * angles.query_gain[:, None, None]).to(q.dtype)
        return q, k, v

    def norm_heads(self, x: Tensor, norm: Norm) -> Tensor:
        """x [T, heads, D] normed as its weight is long: head by head or all heads at once."""
        return self.norm(x.reshape(len(x), x[0].numel() // len(norm.weight), len(norm.weight)), norm).view(x.shape)

    def rope(self, q: Tensor, k: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Rotate q [T, H, D] and k [T, G, D]."""
        heads, half = q.shape[1], angles.cos.shape[-1]
        if not half:
            return q, k
        x = torch.cat((q, k), 1).float()
        axis, shape = (-1, (half, 2)) if angles.interleaved else (-2, (2, half))
        first, second = torch.unflatten(x[..., : 2 * half], -1, shape).unbind(axis)
        pairs = self.rotate(first, second, angles.cos[:, None], angles.sin[:, None])
        turned = torch.cat((torch.stack(pairs, axis).flatten(-2), x[..., 2 * half :]), -1).to(q.dtype)
        return turned[:, :heads], turned[:, heads:]

    def rotate(self, first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate the pairs (first, second), [T, heads, r] each."""
        pairs = torch.complex(first, second) * torch.complex(cos, sin)
        return pairs.real, pairs.imag

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.silu_mul`."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.gelu_mul`."""
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def clamped_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.clamped_mul`."""
        gate, up = gate_up.chunk(2, -1)
        gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
        return self.sigmoid(gate * CLAMP_ALPHA).mul_(gate).mul_(up + 1.0)

    def gelu(self, x: Tensor) -> Tensor:
        """See `Ops.gelu`."""
        return F.gelu(x, approximate="tanh")

    def relu2(self, x: Tensor) -> Tensor:
        """See `Ops.relu2`."""
        return F.relu(x).square_()

    def xielu(self, x: Tensor, how: XIELU) -> Tensor:
        """See `Ops.xielu`."""
        exact, positive, negative = x.float(), F.softplus(how.positive), how.slope + F.softplus(how.negative)
        below = (exact.clamp(max=0).exp_() - 1.0 - exact) * negative
        return torch.where(exact > 0, positive * exact * exact, below).add_(how.slope * exact).to(x.dtype)

    def write_kv(self, kv: LayerKV, k: Tensor, v: Tensor, batch: RaggedBatch) -> None:
        """Write k and v [T, G, D] into their slots."""
        self.prepare(batch).write(kv, k, v)

    def attention(self, q: Tensor, kv: LayerKV, batch: RaggedBatch, how: Scores) -> Tensor:
        """See `Ops.attention`."""
        paged = self.prepare(batch)
        parts = [self.attend(q[group.rows], kv, paged, i, how) for i, group in enumerate(paged.groups)]
        if len(parts) == 1 and len(parts[0]) == len(q):
            return parts[0]
        out = q.new_zeros(*q.shape[:2], kv.v.shape[-1])
        for group, part in zip(paged.groups, parts, strict=True):
            out[group.rows] = part
        return out

    def norm_rope_store_latent(
        self, q: Tensor, compressed: Tensor, kv: LayerKV, batch: RaggedBatch, angles: Angles, norm: Norm
    ) -> Tensor:
        """See `Ops.norm_rope_store_latent`."""
        latent, turned = compressed.tensor_split([kv.v.shape[-1]], -1)
        rotated, key = self.rope(q[..., -turned.shape[-1] :], turned[:, None], angles)
        self.write_kv(kv, key, self.norm(latent.contiguous(), norm)[:, None], batch)
        return rotated

    def heads_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `Ops.heads_linear`."""
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)

    def store_index_key(self, key: Tensor, kv: LayerKV, batch: RaggedBatch, angles: Angles, norm: Norm) -> None:
        """See `Ops.store_index_key`."""
        assert kv.index is not None
        normed = self.norm(key.contiguous(), norm)[:, None]
        self.prepare(batch).put(kv.index, self.rope(normed, normed[:, :0], angles)[0])

    def choose_positions(
        self, q: Tensor, weights: Tensor, kv: LayerKV, batch: RaggedBatch, angles: Angles, count: int
    ) -> Tensor:
        """See `Ops.choose_positions`."""
        assert kv.index is not None
        q, exact, size = self.rope(q, q[:, :0], angles)[0].float(), weights.float(), batch.page_size
        slots = batch.page_table.new_zeros(len(q), count)
        lengths = batch.kv_len.tolist()
        for span, (start, stop) in enumerate(pairwise(batch.query_start.tolist())):
            far, table = max(start, stop - (lengths[span] - count)), batch.page_table[span]
            if far >= stop:
                continue
            keys = read_keys(kv.index, table[: -(-lengths[span] // size)], lengths[span])
            each = max(1, SCORES_AT_ONCE // (q.shape[1] * len(keys)))
            for some in torch.split(torch.arange(far, stop, device=q.device), each):
                scores = self.index_scores(q[some], exact[some], keys)
                after = torch.arange(len(keys), device=q.device) > (some - stop + len(keys))[:, None]
                found = best(scores.masked_fill_(after, -torch.inf), count)
                slots[some] = table[found // size] * size + (found % size).to(slots.dtype)
        return slots

    def index_scores(self, q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        """Scores of `choose_positions` of some queries for all of their span's keys: q [n, J, I], weights [n, J],
        keys [L, I], all float32 -> finite float32 [n, L]."""
        products = torch.matmul(q.flatten(0, 1), keys.t()).relu_().view(*q.shape[:2], -1)
        return finite(torch.bmm(weights[:, None], products)[:, 0])

    def latent_attention(
        self,
        q: Tensor,
        rotated: Tensor,
        kv: LayerKV,
        batch: RaggedBatch,
        scale: float,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """See `Ops.latent_attention`. Chosen tokens are blocks of one token each, and their numbers a block table."""
        whole, how = torch.cat((q, rotated), -1), Scores(scale)
        if chosen is None:
            return self.attention(whole, kv, batch, how)
        out, tokens = torch.zeros_like(q), kv.by_token()
        near, alike = self.prepare(batch).beginning(chosen.shape[1], self.prepare)
        if len(near):
            out[near] = self.attention(whole[near], kv, alike, how)
        far = (batch.positions[: int(batch.query_start[-1])] >= chosen.shape[1]).nonzero()[:, 0]
        for some in torch.split(far, max(1, CHOSEN_AT_ONCE // (chosen.shape[1] * whole.shape[-1]))):
            out[some] = self.attention(whole[some], tokens, RaggedBatch.of_chosen(chosen[some]), how)
        return out

    def attend(self, q: Tensor, kv: LayerKV, paged: PagedAttentionMetadata, i: int, how: Scores) -> Tensor:
        """Attention of the queries q [S * n, H, D] of group number i over its blocks -> [S * n, H, E]."""
        group = paged.groups[i]
        k, v = paged.read_kv(kv, i, q)
        if group.n > FEW:
            last = paged.last_of(i, how.ahead)
            return long(q, k[0], v[0], group, how, None if last is None else last[0])
        mask = paged.mask(i, how, q.shape[1] // k.shape[1])
        return short(q, k, v, mask, group.n, how)


def read_keys(pool: Tensor, pages: Tensor, length: int) -> Tensor:
    """An indexer's keys of a span in some pages of pool [N, 1, B, I] -> float32 [length, I]."""
    return pool.view(len(pool), -1).index_select(0, pages).view(-1, pool.shape[-1])[:length].float()


def finite(scores: Tensor) -> Tensor:
    """Scores above those of what is not seen, -inf, whatever they are made of."""
    least = torch.finfo(scores.dtype).min
    return scores.nan_to_num_(nan=least, neginf=least)


def best(scores: Tensor, count: int) -> Tensor:
    """The columns of the `count` largest scores [n, L] of each row, of equal ones the first -> int64 [n, count],
    ascending. At least so many must be finite."""
    least = scores.topk(count, sorted=False).values.amin(1, keepdim=True)
    above, equal = scores > least, scores == least
    wanted = equal & (equal.cumsum(1) <= count - above.sum(1, keepdim=True))
    return (above | wanted).nonzero()[:, 1].view(len(scores), count)


def short(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, n: int, how: Scores) -> Tensor:
    """Attention of S spans of n queries together: q [S * n, H, D], k [S, G, L, D], v [S, G, L, E],
    mask [S, 1, 1 or R * n, L] -> [S * n, H, E].

    The R = H / G query heads of a K/V head become R times as many queries, so that K/V is not repeated.
    """
    spans, groups, _, dim = k.shape
    heads = q.shape[1]
    if n == 1:
        folded = q.view(spans, groups, heads // groups, dim)
        return weigh(folded, k, v, mask, how, how.sink_of(groups)).reshape(spans, heads, -1)
    folded = q.view(spans, n, groups, heads // groups, dim).permute(0, 2, 3, 1, 4).reshape(spans, groups, -1, dim)
    out = weigh(folded, k, v, mask, how, how.sink_of(groups, n))
    return out.view(spans, groups, -1, n, v.shape[-1]).permute(0, 3, 1, 2, 4).reshape(spans * n, heads, -1)


def long(q: Tensor, k: Tensor, v: Tensor, group: SpanGroup, how: Scores, last: Tensor | None = None) -> Tensor:
    """Attention of one span of many queries, tile by tile: q [n, H, D], k [G, L, D], v [G, L, E] -> [n, H, E].

    last [n]: the last position that each query sees, None for its own.
    """
    n, heads, _ = q.shape
    groups = k.shape[0]
    folded = q.view(n, groups, heads // groups, -1).permute(1, 2, 0, 3)
    past = group.longest - n
    sinks = how.sink_of(groups)
    sinks = None if sinks is None else sinks[..., None]
    tiles = []
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        low = first_visible(past + start, how.window, how.chunk)
        until = None if last is None else last[start:stop, None]
        high = past + stop if until is None else min(int(until.max()) + 1, group.longest)
        key = torch.arange(low, high, device=q.device)
        query = torch.arange(past + start, past + stop, device=q.device)[:, None]
        seen_all = how.sees_all(group.longest, n)
        mask = None if seen_all else visible(key, query, how.window, how.chunk, until)
        keys, values = (x[:, None, low:high].expand(-1, heads // groups, -1, -1) for x in (k, v))
        tiles.append(weigh(folded[:, :, start:stop], keys, values, mask, how, sinks))
    return torch.cat(tiles, 2).permute(2, 0, 1, 3).reshape(n, heads, -1)


def weigh(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Scores, sinks: Tensor | None) -> Tensor:
    """softmax(q k^T scale) v: q [.., M, D], sinks [.., M or 1, 1]. torch has no soft cap and no sinks, so with them it
    is computed step by step in float32."""
    if not how.soft_cap and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=how.scale)
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * how.scale
    if how.soft_cap:
        scores = torch.tanh(scores / how.soft_cap) * how.soft_cap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    return torch.matmul(scores.softmax(-1)[..., : k.shape[-2]], v.float()).to(q.dtype)
