"""Run as a program: precompiles a small model's steps for a GPU that is not there. See `test_precompile`.

Arguments: a compute capability, the bytes of shared memory it has, and "drafts" for a draft model's steps, too.

Prints, as JSON, how many steps there are, how many were precompiled, how many kernels that compiled or found in the
cache, how many of those have launchers, and the names of those that were first met when the steps were done for good,
which only compiles, too.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

from quire.assembly.cuda import graph_keys
from quire.assembly.speculate import speculative_graph_keys
from quire.executors.local import CudaExecutor
from quire.model_runner.graphs import GraphKey, WorkQueue, Works, unwatched
from quire.model_runner.memory import allocate, layer_shapes
from quire.model_runner.speculative import ModelProposer
from quire.model_runner.triton_steps import TritonSteps
from quire.models.registry import Model
from quire.ops.capture import PRECOMPILING
from quire.ops.triton.launch import HOPPER, DeviceInfo
from quire.ops.triton.ops import TritonOps
from quire.ops.triton.precompile import Precompiler, ReportProgress
from quire.weights.load import load_model
from tests.ops.triton.compiling import CAPABILITY, SHARED, NoCard

NOWHERE = torch.device("meta")
CAP, TOKENS, LONGEST, PAGES = 4, 64, 256, 8
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": LONGEST,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}


class Launchers(NoCard):
    """Counts the launchers that it is asked for."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def launcher_cls(self, src: Any, metadata: Any) -> None:
        self.made.append(src.name)


class Watched(WorkQueue):
    """Rehearses, and notes what is compiled afterwards."""

    def __init__(self) -> None:
        self.steps = self.precompiled = self.compiled = 0
        self.late: list[str] = []

    def precompile(self, works: Works) -> None:
        self.steps = len(works)
        Precompiler(2, self.watch)([self.counted(work) for work in works])
        self.watch = unwatched  # type: ignore[method-assign]  # steps that are got ready are no kernels
        knobs.compilation.listener = lambda *, src, **rest: self.late.append(src.name)
        PRECOMPILING.set(lambda made, grid, *args, **options: made.warmup(*args, grid=grid, **options))

    def counted(self, work: Callable[[], object]) -> Callable[[], object]:
        def does() -> None:
            self.precompiled += 1
            work()

        return does

    @contextmanager
    def watch(self) -> Iterator[ReportProgress]:
        def tell(done: int, total: int) -> None:
            self.compiled += 1

        yield tell

    def run(self, key: GraphKey, work: Callable[[], object]) -> None:
        work()


def model(card: DeviceInfo) -> Model:
    ops = TritonOps(NOWHERE)
    ops.card = card
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        return load_model(folder, device=NOWHERE, ops=ops, load_format="dummy")


def main() -> None:
    driver.set_active(launchers := Launchers())
    capability = divmod(CAPABILITY, 10)
    dependent = capability >= HOPPER
    options = MappingProxyType({"launch_pdl": True} if dependent else {})
    card = DeviceInfo(132, capability, dependent, "tf32x3", SHARED, options)
    target, steps, queue = model(card), TritonSteps(NOWHERE), Watched()
    steps.card = card
    warm, proposer = graph_keys(CAP, TOKENS, TOKENS), None
    sizes: dict[str, Any] = {"pages": PAGES, "page_size": 64}
    if "drafts" in sys.argv:
        warm += speculative_graph_keys(CAP, TOKENS, 3, True)
        draft = model(card)
        kv = allocate(layer_shapes(draft.spec.kv_shapes, draft.dtype), device=NOWHERE, **sizes)
        proposer = ModelProposer(draft, kv, num_drafts=3, rows=2 * CAP, device=NOWHERE)
    CudaExecutor(
        *(target,), **sizes, rows=2 * CAP, max_model_len=LONGEST, tokens=TOKENS, dtype=torch.bfloat16, device=NOWHERE,
        steps=steps, queue=queue, proposer=proposer, warm=warm,
    )  # fmt: skip
    print(json.dumps([queue.steps, queue.precompiled, queue.compiled, len(launchers.made), queue.late]))


if __name__ == "__main__":
    main()
