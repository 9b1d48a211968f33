"""`python -m benchmarks.mixtures`: mixtures of public models by format and tokens, and how far each is from its floor.

The floor: the bytes of the experts that are used and of the router at 4.57 TB/s, or the arithmetic at 770 TFLOP/s, of
8 bits at twice that, whichever takes longer. Times are those of router, experts and their sum in a captured graph, with
another x each time; those above 10 ms are of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import click
import torch
import triton
from torch import Tensor

from benchmarks.card import needed
from benchmarks.integers import integers, superblocks
from benchmarks.kernel_cases import noise
from benchmarks.kernels import MULTIPLY, READ, replayed
from quire.ops.integer import pack_floats, stack_integers
from quire.ops.operands import (
    NO_BIASES,
    ExpertBiases,
    ExpertMatrices,
    Gate,
    QuantizedMatrix,
    RouterWeights,
    Routing,
    TopK,
)
from quire.ops.triton.ops import TritonOps
from quire.ops.triton.precompile import Precompiler


class Shape(NamedTuple):
    """Of a layer's experts; they all have the same."""

    experts: int
    used: int
    hidden: int
    width: int
    gate: Gate = "silu"
    biased: bool = False
    groups: int = 1


SHAPES: Mapping[str, Shape] = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
    "deepseek-v3": Shape(256, 8, 7168, 2048, groups=8),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, "clamped", biased=True),
    "qwen3-next-80b-a3b": Shape(512, 10, 2048, 512),
    "olmoe-1b-7b": Shape(64, 8, 2048, 1024),
}

FORMATS = ("bf16", "fp8", "fp8 blocks", "int8", "awq", "gptq order", "mxfp4", "q4_k", "q8_0")
TOKENS = (1, 16, 64, 512, 4096)
LARGEST = 24e9
"""Bytes of a layer up to which it is measured."""

SLOW = 10_000.0
"""Microseconds above which a call is timed once."""

Weights = Tensor | ExpertMatrices


def matrices(kind: str, shape: Shape, outputs: int, inputs: int) -> Weights | None:
    """Of all experts, random; those of integers are all the same. None where the format has no such shape. Columns that
    are moved are those of gate and up, as in a model that was loaded."""
    count = shape.experts
    if kind == "bf16":
        return noise(count, outputs, inputs).mul_(inputs**-0.5)
    if kind.startswith(("fp8", "int8")):
        if kind == "fp8 blocks" and (outputs % 128 or inputs % 128):
            return None
        width, height = (128, 128) if kind == "fp8 blocks" else (inputs, 1)
        dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
        weight = torch.cat([noise(outputs, inputs).mul_(40).to(dtype) for _ in range(count)])
        scale = torch.full((count * outputs, inputs // width), inputs**-0.5 / 40, device="cuda")
        return QuantizedMatrix(weight, scale, width, height=height)
    if kind == "mxfp4":
        codes = torch.randint(0, 16, (outputs, inputs), device="cuda", dtype=torch.uint8)
        one = pack_floats(codes, torch.full((outputs, inputs // 32), 120, device="cuda", dtype=torch.uint8))
    elif kind == "q4_k":
        if inputs % 256:
            return None
        one = superblocks(kind, outputs, inputs)
    else:
        one = integers("awq" if kind == "gptq order" else kind, outputs, inputs)
    if kind == "gptq order":
        one = one._replace(order=torch.randperm(inputs, device="cuda") if inputs == shape.hidden else None)
    return stack_integers([one] * count)


def nbytes(weights: Weights) -> int:
    """With scales."""
    if isinstance(weights, QuantizedMatrix):
        return weights.weight.nbytes + weights.scale.nbytes
    return weights.nbytes


class Mixture:
    """A layer's router and experts in a format."""

    def __init__(self, shape: Shape, kind: str, gate_up: Weights, down: Weights) -> None:
        self.ops, self.shape, self.kind, self.gate_up, self.down = TritonOps("cuda"), shape, kind, gate_up, down
        grouped = shape.groups > 1
        choice = TopK(shape.used, True, grouped, shape.groups, max(1, shape.groups // 2), group_best=2)
        correction = noise(shape.experts, dtype=torch.float32).mul_(0.01) if grouped else None
        weight = noise(shape.experts, shape.hidden).mul_(shape.hidden**-0.5)
        self.router = RouterWeights(weight, choice, correction)
        self.biases = NO_BIASES
        if shape.biased:
            self.biases = ExpertBiases(noise(shape.experts, 2 * shape.width), noise(shape.experts, shape.hidden))

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        routing = self.ops.route(x, self.router)
        first, last = self.gate_up, self.down
        if isinstance(first, Tensor):
            assert isinstance(last, Tensor)
            return self.ops.experts(x, routing, first, last, self.shape.gate, self.biases)
        assert not isinstance(last, Tensor)
        return self.ops.quantized_experts(x, routing, first, last, self.shape.gate, self.biases)

    def floor(self, routings: Sequence[Routing]) -> tuple[float, float]:
        """(microseconds, experts used), on average."""
        shape = self.shape
        used = sum(len(torch.unique(each.experts)) for each in routings) / len(routings)
        read = used / shape.experts * (nbytes(self.gate_up) + nbytes(self.down)) + self.router.weight.nbytes
        slots = routings[0].experts.numel()
        rate = 2 * MULTIPLY if self.kind.startswith(("fp8", "int8")) else MULTIPLY
        work = 2 * slots * 3 * shape.hidden * shape.width / rate
        return max(read / READ, work) / 1e6, used


def made(shape: Shape, kind: str) -> Mixture | None:
    """None where there is no such layer, or it is too large."""
    numbers = 3 * shape.experts * shape.hidden * shape.width
    if numbers * (2 if kind == "bf16" else 1) > LARGEST:
        return None
    gate_up = matrices(kind, shape, 2 * shape.width, shape.hidden)
    down = matrices(kind, shape, shape.hidden, shape.width)
    return None if gate_up is None or down is None else Mixture(shape, kind, gate_up, down)


def took(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds a call."""
    calls[0]()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    calls[-1]()
    end.record()
    torch.cuda.synchronize()
    once = 1e3 * begin.elapsed_time(end)
    return once if once > SLOW else replayed(calls)


def precompile(works: Sequence[Callable[[], object]]) -> None:
    """Compile what all of these launch, several at a time."""

    @contextmanager
    def watch() -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: None

    Precompiler(16, watch)(works)


def measure(mixture: Mixture, inputs: Sequence[Tensor]) -> str:
    """A row of the table."""
    calls = [partial(mixture, x) for x in inputs]
    floor, used = mixture.floor([mixture.ops.route(x, mixture.router) for x in inputs])
    with suppress(torch.cuda.OutOfMemoryError):
        us = took(calls)
        return f"{us:10.1f} us, floor {floor:9.1f}, {us / floor:6.2f} times, {used:5.1f} experts"
    return "too much memory"


@click.command("mixtures")
@click.option("--shape", "shapes", multiple=True, type=click.Choice(list(SHAPES)), default=tuple(SHAPES))
@click.option("--format", "kinds", multiple=True, type=click.Choice(FORMATS), default=FORMATS)
@click.option("--tokens", "counts", multiple=True, type=int, default=TOKENS, show_default=True)
def command(shapes: Sequence[str], kinds: Sequence[str], counts: Sequence[int]) -> None:
    """What router and experts of a layer take, by shape, format and number of tokens."""
    needed("the tests check the kernels on a CPU, too")
    click.echo(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    with torch.inference_mode():
        for name in shapes:
            shape = SHAPES[name]
            own = {kind: mixture for kind in kinds if (mixture := made(shape, kind)) is not None}
            inputs = {count: [noise(count, shape.hidden) for _ in range(4 if count < 16 else 2)] for count in counts}
            precompile([partial(each, inputs[count][0]) for each in own.values() for count in counts])
            for kind, mixture in own.items():
                for count in counts:
                    click.echo(f"{name:18} {kind:10} {count:5} {measure(mixture, inputs[count])}")


if __name__ == "__main__":
    command()
