"""Blocks of K/V between their places in all layers and lines of a buffer: one launch, however many layers there are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import kernel

WORDS = 2048
"""Words that a program copies."""


@kernel(do_not_specialize=["line_words"], do_not_specialize_on_alignment=["blocks"])
def copy_blocks_kernel(
    addresses, widths, starts, blocks, lines, line_words, OUTWARD: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Program (piece, p, i): WORDS words of block blocks[i] in tensor p, from or to line i. addresses, widths, starts
    [P] int64: where a tensor is, the words that a block has in it, and where they begin in a line. Words are of the
    lines' type."""
    part, i = tl.program_id(1), tl.program_id(2)
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    width = tl.load(widths + part)
    inside = at < width
    tensor = tl.load(addresses + part).to(tl.pointer_type(lines.dtype.element_ty))
    place = tensor + tl.load(blocks + i) * width + at
    line = lines + i.to(tl.int64) * line_words + tl.load(starts + part) + at
    if OUTWARD:
        tl.store(line, tl.load(place, mask=inside), mask=inside)
    else:
        tl.store(place, tl.load(line, mask=inside), mask=inside)


class BlockCopies:
    """Copies between a pool and buffers. tensors: the pool's, [blocks, bytes] uint8 each, which are kept.

    A launch is on the current stream, of any thread.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.word = torch.int64 if all(each.shape[1] % 8 == 0 for each in tensors) else torch.uint8
        widths = [each.shape[1] // self.word.itemsize for each in tensors]
        starts = [sum(widths[:i]) for i in range(len(widths))]
        addresses = [each.data_ptr() for each in tensors]
        self.table = torch.tensor([addresses, widths, starts], dtype=torch.int64, device=tensors[0].device)
        self.pieces = -(-max(widths) // WORDS)

    def gather(self, blocks: Tensor, lines: Tensor) -> None:
        """Copy blocks [n] int64 of all tensors to the first lines [>= n, bytes] uint8."""
        self._launch(blocks, lines, outward=True)

    def scatter(self, blocks: Tensor, lines: Tensor) -> None:
        """Copy the first lines to blocks."""
        self._launch(blocks, lines, outward=False)

    def _launch(self, blocks: Tensor, lines: Tensor, *, outward: bool) -> None:
        words = lines.view(self.word)
        copy_blocks_kernel[(self.pieces, len(self.tensors), len(blocks))](
            *(*self.table, blocks, words, words.shape[1]), OUTWARD=outward, WORDS=WORDS, num_warps=8
        )
