"""SamplingParams take what vLLM's take, and refuse by name what would be taken for something else."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import InvalidRequest
from quire.types import SamplingParams, StructuredOutputsParams


class Index:
    """A whole number of some library's."""

    def __index__(self) -> int:
        return 7


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, value) for field in ("n", "top_k", "max_tokens", "min_tokens", "seed") for value in (1.5, "1", True)),
        *((field, value) for field in ("logprobs", "prompt_logprobs") for value in (1.5, "1", True, -2)),
        *((field, value) for field in ("temperature", "top_p", "min_p") for value in ("1", True, None, float("nan"))),
        *((field, value) for field in ("ignore_eos", "detokenize", "skip_special_tokens") for value in (1, "no", None)),
        *((field, value) for field in ("stop", "bad_words") for value in (5, [5], ["a", None], b"ab")),
        *((field, value) for field in ("stop_token_ids", "allowed_token_ids") for value in (5, ["a"], "ab", [1.0])),
        ("n", None),
        ("logit_bias", {"a": 1}),
        ("logit_bias", [1]),
        ("logit_bias", {1: "x"}),
        ("logit_bias", {1: 101}),
        ("structured_outputs", {"json": {}}),
        ("structured_outputs", "a"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_fields_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field and field in str(caught.value)


def test_what_vllm_takes_is_taken() -> None:
    made = SamplingParams(stop="ab", bad_words="the", stop_token_ids=[Index()], temperature=1, logit_bias={1: 2})  # type: ignore[arg-type,list-item]
    assert (made.stop, made.bad_words, made.stop_token_ids) == (("ab",), ("the",), (7,))
    made = SamplingParams(stop=None, stop_token_ids=None, bad_words=None, logit_bias=None, seed=None, max_tokens=None)  # type: ignore[arg-type]
    assert (made.stop, made.stop_token_ids, made.bad_words, made.logit_bias) == ((), (), (), {})
    assert SamplingParams(structured_outputs=StructuredOutputsParams(choice=("a",))).structured_outputs is not None


@pytest.mark.parametrize(("least", "most", "fine"), [(0, 1, True), (4, 4, True), (5, 4, False), (4, None, True)])
def test_an_answer_may_be_asked_for_of_exactly_so_many_tokens(least: int, most: int | None, fine: bool) -> None:
    if fine:
        assert SamplingParams(min_tokens=least, max_tokens=most).min_tokens == least
    else:
        with pytest.raises(InvalidRequest, match="above max_tokens"):
            SamplingParams(min_tokens=least, max_tokens=most)
