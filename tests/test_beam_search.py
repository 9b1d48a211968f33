"""Beam search answers what transformers' beam search does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, BeamSearchParams
from quire.errors import InvalidRequest
from quire.frontend.beam_search import Beam, BeamSearch
from quire.weights.locate import embedded

PROMPTS = ["Once upon a time", "The little dog", "Is it"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("embedded", dtype="float32", max_num_seqs=16, max_model_len=256) as opened:
        yield opened


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(embedded(), dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("width", "penalty", "end"),
    [(1, 1.0, " the"), (3, 1.0, None), (3, 1.0, " the"), (3, 2.0, "."), (4, 0.0, "."), (2, -1.0, " a"), (5, 1.0, ".")],
)
def test_beams_are_those_of_transformers(
    llm: LLM, model: Any, width: int, penalty: float, end: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """end: what stands for the end of text, so that beams end early and late."""
    tokenizer = llm.get_tokenizer()
    ends = [] if end is None else [tokenizer.encode(end, add_special_tokens=False)[-1]]
    monkeypatch.setattr(tokenizer, "eos", frozenset(ends))
    params = BeamSearchParams(width, 9, ignore_eos=not ends, length_penalty=penalty, include_stop_str_in_output=True)
    found = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, found, strict=True):
        ids = tokenizer.encode(prompt)
        with torch.no_grad():
            wanted = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                max_new_tokens=9,
                length_penalty=penalty,
                early_stopping=False,
                eos_token_id=ends or None,
                pad_token_id=0,
            )
        expected = [_without_padding(row.tolist(), len(ids), ends) for row in wanted]
        assert [list(one.tokens) for one in output.sequences] == expected
        for one in output.sequences:
            assert one.finish_reason == ("stop" if one.tokens[-1] in ends else "length")
            assert one.text == tokenizer.decode(one.tokens)


def _without_padding(row: list[int], prompt: int, ends: list[int]) -> list[int]:
    at = next((i + 1 for i, token in enumerate(row) if i >= prompt and token in ends), len(row))
    return row[:at]


def test_the_end_token_is_left_out_unless_it_is_asked_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = llm.get_tokenizer()
    [end] = tokenizer.encode(".", add_special_tokens=False)[-1:]
    monkeypatch.setattr(tokenizer, "eos", frozenset([end]))
    [with_end] = llm.beam_search(PROMPTS[0], BeamSearchParams(2, 20, include_stop_str_in_output=True))
    [without] = llm.beam_search(PROMPTS[0], BeamSearchParams(2, 20))
    for one, other in zip(with_end.sequences, without.sequences, strict=True):
        assert one.tokens == (*other.tokens, end)[: len(one.tokens)] and one.cum_logprob == other.cum_logprob
    assert any(one.finish_reason == "stop" for one in without.sequences)


def test_a_search_ends_when_no_beam_can_become_better() -> None:
    search = BeamSearch(BeamSearchParams(1, 100), {0})
    search.extend([[(0, -0.1), (1, -3.0)]])
    assert search.over and search.beams == [Beam((0,), -0.1)]
    longer = BeamSearch(BeamSearchParams(1, 100, length_penalty=2.0), {0})
    longer.extend([[(1, -0.1), (0, -0.2)]])
    assert not longer.over and not longer.beams, "only what ends among the best `beam_width` is kept"


def test_a_search_ends_where_a_model_gives_no_tokens() -> None:
    search = BeamSearch(BeamSearchParams(2, 100), {0})
    search.extend([[(1, -0.1), (2, -0.2), (0, -0.3)]])
    search.extend([[], []])
    assert search.over and search.beams == [Beam((1,), -0.1), Beam((2,), -0.2)]
    nothing = BeamSearch(BeamSearchParams(2, 100), {0})
    nothing.extend([[]])
    assert nothing.over and not nothing.beams
    some = BeamSearch(BeamSearchParams(2, 100), {0})
    some.extend([[(1, -0.1), (2, -0.2)]])
    some.extend([[], [(0, -0.1)]])
    assert some.over and [beam.tokens for beam in some.beams] == [(2, 0)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 2.5}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 0.7}, "temperature"),
        ({"length_penalty": float("nan")}, "length_penalty"),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3} | fields)
    assert refused.value.param == param


def test_an_answer_that_cannot_fit_is_refused_before_anything_is_computed(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="256") as refused:
        llm.beam_search(PROMPTS, BeamSearchParams(2, 255))
    assert refused.value.param == "max_tokens"
