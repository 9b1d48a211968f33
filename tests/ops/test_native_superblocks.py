"""Superblocks in panels, whose scales lie between the numbers: products to the bit, computed by torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.ops.gguf_blocks import BLOCKS
from quire.ops.native.ops import NativeOps
from quire.ops.native.pack import BLOCK_TYPES
from quire.ops.panels import PANEL_ROWS, PanelMatrix
from quire.weights.gguf import KINDS
from tests.ops import test_native
from tests.ops.test_native import raw_blocks

ops = test_native.ops
KINDS_OF_SUPERBLOCKS = [kind for kind, stored in BLOCK_TYPES.items() if stored.scale_kind.in_superblocks]
ROWS, INPUTS, OUTPUTS = 21, 768, 70


def rows_and_scales() -> tuple[Tensor, Tensor]:
    """Rows of which every 32 numbers are whole multiples of a power of two, the largest of them 127 of it: what they
    are rounded to is exact. And that power of two, [rows, blocks]."""
    whole = torch.randint(-127, 128, (ROWS, INPUTS // 32, 32))
    whole[..., 5] = 127
    scale = 2.0 ** torch.randint(-6, 3, whole.shape[:2])
    return (whole * scale[..., None]).flatten(1).bfloat16(), scale


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, rounded once."""
    return (a.double() * b.double() + c.double()).float()


def wanted(x: Tensor, x_scale: Tensor, matrix: PanelMatrix) -> Tensor:
    """The product as `native/integers.h` describes it, in bfloat16."""
    which = torch.arange(matrix.outputs)
    scale, less = matrix._scales(which // PANEL_ROWS, which % PANEL_ROWS)
    numbers = matrix._numbers(which // PANEL_ROWS, which % PANEL_ROWS)
    assert scale is not None
    whole = (x.float().view(ROWS, -1, 32) / x_scale[..., None]).flatten(1)
    out = torch.zeros(ROWS, matrix.outputs)
    for g in range(INPUTS // matrix.group):
        columns = slice(g * matrix.group, (g + 1) * matrix.group)
        by = x_scale[:, columns.start // 32, None]
        summed = (whole[:, columns].double() @ numbers[:, columns].double().t()).float()
        out = fused(summed * by, scale[:, g], out)
        if less is not None:
            total = torch.zeros(ROWS, 1)
            for half in whole[:, columns].split(16, 1):
                total = fused(half.sum(1, keepdim=True), by, total)
            out = fused(-less[:, g], total, out)
    return out.bfloat16()


@pytest.mark.parametrize("kind", KINDS_OF_SUPERBLOCKS)
def test_products_have_the_bits_that_torch_computes(ops: NativeOps, kind: str) -> None:
    raw = raw_blocks(kind, OUTPUTS, INPUTS)
    panels = ops.empty_blocks(kind, OUTPUTS, INPUTS)
    assert panels is not None
    panels.write(0, raw)
    stored = next(each for each in KINDS.values() if each.name == kind)
    assert torch.equal(
        panels.matrix.values_of(), BLOCKS[kind](raw.view(-1, stored.size)).values().view(OUTPUTS, INPUTS)
    )
    x, scale = rows_and_scales()
    exact = wanted(x, scale, panels.matrix)
    for rows in (1, 2, 3, 4, 8, 9, 21):
        assert torch.equal(ops.quantized_linear(x[:rows], panels.matrix), exact[:rows]), rows


def test_a_superblock_takes_as_many_bytes_as_its_numbers_and_scales(ops: NativeOps) -> None:
    made = {kind: ops.empty_blocks(kind, 16, 256) for kind in KINDS_OF_SUPERBLOCKS}
    sizes = {kind: each.matrix.nbytes for kind, each in made.items() if each is not None}
    six = (16 if ops.level == "amx" else 12) * 256 + 320
    assert sizes == {"Q3_K": 2368, "Q4_K": 2368, "Q5_K": 4416, "Q6_K": six, "IQ4_XS": 2240}
    assert all(each is not None and each.matrix.scale is None for each in made.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_a_table_have_the_bits_that_torch_computes(ops: NativeOps, dtype: torch.dtype) -> None:
    tokens = torch.tensor([3, 69, 3, 16, 0])
    matrices = [ops.arranged(stored) for stored in test_native.integers(OUTPUTS, INPUTS).values()]
    for kind in BLOCK_TYPES:
        panels = ops.empty_blocks(kind, OUTPUTS, INPUTS)
        assert panels is not None
        panels.write(0, raw_blocks(kind, OUTPUTS, INPUTS))
        matrices.append(panels.matrix)
    for matrix in matrices:
        assert isinstance(matrix, PanelMatrix)
        before = ops.calls
        assert torch.equal(ops.integer_embedding(tokens, matrix, dtype), matrix.values_of()[tokens].to(dtype))
        assert ops.calls == before + 1
