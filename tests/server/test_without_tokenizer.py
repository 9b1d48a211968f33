"""A model without a tokenizer over HTTP: token ids in and out, and what needs text refused by name."""

from __future__ import annotations

import re
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from quire.tokenization.no_tokenizer import NoTokenizer
from quire.types import Request
from tests.server.doubles import EOS, HI, Served, served

pytestmark = pytest.mark.anyio

IDS = [5, 6, 7]


def answer(request: Request) -> list[int]:
    return [8 + request.choice, 9, 10, EOS]


def without() -> AbstractAsyncContextManager[Served]:
    return served(answer, tokenizer=NoTokenizer([EOS]), template=None, about={"has_text": False})


async def test_completions_answer_with_token_ids() -> None:
    async with without() as server:
        got = await server.complete(prompt=[IDS, IDS[:2]], n=2)
        assert [one["token_ids"][:3] for one in got["choices"]] == [[8, 9, 10], [9, 9, 10]] * 2
        assert [one["prompt_token_ids"] for one in got["choices"]] == [IDS, IDS, IDS[:2], IDS[:2]]
        assert {one["text"] for one in got["choices"]} == {""} and got["choices"][0]["finish_reason"] == "stop"
        asked = await server.complete(prompt=IDS, stop_token_ids=[9], bad_words=[], return_token_ids=False)
        assert "token_ids" not in asked["choices"][0] or asked["choices"][0]["token_ids"] is None
        assert server.port.submitted[-1].stop == {9, EOS}


async def test_streams_send_the_ids_of_each_step() -> None:
    async with without() as server:
        events = await server.stream("/v1/completions", prompt=IDS, logprobs=1)
        choices = [one["choices"][0] for one in events]
        assert [id for one in choices for id in one.get("token_ids") or []][:3] == [8, 9, 10]
        assert len(choices) >= 4 and choices[-1]["finish_reason"] == "stop"
        names = [name for one in choices for name in (one["logprobs"] or {"tokens": []})["tokens"]]
        assert names[:3] == ["token_id:8", "token_id:9", "token_id:10"]


async def test_log_probabilities_name_ids() -> None:
    async with without() as server:
        got = (await server.complete(prompt=IDS, logprobs=2, prompt_logprobs=1))["choices"][0]
        assert got["logprobs"]["tokens"][:3] == ["token_id:8", "token_id:9", "token_id:10"]
        assert set(got["logprobs"]["top_logprobs"][0]) == {"token_id:8", "token_id:9"}
        assert set(got["logprobs"]["text_offset"]) == {0}
        shown = [one["decoded_token"] for scores in got["prompt_logprobs"][1:] for one in scores.values()]
        assert shown and all(one.startswith("token_id:") for one in shown)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "text"}, "prompt"),
        ("/v1/completions", {"prompt": ["text", "texts"]}, "prompt"),
        ("/v1/completions", {"prompt": "text", "suffix": "more"}, "suffix"),
        ("/v1/completions", {"prompt": IDS, "echo": True}, "echo"),
        ("/v1/completions", {"prompt": IDS, "stop": "a"}, "stop"),
        ("/v1/completions", {"prompt": IDS, "bad_words": ["a"]}, "bad_words"),
        ("/v1/completions", {"prompt": IDS, "guided_regex": "a"}, "guided_regex"),
        ("/v1/completions", {"prompt": IDS, "response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/completions", {"prompt": IDS, "structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ("/v1/chat/completions", {"messages": HI}, "messages"),
        ("/v1/responses", {"input": "hi"}, "input"),
        ("/v1/messages", {"messages": HI, "max_tokens": 5}, "messages"),
        ("/v1/generate", {"prompt": IDS}, "prompt"),
        ("/tokenize", {"prompt": "text"}, "prompt"),
        ("/tokenize", {"messages": HI}, "messages"),
        ("/detokenize", {"tokens": IDS}, "tokens"),
    ],
)
async def test_what_needs_text_is_refused_by_name(path: str, body: dict[str, Any], param: str) -> None:
    async with without() as server:
        refusal = await server.post(path, **body)
        assert refusal.status_code == 400, refusal.text
        assert re.search(rf"{param}: .*(without|needs) a tokenizer", refusal.json()["error"]["message"])
        assert not server.port.submitted
