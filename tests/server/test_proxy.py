"""Requests through a relay: what comes back, byte for byte, and what is said when an upstream fails."""

from __future__ import annotations

import asyncio
import codecs
import json
from typing import Any

import pytest

from quire.errors import InvalidConfig, Unavailable
from quire.scheduler.routing import make_routing_policy
from quire.server.access import Rates
from quire.server.limits import Limits
from tests.frontend.stub import EVENTS, HUGE, WHOLE, Stub, stub
from tests.server.doubles import check_error
from tests.server.relayed import backend_of, relaying

pytestmark = pytest.mark.anyio

STREAM = b"".join(EVENTS).decode()


def error_of(text: str) -> dict[str, Any]:
    """The error that a broken stream ends with; [DONE] comes after it."""
    *_, last, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    error: dict[str, Any] = json.loads(last.removeprefix("data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_answers_pass_byte_for_byte_and_so_do_requests() -> None:
    body = b'{ "model" : "stub", "prompt":"fine",\n "temperature": 0.10 , "future_field": {"a": [1e3]} }'
    async with stub() as server, relaying(server) as relay:
        whole = await relay.client.post(
            "/v1/completions?trace=1", content=body, headers={"content-type": "application/json", "x-mine": "kept"}
        )
        assert whole.content == WHOLE and whole.headers["x-kept"] == "yes"
        sent = server.asked[-1]
        assert sent.body == body and sent.path == "/v1/completions?trace=1" and sent.headers["x-mine"] == "kept"
        assert sent.headers["x-request-id"] == whole.headers["x-request-id"]
        assert await relay.text("fine") == STREAM


IMAGE_PARTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "prompt": "fine",
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}
        ],
    },
    "/v1/responses": {
        "prompt": "fine",
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://pictures.test/a.png"}]}],
    },
    "/v1/messages": {
        "prompt": "fine",
        "messages": [
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://pictures.test/a"}}]}
        ],
    },
}
"""Requests with images by path; `prompt` is for the stub."""


@pytest.mark.parametrize("path", IMAGE_PARTS)
async def test_images_pass_to_other_servers_as_they_came(path: str) -> None:
    """Nothing is fetched, decoded or refused: servers behind this one read images."""
    body = json.dumps({"model": "stub", **IMAGE_PARTS[path]}, indent=3).encode()
    async with stub() as server, relaying(server) as relay:
        whole = await relay.client.post(path, content=body, headers={"content-type": "application/json"})
        assert whole.content == WHOLE, whole.text
        assert [(sent.path, sent.body) for sent in server.asked if sent.body] == [(path, body)]


@pytest.mark.parametrize("prompt", ["drip", "trailers", "until closed"])
async def test_a_stream_comes_whole_however_it_is_framed(prompt: str) -> None:
    async with stub() as server, relaying(server) as relay:
        assert await relay.text(prompt) == STREAM
        assert (await relay.settled())["generated_tokens"] == 4


async def test_an_interim_status_is_not_the_answer() -> None:
    async with stub() as server, relaying(server) as relay:
        assert (await relay.complete("continue")).content == WHOLE


async def test_an_event_of_megabytes_passes() -> None:
    async with stub() as server, relaying(server) as relay:
        assert await relay.text("huge") == HUGE.decode() + "data: [DONE]\n\n"


async def test_a_stream_that_dies_ends_with_an_error_and_no_half_event() -> None:
    async with stub() as server, relaying(server) as relay:
        text = await relay.text("dies")
        assert text.startswith((EVENTS[0] + EVENTS[1]).decode() + 'data: {"error"')
        error = error_of(text)
        assert error["code"] == "upstream_died" and server.url in error["message"]
        assert error_of(await relay.text("cut short"))["code"] == "upstream_died"
        assert error_of(await relay.text("bad chunk"))["code"] == "upstream_malformed"
        assert await relay.text("fine") == STREAM


async def test_messages_and_responses_hear_of_a_death_in_their_own_shape() -> None:
    async with stub() as server, relaying(server) as relay:
        body = {"prompt": "dies", "stream": True}
        said = (await relay.client.post("/v1/messages", json=body)).text
        *_, last, _ = said.split("\n\n")
        assert last.startswith('event: error\ndata: {"type":"error","error":{"type":')
        said = (await relay.client.post("/v1/responses", json=body)).text
        assert "event: error\ndata: " in said and "[DONE]" not in said


@pytest.mark.parametrize(
    ("prompt", "code"), [("dies", "upstream_died"), ("mute", "upstream_died"), ("no http", "upstream_malformed")]
)
async def test_a_death_before_anything_was_sent_is_a_503(prompt: str, code: str) -> None:
    async with stub() as server, relaying(server) as relay:
        broken = await relay.complete(prompt)
        assert broken.status_code == 503 and broken.json()["error"]["code"] == code
        assert "retry-after" in broken.headers
        assert (await relay.complete("fine")).content == WHOLE
        assert (await relay.settled())["upstreams"][0]["failed"] == 1


async def test_what_a_fresh_connection_took_is_not_asked_twice() -> None:
    async with stub() as server, relaying(server) as relay:
        server.hang_up()
        await asyncio.sleep(0.05)
        await relay.complete("mute")
        assert [sent.json["prompt"] for sent in server.asked if sent.body] == ["mute"]


async def test_a_request_that_an_upstream_read_in_full_is_sent_once() -> None:
    async with stub() as server, relaying(server) as relay:
        assert (await relay.complete("fine")).content == WHOLE
        broken = await relay.complete("mute")
        assert broken.status_code == 503 and broken.json()["error"]["code"] == "upstream_died"
        sent = [one for one in server.asked if one.body]
        assert [one.json["prompt"] for one in sent] == ["fine", "mute"]
        assert sent[0].connection == sent[1].connection, "it was sent on the kept connection"


async def test_a_request_that_kills_an_upstream_is_not_sent_to_the_next() -> None:
    async with stub() as one, stub() as two, relaying(one, two) as relay:
        for _ in range(4):
            assert (await relay.complete("fine")).content == WHOLE
        assert all(any(sent.body for sent in server.asked) for server in (one, two)), "both have kept connections"
        broken = await relay.complete("poison")
        assert broken.status_code == 503 and broken.json()["error"]["code"] == "upstream_died"
        assert broken.headers["x-should-retry"] == "false", "nor by the client itself"
        sent = [each.json["prompt"] for server in (one, two) for each in server.asked if each.body]
        assert sent.count("poison") == 1
        assert [(await relay.complete("fine")).status_code for _ in range(4)] == [200] * 4, "the other one answers"


async def test_a_kept_connection_that_was_closed_meanwhile_costs_nothing() -> None:
    async with stub() as server, relaying(server) as relay:
        for _ in range(3):
            assert (await relay.complete("fine")).content == WHOLE
        kept = {sent.connection for sent in server.asked}
        assert len(kept) == 1
        server.hang_up()
        assert (await relay.complete("fine")).content == WHOLE
        assert server.asked[-1].connection not in kept


async def test_a_connection_that_says_more_than_was_asked_is_not_used_again() -> None:
    async with stub() as server, relaying(server) as relay:
        assert (await relay.complete("too much")).content == WHOLE
        used = server.asked[-1].connection
        assert (await relay.complete("fine")).content == WHOLE
        assert server.asked[-1].connection != used


async def test_errors_pass_as_they_are_if_they_have_the_shape_and_in_words_if_not() -> None:
    async with stub() as server, relaying(server) as relay:
        own = await relay.complete("error")
        assert own.status_code == 500 and own.json()["error"]["message"] == "out of memory"
        html = await relay.complete("html", stream=True)
        assert html.status_code == 502
        assert html.json()["error"]["message"] == "the upstream answered 502: <html>Bad gateway</html>"
        busy = await relay.complete("busy")
        assert busy.status_code == 429 and busy.headers["retry-after"] == "7"
        unknown = await relay.client.get("/v1/nothing")
        assert unknown.status_code == 404 and unknown.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_the_request_upstream(stream: bool) -> None:
    async with stub() as server, relaying(server) as relay:
        known = len(server.asked)
        asking = asyncio.ensure_future(relay.complete("one", stream=stream))
        while len(server.asked) == known:
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        stats = await relay.settled()
        while not server.left:
            await asyncio.sleep(0.01)
        assert stats["upstreams"][0]["outstanding"] == 0
        assert b'finished_reason="abort",model_name="stub"} 1.0' in await _metrics(relay)


async def _metrics(relay: Any) -> bytes:
    return bytes((await relay.client.get("/metrics")).content)


async def test_a_deadline_ends_a_request_upstream_too() -> None:
    async with stub() as server, relaying(server) as relay:
        soon = {"x-request-timeout": "1"}  # until then a request must have reached the upstream
        whole = await relay.client.post("/v1/completions", json={"prompt": "one"}, headers=soon)
        assert whole.status_code == 504
        body = {"prompt": "one", "stream": True}
        said = (await relay.client.post("/v1/completions", json=body, headers=soon)).text
        assert said.startswith(EVENTS[0].decode()) and error_of(said)["type"] == "timeout_error"
        while len(server.left) < 2:
            await asyncio.sleep(0.01)
        await relay.settled()


@pytest.mark.parametrize("seconds", ["nan", "0", "-1", "-inf", "soon", ""])
async def test_a_time_that_is_none_is_refused_in_front(seconds: str) -> None:
    async with stub() as server, relaying(server) as relay:
        known = len(server.asked)
        for path, body in (("/v1/completions", {"prompt": "fine"}), ("/v1/generate", {"prompt": "fine"})):
            refused = await relay.client.post(path, json=body, headers={"x-request-timeout": seconds})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "x-request-timeout"
        assert len(server.asked) == known


async def test_a_head_request_waits_for_no_body() -> None:
    async with stub() as server, relaying(server) as relay:
        for path in ("/v1/models", "/v1/models"):
            whole = await relay.client.get(path)
            head = await relay.client.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == str(len(whole.content))


async def test_silence_is_filled_with_comments_between_events() -> None:
    async with stub() as server, relaying(server, limits=Limits(keep_alive=0.05)) as relay:
        text = ""
        body = {"model": "m", "prompt": "one", "stream": True}
        async with relay.client.stream("POST", "/v1/completions", json=body) as answer:
            async for piece in answer.aiter_text():
                text += piece
                if text.count(": keep-alive\n\n") == 2:
                    server.hold.set()
        assert text.count(": keep-alive\n\n") >= 2 and text.replace(": keep-alive\n\n", "") == STREAM


async def test_keys_are_checked_here_and_not_passed_on() -> None:
    async with stub(key="theirs") as server, relaying(server, key="theirs", api_keys=("ours",)) as relay:
        assert (await relay.complete("fine")).status_code == 401
        relay.client.headers["authorization"] = "Bearer ours"
        assert (await relay.complete("fine")).status_code == 200
        assert {sent.headers["authorization"] for sent in server.asked} == {"Bearer theirs"}
        server.key = "changed"
        refused = await relay.complete("fine")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "upstream_key"


async def test_without_keys_here_the_clients_own_goes_on() -> None:
    async with stub() as server, relaying(server) as relay:
        await relay.client.post(
            "/v1/completions", json={"prompt": "fine"}, headers={"authorization": "Bearer mine", "cookie": "a=b"}
        )
        assert server.asked[-1].headers["authorization"] == "Bearer mine" and "cookie" not in server.asked[-1].headers


async def raw(relay: Any, *fields: str) -> str:
    """POST /v1/completions with these header fields, letter by letter; the status line."""
    body = '{"prompt": "fine"}'
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.client.base_url.port)
    lines = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *fields]
    writer.write("\r\n".join([*lines, f"Content-Length: {len(body)}", "", body]).encode())
    status = (await reader.readline()).decode().strip()
    writer.close()
    return status


@pytest.mark.parametrize(
    "field",
    [
        "Authorization: Bearer boss=",
        "AUTHORIZATION: bearer boss=",
        "authorization: Bearer   boss=",
        "Authorization: boss=",
        "Authorization: Token token=boss=, x=1",
        'Authorization: Digest key="boss="',
        "X-Api-Key: boss=",
        "x-API-key: boss=",
        "Api-Key: boss=",
        "X-Auth-Token: boss=",
        "Proxy-Authorization: Bearer boss=",
        "Cookie: key=boss=",
        "Authorization: Bearer mine\r\nAuthorization: Bearer boss=",
    ],
)
@pytest.mark.parametrize("api_keys", [(), ("mine",)])
async def test_an_admin_key_goes_no_further_in_whatever_field_it_is_sent(field: str, api_keys: tuple[str, ...]) -> None:
    async with stub() as server, relaying(server, api_keys=api_keys, admin_keys=("boss=",)) as relay:
        known = len(server.asked)
        await raw(relay, field, "X-Mine: kept")
        assert len(server.asked) == known + 1 or api_keys, "without keys for clients everything is passed on"
        assert not any("boss" in sent.head for sent in server.asked)


async def test_a_clients_own_key_goes_on_beside_an_admin_key() -> None:
    async with stub() as server, relaying(server, admin_keys=("boss",)) as relay:
        assert (await raw(relay, "Authorization: Bearer mine", "X-Api-Key: own")).endswith("200 OK")
        head = server.asked[-1].head
        assert "authorization: Bearer mine\r\n" in head and "x-api-key: own\r\n" in head


async def test_a_clients_key_never_reaches_an_upstream_that_has_a_key() -> None:
    """Looks at the head as it came: of two fields of one name, a table shows only the last."""
    async with stub(key="theirs") as server, relaying(server, key="theirs") as relay:
        for fields in (["Authorization: Bearer mine"], ["X-Api-Key: mine"], ["AUTHORIZATION: mine", "x-api-key: mine"]):
            assert (await raw(relay, *fields)).endswith("200 OK")
            head = server.asked[-1].head.lower()
            assert "mine" not in head and "x-api-key" not in head
            assert head.count("authorization:") == 1 and "authorization: bearer theirs\r\n" in head


async def test_what_a_connection_header_names_ends_here() -> None:
    async with stub() as server, relaying(server) as relay:
        await raw(relay, "Connection: close, X-Hop", "X-Hop: here", "X-End: there", "Proxy-Authorization: Basic eDp5")
        head = server.asked[-1].head
        assert "x-end: there" in head and "hop" not in head.lower() and "proxy" not in head


async def test_the_cors_fields_of_an_upstream_are_not_passed_on() -> None:
    async with stub() as server, relaying(server) as relay:
        answer = await relay.complete("fine")
        assert answer.headers["x-kept"] == "yes" and "access-control-allow-origin" not in answer.headers


async def test_limits_are_kept_in_front() -> None:
    async with stub() as server, relaying(server, limits=Limits(max_body_bytes=2000), max_outstanding=1) as relay:
        known = len(server.asked)
        assert (await relay.complete("x" * 3000)).status_code == 413
        assert (await relay.client.post("/v1/completions", content=b"{}")).status_code == 415
        assert len(server.asked) == known
        held = asyncio.ensure_future(relay.complete("one", stream=True))
        while len(server.asked) == known:
            await asyncio.sleep(0.01)
        full = await relay.complete("fine")
        assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
        assert (await relay.client.post("/v1/completions", content=b"{}")).status_code == 429, "before it is read"
        server.hold.set()
        assert (await held).text == STREAM


@pytest.mark.parametrize("path", ["/v1/../metrics", "/v1/%2e%2e/admin", "/v1/a/./b"])
async def test_a_path_cannot_climb_out(path: str) -> None:
    async with stub() as server, relaying(server) as relay:
        known = len(server.asked)
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.client.base_url.port)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 404")
        writer.close()
        assert len(server.asked) == known


async def test_tokens_count_against_the_keys_rate() -> None:
    async with stub() as server, relaying(server, api_keys=("k",), rates=Rates(tokens=10)) as relay:
        relay.client.headers["authorization"] = "Bearer k"
        assert await relay.text("fine") == STREAM
        assert (await relay.complete("fine")).status_code == 200
        spent = await relay.complete("fine")
        assert spent.status_code == 429 and spent.json()["error"]["code"] == "rate_limit_exceeded"


async def test_an_end_cuts_what_is_not_over_in_time() -> None:
    """Also whole answers, of which nothing comes before they are made."""
    async with stub() as server, relaying(server) as relay:
        streamed, whole = (asyncio.ensure_future(relay.complete("one", stream=stream)) for stream in (True, False))
        while len(server.asked) < 3 or not any(response.num_events for response in relay.backend._open):
            await asyncio.sleep(0.01)
        await relay.backend.drain(0.01)
        assert "shutting down" in error_of((await streamed).text)["message"]
        refused = await asyncio.wait_for(whole, 100)
        assert refused.status_code == 503 and refused.json()["error"]["message"] == "the server is shutting down"
        while len(server.left) < 2:
            await asyncio.sleep(0.01)
        assert relay.backend.load() == 0


async def test_a_path_prefix_is_taken_off() -> None:
    async with stub() as server, relaying(server, root_path="/llm") as relay:
        assert (await relay.complete("fine")).content == WHOLE
        assert server.asked[-1].path == "/v1/completions"


async def test_our_own_routes_answer_too() -> None:
    async with stub() as server, relaying(server) as relay:
        made = (await relay.client.post("/v1/generate", json={"prompt": "fine", "max_new_tokens": 9})).json()
        assert (
            made["text"] == "Once upon a time" and made["generated_tokens"] == 4 and made["finish_reason"] == "length"
        )
        assert server.asked[-1].json == {"prompt": "fine", "max_tokens": 9, "model": "stub"}
        bad = await relay.client.post("/v1/generate", json={"prompt": "fine", "max_new_tokns": 9})
        assert bad.status_code == 400 and "max_new_tokens" in bad.json()["error"]["message"]
        for path in ("/health", "/health/live", "/health/ready", "/ping", "/version"):
            assert (await relay.client.get(path)).status_code == 200
        assert (await relay.client.get("/v1/models")).json()["data"][0]["id"] == "stub"
        stats = (await relay.client.get("/stats")).json()
        assert stats["model"] == "stub" and stats["completed_requests"] == 1 and stats["generated_tokens"] == 4


async def test_metrics_are_ours_and_the_upstreams() -> None:
    async with stub() as server, relaying(server) as relay:
        await relay.text("fine")
        text = (await _metrics(relay)).decode()
        assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="stub"} 1.0' in text
        assert f'vllm:num_requests_running{{upstream="127.0.0.1:{server.port}"}} 3.0' in text
        assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="stub"} 1.0' in text


async def test_the_page_shows_requests_and_explains_one() -> None:
    async with stub() as server, relaying(server) as relay:
        frames = relay.client.stream("GET", "/ui/events")
        async with frames as seen:
            lines = (line async for line in seen.aiter_lines() if line.startswith("data: "))
            first = json.loads((await anext(lines))[6:])
            assert first["whole"]["requests"] == [] and "stubs" in first["whole"]["facts"]["about"]
            await relay.text("fine")
            events = json.loads((await anext(lines))[6:])["events"]
        assert [what for what, *_ in events] == ["new", "open", "first", "end"]
        assert events[-1][3:] == ["length", 4]
        story = (await relay.client.get("/v1/requests/cmpl-7/explain")).json()["answers"][0]
        assert story["generated_tokens"] == 4 and story["prompt_tokens"] == 3 and story["state"] == "finished"
        assert [event["what"] for event in story["events"]] == ["submitted", "opened", "first_token", "finished"]
        assert server.url in story["events"][1]["says"]


async def test_two_servers_share_by_what_is_outstanding_and_one_that_dies_is_left_out() -> None:
    async with stub() as one, stub() as two, relaying(one, two) as relay:
        held = [asyncio.ensure_future(relay.complete("one", stream=True)) for _ in range(4)]
        while sum(len(server.asked) for server in (one, two)) < 5:  # one of them was asked for its models
            await asyncio.sleep(0.01)
        assert [each["outstanding"] for each in (await relay.client.get("/stats")).json()["upstreams"]] == [2, 2]
        await two.close()
        answers = [await relay.complete("fine") for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4
        one.hold.set()
        texts = [(await each).text for each in held]
        assert sum(text == STREAM for text in texts) == 2
        assert sum("upstream_died" in text for text in texts) == 2
        await two.open()
        while not (await relay.client.get("/stats")).json()["upstreams"][1]["well"]:
            await asyncio.sleep(0.05)
        await one.close()
        assert (await relay.complete("fine")).status_code == 200
        await two.close()
        refused = await relay.complete("fine")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "upstream_unreachable"
        assert (await relay.client.get("/health/ready")).status_code == 503
        assert (await relay.client.get("/health/live")).status_code == 200


@pytest.mark.parametrize("policy", ["prefix_hash", "longest_prefix"])
async def test_requests_that_begin_alike_go_to_one_server(policy: str) -> None:
    async with stub() as one, stub() as two, relaying(one, two, routing=make_routing_policy(policy)) as relay:
        for system in range(20):
            for question in range(2):
                messages = [{"role": "system", "content": f"{system} " * 300}, {"role": "user", "content": question}]
                await relay.client.post("/v1/chat/completions", json={"model": "stub", "messages": messages})
        seen = [{sent.json["messages"][0]["content"] for sent in s.asked if sent.body} for s in (one, two)]
        assert not seen[0] & seen[1] and all(seen)


async def test_a_start_without_a_server_or_with_a_strange_one_says_so() -> None:
    async with stub() as server:
        await server.close()
        with pytest.raises(Unavailable, match=r"no upstream answered within 0\.3 s: .*nothing listens there"):
            await backend_of(server).start()
    async with stub(key="secret") as server:
        with pytest.raises(InvalidConfig, match="--upstream-api-key"):
            await backend_of(server).start()
    with pytest.raises(InvalidConfig, match="http://HOST:PORT"):
        backend_of("ftp://there")


async def test_a_server_that_says_it_is_ill_gets_nothing_until_it_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.frontend.upstream._CHECK_INTERVAL", 0.02)
    monkeypatch.setattr("quire.frontend.upstream._RETRY_INTERVAL", 0.02)
    server: Stub
    async with stub() as server, relaying(server) as relay:
        server.healthy = False
        while (await relay.client.get("/health/ready")).status_code == 200:
            await asyncio.sleep(0.01)
        refused = await relay.complete("fine")
        assert refused.status_code == 503 and "503" in refused.json()["error"]["message"]
        server.healthy = True
        while (await relay.client.get("/health/ready")).status_code != 200:
            await asyncio.sleep(0.01)
        assert (await relay.complete("fine")).content == WHOLE


async def test_draining_refuses_and_lets_those_running_end() -> None:
    async with stub() as server, relaying(server) as relay:
        held = asyncio.ensure_future(relay.complete("one", stream=True))
        while len(server.asked) < 2:
            await asyncio.sleep(0.01)
        draining = asyncio.ensure_future(relay.backend.drain(1000))
        await asyncio.sleep(0)
        assert (await relay.complete("fine")).status_code == 503
        server.hold.set()
        assert (await held).text == STREAM
        await draining


JSON = {"content-type": "application/json"}
STATE: list[tuple[str, str, dict[str, Any] | None, str]] = [
    ("GET", "/v1/responses/resp_1", None, "id"),
    ("GET", "/v1//responses/resp_1/", None, "id"),
    ("GET", "/v1/%72esponses%2Fresp_1", None, "id"),
    ("DELETE", "/v1/responses/resp_1", None, "id"),
    ("GET", "/v1/responses/resp_1/input_items", None, "id"),
    ("POST", "/v1/responses/resp_1/cancel", {}, "id"),
    ("POST", "/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    (
        "POST",
        "/v1/responses/",
        {"input": "a", "previous_response_id": "resp_1", "max_tokens": []},
        "previous_response_id",
    ),
    ("POST", "/v1/responses", {"input": "a", "background": True}, "background"),
    ("POST", "/v1/responses", {"input": "a", "conversation": "conv_1"}, "conversation"),
    ("POST", "/v1/responses/input_tokens", {"input": "a", "previous_response_id": "r"}, "previous_response_id"),
    ("POST", "/v1/responses", {"input": [{"role": "user"}, {"type": "item_reference", "id": "msg_1"}]}, "input"),
    ("POST", "/v1/responses", {"input": [{"id": "msg_1"}]}, "input"),
]


SETTINGS: dict[str, tuple[int, tuple[str, ...], str]] = {
    "several upstreams": (2, (), "several upstreams"),
    "several keys": (1, ("a", "b"), "to every key"),
    "one of both": (1, ("a",), ""),
}


@pytest.mark.parametrize("setting", SETTINGS)
async def test_what_an_upstream_stores_is_refused_where_it_would_be_lost_or_seen_by_others(setting: str) -> None:
    servers, keys, words = SETTINGS[setting]
    headers = {"authorization": "Bearer a"}
    async with stub() as first, stub() as second, relaying(*(first, second)[:servers], api_keys=keys) as relay:
        for method, path, body, param in STATE:
            answer = await relay.client.request(method, path, json=body, headers=headers)
            if words:
                check_error(answer, 400, param, words)
            else:
                assert "stored" not in answer.text, "one upstream, and nobody else: it is passed on"
        passed = await relay.client.post("/v1/responses", json={"input": "a", "store": True}, headers=headers)
        assert passed.status_code == 200
        marked = codecs.BOM_UTF8 + b'{"input": "a", "background": true}'
        answer = await relay.client.post("/v1/responses", content=marked, headers=headers | JSON)
        if words:
            check_error(answer, 400, "background", words)


async def test_a_byte_order_mark_means_nothing() -> None:
    async with stub() as server, relaying(server) as relay:
        for path in ("/v1/generate", "/v1/completions"):
            answer = await relay.client.post(path, content=codecs.BOM_UTF8 + b'{"prompt": "fine"}', headers=JSON)
            assert answer.status_code == 200
            assert server.asked[-1].json["prompt"] == "fine"
