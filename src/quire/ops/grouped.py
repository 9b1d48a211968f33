"""Products of runs of rows, each with a matrix of its own, and their sums: what experts are made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]
"""(x [T, in], weight [out, in]) -> [T, out]."""


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, product: Product = F.linear) -> Tensor:
    """See `Ops.grouped_linear`. On a GPU, bfloat16 rows of 16 bytes take torch's grouped GEMM."""
    if not x.is_cuda:
        stops = ends.tolist()
        runs = zip(weight, [0, *stops], stops, strict=False)
        return torch.cat([product(x[start:stop], each) for each, start, stop in runs if start < stop])
    if x.dtype is torch.bfloat16 and all(size % 8 == 0 for size in weight.shape[1:]):
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return by_owner(x, weight, ends, product)


def by_owner(x: Tensor, weight: Tensor, ends: Tensor, product: Product) -> Tensor:
    """The same, every matrix multiplying every row: whose rows are whose is known on the device alone."""
    owner = torch.searchsorted(ends, torch.arange(len(x), device=x.device, dtype=ends.dtype), right=True)[:, None]
    total = x.new_zeros(len(x), weight.shape[1])
    for e, each in enumerate(weight):
        total = torch.where(owner == e, product(x, each), total)
    return total


def combine_experts(made: Tensor, shares: Tensor, *, whole: bool) -> Tensor:
    """See `Ops.mix`."""
    shares = shares / shares.sum(-1, keepdim=True) if whole else shares
    return (made * shares.to(made.dtype)[..., None]).sum(1)


def combine_experts_in_order(made: Tensor, shares: Tensor, *, whole: bool) -> Tensor:
    """See `Ops.mix`; a token's sums are made in one order, however many tokens there are."""
    shares = shares / in_order(shares.unbind(1))[:, None] if whole else shares
    parts = (made * shares.to(made.dtype)[..., None]).float()
    return in_order(parts.unbind(1)).to(made.dtype)


def in_order(parts: tuple[Tensor, ...]) -> Tensor:
    """Their sum, one after the other."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
