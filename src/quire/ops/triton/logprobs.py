"""Log-probabilities of a token and of the likeliest ones, without a sort and without a copy of the vocabulary.

`chunk_score_kernel` reads each chunk of a row once: its greatest logit, the sum of its exponentials, how many of its
logits are above the token's, and its likeliest tokens, one maximum after another. `score_kernel` joins a row's chunks.
Each row's numbers depend on it alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import DeviceInfo, block, kernel, release, wait
from quire.ops.triton.ranks import rank, ranked

CHUNK = 4096
"""Tokens that one program of `chunk_score_kernel` reads."""

NOTHING = tl.constexpr(-(1 << 63))
"""Below the key of every token."""


@kernel
def chunk_score_kernel(
    logits, tokens, row_of, wanted, tops, masses, above, keys, vocab, chunks,
    MOST: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One chunk of one row. A key orders tokens by logit, equal ones by id, the smaller first."""
    r, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    wait(DEPENDENT)
    release(DEPENDENT)
    row = tl.load(row_of + r)
    if row < 0:
        return
    count = tl.load(wanted + row)
    if count < 0:
        return
    mine = logits + r.to(tl.int64) * vocab
    x = tl.load(mine + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    own = tl.load(mine + tl.maximum(tl.load(tokens + r), 0)).to(tl.float32)
    to = r * chunks + chunk
    top = tl.max(x, 0)
    tl.store(tops + to, top)
    # A chunk of nothing but -inf has no mass.
    tl.store(masses + to, tl.sum(tl.exp(x - tl.maximum(top, -3e38)), 0))
    tl.store(above + to, tl.sum((x > own).to(tl.int32), 0))
    # Minus zero counts as zero.
    ranks = rank(tl.where(x == 0.0, 0.0, x)).to(tl.int64)
    key = tl.where(at < vocab, (ranks << 32) | (0x7FFFFFFF - at).to(tl.int64), NOTHING)
    for i in range(tl.minimum(count, MOST)):
        best = tl.max(key, 0)
        tl.store(keys + to.to(tl.int64) * MOST + i, best)
        key = tl.where(key == best, NOTHING, key)


@kernel
def score_kernel(
    logits, tokens, row_of, wanted, tops, masses, above, keys, out, vocab, chunks,
    MOST: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row: log-probability and rank of its token, then the likeliest tokens, then their log-probabilities."""
    r, c = tl.program_id(0), tl.arange(0, CHUNKS)
    wait(DEPENDENT)
    release(DEPENDENT)
    row = tl.load(row_of + r)
    if row < 0:
        return
    count = tl.load(wanted + row)
    if count < 0:
        return
    at, inside = r * chunks + c, c < chunks
    peaks = tl.load(tops + at, mask=inside, other=float("-inf"))
    top = tl.maximum(tl.max(peaks, 0), -3e38)
    mass = tl.load(masses + at, mask=inside, other=0.0)
    total = top + tl.log(tl.sum(mass * tl.exp(peaks - top), 0))
    own = tl.load(logits + r.to(tl.int64) * vocab + tl.maximum(tl.load(tokens + r), 0)).to(tl.float32)
    line = out + r * (2 + 2 * MOST)
    tl.store(line, (own - total).to(tl.int32, bitcast=True))
    tl.store(line + 1, 1 + tl.sum(tl.load(above + at, mask=inside, other=0), 0))
    count = tl.minimum(tl.minimum(count, MOST), vocab)
    i = tl.arange(0, MOST)
    place = at.to(tl.int64)[:, None] * MOST + i[None, :]
    key = tl.load(keys + place, mask=inside[:, None] & (i < count)[None, :], other=NOTHING)
    for n in range(count):
        best = tl.max(tl.max(key, 1), 0)
        value = ranked((best >> 32).to(tl.int32)) - total
        tl.store(line + 2 + n, (0x7FFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32))
        tl.store(line + 2 + MOST + n, value.to(tl.int32, bitcast=True))
        key = tl.where(key == best, NOTHING, key)


def score(
    logits: Tensor, tokens: Tensor, rows: Tensor, wanted: Tensor, out: Tensor, card: DeviceInfo
) -> None:  # fmt: skip
    """Score tokens [R] int32 (below 0: of none) under logits [R, V].

    rows [R] int32: the place of each in `wanted`, below 0 for none. wanted int32: how many of the likeliest tokens to
    add, below 0: the row is not scored. out [R, 2 + 2 * most] int32, `most` being a power of two: of each row, as
    float32 or int32, the token's log-probability, its rank, the likeliest tokens, their log-probabilities.
    """
    count, vocab = logits.shape
    chunks, most = triton.cdiv(vocab, CHUNK), (out.shape[1] - 2) // 2
    tops, masses = (logits.new_empty(count, chunks, dtype=torch.float32) for _ in range(2))
    above = logits.new_empty(count, chunks, dtype=torch.int32)
    keys = logits.new_empty(count, chunks, most, dtype=torch.int64)
    same = {"MOST": most, "DEPENDENT": card.dependent, **card.options}
    chunk_score_kernel[(count, chunks)](
        *(logits, tokens, rows, wanted, tops, masses, above, keys, vocab, chunks), CHUNK=CHUNK, num_warps=8, **same
    )  # fmt: skip
    score_kernel[(count,)](
        *(logits, tokens, rows, wanted, tops, masses, above, keys, out, vocab, chunks),
        CHUNKS=block(chunks), num_warps=4, **same,
    )  # fmt: skip
