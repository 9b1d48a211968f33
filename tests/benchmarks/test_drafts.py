"""What speculation is measured with: answers that are compared, and summaries of nothing but the story's sentences."""

from __future__ import annotations

import re

import pytest
from click import ClickException

from benchmarks.drafts import LOOKUP, STARTS, compared, load, story, summary
from quire.scheduler.speculation import FixedDrafts


def test_summaries_are_sentences_of_the_story_and_mostly_drafted_right() -> None:
    engines = {"off": load(None, 1), "look-up": load(LOOKUP, 1)}
    engines["look-up"]._engine.scheduler.speculation = FixedDrafts(
        8
    )  # else this machine's moment says how many are made
    asked = [summary(engines["off"], STARTS[0], 60)]
    found = compared("summaries", engines, "look-up", asked, 1)
    assert found["right"] > 0.4 and found["drafted"] > 20
    done = engines["look-up"].generate(*asked[0], use_tqdm=False)[0].outputs[0].text
    first = re.split(r"(?<=[.!?]) ", done)[0]
    assert len(first) > 15 and first in asked[0][0][0]


def test_an_answer_that_differs_is_an_error() -> None:
    engine = load(None, 1)
    with pytest.raises(ClickException, match="differ"):
        compared("x", {"off": engine, "on": Other(engine)}, "on", [([STARTS[0]], [story(3)])], 1)  # type: ignore[dict-item]


class Other:
    """Answers something else."""

    def __init__(self, llm: object) -> None:
        self._llm = llm

    @property
    def _engine(self) -> object:
        return self._llm._engine  # type: ignore[attr-defined]

    def generate(self, prompts: list[str], how: object, use_tqdm: bool) -> object:
        return self._llm.generate([p + " Then" for p in prompts], how, use_tqdm=use_tqdm)  # type: ignore[attr-defined]
