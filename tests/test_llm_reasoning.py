"""What an `LLM` streams of a model that thinks aloud: its thoughts apart from its answer."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from quire import LLM, SamplingParams
from quire.parsers.parts import TextPart, joined
from quire.types import TokenTotal
from tests import thinker

HELLO = [{"role": "user", "content": "Well?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(settings=thinker.settings()) as made:
        thinker.thinking(made._engine.executor)
        yield made


def counted(parts: Generator[TextPart, None, TokenTotal], totals: list[TokenTotal]) -> Iterator[TextPart]:
    totals.append((yield from parts))


def test_thoughts_and_answer_are_parts_of_their_own(llm: LLM) -> None:
    counts: list[TokenTotal] = []
    found = list(counted(llm.stream_chat_parts(HELLO, SamplingParams(temperature=0)), counts))
    assert [(part.kind, part.text) for part in joined(found)] == [
        ("reasoning", thinker.THOUGHT),
        ("content", thinker.ANSWER),
    ]
    assert counts == [len(llm.get_tokenizer().encode(thinker.SAYS, add_special_tokens=False)) + 1]
    assert counts[0].finish_reason == "stop"
    assert "".join(llm.stream_chat(HELLO, SamplingParams(temperature=0))) == thinker.SAYS, "as the model wrote it"


def test_a_thought_that_is_cut_off_is_no_answer(llm: LLM) -> None:
    totals: list[TokenTotal] = []
    parts = list(counted(llm.stream_chat_parts(HELLO, SamplingParams(temperature=0, max_tokens=2)), totals))
    assert {part.kind for part in parts} == {"reasoning"}
    assert (totals, totals[0].finish_reason) == ([2], "length")


def test_closing_the_parts_ends_the_request(llm: LLM) -> None:
    parts = llm.stream_chat_parts(HELLO, SamplingParams(temperature=0))
    next(parts)
    parts.close()
    whole = llm.stream_chat_parts(HELLO, SamplingParams(temperature=0))
    assert thinker.ANSWER in "".join(part.text for part in whole)
