"""`python -m benchmarks.layers`: layers of decoding, Llama 3.1 8B's, one after the other in a captured graph.

What a change of one kernel does to those beside it is seen here in seconds, without a model or an engine. Products are
timed by themselves, too, with matrices from memory and with one that is in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import click
import torch
import triton
from torch import Tensor

from benchmarks.card import needed
from benchmarks.integers import made
from benchmarks.kernel_cases import MATRICES, PAGE, batch_of, noise
from benchmarks.kernels import replayed, timed
from benchmarks.steps import lines, traced
from quire.ops.operands import Angles, Gate, IntegerMatrix, Norm, NormedRows, QuantizedMatrix, Scores
from quire.ops.ragged import LayerKV
from quire.ops.triton.ops import TritonOps

KINDS = ("bf16", "fp8", "awq", "q4_k", "q8_0")
PRODUCTS = ("8b qkv", "8b o", "8b gate_up", "8b down")
LAYERS, HEADS, GROUPS, DIM = 8, 32, 8, 128

AnyWeight = Tensor | QuantizedMatrix | IntegerMatrix


def weights(kind: str, name: str, count: int = 4) -> Sequence[AnyWeight]:
    """Random matrices of a kind: together they do not fit into the L2 cache."""
    if kind not in ("bf16", "fp8"):
        return made(kind, name, count).matrices
    outputs, inputs = MATRICES[name]
    plain = [noise(outputs, inputs).mul_(inputs**-0.5) for _ in range(count)]
    if kind == "bf16":
        return plain
    scale = torch.full((outputs, 1), 1 / 64, device="cuda")
    return [QuantizedMatrix(each.mul_(64).to(torch.float8_e4m3fn), scale, inputs) for each in plain]


class Layers:
    """Layers of one kind of matrix, and a step of so many sequences of `length` tokens."""

    def __init__(self, every: Sequence[Sequence[AnyWeight]], rows: int, length: int) -> None:
        self.ops, self.every = TritonOps("cuda"), every
        pages = rows * -(-length // PAGE) + 1
        self.kv = [LayerKV(*(noise(pages, GROUPS, PAGE, DIM) for _ in range(2))) for _ in range(4)]
        self.batch = batch_of([(length - 1, 1)] * rows, pages)
        self.x, self.residual = noise(rows, HEADS * DIM), noise(rows, HEADS * DIM)
        self.norm = Norm(noise(HEADS * DIM).abs(), 1e-5)
        turns = noise(rows, DIM // 2, dtype=torch.float32)
        self.angles = Angles(turns.cos(), turns.sin())

    def multiply(self, x: Tensor | NormedRows, weight: AnyWeight, gate: Gate = "") -> Tensor:
        """A product, of a norm that was made for it."""
        if isinstance(weight, Tensor):
            assert isinstance(x, Tensor)
            return self.ops.linear(x, weight, None, gate)
        if isinstance(x, Tensor):
            return self.ops.quantized_linear(x, weight, None, gate)
        return self.ops.multiply_normed(x, weight, None, gate)

    def add_norm(self, x: Tensor, residual: Tensor, weight: AnyWeight) -> tuple[Tensor | NormedRows, Tensor]:
        """The norm that the product with `weight` reads."""
        if isinstance(weight, Tensor):
            return self.ops.add_norm(x, residual, self.norm)
        return self.ops.add_norm_rounded(x, residual, self.norm, weight)

    def __call__(self) -> Tensor:
        """What the last layer adds."""
        ops, x, residual = self.ops, self.x, self.residual.clone()
        batch = ops.prepare(self.batch)
        for i in range(LAYERS):
            qkv, out, gate_up, down = (own[i % len(own)] for own in self.every)
            read, residual = self.add_norm(x, residual, qkv)
            kv = self.kv[i % len(self.kv)]
            mixed = ops.self_attention(self.multiply(read, qkv), HEADS, kv, batch, self.angles, Scores(DIM**-0.5))
            x = self.multiply(mixed.flatten(1), out)
            read, residual = self.add_norm(x, residual, gate_up)
            if isinstance(gate_up, Tensor) or isinstance(down, Tensor):
                x = self.multiply(self.multiply(read, gate_up, "silu"), down)
            else:
                x = ops.quantized_mlp(read, gate_up, down, "silu")
        return x

    def captured(self) -> torch.cuda.CUDAGraph:
        """As a graph, replayed once."""
        self()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        graph.replay()
        return graph


def in_cache(every: Sequence[Sequence[AnyWeight]], rows: int) -> None:
    """Say what each product takes with matrices from memory, and with one again and again."""
    for name, own in zip(PRODUCTS, every, strict=True):
        gate: Gate = "silu" if "gate" in name else ""
        chain, x = Layers(every, rows, PAGE), noise(rows, MATRICES[name][1])
        calls = [partial(chain.multiply, x, weight, gate) for weight in own]
        click.echo(f"  {name:10} from memory {replayed(calls):7.2f} us, again {replayed(calls[:1]):7.2f}")


@click.command("layers")
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, default=("awq",), show_default=True)
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 16, 64), show_default=True)
@click.option("--length", default=750, show_default=True, help="Tokens of each sequence.")
@click.option("--top", default=8, show_default=True, help="Kernels shown.")
@click.option("--products", is_flag=True, help="Also products by themselves.")
def command(kinds: Sequence[str], batches: Sequence[int], length: int, top: int, products: bool) -> None:
    """What a layer of decoding takes, and what each of its kernels adds."""
    needed("the tests check the kernels on a CPU, too")
    click.echo(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    with torch.inference_mode():
        for kind in kinds:
            every = [weights(kind, name) for name in PRODUCTS]
            for rows in batches:
                graph = Layers(every, rows, length).captured()
                click.echo(f"{kind} {rows}: {timed(graph, LAYERS, 40):.2f} us a layer")
                for line in lines(f"{kind} {rows}, a layer", traced(graph.replay), LAYERS, top):
                    click.echo(f"  {line}")
                if products:
                    in_cache(every, rows)


if __name__ == "__main__":
    command()
