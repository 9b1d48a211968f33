"""Hostile and mistaken requests cost only their sender: an error that names the field, and the next one is served."""

from __future__ import annotations

import codecs
import gzip
import json
from types import SimpleNamespace
from typing import Any

import pytest

from quire.errors import InvalidRequest
from quire.server import prompts
from quire.server.limits import Limits
from tests.server.doubles import ANSWER, HI, check_error, served

pytestmark = pytest.mark.anyio

NOW = {"type": "function", "function": {"name": "now"}}

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/v1/generate"
OK: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "the"}, CHAT: {"messages": HI}, GENERATE: {"prompt": "the"}}

FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": "hot"}, "temperature", "temperature: expected float, got str"),
    ({"temperature": True}, "temperature", "got bool"),
    ({"temperature": -1}, "temperature", "between 0"),
    ({"temperature": 10**400}, "temperature", ""),
    ({"temperature": {}}, "temperature", ""),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.5}, "top_p", "between"),
    ({"top_k": 1.5}, "top_k", "expected int"),
    ({"top_k": -2}, "top_k", "between"),
    ({"min_p": 2}, "min_p", "between"),
    ({"presence_penalty": 3}, "presence_penalty", "between"),
    ({"frequency_penalty": -3}, "frequency_penalty", "between"),
    ({"repetition_penalty": 0}, "repetition_penalty", "between 0.01"),
    ({"seed": "x"}, "seed", "expected int"),
    ({"seed": 1 << 70}, "seed", "between"),
    ({"stop": ""}, "stop", "empty"),
    ({"stop": ["a", 1]}, "stop[1]", "expected str"),
    ({"stop": ["a"] * 65}, "stop", "at most 64"),
    ({"stop": "a" * 5000}, "stop", "4096 characters"),
    ({"stop_token_ids": [1, 512]}, "stop_token_ids", "512 is not in the vocabulary, 0 to 511"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "vocabulary"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
    ({"allowed_token_ids": [9999]}, "allowed_token_ids", "vocabulary"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "'a' is not a token id"),
    ({"logit_bias": {"999": 1}}, "logit_bias", "vocabulary"),
    ({"logit_bias": {"9": 101}}, "logit_bias", "between"),
    ({"logit_bias": {"9": "x"}}, "logit_bias[...]", "expected float"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "is not a token id"),
    ({"bad_words": [""]}, "bad_words", "cannot be turned into tokens"),
    ({"bad_words": ["a"] * 257}, "bad_words", "at most 256"),
    ({"min_tokens": -1}, "min_tokens", "between"),
    ({"timeout": 0}, "timeout", "above 0"),
    ({"timeout": -5}, "timeout", "above 0"),
    ({"ignore_eos": 1}, "ignore_eos", "expected bool"),
    ({"model": "gpt-9"}, "model", "'gpt-9' is not served here: this server has 'tiny'"),
    ({"model": 5}, "model", "expected str"),
    ({"temprature": 1}, "temprature", "unknown field 'temprature'. Did you mean 'temperature'?"),
    ({"x" * 500: 1}, "x" * 64, "unknown field"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "cannot be used together"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"logits_processors": ["os.system"]}, "logits_processors", "not taken"),
]

ANSWERS: list[tuple[dict[str, Any], str, str]] = [
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    ({"truncate_prompt_tokens": 5, "truncation_side": "up"}, "truncation_side", "left or right"),
    ({"truncation_side": "left"}, "truncation_side", "needs truncate_prompt_tokens"),
    ({"n": 0}, "n", "between 1"),
    ({"n": 10**9}, "n", "between 1"),
    ({"n": 1.5}, "n", "expected int"),
    ({"max_tokens": -1}, "max_tokens", "between 1"),
    ({"max_tokens": "9"}, "max_tokens", "expected int"),
    ({"max_tokens": 1000}, "max_tokens", "tokens and max_tokens is 1000: together 10"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "above max_tokens"),
    ({"stream": "yes"}, "stream", "expected bool"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"stream": True, "stream_options": {"inclde_usage": True}}, "stream_options.inclde_usage", "'include_usage'"),
    ({"stream": True, "stream_options": 5}, "stream_options", "expected object"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "not sent in streams"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
]

COMPLETION: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [""]}, "prompt", "prompt[0] is empty"),
    ({"prompt": [[]]}, "prompt", "prompt[0] is empty"),
    ({"prompt": None}, "prompt", "prompt is required"),
    ({"prompt": 5}, "prompt", ""),
    ({"prompt": {"a": 1}}, "prompt", ""),
    ({"prompt": [1, "a"]}, "prompt", "prompt: token ids must all be integers"),
    ({"prompt": [1, 2.5]}, "prompt", "prompt: token ids must all be integers"),
    ({"prompt": ["a", None]}, "prompt", "prompt[1]: expected text or token ids, not null"),
    ({"prompt": [[1], [True]]}, "prompt", "prompt[1]: token ids must all be integers"),
    ({"prompt": [1.5]}, "prompt", "prompt[0]: expected text or token ids, not 1.5"),
    ({"prompt": [[[1]]]}, "prompt", "integers"),
    ({"prompt": [[1, 2], "a"]}, "prompt", "prompt[1] is text, and prompt[0] is token ids"),
    ({"prompt": ["a", "b", [1]]}, "prompt", "prompt[2] is token ids, and prompt[0] is text"),
    ({"prompt": [1, 512]}, "prompt", "512 is not in the vocabulary"),
    ({"prompt": [-1]}, "prompt", "vocabulary"),
    ({"prompt": [1 << 80]}, "prompt", "vocabulary"),
    ({"prompt": [5] * 128}, "prompt", "has 128 tokens, and this model's context holds 128"),
    ({"prompt": "dog " * 40_000}, "prompt", "tokens, and this model's context holds 128"),
    ({"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
    ({"best_of": 3}, "best_of", "must equal n"),
    ({"suffix": "end"}, "suffix", "no markers to fill in"),
    ({"suffix": 1}, "suffix", "expected str"),
    ({"suffix": "end", "prompt": [1]}, "prompt", "with a suffix, a prompt must be text"),
    ({"logprobs": 21}, "logprobs", "between 0 and 20"),
    ({"logprobs": -1}, "logprobs", "between 0 and 20"),
    ({"logprobs": True}, "logprobs", "expected int"),
    ({"messages": HI}, "messages", "unknown field 'messages'. Did you mean 'prompt'? /v1/chat/completions has 'mess"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "Did you mean 'max_tokens'?"),
    ({"regex": "a"}, "regex", "Did you mean 'structured_outputs'?"),
    ({"extra_body": {"top_k": 5}}, "extra_body", "into the request itself"),
    ({"logit_bias": {"٣": 1}}, "logit_bias", "'٣' is not a token id"),
]

CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "empty"),
    ({"messages": "hi"}, "messages", "expected array"),
    ({"messages": [5]}, "messages[0]", "expected object"),
    ({"messages": [{}]}, "messages", "messages[0].role is required"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "of type 'text' needs a field text"),
    ({"prompt": "x"}, "prompt", "unknown field 'prompt'. Did you mean 'messages'? /v1/completions has 'prompt'."),
    ({"enable_thinking": False}, "enable_thinking", "chat_template_kwargs"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages", "'wizard'"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages", "role tool"),
    ({"messages": [{"role": "user"}]}, "messages", "messages[0].content is required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", "must be text"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages", "must be text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
        "images are not read here: this server reads text only",
    ),
    ({"messages": [{"role": "user", "content": "x", "nme": "y"}]}, "messages[0].nme", "'name'"),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages", "messages[0].name must be text"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages", "needs a function with a name"),
    ({"messages": [{"role": "user", "content": "", "tool_calls": [{}]}]}, "messages", "belongs to assistants"),
    ({"messages": [{"role": "user", "content": "dog " * 500}]}, "messages", "context holds 128"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    ({"logprobs": 3}, "logprobs", "expected bool"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be between 1"),
    ({"max_completion_tokens": 999}, "max_completion_tokens", "max_completion_tokens is 999"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "cannot be used together",
    ),
    ({"tools": [{"type": "function"}]}, "tools", "function is required"),
    ({"tools": [{"type": "custom"}]}, "tools", "use function"),
    ({"tools": [NOW, NOW]}, "tools", "two have the name 'now'"),
    ({"tools": [NOW] * 129}, "tools", "at most 128"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "letters"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools", "a JSON schema"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "strct": True}}]},
        "tools[0].function.strct",
        "Did you mean 'strict'?",
    ),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [NOW], "tool_choice": "any"}, "tool_choice", "auto, none, required"),
    (
        {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "late"}}},
        "tool_choice",
        "no tool 'late'",
    ),
    (
        {"tools": [NOW], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
        "cannot be used together",
    ),
    ({"tools": [NOW], "guided_regex": "a"}, "guided_regex", "tool_choice none"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {"const": 1}}}}],
            "tool_choice": "required",
        },
        "tools[0].function.parameters",
        "'not'",
    ),
    ({"functions": [{"name": "a"}]}, "functions", "use tools"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "--chat-template"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs", "expected object"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "send messages as a field of the request"),
    ({"chat_template_kwargs": {"tools": [NOW]}}, "chat_template_kwargs", "chat_template_kwargs.tools: send tools as"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs", "send add_generation_prompt"),
    ({"modalities": ["text", "audio"]}, "modalities", "text only"),
    ({"reasoning_effort": "hihg"}, "reasoning_effort", "Did you mean 'high'?"),
]

CASES = [(path, *case) for path in OK for case in FIELDS]
CASES += [(path, *case) for path in (COMPLETIONS, CHAT) for case in ANSWERS]
CASES += [(COMPLETIONS, *case) for case in COMPLETION] + [(CHAT, *case) for case in CHATS]
CASES += [
    (GENERATE, {"max_new_tokens": 0}, "max_new_tokens", "max_new_tokens must be between 1"),
    (GENERATE, {"max_new_tokens": 500}, "max_new_tokens", "max_new_tokens is 500"),
    (GENERATE, {"max_tokens": 0}, "max_tokens", "max_tokens must be between 1"),
    (GENERATE, {"prompt": ["a", "b"]}, "prompt", "this endpoint takes one prompt"),
    (GENERATE, {"n": 2}, "n", "unknown field"),
]


async def test_an_error_in_a_field_names_the_field() -> None:
    """One server for all cases: each is refused, nothing reaches the engine, and the server still answers."""
    async with served() as server:
        for path, wrong, param, words in CASES:
            response = await server.client.post(path, content=json.dumps({**OK[path], **wrong}), headers=JSON)
            status = 404 if param == "model" and isinstance(wrong["model"], str) else 400
            check_error(response, status, param, words)
        assert server.port.submitted == []
        assert (await server.complete())["choices"][0]["text"] == ANSWER


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"prompt"',
        b"5",
        b'{"prompt": "a",}',
        b"{'prompt': 'a'}",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a"} trailing',
        b'{"prompt": ' + b"[" * 5000,
        b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"user": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
        b"\x00" * 100,
    ],
)
async def test_what_is_not_json_is_refused(body: bytes) -> None:
    async with served() as server:
        for path in OK:
            check_error(await server.client.post(path, content=body, headers=JSON), 400)
        assert (await server.complete())["choices"][0]["text"] == ANSWER


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ('{"prompt": "a"}'.encode("utf-16"), None, "the body is UTF-16 or UTF-32: send the JSON as UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16-le"), None, "the body is UTF-16 or UTF-32"),
        (b'{"prompt": "caf\xe9"}', None, "the body is not UTF-8: byte 0xe9 at 15 begins no character"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature", "temperature: a number is out of range"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "seed", "seed: a number is out of range"),
        (b'{"prompt": [5, [{"a": -1e400}]]}', "prompt", "prompt: a number is out of range"),
        (b"[1e999]", None, "the body: a number is out of range"),
        (b'{"prompt": 1e999, "n": ', None, "the body"),
    ],
)
async def test_what_cannot_be_decoded_is_said(body: bytes, param: str | None, words: str) -> None:
    async with served() as server:
        response = await server.client.post(COMPLETIONS, content=body, headers=JSON)
        check_error(response, 400, param, words)
        assert response.json()["error"]["code"] == "invalid_json"


async def test_a_byte_order_mark_means_nothing() -> None:
    async with served() as server:
        body = codecs.BOM_UTF8 + json.dumps(OK[COMPLETIONS]).encode()
        response = await server.client.post(COMPLETIONS, content=body, headers=JSON)
        assert response.json()["choices"][0]["text"] == ANSWER


@pytest.mark.parametrize("depth", [900, 5_000, 50_000])
async def test_json_that_is_too_deep_is_refused_as_that_whatever_the_decoder_can_read(depth: int) -> None:
    """How deep that is depends on the version of Python."""
    async with served() as server:
        body = b'{"prompt": "a", "metadata": ' + b"[" * depth + b"]" * depth + b"}"
        response = await server.client.post(COMPLETIONS, content=body, headers=JSON)
        assert response.status_code == 400 and response.json()["error"]["code"] == "json_too_deep"
        assert "the JSON is nested more than 64 deep: send what is deeper as text" in response.text


async def test_a_whole_number_may_be_written_as_a_float() -> None:
    """As clients write it whose numbers are all floats, and as vLLM and JSON schemas take it."""
    async with served() as server:
        response = await server.post(COMPLETIONS, prompt="the", max_tokens=2.0, n=1.0, top_k=5.0, seed=-1.0, top_p=1.0)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 2
        for field, value in (("max_tokens", 2.5), ("n", 1e300), ("temperature", "hot")):
            check_error(await server.post(COMPLETIONS, prompt="the", **{"top_k": 5.0, field: value}), 400, field)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_must_be_declared_json(kind: str) -> None:
    async with served() as server:
        headers = {"content-type": kind} if kind else {}
        check_error(await server.client.post(COMPLETIONS, content=b'{"prompt":"a"}', headers=headers), 415)


async def test_a_compressed_body_is_refused_as_that() -> None:
    async with served() as server:
        headers = JSON | {"content-encoding": "gzip"}
        answer = await server.client.post(COMPLETIONS, content=gzip.compress(b'{"prompt":"a"}'), headers=headers)
        check_error(answer, 415, words="Content-Encoding is 'gzip'")


async def test_a_large_body_is_refused_before_it_is_read() -> None:
    async with served(limits=Limits(max_body_bytes=1000)) as server:
        check_error(await server.post(COMPLETIONS, prompt="a" * 1001), 413, words="1000 bytes")

        async def chunks() -> Any:
            for _ in range(1000):
                taken.append(1)
                yield b" " * 100

        taken: list[int] = []
        check_error(await server.client.post(COMPLETIONS, content=chunks(), headers=JSON), 413)
        assert (await server.complete())["choices"][0]["text"] == ANSWER


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x"},
        {"response_format": {"type": "text"}, "tools": None, "suffix": None, "guided_json": None},
        {"temperature": None, "n": None, "stop": None, "stream": None, "logit_bias": None, "max_tokens": None},
        {"logit_bias": {}, "stop": [], "bad_words": [], "stop_token_ids": []},
        {"use_beam_search": False, "length_penalty": 1.0, "spaces_between_special_tokens": True},
        {"no_such_field": None},
    ],
)
async def test_what_asks_for_nothing_is_taken(harmless: dict[str, Any]) -> None:
    async with served() as server:
        for path in (COMPLETIONS, CHAT):
            response = await server.post(path, **OK[path], **harmless)
            assert response.status_code == 200, response.text


async def test_client_libraries_may_send_their_empty_chat_fields() -> None:
    empty = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "modalities": ["text"]}
    async with served() as server:
        assert (await server.post(CHAT, messages=HI, **empty)).status_code == 200


async def test_a_template_that_refuses_is_the_callers_error() -> None:
    async with served(template="{{ raise_exception('only questions') }}") as server:
        check_error(await server.post(CHAT, messages=HI), 400, "messages", "only questions")
    async with served(template=None) as server:
        error = check_error(await server.post(CHAT, messages=HI), 400, "messages", "--chat-template")
        assert error["code"] == "no_chat_template"


@pytest.mark.parametrize("stream", [False, True])
async def test_one_prompt_too_long_is_refused_before_any_is_answered_or_the_others_are_read(stream: bool) -> None:
    async with served(room=64) as server:
        encoded = server.backend.encode
        read: list[str] = []

        def seen(text: str, **rest: Any) -> Any:
            read.append(text)
            return encoded(text, **rest)

        server.backend.encode = seen  # type: ignore[method-assign]
        response = await server.post(COMPLETIONS, prompt=["the", "the " * 100, "dog"], stream=stream)
        error = check_error(response, 400, "prompt", "context holds 64")
        assert error["code"] == "context_length_exceeded"
        assert server.port.submitted == [] and read == ["the", "the " * 100]


@pytest.mark.parametrize(
    ("path", "field"),
    [(CHAT, "messages"), ("/v1/responses", "input"), (COMPLETIONS, "prompt")],
)
@pytest.mark.parametrize(("words", "most"), [(100, 4), (10, 4000)])
async def test_what_is_too_long_is_named_as_the_path_names_it(path: str, field: str, words: int, most: int) -> None:
    text = "the " * words
    said = {"messages": [{"role": "user", "content": text}], "input": text, "prompt": text}[field]
    limit = "max_output_tokens" if field == "input" else "max_tokens"
    async with served(room=64) as server:
        response = await server.post(path, **{field: said, limit: most})
        check_error(response, 400, field if words > most else limit, "context holds 64")
        assert server.port.submitted == []


@pytest.mark.parametrize("priority", [1 << 30, -(1 << 30), 10**30, -(10**30), (1 << 63) - 1])
async def test_priorities_out_of_range_are_refused_at_every_endpoint(priority: int) -> None:
    messages = [{"role": "user", "content": "a"}]
    bodies: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": "a"},
        "/v1/generate": {"prompt": "a"},
        "/v1/chat/completions": {"messages": messages},
        "/v1/responses": {"input": "a"},
    }
    async with served() as server:
        for path, body in bodies.items():
            check_error(await server.post(path, **body, priority=priority), 400, "priority", "lower being sooner")
        assert server.port.submitted == []


async def test_priorities_are_refused_where_the_policy_ignores_them() -> None:
    async with served(limits=Limits(priorities=False)) as server:
        check_error(await server.post(COMPLETIONS, prompt="a", priority=1), 400, "priority", "--scheduling-policy")
        assert (await server.post(COMPLETIONS, prompt="a", priority=0)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "x"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [9999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
async def test_the_tokenizer_routes_are_as_strict(path: str, body: dict[str, Any], param: str) -> None:
    async with served() as server:
        check_error(await server.post(path, **body), 404 if param == "model" else 400, param)


@pytest.mark.parametrize(("prompts", "first"), [([[1, 2], "a"], "token ids"), (["a", [1, 2]], "text")])
async def test_a_list_of_prompts_as_text_and_as_token_ids_is_refused_by_name(prompts: list[Any], first: str) -> None:
    async with served() as server:
        check_error(await server.post(COMPLETIONS, prompt=prompts), 400, "prompt", f"prompt[0] is {first}: send all")
        assert not server.port.submitted


def test_a_long_text_of_few_tokens_is_no_prompt_too_long() -> None:
    """Only the beginning of a text of more than 16 characters a token of the context is encoded at first."""
    encoded: list[int] = []

    def encode(text: str, *, add_special_tokens: bool = True, suffix: str = "") -> tuple[int, ...]:
        encoded.append(len(text))
        return (1,) * min(len(text), most)

    backend: Any = SimpleNamespace(encode=encode)
    most = 99
    assert prompts.encode(["x" * 1601], True, backend, 100)[0][1] == (1,) * 99 and encoded == [800, 1601]
    most = 200
    with pytest.raises(InvalidRequest, match="has 200 tokens"):
        prompts.encode(["x" * 1601], True, backend, 100)
    most = 201
    with pytest.raises(InvalidRequest, match="has more than 201 tokens"):
        prompts.encode(["x" * 1608], True, backend, 100)
    assert encoded[-1] == 800, "the rest is not encoded"
