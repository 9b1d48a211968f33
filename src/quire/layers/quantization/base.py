"""Slots for checkpoint tensors, matrices, the interface of their storage; and storage of unquantized matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from quire.ops.base import Ops
from quire.ops.operands import AnyMatrix, Gate, Int8Matrix, Norm, NormedRows, Projection
from quire.ops.panels import PanelMatrix
from quire.ops.quantized import dequantize
from quire.ops.ragged import RaggedBatch


class WeightBuffer(Protocol):
    """Memory that a slot is part of. Both methods are called from several threads."""

    def acquire(self, target: Tensor) -> Tensor:
        """Memory for the numbers of `target`, which are about to be written."""

    def release(self, target: Tensor) -> None:
        """The numbers of `target` have been written."""


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Where one checkpoint tensor goes: `target` takes its part `shard`, transposed if `transposed`.

    shape: of the whole tensor in the checkpoint; with `ignore_unit_dims`, dimensions of size 1 do not count.
    stored_dtype: the only dtype that it may have there; None for any floating-point one of two bytes or more. mean and
    std: of the random init. shift: is added while copying. buffer: of which `target`, a meta tensor, is part; None: it
    has memory from the start.
    """

    name: str
    shape: tuple[int, ...]
    shard: tuple[slice, ...]
    target: Tensor
    transposed: bool = False
    mean: float = 0.0
    std: float = 0.02
    shift: float = 0.0
    stored_dtype: torch.dtype | None = None
    ignore_unit_dims: bool = False
    buffer: WeightBuffer | None = None

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the checkpoint's tensor may have this shape."""
        if not self.ignore_unit_dims:
            return shape == self.shape
        return [size for size in shape if size != 1] == [size for size in self.shape if size != 1]

    def accepts(self, dtype: torch.dtype) -> bool:
        """Whether the checkpoint's tensor may be of this dtype."""
        return dtype is self.stored_dtype if self.stored_dtype else dtype.is_floating_point and dtype.itemsize > 1

    @property
    def is_direct_copy(self) -> bool:
        """Whether the kept numbers are those of the shard, in the same order."""
        return not (self.transposed or self.ignore_unit_dims or self.shift)

    def copy_from(self, cut: Tensor) -> None:
        """Fill from the shard of the checkpoint's tensor; any floating-point dtype."""
        if self.ignore_unit_dims:
            cut = cut.reshape(self.target.shape)

        def write(into: Tensor) -> None:
            into.copy_(cut.t() if self.transposed else cut)
            if self.shift:
                into.add_(self.shift)

        self.fill(write)

    def fill(self, write: Callable[[Tensor], object]) -> None:
        """Let `write` fill the target."""
        if self.buffer is None:
            write(self.target)
            return
        write(self.buffer.acquire(self.target))
        self.buffer.release(self.target)

    def split(self, most: int) -> Iterator[WeightSlot]:
        """The same as slots of about `most` numbers each, divided along the checkpoint's first dimension."""
        if self.ignore_unit_dims or not self.shard or self.target.numel() <= most:
            yield self
            return
        rows, _, _ = self.shard[0].indices(self.shape[0])
        count = self.target.shape[-1 if self.transposed else 0]
        step = max(1, most * count // self.target.numel())
        for at in range(0, count, step):
            own = slice(at, min(count, at + step))
            into = self.target[:, own] if self.transposed else self.target[own]
            yield replace(self, shard=(slice(rows + own.start, rows + own.stop), *self.shard[1:]), target=into)


class MatrixPart(NamedTuple):
    """One checkpoint matrix of a fused one: its name, its rows in the checkpoint, those that this rank keeps."""

    name: str
    rows: int
    shard: slice


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer's matrix as a format sees it: parts one below the other, [sum of rows, columns].

    shard: the columns that this rank keeps. adds_bias: whether this rank adds the bias. transposed: the checkpoint has
    [columns, rows] (GPT-2). keep_precision: small or decisive (a head, a router): not quantized unless the checkpoint
    is.
    """

    parts: tuple[MatrixPart, ...]
    columns: int
    shard: slice
    dtype: torch.dtype
    device: torch.device
    bias: bool = False
    adds_bias: bool = True
    transposed: bool = False
    keep_precision: bool = False

    @property
    def local_shape(self) -> tuple[int, int]:
        """Rows and columns on this rank."""
        return sum(p.shard.stop - p.shard.start for p in self.parts), self.shard.stop - self.shard.start


class WeightStorage(Protocol):
    """One matrix in its format."""

    matrix: Matrix

    def slots(self) -> list[WeightSlot]:
        """Slots of every checkpoint tensor that it is made of."""

    def finalize(self) -> None:
        """Every slot is filled: convert to the final form."""

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """x [T, columns] -> [T, rows], or with a gate [T, rows / 2]."""

    @property
    def quantized(self) -> QuantizedWeight | None:
        """After `finalize`, the quantized form, if there is one."""


class TableStorage(WeightStorage, Protocol):
    """A matrix that is an embedding's table, too."""

    def rows(self, tokens: Tensor) -> Tensor:
        """Rows number `tokens` [T], in the model's dtype."""


class Packable(Protocol):
    """A matrix that may be packed after the model is ready."""

    @property
    def packed(self) -> bool:
        """Whether it is."""

    @property
    def nbytes(self) -> int:
        """Bytes that packing it takes, at most."""

    def pack(self) -> None:
        """Pack it, once. Called from any thread."""


class Layout(Protocol):
    """How a checkpoint stores a quantized matrix. unit: columns, and rows, that a rank's part has a multiple of."""

    @property
    def unit(self) -> int:
        """See above."""

    def store(self, matrix: Matrix, ops: Ops) -> WeightStorage:
        """The storage of a matrix in this layout. Raises InvalidModel for a matrix that it cannot hold."""


class Unpacked(Protocol):
    """Where the numbers of a matrix are until they are packed."""

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrix."""

    def pack(self) -> None:
        """Fill the matrix. Called from another thread than the other methods, once."""

    def apply(self, x: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
        """As `WeightStorage.apply`."""

    def rows(self, which: Tensor) -> PanelMatrix:
        """Rows number `which` [T] as a matrix, until the next call."""


@dataclass(slots=True, eq=False)
class QuantizedWeight:
    """The final form of a quantized matrix.

    activations: each token is rounded to int8 too. exact: activations are not rounded, in spite of that, nor to float8,
    see `Ops.unrounded`: the reference of the quality check. source: what the matrix is still to be packed from, and is
    read from until then; None: it is packed.
    """

    ops: Ops
    matrix: AnyMatrix
    bias: Tensor | None
    activations: bool = False
    exact: bool = False
    source: Unpacked | None = None

    @property
    def rounds(self) -> bool:
        """Whether activations are rounded, of many tokens at least."""
        return self.activations or self.ops.rounds(self.matrix)

    @property
    def is_product(self) -> bool:
        """Whether `apply` is `Ops.quantized_linear`."""
        return not self.activations and not self.exact and self.source is None

    def add_norm(
        self, x: Tensor, residual: Tensor, norm: Norm, scale: float, batch: RaggedBatch | None
    ) -> tuple[Tensor | NormedRows, Tensor]:
        """See `Ops.add_norm_rounded`."""
        return self.ops.add_norm_rounded(x, residual, norm, self.matrix, scale)

    def multiply_normed(self, x: NormedRows, gate: Gate = "") -> Tensor:
        """As `apply`, of what `Ops.add_norm_rounded` has made for the matrix."""
        return self.ops.multiply_normed(x, self.matrix, self.bias, gate)

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return self.matrix.outputs

    @property
    def packed(self) -> bool:
        """See `Packable`."""
        return self.source is None

    @property
    def nbytes(self) -> int:
        """See `Packable`."""
        return 0 if self.source is None else self.source.nbytes

    def pack(self) -> None:
        """Pack the matrix where that is still to be done."""
        if self.source is not None:
            self.source.pack()
            self.source = None

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """As `WeightStorage.apply`."""
        if (source := self.source) is not None:
            return source.apply(x, self.bias, gate)
        if not self.activations:
            ops = self.ops.unrounded() if self.exact else self.ops
            return ops.quantized_linear(x, self.matrix, self.bias, gate)
        if self.exact:
            return self.ops.linear(x, self.dequantize().to(x.dtype), self.bias, gate)
        return self.ops.rounded_linear(x, cast(Int8Matrix, self.matrix), self.bias, gate)

    @property
    def projection(self) -> Projection | None:
        """What a `Decoder` multiplies by; None while it is exact where it is not, and until it is packed."""
        if self.source is not None or (self.activations and self.exact):
            return None
        return Projection(self.matrix, self.bias, self.activations)

    def dequantize(self, rows: slice = slice(None)) -> Tensor:
        """The values that it represents, [rows, columns] float32."""
        if (source := self.source) is not None:
            return dequantize(source.rows(torch.arange(self.rows)[rows]))
        return dequantize(self.matrix.rows(rows))


def bias_of(matrix: Matrix) -> Tensor | None:
    """A tensor for the biases of the parts, one after the other; zeros on ranks that add none."""
    return torch.zeros(matrix.local_shape[0], dtype=matrix.dtype, device=matrix.device) if matrix.bias else None


def bias_slots(matrix: Matrix, bias: Tensor | None) -> list[WeightSlot]:
    """Slots of the parts' biases."""
    if bias is None:
        return []
    places, row = list[WeightSlot](), 0
    for name, rows, cut in matrix.parts:
        own = slice(row, row + cut.stop - cut.start)
        row = own.stop
        kept, into = (cut, bias[own]) if matrix.adds_bias else (slice(0, 0), bias[:0])
        places.append(WeightSlot(f"{name}.bias", (rows,), (kept,), into, std=0.1))
    return places


Format = Callable[[Matrix, Ops, Tensor | None], WeightStorage]
"""Creates a matrix's storage. A tensor given (of a tied head) is the matrix, which the embedding fills."""


@runtime_checkable
class StoredFormat(Protocol):
    """A format that keeps matrices as a checkpoint stores them, and others in `plain`. unit: see `Layout`."""

    plain: Format

    @property
    def unit(self) -> int:
        """See above."""

    def keeps(self, experts: Sequence[Sequence[MatrixPart]], cut: slice) -> bool:
        """Whether matrices of experts, each of these parts, are kept as stored; columns `cut` of them are needed."""

    def renamed(self, prefixes: Mapping[str, str]) -> StoredFormat:
        """The same for a model that knows names which begin with a key of `prefixes` by ones with its value."""


def weight_slot(
    matrix: Matrix, part: MatrixPart, kept: slice, target: Tensor, buffer: WeightBuffer | None = None
) -> WeightSlot:
    """The slot of rows `kept` of an unquantized part."""
    shape, cuts = (part.rows, matrix.columns), (kept, matrix.shard)
    if matrix.transposed:
        shape, cuts = shape[::-1], cuts[::-1]
    std = matrix.columns**-0.5
    return WeightSlot(f"{part.name}.weight", shape, cuts, target, matrix.transposed, std=std, buffer=buffer)


class Plain:
    """Unquantized values, one row per output, parts one below the other."""

    quantized: QuantizedWeight | None = None

    def __init__(self, matrix: Matrix, ops: Ops, tied_weight: Tensor | None = None) -> None:
        rows, columns = matrix.local_shape
        self.matrix = matrix
        self.ops = ops
        self.tied_weight = tied_weight is not None
        empty = (
            torch.empty(rows, columns, dtype=matrix.dtype, device=matrix.device) if tied_weight is None else tied_weight
        )
        self.weight = empty
        self.bias = bias_of(matrix)

    def slots(self) -> list[WeightSlot]:
        """One slot for each part, and for each bias."""
        matrix, places, row = self.matrix, list[WeightSlot](), 0
        biases = bias_slots(matrix, self.bias)
        for i, part in enumerate(matrix.parts):
            own = slice(row, row + part.shard.stop - part.shard.start)
            row = own.stop
            if not self.tied_weight:
                places.append(weight_slot(matrix, part, part.shard, self.weight[own]))
            places += biases[i : i + 1]
        return places

    def finalize(self) -> None:
        """Nothing to convert."""
        return

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """As `WeightStorage.apply`."""
        return self.ops.linear(x, self.weight, self.bias, gate)
