"""The sampler against one slow row at a time; alone and in any batch; with any drafts; and what it says of NaN."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.model_runner.sampling.sampler import BROKEN, NO_TOKEN_ALLOWED, Sampled, Sampler, Truncation, truncate
from quire.scheduler.plan import Mask, NewSequence, Plan
from quire.types import GREEDY, SamplingParams, TokenLogprobs
from tests.model_runner.bench_rows import opened
from tests.model_runner.oracle import choose, edited
from tests.model_runner.test_noise import chi_square

VOCAB = 75
STOP = frozenset((2, 3, 40))
tokens = st.integers(0, VOCAB - 1)
rarely = lambda strategy, off: st.one_of(st.just(off), strategy)  # noqa: E731

params = st.builds(
    lambda **kw: SamplingParams(**kw),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=rarely(st.integers(1, 80), 0),
    top_p=rarely(st.floats(0.05, 0.99), 1.0),
    min_p=rarely(st.floats(0.01, 0.9), 0.0),
    presence_penalty=rarely(st.floats(-2, 2), 0.0),
    frequency_penalty=rarely(st.floats(-2, 2), 0.0),
    repetition_penalty=rarely(st.floats(0.5, 2), 1.0),
    repeat_last_n=rarely(st.integers(0, 12), -1),
    min_tokens=rarely(st.integers(1, 6), 0),
    bad_words_token_ids=rarely(st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=3), ()),
    logit_bias=rarely(st.dictionaries(tokens, st.floats(-9, 9), max_size=4), {}),
    allowed_token_ids=rarely(st.lists(tokens, min_size=8, max_size=30), None),
    max_tokens=st.none(),
)
masks = st.one_of(st.none(), st.binary(min_size=10, max_size=10), st.binary(min_size=5, max_size=5))


def a_row(row: int, s: SamplingParams, rng: random.Random) -> NewSequence:
    """Few distinct tokens, so that penalties and bad words bite."""
    text = tuple(rng.choice((1, 5, 9, 44, 70)) for _ in range(rng.randrange(2, 20)))
    prompt = rng.randrange(1, len(text))
    return NewSequence(row, text, len(text) - 1, prompt, s, rng.randrange(1 << 64), rng.randrange(3), STOP)


def logits_for(count: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed))


def expected(o: NewSequence, logits: torch.Tensor, mask: Mask = None, drafts: Sequence[int] = ()) -> int | None:
    """What the slow sampler says; None where nothing is allowed."""
    prompt, output = list(o.tokens[: o.prompt_length]), [*o.tokens[o.prompt_length :], *drafts]
    line = edited(logits.tolist(), o.sampling, prompt, output, o.stop_token_ids, mask)
    if max(line) == -math.inf:
        return None
    return choose(line, o.sampling, o.seed, o.choice, len(prompt) + len(output))


def sample(
    opens: Sequence[NewSequence],
    logits: torch.Tensor,
    given_masks: Sequence[Mask] = (),
    drafts: Sequence[Sequence[int]] = (),
) -> Sampled:
    rows, shape = opened(opens, drafts)
    return Sampler(VOCAB)(logits.clone(), rows, shape, list(enumerate(given_masks)))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(params, masks), min_size=1, max_size=6), st.integers(0, 1 << 30))
def test_every_setting_in_any_batch_equals_the_slow_oracle(asked: list[tuple[SamplingParams, Mask]], seed: int) -> None:
    rng = random.Random(seed)
    opens = [a_row(r, s, rng) for r, (s, _) in enumerate(asked)]
    logits = logits_for(len(opens), seed)
    got = sample(opens, logits, [mask for _, mask in asked])
    for r, (o, (_, mask)) in enumerate(zip(opens, asked, strict=True)):
        want = expected(o, logits[r], mask)
        if want is None:
            assert got.bad[r]
            assert got.errors[r] == NO_TOKEN_ALLOWED
        else:
            assert not got.bad[r]
            assert got.tokens[r] == want


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(params, min_size=1, max_size=4), st.integers(0, 1 << 30))
def test_a_verify_row_counts_the_drafts_before_it(asked: list[SamplingParams], seed: int) -> None:
    rng = random.Random(seed)
    opens = [a_row(r, s, rng) for r, s in enumerate(asked)]
    drafts = [[rng.choice((5, 9, 44)) for _ in range(3)] for _ in opens]
    logits = logits_for(4 * len(opens), seed)
    got = sample(opens, logits, drafts=drafts)
    for r, o in enumerate(opens):
        for i in range(4):
            assert got.tokens[4 * r + i] == expected(o, logits[4 * r + i], drafts=drafts[r][:i])


def test_equal_logits_are_truncated_the_same_in_any_batch() -> None:
    """Coarse logits tie at every threshold; a neighbour that needs a longer look must not move the edge."""
    coarse = (2 * logits_for(24, 5)).round() / 2
    rng = random.Random(5)
    kinds = [{"top_k": 4}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.8}, {"min_p": 0.2, "top_p": 0.7}]
    opens = [a_row(r, SamplingParams(temperature=1.5, **kinds[r % 4]), rng) for r in range(24)]
    together = sample(opens, coarse).tokens.tolist()
    flat = a_row(24, SamplingParams(temperature=50.0, top_p=0.99), rng)
    batched = sample([*opens, flat], torch.cat((coarse, coarse[:1]))).tokens.tolist()[:24]
    alone = [int(sample([o._replace(row=0)], coarse[r : r + 1]).tokens[0]) for r, o in enumerate(opens)]
    assert together == batched == alone == [expected(o, coarse[r]) for r, o in enumerate(opens)]


@pytest.mark.parametrize(
    "s",
    [
        pytest.param(SamplingParams(temperature=1.7, top_k=9), marks=pytest.mark.nightly),
        pytest.param(SamplingParams(temperature=1.0, top_p=0.8), marks=pytest.mark.nightly),
        SamplingParams(temperature=2.0, min_p=0.1, top_k=40, top_p=0.95),
        SamplingParams(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.5, logit_bias={7: 2.0}),
    ],
)
def test_samples_follow_the_distribution_asked_for(s: SamplingParams) -> None:
    text, rounds, batch = (1, 5, 9, 5, 44), 10, 2000
    logits = logits_for(1, 8)
    line = np.array(edited(logits[0].tolist(), s, list(text[:2]), list(text[2:]), STOP, None)) / s.temperature
    order = np.argsort(-line)
    probs = np.exp(line - line.max())
    probs[line < line.max() + math.log(s.min_p or 1e-300)] = 0
    probs[order[s.top_k or VOCAB :]] = 0
    probs /= probs.sum()
    probs[order[(np.cumsum(probs[order]) - probs[order]) >= s.top_p]] = 0
    probs /= probs.sum()
    counts = np.zeros(VOCAB, np.int64)
    for i in range(rounds):
        opens = [NewSequence(r, text, 4, 2, s, i * batch + r) for r in range(batch)]
        counts += np.bincount(sample(opens, logits.expand(batch, -1)).tokens, minlength=VOCAB)
    assert counts[probs == 0].sum() == 0
    assert abs(chi_square(counts, probs)) < 4


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone_under_every_setting(poison: float) -> None:
    rng = random.Random(1)
    everything = SamplingParams(
        temperature=0.9, top_k=5, top_p=0.9, min_p=0.1, logprobs=2, repetition_penalty=1.2, presence_penalty=1,
        bad_words_token_ids=((1,),), logit_bias={1: 1.0}, allowed_token_ids=tuple(range(60)), min_tokens=9,
        max_tokens=None,
    )  # fmt: skip
    opens = [a_row(r, s, rng) for r, s in enumerate([GREEDY, everything, everything, GREEDY])]
    clean = logits_for(4, 2)
    sick = clean.clone()
    sick[1, 7] = poison
    sick[3] = poison
    got, want = sample(opens, sick, [None] * 4), sample(opens, clean, [None] * 4)
    assert got.bad.tolist() == [False, True, False, True]
    assert set(got.errors.items()) == {(1, BROKEN), (3, BROKEN)}
    assert [got.tokens[0], got.tokens[2]] == [want.tokens[0], want.tokens[2]]
    assert got.logprobs[2] == want.logprobs[2]


def test_minus_infinity_from_the_model_is_a_token_it_excludes() -> None:
    logits = logits_for(1, 3)
    best = int(logits.argmax())
    logits[0, best] = -math.inf
    got = sample([NewSequence(0, (1, 2), 1, 1)], logits)
    assert not got.bad[0]
    assert got.tokens[0] == int(logits.argmax()) != best


def test_logprobs_are_of_the_raw_logits_whatever_sampling_does() -> None:
    rng = random.Random(2)
    wanted = [0, 1, 5, -1, None, VOCAB]
    opens = [
        a_row(r, SamplingParams(temperature=1.5, top_k=3, logit_bias={6: 9.0}, logprobs=n), rng)
        for r, n in enumerate(wanted)
    ]
    logits = logits_for(len(wanted), 4)
    got = sample(opens, logits)
    assert sorted(got.logprobs) == [0, 1, 2, 3, 5]
    raw = logits.log_softmax(-1)
    for r, score in got.logprobs.items():
        assert isinstance(score, TokenLogprobs)
        assert score.token == got.tokens[r]
        assert score.logprob == pytest.approx(float(raw[r, score.token]), abs=1e-5)
        assert score.rank == 1 + int((raw[r] > raw[r, score.token]).sum())
        count = VOCAB if wanted[r] == -1 else wanted[r]
        values, ids = raw[r].topk(count or 0)
        assert [t for t, _ in score.top] == ids.tolist()
        assert [x for _, x in score.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_equal_logprobs_are_ordered_by_token_id() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [11, 4, 60]] = 2.0
    score = sample([NewSequence(0, (1, 2), 1, 1, SamplingParams(temperature=0.0, logprobs=3))], logits).logprobs[0]
    assert (score.token, score.rank) == (4, 1)
    assert [t for t, _ in score.top] == [4, 11, 60]


def test_settings_of_a_closed_row_do_not_outlive_it() -> None:
    """The same spans, another request in the row: what was derived from the first is stale."""
    logits = logits_for(1, 6)
    only = SamplingParams(temperature=1.0, allowed_token_ids=(33,), logprobs=0)
    rows, shape = opened([NewSequence(0, (1, 2), 1, 1, only)])
    sampler = Sampler(VOCAB)
    first = sampler(logits.clone(), rows, shape)
    assert first.tokens[0] == 33
    assert 0 in first.logprobs
    shape = rows.apply_plan(Plan((NewSequence(0, (1, 2), 1, 1),), (), shape.spans))
    second = sampler(logits.clone(), rows, shape)
    assert second.tokens[0] == int(logits.argmax())
    assert not second.logprobs


def test_seeds_are_64_bits_of_any_sign() -> None:
    logits = torch.zeros(1, VOCAB)
    hot = SamplingParams(temperature=1.0)
    seeds = [0, 1, -1, 1 << 32, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1]
    got = {seed: int(sample([NewSequence(0, (1, 2), 1, 1, hot, seed)], logits).tokens[0]) for seed in seeds}
    assert got == {seed: expected(NewSequence(0, (1, 2), 1, 1, hot, seed), logits[0]) for seed in seeds}
    assert got[-1] == got[(1 << 64) - 1] == got[struct.unpack("q", b"\xff" * 8)[0]]
    assert len(set(got.values())) >= 5


@pytest.mark.parametrize("made", range(5))
def test_stop_tokens_are_masked_until_min_tokens_are_sampled_and_no_longer(made: int) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 9.0
    logits[0, 50] = 1.0
    patient = SamplingParams(temperature=0.0, min_tokens=3)
    text = tuple(range(10, 12 + made))
    got = sample([NewSequence(0, text, len(text) - 1, 2, patient, stop_token_ids=STOP)], logits)
    assert got.tokens[0] == (50 if made < 3 else 3)


@pytest.mark.parametrize("drafted", [0, 1, 2])
def test_a_bad_word_is_kept_from_being_completed_across_drafts(drafted: int) -> None:
    logits = torch.zeros(1 + drafted, VOCAB)
    logits[:, 9] = 5.0
    logits[:, 30] = 1.0
    wary = SamplingParams(temperature=0.0, bad_words_token_ids=((7, 8, 9),))
    text = (7, 8, *(7, 8)[: 2 - drafted])  # the prompt's own 7, 8 do not begin a word of the output
    got = sample([NewSequence(0, text, len(text) - 1, 2, wary)], logits, drafts=[list((7, 8)[2 - drafted :])])
    assert got.tokens.tolist() == [9] * drafted + [30]


@pytest.mark.parametrize("top_p", [0.1, pytest.param(0.5, marks=pytest.mark.nightly), 0.97])
def test_a_nucleus_may_be_wider_than_the_first_look(top_p: float) -> None:
    vocab = 2000
    line = 0.3 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(1))
    probs, order = line[0].double().softmax(-1).sort(descending=True)
    inside = set(order[(probs.cumsum(0) - probs) < top_p].tolist())
    assert len(inside) > 64
    asked = SamplingParams(temperature=1.0, top_p=top_p)
    rows, shape = opened([NewSequence(r, (1, 2), 1, 1, asked, r) for r in range(4000)])
    got = Sampler(vocab)(line.expand(4000, -1).clone(), rows, shape)
    drawn = set(got.tokens.tolist())
    assert drawn <= inside
    assert len(drawn) > 0.8 * len(inside)


def test_a_nucleus_at_the_edge_of_a_token_is_the_same_whatever_others_ask_for() -> None:
    """Its edge is put between the mass that two ways of adding up would give."""
    moved = 0
    for seed in range(20):
        x = np.random.default_rng(seed).standard_normal((2, 300)).astype(np.float32)
        far = math.log(0.05)
        inside = np.sort(x[0][x[0] >= x[0].max() + np.float32(far)])[::-1]
        exact = np.exp(inside - inside[0], dtype=np.float64)
        rough = np.exp(x[0] - inside[0])
        rough[x[0] < inside[-1]] = 0.0
        middle = (float(exact.sum()) + float(rough.sum())) / 2
        edge = float(exact.cumsum()[20]) / middle
        moved += float(exact.sum()) != float(rough.sum())
        alone, among = x[:1].copy(), x.copy()
        truncate(alone, cut([300], [edge], [0.05]))
        truncate(among, cut([300, 299], [edge, 0.5], [0.05, 0.0]))
        assert np.array_equal(alone[0], among[0])
    assert moved > 10, "the two ways differ, so the edges lie between"


def cut(top_k: list[int], top_p: list[float], min_p: list[float]) -> Truncation:
    temperature = np.ones(len(top_k), np.float32)
    columns = {"temperature": temperature, "top_k": np.array(top_k), "top_p": np.array(top_p)}
    return Truncation.of(columns | {"min_p": np.array(min_p, np.float32)}, np.arange(len(top_k)), 300)
