"""Tools and thoughts over HTTP: streamed or whole, an answer says the same."""

from __future__ import annotations

from typing import Any

import pytest

from quire.parsers.tools.styles import STYLES
from quire.server.limits import Limits
from quire.server.prompts import _message
from quire.server.tools import make_tool_set
from quire.structured_output.llguidance import LlguidanceCompiler
from quire.types import Request, SamplingParams
from tests.server.doubles import HI, TOKENIZER, check_error, says, served
from tests.tokenization.vocabulary import CHATML

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "How it is", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
CALLS = (
    'Look:\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
KNOWS = CHATML.replace("{% for", "{{ tools | tojson if tools }}{% for", 1)
"""A template that shows tools."""


def speaking(text: str) -> Any:
    def answer(request: Request) -> list[int]:
        return says(text)

    return answer


def gathered(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], str | None]:
    """A message put together from a stream as clients do, and how it ended."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta, finish = choice["delta"], choice["finish_reason"] or finish
            for name in ("content", "reasoning", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    assert part["index"] == len(message["tool_calls"])
                    assert part["type"] == "function" and part["function"]["arguments"] == ""
                    message["tool_calls"].append({"name": part["function"]["name"], "arguments": ""})
                else:
                    message["tool_calls"][part["index"]]["arguments"] += part["function"]["arguments"]
    return message, finish


async def test_calls_are_separated_from_text_whole_and_streamed() -> None:
    async with served(speaking(CALLS), template=KNOWS, room=1024) as server:
        whole = await server.chat(tools=TOOLS, max_tokens=200)
        choice = whole["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Look:"
        calls = choice["message"]["tool_calls"]
        assert [call["function"] for call in calls] == [
            {"name": "weather", "arguments": '{"city": "Paris"}'},
            {"name": "now", "arguments": "{}"},
        ]
        assert all(call["id"].startswith("call_") and call["type"] == "function" for call in calls)
        assert calls[0]["id"] != calls[1]["id"]
        chunks = await server.stream("/v1/chat/completions", messages=HI, tools=TOOLS, max_tokens=200)
        message, finish = gathered(chunks)
        assert finish == "tool_calls"
        assert message["content"] == "Look:"
        assert message["tool_calls"] == [call["function"] for call in calls]
        pieces = [c for c in chunks if c["choices"] and "tool_calls" in c["choices"][0]["delta"]]
        assert len(pieces) > 6, "arguments come as they are made"


async def test_without_tools_or_with_none_a_call_is_text() -> None:
    async with served(speaking(CALLS), template=KNOWS, room=1024) as server:
        cases: list[dict[str, Any]] = [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}]
        for rest in cases:
            answer = (await server.chat(max_tokens=200, **rest))["choices"][0]
            assert answer["message"]["content"] == CALLS
            assert answer["finish_reason"] == "stop"
            assert "weather" not in TOKENIZER.decode(server.port.submitted[-1].prompt)


async def test_the_template_is_shown_tools_calls_and_results() -> None:
    template = (
        "{{ tools[1].function.name }}"
        "{% for m in messages %}"
        "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.arguments.city }}]{% endfor %}"
        "{{ m.role }}:{{ m.tool_call_id }}{{ m.content }}{% endfor %}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "warm"},
    ]
    async with served(template=template) as server:
        await server.chat(messages=[*HI, *history], tools=TOOLS)
        said = TOKENIZER.decode(server.port.submitted[-1].prompt)
        assert said == "nowuser:hi[c1 Rome]assistant:tool:c1warm"


async def test_a_template_without_tools_is_refused_with_a_reason() -> None:
    async with served(room=2048) as server:
        await server.chat(tools=TOOLS)
        said = TOKENIZER.decode(server.port.submitted[-1].prompt)
        assert "How it is" in said and "<tool_call>" in said
        shown = await server.post("/tokenize", messages=HI, tools=TOOLS)
        assert shown.json()["tokens"] == list(server.port.submitted[-1].prompt)


async def test_parallel_tool_calls_false_returns_one_call() -> None:
    async with served(speaking(CALLS), template=KNOWS, room=1024) as server:
        answer = await server.chat(tools=TOOLS, max_tokens=200, parallel_tool_calls=False)
        assert len(answer["choices"][0]["message"]["tool_calls"]) == 1


async def test_a_tool_that_is_named_is_called_once() -> None:
    twice = "\n".join(['<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'] * 2)
    named = {"type": "function", "function": {"name": "now"}}
    async with served(speaking(twice), template=KNOWS, room=1024) as server:
        for choice, count in ((named, 1), ("required", 2), ("auto", 2)):
            answer = await server.chat(tools=TOOLS, tool_choice=choice, max_tokens=200)
            assert len(answer["choices"][0]["message"]["tool_calls"]) == count


FORCED = [
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Ulm"}}'),
    ("mistral", '[{"name": "weather", "arguments": {"city": "Ulm"}}]'),
    ("gemma", '[{"name": "weather", "parameters": {"city": "Ulm"}}]'),
]


def allows(params: SamplingParams, text: str) -> bool:
    """Whether the grammar lets `text` be the whole answer."""
    assert params.structured_outputs is not None
    follow = LlguidanceCompiler(lambda: TOKENIZER)(params.structured_outputs)()
    output: list[int] = []
    for token in says(text):
        [mask] = follow.masks(output, [])
        if mask is not None and not (token >> 3 < len(mask) and mask[token >> 3] >> (token & 7) & 1):
            return False
        output.append(token)
    return True


@pytest.mark.parametrize(("parser", "text"), FORCED)
async def test_a_forced_call_is_written_as_the_family_does_and_obeys_its_schema(parser: str, text: str) -> None:
    about = {"tool_parser": parser}
    named = {"type": "function", "function": {"name": "weather"}}
    async with served(speaking(text), template=KNOWS, room=1024, about=about) as server:
        for choice in ("required", named):
            answer = (await server.chat(tools=TOOLS, tool_choice=choice, max_tokens=100))["choices"][0]
            assert answer["finish_reason"] == "tool_calls"
            assert [call["function"] for call in answer["message"]["tool_calls"]] == [
                {"name": "weather", "arguments": '{"city": "Ulm"}'}
            ]
            assert len(answer["message"]["tool_calls"][0]["id"]) == (9 if parser == "mistral" else 29)
            params = server.port.submitted[-1].sampling
            assert allows(params, text)
            assert not allows(params, "No.")
            assert not allows(params, text.replace('"Ulm"', "3"))
            assert not allows(params, text.replace("weather", "whether"))
            assert allows(params, text.replace("weather", "now").replace('{"city": "Ulm"}', "{}")) == (choice != named)


def allowing(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(("parser", "text"), FORCED)
async def test_only_allowed_tools_are_called_and_shown_where_nothing_binds_the_calls(parser: str, text: str) -> None:
    async with served(speaking(text), template=KNOWS, room=1024, about={"tool_parser": parser}) as server:
        # Hermes' calls are bound by a grammar, which the scripted engine does not read: see below.
        for name, called in (("weather", 1), *([] if parser == "hermes" else [("now", 0)])):
            answer = (await server.chat(tools=TOOLS, tool_choice=allowing("auto", name)))["choices"][0]["message"]
            assert len(answer["tool_calls"]) == called and bool(answer["content"]) != bool(called)
            said = TOKENIZER.decode(server.port.submitted[-1].prompt)
            shown = {tool["function"]["name"] for tool in TOOLS} if parser == "hermes" else {name}
            assert {one for one in ("weather", "now") if f'"{one}"' in said} == shown
        await server.chat(tools=TOOLS, tool_choice=allowing("required", "weather"))
        assert '"now"' in TOKENIZER.decode(server.port.submitted[-1].prompt), "a grammar keeps it from being called"
        params = server.port.submitted[-1].sampling
        assert allows(params, text) and not allows(params, "No.")
        assert not allows(params, text.replace("weather", "now").replace('{"city": "Ulm"}', "{}"))


async def test_calls_of_tools_that_are_not_allowed_are_not_generated() -> None:
    async with served(template=KNOWS, room=1024) as server:
        await server.chat(tools=TOOLS, tool_choice=allowing("auto", "now"))
        params = server.port.submitted[-1].sampling
        called = 'So: <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        assert allows(params, "No.") and allows(params, called)
        assert not allows(params, FORCED[0][1])
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        few = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
        answer = await server.post("/v1/responses", input="hi", tools=tools, tool_choice=few)
        assert answer.status_code == 200 and answer.json()["tool_choice"] == few
        assert server.port.submitted[-1].sampling.structured_outputs == params.structured_outputs


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (allowing("auto", "whether"), "no tool 'whether'"),
        (allowing("none", "now"), "mode auto or required"),
        (allowing("required"), "required needs tools"),
        ({"type": "allowed_tools"}, "needs a list of tools"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["now"]}}, "tool_choice must be"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tols": []}}, "tols"),
    ],
)
async def test_a_choice_of_allowed_tools_that_cannot_be_is_refused(choice: Any, words: str) -> None:
    async with served(template=KNOWS, room=1024) as server:
        refused = await server.post("/v1/chat/completions", messages=HI, tools=TOOLS, tool_choice=choice)
        assert refused.status_code == 400 and words in refused.json()["error"]["message"], refused.text
        assert refused.json()["error"]["param"].startswith("tool_choice")


async def test_strict_tools_bind_calls_and_leave_text_free() -> None:
    strict = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}]
    async with served(template=KNOWS, room=1024) as server:
        await server.chat(tools=strict)
        params = server.port.submitted[-1].sampling
        assert allows(params, "Just text.")
        assert allows(params, "So: " + FORCED[0][1] + " ok")
        assert not allows(params, "So: " + FORCED[0][1].replace('"Ulm"', "3"))


async def test_a_schema_for_the_answer_leaves_calls_open() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with served(template=KNOWS, room=1024) as server:
        await server.chat(tools=TOOLS, response_format=form)
        params = server.port.submitted[-1].sampling
        assert allows(params, '{"a": 1}') and allows(params, FORCED[0][1])
        assert not allows(params, "x") and not allows(params, '{"a": "1"}')


async def test_special_tokens_are_seen_where_calls_are_marked_by_them() -> None:
    async with served(template=KNOWS, room=1024, about={"tool_parser": "mistral"}) as server:
        await server.chat(tools=TOOLS)
        await server.chat(tools=TOOLS, skip_special_tokens=True)
        await server.chat()
        assert [r.sampling.skip_special_tokens for r in server.port.submitted] == [False, True, True]


THOUGHT = "<think>\nLet me see.\n</think>\n\nYes."
QWEN = {"reasoning_parser": "qwen3"}


async def test_thoughts_are_separated_and_counted_whole_and_streamed() -> None:
    async with served(speaking(THOUGHT), about=QWEN) as server:
        whole = await server.chat(max_tokens=64)
        message = whole["choices"][0]["message"]
        assert message["reasoning"] == message["reasoning_content"] == "Let me see."
        assert message["content"] == "Yes."
        thoughts = len(TOKENIZER.encode("<think>\nLet me see.\n</think>"))
        used = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert thoughts - 1 <= used <= thoughts + 1 < whole["usage"]["completion_tokens"]
        options = {"include_usage": True}
        chunks = await server.stream("/v1/chat/completions", messages=HI, max_tokens=64, stream_options=options)
        assert gathered(chunks)[0] == {
            "content": "Yes.",
            "reasoning": "Let me see.",
            "reasoning_content": "Let me see.",
            "tool_calls": [],
        }
        assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": used}


async def test_thoughts_can_be_hidden_but_are_counted() -> None:
    async with served(speaking(THOUGHT), about=QWEN) as server:
        whole = await server.chat(max_tokens=64, include_reasoning=False)
        message = whole["choices"][0]["message"]
        assert message["reasoning"] is None and message["reasoning_content"] is None and message["content"] == "Yes."
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5
        chunks = await server.stream("/v1/chat/completions", messages=HI, max_tokens=64, include_reasoning=False)
        assert gathered(chunks)[0]["reasoning"] == "" and gathered(chunks)[0]["content"] == "Yes."


async def test_where_the_template_opens_the_thoughts_the_answer_begins_with_them() -> None:
    template = CHATML.replace("assistant\n", "assistant\n<think>\n")
    async with served(speaking("Hm.</think>Yes."), template=template, about=QWEN, room=1024) as server:
        message = (await server.chat(max_tokens=64))["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")
        await server.chat(tools=TOOLS, tool_choice="required")
        params = server.port.submitted[-1].sampling
        assert allows(params, "Hm.</think>\n\n" + FORCED[0][1])
        assert not allows(params, "Hm.</think>\n\nYes")


async def test_without_a_parser_thoughts_stay_in_the_text() -> None:
    async with served(speaking(THOUGHT)) as server:
        whole = await server.chat(max_tokens=64)
        assert whole["choices"][0]["message"]["content"] == THOUGHT
        assert "completion_tokens_details" not in whole["usage"]


async def test_thoughts_sent_back_reach_the_template_under_either_name() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    async with served(template=template) as server:
        for name in ("reasoning", "reasoning_content"):
            await server.chat(messages=[*HI, {"role": "assistant", "content": "a", name: "hm"}])
            assert TOKENIZER.decode(server.port.submitted[-1].prompt) == "user:hiassistant:hma"


async def test_effective_sampling_parameters_are_shown_with_their_source() -> None:
    async with served(defaults={"top_k": 7, "temperature": 0.5}) as server:
        shown = (await server.complete(return_sampling_params=True, temperature=0.2))["sampling_params"]
        assert shown["temperature"] == {"value": 0.2, "source": "request"}
        assert shown["top_k"] == {"value": 7, "source": "generation_config"}
        assert shown["min_p"] == {"value": 0.0, "source": "default"}
        assert shown["max_tokens"] == {"value": 64, "source": "request"}
        chat = (await server.chat(return_sampling_params=True, max_completion_tokens=9))["sampling_params"]
        assert chat["max_tokens"] == {"value": 9, "source": "request"}
        chunks = await server.stream("/v1/chat/completions", messages=HI, return_sampling_params=True)
        assert chunks[-1]["choices"] == [] and chunks[-1]["sampling_params"]["top_k"]["value"] == 7
        assert "sampling_params" not in await server.complete()


@pytest.mark.parametrize(("side", "kept"), [(None, [13, 14]), ("left", [13, 14]), ("right", [10, 11])])
async def test_a_prompt_is_cut_where_asked_and_that_is_reported(side: str | None, kept: list[int]) -> None:
    async with served() as server:
        rest = {} if side is None else {"truncation_side": side}
        got = await server.complete(prompt=[10, 11, 12, 13, 14], truncate_prompt_tokens=2, **rest)
        assert list(server.port.submitted[-1].prompt) == kept
        assert got["usage"]["prompt_tokens"] == 2
        assert got["usage"]["prompt_tokens_details"]["truncated_tokens"] == 3
        long = await server.complete(prompt=[9] * 500, truncate_prompt_tokens=-1, max_tokens=28)
        assert long["usage"]["prompt_tokens"] == 100


async def test_the_timeout_header_counts_where_the_field_is_not_sent() -> None:
    async with served(None) as server:
        for headers, body in (({"X-Request-Timeout": "0.05"}, {}), ({"X-Request-Timeout": "60"}, {"timeout": 0.05})):
            response = await server.client.post("/v1/completions", json={"prompt": "a", **body}, headers=headers)
            check_error(response, 504, "timeout", "0.05")
        response = await server.client.post(
            "/v1/completions", json={"prompt": "a"}, headers={"X-Request-Timeout": "soon"}
        )
        check_error(response, 400, "x-request-timeout", "seconds")
        response = await server.client.post(
            "/v1/completions", json={"prompt": "a"}, headers={"X-Request-Timeout": "nan"}
        )
        check_error(response, 400, "x-request-timeout", "above 0")


ENDPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI, "tools": TOOLS}),
    ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **tool["function"]} for tool in TOOLS]}),
    (
        "/v1/messages",
        {"messages": HI, "tools": [{"name": "weather", "input_schema": SCHEMA}], "max_tokens": 60},
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("arguments", ["[1]", "7", "true", '"null"'])
async def test_arguments_of_another_kind_that_a_model_writes_are_no_500(arguments: str, stream: bool) -> None:
    text = f'{{"name": "weather", "arguments": {arguments}}}'
    async with served(speaking(text), template=KNOWS, room=1024, about={"tool_parser": "llama3_json"}) as server:
        for path, body in ENDPOINTS:
            response = await server.post(path, **body, stream=stream)
            assert response.status_code == 200, response.text
            assert "error" not in response.text.replace('"error":null', "")
            said = response.text.replace("\\", "")
            assert "weather" in said and (arguments in said) == (arguments != '"null"')


WALKS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}{{ k }}"
    "{% endfor %}{% endfor %}{{ tools and m.content }}{% endfor %}"
)
"""A template that takes arguments for an object."""


@pytest.mark.parametrize("arguments", [[1], 7, True, "[1]", "true", "null", '{"a": NaN}', None, {"a": [1]}])
async def test_arguments_of_another_kind_that_a_client_sends_back_are_no_500(arguments: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    history = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    for template in (KNOWS, CHATML, WALKS):
        async with served(template=template, room=2048) as server:
            response = await server.post("/v1/chat/completions", messages=history, tools=TOOLS)
            if template is not WALKS or arguments is None or isinstance(arguments, dict):
                assert response.status_code == 200, response.text
            else:
                check_error(response, 400, "messages", "template")


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a": ', "\x00"])
async def test_arguments_that_no_parser_takes_are_shown_to_the_template_as_they_are(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    checked = _message({"role": "assistant", "content": None, "tool_calls": [call]}, "messages[0]")
    assert checked["tool_calls"][0]["function"] == {"name": "now", "arguments": arguments}


@pytest.mark.parametrize("kind", ["array", "string", ["array", "null"], 7])
async def test_arguments_that_are_no_object_are_refused_by_name(kind: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}]
    async with served(speaking("hi"), template=KNOWS, about=QWEN) as server:
        answer: Any = await server.post("/v1/chat/completions", messages=HI, tools=tools)
        check_error(answer, 400, "tools", "tools[0].function.parameters.type must be object")


@pytest.mark.parametrize("schema", [{"description": "none"}, {"type": ["object", "null"]}, {"anyOf": [{}, {}]}])
def test_arguments_are_an_object_whatever_a_schema_leaves_open(schema: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    made = make_tool_set(tools, "required", None, STYLES["hermes"], Limits())
    assert made.schemas["f"]["type"] == "object" and made.for_template is not None
    assert made.for_template[0]["function"]["parameters"] == schema
