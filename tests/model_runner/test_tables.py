"""Sizes, keys, features, noise and truncation over many values, as written down."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.errors import InvalidConfig
from quire.model_runner import memory
from quire.model_runner.device_state import UploadRing
from quire.model_runner.device_steps import follow, lookup
from quire.model_runner.graphs import GraphKey, bucket_seqs, bucket_tokens, padding, round_up
from quire.model_runner.row_state import RowState, StepShape
from quire.model_runner.sampling import noise
from quire.model_runner.sampling.features import COLUMNS, SamplingFeatures, pack_lists
from quire.model_runner.sampling.sampler import Truncation, mask, score_tokens, truncate
from quire.model_runner.speculative import NgramDrafter
from quire.ops.ragged import KVShape
from quire.scheduler.plan import NewSequence, Span
from quire.types import SamplingParams
from tests.calls import shown
from tests.expected import check

EXPECTED = Path(__file__).parent / "expected"
SIZES = (*range(1, 40), 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300, 511, 512, 513, 1000, 2048, 2049, 8191)


def test_sizes_are_rounded_as_written_down() -> None:
    lines = [f"{n}: {padding(n)} {bucket_tokens(n)} {bucket_seqs(n)} {round_up(n, 4, 8)}" for n in SIZES]
    for spans in ([(0, 1, 1, 1)], [(0, 1, 1, 1)] * 9, [(0, 3, 3, 3)] * 5, [(0, 3, 3, 3), (1, 1, 1, 1)], [(0, 9, 0, 0)]):
        for more in ([], [(7, 5, 1, 5)], [(8, 30, 0, 0)]):
            shape = StepShape.of(tuple(Span(*one) for one in (*spans, *more)))
            lines.append(f"{spans[0]} x {len(spans)} and {more}: {tuple(GraphKey.of(shape))}")
            lines.append(shown({name: np.asarray(getattr(shape, name)).tolist() for name in StepShape.__slots__}))
    lines += [str(tuple(GraphKey.head(n, 5))) for n in (1, 2, 5, 9, 40)]
    check(EXPECTED / "sizes.txt", "\n".join(lines))


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
    {"temperature": 0.6, "top_k": -1, "top_p": 1.0},
    {"temperature": 0.6, "top_k": 5},
    {"temperature": 0.6, "top_p": 0.5},
    {"temperature": 0.6, "min_p": 0.5},
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 0.5},
    {"presence_penalty": -0.5},
    {"logprobs": 0},
    {"logprobs": 32},
    {"logprobs": 33},
    {"logprobs": -1},
    {"prompt_logprobs": 3},
    {"min_tokens": 4},
    {"allowed_token_ids": (3, 40, 7)},
    {"logit_bias": {5: 2.0, 70: -1.5}},
    {"bad_words_token_ids": ((4,), (5, 6, 7), (8, 9))},
    {"bad_words_token_ids": ((4, 5),), "logit_bias": {1: 1.0}, "allowed_token_ids": (0, 31, 32), "min_tokens": 2},
)


def test_the_features_of_rows_are_as_written_down() -> None:
    lines = []
    for given in SETTINGS:
        for stop in (frozenset({9, 3}), frozenset[int]()):
            rows = SamplingFeatures(2)
            rows.open(
                NewSequence(1, (1, 2), 0, 2, SamplingParams(**given), seed=(5 << 33) + 1, choice=2, stop_token_ids=stop)
            )
            values = {name: column[1].item() for name, column in rows.columns.items() if column[1] != COLUMNS[name].off}
            lines.append(f"{given} {sorted(stop)}: bits {rows.bits.tolist()} {values} stream {rows.stream.tolist()}")
            lists, sizes = pack_lists(rows.extras[1])
            lines.append(
                f"  {rows.min_tokens.tolist()} {rows.logprobs.tolist()} {rows.prompt_logprobs} {lists.tolist()} {sizes}"
            )
            rows.reset()
            lines.append(f"  reset {rows.bits.tolist()} {pack_lists(rows.extras[1])[1]}")
    check(EXPECTED / "features.txt", "\n".join(lines))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_noise_is_as_written_down() -> None:
    """A seed's answers are the same in every version, on every device."""
    words = np.array([0, 1, 2, 1 << 31, (1 << 32) - 1, 12345], np.uint32)
    lines = [f"mix {noise.mix(words).tolist()}", f"fold {noise.fold(words, words[::-1].copy()).tolist()}"]
    lines.append(f"salted {noise.salted(words).tolist()}")
    lines.append(f"exponential {[f'{x:.5g}' for x in noise.exponential(words).tolist()]}")
    for seed in (0, 1, -1, 1 << 32, (1 << 63) - 1, -(1 << 63), 77):
        lines.append(f"stream of {seed}: {[noise.stream(seed, choice) for choice in (0, 1, 5)]}")
    for vocab in (5, 32, 33, 100):
        draw = noise.Draw(vocab)
        logits = np.sin(np.arange(8 * vocab, dtype=np.float32)).reshape(8, vocab) * 3
        logits[3, 1:] = -np.inf
        key = noise.keys(np.arange(8, dtype=np.uint32) * 77777, np.arange(8))
        for degree in (0.1, 1.0, 5.0):
            degrees = np.full((8, 1), degree, np.float32)
            drawn = draw(logits.copy(), degrees, key), draw(logits[:2], degrees[:2], key[:2])
            lines.append(f"{vocab} tokens at {degree}: {[each.tolist() for each in drawn]}")
    check(EXPECTED / "noise.txt", "\n".join(lines))


def test_truncation_and_scores_are_as_written_down() -> None:
    lines = []
    rng = np.random.default_rng(5)
    for vocab in (7, 70, 700):
        logits = rng.standard_normal((6, vocab)).astype(np.float32)
        logits[2, :3] = logits[2, 3]
        logits[4] *= 6
        for given in (
            {"top_k": 3},
            {"top_p": 0.4},
            {"min_p": 0.2},
            {"top_k": 80, "top_p": 0.9},
            {"top_p": 0.999, "min_p": 0.01},
        ):
            features = SamplingFeatures(6)
            for row in range(6):
                degree = 0.5 + row / 4
                sampling = SamplingParams(temperature=degree, **(given if row != 1 else {"top_p": 0.01}))
                features.open(NewSequence(row, (1,), 0, 1, sampling))
            left = logits.copy()
            truncate(left, Truncation.of(features.columns, np.arange(6), vocab))
            kept = np.isfinite(left)
            lines.append(f"{vocab} {given}: {kept.sum(1).tolist()} {np.flatnonzero(kept[0])[:9].tolist()}")
    logits[1, 5] = logits[1].max()
    for one in score_tokens(torch.from_numpy(logits), np.arange(6) * 3, np.array([0, 3, -1, 2, 3, 900])):
        top = [(token, f"{value:.3f}") for token, value in one.top[:4]]
        lines.append(f"{one.token} {one.logprob:.3f} rank {one.rank} of {len(one.top)}: {top}")
    for masks in ([], [(0, None)], [(0, b"\x05"), (2, b"")], [(1, b"\xff" * 100), (0, None)]):
        left = np.zeros((3, 11), np.float32)
        mask(left, masks)  # type: ignore[arg-type]
        lines.append(f"{masks}: {[np.flatnonzero(np.isfinite(row)).tolist() for row in left]}")
    check(EXPECTED / "truncation.txt", "\n".join(lines))


def test_drafts_by_look_up_are_as_written_down() -> None:
    lines = []
    histories = (
        [1],
        [1, 1],
        [1, 2, 3],
        [1, 2, 3, 1, 2],
        [5, 1, 2, 9, 1, 2, 8, 1, 2],
        [4] * 9,
        [1, 2, 3, 4, 1, 2, 3, 4, 2, 3, 4],
    )
    rows = RowState(len(histories), 20, 4, 4)
    for row, history in enumerate(histories):
        tokens = np.array(history, np.int32)
        rows.tokens[row, : len(tokens)], rows.num_known[row] = tokens, len(tokens)
        for longest, shortest in ((1, 1), (2, 1), (4, 2), (3, 3), (8, 1)):
            at = lookup(tokens, longest, shortest)
            lines.append(f"{history} {longest} {shortest}: {at}, {follow(tokens, at, 4).tolist()}")
    drafts = NgramDrafter(4).propose(rows, np.arange(len(histories)), np.array([4, 0, 1, 2, 3, 4, 2]))
    lines.append(str(drafts.tolist()))
    check(EXPECTED / "look-up.txt", "\n".join(lines))


def test_memory_is_planned_as_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = memory.layer_shapes((KVShape(2, 16, 16), KVShape(1, 8, 8)), torch.bfloat16)
    lines = [shown(layers)]
    for page, rows, length in ((16, 4, 100), (8, 1, 9), (1, 3, 2), (16, 4, 17)):
        each = memory.block_bytes(layers, page)
        lines.append(f"pages of {page}: {each} bytes, {memory.usable_blocks(rows, length, page)} used at most")
        for budget in (0, each, 2 * each, 2 * each - 1, 5 * each, 8 * each, 9 * each + 3, 1000 * each, 3 << 30):
            try:
                made = memory.plan_blocks(layers, page_size=page, rows=rows, max_model_len=length, budget=budget)
                lines.append(f"  {budget}: {made}")
            except InvalidConfig as error:
                lines.append(f"  {budget}: {error}")
    lines += [f"{size}: {memory.cpu_budget(size)}" for size in (0, 5, 1 << 20, 15 << 30, 16 << 30, 100 << 30)]
    for tokens, logits in ((1, 1), (1, 300), (4096, 4)):
        for dtype in (torch.bfloat16, torch.float32):
            size = memory.activation_bytes(
                tokens=tokens, logits=logits, hidden=64, widest=300, vocab_size=1000, dtype=dtype
            )
            lines.append(f"activations of {tokens} tokens, {logits} rows, {dtype}: {size}")
    pools = memory.allocate((memory.LayerShape(2, 16, 16, torch.float16, 0.5, 0.25),), pages=3, page_size=4)
    lines += [f"{pool.k.shape} {pool.v.shape} {pool.k.dtype} {pool.k_scale} {pool.v_scale}" for pool in pools]

    def full(*args: object, **rest: object) -> None:
        raise RuntimeError("you tried to allocate too much")

    monkeypatch.setattr(memory, "huge_zeros", full)
    for pages in (9, 1 << 20):
        with pytest.raises(MemoryError) as refused:
            memory.allocate(layers, pages=pages, page_size=16)
        lines.append(str(refused.value))
    check(EXPECTED / "memory.txt", "\n".join(lines))


def test_updates_are_made_in_each_buffer_in_turn() -> None:
    """What a buffer holds stays until as many more were made as there are buffers, for it may still be copied."""
    ring = UploadRing(SimpleNamespace(device=torch.device("cpu"), offsets={}), num_slots=3)  # type: ignore[arg-type]
    held = []
    for i in range(7):
        made = ring.pack([(10 * i, np.array([i, -i], dtype=np.int32)), (np.array([5, 3]), np.array([i + 50] * 2))])
        assert made is not None and ring.pack([]) is None
        assert [part.tolist() for part in made[:2]] == [[10 * i, 10 * i + 1, 5, 3], [i, -i, i + 50, i + 50]]
        held.append([int(buffer[32]) for buffer in ring.host])
    assert held[2:] == [[0, 1, 2], [3, 1, 2], [3, 4, 2], [3, 4, 5], [6, 4, 5]]


def test_updates_larger_than_the_buffers_are_made_in_larger_ones() -> None:
    """Sizes below, at and above what a buffer, the copy on the device and the list of consecutive numbers hold."""
    ring = UploadRing(SimpleNamespace(device=torch.device("cpu"), offsets={}), num_slots=2)  # type: ignore[arg-type]
    for size in (1, 1 << 14, (1 << 14) + 1, 3, 1 << 15, (1 << 16) + 1, 5, 1 << 17):
        values = np.arange(size, dtype=np.int32)[::-1]
        made = ring.pack([(7, values)])
        assert (
            made is not None and torch.equal(made[0], torch.arange(7, 7 + size)) and made[1].tolist() == values.tolist()
        )
