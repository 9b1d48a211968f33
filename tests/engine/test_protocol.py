"""What is said between the front and the engine's process, and how much of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from quire.engine.protocol import Abort, FrameReader, Submit, ToEngine, encode_frame, submission, submitted
from quire.frontend.interface import Call
from quire.frontend.processor import requests
from quire.types import Request, SamplingParams, StructuredOutputsParams
from tests.server.doubles import TOKENIZER

LARGE = SamplingParams(
    n=64,
    structured_outputs=StructuredOutputsParams(choice=("a" * 5000, "b")),
    logit_bias=dict.fromkeys(range(400), 1.0),
    allowed_token_ids=tuple(range(400)),
)


def sent(several: list[Request]) -> tuple[int, list[Request]]:
    """Bytes on the way, and what arrives."""
    data = encode_frame(submission(several))
    [message] = FrameReader(ToEngine).feed(data)
    return len(data), list(submitted(message))


@pytest.mark.parametrize("sampling", [LARGE, replace(LARGE, prompt_logprobs=2)])
def test_what_the_answers_to_a_prompt_share_is_sent_to_the_engine_once(sampling: SamplingParams) -> None:
    """Where log-probabilities of the prompt are wanted, the first answer's request differs from the others'."""
    call = Call(id="c", prompt=tuple(i % 300 for i in range(20_000)), sampling=sampling)
    several = requests(call, tokenizer=TOKENIZER, limit=1 << 20, seed=3)
    (one, _), (all_of_them, got) = sent(several[:1]), sent(several)
    assert got == several
    assert all_of_them < (1 if sampling.prompt_logprobs is None else 2) * one + 64 * 32
    assert got[5].prompt is got[63].prompt and got[5].sampling is got[63].sampling


def test_requests_of_any_kinds_arrive_as_they_were() -> None:
    a = Request(id="a", prompt=(1, 2), max_new_tokens=3)
    kinds = [
        a,
        replace(a, id="b", choice=1),
        replace(a, seed=5),
        replace(a, prompt=(1, 3)),
        replace(a, cache_salt="s"),
        a,
    ]
    for several in itertools.permutations(kinds, 4):
        assert sent(list(several))[1] == list(several)


def test_an_answer_without_a_request_before_it_is_no_submission() -> None:
    with pytest.raises(ValueError, match="has nothing but its id"):
        list(submitted(Submit([("a", 1)])))


def test_messages_arrive_wherever_the_bytes_are_cut() -> None:
    messages = [Abort(["a"], "abort"), Abort(["b", "c"], "timeout")]
    data = b"".join(map(encode_frame, messages))
    for cut in range(len(data) + 1):
        reader = FrameReader(ToEngine)
        assert [*reader.feed(data[:cut]), *reader.feed(data[cut:])] == messages, cut
