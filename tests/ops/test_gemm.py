"""Which product is taken: the fastest of what there is, remembered, and never looked for once an engine is ready."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.capture import PRECOMPILING
from quire.ops.cublaslt import CublasLt
from quire.ops.gemm import TORCH, TORCH_GEMM, GemmAlgorithm, GemmAutotuner, GemmShape, SameBits, autotuning, on_the_card

X, WEIGHT, BIAS = torch.ones(3, 4), torch.ones(2, 4), torch.ones(2)
SHAPE = "3,2,4,0,float32"


class Marked:
    """An algorithm that is recognised by its result."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        out.fill_(float(self.name))


class Two:
    """A library with two ways."""

    version = "a card, version 1"

    def supports(self, x: Tensor, weight: Tensor) -> bool:
        return len(x) > 1

    def algorithms(self, shape: GemmShape) -> Sequence[GemmAlgorithm]:
        return [Marked("7"), Marked("8")]

    def algorithm(self, shape: GemmShape, name: str) -> GemmAlgorithm:
        if not name.isdigit():
            raise ValueError(name)
        return Marked(name)


class Watch:
    """Returns the times that it was given, and counts its calls."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.asked = seconds, 0

    def __call__(self, works: Sequence[Callable[[], None]]) -> Sequence[float]:
        for work in works:
            work()
        self.asked += 1
        return self.seconds


def test_the_fastest_way_is_taken_from_then_on(tmp_path: Path) -> None:
    watch = Watch(3.0, 2.0, 1.0)
    library = GemmAutotuner(Two(), watch)
    with autotuning(tmp_path / "new" / "book.json"):
        assert torch.equal(library.linear(X, WEIGHT), torch.full((3, 2), 8.0))
        assert torch.equal(library.linear(X[:1], WEIGHT), F.linear(X[:1], WEIGHT)), "which the library does not take"
    assert torch.equal(library.linear(X[:, None], WEIGHT), torch.full((3, 1, 2), 8.0))
    assert watch.asked == 1
    said = json.loads((tmp_path / "new" / "book.json").read_text())
    assert said == {"format": 1, Two.version: {SHAPE: "8"}}


@pytest.mark.parametrize("bias", [None, BIAS])
def test_torch_multiplies_where_it_is_fastest(bias: Tensor | None, tmp_path: Path) -> None:
    library = GemmAutotuner(Two(), Watch(1.0, 2.0, 3.0))
    with autotuning(tmp_path / "book.json"):
        assert torch.equal(library.linear(X, WEIGHT, bias), F.linear(X, WEIGHT, bias))
    (name,) = json.loads((tmp_path / "book.json").read_text())[Two.version].values()
    assert name == TORCH


def test_what_is_known_is_not_timed_again(tmp_path: Path) -> None:
    book = tmp_path / "book.json"
    first, watch = GemmAutotuner(Two(), Watch(3.0, 1.0, 2.0)), Watch()
    with autotuning(book):
        first.linear(X, WEIGHT)
    again = GemmAutotuner(Two(), watch)
    with autotuning(book):
        assert torch.equal(again.linear(X, WEIGHT), torch.full((3, 2), 7.0))
    assert not watch.asked


def test_nothing_is_tried_once_the_engine_is_ready(tmp_path: Path) -> None:
    watch = Watch(3.0, 2.0, 1.0)
    library = GemmAutotuner(Two(), watch)
    with autotuning(tmp_path / "book.json"):
        pass
    assert torch.equal(library.linear(X, WEIGHT), F.linear(X, WEIGHT))
    assert not watch.asked
    assert not (tmp_path / "book.json").exists(), "there is nothing to keep"


def test_results_that_others_store_meanwhile_stay(tmp_path: Path) -> None:
    book = tmp_path / "book.json"
    with autotuning(book):
        GemmAutotuner(Two(), Watch(3.0, 1.0, 2.0)).linear(X, WEIGHT)
        with autotuning(book):
            GemmAutotuner(Two(), Watch(3.0, 2.0, 1.0)).linear(X[:2], WEIGHT)
    assert json.loads(book.read_text()) == {"format": 1, Two.version: {SHAPE: "7", "2,2,4,0,float32": "8"}}


@pytest.mark.parametrize(
    "said",
    [
        "{",
        "[]",
        json.dumps({Two.version: {SHAPE: 8}}),
        '{"a card, version 1": 3}',
        json.dumps({Two.version: {SHAPE: "no name"}}),
        '{"another": {"x": "8"}}',
    ],
    ids=["cut", "list", "no string", "number", "name", "version"],
)
def test_a_file_without_usable_results_is_written_again(said: str, tmp_path: Path) -> None:
    book, watch = tmp_path / "book.json", Watch(3.0, 1.0, 2.0)
    book.write_text(said)
    library = GemmAutotuner(Two(), watch)
    with autotuning(book):
        assert torch.equal(library.linear(X, WEIGHT), torch.full((3, 2), 7.0))
    assert watch.asked == 1
    assert json.loads(book.read_text())[Two.version] == {SHAPE: "7"}


def test_a_file_of_another_format_is_named_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    book, watch = tmp_path / "book.json", Watch(3.0, 1.0, 2.0)
    said = json.dumps({"format": 2, Two.version: {SHAPE: "8"}})
    book.write_text(said)
    library = GemmAutotuner(Two(), watch)
    with caplog.at_level(logging.WARNING), autotuning(book):
        assert torch.equal(library.linear(X, WEIGHT), torch.full((3, 2), 7.0))
    assert watch.asked == 1
    assert "is of format 2, and this version of Quire reads format 1" in caplog.text
    assert book.read_text() == said


def test_a_file_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    library = GemmAutotuner(Two(), Watch(3.0, 1.0, 2.0))
    with caplog.at_level(logging.WARNING), autotuning(tmp_path / "file" / "book.json"):
        library.linear(X, WEIGHT)
    assert "could not be written" in caplog.text


def test_without_a_library_torch_multiplies(tmp_path: Path) -> None:
    library = GemmAutotuner(None, Watch())
    with autotuning(tmp_path / "book.json"):
        assert torch.equal(library.linear(X, WEIGHT, BIAS), F.linear(X, WEIGHT, BIAS))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(24, 4096, 1024), (64, 1024, 3072), (448, 6144, 4096)])
def test_every_proposal_multiplies(rows: int, outputs: int, inputs: int, biased: bool) -> None:
    lt = CublasLt(torch.device("cuda"))
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) / inputs**0.5
    bias = torch.randn(outputs, device="cuda", dtype=torch.bfloat16) if biased else None
    want = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    shape = GemmShape(rows, outputs, inputs, biased, torch.bfloat16)
    ways = lt.algorithms(shape)
    assert ways
    for way in [*ways, lt.algorithm(shape, ways[-1].name)]:
        out = torch.full((rows, outputs), float("nan"), device="cuda", dtype=torch.bfloat16)
        way(x, weight, bias, out)
        assert float((out.float() - want).norm() / want.norm()) < 4e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tuned_algorithm_is_captured(tmp_path: Path) -> None:
    library = GemmAutotuner(CublasLt(torch.device("cuda")), on_the_card)
    x = torch.randn(96, 2048, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), autotuning(tmp_path / "book.json"):
        want = library.linear(x, weight)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        got = library.linear(x, weight)
        graph.capture_end()
        graph.replay()
    stream.synchronize()
    assert torch.equal(got, want)
    with pytest.raises(ValueError, match="small"):
        CublasLt(torch.device("cuda")).algorithm(GemmShape(96, 8192, 2048, False, torch.bfloat16), "00ff")


class Summed:
    """An algorithm that adds up products one after the other, forwards or backwards."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        out.zero_()
        for i in sorted(range(x.shape[1]), reverse=self.name == "backwards"):
            out += x[:, i : i + 1] * weight[:, i]
        if bias is not None:
            out += bias


class BothOrders(Two):
    """A library with an algorithm of either order, the wrong one first."""

    def algorithms(self, shape: GemmShape) -> Sequence[GemmAlgorithm]:
        return [Summed("backwards"), Summed("forwards")]

    def algorithm(self, shape: GemmShape, name: str) -> GemmAlgorithm:
        return Summed(name)


@pytest.mark.parametrize("bias", [None, torch.tensor([0.5, -1.25])])
def test_only_algorithms_of_the_same_order_are_taken(bias: Tensor | None, tmp_path: Path) -> None:
    x, weight, usual = torch.randn(3, 50), torch.randn(2, 50), Summed(TORCH)
    same = SameBits(BothOrders(), usual, 2, torch.device("cpu"))
    library = GemmAutotuner(same, Watch(2.0, 1.0), usual)
    with autotuning(tmp_path / "book.json"):
        assert library.algorithm(x, weight, bias).name == "forwards"
        assert library.algorithm(x[:1], weight, bias) is usual, "too few rows"
    assert library.untuned().algorithm(x, weight, bias) is usual
    written = json.loads((tmp_path / "book.json").read_text())
    (key,) = set(written) - {"format"}
    assert key == f"{Two.version}, in order", "default mode has its own"


def test_a_remembered_algorithm_is_compared_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x, weight, usual = torch.randn(3, 50), torch.randn(2, 50), Summed(TORCH)
    same, shape = SameBits(BothOrders(), usual, 2, torch.device("cpu")), GemmShape(3, 2, 50, False, torch.float32)
    book = tmp_path / "book.json"
    book.write_text(json.dumps({"format": 1, same.version: {str(shape): "backwards"}}))
    with autotuning(book), caplog.at_level(logging.WARNING):
        assert GemmAutotuner(same, Watch(2.0, 1.0), usual).algorithm(x, weight, None).name == "forwards"
    assert "differ" in caplog.text
    assert json.loads(book.read_text())[same.version][str(shape)] == "forwards"
    caplog.clear()
    with autotuning(book):
        assert GemmAutotuner(same, Watch(), usual).algorithm(x, weight, None).name == "forwards", "without timing"


def test_without_memory_to_compare_the_usual_algorithm_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object, **options: object) -> Tensor:
        raise torch.OutOfMemoryError

    same = SameBits(BothOrders(), TORCH_GEMM, 2, torch.device("cpu"))
    monkeypatch.setattr(same, "_compared", full)
    with autotuning(tmp_path / "book.json"):
        assert GemmAutotuner(same, Watch(1.0)).algorithm(X, WEIGHT, None) is TORCH_GEMM
    assert "not enough memory" in caplog.text


def test_nothing_is_compared_while_kernels_are_compiled_and_not_run(tmp_path: Path) -> None:
    calls = 0

    def count(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        nonlocal calls
        calls += 1

    x, weight, usual = torch.randn(3, 50), torch.randn(2, 50), Summed(TORCH)
    same = SameBits(BothOrders(), usual, 2, torch.device("cpu"))
    library = GemmAutotuner(same, Watch(2.0, 1.0), usual)
    token = PRECOMPILING.set(lambda *args, **options: None)
    try:
        with autotuning(tmp_path / "book.json"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Summed, "__call__", lambda self, *args: count(*args))
            assert library.algorithm(x, weight, None) is usual
    finally:
        PRECOMPILING.reset(token)
    assert calls == 1, "what comparing launches is compiled"
    with autotuning(tmp_path / "book.json"):
        assert library.algorithm(x, weight, None).name == "forwards", "what was not compared is not remembered"
