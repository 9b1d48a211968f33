"""DeepSeek V3.2 by the executor that runs ahead: steps whose sequences are all short are those of a model without an
indexer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.engine.engine import Engine
from quire.engine.executor import Executor
from quire.executors.local import CudaExecutor, LocalExecutor
from quire.model_runner.device_steps import TorchSteps
from quire.model_runner.graphs import GraphKey, WorkQueue
from quire.models.registry import Model
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.scheduler import Scheduler
from quire.types import Request
from quire.weights.load import load_model
from tests import checkpoints

TOP, SIZE = 21, 4
"""Tokens that the model's indexer chooses, and of a block."""

SIZES: dict[str, Any] = {"pages": 40, "page_size": SIZE, "rows": 4, "max_model_len": 64, "dtype": torch.float32}


class Noting(WorkQueue):
    """Which forwards are done, and which are prepared."""

    def __init__(self) -> None:
        self.done = list[GraphKey]()
        self.prepared = list[GraphKey]()

    def run(self, key: GraphKey, work: Callable[[], object]) -> None:
        if key.kind == "feed":
            self.done.append(key)
        super().run(key, work)

    def prepare(self, key: GraphKey, work: Callable[[], object]) -> None:
        self.prepared.append(key)
        super().prepare(key, work)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("indexed")
    checkpoints.make(folder, "deepseek_v32-all-experts")
    made = load_model(folder, dtype="float32")
    assert made.spec.near == TOP
    return made


def answers(executor: Executor, lengths: tuple[int, ...], depth: int) -> list[tuple[int, ...]]:
    """Greedy, ten tokens after a prompt of each length, one request after another admitted."""
    engine = Engine(
        Scheduler(KVCacheManager(40, SIZE, make_prefix_cache(SIZE, True, None)), rows=4, max_num_batched_tokens=16),
        executor,
        lookahead=depth,
    )
    for i, length in enumerate(lengths):
        engine.add(Request(id=str(i), prompt=tuple(5 + (7 * i + j) % 20 for j in range(length)), max_new_tokens=10))
    while engine.has_pending_work:
        engine.step()
    done = {one.id: one.tokens for one in engine.completed_requests}
    return [done[str(i)] for i in range(len(lengths))]


def ahead(model: Model, queue: WorkQueue, **options: Any) -> CudaExecutor:
    return CudaExecutor(
        model, **SIZES, tokens=64, device=torch.device("cpu"), steps=TorchSteps(), queue=queue, **options
    )


@pytest.mark.parametrize("depth", [0, 1])
def test_an_indexer_is_left_out_until_a_sequence_is_longer_than_what_it_chooses(model: Model, depth: int) -> None:
    lengths, queue = (3, 9, 15), Noting()
    assert answers(ahead(model, queue), lengths, depth) == answers(LocalExecutor(model, **SIZES), lengths, 0)
    near = [key.near for key in queue.done]
    assert near[0]
    assert not near[-1]
    assert near == sorted(near, reverse=True), "the longest request is the last to end"


def test_short_requests_never_meet_it(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Noting()
    executor = ahead(model, queue)
    monkeypatch.setattr(type(model.ops), "choose_positions", None)  # type: ignore[attr-defined]
    answers(executor, (3, 6, 2), 1)
    assert {key.near for key in queue.done} == {True}


def test_both_kinds_of_step_are_prepared(model: Model) -> None:
    queue, key = Noting(), GraphKey(4, 4, 1)
    ahead(model, queue, warm=[key, GraphKey.head(4, 0)])
    assert [one for one in queue.prepared if one.kind == "feed"] == [key, key._replace(near=True)]
