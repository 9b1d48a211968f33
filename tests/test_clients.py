"""The official clients against the whole house: tools, thoughts, Responses and Messages on the embedded model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx2
import jsonschema  # type: ignore[import-untyped]
import ollama
import pytest
from anthropic import Anthropic
from pydantic import BaseModel, Field

from tests import thinker
from tests.live import Live, serving, standing

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "Tells it", "parameters": SCHEMA}}
HI: Any = [{"role": "user", "content": "Tell me about the weather in Rome."}]


@pytest.fixture(scope="module", params=["native", "upstream"])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with standing(request.param, tmp_path_factory.mktemp("clients"), "--dtype", "float32") as live:
        yield live


THROUGH_ANOTHER_AT_NIGHT = pytest.mark.parametrize(
    "live", ["native", pytest.param("upstream", marks=pytest.mark.nightly)], indirect=True, scope="module"
)
"""Of long answers: what is passed on is compared byte by byte in `tests/server/test_proxy.py`."""


@pytest.fixture
def claude(live: Any) -> Iterator[Anthropic]:
    with Anthropic(api_key="none", base_url=live.url, http_client=httpx2.Client(trust_env=False)) as client:
        yield client


@THROUGH_ANOTHER_AT_NIGHT
def test_a_forced_call_obeys_its_schema_whole_and_streamed(live: Any) -> None:
    ask: dict[str, Any] = {"model": "embedded", "messages": HI, "tools": [TOOL], "seed": 3, "max_tokens": 120}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        whole = live.openai.chat.completions.create(**ask, tool_choice=choice, parallel_tool_calls=False)
        [call] = whole.choices[0].message.tool_calls
        assert whole.choices[0].finish_reason == "tool_calls"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        pieces, name = "", ""
        for chunk in live.openai.chat.completions.create(
            **ask, tool_choice=choice, parallel_tool_calls=False, stream=True
        ):
            for part in chunk.choices[0].delta.tool_calls or ():
                name, pieces = name or part.function.name, pieces + part.function.arguments
        assert (name, pieces) == ("weather", call.function.arguments)


@THROUGH_ANOTHER_AT_NIGHT
def test_several_calls_can_be_forced_and_all_obey(live: Any) -> None:
    made = live.openai.chat.completions.create(
        model="embedded", messages=HI, tools=[TOOL], tool_choice="required", seed=1, max_tokens=200
    )
    calls = made.choices[0].message.tool_calls
    assert calls
    for call in calls[: -1 if made.choices[0].finish_reason == "length" else None]:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_results_of_tools_go_back_into_a_conversation(live: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    talk: Any = [
        *HI,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "warm"},
    ]
    made = live.openai.chat.completions.create(model="embedded", messages=talk, tools=[TOOL], max_tokens=20)
    assert made.choices[0].message.content


def test_responses_stream_what_they_say_whole(live: Any) -> None:
    ask: dict[str, Any] = {"model": "embedded", "input": "Once upon a time", "max_output_tokens": 40, "temperature": 0}
    whole = live.openai.responses.create(**ask)
    with live.openai.responses.stream(**ask) as stream:
        said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert said == whole.output_text and len(said) > 20
    assert whole.usage.output_tokens <= 40


def test_responses_call_tools_and_obey_schemas(live: Any) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA}
    made = live.openai.responses.create(
        model="embedded", input="Rome", tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    [call] = [item for item in made.output if item.type == "function_call"]
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    form: Any = {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA}}
    made = live.openai.responses.create(model="embedded", input="Rome", text=form)
    jsonschema.validate(json.loads(made.output_text), SCHEMA)


def test_messages_stream_what_they_say_whole(live: Any, claude: Any) -> None:
    ask: dict[str, Any] = {"model": "embedded", "max_tokens": 40, "messages": HI, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**ask)
    with claude.messages.stream(**ask) as stream:
        said = "".join(stream.text_stream)
    assert said == whole.content[0].text and len(said) > 20
    counted = claude.messages.count_tokens(model="embedded", messages=HI)
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


@THROUGH_ANOTHER_AT_NIGHT
def test_messages_call_tools(live: Any, claude: Any) -> None:
    tool: Any = {"name": "weather", "input_schema": SCHEMA}
    choice: Any = {"type": "tool", "name": "weather"}
    ask: dict[str, Any] = {"model": "embedded", "max_tokens": 120, "messages": HI, "extra_body": {"seed": 5}}
    whole = claude.messages.create(**ask, tools=[tool], tool_choice=choice)
    assert whole.stop_reason == "tool_use"
    jsonschema.validate(whole.content[0].input, SCHEMA)
    with claude.messages.stream(**ask, tools=[tool], tool_choice=choice) as stream:
        assert stream.get_final_message().content[0].input == whole.content[0].input


class Trip(BaseModel):
    """An ordinary class, whose schema says nothing of additionalProperties."""

    city: Literal["Paris", "Rome"]
    days: Annotated[int, Field(ge=1, le=7)]
    note: Annotated[str, Field(max_length=20)] | None = None


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    far: bool


@THROUGH_ANOTHER_AT_NIGHT
def test_answers_and_calls_are_objects_of_an_ordinary_class(live: Any, claude: Any) -> None:
    schema = Trip.model_json_schema()
    assert "additionalProperties" not in schema
    tool: Any = {"type": "function", "function": {"name": "Trip", "parameters": schema}}
    forced: Any = {"type": "function", "function": {"name": "Trip"}}
    asked: dict[str, Any] = {"model": "embedded", "messages": HI, "max_tokens": 200}

    def call(seed: int) -> Any:
        return live.openai.chat.completions.create(**asked, seed=seed, tools=[tool], tool_choice=forced)

    with ThreadPoolExecutor(8) as threads:
        for made in threads.map(call, range(8)):
            Trip.model_validate_json(made.choices[0].message.tool_calls[0].function.arguments, strict=True)
    form: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema}}
    made = live.openai.chat.completions.create(**asked, response_format=form)
    Trip.model_validate_json(made.choices[0].message.content)
    # Anthropic's client leaves bounds out of the schema, and checks them itself.
    assert isinstance(claude.messages.parse(**asked, output_format=Place).parsed_output, Place)
    parsed = live.openai.responses.parse(model="embedded", input="Rome", max_output_tokens=200, text_format=Trip)
    assert isinstance(parsed.output_parsed, Trip)


def test_which_parsers_were_chosen_is_shown(live: Any) -> None:
    card = live.http.get("/v1/models").json()["data"][0]
    assert (card["tool_call_parser"], card["reasoning_parser"]) == ("hermes", "none")
    assert "tool calls: hermes (" in live.log


def test_thoughts_are_split_where_that_is_asked_for(tmp_path: Path) -> None:
    """Also where a structure binds what comes after them."""
    with serving(tmp_path, module="tests.thinker") as server:
        live: Any = server
        for structure in ({}, {"guided_choice": ["No.", thinker.ANSWER]}):
            ask: dict[str, Any] = {"model": "embedded", "messages": HI, "extra_body": structure}
            made = live.openai.chat.completions.create(**ask)
            assert made.choices[0].message.content == thinker.ANSWER
            assert made.choices[0].message.reasoning == thinker.THOUGHT
            details = made.usage.completion_tokens_details
            assert 0 < details.reasoning_tokens < made.usage.completion_tokens
            thought = "".join(
                getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
                for chunk in live.openai.chat.completions.create(**ask, stream=True)
            )
            assert thought == thinker.THOUGHT
        assert live.settled()["cache"]["used_pages"] == 0


def test_fields_of_ours_go_through_openais_client(live: Any) -> None:
    def ask(prompt: Any = "Once upon a time there was", **more: Any) -> Any:
        return live.openai.completions.create(
            model="embedded", prompt=prompt, max_tokens=12, temperature=0, extra_body=more
        )

    plain = ask(return_token_ids=True)
    prompt, answer = plain.choices[0].prompt_token_ids, plain.choices[0].token_ids
    assert len(prompt) == plain.usage.prompt_tokens and len(answer) == plain.usage.completion_tokens
    assert ask(cache_salt="mine").choices[0].text == plain.choices[0].text
    assert ask(prompt).choices[0].text == plain.choices[0].text
    some = [answer[0], answer[1], 300]
    assert set(ask(allowed_token_ids=some, return_token_ids=True).choices[0].token_ids) <= set(some)
    unwanted = plain.choices[0].text.split()[0]
    assert f" {unwanted} " not in f" {ask(bad_words=[unwanted]).choices[0].text} "
    scores = ask(prompt_logprobs=1).choices[0].prompt_logprobs
    assert len(scores) == len(prompt) and scores[0] is None
    cut = ask(truncate_prompt_tokens=3, return_token_ids=True)
    assert cut.usage.prompt_tokens == 3 and cut.choices[0].prompt_token_ids == prompt[-3:]
    late = live.openai.completions.create(
        model="embedded", prompt="Once", max_tokens=2000, temperature=0, extra_body={"timeout": 0.3, "ignore_eos": True}
    )
    assert late.choices[0].finish_reason == "timeout" and late.usage.completion_tokens > 0


def test_usage_is_sent_with_each_chunk_where_asked(live: Any) -> None:
    stream = live.openai.chat.completions.create(
        model="embedded",
        messages=HI,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = [piece.usage.completion_tokens for piece in stream if piece.usage is not None]
    assert counts == sorted(counts) and len(counts) > 3 and counts[-1] <= 8


@pytest.fixture
def llama(live: Any) -> Iterator[ollama.Client]:
    client = ollama.Client(host=live.url, trust_env=False)
    yield client
    client._client.close()


@THROUGH_ANOTHER_AT_NIGHT
def test_ollamas_client_chats_and_generates_whole_and_streamed(live: Any, llama: ollama.Client) -> None:
    few: Any = {"temperature": 0, "num_predict": 40, "num_ctx": 4096}
    same = live.openai.chat.completions.create(model="embedded", messages=HI, temperature=0, max_tokens=40)
    for name in ("embedded", "embedded:latest"):
        whole = llama.chat(name, HI, options=few)
        assert whole.message.content == same.choices[0].message.content and len(whole.message.content) > 20
        assert (whole.prompt_eval_count, whole.eval_count) == (same.usage.prompt_tokens, same.usage.completion_tokens)
    parts = list(llama.chat("embedded", HI, options=few, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content and len(parts) > 5
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].done_reason in ("stop", "length") and parts[-1].eval_count == whole.eval_count
    assert (parts[-1].total_duration or 0) >= (parts[-1].eval_duration or 0) > 0
    told = llama.generate("embedded", "Once upon a time", raw=True, options=few)
    text = live.openai.completions.create(model="embedded", prompt="Once upon a time", temperature=0, max_tokens=40)
    assert told.response == text.choices[0].text and told.context is None
    pieces = llama.generate("embedded", "Once upon a time", raw=True, options=few, stream=True)
    assert "".join(piece.response for piece in pieces) == told.response
    first = llama.generate("embedded", "Tell me about a boat.", system="Be brief.", options=few)
    assert llama.generate("embedded", "And?", context=first.context, options=few).response
    assert llama.generate("embedded").done_reason == llama.chat("embedded").done_reason == "load"


@THROUGH_ANOTHER_AT_NIGHT
def test_ollamas_client_gets_objects_of_an_ordinary_class_and_tool_calls(live: Any, llama: ollama.Client) -> None:
    schema = Trip.model_json_schema()
    made = llama.chat("embedded", HI, format=schema, options={"seed": 3, "num_predict": 200})
    Trip.model_validate_json(made.message.content or "", strict=True)
    made = llama.generate("embedded", "Rome", format="json", options={"num_predict": 100, "temperature": 0})
    assert made.done_reason == "length" or json.loads(made.response) is not None

    def weather(city: str, days: int) -> str:
        """Tells it.

        Args:
            city: where
            days: for how long
        """
        return f"{city}: warm for {days} days"

    answer = llama.chat("embedded", HI, tools=[weather], options={"num_predict": 20, "seed": 1})
    call: Any = {"function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}}}
    talk: Any = [
        *HI,
        answer.message,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": weather("Rome", 2)},
    ]
    assert llama.chat("embedded", talk, tools=[weather], options={"num_predict": 20}).eval_count


def test_ollamas_client_embeds_and_lists(live: Any, llama: ollama.Client) -> None:
    found = llama.embed("embedded", ["a boat", "a dog"])
    same = live.openai.embeddings.create(model="embedded", input=["a boat", "a dog"])
    assert [list(one) for one in found.embeddings] == [pytest.approx(one.embedding, abs=1e-6) for one in same.data]
    assert len(llama.embeddings("embedded", "a boat").embedding) == len(found.embeddings[0])
    [listed] = llama.list().models
    [loaded] = llama.ps().models
    shown = llama.show("embedded")
    assert listed.model == loaded.model == "embedded:latest"
    assert listed.details is not None and listed.details == shown.details == loaded.details
    assert (listed.details.family, listed.details.format) == ("llama", "safetensors")
    assert listed.size and listed.modified_at and shown.modelinfo and shown.capabilities
    assert shown.modelinfo["llama.context_length"] == live.http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert {"completion", "embedding"} <= set(shown.capabilities)


def test_ollamas_client_is_told_what_to_do_instead(live: Any, llama: ollama.Client) -> None:
    refused: list[tuple[int, str, Any]] = [
        (404, "not served here", lambda: llama.chat("llama3.2", HI)),
        (404, "not served here", lambda: next(iter(llama.chat("llama3.2", HI, stream=True)))),
        (400, "options.temperature", lambda: llama.chat("embedded", HI, options={"temperature": -1})),
        (400, "quire serve MODEL", lambda: llama.pull("llama3.2")),
        (400, "remove the files", lambda: llama.delete("embedded")),
        (400, "--served-model-name", lambda: llama.copy("embedded", "other")),
        (400, "options", lambda: llama.create("other", from_="embedded")),
        (400, "hub", lambda: llama.push("embedded")),
    ]
    for status, words, ask in refused:
        with pytest.raises(ollama.ResponseError, match=words) as caught:
            ask()
        assert caught.value.status_code == status


def test_the_examples_of_ollamas_documentation_are_answered_as_they_stand(live: Any) -> None:
    body = b'{"model": "embedded", "messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 3}}'
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = live.http.post("/api/chat", content=body, headers=form)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert json.loads(answer.text.splitlines()[-1])["eval_count"] <= 3
    assert live.http.get("/").text == "Ollama is running" and live.http.head("/").status_code == 200
    assert set(live.http.get("/api/version").json()) == {"version"}
