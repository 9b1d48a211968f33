"""The first promise: greedy answers in float32 equal transformers', whatever happens around a request.

Real checkpoints through the real engine and the CPU executor: alone, in a crowd, cold, warm, chunked, preempted, with
any depth of look-ahead; and a slice of the lattice on the same executor.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.scheduler.policy import SchedulingPolicy
from quire.types import UNLIMITED
from quire.weights.load import load_model
from quire.weights.locate import embedded
from tests import checkpoints
from tests.answers import Subject
from tests.pairs import pairwise

SHAPES = ("llama-gqa-tied", "llama-mha-llama3-rope", "embedded")


@pytest.fixture(scope="module", params=SHAPES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(request.param, tmp_path_factory.getbasetemp())


@cache
def make_subject(shape: str, base: Path) -> Subject:
    folder = embedded() if shape == "embedded" else base / shape
    theirs = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        if shape == "embedded"
        else checkpoints.make(folder, shape)
    )
    return Subject(load_model(folder, dtype="float32"), theirs, new=32)


def test_the_checkpoints_are_worth_comparing(subject: Subject) -> None:
    """Answers that repeat one token would agree by accident."""
    varied = [len(set(answer)) for answer in subject.want]
    assert max(varied) >= 16 and sum(v >= 8 for v in varied) >= 8


def test_alone(subject: Subject) -> None:
    for i in range(4):
        assert subject.ask(subject.engine(), [i])[i] == subject.want[i]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_among_fifteen_others(subject: Subject, lookahead: int) -> None:
    answers = subject.ask(subject.engine(lookahead=lookahead), range(16))
    assert answers == dict(enumerate(subject.want))


def test_after_a_prefix_hit(subject: Subject) -> None:
    engine = subject.engine(page_size=4)
    subject.ask(engine, [0])
    answers = subject.ask(engine, [3, 6, 15])
    assert engine.gauges().prefix_hit > 3 * 36
    assert all(answers[i] == subject.want[i] for i in (0, 3, 6, 15))


def test_chunked(subject: Subject) -> None:
    answers = subject.ask(subject.engine(max_num_batched_tokens=24, max_chunk_tokens=7, page_size=4), range(16))
    assert answers == dict(enumerate(subject.want))


def test_after_preemption(subject: Subject) -> None:
    engine = subject.engine(pages=60, page_size=8, prefix_caching=False)
    answers = subject.ask(engine, range(16))
    assert engine.gauges().preemptions > 0
    assert answers == dict(enumerate(subject.want))


AXES: dict[str, Sequence[Any]] = {
    "lookahead": (0, 1, 2),
    "page_size": (1, 4, 16, 512),
    "tight": (1, 2, 16),
    "prefix_caching": (False, True),
    "eviction_policy": ("lru", "fifo"),
    "max_num_seqs": (1, 4, UNLIMITED),
    "feed": ((UNLIMITED, UNLIMITED), (16, 5), (64, 7), (9, UNLIMITED)),
    "batching": ("continuous", "static"),
}


def share_of(share: int) -> list[dict[str, Any]]:
    """Every pair of values, or 26 combinations of 208."""
    if share == 0:
        return pairwise(AXES)
    rng = random.Random(share)
    return [{axis: rng.choice(values) for axis, values in AXES.items()} for _ in range(26)]


@pytest.mark.parametrize("share", [0, *(pytest.param(share, marks=pytest.mark.nightly) for share in range(1, 9))])
def test_a_slice_of_the_lattice_on_real_tensors(share: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Short answers, so that they take seconds."""
    subject = make_subject("llama-gqa-tied", tmp_path_factory.getbasetemp())
    rng = random.Random(share)
    for c in share_of(share):
        budget, chunk = c.pop("feed")
        longest = max(map(len, subject.prompts)) + 6
        pages = -(-longest // c["page_size"]) * c.pop("tight")
        policy = SchedulingPolicy(batching=c.pop("batching"))
        engine = subject.engine(pages=pages, max_num_batched_tokens=budget, max_chunk_tokens=chunk, policy=policy, **c)
        which = rng.sample(range(16), 6)
        answers = subject.ask(engine, which, 6)
        assert answers == {i: subject.want[i][:6] for i in which}, c
