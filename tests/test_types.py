"""Sequences that are made when they are read."""

from __future__ import annotations

import pytest

from quire.engine.protocol import FrameReader, ToFront, Update, encode_frame
from quire.frontend.interface import Call, Delta
from quire.frontend.outputs import request_output
from quire.types import Deferred, RequestStepOutput, SamplingParams, TokenLogprobs, joined

SCORES = tuple(TokenLogprobs(token, -0.5 * token, 1, ((token, -0.5), (9, -2.0))) for token in range(4))


class Made:
    """Makes a sequence, and counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> list[TokenLogprobs]:
        self.times += 1
        return [*SCORES]


def test_it_is_made_once_and_not_for_its_length_nor_as_a_part_of_another() -> None:
    make = Made()
    deferred = Deferred(make, 4)
    whole = joined((None,), joined(deferred[:], deferred[0:9]))
    assert len(deferred) == 4 and deferred and len(whole) == 9 and make.times == 0
    assert whole == (None, *SCORES, *SCORES) and whole != (None, *SCORES)
    assert deferred[1] == SCORES[1] and [*deferred[1:3]] == [*SCORES[1:3]] and [*deferred] == [*SCORES]
    assert hash(deferred) == hash(SCORES) and repr(deferred) == repr(SCORES) and make.times == 1
    assert deferred == Deferred(lambda: SCORES, 4) and deferred != 4
    assert joined((1,), (2, 3)) == (1, 2, 3)


def test_in_a_message_and_in_an_output_it_is_what_it_makes() -> None:
    make = Made()
    event = RequestStepOutput("a", (1,), prompt_logprobs=Deferred(make, 4))  # type: ignore[arg-type]
    [update] = FrameReader(ToFront).feed(encode_frame(Update(1, [event], False, 0, 1.0)))
    assert update.events == [event._replace(prompt_logprobs=SCORES)] and make.times == 1
    call = Call(id="a", prompt=(1,) * 5, text=None, sampling=SamplingParams(prompt_logprobs=1))
    delta = Delta(0, "", (1,), prompt_logprobs=joined((None,), event.prompt_logprobs))
    assert request_output(call, [[delta]]).prompt_logprobs == (None, *SCORES)
    with pytest.raises(NotImplementedError, match="cannot hold complex"):
        encode_frame(Update(1, [], False, 0, 1.0, stats={"a": 1j}))
