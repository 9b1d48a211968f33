"""What an `LLM` streams of a model that thinks aloud: its thoughts apart from its answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire import LLM, SamplingParams
from quire.parsers.parts import TextPart, joined
from tests import thinker

HELLO = [{"role": "user", "content": "Well?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(settings=thinker.settings()) as made:
        thinker.thinking(made._engine.executor)
        yield made


def test_thoughts_and_answer_are_parts_of_their_own(llm: LLM) -> None:
    counts = []

    def counted() -> Iterator[TextPart]:
        counts.append((yield from llm.stream_chat_parts(HELLO, SamplingParams(temperature=0))))

    found = list(counted())
    assert [(part.kind, part.text) for part in joined(found)] == [
        ("reasoning", thinker.THOUGHT),
        ("content", thinker.ANSWER),
    ]
    assert counts == [len(llm.get_tokenizer().encode(thinker.SAYS, add_special_tokens=False)) + 1]
    assert "".join(llm.stream_chat(HELLO, SamplingParams(temperature=0))) == thinker.SAYS, "as the model wrote it"


def test_a_thought_that_is_cut_off_is_no_answer(llm: LLM) -> None:
    parts = list(llm.stream_chat_parts(HELLO, SamplingParams(temperature=0, max_tokens=2)))
    assert {part.kind for part in parts} == {"reasoning"}


def test_closing_the_parts_ends_the_request(llm: LLM) -> None:
    parts = llm.stream_chat_parts(HELLO, SamplingParams(temperature=0))
    next(parts)
    parts.close()
    whole = llm.stream_chat_parts(HELLO, SamplingParams(temperature=0))
    assert thinker.ANSWER in "".join(part.text for part in whole)
