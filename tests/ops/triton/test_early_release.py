"""Some kernels let the next one start before they wait: what that reads before its own wait was there already."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from quire.ops.capture import PRECOMPILING
from quire.ops.triton.launch import HOPPER, DeviceInfo
from quire.ops.triton.ops import TritonOps
from quire.weights import load
from quire.weights.canary import feed, pages
from tests.checkpoints import make

EARLY = frozenset({"norm_kernel", "qk_norm_rope_store_kv_kernel", "attention_kernel"})
"""Those that release before they wait."""

LISTS = frozenset({"prepare_inputs_kernel", "tiles_kernel", "shares_kernel", "depth_kernel", "gather_kernel"})
ROUTES = frozenset({"route_kernel", "choice_kernel", "count_kernel", "earlier_kernel", "place_kernel", "sort_kernel"})
WRITERS = MappingProxyType(
    dict.fromkeys(("attention_kernel", "cascade_kernel", "latent_kernel"), LISTS | {"index_choice_kernel"})
    | dict.fromkeys(("few_gate_up_kernel", "few_down_kernel", "experts_kernel"), ROUTES)
    | dict.fromkeys(("integer_gemv_kernel", "integer_experts_kernel"), ROUTES)
)
"""Of kernels that read more than weights before their wait, those that write it."""


def running(launches: list[tuple[str, bool]]) -> Iterator[tuple[str, set[str]]]:
    """Each kernel, with those before the preceding one that may still run when it starts."""
    for i, (name, dependent) in enumerate(launches):
        before, at = set[str](), i - 1
        while at > 0 and dependent and launches[at][0] in EARLY:
            dependent, at = launches[at][1], at - 1
            before.add(launches[at][0])
        yield name, before


def test_kernels_that_may_run_are_those_that_nobody_waited_for() -> None:
    launches = [("a", True), ("norm_kernel", True), ("attention_kernel", True), ("b", True), ("c", True)]
    assert dict(running(launches)) == {
        "a": set(),
        "norm_kernel": set(),
        "attention_kernel": {"a"},
        "b": {"norm_kernel", "a"},
        "c": set(),
    }
    assert dict(running([("a", True), ("norm_kernel", False), ("b", False)]))["b"] == set()


@pytest.mark.parametrize(
    "shape",
    [
        "qwen3-gqa",
        "gemma4_text-mixture",
        "qwen2_moe-gqa",
        "gpt_oss-gqa",
        "deepseek_v2-plain-queries",
        "deepseek_v32-groups-yarn",
        "llama4_text-gqa",
        "granitemoeshared-gqa",
        "qwen3_next-shared-keys",
    ],
)
def test_nothing_that_is_read_before_a_wait_is_still_written(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, shape)
    monkeypatch.setattr(load, "can_pack", lambda *asked: False)  # as on a GPU
    ops = TritonOps("cpu")
    ops.card = DeviceInfo(132, HOPPER, True, "tf32x3", 227 << 10, MappingProxyType({"launch_pdl": True}))
    model = load.load_model(tmp_path, dtype="bfloat16", ops=ops)
    kv, launches = pages(model, 20, torch.device("cpu")), list[tuple[str, bool]]()

    def note(kernel: Any, grid: object, *arguments: Any, **options: Any) -> None:
        launches.append((kernel.fn.__name__, options.get("launch_pdl", False)))

    recording = PRECOMPILING.set(note)
    try:
        with torch.inference_mode():
            for begin, end in ((0, 18), (18, 19), (19, 20)):
                model.logits(model.forward(feed(range(20), begin, end, torch.device("cpu")), kv))
    finally:
        PRECOMPILING.reset(recording)
    assert len(launches) > 10
    if shape == "qwen3-gqa":
        assert {name for name, dependent in launches if dependent} >= EARLY
    for name, before in running(launches):
        assert not before & WRITERS.get(name, frozenset()), name
