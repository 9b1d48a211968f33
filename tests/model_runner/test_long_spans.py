"""Long spans: what the host tells attention of a prompt's chunk is what the device has, however steps overlap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.engine import Engine
from quire.executors.local import CudaExecutor, LocalExecutor
from quire.model_runner import lookahead_runner
from quire.model_runner.device_steps import TorchSteps
from quire.model_runner.graphs import GraphKey, WorkQueue
from quire.ops.ragged import LayerKV, LongSpan, RaggedBatch
from quire.ops.reference import ReferenceOps
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.scheduler import Scheduler
from quire.types import Request, SamplingParams
from quire.weights.load import load_model
from tests import checkpoints

LENGTH, ROWS, PAGE = 160, 8, 16


class CheckingOps(ReferenceOps):
    """Compares the long spans of each batch with its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[LongSpan] = []

    def attention(self, q: Tensor, kv: LayerKV, batch: RaggedBatch, *how: Any, **named: Any) -> Tensor:
        for span in batch.long_spans.spans:
            start = batch.query_start[span.span : span.span + 2].tolist()
            if start[0] < start[1]:  # else padding
                assert [span.first, span.first + span.queries] == start
                assert span.past + span.queries == int(batch.kv_len[span.span])
                self.seen.append(span)
        fed = batch.query_start.diff().count_nonzero()
        assert batch.long_spans.alone == (0 < len(batch.long_spans.spans) == fed)
        return super().attention(q, kv, batch, *how, **named)


class CapturingQueue(WorkQueue):
    """Says that it captures small steps, as a GPU's does."""

    def captures(self, key: GraphKey) -> bool:
        return key.tokens <= 32


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead_runner, "LONG", 8)


@pytest.mark.parametrize(("blocks", "depth"), [(200, 2), (200, 0), (22, 2)], ids=["ahead", "in turn", "preempted"])
@pytest.mark.parametrize("queue", [WorkQueue, CapturingQueue])
def test_long_spans_are_those_of_the_step(blocks: int, depth: int, queue: type[WorkQueue], tmp_path: Path) -> None:
    checkpoints.make(tmp_path, "llama-gqa-tied")
    ops = CheckingOps()
    sizes: dict[str, Any] = {"pages": blocks, "page_size": PAGE, "rows": ROWS, "max_model_len": LENGTH}
    device = torch.device("cpu")
    ahead = CudaExecutor(
        load_model(tmp_path, dtype="float32", ops=ops),
        **sizes,
        tokens=96,
        dtype=torch.float32,
        device=device,
        steps=TorchSteps(),
        queue=queue(),
        depth=depth,
        warm=[GraphKey(96, 8, 96), GraphKey(16, 8, 16)],
    )
    local = LocalExecutor(load_model(tmp_path, dtype="float32"), **sizes, dtype=torch.float32)
    answers = [answered(executor, blocks, n) for executor, n in ((local, 0), (ahead, depth))]
    assert answers[0] == answers[1]
    assert any(span.past for span in ops.seen)
    assert any(not span.past for span in ops.seen)


def answered(executor: Any, blocks: int, lookahead: int) -> dict[str, tuple[int, ...]]:
    """Prompts in chunks of 40, among decodes, some of which begin alike."""
    scheduler = Scheduler(
        KVCacheManager(blocks, PAGE, make_prefix_cache(PAGE, True)),
        rows=ROWS,
        max_num_batched_tokens=96,
        max_chunk_tokens=40,
    )
    engine = Engine(scheduler, executor, lookahead=lookahead)
    for i in range(8):
        prompt = tuple(range(1, 30)) + tuple((7 * i + j) % 90 + 1 for j in range(60 if i % 2 else 3))
        sampling = SamplingParams(temperature=0.0, prompt_logprobs=0 if i == 5 else None)
        engine.add(Request(id=str(i), prompt=prompt, max_new_tokens=20, sampling=sampling, seed=i))
    while engine.has_pending_work:
        engine.step()
    assert not engine.failures
    return {done.id: done.tokens for done in engine.completed_requests}
