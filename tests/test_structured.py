"""Structured output from the socket down: the page's examples, and what it must compose with, on a live server."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from quire import LLM, SamplingParams
from quire.types import StructuredOutputsParams
from tests.live import Live, environment, serving
from tests.structured_output.schemas import Schema, schemas

PAGE = (Path(__file__).parents[1] / "docs/guides/structured-outputs.md").read_text(encoding="utf-8")
HI = [
    {
        "role": "user",
        "content": "Tell me about a dog, its name, its age, and who its friends in the village were, please.",
    }
]
SCHEMA: Schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "dog", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("structured"), "--dtype", "float32", "--max-num-seqs", "16") as live:
        yield live


def chat(live: Live, **body: Any) -> Any:
    ask: dict[str, Any] = {"model": "embedded", "messages": HI, "max_tokens": 200, "seed": 3, **body}
    return live.openai.chat.completions.create(**ask)


def valid(text: str | None, schema: Schema = SCHEMA) -> Any:
    value = json.loads(text or "")
    Draft202012Validator(schema).validate(value)
    return value


# ---------------------------------------------------------------- the page


def example(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert found, name
    return found[1]


def shown(live: Live, name: str) -> dict[str, Any]:
    code = example(name).replace("http://127.0.0.1:8000", live.url)
    done = subprocess.run(["bash", "-euc", code], capture_output=True, text=True, env=environment(), check=True)
    choice: dict[str, Any] = json.loads(done.stdout)["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    return choice


def test_the_examples_of_the_page_work_as_printed(live: Live) -> None:
    dog = json.loads(shown(live, "schema")["message"]["content"])
    assert set(dog) == {"name", "age", "colour"}
    assert shown(live, "choice")["text"] in ("happy", "sad", "very tired")
    assert re.fullmatch(r"\d{3}-\d{4}", shown(live, "regex")["text"])
    assert re.fullmatch(r"\d{1,2}( [+-] \d{1,2}){1,3}", shown(live, "grammar")["text"])


def test_the_offline_example_prints_one_of_its_choices() -> None:
    with redirect_stdout(io.StringIO()) as said:
        exec(compile(example("offline"), "offline", "exec"), {})
    assert said.getvalue().strip() in ("yes", "no")


# ---------------------------------------------------------------- what it composes with


def test_schemas_of_every_category_validate_when_streamed_in_a_crowd(live: Live) -> None:
    asked = schemas(1)

    async def story() -> list[tuple[str, str | None]]:
        async with httpx.AsyncClient(base_url=live.url, timeout=1200, trust_env=False) as http:

            async def one(schema: Schema) -> tuple[str, str | None]:
                body = {"prompt": "Once upon a time: ", "max_tokens": 400, "seed": 9, "temperature": 1, "stream": True}
                text, finish = "", None
                async with http.stream("POST", "/v1/completions", json={**body, "guided_json": schema}) as response:
                    assert response.status_code == 200, await response.aread()
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            [choice] = json.loads(line[6:])["choices"]
                            text, finish = text + choice["text"], choice["finish_reason"]
                return text, finish

            return await asyncio.gather(*(one(schema) for _, schema in asked))

    for (name, schema), (text, finish) in zip(asked, asyncio.run(story()), strict=True):
        assert finish == "stop", (name, text)
        valid(text, schema)
    live.settled()


def test_seeds_choices_logprobs_and_streams_say_the_same(live: Live) -> None:
    whole = chat(live, n=3, response_format=FORMAT, logprobs=True, top_logprobs=2, temperature=1.2)
    assert [c.finish_reason for c in whole.choices] == ["stop"] * 3
    texts = [c.message.content for c in whole.choices]
    assert len({str(valid(text)) for text in texts}) > 1
    for choice in whole.choices:
        told = choice.logprobs.content
        assert "".join(t.token for t in told).startswith(choice.message.content)
    pieces = ["", "", ""]
    for chunk in chat(live, n=3, response_format=FORMAT, stream=True, temperature=1.2):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert pieces == texts
    again = chat(live, n=3, response_format=FORMAT, temperature=1.2)
    assert [c.message.content for c in again.choices] == texts, "and with the prompt's pages cached"
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_a_stop_string_within_the_structure_ends_the_answer(live: Live) -> None:
    answer = chat(live, response_format=FORMAT, stop=['"age"'], temperature=0).choices[0]
    assert answer.finish_reason == "stop" and answer.message.content.startswith('{"name"')
    assert '"age"' not in answer.message.content


def test_max_tokens_cuts_a_right_beginning(live: Live) -> None:
    answer = chat(live, response_format=FORMAT, max_tokens=4, temperature=0).choices[0]
    assert answer.finish_reason == "length" and '{"name"'.startswith(answer.message.content[:7])


def test_an_answer_under_pressure_is_the_quiet_one(tmp_path: Path, live: Live) -> None:
    """Few blocks, so that rows are preempted and opened again in the middle of a structure."""

    def ask(where: Live, i: int) -> dict[str, Any]:
        body = {"prompt": f"Animal number {i}: ", "max_tokens": 80, "temperature": 0, "seed": i}
        guided = {"type": "array", "items": SCHEMA, "minItems": 3, "maxItems": 4}
        answer = where.http.post("/v1/completions", json={**body, "guided_json": guided})
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    async def crowd(where: Live) -> list[Any]:
        return await asyncio.gather(*(asyncio.to_thread(ask, where, i) for i in range(8)))

    with serving(
        tmp_path, "--dtype", "float32", "--num-gpu-blocks-override", "24", "--pressure-policy", "preempt"
    ) as tight:
        pressed = asyncio.run(crowd(tight))
        assert tight.stats()["cache"]["pressure_events"] > 0
        tight.settled()
    with ThreadPoolExecutor(4) as threads:
        quiet = list(threads.map(lambda i: ask(live, i), range(8)))
    assert [p["text"] for p in pressed] == [q["text"] for q in quiet]
    assert quiet[0]["text"] == ask(live, 0)["text"]


# ---------------------------------------------------------------- what must not hurt anybody

HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": {"type": "strng"}}, "guided_json"),
    ({"guided_json": {"not": {}}}, "guided_json"),
    ({"response_format": {"type": "json_schema", "schema": {"$ref": "https://example.com/a"}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "schema": {"$ref": "file:///etc/passwd"}}}, "response_format"),
    ({"guided_json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "guided_json"),
    ({"guided_regex": "(a{1000}){1000}"}, "guided_regex"),
    ({"guided_regex": "(" * 9000}, "guided_regex"),
    ({"guided_regex": "(?=a)b"}, "guided_regex"),
    ({"guided_grammar": 'start: start "a"'}, "guided_grammar"),
    ({"guided_grammar": "root ::= " + "(" * 9000}, "guided_grammar"),
    ({"guided_grammar": "%import a.b"}, "guided_grammar"),
    ({"guided_choice": ["yes"], "allowed_token_ids": [5]}, "guided_choice"),
    ({"guided_choice": ["yes"], "bad_words": ["y", "ye", "yes", "s"], "allowed_token_ids": [5]}, "guided_choice"),
    ({"guided_json": "[" * 100_000}, "guided_json"),
    ({"guided_regex": "x" * 263_000}, "guided_regex"),
]


@pytest.mark.parametrize("streamed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_hostile_structures_cost_their_senders_only(live: Live, streamed: int) -> None:
    """Every second one is streamed: it is refused before an answer begins in either form."""
    ask = {"prompt": "The dog", "temperature": 0, "max_tokens": 60}
    quiet = live.http.post("/v1/completions", json=ask).json()["choices"][0]["text"]

    async def story() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=live.url, timeout=600, trust_env=False) as http:
            normal = [http.post("/v1/completions", json=ask) for _ in range(8)]
            bad = [
                http.post("/v1/completions", json={**ask, "stream": at % 2 == streamed, **body})
                for at, (body, _) in enumerate(HOSTILE)
            ]
            return await asyncio.gather(*normal, *bad)

    answers = asyncio.run(story())
    for answer in answers[:8]:
        assert answer.json()["choices"][0]["text"] == quiet
    for answer, (body, param) in zip(answers[8:], HOSTILE, strict=True):
        assert answer.status_code == 400, (str(body)[:80], answer.text[:200])
        error = answer.json()["error"]
        assert error["param"] == param and len(error["message"]) < 700 and not re.search(r"/\w+/\w+/", error["message"])
    live.settled()


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
)


def test_offline_conversations_are_bound_after_their_thoughts(tmp_path: Path) -> None:
    template = tmp_path / "thinks.jinja"
    template.write_text(TEMPLATE)
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="[0-9]{5}"), max_tokens=30, temperature=0.0
    )
    with LLM(chat_template=str(template)) as llm:

        def bound(text: str) -> bool:
            return re.fullmatch("[0-9]{5}", text) is not None

        off = {"enable_thinking": False}
        assert not bound(llm.chat(HI, params, use_tqdm=False)[0].outputs[0].text)
        assert bound(llm.chat(HI, params, chat_template_kwargs=off, use_tqdm=False)[0].outputs[0].text)
        assert not bound("".join(llm.stream_chat(HI, params)))
        assert bound("".join(llm.stream("the", params))), "a raw prompt has no thoughts"
        several = [params, replace(params, structured_outputs=None)]
        with_both = llm.chat([HI, HI], several, chat_template_kwargs=off, use_tqdm=False)
        assert [bound(one.outputs[0].text) for one in with_both] == [True, False]
        goes_on = [*HI, {"role": "assistant", "content": "<think>Well.</think>So: "}]
        said = llm.chat(goes_on, params, add_generation_prompt=False, continue_final_message=True, use_tqdm=False)
        assert bound(said[0].outputs[0].text)
