"""min_p, top_k and top_p as one threshold a row: what lies below it cannot be drawn.

Being thresholds on the logits, they keep every token that ties with the last one kept (as vLLM does), so the answer
depends neither on the order of equal logits nor on who else is in the batch. Nothing is sorted but the head.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HEAD = 64
"""How many of the greatest logits are looked at first. Most nuclei are smaller."""


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Set to -inf, in place, what min_p, then top_k, then top_p exclude (each of what the ones before left).

    logits [R, V] float32, already divided by the temperature. top_k [R] int64, 0 for off; top_p [R] float64, 1 for off;
    min_p [R] float32, 0 for off.
    """
    vocab = logits.shape[1]
    peak = logits.amax(1, keepdim=True)
    floor = peak + min_p.log()[:, None]
    top_k = torch.where(top_k < vocab, top_k, 0)
    nucleus = bool((top_p < 1).any())
    width = max(_HEAD * nucleus, int(top_k.max()) + 1)
    while True:
        width = min(width, vocab)
        head = logits.topk(width, 1).values
        kth = head.gather(1, (top_k - 1).clamp_(min=0)[:, None])
        low = torch.maximum(floor, torch.where(top_k[:, None] > 0, kth, -torch.inf))
        if not nucleus:
            break
        last, inside = _nucleus(logits, head, peak, low, top_p)
        if width == vocab or not bool((inside == width).any()):
            low = torch.maximum(low, last)
            break
        width *= 8
    logits.masked_fill_(logits < low, -torch.inf)


def _nucleus(logits: Tensor, head: Tensor, peak: Tensor, low: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The least logit in each row's nucleus [R, 1], -inf for rows without top_p, and how many of `head` are in it [R].

    A nucleus is as few of the likeliest tokens as have `top_p` of the mass of all above `low`. Summed in double
    precision: how a sum is cut over threads must not move its edge.
    """
    mass = (logits - peak).exp_().masked_fill_(logits < low, 0.0).sum(1, keepdim=True, dtype=torch.float64)
    weight = (head - peak).exp_().masked_fill_(head < low, 0.0).double()
    before = weight.cumsum(1) - weight
    wanted = top_p[:, None] < 1
    inside = ((before < top_p[:, None] * mass) & (head >= low) & wanted).sum(1)
    last = head.gather(1, (inside - 1).clamp_(min=0)[:, None])
    return torch.where(wanted, last, -torch.inf), inside
