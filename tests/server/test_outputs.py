"""Whole answers, in the exact shapes of vLLM and OpenAI."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.frontend.ports import fire
from tests.server.doubles import ANSWER, HI, TOKENIZER, says, served

pytestmark = pytest.mark.anyio

TOKENS = len(says(ANSWER))


async def test_a_completion_has_vllms_shape() -> None:
    async with served() as server:
        got = await server.complete()
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", got.pop("id"))
    assert isinstance(got.pop("created"), int)
    prompt = len(TOKENIZER.encode("the"))
    assert got == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": ANSWER,
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": "quire-9.9",
        "usage": {
            "prompt_tokens": prompt,
            "total_tokens": prompt + TOKENS,
            "completion_tokens": TOKENS,
            "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0, "created_cache_tokens": 0},
        },
        "kv_transfer_params": None,
        "metrics": None,
    }


async def test_a_chat_completion_has_vllms_shape() -> None:
    async with served() as server:
        got = await server.chat()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", got["id"])
    assert got["object"] == "chat.completion"
    assert got["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": ANSWER,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "tool_calls": [],
                "reasoning": None,
            },
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": None,
        }
    ]
    assert set(got) >= {"created", "model", "usage", "system_fingerprint", "prompt_logprobs", "prompt_token_ids"}
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert server.port.submitted[0].prompt == TOKENIZER.encode(rendered)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("the dog", ["the dog"]),
        (["the", "dog"], ["the", "dog"]),
        (list(TOKENIZER.encode("the dog")), ["the dog"]),
        ([list(TOKENIZER.encode("the")), list(TOKENIZER.encode("dog"))], ["the", "dog"]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
async def test_prompts_come_in_four_forms(prompt: object, texts: list[str]) -> None:
    async with served() as server:
        got = await server.complete(prompt=prompt, echo=True)
    assert [choice["text"] for choice in got["choices"]] == [text + ANSWER for text in texts]
    assert got["usage"]["prompt_tokens"] == sum(len(TOKENIZER.encode(text)) for text in texts)


async def test_n_answers_to_several_prompts_are_numbered_in_order() -> None:
    async with served() as server:
        got = await server.complete(prompt=["the", "dog"], n=2)
    assert [(c["index"], c["text"]) for c in got["choices"]] == [
        (0, ANSWER),
        (1, ANSWER + " 1"),
        (2, ANSWER),
        (3, ANSWER + " 1"),
    ]


async def test_max_tokens_default_to_sixteen_or_the_rest_of_the_context() -> None:
    async with served(lambda _: says("dog " * 200)) as server:
        got = await server.complete(max_tokens=None)
        assert got["usage"]["completion_tokens"] == 16
        assert got["choices"][0]["finish_reason"] == "length"
        chat = await server.chat()
        assert chat["usage"]["total_tokens"] == 128
        long = await server.complete(prompt=[5] * 120, max_tokens=None)
        assert long["usage"]["completion_tokens"] == 8


async def test_sampling_defaults_are_the_requests_then_the_checkpoints_then_openais() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 3}
    async with served(defaults=defaults) as server:
        await server.complete(max_tokens=None, top_k=5)
        await server.complete(temperature=0)
    first, second = (request.sampling for request in server.port.submitted)
    assert (first.temperature, first.top_k, first.top_p, first.max_tokens) == (0.6, 5, 1.0, 3)
    assert (second.temperature, second.top_k, second.max_tokens) == (0, 20, 64)


async def test_every_sampling_field_reaches_the_engine() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "seed": 42,
        "min_tokens": 2,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "stop": ["zzz"],
        "stop_token_ids": [9],
        "allowed_token_ids": [1, 2, 3],
        "logit_bias": {"7": -3.5},
        "bad_words": ["dog"],
        "priority": 3,
        "cache_salt": "pepper",
        "max_completion_tokens": 30,
    }
    async with served() as server:
        await server.chat(**fields)
    request = server.port.submitted[0]
    for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed"):
        assert getattr(request.sampling, name) == fields[name]
    for name in ("repetition_penalty", "min_tokens", "ignore_eos", "skip_special_tokens"):
        assert getattr(request.sampling, name) == fields[name]
    assert request.sampling.logit_bias == {7: -3.5}
    assert request.sampling.allowed_token_ids == (1, 2, 3)
    assert len(request.sampling.bad_words_token_ids) == 2
    assert (request.seed, set(request.stop), request.max_new_tokens) == (42, {9}, 30)
    assert request.priority == 3 and len(request.cache_salt) == 32  # a digest


async def test_a_stop_string_ends_the_answer_and_is_named() -> None:
    async with served() as server:
        got = await server.complete(stop=" boat")
        kept = await server.complete(stop=[" boat"], include_stop_str_in_output=True)
    choice = got["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a dog and a", "stop", " boat")
    assert kept["choices"][0]["text"] == "a dog and a boat"
    assert got["usage"]["completion_tokens"] == len(TOKENIZER.encode("a dog and a boat"))


async def test_a_stop_token_ends_the_answer_and_is_named() -> None:
    token = TOKENIZER.encode("a dog and")[-1]
    async with served() as server:
        got = await server.complete(stop_token_ids=[token])
    assert got["choices"][0]["stop_reason"] == token


async def test_cached_tokens_are_always_shown() -> None:
    async with served() as server:
        got = await server.complete(prompt=[7] * 20, n=2)
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


async def test_token_ids_come_on_request() -> None:
    async with served() as server:
        got = await server.complete(return_token_ids=True)
        chat = await server.chat(return_token_ids=True)
    assert got["choices"][0]["token_ids"] == says(ANSWER)
    assert got["choices"][0]["prompt_token_ids"] == list(TOKENIZER.encode("the"))
    assert chat["choices"][0]["token_ids"] == says(ANSWER)
    assert chat["prompt_token_ids"] == list(server.port.submitted[1].prompt)


async def test_a_chat_can_go_on_with_its_last_message() -> None:
    messages = [*HI, {"role": "assistant", "content": "well,"}]
    async with served() as server:
        got = await server.chat(messages=messages, continue_final_message=True, echo=True)
    assert got["choices"][0]["message"]["content"] == "well," + ANSWER
    assert TOKENIZER.decode(server.port.submitted[0].prompt).endswith("<|im_start|>assistant\nwell,")


async def test_answers_can_be_sent_back_as_messages() -> None:
    async with served() as server:
        got = await server.chat()
        again = await server.chat(messages=[*HI, got["choices"][0]["message"], *HI])
    assert again["choices"][0]["message"]["content"] == ANSWER


async def test_text_parts_and_developers_are_understood() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
    ]
    async with served() as server:
        await server.chat(messages=messages)
    prompt = TOKENIZER.decode(server.port.submitted[0].prompt)
    assert prompt.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na\nb<|im_end|>")


async def test_generate_answers_in_its_own_shape() -> None:
    async with served() as server:
        response = await server.post("/v1/generate", prompt="the", max_new_tokens=50, temperature=0)
    got = response.json()
    assert got.pop("request_id").startswith("gen-")
    assert got.pop("latency_ms") > 0
    assert got == {"text": ANSWER, "generated_tokens": TOKENS, "finish_reason": "stop", "model": "tiny"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_before_the_first_token_is_a_gateway_timeout(stream: bool) -> None:
    async with served() as server:
        server.port.stepping.clear()
        response = await server.post("/v1/completions", prompt="the", timeout=0.02, stream=stream)
    assert response.status_code == 504
    assert response.json()["error"]["type"] == "timeout_error"


async def test_a_deadline_later_ends_the_answer_with_what_there_is() -> None:
    async with served(None) as server:
        pending = asyncio.ensure_future(server.complete(timeout=1000))
        while not server.port.submitted:
            await asyncio.sleep(0)
        server.port.say(server.port.submitted[0], *TOKENIZER.encode("the dog"))
        [live] = server.backend._requests
        fire(live.timer)
        choice = (await pending)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("the dog", "timeout")


async def test_several_prompts_fail_together() -> None:
    async with served(max_queued=3) as server:
        response = await server.post("/v1/completions", prompt=["the"] * 4)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert sorted(server.port.aborted) == sorted(request.id for request in server.port.submitted)
        assert (await server.complete())["choices"][0]["text"] == ANSWER


async def test_of_two_names_for_the_most_tokens_the_newer_one_counts() -> None:
    async with served() as server:
        await server.chat(max_tokens=3, max_completion_tokens=5)
        await server.chat(max_completion_tokens=5)
        await server.chat(max_tokens=3)
        assert [request.max_new_tokens for request in server.port.submitted] == [5, 5, 3]
