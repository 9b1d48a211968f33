"""/v1/embeddings, /score, /rerank, /classify and /pooling of encoders, through a whole server, and over gRPC."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.assembly.grpc import host
from quire.config import Settings
from quire.llm import LLM
from tests import encoders
from tests.live import Live, serving
from tests.server.doubles import check_error

FLOAT32 = ("--dtype", "float32")


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Any]]:
    folder = tmp_path_factory.mktemp("reranker")
    model = encoders.write(folder / "model", "bert", labels=1)
    with serving(folder, str(folder / "model"), *FLOAT32, "--served-model-name", "m") as live:
        yield live, model


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Any]]:
    folder = tmp_path_factory.mktemp("embedder")
    model = encoders.write(folder / "model", "bert")
    encoders.sentence_transformers(folder / "model", pooling="mean", prompts={"query": "what is "})
    with serving(folder, str(folder / "model"), *FLOAT32, "--served-model-name", "m") as live:
        yield live, model


def expected_scores(model: Any, query: str, documents: list[str]) -> Any:
    pairs = [encoders.tokenizer().encode(query, one) for one in documents]
    return torch.stack([encoders.logits(model, pair.ids, pair.type_ids) for pair in pairs]).sigmoid()[:, 0].numpy()


QUERY, DOCUMENTS = "what dog runs", ["a red dog", "the old house is near the river", "fish"]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_have_vllms_shape(reranker: tuple[Live, Any], path: str) -> None:
    live, model = reranker
    answer = live.http.post(path, json={"model": "m", "text_1": QUERY, "text_2": DOCUMENTS}).json()
    assert answer.keys() == {"id", "object", "created", "model", "data", "usage"} and answer["object"] == "list"
    assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    assert {one["object"] for one in answer["data"]} == {"score"}
    np.testing.assert_allclose(
        [one["score"] for one in answer["data"]], expected_scores(model, QUERY, DOCUMENTS), atol=1e-5
    )
    tokens = sum(len(encoders.tokenizer().encode(QUERY, one).ids) for one in DOCUMENTS)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    for first, second in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        other = live.http.post(path, json={first: [QUERY] * 3, second: DOCUMENTS}).json()
        assert other["data"] == answer["data"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_in_the_order_of_their_scores(reranker: tuple[Live, Any], path: str) -> None:
    live, model = reranker
    given = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    made = live.http.post(path, json={"query": QUERY, "documents": given, "top_n": 2}).json()
    wanted = expected_scores(model, QUERY, DOCUMENTS)
    order = np.argsort(-wanted)[:2].tolist()
    assert [one["index"] for one in made["results"]] == order
    assert [one["document"] for one in made["results"]] == [{"text": DOCUMENTS[i]} for i in order]
    np.testing.assert_allclose([one["relevance_score"] for one in made["results"]], wanted[order], atol=1e-5)
    bare = live.http.post(path, json={"query": QUERY, "documents": given, "return_documents": False}).json()
    assert len(bare["results"]) == 3 and all(one.keys() == {"index", "relevance_score"} for one in bare["results"])


def test_classes_and_pooling_of_a_classifier(reranker: tuple[Live, Any]) -> None:
    live, model = reranker
    ids = encoders.tokenizer().encode(QUERY).ids
    number = float(encoders.logits(model, ids)[0])
    for path in ("/classify", "/v1/classify"):
        [one] = live.http.post(path, json={"input": QUERY, "use_activation": False}).json()["data"]
        assert one["label"] == "LABEL_0" and one["num_classes"] == 1 and abs(one["probs"][0] - number) < 1e-5
    made = live.http.post("/pooling", json={"input": [ids], "encoding_format": "base64"}).json()
    [data] = np.frombuffer(base64.b64decode(made["data"][0]["data"]), "<f4")
    assert made["data"][0]["object"] == "pooling" and abs(data - 1 / (1 + np.exp(-number))) < 1e-5


def test_embeddings_are_cut_only_where_that_is_asked_for_and_counted(embedder: tuple[Live, Any]) -> None:
    live, model = embedder
    long = " ".join(["dog"] * 200)
    check_error(live.http.post("/v1/embeddings", json={"input": long}), 400, "input", "202 tokens")
    made = live.http.post("/v1/embeddings", json={"input": ["cat", long], "truncate_prompt_tokens": 20}).json()
    assert made["usage"] == {
        "prompt_tokens": 23,
        "total_tokens": 23,
        "prompt_tokens_details": {"truncated_tokens": 182},
    }
    ids = encoders.tokenizer().encode(" ".join(["dog"] * 18)).ids
    wanted = torch.nn.functional.normalize(encoders.states(model, ids).mean(0), dim=0)
    np.testing.assert_allclose(made["data"][1]["embedding"], wanted.numpy(), atol=1e-5)
    refused = live.http.post("/api/embed", json={"model": "m", "input": long})
    assert refused.status_code == 400 and "truncate true" in refused.json()["error"]
    ollama = live.http.post("/api/embed", json={"model": "m", "input": long, "truncate": True}).json()
    assert len(ollama["embeddings"][0]) == 32


def test_prompts_pooling_and_vectors_of_tokens_over_http(embedder: tuple[Live, Any]) -> None:
    live, model = embedder
    named = live.http.post("/v1/embeddings", json={"input": "red dog", "prompt_name": "query"}).json()["data"]
    written = live.http.post("/v1/embeddings", json={"input": "what is red dog"}).json()["data"]
    np.testing.assert_allclose(named[0]["embedding"], written[0]["embedding"], atol=1e-6)
    asked = {"input": "red dog", "task": "token_embed", "normalize": False}
    made = live.http.post("/pooling", json=asked).json()["data"][0]["data"]
    states = encoders.states(model, encoders.tokenizer().encode("red dog").ids)
    np.testing.assert_allclose(made, states.numpy(), atol=1e-5)
    [score] = live.http.post("/score", json={"text_1": "a dog", "text_2": "a dog"}).json()["data"]
    assert abs(score["score"] - 1) < 1e-5


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a"}, "model"),
        ("/v1/completions", {"prompt": "a", "stream": True}, "model"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/generate", {"prompt": "a"}, "model"),
        ("/classify", {"input": "a"}, "model"),
        ("/pooling", {"input": "a", "task": "classify"}, "model"),
        ("/pooling", {"input": "a", "task": "plugin"}, "task"),
        ("/v1/embeddings", {"input": [[96]]}, "input"),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ("/v1/score", {"text_1": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "a", "documents": "b"}, "text_1"),
        ("/v1/score", {"queries": "a", "documents": "b", "items": "c"}, "text_1"),
        ("/v1/embeddings", {"input": "a", "truncation_side": "left"}, "truncation_side"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "use_activation": True}, "use_activation"),
        ("/v1/score", {"text_1": "a", "text_2": "dog " * 300}, "text_2"),
        ("/v1/rerank", {"query": "a", "documents": [3]}, "documents[0]"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "max_tokens_per_doc"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_k": 9}, "top_k"),
    ],
)
def test_what_an_embedder_cannot_do_is_refused_by_name(
    embedder: tuple[Live, Any], path: str, body: dict[str, Any], param: str
) -> None:
    check_error(embedder[0].http.post(path, json=body), 400, param)


def test_an_executor_elsewhere_runs_encoders(tmp_path: Path) -> None:
    model = encoders.write(tmp_path, "bert")
    texts, core = encoders.texts(8), encoders.tokenizer()
    wanted = torch.stack([encoders.states(model, core.encode(text).ids)[0] for text in texts])
    server = host(Settings.of(model=str(tmp_path), dtype="float32"), "127.0.0.1:0")
    try:
        with LLM(str(tmp_path), executor="grpc", executor_address=f"127.0.0.1:{server.port}") as llm:
            made = [one.outputs.embedding for one in llm.embed(texts)]
    finally:
        server.stop()
    np.testing.assert_allclose(made, torch.nn.functional.normalize(wanted, dim=1).numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("path", "names"), [("/v1/rerank", ("query", "documents")), ("/v1/score", ("text_1", "text_2"))]
)
def test_pairs_that_are_too_long_or_too_many_are_refused_by_name(
    reranker: tuple[Live, Any], path: str, names: tuple[str, str]
) -> None:
    first, second = names
    live, _ = reranker
    long = live.http.post(path, json={first: "dog " * 5000, second: ["cat", "fish"]})
    message = check_error(long, 400, second)["message"]
    assert f"{second}[0]" in message and "5004 tokens" in message and "truncate_prompt_tokens" in message
    many = live.http.post(path, json={first: "dog", second: ["cat"] * 5000})
    assert f"5000 {second}" in check_error(many, 400, second)["message"]
