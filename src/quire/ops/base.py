"""The operations that a model is made of, as one class that a device implements. Layers call these and nothing below.

Shape letters are those of `ragged`: T tokens fed, S spans, H query heads, G key/value heads, D head dim; F is the width
of an MLP. Results have the dtype of the first argument; sums are float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.matmul import by_expert, combine_experts, through_experts
from quire.ops.operands import (
    NO_BIASES,
    XIELU,
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
    TopK,
)
from quire.ops.panels import PanelMatrix, Zeros
from quire.ops.quantized import LEAST, dequantize, expert_matrices, integer_product, quantize_tokens, with_biases
from quire.ops.ragged import LayerKV, LayerState, RaggedBatch
from quire.ops.recurrent import gated_delta, selective_scan, with_padding


class Ops(ABC):
    """What a device can compute. `ReferenceOps` is the oracle that every other implementation is tested against.

    What is not abstract is here in plain torch; quantized products dequantize the matrix at each call.
    """

    multiplies_integers = False
    """Whether products with an `IntegerMatrix` read it as it is, so that it beats the same numbers as floats."""

    def multiply(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """product(x) of x [T, in], for formats that multiply by themselves: in tiles where rows must not depend on
        others, see `matmul.in_tiles`."""
        return product(x)

    def untuned(self) -> Self:
        """The same without choices that are measured in this process, so that every rank computes the same bits."""
        return self

    def rounds(self, matrix: AnyMatrix) -> bool:
        """Whether rows that are multiplied with a matrix are rounded to float8 as it is, if there are many."""
        return False

    def unrounded(self) -> Self:
        """The same, but for activations, which `rounds` is never true of."""
        return self

    @abstractmethod
    def prepare(self, batch: RaggedBatch) -> RaggedBatch:
        """The same batch with what every layer would otherwise compute again. Called once a forward.

        Optional: `attention` and `qk_norm_rope_store_kv` take any RaggedBatch. Its tensors must not change afterwards.
        """

    def embedding(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """tokens [T], weight [V, hidden] -> [T, hidden]."""
        return F.embedding(tokens, weight)

    def integer_embedding(self, tokens: Tensor, matrix: IntegerMatrix | PanelMatrix, dtype: torch.dtype) -> Tensor:
        """As `embedding`, with a matrix of integers, in dtype."""
        return dequantize(matrix.rows(tokens)).to(dtype)

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        """x [T, in], weight [out, in], bias [out] -> [T, out]; with a gate [T, out / 2], see `Gate`."""

    def arranged(self, matrix: AnyMatrix) -> AnyMatrix:
        """The same matrix as these products read it fastest. Called once, when it is loaded."""
        return matrix

    def empty_panels(self, outputs: int, inputs: int, dtype: torch.dtype) -> PanelMatrix:
        """An unquantized matrix in panels, to be filled."""
        return PanelMatrix.empty(outputs, inputs, dtype)

    def empty_blocks(self, kind: str, outputs: int, inputs: int, zeros: Zeros | None = None) -> BlockPanels | None:
        """A matrix of GGUF's blocks of a type, to be filled; None where blocks are repacked all at once, by
        `arranged`. zeros: allocates."""
        return None

    def quantized_linear(self, x: Tensor, matrix: AnyMatrix, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        """As `linear`, with a quantized matrix. Rows of x may be rounded, see `rounds`."""
        return self.linear(x, dequantize(matrix).to(x.dtype), bias, gate)

    def quantized_mlp(self, x: Tensor | NormedRows, gate_up: AnyMatrix, down: AnyMatrix, gate: Gate) -> Tensor:
        """`quantized_linear` with `gate_up` and its gate, and of that with `down`."""
        if not isinstance(x, Tensor):
            return self.quantized_linear(self.multiply_normed(x, gate_up, None, gate), down)
        return self.quantized_linear(self.quantized_linear(x, gate_up, None, gate), down)

    def add_norm_rounded(
        self, x: Tensor, residual: Tensor, norm: Norm, matrix: AnyMatrix, scale: float = 1.0
    ) -> tuple[Tensor | NormedRows, Tensor]:
        """`add_norm`, for `quantized_linear` with `matrix` alone: where that rounds its rows, they are rounded here.
        Where it norms a row itself, that is left to it: the sum is there once it is multiplied."""
        return self.add_norm(x, residual, norm, None, scale)

    def multiply_normed(self, x: NormedRows, matrix: AnyMatrix, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        """As `quantized_linear`, of what `add_norm_rounded` has made for this matrix."""
        assert isinstance(x, RoundedRows), "rows are normed by those who leave that to their products"
        numbers, steps = x.rows[: x.tokens].float(), x.steps[:, : x.tokens].t()
        width = matrix.width if isinstance(matrix, QuantizedMatrix) and steps.shape[1] > 1 else numbers.shape[1]
        exact = numbers * steps.repeat_interleave(width, 1)[:, : numbers.shape[1]]
        return self.quantized_linear(exact.to(x.dtype), matrix, bias, gate)

    def int8_linear(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, gate: Gate = ""
    ) -> Tensor:
        """As `linear`, but each token of x is rounded to int8 by its own largest number and multiplied by weight
        [out, in] int8 with integer sums; the result is scaled back. scale [out, 1] float32."""
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

    def rounded_linear(self, x: Tensor, matrix: Int8Matrix, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        """`int8_linear`, with a matrix of `arranged_int8`."""
        assert isinstance(matrix, QuantizedMatrix), "matrices in panels are multiplied by their own kernels"
        return self.int8_linear(x, matrix.weight, matrix.scale, bias, gate)

    def arranged_int8(self, matrix: QuantizedMatrix) -> Int8Matrix:
        """A matrix of int8 with one scale a row as `rounded_linear` reads it fastest. Called once, when loaded."""
        return matrix

    def combine_experts(self, made: Tensor, weights: Tensor) -> Tensor:
        """made [T, K, n], weights [T, K] float32 -> [T, n]: for each token the sum of its experts' outputs times their
        weights."""
        return combine_experts(made, weights)

    def select_experts(
        self, logits: Tensor, how: TopK, correction: Tensor | None = None, gains: Tensor | None = None
    ) -> Routing:
        """logits [T, E] -> for each token its experts and their weights, as `how` says.

        correction: float32 [E], added to the scores by which experts are chosen, and not to weights (Wang et al. 2024).
        gains: float32 [E], what the weights of each expert are multiplied by in the end (Gemma 4).
        """
        logits = logits.float() if how.logit_scale == 1.0 else logits.float() * how.logit_scale
        if how.margin:
            return apply_gains(sparse_mixer(logits, how), gains)
        scores = self.sigmoid(logits) if how.sigmoid else logits.softmax(-1)
        ranked = mask_other_groups(scores if correction is None else scores + correction, how)
        experts = ranked.topk(how.used, dim=-1).indices
        weights = scores.gather(-1, experts)
        if how.normalize:
            weights = self.normalize(weights, how.floor)
        return apply_gains(Routing(experts.int(), weights * how.scale), gains)

    def route(self, x: Tensor, router: RouterWeights, batch: RaggedBatch | None = None) -> Routing:
        """x [T, in] -> `select_experts` of its product with the router.

        batch: whose tokens x is of. Those in the null block only fill up the step, and may get no experts.
        """
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
        """(norm of the sum with its experts, sum): `add_norm` and `route`."""
        x, residual = self.add_norm(x, residual, norm, None, scale)
        return RoutedRows(x, self.route(x, router, batch)), residual

    def experts(
        self,
        x: Tensor,
        routing: Routing,
        gate_up: Tensor,
        down: Tensor,
        gate: Gate,
        biases: ExpertBiases = NO_BIASES,
    ) -> Tensor:
        """x [T, in], gate_up [E, 2F, in], down [E, in, F] -> [T, in]: each token through the MLPs of its experts, gated
        by any `Gate` but "", added up as by `combine_experts`. With relu2, gate_up is [E, F, in]."""

        def mlp(rows: Tensor, ends: Tensor) -> Tensor:
            inner = by_expert(rows, with_biases(gate_up, biases.gate_up), ends, lambda x, each: self.linear(x, *each))
            outer = with_biases(down, biases.down)
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
        """As `experts`, with quantized matrices. Of int8 with one scale a row are only those that `rounded_linear` is
        for."""
        count = len(down.weight) // (1 if isinstance(down, IntegerMatrix) else x.shape[1])

        def product(x: Tensor, each: tuple[AnyMatrix, Tensor | None]) -> Tensor:
            matrix, bias = each
            if isinstance(matrix, QuantizedMatrix) and matrix.is_int8_rows:
                return self.rounded_linear(x, matrix, bias)
            return self.quantized_linear(x, matrix, bias)

        def mlp(rows: Tensor, ends: Tensor) -> Tensor:
            first, last = (
                with_biases(expert_matrices(gate_up, count), biases.gate_up),
                with_biases(expert_matrices(down, count), biases.down),
            )
            return by_expert(self.apply_gate(by_expert(rows, first, ends, product), gate), last, ends, product)

        return through_experts(x, routing, count, mlp, self.combine_experts)

    def add_shared(self, routed: Tensor, shared: Tensor, logits: Tensor | None) -> Tensor:
        """routed + shared [T, n], which is first multiplied by the sigmoid of logits [T, 1], where there are any."""
        return routed + (shared if logits is None else shared * self.sigmoid(logits))

    @abstractmethod
    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """x normed over its last dimension."""

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
        """(norm of the sum, sum) of residual and x, which is first normed by `before` and multiplied by `scale`.

        gain: a tensor of one number that the sum is multiplied by. `residual` may be overwritten by the sum. Without a
        norm both results are the sum.
        """

    def add_norms(
        self,
        x: Tensor,
        residual: Tensor,
        norms: Sequence[Norm],
        before: Norm | None = None,
        scale: float = 1.0,
        gain: Tensor | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """(each norm of the sum, sum), as `add_norm`; of at least one norm."""
        first, total = self.add_norm(x, residual, norms[0], before, scale, gain)
        return [first, *(self.norm(total, each) for each in norms[1:])], total

    def sum_norms(self, x: Tensor, norm: Norm, other: Tensor, other_norm: Norm) -> Tensor:
        """The sum of x and `other`, each normed and rounded. `other` may be overwritten by it."""
        return self.add_norm(x, self.norm(other, other_norm), None, norm)[1]

    def apply_gate(self, y: Tensor, gate: Gate) -> Tensor:
        """y [T, out] itself, or what a gate makes of its halves, [T, out / 2]; relu2: [T, out]."""
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
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2F], gate first -> silu(gate) * up, [T, F] (SwiGLU, Shazeer 2020)."""

    @abstractmethod
    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2F], gate first -> gelu(gate) * up, [T, F], gelu by its tanh approximation (GeGLU)."""

    def gelu_erf_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2F], gate first -> gelu(gate) * up, [T, F], gelu by the error function (ModernBERT)."""
        gate, up = gate_up.chunk(2, -1)
        return self.gelu_erf(gate).mul_(up)

    def relu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2F], gate first -> max(gate, 0) * up, [T, F] (ReGLU, Shazeer 2020)."""
        gate, up = gate_up.chunk(2, -1)
        return self.relu(gate).mul_(up)

    @abstractmethod
    def clamped_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2F], gate first -> gate * sigmoid(a gate) * (up + 1), [T, F], of a gate that is at most b and an up
        between -b and b; a is CLAMP_ALPHA, b CLAMP_LIMIT (OpenAI 2025, gpt-oss)."""

    @abstractmethod
    def gelu(self, x: Tensor) -> Tensor:
        """gelu by its tanh approximation, as in GPT-2."""

    def gelu_erf(self, x: Tensor) -> Tensor:
        """gelu by the error function, x (1 + erf(x / sqrt(2))) / 2 (Hendrycks and Gimpel 2016). x may be
        overwritten."""
        return cast(Tensor, torch.ops.aten.gelu_(x))

    def relu(self, x: Tensor) -> Tensor:
        """max(x, 0)."""
        return torch.relu(x)

    @abstractmethod
    def relu2(self, x: Tensor) -> Tensor:
        """max(x, 0)^2 (So et al. 2021)."""

    @abstractmethod
    def xielu(self, x: Tensor, how: XIELU) -> Tensor:
        """p x^2 + b x of x above 0 and n (exp(x) - 1 - x) + b x of others, where b is the slope, p the softplus of
        `positive`, and n that of `negative` and b more (Huang and Schlag 2024)."""

    @abstractmethod
    def angles(self, positions: Tensor, frequencies: Tensor, gain: float = 1.0) -> tuple[Tensor, Tensor]:
        """positions [T], frequencies [r] float32, in radians per position -> cos and sin of their products, times
        gain."""

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
        """From the projection to attention: qkv [T, (H + 2 G) D] -> q [T, H, D]. Of q alone [T, H D], nothing is
        stored.

        With `norms`, q and k are normed, before they are rotated or after. Each pair of dimensions of each head of q
        and k is rotated by its angle (Su et al. 2021); dimensions from 2 r on are unchanged. k and v are written to the
        batch's slots, except those of the null block, which need not be written. gated: each head of q is followed by
        as many numbers, which are left out: qkv [T, (2 H + 2 G) D].
        """

    @abstractmethod
    def norm_rope_store_latent(
        self, q: Tensor, compressed: Tensor, kv: LayerKV, batch: RaggedBatch, angles: Angles, norm: Norm
    ) -> Tensor:
        """From the projections to `latent_attention`: q [T, H, N + R], compressed [T, C + R] -> [T, H, R].

        Each token's C latents are normed and written to the batch's slots of kv.v, the R numbers after them are rotated
        by its angles and written to those of kv.k. Of each query the last R numbers are rotated, and returned.
        """

    @abstractmethod
    def store_index_key(self, key: Tensor, kv: LayerKV, batch: RaggedBatch, angles: Angles, norm: Norm) -> None:
        """What an indexer chooses each token by, key [T, I]: normed, rotated, and written to the batch's slots of
        kv.index. Called after `norm_rope_store_latent`."""

    @abstractmethod
    def choose_positions(
        self, q: Tensor, weights: Tensor, kv: LayerKV, batch: RaggedBatch, angles: Angles, count: int
    ) -> Tensor:
        """The slots of the positions that each query attends to, int32 [T, count], in ascending order of position: of
        those up to its own the `count` of the largest scores, of equal ones the first. Rows of queries at positions
        below `count` are undefined: these see all (DeepSeek-AI 2025, DeepSeek-V3.2).

        q [T, J, I] is rotated here and may be overwritten, weights [T, J]. A score is the sum over J heads of weight
        times max(0, q k), of keys k of `store_index_key`, with this step's already written.
        """

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """x sigmoid(gate), both [T, H, D]. Rows and heads of `gate` may lie apart."""
        return (x / gate.float().neg().exp_().add_(1.0)).to(x.dtype)

    def gated_delta(self, x: DeltaInputs, weights: DeltaWeights, state: LayerState, batch: RaggedBatch) -> Tensor:
        """The gated delta rule (Yang et al. 2025; `ops/recurrent.py` has its formulas) -> [T, H V].

        Each span goes on from the state of its `batch.states.source`; states after tokens are written where
        `batch.states.target` says. Results are normed head by head, then multiplied by silu(gate).
        """
        return with_padding(gated_delta, x, weights, state, batch)

    def selective_scan(self, x: ScanInputs, weights: ScanWeights, state: LayerState, batch: RaggedBatch) -> Tensor:
        """The selective scan of Mamba 2 (Dao and Gu 2024; `ops/recurrent.py` has its formulas) -> [T, H V].

        States are read and written as by `gated_delta`. Results are multiplied by silu(gate), then normed group by
        group.
        """
        return with_padding(selective_scan, x, weights, state, batch)

    @abstractmethod
    def heads_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, H, n], weight [H, n, m] -> [T, H, m]: each head by its own matrix. Both may have any strides."""

    def segment_attention(
        self, qkv: Tensor, heads: int, lengths: Sequence[int], angles: Angles | None = None, scale: float = 0.0
    ) -> Tensor:
        """Attention without K/V blocks, in both directions: qkv [P, 3 H D] -> [P, H D], each row to those of its own
        segment. lengths: of the segments, one after the other. Heads are rotated by angles, if there are any. scale: of
        scores, 0 for 1 / sqrt(D)."""
        q, k, v = qkv.view(len(qkv), 3, heads, -1).unbind(1)
        if angles is not None:
            q, k = (rotate_halves(x, angles) for x in (q, k))
        scale = scale or q.shape[-1] ** -0.5
        segments = (torch.split(x.transpose(0, 1), list(lengths), 1) for x in (q, k, v))
        parts = [F.scaled_dot_product_attention(a, b, c, scale=scale) for a, b, c in zip(*segments, strict=True)]
        return torch.cat(parts, 1).transpose(0, 1).flatten(1)

    @abstractmethod
    def latent_attention(
        self,
        q: Tensor,
        rotated: Tensor,
        kv: LayerKV,
        batch: RaggedBatch,
        scale: float,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of q [T, H, C] and rotated [T, H, R] to latents, kv.v, and what was rotated of their tokens,
        kv.k, with this step's already written -> [T, H, C] (DeepSeek-AI 2024, DeepSeek-V2; its section 2.1.2 is how
        keys and values need not be made of the latents).

        A score is q times the latent and rotated times what was rotated; the latents are the values, too. chosen: what
        `choose_positions` returned; None: all positions.
        """

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
        """`qk_norm_rope_store_kv` and then `attention`: qkv [T, (H + 2 G) D] -> [T, H, D]. Where `how.ahead` is above 0
        nothing need be stored of spans that are whole prompts."""
        q = self.qk_norm_rope_store_kv(qkv, heads, kv, batch, angles, norms)
        return self.attention(q, kv, batch, how)

    def decoder(self, layers: Sequence[DecoderLayer]) -> Decoder | None:
        """What runs these layers in one call where batches are small; None: they are run one by one. Called once, when
        weights are in their final form."""
        return None

    @abstractmethod
    def attention(self, q: Tensor, kv: LayerKV, batch: RaggedBatch, how: Scores) -> Tensor:
        """Attention of q [T, H, D] over each span's own blocks, with this step's K/V already written -> [T, H, D].

        Query head h uses K/V head h // (H / G). What a query may not see, see `Scores`, never reaches its result,
        whatever it contains.
        """

    def sigmoid(self, x: Tensor) -> Tensor:
        """Of each number."""
        return x.sigmoid()

    def normalize(self, weights: Tensor, floor: float = 0.0) -> Tensor:
        """weights [T, K], each row divided by its sum, or by `floor` where that is larger."""
        return weights / weights.sum(-1, keepdim=True).clamp(min=floor)


def mask_other_groups(scores: Tensor, how: TopK) -> Tensor:
    """scores [T, E], -inf for experts outside the best groups, see `TopK`."""
    if how.groups == 1:
        return scores
    grouped = scores.view(len(scores), how.groups, -1)
    best = grouped.topk(how.group_best, dim=-1).values.sum(-1).topk(how.used_groups, dim=-1).indices
    outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, value=False)
    return grouped.masked_fill(outside[..., None], float("-inf")).view(scores.shape)


def sparse_mixer(logits: Tensor, how: TopK) -> Routing:
    """`select_experts` with a margin, see `TopK`."""
    experts, weights, left = list[Tensor](), list[Tensor](), logits
    for _ in range(how.used):
        best, number = left.max(-1, keepdim=True)
        near = best - left <= how.margin * torch.maximum(logits.abs(), best)
        experts.append(number)
        weights.append(left.masked_fill(~near, float("-inf")).softmax(-1).gather(-1, number))
        left = left.scatter(-1, number, float("-inf"))
    return Routing(torch.cat(experts, -1).int(), torch.cat(weights, -1) * how.scale)


def apply_gains(routing: Routing, gains: Tensor | None) -> Routing:
    """The routing with weights multiplied by their experts' gains, see `Ops.select_experts`."""
    return routing if gains is None else routing._replace(weights=routing.weights * gains[routing.experts])


def rotate_halves(x: Tensor, angles: Angles) -> Tensor:
    """x [P, H, D] with the pairs (i, i + D / 2) of each head rotated in float32."""
    first, second = x.float().chunk(2, -1)
    cos, sin = angles.cos[:, None], angles.sin[:, None]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1).to(x.dtype)
