"""Beam search over HTTP: `LLM.beam_search`'s answers, in both formats and as streams; its limits."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from quire import LLM, BeamSearchParams
from quire.server.access import Rates
from tests.live import Behind, Live, serving
from tests.server.doubles import check_error, served

PROMPT = "Once upon a time"
BEAMS: dict[str, Any] = {"model": "embedded", "use_beam_search": True, "temperature": 0}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    options = ("--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "256")
    with serving(tmp_path_factory.mktemp("beams"), *options) as opened:
        yield opened


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("embedded", dtype="float32", max_num_seqs=4, max_model_len=256) as opened:
        yield opened


def completed(live: Live, **fields: Any) -> Any:
    response = live.http.post("/v1/completions", json={**BEAMS, "prompt": PROMPT, "max_tokens": 9, **fields})
    return response.json() if response.status_code == 200 else (response.status_code, response.json()["error"])


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"n": 3}, BeamSearchParams(3, 9)),
        ({"n": 2, "best_of": 4}, BeamSearchParams(4, 9)),
        ({"n": 4, "length_penalty": -1.0}, BeamSearchParams(4, 9, length_penalty=-1.0)),
        ({"n": 2, "ignore_eos": True}, BeamSearchParams(2, 9, ignore_eos=True)),
        ({"n": 2, "early_stopping": True, "max_tokens": 40}, BeamSearchParams(2, 40, early_stopping=True)),
    ],
)
def test_answers_are_those_of_the_library(live: Live, llm: LLM, fields: Any, params: BeamSearchParams) -> None:
    [found] = llm.beam_search([PROMPT], params)
    made = completed(live, **fields)
    texts = [PROMPT + choice["text"] for choice in made["choices"]]
    assert texts == [one.text for one in found.sequences[: fields["n"]]]
    assert [choice["finish_reason"] for choice in made["choices"]] == [
        one.finish_reason for one in found.sequences[: fields["n"]]
    ]
    assert made["usage"]["prompt_tokens"] + made["usage"]["completion_tokens"] == made["usage"]["total_tokens"]


def test_the_usage_counts_what_the_prompt_put_into_the_cache_not_what_beams_found_there(live: Live) -> None:
    text = "A dog and a cat went to the river and played there. " * 3
    first, again = (completed(live, prompt=text, n=3)["usage"] for _ in range(2))
    details, found = first["prompt_tokens_details"], again["prompt_tokens_details"]
    whole = first["prompt_tokens"] // 16 * 16
    assert (details["cached_tokens"], details["cache_write_tokens"]) == (0, whole)
    assert (found["cached_tokens"], found["cache_write_tokens"]) == ((first["prompt_tokens"] - 1) // 16 * 16, 0)


def test_a_stream_has_each_answer_when_the_search_is_over(live: Live) -> None:
    whole = [choice["text"] for choice in completed(live, n=3)["choices"]]
    stream = live.openai.completions.create(
        model="embedded",
        prompt=PROMPT,
        n=3,
        max_tokens=9,
        temperature=0,
        stream=True,
        extra_body={"use_beam_search": True},
    )
    found = ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            found[choice.index] += choice.text
    assert found == whole


def test_chats_and_several_prompts_search_too(live: Live) -> None:
    talk = live.openai.chat.completions.create(
        model="embedded",
        messages=[{"role": "user", "content": "Tell me about a boat."}],
        n=2,
        max_tokens=8,
        temperature=0,
        extra_body={"use_beam_search": True, "include_stop_str_in_output": True},
    )
    assert len(talk.choices) == 2 and len({choice.message.content for choice in talk.choices}) == 2
    both = completed(live, prompt=[PROMPT, "The little dog"], n=2, echo=True)
    assert [
        choice["text"].startswith(p)
        for choice, p in zip(both["choices"], [PROMPT] * 2 + ["The little dog"] * 2, strict=True)
    ]
    assert [c["text"] for c in both["choices"][2:]] == [
        c["text"] for c in completed(live, prompt="The little dog", n=2, echo=True)["choices"]
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"logprobs": 2}, "logprobs"),
        ({"stop": ["a"]}, "stop"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 64}, "n"),
        ({"best_of": 100000}, "best_of"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
        ({"max_tokens": 4000}, "max_tokens"),
    ],
)
def test_what_does_not_go_with_a_search_is_refused_by_name(live: Live, fields: Any, param: str) -> None:
    status, error = completed(live, **fields)
    assert (status, error["param"]) == (400, param), error


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/generate"])
def test_other_endpoints_name_those_that_search(live: Live, path: str) -> None:
    response = live.http.post(path, json={"use_beam_search": True, "prompt": "x"})
    assert response.status_code == 400 and "/v1/completions" in response.json()["error"]["message"]


def test_a_client_that_leaves_ends_its_beams(live: Live) -> None:
    body = {**BEAMS, "prompt": PROMPT, "n": 4, "max_tokens": 200, "ignore_eos": True, "stream": True}

    def leave() -> None:
        with live.http.stream("POST", "/v1/completions", json=body, timeout=0.3) as response:
            response.read()

    for _ in range(3):
        with pytest.raises(Exception, match="timed out"):
            leave()
    live.settled()
    assert live.stats()["active_requests"] == live.stats()["waiting_requests"] == 0


@pytest.fixture(scope="module")
def relayed(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """`live` through a server that passes requests on."""
    options = ("--backend", "openai", "--upstream", live.url)
    with serving(tmp_path_factory.mktemp("relay"), *options) as front:
        yield Behind(front, live)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3},
        {"n": 2, "best_of": 4, "length_penalty": -1.0, "early_stopping": True},
        {"prompt": [PROMPT, "The little dog"], "n": 2, "echo": True},
    ],
)
def test_a_search_behind_another_server_gives_the_same_answers(live: Live, relayed: Live, fields: Any) -> None:
    own, found = completed(live, **fields), completed(relayed, **fields)
    assert found["choices"] == own["choices"]
    assert found["usage"]["completion_tokens"] == own["usage"]["completion_tokens"]
    body = {**BEAMS, "prompt": PROMPT, "max_tokens": 9, **fields, "stream": True}
    streamed = [""] * len(own["choices"])
    with relayed.http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    streamed[choice["index"]] += choice["text"]
    assert streamed == [choice["text"] for choice in own["choices"]]


def test_what_is_refused_behind_another_server_is_refused_alike(live: Live, relayed: Live) -> None:
    for fields in ({"n": 64}, {"temperature": 0.5}, {"n": 3, "best_of": 2}):
        assert completed(relayed, **fields) == completed(live, **fields)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["native", "upstream"])
def test_a_client_that_leaves_in_the_middle_of_a_search_ends_it(
    live: Live, relayed: Live, where: str, stream: bool
) -> None:
    there = live if where == "native" else relayed
    body = {**BEAMS, "prompt": PROMPT, "n": 4, "max_tokens": 240, "ignore_eos": True, "stream": stream}
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    made, port = "vllm:generation_tokens_total", int(there.url.rpartition(":")[2])
    before, aborted = live.metric(made), live.metric("vllm:request_success_total", finished_reason="abort")
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(head.encode() + data)
        client.setblocking(False)
        while live.metric(made) < before + 20:
            with suppress(BlockingIOError):
                assert b" 200 " in (said := client.recv(1 << 16)) or b"HTTP/1.1" not in said, said
            time.sleep(0.005)
    live.settled()
    assert live.metric(made) < before + 4 * 240, "the search ran to its end"
    # The engine's counts come with its next report.
    for _ in range(4000):
        if live.metric("vllm:request_success_total", finished_reason="abort") > aborted:
            break
        time.sleep(0.005)
    else:
        pytest.fail("no beam was aborted")
    assert completed(there, n=3)["choices"] == completed(live, n=3)["choices"]


def test_others_are_answered_while_beams_run(live: Live) -> None:
    alone = (
        live.openai.completions.create(model="embedded", prompt=PROMPT, max_tokens=12, temperature=0).choices[0].text
    )
    searches = [threading.Thread(target=completed, args=(live,), kwargs={"n": 4, "max_tokens": 40}) for _ in range(3)]
    for search in searches:
        search.start()
    for _ in range(5):
        made = live.openai.completions.create(model="embedded", prompt=PROMPT, max_tokens=12, temperature=0)
        assert made.choices[0].text == alone
    for search in searches:
        search.join()


def test_a_timeout_gives_the_best_beams_so_far(live: Live) -> None:
    began = time.monotonic()
    made = completed(live, n=2, max_tokens=230, ignore_eos=True, timeout=0.5)
    if isinstance(made, tuple):
        # Not even the first step was over.
        assert made[0] == 408 or made[0] == 504, made
        return
    assert {choice["finish_reason"] for choice in made["choices"]} <= {"timeout", "length"}
    assert time.monotonic() - began < 60 and json.dumps(made)


@pytest.mark.anyio
async def test_each_beam_is_charged_for_its_tokens_and_the_prompt_once() -> None:
    """A beam of 8 costs what 8 answers do, and one request."""
    rates = Rates(requests=60, tokens=1000, clock=lambda: 0.0)
    spent: list[int] = []
    rates.spend = lambda key, tokens: spent.append(tokens)  # type: ignore[method-assign]
    async with served(lambda request: [8 + request.choice], rates=rates, about={"vocab_size": 300}) as server:
        fields = {"prompt": "the the", "n": 8, "use_beam_search": True, "max_tokens": 4, "temperature": 0}
        response: Any = await server.post("/v1/completions", **fields, ignore_eos=True)
        assert spent[0] == response.json()["usage"]["prompt_tokens"]
        assert sum(spent[1:]) == len(server.port.submitted) > 8 + 4


@pytest.mark.anyio
async def test_a_search_for_which_the_queue_has_no_place_is_refused() -> None:
    async with served(max_queued=4) as server:
        fields = {"prompt": "the the", "use_beam_search": True, "max_tokens": 4, "temperature": 0}
        refused: Any = await server.post("/v1/completions", **fields, n=8)
        error = check_error(refused, 429, words="8 more are asked for, but at most 4 may wait")
        assert refused.headers["retry-after"] and error["type"]
        assert (await server.post("/v1/completions", **fields, n=4)).status_code == 200
