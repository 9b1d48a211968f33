"""The device's sampler against the host's noise and truncation, and against penalties computed token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.model_runner.device_steps import SCORE_WIDTH, read_scores
from quire.model_runner.sampling.features import (
    COLUMNS,
    LISTS,
    MASKED,
    MAX_LOGPROBS,
    SamplingFeatures,
    bitmask,
    pack_lists,
)
from quire.model_runner.sampling.noise import Draw, stream
from quire.model_runner.sampling.sampler import Truncation, score_tokens, truncate
from quire.model_runner.triton_steps import TritonSteps, requested_features
from quire.ops.operands import VocabularyPart
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.noise import exponentials
from quire.ops.triton.sampler import (
    BROKEN,
    FINE,
    STUCK,
    RequestedFeatures,
    RowHistories,
    SamplingTensors,
    sample,
)
from quire.scheduler.plan import NewSequence
from quire.types import SamplingParams, TokenLogprobs
from tests.model_runner import oracle
from tests.ops.triton.device import DEVICE

CARD = DeviceInfo.of(DEVICE)


@dataclass(frozen=True)
class Row:
    """One row to sample: its parameters, and its tokens so far. mask: allowed tokens, bit by bit; None: all."""

    params: SamplingParams
    tokens: tuple[int, ...] = (3, 5, 3)
    prompt: int = 1
    seed: int = 0
    choice: int = 0
    stop: frozenset[int] = frozenset()
    mask: bytes | None = None

    @property
    def features(self) -> SamplingFeatures:
        made = SamplingFeatures(1)
        made.open(NewSequence(0, self.tokens, 0, self.prompt, self.params, stop_token_ids=self.stop))
        return made


def column(values: Sequence[float], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def settings(rows: list[Row], lists: list[Tensor]) -> SamplingTensors:
    """lists: takes what the settings point to, which must outlive them."""
    s = [row.params for row in rows]
    packed = [pack_lists(row.features.extras[0]) for row in rows]
    lists += [torch.from_numpy(words.copy()).to(DEVICE) for words, _ in packed]
    halves = np.array([each.data_ptr() for each in lists], dtype=np.int64).view(np.int32).reshape(-1, 2)
    sizes = {name: column([size[i] for _, size in packed]) for i, name in enumerate(LISTS)}
    columns = {
        name: column([each.read(p) for p in s], torch.int32 if each.is_integer else torch.float32)
        for name, each in COLUMNS.items()
    }
    addresses = {"lists_low": column(halves[:, 0].tolist()), "lists_high": column(halves[:, 1].tolist())}
    return SamplingTensors.of(
        columns
        | {"stream": column([stream(row.seed, row.choice) for row in rows], torch.int64)}
        | {"min_tokens": column([p.min_tokens for p in s])}
        | addresses
        | sizes
    )


def asked_by(rows: list[Row]) -> RequestedFeatures:
    bits = 0
    for row in rows:
        bits |= int(row.features.bits[0]) | (0 if row.mask is None else MASKED)
    return requested_features(bits)


def masks_of(rows: list[Row], vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """(masks, mask_words, mask_index): those that rows have, last row first."""
    masks = np.zeros((len(rows), -(-vocab // 32) * 4), dtype=np.uint8)
    index = np.full(len(rows), -1, dtype=np.int32)
    for place, r in enumerate(reversed([r for r, row in enumerate(rows) if row.mask is not None])):
        bits = np.frombuffer(rows[r].mask or b"", dtype=np.uint8)[: masks.shape[1]]
        masks[place, : len(bits)] = bits
        index[r] = place
    lines = torch.from_numpy(masks.view(np.int32))
    return lines.flatten().to(DEVICE), column([lines.shape[1]]), torch.from_numpy(index).to(DEVICE)


def sampled(
    logits: Tensor, rows: list[Row], asked: RequestedFeatures | None = None, part: VocabularyPart | None = None
) -> tuple[list[int], list[int], list[TokenLogprobs]]:
    """Tokens, states, and the scores of rows that ask for them. asked: by default what the rows ask for."""
    longest = max(len(row.tokens) for row in rows) + 4
    history = torch.tensor([[*row.tokens, *[7] * (longest - len(row.tokens))] for row in rows], dtype=torch.int32)
    positions = column([len(row.tokens) for row in rows])
    histories = RowHistories(history.to(DEVICE), column([row.prompt for row in rows]), *masks_of(rows, logits.shape[1]))
    tally = torch.zeros(logits.shape, dtype=torch.int32, device=DEVICE)
    scores = torch.zeros(len(rows), SCORE_WIDTH, dtype=torch.int32, device=DEVICE)
    held: list[Tensor] = []
    which = torch.arange(len(rows), dtype=torch.int32, device=DEVICE)
    tokens, state = sample(
        logits.to(DEVICE, copy=True),
        which,
        positions,
        histories,
        settings(rows, held),
        CARD,
        asked or asked_by(rows),
        tally=tally,
        scores=scores,
        part=part,
    )
    assert not tally.any()
    wanted = [-1 if row.params.logprobs is None else row.params.logprobs for row in rows]
    scored = [r for r, count in enumerate(wanted) if count >= 0]
    drawn_tokens = tokens.tolist()
    lines = read_scores(scores.cpu().numpy()[scored], [drawn_tokens[r] for r in scored], [wanted[r] for r in scored])
    return drawn_tokens, state.tolist(), lines


def drawn(logits: Tensor, rows: list[Row], asked: RequestedFeatures | None = None) -> tuple[list[int], list[int]]:
    """Tokens and states."""
    return sampled(logits, rows, asked)[:2]


def expected(logits: Tensor, rows: list[Row]) -> list[int]:
    """What the host draws, row by row."""
    out = []
    for x, row in zip(logits.tolist(), rows, strict=True):
        p = row.params
        prompt, output = row.tokens[: row.prompt], row.tokens[row.prompt :]
        line = np.array([oracle.edited(x, p, prompt, output, row.stop, row.mask)], np.float32)
        if p.greedy:
            out.append(int(line.argmax()))
            continue
        heat = np.array([p.temperature], np.float32)
        columns = {name: np.array([each.read(p)], each.dtype) for name, each in COLUMNS.items()}
        truncate(line, Truncation.of(columns, np.arange(1), line.shape[1]))
        key = np.array([oracle.fold(stream(row.seed, row.choice), len(row.tokens))], np.uint32)
        out.append(int(Draw(line.shape[1])(line, heat[:, None], key)[0]))
    return out


def agree(logits: Tensor, rows: list[Row], asked: RequestedFeatures | None = None) -> None:
    tokens, state = drawn(logits, rows, asked)
    assert state == [FINE] * len(rows)
    assert tokens == expected(logits, rows)


def test_greedy_rows_take_the_first_of_the_greatest() -> None:
    logits = torch.randn(3, 2500, generator=torch.Generator().manual_seed(0))
    logits[0, [700, 2100]] = 9.0
    logits[1, [2499, 2400]] = 9.0
    tokens, _ = drawn(logits, [Row(SamplingParams(temperature=0.0))] * 3)
    assert tokens == [700, 2400, int(logits[2].argmax())]


def elected(logits: Tensor, rows: list[Row], size: int) -> list[tuple[list[int], list[int]]]:
    """What each of `size` ranks draws, each of which sees its part of the vocabulary and every rank's candidates."""
    width = logits.shape[1] // size
    candidates = list[Tensor]()

    def sent(own: Tensor) -> Tensor:
        candidates.append(own)
        return own.repeat(1, size)

    def drawn_by(rank: int, gather: Callable[[Tensor], Tensor]) -> tuple[list[int], list[int]]:
        part = VocabularyPart(rank * width, size, torch.clone, gather)
        return sampled(logits[:, rank * width : (rank + 1) * width], rows, part=part)[:2]

    for rank in range(size):
        drawn_by(rank, sent)
    return [drawn_by(rank, lambda own: torch.cat(candidates, 1)) for rank in range(size)]


@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_ranks_that_divide_the_vocabulary_elect_the_token_of_one(spread: float) -> None:
    logits = spread * torch.randn(6, 3 * 1504, generator=torch.Generator().manual_seed(8))
    logits[0, [1503, 1504]] = 40.0 * spread  # a tie of two ranks
    logits[1, :1504] = -math.inf
    temperatures = (0.0, 0.8, 1.7)
    rows = [Row(SamplingParams(temperature=temperatures[i % 3]), seed=i) for i in range(6)]
    wanted = expected(logits, rows)
    assert elected(logits, rows, 3) == [(wanted, [FINE] * 6)] * 3
    greedy = [Row(SamplingParams(temperature=0.0))] * 6
    assert elected(logits, greedy, 3) == [(logits.argmax(1).tolist(), [FINE] * 6)] * 3


def test_logits_that_are_broken_on_one_rank_break_the_row_on_all() -> None:
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(9))
    logits[0, 40], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    for heat in (0.0, 1.0):
        rows = [Row(SamplingParams(temperature=heat))] * 4
        (tokens, state), other = elected(logits, rows, 2)
        assert (tokens, state) == other and state == [BROKEN] * 3 + [FINE] and tokens[:3] == [-BROKEN] * 3


@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_tokens_equal_the_hosts(spread: float) -> None:
    logits = spread * torch.randn(12, 4500, generator=torch.Generator().manual_seed(1))
    temperatures = (0.3, 1.0, 1.7)
    agree(logits, [Row(SamplingParams(temperature=temperatures[i % 3]), seed=i - 5, choice=i % 2) for i in range(12)])


@pytest.mark.parametrize("spread", [3.0, *(pytest.param(far, marks=pytest.mark.nightly) for far in (0.1, 30.0))])
@pytest.mark.parametrize(
    "limits",
    [{"top_k": 1}, {"top_k": 40}, {"top_k": 2000}, {"top_p": 0.1}, {"top_p": 0.9}, {"top_p": 0.999}, {"min_p": 0.05},
     {"top_k": 50, "top_p": 0.8, "min_p": 0.01}],
    ids=str,
)  # fmt: skip
def test_truncated_tokens_equal_the_hosts(limits: dict[str, float], spread: float) -> None:
    logits = spread * torch.randn(4, 4500, generator=torch.Generator().manual_seed(2))
    agree(logits, [Row(SamplingParams(temperature=0.5 + i / 2, **limits), seed=i) for i in range(4)])


def test_tokens_that_tie_at_the_threshold_are_all_kept() -> None:
    logits = torch.full((24, 2500), -5.0)
    logits[:, [3, 900, 2300]] = 1.0
    logits[:, 40] = 2.0
    tokens, _ = drawn(logits, [Row(SamplingParams(temperature=3.0, top_k=2), seed=i) for i in range(24)])
    assert set(tokens) == {3, 40, 900, 2300}


def test_logits_that_lie_far_apart_are_cut_as_the_hosts() -> None:
    """Quarters of values do not separate the small ones, quarters of the numbers between them do. Nothing is between
    1e30 and 1 less."""
    logits = torch.rand(2, VOCAB, generator=torch.Generator().manual_seed(15))
    logits[0, 3], logits[1, 50:] = 1e30, -1e30
    limits: tuple[dict[str, Any], ...] = ({"top_k": 40}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 60})
    for limit in limits:
        agree(logits, [Row(SamplingParams(temperature=1.0, seed=seed, **limit)) for seed in (1, 2)])


def test_penalties_equal_the_oracles() -> None:
    vocab = 4200
    logits = 3 * torch.randn(5, vocab, generator=torch.Generator().manual_seed(3))
    often = tuple(int(t) for t in logits[0].topk(4).indices for _ in range(3))
    asked = [
        Row(SamplingParams(temperature=0.0, repetition_penalty=1.3), often),
        Row(SamplingParams(temperature=0.0, frequency_penalty=0.7), often, prompt=4),
        Row(SamplingParams(temperature=0.0, presence_penalty=1.5), often, prompt=2),
        Row(SamplingParams(temperature=1.0, repetition_penalty=0.8, frequency_penalty=-0.4, top_k=30), often * 30),
        Row(SamplingParams(temperature=1.0)),
    ]
    agree(logits, asked)


VOCAB = 4500
GREEDY = SamplingParams(temperature=0.0)


def greatest(logits: Tensor, count: int) -> list[int]:
    return [int(token) for token in logits.topk(count).indices]


def test_penalties_of_the_last_tokens_equal_the_oracles() -> None:
    """As many as none, as a part of the output, as reach into the prompt, and more than there are; of blocks of the
    kernel that are not whole."""
    logits = 3 * torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(4))
    each: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.5}
    rows = []
    for line, last in zip(logits, (0, 1, 3, 9, 1300, 5000), strict=True):
        history = tuple(greatest(line, 7)) * (2 if last < 100 else 200)
        rows.append(Row(SamplingParams(temperature=0.0, repeat_last_n=last, **each), history, prompt=8))
    agree(logits, rows)
    assert drawn(logits[:1], rows[:1]) == ([int(logits[0].argmax())], [FINE])


def edits(logits: Tensor) -> list[Row]:
    """A row for each way of changing logits, each of which changes what is drawn, and one for all of them."""
    top = [greatest(line, 40) for line in logits]
    allowed = (*top[3][7:9], VOCAB - 1)
    every = {
        "allowed_token_ids": tuple(top[8][2:]),
        "logit_bias": {top[8][3]: 30.0, top[8][4]: -30.0},
        "bad_words_token_ids": ((3, top[8][2]),),
        "min_tokens": 3,
        "presence_penalty": 1.0,
        "repetition_penalty": 1.3,
    }
    return [
        Row(GREEDY),
        Row(SamplingParams(temperature=0.0, logit_bias={top[1][5]: 50.0, top[1][0]: -50.0, VOCAB + 9: 1.0})),
        Row(SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(top[2][:30], -100.0))),
        Row(SamplingParams(temperature=1.0, allowed_token_ids=allowed)),
        Row(SamplingParams(temperature=0.0, bad_words_token_ids=((5, 3, top[4][0]), (top[4][1],), (9, top[4][2])))),
        Row(SamplingParams(temperature=0.0, bad_words_token_ids=((3, 5, 3, top[5][0]),))),
        Row(SamplingParams(temperature=0.0, min_tokens=3), stop=frozenset({top[6][0], VOCAB + 1})),
        Row(SamplingParams(temperature=0.0, min_tokens=2), stop=frozenset({top[7][0]})),
        Row(SamplingParams(temperature=0.7, **every), stop=frozenset({top[8][5]}), mask=bitmask(tuple(top[8][1:]))),
        Row(GREEDY, mask=bitmask(tuple(top[9][3:]))),
        Row(SamplingParams(temperature=1.0, top_k=5), mask=bitmask(tuple(top[10][2:]))),
    ]


def test_masks_and_lists_equal_the_oracles() -> None:
    logits = 3 * torch.randn(11, VOCAB, generator=torch.Generator().manual_seed(11))
    rows = edits(logits)
    agree(logits, rows)
    for r, row in enumerate(rows):
        agree(logits[r : r + 1], [row])


def test_an_edit_changes_no_other_row_and_a_row_with_nothing_left_says_so() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(12))
    only = SamplingParams(temperature=0.0, allowed_token_ids=(7,))
    rows = [Row(GREEDY), Row(GREEDY, mask=b""), Row(only, mask=bitmask((6, 8))), Row(only)]
    tokens, state = drawn(logits, rows)
    assert state == [FINE, STUCK, STUCK, FINE]
    assert (tokens[0], tokens[3]) == (int(logits[0].argmax()), 7)


def test_masks_of_an_earlier_step_are_not_read_where_no_row_has_one() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(14))
    rows = [Row(SamplingParams(temperature=0.0, allowed_token_ids=(7,))), Row(GREEDY, mask=bitmask((6,)))]
    assert drawn(logits, rows)[0] == [7, 6]
    assert drawn(logits, rows, asked_by(rows[:1]))[0] == [7, int(logits[1].argmax())]


def test_many_bad_words_and_biases_are_all_seen() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(13))
    order = greatest(logits[0], VOCAB)
    banned = tuple((3, token) if i % 2 else (token,) for i, token in enumerate(order[:700]))
    params = SamplingParams(temperature=0.0, bad_words_token_ids=banned)
    biased = SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(greatest(logits[1], 600), -99.0))
    agree(logits, [Row(params), Row(biased)])
    assert drawn(logits, [Row(params), Row(biased)])[0][0] == order[700]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_of_the_logits_as_they_were(dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(14))).to(dtype)
    logits[1, [4499, 17, 4100]] = 20.0
    logits[2, 5:] = -math.inf
    logits[3, :4] = torch.tensor([0.0, -0.0, 0.0, -0.0])
    penalised = SamplingParams(temperature=1.0, repetition_penalty=1.2, logprobs=5)
    counts = [0, 3, MAX_LOGPROBS, 20]
    rows = [Row(SamplingParams(temperature=0.0, logprobs=count)) for count in counts] + [Row(penalised)]
    tokens, _, got = sampled(logits, rows)
    wanted = np.array([*counts, 5])
    want = score_tokens(logits.float(), np.array(tokens), wanted)
    for one, other in zip(got, want, strict=True):
        assert (one.token, one.rank) == (other.token, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=2e-6)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=2e-6)
    alone = sampled(logits[1:2], rows[1:2])[2]
    assert alone == got[1:2]


def test_scores_of_given_tokens_equal_the_hosts() -> None:
    logits = torch.randn(4, 9000, generator=torch.Generator().manual_seed(15))
    tokens = np.array([8999, 0, 4095, 4096])
    wanted = np.array([2, 0, 7, 32])
    scores = torch.zeros(4, SCORE_WIDTH, dtype=torch.int32, device=DEVICE)
    TritonSteps(DEVICE).score(logits.to(DEVICE), column(tokens.tolist()), column(wanted.tolist()), scores)
    got = read_scores(scores.cpu().numpy(), tokens.tolist(), wanted.tolist())
    for one, other in zip(got, score_tokens(logits, tokens, wanted), strict=True):
        assert (one.rank, [t for t, _ in one.top]) == (other.rank, [t for t, _ in other.top])
        assert one.logprob == pytest.approx(other.logprob, abs=2e-6)


def test_features_that_no_row_has_change_nothing_when_they_run() -> None:
    logits = torch.randn(2, 4500, generator=torch.Generator().manual_seed(5))
    agree(logits, [Row(SamplingParams(temperature=0.0)), Row(SamplingParams(temperature=1.0))], RequestedFeatures())


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_rows_without_a_token_say_why_and_do_not_change_others() -> None:
    logits = torch.randn(8, 2500, generator=torch.Generator().manual_seed(4))
    logits[0, 5] = math.nan
    logits[6:] = math.nan
    logits[1, 2400] = math.inf
    logits[2] = -math.inf
    logits[3] = -3e38
    greedy, hot = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.5)
    # Times this penalty, the logit of every token is beyond float32.
    overflow = Row(SamplingParams(temperature=1.0, repetition_penalty=100.0), tuple(range(2500)))
    rows = [Row(greedy), Row(hot), Row(greedy), overflow, Row(greedy), Row(hot), Row(greedy), Row(hot)]
    tokens, state = drawn(logits, rows)
    assert state == [BROKEN, BROKEN, BROKEN, STUCK, FINE, FINE, BROKEN, BROKEN]
    assert tokens[4:6] == expected(logits[4:6], rows[4:6])


@triton.jit
def noise_kernel(out, key, block, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), exponentials(tl.load(key).to(tl.uint32), block, BLOCK))


def test_noise_is_the_hosts_to_the_last_bit() -> None:
    for block in (0, 3, 4095):
        key = oracle.fold(stream(11, 0), 9)
        out = torch.empty(32, device=DEVICE)
        noise_kernel[(1,)](out, torch.tensor([key], device=DEVICE), block, BLOCK=32)
        head = oracle.fold(key, 2**30 + block)
        low = np.float32(oracle.unit(head)) / np.float32(32)
        held = oracle.fold(head, 0) % 32
        fresh = [np.float32(0 if i == held else oracle.unit(oracle.fold(key, 32 * block + i))) for i in range(32)]
        assert out.tolist() == [float(low + each) for each in fresh]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9),
        SamplingParams(temperature=0.9, top_p=0.7, top_k=40),
        SamplingParams(temperature=0.9, repetition_penalty=1.3),
    ],
    ids=["greedy", "hot", "cut", "edited"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)])
def test_logits_of_sixteen_bits_draw_what_they_would_draw_in_float32(
    params: SamplingParams, dtype: torch.dtype
) -> None:
    logits = (torch.randn(6, 5000, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    rows = [Row(params, seed=seed) for seed in range(6)]
    assert drawn(logits, rows) == drawn(logits.float(), rows)


@pytest.mark.parametrize("logprobs", [None, 2], ids=["in place", "in a copy"])
def test_restricted_rows_of_sixteen_bits_stand_beside_others(logprobs: int | None) -> None:
    logits = (torch.randn(8, 5000, generator=torch.Generator().manual_seed(1)) * 3).bfloat16()
    logits[6, 4999] = math.nan
    few, mask = tuple(range(3, 4900, 7)), bytes([0x5A]) * 620
    rows = [
        Row(SamplingParams(temperature=0.0, logprobs=logprobs)),
        Row(SamplingParams(temperature=0.0), mask=mask),
        Row(SamplingParams(temperature=0.9, allowed_token_ids=few)),
        Row(SamplingParams(temperature=0.9, top_p=0.7, top_k=40)),
        Row(SamplingParams(temperature=0.9, top_k=40, allowed_token_ids=few), mask=mask),
        Row(SamplingParams(temperature=0.0), mask=bytes(620)),
        Row(SamplingParams(temperature=0.0), mask=mask),
        Row(SamplingParams(temperature=0.0)),
    ]
    tokens, state = drawn(logits, rows)
    assert state == [FINE] * 5 + [STUCK, BROKEN, FINE]
    assert tokens[:5] == expected(logits[:5].float(), rows[:5])
    assert sampled(logits, rows) == sampled(logits.float(), rows)
