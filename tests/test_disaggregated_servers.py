"""Two servers, one that computes prompts and one that answers: what clients, operators and a failing side see."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.assembly.engine import build_engine
from quire.config import Settings
from quire.errors import InvalidConfig
from quire.frontend.supervisor import free_port
from quire.weights.locate import embedded
from tests import checkpoints
from tests.live import Live, serving

SMALL = ("--max-model-len", "512", "--num-gpu-blocks-override", "96", "--max-num-seqs", "8")
PROMPT = [(37 * i) % 1900 + 50 for i in range(330)]
BLOCK = 65536
"""Bytes of a block of the embedded model."""


ALWAYS = ("--disaggregation-max-slowdown", "1e9")
"""However long the prefill engine takes, on a machine that does much else."""


@contextmanager
def split(folder: Path, *options: str) -> Iterator[tuple[Live, Live]]:
    """A prefill and a decode server that are connected."""
    address = f"127.0.0.1:{free_port()}"
    secret = folder / "secret"
    secret.write_text("0123456789abcdef\n")
    common = (*SMALL, "--disaggregation-address", address, "--disaggregation-secret-file", str(secret))
    folders = folder / "prefill", folder / "decode"
    for each in folders:
        each.mkdir()
    with (
        serving(folders[0], *common, "--disaggregation-mode", "prefill") as prefill,
        serving(folders[1], *common, "--disaggregation-mode", "decode", *ALWAYS, *options) as decode,
    ):
        eventually(lambda: ": connected" in decode.log)
        yield prefill, decode


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ask(server: Live, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "model": "embedded", "return_token_ids": True, **more}
    answer: dict[str, Any] = server.http.post("/v1/completions", json=body).raise_for_status().json()
    return answer


def explained(server: Live, answer: dict[str, Any]) -> dict[str, Any]:
    (found,) = server.http.get(f"/v1/requests/{answer['id']}/explain").json()["answers"]
    prefix: dict[str, Any] = found["prefix"]
    return prefix


def alone(prompts: list[list[int]], max_tokens: int = 4) -> list[list[int]]:
    with LLM("embedded", max_model_len=512, num_gpu_blocks_override=96, max_num_seqs=8) as llm:
        answers = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], SamplingParams(temperature=0, max_tokens=max_tokens)
        )
    return [list(each.outputs[0].token_ids) for each in answers]


def random_prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    starts = [[rng.randrange(50, 1900) for _ in range(200)] for _ in range(5)]
    return [
        rng.choice(starts)[: rng.randrange(1, 200)] + [rng.randrange(50, 1900) for _ in range(rng.randrange(1, 250))]
        for _ in range(count)
    ]


def converse(server: Live, count: int, seed: int) -> None:
    """Requests one after another, some of which are left after a token: the others are answered as by one engine."""
    rng, prompts = random.Random(seed), random_prompts(count, seed)
    for prompt, wanted in zip(prompts, alone(prompts), strict=True):
        if rng.random() < 0.25:
            body = {"prompt": prompt, "max_tokens": 60, "stream": True, "model": "embedded"}
            with server.http.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())
            continue
        assert ask(server, prompt)["choices"][0]["token_ids"] == wanted


def test_two_servers_answer_as_one_and_say_what_was_sent(tmp_path: Path) -> None:
    wanted = alone([PROMPT])[0]
    with split(tmp_path) as (prefill, decode):
        answer = ask(decode, PROMPT)
        assert answer["choices"][0]["token_ids"] == wanted
        details = answer["usage"]["prompt_tokens_details"]
        assert details["cached_tokens_details"] == {"device": 0, "host": 0, "disk": 0, "remote": 320}
        prefix = explained(decode, answer)
        transfer = prefix["transfer"]
        assert prefix["remote_tokens"] == transfer["tokens"] == transfer["received_tokens"] == 320
        assert transfer["bytes"] == 20 * BLOCK and transfer["seconds"] > 0 and transfer["failed"] is None
        assert f"{transfer['from']} computed 320 tokens and sent 1,310,720 bytes in" in prefix["why"]
        assert decode.metric("quire:remote_prefills_total", outcome="done") == 1
        assert decode.metric("quire:remote_prefill_seconds_total") > 0
        assert decode.metric("quire:kv_offload_copied_bytes_total", copy="receive") == 20 * BLOCK
        assert decode.metric("vllm:prompt_tokens_cached_by_source_total", source="remote") == 320
        assert prefill.metric("quire:kv_offload_copied_bytes_total", copy="send") == 20 * BLOCK
        short = ask(decode, PROMPT[:100])
        assert "transfer" not in explained(decode, short)
        converse(decode, 6, seed=1)
        decode.settled()
        prefill.settled()
        assert ask(prefill, PROMPT)["choices"][0]["token_ids"] == wanted, "a prefill engine answers, too"
        check_that_nobody_is_lost(prefill, decode, wanted)
        secrets = (prefill.log + decode.log, "0123456789abcdef")
        assert secrets[1] not in secrets[0]


def check_that_nobody_is_lost(prefill: Live, decode: Live, wanted: list[int]) -> None:
    """The prefill side's engine is killed, starts again, and is stopped: prompts are computed here meanwhile."""
    os.kill(prefill.engine_pid(), signal.SIGKILL)
    decode.http.post("/reset_prefix_cache").raise_for_status()
    answer = ask(decode, PROMPT)
    assert answer["choices"][0]["token_ids"] == wanted
    eventually(lambda: decode.log.count(": connected") == 2)
    decode.http.post("/reset_prefix_cache").raise_for_status()
    done = decode.metric("quire:remote_prefills_total", outcome="done")
    assert ask(decode, PROMPT)["choices"][0]["token_ids"] == wanted
    assert decode.metric("quire:remote_prefills_total", outcome="done") == done + 1
    assert prefill.stop() == 0
    decode.http.post("/reset_prefix_cache").raise_for_status()
    answer = ask(decode, PROMPT)
    assert answer["choices"][0]["token_ids"] == wanted
    prefix = explained(decode, answer)
    assert prefix["transfer"]["failed"] in ("down", "closed") and "so they were computed here" in prefix["why"]
    assert decode.metric("quire:remote_prefills_total", outcome=prefix["transfer"]["failed"]) >= 1


@pytest.mark.nightly
def test_hundreds_of_requests_of_which_some_are_cancelled_are_answered_as_by_one_engine(tmp_path: Path) -> None:
    with split(tmp_path, "--disaggregation-min-tokens", "32") as (prefill, decode):
        converse(decode, 300, seed=2)
        assert decode.metric("quire:remote_prefills_total", outcome="done") > 50
        decode.settled()
        prefill.settled()


# -------------------------------------------------------------------- by options

MODE = {"disaggregation_mode": "decode"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an address without a mode": ({"disaggregation_address": "127.0.0.1:9"}, "is for disaggregation_mode prefill"),
    "a timeout of prefill": (
        {"disaggregation_mode": "prefill", "disaggregation_timeout": 3},
        "is for disaggregation_mode decode",
    ),
    "no port": ({**MODE, "disaggregation_address": "localhost"}, "is not HOST:PORT"),
    "a port that is none": ({**MODE, "disaggregation_address": "localhost:99999"}, "is not HOST:PORT"),
    "two addresses to listen at": (
        {"disaggregation_mode": "prefill", "disaggregation_address": "127.0.0.1:8,127.0.0.1:9"},
        "listens at one address",
    ),
    "no secret": ({**MODE, "disaggregation_address": "192.0.2.1:8998"}, "is not a loopback address: name a file"),
    "no file": ({**MODE, "disaggregation_secret_file": "missing"}, "No such file"),
    "a short secret": ({**MODE, "disaggregation_secret_file": "short"}, "has 5 bytes: a secret needs 16 or more"),
    "no prefix caching": ({**MODE, "enable_prefix_caching": False}, "turn --enable-prefix-caching on"),
    "prefill in an LLM": ({"disaggregation_mode": "prefill"}, "start `quire serve` for it"),
    "ranks": ({**MODE, "tensor_parallel_size": 2}, "an engine of several ranks has no K/V tiers"),
    "stages": ({**MODE, "pipeline_parallel_size": 2}, "an engine of several ranks has no K/V tiers"),
    "replicas": ({**MODE, "replicas": 2}, "start a server for each engine"),
    "onnx": ({**MODE, "executor": "onnx"}, "--disaggregation-mode does not go with --executor onnx"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_a_split_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("short\n")
    changed, reason = REFUSED[name]
    with pytest.raises(InvalidConfig, match=reason):
        LLM("embedded", max_model_len=128, **changed)


def test_models_with_recurrent_layers_are_refused(tmp_path: Path) -> None:
    checkpoints.make(tmp_path, "qwen3_next-shared-keys")
    with pytest.raises(InvalidConfig, match="--disaggregation-mode: this model has recurrent layers"):
        LLM(str(tmp_path), tokenizer=str(embedded()), max_model_len=128, **MODE)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = Settings.of(model="embedded", disaggregation_mode="prefill", disaggregation_address=address)
        with pytest.raises(InvalidConfig, match=f"{address}: cannot listen there: Address already in use"):
            build_engine(settings)


def test_an_llm_may_be_the_decode_side() -> None:
    settings = Settings.of(model="embedded", disaggregation_mode="decode", max_model_len=512)
    with LLM(settings=settings) as llm:
        (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(temperature=0, max_tokens=4))
        assert list(answer.outputs[0].token_ids) == alone([PROMPT])[0]
