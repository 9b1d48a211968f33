"""Numbers to blocks of GGUF's types: the opposite of `ops.gguf_blocks`.

Types with one scale for 32 numbers take it from the largest number. K-quants search scales, and minima, for the least
squared error weighted by the numbers' size, as ggml-quants.c does: large weights matter most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

TINY = 1e-30


def encode(kind: str, values: Tensor) -> Tensor:
    """values float32 [N, numbers of a block] -> uint8 [N, bytes of a block]. Raises KeyError for a type of `BLOCKS`
    that is only read."""
    return ENCODERS[kind](values)


def as_bytes(numbers: Tensor) -> Tensor:
    """[N, n] of any dtype -> uint8 [N, bytes]."""
    return numbers.contiguous().view(torch.uint8).view(len(numbers), -1)


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, 0 where that is 0."""
    return torch.where(scale.abs() < TINY, 0.0, 1.0 / torch.where(scale.abs() < TINY, 1.0, scale))


def largest(values: Tensor) -> Tensor:
    """The number of largest magnitude of each row, with its sign, [.., 1]."""
    return values.gather(-1, values.abs().argmax(-1, keepdim=True))


def q8_0(values: Tensor) -> Tensor:
    """See `gguf_blocks.q8_0`."""
    scale = values.abs().amax(1, keepdim=True) / 127.0
    numbers = (values * inverse(scale)).round()
    return torch.cat((as_bytes(scale.half()), as_bytes(numbers.to(torch.int8))), 1)


def halves(numbers: Tensor) -> Tensor:
    """Numbers 0 to 15 [N, 32] -> 16 bytes, the first 16 in the low halves."""
    numbers = numbers.to(torch.uint8)
    return numbers[:, :16] | (numbers[:, 16:] << 4)


def fifths(numbers: Tensor) -> Tensor:
    """The fifth bits of numbers 0 to 31 [N, 32], 4 bytes."""
    bits = (numbers.to(torch.uint8) >> 4).view(len(numbers), 4, 8) << torch.arange(
        8, dtype=torch.uint8, device=numbers.device
    )
    return bits.sum(-1, dtype=torch.uint8)


def lowest_first(values: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """(scale, numbers 0 to most) of rows whose largest number becomes 0, or `most + 1` where it would be above."""
    scale = largest(values) / -((most + 1) // 2)
    numbers = (values * inverse(scale) + (most + 1) // 2 + 0.5).floor().clamp(0, most)
    return scale, numbers


def q4_0(values: Tensor) -> Tensor:
    """See `gguf_blocks.q4_0`."""
    scale, numbers = lowest_first(values, 15)
    return torch.cat((as_bytes(scale.half()), halves(numbers)), 1)


def q5_0(values: Tensor) -> Tensor:
    """See `gguf_blocks.q5_0`."""
    scale, numbers = lowest_first(values, 31)
    return torch.cat((as_bytes(scale.half()), fifths(numbers), halves(numbers.to(torch.uint8) & 15)), 1)


def with_minimum(values: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """(scale and minimum [N, 2], numbers 0 to most)."""
    low = values.amin(1, keepdim=True)
    scale = (values.amax(1, keepdim=True) - low) / most
    return torch.cat((scale, low), 1), ((values - low) * inverse(scale) + 0.5).floor().clamp(0, most)


def q4_1(values: Tensor) -> Tensor:
    """See `gguf_blocks.q4_1`."""
    about, numbers = with_minimum(values, 15)
    return torch.cat((as_bytes(about.half()), halves(numbers)), 1)


def q5_1(values: Tensor) -> Tensor:
    """See `gguf_blocks.q5_1`."""
    about, numbers = with_minimum(values, 31)
    return torch.cat((as_bytes(about.half()), fifths(numbers), halves(numbers.to(torch.uint8) & 15)), 1)


# ---------------------------------------------------------------- K-quants


def search_scale(groups: Tensor, most: int) -> Tensor:
    """groups [n, G], a column each -> the scale of each [G] with which numbers from -most to most - 1 fit best."""
    peak = largest(groups.t())[:, 0]
    weights, unit = groups.square(), groups * inverse(peak)
    weighted = weights * groups
    best, scale = torch.full_like(peak, -1.0), torch.zeros_like(peak)
    for step in range(-9, 10):
        numbers = (unit * -(most + 0.1 * step)).round_().clamp_(-most, most - 1)
        product, square = (weighted * numbers).sum(0), (weights * numbers.square_()).sum(0)
        share = product * inverse(square)
        found = product * share
        better = found > best
        best, scale = torch.where(better, found, best), torch.where(better, share, scale)
    return scale


def q6_k(values: Tensor) -> Tensor:
    """See `gguf_blocks.q6_k`."""
    groups = values.view(-1, 16, 16)
    scale = search_scale(groups.flatten(0, 1).t().contiguous(), 32).view(-1, 16)
    factor = (largest(scale) / -128.0).half()
    scales = (scale * inverse(factor.float())).round().clamp(-128, 127)
    step = factor.float()[..., None] * scales[..., None]
    numbers = ((groups * inverse(step)).round().clamp(-32, 31) + 32).to(torch.uint8).view(-1, 2, 4, 32)
    low = torch.cat(
        (numbers[:, :, 0] & 15 | (numbers[:, :, 2] & 15) << 4, numbers[:, :, 1] & 15 | numbers[:, :, 3] << 4), 2
    )
    high = torch.zeros_like(numbers[:, :, 0])
    for i in range(4):
        high |= (numbers[:, :, i] >> 4) << (2 * i)
    return torch.cat((low.flatten(1), high.flatten(1), as_bytes(scales.to(torch.int8)), as_bytes(factor)), 1)


def search_minimum(groups: Tensor, most: int, first: float, steps: int) -> tuple[Tensor, Tensor]:
    """groups [32, G], a column each -> (scale, minimum below 0 with its sign changed) [G] with which numbers from 0 to
    most fit best; `steps` + 1 scales are tried, a tenth of a number apart, `first` numbers from that of the range on.
    """
    weights = groups.square().mean(0).sqrt() + groups.abs()
    low = groups.amin(0).clamp(max=0.0)
    span = groups.amax(0) - low
    shifted, weighted = groups - low, weights * groups
    total, linear, square = weights.sum(0), weighted.sum(0), (weighted * groups).sum(0)
    scale, minimum, best = span / most, low, torch.full_like(span, torch.inf)
    # The first is that of the whole range.
    for wider in (0.0, *(first + 0.1 * i for i in range(steps + 1))):
        numbers = (shifted * ((wider + most) * inverse(span))).round_().clamp_(0, most)
        cross, own = (weighted * numbers).sum(0), weights * numbers
        one, two = own.sum(0), (own * numbers).sum(0)
        divisor = inverse((total * two - one.square()).clamp(min=0.0))
        step, least = (total * cross - linear * one) * divisor, (two * linear - one * cross) * divisor
        positive = least > 0
        step, least = torch.where(positive, cross * inverse(two), step), least.clamp(max=0.0)
        # The weighted sum of (step numbers + least - values)^2.
        found = step.square() * two + least.square() * total + square
        found += 2.0 * (step * least * one - step * cross - least * linear)
        better = (divisor > 0) & (found < best)
        best = torch.where(better, found, best)
        scale, minimum = torch.where(better, step, scale), torch.where(better, least, minimum)
    return scale, -minimum


def superblocks(values: Tensor, most: int, first: float, steps: int) -> tuple[Tensor, Tensor]:
    """(16 bytes of factors, scales and minima, numbers 0 to most [N, 8, 32])."""
    groups = values.view(-1, 8, 32)
    found = search_minimum(groups.flatten(0, 1).t().contiguous(), most, first, steps)
    scale, minimum = (each.view(-1, 8) for each in found)
    factors = torch.stack((scale.amax(1), minimum.amax(1)), 1).div(63.0).half()
    exact = factors.float()
    scales = (scale * inverse(exact[:, :1])).round().clamp(0, 63).to(torch.uint8)
    minima = (minimum * inverse(exact[:, 1:])).round().clamp(0, 63).to(torch.uint8)
    step = (exact[:, :1] * scales)[..., None]
    numbers = ((groups + (exact[:, 1:] * minima)[..., None]) * inverse(step)).round().clamp(0, most).to(torch.uint8)
    about = torch.cat(
        (
            scales[:, :4] | (scales[:, 4:] >> 4) << 6,
            minima[:, :4] | (minima[:, 4:] >> 4) << 6,
            (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4,
        ),
        1,
    )
    return torch.cat((as_bytes(factors), about), 1), numbers


def pairs(numbers: Tensor) -> Tensor:
    """Low halves of numbers [N, 8, 32] -> 128 bytes: 32 in the low halves of 32 bytes, then 32 in the high ones."""
    return ((numbers[:, ::2] & 15) | (numbers[:, 1::2] & 15) << 4).flatten(1)


def q4_k(values: Tensor) -> Tensor:
    """See `gguf_blocks.q4_k`."""
    about, numbers = superblocks(values, 15, -1.0, 20)
    return torch.cat((about, pairs(numbers)), 1)


def q5_k(values: Tensor) -> Tensor:
    """See `gguf_blocks.q5_k`."""
    about, numbers = superblocks(values, 31, -0.5, 15)
    fifth = ((numbers >> 4) << torch.arange(8, dtype=torch.uint8, device=numbers.device)[:, None]).sum(
        1, dtype=torch.uint8
    )
    return torch.cat((about, fifth, pairs(numbers)), 1)


ENCODERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
"""Types that are written."""
