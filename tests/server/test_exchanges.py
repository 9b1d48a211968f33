"""Requests of every kind over HTTP with their whole answers, streams included, what reached the engine for each, and
what was counted: the exact text of the API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.expected import check
from tests.server.exchanges import Exchange, written

pytestmark = pytest.mark.anyio

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "How it is", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
CALLS = (
    'Look:\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 200, **more}


def posts(path: str, bodies: dict[str, dict[str, Any]], **more: Any) -> dict[str, Exchange]:
    return {name: Exchange(path, {**body, **more}) for name, body in bodies.items()}


COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "the"},
    "the model's name": {"prompt": "the", "model": "tiny"},
    "two prompts, two answers each": {"prompt": ["say dog", "say boat"], "n": 2},
    "log-probabilities": {"prompt": "say é €5", "logprobs": 2},
    "log-probabilities without alternatives, as ids": {
        "prompt": "say a dog",
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
    },
    "echo with scores": {"prompt": ["say a", "say dog"], "echo": True, "logprobs": 1, "n": 2},
    "scores of the prompt only": {"prompt": "the dog", "echo": True, "logprobs": 1, "max_tokens": 0},
    "echo of ids": {"prompt": [7, 8, 9], "echo": True, "max_tokens": 2},
    "prompt scores": {"prompt": "the dog", "prompt_logprobs": 2, "max_tokens": 3},
    "token ids": {"prompt": ["say a", "say b"], "return_token_ids": True},
    "a stop string": {"prompt": "say one two three", "stop": ["three", " two"]},
    "a stop string kept": {"prompt": "say one two three", "stop": " two", "include_stop_str_in_output": True},
    "a stop string after min_tokens": {"prompt": "say dog dog dog dog", "stop": "dog", "min_tokens": 3},
    "a limit": {"prompt": "the", "max_tokens": 3},
    "parameters": {
        "prompt": "the",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "seed": -3,
        "min_tokens": 2,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stop_token_ids": [9, 300],
        "allowed_token_ids": [1, 2, 399],
        "logit_bias": {"7": -3.5, "399": 2},
        "bad_words": ["dog", "a"],
        "priority": -3,
        "cache_salt": "pepper",
        "timeout": 9,
        "return_sampling_params": True,
        "max_tokens": 2,
    },
    "the start token is left out": {"prompt": "the", "add_special_tokens": False, "max_tokens": 1},
    "truncated on the left": {"prompt": [4, 5, 6, 7, 8], "truncate_prompt_tokens": 2, "max_tokens": 1, "echo": True},
    "truncated on the right": {
        "prompt": [[4, 5, 6, 7, 8], [9, 10, 11]],
        "truncate_prompt_tokens": 2,
        "truncation_side": "right",
        "max_tokens": 1,
    },
    "truncated for the answer": {"prompt": [5] * 1030, "truncate_prompt_tokens": -1, "max_tokens": 6},
    "cached tokens": {"prompt": [7] * 20, "n": 2, "max_tokens": 1},
    "best_of as many": {"prompt": "the", "n": 2, "best_of": 2, "max_tokens": 1},
    "no-op fields": {"prompt": "the", "max_tokens": 1, "suffix": "", "user": "me", "store": False, "tools": []},
    "a grammar's white space": {
        "prompt": "say 1",
        "guided_json": {"type": "integer"},
        "guided_whitespace_pattern": "[ ]?",
    },
}

CHATS: dict[str, dict[str, Any]] = {
    "plain": said("Hello 😀"),
    "several roles": {
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
            {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": []},
            {"role": "user", "content": "and?"},
        ]
    },
    "thoughts sent back": {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a", "reasoning": "because"},
            {"role": "user", "content": "and?"},
        ]
    },
    "continued": {
        "messages": [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "well,"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "echo": True,
    },
    "two answers with scores": said("dog", n=2, logprobs=True, top_logprobs=2),
    "scores without alternatives": said("dog", logprobs=True),
    "ids and prompt scores": said("dog", return_token_ids=True, prompt_logprobs=1),
    "the newer limit": said("one two three four five", max_completion_tokens=3),
    "template arguments": said("dog", chat_template_kwargs={"extra": "<extra>"}),
    "shown parameters": said("dog", return_sampling_params=True, temperature=0.25, logit_bias={"3": 1}),
    "calls": said(CALLS, tools=TOOLS),
    "calls, none wanted": said(CALLS, tools=TOOLS, tool_choice="none"),
    "one call at a time": said(CALLS, tools=TOOLS, parallel_tool_calls=False),
    "a broken call": said("<tool_call>\n{'name': weather", tools=TOOLS),
    "a call and its result": {
        "messages": [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}},
                    {"id": "call_2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
            {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "rain"}]},
            {"role": "user", "content": "so?"},
        ],
        "tools": TOOLS,
    },
    "a stop string": said("one two three", stop=[" three"]),
    "text as the format": said("dog", response_format={"type": "text"}),
}

RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {"input": "Hello", "instructions": "be brief"},
    "items": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
            {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city": "x"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "noon"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
            {"role": "user", "content": "well?"},
        ]
    },
    "scores": {"input": "a dog", "top_logprobs": 2},
    "scores that are included": {"input": "a dog", "include": ["message.output_text.logprobs"]},
    "cut short": {"input": "one two three four five six", "max_output_tokens": 4},
    "calls": {"input": CALLS, "tools": [{"type": "function", **tool["function"]} for tool in TOOLS]},
    "calls, one at a time": {
        "input": CALLS,
        "tools": [{"type": "function", "name": "weather", "parameters": CITY}],
        "parallel_tool_calls": False,
    },
    "parameters": {"input": "dog", "temperature": 0.5, "top_p": 0.5, "seed": 5, "tool_choice": "auto"},
}

MESSAGES: dict[str, dict[str, Any]] = {
    "plain": said("Hello", system="be brief"),
    "blocks": {
        "max_tokens": 60,
        "system": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "thinking", "thinking": "hmm", "signature": ""},
                    {"type": "redacted_thinking", "data": ""},
                    {"type": "text", "text": "so"},
                    {"type": "tool_use", "id": "t1", "name": "now", "input": {}},
                    {"type": "tool_use", "id": "t2", "name": "weather", "input": {"city": "x"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "noon"},
                    {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "rain"}]},
                    {"type": "text", "text": "well?"},
                ],
            },
        ],
    },
    "results alone": {
        "max_tokens": 60,
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "now", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
        ],
    },
    "continued": {
        "max_tokens": 60,
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "well"}],
    },
    "stop sequences": said("one two three", stop_sequences=[" two", "three"]),
    "cut short": said("one two three four five six") | {"max_tokens": 4},
    "calls": said(CALLS, tools=[{"name": "weather", "description": "d", "input_schema": CITY}, {"name": "now"}]),
    "no parallel calls": said(
        CALLS,
        tools=[{"type": "custom", "name": "weather", "input_schema": CITY, "cache_control": {"type": "ephemeral"}}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    ),
    "no calls": said(CALLS, tools=[{"name": "now"}], tool_choice={"type": "none"}),
    "cached": said("dog " * 20),
}

STREAMS = {
    "/v1/completions": {
        **{
            name: COMPLETIONS[name]
            for name in (
                "plain",
                "two prompts, two answers each",
                "log-probabilities",
                "echo with scores",
                "scores of the prompt only",
                "token ids",
                "a stop string",
                "a limit",
            )
        },
        "usage": {"prompt": "the dog", "max_tokens": 3, "stream_options": {"include_usage": True}},
        "usage in every chunk, and parameters": {
            "prompt": "the dog",
            "max_tokens": 3,
            "return_sampling_params": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    },
    "/v1/chat/completions": {
        **{
            name: CHATS[name]
            for name in (
                "plain",
                "continued",
                "two answers with scores",
                "calls",
                "one call at a time",
                "a broken call",
                "a stop string",
            )
        },
        "ids": said("dog", return_token_ids=True),
        "usage in every chunk": said(
            "a dog", n=2, stream_options={"include_usage": True, "continuous_usage_stats": True}
        ),
    },
    "/v1/responses": {name: RESPONSES[name] for name in ("plain", "scores", "cut short", "calls", "parameters")},
    "/v1/messages": {
        name: MESSAGES[name] for name in ("plain", "stop sequences", "cut short", "calls", "no calls", "cached")
    },
}

WHOLE = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHATS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}

THOUGHTS = "I think.\n</think>\n\nIt is so."
THINKING: dict[str, Exchange] = {
    **posts(
        "/v1/chat/completions",
        {"thoughts": said(THOUGHTS), "no end": said("I think"), "hidden": said(THOUGHTS, include_reasoning=False)},
    ),
    **posts("/v1/chat/completions", {"thoughts and calls": said("Hm.</think>" + CALLS, tools=TOOLS)}),
    **posts("/v1/chat/completions", {"streamed": said(THOUGHTS, stream=True, stream_options={"include_usage": True})}),
    **posts("/v1/chat/completions", {"streamed, hidden": said(THOUGHTS, stream=True, include_reasoning=False)}),
    **posts(
        "/v1/responses", {"response": {"input": THOUGHTS}, "streamed response": {"input": THOUGHTS, "stream": True}}
    ),
    **posts("/v1/responses", {"response, hidden": {"input": THOUGHTS, "include_reasoning": False}}),
    **posts(
        "/v1/messages",
        {
            "message": said(THOUGHTS, thinking={"type": "enabled", "budget_tokens": 1024}),
            "streamed message": said(THOUGHTS, stream=True),
            "without thoughts": said("It is so.", thinking={"type": "disabled"}),
        },
    ),
}

OTHERS: dict[str, Exchange] = {
    **posts(
        "/v1/generate",
        {
            "generate": {"prompt": "say dog", "max_new_tokens": 9},
            "generate cut": {"prompt": "say a dog", "max_new_tokens": 1},
        },
    ),
    **posts("/v1/generate", {"generate two": {"prompt": ["a", "b"]}}),
    **posts(
        "/tokenize",
        {
            "tokenize": {"prompt": "the dog", "return_token_strs": True},
            "tokenize without": {"prompt": "the dog", "add_special_tokens": False},
            "tokenize messages": {"messages": [{"role": "user", "content": "q"}], "tools": TOOLS},
            "tokenize nothing": {},
            "tokenize both": {"prompt": "", "messages": []},
            "tokenize without an answer": {
                "messages": [{"role": "user", "content": "q"}],
                "add_generation_prompt": False,
            },
        },
    ),
    **posts(
        "/detokenize",
        {"detokenize": {"tokens": [270, 271, 4]}, "outside": {"tokens": [1, 9999999999]}, "none": {"tokens": []}},
    ),
    **posts("/v1/messages/count_tokens", {"count": {"messages": [{"role": "user", "content": "q"}], "system": "s"}}),
    **posts("/v1/responses/input_tokens", {"count input": {"input": "q"}}),
    **posts("/v1/embeddings", {"embeddings": {"input": "q"}}),
    "models": Exchange("/v1/models", method="GET"),
    "model": Exchange("/v1/models/tiny", method="GET"),
    "no model": Exchange("/v1/models/huge", method="GET"),
    "health": Exchange("/health", method="GET"),
    "live": Exchange("/health/live", method="GET"),
    "ready": Exchange("/health/ready", method="GET"),
    "ping": Exchange("/ping", method="GET"),
    "version": Exchange("/version", method="GET"),
    "load": Exchange("/load", method="GET"),
    "stats": Exchange("/stats", method="GET"),
    "reset": Exchange("/reset_prefix_cache"),
    "reset with parameters": Exchange("/reset_prefix_cache?reset_running_requests=false&reset_external=0"),
    "reset of running ones": Exchange("/reset_prefix_cache?reset_running_requests=true"),
    "reset of what is unknown": Exchange("/reset_prefix_cache?reset_runing_requests=1"),
    "reset by a page": Exchange("/reset_prefix_cache", headers={"sec-fetch-site": "cross-site"}),
    "no recording": Exchange("/v1/recording", method="GET"),
    "no files": Exchange("/v1/files", method="GET"),
    "no batches": Exchange("/v1/batches/b1", method="GET"),
    "nothing there": Exchange("/v1/completion", {"prompt": "a"}),
    "another method": Exchange("/v1/completions", method="GET"),
}

REFUSALS: list[tuple[str, Any]] = [
    ("/v1/completions", b"{"),
    ("/v1/completions", b"[]"),
    ("/v1/completions", b"1"),
    ("/v1/completions", b'{"prompt": NaN}'),
    ("/v1/completions", b"\xff"),
    ("/v1/completions", b'"' + b"x" * 20_000 + b'"'),
    ("/v1/completions", b'{"prompt": "a", "metadata": {"a": [1, 1e999]}}'),
    ("/v1/completions", {"prompt": "a", "metadata": [[[[[[[[[[[[[]]]]]]]]]]]]]}),
    ("/v1/completions", {"prompt": "a", "metadata": [[]] * 300}),
    *(
        ("/v1/completions", {"prompt": "the", **more})
        for more in (
            {"prompt": ""},
            {"prompt": []},
            {"prompt": [[]]},
            {"prompt": ["a"] * 6},
            {"prompt": ["a", [1]]},
            {"prompt": ["a", 1.5]},
            {"prompt": [1, "a"]},
            {"prompt": [1, 512, 600]},
            {"prompt": [-1]},
            {"prompt": {"a": 1}},
            {"prompt": None},
            {"prompt": [5] * 256},
            {"prompt": "a " * 3000},
            {"prompt": [5] * 250, "max_tokens": 7},
            {"model": "huge"},
            {"modle": "tiny"},
            {"message": "hi"},
            {"messages": []},
            {"max_output_tokens": 5},
            {"num_predict": 5},
            {"n": 0},
            {"n": 5},
            {"n": 3, "prompt": ["a", "b", "c"]},
            {"prompt": ["a"] * 5, "n": 2},
            {"n": "2"},
            {"max_tokens": -1},
            {"max_tokens": 0},
            {"max_tokens": 2.5},
            {"max_tokens": 300},
            {"temperature": -1},
            {"temperature": "hot"},
            {"top_p": 0},
            {"top_p": 1.5},
            {"top_k": -2},
            {"min_p": 2},
            {"seed": 1 << 64},
            {"presence_penalty": 3},
            {"repetition_penalty": 0},
            {"min_tokens": 9, "max_tokens": 8},
            {"logprobs": 6},
            {"logprobs": -1},
            {"logprobs": True},
            {"prompt_logprobs": 6},
            {"prompt_logprobs": 1, "stream": True},
            {"best_of": 2},
            {"stop": ["a", "b", "c", "d"]},
            {"stop": ["a" * 10, "b" * 11]},
            {"stop": [""]},
            {"stop": 5},
            {"stop_token_ids": [1, 2, 3, 4, 5]},
            {"stop_token_ids": [1, 512]},
            {"logit_bias": {"x": 1}},
            {"logit_bias": {"-1": 1}},
            {"logit_bias": {"12345678901": 1}},
            {"logit_bias": {"5": 101}},
            {"logit_bias": {"512": 1}},
            {"logit_bias": {str(i): 1 for i in range(5)}},
            {"logit_bias": {"5": "x"}},
            {"bad_words": ["a", "b", "c"]},
            {"bad_words": ["a" * 13]},
            {"bad_words": [""]},
            {"allowed_token_ids": []},
            {"allowed_token_ids": [9999]},
            {"priority": 1 << 30},
            {"priority": -(1 << 30)},
            {"timeout": 0},
            {"timeout": -1.5},
            {"truncate_prompt_tokens": 0},
            {"truncate_prompt_tokens": -2},
            {"truncation_side": "left"},
            {"truncation_side": "up", "truncate_prompt_tokens": 1},
            {"stream_options": {"include_usage": True}},
            {"stream": True, "stream_options": {"include_usages": True}},
            {"stream": True, "stream_options": {"include_usage": 1}},
            {"tools": [1]},
            {"suffix": "x"},
            {"chat_template": "x"},
            {"prompt_embeds": "x"},
            {"response_format": {"type": "xml"}},
            {"response_format": {"type": "json_schema"}},
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}},
            {"response_format": {"type": "json_object", "strict": True}},
            {"response_format": {"type": "json_object"}, "guided_json": {}},
            {"structured_outputs": {}},
            {"structured_outputs": {"json": {}, "regex": "a"}},
            {"structured_outputs": {"choice": []}},
            {"structured_outputs": {"jsn": {}}},
            {"structured_outputs": {"structural_tag": {}}},
            {"guided_regex": "a", "guided_choice": ["a"]},
            {"guided_whitespace_pattern": " ", "guided_regex": "a"},
            {"guided_choice": ["a", ""]},
            {"guided_json": "{"},
            {"guided_json": {}, "min_tokens": 2},
            {"add_special_tokens": "yes"},
        )
    ),
    *(
        ("/v1/chat/completions", said("hi", **more))
        for more in (
            {"messages": []},
            {"messages": [{"role": "user"}]},
            {"messages": [{"content": "a"}]},
            {"messages": [{"role": "robot", "content": "a"}]},
            {"messages": ["hi"]},
            {"messages": "hi"},
            {"messages": [{"role": "user", "content": 5}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            {"messages": [{"role": "user", "content": "a", "colour": 1}]},
            {"messages": [{"role": "user", "content": "a", "audio": {"id": 1}}]},
            {"messages": [{"role": "tool", "content": "a"}]},
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": {"a": 1}}]},
            {"messages": [{"role": "user", "content": "word " * 300}]},
            {"top_logprobs": 2},
            {"logprobs": True, "top_logprobs": 6},
            {"max_completion_tokens": 0},
            {"max_completion_tokens": 1000},
            {"n": 7},
            {"continue_final_message": True},
            {"tools": [{"type": "web", "function": {"name": "a"}}]},
            {"tools": [{"type": "function"}]},
            {"tools": [{"function": {"name": "a b"}}]},
            {"tools": [{"function": {"name": ""}}]},
            {"tools": [{"function": {"name": "a", "parameters": "x"}}]},
            {"tools": [{"function": {"name": "a", "strict": 1}}]},
            {"tools": [{"function": {"name": "a", "colour": 1}}]},
            {"tools": [{"function": {"name": "a"}, "colour": 1}]},
            {"tools": [{"function": {"name": "a", "parameters": {"properties": []}}}]},
            {"tools": [{"function": {"name": "a"}}, {"function": {"name": "a"}}]},
            {"tools": [{"function": {"name": f"a{i}"}} for i in range(129)]},
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "never"}}},
            {"tools": TOOLS, "tool_choice": {"type": "tool"}},
            {"tools": TOOLS, "tool_choice": "some"},
            {"tools": TOOLS, "tool_choice": 5},
            {"tool_choice": "required"},
            {"tools": TOOLS, "guided_regex": "a"},
            {"tools": TOOLS, "tool_choice": "required", "guided_json": {}},
            {"functions": [{"name": "a"}]},
            {"reasoning_effort": "lwo"},
            {"audio": {}},
            {"modalities": ["text", "audio"]},
            {"input": "x"},
            {"prompt": "x"},
        )
    ),
    *(
        ("/v1/responses", {"input": "hi", **more})
        for more in (
            {"input": None},
            {"input": []},
            {"input": [{"type": "image"}]},
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            {"input": [{"role": "user", "content": 5}]},
            {"input": [{"type": "function_call", "name": "a"}]},
            {"input": [{"type": "function_call_output", "output": "x"}]},
            {"input": [{"type": "reasoning", "content": "x"}]},
            {"input": ["x"]},
            {"include": ["everything"]},
            {"max_output_tokens": 0},
            {"max_output_tokens": 1000},
            {"tools": [{"type": "window"}]},
            {"tools": [{"type": "function", "parameters": {}}]},
            {"tool_choice": {"type": "function", "name": "never"}},
            {"text": {"format": {"type": "json_schema"}}},
            {"text": {"format": {"type": "yaml"}}},
            {"text": {"format": {"type": "json_schema", "schema": 5}}},
            {"text": {"format": "json"}},
            {"text": {"verbose": 1}},
            {"text": {"format": {"type": "text"}}, "response_format": {"type": "text"}},
            {"previous_response_id": "x"},
            {"background": True, "store": False},
            {"reasoning": {"effort": "hihg"}},
            {"truncation": "auto"},
            {"top_logprobs": 9},
            {"stop": [""]},
            {"messages": []},
        )
    ),
    *(
        ("/v1/messages", said("hi", **more))
        for more in (
            {"max_tokens": None},
            {"max_tokens": 0},
            {"messages": [{"role": "tool", "content": "a"}]},
            {"messages": [{"role": "user", "content": 5}]},
            {"messages": [{"role": "user", "content": ["x"]}]},
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]},
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]},
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 5}]}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            {"messages": [{"role": "user", "content": "a", "name": "b"}]},
            {"system": 5},
            {"system": [{"type": "image"}]},
            {"tools": [{"type": "window", "name": "bash"}]},
            {"tools": [{"name": "a b"}]},
            {"tool_choice": {"type": "some"}},
            {"tool_choice": {"type": "tool", "name": "never"}},
            {"thinking": {"type": "enabled"}},
            {"thinking": {"type": "maybe"}},
            {"stop": ["a"], "stop_sequences": ["b"]},
            {"stop_sequences": ["a", "b", "c", "d"]},
            {"container": "x"},
            {"metadata": {"user_id": "x"}, "service_tier": "auto", "top_k": -9},
        )
    ),
]

SAY = {"prompt": "say a"}
HEADERS: dict[str, Exchange] = {
    "form": Exchange("/v1/completions", b"a=1", headers={"content-type": "application/x-www-form-urlencoded"}),
    "no type": Exchange("/v1/completions", b"{}", headers={"content-type": ""}),
    "a charset": Exchange(
        "/v1/completions", {"prompt": "say a"}, headers={"content-type": "Application/JSON; charset=utf-8"}
    ),
    "compressed": Exchange("/v1/completions", b"{}", headers={"content-encoding": "gzip"}),
    "deadline": Exchange("/v1/completions", {"prompt": "say a"}, headers={"x-request-timeout": "5"}),
    "a bad deadline": Exchange("/v1/completions", {"prompt": "say a"}, headers={"x-request-timeout": "nan"}),
    "a deadline of zero": Exchange("/v1/completions", {"prompt": "say a"}, headers={"x-request-timeout": "0"}),
    "a deadline in the body": Exchange(
        "/v1/completions", {"prompt": "say a", "timeout": 3}, headers={"x-request-timeout": "x"}
    ),
    "an id that is not safe": Exchange("/ping", method="GET", headers={"x-request-id": "a b"}),
    "a refusal of messages": Exchange("/v1/messages", said("hi", model="huge")),
    "a refusal of responses": Exchange("/v1/responses", {"input": "hi", "model": "huge"}),
}


def expected(name: str) -> Path:
    return Path(__file__).parent / "expected" / f"{name}.txt"


@pytest.mark.parametrize("path", WHOLE)
async def test_whole_answers_are_as_written_down(path: str) -> None:
    check(
        expected(path.rpartition("/")[0].rpartition("/")[2] + "-" + path.rpartition("/")[2]),
        await written(posts(path, WHOLE[path])),
    )


@pytest.mark.parametrize("path", STREAMS)
async def test_streams_are_as_written_down(path: str) -> None:
    name = "stream-" + path.removeprefix("/v1/").replace("/", "-")
    check(expected(name), await written(posts(path, STREAMS[path], stream=True)))


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
async def test_thoughts_are_as_written_down(parser: str) -> None:
    check(expected(f"thoughts-{parser}"), await written(THINKING, about={"reasoning_parser": parser}))


async def test_other_paths_answer_as_written_down() -> None:
    check(expected("others"), await written(OTHERS))


async def test_refusals_say_what_is_wrong_as_written_down() -> None:
    exchanges = {
        f"{i} {path} {json.dumps(body)[:150] if isinstance(body, dict) else body[:30]}": Exchange(path, body)
        for i, (path, body) in enumerate(REFUSALS)
    }
    check(expected("refusals"), await written(exchanges, about={"vocab_size": 512}, room=256))


async def test_headers_decide_as_written_down() -> None:
    check(expected("headers"), await written(HEADERS))


async def test_a_checkpoints_defaults_are_used_as_written_down() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 3}
    bodies = {
        "defaults": {"prompt": "the", "return_sampling_params": True},
        "own": {"prompt": "the", "top_k": 0, "max_tokens": 2, "return_sampling_params": True},
    }
    exchanges = posts("/v1/completions", bodies)
    exchanges |= posts(
        "/v1/chat/completions",
        {"chat": {"messages": [{"role": "user", "content": "one two three four"}], "return_sampling_params": True}},
    )
    check(expected("defaults"), await written(exchanges, defaults=defaults))
