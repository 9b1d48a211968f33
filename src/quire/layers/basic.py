"""Layers without experts: norms, embeddings, rotary embeddings, attention, MLPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from quire.errors import InvalidModel, nearest
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.quantization.gguf import GgufStorage
from quire.ops.base import Angles, Gate, Ops
from quire.ops.ragged import LayerKV, RaggedBatch, select_rows
from quire.types import UNLIMITED


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """A model's rotary embedding: which of a head's dimensions are rotated, by which angles.

    dim: the first dimensions of a head, which are rotated; 0: none. theta: base of the wavelengths. kind: "default";
    "linear", every wavelength `factor` times as long; "llama3", only wavelengths above `original` / `high`, in full
    above `original` / `low`; "yarn", from those that fit `original` `fast` times to those that fit it `slow` times;
    "factors", each wavelength multiplied by its number in `factors` (Llama 3.1 in GGUF). original: context length, in
    tokens, of the first training. full_dim: yarn's two bounds are rounded to whole pairs of dimensions. gain: what the
    rotated dimensions are multiplied by.
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
    """See `Ops.rms_norm`."""

    def __init__(self, weight: Tensor, eps: float, ops: Ops) -> None:
        self.weight, self.eps, self.ops = weight, eps, ops

    @property
    def settings(self) -> tuple[Tensor, float]:
        """(weight, eps), for ops that norm as part of something larger."""
        return self.weight, self.eps

    def __call__(self, x: Tensor) -> Tensor:
        """x: (tokens, hidden); the same shape."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor, before: RMSNorm | None = None) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual); x is normed by `before` first, if given."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, before.settings if before else None)


class LayerNorm:
    """See `Ops.layer_norm`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, ops: Ops) -> None:
        self.weight, self.bias, self.eps, self.ops = weight, bias, eps, ops

    def __call__(self, x: Tensor) -> Tensor:
        """x: (tokens, hidden); the same shape."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)


class Embedding:
    """Token ids [T] -> [T, hidden]. Whole on every rank."""

    def __init__(self, weight: Tensor, ops: Ops) -> None:
        self.weight, self.ops, self.dtype = weight, ops, weight.dtype

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens: (tokens,); (tokens, hidden)."""
        return self.ops.embedding(tokens, self.weight)


class GgufEmbedding:
    """As `Embedding`, kept at the bits of the file; a tied head multiplies the same matrix."""

    def __init__(self, stored: GgufStorage) -> None:
        self.stored, self.dtype = stored, stored.matrix.dtype

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens: (tokens,); (tokens, hidden)."""
        return self.stored.rows(tokens)


AnyEmbedding = Embedding | GgufEmbedding


class ScaledEmbedding:
    """An embedding times `scale`, which is rounded to the table's dtype first (Gemma)."""

    def __init__(self, embedding: AnyEmbedding, scale: float) -> None:
        self.embedding = embedding
        self.scale = float(torch.tensor(scale, dtype=embedding.dtype))

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens: (tokens,); (tokens, hidden)."""
        return self.embedding(tokens) * self.scale


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up fused."""

    def __init__(self, gate_up: ColumnParallelLinear, down: RowParallelLinear, gate: Gate) -> None:
        self.gate_up, self.down, self.gate = gate_up, down, gate

    def __call__(self, x: Tensor, batch: RaggedBatch | None = None) -> Tensor:
        """x: (tokens, hidden); the same shape. batch: of no use here, see `MLPFunction`."""
        return self.down(self.gate_up(x, self.gate))


class MLP:
    """down(act(up(x)))."""

    def __init__(
        self, up: ColumnParallelLinear, down: RowParallelLinear, activation: Callable[[Tensor], Tensor]
    ) -> None:
        self.up, self.down, self.activation = up, down, activation

    def __call__(self, x: Tensor) -> Tensor:
        """x: (tokens, hidden); the same shape."""
        return self.down(self.activation(self.up(x)))


class Rotary:
    """Positions [T] -> (cos, sin), float32 [T, dim / 2] each: computed once a forward, used by every layer."""

    def __init__(self, rope: RopeConfig, device: torch.device, ops: Ops) -> None:
        self.frequencies, self.gain, self.ops = frequencies(rope).to(device), rope.gain, ops

    def __call__(self, positions: Tensor) -> Angles:
        """The angles of `positions`, for `Ops` that rotate."""
        return self.ops.angles(positions, self.frequencies, self.gain)


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


SCALINGS: Mapping[str, Callable[[Tensor, RopeConfig], Tensor]] = MappingProxyType(
    {"default": unscaled, "linear": linear, "llama3": llama3, "yarn": yarn, "factors": factors}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """A layer's heads on this rank: `count` of queries, `kv` of keys and values, of `dim` numbers each.

    window: how many positions a query sees, its own included. soft_cap: of the scores, 0 for none.
    """

    count: int
    kv: int
    dim: int
    scale: float
    window: int = UNLIMITED
    soft_cap: float = 0.0


class Attention:
    """Attention of one layer: project, norm q and k where the model does, rotate, store K/V, attend, project back."""

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

    def project(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> q, k and v side by side, [T, (heads + 2 kv_heads) head_dim]."""
        return self.qkv(x)

    def __call__(
        self, x: Tensor, angles: Angles, batch: RaggedBatch, kv: LayerKV, outputs: Tensor | None = None
    ) -> Tensor:
        """x [T, hidden], angles from `Rotary` -> [T, hidden], or the rows `outputs` of it."""
        h = self.heads
        q = self.ops.qk_norm_rope_store_kv(self.project(x), h.count, kv, batch, angles, self.norms)
        mixed = self.ops.attention(q, kv, batch, h.scale, h.window, h.soft_cap).flatten(1)
        return self.out(select_rows(mixed, outputs))
