from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.outputs import TextLogprobs, chat_logprobs, prompt_logprobs
from quire.types import TokenLogprobs
from tests.server.doubles import ANSWER, TOKENIZER, says, served

pytestmark = pytest.mark.anyio

the = TOKENIZER.encode("the")[0]


def text(token: int) -> str:
    return TOKENIZER.token_text(token)[0]


async def test_completions_get_four_lists() -> None:
    async with served() as server:
        got = (await server.complete(logprobs=2))["choices"][0]["logprobs"]
    tokens = says(ANSWER)
    assert set(got) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert {len(column) for column in got.values()} == {len(tokens)}
    assert got["tokens"][0] == text(tokens[0])
    assert set(got["token_logprobs"]) == {-0.5}
    assert got["top_logprobs"][0] == {text(tokens[0]): -0.5, text(tokens[0] + 1): -0.25}
    assert got["text_offset"][:2] == [0, len(text(tokens[0]))]


async def test_echo_with_logprobs_scores_the_prompt_too() -> None:
    prompt = "the dog"
    ids = TOKENIZER.encode(prompt)
    async with served() as server:
        got = (await server.complete(prompt=prompt, echo=True, logprobs=0, n=2))["choices"]
    for choice in got:
        scores = choice["logprobs"]
        assert scores["token_logprobs"][0] is None
        assert scores["top_logprobs"][0] is None
        assert set(scores["token_logprobs"][1:]) == {-0.5}
        assert scores["tokens"][: len(ids)] == [text(t) for t in ids]
        assert scores["text_offset"][len(ids)] == len(prompt)
        assert choice["prompt_logprobs"] is None
    assert [r.sampling.prompt_logprobs for r in server.port.submitted] == [0, None]


async def test_a_prompt_can_be_scored_alone() -> None:
    ids = list(TOKENIZER.encode("the dog"))
    async with served() as server:
        got = await server.complete(prompt=ids, echo=True, logprobs=1, max_tokens=0)
    choice = got["choices"][0]
    assert choice["text"] == "the dog"
    assert len(choice["logprobs"]["tokens"]) == len(ids)
    assert choice["finish_reason"] == "length"
    assert got["usage"]["completion_tokens"] == 0


async def test_chats_get_an_object_a_token_with_exact_bytes() -> None:
    async with served() as server:
        got = (await server.chat(logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]
    assert set(got) == {"content"}
    first = got["content"][0]
    token = says(ANSWER)[0]
    assert first["token"] == text(token)
    assert first["logprob"] == -0.5
    assert bytes(first["bytes"]) == TOKENIZER.token_text(token)[1]
    assert [top["logprob"] for top in first["top_logprobs"]] == [-0.25, -0.5]
    spelled = b"".join(bytes(one["bytes"]) for one in got["content"][:-1])
    assert spelled.decode() == ANSWER


async def test_chats_without_alternatives_get_none() -> None:
    async with served() as server:
        got = (await server.chat(logprobs=True))["choices"][0]["logprobs"]
    assert {len(one["top_logprobs"]) for one in got["content"]} == {0}


async def test_prompt_logprobs_are_shown_by_token_id() -> None:
    ids = TOKENIZER.encode("the dog")
    async with served() as server:
        got = (await server.complete(prompt="the dog", prompt_logprobs=1))["choices"][0]["prompt_logprobs"]
        chat = await server.chat(prompt_logprobs=0)
    assert got[0] is None
    assert len(got) == len(ids)
    assert got[1][str(ids[1])] == {"logprob": -0.5, "rank": 2, "decoded_token": text(ids[1])}
    assert got[1][str(ids[1] + 1)]["rank"] == 1
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


async def test_tokens_can_be_named_by_their_ids() -> None:
    async with served() as server:
        got = await server.complete(logprobs=0, return_tokens_as_token_ids=True)
        chat = await server.chat(logprobs=True, return_tokens_as_token_ids=True)
    token = says(ANSWER)[0]
    assert got["choices"][0]["logprobs"]["tokens"][0] == f"token_id:{token}"
    assert chat["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{token}"


def test_parts_of_a_character_stay_apart() -> None:
    parts = TOKENIZER.encode("🐸")
    scores = [TokenLogprobs(t, -1.0, 1, ((t + 1, -2.0),)) for t in parts]
    got = TextLogprobs(TOKENIZER.token_text).of(parts, scores)
    assert got["tokens"][0].startswith("bytes:\\xf0")
    assert len(set(got["tokens"])) == len(parts)
    assert got["text_offset"] == [0] * len(parts)


@given(st.text(max_size=20), st.integers(0, 20))
def test_offsets_go_on_from_chunk_to_chunk(said: str, cut: int) -> None:
    tokens = TOKENIZER.encode(said)
    scores = [TokenLogprobs(t, -1.0, 1) for t in tokens]
    whole, encoder = TextLogprobs(TOKENIZER.token_text), TextLogprobs(TOKENIZER.token_text)
    chunks = [encoder.of(tokens[:cut], scores[:cut]), encoder.of(tokens[cut:], scores[cut:])]
    assert chunks[0]["text_offset"] + chunks[1]["text_offset"] == whole.of(tokens, scores)["text_offset"]


def test_minus_infinity_which_json_lacks_becomes_a_large_number() -> None:
    score = TokenLogprobs(the, -math.inf, 9, ((the, -math.inf),))
    assert TextLogprobs(TOKENIZER.token_text).of([the], [score])["token_logprobs"] == [-9999.0]
    assert chat_logprobs([score], 1, TOKENIZER.token_text)["content"][0]["logprob"] == -9999.0
    assert prompt_logprobs([None, score], 0, TOKENIZER.token_text)[1] == {
        str(the): {"logprob": -9999.0, "rank": 9, "decoded_token": "the"}
    }
