"""Every architecture's greedy answers are those of transformers, whatever happens around a request.

CI asks the first shape of each architecture in one of the situations by turns, `make nightly` all of them in all
situations. `tests/ops/triton/test_executor.py` does the
same with the GPU's executor and interpreted kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from quire.weights.load import load_model
from tests.answers import Subject
from tests.checkpoints import FIRST, SHAPES, make

SITUATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "alone": {"max_num_seqs": 1, "prefix_caching": False},
        "among fifteen others": {},
        "looking ahead": {"lookahead": 1},
        "chunked": {"max_num_batched_tokens": 24, "max_chunk_tokens": 7, "page_size": 4},
        "preempted": {"pages": 120, "page_size": 2, "prefix_caching": False},
        "drafted": {"drafts": 2, "lookahead": 1},
    }
)


HALF = [pytest.param(shape, marks=() if shape in sorted(FIRST)[::2] else pytest.mark.nightly) for shape in SHAPES]


@pytest.fixture(
    scope="module",
    params=[pytest.param(shape, marks=() if shape in FIRST else pytest.mark.nightly) for shape in SHAPES],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = make(folder, request.param)
    return Subject(load_model(folder, dtype="float32"), theirs, new=8)


def cases() -> list[Any]:
    """(shape, situation); of the first shapes that share a situation in CI there are several families."""
    turns, firsts = list(SITUATIONS), sorted(FIRST)
    return [
        pytest.param(
            shape,
            situation,
            id=f"{shape}-{situation}",
            marks=()
            if shape in FIRST and turns.index(situation) == 5 * firsts.index(shape) % len(turns)
            else pytest.mark.nightly,
        )
        for shape in SHAPES
        for situation in SITUATIONS
    ]


@pytest.mark.parametrize(("subject", "situation"), cases(), indirect=["subject"], scope="module")
def test_answers_are_those_of_transformers(subject: Subject, situation: str) -> None:
    engine = subject.engine(**SITUATIONS[situation])
    assert subject.ask(engine, range(16)) == dict(enumerate(subject.want))
    assert (engine.gauges().preemptions > 0) == (situation == "preempted")
    assert len(set(subject.want)) >= 15, "answers that are all the same would agree by accident"


@pytest.mark.parametrize("subject", HALF, indirect=True, scope="module")
def test_answers_after_a_prefix_hit_are_those_of_transformers(subject: Subject) -> None:
    engine = subject.engine(page_size=4)
    for which in ([0], [3], [6, 15]):
        answers = subject.ask(engine, which)
    hits = engine.gauges().prefix_hit
    # Of recurrent layers no state is known where the first of them leaves the shared beginning; then there is.
    assert hits > (2 if engine.description.recurrent else 3) * 36
    assert all(answers[i] == subject.want[i] for i in (0, 3, 6, 15))
