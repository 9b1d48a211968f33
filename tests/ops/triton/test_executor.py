"""The whole executor of a GPU, kernels and all, in the interpreter: the CPU path's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.engine import Engine
from quire.engine.executor import Executor
from quire.executors.local import CudaExecutor, LocalExecutor
from quire.model_runner.graphs import WorkQueue
from quire.model_runner.memory import allocate, layer_shapes
from quire.model_runner.mtp import MTPProposer
from quire.model_runner.speculative import NgramProposer
from quire.model_runner.triton_steps import TritonSteps
from quire.models.registry import mtp_of
from quire.ops.base import Ops
from quire.ops.ragged import RaggedBatch
from quire.ops.triton import attention, attention_schedule, rounded_gemm
from quire.ops.triton.ops import TritonOps
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import FixedDrafts
from quire.types import Request, SamplingParams
from quire.weights.load import load_model
from tests import checkpoints
from tests.models.feeding import Feeder
from tests.mtp import make_mtp

SIZES: dict[str, Any] = {"pages": 40, "page_size": 16, "rows": 4, "max_model_len": 64, "dtype": torch.float32}
SIZES["snapshots"] = 6
SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_p=0.8),
    SamplingParams(temperature=0.0, logit_bias={5: 4.0}, min_tokens=3),
)


def answers(executor: Executor, depth: int, shared: int = 18, new: int = 5) -> list[tuple[int, ...]]:
    """shared: tokens that all prompts begin with."""
    about = executor.describe()
    cache = make_prefix_cache(16, True, about.num_snapshots if about.recurrent else None)
    scheduler = Scheduler(
        KVCacheManager(40, 16, cache), rows=4, max_num_batched_tokens=24, speculation=FixedDrafts(about.num_drafts)
    )
    engine = Engine(scheduler, executor, lookahead=depth)
    for i, sampling in enumerate(SAMPLING):
        prompt = (*(20 + j % 18 for j in range(shared)), 7, 8, 7, 8, 7 + i)
        engine.add(Request(id=str(i), prompt=prompt, max_new_tokens=new, sampling=sampling, seed=i))
    while engine.has_pending_work:
        engine.step()
    done = {one.id: one.tokens for one in engine.completed_requests}
    return [done[str(i)] for i in range(len(SAMPLING))]


ALL_AT_ONCE = ("gpt_oss-gqa-mxfp4", "nemotron_h-gqa")
"""In CI: windows, sinks and experts; states and layers without rotation. What else kernels can do is compared with the
reference one by one."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # hashes wrap around, as they do on a card
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/executors/test_gpu.py does it on the card")
@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=() if shape in ALL_AT_ONCE else pytest.mark.nightly) for shape in checkpoints.SHAPES],
)
def test_chunks_decode_drafts_and_samples_through_interpreted_kernels(shape: str, tmp_path: Path) -> None:
    checkpoints.make(tmp_path, shape)
    device = torch.device("cpu")
    model = load_model(tmp_path, dtype="float32", device=device, ops=TritonOps(device))
    steps, proposer = TritonSteps(device), NgramProposer(2, shortest=1)
    executor = CudaExecutor(model, **SIZES, tokens=64, device=device, steps=steps, queue=WorkQueue(), proposer=proposer)
    assert answers(executor, 1) == answers(LocalExecutor(load_model(tmp_path, dtype="float32"), **SIZES), 0)
    assert not any(
        pool[0].any() for each in executor.runner.kv for pool in each.pools
    )  # the null block: nothing writes there


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/executors/test_gpu.py does it on the card")
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("shape", "layers"),
    [
        ("glm4_moe-groups", 1),
        ("deepseek_v3-groups-yarn", 1),
        ("deepseek_v3-groups-yarn", 3),
        ("deepseek_v32-groups-yarn", 1),
        ("glm4_moe_lite-gqa", 1),
        ("mimo-gqa", 1),
        ("mimo-gqa", 2),
        ("ernie4_5_moe-gqa", 1),
        ("nemotron_h-experts", 1),
    ],
)
def test_drafts_by_multi_token_prediction_through_interpreted_kernels(shape: str, layers: int, tmp_path: Path) -> None:
    make_mtp(tmp_path, shape, layers)
    device = torch.device("cpu")
    model = load_model(tmp_path, dtype="float32", device=device, ops=TritonOps(device), mtp=True)
    mtp = mtp_of(model)
    assert mtp is not None
    kv = allocate(layer_shapes(mtp.kv_shapes, torch.float32), pages=40, page_size=16)
    proposer = MTPProposer(mtp.layers, kv, num_drafts=2, rows=4, device=device)
    steps = TritonSteps(device)
    executor = CudaExecutor(model, **SIZES, tokens=64, device=device, steps=steps, queue=WorkQueue(), proposer=proposer)
    local = LocalExecutor(load_model(tmp_path, dtype="float32"), **SIZES)
    assert answers(executor, 1, shared=8, new=3) == answers(local, 0, shared=8, new=3)
    assert kv[0].k[1:].any()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the launches of a card are captured before lengths are known")
def test_a_prefix_cached_for_several_sequences_is_read_once_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[list[int]] = []
    find = attention_schedule.find_shared_prefixes

    def found(batch: RaggedBatch, sharing: attention_schedule.PrefixSharing) -> attention_schedule.SharedPrefixes:
        lists = find(batch, sharing)
        looked.append(lists.begun[0].tolist())
        return lists

    monkeypatch.setattr(attention, "MIN_CASCADE_SPANS", 2)
    monkeypatch.setattr(attention, "MIN_BYTES_SAVED", 0)
    monkeypatch.setattr(attention_schedule, "MIN_GROUP", 2)
    monkeypatch.setattr(attention_schedule, "find_shared_prefixes", found)
    checkpoints.make(tmp_path, "qwen3-gqa")
    device, sizes = torch.device("cpu"), SIZES | {"max_model_len": 128}
    model = load_model(tmp_path, dtype="float32", device=device, ops=TritonOps(device))
    executor = CudaExecutor(model, **sizes, tokens=64, device=device, steps=TritonSteps(device), queue=WorkQueue())
    local = LocalExecutor(load_model(tmp_path, dtype="float32"), **sizes)
    assert answers(executor, 1, shared=70, new=3) == answers(local, 0, shared=70, new=3)
    assert [64, 64, 64] in (begun[:3] for begun in looked)


class Apart(TritonOps):
    """Without kernels that do two things at once."""

    add_norm_rounded = Ops.add_norm_rounded
    quantized_mlp = Ops.quantized_mlp


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")
@pytest.mark.parametrize(
    ("shape", "each"),
    [("qwen3-gqa", 2), ("qwen3_next-shared-keys", 1), ("bamba-gqa", 2)],
    ids=["attention", "delta", "mamba"],
)
def test_norms_of_float8_models_are_rounded_in_their_kernel(
    shape: str, each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.make(tmp_path, shape)
    made, plain = [], rounded_gemm.norm_rounded
    monkeypatch.setattr(rounded_gemm, "norm_rounded", lambda *given: made.append(given) or plain(*given))
    logits = []
    for ops in (TritonOps("cpu"), Apart("cpu")):
        model = load_model(tmp_path, dtype="float16", ops=ops, quantization="fp8")
        feeder = Feeder(model, page_size=16, dtype=torch.float16)
        logits += feeder.step([(0, [7 * i % 190 for i in range(17)])])
    assert len(made) == each * model.spec.layers, "of what mixes tokens, and of an MLP that is not experts"
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 0.02
    assert not logits[0].isnan().any()
