"""How clients bound the thoughts of a model, on every endpoint that takes messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire.parsers.reasoning import THOUGHTS
from quire.parsers.tools.rendering import calls_text
from quire.parsers.tools.styles import STYLES, TaggedStyle
from quire.types import Request
from tests.parsers.families import SCHEMAS, WEATHER
from tests.server.doubles import HI, TOKENIZER, Served, check_error, says, served
from tests.server.test_tools import KNOWS, gathered, speaking
from tests.tokenization.vocabulary import CHATML

pytestmark = pytest.mark.anyio

OPENS = CHATML.replace("assistant\n", "assistant\n<think>\n")
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 20},
    "/v1/responses": {"input": "hi", "max_output_tokens": 20},
    "/v1/messages": {"messages": HI, "max_tokens": 20},
}


def about(parser: str = "qwen3", *arguments: str) -> dict[str, Any]:
    return {"reasoning_parser": parser, "template_arguments": frozenset(arguments)}


def bound(server: Served) -> int | None:
    structure = server.port.submitted[-1].sampling.structured_outputs
    return None if structure is None else structure.thought_budget


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_budget_reaches_the_engine_from_every_endpoint(path: str) -> None:
    async with served(template=OPENS, about=about()) as server:
        for budget in (0, 5):
            response = await server.post(path, **ENDPOINTS[path], thinking_token_budget=budget)
            assert response.status_code == 200, response.text
            assert bound(server) == budget
        for body in ({}, {"thinking_token_budget": -1}, {"reasoning_effort": "high"}):
            assert (await server.post(path, **ENDPOINTS[path], **body)).status_code == 200
            assert server.port.submitted[-1].sampling.structured_outputs is None
        check = await server.post(path, **ENDPOINTS[path], thinking_token_budget=-2)
        assert check.status_code == 400 and "thinking_token_budget" in check.text
        assert (await server.post(path, **ENDPOINTS[path], reasoning_effort="low")).status_code == 200
        assert bound(server) == 1024
        wrong = await server.post(path, **ENDPOINTS[path], reasoning_effort="lots")
        assert wrong.status_code == 400 and "reasoning_effort" in wrong.text


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_anthropics_budget_is_the_same(path: str) -> None:
    async with served(template=OPENS, about=about()) as server:
        body = ENDPOINTS[path]
        await server.post(path, **body, thinking={"type": "enabled", "budget_tokens": 7})
        assert bound(server) == 7
        for given in (0, -1, "7", 1.5, True, [7]):
            wrong = await server.post(path, **body, thinking={"type": "enabled", "budget_tokens": given})
            assert wrong.status_code == 400 and "budget_tokens" in wrong.text
        both = {"thinking": {"type": "enabled", "budget_tokens": 7}, "thinking_token_budget": 7}
        assert (await server.post(path, **body, **both)).status_code == 400


async def test_effort_goes_to_the_template_where_it_is_known_there() -> None:
    template = CHATML.replace("assistant\n", "assistant\n{{ reasoning_effort }} {{ enable_thinking }}")
    async with served(template=template, about=about("qwen3", "reasoning_effort", "enable_thinking")) as server:
        await server.chat(reasoning_effort="low", max_tokens=9)
        assert TOKENIZER.decode(server.port.submitted[-1].prompt).endswith("low True")
        assert bound(server) is None
        await server.chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "odd"}, max_tokens=9)
        assert TOKENIZER.decode(server.port.submitted[-1].prompt).endswith("odd True")
        await server.chat(reasoning_effort="low", thinking_token_budget=3, max_tokens=9)
        assert bound(server) == 3


async def test_no_effort_switches_thoughts_off_or_leaves_them_no_token() -> None:
    async with served(template=CHATML, about=about("qwen3", "enable_thinking")) as server:
        await server.chat(reasoning_effort="none", max_tokens=9)
        assert bound(server) is None
    async with served(template=OPENS, about=about()) as server:
        await server.chat(reasoning_effort="none", max_tokens=9)
        assert bound(server) == 0


@pytest.mark.parametrize("sent", [{}, {"thinking": {"type": "enabled"}}, {"reasoning_effort": "none"}])
async def test_what_requests_do_not_say_is_the_operators(sent: dict[str, Any]) -> None:
    """`--default-chat-template-kwargs`: a structure binds from the first token where thinking is off."""
    said = {**about("deepseek_r1", "enable_thinking"), "template_kwargs": {"enable_thinking": False}}
    async with served(template=CHATML, about=said) as server:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        await server.post("/v1/chat/completions", **body, **sent, structured_outputs={"regex": "[a-z]+"})
        structure = server.port.submitted[-1].sampling.structured_outputs
    assert structure is not None and structure.thoughts == ("open" if "thinking" in sent else "none")


SWITCH = "enable_thinking"
ON, OFF, ADAPTIVE = {"type": "enabled"}, {"type": "disabled"}, {"type": "adaptive"}


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("switch", ["enable_thinking", "thinking", ""])
async def test_thinking_turns_thoughts_on_and_off_as_far_as_the_template_can(path: str, switch: str) -> None:
    """Anthropic's and DeepSeek's field; without a switch in the template, thoughts that are off get no token."""
    template = CHATML.replace("assistant\n", "assistant\n{{ enable_thinking }} {{ thinking }} ")
    cases: list[tuple[dict[str, Any], Any, int | None]] = [
        ({"thinking": ON}, True, None),
        ({"thinking": ADAPTIVE}, True, None),
        ({"thinking": OFF}, False, None if switch else 0),
        ({"thinking": OFF, "thinking_token_budget": 9}, False, None if switch else 0),
        ({"thinking": OFF, "reasoning_effort": "high"}, False, None if switch else 0),
        ({"thinking": ON, "reasoning_effort": "low"}, True, 1024),
        ({"thinking": ADAPTIVE, "reasoning_effort": "none"}, False, None if switch else 0),
    ]
    async with served(template=template, about=about("qwen3", *filter(None, [switch]))) as server:
        for fields, on, budget in cases:
            response = await server.post(path, **ENDPOINTS[path], **fields)
            assert response.status_code == 200, response.text
            shown = " ".join(str(on) if name == switch else "" for name in ("enable_thinking", "thinking"))
            assert TOKENIZER.decode(server.port.submitted[-1].prompt).endswith(f"assistant\n{shown} "), fields
            assert bound(server) == budget, fields


WRONG: list[tuple[Any, str]] = [
    ({"thinking": {"type": "maybe"}}, "thinking.type must be enabled, adaptive or disabled"),
    ({"thinking": {}}, "thinking.type must be"),
    ({"thinking": {"type": ["enabled"]}}, "thinking.type must be"),
    ({"thinking": True}, "thinking"),
    ({"thinking": {"type": "enabled", "depth": 3}}, "thinking.depth"),
    ({"thinking": ON, "reasoning_effort": "none"}, "effort is none, and thinking is enabled"),
]


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_what_thinking_cannot_be_is_named(path: str) -> None:
    async with served(template=OPENS, about=about()) as server:
        for fields, words in WRONG:
            wrong = await server.post(path, **ENDPOINTS[path], **fields)
            assert wrong.status_code == 400 and words in wrong.json()["error"]["message"], wrong.text
    async with served() as server:
        for thinking in (OFF, ADAPTIVE):
            assert (await server.post(path, **ENDPOINTS[path], thinking=thinking)).status_code == 200
        wrong = await server.post(path, **ENDPOINTS[path], thinking=ON)
        assert wrong.status_code == 400 and "does not think" in wrong.text
        check_error(await server.post("/v1/completions", prompt="a", thinking=ON), 400, "thinking", "/v1/chat/comp")


REASONING = {path: ENDPOINTS[path] for path in ("/v1/chat/completions", "/v1/responses")}


@pytest.mark.parametrize("path", REASONING)
async def test_reasoning_is_the_same_as_the_fields_apart(path: str) -> None:
    """OpenRouter's object, whose `effort` is that of Responses."""
    template = CHATML.replace("assistant\n", "assistant\n{{ enable_thinking }} ")
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"effort": "low", "summary": "auto"}, {"reasoning_effort": "low"}),
        ({"effort": "none"}, {"reasoning_effort": "none"}),
        ({"max_tokens": 7}, {"thinking_token_budget": 7}),
        ({"max_tokens": 0, "effort": "high"}, {"thinking_token_budget": 0, "reasoning_effort": "high"}),
        ({"enabled": True}, {"thinking": ON}),
        ({"enabled": False, "effort": "high"}, {"thinking": OFF, "reasoning_effort": "high"}),
        ({"exclude": True}, {"include_reasoning": False}),
        ({"exclude": False, "enabled": None}, {}),
    ]
    async with served(lambda _: says("Hm.</think>Yes."), template=template, about=about("qwen3", SWITCH)) as server:
        for reasoning, apart in cases:
            made = []
            for fields in ({"reasoning": reasoning}, apart, {"reasoning": reasoning, **apart}):
                answer = await server.post(path, **REASONING[path], **fields)
                assert answer.status_code == 200, answer.text
                request = server.port.submitted[-1]
                made.append((request.prompt, request.sampling.structured_outputs, "Hm." in answer.text))
            assert made[0] == made[1] == made[2], reasoning
        plain = await server.post(path, **REASONING[path])
        assert "Hm." in plain.text


WRONG_REASONING: list[tuple[dict[str, Any], str, str]] = [
    ({"reasoning": {"effort": 3}}, "effort", "must be text"),
    ({"reasoning": {"effort": "hihg"}}, "effort", "reasoning.effort must be one of"),
    ({"reasoning": {"max_tokens": "7"}}, "max_tokens", "must be a whole number"),
    ({"reasoning": {"max_tokens": True}}, "max_tokens", "must be a whole number"),
    ({"reasoning": {"max_tokens": -2}}, "max_tokens", "reasoning.max_tokens must be at least 0"),
    ({"reasoning": {"enabled": 1}}, "enabled", "must be true or false"),
    ({"reasoning": {"exclude": "yes"}}, "exclude", "must be true or false"),
    ({"reasoning": {"depth": 3}}, "depth", "unknown field 'reasoning.depth'"),
    ({"reasoning": {"effort": "none", "enabled": True}}, "effort", "reasoning.effort is none, and thinking is enabled"),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "effort", "reasoning_effort say different things"),
    ({"reasoning": {"max_tokens": 7}, "thinking_token_budget": 8}, "max_tokens", "say different things"),
    ({"reasoning": {"max_tokens": 7}, "thinking": {**ON, "budget_tokens": 7}}, "max_tokens", "are the same: send one"),
    ({"reasoning": {"enabled": True}, "thinking": OFF}, "enabled", "and thinking say different things"),
    ({"reasoning": {"exclude": True}, "include_reasoning": True}, "exclude", "say different things"),
]


@pytest.mark.parametrize("path", REASONING)
async def test_what_reasoning_cannot_be_is_named(path: str) -> None:
    async with served(template=OPENS, about=about()) as server:
        for fields, name, words in WRONG_REASONING:
            check_error(await server.post(path, **REASONING[path], **fields), 400, f"reasoning.{name}", words)
    async with served() as server:
        wrong = await server.post(path, **REASONING[path], reasoning={"enabled": True})
        check_error(wrong, 400, "reasoning.enabled", "reasoning.enabled: this model does not think: turn it off")
        check_error(await server.post("/v1/completions", prompt="a", reasoning={"max_tokens": 3}), 400, "reasoning")


async def test_a_model_without_thoughts_keeps_any_budget() -> None:
    async with served() as server:
        await server.chat(thinking_token_budget=3, reasoning_effort="low", max_tokens=9)
        assert server.port.submitted[-1].sampling.structured_outputs is None
        check_error(await server.post("/v1/completions", prompt="a", thinking_token_budget=3), 400)


async def test_a_budget_goes_with_min_tokens_and_with_a_structure() -> None:
    async with served(template=OPENS, about=about()) as server:
        await server.chat(thinking_token_budget=3, min_tokens=2, max_tokens=9)
        await server.chat(thinking_token_budget=3, response_format={"type": "json_object"}, max_tokens=9)
        structure = server.port.submitted[-1].sampling.structured_outputs
        assert structure is not None and structure.json_object and structure.thought_budget == 3


TOOLS = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "tools": TOOLS, "max_tokens": 400},
    "/v1/responses": {
        "input": "hi",
        "tools": [{"type": "function", "name": n, "parameters": s} for n, s in SCHEMAS.items()],
    },
    "/v1/messages": {
        "messages": HI,
        "tools": [{"name": n, "input_schema": s} for n, s in SCHEMAS.items()],
        "max_tokens": 400,
    },
    "/api/chat": {"model": "tiny", "messages": HI, "tools": TOOLS, "options": {"num_predict": 400}},
}
ODD = [[1], 7, True, None, "x", "{}", -1.5, {"city": [{}]}, {"city": None, "": 1}]


def odd_requests() -> Iterator[tuple[str, str, bool, int]]:
    """(parser, endpoint, stream, which texts): every parser, and every endpoint with each of the odd values."""
    paths = list(ASKED)
    for i, name in enumerate(STYLES):
        yield name, paths[i % 4], i % 3 == 0, i


@pytest.mark.parametrize(("name", "path", "stream", "first"), list(odd_requests()))
async def test_any_json_where_a_call_stands_is_no_5xx(name: str, path: str, stream: bool, first: int) -> None:
    await check_odd(name, path, stream, slice(first % 3, None, 3))


@pytest.mark.nightly
@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", [False, True])
async def test_any_json_in_every_place_is_no_5xx(name: str, path: str, stream: bool) -> None:
    await check_odd(name, path, stream, slice(None))


async def check_odd(name: str, path: str, stream: bool, which: slice) -> None:
    style = STYLES[name]  # type: ignore[index]
    texts = [calls_text([{"function": {"name": "weather", "arguments": odd}}], style) for odd in ODD]
    texts += [style.before + (style.begin if isinstance(style, TaggedStyle) else "") + "[1]" + style.finish]
    spoken = [""]

    def answer(request: Request) -> list[int]:
        return says(spoken[0])

    async with served(answer, template=KNOWS, room=4096, about={"tool_parser": name}) as server:
        for text in texts[which]:
            spoken[0] = text
            response = await server.post(path, **ASKED[path], stream=stream)
            assert response.status_code == 200, (text, response.text)
            assert '"error":{' not in response.text and '{"error"' not in response.text, (text, response.text)


async def test_calls_of_gpt_oss_come_with_thoughts_and_ids_of_kimi_with_numbers() -> None:
    text = (
        f"{THOUGHTS['openai_gptoss'].opens[0]}Hm.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Ulm"}<|call|>'
    )
    # The tests' vocabulary ends texts with <|end|>.
    text = text.replace("<|end|><|start|>assistant", "<|start|>assistant")
    kinds = {"tool_parser": "openai", "reasoning_parser": "openai_gptoss"}
    async with served(speaking(text), template=KNOWS, room=2048, about=kinds) as server:
        message = (await server.chat(tools=TOOLS, max_tokens=300))["choices"][0]["message"]
        assert message["reasoning"] == "Hm." and message["content"] is None
        assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}
        chunks = await server.stream("/v1/chat/completions", messages=HI, tools=TOOLS, max_tokens=300)
        assert gathered(chunks)[0]["reasoning"] == "Hm." and len(gathered(chunks)[0]["tool_calls"]) == 1
    call = {"id": "functions.now:0", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    history = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3 pm"}]
    said = calls_text([{"function": {"name": "weather", "arguments": {"city": "Ulm"}}}] * 2, STYLES["kimi_k2"])
    async with served(speaking(said), template=KNOWS, room=2048, about={"tool_parser": "kimi_k2"}) as server:
        message = (await server.chat(messages=history, tools=TOOLS, max_tokens=300))["choices"][0]["message"]
        assert [one["id"] for one in message["tool_calls"]] == ["functions.weather:1", "functions.weather:2"]
    assert WEATHER["required"] == ["city"]
