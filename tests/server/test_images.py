"""Images over HTTP: every API says the same as offline, and images that are damaged or enormous disturb nobody."""

from __future__ import annotations

import base64
import random
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from tests.live import Live, serving
from tests.vision import IDS, make, picture, png

IMAGE = picture(40, 30)
DATA = base64.b64encode(png(IMAGE)).decode()
URL = f"data:image/png;base64,{DATA}"
FEW = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen")
    make(made, "qwen2.5-vl")
    return made


@pytest.fixture(scope="module")
def live(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    flags = ["--served-model-name", "m", "--dtype", "float32", "--max-model-len", "512"]
    with serving(tmp_path_factory.mktemp("log"), str(folder), *flags, "--max-num-encoder-input-tokens", "7") as made:
        yield made


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "what?"}]
    return {
        "model": "m",
        "temperature": 0,
        "max_tokens": FEW,
        "messages": [{"role": "user", "content": content}],
    } | fields


def image(url: str = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def post(live: Live, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = live.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_every_api_says_what_is_said_offline(live: Live, folder: Path) -> None:
    talk = [{"role": "user", "content": [{"type": "image", "image": IMAGE}, {"type": "text", "text": "what?"}]}]
    with LLM(str(folder), dtype="float32", max_model_len=512) as llm:
        [out] = llm.chat(talk, SamplingParams(temperature=0.0, max_tokens=FEW))
    wanted = out.outputs[0].text
    whole = post(live, "/v1/chat/completions", chat(image(), return_token_ids=True))
    assert tuple(whole["prompt_token_ids"]) == out.prompt_token_ids
    assert whole["choices"][0]["message"]["content"] == wanted
    shown = out.prompt_token_ids.count(IDS["<|image_pad|>"])
    assert whole["usage"]["prompt_tokens_details"]["multimodal_tokens"] == {"image": shown}
    text = post(live, "/v1/chat/completions", chat())
    assert "multimodal_tokens" not in text["usage"]["prompt_tokens_details"]
    content = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "what?"}]
    response = {
        "model": "m",
        "temperature": 0,
        "max_output_tokens": FEW,
        "input": [{"role": "user", "content": content}],
    }
    answered = post(live, "/v1/responses", response)
    assert answered["output"][0]["content"][0]["text"] == wanted
    assert answered["usage"]["input_tokens_details"]["multimodal_tokens"] == {"image": shown}
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
    message = {"model": "m", "temperature": 0, "max_tokens": FEW, "messages": [{"role": "user", "content": blocks}]}
    assert post(live, "/v1/messages", message)["content"][0]["text"] == wanted
    counted = {name: message[name] for name in ("model", "messages")}
    assert post(live, "/v1/messages/count_tokens", counted)["input_tokens"] == len(out.prompt_token_ids)
    options = {"temperature": 0, "num_predict": FEW}
    ollama = {"model": "m", "stream": False, "options": options}
    asked = {"messages": [{"role": "user", "content": "what?", "images": [DATA]}]}
    assert post(live, "/api/chat", ollama | asked)["message"]["content"] == wanted
    generated = post(live, "/api/generate", ollama | {"prompt": "what?", "images": [DATA]})
    assert generated["response"] == wanted
    again = live.http.post("/api/generate", json=ollama | {"prompt": "and?", "context": generated["context"]})
    assert again.status_code == 400 and "send the whole conversation to /api/chat" in again.text
    tokens = post(live, "/tokenize", {"messages": chat(image())["messages"]})
    assert tuple(tokens["tokens"]) == out.prompt_token_ids
    streamed = live.openai.chat.completions.create(**chat(image()), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == wanted
    assert live.metric("quire:images_encoded_total") == 1
    [card] = live.http.get("/v1/models").json()["data"]
    assert card["architecture"]["input_modalities"] == ["text", "image"]


def test_a_stored_response_goes_on_with_its_images(live: Live) -> None:
    content = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "what?"}]
    first = {"model": "m", "temperature": 0, "max_output_tokens": 4, "input": [{"role": "user", "content": content}]}
    made = post(live, "/v1/responses", first)
    later = {"model": "m", "max_output_tokens": 4, "input": "and?", "previous_response_id": made["id"]}
    assert post(live, "/v1/responses", later)["usage"]["input_tokens"] > made["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("part", "error"),
    [
        (image("http://127.0.0.1:1/x.png"), "--allowed-media-domains"),
        (image("file:///etc/passwd"), "--allowed-local-media-path"),
        ({"type": "image", "image": "/etc/passwd"}, "must begin with"),
        ({"type": "input_audio", "input_audio": {}}, "'input_audio' is not supported"),
        ({"type": "video_url", "video_url": {"url": URL}}, "'video_url' is not supported"),
    ],
)
def test_what_is_not_read_is_refused_by_name(live: Live, part: dict[str, Any], error: str) -> None:
    answer = live.http.post("/v1/chat/completions", json=chat(part))
    assert answer.status_code == 400 and error in answer.json()["error"]["message"]


BAD = "data:image/png;base64,AAAA"
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "1"}
USED = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
TOLD = {"type": "tool_result", "tool_use_id": "c", "content": "1"}


def responses_with(url: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": url}]
    return {"model": "m", "instructions": "hm", "input": [CALL, RESULT, {"role": "user", "content": content}]}


def messages_with(url: str) -> dict[str, Any]:
    kind, _, data = url.partition("base64,")
    source = {"type": "base64", "media_type": "image/png", "data": data} if data else {"type": "url", "url": kind}
    talk = [
        {"role": "assistant", "content": [USED]},
        {"role": "user", "content": [TOLD, {"type": "image", "source": source}]},
    ]
    return {"model": "m", "max_tokens": 1, "system": "hm", "messages": talk}


def ollama_with(url: str) -> dict[str, Any]:
    return {"model": "m", "system": "hm", "prompt": "a", "images": [DATA, url.partition("base64,")[2]]}


def ollama_chat_with(url: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "a", "images": ollama_with(url)["images"]}]}


@pytest.mark.parametrize(
    ("url", "status"),
    [(BAD, 400), ("http://127.0.0.1/x", 400), ("data:image/png;base64,", 413)],
    ids=["damaged", "elsewhere", "enormous"],
)
@pytest.mark.parametrize(
    ("path", "body", "where", "param"),
    [
        ("/v1/chat/completions", lambda url: chat(image(), image(url)), "messages[0].content[1]", "messages"),
        ("/v1/responses", responses_with, "input[2].content[1]", "input"),
        ("/v1/messages", messages_with, "messages[1].content[1]", None),
        ("/api/chat", ollama_chat_with, "messages[0].images[1]", None),
        ("/api/generate", ollama_with, "images[1]", None),
    ],
)
def test_errors_name_the_field_that_the_client_sent(
    live: Live, path: str, body: Any, where: str, param: str | None, url: str, status: int
) -> None:
    if url.endswith(","):
        url += base64.b64encode(bomb(60_000, 60_000)).decode()
    answer = live.http.post(path, json=body(url))
    assert answer.status_code == status
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(f"{where}: "), message
    assert param is None or error["param"] == param


def test_truncation_and_raw_prompts_are_refused_with_images(live: Live) -> None:
    answer = live.http.post("/v1/chat/completions", json=chat(image(), truncate_prompt_tokens=20))
    assert answer.status_code == 400 and "would cut images" in answer.text
    raw = {"model": "m", "raw": True, "prompt": "a", "images": [DATA]}
    answer = live.http.post("/api/generate", json=raw)
    assert answer.status_code == 400 and answer.json()["error"].startswith("images")


def bomb(width: int, height: int) -> bytes:
    """A small PNG file of very many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(b"\0" * 1_000_000, 9)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def damaged(chance: random.Random) -> str:
    """An image that cannot be read, as a data URL."""
    kind = chance.randrange(6)
    whole = png(picture(60, 40, chance.randrange(99)), chance.choice(("PNG", "JPEG", "WEBP", "GIF")))
    if kind == 0:
        whole = bomb(chance.choice((20_000, 65_535, 2_000_000)), 60_000)
    elif kind == 1:
        whole = whole[: chance.randrange(12)]
    elif kind == 2:
        whole = whole[:8] + chance.randbytes(len(whole))
    elif kind == 3:
        whole = chance.randbytes(chance.randrange(2000))
    elif kind == 4:
        whole = bomb(300, 300)[: -chance.randrange(900, 990)]
    else:
        return "data:image/png;base64," + base64.b64encode(whole).decode()[: -1 - 4 * chance.randrange(9)] + "~"
    return "data:image/png;base64," + base64.b64encode(whole).decode()


def throw(live: Live, count: int) -> None:
    """Damaged images, while others are answered as if there were none, and no memory is kept."""
    wanted = post(live, "/v1/chat/completions", chat(image()))["choices"][0]["message"]["content"]
    chance = random.Random(count)
    bodies = [chat(image(damaged(chance))) for _ in range(count)]

    def refused(body: dict[str, Any]) -> None:
        answer = live.http.post("/v1/chat/completions", json=body)
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.json()["error"]["code"] in ("invalid_image", "image_too_large", None), answer.text

    list(map(refused, bodies[: min(20, count)]))
    with ThreadPoolExecutor(6) as pool:
        # Blocks of K/V take memory when they are first used, and so do batches of several requests.
        list(pool.map(lambda _: post(live, "/v1/chat/completions", chat(image())), range(count // 10)))
    before = live.memory()
    with ThreadPoolExecutor(6) as pool:
        good = [pool.submit(post, live, "/v1/chat/completions", chat(image())) for _ in range(count // 10)]
        list(pool.map(refused, bodies))
        assert {one.result()["choices"][0]["message"]["content"] for one in good} == {wanted}
    live.settled()
    after = live.memory()
    assert after.front - before.front < 64 << 20 and after.engine - before.engine < 32 << 20


def test_damaged_and_enormous_images_are_refused_and_disturb_nobody(live: Live) -> None:
    throw(live, 60)


def steps_of_a_neighbour(live: Live, bodies: list[dict[str, Any]], tokens: int) -> tuple[float, float]:
    """Steps of the engine, and those of them that brought a later token, from before a neighbour's prompt to its last
    token; its others are refused meanwhile."""
    names = ("quire:steps_total", "quire:decode_steps_total")
    before = [live.metric(name) for name in names]
    asked = {"model": "m", "prompt": "abcd", "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    with ThreadPoolExecutor(4) as pool, live.http.stream("POST", "/v1/completions", json=asked) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
        next(lines)
        thrown = [pool.submit(live.http.post, "/v1/chat/completions", json=body) for body in bodies]
        list(lines)
        assert all(400 <= one.result().status_code < 500 for one in thrown)
    live.settled()
    steps, decoded = (live.metric(name) - then for name, then in zip(names, before, strict=True))
    return steps, decoded


def unread(live: Live, count: int, tokens: int) -> None:
    """`count` images that cannot be read take no step of the engine, and delay none of a neighbour's tokens: each of
    its steps brings one."""
    chance = random.Random(count)
    alone = steps_of_a_neighbour(live, [], tokens)
    assert alone == (tokens, tokens - 1)
    assert steps_of_a_neighbour(live, [chat(image(damaged(chance))) for _ in range(count)], tokens) == alone


def test_images_that_cannot_be_read_take_no_step(live: Live) -> None:
    unread(live, 40, 120)


NEIGHBOUR = """
import http.client, json, sys, time
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
asked = {"model": "m", "prompt": "a", "max_tokens": int(sys.argv[2]), "ignore_eos": True, "stream": True}
connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
times = []
for line in connection.getresponse():
    if line.startswith(b"data: {"):
        times.append(time.perf_counter())
        if len(times) == 1:
            print(flush=True)
print(*(after - before for before, after in zip(times, times[1:])))
"""
"""A client that streams an answer, says when it has begun, and in the end the seconds between its tokens."""


def gaps(live: Live, count: int, bodies: list[dict[str, Any]], apart: float, pool: ThreadPoolExecutor) -> list[float]:
    """Seconds between tokens of an answer, in a process of its own, while bodies are refused. apart: seconds between
    these, but that each client waits for its answer."""
    command = [sys.executable, "-c", NEIGHBOUR, str(live.port), str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as neighbour:
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline() == "\n"
        thrown = []
        for body in bodies:
            thrown.append(pool.submit(live.http.post, "/v1/chat/completions", json=body))
            time.sleep(apart)
        found = [float(each) for each in neighbour.stdout.read().split()]
    assert all(400 <= one.result().status_code < 500 for one in thrown)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("apart", [0.01, 0.0], ids=["a hundred a second", "as fast as four clients can"])
def test_a_thousand_of_them(live: Live, apart: float, record_property: Any) -> None:
    """How much longer gaps between a neighbour's tokens are, with damaged images and without in turns, is reported and
    not asserted: a busy machine has its own."""
    throw(live, 1000)
    unread(live, 1000, 400)
    chance, found = random.Random(1), dict[bool, list[float]]({False: [], True: []})
    with ThreadPoolExecutor(4) as pool:
        for turn in range(40):
            damage = turn % 2 == 1
            bodies = [chat(image(damaged(chance))) for _ in range(50 * damage)]
            found[damage] += gaps(live, 100, bodies, apart, pool)
    without, beside = (float(np.percentile(found[damage], 99)) for damage in (False, True))
    record_property("p99_gap_ratio", beside / without)
    print(f"p99 between tokens: {1e3 * without:.1f} ms without damaged images, {1e3 * beside:.1f} ms with them")
