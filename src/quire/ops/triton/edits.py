"""What changes logits before they are sampled from, by row: masks, allowed tokens, bias, bans, penalties.

The order is that of `model_runner.sampling.sampler`, whose answers these are.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import DeviceInfo, kernel, release, wait


class ListTensors(NamedTuple):
    """The lists of each row, int32 [rows] each: min_tokens, the lists' address in two halves, and the sizes of their
    sections (see `model_runner.sampling.features.pack_lists`); 0 for none."""

    min_tokens: Tensor
    lists_low: Tensor
    lists_high: Tensor
    allowed_words: Tensor
    num_bias: Tensor
    num_stop: Tensor
    num_bad_words: Tensor
    bad_word_length: Tensor


class Penalties(NamedTuple):
    """The penalties of each row, float32 [rows] each; off: 1, 0, 0. repeat_last_n int32 [rows]: how many of its last
    tokens they count."""

    repetition_penalty: Tensor
    frequency_penalty: Tensor
    presence_penalty: Tensor
    repeat_last_n: Tensor


@kernel(do_not_specialize=["masked", "whole", "copied"])
def restrict_kernel(
    logits, edited, row_of, mask_of, masks, mask_words, lists_low, lists_high, allowed_words, raw, masked, whole,
    copied, vocab, chunks, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One chunk of a row: its greatest logit as the model made it to raw [R, chunks] (NaN counts as inf); then what the
    row's mask or its list of allowed tokens does not have becomes -inf. A list that is shorter than the vocabulary
    allows nothing after its end.

    copied: all of it goes to `edited`; otherwise that is `logits`. Without whole, a row that may have every token is
    neither copied nor read: its raw is -inf.
    """
    r, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    wait(DEPENDENT)
    release(DEPENDENT)
    row = tl.load(row_of + r)
    if row < 0:
        return
    mask = tl.where(masked > 0, tl.load(mask_of + r), -1)
    count = tl.load(allowed_words + row)
    greatest = tl.full([], float("-inf"), tl.float32)
    if (whole > 0) | (mask >= 0) | (count > 0):
        inside = at < vocab
        x = tl.load(logits + r.to(tl.int64) * vocab + at, mask=inside, other=float("-inf")).to(tl.float32)
        greatest = tl.max(tl.where(x != x, float("inf"), x), 0)
        word, bit = at // 32, at % 32
        kept = inside
        if mask >= 0:
            words = tl.load(mask_words)
            held = tl.load(masks + mask.to(tl.int64) * words + word, mask=word < words, other=0)
            kept = kept & (((held >> bit) & 1) > 0)
        if count > 0:
            lists = address(tl.load(lists_low + row), tl.load(lists_high + row)).to(tl.pointer_type(tl.int32))
            held = tl.load(lists + word, mask=word < count, other=0)
            kept = kept & (((held >> bit) & 1) > 0)
        x = tl.where(kept, x, float("-inf")).to(edited.dtype.element_ty)
        tl.store(edited + r.to(tl.int64) * vocab + at, x, mask=inside & ((copied > 0) | ~kept))
    tl.store(raw + r * chunks + chunk, greatest)


@triton.jit
def address(low, high):
    """An address of two int32 halves."""
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


def restrict(
    logits: Tensor, edited: Tensor, rows: Tensor, masks: tuple[Tensor, Tensor, Tensor], lists: ListTensors,
    raw: Tensor, card: DeviceInfo, chunk: int, *, masked: bool, whole: bool,
) -> None:  # fmt: skip
    """Copy logits [R, V] to edited [R, V], which may be the same; what masks and allowed tokens leave out becomes -inf.
    Fill raw [R, chunks] float32. masks: the line of each row, the lines, and the words of a line. masked: whether they
    are of this step. whole: rows that may have every token are copied and read, too."""
    count, vocab = logits.shape
    copied = edited is not logits
    restrict_kernel[(count, raw.shape[1])](
        *(logits, edited, rows, *masks, lists.lists_low, lists.lists_high, lists.allowed_words, raw),
        *(int(masked), int(whole or copied), int(copied), vocab, raw.shape[1]),
        CHUNK=chunk, DEPENDENT=card.dependent, num_warps=4, **card.options,
    )  # fmt: skip


@kernel
def lists_kernel(
    logits, row_of, position_of, history, prompt, min_tokens, lists_low, lists_high, allowed_words, num_bias, num_stop,
    num_bad_words, bad_word_length, width, vocab, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row: biases are added; then no stop token before min_tokens, and no last token of a bad word whose others are
    the end of the output."""
    r = tl.program_id(0)
    wait(DEPENDENT)
    release(DEPENDENT)
    row = tl.load(row_of + r)
    if row < 0:
        return
    biases, stops, words = tl.load(num_bias + row), tl.load(num_stop + row), tl.load(num_bad_words + row)
    mine = logits + r.to(tl.int64) * vocab
    lists = address(tl.load(lists_low + row), tl.load(lists_high + row)).to(tl.pointer_type(tl.int32))
    lists += tl.load(allowed_words + row)
    i = tl.arange(0, BLOCK)
    for first in range(0, biases, BLOCK):
        inside = first + i < biases
        token = tl.load(lists + first + i, mask=inside, other=0)
        amount = tl.load(lists + biases + first + i, mask=inside, other=0).to(tl.float32, bitcast=True)
        inside = inside & (token < vocab)
        x = tl.load(mine + token, mask=inside, other=0.0)
        tl.store(mine + token, x + amount, mask=inside)
    tl.debug_barrier()
    lists += 2 * biases
    position, start = tl.load(position_of + r), tl.load(prompt + row)
    if position - start < tl.load(min_tokens + row):
        for first in range(0, stops, BLOCK):
            token = tl.load(lists + first + i, mask=first + i < stops, other=vocab)
            tl.store(mine + token, float("-inf"), mask=token < vocab)
    lists += stops
    length = tl.load(bad_word_length + row)
    output = history + row.to(tl.int64) * width
    for first in range(0, words, BLOCK):
        inside = first + i < words
        line = lists + (first + i) * length
        tail = tl.load(line + length - 1, mask=inside, other=vocab)
        for j in range(length - 1):
            at = position - (length - 1) + j
            token = tl.load(line + j, mask=inside, other=-1)
            last = tl.load(output + at, mask=at >= start, other=-2)
            inside = inside & ((token < 0) | (token == last))
        tl.store(mine + tail, float("-inf"), mask=inside & (tail < vocab))


def edit_by_lists(
    logits: Tensor, rows: Tensor, positions: Tensor, history: Tensor, prompt: Tensor, lists: ListTensors,
    card: DeviceInfo,
) -> None:  # fmt: skip
    """Apply logit_bias, min_tokens and bad words to logits [R, V] float32. See `sampler.sample`."""
    lists_kernel[(len(logits),)](
        *(logits, rows, positions, history, prompt, *lists, history.shape[1], logits.shape[1]),
        BLOCK=256, DEPENDENT=card.dependent, num_warps=4, **card.options,
    )  # fmt: skip


@kernel
def penalty_kernel(
    logits, row_of, position_of, history, prompt, repetition, frequency, presence, last_n, tally, width, vocab,
    PROMPT: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row. Each of its last tokens is counted in the tally, with PROMPT for one of the prompt's. Then the first
    thread that finds a count takes it, so that each token is penalised once and the tally is zero again."""
    r = tl.program_id(0)
    wait(DEPENDENT)
    release(DEPENDENT)
    row = tl.load(row_of + r)
    if row < 0:
        return
    mine, counts = logits + r.to(tl.int64) * vocab, tally + r.to(tl.int64) * vocab
    position, start = tl.load(position_of + r), tl.load(prompt + row)
    by, often, once = tl.load(repetition + row), tl.load(frequency + row), tl.load(presence + row)
    if (by != 1.0) | (often != 0.0) | (once != 0.0):
        tokens = history + row.to(tl.int64) * width
        begin = tl.maximum(position - tl.load(last_n + row), 0)
        for first in range(begin, position, BLOCK):
            i = first + tl.arange(0, BLOCK)
            known = tl.load(tokens + i, mask=i < position, other=0)
            tl.atomic_add(counts + known, tl.where(i < start, PROMPT, 1), mask=i < position)
        tl.debug_barrier()
        for first in range(begin, position, BLOCK):
            i = first + tl.arange(0, BLOCK)
            known = tl.load(tokens + i, mask=i < position, other=0)
            times = tl.atomic_xchg(counts + known, 0, mask=i < position)
            found = (i < position) & (times > 0)
            x = tl.load(mine + known, mask=found, other=0.0, cache_modifier=".cg")
            x = tl.where(x > 0.0, tl.div_rn(x, by), x * by)
            in_prompt = (times % PROMPT).to(tl.float32)
            x = tl.where(in_prompt > 0.0, x - (often * in_prompt + once), x)
            tl.store(mine + known, x, mask=found)


def penalise(
    logits: Tensor, rows: Tensor, positions: Tensor, history: Tensor, prompt: Tensor, penalties: Penalties,
    tally: Tensor, card: DeviceInfo,
) -> None:  # fmt: skip
    """Apply penalties to logits [R, V] float32. See `sampler.sample`."""
    penalty_kernel[(len(logits),)](
        *(logits, rows, positions, history, prompt, *penalties, tally, history.shape[1], logits.shape[1]),
        PROMPT=1 << 20, BLOCK=1024, DEPENDENT=card.dependent, num_warps=8, **card.options,
    )  # fmt: skip
