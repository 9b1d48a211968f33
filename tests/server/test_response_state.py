"""Responses with state over a scripted engine, as OpenAI's client sees them."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from quire.frontend.offload import LARGE
from quire.server import response_state
from quire.server.access import Keys
from quire.server.app import create_app
from quire.server.limits import Limits
from quire.server.response_state import ResponseState
from quire.server.response_store import Content, Entry, ResponseStore
from tests.frontend.ports import FakePort
from tests.server.doubles import ANSWER, TOKENIZER, Served, check_error, says, served
from tests.server.test_responses import TOOLS
from tests.server.test_tools import CALLS, KNOWS, QWEN, THOUGHT, speaking

pytestmark = pytest.mark.anyio

# Shows every part of a conversation that items can carry.
SHOWS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}"
)


class Stateful:
    """A server with stored responses, and clients of it."""

    def __init__(self, server: Served, state: ResponseState, store: ResponseStore, keys: tuple[str, ...]) -> None:
        self.server, self.state, self.store = server, state, store
        self._limits = Limits()
        self.app = create_app(server.backend, keys=Keys(keys, salt=store.salt), limits=state._limits, state=state)

    def client(self, key: str = "k") -> AsyncOpenAI:
        http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://server")
        return AsyncOpenAI(api_key=key, base_url="http://server/v1", http_client=http, max_retries=0)

    async def ask(self, method: str, path: str, key: str = "k", **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers) as http:
            return await http.request(method, path, json=body or None)

    def prompt(self) -> str:
        """The text of the last prompt."""
        return TOKENIZER.decode(self.server.port.submitted[-1].prompt)


@asynccontextmanager
async def stateful(
    *args: Any,
    keys: tuple[str, ...] = (),
    folder: Path | None = None,
    most: int = 1000,
    most_bytes: int = 128 << 20,
    limits: Limits | None = None,
    **options: Any,
) -> AsyncIterator[Stateful]:
    limits = Limits() if limits is None else limits
    async with served(*args, limits=limits, **{"room": 4096, **options}) as server:
        observer = server.backend.observer
        store = ResponseStore(most, most_bytes, folder, observer)
        state = ResponseState(store, limits)
        try:
            yield Stateful(server, state, store, keys)
        finally:
            await state.stop()


@pytest.fixture(params=["memory", "folder"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "state" if request.param == "folder" else None


def slow() -> FakePort:
    """An engine that waits for `stepping`."""
    port = FakePort(lambda request: says(ANSWER), max_model_len=4096)
    port.stepping.clear()
    return port


# ---------------------------------------------------------------- stored, fetched, deleted


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_fetched_as_it_was_answered(folder: Path | None, stream: bool) -> None:
    async with stateful(speaking(CALLS), template=KNOWS, folder=folder) as here:
        client = here.client()
        made: Any = await client.responses.create(
            model="tiny", input="hi", tools=TOOLS, metadata={"a": "b"}, stream=stream
        )
        if stream:
            made = [event async for event in made][-1].response
        assert made.store is True and made.metadata == {"a": "b"}
        fetched: Any = await client.responses.retrieve(made.id)
        assert fetched.to_dict() == made.to_dict()
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
        assert len(here.store) == here.store.bytes == 0


async def test_what_is_not_to_be_stored_is_not(folder: Path | None) -> None:
    async with stateful(folder=folder) as here:
        client = here.client()
        made: Any = await client.responses.create(model="tiny", input="hi", store=False)
        assert made.store is False
        with pytest.raises(openai.NotFoundError, match="store: false"):
            await client.responses.retrieve(made.id)
        assert len(here.store) == 0


async def test_a_server_that_stores_nothing_says_so() -> None:
    async with stateful(most=0) as here:
        made: Any = await here.client().responses.create(model="tiny", input="hi", store=True)
        assert made.store is False
        for field in ({"previous_response_id": made.id}, {"background": True}):
            refused = await here.ask("POST", "/v1/responses", model="tiny", input="hi", **field)
            check_error(refused, 400, next(iter(field)), "this server stores no responses")
        refused = await here.ask("POST", "/v1/responses", input=[{"type": "item_reference", "id": made.output[0].id}])
        check_error(refused, 400, "input", "input[0]: an item by reference (item_reference) needs stored responses")
        check_error(await here.ask("GET", f"/v1/responses/{made.id}"), 404, "id")


async def test_input_items_are_listed_by_page(folder: Path | None) -> None:
    async with stateful(folder=folder) as here:
        client = here.client()
        given: Any = [{"role": "user", "content": f"say {i}"} for i in range(5)]
        made = await client.responses.create(model="tiny", input=given)
        seen: list[Any] = [item async for item in client.responses.input_items.list(made.id, limit=2, order="asc")]
        texts = [item.content[0].text for item in seen]
        assert texts == [f"say {i}" for i in range(5)]
        newest = await client.responses.input_items.list(made.id)
        assert [item.id for item in newest.data] == [item.id for item in seen][::-1]
        one = await client.responses.create(model="tiny", input="hi")
        item: Any
        [item] = (await client.responses.input_items.list(one.id)).data
        assert (item.role, item.content[0].text) == ("user", "hi")
        same: Any = [
            {"role": "user", "content": text, "id": id} for text, id in (("a", "x"), ("b", "x"), ("c", None), ("d", []))
        ]
        two = await client.responses.create(model="tiny", input=same)
        pages: list[Any] = [item async for item in client.responses.input_items.list(two.id, limit=1, order="asc")]
        assert [item.content[0].text for item in pages] == ["b", "c", "d"], "an id that came twice ends no paging"
        refused = await here.ask("GET", f"/v1/responses/{one.id}/input_items?limit=0")
        check_error(refused, 400, "limit")


# ---------------------------------------------------------------- conversations


THREE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (ANSWER, {}, {}),
    (CALLS, {"tools": TOOLS}, {}),
    (THOUGHT, {}, {"about": QWEN}),
]


@pytest.mark.parametrize(("text", "rest", "options"), THREE)
async def test_a_continued_response_is_asked_as_the_whole_conversation_is(
    folder: Path | None, text: str, rest: dict[str, Any], options: dict[str, Any]
) -> None:
    """Every kind of item, over two responses: the prompt is, to the token, that of the items sent again."""
    async with stateful(speaking(text), template=SHOWS, folder=folder, **options) as here:
        client = here.client()
        first = await client.responses.create(model="tiny", input="hi", instructions="Be brief.", **rest)
        assert "Be brief." in here.prompt()
        answers: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "warm"}
            for item in first.output
            if item.type == "function_call"
        ] or [{"role": "user", "content": "on"}]
        second = await client.responses.create(model="tiny", input=answers, previous_response_id=first.id, **rest)
        assert second.previous_response_id == first.id
        third = await client.responses.create(model="tiny", input="more", previous_response_id=second.id, **rest)
        continued = here.server.port.submitted[-1].prompt
        assert "Be brief." not in here.prompt(), "instructions are those of one request"
        items: Any = [
            *({"role": "user", "content": "hi"}, *(item.to_dict() for item in first.output)),
            *(*answers, *(item.to_dict() for item in second.output)),
            {"role": "user", "content": "more"},
        ]
        await client.responses.create(model="tiny", input=items, store=False, **rest)
        assert here.server.port.submitted[-1].prompt == continued
        counted = await client.responses.input_tokens.count(input="more", previous_response_id=second.id, **rest)
        assert third.usage is not None and counted.input_tokens == third.usage.input_tokens == len(continued)
        # What the AI SDK sends: the ids of what responses gave.
        named: Any = [item if "id" not in item else {"type": "item_reference", "id": item["id"]} for item in items]
        assert [each for each in named if each.get("type") == "item_reference"]
        by_name = await client.responses.create(model="tiny", input=named, **rest)
        assert here.server.port.submitted[-1].prompt == continued
        counted = await client.responses.input_tokens.count(input=named, **rest)
        assert counted.input_tokens == len(continued)
        for id in (first.id, second.id, third.id):
            await client.responses.delete(id)
        await client.responses.create(model="tiny", input="and?", previous_response_id=by_name.id, **rest)
        assert here.server.port.submitted[-1].prompt[: len(continued) - 8] == continued[:-8], "items are stored whole"


async def test_a_conversation_that_lost_its_beginning_says_so(folder: Path | None) -> None:
    async with stateful(folder=folder) as here:
        client = here.client()
        first = await client.responses.create(model="tiny", input="one")
        second = await client.responses.create(model="tiny", input="two", previous_response_id=first.id)
        await client.responses.delete(first.id)
        asked: dict[str, Any] = {"model": "tiny", "input": "three", "previous_response_id": second.id}
        refused = await here.ask("POST", "/v1/responses", **asked)
        error = check_error(refused, 404, "previous_response_id", "no longer stored: send the whole conversation")
        assert first.id in error["message"] and error["code"] == "response_not_found"


async def test_items_of_an_input_are_referred_to_by_the_ids_that_are_listed(folder: Path | None) -> None:
    async with stateful(template=SHOWS, folder=folder) as here:
        client = here.client()
        first = await client.responses.create(model="tiny", input="one")
        [listed] = (await client.responses.input_items.list(first.id)).data
        given: Any = [{"id": listed.id}, {"id": first.output[0].id, "type": None}, {"role": "user", "content": "two"}]
        await client.responses.create(model="tiny", input=given)
        by_id = here.server.port.submitted[-1].prompt
        await client.responses.create(model="tiny", input="two", previous_response_id=first.id)
        assert by_id == here.server.port.submitted[-1].prompt


def referring(id: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": id}


async def test_items_that_cannot_be_referred_to_are_named(folder: Path | None) -> None:
    """Of another key, not stored, of nobody, twice, without an id, or too large together."""
    limits = Limits(max_body_bytes=4000)
    async with stateful(folder=folder, keys=("mine", "theirs"), limits=limits) as here:
        made: Any = await here.client("mine").responses.create(model="tiny", input="x" * 300)
        gone: Any = await here.client("mine").responses.create(model="tiny", input="x", store=False)
        mine, absent = made.output[0].id, [gone.output[0].id, made.output[0].id + "0", "msg_1", "", "x" * 500]
        said = set[str]()
        for key, id in [("theirs", mine), *(("mine", id) for id in absent)]:
            for path in ("/v1/responses", "/v1/responses/input_tokens"):
                refused = await here.ask("POST", path, key, input=[referring(id)])
                error = check_error(refused, 404, "input", "is stored for this key")
                assert error["code"] == "item_not_found"
                said.add(error["message"].replace(repr(id[:80]), "ID"))
        assert len(said) == 1
        twice = await here.ask("POST", "/v1/responses", "mine", input=[referring(mine)] * 2)
        check_error(twice, 400, "input", "input[1]: item 'msg_")
        wrongs: list[dict[str, Any]] = [{"type": "item_reference"}, {"type": "item_reference", "id": 3}, {"id": []}]
        for wrong in wrongs:
            check_error(
                await here.ask("POST", "/v1/responses", "mine", input=[wrong]), 400, "input", "the id of an item"
            )
        [listed] = (await here.client("mine").responses.input_items.list(made.id)).data
        long = [referring(mine), {"role": "user", "content": "y" * 3600}]
        assert (await here.ask("POST", "/v1/responses", "mine", input=long)).status_code == 200
        long += [referring(listed.id)]
        check_error(await here.ask("POST", "/v1/responses", "mine", input=long), 400, "input", "--max-body-bytes")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_in_the_background_takes_items_by_reference(folder: Path | None, stream: bool) -> None:
    """Items of inputs, of outputs, and of earlier responses in the background; they are stored whole."""
    async with stateful(template=SHOWS, folder=folder) as here:
        client = here.client()
        given: Any = [{"role": "user", "content": "one"}]
        whole: Any = list(given)
        for turn in ("two", "three"):
            made: Any = await client.responses.create(model="tiny", input=given, background=True, stream=stream)
            if stream:
                made = [event async for event in made][-1].response
            made = await until(client, made.id, "completed")
            listed = (await client.responses.input_items.list(made.id, order="asc")).data
            said = {"role": "user", "content": turn}
            given = [*(referring(item.id) for item in (*listed, *made.output)), said]
            whole = [*whole, *(item.to_dict() for item in made.output), said]
        last: Any = await client.responses.create(model="tiny", input=given, background=True)
        last = await until(client, last.id, "completed")  # answered before it is submitted
        by_reference = here.server.port.submitted[-1].prompt
        await client.responses.create(model="tiny", input=whole, store=False)
        assert by_reference == here.server.port.submitted[-1].prompt
        await client.responses.delete(made.id)
        shown = (await client.responses.input_items.list(last.id, order="asc")).data
        assert [item.type for item in shown] == ["message"] * 5, "items are stored whole"
        stored = len(here.store)
        for wrong in (given[-2:-1], [referring("msg_1")]):
            asked: dict[str, Any] = {"input": wrong, "background": True, "stream": stream}
            check_error(await here.ask("POST", "/v1/responses", **asked), 404, "input", "is stored for this key")
        assert len(here.store) == stored


async def test_a_response_is_complete_once_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the last token and the store, it is still in progress: a client that continues it finds it."""
    async with stateful() as here:
        put, stored = here.store.put, threading.Event()

        def late(entry: Entry, content: Content) -> None:
            assert entry.status == "queued" or stored.wait(60)
            put(entry, content)

        monkeypatch.setattr(here.store, "put", late)
        monkeypatch.setattr(ResponseStore, "read_cost", LARGE)  # stored in a thread
        client = here.client()
        made: Any = await client.responses.create(model="tiny", input="one", background=True)
        [running] = here.state._running.values()
        async with asyncio.timeout(60):
            while not running._chunks.last:
                await asyncio.sleep(0.001)
        assert (await client.responses.retrieve(made.id)).status == "in_progress"
        stored.set()
        made = await until(client, made.id, "completed")
        assert (await here.ask("POST", "/v1/responses", input=[referring(made.output[0].id)])).status_code == 200


async def test_an_input_is_not_read_for_an_item_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()
    shown = response_state._shown_input
    monkeypatch.setattr(
        response_state, "_shown_input", lambda entry, content: read.append(entry.id) or shown(entry, content)
    )
    async with stateful() as here:
        made = await here.client().responses.create(model="tiny", input="one")
        assert (await here.ask("POST", "/v1/responses", input=[referring(made.output[0].id)])).status_code == 200
        assert not read


async def test_an_item_of_a_response_in_progress_is_not_there_yet() -> None:
    async with stateful(port=slow()) as here:
        running: Any = await here.client().responses.create(model="tiny", input="one", background=True)
        asked: dict[str, Any] = {"input": [referring(f"msg_{running.id.removeprefix('resp_')}10000")]}
        check_error(await here.ask("POST", "/v1/responses", **asked), 404, "input", "is not complete")
        here.server.port.stepping.set()


async def test_a_conversation_is_bound_as_a_body_is() -> None:
    async with stateful(limits=Limits(max_body_bytes=2000)) as here:
        id, sizes = None, []
        made = httpx.Response(500)
        for _ in range(20):
            made = await here.ask("POST", "/v1/responses", input="x" * 200, previous_response_id=id)
            if made.status_code == 400:
                break
            id = made.json()["id"]
            sizes.append(made.json()["usage"]["input_tokens"])
        assert len(sizes) < 9
        check_error(made, 400, "previous_response_id", "--max-body-bytes")


# ---------------------------------------------------------------- bounds


async def test_the_longest_unused_are_evicted_and_a_continued_conversation_stays(folder: Path | None) -> None:
    async with stateful(folder=folder, most=4) as here:
        client = here.client()
        ids = [(await client.responses.create(model="tiny", input=f"n{i}")).id for i in range(4)]
        last = await client.responses.create(model="tiny", input="on", previous_response_id=ids[0])
        assert len(here.store) == 4
        await client.responses.retrieve(ids[0])
        with pytest.raises(openai.NotFoundError, match="evicted"):
            await client.responses.retrieve(ids[1])
        assert (await client.responses.retrieve(last.id)).previous_response_id == ids[0]
        metrics = here.server.backend.metrics().decode()
        assert re.search(r"quire:stored_responses\{.*\} 4.0", metrics)
        assert re.search(r"quire:evicted_responses_total\{.*\} 1.0", metrics)
        assert re.search(rf"quire:stored_response_bytes\{{.*\}} {float(here.store.bytes)}", metrics)
        if folder is not None:
            assert len(list((folder / "responses").iterdir())) == 4


def pad(size: int) -> dict[str, str]:
    return {"pad": "x" * size}


async def test_bytes_are_bounded_and_a_key_that_stores_most_loses_its_own(folder: Path | None) -> None:
    async with stateful(folder=folder, most_bytes=100_000, keys=("a", "b")) as here:
        small = await here.client("a").responses.create(model="tiny", input="hi")
        for _ in range(12):
            await here.client("b").responses.create(model="tiny", input="hi", metadata=pad(20_000))
            assert here.store.bytes <= 100_000
        assert (await here.client("a").responses.retrieve(small.id)).id == small.id
        large = await here.client("a").responses.create(model="tiny", input="hi", metadata=pad(120_000))
        assert large.output_text == ANSWER, "an answer is not lost because it is too large to be stored"
        assert large.to_dict()["store"] is False


# ---------------------------------------------------------------- other keys, forged ids

FORGED = (
    "resp_" + "0" * 32,
    "x",
    "%2e%2e%2fsalt",
    "..%2f..%2fetc%2fpasswd",
    "resp_%00",
    "%F0%9F%98%80",
    "resp_" + "a" * 500,
)


async def test_one_key_never_sees_anothers(folder: Path | None) -> None:
    async with stateful(folder=folder, keys=("mine", "theirs"), port=slow()) as here:
        running = await here.client("mine").responses.create(model="tiny", input="secret", background=True)
        here.server.port.stepping.set()
        done = await here.client("mine").responses.create(model="tiny", input="secret")
        for id in (running.id, done.id, *FORGED):
            told = [
                await here.ask(method, f"/v1/responses/{id}{rest}", "theirs")
                for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel"))
            ]
            told.append(await here.ask("GET", f"/v1/responses/{id}?stream=true", "theirs"))
            asked: dict[str, Any] = {"input": "what?", "previous_response_id": id}
            told.append(await here.ask("POST", "/v1/responses", "theirs", **asked))
            told.append(await here.ask("POST", "/v1/responses/input_tokens", "theirs", **asked))
            for one in told:
                assert one.status_code == 404, (id, one.text)
            if "%" not in id:
                messages = {one.json()["error"]["message"].replace(id[:64], "ID") for one in told}
                [said] = messages
                assert said.startswith("no response 'ID' is stored for this key: it was evicted, deleted,")
        assert (await here.client("mine").responses.retrieve(done.id)).output_text == ANSWER


# ---------------------------------------------------------------- in the background


async def until(client: AsyncOpenAI, id: str, *over: str) -> Any:
    async with asyncio.timeout(60):
        while (made := await client.responses.retrieve(id)).status not in over:
            await asyncio.sleep(0.005)
    return made


async def test_a_background_response_goes_on_and_is_polled(folder: Path | None) -> None:
    async with stateful(folder=folder, port=slow()) as here:
        client = here.client()
        made = await client.responses.create(model="tiny", input="hi", background=True)
        assert (made.status, made.background, made.output) == ("queued", True, [])
        asked: dict[str, Any] = {"input": "on", "previous_response_id": made.id}
        check_error(await here.ask("POST", "/v1/responses", **asked), 400, "previous_response_id", "only a complete")
        here.server.port.stepping.set()
        done = await until(client, made.id, "completed")
        assert done.output_text == ANSWER and done.usage is not None and done.store is True
        assert (await client.responses.cancel(made.id)).to_dict() == done.to_dict(), "it has ended already"
        on = await client.responses.create(model="tiny", input="on", previous_response_id=made.id)
        assert on.output_text == ANSWER
        check_error(await here.ask("POST", f"/v1/responses/{on.id}/cancel"), 400, "id", "close the connection")


async def test_a_stream_is_taken_up_again_where_it_was_left(folder: Path | None) -> None:
    async with stateful(speaking(CALLS), template=KNOWS, folder=folder) as here:
        client = here.client()
        whole = await client.responses.create(model="tiny", input="hi", tools=TOOLS, background=True, stream=True)
        events: list[Any] = [event async for event in whole]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.completed"
        id = events[0].response.id
        await until(client, id, "completed")
        for after in (0, 5, len(events) - 2, len(events) - 1, len(events) + 5):
            again: Any = await client.responses.retrieve(id, stream=True, starting_after=after)
            assert [e.to_dict() async for e in again] == [e.to_dict() for e in events[after + 1 :]]
        assert len([e async for e in await client.responses.retrieve(id, stream=True)]) == len(events)
        for wrong in (
            "stream=maybe",
            "stream=true&starting_after=x",
            "starting_after=3",
            "stream=true&starting_after=-2",
        ):
            check_error(await here.ask("GET", f"/v1/responses/{id}?{wrong}"), 400)
        plain = await client.responses.create(model="tiny", input="hi")
        check_error(await here.ask("GET", f"/v1/responses/{plain.id}?stream=true"), 400, "stream", "background: true")


async def test_a_client_that_leaves_its_stream_finds_the_rest_of_it() -> None:
    async with stateful(port=FakePort(max_model_len=4096)) as here:
        client, port = here.client(), here.server.port
        made = await client.responses.create(model="tiny", input="hi", background=True)
        tokens = says(ANSWER)
        port.say(port.submitted[-1], *tokens[:3])
        seen: Any = await until(client, made.id, "in_progress")
        assert ANSWER.startswith(seen.output_text)
        reading: Any = asyncio.create_task(_all_events(client, made.id))
        left: Any = asyncio.create_task(_all_events(client, made.id))
        async with asyncio.timeout(60):
            while len(here.state._running[made.id].readers) < 2:
                await asyncio.sleep(0)
        left.cancel()
        port.say(port.submitted[-1], *tokens[3:], finish="stop")
        async with asyncio.timeout(60):
            events = await reading
        assert events[-1].response.output_text == ANSWER and port.aborted == []
        assert [event.sequence_number for event in events] == list(range(len(events)))


async def _all_events(client: AsyncOpenAI, id: str) -> list[Any]:
    return [event async for event in await client.responses.retrieve(id, stream=True)]


@pytest.mark.parametrize("how", ["cancel", "delete"])
async def test_a_background_response_can_be_cancelled_and_deleted_in_progress(folder: Path | None, how: str) -> None:
    async with stateful(folder=folder, port=FakePort(max_model_len=4096)) as here:
        client, port = here.client(), here.server.port
        made = await client.responses.create(model="tiny", input="hi", background=True)
        port.say(port.submitted[-1], *says(ANSWER)[:3])
        reading: Any = asyncio.create_task(_all_events(client, made.id))
        await until(client, made.id, "in_progress")
        if how == "delete":
            await client.responses.delete(made.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(made.id)
            assert len(here.store) == 0
        else:
            ended: Any = await client.responses.cancel(made.id)
            assert ended.status == "cancelled" and ended.output[0].status == "incomplete"
            assert (await client.responses.cancel(made.id)).to_dict() == ended.to_dict()
            asked: dict[str, Any] = {"input": "on", "previous_response_id": made.id}
            check_error(await here.ask("POST", "/v1/responses", **asked), 400, words="is cancelled")
        assert port.aborted == [port.submitted[-1].id]
        assert (await reading)[-1].type == "response.cancelled"
        assert here.server.backend.load() == 0


async def test_a_crash_of_the_engine_is_the_responses_error(folder: Path | None) -> None:
    async with stateful(folder=folder, port=slow()) as here:
        client = here.client()
        made = await client.responses.create(model="tiny", input="hi", background=True)
        here.server.port.die("out of memory")
        failed = await until(client, made.id, "failed")
        assert failed.error.code == "server_error" and "the engine stopped" in failed.error.message


async def test_what_a_shutdown_interrupts_says_so_after_the_restart(tmp_path: Path) -> None:
    async with stateful(folder=tmp_path, port=slow()) as here:
        made = await here.client().responses.create(model="tiny", input="hi", background=True)
        await here.server.backend.drain(0)
    async with stateful(folder=tmp_path) as here:
        failed = await here.client().responses.retrieve(made.id)
        assert failed.status == "failed" and failed.error is not None
        assert "server ended before this response was complete" in failed.error.message


@pytest.mark.parametrize("how", ["cancel", "shutdown"])
@pytest.mark.parametrize("during", ["_encode", "_end"])
async def test_an_answer_that_is_complete_stays_so_whatever_comes_while_its_end_is_written(
    monkeypatch: pytest.MonkeyPatch, during: str, how: str
) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def late(size: int, work: Any) -> Any:
        if getattr(getattr(work, "func", None), "__name__", "") == during:
            reached.set()
            await go_on.wait()
        return work()

    async with stateful(port=FakePort(max_model_len=4096)) as here, asyncio.timeout(60):
        client, port = here.client(), here.server.port
        made = await client.responses.create(model="tiny", input="hi", background=True)
        monkeypatch.setattr(response_state, "offload", late)
        port.say(port.submitted[-1], *says(ANSWER), finish="stop")
        await reached.wait()
        running = here.state._running[made.id]
        ending: Any = asyncio.create_task(here.state.stop() if how == "shutdown" else client.responses.cancel(made.id))
        while running._why is None:
            await asyncio.sleep(0.001)
        go_on.set()
        await ending
        ended = await until(client, made.id, "completed")
        assert ended.output_text == ANSWER and ended.output[0].status == "completed"
        assert here.store.find(made.id, "").status == "completed"


async def test_a_response_of_which_not_even_the_failure_fits_is_forgotten() -> None:
    """Otherwise clients would wait for it for ever."""
    async with stateful(port=FakePort(max_model_len=4096)) as here, asyncio.timeout(60):
        client, port = here.client(), here.server.port
        made = await client.responses.create(model="tiny", input="hi", background=True)
        here.store._most_bytes = here.store.bytes + 40
        reading: Any = asyncio.create_task(_all_events(client, made.id))
        while not here.state._running[made.id].readers:
            await asyncio.sleep(0.001)
        port.say(port.submitted[-1], *says(ANSWER * 20), finish="stop")
        assert (await reading)[-1].type == "response.completed"
        while here.state._running:
            await asyncio.sleep(0.001)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
        assert here.store.bytes == 0


async def test_background_without_store_is_refused() -> None:
    async with stateful() as here:
        refused = await here.ask("POST", "/v1/responses", input="hi", background=True, store=False)
        check_error(refused, 400, "background", "store: true")


async def test_a_full_queue_refuses_work_in_the_background_and_stores_nothing() -> None:
    async with stateful(port=slow(), max_queued=1) as here:
        await here.client().responses.create(model="tiny", input="hi", background=True)
        refused = await here.ask("POST", "/v1/responses", input="hi", background=True)
        check_error(refused, 429)
        assert len(here.store) == 1
