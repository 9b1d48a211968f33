"""Norms that a quantized matrix or a router alone reads are made for it; others are plain."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops.capture import PRECOMPILING
from quire.ops.operands import AnyMatrix, Gate, Norm, NormedRows, UnnormedRow
from quire.ops.reference import ReferenceOps
from quire.ops.triton import integer_row
from quire.ops.triton.launch import HOPPER, DeviceInfo
from quire.ops.triton.ops import TritonOps
from quire.weights.canary import feed, pages
from quire.weights.load import load_model
from tests.checkpoints import make
from tests.models.feeding import Feeder


class Recorded(TritonOps):
    """Keeps for what norms were made."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.made = list[str]()

    def add_norm_route(self, *given, **named):
        self.made.append("router")
        return super().add_norm_route(*given, **named)

    def add_norm_rounded(self, *given, **named):
        self.made.append("matrix")
        return super().add_norm_rounded(*given, **named)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")
@pytest.mark.parametrize(
    ("shape", "quantization", "made"),
    [
        ("qwen3-gqa", "auto", []),
        ("qwen3-gqa", "fp8", 3 * ["matrix", "matrix"]),
        ("mixtral-gqa", "auto", 3 * ["router"]),
        ("mixtral-gqa", "fp8", 3 * ["matrix", "router"]),
        ("deepseek_v2-plain-queries", "auto", 2 * ["router"]),  # the first layer has no experts
        ("qwen3_next-shared-keys", "fp8", 4 * ["matrix", "router"]),
        ("gemma2-gqa", "fp8", ["matrix"]),  # what is added has norms of its own
        ("nemotron-gqa", "fp8", 3 * ["matrix"]),  # an MLP without a gate
    ],
)
def test_norms_are_made_for_what_reads_them(tmp_path: Path, shape: str, quantization: str, made: list[str]) -> None:
    make(tmp_path, shape)
    ops = Recorded()
    model = load_model(tmp_path, dtype="float16", ops=ops, quantization=quantization)
    Feeder(model, page_size=16, dtype=torch.float16).step([(0, [7 * i % 190 for i in range(5)])])
    assert ops.made == made


class Leaving(ReferenceOps):
    """Leaves norms to the products that read them, as kernels do with a row; there is no sum until then."""

    def add_norm_rounded(
        self, x: Tensor, residual: Tensor, norm: Norm, matrix: AnyMatrix, scale: float = 1.0
    ) -> tuple[Tensor | NormedRows, Tensor]:
        total = torch.full_like(residual, float("nan"))
        return UnnormedRow(x, residual.clone(), total, norm, scale), total

    def multiply_normed(self, x: NormedRows, matrix: AnyMatrix, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        assert isinstance(x, UnnormedRow)
        normed, total = self.add_norm(x.row, x.residual, x.norm, None, x.scale)
        x.total.copy_(total)
        return self.quantized_linear(normed, matrix, bias, gate)


@pytest.mark.parametrize(
    "shape",
    ["qwen3-gqa", "granitemoeshared-gqa", "mixtral-gqa", "qwen3_next-shared-keys", "gemma2-gqa", "nemotron-gqa"],
)
def test_nothing_reads_a_sum_before_the_product_that_writes_it(tmp_path: Path, shape: str) -> None:
    make(tmp_path, shape)
    made = []
    for ops in (ReferenceOps(), Leaving()):
        model = load_model(tmp_path, dtype="float32", ops=ops, quantization="fp8")
        feeder = Feeder(model, page_size=16, dtype=torch.float32)
        made += [*feeder.step([(0, [7 * i % 190 for i in range(5)])]), *feeder.step([(0, [3])])]
    first, second, *left = made
    assert all(torch.equal(*pair) for pair in zip((first, second), left, strict=True))


def test_on_hopper_no_norm_of_one_row_with_whole_numbers_is_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 128}
    make(tmp_path, "qwen3-gqa", **sizes)
    monkeypatch.setattr("quire.weights.load.can_pack", lambda *asked: False)  # as on a GPU
    monkeypatch.setattr(integer_row, "LEAST_BYTES", 0)
    ops, launches = TritonOps("cpu"), list[tuple[str, bool]]()
    model = load_model(tmp_path, dtype="bfloat16", ops=ops, quantization="q8_0")
    ops.card = DeviceInfo(132, HOPPER, True, "tf32x3", 227 << 10, MappingProxyType({"launch_pdl": True}))
    kv, one = pages(model, 20, torch.device("cpu")), feed(range(20), 18, 19, torch.device("cpu"))

    def note(kernel: Any, grid: object, *arguments: Any, **options: Any) -> None:
        if kernel.fn.__name__ in ("ring_kernel", "norm_kernel"):
            launches.append((kernel.fn.__name__, options.get("NORMED", False)))

    recording = PRECOMPILING.set(note)
    try:
        with torch.inference_mode():
            model.forward(one, kv)
    finally:
        PRECOMPILING.reset(recording)
    pair = [("ring_kernel", True), ("ring_kernel", False)]  # into attention or the MLP, and out of it
    count = len(launches) // 2  # of layers that are alike not all are run for their kernels alone
    assert count > 1 and launches == count * pair + [("norm_kernel", False)]
