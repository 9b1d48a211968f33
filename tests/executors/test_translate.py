"""Plans, results, masks and descriptions of every shape are the same after a way through bytes."""

from __future__ import annotations

import random

import pytest

from quire.engine.executor import Description
from quire.executors.contract import executor_pb2 as pb
from quire.executors.contract.translate import (
    read_description,
    read_masks,
    read_plan,
    read_result,
    send_description,
    send_masks,
    send_plan,
    send_result,
)
from quire.scheduler.plan import Mask, NewSequence, Plan, Result, Span
from quire.types import SamplingParams, TokenLogprobs

RNG = random.Random(3)


def score(n: int) -> TokenLogprobs:
    return TokenLogprobs(n, -n / 4, n + 1, tuple((n + i, -i / 8) for i in range(n % 4)))


def sampling(n: int) -> SamplingParams:
    """All fields, each of its own value."""
    if n % 3 == 0:
        return SamplingParams()
    return SamplingParams(
        temperature=n / 8,
        top_p=1 / (n + 1),
        top_k=n,
        min_p=n / 64,
        presence_penalty=-n / 16,
        frequency_penalty=n / 16,
        repetition_penalty=1 + n / 4,
        min_tokens=n,
        max_tokens=None,
        stop_token_ids=(n, n + 1),
        bad_words_token_ids=((n,), (n, 2)),
        logit_bias={n: 1.5, n + 5: -2.0},
        allowed_token_ids=None if n % 2 else (n, n + 3),
        logprobs=n,
        prompt_logprobs=None if n % 2 else n + 1,
        pooling=(None, "mean", "last")[n % 3],  # type: ignore[arg-type]
    )


def sequence(n: int) -> NewSequence:
    tokens = tuple(range(n, 3 * n + 2))
    seed = (0, 1, (1 << 64) - 1, 1 << 63)[n % 4]
    return NewSequence(n, tokens, n, n + 1, sampling(n), seed, n % 5, frozenset({n, n + 7}), 100 + n)


def plan(n: int) -> Plan:
    spans = tuple(Span(i, i + 1, i % 2, i + i % 2) for i in range(n + 1))
    blocks = tuple((i, tuple(range(i, i + n % 3 + 1))) for i in range(n))
    drafts = tuple(range(n + 1)) if n % 2 else ()
    return Plan(tuple(map(sequence, range(n))), blocks, spans, tuple(range(0, n, 2)), drafts)


@pytest.mark.parametrize("n", range(8))
def test_plans_arrive_as_they_were_sent(n: int) -> None:
    sent = plan(n)
    got = read_plan(pb.Plan.FromString(send_plan(sent, ()).SerializeToString()), ())
    assert got._replace(new_sequences=()) == sent._replace(new_sequences=())
    for before, after in zip(sent.new_sequences, got.new_sequences, strict=True):
        assert after._replace(sampling=SamplingParams()) == before._replace(sampling=SamplingParams())
        for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "min_tokens"):
            assert getattr(after.sampling, name) == pytest.approx(getattr(before.sampling, name)), name
        for name in ("repetition_penalty", "logprobs", "prompt_logprobs", "pooling", "allowed_token_ids", "logit_bias"):
            assert getattr(after.sampling, name) == getattr(before.sampling, name), name
        assert after.sampling.bad_words_token_ids == before.sampling.bad_words_token_ids


def test_spans_that_stay_the_same_are_not_sent_and_stay_the_same_object() -> None:
    first = plan(3)
    again = plan(2)._replace(spans=first.spans, num_drafts=())
    message = send_plan(again, first.spans)
    assert not message.spans and read_plan(message, first.spans).spans is first.spans
    equal = again._replace(spans=tuple(Span(*span) for span in first.spans))
    assert read_plan(send_plan(equal, ()), ()).spans == first.spans


@pytest.mark.parametrize("n", range(6))
def test_results_arrive_as_they_were_sent(n: int) -> None:
    """Log-probabilities of several spans, drafts of several, errors and vectors of several."""
    sent = Result(
        [[RNG.randrange(99) for _ in range(1 if n < 3 else i % 3)] for i in range(n)],
        [list(range(i)) for i in range(n)],
        {i: [score(i + k) for k in range(i + 1)] for i in range(0, n, 2)},
        {i: [score(i)] * 2 for i in range(1, n)},
        {i: f"row {i}" for i in range(1, n, 2)},
        {i: bytes(range(i)) for i in range(n)},
    )
    assert read_result(pb.Result.FromString(send_result(sent).SerializeToString())) == sent


def test_masks_arrive_as_they_were_sent() -> None:
    sent: list[list[Mask]] = [[None], [b"", b"\x01\x80", None], [], [b"\0" * 9]]
    assert read_masks(pb.Masks.FromString(send_masks(sent).SerializeToString())) == sent


def test_descriptions_arrive_as_they_were_sent() -> None:
    sent = Description(
        num_blocks=5,
        block_size=4,
        num_rows=3,
        max_model_len=77,
        vocab_size=11,
        lookahead=2,
        max_step_tokens=19,
        num_drafts=6,
        supports_masks=True,
        block_bytes=123,
        device="d",
        dtype="t",
        draft_catch_up_seconds=0.25,
        draft_kv_share=0.5,
        supports_pooling=True,
        step_times={(1, 0): 0.5, (4, 2): 0.25},
        static_gauges={"a": 1.0, "b": 2.0},
    )
    message = pb.Description.FromString(send_description(sent, 7).SerializeToString())
    assert read_description(message) == sent and message.instance == 7
