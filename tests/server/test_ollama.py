"""Ollama's API: chat, generate, embed, the lists of models, and what is refused with something to do instead."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.errors import Unavailable
from quire.server.error_responses import OLLAMA_PATHS
from quire.server.limits import Limits
from quire.server.ollama import OPTION_HINTS, REFUSED_OPTIONS, Options, read_options
from quire.weights.details import ModelDetails
from tests.expected import check
from tests.frontend.ports import FakePort
from tests.server.doubles import ANSWER, HI, TOKENIZER, Served, answers, served
from tests.server.exchanges import Exchange, written
from tests.server.test_exchanges import CALLS, THOUGHTS, TOOLS, expected, posts
from tests.server.test_infill import NAMES, filling

pytestmark = pytest.mark.anyio


def talk(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
EVERY_OPTION = {
    "num_keep": 5,
    "seed": 42,
    "num_predict": 100,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repeat_last_n": 64,
    "temperature": 0.8,
    "repeat_penalty": 1.2,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.0,
    "mirostat": 0,
    "mirostat_tau": 0.8,
    "mirostat_eta": 0.6,
    "penalize_newline": True,
    "stop": ["\n", "user:"],
    "numa": False,
    "num_ctx": 1024,
    "num_batch": 2,
    "num_gpu": 1,
    "main_gpu": 0,
    "low_vram": False,
    "vocab_only": False,
    "use_mmap": True,
    "use_mlock": False,
    "num_thread": 8,
}
TOOL_TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "q"},
    {
        "role": "assistant",
        "content": "",
        "thinking": "hm",
        "tool_calls": [
            {"function": {"name": "now", "arguments": {"a": 1}}},
            {"function": {"name": "weather", "arguments": {}}},
        ],
    },
    {"role": "tool", "content": "warm", "tool_name": "weather"},
    {"role": "tool", "content": "noon"},
]

CHATS: dict[str, dict[str, Any]] = {
    "plain": talk("Hello 😀"),
    "streamed as asked": talk("a dog", stream=True),
    "whole": talk("a dog", stream=False),
    "calls": talk(CALLS, tools=TOOLS),
    "calls, whole": talk(CALLS, tools=TOOLS, stream=False),
    "calls without an object": talk('<tool_call>\n{"name": "now", "arguments": 3}\n</tool_call>', tools=TOOLS),
    "results of calls": {"messages": TOOL_TALK, "tools": TOOLS, "stream": False},
    "every option": talk("a dog", stream=False, options=EVERY_OPTION, keep_alive="5m"),
    "as many as there are": talk("a dog", stream=False, options={"num_predict": -1, "seed": -1}),
    "numbers that are all floats": talk("a dog and a boat", stream=False, options={"num_predict": 2.0, "top_k": 5.0}),
    "any json": talk('{"a": 1}', format="json", stream=False),
    "a schema": talk('{"age": 1}', format=SCHEMA, stream=False),
    "no format": talk("a dog", format="", stream=False),
    "a stop string": talk("one two three", options={"stop": "two"}),
    "scores": talk("a dog", logprobs=True, top_logprobs=1, options={"num_predict": 2}),
    "scores, whole": talk("a dog", logprobs=True, stream=False, options={"num_predict": 1}),
    "a beginning to go on from": {
        "messages": [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "well,"}],
        "stream": False,
    },
    "nothing: the model is loaded": {"model": "tiny"},
    "nothing, whole": {"model": "tiny", "messages": [], "stream": False, "keep_alive": 0},
    "no thoughts wanted": talk("a dog", think=False, stream=False),
}

GENERATES: dict[str, dict[str, Any]] = {
    "plain": {"model": "tiny:latest", "prompt": "a dog"},
    "with a system message": {"prompt": "a dog", "system": "be brief", "stream": False},
    "going on": {"prompt": "a boat", "context": [5, 9, 1], "stream": False},
    "raw": {"prompt": "say a dog", "raw": True},
    "raw, whole, with scores": {"prompt": "say a dog", "raw": True, "stream": False, "logprobs": True},
    "harmless values": {
        "prompt": "a dog",
        "stream": False,
        "suffix": "",
        "system": "",
        "template": "",
        "images": [],
        "format": "",
        "context": [],
        "raw": False,
        "options": {},
        "truncate": False,
    },
    "nothing: the model is loaded": {"model": "tiny"},
    "nothing, whole": {"prompt": "", "stream": False},
}

REFUSALS: list[tuple[str, Any]] = [
    ("/api/chat", b"{"),
    *(
        ("/api/chat", talk("hi", **more))
        for more in (
            {"model": "huge"},
            {"options": {"temperature": -1}},
            {"options": {"temprature": 1}},
            {"options": {"num_predict": 0}},
            {"options": {"num_predict": 9999}},
            {"options": {"num_predict": 2.5}},
            {"options": {"top_k": "many"}},
            {"options": {"stop": [1]}},
            {"options": {"stop": ["a", "b", "c", "d"]}},
            {"options": {"repeat_penalty": 1.1, "repeat_last_n": -2}},
            {"options": {"repeat_penalty": 0}},
            *({"options": {name: 0.5}} for name in REFUSED_OPTIONS),
            {"options": [1]},
            {"options": {"temperature": 1}, "temperature": 1},
            {"format": "xml"},
            {"format": {"type": "objekt"}},
            {"format": "json", "response_format": {"type": "json_object"}},
            {"think": True},
            {"think": 3},
            {"template": "{{ .Prompt }}"},
            {"truncate": True},
            {"shift": True},
            {"tools": [{"type": "function"}]},
            {"tool": []},
            {"top_logprobs": 2},
            {"messages": [{"role": "user", "content": "what?", "images": ["aGk="]}]},
            {"messages": [{"role": "user", "content": "what?", "images": {}}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            {"messages": [{"role": "user", "text": "a"}]},
            {"messages": [{"content": "a"}]},
            {"messages": [{"role": "robot", "content": "a"}]},
            {"messages": [{"role": "assistant", "tool_calls": {}}]},
            {"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]},
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}]},
        )
    ),
    *(
        ("/api/generate", {"prompt": "hi", **more})
        for more in (
            {"images": ["aGk="]},
            {"raw": True, "system": "s"},
            {"raw": True, "context": [1]},
            {"raw": True, "think": True},
            {"raw": True, "top_logprobs": 1},
            {"suffix": "x"},
            {"suffix": "x", "system": "s"},
            {"context": [1, 9999]},
            {"messages": []},
            {"prompt": ["a"]},
            {"prompt": "a " * 3000},
        )
    ),
    ("/api/embed", {"input": "hi"}),
    ("/api/embed", {"input": 3}),
    ("/api/show", {"model": "huge"}),
    ("/api/show", {"modle": "tiny"}),
]

LISTS: dict[str, Exchange] = {
    "tags": Exchange("/api/tags", method="GET"),
    "ps": Exchange("/api/ps", method="GET"),
    "version": Exchange("/api/version", method="GET"),
    "root": Exchange("/", method="GET"),
    "head": Exchange("/", method="HEAD"),
    "show": Exchange("/api/show", {"model": "tiny"}),
    "show by its tag and older name": Exchange("/api/show", {"name": "tiny:latest", "verbose": True}),
    "pull": Exchange("/api/pull", {"model": "llama3.2"}),
    "pull of what is served": Exchange("/api/pull", {"model": "tiny:latest", "stream": True}),
    "push": Exchange("/api/push", {"model": "llama3.2"}),
    "create": Exchange("/api/create", {"model": "mario", "from": "llama3.2"}),
    "copy": Exchange("/api/copy", {"source": "a", "destination": "b"}),
    "delete": Exchange("/api/delete", {"model": "llama3.2"}, method="DELETE"),
    "another method": Exchange("/api/chat", method="GET"),
}


async def test_chats_are_as_written_down() -> None:
    check(expected("ollama-chat"), await written(posts("/api/chat", CHATS)))


async def test_generated_texts_are_as_written_down() -> None:
    check(expected("ollama-generate"), await written(posts("/api/generate", GENERATES)))


async def test_thoughts_are_as_written_down() -> None:
    about = {"reasoning_parser": "qwen3", "template_arguments": frozenset({"enable_thinking"})}
    wanted: dict[str, dict[str, Any]] = {
        "thoughts": talk(f"<think>{THOUGHTS}"),
        "whole": talk(f"<think>{THOUGHTS}", stream=False),
        "asked for": talk("a dog", think=True, stream=False),
        "none": talk("a dog", think=False, stream=False),
        "a little": talk("a dog", think="low", stream=False),
        "a level that there is not": talk("a dog", think="some"),
    }
    exchanges = posts("/api/chat", wanted)
    exchanges["generate"] = Exchange("/api/generate", {"prompt": f"<think>{THOUGHTS}"})
    check(expected("ollama-thoughts"), await written(exchanges, about=about))


async def test_refusals_are_texts_that_name_the_field_as_written_down() -> None:
    exchanges = {f"{i} {path}": Exchange(path, body) for i, (path, body) in enumerate(REFUSALS)}
    check(expected("ollama-refusals"), await written(exchanges, about={"vocab_size": 512}, room=256))


async def test_models_are_listed_as_written_down() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    about = {"reasoning_parser": "qwen3", "template_arguments": frozenset({"tools"}), "aliases": ("other:7b", "a/b")}
    check(expected("ollama-lists"), await written(LISTS, defaults=defaults, about=about))


def test_every_option_of_ollama_is_known() -> None:
    known = {*Options.__struct_fields__, *OPTION_HINTS, *REFUSED_OPTIONS}
    assert EVERY_OPTION.keys() <= known
    assert read_options(EVERY_OPTION)["max_tokens"] == 100 and read_options(None) == {}
    for name, refusal in REFUSED_OPTIONS.items():
        assert all(read_options({name: value}) == {} for value in refusal.no_op)


async def test_the_example_of_a_shell_works_without_a_content_type_and_a_page_of_another_site_gets_nothing() -> None:
    async with served() as server:
        body = json.dumps(talk("hi")).encode()
        form = {"content-type": "application/x-www-form-urlencoded"}
        assert (await server.client.post("/api/chat", content=body, headers=form)).status_code == 200
        assert (await server.client.post("/api/show", content=b"{}")).status_code == 200
        for field in ({"origin": "http://evil.example"}, {"sec-fetch-site": "same-site"}):
            for path in ("/api/chat", "/api/generate", "/api/embed", "/api/show"):
                refused = await server.client.post(path, content=body, headers=form | field)
                assert refused.status_code == 415 and isinstance(refused.json()["error"], str)


async def test_the_tag_latest_is_taken_everywhere_and_other_tags_are_not() -> None:
    async with served(about={"aliases": ("other:7b",)}) as server:
        for name in ("tiny", "tiny:latest", "other:7b", "other:7b:latest"):
            await server.chat(model=name)
        assert (await server.client.get("/v1/models/tiny:latest")).status_code == 200
        for name in ("tiny:7b", "other", "other:latest", ":latest"):
            assert (await server.post("/api/chat", **talk("hi", model=name))).status_code == 404


async def test_names_without_a_tag_are_listed_with_one() -> None:
    async with served(about={"aliases": ("other:7b", "a/b", "http://x/y")}) as server:
        listed = (await server.client.get("/api/tags")).json()["models"]
    assert [one["name"] for one in listed] == ["tiny:latest", "other:7b", "a/b:latest", "http://x/y:latest"]
    assert len({one["digest"] for one in listed}) == 1, "it is one model"


async def test_the_details_of_the_checkpoint_are_shown_and_read_once() -> None:
    reads = []

    def details() -> ModelDetails:
        reads.append(1)
        return ModelDetails("llama", "gguf", "Q4_K", 4096, 7_600_000_000, 128)

    info = {"chat_template": "TEMPLATE"}
    async with served(details=details, tokenizer_info=info) as server:
        shown = (await server.post("/api/show", model="tiny")).json()
        [listed] = (await server.client.get("/api/tags")).json()["models"]
        [loaded] = (await server.client.get("/api/ps")).json()["models"]
    assert shown["details"] == listed["details"] == loaded["details"]
    assert shown["details"] | {"parent_model": ""} == {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "7.6B",
        "quantization_level": "Q4_K",
    }
    assert shown["model_info"]["general.parameter_count"] == 7_600_000_000
    assert (shown["model_info"]["llama.context_length"], shown["model_info"]["llama.embedding_length"]) == (128, 128)
    assert shown["template"] == "TEMPLATE", "it is shown where /tokenizer_info is"
    assert (listed["size"], loaded["size"], loaded["size_vram"], loaded["context_length"]) == (4096, 4096, 0, 128)
    assert reads == [1]


@pytest.mark.parametrize(("device", "there"), [("cpu", 0), ("cuda", 4096)])
async def test_what_runs_on_a_gpu_says_so(device: str, there: int) -> None:
    port = FakePort(answers)
    port.about = replace(port.about, device=device)
    async with served(port=port, details=lambda: ModelDetails(num_bytes=4096)) as server:
        [loaded] = (await server.client.get("/api/ps")).json()["models"]
    assert loaded["size_vram"] == there


async def test_a_suffix_is_filled_in_before() -> None:
    async with filling() as (server, tokenizer):
        answer = (await server.post("/api/generate", prompt="the dog", suffix="boat", stream=False)).json()
        prefix, suffix, middle = map(tokenizer.id_of, NAMES[:3])
        wanted = (prefix, *tokenizer.encode("the dog"), suffix, *tokenizer.encode("boat"), middle)
        assert answer["response"] == ANSWER and server.port.submitted[-1].prompt == wanted
        assert "insert" in (await server.post("/api/show")).json()["capabilities"]


async def test_a_context_goes_on_from_the_last_answer() -> None:
    async with served(room=400) as server:
        first = (await server.post("/api/generate", prompt="hi", stream=False)).json()
        assert first["context"] == [*server.port.submitted[-1].prompt, *TOKENIZER.encode(ANSWER), 1]
        lines = (await server.post("/api/generate", prompt="and?", context=first["context"])).text.splitlines()
        prompt = server.port.submitted[-1].prompt
        assert list(prompt[: len(first["context"])]) == first["context"]
        assert "and?" in TOKENIZER.decode(prompt[len(first["context"]) :])
        assert json.loads(lines[-1])["context"][: len(prompt)] == list(prompt)


async def test_a_template_that_begins_with_the_begin_token_has_it_once_behind_a_context() -> None:
    async with served(room=400) as server:
        plain = server.backend.tokenizer

        class Beginning:
            def __getattr__(self, name: str) -> Any:
                return getattr(plain, name)

            def encode(self, text: str, **options: Any) -> tuple[int, ...]:
                return (7, *plain.encode(text, **options))

        server.backend.tokenizer = Beginning()  # type: ignore[assignment]
        await server.post("/api/generate", prompt="hi", context=[7, 8, 9], stream=False)
        assert list(server.port.submitted[-1].prompt[:3]) == [7, 8, 9] and 7 not in server.port.submitted[-1].prompt[3:]


def pooling() -> FakePort:
    port = FakePort(answers)
    port.about = replace(port.about, supports_pooling=True)
    return port


@pytest.mark.parametrize(
    ("path", "body", "vectors"),
    [
        ("/api/embed", {"input": "hi"}, lambda answer: answer["embeddings"]),
        ("/api/embed", {"input": ["hi", "you"]}, lambda answer: answer["embeddings"]),
        ("/api/embed", {"input": "the " * 300, "truncate": True}, lambda answer: answer["embeddings"]),
        ("/api/embed", {}, lambda answer: answer["embeddings"]),
        ("/api/embeddings", {"prompt": "hi"}, lambda answer: [answer["embedding"]]),
    ],
)
async def test_texts_become_vectors(
    path: str, body: dict[str, Any], vectors: Callable[[Any], list[list[float]]]
) -> None:
    async with served(port=pooling()) as server:
        answer = await server.post(path, model="tiny", **body)
        assert answer.status_code == 200, answer.text
        texts = body.get("input", body.get("prompt", []))
        asked = [texts] if isinstance(texts, str) else texts
        found = vectors(answer.json())
        assert len(found) == len(asked) == len(server.port.submitted)
        plain = await server.post("/v1/embeddings", input=["hi", "you"])
        numbers = [one["embedding"] for one in plain.json()["data"]]
        for vector, other in zip(found, numbers, strict=False):
            ratio = np.linalg.norm(vector) if path == "/api/embeddings" else 1
            np.testing.assert_allclose(vector, np.multiply(other, ratio), rtol=1e-5)
        if path == "/api/embed":
            assert answer.json()["prompt_eval_count"] == sum(
                len(one.prompt) for one in server.port.submitted[: len(asked)]
            )


async def test_a_text_that_is_too_long_for_a_vector_is_cut_only_when_that_is_asked_for() -> None:
    async with served(port=pooling()) as server:
        for more in ({}, {"truncate": False}):
            refused = await server.post("/api/embed", input="the " * 300, **more)
            assert refused.status_code == 400 and "128" in refused.json()["error"]
        assert (await server.post("/api/embed", input="the " * 300, truncate=True)).json()["prompt_eval_count"] == 127


async def test_a_silent_stream_sends_lines_that_clients_can_read() -> None:
    async with served(None, limits=Limits(keep_alive=0.01)) as server:
        pending = asyncio.ensure_future(server.post("/api/chat", **talk("hi")))
        while not server.port.submitted:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        server.port.say(server.port.submitted[-1], *TOKENIZER.encode("a dog"), 1, finish="stop", stop_token=1)
        lines = [json.loads(line) for line in (await pending).text.splitlines()]
    silent = [line for line in lines if not line["message"]["content"] and not line["done"]]
    assert silent and silent[0]["message"] == {"role": "assistant", "content": ""}
    assert "".join(line["message"]["content"] for line in lines) == "a dog" and lines[-1]["done"]


async def test_an_error_in_the_middle_of_a_stream_is_its_last_line() -> None:
    async with served(None) as server:
        pending = asyncio.ensure_future(server.post("/api/chat", **talk("hi")))
        while not server.port.submitted:
            await asyncio.sleep(0)
        server.port.say(server.port.submitted[-1], *TOKENIZER.encode("a"))
        await asyncio.sleep(0)
        server.backend._on_death("it died")
        lines = [json.loads(line) for line in (await pending).text.splitlines()]
    assert lines[0]["message"]["content"] == "a"
    assert list(lines[-1]) == ["error"] and "it died" in lines[-1]["error"]


async def test_while_there_is_no_engine_nothing_is_loaded(server: Served) -> None:
    server.backend._draining = True
    refused = await server.post("/api/generate", model="tiny")
    assert refused.status_code == Unavailable.status and "shutting down" in refused.json()["error"]


@pytest.fixture
async def server() -> Any:
    async with served() as made:
        yield made


async def test_every_path_needs_the_key(server: Served) -> None:
    async with served(api_keys=("k",)) as guarded:
        for path in ("/", *OLLAMA_PATHS):
            refused = await guarded.client.get(path)
            assert refused.status_code == 401
            assert isinstance(refused.json()["error"], dict if path == "/" else str)
        key = {"authorization": "Bearer k"}
        assert (await guarded.client.post("/api/chat", json=talk("hi"), headers=key)).status_code == 200


async def test_a_browser_is_led_to_the_page_with_or_without_a_key() -> None:
    for keys in ((), ("k",)):
        async with served(api_keys=keys) as made:
            shown = await made.client.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
            assert (shown.status_code, shown.headers["location"]) == (307, "ui")
            assert (await made.client.get("/ui")).status_code == 200


async def test_the_counts_add_up_and_the_times_are_in_nanoseconds(server: Served) -> None:
    answer = (await server.post("/api/chat", messages=HI, stream=False)).json()
    assert answer["prompt_eval_count"] == len(server.port.submitted[-1].prompt)
    assert answer["eval_count"] == len(TOKENIZER.encode(ANSWER)) + 1
    spent = answer["prompt_eval_duration"] + answer["eval_duration"]
    assert 0 < spent <= answer["total_duration"] + 10_000_000 and answer["load_duration"] == 0
