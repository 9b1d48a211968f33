"""Completions between a prompt and a suffix."""

from __future__ import annotations

import json
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quire.tokenization.tokenizer import Tokenizer
from tests.server.doubles import ANSWER, EOS, TOKENIZER, Served, check_error, events, served
from tests.surface.blocks import FOUND
from tests.tokenization.vocabulary import byte_level

pytestmark = pytest.mark.anyio

NAMES = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")


@asynccontextmanager
async def filling(ends_with: str = "<|end|>", **options: Any) -> AsyncIterator[tuple[Served, Tokenizer]]:
    """A server whose model has Qwen's markers, and says ANSWER and the token `ends_with`."""
    core = byte_level()
    core.add_tokens(list(NAMES))
    tokenizer = Tokenizer(core, {"eos_token": "<|end|>"})
    assert tokenizer.infill is not None
    said = [*TOKENIZER.encode(ANSWER), tokenizer.id_of(ends_with) or EOS]
    about = {"infill_ends": tokenizer.infill.ends, "vocab_size": tokenizer.vocab_size}
    async with served(lambda request: said, about=about, **options) as server:
        server.backend.tokenizer = tokenizer
        yield server, tokenizer


async def test_the_answer_is_what_stands_between_and_the_prompt_has_the_markers() -> None:
    async with filling() as (server, tokenizer):
        answer = await server.complete(prompt="the dog", suffix="boat", return_token_ids=True)
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (ANSWER, "stop")
        prefix, suffix, middle = map(tokenizer.id_of, NAMES[:3])
        wanted = [prefix, *tokenizer.encode("the dog"), suffix, *tokenizer.encode("boat"), middle]
        assert choice["prompt_token_ids"] == wanted and answer["usage"]["prompt_tokens"] == len(wanted)
        streamed = await server.post("/v1/completions", prompt="the dog", suffix="boat", stream=True, max_tokens=64)
        assert "".join(event["choices"][0]["text"] for event in events(streamed.text)) == ANSWER


async def test_the_example_of_the_guide_is_answered() -> None:
    words = shlex.split(FOUND["docs/guides/fill-in-the-middle.md: infill"].text)
    asked = json.loads(words[words.index("-d") + 1])
    assert {"prompt", "suffix"} <= asked.keys()
    async with filling() as (server, _):
        assert (await server.complete(**asked))["choices"][0]["text"] == ANSWER


async def test_a_prompt_may_be_empty_or_one_of_several() -> None:
    async with filling() as (server, tokenizer):
        answer = await server.complete(prompt=["", "the"], suffix="a", return_token_ids=True)
        found = [choice["prompt_token_ids"] for choice in answer["choices"]]
        assert found == [list(tokenizer.encode(text, suffix="a")) for text in ("", "the")]


async def test_an_empty_suffix_is_none() -> None:
    async with filling() as (server, tokenizer):
        for suffix in ("", None):
            answer = await server.complete(prompt="the", suffix=suffix, return_token_ids=True, echo=True)
            assert answer["choices"][0]["prompt_token_ids"] == list(tokenizer.encode("the"))


async def test_markers_of_another_file_end_the_answer_unless_ends_are_ignored() -> None:
    async with filling("<|file_sep|>") as (server, tokenizer):
        end = tokenizer.id_of("<|file_sep|>")
        [choice] = (await server.complete(suffix="a", stop_token_ids=[5]))["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (ANSWER, "stop", end)
        await server.complete(suffix="a", ignore_eos=True, max_tokens=3)
        await server.complete(max_tokens=3)
        assert [request.stop for request in server.port.submitted] == [{EOS, 5, end}, set(), {EOS}]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"echo": True}, "echo", "insert the answer between"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "markers"),
        ({"prompt": [[5, 6]]}, "prompt", "must be text"),
        ({"suffix": "dog " * 200}, "prompt", "context holds 128"),
        ({"suffix": "dog " * 40_000}, "prompt", "more than"),
    ],
)
async def test_what_does_not_go_with_a_suffix_is_refused_by_name(
    fields: dict[str, Any], param: str, words: str
) -> None:
    async with filling() as (server, _):
        check_error(
            await server.post("/v1/completions", **{"prompt": "the", "suffix": "a", **fields}), 400, param, words
        )
