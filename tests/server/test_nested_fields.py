"""Each field of each object in the official clients' requests has an effect, is a documented hint, or is refused."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from anthropic.types import message_create_params as message_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as response_params

from quire.multimodal.inputs import Decoder, ImageReader, MediaPolicy
from quire.multimodal.pixels import opened, resized
from quire.multimodal.processor import ImageProcessor
from quire.server.fields import NO_OPS, REFUSED_FIELDS
from quire.server.limits import Limits
from quire.server.messages import MessagesRequest, as_chat
from quire.server.nested import EVERYWHERE, HINTS, KINDS, check_nested
from tests.server.doubles import HI, Served, served
from tests.server.nested import Body, Place, example, examples, places
from tests.server.test_tools import KNOWS, QWEN, speaking

pytestmark = pytest.mark.anyio

TEMPLATE = KNOWS + "{{ messages | tojson }}"
"""Shows everything that a template is given."""

SCHEMA = {"type": "object", "properties": {}}
TOOL = {"name": "f", "parameters": SCHEMA}
ROOTS: Mapping[str, tuple[Any, Body]] = {
    "/v1/chat/completions": (
        chats.CompletionCreateParamsBase,
        {"messages": HI, "tools": [{"type": "function", "function": TOOL}]},
    ),
    "/v1/responses": (response_params.ResponseCreateParamsBase, {"input": HI, "tools": [{"type": "function", **TOOL}]}),
    "/v1/messages": (
        message_params.MessageCreateParamsBase,
        {"max_tokens": 64, "messages": HI, "tools": [{"name": "f", "input_schema": SCHEMA}]},
    ),
    "/v1/messages?beta=true": (
        beta_params.MessageCreateParamsBase,
        {"max_tokens": 64, "messages": HI, "tools": [{"name": "f", "input_schema": SCHEMA}]},
    ),
}

OPAQUE = {"InputSchemaTyped"}
"""Objects that are no objects of the API: JSON schemas, which go to the model whole."""

SEEN_IN_ANSWERS = {"disable_parallel_tool_use"}
"""Their effect is on the answer, not on what the engine gets: see the test below."""

REFUSED_WHERE_ON = {"citations"}
"""What passes asks for nothing: `test_documents` has the other values."""

DEFAULTS = {"type"}
"""Their only values say what is so without them."""

KIND_OF = {
    "text": """ChatCompletionContentPartTextParam ResponseInputTextParam ResponseOutputTextParam
        ResponseInputTextContentParam TextBlockParam BetaTextBlockParam""",
    "file": "File",
    "input_file": "ResponseInputFileParam ResponseInputFileContentParam",
    "item.message": "EasyInputMessageParam Message ResponseOutputMessageParam",
    "item.call": "ResponseFunctionToolCallParam ResponseCustomToolCallParam",
    "item.result": "FunctionCallOutput ResponseCustomToolCallOutputParam",
    "item.reasoning": "ResponseReasoningItemParam",
    "messages.tool_use": "ToolUseBlockParam BetaToolUseBlockParam",
    "messages.tool_result": "ToolResultBlockParam BetaToolResultBlockParam",
    "thinking": """ThinkingConfigEnabledParam ThinkingConfigAdaptiveParam
        BetaThinkingConfigEnabledParam BetaThinkingConfigAdaptiveParam""",
    "reasoning": "Reasoning",
}
"""Objects by the kind whose hints they may have."""

OTHER_HINTS = {
    "JSONSchema": "description strict",
    "ResponseFormatTextJSONSchemaConfigParam": "description strict",
    "ResponseTextConfigParam": "verbosity",
    "ChatCompletionStreamOptionsParam": "include_obfuscation",
    "StreamOptions": "include_obfuscation",
    "FunctionToolParam": "allowed_callers defer_loading",
    "CustomToolParam": "allowed_callers defer_loading",
    "ToolFunction": "allowed_callers defer_loading",
    "ToolParam": "allowed_callers defer_loading eager_input_streaming",
    "BetaToolParam": "allowed_callers defer_loading eager_input_streaming",
}
"""Hints of objects that are no kind of `KINDS`: each is in a table that the documentation shows."""

TAKEN = {
    "/v1/chat/completions": """ChatCompletionDeveloperMessageParam ChatCompletionSystemMessageParam
        ChatCompletionUserMessageParam ChatCompletionAssistantMessageParam ChatCompletionToolMessageParam
        ChatCompletionContentPartTextParam ChatCompletionMessageFunctionToolCallParam ChatCompletionFunctionToolParam
        FunctionDefinition ResponseFormatText ResponseFormatJSONObject ResponseFormatJSONSchema JSONSchema
        ChatCompletionStreamOptionsParam ChatCompletionNamedToolChoiceParam ChatCompletionContentPartRefusalParam
        File FileFile""",
    "/v1/responses": """EasyInputMessageParam Message ResponseOutputMessageParam ResponseInputTextParam
        ResponseOutputTextParam ResponseFunctionToolCallParam FunctionCallOutput ResponseCustomToolCallParam
        ResponseCustomToolCallOutputParam ResponseReasoningItemParam FunctionToolParam CustomToolParam
        NamespaceToolParam Reasoning ResponseTextConfigParam ResponseFormatTextJSONSchemaConfigParam StreamOptions
        ToolChoiceFunctionParam ResponseOutputRefusalParam ResponseInputFileParam ResponseInputFileContentParam""",
    "/v1/messages": """UserMessageParam AssistantMessageParam TextBlockParam ThinkingBlockParam ToolUseBlockParam
        RedactedThinkingBlockParam ToolResultBlockParam CacheControlEphemeralParam OutputConfigParam
        JSONOutputFormatParam ToolParam ToolChoiceAutoParam ToolChoiceAnyParam ToolChoiceToolParam
        DocumentBlockParam PlainTextSourceParam ContentBlockSourceParam SearchResultBlockParam ToolReferenceBlockParam
        ToolChoiceNoneParam ThinkingConfigEnabledParam ThinkingConfigDisabledParam ThinkingConfigAdaptiveParam""",
    "/v1/messages?beta=true": """BetaUserMessageParam BetaAssistantMessageParam BetaTextBlockParam
        BetaThinkingBlockParam BetaToolUseBlockParam BetaOutputConfigParam BetaJSONOutputFormatParam
        BetaRedactedThinkingBlockParam BetaToolResultBlockParam BetaCacheControlEphemeralParam BetaToolParam
        BetaToolChoiceAutoParam BetaThinkingConfigEnabledParam""",
}
"""What must not be refused in its least form: otherwise nothing below it would be tested."""


def roots(path: str) -> list[Place]:
    """All objects of a request, without those below hints."""
    root, base = ROOTS[path]
    found: list[Place] = []
    for name, kind in typing.get_type_hints(root).items():

        def body(value: Any, name: str = name) -> Body:
            more = {"stream": True} if name == "stream_options" else {}
            talk = name in ("messages", "input") and isinstance(value, list)
            return {"seed": 1, **base, **more, name: [*value, *HI] if talk else value}

        if name not in NO_OPS or name == "cache_control":
            found += places(kind, body, name)
    return [place for place in found if not HINTS.keys() & set(place.path.split(".")[1:-1]) and not hint(place.path)]


def hints_of(name: str) -> set[str]:
    """The fields that may be without an effect in an object of this type."""
    kinds = [kind for kind, names in KIND_OF.items() if name in names.split()]
    return {hint for kind in kinds for hint in (*KINDS[kind].hints, *EVERYWHERE)} | {*OTHER_HINTS.get(name, "").split()}


def test_hints_of_other_objects_are_documented() -> None:
    named = {hint for hints in OTHER_HINTS.values() for hint in hints.split()}
    assert named <= {*NO_OPS, *HINTS, *REFUSED_FIELDS}


def hint(path: str) -> bool:
    return ("." in path and path.rpartition(".")[2] in HINTS.keys() - {"citations"}) or ".citations" in path


async def outcome(server: Served, path: str, body: Body) -> tuple[str | None, Any]:
    """(the error's message, None) of a refused request, or (None, what came of it)."""
    answer = await server.post(path, **body)
    if answer.status_code == 400 or '"code":"item_not_found"' in answer.text:
        error = answer.json()["error"]
        return str(error["message"]), error.get("param")
    assert answer.status_code == 200, answer.text
    omitted = answer.headers.get("x-quire-omitted-tools", "")
    usages = len(re.findall('"usage"', answer.text))
    return None, (replace(server.port.submitted[-1], id=""), omitted, usages)


@pytest.mark.parametrize("path", ROOTS)
async def test_every_nested_field_has_an_effect_is_a_hint_or_is_refused(path: str) -> None:
    dropped, unnamed, taken = [], [], set()
    async with served(speaking("hi"), room=4000, template=TEMPLATE, about=QWEN) as server:
        for place in roots(path):
            least = example(place.kind)
            refused, plain = await outcome(server, path, place.body(least))
            name = f"{place.path} {place.kind.__name__}"
            if refused is not None or plain[1]:  # a tool that this server lacks is left out whole, and a header says so
                continue
            taken.add(place.kind.__name__)
            unknown, param = await outcome(server, path, place.body({**least, "zzz": 1}))
            whole = param == place.path or f"{unknown}".startswith(f"{place.path}: ")
            named = unknown is not None and ("zzz" in f"{unknown} {param}" or whole)
            if place.kind.__name__ not in OPAQUE and not named:
                unnamed.append(name)
            for field, kind in place.fields().items():
                made = [
                    await outcome(server, path, place.body({**least, field: value}))
                    for value in examples(kind)
                    if field not in least
                ]
                known = {*hints_of(place.kind.__name__), *SEEN_IN_ANSWERS, *REFUSED_WHERE_ON, *DEFAULTS}
                passed = [result for error, result in made if error is None]
                if passed and all(result == plain for result in passed) and field not in known:
                    dropped.append(f"{name}.{field}")
    assert not dropped, "without effect, and in no table"
    assert not unnamed, "an unknown field is not refused by name"
    assert set(TAKEN[path].split()) <= taken


@pytest.mark.parametrize(("given", "parallel"), [({}, None), ({"disable_parallel_tool_use": True}, False)])
def test_one_call_at_a_time_is_asked_for_by_its_name_in_each_api(given: Body, parallel: bool | None) -> None:
    asked = MessagesRequest(messages=HI, max_tokens=1, tool_choice={"type": "auto", **given})
    assert as_chat(asked).parallel_tool_calls is parallel


@pytest.mark.parametrize("kind", KINDS)
def test_hints_of_each_kind_are_in_the_table_and_change_nothing(kind: str) -> None:
    honoured, hints = KINDS[kind]
    assert set(hints) <= HINTS.keys() and not set(hints) & set(honoured)
    check_nested(dict.fromkeys((*honoured, *hints), "x") | {"cache_control": {"type": "ephemeral"}}, kind, "here")


async def test_a_mark_in_a_tools_result_and_in_a_part_of_an_item_pins() -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
    inner = [{"type": "text", "text": "sunny", **mark}]
    told = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": inner}]}
    async with served(speaking("hi"), room=4000, template=TEMPLATE) as server:
        await server.post("/v1/messages", max_tokens=8, messages=[*HI, used, told])
        assert [pin.seconds for pin in server.port.submitted[-1].pins] == [3600]
        await server.post(
            "/v1/responses", input=[{"role": "user", "content": [{"type": "input_text", "text": "a", **mark}]}]
        )
        assert [pin.seconds for pin in server.port.submitted[-1].pins] == [3600]


URL = "data:image/png;base64,AAAA"
BASE64 = {"type": "base64", "media_type": "image/png", "data": "AA"}
IMAGES: list[tuple[str, Body]] = [
    ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": URL}, "zzz": 1}),
    ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": URL, "zzz": 1}}),
    ("/v1/responses", {"type": "input_image", "image_url": URL, "zzz": 1}),
    ("/v1/messages", {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}, "zzz": 1}),
    (
        "/v1/messages",
        {"type": "image", "source": {**BASE64, "zzz": 1}},
    ),
]


@pytest.mark.parametrize(("path", "part"), IMAGES)
async def test_unknown_fields_of_images_are_refused_by_name(path: str, part: Body) -> None:
    talk = [{"role": "user", "content": [part]}]
    about = {"input": talk} if path == "/v1/responses" else {"messages": talk, "max_tokens": 8}
    reads = Limits(images=ImageReader(ImageProcessor(factor=8, image_token=7), Decoder(opened, resized), MediaPolicy()))
    async with served(speaking("hi"), room=4000, limits=reads) as server:
        answer = await server.post(path, **about)
        assert answer.status_code == 400 and "zzz" in answer.text, answer.text
