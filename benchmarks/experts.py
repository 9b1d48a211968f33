"""`python -m benchmarks.experts`: one mixture of Qwen3-30B-A3B at several batch sizes, each kernel in several tilings.

Beside each time stands the floor: the bytes of the experts that are used at 4.3 TB/s, or the arithmetic at 770 TFLOP/s,
whichever takes longer. Kernels are timed inside a captured graph, layers by turns, so that matrices come from memory.
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
from quire.ops.base import QuantizedMatrix, Routing
from quire.ops.quantized import E4M3, E4M3_MAX, BaseOps, dequantize
from quire.ops.triton import experts as mixture
from quire.ops.triton.experts import ExpertConfig, ExpertTile, SortedSlots
from quire.ops.triton.gemv import GemmConfig
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


Tables = tuple[Mapping[int, Sequence[ExpertTile]], Mapping[int, Sequence[ExpertTile]]]
"""Tiles of gate and up and of down, by their rows."""


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

EIGHT_BIT_TOKENS: Mapping[int, tuple[int, ...]] = {1: (16,), 16: (16,), 256: (32, 64), 2048: (64, 128), 8192: (128,)}
"""Rows of the tiles that are tried with e4m3, by tokens."""


class Layer(NamedTuple):
    """The matrices of a mixture, plain or of e4m3. exact: the numbers that e4m3 ones stand for, of one layer alone."""

    router: Tensor
    gate_up: Tensor | QuantizedMatrix
    down: Tensor | QuantizedMatrix
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
        Layer(made(EXPERTS, HIDDEN), made(EXPERTS, 2 * WIDTH, HIDDEN), made(EXPERTS, HIDDEN, WIDTH))
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


def gate_up(batch: Batch, slots: SortedSlots, how: ExpertTile, card: DeviceInfo) -> Tensor:
    """The first product of a mixture, with its gate."""
    if how.stages:
        return mixture.multiply_tiles(batch.x, batch.layer.gate_up, slots, USED, how, card, "silu", count=EXPERTS)
    assert isinstance(batch.layer.gate_up, Tensor)
    return mixture.multiply_gate_up(batch.x, batch.layer.gate_up, batch.routing, how, card, "silu")


def down(batch: Batch, inner: Tensor, slots: SortedSlots, how: ExpertTile, card: DeviceInfo) -> Tensor:
    """The second product: of slots, or added up for each token where there are no tiles."""
    if how.stages:
        return mixture.multiply_tiles(inner, batch.layer.down, slots, USED, how, card, count=EXPERTS)
    assert isinstance(batch.layer.down, Tensor)
    return mixture.multiply_down(inner, batch.layer.down, batch.routing, how, card)


class Tiling(NamedTuple):
    """One way to make one product, "gate_up" or "down"."""

    product: str
    how: ExpertTile
    check: Callable[[], float]
    calls: Sequence[Callable[[], Tensor]]


def tilings(rows: int, batches: Sequence[Batch], card: DeviceInfo, table: Tables) -> Iterator[Tiling]:
    """Those with so many rows."""
    count, first = len(batches[0].x) * USED, batches[0]
    slots = [mixture.sort_slots(b.routing.experts, EXPERTS, rows, card) for b in batches]
    some = slots[0].order[:: max(1, count // 64)].long()
    at = some if rows == 1 else torch.argsort(slots[0].order)[some]
    want = exact_inner(first, some)
    for how in table[0][rows]:
        calls = [partial(gate_up, b, s, how, card) for b, s in zip(batches, slots, strict=True)]
        yield Tiling("gate_up", how, partial(error_of, calls[0], at, want), calls)
    inners = [noise(count, WIDTH) for _ in batches]
    if rows == 1:
        some, at = torch.zeros(1, dtype=torch.int64), torch.arange(USED, device=first.x.device)
    want = exact_outer(first, inners[0][at], at if rows == 1 else some)
    if rows == 1:
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
        made.append(Batch(layer, x, BaseOps.route(ops, x, layer.router, USED, normalize=True)))
    return made


def floors(batches: Sequence[Batch]) -> dict[str, float]:
    """Microseconds of each product, on average over the layers, and the experts used."""
    used = sum(len(set(b.routing.experts.flatten().tolist())) for b in batches) / len(batches)
    numbers, slots = WIDTH * HIDDEN, batches[0].routing.experts.numel()
    size = 2 if isinstance(batches[0].layer.down, Tensor) else 1
    first, second = (max(used * n * size / READ, 2 * slots * n / MULTIPLY) / 1e6 for n in (2 * numbers, numbers))
    return {
        "experts": round(used, 1),
        "gate_up": round(first, 2),
        "down": round(second, 2),
        "all": round(first + second, 2),
    }


def whole(
    batches: Sequence[Batch], ops: TritonOps, how: ExpertConfig, router: GemmConfig
) -> list[Callable[[], Tensor]]:
    """All launches of a mixture."""

    def call(batch: Batch) -> Tensor:
        routing = mixture.route(batch.x, batch.layer.router, USED, router, ops.card, ops.arrived, normalize=True)
        return through(batch, routing, how, ops.card)

    return [partial(call, batch) for batch in batches]


def through(batch: Batch, routing: Routing, how: ExpertConfig, card: DeviceInfo) -> Tensor:
    """The experts alone."""
    first, second = batch.layer.gate_up, batch.layer.down
    if isinstance(first, QuantizedMatrix) and isinstance(second, QuantizedMatrix):
        return mixture.quantized_experts(batch.x, routing, first, second, "silu", how, card)
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    return mixture.experts(batch.x, routing, first, second, "silu", how, card)


def whole_error(batch: Batch, ops: TritonOps, how: ExpertConfig, router: GemmConfig) -> float:
    """The relative error of some tokens of all launches, against float32 with the experts that the router chose."""
    layer = batch.layer
    routing = mixture.route(batch.x, layer.router, USED, router, ops.card, ops.arrived, normalize=True)
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
    exact = batch.x.double() @ batch.layer.router.double().T
    chosen = exact.gather(1, routing.experts.long())
    below = (exact.topk(USED).values - chosen.sort(-1, descending=True).values).abs().max()
    apart = (chosen.softmax(-1) - routing.weights).abs().max()
    distinct = bool(routing.experts.sort(-1).values.diff(dim=-1).gt(0).all())
    return float(torch.maximum(below, apart)) if distinct else float("inf")


def routers(batches: Sequence[Batch], ops: TritonOps) -> list[Tried]:
    tokens, results = len(batches[0].x), []
    for how in ROUTERS:
        if tokens <= 16 or how.rows > 1:
            calls = [
                partial(mixture.route, b.x, b.layer.router, USED, how, ops.card, ops.arrived, normalize=True)
                for b in batches
            ]
            results.append(attempt(how, partial(routing_error, calls[0], batches[0]), calls))
    return results


def measure(tokens: int, layers: Sequence[Layer], ops: TritonOps) -> dict[str, Any]:
    """Every tiling at so many tokens, and all launches: as configured, and with the fastest tilings."""
    batches, plain = batches_of(tokens, layers, ops), isinstance(layers[0].down, Tensor)
    table, tried_rows = ((GATE_UP, DOWN), ROWS) if plain else (EIGHT_BITS, EIGHT_BIT_TOKENS)
    kind = "bfloat16" if plain else "e4m3"
    found: dict[str, Any] = {"tokens": tokens, "kind": kind, "floor": floors(batches), "gate_up": [], "down": []}
    best: list[ExpertConfig] = []
    for rows in tried_rows[tokens]:
        own: dict[str, tuple[float, ExpertTile]] = {}
        for each in tilings(rows, batches, ops.card, table):
            tried = attempt(each.how, each.check, each.calls)
            found[each.product].append(tried._asdict())
            if tried.error < 5e-3 and (each.product not in own or tried.us < own[each.product][0]):
                own[each.product] = tried.us, each.how
        if len(own) == 2:
            best.append(ExpertConfig(own["gate_up"][1], own["down"][1]))
    found["routers"] = [each._asdict() for each in (routers(batches, ops) if plain else [])]
    now = mixture.expert_config(tokens, USED, EXPERTS, HIDDEN, WIDTH)
    now = now if plain else mixture.quantized_expert_config(tokens, USED, EXPERTS)
    router = mixture.router_config(tokens, HIDDEN)
    found["around"] = around(batches, ops, now.gate_up.rows)
    found["now"] = attempt(
        (now, router), partial(whole_error, batches[0], ops, now, router), whole(batches, ops, now, router)
    )._asdict()
    found["best"] = []
    for how in best:
        check = partial(whole_error, batches[0], ops, how, router)
        found["best"].append(attempt(how, check, whole(batches, ops, how, router))._asdict())
    return found


def precompile(layers: Sequence[Layer], ops: TritonOps) -> None:
    """Compile every tiling, several at a time."""
    (batch,), works = batches_of(4, layers[:1], ops), list[Callable[[], object]]()
    slots, inner = mixture.sort_slots(batch.routing.experts, EXPERTS, 16, ops.card), noise(4 * USED, WIDTH)
    many = batch.routing.experts.new_zeros(8192, USED)
    eight = batch._replace(layer=Layer(batch.layer.router, *small_matrices(batch.layer)))
    for rows in EIGHT_BITS[0]:
        works += [partial(gate_up, eight, slots, how, ops.card) for how in EIGHT_BITS[0][rows]]
        works += [partial(down, eight, inner, slots, how, ops.card) for how in EIGHT_BITS[1][rows]]
    for rows in GATE_UP:
        works += [partial(gate_up, batch, slots, how, ops.card) for how in GATE_UP[rows]]
        works += [partial(down, batch, inner, slots, how, ops.card) for how in DOWN[rows]]
        works += [partial(mixture.sort_slots, each, EXPERTS, rows, ops.card) for each in (batch.routing.experts, many)]
    works += [
        partial(mixture.route, batch.x, batch.layer.router, USED, how, ops.card, ops.arrived, normalize=True)
        for how in ROUTERS
    ]

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
        f"now {found['now']['us']} (error {found['now']['error']:.1e} {found['now']['failure']}), best "
        f"{min((each['us'] for each in found['best']), default=float('nan'))}"
    ]
    parts += [
        f"    {name:8} {each['us']:9.2f} us" + (f" of {floor[name]:9.2f}" if name in floor else "") + f"  {each['how']}"
        for name, each in lowest.items()
    ]
    return "\n".join([*parts, f"    sort {found['around']['sort']} us, combine {found['around']['combine']} us"])


@click.command("experts")
@click.option("--seconds", default=90.0, show_default=True, help="No batch size is begun after so many.")
@click.option("--json", "path", type=click.Path(path_type=Path), required=True, help="Where all rows are written.")
def command(seconds: float, path: Path) -> None:
    """Check and time a mixture of experts on this machine's CUDA device."""
    needed("the tests check every kernel on a CPU, too")
    began = time.monotonic()
    torch.manual_seed(0)
    ops, layers = TritonOps("cuda"), weights()
    precompile(layers, ops)
    about: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": list[Any](),
        "seconds": 0.0,
    }
    click.echo(f"{about['device']}, torch {about['torch']}, compiled after {time.monotonic() - began:.0f} s")
    small = in_eight_bits(layers)
    plans = [(tokens, layers) for tokens in TOKENS[:7]] + [(tokens, small) for tokens in EIGHT_BIT_TOKENS]
    for tokens, made in [*plans, *((tokens, layers) for tokens in TOKENS[7:])]:
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
