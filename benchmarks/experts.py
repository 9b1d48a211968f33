"""`python -m benchmarks.experts`: one mixture of Qwen3-30B-A3B at several batch sizes, each kernel in several tilings.

Beside each time stands the floor: the bytes of the experts that are used at 4.3 TB/s, or the arithmetic at 770 TFLOP/s,
whichever takes longer. Kernels are timed inside a captured graph, layers by turns, so that matrices come from memory.
`--kind int4` measures mixtures of one kind alone: bf16, fp8, or int4 as AWQ has it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.card import needed
from benchmarks.kernel_cases import noise, relative
from benchmarks.kernels import MULTIPLY, replayed
from quire.ops.base import Ops
from quire.ops.integer import dequantize_integers, pack_integers, stack_integers
from quire.ops.operands import ExpertMatrices, IntegerMatrix, QuantizedMatrix, RouterWeights, Routing, TopK
from quire.ops.quantized import E4M3, E4M3_MAX, dequantize
from quire.ops.triton import experts as mixture
from quire.ops.triton.experts import ExpertConfig, ExpertTile, SortedSlots
from quire.ops.triton.gemv import MAX_GEMV_ROWS, GemmConfig
from quire.ops.triton.integer_experts import (
    IntegerExpertConfig,
    integer_expert_config,
    integer_experts,
    multiply_integer_tiles,
)
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.ops import TritonOps
from quire.ops.triton.precompile import Precompiler

EXPERTS, USED, HIDDEN, WIDTH = 128, 8, 2048, 768
"""Of Qwen3-30B-A3B."""

LAYERS = 3
READ = 4.3
"""TB/s of the floor."""

TOKENS = (1, 16, 64, 256, 8192, 2048, 4, 512, 8, 2, 128, 1024, 32)
"""In this order, as far as the time allows."""

ROWS: Mapping[int, tuple[int, ...]] = {
    **dict.fromkeys((1, 2, 4, 8), (1, 16)), 16: (16,), 32: (16,), 64: (16, 32), 128: (16, 32), 256: (16, 32, 64),
    512: (32, 64, 128), 1024: (64, 128), 2048: (64, 128), 8192: (128, 256),
}  # fmt: skip
"""Of the tiles that are tried, by tokens."""


def tiles(rows: int, *shapes: tuple[int, int, int, int], first: bool = False, ways: str = "") -> list[ExpertTile]:
    """shapes: outputs, inputs, warps, stages. first: rows are the first factor. ways: also as `ExpertTile` says of d,
    described, h, halves, b, both."""
    plain = [ExpertTile(rows, *shape, first) for shape in shapes]
    made = list(plain)
    for way in ways:
        made += [each._replace(described=way in "db", halves=way in "hb") for each in plain]
    return made


GATE_UP: Mapping[int, Sequence[ExpertTile]] = {
    1: tiles(1, (1, 2048, 2, 0), (4, 2048, 4, 0), (2, 2048, 8, 0), (1, 2048, 1, 0), (2, 2048, 2, 0)),
    16: tiles(16, (64, 128, 4, 3), (32, 128, 2, 4), (64, 64, 4, 5), (128, 64, 4, 4), (128, 128, 8, 3), ways="d"),
    32: tiles(32, (64, 64, 4, 5), (64, 128, 4, 3), (128, 64, 4, 4), (64, 64, 4, 4), ways="d"),
    64: [
        *tiles(64, (64, 64, 4, 4), ways="dhb"),
        *tiles(64, (128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 3), first=True, ways="d"),
    ],
    128: [
        *tiles(128, (128, 64, 8, 3), (128, 64, 8, 4), first=True, ways="dhb"),
        *tiles(128, (64, 64, 4, 3), (64, 64, 8, 3), (128, 32, 8, 4), (64, 128, 8, 2), first=True, ways="db"),
    ],
    256: tiles(256, (64, 64, 8, 3), first=True, ways="db"),
}
DOWN: Mapping[int, Sequence[ExpertTile]] = {
    1: tiles(1, (2, 256, 4, 0), (2, 256, 1, 0), (1, 256, 2, 0), (4, 256, 8, 0), (1, 256, 4, 0)),
    16: tiles(16, (128, 128, 8, 3), (128, 64, 4, 5), (64, 64, 4, 6), (64, 128, 4, 4), (128, 128, 4, 3), ways="d"),
    32: tiles(32, (128, 64, 4, 5), (64, 128, 4, 4), (128, 128, 8, 3), (128, 64, 4, 4), ways="d"),
    64: [
        *tiles(64, (128, 64, 4, 4), first=True, ways="dhb"),
        *tiles(64, (256, 64, 8, 4), (256, 64, 4, 4), (128, 64, 4, 3), first=True, ways="d"),
    ],
    128: [
        *tiles(128, (256, 64, 8, 3), (256, 64, 8, 4), first=True, ways="dhb"),
        *tiles(128, (128, 64, 4, 3), (128, 64, 8, 3), (256, 32, 8, 4), (128, 128, 8, 2), first=True, ways="db"),
    ],
    256: tiles(256, (128, 64, 8, 3), first=True, ways="db"),
}
ROUTERS = (
    *(GemmConfig(1, 4, 2048, 4), GemmConfig(1, 2, 2048, 4), GemmConfig(1, 8, 2048, 8)),
    *(GemmConfig(16, 32, 128, 4, 4), GemmConfig(16, 64, 128, 4, 4), GemmConfig(16, 32, 256, 4, 3)),
    *(GemmConfig(32, 128, 64, 4, 4), GemmConfig(32, 128, 128, 4, 3), GemmConfig(32, 64, 128, 4, 4)),
    *(GemmConfig(64, 128, 64, 8, 4), GemmConfig(128, 128, 64, 8, 3)),
)


AnyTile = ExpertTile | GemmConfig
"""Of one product; of integers the latter."""

AnyConfig = ExpertConfig | IntegerExpertConfig

Tables = tuple[Mapping[int, Sequence[AnyTile]], Mapping[int, Sequence[AnyTile]]]
"""Tiles of gate and up and of down, by their rows."""


def pairs(gate_up: tuple[int, ...], down: tuple[int, ...], *, sorted: bool = True) -> list[IntegerExpertConfig]:
    """One candidate for each product of integers: rows, outputs, inputs, warps, stages, inputs asked for ahead."""
    return [IntegerExpertConfig(GemmConfig(*gate_up), GemmConfig(*down), sorted)]


def tables(rows: Sequence[int], gate_up: Sequence[ExpertTile], down: Sequence[ExpertTile]) -> Tables:
    """Tiles by their rows."""
    first, second = ({r: [how for how in some if how.rows == r] for r in rows} for some in (gate_up, down))
    return first, second


EIGHT_BITS = tables(
    (16, 32, 64, 128),
    [
        *tiles(16, (64, 128, 4, 4), (32, 128, 2, 5), (64, 128, 4, 3), (128, 128, 8, 3), ways="d"),
        *tiles(32, (64, 128, 4, 3), (64, 64, 4, 5), ways="d"),
        *tiles(64, (64, 128, 4, 3), (64, 64, 4, 4), ways="d"),
        *tiles(64, (64, 128, 8, 3), first=True, ways="d"),
        *tiles(128, (64, 128, 8, 3), (64, 64, 8, 3), (128, 64, 8, 3), first=True, ways="d"),
    ],
    [
        *tiles(16, (128, 128, 8, 4), (64, 128, 4, 4), (32, 128, 2, 5), ways="d"),
        *tiles(32, (128, 128, 8, 4), (128, 64, 4, 5), (64, 128, 4, 4), ways="d"),
        *tiles(64, (128, 128, 8, 3), (128, 64, 4, 4), ways="d"),
        *tiles(64, (128, 128, 8, 3), first=True, ways="d"),
        *tiles(128, (128, 128, 8, 3), (128, 64, 8, 3), (64, 128, 8, 3), first=True, ways="d"),
    ],
)
"""Of e4m3 matrices with a scale for 128 columns."""

FOUR_BITS: Mapping[int, Sequence[IntegerExpertConfig]] = {
    1: [
        *pairs((8, 32, 256, 2, 4), (8, 64, 256, 2, 3, 256), sorted=False),
        *pairs((8, 16, 256, 1, 4), (8, 64, 256, 2, 3), sorted=False),
        *pairs((8, 32, 128, 2, 6), (8, 64, 128, 2, 6, 128), sorted=False),
        *pairs((8, 64, 256, 2, 4), (8, 32, 256, 2, 3, 256), sorted=False),
        *pairs((8, 32, 256, 4, 4), (8, 32, 128, 1, 6, 128), sorted=False),
        *pairs((8, 16, 512, 2, 3), (8, 16, 256, 1, 3, 256), sorted=False),
    ],
    8: [
        *pairs((8, 64, 256, 2, 4), (8, 64, 128, 2, 6)),
        *pairs((8, 64, 128, 2, 6), (8, 64, 256, 2, 3)),
        *pairs((8, 32, 256, 2, 4), (8, 128, 128, 4, 4)),
        *pairs((8, 64, 256, 4, 4), (8, 64, 256, 2, 3, 256)),
        *pairs((8, 128, 128, 4, 4), (8, 64, 128, 2, 6, 128)),
    ],
    16: [
        *pairs((16, 64, 128, 2, 6), (16, 64, 256, 2, 4)),
        *pairs((16, 64, 128, 4, 4), (16, 64, 128, 2, 6)),
        *pairs((16, 32, 256, 2, 4), (16, 64, 128, 4, 4)),
        *pairs((16, 64, 256, 4, 3), (16, 128, 128, 4, 4)),
    ],
    32: [
        *pairs((32, 64, 256, 4, 3), (32, 64, 128, 4, 3)),
        *pairs((32, 64, 128, 4, 4), (32, 128, 128, 4, 3)),
        *pairs((32, 128, 128, 8, 3), (32, 64, 256, 4, 3)),
    ],
    64: [
        *pairs((64, 128, 128, 8, 3), (64, 128, 128, 8, 3)),
        *pairs((64, 64, 128, 4, 3), (64, 64, 128, 4, 4)),
        *pairs((64, 128, 64, 8, 4), (64, 128, 128, 4, 4)),
        *pairs((64, 64, 64, 4, 4), (64, 128, 64, 8, 4)),
    ],
    128: [
        *pairs((128, 64, 128, 8, 3), (128, 128, 128, 8, 3)),
        *pairs((128, 128, 64, 8, 3), (128, 128, 64, 8, 3)),
        *pairs((128, 64, 64, 4, 3), (128, 64, 128, 4, 3)),
    ],
}
"""Tiles of int4 matrices in groups of 128, by their rows; 1: of slots that are not sorted."""

FOUR_BIT_TOKENS: Mapping[int, tuple[int, ...]] = {
    1: (1, 8), 16: (8, 16), 64: (8, 16), 256: (16, 32), 4: (1, 8), 8192: (64, 128), 1024: (32, 64),
}  # fmt: skip
"""Rows of the tiles that are tried with int4, by tokens."""

EIGHT_BIT_TOKENS: Mapping[int, tuple[int, ...]] = {
    1: (16,),
    16: (16,),
    64: (16,),
    256: (32, 64),
    2048: (64, 128),
    8192: (128,),
}
"""Rows of the tiles that are tried with e4m3, by tokens."""


class Layer(NamedTuple):
    """The matrices of a mixture, plain or quantized. exact: the numbers that quantized ones stand for, of one layer
    alone."""

    router: RouterWeights
    gate_up: Tensor | ExpertMatrices
    down: Tensor | ExpertMatrices
    exact: tuple[Tensor, Tensor] | None = None

    def expert(self, which: int, e: int) -> Tensor:
        """An expert's gate and up (0) or down (1), float32."""
        matrix = self[1 + which] if self.exact is None else self.exact[which]
        assert isinstance(matrix, Tensor)
        return matrix[e].float()


def eight_bits(weight: Tensor, width: int = 128) -> QuantizedMatrix:
    """Matrices [E, out, in] one below the other, with a scale for every `width` columns of a row."""
    flat = weight.flatten(0, 1).float()
    runs = flat.view(len(flat), -1, width)
    scale = runs.abs().amax(-1) / E4M3_MAX
    return QuantizedMatrix((runs / scale[..., None]).flatten(1).to(E4M3), scale, width)


def in_eight_bits(layers: Sequence[Layer]) -> list[Layer]:
    """The same layers of e4m3."""
    made = list[Layer]()
    for layer in layers:
        gate_up, down = small_matrices(layer)
        exact = None if made else (restored(gate_up), restored(down))
        made.append(Layer(layer.router, gate_up, down, exact))
    return made


def small_matrices(layer: Layer) -> tuple[QuantizedMatrix, QuantizedMatrix]:
    """Gate and up, and down, of e4m3."""
    assert isinstance(layer.gate_up, Tensor)
    assert isinstance(layer.down, Tensor)
    return eight_bits(layer.gate_up), eight_bits(layer.down)


def restored(matrix: QuantizedMatrix) -> Tensor:
    """[E, out, in] float32."""
    return dequantize(matrix).view(EXPERTS, -1, matrix.weight.shape[1])


def in_four_bits(layers: Sequence[Layer]) -> list[Layer]:
    """Layers of random int4 matrices in groups of 128 with zero points, as AWQ has them."""
    made = list[Layer]()
    for layer in layers:
        gate_up, down = four_bits(2 * WIDTH, HIDDEN), four_bits(HIDDEN, WIDTH)
        exact = None if made else (dequantized(gate_up), dequantized(down))
        made.append(Layer(layer.router, gate_up, down, exact))
    return made


def dequantized(matrix: IntegerMatrix) -> Tensor:
    """[E, out, in] float32."""
    return torch.stack([dequantize_integers(matrix.expert(e)) for e in range(EXPERTS)])


def four_bits(outputs: int, inputs: int) -> IntegerMatrix:
    """Matrices of all experts."""
    count = outputs, inputs // 128

    def one() -> IntegerMatrix:
        numbers = torch.randint(0, 16, (outputs, inputs), device="cuda", dtype=torch.uint8)
        scale = (torch.rand(count, device="cuda") * 0.5 + 0.5).div_(4 * inputs**0.5).half().float()
        return pack_integers(numbers, 128, scale, zero=torch.randint(4, 12, count, device="cuda"))

    whole = stack_integers([one() for _ in range(EXPERTS)])
    assert whole is not None
    return whole


class Batch(NamedTuple):
    """x [T, hidden] of a layer, and its routing."""

    layer: Layer
    x: Tensor
    routing: Routing


def weights() -> list[Layer]:
    """With standard deviations as those of random models."""

    def made(*shape: int) -> Tensor:
        return noise(*shape).mul_(shape[-1] ** -0.5)

    return [
        Layer(
            RouterWeights(made(EXPERTS, HIDDEN), TopK(USED, True)),
            made(EXPERTS, 2 * WIDTH, HIDDEN),
            made(EXPERTS, HIDDEN, WIDTH),
        )
        for _ in range(LAYERS)
    ]


class Tried(NamedTuple):
    """One tiling: microseconds and the relative error, or why it does not run."""

    how: str
    us: float
    error: float
    failure: str = ""


def attempt(how: object, check: Callable[[], float], calls: Sequence[Callable[[], object]]) -> Tried:
    """Check and time one tiling."""
    try:
        return Tried(repr(how), round(replayed(calls), 2), check())
    except Exception as error:
        # Of any kind: one tiling that does not fit must not end the others.
        return Tried(repr(how), float("inf"), float("nan"), repr(error)[:200])


def exact_inner(batch: Batch, slots: Tensor) -> Tensor:
    """Gated outputs of some slots, in float32."""
    own = batch.routing.experts.flatten()[slots].long()
    both = torch.stack(
        [batch.layer.expert(0, e) @ batch.x[s // USED].float() for e, s in zip(own.tolist(), slots, strict=True)]
    )
    return F.silu(both[:, :WIDTH]) * both[:, WIDTH:]


def exact_outer(batch: Batch, inner: Tensor, slots: Tensor) -> Tensor:
    """Outputs of some slots from their inner numbers, in float32."""
    own = batch.routing.experts.flatten()[slots].tolist()
    return torch.stack([batch.layer.expert(1, e) @ row.float() for e, row in zip(own, inner, strict=True)])


def gate_up(batch: Batch, slots: SortedSlots | Tensor, how: AnyTile, card: DeviceInfo) -> Tensor:
    """The first product of a mixture, with its gate. slots: as they are, the experts of each."""
    matrix = batch.layer.gate_up
    if isinstance(how, GemmConfig):
        assert isinstance(matrix, IntegerMatrix)
        return multiply_integer_tiles(batch.x, matrix, slots, USED, how, card, "silu")
    assert not isinstance(matrix, IntegerMatrix)
    if how.stages and isinstance(slots, SortedSlots):
        also = rounded(matrix, batch)
        return mixture.multiply_tiles(batch.x, matrix, slots, USED, how, card, "silu", count=EXPERTS, rounded=also)
    return mixture.multiply_gate_up(batch.x, matrix, batch.routing, how, card, "silu", count=EXPERTS)


def rounded(matrix: object, batch: Batch) -> bool:
    """Whether rows are rounded to e4m3, as the engine does it."""
    return isinstance(matrix, QuantizedMatrix) and len(batch.x) > MAX_GEMV_ROWS


def down(batch: Batch, inner: Tensor, slots: SortedSlots | Tensor, how: AnyTile, card: DeviceInfo) -> Tensor:
    """The second product: of slots, or added up for each token where there are no tiles."""
    matrix = batch.layer.down
    if isinstance(how, GemmConfig):
        assert isinstance(matrix, IntegerMatrix)
        return multiply_integer_tiles(inner, matrix, slots, USED, how, card)
    assert not isinstance(matrix, IntegerMatrix)
    if how.stages and isinstance(slots, SortedSlots):
        also = rounded(matrix, batch)
        return mixture.multiply_tiles(inner, matrix, slots, USED, how, card, count=EXPERTS, rounded=also)
    return mixture.multiply_down(inner, matrix, batch.routing, how, card, count=EXPERTS)


class Tiling(NamedTuple):
    """One way to make one product, "gate_up" or "down"."""

    product: str
    how: AnyTile
    check: Callable[[], float]
    calls: Sequence[Callable[[], Tensor]]


def tilings(rows: int, batches: Sequence[Batch], card: DeviceInfo, table: Tables) -> Iterator[Tiling]:
    """Those with so many rows; 1: of slots that are not sorted."""
    count, first = len(batches[0].x) * USED, batches[0]
    ordered = [mixture.sort_slots(b.routing.experts, EXPERTS, rows, card) for b in batches]
    integers = isinstance(first.layer.down, IntegerMatrix)
    summed, slots = rows == 1 and not integers, list[SortedSlots | Tensor](ordered)
    if rows == 1 and integers:
        slots = [b.routing.experts for b in batches]
    some = ordered[0].order[:: max(1, count // 64)].long()
    at = some if rows == 1 else torch.argsort(ordered[0].order)[some]
    want = exact_inner(first, some)
    for how in table[0][rows]:
        calls = [partial(gate_up, b, s, how, card) for b, s in zip(batches, slots, strict=True)]
        yield Tiling("gate_up", how, partial(error_of, calls[0], at, want), calls)
    inners = [noise(count, WIDTH) for _ in batches]
    if summed:
        some, at = torch.zeros(1, dtype=torch.int64), torch.arange(USED, device=first.x.device)
    want = exact_outer(first, inners[0][at], at if summed else some)
    if summed:
        want = (want * first.routing.weights[0][:, None]).sum(0, keepdim=True)
    for how in table[1][rows]:
        calls = [partial(down, *each, how, card) for each in zip(batches, inners, slots, strict=True)]
        yield Tiling("down", how, partial(error_of, calls[0], some, want), calls)


def error_of(call: Callable[[], Tensor], rows: Tensor, want: Tensor) -> float:
    """The relative error of some rows of a result."""
    return relative(call()[rows.to(want.device)], want)


def batches_of(tokens: int, layers: Sequence[Layer], ops: TritonOps) -> list[Batch]:
    made = []
    for layer in layers:
        x = noise(tokens, HIDDEN)
        made.append(Batch(layer, x, Ops.route(ops, x, layer.router)))
    return made


def floors(batches: Sequence[Batch]) -> dict[str, float]:
    """Microseconds of each product, on average over the layers, and the experts used."""
    used = sum(len(set(b.routing.experts.flatten().tolist())) for b in batches) / len(batches)
    numbers, slots = WIDTH * HIDDEN, batches[0].routing.experts.numel()
    matrix = batches[0].layer.down
    size = 2.0 if isinstance(matrix, Tensor) else 1.0
    if isinstance(matrix, IntegerMatrix):
        size = matrix.nbytes / (EXPERTS * numbers)
    first, second = (max(used * n * size / READ, 2 * slots * n / MULTIPLY) / 1e6 for n in (2 * numbers, numbers))
    return {
        "experts": round(used, 1),
        "gate_up": round(first, 2),
        "down": round(second, 2),
        "all": round(first + second, 2),
    }


def whole(batches: Sequence[Batch], ops: TritonOps, how: AnyConfig, router: GemmConfig) -> list[Callable[[], Tensor]]:
    """All launches of a mixture."""

    def call(batch: Batch) -> Tensor:
        routing = mixture.route(batch.x, batch.layer.router, router, ops.card, ops.arrived)
        return through(batch, routing, how, ops.card)

    return [partial(call, batch) for batch in batches]


def through(batch: Batch, routing: Routing, how: AnyConfig, card: DeviceInfo) -> Tensor:
    """The experts alone."""
    first, second = batch.layer.gate_up, batch.layer.down
    if isinstance(how, IntegerExpertConfig):
        assert isinstance(first, IntegerMatrix)
        assert isinstance(second, IntegerMatrix)
        return integer_experts(batch.x, routing, first, second, "silu", how, card)
    if isinstance(first, QuantizedMatrix) and isinstance(second, QuantizedMatrix):
        also = rounded(first, batch)
        return mixture.quantized_experts(batch.x, routing, first, second, "silu", how, card, rounded=also)
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    return mixture.experts(batch.x, routing, first, second, "silu", how, card)


def by_engine(batches: Sequence[Batch], ops: TritonOps) -> list[Callable[[], Tensor]]:
    """All launches of a mixture, as the engine makes them."""

    def call(batch: Batch) -> Tensor:
        routing, first, second = ops.route(batch.x, batch.layer.router), batch.layer.gate_up, batch.layer.down
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            return ops.experts(batch.x, routing, first, second, "silu")
        assert not isinstance(first, Tensor)
        assert not isinstance(second, Tensor)
        return ops.quantized_experts(batch.x, routing, first, second, "silu")

    return [partial(call, batch) for batch in batches]


def whole_error(batch: Batch, ops: TritonOps, how: AnyConfig, router: GemmConfig) -> float:
    """The relative error of some tokens of all launches, against float32 with the experts that the router chose."""
    layer = batch.layer
    routing = mixture.route(batch.x, layer.router, router, ops.card, ops.arrived)
    got = through(batch, routing, how, ops.card)
    chosen, tokens = batch._replace(routing=routing), torch.arange(len(batch.x))[:: max(1, len(batch.x) // 16)]
    slots = (tokens[:, None] * USED + torch.arange(USED)).flatten().to(batch.x.device)
    parts = exact_outer(chosen, exact_inner(chosen, slots), slots).view(len(tokens), USED, -1)
    own = tokens.to(batch.x.device)
    return relative(got[own], (parts * routing.weights[own][..., None]).sum(1))


def around(batches: Sequence[Batch], ops: TritonOps, rows: int) -> dict[str, float]:
    """Microseconds of sorting and of combining."""
    tokens = len(batches[0].x)
    sort = [partial(mixture.sort_slots, b.routing.experts, EXPERTS, max(rows, 16), ops.card) for b in batches]
    y = noise(tokens * USED, HIDDEN)
    combine = [partial(mixture.combine, y, b.routing.weights, ops.card) for b in batches]
    return {"sort": round(replayed(sort), 2), "combine": round(replayed(combine), 2)}


def routing_error(call: Callable[[], Routing], batch: Batch) -> float:
    """How far the chosen logits are below the largest ones, or the weights from the softmax of the chosen ones: the
    largest difference, against float64. Infinite where an expert is chosen twice."""
    routing = call()
    exact = batch.x.double() @ batch.layer.router.weight.double().T
    chosen = exact.gather(1, routing.experts.long())
    below = (exact.topk(USED).values - chosen.sort(-1, descending=True).values).abs().max()
    apart = (chosen.softmax(-1) - routing.weights).abs().max()
    distinct = bool(routing.experts.sort(-1).values.diff(dim=-1).gt(0).all())
    return float(torch.maximum(below, apart)) if distinct else float("inf")


def routers(batches: Sequence[Batch], ops: TritonOps) -> list[Tried]:
    tokens, results = len(batches[0].x), []
    for how in ROUTERS:
        if tokens <= 16 or how.rows > 1:
            calls = [partial(mixture.route, b.x, b.layer.router, how, ops.card, ops.arrived) for b in batches]
            results.append(attempt(how, partial(routing_error, calls[0], batches[0]), calls))
    return results


def measure(tokens: int, layers: Sequence[Layer], ops: TritonOps) -> dict[str, Any]:
    """Every tiling at so many tokens, and all launches: as configured, and with the fastest tilings."""
    batches, plain = batches_of(tokens, layers, ops), isinstance(layers[0].down, Tensor)
    kind = kind_of(layers[0])
    table, tried_rows = TRIED[kind]
    found: dict[str, Any] = {"tokens": tokens, "kind": kind, "floor": floors(batches), "gate_up": [], "down": []}
    best: list[AnyConfig] = []
    for rows in tried_rows[tokens]:
        own: dict[str, tuple[float, AnyTile]] = {}
        for each in tilings(rows, batches, ops.card, table):
            tried = attempt(each.how, each.check, each.calls)
            found[each.product].append(tried._asdict())
            if tried.error < 5e-3 and (each.product not in own or tried.us < own[each.product][0]):
                own[each.product] = tried.us, each.how
        if len(own) == 2:
            best.append(config_of(own["gate_up"][1], own["down"][1], rows))
    found["routers"] = [each._asdict() for each in (routers(batches, ops) if plain else [])]
    now = current(tokens, layers[0])
    router = mixture.router_config(tokens, HIDDEN)
    found["around"] = around(batches, ops, now.gate_up.rows)
    found["now"] = attempt(
        (now, router), partial(whole_error, batches[0], ops, now, router), whole(batches, ops, now, router)
    )._asdict()
    engine, plainly = by_engine(batches, ops), whole(batches[:1], ops, now, router)[0]
    found["engine"] = attempt("engine", lambda: relative(engine[0](), plainly()), engine)._asdict()
    found["best"] = []
    for how in best:
        check = partial(whole_error, batches[0], ops, how, router)
        found["best"].append(attempt(how, check, whole(batches, ops, how, router))._asdict())
    return found


TRIED: Mapping[str, tuple[Tables, Mapping[int, tuple[int, ...]]]] = {
    "bf16": ((GATE_UP, DOWN), ROWS),
    "fp8": (EIGHT_BITS, EIGHT_BIT_TOKENS),
    "int4": (
        (
            {rows: [how.gate_up for how in some] for rows, some in FOUR_BITS.items()},
            {rows: [how.down for how in some] for rows, some in FOUR_BITS.items()},
        ),
        FOUR_BIT_TOKENS,
    ),
}
"""By kind of matrix: tiles, and their rows by tokens."""


def kind_of(layer: Layer) -> str:
    """Of TRIED."""
    return "bf16" if isinstance(layer.down, Tensor) else "int4" if isinstance(layer.down, IntegerMatrix) else "fp8"


def config_of(gate_up: AnyTile, down: AnyTile, rows: int) -> AnyConfig:
    """Of two tiles."""
    if isinstance(gate_up, GemmConfig):
        assert isinstance(down, GemmConfig)
        return IntegerExpertConfig(gate_up, down, rows > 1)
    assert isinstance(down, ExpertTile)
    return ExpertConfig(gate_up, down)


def current(tokens: int, layer: Layer) -> AnyConfig:
    """What the engine takes now."""
    if isinstance(layer.gate_up, IntegerMatrix):
        assert isinstance(layer.down, IntegerMatrix)
        return integer_expert_config(tokens, USED, layer.gate_up, layer.down)
    if isinstance(layer.gate_up, Tensor):
        return mixture.expert_config(tokens, USED, EXPERTS, HIDDEN, WIDTH)
    assert isinstance(layer.gate_up, QuantizedMatrix)
    assert isinstance(layer.down, QuantizedMatrix)
    few = tokens <= MAX_GEMV_ROWS
    return mixture.quantized_expert_config(tokens, USED, layer.gate_up, layer.down, rounded=not few)


def precompile(layers: Sequence[Layer], kinds: Sequence[Sequence[Layer]], ops: TritonOps) -> None:
    """Compile every tiling, several at a time. kinds: layers of each kind that is measured."""
    (batch,), works = batches_of(4, layers[:1], ops), list[Callable[[], object]]()
    slots, inner = mixture.sort_slots(batch.routing.experts, EXPERTS, 16, ops.card), noise(4 * USED, WIDTH)
    many = batch.routing.experts.new_zeros(8192, USED)
    for made in kinds:
        own = batch._replace(layer=made[0])
        rises, falls = TRIED[kind_of(made[0])][0]
        for rows in rises:
            sort = batch.routing.experts if rows == 1 and kind_of(made[0]) == "int4" else slots
            works += [partial(gate_up, own, sort, how, ops.card) for how in rises[rows]]
            works += [partial(down, own, inner, sort, how, ops.card) for how in falls[rows]]
    for rows in {1, 8, *GATE_UP}:
        works += [partial(mixture.sort_slots, each, EXPERTS, rows, ops.card) for each in (batch.routing.experts, many)]
    works += [partial(mixture.route, batch.x, batch.layer.router, how, ops.card, ops.arrived) for how in ROUTERS]

    @contextmanager
    def watch() -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: None

    Precompiler(16, watch)(works)


def line(found: Mapping[str, Any]) -> str:
    """What matters of a batch size."""
    named = [name for name in ("gate_up", "down", "routers") if found[name]]
    lowest = {name: min(found[name], key=lambda each: each["us"]) for name in named}
    floor = found["floor"]
    parts = [
        f"{found['kind']}, {found['tokens']} tokens, {floor['experts']} experts: floor {floor['all']} us, "
        f"engine {found['engine']['us']} (off {found['engine']['error']:.1e} {found['engine']['failure']}), "
        f"by tiles {found['now']['us']} (error {found['now']['error']:.1e} {found['now']['failure']}), best "
        f"{min((each['us'] for each in found['best']), default=float('nan'))}"
    ]
    parts += [
        f"    {name:8} {each['us']:9.2f} us" + (f" of {floor[name]:9.2f}" if name in floor else "") + f"  {each['how']}"
        for name, each in lowest.items()
    ]
    return "\n".join([*parts, f"    sort {found['around']['sort']} us, combine {found['around']['combine']} us"])


@click.command("experts")
@click.option("--seconds", default=90.0, show_default=True, help="No batch size is begun after so many.")
@click.option("--kind", "names", multiple=True, type=click.Choice(sorted(TRIED)), help="All, unless some are named.")
@click.option("--json", "path", type=click.Path(path_type=Path), required=True, help="Where all rows are written.")
def command(seconds: float, names: Sequence[str], path: Path) -> None:
    """Check and time a mixture of experts on this machine's CUDA device."""
    needed("the tests check every kernel on a CPU, too")
    began = time.monotonic()
    torch.manual_seed(0)
    ops, layers = TritonOps("cuda"), weights()
    kinds: Mapping[str, Callable[[], Sequence[Layer]]] = {
        "bf16": lambda: layers,
        "fp8": lambda: in_eight_bits(layers),
        "int4": lambda: in_four_bits(layers),
    }
    chosen = [make() for name, make in kinds.items() if name in (names or kinds)]
    precompile(layers, chosen, ops)
    about: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": list[Any](),
        "seconds": 0.0,
    }
    click.echo(f"{about['device']}, torch {about['torch']}, compiled after {time.monotonic() - began:.0f} s")
    plans = [(tokens, made) for tokens in TOKENS for made in chosen if tokens in TRIED[kind_of(made[0])][1]]
    for tokens, made in plans:
        if time.monotonic() - began > seconds:
            click.echo(f"{tokens} tokens: no time left")
            continue
        found = measure(tokens, made, ops)
        about["rows"] = [*about["rows"], found]
        about["seconds"] = round(time.monotonic() - began, 1)
        click.echo(line(found))
        path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    click.echo(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    command()
