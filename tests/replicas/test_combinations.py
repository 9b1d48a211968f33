"""Several replicas with what else a server has: ranks, drafts, prefix caching, stored responses, batches, background.

CI asks the replicas of `test_deployment.py`, `make nightly` those of every pair of settings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.types import SamplingParams
from tests.live import Live, serving
from tests.pairs import pairwise

AXES: Mapping[str, tuple[Any, ...]] = {
    "ranks": (1, 2),
    "drafts": (True, False),
    "prefixes": (True, False),
    "folders": (True, False),
    "policy": ("longest_prefix", "least_loaded"),
}
QUESTIONS = ("Tell me a story.", "Who lived by the sea?", "What did the little dog find?", "Where is the ball?")
ASKED: dict[str, Any] = {"temperature": 0.0, "max_output_tokens": 10}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6}}, "required": ["name"]}


def flags_of(case: Mapping[str, Any], folder: Path) -> list[str]:
    flags = ["--replicas", "2", "--threads", "1", "--num-gpu-blocks-override", "256", "--max-num-seqs", "8"]
    flags += ["--dtype", "float32", "--tensor-parallel-size", str(case["ranks"]), "--replica-policy", case["policy"]]
    if case["drafts"]:
        flags += ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    if not case["prefixes"]:
        flags += ["--no-enable-prefix-caching"]
    if case["folders"]:
        flags += ["--batch-dir", str(folder / "batches"), "--state-dir", str(folder / "responses")]
    return flags


def one_engine(dtype: str = "auto") -> dict[str, list[str]]:
    """What one engine answers: to each question, and to "Go on." after it."""
    found: dict[str, list[str]] = {}
    with LLM(num_gpu_blocks_override=256, threads=1, dtype=dtype) as llm:
        for question in QUESTIONS:
            messages, found[question] = [{"role": "user", "content": question}], []
            for _ in range(2):
                [answer] = llm.chat([messages], SamplingParams(temperature=0.0, max_tokens=10))  # type: ignore[list-item]
                found[question].append(answer.outputs[0].text)
                messages += [
                    {"role": "assistant", "content": found[question][-1]},
                    {"role": "user", "content": "Go on."},
                ]
    return found


def eventually(ask: Any, done: Any) -> Any:
    deadline = time.monotonic() + 240
    while not done(found := ask()):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def check_responses(live: Live, told: Mapping[str, list[str]]) -> None:
    """A response is continued, whichever replica answers, and one in the background is fetched."""
    client = live.openai
    for question, answers in told.items():
        first = client.responses.create(model="embedded", input=question, **ASKED)
        assert first.output_text == answers[0]
        more = client.responses.create(model="embedded", input="Go on.", previous_response_id=first.id, **ASKED)
        assert more.output_text == answers[1]
        begun = client.responses.create(model="embedded", input=question, background=True, **ASKED)
        ended = eventually(
            lambda id=begun.id: client.responses.retrieve(id), lambda it: it.status not in ("queued", "in_progress")
        )
        assert ended.output_text == answers[0]


def check_batch(live: Live, told: Mapping[str, list[str]]) -> None:
    """A batch is answered by the replicas, each line as alone."""
    client, asked = live.openai, {"model": "embedded", "temperature": 0.0, "max_tokens": 10}
    lines = [
        {"custom_id": question, "method": "POST", "url": "/v1/chat/completions"}
        | {"body": {**asked, "messages": [{"role": "user", "content": question}]}}
        for question in told
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    ended = eventually(lambda: client.batches.retrieve(made.id), lambda it: it.status in ("completed", "failed"))
    results = map(json.loads, client.files.content(ended.output_file_id).text.splitlines())
    found = {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in results}
    assert found == {question: answers[0] for question, answers in told.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("case", pairwise(AXES), ids=lambda case: "-".join(map(str, case.values())))
def test_replicas_answer_as_one_engine_does_whatever_else_is_on(case: Mapping[str, Any], tmp_path: Path) -> None:
    told = one_engine("float32")  # ranks add up in another order, which bfloat16 would show
    with serving(tmp_path, *flags_of(case, tmp_path)) as live:
        if case["folders"]:
            check_responses(live, told)
            check_batch(live, told)
        for question, answers in told.items():
            body = {"model": "embedded", "temperature": 0.0, "max_tokens": 10, "n": 2}
            body["messages"] = [{"role": "user", "content": question}]
            choices = live.http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"]
            assert [each["message"]["content"] for each in choices] == [answers[0]] * 2
        body = {"model": "embedded", "prompt": "A name: ", "max_tokens": 40, "temperature": 0.0}
        body["structured_outputs"] = {"json": SCHEMA}
        made = live.http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"]
        assert json.loads(made).keys() == {"name"}
        assert len(live.stats()["replicas"]) == 2
