"""Recurrent layers over ragged batches, in plain torch: the gated delta rule (Yang et al. 2025, Gated Delta Networks)
and the selective scan of Mamba 2 (Dao and Gu 2024).

A head's memory S [K, V] maps keys to values. Each token lets it fade, then corrects what it holds for its key, or, in
Mamba 2, adds to it:

    S = exp(g) S;  S = S + k (beta (v - k^T S))^T;  o = S^T q
    S = exp(d A) S;  S = S + B (d x)^T;  y = S^T C + D x

So the second is the first with k = B, v = d x, q = C, g = d A, and nothing to correct. Letters as in `ops/ragged.py`;
here H counts heads of values, G heads of keys, K and V are the numbers of a key and of a value, C = 2 G K + H V
channels pass through a causal convolution of W inputs, silu behind it, before they are q, k, v (x, B, C in Mamba 2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from quire.ops.operands import DeltaInputs, DeltaWeights, ScanInputs, ScanWeights
from quire.ops.ragged import LayerState, RaggedBatch, StateSlots

Inputs = TypeVar("Inputs", DeltaInputs, ScanInputs)

CHUNK = 64
"""Tokens of a long span computed at once."""

FEW = 8
"""Tokens of a span up to which it is computed token by token, all such spans of one length together."""

KEY_EPS = 1e-6
"""Is added to the squared lengths of queries and keys."""


class Run(NamedTuple):
    """What is read, float32: q, k [.., n, H, K]; v [.., n, H, V]; decay, beta [.., n, H]; decay is g. beta: None where
    values are added as they are."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None

    def part(self, which: slice | Tensor) -> Run:
        """Some tokens."""
        beta = None if self.beta is None else self.beta[which]
        return Run(self.q[which], self.k[which], self.v[which], self.decay[which], beta)


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), of steps that round alike wherever a number lies, see `ops/batch_invariant.py`."""
    return x / x.neg().exp_().add_(1.0)


def gated_delta(x: DeltaInputs, weights: DeltaWeights, state: LayerState, starts: Tensor, states: StateSlots) -> Tensor:
    """See `Ops.gated_delta`. starts: the batch's `query_start`."""
    mixed = convolve(x.mixed(), weights.convolution, state.window, starts, states)
    heads, values = state.memory.shape[1], state.memory.shape[3]
    keys = (mixed.shape[1] - heads * values) // 2
    q, k, v = torch.split(mixed, [keys, keys, heads * values], -1)
    q, k = (unit(torch.unflatten(each, 1, (-1, state.memory.shape[2]))) for each in (q, k))
    repeat = heads // q.shape[1]
    q, k = (each.repeat_interleave(repeat, 1) for each in (q * q.shape[-1] ** -0.5, k))
    run = Run(
        q,
        k,
        torch.unflatten(v, 1, (heads, values)),
        -weights.fading.exp() * softplus(x.rise.flatten(1).float() + weights.rise),
        1.0 / (1.0 + x.beta.flatten(1).float().neg().exp()),
    )
    out = recur(run, state.memory, starts, states)
    centred = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + weights.norm.eps)
    normed = weights.norm.weight * centred.to(x.gate.dtype)
    return (normed.float() * silu(x.gate.float().reshape(out.shape))).to(x.gate.dtype).flatten(1)


def selective_scan(
    x: ScanInputs, weights: ScanWeights, state: LayerState, starts: Tensor, states: StateSlots
) -> Tensor:
    """See `Ops.selective_scan`. starts: the batch's `query_start`."""
    mixed = convolve(x.mixed, weights.convolution, state.window, starts, states, weights.bias)
    heads, keys, values = state.memory.shape[1:]
    inner = heads * values
    groups = (mixed.shape[1] - inner) // (2 * keys)
    values_in, k, q = torch.split(mixed, [inner, groups * keys, groups * keys], -1)
    k, q = (torch.unflatten(each, 1, (groups, keys)).repeat_interleave(heads // groups, 1) for each in (k, q))
    step = softplus(x.step.float() + weights.rise).clamp(*weights.step_limit)
    v = torch.unflatten(values_in, 1, (heads, values))
    run = Run(q, k, v * step[..., None], -weights.fading.exp() * step, None)
    out = recur(run, state.memory, starts, states) + v * weights.skip[:, None]
    gated = torch.unflatten(out.flatten(1) * silu(x.gate.float()), 1, (groups, -1))
    centred = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + weights.norm.eps)
    return (weights.norm.weight.float() * centred.flatten(1)).to(x.mixed.dtype)


def with_padding(
    rule: Callable[..., Tensor], x: Inputs, weights: object, state: LayerState, batch: RaggedBatch
) -> Tensor:
    """`rule`, one of the two above, of the tokens that spans have; zeros for those behind, which fill up a step."""
    starts, states = batch.query_start, slots_of(batch)
    fed, size = int(starts[-1]), len(x[0])
    inputs = type(x)(*(each[:fed] for each in x))
    slots = StateSlots(states.source, states.target[:fed], states.snapshot[:fed])
    return padded(rule(inputs, weights, state, starts, slots), size)


def padded(out: Tensor, size: int) -> Tensor:
    """Rows out [n, ..] and zeros, `size` in all."""
    return out if len(out) == size else torch.cat((out, out.new_zeros(size - len(out), *out.shape[1:])))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), without overflow."""
    return x.clamp(min=0) + torch.log1p(x.abs().neg().exp())


def slots_of(batch: RaggedBatch) -> StateSlots:
    """The slots of a batch that has some."""
    if batch.states is None:
        raise ValueError("a model with recurrent layers needs a batch with states")
    return batch.states


def unit(x: Tensor) -> Tensor:
    """x [.., K] of length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + KEY_EPS)


def convolve(
    x: Tensor, weight: Tensor, window: Tensor, starts: Tensor, states: StateSlots, bias: Tensor | None = None
) -> Tensor:
    """x [T, C], weight [C, W], windows [M, W - 1, C] -> silu of the convolution, [T, C] float32; writes windows."""
    width, start = weight.shape[1], starts.long()
    kept = width - 1
    span = torch.repeat_interleave(torch.arange(len(states.source), device=x.device), start.diff())
    offset = torch.arange(len(x), device=x.device) - start[span]
    before = window[states.source].flatten(0, 1)
    inputs = torch.cat((before, x))
    at = offset[:, None] + torch.arange(1 - width, 1, device=x.device)
    at = torch.where(at < 0, (span * kept)[:, None] + at + kept, (len(before) + start[span])[:, None] + at)
    out = inputs[at[:, 0]].float() * weight[:, 0].float()
    for i in range(1, width):
        out += inputs[at[:, i]].float() * weight[:, i].float()
    tokens, slots = states.kept()
    window[slots] = inputs[at[tokens, 1:]]
    return silu(out if bias is None else out + bias.float())


def recur(run: Run, memory: Tensor, starts: Tensor, states: StateSlots) -> Tensor:
    """Outputs [T, H, V] of every span; writes memories [M, H, K, V]."""
    out = torch.empty_like(run.v)
    tokens, slots = states.kept()
    after = dict[int, Tensor]()
    for piece in pieces(starts, tokens):
        source = memory[states.source[piece.spans]]
        if piece.cuts:
            state = source[0]
            for begin, end in pairwise(piece.cuts):
                out[begin:end], state = chunked(run.part(slice(begin, end)), state)
                after[end - 1] = state
            continue
        for at in piece.tokens:
            source, out[at] = update(run.part(at), source)
            after.update(zip(at.tolist(), source.unbind(), strict=True))
    if len(tokens):
        memory[slots] = torch.stack([after[token] for token in tokens.tolist()])
    return out


class Piece(NamedTuple):
    """Spans of one step that are computed together.

    cuts: of one long span: where it begins, the tokens before which its state is needed, and where it ends. tokens: of
    short spans of one length, the first of each [spans], then the second of each, and so on.
    """

    spans: list[int]
    cuts: list[int]
    tokens: Sequence[Tensor]


def pieces(starts: Tensor, kept: Tensor) -> list[Piece]:
    """The spans of a batch: those of up to FEW tokens together. kept [M]: tokens after which states are kept."""
    begin, short, found = starts.tolist(), dict[int, list[int]](), list[Piece]()
    for s, (start, stop) in enumerate(pairwise(begin)):
        if stop - start > FEW:
            inner = sorted({1 + t for t in kept.tolist() if start <= t < stop - 1})
            found.append(Piece([s], [start, *inner, stop], ()))
        elif stop > start:
            short.setdefault(stop - start, []).append(s)
    for n, spans in short.items():
        first = torch.tensor([begin[s] for s in spans], device=starts.device)
        found.append(Piece(spans, [], [first + i for i in range(n)]))
    return found


def update(one: Run, memory: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of S sequences: memories [S, H, K, V] -> memories after it, outputs [S, H, V]."""
    faded, change = memory * one.decay.exp()[..., None, None], one.v
    if one.beta is not None:
        change = (one.v - (faded * one.k[..., None]).sum(-2)) * one.beta[..., None]
    made = faded + one.k[..., None] * change[..., None, :]
    return made, (made * one.q[..., None]).sum(-2)


def chunked(run: Run, memory: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence of n tokens, CHUNK at a time: memory [H, K, V] -> outputs [n, H, V], memory after them.

    Within a chunk corrections depend on each other by a triangular system, which is solved for all at once.
    """
    parts = []
    for start in range(0, len(run.q), CHUNK):
        part = run.part(slice(start, start + CHUNK))
        q, k, changes = (each.transpose(0, 1) for each in part[:3])
        total = part.decay.t().cumsum(1)
        n = total.shape[1]
        lower = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        between = (total[:, :, None] - total[:, None]).masked_fill(~lower, float("-inf")).exp()
        since = total.exp()[..., None]
        if part.beta is not None:
            beta = part.beta.t()[..., None]
            system = (k @ k.transpose(1, 2) * between * beta).tril(-1)
            wanted = beta * (changes - (k * since) @ memory)
            changes = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        parts.append(((q * since) @ memory + (q @ k.transpose(1, 2) * between) @ changes).transpose(0, 1))
        left = (total[:, -1:] - total).exp()[..., None]
        memory = memory * since[:, -1:] + (k * left).transpose(1, 2) @ changes
    return torch.cat(parts), memory
