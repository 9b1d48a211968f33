from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.interface import Delta
from quire.frontend.processor import OutputProcessor, output_processor
from quire.tokenization.detokenizer import StopStrings
from quire.tokenization.tokenizer import Tokenizer
from quire.types import Request, RequestStepOutput, SamplingParams, TokenLogprobs
from tests.tokenization.vocabulary import byte_level

TOKENIZER = Tokenizer(byte_level(), {"eos_token": "<|end|>"})
EOS = 1


def answer(*, at_end: bool = False, **fields: object) -> OutputProcessor:
    sampling = SamplingParams(**{"max_tokens": None, **fields})  # type: ignore[arg-type]
    request = Request(id="a", prompt=(5,), max_new_tokens=99, sampling=sampling)
    return output_processor(request, TOKENIZER, StopStrings(sampling.stop), whole=at_end)


def ids(text: str) -> tuple[int, ...]:
    return TOKENIZER.encode(text)


def run(one: OutputProcessor, events: list[RequestStepOutput]) -> list[Delta]:
    """As the backend reads them: nothing after the end."""
    deltas = []
    for event in events:
        delta = one.process(event)
        if delta is not None:
            deltas.append(delta)
            if delta.finish_reason:
                break
    return deltas


def whole(deltas: list[Delta]) -> tuple[str, tuple[int, ...], str | None, int | str | None]:
    last = deltas[-1]
    return "".join(d.text for d in deltas), sum((d.tokens for d in deltas), ()), last.finish_reason, last.stop_reason


@given(
    text=st.text(alphabet="ab é😀\n", max_size=24),
    stops=st.lists(st.text(alphabet="ab é\n", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(1, 5), max_size=24),
    least=st.integers(0, 4),
    ended=st.sampled_from(["stop", "length"]),
)
@settings(max_examples=300, deadline=None)
def test_however_tokens_are_cut_into_steps_the_answer_is_the_same(
    text: str, stops: list[str], cuts: list[int], least: int, ended: Literal["stop", "length"]
) -> None:
    tokens = [*ids(text), EOS] if ended == "stop" else [*ids(text), ids("a")[0]]

    def events(sizes: list[int]) -> list[RequestStepOutput]:
        made: list[RequestStepOutput] = []
        at = 0
        while at < len(tokens):
            size = sizes[len(made)] if len(made) < len(sizes) else 1
            made.append(RequestStepOutput("a", tuple(tokens[at : at + size])))
            at += size
        made[-1] = made[-1]._replace(finish=ended, stop_token=EOS if ended == "stop" else None)
        return made

    fields = {"stop": stops, "min_tokens": least}
    steps = whole(run(answer(**fields), events(cuts)))
    assert steps == whole(run(answer(**fields), events([])))
    assert steps == whole(run(answer(**fields), events([99])))
    [only] = run(answer(at_end=True, **fields), events(cuts))
    assert steps == whole([only])
    if steps[2] == "stop" and steps[3] in stops:
        emitted, used = steps[0], steps[1]
        assert TOKENIZER.decode(used).startswith(emitted)
        assert used == tuple(tokens[: len(used)])


@pytest.mark.parametrize("stop", [(), ("b",)])
def test_an_answer_that_is_read_at_its_end_has_one_delta_with_everything(stop: tuple[str, ...]) -> None:
    score = TokenLogprobs(7, -1.0, 1, ())
    steps = [
        RequestStepOutput("a", (), prompt_logprobs=(score,)),
        RequestStepOutput("a", ids("x"), logprobs=(score,), num_cached=3),
        RequestStepOutput("a", ids("yz"), logprobs=(score, score)),
    ]
    one = answer(at_end=True, stop=stop, prompt_logprobs=0)
    assert run(one, steps) == [] and one.count == 3
    failed = RequestStepOutput("a", (), "error", error="broken")
    [delta] = run(one, [failed])
    assert (delta.text, delta.tokens, delta.finish_reason, delta.error) == ("xyz", ids("xyz"), "error", "broken")
    assert len(delta.logprobs) == 3 and delta.num_cached == 3 and delta.prompt_logprobs == [None, score]
    aborted = answer(at_end=True, stop=stop)
    assert run(aborted, steps) == [] and aborted.end("abort").text == "xyz"


def test_the_end_token_is_counted_but_not_shown_and_not_named() -> None:
    deltas = run(answer(skip_special_tokens=False), [RequestStepOutput("a", (*ids("the"), EOS), "stop", EOS)])
    assert whole(deltas) == ("the", (*ids("the"), EOS), "stop", None)


def test_a_stop_token_of_the_request_is_named() -> None:
    token = ids("the")[0]
    emitted = run(answer(stop_token_ids=[token]), [RequestStepOutput("a", (*ids("a"), token), "stop", token)])
    assert whole(emitted) == ("a", (*ids("a"), token), "stop", token)
    shown = run(
        answer(stop_token_ids=[token], include_stop_str_in_output=True),
        [RequestStepOutput("a", (*ids("a"), token), "stop", token)],
    )
    assert whole(shown)[0] == "athe"


def test_an_ignored_end_token_that_is_a_stop_token_is_named() -> None:
    deltas = run(answer(ignore_eos=True, stop_token_ids=[EOS]), [RequestStepOutput("a", (EOS,), "stop", EOS)])
    assert whole(deltas) == ("", (EOS,), "stop", EOS)


def test_tokens_past_a_stop_string_are_surplus_and_not_counted() -> None:
    one = answer(stop=["dog"], logprobs=0)
    tokens = ids("the dog and a boat")
    scores = tuple(TokenLogprobs(t, -1.0, 1) for t in tokens)
    deltas = run(one, [RequestStepOutput("a", tokens, logprobs=scores)])
    text, used, finish, reason = whole(deltas)
    assert (text, finish, reason) == ("the ", "stop", "dog")
    assert TOKENIZER.decode(used) == "the dog"
    assert one.count == len(used) == len(deltas[0].logprobs)
    assert one.num_surplus == len(tokens) - len(used)


def test_text_held_back_is_emitted_at_the_end() -> None:
    one = answer(stop=["boats"])
    first = run(one, [RequestStepOutput("a", (t,)) for t in ids("a boat")])
    assert "".join(d.text for d in first) == "a "
    assert one.end("length").text == "boat"


def test_half_a_character_is_emitted_only_at_the_end_and_its_tokens_with_it() -> None:
    tokens = ids("🐸")[:-1]
    one = answer()
    assert run(one, [RequestStepOutput("a", tokens)]) == []
    assert one.end("timeout") == Delta(0, "�", tokens, finish_reason="timeout")


def test_log_probabilities_of_the_prompt_come_with_the_first_text() -> None:
    one = answer(prompt_logprobs=0)
    score = TokenLogprobs(5, -1.0, 1)
    deltas = run(
        one,
        [
            RequestStepOutput("a", (), prompt_logprobs=(score,)),
            RequestStepOutput("a", ids("a"), prompt_logprobs=(score,)),
        ],
    )
    assert [d.prompt_logprobs for d in deltas] == [(None, score, score)]


def test_cached_tokens_are_in_every_delta() -> None:
    deltas = run(answer(), [RequestStepOutput("a", ids("a"), num_cached=16), RequestStepOutput("a", ids("b"))])
    assert [d.num_cached for d in deltas] == [16, 16]


def test_an_error_ends_the_answer_with_its_reason() -> None:
    deltas = run(answer(), [RequestStepOutput("a", (), "error", error="out of luck")])
    assert (deltas[-1].finish_reason, deltas[-1].error) == ("error", "out of luck")


@pytest.mark.parametrize("least", [0, 1, 3])
def test_a_stop_string_counts_only_after_min_tokens(least: int) -> None:
    tokens = ids("the the the the")
    deltas = run(answer(stop=["the"], min_tokens=least), [RequestStepOutput("a", (t,)) for t in tokens])
    assert whole(deltas)[0] == ["", "the ", "the the the "][[0, 1, 3].index(least)]


def test_without_text_wanted_tokens_come_at_the_end() -> None:
    deltas = run(answer(detokenize=False), [RequestStepOutput("a", (7,)), RequestStepOutput("a", (8,), "length")])
    assert whole(deltas) == ("", (7, 8), "length", None)
