"""Embeddings through the whole house, beside the hidden states of a plain forward."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from quire.errors import InvalidRequest
from quire.llm import LLM
from quire.model_runner.memory import allocate, layer_shapes
from quire.model_runner.row_state import RowState, StepShape
from quire.model_runner.step_io import build_batch
from quire.ops.ragged import LayerKV
from quire.ops.reference import ReferenceOps
from quire.scheduler.plan import NewSequence, Plan, Span
from quire.weights.load import load_model
from quire.weights.locate import locate
from tests.live import Live, serving
from tests.server.doubles import check_error, served

TEXT = "Once upon a time there was a little dog who lived in a boat by the sea. " * 6


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    options = (
        "--dtype",
        "float32",
        "--max-num-batched-tokens",
        "32",
        "--max-num-seqs",
        "8",
        "--scheduling-policy",
        "priority",
    )
    folder = tmp_path_factory.mktemp("embeddings")
    with serving(folder, *options, "--batch-dir", str(folder / "batches")) as live:
        yield live


@torch.inference_mode()
def hidden(ids: list[int]) -> Any:
    """[T, H] of a plain forward over all of them."""
    model = load_model(locate("embedded"), dtype="float32", device=torch.device("cpu"), ops=ReferenceOps())
    pages, size = -(-len(ids) // 16), 16
    kv: list[LayerKV] = list(
        allocate(layer_shapes(model.spec.kv_shapes, torch.float32), pages=pages, page_size=size, device="cpu")
    )
    rows = RowState(1, 2048, size)
    spans = (Span(0, len(ids), 1, 1),)
    shape: StepShape = rows.apply_plan(
        Plan((NewSequence(0, tuple(ids), 0, len(ids)),), ((0, tuple(range(1, pages + 1))),), spans)
    )
    return model.forward(build_batch(rows, shape, torch.device("cpu")), kv).numpy()


def unit(vector: Any) -> Any:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_vector_is_the_pooled_hidden_states_however_the_prompt_was_cut(live: Live, pooling: str) -> None:
    ids = live.http.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
    assert len(ids) > 3 * 32  # more than three steps
    states = hidden(ids)
    expected = unit(states.mean(0) if pooling == "mean" else states[-1])
    for _ in range(2):  # the second time its prefix is known
        made = live.openai.embeddings.create(model="embedded", input=TEXT, extra_body={"pooling": pooling})
        np.testing.assert_allclose(made.data[0].embedding, expected, atol=2e-5)
    assert made.usage.prompt_tokens == made.usage.total_tokens == len(ids)
    assert live.settled()["cache"]["used_pages"] == 0


def test_a_mean_says_why_it_computed_all_of_its_prompt(live: Live) -> None:
    for _ in range(2):
        live.http.post("/v1/embeddings", json={"input": TEXT})
    newest = live.http.get("/v1/requests").json()["requests"][0]["id"]
    [told] = live.http.get(f"/v1/requests/{newest}/explain").json()["answers"]
    assert "mean of all its hidden states" in told["prefix"]["why"]


def test_all_inputs_and_prompts_of_a_request_are_explained_by_its_id(live: Live) -> None:
    def explained(id: str) -> list[tuple[int, int, int]]:
        answers = live.http.get(f"/v1/requests/{id}/explain").json()["answers"]
        return [(one["prompt"], one["choice"], one["prompt_tokens"]) for one in answers]

    live.http.post("/v1/embeddings", json={"input": [[5, 6, 7], [5], [5, 6]]})
    newest = live.http.get("/v1/requests").json()["requests"][0]["id"]
    assert newest.startswith("embd-") and newest.endswith(".2-0")
    assert explained(newest.partition(".")[0]) == [(0, 0, 3), (1, 0, 1), (2, 0, 2)]
    asked = {"prompt": [[5, 6, 7], [5]], "n": 2, "max_tokens": 1}
    id = live.http.post("/v1/completions", json=asked).json()["id"]
    assert explained(id) == [(0, 0, 3), (0, 1, 3), (1, 0, 1), (1, 1, 1)]
    assert explained(f"{id}.1") == [(1, 0, 1), (1, 1, 1)]


def test_every_form_of_input_and_output_says_the_same(live: Live) -> None:
    ids = live.http.post("/tokenize", json={"prompt": "a dog"}).json()["tokens"]
    create = live.openai.embeddings.create
    alone = create(model="embedded", input="a dog", encoding_format="float").data[0].embedding
    assert abs(np.linalg.norm(alone) - 1) < 1e-5
    for given in (ids, [ids], ["a dog"]):
        made: Any = create(model="embedded", input=given, encoding_format="base64" if given is ids else "float")
        vector = made.data[0].embedding
        if isinstance(vector, str):
            vector = np.frombuffer(base64.b64decode(vector), "<f4")
        np.testing.assert_allclose(vector, alone, atol=1e-6)
    short = create(model="embedded", input="a dog", dimensions=8).data[0].embedding
    np.testing.assert_allclose(short, unit(np.array(alone[:8])), atol=1e-5)
    many = create(model="embedded", input=["a dog", "a cat", TEXT, "a dog"])
    assert [one.index for one in many.data] == [0, 1, 2, 3]
    np.testing.assert_allclose(many.data[0].embedding, many.data[3].embedding, atol=1e-5)
    assert float(np.dot(many.data[0].embedding, many.data[1].embedding)) < 0.9999


def test_they_run_in_one_batch_with_answers_and_change_none(live: Live) -> None:
    ask = {"model": "embedded", "prompt": "Long ago", "max_tokens": 60, "temperature": 0}
    quiet = live.http.post("/v1/completions", json=ask).json()["choices"]

    async def crowd() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=live.url, trust_env=False, timeout=600) as many:
            vectors = [many.post("/v1/embeddings", json={"input": f"{i} {TEXT}"}) for i in range(12)]
            return await asyncio.gather(*(many.post("/v1/completions", json=ask) for _ in range(4)), *vectors)

    made = asyncio.run(crowd())
    assert [answer.json()["choices"] for answer in made[:4]] == [quiet] * 4
    assert all(answer.status_code == 200 for answer in made)
    for i in (0, 11):
        alone = live.http.post("/v1/embeddings", json={"input": f"{i} {TEXT}"}).json()["data"][0]["embedding"]
        np.testing.assert_allclose(made[4 + i].json()["data"][0]["embedding"], alone, atol=1e-5)


def test_a_batch_of_them_says_what_asking_says(live: Live) -> None:
    texts = {f"q{i}": f"{i} dogs" for i in range(5)}
    asked = [
        {"custom_id": id, "method": "POST", "url": "/v1/embeddings", "body": {"input": text}}
        for id, text in texts.items()
    ]
    data = "\n".join(map(json.dumps, asked)).encode()
    file = live.openai.files.create(file=("in.jsonl", data), purpose="batch")
    batch = live.openai.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    deadline = time.monotonic() + 300
    while (batch := live.openai.batches.retrieve(batch.id)).status != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    lines = [json.loads(line) for line in live.openai.files.content(str(batch.output_file_id)).text.splitlines()]
    assert {line["custom_id"] for line in lines} == texts.keys()
    for line in lines:
        asked_alone = live.http.post("/v1/embeddings", json={"input": texts[line["custom_id"]]}).json()
        vectors = [one["data"][0]["embedding"] for one in (line["response"]["body"], asked_alone)]
        np.testing.assert_allclose(*vectors, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[1, "a"]]}, "input"),
        ({"input": [[1, 2], "a"]}, "input"),
        ({"input": [99999999]}, "input"),
        ({"input": "x " * 3000}, "input"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 100000}, "dimensions"),
        ({"input": "x", "pooling": "max"}, "pooling"),
        ({"input": "x", "priority": 1 << 30}, "priority"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "x", "truncate_prompt_tokens": 99999}, "truncate_prompt_tokens"),
        ({"input": "x", "prompt_name": "query"}, "prompt_name"),
        ({"input": "x", "messages": [{"role": "user", "content": "x"}]}, "input"),
        ({"input": "x", "dimension": 3}, "dimension"),
        ({}, "input"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(live: Live, body: dict[str, Any], param: str) -> None:
    check_error(live.http.post("/v1/embeddings", json=body), 400, param)


@pytest.mark.anyio
async def test_an_engine_that_cannot_says_so() -> None:
    async with served() as server:
        check_error(await server.post("/v1/embeddings", input="x"), 400, words="does not support embeddings")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_the_library_gives_the_same_vectors(live: Live) -> None:
    with LLM("embedded", dtype="float32", max_num_seqs=4, max_num_batched_tokens=32) as llm:
        first, second = llm.embed([TEXT, "a dog"], use_tqdm=False)
        (last,) = llm.embed(TEXT, pooling="last", dimensions=8, normalize=False, use_tqdm=False)
        with pytest.raises(InvalidRequest, match="at least 1") as refused:
            llm.embed("a dog", dimensions=0, use_tqdm=False)
        assert refused.value.param == "dimensions"
        assert llm.generate("a dog", use_tqdm=False)[0].finished, "who was refused leaves nothing behind"
    states = hidden(list(first.prompt_token_ids))
    np.testing.assert_allclose(first.outputs.embedding, unit(states.mean(0)), atol=2e-5)
    np.testing.assert_allclose(last.outputs.embedding, states[-1][:8], atol=2e-4)
    told = live.openai.embeddings.create(model="embedded", input="a dog").data[0].embedding
    np.testing.assert_allclose(second.outputs.embedding, told, atol=2e-5)
