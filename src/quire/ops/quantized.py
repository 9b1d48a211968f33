"""Products with quantized matrices in plain torch: the matrix is dequantized, then multiplied. The oracle of the
kernels.

Every supported format has one of two layouts. Scaled: one number per byte (int8, or e4m3: float8 with four bits of
exponent and three of mantissa, Micikevicius et al. 2022), and a scale for every `width` columns of a row. Grouped: one
number per byte or two, the even column's in the low bits, with a scale and a zero point for every group of columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import repeat
from types import MappingProxyType
from typing import NamedTuple, Self, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.base import (
    NO_BIASES,
    Angles,
    AnyMatrix,
    BlockPanels,
    Decoder,
    DecoderLayer,
    DeltaInputs,
    DeltaWeights,
    ExpertBiases,
    ExpertMatrices,
    Gate,
    Int8Matrix,
    IntegerMatrix,
    MixedMatrix,
    Norm,
    Norms,
    QuantizedMatrix,
    RoundedRows,
    RoutedRows,
    RouterWeights,
    Routing,
    ScanInputs,
    ScanWeights,
    Scores,
    TopK,
)
from quire.ops.integer import dequantize_integers
from quire.ops.matmul import by_expert, combine_experts, through_experts
from quire.ops.panels import PanelMatrix, Zeros
from quire.ops.ragged import LayerKV, LayerState, RaggedBatch
from quire.ops.recurrent import gated_delta, selective_scan, with_padding

Each = TypeVar("Each")

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


class Float8(NamedTuple):
    """A format of K/V in 8 bits. most: its largest number. error: the largest median relative error of values that it
    holds, whose own are half of this: those that underflow have far more."""

    dtype: torch.dtype
    most: float
    error: float


FLOAT8: Mapping[str, Float8] = MappingProxyType(
    {"fp8": Float8(E4M3, E4M3_MAX, 0.06), "fp8_e5m2": Float8(torch.float8_e5m2, 57344.0, 0.12)}
)
"""By the names of `--kv-cache-dtype`: three bits of mantissa, or two and a wider range."""

FLOAT8_MAX: Mapping[torch.dtype, float] = MappingProxyType({each.dtype: each.most for each in FLOAT8.values()})


def to_fp8(x: Tensor, scale: float, dtype: torch.dtype = E4M3) -> Tensor:
    """x / scale in float8; numbers beyond its range become its largest."""
    most = FLOAT8_MAX[dtype]
    return (x.float() / scale).clamp(-most, most).to(dtype)


INT8_MAX = 127.0


def dequantize(matrix: AnyMatrix) -> Tensor:
    """The numbers of a matrix, float32 [out, in]."""
    if isinstance(matrix, IntegerMatrix):
        return dequantize_integers(matrix)
    if isinstance(matrix, MixedMatrix):
        return torch.cat([dequantize(part) for part in matrix.parts])
    if isinstance(matrix, PanelMatrix):
        return matrix.values_of()
    weight, scale = matrix.weight, matrix.scale
    if matrix.zero is not None and matrix.groups is not None:
        numbers = (torch.stack((weight & 15, weight >> 4), -1).flatten(1) if matrix.is_int4 else weight).float()
        zero = matrix.zero.float().index_select(1, matrix.groups)
        return numbers.sub_(zero).mul_(scale.index_select(1, matrix.groups))
    exact = weight.float()
    if scale.shape[1] == 1:
        return exact.mul_(scale)
    column = (torch.arange(weight.shape[1], device=weight.device) + matrix.offset) // matrix.width
    return exact.mul_(scale.index_select(1, column))


def parts(matrix: ExpertMatrices, count: int) -> Sequence[AnyMatrix]:
    """The matrices of `count` experts."""
    if isinstance(matrix, IntegerMatrix):
        return [matrix.expert(e) for e in range(count)]
    rows = len(matrix.weight) // count
    return [matrix.rows(slice(first, first + rows)) for first in range(0, count * rows, rows)]


def biased(matrices: Iterable[Each], biases: Tensor | None) -> Iterator[tuple[Each, Tensor | None]]:
    """The matrices of experts, each with its bias."""
    return zip(matrices, repeat(None) if biases is None else biases, strict=False)


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, in] -> (int8 [T, in], float32 [T, 1]): each token by its own largest number, halves to even."""
    exact = x.float()
    scale = exact.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / INT8_MAX
    return (exact / scale).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale


LEAST_FLOAT8 = 1e-30
"""The least that tokens in float8 are scaled by: E4M3_MAX times its inverse is finite."""


def float8_tokens(x: Tensor, width: int = 0) -> tuple[Tensor, Tensor]:
    """x [T, in] -> (e4m3 [T, in], float32 [T, runs]): each run of `width` numbers of a token by its own largest; 0: the
    whole token."""
    inputs = x.shape[1]
    width = width or inputs
    runs = F.pad(x.float(), (0, -inputs % width)).view(len(x), -(-inputs // width), width)
    largest = runs.abs().amax(-1, keepdim=True).clamp(min=LEAST_FLOAT8)
    # A number by a tensor would be the number times its inverse, which is rounded once more.
    inverse = torch.full_like(largest, E4M3_MAX) / largest
    return (runs * inverse).to(E4M3).flatten(1)[:, :inputs], largest[..., 0] / E4M3_MAX


EXACT = 1024
"""Columns of int8 whose products float32 adds up exactly, in any order: 127 * 128 * 1024 < 2 ** 24."""


@cache
def adds_exactly() -> bool:
    """Whether torch multiplies integers right on this CPU: without VNNI, sums of two products are cut to 16 bits."""
    largest = torch.full((33, 72), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest.t()) == 72 * 127 * 127).all())


def integer_product(a: Tensor, b: Tensor) -> Tensor:
    """a int8 [T, in], b int8 [out, in], on a CPU -> their exact product, float32 [T, out]."""
    if adds_exactly() and a.shape[1] > 1:  # of a single column torch's product is wrong on any
        return torch._int_mm(a, b.t()).float()
    total = torch.zeros(len(a), len(b), dtype=torch.int32)
    for x, y in zip(torch.split(a, EXACT, 1), torch.split(b, EXACT, 1), strict=True):
        total += F.linear(x.float(), y.float()).int()
    return total.float()


def in_best_groups(scores: Tensor, how: TopK) -> Tensor:
    """scores [T, E], -inf for experts outside the best groups, see `TopK`."""
    if how.groups == 1:
        return scores
    grouped = scores.view(len(scores), how.groups, -1)
    best = grouped.topk(how.group_best, dim=-1).values.sum(-1).topk(how.used_groups, dim=-1).indices
    outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, value=False)
    return grouped.masked_fill(outside[..., None], float("-inf")).view(scores.shape)


def mix_sparsely(logits: Tensor, how: TopK) -> Routing:
    """`select_experts` with a margin, see `TopK`."""
    experts, weights, left = list[Tensor](), list[Tensor](), logits
    for _ in range(how.used):
        best, number = left.max(-1, keepdim=True)
        near = best - left <= how.margin * torch.maximum(logits.abs(), best)
        experts.append(number)
        weights.append(left.masked_fill(~near, float("-inf")).softmax(-1).gather(-1, number))
        left = left.scatter(-1, number, float("-inf"))
    return Routing(torch.cat(experts, -1).int(), torch.cat(weights, -1) * how.scale)


def gained(routing: Routing, gains: Tensor | None) -> Routing:
    """The routing with weights multiplied by their experts' gains, see `Ops.select_experts`."""
    return routing if gains is None else routing._replace(weights=routing.weights * gains[routing.experts])


LEAST = 32
"""Rows that a card's library wants for products of integers, at least."""


def rotate_halves(x: Tensor, angles: Angles) -> Tensor:
    """x [P, H, D] with the pairs (i, i + D / 2) of each head rotated in float32."""
    first, second = x.float().chunk(2, -1)
    cos, sin = angles.cos[:, None], angles.sin[:, None]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1).to(x.dtype)


class BaseOps(ABC):
    """What implementations of `Ops` have in common; quantized products dequantize the matrix at each call."""

    multiplies_integers = False

    def untuned(self) -> Self:
        """See `Ops.untuned`."""
        return self

    def rounds(self, matrix: AnyMatrix) -> bool:
        """See `Ops.rounds`."""
        return False

    def unrounded(self) -> Self:
        """See `Ops.unrounded`."""
        return self

    def multiply(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """See `Ops.multiply`."""
        return product(x)

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        """See `Ops.linear`."""

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.silu_mul`."""

    @abstractmethod
    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.gelu_mul`."""

    @abstractmethod
    def clamped_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.clamped_mul`."""

    @abstractmethod
    def relu2(self, x: Tensor) -> Tensor:
        """See `Ops.relu2`."""

    def embedding(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """See `Ops.embedding`."""
        return F.embedding(tokens, weight)

    def integer_embedding(self, tokens: Tensor, matrix: IntegerMatrix | PanelMatrix, dtype: torch.dtype) -> Tensor:
        """See `Ops.integer_embedding`."""
        return dequantize(matrix.rows(tokens)).to(dtype)

    def apply_gate(self, y: Tensor, gate: Gate) -> Tensor:
        """See `Ops.apply_gate`."""
        gates = {
            "silu": self.silu_mul,
            "gelu": self.gelu_mul,
            "gelu_erf": self.gelu_erf_mul,
            "relu": self.relu_mul,
            "clamped": self.clamped_mul,
            "relu2": self.relu2,
        }
        return gates[gate](y) if gate else y

    @abstractmethod
    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See `Ops.norm`."""

    @abstractmethod
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

    def add_norms(
        self,
        x: Tensor,
        residual: Tensor,
        norms: Sequence[Norm],
        before: Norm | None = None,
        scale: float = 1.0,
        gain: Tensor | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """See `Ops.add_norms`."""
        first, total = self.add_norm(x, residual, norms[0], before, scale, gain)
        return [first, *(self.norm(total, each) for each in norms[1:])], total

    def sum_norms(self, x: Tensor, norm: Norm, other: Tensor, other_norm: Norm) -> Tensor:
        """See `Ops.sum_norms`."""
        return self.add_norm(x, self.norm(other, other_norm), None, norm)[1]

    @abstractmethod
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

    @abstractmethod
    def attention(self, q: Tensor, kv: LayerKV, batch: RaggedBatch, how: Scores) -> Tensor:
        """See `Ops.attention`."""

    def self_attention(
        self,
        qkv: Tensor,
        heads: int,
        kv: LayerKV,
        batch: RaggedBatch,
        angles: Angles,
        how: Scores,
        norms: Norms | None = None,
    ) -> Tensor:
        """See `Ops.self_attention`."""
        q = self.qk_norm_rope_store_kv(qkv, heads, kv, batch, angles, norms)
        return self.attention(q, kv, batch, how)

    def decoder(self, layers: Sequence[DecoderLayer]) -> Decoder | None:
        """See `Ops.decoder`."""
        return None

    def gelu_erf(self, x: Tensor) -> Tensor:
        """See `Ops.gelu_erf`."""
        return cast(Tensor, torch.ops.aten.gelu_(x))

    def gelu_erf_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.gelu_erf_mul`."""
        gate, up = gate_up.chunk(2, -1)
        return self.gelu_erf(gate).mul_(up)

    def relu(self, x: Tensor) -> Tensor:
        """See `Ops.relu`."""
        return torch.relu(x)

    def relu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.relu_mul`."""
        gate, up = gate_up.chunk(2, -1)
        return self.relu(gate).mul_(up)

    def sigmoid(self, x: Tensor) -> Tensor:
        """Of each number."""
        return x.sigmoid()

    def combine_experts(self, made: Tensor, weights: Tensor) -> Tensor:
        """See `Ops.combine_experts`."""
        return combine_experts(made, weights)

    def normalize(self, weights: Tensor, floor: float = 0.0) -> Tensor:
        """weights [T, K], each row divided by its sum, or by `floor` where that is larger."""
        return weights / weights.sum(-1, keepdim=True).clamp(min=floor)

    def select_experts(
        self, logits: Tensor, how: TopK, correction: Tensor | None = None, gains: Tensor | None = None
    ) -> Routing:
        """See `Ops.select_experts`."""
        logits = logits.float() if how.logit_scale == 1.0 else logits.float() * how.logit_scale
        if how.margin:
            return gained(mix_sparsely(logits, how), gains)
        scores = self.sigmoid(logits) if how.sigmoid else logits.softmax(-1)
        ranked = in_best_groups(scores if correction is None else scores + correction, how)
        experts = ranked.topk(how.used, dim=-1).indices
        weights = scores.gather(-1, experts)
        if how.normalize:
            weights = self.normalize(weights, how.floor)
        return gained(Routing(experts.int(), weights * how.scale), gains)

    def route(self, x: Tensor, router: RouterWeights, batch: RaggedBatch | None = None) -> Routing:
        """See `Ops.route`."""
        logits = self.linear(x, router.weight, router.bias)
        return self.select_experts(logits, router.how, router.correction, router.gains)

    def add_norm_route(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Norm,
        router: RouterWeights,
        batch: RaggedBatch | None = None,
        scale: float = 1.0,
    ) -> tuple[RoutedRows, Tensor]:
        """See `Ops.add_norm_route`."""
        x, residual = self.add_norm(x, residual, norm, None, scale)
        return RoutedRows(x, self.route(x, router, batch)), residual

    def add_shared(self, routed: Tensor, shared: Tensor, logits: Tensor | None) -> Tensor:
        """See `Ops.add_shared`."""
        return routed + (shared if logits is None else shared * self.sigmoid(logits))

    def experts(
        self,
        x: Tensor,
        routing: Routing,
        gate_up: Tensor,
        down: Tensor,
        gate: Gate,
        biases: ExpertBiases = NO_BIASES,
    ) -> Tensor:
        """See `Ops.experts`."""

        def mlp(rows: Tensor, ends: Tensor) -> Tensor:
            inner = by_expert(rows, biased(gate_up, biases.gate_up), ends, lambda x, each: self.linear(x, *each))
            outer = biased(down, biases.down)
            return by_expert(self.apply_gate(inner, gate), outer, ends, lambda x, each: self.linear(x, *each))

        return through_experts(x, routing, len(gate_up), mlp, self.combine_experts)

    def quantized_experts(
        self,
        x: Tensor,
        routing: Routing,
        gate_up: ExpertMatrices,
        down: ExpertMatrices,
        gate: Gate,
        biases: ExpertBiases = NO_BIASES,
    ) -> Tensor:
        """See `Ops.quantized_experts`."""
        count = len(down.weight) // (1 if isinstance(down, IntegerMatrix) else x.shape[1])

        def mlp(rows: Tensor, ends: Tensor) -> Tensor:
            first, last = biased(parts(gate_up, count), biases.gate_up), biased(parts(down, count), biases.down)
            inner = by_expert(rows, first, ends, lambda x, each: self.quantized_linear(x, *each))
            gated = self.apply_gate(inner, gate)
            return by_expert(gated, last, ends, lambda x, each: self.quantized_linear(x, *each))

        return through_experts(x, routing, count, mlp, self.combine_experts)

    def arranged(self, matrix: AnyMatrix) -> AnyMatrix:
        """See `Ops.arranged`."""
        return matrix

    def empty_panels(self, outputs: int, inputs: int, dtype: torch.dtype) -> PanelMatrix:
        """See `Ops.empty_panels`."""
        return PanelMatrix.empty(outputs, inputs, dtype)

    def empty_blocks(self, kind: str, outputs: int, inputs: int, zeros: Zeros | None = None) -> BlockPanels | None:
        """See `Ops.empty_blocks`."""
        return None

    def quantized_linear(self, x: Tensor, matrix: AnyMatrix, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        """See `Ops.quantized_linear`."""
        return self.linear(x, dequantize(matrix).to(x.dtype), bias, gate)

    def quantized_mlp(self, x: Tensor | RoundedRows, gate_up: AnyMatrix, down: AnyMatrix, gate: Gate) -> Tensor:
        """See `Ops.quantized_mlp`."""
        if isinstance(x, RoundedRows):
            return self.quantized_linear(self.multiply_rounded(x, gate_up, None, gate), down)
        return self.quantized_linear(self.quantized_linear(x, gate_up, None, gate), down)

    def add_norm_rounded(
        self, x: Tensor, residual: Tensor, norm: Norm, matrix: AnyMatrix, scale: float = 1.0
    ) -> tuple[Tensor | RoundedRows, Tensor]:
        """See `Ops.add_norm_rounded`."""
        return self.add_norm(x, residual, norm, None, scale)

    def multiply_rounded(
        self, x: RoundedRows, matrix: AnyMatrix, bias: Tensor | None = None, gate: Gate = ""
    ) -> Tensor:
        """See `Ops.multiply_rounded`."""
        numbers, steps = x.rows[: x.tokens].float(), x.steps[:, : x.tokens].t()
        width = matrix.width if isinstance(matrix, QuantizedMatrix) and steps.shape[1] > 1 else numbers.shape[1]
        exact = numbers * steps.repeat_interleave(width, 1)[:, : numbers.shape[1]]
        return self.quantized_linear(exact.to(x.dtype), matrix, bias, gate)

    def int8_linear(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, gate: Gate = ""
    ) -> Tensor:
        """See `Ops.int8_linear`."""
        rounded, steps = quantize_tokens(x)
        if not x.is_cuda:
            sums = integer_product(rounded, weight)
        elif any(size % 8 for size in weight.shape):
            sums = self.linear(rounded.float(), weight.float())
        else:
            missing = max(0, LEAST - len(x))
            sums = torch._int_mm(F.pad(rounded, (0, 0, 0, missing)), weight.t())[: len(x)].float()
        out = (sums * steps * scale.t()).to(x.dtype)
        return self.apply_gate(out if bias is None else out + bias, gate)

    def arranged_int8(self, matrix: QuantizedMatrix) -> Int8Matrix:
        """See `Ops.arranged_int8`."""
        return matrix

    def rounded_linear(self, x: Tensor, matrix: Int8Matrix, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        """See `Ops.rounded_linear`."""
        assert isinstance(matrix, QuantizedMatrix), "matrices in panels are multiplied by their own kernels"
        return self.int8_linear(x, matrix.weight, matrix.scale, bias, gate)

    def segment_attention(
        self, qkv: Tensor, heads: int, lengths: Sequence[int], angles: Angles | None = None, scale: float = 0.0
    ) -> Tensor:
        """See `Ops.segment_attention`."""
        q, k, v = qkv.view(len(qkv), 3, heads, -1).unbind(1)
        if angles is not None:
            q, k = (rotate_halves(x, angles) for x in (q, k))
        scale = scale or q.shape[-1] ** -0.5
        segments = (torch.split(x.transpose(0, 1), list(lengths), 1) for x in (q, k, v))
        parts = [F.scaled_dot_product_attention(a, b, c, scale=scale) for a, b, c in zip(*segments, strict=True)]
        return torch.cat(parts, 1).transpose(0, 1).flatten(1)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """See `Ops.sigmoid_mul`."""
        return (x / gate.float().neg().exp_().add_(1.0)).to(x.dtype)

    def gated_delta(self, x: DeltaInputs, weights: DeltaWeights, state: LayerState, batch: RaggedBatch) -> Tensor:
        """See `Ops.gated_delta`."""
        return with_padding(gated_delta, x, weights, state, batch)

    def selective_scan(self, x: ScanInputs, weights: ScanWeights, state: LayerState, batch: RaggedBatch) -> Tensor:
        """See `Ops.selective_scan`."""
        return with_padding(selective_scan, x, weights, state, batch)
