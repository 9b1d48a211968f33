"""A structure binds what comes after the thoughts, on every endpoint that takes messages, streamed or whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest

from quire.errors import InvalidRequest
from quire.parsers.reasoning import CLOSE, OPEN, thoughts_ahead
from quire.server.endpoints import answerer
from quire.server.limits import Limits
from quire.structured_output.llguidance import LlguidanceCompiler
from quire.types import Request, StructuredOutputsParams
from tests.pairs import in_turn
from tests.server.doubles import HI, TOKENIZER, Served, says, served
from tests.tokenization.vocabulary import CHATML

pytestmark = pytest.mark.anyio

GENERATION = "assistant\n"
OPENS = CHATML.replace(GENERATION, f"{GENERATION}{OPEN}\n")
SWITCH = (
    "{{% if enable_thinking is defined and not enable_thinking %}}<think>\n\n</think>\n\n{{% else %}}{on}{{% endif %}}"
)
THOUGHT = 'Hm {"a": 2}.'


def switched(on: str) -> str:
    """A template that closes the thoughts itself when they are switched off; `on` is what it ends with otherwise."""
    at = CHATML.rindex("{% endif %}")
    return CHATML[:at] + SWITCH.format(on=on) + CHATML[at:]


class Model(NamedTuple):
    """How a model thinks, and whether the client lets it. writes: what it writes before the structure."""

    parser: str
    template: str
    off: bool
    writes: str

    @property
    def about(self) -> dict[str, Any]:
        switches = ("enable_thinking",) if "enable_thinking" in self.template else ()
        return {"reasoning_parser": self.parser, "template_arguments": frozenset(switches)}

    def budgeted(self, path: str) -> bool:
        """Whether the thoughts get no token, since they are off and the template has no switch."""
        return self.off and path == "/v1/messages" and not self.about["template_arguments"]


INSIDE = f"{THOUGHT}\n{CLOSE}\n\n"
MODELS = {
    "the template opens": Model("deepseek_r1", OPENS, False, INSIDE),
    "no mark, thinks first": Model("deepseek_r1", CHATML, False, INSIDE),
    "no mark, switched off": Model("deepseek_r1", CHATML, True, ""),
    "the model opens": Model("qwen3", switched(""), False, f"{OPEN}\n{INSIDE}"),
    "the template closes": Model("qwen3", switched(""), True, ""),
    "hybrid, the template opens": Model("qwen3", switched(f"{OPEN}\n"), False, INSIDE),
    "hybrid, the template closes": Model("qwen3", switched(f"{OPEN}\n"), True, ""),
    "the template knows no switch": Model("qwen3", CHATML, True, ""),
    "the template opens though switched off": Model("qwen3", OPENS, True, INSIDE),
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "json_schema": ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, '{"a": 1}'),
    "json_object": ({"response_format": {"type": "json_object"}}, '{"b": [1]}'),
    "regex": ({"structured_outputs": {"regex": "[ab]/+c"}}, "b//c"),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "no"),
    "grammar": ({"structured_outputs": {"grammar": 'start: thoughts\nthoughts: "x"+ SPACE\nSPACE: /y/'}}, "xxy"),
}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]


@cache
def allows(structure: StructuredOutputsParams, text: str) -> bool:
    """Whether the masks let `text` be the whole answer."""
    follow = LlguidanceCompiler(lambda: TOKENIZER)(structure)()
    output: list[int] = []
    for token in says(text):
        [mask] = follow.masks(output, [])
        if mask is not None and not (token >> 3 < len(mask) and mask[token >> 3] >> (token & 7) & 1):
            return False
        output.append(token)
    return True


def thinker(writes: str, obeys: str) -> Callable[[Request], list[int]]:
    """A model that thinks where it may, and obeys only where it must."""

    def answer(request: Request) -> list[int]:
        structure = request.sampling.structured_outputs
        wanted = [f"{begin}{end}" for begin in (f"{OPEN}\n{INSIDE}", INSIDE, "", CLOSE) for end in ("Sure!", obeys)]
        mine = [text for text in wanted if structure is None or allows(structure, text)]
        return says(next((text for text in mine if text == writes + obeys), mine[0]))

    return answer


def data(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def of_chat(found: dict[str, Any]) -> tuple[str, str]:
    message = found["choices"][0]["message"]
    return message["reasoning"] or "", message["content"] or ""


def of_chat_stream(found: list[dict[str, Any]]) -> tuple[str, str]:
    deltas = [choice["delta"] for chunk in found for choice in chunk["choices"]]
    return "".join(d.get("reasoning") or "" for d in deltas), "".join(d.get("content") or "" for d in deltas)


def of_responses(found: dict[str, Any]) -> tuple[str, str]:
    texts = {item["type"]: item["content"][0]["text"] for item in found["output"]}
    return texts.get("reasoning", ""), texts.get("message", "")


def of_responses_stream(found: list[dict[str, Any]]) -> tuple[str, str]:
    def said(kind: str) -> str:
        return "".join(event["delta"] for event in found if event["type"] == f"response.{kind}.delta")

    assert of_responses(found[-1]["response"]) == (said("reasoning_text"), said("output_text"))
    return said("reasoning_text"), said("output_text")


def of_messages(found: dict[str, Any]) -> tuple[str, str]:
    texts = {block["type"]: block.get("thinking") or block.get("text") for block in found["content"]}
    return texts.get("thinking") or "", texts.get("text") or ""


def of_messages_stream(found: list[dict[str, Any]]) -> tuple[str, str]:
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    return "".join(d.get("thinking", "") for d in deltas), "".join(d.get("text", "") for d in deltas)


class Endpoint(NamedTuple):
    path: str
    body: dict[str, Any]
    tools: list[dict[str, Any]]
    whole: Callable[[dict[str, Any]], tuple[str, str]]
    streamed: Callable[[list[dict[str, Any]]], tuple[str, str]]

    def off(self) -> dict[str, Any]:
        if self.path == "/v1/messages":
            return {"thinking": {"type": "disabled"}}
        return {"chat_template_kwargs": {"enable_thinking": False}}


ENDPOINTS = (
    Endpoint("/v1/chat/completions", {"messages": HI}, TOOLS, of_chat, of_chat_stream),
    Endpoint(
        "/v1/responses",
        {"input": "hi"},
        [{"type": "function", **TOOLS[0]["function"]}],  # type: ignore[dict-item]
        of_responses,
        of_responses_stream,
    ),
    Endpoint(
        "/v1/messages",
        {"messages": HI, "max_tokens": 200},
        [{"name": "now", "input_schema": {"type": "object"}}],
        of_messages,
        of_messages_stream,
    ),
)


async def content_of(server: Served, end: Endpoint, body: dict[str, Any], stream: bool) -> tuple[str, str]:
    response = await server.post(end.path, **body, stream=stream)
    assert response.status_code == 200, response.text
    return end.streamed(data(response.text)) if stream else end.whole(response.json())


async def in_a_batch(server: Served, end: Endpoint, body: dict[str, Any]) -> tuple[str, str]:
    """As a batch's line is answered."""
    return end.whole(await answerer(server.backend, Limits(), "test")(end.path, json.dumps(body).encode()))


@pytest.mark.parametrize(("name", "kind"), in_turn(product(MODELS, KINDS)))
async def test_the_structure_binds_what_comes_after_the_thoughts(name: str, kind: str) -> None:
    model, (asks, obeys) = MODELS[name], KINDS[kind]
    script = thinker(model.writes, obeys)
    async with served(script, template=model.template, room=2048, about=model.about) as server:
        for end in ENDPOINTS:
            want = (THOUGHT if model.writes and not model.budgeted(end.path) else "", obeys)
            for tools in ({}, {"tools": end.tools}):
                body = {**end.body, **asks, **(end.off() if model.off else {}), **tools}
                if tools and "response_format" not in asks:
                    refused = await server.post(end.path, **body)
                    assert refused.status_code == 400 and "only as a JSON schema" in refused.text
                    continue
                for stream in (False, True):
                    assert await content_of(server, end, body, stream) == want, (end.path, tools, stream)
                assert await in_a_batch(server, end, body) == want, (end.path, tools)
        structure = server.port.submitted[-1].sampling.structured_outputs
        assert structure is not None
        begins_inside = structure.thoughts == "open"
        assert begins_inside == (name == "no mark, switched off" or model.writes == INSIDE)
        writes = CLOSE * begins_inside if model.budgeted("/v1/messages") else model.writes
        assert not allows(structure, writes + "Sure!") and not allows(structure, writes)
        assert allows(structure, writes + obeys) and allows(structure, obeys) != begins_inside


async def test_an_answer_cut_within_its_thoughts_has_no_content() -> None:
    async with served(thinker(INSIDE, "no"), template=OPENS, about={"reasoning_parser": "qwen3"}) as server:
        asks, _ = KINDS["choice"]
        choice = (await server.chat(**asks, max_tokens=3))["choices"][0]
        assert choice["finish_reason"] == "length"
        assert (choice["message"]["content"] or "") == "" and choice["message"]["reasoning"]


async def test_an_answer_that_goes_on_is_bound_where_its_thoughts_are_over() -> None:
    asks, obeys = KINDS["choice"]
    async with served(thinker("", obeys), room=1024, about={"reasoning_parser": "qwen3"}) as server:
        for begun, ahead in ((f"{OPEN}a", "open"), (f"{OPEN}a{CLOSE}", "none"), ("I", "none")):
            messages = [*HI, {"role": "assistant", "content": begun}]
            await server.chat(messages=messages, continue_final_message=True, add_generation_prompt=False, **asks)
            structure = server.port.submitted[-1].sampling.structured_outputs
            assert structure is not None and structure.thoughts == ahead


async def test_a_raw_prompt_is_bound_from_its_first_token() -> None:
    asks, obeys = KINDS["regex"]
    async with served(thinker("", obeys), about={"reasoning_parser": "deepseek_r1"}) as server:
        for path in ("/v1/completions", "/v1/generate"):
            response = await server.post(path, prompt="the", **asks)
            assert response.status_code == 200 and obeys in response.text


def test_a_structure_knows_three_kinds_of_thoughts() -> None:
    assert thoughts_ahead("none", OPEN) == "none"
    with pytest.raises(InvalidRequest, match="thoughts must be one of none, possible, open"):
        StructuredOutputsParams(regex="a", thoughts="some")  # type: ignore[arg-type]
