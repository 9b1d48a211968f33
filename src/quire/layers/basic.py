"""Rotary embedding as data: read off a config, printed, compared. Torch-free; `basic.Rotary` computes with it.

The small layers: norms, embedding, rotary angles, MLPs.

Attention over pages: project, norm where the model does, turn, write K/V, attend, project back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from quire.errors import InvalidModel, nearest
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.ops.base import Angles, Gate, Ops
from quire.ops.ragged import LayerKV, RaggedBatch, select_rows
from quire.types import UNLIMITED


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions turn a head's first `dim` numbers. `dim` 0: not at all.

    theta: base of the wavelengths. kind: "default"; "linear", every wavelength `factor` times as long; "llama3",
    only those above `original` / `high`, in full above `original` / `low`; "yarn", from those that fit `original`
    fast times, in full from those that fit it slow times on. original: context length, in tokens, that the model was
    first trained for. whole: yarn's two bounds are rounded to whole pairs of dimensions. gain: what turned numbers are
    multiplied by. "factors": each wavelength as many times as long as `factors` says (GGUF's Llama 3.1).
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


NO_ROPE = RopeConfig(dim=0)
"""No rotary embedding."""


class RMSNorm:
    """See `Ops.rms_norm`; `add` takes the residual stream along."""

    def __init__(self, weight: Tensor, eps: float, ops: Ops) -> None:
        self.weight, self.eps, self.ops = weight, eps, ops

    @property
    def settings(self) -> tuple[Tensor, float]:
        """(weight, eps), for ops that norm as part of something larger."""
        return self.weight, self.eps

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor, before: RMSNorm | None = None) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), x normed by `before` first."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, before.settings if before else None)


class LayerNorm:
    """See `Ops.layer_norm`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, ops: Ops) -> None:
        self.weight, self.bias, self.eps, self.ops = weight, bias, eps, ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)


class Embedding:
    """Token ids [T] -> [T, hidden]. Whole on every rank."""

    def __init__(self, weight: Tensor, ops: Ops) -> None:
        self.weight, self.ops = weight, ops

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.ops.embedding(tokens, self.weight)


class ScaledEmbedding:
    """An embedding times `scale`, which is rounded to the table's dtype first (Gemma)."""

    def __init__(self, embedding: Embedding, scale: float) -> None:
        self.embedding = embedding
        self.scale = float(torch.tensor(scale, dtype=embedding.weight.dtype))

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * self.scale


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up fused."""

    def __init__(self, gate_up: ColumnParallelLinear, down: RowParallelLinear, gate: Gate) -> None:
        self.gate_up, self.down, self.gate = gate_up, down, gate

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x, self.gate))


class MLP:
    """down(act(up(x)))."""

    def __init__(
        self, up: ColumnParallelLinear, down: RowParallelLinear, activation: Callable[[Tensor], Tensor]
    ) -> None:
        self.up, self.down, self.activation = up, down, activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Rotary:
    """Positions [T] -> (cos, sin), float32 [T, dim / 2] each: made once a forward, used by every layer."""

    def __init__(self, rope: RopeConfig, device: torch.device, ops: Ops) -> None:
        self.frequencies, self.gain, self.ops = frequencies(rope).to(device), rope.gain, ops

    def __call__(self, positions: Tensor) -> Angles:
        return self.ops.angles(positions, self.frequencies, self.gain)


def frequencies(rope: RopeConfig) -> Tensor:
    """Radians a position, [dim / 2] float32. Raises InvalidModel for a scaling that is not known."""
    if rope.kind not in SCALINGS:
        raise InvalidModel(
            f"rope scaling {rope.kind!r} is not supported (known: {', '.join(SCALINGS)}).{nearest(rope.kind, SCALINGS)}"
        )
    steps = torch.arange(0, rope.dim, 2, dtype=torch.float32) / max(1, rope.dim)
    return SCALINGS[rope.kind](1.0 / rope.theta**steps, rope)


def unscaled(plain: Tensor, rope: RopeConfig) -> Tensor:
    return plain


def linear(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Position interpolation (Chen et al. 2023)."""
    return plain / rope.factor


def llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: short waves kept, long ones stretched, those between blended by how often they fit `original`."""
    fits = rope.original * plain / (2 * math.pi)
    kept = ((fits - rope.low) / (rope.high - rope.low)).clamp(0.0, 1.0)
    return plain * (kept + (1 - kept) / rope.factor)


def yarn(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Peng et al. 2023: short waves kept, long ones stretched, those between blended by their place in the head."""

    def place(turns: float) -> float:
        """The dimension, as a fraction of a pair, whose wave fits `original` so many times."""
        return rope.dim * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = place(rope.fast), place(rope.slow)
    if rope.full_dim:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    steps = torch.arange(rope.dim // 2, dtype=torch.float32)
    stretched = ((steps - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)
    return plain / rope.factor * stretched + plain * (1 - stretched)


def factors(plain: Tensor, rope: RopeConfig) -> Tensor:
    """One factor for each pair, as GGUF files carry what became of `llama3` scaling."""
    if len(rope.factors) != len(plain):
        raise InvalidModel(f"rope scaling has {len(rope.factors)} factors for {len(plain)} pairs of dimensions")
    return plain / torch.tensor(rope.factors, dtype=torch.float32)


SCALINGS: Mapping[str, Callable[[Tensor, RopeConfig], Tensor]] = MappingProxyType(
    {"default": unscaled, "linear": linear, "llama3": llama3, "yarn": yarn, "factors": factors}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """A layer's heads on this rank: `count` of queries, `kv` of keys and values, `dim` numbers each.

    window: how many positions a query sees, its own included. soft_cap: of the scores, 0 for none.
    """

    count: int
    kv: int
    dim: int
    scale: float
    window: int = UNLIMITED
    soft_cap: float = 0.0


class Attention:
    """One layer's. `norms` are those of q and of k (Qwen 3), or nothing."""

    def __init__(
        self,
        qkv: ColumnParallelLinear,
        out: RowParallelLinear,
        heads: Heads,
        ops: Ops,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> None:
        self.qkv, self.out, self.heads, self.ops = qkv, out, heads, ops
        self.norms = norms and (norms[0].settings, norms[1].settings)

    def __call__(
        self, x: Tensor, turn: Angles, batch: RaggedBatch, kv: LayerKV, wanted: Tensor | None = None
    ) -> Tensor:
        """x [T, hidden], turn as `Rotary` makes it -> [T, hidden], or those of `wanted`."""
        h = self.heads
        q = self.ops.qk_norm_rope_store_kv(self.qkv(x), h.count, kv, batch, turn, self.norms)
        mixed = self.ops.attention(q, kv, batch, h.scale, h.window, h.soft_cap).flatten(1)
        return self.out(select_rows(mixed, wanted))
