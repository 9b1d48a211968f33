"""What operations read and return: matrices as they are stored, norms, scores, routers, and the inputs of layers.

Shape letters are those of `ragged`: T tokens fed, S spans, H query heads, G key/value heads, D head dim; F is the width
of an MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from quire.ops.panels import PanelMatrix
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.types import UNLIMITED


class Angles(NamedTuple):
    """cos and sin, float32 [T, r], of the angles by which each token's heads are rotated.

    interleaved: the pairs are neighbours, (2 i, 2 i + 1), rather than (i, i + r). query_gain: float32 [T], what each
    token's queries are multiplied by; None: 1.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    query_gain: Tensor | None = None


class BlockPanels(NamedTuple):
    """A matrix of GGUF's blocks, and what fills it.

    write: of rows from a number on, a multiple of 16, given as uint8 [rows, bytes of a row] on the CPU. Called from
    several threads, each for rows of its own.
    """

    matrix: PanelMatrix
    write: Callable[[int, Tensor], None]


Gate = Literal["", "silu", "gelu", "gelu_erf", "clamped", "relu", "relu2"]
"""What is done with the halves of a product: nothing (""), or `silu_mul`, `gelu_mul`, `gelu_erf_mul`, `relu_mul` or
`clamped_mul` of them; or `relu2` of the whole, which experts without a gate have."""


def num_parts(gate: Gate) -> int:
    """Outputs of a product for each number that a gate makes: 2 where one half multiplies the other."""
    return 1 if gate in ("", "relu2") else 2


CLAMP_ALPHA, CLAMP_LIMIT = 1.702, 7.0
"""See `Ops.clamped_mul`."""


class Norm(NamedTuple):
    """An RMS norm, x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), or, if `centred`, a layer norm,
    (x - mean) / sqrt(var + eps) * weight + bias, of each row.

    The weight may be float32 whatever x is (Gemma's 1 + w, which would lose precision if rounded).
    """

    weight: Tensor
    eps: float
    bias: Tensor | None = None
    centred: bool = False


class Norms(NamedTuple):
    """RMS norms of q and of k: with weights [D] head by head, with weights [H D] and [G D] all heads at once.

    after_rope: the normed heads are the rotated ones; head by head only. v_eps: that of v's heads, whose RMS norm has
    no weight and goes with norms head by head before rotation; None: v is not normed.
    """

    q: Norm
    k: Norm
    after_rope: bool = False
    v_eps: float | None = None


class XIELU(NamedTuple):
    """Trained numbers of an activation, float32 [1] each: see `Ops.xielu`."""

    positive: Tensor
    negative: Tensor
    slope: Tensor


class TopK(NamedTuple):
    """How a router's logits become experts and weights: each token uses the `used` experts of the largest scores.

    Scores are a float32 softmax over all experts, or with `sigmoid` the sigmoid of each logit. logit_scale: what logits
    are multiplied by before anything else. normalize: a token's weights are divided by their sum, or by `floor` where
    that is larger. groups: of as many neighbouring experts each, of which only those of the `used_groups` best groups
    may be used; a group is as good as its `group_best` best experts, one or two, together (DeepSeek-AI 2024). scale:
    what weights are multiplied by in the end. margin above 0: of the experts left, the best first, each is weighed by a
    softmax over the logits of those left that are below its own by at most `margin` times the larger of its logit and
    their absolute value (SparseMixer, Liu et al. 2023).
    """

    used: int
    normalize: bool
    sigmoid: bool = False
    groups: int = 1
    used_groups: int = 1
    scale: float = 1.0
    floor: float = 1e-20
    margin: float = 0.0
    group_best: int = 2
    logit_scale: float = 1.0


class VocabularyPart(NamedTuple):
    """What one of `size` ranks has of a vocabulary that they share out evenly: the tokens from `first` on, as many as
    others have. logits: hidden states [R, hidden] -> logits of these tokens. gather: every rank's tensor side by side
    along the last dimension, in rank order."""

    first: int
    size: int
    logits: Callable[[Tensor], Tensor]
    gather: Callable[[Tensor], Tensor]


class Routing(NamedTuple):
    """Which experts each token uses, the best first, int32 [T, K], and their weights, float32 [T, K]. Expert -1
    with weight 0: none.

    early: other kernels were launched since those that made it, so that the next may read it before they wait for the
    preceding one (`ops/triton/launch.py`).
    """

    experts: Tensor
    weights: Tensor
    early: bool = False


class RoutedRows(NamedTuple):
    """Rows [T, in] and the experts that they use."""

    rows: Tensor
    routing: Routing


class RouterWeights(NamedTuple):
    """A router: weight [E, in], bias [E], how it chooses, and the terms of `Ops.select_experts`."""

    weight: Tensor
    how: TopK
    correction: Tensor | None = None
    bias: Tensor | None = None
    gains: Tensor | None = None


class RoundedRows(NamedTuple):
    """Rows in eight bits [R, in], and what one step of each run of a row's numbers is, float32 [runs, R]. tokens:
    so many of the first rows, and no others, have numbers. dtype: of what is made of them."""

    rows: Tensor
    steps: Tensor
    tokens: int
    dtype: torch.dtype


class UnnormedRow(NamedTuple):
    """A row [1, in] of which the product that reads it makes the norm of row * scale + residual, and writes that sum to
    `total`."""

    row: Tensor
    residual: Tensor
    total: Tensor
    norm: Norm
    scale: float


NormedRows = RoundedRows | UnnormedRow
"""A norm as a product alone reads it, see `Ops.add_norm_rounded`."""


class ExpertBiases(NamedTuple):
    """Biases of the experts' products: gate_up [E, 2F], down [E, in]; None: none."""

    gate_up: Tensor | None = None
    down: Tensor | None = None


NO_BIASES = ExpertBiases()


class QuantizedMatrix(NamedTuple):
    """A matrix [out, in] in one of two layouts. scale: float32 [out, G], G scales per row.

    Scaled: weight [out, in] int8 or float8_e4m3, times its scale: column c has scale number (c + offset) // width. Of
    every `height` rows, from the first on, the scales are the same.
    Grouped (zero and groups are not None): weight uint8 [out, in], or [out, in / 2] of 4 bits, even columns in the low
    bits; (w - zero) scale with zero [out, G]. groups [in] int64: each column's group, which is the number of its scale
    and zero.
    """

    weight: Tensor
    scale: Tensor
    width: int = 1
    offset: int = 0
    zero: Tensor | None = None
    groups: Tensor | None = None
    height: int = 1

    @property
    def outputs(self) -> int:
        """Rows."""
        return len(self.weight)

    @property
    def is_int4(self) -> bool:
        """Whether it has two numbers per byte."""
        return self.groups is not None and len(self.groups) > self.weight.shape[1]

    @property
    def is_int8_rows(self) -> bool:
        """Whether it is int8 with a scale for each row."""
        return self.weight.dtype is torch.int8 and self.groups is None and self.scale.shape[1] == 1

    def rows(self, which: slice) -> QuantizedMatrix:
        """Some of its rows."""
        zero, whole = None if self.zero is None else self.zero[which], which.step in (None, 1)
        height = self.height if whole and (which.start or 0) % self.height == 0 else 1
        return self._replace(weight=self.weight[which], scale=self.scale[which], zero=zero, height=height)


class IntegerKind(IntEnum):
    """What the words of an `IntegerMatrix` hold for columns of a row, in their upper and their lower 16 bits.

    ZEROS: of a group, the scale, and the zero point in bfloat16: less -128 of 4 bits, as it is of signed bytes. PAIRS:
    the scales of columns 32 to 63 and 0 to 31 of 64; zero is 8 of 4 bits, and 0 of signed bytes. ROWS: one word for a
    row, its scale in float32. SUPERBLOCKS: of 64 columns four bytes, from the lowest bits on, which float16 numbers of
    256 columns are multiplied with: scale and minimum of columns 0 to 31 and of 32 to 63, or in groups of 16 their four
    signed scales. Minima are subtracted after scaling. FLOATS: the 4 bits are e2m1 numbers (a sign, two bits of
    exponent, one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6), and of 128 columns four bytes, from the lowest bits on, are
    exponents e of groups of 32, whose scales are 2^(e - 127) (MXFP4, OCP Microscaling Formats 2023); `half`: some e is
    above 128, so that sums are scaled instead of numbers.
    """

    ZEROS = 0
    SUPERBLOCKS = 1
    PAIRS = 2
    ROWS = 3
    FLOATS = 4


class IntegerMatrix(NamedTuple):
    """A matrix [out, in] of integers of 4 or 8 bits, a scale for every `group` columns of a row, as kernels read it.

    weight: uint8 [B, out, 32], block by block of columns. Of 4 bits, byte j of a row of block b has columns 64 b + j
    (low bits) and 64 b + 32 + j; of 8 bits it is column 32 b + j, signed.
    words: int32 [W, out], see `IntegerKind`; scales are float16, or bfloat16 where `half` is False. inputs: columns,
    without those of zeros by which they are padded. order: int64 [in], columns of x in the matrix's order; None: as
    they are. supers: int32 [S, out], what multiplies the scales (upper 16 bits) and minima (lower) of 256 columns of
    SUPERBLOCKS. See `ops.integer`.

    Of experts: the tensors of each, one after the other, with a dimension more in front. outputs and padded are those
    of each, and `rows` is not for them.
    """

    weight: Tensor
    words: Tensor
    inputs: int
    bits: int
    group: int
    kind: IntegerKind
    half: bool = True
    order: Tensor | None = None
    supers: Tensor | None = None

    @property
    def outputs(self) -> int:
        """Rows."""
        return self.weight.shape[-2]

    @property
    def padded(self) -> int:
        """Columns with padding, a multiple of 128."""
        return self.weight.shape[-3] * 256 // self.bits

    @property
    def nbytes(self) -> int:
        """Memory of numbers and scales."""
        return self.weight.nbytes + self.words.nbytes + (0 if self.supers is None else self.supers.nbytes)

    def rows(self, which: slice | Tensor) -> IntegerMatrix:
        """Some of its rows; a tensor [T] holds their numbers."""
        supers = None if self.supers is None else self.supers[:, which]
        return self._replace(weight=self.weight[:, which], words=self.words[:, which], supers=supers)

    def expert(self, number: int) -> IntegerMatrix:
        """One of the matrices of experts."""
        order, supers = (None if each is None else each[number] for each in (self.order, self.supers))
        return self._replace(weight=self.weight[number], words=self.words[number], order=order, supers=supers)


class MixedMatrix(NamedTuple):
    """Matrices of different layouts, one below the other."""

    parts: tuple[IntegerMatrix | PanelMatrix, ...]

    @property
    def outputs(self) -> int:
        """Rows."""
        return sum(part.outputs for part in self.parts)

    def rows(self, which: slice) -> MixedMatrix:
        """Some of its rows, in order."""
        some, first = list[IntegerMatrix | PanelMatrix](), 0
        wanted = range(*which.indices(self.outputs))
        for part in self.parts:
            begin, stop = (max(0, -(-(at - wanted.start) // wanted.step)) for at in (first, first + part.outputs))
            own = wanted[begin:stop]
            some += [part.rows(slice(own.start - first, own.stop - first, own.step))] if len(own) else []
            first += part.outputs
        return MixedMatrix(tuple(some))


AnyMatrix = QuantizedMatrix | IntegerMatrix | PanelMatrix | MixedMatrix
"""A quantized matrix."""

Int8Matrix = QuantizedMatrix | PanelMatrix
"""Of int8, with one scale a row."""

ExpertMatrices = QuantizedMatrix | IntegerMatrix
"""Of all experts of a layer: one below the other [E out, in], or see `IntegerMatrix`."""


class Scores(NamedTuple):
    """What attention does with scores: how they are made, and which of them count.

    scale: of products. A query at position p sees positions p - window + 1 to p, those of its own chunk of `chunk`
    positions (Meta 2025, Llama 4), and from p on to p + ahead and to its token's `RaggedBatch.last_visible`, as far as
    its span has them. ahead: 0 for causal attention; UNLIMITED for an encoder's, whose spans are whole prompts.
    soft_cap c above 0 makes scores c * tanh(score / c) (Gemma 2). sinks float32 [H]: one more score for each query of a
    head, which takes part in the softmax and has no value (OpenAI 2025, gpt-oss); None: -inf.
    """

    scale: float
    window: int = UNLIMITED
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    chunk: int = UNLIMITED
    ahead: int = 0

    def sees_all(self, longest: int, queries: int) -> bool:
        """Whether each of the last `queries` positions of spans of `longest` sees all of them."""
        return min(self.window, self.chunk) >= longest and queries <= self.ahead + 1

    def is_causal(self, batch: RaggedBatch) -> bool:
        """Whether no token sees a later one."""
        return not self.ahead and batch.last_visible is None

    def sink_of(self, groups: int, repeat: int = 1) -> Tensor | None:
        """The sinks of rows of queries, the heads of a K/V head one after the other: [G, R * repeat, 1]."""
        return None if self.sinks is None else self.sinks.view(groups, -1, 1).repeat_interleave(repeat, 1)


class Projection(NamedTuple):
    """A linear layer's matrix [out, in], and its bias [out], if any. rounded: it is for `Ops.rounded_linear`."""

    matrix: AnyMatrix
    bias: Tensor | None
    rounded: bool = False


class DecoderLayer(NamedTuple):
    """A layer of Llama's structure: x + out(attention(qkv(norm(x)))), and to that down(gate(gate_up(norm(it)))) added.

    heads: of queries, all of one size. norms: of queries and keys. scores: see `Scores`. attention_scale, mlp_scale:
    what the results of `out` and `down` are multiplied by where they are added.
    """

    attention_norm: Norm
    qkv: Projection
    heads: int
    norms: Norms | None
    scores: Scores
    out: Projection
    attention_scale: float
    mlp_norm: Norm
    gate_up: Projection
    gate: Gate
    down: Projection
    mlp_scale: float


class Decoder(Protocol):
    """Layers that run in one call."""

    def __call__(
        self, residual: Tensor, batch: RaggedBatch, kv: Sequence[LayerKV], angles: Sequence[Angles]
    ) -> tuple[Tensor, Tensor] | None:
        """residual [T, hidden] before the first layer, the K/V and angles of each layer that is to run, the first of
        those there are -> (output of the last of them, residual stream without it), as one by one they would make to
        the bit; None: this batch is not for it."""


class DeltaInputs(NamedTuple):
    """What a layer of the gated delta rule makes of the residual stream, for each of G heads of keys: what its query
    and key [T, G, K] and the values of its H / G heads [T, G, H / G V] are made of, gates of results, as many, and beta
    and rise [T, G, H / G], before their functions. Rows and heads may lie apart, the numbers of a head not."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    gate: Tensor
    beta: Tensor
    rise: Tensor

    def mixed(self) -> Tensor:
        """[T, C]: queries, keys and values one after the other; without a copy where they lie so."""
        parts = self.queries, self.keys, self.values
        first, at = self.queries, self.queries.storage_offset()
        for each in parts:
            _, heads, size = each.shape
            together = each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            if not together or (each.storage_offset(), each.stride()) != (at, (first.stride(0), size, 1)):
                return torch.cat([part.flatten(1) for part in parts], -1)
            at += heads * size
        return first.as_strided((len(first), at - first.storage_offset()), (first.stride(0), 1))


class DeltaWeights(NamedTuple):
    """Small weights of a layer of the gated delta rule: convolution [C, W], the last column for the newest input; of
    each head fading [H], the logarithm of how fast it fades, and rise [H], which is added to the inputs' (both
    float32); norm: of results, head by head."""

    convolution: Tensor
    fading: Tensor
    rise: Tensor
    norm: Norm


class ScanInputs(NamedTuple):
    """What a layer of Mamba 2 makes of the residual stream: gate [T, H V] of its results; mixed [T, C], what values,
    keys and queries are made of, in this order; step [T, H], before its function."""

    gate: Tensor
    mixed: Tensor
    step: Tensor


class ScanWeights(NamedTuple):
    """Small weights of a layer of Mamba 2: convolution [C, W] and bias [C], as of `DeltaWeights`; of each head fading
    [H], the logarithm of how fast it fades, rise [H], which is added to the steps, and skip [H], what values are
    multiplied by that are added to the results (all float32); norm: of gated results, group by group. step_limit: the
    least and the largest step."""

    convolution: Tensor
    bias: Tensor | None
    fading: Tensor
    rise: Tensor
    skip: Tensor
    norm: Norm
    step_limit: tuple[float, float]
