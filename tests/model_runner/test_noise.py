"""The hash is the documented one, its exponentials are independent and of mean 1, and draws follow softmax."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quire.model_runner.sampling.noise import Draw, keys, stream
from tests.model_runner.oracle import exponential

VOCABS = [1, 31, 32, 61, 64, 4096, 5003]


def draw_keys(seed: int, choice: int, positions: range) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    streams = np.full(len(positions), stream(seed, choice), np.uint32)
    return keys(streams, np.arange(positions.start, positions.stop))


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0])
def test_a_draw_is_the_gumbel_argmax_of_the_documented_noise(vocab: int, scale: float) -> None:
    rng = np.random.default_rng(vocab)
    rows, temperature = 3, 0.7
    logits = (scale * rng.standard_normal((rows, vocab))).astype(np.float32)
    for seed in (0, 1, -5, 2**63 + 11):
        got = Draw(vocab)(logits, np.full((rows, 1), temperature, np.float32), draw_keys(seed, 2, range(40, 40 + rows)))
        for r in range(rows):
            scores = [
                float(logits[r, t]) / temperature - math.log(exponential(seed, 2, 40 + r, t)) for t in range(vocab)
            ]
            assert got[r] == int(np.argmax(scores))


def test_a_logit_of_minus_infinity_is_never_drawn() -> None:
    rng = np.random.default_rng(0)
    logits = np.full((200, 100), -np.inf, np.float32)
    allowed = rng.integers(0, 100, 200)
    logits[np.arange(200), allowed] = rng.standard_normal(200)
    got = Draw(100)(logits, np.ones((200, 1), np.float32), draw_keys(3, 0, range(200)))
    assert got.tolist() == allowed.tolist()


def test_seed_choice_and_position_all_matter() -> None:
    flat = np.zeros((64, 5000), np.float32)
    ones = np.ones((64, 1), np.float32)
    draw = Draw(5000)
    base = draw(flat, ones, draw_keys(1, 0, range(64)))
    assert len(set(base.tolist())) > 60
    for other in (draw_keys(2, 0, range(64)), draw_keys(1, 1, range(64)), draw_keys(1 << 32 | 1, 0, range(64))):
        assert (draw(flat, ones, other) == base).sum() <= 1
    assert (draw(flat, ones, draw_keys(1, 0, range(1, 65)))[:-1] == base[1:]).all()


def chi_square(counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]], probs: np.ndarray) -> float:  # type: ignore[type-arg]
    """How many standard deviations the statistic lies above its mean, cells of fewer than 5 expected pooled."""
    expected = probs * counts.sum()
    small = expected < 5
    seen = np.append(counts[~small], counts[small].sum())
    want = np.append(expected[~small], expected[small].sum())
    seen, want = seen[want > 0], want[want > 0]
    freedom = len(seen) - 1
    return float((((seen - want) ** 2 / want).sum() - freedom) / math.sqrt(2 * max(freedom, 1)))


@pytest.mark.parametrize(("vocab", "scale"), [(7, 1.0), (64, 0.0), (200, 2.0), (1000, 3.0)])
def test_draws_follow_the_softmax(vocab: int, scale: float) -> None:
    rng = np.random.default_rng(vocab)
    line = (scale * rng.standard_normal(vocab)).astype(np.float32)
    draws, batch, temperature = 100_000, 5_000, 1.25
    probs = np.exp(line.astype(np.float64) / temperature)
    probs /= probs.sum()
    draw, counts = Draw(vocab), np.zeros(vocab, np.int64)
    heat = np.full((batch, 1), temperature, np.float32)
    for begin in range(0, draws, batch):
        got = draw(np.tile(line, (batch, 1)), heat, draw_keys(9, 0, range(begin, begin + batch)))
        counts += np.bincount(got, minlength=vocab)
    assert abs(chi_square(counts, probs)) < 4


def test_noise_of_neighbouring_positions_and_tokens_is_uncorrelated() -> None:
    noise = np.array([[exponential(4, 0, p, t) for t in range(96)] for p in range(600)])
    assert noise.mean() == pytest.approx(1.0, abs=0.02)
    assert noise.var() == pytest.approx(1.0, abs=0.05)
    across_tokens = np.corrcoef(noise.T) - np.eye(96)
    across_positions = [np.corrcoef(noise[:-lag].ravel(), noise[lag:].ravel())[0, 1] for lag in (1, 2, 7)]
    assert np.abs(across_tokens).max() < 0.2
    assert np.abs(across_tokens).mean() < 0.04
    assert max(map(abs, across_positions)) < 0.02
