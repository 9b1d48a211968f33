"""Blocks of K/V between a pool and lines of a buffer: the bits of torch's operations, one launch for all layers."""

from __future__ import annotations

import pytest
import torch

from quire.executors.block_store import TorchMover
from quire.ops.triton.blocks import WORDS, BlockCopies
from tests.ops.triton.device import DEVICE

WIDTHS = {"words": (64, 8 * WORDS + 72, 64), "bytes": (15, 30, WORDS + 1), "one": (4096,)}


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
def test_blocks_are_moved_as_torch_moves_them(widths: tuple[int, ...]) -> None:
    tensors = [torch.randint(0, 256, (9, width), dtype=torch.uint8, device=DEVICE) for width in widths]
    blocks = torch.tensor([7, 2, 5], device=DEVICE)
    line = torch.zeros((4, sum(widths)), dtype=torch.uint8, device=DEVICE)
    expected = line.clone()
    BlockCopies(tensors).gather(blocks, line)
    TorchMover(tensors).gather(blocks, expected)
    assert torch.equal(line, expected) and not line[3].any()
    others = [torch.zeros_like(each) for each in tensors]
    BlockCopies(others).scatter(torch.tensor([1, 8, 3], device=DEVICE), line)
    for new, old in zip(others, tensors, strict=True):
        assert torch.equal(new[[1, 8, 3]], old[[7, 2, 5]]) and not new[[0, 2, 4, 5, 6, 7]].any()
