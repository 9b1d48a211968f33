"""`Ops` by Triton kernels: one path for prefill, decode and verification, which can be captured in a CUDA graph as a
whole.

`BatchInvariantTritonOps` computes each row with the same bits in any batch: sums of plain products are cut by the
matrix alone (see `invariant_gemm`) and those of attention by positions alone (see `cells`), other products and latent
attention have one tile shape and no sums split among programs, and a library multiplies only where its results have the
same bits (see `gemm.SameBits`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from quire.ops.base import Ops
from quire.ops.cublaslt import CublasLt
from quire.ops.gemm import GemmAutotuner, SameBits, multiplied, on_the_card
from quire.ops.integer import integers_of
from quire.ops.matmul import combine_experts_in_order, in_order
from quire.ops.operands import (
    NO_BIASES,
    XIELU,
    Angles,
    AnyMatrix,
    DeltaInputs,
    DeltaWeights,
    ExpertBiases,
    ExpertMatrices,
    Gate,
    IntegerMatrix,
    MixedMatrix,
    Norm,
    NormedRows,
    Norms,
    QuantizedMatrix,
    RoundedRows,
    RoutedRows,
    RouterWeights,
    Routing,
    ScanInputs,
    ScanWeights,
    Scores,
    UnnormedRow,
    num_parts,
)
from quire.ops.panels import PanelMatrix
from quire.ops.quantized import E4M3
from quire.ops.ragged import LONG, NO_LONG_SPANS, LayerKV, LayerState, RaggedBatch
from quire.ops.triton import gemv, invariant_gemm, rows
from quire.ops.triton.attention import attention, cascade_attention
from quire.ops.triton.attention_schedule import AttentionPlan
from quire.ops.triton.gemv import COUNTERS, GemmConfig
from quire.ops.triton.later import Later
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.long_spans import DenseAttention, attend_long, dense_attention, serves
from quire.ops.triton.recurrence import FEW
from quire.types import UNLIMITED

if TYPE_CHECKING:
    from quire.ops.triton import (
        block_tma,
        grouped_gemm,
        indexer,
        integer_experts,
        integer_gemm,
        integer_gemv,
        integer_mma,
        integer_row,
        integer_stationary,
        integer_tma,
        latent,
        quantized_gemm,
        recurrent,
        rounded_gemm,
        span_attention,
    )
    from quire.ops.triton import experts as mixture
else:
    # Triton looks up the source of every kernel that is imported, and most models need few of these.
    block_tma = Later("block_tma")
    mixture = Later("experts")
    grouped_gemm = Later("grouped_gemm")
    indexer = Later("indexer")
    integer_experts = Later("integer_experts")
    integer_gemm = Later("integer_gemm")
    integer_gemv = Later("integer_gemv")
    integer_mma = Later("integer_mma")
    integer_row = Later("integer_row")
    integer_stationary = Later("integer_stationary")
    integer_tma = Later("integer_tma")
    latent = Later("latent")
    quantized_gemm = Later("quantized_gemm")
    recurrent = Later("recurrent")
    rounded_gemm = Later("rounded_gemm")
    span_attention = Later("span_attention")

MOST_OUTPUTS = 1 << 15
"""Outputs of a matrix that are dequantized at a time."""

log = logging.getLogger(__name__)


def gemm_library(device: torch.device) -> CublasLt | None:
    """A new one for each engine: its workspace serves one product at a time. None where there is none."""
    if device.type == "cuda":
        try:
            return CublasLt(device)
        except (OSError, RuntimeError) as error:
            log.warning("matrix products are not tuned, because cuBLASLt is not available: %s", error)
    return None


class TritonOps(Ops):
    """`Ops`. Launches depend on shapes and on the batch's `max_query` and `max_kv` alone: lengths, query starts, blocks
    and slots are read on the device, so a captured step serves any batch within them."""

    multiplies_integers = True
    dense: DenseAttention | None
    few = FEW
    """Tokens of a span up to which recurrent layers compute it token by token."""

    def __init__(
        self, device: torch.device | str = "cuda", *, dependent: bool = True, rounds_float8: bool = True
    ) -> None:
        """dependent: use programmatic dependent launch where the GPU has it. rounds_float8: see `rounds`."""
        self.rounds_float8 = rounds_float8
        self.card = DeviceInfo.of(torch.device(device), dependent)
        self.arrived, self.turns = torch.zeros(2, COUNTERS, dtype=torch.int32, device=device)
        self.gemm = self.make_gemm(gemm_library(self.arrived.device))
        self.dense = dense_attention(self.card)

    def untuned(self) -> Self:
        """See `Ops.untuned`."""
        made = copy(self)
        made.gemm = self.gemm.untuned()
        return made

    def unrounded(self) -> Self:
        """See `Ops.unrounded`."""
        made = copy(self)
        made.rounds_float8 = False
        return made

    def rounds(self, matrix: AnyMatrix) -> bool:
        """See `Ops.rounds`: more than `gemv.MAX_GEMV_ROWS` rows of 16 bits."""
        float8 = isinstance(matrix, QuantizedMatrix) and rounded_gemm.multiplies_float8(matrix, self.card)
        return float8 and self.rounds_float8

    def rounds_rows(self, x: Tensor) -> bool:
        """Whether x has so many rows that they are rounded where `rounds` says so."""
        return self.rounds_float8 and len(x) > gemv.MAX_GEMV_ROWS and x.dtype in (torch.bfloat16, torch.float16)

    def make_gemm(self, library: CublasLt | None) -> GemmAutotuner:
        """What multiplies many rows of 16 bits. library: see `gemm_library`."""
        return GemmAutotuner(library, on_the_card)

    def prepare(self, batch: RaggedBatch) -> AttentionPlan:
        """See `Ops.prepare`."""
        return batch if isinstance(batch, AttentionPlan) else AttentionPlan.of(batch)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        """See `Ops.linear`."""
        outputs, gated = len(weight) // num_parts(gate), num_parts(gate) == 2
        if x.dtype is torch.bfloat16 and invariant_gemm.is_faster(len(x), outputs, gated, self.card):
            return invariant_gemm.invariant_linear(x, weight, bias, self.card, self.arrived, gate)
        how = gemv.gemm_config(len(x), outputs, x.shape[-1], gated)
        if how is not None and x.dtype is torch.bfloat16:
            return gemv.gemv_linear(x, weight, bias, how, self.card, gate, arrived=self.arrived)
        return self.apply_gate(self.gemm.linear(x, weight, bias), gate)

    def route(self, x: Tensor, router: RouterWeights, batch: RaggedBatch | None = None) -> Routing:
        """See `Ops.route`."""
        return mixture.route(x, router, self.router_config(len(x), router.weight), self.card, self.arrived, batch)

    def add_norm_route(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Norm,
        router: RouterWeights,
        batch: RaggedBatch | None = None,
        scale: float = 1.0,
    ) -> tuple[RoutedRows, Tensor]:
        """See `Ops.add_norm_route`. Of few tokens one kernel."""
        how = self.router_config(len(x), router.weight)
        plain = not norm.centred and norm.bias is None and x.dtype is torch.bfloat16
        if not (plain and mixture.norms_rows(how, *x.shape)):
            return super().add_norm_route(x, residual, norm, router, batch, scale)
        into = mixture.Addition(
            residual.contiguous(), norm.weight, torch.empty_like(x), torch.empty_like(x), scale, norm.eps
        )
        routing = mixture.route(x, router, how, self.card, self.arrived, batch, into)
        return RoutedRows(into.normed, routing), into.sums

    def add_shared(self, routed: Tensor, shared: Tensor, logits: Tensor | None) -> Tensor:
        """See `Ops.add_shared`."""
        return rows.add_shared(routed, shared, logits, self.card)

    def router_config(self, tokens: int, weight: Tensor) -> GemmConfig:
        """How the product of a router [E, in] is tiled."""
        return mixture.router_config(tokens, weight.shape[1])

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
        x, how = x.contiguous(), self.expert_config(routing, down)
        plain = biases.gate_up is None and biases.down is None
        if plain and grouped_gemm.takes(x, gate_up, down, gate, how.gate_up.rows, self.card):
            return grouped_gemm.grouped_experts(x, routing, gate_up, down, gate, self.card, self.arrived)
        return mixture.experts(x, routing, gate_up, down, gate, how, self.card, biases)

    def expert_config(self, routing: Routing, down: Tensor) -> mixture.ExpertConfig:
        """How the products of experts are tiled. down: [E, in, F]."""
        if down.dtype is torch.float32:
            return mixture.SMALL
        return mixture.expert_config(*routing.experts.shape, *down.shape)

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
        if isinstance(gate_up, IntegerMatrix) and isinstance(down, IntegerMatrix) and down.order is None:
            if integer_gemv.takes(x, self.card, gate_up, down):
                inner = integer_gemv.multiply_slots(x, routing, gate_up, gate, self.card, biases.gate_up)
                return integer_gemv.add_slots(inner, routing, down, self.card, biases.down)
            tiles = self.integer_expert_config(routing, x, gate_up, down)
            return integer_experts.integer_experts(x, routing, gate_up, down, gate, tiles, self.card, biases)
        if not (mixture.is_supported(gate_up, self.card) and mixture.is_supported(down, self.card)):
            return super().quantized_experts(x, routing, gate_up, down, gate, biases)
        how = self.quantized_expert_config(routing, x, gate_up, down)
        return mixture.quantized_experts(
            x, routing, gate_up, down, gate, how, self.card, biases, rounded=self.rounds_rows(x)
        )

    def quantized_expert_config(
        self, routing: Routing, x: Tensor, gate_up: QuantizedMatrix, down: QuantizedMatrix
    ) -> mixture.ExpertConfig:
        """As `expert_config`, of quantized experts."""
        if x.dtype is torch.float32:
            return mixture.SMALL
        tokens, used = routing.experts.shape
        return mixture.quantized_expert_config(tokens, used, gate_up, down, rounded=self.rounds_rows(x))

    def integer_expert_config(
        self, routing: Routing, x: Tensor, gate_up: IntegerMatrix, down: IntegerMatrix
    ) -> integer_experts.IntegerExpertConfig:
        """As `expert_config`, of experts of integers."""
        if x.dtype is torch.float32:
            return integer_experts.SMALL
        tokens, used = routing.experts.shape
        return integer_experts.integer_expert_config(tokens, used, gate_up, down)

    def integer_embedding(self, tokens: Tensor, matrix: IntegerMatrix | PanelMatrix, dtype: torch.dtype) -> Tensor:
        """See `Ops.integer_embedding`."""
        if isinstance(matrix, PanelMatrix):
            return super().integer_embedding(tokens, matrix, dtype)
        return integer_gemm.dequantize(matrix, dtype, self.card, chosen=tokens)

    def arranged(self, matrix: AnyMatrix) -> AnyMatrix:
        """See `Ops.arranged`."""
        return (isinstance(matrix, QuantizedMatrix) and integers_of(matrix)) or matrix

    def quantized_linear(self, x: Tensor, matrix: AnyMatrix, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        """See `Ops.quantized_linear`."""
        if isinstance(matrix, IntegerMatrix):
            return self.integer_linear(x, matrix, bias, gate)
        if isinstance(matrix, MixedMatrix):
            y = torch.cat([self.quantized_linear(x, part) for part in matrix.parts], 1)
            return self.apply_gate(y if bias is None else y + bias, gate)
        if isinstance(matrix, PanelMatrix):
            return super().quantized_linear(x, matrix, bias, gate)
        if matrix.groups is not None and not matrix.is_int4:
            return super().quantized_linear(x, matrix, bias, gate)
        if matrix.weight.dtype is E4M3 and not self.card.float8:
            return super().quantized_linear(x, matrix, bias, gate)
        return self.fused_linear(x, matrix, bias, gate)

    def int8_linear(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, gate: Gate = ""
    ) -> Tensor:
        """See `Ops.int8_linear`."""
        matrix = QuantizedMatrix(weight, scale, weight.shape[1])
        return self.multiply_normed(rounded_gemm.round_rows(x.contiguous(), self.card, torch.int8), matrix, bias, gate)

    def quantized_mlp(self, x: Tensor | NormedRows, gate_up: AnyMatrix, down: AnyMatrix, gate: Gate) -> Tensor:
        """See `Ops.quantized_mlp`. Where a library multiplies what is rounded, the gate is part of the rounding."""
        if isinstance(gate_up, QuantizedMatrix) and isinstance(down, QuantizedMatrix) and self.rounds(down):
            rows = self.rounded(x, gate_up)
            if rows is not None and rounded_gemm.prefers_library(rows.tokens, gate_up, self.card):
                y = rounded_gemm.library_linear(rows, gate_up, None)
                again = rounded_gemm.round_rows(y, self.card, E4M3, rounded_gemm.run_of(down), gate)
                return self.multiply_normed(again, down)
            x = x if rows is None else rows
        return super().quantized_mlp(x, gate_up, down, gate)

    def rounded(self, x: Tensor | NormedRows, matrix: QuantizedMatrix) -> RoundedRows | None:
        """Rows as they are multiplied with the matrix; None where they are not rounded."""
        if isinstance(x, RoundedRows):
            return x
        assert isinstance(x, Tensor)
        if not (self.rounds_rows(x) and self.rounds(matrix)):
            return None
        return rounded_gemm.round_rows(x.contiguous(), self.card, E4M3, rounded_gemm.run_of(matrix))

    def add_norm_rounded(
        self, x: Tensor, residual: Tensor, norm: Norm, matrix: AnyMatrix, scale: float = 1.0
    ) -> tuple[Tensor | NormedRows, Tensor]:
        """See `Ops.add_norm_rounded`."""
        if isinstance(matrix, IntegerMatrix) and integer_row.norms(x, norm, matrix, self.card):
            total = torch.empty_like(residual)
            return UnnormedRow(x.contiguous(), residual, total, norm, scale), total
        plain = not norm.centred and norm.bias is None
        if plain and isinstance(matrix, QuantizedMatrix) and self.rounds_rows(x) and self.rounds(matrix):
            return rounded_gemm.norm_rounded(x, residual, norm, scale, matrix, self.card), residual
        return super().add_norm_rounded(x, residual, norm, matrix, scale)

    def multiply_normed(self, x: NormedRows, matrix: AnyMatrix, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        """See `Ops.multiply_normed`."""
        if isinstance(x, UnnormedRow):
            assert isinstance(matrix, IntegerMatrix)
            return integer_row.integer_row(x, matrix, bias, self.card, gate)
        assert isinstance(matrix, QuantizedMatrix)
        if rounded_gemm.prefers_library(x.tokens, matrix, self.card):
            return self.apply_gate(rounded_gemm.library_linear(x, matrix, bias), gate)
        outputs = len(matrix.weight) // num_parts(gate)
        how = rounded_gemm.rounded_config(
            x.tokens, outputs, x.rows.shape[1], gated=num_parts(gate) == 2, runs=rounded_gemm.run_of(matrix) > 0
        )
        return rounded_gemm.rounded_linear(x, matrix, bias, how, self.card, self.arrived, gate)

    def integer_linear(self, x: Tensor, matrix: IntegerMatrix, bias: Tensor | None, gate: Gate) -> Tensor:
        """As `linear`. For many rows the matrix is dequantized first."""
        if integer_row.takes(x, matrix, self.card):
            return integer_row.integer_row(x, matrix, bias, self.card, gate)
        if integer_stationary.takes(x, matrix, self.card):
            return integer_stationary.integer_stationary(x, matrix, bias, self.card, gate)
        if integer_gemv.takes(x, self.card, matrix):
            return integer_gemv.integer_gemv(integer_gemm.ordered(x, matrix), matrix, bias, self.card, gate)
        if integer_tma.takes(x, matrix, self.card):
            return integer_tma.integer_tma(x, matrix, bias, self.card, self.arrived, gate)
        if block_tma.takes(x, matrix, bias, gate, self.card):
            return block_tma.block_tma(x, matrix, bias, self.card, self.turns, gate)
        if integer_mma.takes(x, matrix, gate, self.card):
            return integer_mma.integer_mma(x, matrix, bias, self.card, self.arrived, gate)
        how = integer_gemm.integer_gemm_config(len(x), matrix, self.card, gated=num_parts(gate) == 2)
        if how is None or x.dtype is torch.float32:
            if not gate and matrix.outputs > MOST_OUTPUTS:
                return self.in_pieces(x, matrix, bias)
            x = integer_gemm.ordered(x, matrix)
            return self.linear(x, integer_gemm.dequantize(matrix, x.dtype, self.card), bias, gate)
        return integer_gemm.integer_linear(x, matrix, bias, how, self.card, self.arrived, gate)

    def in_pieces(self, x: Tensor, matrix: IntegerMatrix, bias: Tensor | None) -> Tensor:
        """As `linear`, MOST_OUTPUTS at a time, so that a dequantized head takes little memory."""
        out = x.new_empty(len(x), matrix.outputs)
        for first in range(0, matrix.outputs, MOST_OUTPUTS):
            own = slice(first, min(first + MOST_OUTPUTS, matrix.outputs))
            exact = integer_gemm.dequantize(matrix, x.dtype, self.card, own)
            out[:, own] = self.linear(integer_gemm.ordered(x, matrix), exact, None if bias is None else bias[own])
        return out

    def fused_linear(self, x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, gate: Gate) -> Tensor:
        """As `linear`. Many rows are rounded to float8 where the matrix and the card have it; else numbers are
        dequantized on the way, or, for more rows than MAX_FUSED_ROWS, all of them beforehand."""
        weight, scale = matrix.weight, matrix.scale
        if weight.dtype is E4M3 and x.dtype is torch.bfloat16 and rounded_gemm.aligned_runs(matrix):
            run, outputs = rounded_gemm.run_of(matrix), len(weight) // num_parts(gate)
            quick = gemv.scaled_gemm_config(len(x), outputs, x.shape[-1], num_parts(gate) == 2, run)
            if quick is not None:
                return gemv.gemv_linear(x, weight, bias, quick, self.card, gate, scale, self.arrived, run)
        if (rows := self.rounded(x, matrix)) is not None:
            return self.multiply_normed(rows, matrix, bias, gate)
        fast = quantized_gemm.uses_fast_conversion(x, matrix, self.card)
        how = quantized_gemm.quantized_gemm_config(len(x), len(weight), x.shape[-1], fast=fast, halved=matrix.is_int4)
        if how is None or x.dtype is torch.float32:
            return self.linear(x, quantized_gemm.dequantize(matrix, x.shape[-1], x.dtype, self.card), bias, gate)
        how = quantized_gemm.gated_config(how) if num_parts(gate) == 2 and not matrix.is_int4 else how
        return quantized_gemm.quantized_linear(x, matrix, bias, how, self.card, self.arrived, gate)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See `Ops.norm`."""
        return rows.norms(x, [norm], self.card)[0]

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
        made = rows.norms(x, [norm] if norm else [], self.card, residual, before, scale, gain)
        return made[0] if made else residual, residual

    def add_norms(
        self, x: Tensor, residual: Tensor, norms: Sequence[Norm], before: Norm | None = None, scale: float = 1.0,
        gain: Tensor | None = None,
    ) -> tuple[list[Tensor], Tensor]:  # fmt: skip
        """See `Ops.add_norms`."""
        if len(norms) > 1 and not rows.computes_norms(norms):
            return super().add_norms(x, residual, norms, before, scale, gain)
        return rows.norms(x, norms, self.card, residual, before, scale, gain), residual

    def sum_norms(self, x: Tensor, norm: Norm, other: Tensor, other_norm: Norm) -> Tensor:
        """See `Ops.sum_norms`."""
        if not rows.computes_norms((norm, other_norm)):
            return super().sum_norms(x, norm, other, other_norm)
        rows.norms(x, [], self.card, other, norm, beside=other_norm)
        return other

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.silu_mul`."""
        return rows.activation(gate_up, self.card, rows.SILU, gated=True)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.gelu_mul`."""
        return rows.activation(gate_up, self.card, rows.GELU, gated=True)

    def gelu_erf_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.gelu_erf_mul`."""
        return rows.activation(gate_up, self.card, rows.GELU_ERF, gated=True)

    def clamped_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.clamped_mul`."""
        return rows.activation(gate_up, self.card, rows.CLAMPED, gated=True)

    def gelu(self, x: Tensor) -> Tensor:
        """See `Ops.gelu`."""
        return rows.activation(x, self.card, rows.GELU, gated=False)

    def gelu_erf(self, x: Tensor) -> Tensor:
        """See `Ops.gelu_erf`."""
        return rows.activation(x, self.card, rows.GELU_ERF, gated=False)

    def relu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.relu_mul`."""
        return rows.activation(gate_up, self.card, rows.RELU, gated=True)

    def relu2(self, x: Tensor) -> Tensor:
        """See `Ops.relu2`."""
        return rows.activation(x, self.card, rows.RELU2, gated=False)

    def xielu(self, x: Tensor, how: XIELU) -> Tensor:
        """See `Ops.xielu`."""
        return rows.xielu(x, how, self.card)

    def angles(self, positions: Tensor, frequencies: Tensor, gain: float = 1.0) -> tuple[Tensor, Tensor]:
        """See `Ops.angles`."""
        return rows.angles(positions, frequencies, gain, self.card)

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
        return rows.qk_norm_rope_store_kv(qkv, heads, kv, batch, angles, norms, self.card, gated=gated)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """See `Ops.sigmoid_mul`."""
        return rows.sigmoid_mul(x, gate, self.card)

    def norm_rope_store_latent(
        self, q: Tensor, compressed: Tensor, kv: LayerKV, batch: RaggedBatch, angles: Angles, norm: Norm
    ) -> Tensor:
        """See `Ops.norm_rope_store_latent`."""
        return latent.norm_rope_store_latent(q, compressed, kv, batch, angles, norm, self.card)

    def heads_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `Ops.heads_linear`."""
        return latent.heads_linear(x, weight, self.heads_config(x, weight), self.card)

    def heads_config(self, x: Tensor, weight: Tensor) -> GemmConfig:
        """How products by head are tiled."""
        if x.dtype is torch.float32:
            return latent.EXACT_HEAD_TILE
        return latent.heads_config(len(x), weight.shape[2])

    def gated_delta(self, x: DeltaInputs, weights: DeltaWeights, state: LayerState, batch: RaggedBatch) -> Tensor:
        """See `Ops.gated_delta`. No span may read a slot that another writes."""
        return recurrent.gated_delta(x, weights, state, self.prepare(batch), self.few, self.card)

    def selective_scan(self, x: ScanInputs, weights: ScanWeights, state: LayerState, batch: RaggedBatch) -> Tensor:
        """See `Ops.selective_scan`. No span may read a slot that another writes."""
        return recurrent.selective_scan(x, weights, state, self.prepare(batch), self.few, self.card)

    def store_index_key(self, key: Tensor, kv: LayerKV, batch: RaggedBatch, angles: Angles, norm: Norm) -> None:
        """See `Ops.store_index_key`."""
        indexer.store_index_key(key, kv, batch, angles, norm, self.card)

    def choose_positions(
        self, q: Tensor, weights: Tensor, kv: LayerKV, batch: RaggedBatch, angles: Angles, count: int
    ) -> Tensor:
        """See `Ops.choose_positions`."""
        return indexer.choose_positions(q, weights, kv, self.prepare(batch), angles, count, self.card)

    def latent_attention(
        self,
        q: Tensor,
        rotated: Tensor,
        kv: LayerKV,
        batch: RaggedBatch,
        scale: float,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """See `Ops.latent_attention`."""
        planned = self.prepare(batch)
        if chosen is not None:
            return indexer.attend_chosen(q, rotated, kv, planned, chosen, scale, self.card)
        return attention(q, kv, planned, Scores(scale), self.card, rotated=rotated)

    def attention(self, q: Tensor, kv: LayerKV, batch: RaggedBatch, how: Scores) -> Tensor:
        """See `Ops.attention`."""
        planned = self.prepare(batch)
        plain = how.is_causal(batch) and min(how.window, how.chunk) >= batch.max_kv
        plain = plain and not how.soft_cap and how.sinks is None
        long, longest, own = NO_LONG_SPANS, UNLIMITED, False
        if batch.long_spans.spans:
            own = span_attention.takes(q, kv, batch, how, self.card)
            if own or (plain and self.dense is not None and serves(q)):
                long, longest = batch.long_spans, LONG
        if long.alone:
            out = torch.empty_like(q)
        else:
            begun = cascade_attention(q, kv, planned, how, self.card)
            out = attention(q, kv, planned, how, self.card, begun, longest)
        for span in long.spans:
            if own:
                span_attention.attend_span(out, q, kv, batch, span, how, self.card)
                continue
            assert self.dense is not None
            attend_long(out, q, kv, batch, span, how.scale, self.dense, self.card)
        return out


RESTORED, EXACT = GemmConfig(64, 64, 64, 4, 3), GemmConfig(16, 32, 64, 4, 3)
"""Of matrices restored on the way, and of any in float32, which takes more registers."""

LEAST_LIBRARY_ROWS = 128
"""From which on the library's products were faster than `invariant_linear` (H100, 28,672 outputs)."""


class BatchInvariantTritonOps(TritonOps):
    """`Ops` whose launches do not depend on the batch."""

    few = UNLIMITED

    def __init__(self, device: torch.device | str = "cuda", *, dependent: bool = True) -> None:
        super().__init__(device, dependent=dependent, rounds_float8=False)
        self.card = replace(self.card.without_fusion(), sms=0)
        self.dense = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        """See `Ops.linear`."""
        if x.dtype is torch.float32:
            return gemv.gemv_linear(x, weight, bias, EXACT, self.card, gate)
        runs = invariant_gemm.runs_of(len(weight) // num_parts(gate), x.shape[-1], num_parts(gate) == 2)[1]
        way = self.gemm.usual if runs > 1 else self.gemm.algorithm(x, weight, bias)
        if way is self.gemm.usual:
            return invariant_gemm.invariant_linear(x, weight, bias, self.card, self.arrived, gate)
        return self.apply_gate(multiplied(way, x, weight, bias), gate)

    def make_gemm(self, library: CublasLt | None) -> GemmAutotuner:
        """See `TritonOps.make_gemm`. The library's products of one run, as far as they have the same bits."""
        usual = invariant_gemm.OneRun(self.card, self.arrived)
        same = None if library is None else SameBits(library, usual, LEAST_LIBRARY_ROWS, self.arrived.device)
        return GemmAutotuner(same, on_the_card, usual)

    def fused_linear(self, x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, gate: Gate) -> Tensor:
        """As `linear`, dequantized on the way."""
        return quantized_gemm.quantized_linear(x, matrix, bias, config_for(x, RESTORED), self.card, self.arrived, gate)

    def integer_linear(self, x: Tensor, matrix: IntegerMatrix, bias: Tensor | None, gate: Gate) -> Tensor:
        """As `linear`, dequantized on the way."""
        how = config_for(x, integer_gemm.ANY_BATCH)
        return integer_gemm.integer_linear(x, matrix, bias, how, self.card, self.arrived, gate)

    def combine_experts(self, made: Tensor, weights: Tensor) -> Tensor:
        """See `Ops.combine_experts`."""
        return combine_experts_in_order(made, weights)

    def normalize(self, weights: Tensor, floor: float = 0.0) -> Tensor:
        """Add up a row's weights in order."""
        return weights / in_order(weights.unbind(1))[:, None].clamp(min=floor)

    def router_config(self, tokens: int, weight: Tensor) -> GemmConfig:
        """The same for any number of tokens."""
        return mixture.FIXED_ROUTER

    def heads_config(self, x: Tensor, weight: Tensor) -> GemmConfig:
        """The same for any number of tokens."""
        return latent.EXACT_HEAD_TILE if x.dtype is torch.float32 else latent.HEAD_TILE

    def expert_config(self, routing: Routing, down: Tensor) -> mixture.ExpertConfig:
        """The same for any number of tokens."""
        return mixture.SMALL if down.dtype is torch.float32 else mixture.FIXED

    def quantized_expert_config(
        self, routing: Routing, x: Tensor, gate_up: QuantizedMatrix, down: QuantizedMatrix
    ) -> mixture.ExpertConfig:
        """The same for any number of tokens."""
        return mixture.SMALL if x.dtype is torch.float32 else mixture.FIXED

    def integer_expert_config(
        self, routing: Routing, x: Tensor, gate_up: IntegerMatrix, down: IntegerMatrix
    ) -> integer_experts.IntegerExpertConfig:
        """The same for any number of tokens."""
        return integer_experts.SMALL if x.dtype is torch.float32 else integer_experts.FIXED


def config_for(x: Tensor, usual: GemmConfig) -> GemmConfig:
    """`usual`, or EXACT for float32."""
    return EXACT if x.dtype is torch.float32 else usual
