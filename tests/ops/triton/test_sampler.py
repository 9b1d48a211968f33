"""The device's sampler against the host's noise and truncation, and against penalties computed token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.model_runner.sampling.features import COLUMNS
from quire.model_runner.sampling.noise import Draw, stream
from quire.model_runner.sampling.sampler import Truncation, truncate
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.noise import exponentials
from quire.ops.triton.sampler import BROKEN, FINE, STUCK, RequestedFeatures, SamplingTensors, sample
from quire.types import SamplingParams
from tests.model_runner import oracle
from tests.ops.triton.device import DEVICE

CARD = DeviceInfo.of(DEVICE)


@dataclass(frozen=True)
class Row:
    """One row to sample: its parameters, and its tokens so far."""

    params: SamplingParams
    tokens: tuple[int, ...] = (3, 5, 3)
    prompt: int = 1
    seed: int = 0
    choice: int = 0


def settings(rows: list[Row]) -> SamplingTensors:
    def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    s = [row.params for row in rows]
    return SamplingTensors(
        **{
            name: column([each.read(p) for p in s], torch.int32 if each.is_integer else torch.float32)
            for name, each in COLUMNS.items()
        },
        stream=column([stream(row.seed, row.choice) for row in rows], torch.int64),
    )


def drawn(logits: Tensor, rows: list[Row], asked: RequestedFeatures | None = None) -> tuple[list[int], list[int]]:
    """Tokens and state. asked: by default what the rows ask for."""
    if asked is None:
        p = [row.params for row in rows]
        cut = any(s.top_k > 0 or s.top_p < 1 or s.min_p > 0 for s in p)
        penalised = any(s.repetition_penalty != 1 or s.frequency_penalty or s.presence_penalty for s in p)
        asked = RequestedFeatures(not all(s.greedy for s in p), cut, penalised)
    longest = max(len(row.tokens) for row in rows) + 4
    history = torch.tensor([[*row.tokens, *[7] * (longest - len(row.tokens))] for row in rows], dtype=torch.int32)
    positions = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int32)
    prompt = torch.tensor([row.prompt for row in rows], dtype=torch.int32)
    which = torch.arange(len(rows), dtype=torch.int32)
    moved = (x.to(DEVICE) for x in (logits.clone(), which, positions, history, prompt))
    tally = torch.zeros(logits.shape, dtype=torch.int32, device=DEVICE)
    tokens, state = sample(*moved, settings(rows), CARD, asked, tally=tally)
    assert not tally.any()
    return tokens.tolist(), state.tolist()


def expected(logits: Tensor, rows: list[Row]) -> list[int]:
    """What the host draws, row by row."""
    out = []
    for x, row in zip(logits.tolist(), rows, strict=True):
        p = row.params
        prompt, output = row.tokens[: row.prompt], row.tokens[row.prompt :]
        line = np.array([oracle.edited(x, p, prompt, output, frozenset(), None)], np.float32)
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


def test_features_that_no_row_has_change_nothing_when_they_run() -> None:
    logits = torch.randn(2, 4500, generator=torch.Generator().manual_seed(5))
    agree(logits, [Row(SamplingParams(temperature=0.0)), Row(SamplingParams(temperature=1.0))], RequestedFeatures())


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_rows_without_a_token_say_why_and_do_not_change_others() -> None:
    logits = torch.randn(6, 2500, generator=torch.Generator().manual_seed(4))
    logits[0, 5] = math.nan
    logits[1, 2400] = math.inf
    logits[2] = -math.inf
    logits[3] = -3e38
    greedy, hot = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.5)
    # Times this penalty, the logit of every token is beyond float32.
    overflow = Row(SamplingParams(temperature=1.0, repetition_penalty=100.0), tuple(range(2500)))
    rows = [Row(greedy), Row(hot), Row(greedy), overflow, Row(greedy), Row(hot)]
    tokens, state = drawn(logits, rows)
    assert state == [BROKEN, BROKEN, BROKEN, STUCK, FINE, FINE]
    assert tokens[4:] == expected(logits[4:], rows[4:])


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
