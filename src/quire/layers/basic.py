"""Layers without experts: norms, embeddings, rotary embeddings, attention, MLPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.errors import InvalidModel, nearest
from quire.layers.linear import ONE_RANK, ColumnParallelLinear, ParallelGroup, RowParallelLinear
from quire.layers.quantization.base import QuantizedWeight, TableStorage
from quire.ops.base import Ops
from quire.ops.operands import Angles, Gate, Norm, NormedRows, Norms, Scores
from quire.ops.ragged import LayerKV, RaggedBatch, select_rows
from quire.types import UNLIMITED


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """A model's rotary embedding: which of a head's dimensions are rotated, by which angles.

    dim: the first dimensions of a head, which are rotated; 0: none. theta: base of the wavelengths. kind: "default";
    "linear", every wavelength `factor` times as long; "llama3", only wavelengths above `original` / `high`, in full
    above `original` / `low`; "yarn", from those that fit `original` `fast` times to those that fit it `slow` times;
    "factors", each wavelength multiplied by its number in `factors` (Llama 3.1 in GGUF); "proportional", only the first
    `share` of the pairs of dimensions turn, each `factor` times as slowly (Gemma 4). original: context length, in
    tokens, of the first training. full_dim: yarn's two bounds are rounded to whole pairs of dimensions. gain: what the
    rotated dimensions are multiplied by. interleaved: neighbours are rotated together, not the two halves of `dim`.
    query_beta: b multiplies the query at position p by 1 + b log(1 + floor((p + query_shift) / original)) (Llama 4).
    short_factors, short_gain: instead of `factors` and `gain` where no sequence is longer than `original` (LongRoPE,
    Ding et al. 2024). axes: for each pair of dimensions, which position turns it: in time (0), height (1) or width (2);
    empty where tokens have one position.
    """

    dim: int
    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 0
    fast: float = 32.0
    slow: float = 1.0
    full_dim: bool = True
    gain: float = 1.0
    factors: tuple[float, ...] = ()
    interleaved: bool = False
    query_beta: float = 0.0
    short_factors: tuple[float, ...] = ()
    short_gain: float = 1.0
    share: float = 1.0
    query_shift: int = 0
    axes: tuple[int, ...] = ()


NO_ROPE = RopeConfig(dim=0)
"""No rotary embedding."""


class NormReader(Protocol):
    """A matrix or a router that alone reads a norm, and takes it with more than numbers."""

    def add_norm(
        self, x: Tensor, residual: Tensor, norm: Norm, scale: float, batch: RaggedBatch | None
    ) -> tuple[object, Tensor]:
        """(norm of the sum as this reads it, sum): see `Ops.add_norm`."""


class NormLayer:
    """An RMS norm or a layer norm, or none: then x stays as it is.

    scale: what its output is multiplied by where it is added to the residual stream. gain: a number, in a tensor, that
    the stream is multiplied by then. parallel: where it is added, what comes to it are partial sums of these ranks, see
    `RowParallelLinear.leave_sum`.
    """

    def __init__(self, norm: Norm | None, ops: Ops, scale: float = 1.0, gain: Tensor | None = None) -> None:
        self.norm, self.ops, self.scale, self.gain = norm, ops, scale, gain
        self.parallel = ONE_RANK

    def __call__(self, x: Tensor) -> Tensor:
        """x: (tokens, hidden); the same shape."""
        return self.ops.norm(x, self.norm) if self.norm else x

    def add(self, x: Tensor, residual: Tensor, before: NormLayer) -> tuple[Tensor, Tensor]:
        """(norm of the sum, sum) of residual and of what `before` makes of x. See `Ops.add_norm`."""
        add_norm = before.parallel.add_norm
        return add_norm(self.ops, x, residual, self.norm, before.norm, before.scale, before.gain)

    def add_for(
        self, x: Tensor, residual: Tensor, before: NormLayer, reader: NormReader | None, batch: RaggedBatch | None
    ) -> tuple[Any, Tensor]:
        """As `add`, for what alone reads the norm: the first result is a tensor, or what `reader` makes of it. batch:
        whose tokens x is of."""
        if reader is None or self.norm is None or not before.is_plain:
            return self.add(x, residual, before)
        return reader.add_norm(x, residual, self.norm, before.scale, batch)

    @property
    def is_plain(self) -> bool:
        """Whether what comes to this is added as it is, but for `scale`."""
        return self.norm is None and self.gain is None and self.parallel.size == 1

    def add_norms(
        self, x: Tensor, residual: Tensor, before: NormLayer, others: Sequence[Norm]
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """(norm of the sum, other norms of it, sum): as `add`, of a layer with a norm."""
        assert self.norm is not None
        norms, x = (self.norm, *others), before.parallel.all_reduce(x)
        (made, *rest), total = self.ops.add_norms(x, residual, norms, before.norm, before.scale, before.gain)
        return made, rest, total


class Embedding:
    """Token ids [T] -> [T, hidden], times `scale`, which is rounded to the table's dtype (Gemma)."""

    def __init__(self, weight: Tensor, ops: Ops, scale: float = 1.0) -> None:
        self.weight, self.ops = weight, ops
        self.scale = float(torch.tensor(scale, dtype=weight.dtype))

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens: (tokens,); (tokens, hidden)."""
        x = self.ops.embedding(tokens, self.weight)
        return x if self.scale == 1.0 else x * self.scale


class StoredEmbedding:
    """As `Embedding`, kept as a matrix is, which a tied head multiplies."""

    def __init__(self, stored: TableStorage, scale: float = 1.0) -> None:
        self.stored = stored
        self.scale = float(torch.tensor(scale, dtype=stored.matrix.dtype))

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens: (tokens,); (tokens, hidden)."""
        x = self.stored.rows(tokens)
        return x if self.scale == 1.0 else x * self.scale


class VocabParallelEmbedding:
    """As `Embedding`, each rank having rows of the table: what it has no row for is 0 in its part of the sum."""

    def __init__(self, table: Embedding | StoredEmbedding, rows: slice, parallel: ParallelGroup) -> None:
        self.table, self.rows, self.all_reduce = table, rows, parallel.all_reduce

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens: (tokens,); (tokens, hidden)."""
        inside = (tokens >= self.rows.start) & (tokens < self.rows.stop)
        x = self.table(torch.where(inside, tokens - self.rows.start, 0))
        return self.all_reduce(torch.where(inside[:, None], x, 0.0))


AnyEmbedding = Embedding | StoredEmbedding | VocabParallelEmbedding


def is_plain_product(weight: QuantizedWeight | None) -> TypeGuard[QuantizedWeight]:
    """Whether a quantized matrix is multiplied as it is, without a bias."""
    return weight is not None and weight.is_product and weight.bias is None


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up fused."""

    def __init__(self, gate_up: ColumnParallelLinear, down: RowParallelLinear, gate: Gate) -> None:
        self.gate_up, self.down, self.gate = gate_up, down, gate

    @property
    def reader(self) -> NormReader | None:
        """See `NormLayer.add_for`."""
        return self.gate_up.reader

    def __call__(self, x: Tensor | NormedRows, batch: RaggedBatch | None = None) -> Tensor:
        """x: (tokens, hidden); the same shape. batch: of no use here, see `MLPFunction`."""
        first, last = self.gate_up.stored.quantized, self.down.stored.quantized
        if is_plain_product(first) and is_plain_product(last):
            return self.down.all_reduce(first.ops.quantized_mlp(x, first.matrix, last.matrix, self.gate))
        return self.down(self.gate_up(x, self.gate))

    def leave_sum(self) -> ParallelGroup:
        """See `RowParallelLinear.leave_sum`."""
        return self.down.leave_sum()


class MLP:
    """down(act(up(x)))."""

    reader: None = None

    def __init__(
        self, up: ColumnParallelLinear, down: RowParallelLinear, activation: Callable[[Tensor], Tensor]
    ) -> None:
        self.up, self.down, self.activation = up, down, activation

    def __call__(self, x: Tensor, batch: RaggedBatch | None = None) -> Tensor:
        """x: (tokens, hidden); the same shape. batch: of no use here, see `MLPFunction`."""
        return self.down(self.activation(self.up(x)))

    def leave_sum(self) -> ParallelGroup:
        """See `RowParallelLinear.leave_sum`."""
        return self.down.leave_sum()


class Rotary:
    """Positions [T] -> `Angles` of [T, dim / 2]: computed once a forward, used by every layer."""

    def __init__(self, rope: RopeConfig, device: torch.device, ops: Ops) -> None:
        self.rope, self.frequencies, self.ops = rope, frequencies(rope).to(device), ops

    @cached_property
    def axes(self) -> Tensor:
        """[dim / 2] which position turns each pair of dimensions."""
        return torch.tensor(self.rope.axes, device=self.frequencies.device)

    def __call__(self, positions: Tensor, by_axis: Tensor | None = None) -> Angles:
        """The angles of `positions`, for `Ops` that rotate. by_axis: as `RaggedBatch.rope_positions`, for a rotary
        embedding that has `axes`."""
        if by_axis is not None and self.rope.axes:
            whole = [self.ops.angles(each, self.frequencies, self.rope.gain) for each in by_axis]
            if len(whole) == 1:
                return Angles(*whole[0], self.rope.interleaved)
            pick = self.axes.expand(1, by_axis.shape[1], -1)
            cos, sin = (torch.stack(parts).gather(0, pick)[0] for parts in zip(*whole, strict=True))
            return Angles(cos, sin, self.rope.interleaved)
        rope, gain = self.rope, None
        if rope.query_beta:
            gain = 1.0 + rope.query_beta * torch.log1p(((positions + rope.query_shift) // rope.original).float())
        return Angles(*self.ops.angles(positions, self.frequencies, rope.gain), rope.interleaved, gain)


def frequencies(rope: RopeConfig) -> Tensor:
    """Radians per position, [dim / 2] float32. Raises InvalidModel for an unknown scaling."""
    if rope.kind not in SCALINGS:
        raise InvalidModel(
            f"rope scaling {rope.kind!r} is not supported (known: {', '.join(SCALINGS)}).{nearest(rope.kind, SCALINGS)}"
        )
    steps = torch.arange(0, rope.dim, 2, dtype=torch.float32) / max(1, rope.dim)
    return SCALINGS[rope.kind](1.0 / rope.theta**steps, rope)


def unscaled(plain: Tensor, rope: RopeConfig) -> Tensor:
    """The frequencies as they are."""
    return plain


def linear(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Position interpolation (Chen et al. 2023)."""
    return plain / rope.factor


def llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: short wavelengths kept, long ones stretched, those between blended by how often they fit
    `original`."""
    fits = rope.original * plain / (2 * math.pi)
    kept = ((fits - rope.low) / (rope.high - rope.low)).clamp(0.0, 1.0)
    return plain * (kept + (1 - kept) / rope.factor)


def yarn(plain: Tensor, rope: RopeConfig) -> Tensor:
    """YaRN (Peng et al. 2023): short wavelengths kept, long ones stretched, those between blended by their index."""

    def index(turns: float) -> float:
        """The index of the pair, with a fraction, whose wavelength fits `original` so many times."""
        return rope.dim * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index(rope.fast), index(rope.slow)
    if rope.full_dim:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    steps = torch.arange(rope.dim // 2, dtype=torch.float32)
    stretched = ((steps - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)
    return plain / rope.factor * stretched + plain * (1 - stretched)


def factors(plain: Tensor, rope: RopeConfig) -> Tensor:
    """One factor for each pair of dimensions: what GGUF files store for `llama3` scaling."""
    if len(rope.factors) != len(plain):
        raise InvalidModel(f"rope scaling has {len(rope.factors)} factors for {len(plain)} pairs of dimensions")
    return plain / torch.tensor(rope.factors, dtype=torch.float32)


def proportional(plain: Tensor, rope: RopeConfig) -> Tensor:
    """The first pairs of dimensions, as they are without the rest, which do not turn (Gemma 4)."""
    turning = torch.arange(len(plain)) < int(rope.share * rope.dim // 2)
    return torch.where(turning, plain / rope.factor, 0.0)


SCALINGS: Mapping[str, Callable[[Tensor, RopeConfig], Tensor]] = MappingProxyType(
    {
        "default": unscaled,
        "linear": linear,
        "llama3": llama3,
        "yarn": yarn,
        "factors": factors,
        "proportional": proportional,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """A layer's heads on this rank: `count` of queries, `kv` of keys and values, of `dim` numbers each.

    window: how many positions a query sees, its own included. soft_cap: of the scores, 0 for none. chunk: positions of
    the chunks of which a query sees its own. ahead: later positions that a query sees, 0 for causal attention.
    """

    count: int
    kv: int
    dim: int
    scale: float
    window: int = UNLIMITED
    soft_cap: float = 0.0
    chunk: int = UNLIMITED
    ahead: int = 0


class Attention:
    """Attention of one layer: project, norm q and k where the model does, rotate, store K/V, attend, project back."""

    def __init__(
        self,
        qkv: ColumnParallelLinear,
        out: RowParallelLinear,
        heads: Heads,
        ops: Ops,
        norms: Norms | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.qkv, self.out, self.heads, self.ops, self.norms, self.sinks = qkv, out, heads, ops, norms, sinks

    @property
    def reader(self) -> NormReader | None:
        """See `NormLayer.add_for`."""
        return self.qkv.reader

    @property
    def scores(self) -> Scores:
        """What is done with scores."""
        h = self.heads
        return Scores(h.scale, h.window, h.soft_cap, self.sinks, h.chunk, h.ahead)

    def __call__(
        self,
        x: Tensor | NormedRows,
        angles: Angles,
        batch: RaggedBatch,
        kv: LayerKV,
        outputs: Tensor | None = None,
    ) -> Tensor:
        """x [T, hidden], angles from `Rotary` -> [T, hidden], or the rows `outputs` of it."""
        mixed = self.attend(self.qkv(x), angles, batch, kv)
        return self.out(select_rows(mixed.flatten(1), outputs))

    def attend(self, qkv: Tensor, angles: Angles, batch: RaggedBatch, kv: LayerKV) -> Tensor:
        """qkv [T, (H + 2 G) D], as it is projected -> [T, H, D]."""
        return self.ops.self_attention(qkv, self.heads.count, kv, batch, angles, self.scores, self.norms)


class HeadNormAttention(Attention):
    """Attention whose queries and keys are normed by layer norms of each head, with weights [H, D] and [G, D] of their
    own (Command R+), if they are: without norms it is `Attention`."""

    def attend(self, qkv: Tensor, angles: Angles, batch: RaggedBatch, kv: LayerKV) -> Tensor:
        """See `Attention`."""
        if self.norms is None:
            return super().attend(qkv, angles, batch, kv)
        h = self.heads
        q, k, v = torch.split(qkv.view(len(qkv), -1, h.dim), [h.count, h.kv, h.kv], 1)
        normed = [
            F.layer_norm(each.float(), (h.dim,), eps=norm.eps) * norm.weight.float()
            for each, norm in ((q, self.norms.q), (k, self.norms.k))
        ]
        made = torch.cat([*(each.to(qkv.dtype) for each in normed), v], 1).flatten(1)
        return self.ops.self_attention(made, h.count, kv, batch, angles, self.scores)


class GatedAttention(Attention):
    """Attention whose result is multiplied by the sigmoid of a gate, which the projection makes beside each head of
    queries (Qiu et al. 2025, Gated Attention for Large Language Models)."""

    def __call__(
        self,
        x: Tensor | NormedRows,
        angles: Angles,
        batch: RaggedBatch,
        kv: LayerKV,
        outputs: Tensor | None = None,
    ) -> Tensor:
        """See `Attention`."""
        h = self.heads
        made = self.qkv(x)
        gate = made[:, : 2 * h.count * h.dim].view(len(made), h.count, 2, h.dim)[:, :, 1]
        q = self.ops.qk_norm_rope_store_kv(made, h.count, kv, batch, angles, self.norms, gated=True)
        mixed = self.ops.attention(q, kv, batch, self.scores)
        return self.out(self.ops.sigmoid_mul(select_rows(mixed, outputs), select_rows(gate, outputs)).flatten(1))
