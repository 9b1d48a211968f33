"""`python -m benchmarks.integers`: products with matrices of 4- and 8-bit integers, the fastest tiles on this card.

First the products as `TritonOps` chooses them are checked: all kinds, dtypes and numbers of rows. Then every candidate
is checked on random inputs, timed inside a captured graph, matrices cold, and checked again to the bit: what changes
between runs is a race. Then whole layers of products are timed, each by the fastest candidate, and as chosen now.

`--kind` names the kinds to do instead of AWQ in full: fewer candidates each, 1 to 64 rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
import torch
import triton
from torch import Tensor

from benchmarks.card import needed
from benchmarks.kernel_cases import MATRICES, copies, noise, relative
from benchmarks.kernels import READ, replayed
from quire.ops.base import Ops
from quire.ops.integer import dequantize_integers, pack_integers, pack_rows, pack_superblocks
from quire.ops.operands import Gate, IntegerMatrix, QuantizedMatrix
from quire.ops.reference import ReferenceOps
from quire.ops.triton.gemv import COUNTERS, GemmConfig
from quire.ops.triton.integer_gemm import dequantize, integer_gemm_config, integer_linear
from quire.ops.triton.integer_gemv import integer_gemv
from quire.ops.triton.integer_mma import MmaConfig, integer_mma
from quire.ops.triton.integer_row import RingConfig, integer_row
from quire.ops.triton.integer_stationary import MAX_ROWS, integer_stationary
from quire.ops.triton.integer_stationary import takes_matrix as stays_for
from quire.ops.triton.integer_tma import TmaConfig, integer_tma, takes_matrix
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from quire.ops.triton.precompile import Precompiler
from quire.ops.triton.rounded_gemm import round_rows, rounded_linear

KINDS = ("awq", "q4_k", "q8_0", "q4_0", "gptq 32", "gptq 64", "q5_k", "q6_k", "gptq 8 bits", "int8")
PRODUCTS = ("8b qkv", "8b o", "8b gate_up", "8b down")

CANDIDATES: dict[int, Sequence[tuple[int, int, int, int, int]]] = {
    8: (
        (16, 128, 4, 3, 8), (16, 128, 4, 4, 8), (16, 256, 4, 2, 8), (16, 64, 4, 6, 8), (32, 128, 8, 3, 8),
        (32, 128, 4, 3, 8), (32, 128, 4, 4, 4), (16, 128, 2, 4, 4), (16, 128, 4, 4, 4), (32, 256, 4, 2, 4),
        (64, 128, 4, 4, 2), (32, 128, 2, 4, 2), (32, 128, 4, 4, 2), (64, 128, 8, 4, 2), (64, 128, 4, 5, 1),
        (64, 128, 4, 4, 1), (64, 128, 4, 3, 1), (128, 128, 8, 4, 1), (32, 128, 2, 4, 1), (16, 256, 1, 3, 1),
        (64, 256, 4, 3, 1), (32, 256, 1, 3, 1), (64, 128, 2, 4, 1), (64, 128, 2, 6, 1), (64, 256, 2, 4, 1),
        (32, 256, 1, 5, 1),
    ),
    16: (
        (64, 128, 4, 4, 1), (64, 128, 4, 3, 1), (128, 128, 8, 4, 1), (128, 128, 4, 4, 1), (32, 128, 2, 4, 1),
        (64, 128, 2, 6, 1), (64, 128, 2, 4, 1), (64, 256, 2, 4, 1), (64, 256, 4, 4, 1), (32, 256, 1, 4, 1),
        (32, 256, 1, 3, 1), (16, 256, 1, 3, 1), (128, 128, 4, 3, 1),
    ),
    32: (
        (64, 128, 4, 3, 1), (64, 128, 4, 4, 1), (128, 128, 8, 4, 1), (128, 128, 8, 3, 1), (128, 128, 4, 4, 1),
        (64, 256, 2, 3, 1), (64, 256, 4, 3, 1), (32, 128, 2, 4, 1),
    ),
    64: (
        (64, 128, 4, 4, 1), (64, 128, 4, 3, 1), (128, 128, 8, 4, 1), (128, 128, 8, 3, 1), (128, 128, 4, 4, 1),
        (64, 128, 8, 4, 1), (32, 128, 2, 4, 1),
    ),
    128: ((64, 128, 4, 3, 1), (64, 128, 8, 3, 1), (128, 128, 8, 3, 1), (128, 64, 8, 4, 1)),
}  # fmt: skip
"""By columns of x of a tile: outputs, inputs, warps, stages and chunks. Few enough bytes of shared memory and registers
that all programs of a product, or nearly, run at the same time: two unequal turns of them cost twice."""

FEW: dict[int, Sequence[tuple[int, int, int, int, int]]] = {
    8: (
        (64, 128, 2, 6, 1), (64, 256, 2, 4, 1), (64, 128, 4, 4, 1), (32, 128, 2, 4, 1), (32, 256, 1, 4, 1),
        (16, 256, 1, 3, 1),
    ),
    16: ((64, 128, 2, 6, 1), (64, 256, 2, 4, 1), (64, 128, 4, 4, 1), (32, 128, 2, 4, 1), (32, 256, 1, 4, 1)),
    32: ((64, 128, 4, 3, 1), (64, 128, 4, 4, 1), (64, 64, 4, 4, 1), (32, 128, 2, 4, 1), (32, 64, 2, 4, 1)),
    64: ((64, 128, 4, 4, 1), (64, 128, 8, 4, 1), (64, 64, 4, 4, 1), (128, 128, 8, 3, 1), (32, 64, 2, 4, 1)),
}  # fmt: skip
"""As CANDIDATES, for the other kinds."""

FEW_ROWS = {8: (1, 4, 8), 16: (16,), 32: (32,), 64: (64,)}

W8A8: Sequence[GemmConfig] = (
    GemmConfig(8, 32, 256, 4, 4), GemmConfig(8, 16, 256, 2, 6), GemmConfig(8, 64, 256, 4, 4),
    GemmConfig(16, 32, 256, 4, 4), GemmConfig(16, 64, 256, 4, 4), GemmConfig(64, 64, 128, 4, 4),
    GemmConfig(64, 128, 128, 4, 4), GemmConfig(128, 128, 128, 8, 3), GemmConfig(128, 64, 128, 8, 3),
    GemmConfig(128, 128, 128, 4, 4), GemmConfig(256, 128, 128, 8, 3),
)  # fmt: skip
"""Tiles of products with int8 activations."""

IN_REGISTERS: dict[int, Sequence[tuple[int, int, int, int, int]]] = {
    8: ((64, 1, 256, 4, 2), (32, 2, 256, 4, 2), (64, 1, 512, 4, 2), (32, 1, 512, 2, 4), (64, 2, 256, 8, 2)),
    16: ((64, 1, 256, 4, 1), (64, 1, 256, 4, 2), (64, 1, 256, 4, 3), (32, 2, 256, 4, 2), (64, 2, 256, 8, 2)),
    32: ((64, 1, 256, 4, 1), (64, 1, 256, 4, 2), (32, 2, 128, 4, 2), (128, 1, 256, 8, 1)),
}
"""Tiles of `integer_mma` by rows: outputs, chunks, columns of a chunk, warps and steps ahead."""

COPIED: dict[int, Sequence[TmaConfig]] = {
    16: (TmaConfig(16, stages=6),),
    32: (TmaConfig(32), TmaConfig(32, stages=6)),
    64: (TmaConfig(64), TmaConfig(64, stages=4), TmaConfig(64, stages=6), TmaConfig(64, groups=2, registers=200)),
    128: (TmaConfig(64), TmaConfig(64, stages=6)),
    256: (TmaConfig(64),),
}
"""Tiles of `integer_tma` by rows."""

RINGED: dict[int, Sequence[RingConfig]] = {
    4: (
        RingConfig(32, 4, 2, 5, 8, 1), RingConfig(32, 4, 2, 5, 8, 2), RingConfig(32, 4, 2, 4, 8, 2),
        RingConfig(16, 8, 2, 4, 8, 2), RingConfig(32, 8, 2, 3, 16, 1),
    ),
    8: (RingConfig(32, 4, 2, 3, 8, 1), RingConfig(32, 4, 2, 3, 8, 2), RingConfig(16, 8, 2, 3, 8, 2)),
}  # fmt: skip
"""Tiles of `integer_row` by bits."""

MAX_SUMS = 130
"""Sums that a thread may have: more do not fit its registers."""

ROWS = {8: (1, 2, 4, 8), 16: (16, 12), 32: (32,), 64: (64,), 128: (128, 256)}
"""Rows that are timed with a tile."""

PROGRAMS = {8: (4.0, 8.0), 16: (3.0, 6.0), 32: (2.0, 4.0), 64: (0.2, 1.0, 2.0), 128: (0.2, 1.0, 2.0)}
"""About how many programs a multiprocessor gets: inputs are split until there are so many."""

AHEAD = (0, 512)
"""Inputs asked for before the wait, of each chunk."""

CHECKED = (1, 2, 3, 4, 5, 8, 12, 16, 17, 32, 33, 64, 65, 100, 300)
"""Rows of which products are checked."""


class Product(NamedTuple):
    """A kind and a shape, with copies of the matrix and its values in float32."""

    kind: str
    name: str
    gate: Gate
    matrices: Sequence[IntegerMatrix]
    exact: Tensor

    @property
    def bytes(self) -> int:
        """Of the matrix with its scales."""
        return self.matrices[0].nbytes


@dataclass(frozen=True, slots=True)
class Row:
    """error: ||got - want|| / ||want||, want in float32. us: of a product. same: whether a second run has equal
    bits."""

    kind: str
    name: str
    rows: int
    how: str
    us: float
    tb_s: float
    error: float
    same: bool


def made(kind: str, name: str, most: int = 64) -> Product:
    """A random matrix of a kind, with copies, at most so many."""
    outputs, inputs = MATRICES[name]
    first = superblocks(kind, outputs, inputs) if kind in ("q4_k", "q5_k", "q6_k") else integers(kind, outputs, inputs)
    others = [
        first._replace(
            weight=first.weight.clone(),
            words=first.words.clone(),
            supers=None if first.supers is None else first.supers.clone(),
        )
        for _ in range(copies(first.nbytes, most) - 1)
    ]
    gate: Gate = "silu" if "gate_up" in name else ""
    return Product(kind, name, gate, [first, *others], dequantize_integers(first))


def superblocks(kind: str, outputs: int, inputs: int) -> IntegerMatrix:
    """A random matrix of GGUF's K types."""
    group = 16 if kind == "q6_k" else 32
    supers = (torch.rand(outputs, inputs // 256, 2, device="cuda") + 0.5).div_(64 * 8 * inputs**0.5).half()
    scales = torch.randint(1, 64, (outputs, inputs // 16), device="cuda", dtype=torch.int16).to(torch.uint8)
    low, high = {"q4_k": (0, 16), "q5_k": (0, 32), "q6_k": (-32, 32)}[kind]
    numbers = torch.randint(low, high, (outputs, inputs), device="cuda", dtype=torch.int16)
    return pack_superblocks(numbers.to(torch.uint8 if kind == "q4_k" else torch.int8), group, scales, supers)


def integers(kind: str, outputs: int, inputs: int) -> IntegerMatrix:
    """A random matrix of another kind."""
    group = {"awq": 128, "gptq 64": 64, "gptq 8 bits": 128, "int8": inputs}.get(kind, 32)
    shape, count = (outputs, inputs), (outputs, inputs // group)
    scale = (torch.rand(count, device="cuda") * 0.5 + 0.5).div_(8 * inputs**0.5).half().float()
    high = 128 if kind in ("q8_0", "gptq 8 bits", "int8") else 16
    numbers = torch.randint(-high if high == 128 else 0, high, shape, device="cuda", dtype=torch.int16)
    numbers = numbers.to(torch.int8 if high == 128 else torch.uint8)
    if kind == "int8":
        return pack_rows(numbers, scale / 8)
    zero = None
    if kind == "awq" or kind.startswith("gptq"):
        zero = torch.randint(-8, 8, count, device="cuda") if high == 128 else torch.randint(4, 12, count, device="cuda")
    return pack_integers(numbers, group, scale / 8 if high == 128 else scale, zero=zero)


def configs(product: Product, tile: int, *, few: bool = False) -> Iterator[GemmConfig]:
    """Candidates with inputs split so that multiprocessors have enough to do; in chunks not at all, or in two."""
    matrix = product.matrices[0]
    outputs = matrix.outputs // (2 if product.gate else 1)
    seen = set()
    for height, inputs, warps, stages, chunks in (FEW if few else CANDIDATES)[tile]:
        if height * chunks * tile // (32 * warps) * (3 if product.gate else 2) > MAX_SUMS:
            continue
        tiles = -(-outputs // height)
        near = [min((1, 2, 4, 8, 16), key=lambda s: abs(s * tiles / 132 / wanted - 1)) for wanted in PROGRAMS[tile]]
        for splits in (1, 2) if chunks > 1 else near:
            runs = max(1, min(splits, matrix.inputs // (2 * inputs * chunks)))
            for ahead in AHEAD if tile <= 16 and splits in (1, near[-1]) and not few else (0,):
                how = GemmConfig(tile, height, inputs, warps, stages, ahead, runs, chunks)
                if how not in seen and tiles <= COUNTERS and ahead * runs * chunks <= matrix.inputs:
                    seen.add(how)
                    yield how


class Bench:
    """What is measured, until a deadline. seconds: from now on."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.ops = TritonOps("cuda")
        self.rows: list[Row] = []
        self.best: dict[tuple[str, str, int], tuple[float, GemmConfig]] = {}
        self.products: dict[tuple[str, str], Product] = {}
        self.notes: list[str] = []

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def product(self, kind: str, name: str) -> Product:
        """Made once."""
        if (kind, name) not in self.products:
            self.products[kind, name] = made(kind, name)
        return self.products[kind, name]

    def call(self, product: Product, matrix: IntegerMatrix, x: Tensor, how: GemmConfig) -> Tensor:
        """One product."""
        return integer_linear(x, matrix, None, how, self.ops.card, self.ops.arrived, product.gate)

    def note(self, text: str) -> None:
        """Say and keep."""
        self.notes.append(text)
        click.echo(text)

    def precompile(self, works: Sequence[Callable[[], object]]) -> None:
        """All kernels that works launch, in parallel."""
        began = time.monotonic()

        @contextmanager
        def watch() -> Iterator[Callable[[int, int], None]]:
            yield lambda done, total: None

        Precompiler(16, watch)(works)
        torch.cuda.synchronize()
        self.note(f"compiled {len(works)} products in {time.monotonic() - began:.1f} s, {self.left:.0f} s left")

    def measure(self, product: Product, rows: int, how: GemmConfig, want: Tensor, x: Tensor) -> None:
        """Check and time one candidate."""
        calls = [partial(self.call, product, matrix, x, how) for matrix in product.matrices]
        self.timed(product, rows, str(tuple(how)), calls, want)
        best = self.best.get((product.kind, product.name, rows))
        found = self.rows[-1]
        if found.error < 2e-2 and found.same and (best is None or found.us < best[0]):
            self.best[product.kind, product.name, rows] = found.us, how

    def timed(self, product: Product, rows: int, how: str, calls: Sequence[Callable[[], Tensor]], want: Tensor) -> None:
        """Check and time some way of multiplying."""
        try:
            first = calls[0]()
            error = relative(first, want)
            us = replayed(calls, 3)
            same = torch.equal(calls[0](), first)
        except Exception as failure:  # a candidate that does not fit the card is one less
            self.note(f"{product.kind} {product.name} {rows} {how}: {failure!r}"[:300])
            us, error, same = float("inf"), float("nan"), False
        self.rows.append(
            Row(product.kind, product.name, rows, how, round(us, 2), round(product.bytes / us / 1e6, 3), error, same)
        )

    def tile(self, kind: str, tile: int, most: int = 99, *, few: bool = False) -> None:
        """All candidates of a tile, for each product, or few; `most`: of those the fastest for awq."""
        names, rows_of = [self.product(kind, name) for name in PRODUCTS], FEW_ROWS if few else ROWS
        every = {
            (product.name, rows): self.chosen(product, tile, rows, most, few=few)
            for product in names
            for rows in rows_of[tile]
        }
        works = [
            partial(self.call, product, product.matrices[0], noise(tile, product.matrices[0].inputs), how)
            for product in names
            for how in {how: 0 for rows in rows_of[tile] for how in every[product.name, rows]}
        ]
        self.precompile(works)
        for rows in rows_of[tile]:
            for product in names:
                x = noise(rows, product.matrices[0].inputs)
                want = ReferenceOps().linear(x.float(), product.exact, None, product.gate)
                for how in every[product.name, rows]:
                    if self.left > 10:
                        self.measure(product, rows, how, want, x)
                self.say(product, rows)

    def chosen(self, product: Product, tile: int, rows: int, most: int, *, few: bool = False) -> Sequence[GemmConfig]:
        """Candidates that have so many rows, the fastest for awq first if only some are wanted."""
        every = [how for how in configs(product, tile, few=few) if how.chunks == 1 or how.rows // how.chunks >= rows]
        if most >= len(every):
            return every
        us = {r.how: r.us for r in self.rows if (r.kind, r.name, r.rows) == ("awq", product.name, rows)}
        return sorted(every, key=lambda how: us.get(str(tuple(how)), 1e9))[:most]

    def say(self, product: Product, rows: int) -> None:
        """The three fastest."""
        some = [r for r in self.rows if (r.kind, r.name, r.rows) == (product.kind, product.name, rows)]
        for r in sorted(some, key=lambda r: r.us)[:3]:
            click.echo(
                f"{r.kind:8} {r.name:11} {r.rows:5} {r.how:40} {r.us:8.2f} us {r.tb_s:6.2f} TB/s {r.tb_s / READ:5.0%}"
                f" error {r.error:.1e}{'' if r.same else ' CHANGES'}"
            )

    def dequantized(self, kind: str) -> None:
        """Matrices dequantized whole, or some outputs at a time, and multiplied by the library."""
        for name in PRODUCTS:
            product = self.product(kind, name)
            matrix = product.matrices[0]
            for rows in (128, 256, 512, 2048):
                if self.left < 10:
                    return
                x, plain, begin = noise(rows, matrix.inputs), product.exact.bfloat16(), len(self.rows)
                want = torch.nn.functional.linear(x.float(), product.exact)
                linear = torch.nn.functional.linear
                self.timed(product, rows, "bf16", [partial(linear, x, each) for each in (plain, plain.clone())], want)
                whole = [partial(self.expanded, x, each, matrix.outputs) for each in product.matrices]
                self.timed(product, rows, "dequantized", whole, want)
                if matrix.outputs > 4096:
                    parts = [partial(self.expanded, x, each, 4096) for each in product.matrices]
                    self.timed(product, rows, "dequantized by 4096", parts, want)
                for r in self.rows[begin:]:
                    click.echo(f"{r.kind:8} {r.name:11} {r.rows:5} {r.how:40} {r.us:8.2f} us error {r.error:.1e}")

    def expanded(self, x: Tensor, matrix: IntegerMatrix, step: int) -> Tensor:
        """The product, `step` outputs at a time."""
        card = self.ops.card
        if step >= matrix.outputs:
            return torch.nn.functional.linear(x, dequantize(matrix, torch.bfloat16, card))
        out = x.new_empty(len(x), matrix.outputs)
        for at in range(0, matrix.outputs, step):
            some = slice(at, min(at + step, matrix.outputs))
            out[:, some] = torch.nn.functional.linear(x, dequantize(matrix, torch.bfloat16, card, some))
        return out

    def w8a8(self) -> None:
        """Products with int8 activations, rounding included, by a few tiles, and as chosen now."""
        ops, card = self.ops, self.ops.card
        cases = [(name, rows) for name in PRODUCTS for rows in (1, 4, 8, 16, 32, 64, 512, 2048)]

        def works(name: str, rows: int) -> dict[str, partial[Tensor]]:
            outputs, inputs = MATRICES[name]
            gate: Gate = "silu" if "gate_up" in name else ""
            weight = torch.randint(-127, 128, (outputs, inputs), device="cuda", dtype=torch.int16).to(torch.int8)
            scale, x = torch.rand(outputs, 1, device="cuda") / (127 * inputs**0.5), noise(rows, inputs)
            every = [how for how in W8A8 if how.rows <= max(8, 2 * rows) and (rows <= 64 or how.rows >= 64)]
            matrix, arrived = QuantizedMatrix(weight, scale, inputs), ops.arrived

            def product(how: GemmConfig) -> Tensor:
                return rounded_linear(round_rows(x, card, torch.int8), matrix, None, how, card, arrived, gate)

            made = {str(tuple(how)): partial(product, how) for how in every}
            return {**made, "as now": partial(ops.int8_linear, x, weight, scale, None, gate)}

        self.precompile([work for name, rows in cases for work in works(name, rows).values()])
        for name, rows in cases:
            every = works(name, rows)
            want, found = Ops.int8_linear(ops, *every["as now"].args), list[tuple[float, str]]()
            for how, work in every.items():
                if self.left > 5:
                    found.append((replayed([work], 3), how))
                    if not relative(work(), want) < 1e-2:
                        self.note(f"WRONG w8a8 {name} {rows} {how}")
            for us, how in sorted(found)[:3] + [each for each in found if each[1] == "as now"]:
                self.note(f"w8a8     {name:11} {rows:5} {how:40} {us:8.2f} us (matrix partly in L2)")

    def check(self, kinds: Sequence[str] = KINDS) -> None:
        """Products as they are chosen now, whatever was measured: a note of each that is wrong."""
        always, wrong, count = BatchInvariantTritonOps("cuda"), 0, 0
        products = [made(kind, name, 1) for kind in kinds for name in ("8b o", "8b gate_up")]
        cases = [(product, dtype) for product in products for dtype in (torch.bfloat16, torch.float16)]

        def product_of(ops: TritonOps, case: tuple[Product, torch.dtype], x: Tensor) -> Tensor:
            return ops.quantized_linear(x, case[0].matrices[0], None, case[0].gate)

        self.precompile(
            [
                partial(product_of, ops, case, noise(rows, 4096, dtype=case[1]))
                for case in cases
                for ops, every in ((self.ops, (1, 16, 32, 64, 300)), (always, (1,)))
                for rows in every
            ]
        )
        for case in cases:
            product, dtype = case
            x = noise(CHECKED[-1], product.exact.shape[1], dtype=dtype)
            want = ReferenceOps().linear(x.float(), product.exact, None, product.gate)
            whole = product_of(always, case, x)
            off = [("all, deterministic", relative(whole, want), True)]
            for rows in CHECKED:
                got, again = product_of(self.ops, case, x[:rows]), product_of(always, case, x[:rows])
                same = torch.equal(again, whole[:rows]) and not self.ops.arrived.any()
                off.append((f"{rows}", relative(got, want[:rows]), same))
            for rows_text, error, same in off:
                count += 1
                if not error < 1e-2 or not same:
                    wrong += 1
                    self.note(f"WRONG {product.kind} {product.name} {dtype} rows {rows_text}: {error:.1e}, {same}")
        self.note(f"{count} products as chosen now checked, {wrong} wrong, {self.left:.0f} s left")

    def in_registers(self, kind: str) -> None:
        """Products by tiles of `integer_row`, `integer_stationary`, `integer_mma` and `integer_tma`, beside what
        `integer_gemm` would choose, or of one row `integer_gemv`."""
        cases = [(rows, self.product(kind, name)) for rows in {1: (), **IN_REGISTERS, **COPIED} for name in PRODUCTS]

        def work(
            product: Product, x: Tensor, how: RingConfig | MmaConfig | TmaConfig | None, matrix: IntegerMatrix
        ) -> Tensor:
            if isinstance(how, RingConfig):
                return integer_row(x, matrix, None, self.ops.card, product.gate, how)
            if len(x) == 1:
                return integer_gemv(x, matrix, None, self.ops.card, product.gate)
            if isinstance(how, MmaConfig):
                return integer_mma(x, matrix, None, self.ops.card, self.ops.arrived, product.gate, how)
            if isinstance(how, TmaConfig):
                return integer_tma(x, matrix, None, self.ops.card, self.ops.arrived, product.gate, how)
            chosen = integer_gemm_config(len(x), matrix, self.ops.card, gated=product.gate != "")
            if chosen is None:
                return self.ops.linear(x, dequantize(matrix, x.dtype, self.ops.card), None, product.gate)
            return self.call(product, matrix, x, chosen)

        def ways(product: Product, x: Tensor) -> Iterator[tuple[str, Callable[[IntegerMatrix], Tensor]]]:
            yield "few rows" if len(x) == 1 else "through shared memory", partial(work, product, x, None)
            for ring in RINGED[product.matrices[0].bits] if len(x) == 1 else ():
                yield f"ring {tuple(ring)}", partial(work, product, x, ring)
            if 1 < len(x) <= MAX_ROWS and stays_for(product.matrices[0], self.ops.card):
                yield "stationary", lambda each: integer_stationary(x, each, None, self.ops.card, product.gate)
            if takes_matrix(product.matrices[0], self.ops.card):
                for tile in COPIED.get(len(x), ()):
                    yield f"copied {tuple(tile)}", partial(work, product, x, tile)
            for outputs, chunks, chunk, warps, ahead in IN_REGISTERS.get(len(x), ()):
                for wanted in (2, 4, 6):
                    how = MmaConfig(len(x), outputs, chunks, chunk, warps, ahead, wanted)
                    yield str(tuple(how)), partial(work, product, x, how)

        given = [(product, noise(rows, product.matrices[0].inputs)) for rows, product in cases]
        self.precompile([partial(way, product.matrices[0]) for product, x in given for _, way in ways(product, x)])
        for product, x in given:
            want = ReferenceOps().linear(x.float(), product.exact, None, product.gate)
            for how, way in ways(product, x):
                if self.left > 5:
                    self.timed(product, len(x), how, [partial(way, matrix) for matrix in product.matrices], want)
            self.say(product, len(x))

    def half(self, rows: int) -> None:
        """The fastest candidates for awq, in float16: right and as fast?"""
        for name in PRODUCTS:
            product, best = self.product("awq", name), self.best.get(("awq", name, rows))
            if best is not None and self.left > 10:
                x = noise(rows, product.exact.shape[1], dtype=torch.float16)
                want = ReferenceOps().linear(x.float(), product.exact, None, product.gate)
                calls = [partial(self.call, product, matrix, x, best[1]) for matrix in product.matrices]
                self.timed(product, rows, f"float16 {tuple(best[1])}", calls, want)
                last = self.rows[-1]
                self.note(f"float16 {name} {rows} {last.how}: {last.us} us for {best[0]}, error {last.error:.1e}")

    def layers(self, kind: str, rows: int, count: int = 3) -> None:
        """Products of some layers, one after the other, each by the fastest candidate, and as chosen now."""
        found = {name: self.best.get((kind, name, rows)) for name in PRODUCTS}
        x = {name: noise(rows, MATRICES[name][1]) for name in PRODUCTS}

        def layer(i: int, how: dict[str, GemmConfig | None]) -> None:
            for name in PRODUCTS:
                product = self.product(kind, name)
                matrix, config = product.matrices[i % len(product.matrices)], how[name]
                if config is None:
                    self.ops.quantized_linear(x[name], matrix, None, product.gate)
                else:
                    self.call(product, matrix, x[name], config)

        held = sum(self.product(kind, name).bytes for name in PRODUCTS)
        now: dict[str, GemmConfig | None] = dict.fromkeys(PRODUCTS)
        fastest = {name: best[1] if best is not None else None for name, best in found.items()}
        for text, how in (("fastest", fastest), ("as now", now)):
            us = replayed([partial(layer, i, how) for i in range(count)], 5)
            self.note(
                f"layer {kind:8} rows {rows:5} {text:7}: {us:8.2f} us, {held / us / 1e6:.2f} TB/s, "
                f"32 of them {us * 32 / 1e3:.3f} ms"
            )


@click.command("integers")
@click.option("--seconds", default=135.0, show_default=True, help="Nothing new is begun after these.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice((*KINDS, "w8a8")), help="Only these.")
@click.option(
    "--in-registers",
    is_flag=True,
    help="Tiles of `integer_row`, `integer_stationary`, `integer_mma` and `integer_tma`.",
)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here, too.")
def command(seconds: float, kinds: tuple[str, ...], in_registers: bool, path: Path | None) -> None:
    """Check and time products with matrices of integers on this machine's CUDA device."""
    needed("the tests check the kernels on a CPU, too")
    bench = Bench(seconds)
    bench.note(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    with torch.inference_mode():
        try:
            if in_registers:
                for kind in kinds or ("awq", "q4_k"):
                    bench.in_registers(kind)
            else:
                measure_kinds(bench, kinds) if kinds else measure(bench)
        finally:
            if path is not None:
                rows = [asdict(row) for row in bench.rows]
                best = {" ".join(map(str, key)): [us, list(how)] for key, (us, how) in bench.best.items()}
                path.write_text(json.dumps({"notes": bench.notes, "best": best, "rows": rows}) + "\n", encoding="utf-8")


def measure_kinds(bench: Bench, kinds: Sequence[str]) -> None:
    """Few candidates of each kind, and layers of them."""
    plain = [kind for kind in kinds if kind != "w8a8"]
    if plain:
        bench.check(plain)
    for kind in plain:
        for tile, every in FEW_ROWS.items():
            bench.tile(kind, tile, few=True)
            for rows in every:
                bench.layers(kind, rows)
        bench.products.clear()
    if "w8a8" in kinds:
        bench.w8a8()


def measure(bench: Bench) -> None:
    """In the order of importance: what is too late is left out."""
    bench.check()
    for tile in (8, 16, 32, 64):
        bench.tile("awq", tile)
        for rows in ROWS[tile]:
            bench.layers("awq", rows)
    for rows in (1, 4, 16, 64):
        bench.half(rows)
    bench.tile("awq", 128)
    for rows in ROWS[128]:
        bench.layers("awq", rows)
    for tile in (8, 16, 64):
        for kind in ("q4_k", "q8_0", "gptq 32"):
            if bench.left > 15:
                bench.tile(kind, tile, 6)
                bench.layers(kind, ROWS[tile][0])
    bench.dequantized("awq")


if __name__ == "__main__":
    command()
