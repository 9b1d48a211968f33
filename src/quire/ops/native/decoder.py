"""All decoder layers of Llama's structure in one native call. Eight calls a layer have an overhead in Python and torch
that is as large as the kernels of a small model. The kernels are the same, and so are the results, to the bit."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from ctypes import Structure
from operator import is_

import torch
from torch import Tensor

from quire.ops.native.call import (
    FLOATS,
    GATES,
    MOST_DIM,
    MOST_KEY_DIM,
    attention_call,
    by_heads,
    handle_of,
    norm_call,
    reads,
    rope_call,
)
from quire.ops.native.library import KERNELS, CAttention, CCall, CLinear, CNorm, CRope
from quire.ops.operands import Angles, AnyMatrix, DecoderLayer, MixedMatrix, Norm, Projection
from quire.ops.paged_attention import PagedAttentionMetadata
from quire.ops.panels import PANEL_ROWS, PanelMatrix
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.types import UNLIMITED

MOST_ROWS = 64
"""Most tokens of a step that runs in one call. In larger steps the overhead of calls is negligible."""


class NativeDecoder:
    """See `Decoder`. Arguments, inputs and results are preallocated: each step copies its inputs there, and arguments
    are rebuilt when the number of rows or spans or the K/V tensors change.

    invariant: see `NativeOps`. many_queries: most queries of a span that the attention kernel takes.
    """

    def __init__(
        self, run: Callable[..., None], layers: Sequence[DecoderLayer], invariant: bool, many_queries: int
    ) -> None:
        self.run, self.layers, self.invariant, self.many_queries = run, layers, invariant, many_queries
        self.state: tuple[int, int, int] | None = None
        self.kv: Sequence[LayerKV] = ()
        """What the arguments are of, with `state`."""
        self.dtype: torch.dtype | None = None

    def _reserve(self, hidden: int, dtype: torch.dtype) -> None:
        layers, self.dtype, self.hidden, self.state = self.layers, dtype, hidden, None

        def zeros(width: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(MOST_ROWS, width, dtype=kind)

        with torch.inference_mode(False):  # inference tensors could not be written outside of it
            wide = max(layer.qkv.matrix.outputs for layer in layers)
            self.residual, self.x, self.normed = (zeros(hidden) for _ in range(3))
            self.qkv, self.q, self.mixed = (zeros(wide) for _ in range(3))
            self.gated = zeros(max(layer.gate_up.matrix.outputs // 2 for layer in layers))
            self.slots = torch.zeros(MOST_ROWS, dtype=torch.int64)
            self.query_start, self.kv_len = (torch.zeros(MOST_ROWS + 1, dtype=torch.int32) for _ in range(2))
            self.page_table = zeros(16, torch.int32)

    def __call__(
        self, residual: Tensor, batch: RaggedBatch, kv: Sequence[LayerKV], angles: Sequence[Angles]
    ) -> tuple[Tensor, Tensor] | None:
        """See `Decoder`."""
        rows, dtype = len(residual), residual.dtype
        fits = 0 < rows <= MOST_ROWS and batch.last_visible is None and batch.max_query <= self.many_queries
        # In float32 the kernel depends on the number of rows, see `InvariantNativeOps.panel_linear`.
        one_way = dtype is torch.bfloat16 or not self.invariant
        if not (fits and one_way and kv and dtype in FLOATS):
            return None
        if dtype is not self.dtype:
            self._reserve(residual.shape[1], dtype)
        assert isinstance(batch, PagedAttentionMetadata)
        distinct = list({id(each): each for each in angles}.values())
        if any(each.query_gain is not None for each in distinct) or not self._arrange(
            batch, rows, kv, angles, distinct
        ):
            return None
        if len(batch.begun):
            for pools in kv:
                batch.clear(pools)
        self.residual[:rows].copy_(residual)
        self.slots[:rows].copy_(batch.slots)
        self.query_start[: len(batch.query_start)].copy_(batch.query_start)
        self.kv_len[: len(batch.kv_len)].copy_(batch.kv_len)
        self.page_table[: len(batch.kv_len), : batch.page_table.shape[1]].copy_(batch.page_table)
        for (cos, sin), each in zip(self.angles, distinct, strict=True):
            cos[:rows].copy_(each.cos)
            sin[:rows].copy_(each.sin)
        self.run(ctypes.byref(self.calls), len(self.calls), torch.get_num_threads())
        return self.x[:rows], self.residual[:rows].clone()

    def _arrange(
        self,
        batch: PagedAttentionMetadata,
        rows: int,
        kv: Sequence[LayerKV],
        angles: Sequence[Angles],
        distinct: Sequence[Angles],
    ) -> bool:
        """Prepare the arguments for a batch. False if the kernels do not support it."""
        state = rows, len(batch.kv_len), batch.page_size
        same = state == self.state and len(kv) == len(self.kv) and all(map(is_, kv, self.kv))
        longer = batch.page_table.shape[1] > self.page_table.shape[1]
        if same and not longer:
            return True
        if not all(self._takes(layer, each) for layer, each in zip(self.layers, kv, strict=False)):
            return False
        self.state = None
        with torch.inference_mode(False):
            if longer:
                self.page_table = torch.zeros(MOST_ROWS, 2 * batch.page_table.shape[1], dtype=torch.int32)
            self.angles = [
                (torch.zeros(MOST_ROWS, each.cos.shape[-1]), torch.zeros(MOST_ROWS, each.cos.shape[-1]))
                for each in distinct
            ]
        number = {id(each): i for i, each in enumerate(distinct)}
        made, before = list[tuple[Structure, bool]](), 1.0
        for layer, own, turned in zip(self.layers, kv, angles, strict=False):
            place = self.angles[number[id(turned)]]
            made += self._layer(layer, own, (*place, turned.interleaved), rows, batch, before, not made)
            before = layer.mlp_scale
        self.arguments = [each for each, _ in made]
        self.calls = (CCall * len(made))(
            *(CCall(ctypes.addressof(each), KERNELS[type(each)], apart, 0) for each, apart in made)
        )
        self.state, self.kv = state, kv
        return True

    def _takes(self, layer: DecoderLayer, kv: LayerKV) -> bool:
        dim, wide = kv.k.shape[-1], kv.v.shape[-1]
        groups = (layer.qkv.matrix.outputs // dim - layer.heads) // 2
        return (
            kv.k.dtype is self.dtype
            and kv.v.dtype is self.dtype
            and groups in (0, kv.k.shape[1])
            and dim == wide
            and dim % PANEL_ROWS == 0
            and dim <= min(MOST_DIM, MOST_KEY_DIM)
            and (layer.norms is None or by_heads(layer.norms, dim))
        )

    def _layer(
        self,
        layer: DecoderLayer,
        kv: LayerKV,
        angles: tuple[Tensor, Tensor, bool],
        rows: int,
        batch: PagedAttentionMetadata,
        scale: float,
        first: bool,
    ) -> Iterator[tuple[Structure, bool]]:
        """Arguments of a layer's kernels, in order, and whether each may run concurrently with the one before."""
        if first:
            yield self._norm(self.residual, None, layer.attention_norm, rows, 1.0), False
        else:
            yield self._norm(self.x, self.residual, layer.attention_norm, rows, scale), False
        yield from self._products(layer.qkv, self.normed, self.qkv, rows)
        yield self._rope(layer, kv, angles, rows), False
        yield self._attention(layer, kv, batch), False
        yield from self._products(layer.out, self.mixed, self.x, rows)
        yield self._norm(self.x, self.residual, layer.mlp_norm, rows, layer.attention_scale), False
        yield from self._products(layer.gate_up, self.normed, self.gated, rows, GATES[layer.gate])
        yield from self._products(layer.down, self.gated, self.x, rows)

    def _norm(self, x: Tensor, residual: Tensor | None, norm: Norm, rows: int, scale: float) -> CNorm:
        return norm_call(x, residual, self.normed, norm, rows, scale)

    def _products(
        self, projection: Projection, x: Tensor, y: Tensor, rows: int, gate: int = 0
    ) -> Iterator[tuple[CLinear, bool]]:
        """Products of x with each part of a matrix, into adjacent columns of y. x and y are contiguous."""
        parts, bias = parts_of(projection.matrix), projection.bias
        whole = sum(part.outputs for part in parts) // (2 if gate else 1)
        half, at = self.dtype is torch.bfloat16, 0
        for part in parts:
            yield (
                CLinear(
                    ctypes.addressof(handle_of(part)[0]),
                    x.data_ptr(),
                    y.data_ptr() + at * y.itemsize,
                    None if bias is None else bias.data_ptr() + at * bias.itemsize,
                    rows,
                    part.inputs,
                    whole,
                    half,
                    half,
                    bias is not None and bias.dtype is torch.bfloat16,
                    gate,
                    part.inputs,
                    self.invariant,
                    projection.rounded,
                ),
                at > 0,
            )
            at += part.outputs

    def _rope(self, layer: DecoderLayer, kv: LayerKV, angles: tuple[Tensor, Tensor, bool], rows: int) -> CRope:
        width = layer.qkv.matrix.outputs
        return rope_call(
            self.qkv, self.q, kv, self.slots, angles, layer.norms, rows=rows, width=width, heads=layer.heads
        )

    def _attention(self, layer: DecoderLayer, kv: LayerKV, batch: PagedAttentionMetadata) -> CAttention:
        shape = MOST_ROWS, layer.heads, kv.k.shape[-1]
        # Buffers have the size of the widest layer; rows are contiguous.
        q, mixed = (each.view(-1)[: math.prod(shape)].view(shape) for each in (self.q, self.mixed))
        spans = self.query_start, self.kv_len, self.page_table
        return attention_call(q, mixed, kv, spans, len(batch.kv_len), layer.scores, UNLIMITED)


def parts_of(matrix: AnyMatrix) -> list[PanelMatrix]:
    """The panel matrices that a matrix consists of; empty if a part has another layout or reordered columns."""
    parts = matrix.parts if isinstance(matrix, MixedMatrix) else (matrix,)
    panels = [part for part in parts if isinstance(part, PanelMatrix) and part.order is None and part.which is None]
    return panels if len(panels) == len(parts) else []


def is_supported(layer: DecoderLayer) -> bool:
    """Whether the kernels support a layer."""
    qkv, out, gate_up, down = (parts_of(each.matrix) for each in (layer.qkv, layer.out, layer.gate_up, layer.down))
    return (
        all((qkv, out, gate_up, down))
        and len(gate_up) == 1
        and layer.gate in GATES
        and layer.gate != ""
        and gate_up[0].outputs % (2 * PANEL_ROWS) == 0
        and all(part.outputs % PANEL_ROWS == 0 for part in qkv[:-1])
        and not layer.scores.ahead
        and all(reads(norm) for norm in (layer.attention_norm, layer.mlp_norm))
    )
