"""Matrix products in pieces: in tiles of rows of one size, in oneDNN's blocked layout, and by groups of rows (experts).

A library chooses how to sum by the shape that it is given: one row is a product of its own in MKL and in oneDNN, and a
batch of another size is summed in other runs. With one shape it always sums in one way, and in the same way for every
row. (He et al. 2025, "Defeating nondeterminism in LLM inference", call it batch invariance.)

oneDNN's blocks are what an x86 CPU multiplies by fastest. Measured on two cores of an EPYC with avx512_bf16, weights
read from memory, [3072, 576] at 1, 8 and 64 rows: bfloat16 77, 88 and 282 us against 124, 143 and 335 us for
`F.linear`, which chooses a layout at each call; float32 133, 162 and 510 us against 384, 451 and 1337 us for
`F.linear`, which is MKL there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.operands import Routing

TILE_ROWS = 8
"""Of a tile. A batch of 8 pays nothing, one row up to two thirds more, a prompt up to twice as much: [3072, 576] in
float32 takes 86, 138 and 7,010 us at 1, 8 and 512 rows at once, and 144, 141 and 9,939 us in tiles."""


ALIGNED = 64
"""Bytes that a tile begins at a multiple of, as what torch allocates does."""


def in_tiles(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """product(x) of x [T, in] -> [T, out], TILE_ROWS at a time, the last tile padded with zeros.

    Tiles are contiguous and aligned: on some processors MKL's float32 products depend on the distance between rows, and
    oneDNN's float16 products on where the first one begins.
    """
    count = len(x)
    if count % TILE_ROWS:
        x = F.pad(x, (0, 0, 0, -count % TILE_ROWS))
    elif not x.is_contiguous() or x.data_ptr() % ALIGNED:
        x = x.clone(memory_format=torch.contiguous_format)
    return in_pieces(product, x, TILE_ROWS)[:count]


def in_pieces(product: Callable[[Tensor], Tensor], x: Tensor, most: int) -> Tensor:
    """product(x) of x [T, in] -> [T, out], at most so many rows at a time."""
    parts = [product(piece) for piece in torch.split(x, most)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


PACKED_ROWS = 8
"""Rows the layout is chosen for; others work as well."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine gains from packing."""
    if (
        device.type != "cpu"
        or not torch._C._has_mkldnn
        or not torch.backends.cpu.get_cpu_capability().startswith("AVX")
    ):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: Tensor) -> Tensor:
    """[out, in] -> the same numbers in blocks: opaque, read by `packed_linear` only."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)  # type: ignore[no-any-return]


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in], weight from `pack`, bias [out] -> [T, out]."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


Expert = TypeVar("Expert")


def by_expert(
    x: Tensor, experts: Iterable[Expert], ends: Tensor, product: Callable[[Tensor, Expert], Tensor]
) -> Tensor:
    """Rows ends[e - 1] to ends[e] of x [N, in] by `product` with expert number e -> [N, out].

    On a GPU, which must not be waited for, every expert computes every row.
    """
    if not x.is_cuda:
        stops = ends.tolist()
        runs = zip(experts, [0, *stops], stops, strict=False)
        return torch.cat([product(x[start:stop], each) for each, start, stop in runs if start < stop])
    owner = torch.searchsorted(ends, torch.arange(len(x), device=x.device, dtype=ends.dtype), right=True)[:, None]
    total = x.new_zeros(())
    for e, each in enumerate(experts):
        total = torch.where(owner == e, product(x, each), total)
    return total


def through_experts(
    x: Tensor,
    routing: Routing,
    count: int,
    mlp: Callable[[Tensor, Tensor], Tensor],
    combine: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """As `Ops.experts`, of `count` experts. mlp: (rows [N, in] sorted by expert, ends [E] int32) -> [N, in], see
    `by_expert`. combine: `Ops.combine_experts`.

    Shapes do not depend on which experts tokens use, so that a step can be captured.
    """
    used = routing.experts.shape[1]
    owner, order = routing.experts.flatten().sort(stable=True)
    everyone = torch.arange(count, device=x.device, dtype=owner.dtype)
    made = mlp(x[order // used], torch.searchsorted(owner, everyone, right=True).int())
    back = torch.empty_like(made)
    back[order] = made
    return combine(back.view(-1, used, back.shape[-1]), routing.weights)


def combine_experts(made: Tensor, weights: Tensor) -> Tensor:
    """See `Ops.combine_experts`."""
    return (made * weights.to(made.dtype)[..., None]).sum(1)


def combine_experts_in_order(made: Tensor, weights: Tensor) -> Tensor:
    """See `Ops.combine_experts`; a token's sums are computed in one order, however many tokens there are."""
    parts = (made * weights.to(made.dtype)[..., None]).float()
    return in_order(parts.unbind(1)).to(made.dtype)


def in_order(parts: tuple[Tensor, ...]) -> Tensor:
    """The sum of the parts, added one after the other."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
