from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.errors import InvalidRequest
from quire.frontend.interface import Call
from quire.frontend.processor import bad_words, embedding_vector, requests
from quire.tokenization.tokenizer import Tokenizer
from quire.types import Request, SamplingParams
from tests.tokenization.vocabulary import byte_level

TOKENIZER = Tokenizer(byte_level(), {"eos_token": "<|end|>"}, eos=[3])


def spelled(prompt: int = 10, limit: int = 100, salt: str = "s", **fields: object) -> list[Request]:
    sampling = SamplingParams(**{"max_tokens": None, **fields})  # type: ignore[arg-type]
    call = Call(id="c", prompt=tuple(range(5, 5 + prompt)), sampling=sampling, priority=3, cache_salt=salt)
    return requests(call, tokenizer=TOKENIZER, limit=limit, seed=77)


def test_n_answers_are_n_requests_of_one_seed() -> None:
    asked = spelled(n=3, prompt_logprobs=1)
    assert [(r.id, r.choice) for r in asked] == [("c-0", 0), ("c-1", 1), ("c-2", 2)]
    assert {r.seed for r in asked} == {77}
    assert [r.sampling.prompt_logprobs for r in asked] == [1, None, None]


def test_a_salt_stays_apart_from_every_other_and_is_short() -> None:
    salts = [spelled(salt=salt)[0].cache_salt for salt in ("", "s", "s" * (3 << 20), "t" + "s" * (3 << 20), "\ud800")]
    assert salts[0] == "" and len(set(salts)) == len(salts)
    assert {len(salt) for salt in salts[1:]} == {32}
    assert salts[1] == spelled()[0].cache_salt, "and the same every time"


def test_ends_are_the_models_own_and_the_requests() -> None:
    assert spelled(stop_token_ids=[9])[0].stop == {1, 3, 9}
    assert spelled(stop_token_ids=[9], ignore_eos=True)[0].stop == {9}


def test_the_answer_gets_what_the_context_leaves() -> None:
    assert spelled()[0].max_new_tokens == 90
    assert spelled(max_tokens=7)[0].max_new_tokens == 7
    assert spelled(prompt=99)[0].max_new_tokens == 1


@pytest.mark.parametrize(
    ("prompt", "fields", "param", "words"),
    [
        (0, {}, "prompt", "empty"),
        (100, {}, "prompt", "has 100 tokens.*holds 100"),
        (90, {"max_tokens": 11}, "max_tokens", "90 tokens.*is 11: together 101.*holds 100.*at most 10"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_counts(
    prompt: int, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        spelled(prompt=prompt, **fields)
    assert caught.value.param == param


def test_bad_words_are_spelled_with_and_without_a_space() -> None:
    word = spelled(bad_words=["dog"])[0].sampling.bad_words_token_ids
    assert {TOKENIZER.decode(ids) for ids in word} == {"dog", " dog"}


def test_an_empty_bad_word_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot be turned into tokens"):
        bad_words([" "], TOKENIZER)


def test_a_vector_may_be_cut_to_any_number_of_its_dimensions_but_not_to_more() -> None:
    pooled = np.array([3, 4, 12], "<f4").tobytes()
    assert embedding_vector(pooled, 3, normalize=False).tolist() == [3, 4, 12]
    assert embedding_vector(pooled, 2).tolist() == pytest.approx([0.6, 0.8])
    assert embedding_vector(pooled, 1).tolist() == [1]
    with pytest.raises(InvalidRequest, match="at most 3"):
        embedding_vector(pooled, 4)
