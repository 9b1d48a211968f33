"""`cache_control` on every API: which prefix is pinned, what the usage says of it, and times in answers."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from tests.server.doubles import HI, TOKENIZER, check_error, events, served
from tests.server.engine_port import EnginePort

pytestmark = pytest.mark.anyio

SHORT, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
SYSTEM = "Be kind and read the file. " * 6
ASK = {"role": "user", "content": "hi"}


def length(*messages: tuple[str, str], begun: bool = False) -> int:
    """Tokens of messages by the template."""
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return len(TOKENIZER.encode(text + "<|im_start|>assistant\n" * begun, add_special_tokens=False))


ONE, TWO = length(("system", SYSTEM)), length(("system", SYSTEM), ("user", "hi"), ("assistant", "yes"))
WHOLE = length(("system", SYSTEM), ("user", "hi"), ("assistant", "yes"), ("user", "hi"), begun=True)


def block(text: str, mark: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": text} | ({} if mark is None else {"cache_control": mark})


def talk(system: Any, assistant: Any = "yes", last: Any = "hi") -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": system},
        ASK,
        {"role": "assistant", "content": assistant},
        {"role": "user", "content": last},
    ]


MARKED: list[tuple[dict[str, Any], list[tuple[int, float]]]] = [
    ({"messages": talk(SYSTEM)}, []),
    ({"messages": talk(SYSTEM), "cache_control": SHORT}, [(WHOLE, 300)]),
    ({"messages": talk(SYSTEM), "cache_control": LONG}, [(WHOLE, 3600)]),
    ({"messages": talk([block(SYSTEM, SHORT)])}, [(ONE, 300)]),
    ({"messages": talk(SYSTEM, [block("yes", SHORT)])}, [(TWO, 300)]),
    ({"messages": talk([block(SYSTEM, SHORT)], [block("yes", LONG)])}, [(TWO, 3600)]),
    ({"messages": talk([block(SYSTEM, LONG)], last=[block("hi", SHORT)])}, [(WHOLE, 300), (ONE, 3600)]),
    ({"messages": talk([block(SYSTEM, SHORT)], [block("yes", SHORT)], [block("hi", SHORT)])}, [(WHOLE, 300)]),
    ({"messages": [ASK | {"cache_control": LONG}, *talk(SYSTEM)[2:]]}, [(length(("user", "hi")), 3600)]),
]


@pytest.mark.parametrize(("body", "pins"), MARKED)
async def test_marks_of_a_conversation_pin_what_comes_before(
    body: dict[str, Any], pins: list[tuple[int, float]]
) -> None:
    async with served(room=1024) as server:
        await server.chat(**body, max_tokens=8)
        assert [tuple(pin) for pin in server.port.submitted[-1].pins] == pins


async def test_anthropics_marks_mean_the_same() -> None:
    tool = {"name": "read", "input_schema": {"type": "object"}}
    messages = talk("")[1:]
    bodies: list[tuple[dict[str, Any], list[tuple[int, float]]]] = [
        ({"system": [block(SYSTEM, SHORT)]}, [(ONE, 300)]),
        ({"system": [block("a", SHORT), block("b", LONG)]}, [(length(("system", "a\nb")), 3600)]),
        ({"system": SYSTEM, "cache_control": LONG}, [(WHOLE, 3600)]),
        (
            {"system": SYSTEM, "messages": [*messages[:2], {"role": "user", "content": [block("hi", SHORT)]}]},
            [(WHOLE, 300)],
        ),
    ]
    async with served(room=1024) as server:
        for fields, pins in bodies:
            made = await server.post("/v1/messages", **{"messages": messages, "max_tokens": 8} | fields)
            assert made.status_code == 200, made.text
            assert [tuple(pin) for pin in server.port.submitted[-1].pins] == pins
        result = {"type": "tool_result", "tool_use_id": "x", "content": "ok", "cache_control": SHORT}
        call = {"type": "tool_use", "id": "x", "name": "read", "input": {}, "cache_control": LONG}
        for marked, count in (([call], 1), ([result], 1)):
            role = "assistant" if marked[0] is call else "user"
            asked = [ASK, {"role": role, "content": marked}, *([ASK] if role == "assistant" else [])]
            await server.post("/v1/messages", messages=asked, max_tokens=8, tools=[tool])
            assert len(server.port.submitted[-1].pins) == count
        await server.post("/v1/messages", messages=messages, max_tokens=8, tools=[tool | {"cache_control": SHORT}])
        [pin] = server.port.submitted[-1].pins
        shown = TOKENIZER.decode(server.port.submitted[-1].prompt[: pin.tokens])
        assert shown.endswith("hi<|im_end|>\n") and pin.tokens < len(server.port.submitted[-1].prompt)


WHOLES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the dog", "max_tokens": 8},
    "/v1/responses": {"input": "hi", "max_output_tokens": 8},
    "/v1/generate": {"prompt": "the dog"},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 8},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
    "/api/chat": {"messages": HI, "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
}


@pytest.mark.parametrize("path", WHOLES)
async def test_a_mark_of_the_request_pins_its_whole_prompt(path: str) -> None:
    async with served(api_keys=("one", "two"), headers={"authorization": "Bearer two"}) as server:
        made = await server.post(path, **WHOLES[path], cache_control=LONG)
        assert made.status_code == 200, made.text
        [request] = server.port.submitted
        assert [tuple(pin) for pin in request.pins] == [(len(request.prompt), 3600.0)] and request.owner == "1"
        for mark, says in (
            ({"type": "forever"}, "type must be ephemeral"),
            ({"type": "ephemeral", "ttl": "1y"}, "ttl must be 5m or 1h"),
            ({"type": "ephemeral", "ttl": 3}, "ttl must be 5m or 1h"),
            ({"type": "ephemeral", "seconds": 3}, "unknown field 'cache_control.seconds'"),
            (5, "cache_control"),
        ):
            refused = await server.post(path, **WHOLES[path], cache_control=mark)
            assert refused.status_code == 400 and says in refused.text, refused.text


@pytest.mark.parametrize("where", ["message", "part", "tool"])
async def test_a_mark_that_is_none_is_refused_where_it_stands(where: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    body: dict[str, Any] = {"messages": messages}
    if where == "tool":
        body["tools"] = [{"type": "function", "function": {"name": "f"}, "cache_control": {"type": "x"}}]
    elif where == "part":
        messages[0]["content"] = [block("hi", {"type": "x"})]
    else:
        messages[0]["cache_control"] = {"type": "x"}
    async with served() as server:
        param = "tools" if where == "tool" else "messages"
        check_error(await server.post("/v1/chat/completions", **body), 400, param, "[0].cache_control.type must be")
        assert server.port.submitted == []


BAD = {"type": "ephemeral", "ttl": "2h"}
CALLED = {"type": "function_call_output", "call_id": "a"}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "warm"}
NAMED: list[tuple[str, dict[str, Any], str]] = [
    (
        "/v1/chat/completions",
        {"messages": [*HI, {"role": "user", "content": [block("hi", BAD)]}]},
        "messages[1].content[0]",
    ),
    ("/v1/chat/completions", {"messages": HI, "cache_control": BAD}, ""),
    (
        "/v1/responses",
        {"input": [ASK, {"role": "user", "content": [{**block("hi", BAD), "type": "input_text"}]}]},
        "input[1].content[0]",
    ),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x", "cache_control": BAD}]}]},
        "input[0].content[0]",
    ),
    (
        "/v1/responses",
        {"instructions": "be", "input": [{**CALLED, "output": [{**block("hi", BAD), "type": "input_text"}]}]},
        "input[0].output[0]",
    ),
    ("/v1/messages", {"system": [block("be", SHORT), block("be", BAD)], "messages": HI}, "system[1]"),
    (
        "/v1/messages",
        {"system": "be", "messages": [*HI, {"role": "user", "content": [block("hi", BAD)]}]},
        "messages[1].content[0]",
    ),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{**RESULT, "cache_control": BAD}]}]},
        "messages[0].content[0]",
    ),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{**RESULT, "content": [block("a", BAD)]}]}]},
        "messages[0].content[0].content[0]",
    ),
    ("/v1/messages", {"messages": HI, "tools": [{"name": "f", "input_schema": {}, "cache_control": BAD}]}, "tools[0]"),
]


@pytest.mark.parametrize(("path", "body", "where"), NAMED)
async def test_a_mark_that_is_wrong_is_named_as_the_client_sent_it(path: str, body: dict[str, Any], where: str) -> None:
    """System messages and results of tools become messages of their own, which the client did not number."""
    most = {} if path == "/v1/responses" else {"max_tokens": 8}
    async with served(room=2000) as server:
        refused = await server.post(path, **body, **most)
        named = f"{where}.cache_control" if where else "cache_control"
        assert refused.status_code == 400 and f"{named}.ttl must be 5m or 1h" in refused.text, refused.text
        assert server.port.submitted == []


async def test_the_prefix_of_a_prompt_that_is_cut_and_of_a_template_that_refuses_it_alone() -> None:
    picky = "{% if messages|length < 2 %}{{ raise_exception('no') }}{% endif %}"
    picky += "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    async with served(template=picky) as server:
        await server.chat(messages=[{"role": "system", "content": [block("be", SHORT)]}, ASK], max_tokens=8)
        [request] = server.port.submitted
        assert request.pins == ((len(request.prompt), 300.0),)
        await server.chat(messages=[*HI, ASK], max_tokens=8, truncate_prompt_tokens=2, cache_control=SHORT)
        assert server.port.submitted[-1].pins == ()


async def test_what_anthropics_usage_counts_adds_up_to_the_prompt() -> None:
    port = EnginePort(pins=500)
    marked = [block(SYSTEM, LONG)]
    async with served(port=port, room=2000) as server:
        turns = []
        messages: list[dict[str, Any]] = []
        for turn in range(3):
            said = "read the file and tell me " * (turn + 2)
            messages = [*messages, {"role": "user", "content": [block(said, SHORT)]}]
            made = await server.post("/v1/messages", system=marked, messages=messages, max_tokens=8, seed=1)
            assert made.status_code == 200, made.text
            turns.append(made.json()["usage"])
            messages += [{"role": "assistant", "content": "yes"}]
        prompts = [len(request.prompt) for request in port.submitted]
        blocks = [count // 16 * 16 for count in prompts]
        assert [usage["cache_read_input_tokens"] for usage in turns] == [0, *(blocks[i] for i in range(2))]
        created = [usage["cache_creation_input_tokens"] for usage in turns]
        assert created == [blocks[0], blocks[1] - blocks[0], blocks[2] - blocks[1]]
        assert [sum(u[k] for k in u if k.endswith("input_tokens")) for u in turns] == prompts
        longs = [usage["cache_creation"]["ephemeral_1h_input_tokens"] for usage in turns]
        assert longs == [ONE // 16 * 16, 0, 0]
        for usage, count in zip(turns, created, strict=True):
            assert sum(usage["cache_creation"].values()) == count
        assert port.counts()["quire:pinned_pages"] == blocks[2] // 16
        port.clock.time += 400
        plain = await server.chat(messages=[ASK], max_tokens=2)
        assert "pinned_tokens" not in plain["usage"]["prompt_tokens_details"]
        counts = port.counts()
        assert counts["quire:pinned_pages"] == ONE // 16
        assert counts["quire:pins_ended"] == {"expired": (blocks[2] - longs[0]) // 16, "displaced": 0, "evicted": 0}


async def test_a_bound_that_is_reached_shows_in_the_usage_of_every_api() -> None:
    port = EnginePort(pins=2)
    async with served(port=port, room=2000) as server:
        chat = await server.chat(messages=talk(SYSTEM), cache_control=SHORT, max_tokens=4, n=2)
        written = WHOLE // 16 * 16
        details = {"cached_tokens": 0, "cache_write_tokens": written, "created_cache_tokens": written}
        assert chat["usage"]["prompt_tokens_details"] == {**details, "pinned_tokens": 32}
        made = await server.post("/v1/responses", input=SYSTEM * 2, cache_control=SHORT, max_output_tokens=4)
        assert made.json()["usage"]["input_tokens_details"]["pinned_tokens"] == 32
        done = await server.complete(prompt=[SYSTEM, SYSTEM * 2], cache_control=SHORT, max_tokens=4)
        assert done["usage"]["prompt_tokens_details"]["pinned_tokens"] <= 64
        assert port.counts()["quire:pinned_pages"] == 2 and port.counts()["quire:pins_refused"] > 0


# ---------------------------------------------------------------- times

FIELDS = ["queue_ms", "first_token_ms", "total_ms", "cache_n", "prompt_n", "prompt_ms", "prompt_per_second"]
FIELDS += ["predicted_n", "predicted_ms", "predicted_per_second"]


def timings_in(value: Any) -> list[dict[str, Any]]:
    """All `timings` anywhere in an answer."""
    if isinstance(value, list):
        return list(itertools.chain.from_iterable(map(timings_in, value)))
    if not isinstance(value, dict):
        return []
    own = [value["timings"]] if "timings" in value else []
    return own + [found for name, one in value.items() if name != "timings" for found in timings_in(one)]


def parsed(path: str, text: str) -> list[Any]:
    """The events, or the lines, of a stream."""
    if path.startswith("/api"):
        return [json.loads(line) for line in text.splitlines()]
    if path in ("/v1/messages", "/v1/responses"):
        return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    return list(events(text))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", WHOLES)
async def test_times_are_in_the_answer_if_they_are_asked_for(path: str, stream: bool) -> None:
    if path == "/v1/generate" and stream:
        return
    asked = WHOLES[path] | ({} if path == "/v1/generate" else {"stream": stream})
    async with served(port=EnginePort(), room=2000) as server:
        for wanted in (True, False):
            made = await server.post(path, **asked, return_timings=wanted)
            assert made.status_code == 200, made.text
            answer = parsed(path, made.text) if stream else [made.json()]
            found = timings_in(answer)
            assert len(found) == wanted
            for times in found:
                assert list(times) == FIELDS
                assert times["prompt_n"] + times["cache_n"] == len(server.port.submitted[-1].prompt)
                assert times["predicted_n"] >= 1 and times["prompt_ms"] == 250.0 and times["queue_ms"] >= 0
                assert times["total_ms"] >= times["first_token_ms"] >= 0
        if stream and path == "/v1/chat/completions":
            assert timings_in(answer[:-2]) == [], "only the last chunk of a choice has them"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_each_choice_has_times_of_its_own(path: str, stream: bool) -> None:
    port = EnginePort(max_num_seqs=1)
    several = {"prompt": ["the dog", "a boat"]} if path == "/v1/completions" else {"messages": HI}
    async with served(port=port, room=2000) as server:
        made = await server.post(path, **several, max_tokens=3, n=2, seed=1, stream=stream, return_timings=True)
        assert made.status_code == 200, made.text
        chunks = parsed(path, made.text) if stream else [made.json()]
        found = {one["index"]: one["timings"] for chunk in chunks for one in chunk["choices"] if "timings" in one}
        assert len(found) == (4 if path == "/v1/completions" else 2)
        queued = [found[index]["queue_ms"] for index in sorted(found)]
        assert queued == sorted(queued) and queued[0] < queued[-1], "one after the other"


async def test_times_of_an_answer_that_got_no_place_are_unknown() -> None:
    port = EnginePort()
    port._go = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
    async with served(port=port, room=2000) as server:
        asked = asyncio.ensure_future(server.post("/v1/chat/completions", messages=HI, return_timings=True))
        while not port.submitted:
            await asyncio.sleep(0)
        [live] = server.backend._requests
        server.backend.end(live, "abort")
        [times] = timings_in((await asked).json())
        assert {name for name in FIELDS if times[name] is None} == {
            *("queue_ms", "first_token_ms", "prompt_ms", "prompt_per_second", "predicted_ms", "predicted_per_second"),
        }
