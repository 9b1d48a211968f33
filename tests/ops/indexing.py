"""Sequences fed through an indexer and attention to what it chose, and both by their formulas."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from quire.ops.base import Ops
from quire.ops.operands import Angles, Norm
from quire.ops.ragged import LayerKV, RaggedBatch
from tests.ops.batches import Pages, poisoned

T = TypeVar("T")

CPU = torch.device("cpu")
HEADS, LATENTS, ROTATED, INDEX_HEADS, DIM = 3, 24, 8, 6, 16
LENGTHS = (150, 7, 41)
"""Tokens of each sequence: some far above what is chosen, one below."""


class Inputs(NamedTuple):
    """Of one token a row: queries and their rotated part, latents with rotated keys, the indexer's queries, weights and
    keys, and angles."""

    q: Tensor
    rotated: Tensor
    compressed: Tensor
    index_q: Tensor
    weights: Tensor
    key: Tensor
    cos: Tensor
    sin: Tensor

    def of(self, rows: Sequence[int] | Tensor) -> Inputs:
        return Inputs(*(each[rows] for each in self))


def draw(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    sizes = (
        (HEADS, LATENTS + ROTATED),
        (HEADS, ROTATED),
        (LATENTS + ROTATED,),
        (INDEX_HEADS, DIM),
        (INDEX_HEADS,),
        (DIM,),
    )
    turns = torch.rand(count, ROTATED // 2, generator=generator) * 6
    return Inputs(
        *(torch.randn(count, *size, generator=generator).to(dtype) for size in sizes), turns.cos(), turns.sin()
    )


NORM = Norm(torch.linspace(0.5, 1.5, LATENTS), 1e-6)
INDEX_NORM = Norm(torch.linspace(0.5, 1.5, DIM), 1e-6, torch.linspace(-0.2, 0.3, DIM), centred=True)


def like(norm: Norm, x: Tensor) -> Norm:
    """In the dtype and on the device of x."""
    return norm._replace(weight=norm.weight.to(x), bias=None if norm.bias is None else norm.bias.to(x))


def on(record: T, device: torch.device) -> T:
    """A dataclass with its tensors on a device."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}  # type: ignore[arg-type]
    return type(record)(**{n: v.to(device) if isinstance(v, Tensor) else v for n, v in values.items()})


def attend(ops: Ops, x: Inputs, kv: LayerKV, batch: RaggedBatch, count: int) -> tuple[Tensor, Tensor]:
    """What a step stores, chooses and returns: slots chosen and results."""
    batch = ops.prepare(batch)
    angles, halves = Angles(x.cos, x.sin, True), Angles(x.cos, x.sin)
    rotated = ops.norm_rope_store_latent(x.q, x.compressed, kv, batch, angles, like(NORM, x.q))
    ops.store_index_key(x.key, kv, batch, halves, like(INDEX_NORM, x.q))
    chosen = ops.choose_positions(x.index_q.clone(), x.weights, kv, batch, halves, count)
    absorbed = x.q[..., :LATENTS].contiguous()
    return chosen, ops.latent_attention(absorbed, rotated, kv, batch, 0.2, chosen)


class Fed:
    """Sequences fed in some order, a step after the other, and what each token's results were."""

    def __init__(
        self,
        ops: Ops,
        count: int,
        *,
        size: int = 4,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        lengths: Sequence[int] = LENGTHS,
    ) -> None:
        """lengths: tokens of each sequence, of those that there are."""
        self.ops, self.count, self.pages, self.device, self.lengths = ops, count, Pages(200, size), device, lengths
        self.kv = on(poisoned(200, 1, size, ROTATED, dtype, value_dim=LATENTS, index_dim=DIM), device)
        self.inputs = [draw(n, dtype, seed) for seed, n in enumerate(LENGTHS)]
        self.fed = [0] * len(LENGTHS)
        self.results: list[list[Tensor]] = [[] for _ in LENGTHS]
        self.chosen: list[list[Tensor]] = [[] for _ in LENGTHS]

    def step(self, spans: Sequence[tuple[int, int]]) -> None:
        """(sequence, number of its next tokens)."""
        batch = on(self.pages.batch([(s, self.fed[s], [0] * n) for s, n in spans], spare=1), self.device)
        x = [self.inputs[s].of(range(self.fed[s], self.fed[s] + n)) for s, n in spans]
        together = Inputs(*(torch.cat(each).to(self.device) for each in zip(*x, strict=True)))
        chosen, made = attend(self.ops, together, self.kv, batch, self.count)
        widths = [n for _, n in spans]
        for (s, n), slots, out in zip(spans, chosen.split(widths), made.split(widths), strict=True):
            self.chosen[s].append(slots.cpu())
            self.results[s].append(out.cpu())
            self.fed[s] += n

    def chunks(self, seed: int) -> Tensor:
        """All sequences in ragged chunks -> results of every token."""
        chance, lengths = random.Random(seed), dict(enumerate(self.lengths))
        while left := [s for s in lengths if self.fed[s] < lengths[s]]:
            some = chance.sample(left, chance.randint(1, len(left)))
            self.step([(s, min(chance.choice((1, 3, 40, 64)), lengths[s] - self.fed[s])) for s in some])
        return self.all()

    def all(self) -> Tensor:
        return torch.cat([torch.cat(each) for each in self.results if each])

    def positions(self, s: int) -> list[list[int]]:
        """What each token of a sequence attends to, by position."""
        size, table = self.pages.size, self.pages.held[s]
        at = {page * size + i: b * size + i for b, page in enumerate(table) for i in range(size)}
        return [
            [at[slot] for slot in row] if t >= self.count else list(range(t + 1))
            for t, row in enumerate(torch.cat(self.chosen[s]).tolist())
        ]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves of the first ROTATED numbers of x [n, .., DIM], turned."""
    a, b, rest = x.split([ROTATED // 2, ROTATED // 2, x.shape[-1] - ROTATED], -1)
    shape = (len(x), *(1,) * (x.dim() - 2), ROTATED // 2)
    c, s = cos.view(shape), sin.view(shape)
    return torch.cat((a * c - b * s, b * c + a * s, rest), -1)


@cache
def naive(sequence: int, count: int) -> tuple[list[list[int]], Tensor]:
    """Positions that each token of a sequence of `Fed` attends to, and results, by the formulas, a token at a time in
    float64."""
    exact = Inputs(*(each.double() for each in draw(LENGTHS[sequence], seed=sequence)))
    keys = torch.nn.functional.layer_norm(
        exact.key,
        (DIM,),
        INDEX_NORM.weight.double(),
        INDEX_NORM.bias.double(),
        INDEX_NORM.eps,  # type: ignore[union-attr]
    )
    keys, q = (rotated(each, exact.cos, exact.sin) for each in (keys, exact.index_q))
    latents = torch.rms_norm(exact.compressed[:, :LATENTS], (LATENTS,), NORM.weight.double(), NORM.eps)

    def turned(each: Tensor) -> Tensor:
        shape = (len(each), *(1,) * (each.dim() - 2), ROTATED // 2)
        a, b, c, s = each[..., ::2], each[..., 1::2], exact.cos.view(shape), exact.sin.view(shape)
        return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)

    rests, turns = turned(exact.compressed[:, LATENTS:]), turned(exact.q[..., LATENTS:])
    seen, made = list[list[int]](), list[Tensor]()
    for t in range(len(keys)):
        scores = [float((exact.weights[t] * (q[t] @ keys[i]).clamp(min=0)).sum()) for i in range(t + 1)]
        order = sorted(range(t + 1), key=lambda i: (-scores[i], i))[:count]
        seen.append(sorted(order))
        about = (exact.q[t, :, :LATENTS] @ latents[seen[t]].T + turns[t] @ rests[seen[t]].T) * 0.2
        made.append(about.softmax(-1) @ latents[seen[t]])
    return seen, torch.stack(made)
