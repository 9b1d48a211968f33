"""`NativeOps`: the CPU's operations by the library of kernels, what it does not have by torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from itertools import repeat
from typing import cast

import torch
from torch import Tensor

from quire.ops import integer, panels
from quire.ops.batch_invariant import BatchInvariantOps
from quire.ops.huge_pages import HugePages
from quire.ops.integer import integers_of
from quire.ops.matmul import in_tiles
from quire.ops.native.call import (
    FLOATS,
    GATES,
    MOST_DIM,
    MOST_KEY_DIM,
    address,
    attention_call,
    by_heads,
    handle_of,
    norm_call,
    reads,
    rope_call,
)
from quire.ops.native.decoder import NativeDecoder, is_supported
from quire.ops.native.library import LEVELS, CLookup, load, team_functions
from quire.ops.native.pack import (
    BLOCK_TYPES,
    TILED_BLOCK_TYPES,
    empty_blocks,
    float8_panels,
    in_panels,
    int4_panels,
    int8_panels,
    write_blocks,
)
from quire.ops.operands import (
    Angles,
    AnyMatrix,
    BlockPanels,
    Decoder,
    DecoderLayer,
    Gate,
    Int8Matrix,
    IntegerMatrix,
    MixedMatrix,
    Norm,
    Norms,
    QuantizedMatrix,
    Scores,
)
from quire.ops.paged_attention import PagedAttentionMetadata, visible
from quire.ops.panels import PANEL_ROWS, PanelMatrix, Zeros
from quire.ops.quantized import E4M3
from quire.ops.ragged import LayerKV, RaggedBatch, without_gates
from quire.ops.reference import ReferenceOps, weigh
from quire.types import UNLIMITED

WORTH_THREADS = 1 << 14
"""Numbers below which a second thread costs more than it computes."""


class NativeOps(ReferenceOps):
    """`Ops` as `ReferenceOps`, up to rounding. level: of `LEVELS`. Raises RuntimeError where the library is missing."""

    multiplies_integers = True
    invariant = False
    """Whether a row's bits must not depend on how many rows there are, see `native/kernels.h`."""
    unit = panels.UNIT
    """What columns are padded to a multiple of."""
    many_queries = 8
    """Queries of a span above which torch attends: its products of many rows are faster than ours of few."""

    def __init__(self, level: str) -> None:
        library = load()
        if library is None:
            raise RuntimeError("the CPU kernels do not run on this machine")
        library.quire_start(LEVELS[level], *team_functions())
        self.library, self.level, self.memory = library, level, HugePages()
        self.calls = 0
        """Calls of kernels so far."""
        if level == "amx":
            self.unit = integer.UNIT  # tiles are multiplied four at a time
        self.block_types = TILED_BLOCK_TYPES if level == "amx" else BLOCK_TYPES
        self.many_queries = UNLIMITED if level in ("amx", "avx512_bf16") else self.many_queries

    def panel_linear(self, x: Tensor, matrix: PanelMatrix, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        """As `linear`, with a matrix in panels."""
        return self._product(x, matrix, bias, gate, rounded=False)

    def rounded_linear(self, x: Tensor, matrix: Int8Matrix, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        """See `Ops.rounded_linear`."""
        if not isinstance(matrix, PanelMatrix):
            return super().rounded_linear(x, matrix, bias, gate)
        return self._product(x, matrix, bias, gate, rounded=True)

    def _product(self, x: Tensor, matrix: PanelMatrix, bias: Tensor | None, gate: Gate, *, rounded: bool) -> Tensor:
        if matrix.order is not None:
            x = x.index_select(-1, matrix.order)
        if x.dtype not in FLOATS:
            return self._product(x.float(), matrix, bias, gate, rounded=rounded).to(x.dtype)
        width = matrix.outputs
        fused = gate in GATES and (not gate or width % (2 * PANEL_ROWS) == 0)
        if gate and fused:
            width //= 2
        x = x if x.stride(-1) == 1 else x.contiguous()
        y = x.new_empty(len(x), width)
        self.calls += 1
        self.library.quire_linear(
            handle_of(matrix),
            x.data_ptr(),
            y.data_ptr(),
            address(bias),
            len(x),
            x.stride(0),
            matrix.inputs,
            x.dtype is torch.bfloat16,
            bias is not None and bias.dtype is torch.bfloat16,
            GATES[gate] if fused else 0,
            self.invariant,
            rounded,
            torch.get_num_threads(),
        )
        return y if fused else self.apply_gate(y, gate)

    def arranged(self, matrix: AnyMatrix) -> AnyMatrix:
        """See `Ops.arranged`."""
        if isinstance(matrix, MixedMatrix):
            return MixedMatrix(tuple(self._in_panels(cast(IntegerMatrix, part)) for part in matrix.parts))
        if isinstance(matrix, QuantizedMatrix) and matrix.weight.dtype is E4M3:
            float8 = float8_panels(matrix, self.unit)
            return matrix if float8 is None else self._kept(float8)
        if isinstance(matrix, QuantizedMatrix) and matrix.is_int8_rows:
            return int8_panels(matrix.weight, matrix.scale, self.unit, self.memory.zeros)
        if isinstance(matrix, QuantizedMatrix) and (int4 := int4_panels(matrix, self.unit, self.memory.zeros)):
            return self._with_scales(int4)
        found = integers_of(matrix) if isinstance(matrix, QuantizedMatrix) else matrix
        return self._in_panels(found) if isinstance(found, IntegerMatrix) else matrix

    def arranged_int8(self, matrix: QuantizedMatrix) -> Int8Matrix:
        """See `Ops.arranged_int8`."""
        return int8_panels(matrix.weight, matrix.scale, self.unit, self.memory.zeros)

    def empty_panels(self, outputs: int, inputs: int, dtype: torch.dtype) -> PanelMatrix:
        """See `Ops.empty_panels`."""
        return PanelMatrix.empty(outputs, inputs, dtype, self.memory.zeros)

    def _in_panels(self, matrix: IntegerMatrix) -> PanelMatrix:
        return self._kept(in_panels(matrix, self.unit))

    def _kept(self, made: PanelMatrix) -> PanelMatrix:
        made.weight = self.memory.copy(made.weight)
        return self._with_scales(made)

    def _with_scales(self, made: PanelMatrix) -> PanelMatrix:
        copy = self.memory.copy
        made.scale, made.zero = (None if each is None else copy(each) for each in (made.scale, made.zero))
        return made

    def empty_blocks(self, kind: str, outputs: int, inputs: int, zeros: Zeros | None = None) -> BlockPanels | None:
        """See `Ops.empty_blocks`."""
        stored = self.block_types[kind]
        made = empty_blocks(stored, outputs, inputs, zeros or self.memory.zeros, self.unit)
        return BlockPanels(made, partial(write_blocks, self.library, made, stored))

    def integer_embedding(self, tokens: Tensor, matrix: IntegerMatrix | PanelMatrix, dtype: torch.dtype) -> Tensor:
        """See `Ops.integer_embedding`."""
        if not isinstance(matrix, PanelMatrix) or not matrix.has_integers or dtype not in FLOATS:
            return super().integer_embedding(tokens, matrix, dtype)
        which = tokens.to(torch.int64).contiguous()
        out = torch.empty(len(which), matrix.inputs, dtype=dtype)
        handle, half = handle_of(matrix), dtype is torch.bfloat16
        made = CLookup(ctypes.addressof(handle[0]), which.data_ptr(), out.data_ptr(), len(which), matrix.inputs, half)
        self.calls += 1
        self.library.quire_lookup(ctypes.byref(made), threads_for(out))
        return out

    def quantized_linear(self, x: Tensor, matrix: AnyMatrix, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        """See `Ops.quantized_linear`."""
        if isinstance(matrix, PanelMatrix):
            return self.panel_linear(x, matrix, bias, gate)
        if isinstance(matrix, MixedMatrix):
            widths = [part.outputs for part in matrix.parts]
            biases = repeat(None) if bias is None else torch.split(bias, widths)
            made = [self.quantized_linear(x, *each) for each in zip(matrix.parts, biases, strict=False)]
            return self.apply_gate(torch.cat(made, -1), gate)
        return super().quantized_linear(x, matrix, bias, gate)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See `Ops.norm`."""
        if x.dtype not in FLOATS or not x.is_contiguous() or not reads(norm):
            return super().norm(x, norm)
        out = torch.empty_like(x)
        self._norm(x, None, out, norm, 1.0)
        return out

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
        plain = norm is not None and gain is None and residual.is_contiguous() and residual.dtype in FLOATS
        x = self.norm(x, before) if before else x
        if norm is None or not plain or not x.is_contiguous() or not reads(norm):
            return super().add_norm(x, residual, norm, None, scale, gain)
        out = torch.empty_like(x)
        self._norm(x, residual, out, norm, scale)
        return out, residual

    def _norm(self, x: Tensor, residual: Tensor | None, out: Tensor, norm: Norm, scale: float) -> None:
        arguments = norm_call(x, residual, out, norm, x.numel() // x.shape[-1], scale)
        self.calls += 1
        self.library.quire_norm(ctypes.byref(arguments), threads_for(x))

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
        dim, dtype = kv.k.shape[3], qkv.dtype
        qkv = without_gates(qkv, heads * dim, heads) if gated else qkv
        groups = (qkv.shape[-1] // dim - heads) // 2
        if (
            dtype not in FLOATS
            or dim > MOST_DIM
            or kv.k.dtype is not dtype
            or kv.v.dtype is not dtype
            or angles.query_gain is not None
            or not qkv.is_contiguous()
            or (norms is not None and not by_heads(norms, dim))
        ):
            return super().qk_norm_rope_store_kv(qkv, heads, kv, batch, angles, norms)
        if groups:
            self.prepare(batch).clear(kv)
        q = qkv.new_empty(len(qkv), heads, dim)
        turned = angles.cos, angles.sin, angles.interleaved
        arguments = rope_call(qkv, q, kv, batch.slots, turned, norms, rows=len(qkv), width=qkv.shape[-1], heads=heads)
        self.calls += 1
        self.library.quire_rope(ctypes.byref(arguments), threads_for(qkv))
        return q

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
        """See `Ops.self_attention`. Prompts of one length are attended in one call, without K/V of their own."""
        paged = self.prepare(batch)
        if not how.ahead or how.chunk < UNLIMITED or not paged.is_whole or paged.last_visible is not None:
            return super().self_attention(qkv, heads, kv, batch, angles, how, norms)
        order = paged.order
        q, k, v = self.heads_of(qkv, heads, kv.k.shape[3], angles, norms)
        if order is not None:
            q, k, v = (x.index_select(0, order) for x in (q, k, v))
        out, start = q.new_empty(len(q), heads, v.shape[-1]), 0
        repeat = heads // k.shape[1]
        for group in paged.groups:
            spans, rows = len(group.kv_len), slice(start, start + len(group.kv_len) * group.n)
            shape = (spans, group.n, -1, q.shape[-1])
            query, key, value = (x[rows].view(shape).transpose(1, 2) for x in (q, k, v))
            if repeat > 1:
                key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
            sinks = None if how.sinks is None else how.sinks.view(-1, 1, 1)
            made = weigh(query, key, value, whole_mask(paged, group.n, how), how, sinks)
            out[rows].view(spans, group.n, heads, -1).copy_(made.transpose(1, 2))
            start = rows.stop
        return out if order is None else torch.empty_like(out).index_copy_(0, order, out)

    def decoder(self, layers: Sequence[DecoderLayer]) -> Decoder | None:
        """See `Ops.decoder`."""
        if not all(is_supported(layer) for layer in layers):
            return None

        def run(*arguments: object) -> None:
            self.calls += 1
            self.library.quire_run(*arguments)

        return NativeDecoder(run, layers, self.invariant, self.many_queries)

    def attention(self, q: Tensor, kv: LayerKV, batch: RaggedBatch, how: Scores) -> Tensor:
        """See `Ops.attention`."""
        paged = self.prepare(batch)
        # The kernel is causal.
        attends = how.is_causal(paged) and self._attends(q, kv)
        if not attends or all(group.n > self.many_queries for group in paged.groups):
            return super().attention(q, kv, paged, how)
        out = q.new_empty(*q.shape[:2], kv.v.shape[-1])
        for i, group in enumerate(paged.groups):
            if group.n > self.many_queries:
                out[group.rows] = self.attend(q[group.rows], kv, paged, i, how)
        spans = paged.query_start, paged.kv_len, paged.page_table
        arguments = attention_call(q, out, kv, spans, len(paged.kv_len), how, self.many_queries)
        self.calls += 1
        self.library.quire_attention(ctypes.byref(arguments), torch.get_num_threads())
        return out

    def _attends(self, q: Tensor, kv: LayerKV) -> bool:
        dims = q.shape[-1] == kv.k.shape[-1] and q.shape[-1] % PANEL_ROWS == 0 and kv.v.shape[-1] % PANEL_ROWS == 0
        dtypes = q.dtype in FLOATS and kv.k.dtype in FLOATS and kv.v.dtype is kv.k.dtype
        return dims and dtypes and q.shape[-1] <= MOST_KEY_DIM and q.stride(-1) == 1 and q.stride(1) == q.shape[-1]


class InvariantNativeOps(NativeOps, BatchInvariantOps):
    """`NativeOps`, batch-invariant: every way that does not depend on the batch is a kernel's, every other one that of
    `BatchInvariantOps`."""

    invariant = True
    many_queries = UNLIMITED

    def panel_linear(self, x: Tensor, matrix: PanelMatrix, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        """See `NativeOps.panel_linear`. Rows in float32 are multiplied TILE_ROWS at a time: only those in bfloat16 have
        one way whatever their number is."""
        product = partial(super().panel_linear, matrix=matrix, bias=bias, gate=gate)
        return product(x) if x.dtype is torch.bfloat16 else in_tiles(product, x)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See `Ops.norm`. A single row of a wider tensor counts as contiguous where several do not."""
        return super().norm(x.contiguous(), norm)

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
        return BatchInvariantOps.self_attention(self, qkv, heads, kv, batch, angles, how, norms)


def whole_mask(paged: PagedAttentionMetadata, n: int, how: Scores) -> Tensor | None:
    """[n, n] bool: which positions of a prompt of `n` tokens each sees; None where each sees all."""
    if how.sees_all(n, n):
        return None
    key = (n, how.window, how.ahead)
    if key not in paged.masks:
        at = torch.arange(n)
        paged.masks[key] = visible(at, at[:, None], how.window, how.chunk, at[:, None] + how.ahead)
    return paged.masks[key]


def threads_for(x: Tensor) -> int:
    """Threads worth having for so many numbers."""
    return 1 if x.numel() < WORTH_THREADS else torch.get_num_threads()
