"""A model is ready before its matrices are read, and says the same when they have been."""

from __future__ import annotations

import atexit
import io
import select
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.assembly import engine as assembly
from quire.config import Settings
from quire.engine.process import EngineLoop
from quire.engine.protocol import FrameReader, ToFront, encode_frame, submission
from quire.engine.step_watch import StepWatch
from quire.errors import InvalidModel, ModelLost
from quire.layers.basic import StoredEmbedding
from quire.layers.quantization.base import Packable, WeightSlot
from quire.layers.quantization.deferred import Deferred
from quire.layers.quantization.mapped import Packing, pack_beside
from quire.layers.quantization.packed import Panels
from quire.models.registry import Model
from quire.ops.native.library import best_level
from quire.ops.operands import Gate
from quire.types import Request, SamplingParams
from quire.weights import load
from quire.weights.canary import Canary, Quality, Threshold
from quire.weights.kept_result import KeptResult
from quire.weights.load import load_model
from tests.checkpoints import make
from tests.gguf_files import write
from tests.layers.test_mapped import WIDE, native, said
from tests.quantised import quantise

pytestmark = pytest.mark.skipif(best_level() is None, reason="needs a processor that the kernels run on")

PROMPT = list(range(1, 40))
FOUND = Quality(positions=64, agreement=1.0, kl=0.0, nll=1.0, before=1.0)


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "WAITING", (1, 1 << 40))


def written(folder: Path, shape: str, **changed: Any) -> Path:
    make(folder, shape, **changed)
    return folder


def judged(folder: Path, quality: Quality | None = FOUND) -> Canary:
    """A canary that has judged the model at an earlier start, or has not."""
    kept = KeptResult(folder / "kept.json", "1")
    if quality is not None:
        kept.write(asdict(quality))
    return Canary(threshold=Threshold(), keep=lambda: kept)


def loaded(folder: Path, unpacked: list[Packable] | None, canary: Canary | None = None, **more: Any) -> Model:
    return load_model(folder, dtype="bfloat16", ops=native(), unpacked=unpacked, canary=canary, **more)


# Of each way in which a matrix is stored: tied and untied heads, quantized while it is loaded, and before.
GPT2 = "gpt2-one-head"
ONLINE = ("int8", "int8_w8a8", "fp8", "q4_k")
STORED = ("int4-packed", "awq", "int8-w8a8", "fp8-blocks")


@pytest.mark.parametrize("kind", ["llama-gqa-tied", "qwen2-gqa", GPT2, *ONLINE, *STORED])
def test_a_model_says_the_same_while_it_is_read_and_afterwards(tmp_path: Path, kind: str) -> None:
    shape = kind if kind not in (*ONLINE, *STORED) else "llama-gqa-tied"
    folder = written(tmp_path / "source", shape, **({} if shape == GPT2 else WIDE))
    if kind in STORED:
        quantise(folder, kind)
    how: dict[str, Any] = {"quantization": kind} if kind in ONLINE else {}
    wanted = said(loaded(folder, None, **how), PROMPT)
    for packs in (False, True):  # who packs: the first step alone, or a thread as well
        unpacked: list[Packable] = []
        ours: Any = loaded(folder, unpacked, judged(tmp_path), **how)
        assert unpacked and not any(each.packed for each in unpacked)
        assert all(isinstance(each, Deferred) for each in unpacked)
        assert shape == GPT2 or ours.decoder == (None, 0), "which reads packed matrices"
        thread = pack_beside(unpacked) if packs else None
        assert torch.equal(said(ours, PROMPT), wanted)
        if thread is not None:
            thread.join()
        assert all(each.packed for each in unpacked)
        assert shape == GPT2 or (ours.decoder[1] == len(ours.blocks) and not ours.unpacked)
        assert torch.equal(said(ours, PROMPT), wanted)


def test_a_tied_head_is_kept_once_and_an_untied_one_as_ever(tmp_path: Path) -> None:
    tied: Any = loaded(written(tmp_path / "tied", "llama-gqa-tied", **WIDE), None)
    assert isinstance(tied.embedding, StoredEmbedding) and isinstance(tied.embedding.stored, Panels)
    assert tied.head.apply == tied.embedding.stored.apply
    plain: Any = load_model(tmp_path / "tied", dtype="bfloat16")
    tokens = torch.tensor([5, 0, 5, 17, tied.spec.vocab - 1])
    assert torch.equal(tied.embedding(tokens), plain.embedding(tokens))
    untied: Any = loaded(written(tmp_path / "untied", "qwen2-gqa", **WIDE), None)
    assert not isinstance(untied.embedding, StoredEmbedding)


def test_what_was_never_judged_is_read_at_once(tmp_path: Path) -> None:
    folder, unpacked = written(tmp_path / "source", "llama-gqa-tied", **WIDE), list[Packable]()
    loaded(folder, unpacked, quantization="int8")
    assert unpacked == []
    canary = judged(tmp_path, None)
    loaded(folder, unpacked, canary, quantization="int8")
    assert unpacked == [] and canary.quality is not None
    again = judged(tmp_path, None)
    loaded(folder, unpacked, again, quantization="int8")
    assert unpacked and again.quality == canary.quality


def test_what_was_judged_to_be_broken_is_not_served(tmp_path: Path) -> None:
    folder = written(tmp_path / "source", "llama-gqa-tied", **WIDE)
    with pytest.raises(InvalidModel, match="degraded"):
        loaded(folder, [], judged(tmp_path, Quality(64, 0.1, 9.0, 1.0, 1.0)), quantization="int8")


@pytest.mark.parametrize("sizes", [load.WAITING, (1, 1 << 20)])
def test_small_and_very_large_models_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]
) -> None:
    monkeypatch.setattr(load, "WAITING", sizes)
    unpacked = list[Packable]()
    loaded(written(tmp_path / "source", "llama-gqa-tied", **WIDE), unpacked)
    assert unpacked == []


def test_mixtures_of_experts_are_read_at_once(tmp_path: Path) -> None:
    unpacked = list[Packable]()
    folder = written(tmp_path / "source", "qwen3_moe-gqa", **WIDE, moe_intermediate_size=256)
    ours = loaded(folder, unpacked)
    assert unpacked == [] and torch.equal(said(ours, PROMPT), said(loaded(folder, None), PROMPT))


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_is_gone_or_another_one_fails_every_step_in_the_same_words(tmp_path: Path, replaced: bool) -> None:
    folder, unpacked = written(tmp_path / "source", "qwen2-gqa", **WIDE), list[Packable]()
    ours = loaded(folder, unpacked)
    for file in folder.glob("*.safetensors"):
        held = file.read_bytes()
        file.unlink()
        if replaced:
            (folder / "new").write_bytes(held[::-1])
            (folder / "new").replace(file)
    for _ in range(2):
        with pytest.raises(ModelLost, match="safetensors has changed while the model was read from it"):
            said(ours, PROMPT)


class Counted:
    """A storage that is finalized once, and not before another thread has asked for it, too."""

    quantized = None

    def __init__(self) -> None:
        self.matrix: Any = None
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.count = 0

    def slots(self) -> list[WeightSlot]:
        return []

    def finalize(self) -> None:
        self.began.set()
        assert self.goes_on.wait(60)
        self.count += 1

    def apply(self, x: torch.Tensor, gate: Gate = "") -> torch.Tensor:
        assert self.count == 1
        return x


def test_threads_that_want_one_matrix_wait_for_the_one_that_makes_it() -> None:
    stored = Counted()
    matrix, reads, x = Deferred(stored), list[int](), torch.ones(1)
    matrix.read = lambda: reads.append(1)
    found = list[torch.Tensor]()
    packing = pack_beside([matrix])
    assert stored.began.wait(60)
    steps = [threading.Thread(target=lambda: found.append(matrix.apply(x))) for _ in range(2)]
    for each in steps:
        each.start()
    assert not matrix.packed and not found
    stored.goes_on.set()
    packing.join()
    for each in steps:
        each.join()
    assert reads == [1] and len(found) == 2 and matrix.packed


@pytest.mark.parametrize("gguf", [False, True])
def test_memory_that_weights_take_later_is_not_given_to_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf: bool
) -> None:
    packing = list[Packable]()
    monkeypatch.setattr(assembly, "pack_beside", packing.extend)
    monkeypatch.setattr(assembly, "host_bytes", lambda: 16 << 20)
    source, path = make(tmp_path / "source", "llama-gqa-tied", **WIDE), tmp_path / "model.gguf"
    write(path, source, "Q8_0")
    model = str(path if gguf else tmp_path / "source")
    engine = assembly.build_engine(Settings.of(model=model, device="cpu", dtype="bfloat16", max_model_len=64))
    about, coming = engine.executor.describe(), sum(each.nbytes for each in packing)
    assert coming > 1 << 19
    assert about.num_blocks + 1 == ((16 << 20) - coming) // 4 // about.block_bytes
    engine.executor.close()


@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("gguf", [False, True])
def test_an_engine_with_tiers_of_kv_reads_all_since_their_name_is_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiers: bool, gguf: bool
) -> None:
    packing = list[Packable]()
    monkeypatch.setattr(assembly, "pack_beside", packing.extend)
    source, path = make(tmp_path / "source", "llama-gqa-tied", **WIDE), tmp_path / "model.gguf"
    write(path, source, "Q8_0")
    folder = str(path if gguf else tmp_path / "source")
    more = {"kv_offloading_size": 0.001} if tiers else {}
    engine = assembly.build_engine(
        Settings.of(model=folder, device="cpu", dtype="bfloat16", max_model_len=64, num_gpu_blocks_override=16, **more)
    )
    assert bool(packing) == (not tiers)
    engine.executor.close()


def test_a_model_whose_weights_are_gone_is_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is at fault, and an engine that goes on would fail all of them and count as healthy."""
    monkeypatch.setattr(assembly, "pack_beside", lambda weights: None)
    folder = written(tmp_path / "source", "llama-gqa-tied", **WIDE)
    engine = assembly.build_engine(Settings.of(model=str(folder), device="cpu", dtype="bfloat16", max_model_len=64))
    for file in folder.glob("*.safetensors"):
        file.unlink()
    front, back = socket.socketpair()
    with front, back, closing(engine):
        front.sendall(
            encode_frame(
                submission([Request(id="r", prompt=tuple(PROMPT), max_new_tokens=4, sampling=SamplingParams())])
            )
        )
        assert EngineLoop(engine, back, dict, StepWatch(out=io.StringIO())).run() is False, "its process ends"
        messages = list(FrameReader(ToFront).feed(front.recv(1 << 16)))
    (output,) = [output for message in messages for output in message.events]
    assert output.status == 503 and "could not be read" in output.error


def test_an_idle_engine_whose_weights_are_gone_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it counts as healthy until somebody asks."""
    monkeypatch.setattr(assembly, "pack_beside", Packing)
    folder = written(tmp_path / "source", "llama-gqa-tied", **WIDE)
    engine = assembly.build_engine(Settings.of(model=str(folder), device="cpu", dtype="bfloat16", max_model_len=64))
    executor: Any = engine.executor
    for file in folder.glob("*.safetensors"):
        file.unlink()
    front, back = socket.socketpair()
    with front, back, closing(engine):
        loop = EngineLoop(engine, back, dict, StepWatch(out=io.StringIO()), exit_fds=executor.exit_fds())
        executor.packing.start()
        assert loop.run() is False, "its process ends"
        executor.packing.join()
        assert select.select(executor.exit_fds(), [], [], 0)[0], "who asks later knows at once"


class Slow:
    """A matrix that is packed when the test says so."""

    nbytes = 0

    def __init__(self) -> None:
        self.packed, self.began, self.goes_on = False, threading.Event(), threading.Event()

    def pack(self) -> None:
        self.began.set()
        assert self.goes_on.wait(60)
        self.packed = True


def test_packing_ends_before_the_interpreter_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would stop a thread within torch, and that aborts the process."""
    at_exit = list[Callable[[], object]]()
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    last, first = Slow(), Slow()
    packing = Packing([last, first])
    packing.start()
    assert first.began.wait(60)
    exiting = threading.Thread(target=at_exit[0])
    exiting.start()
    while not packing._ending.is_set():
        exiting.join(0.001)
    assert exiting.is_alive() and packing.is_alive()
    first.goes_on.set()
    exiting.join()
    assert first.packed and not packing.is_alive() and not last.began.is_set() and at_exit == []


def test_an_engine_that_is_closed_packs_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrices, packing = [Slow(), Slow()], list[Packing]()

    def begun(weights: list[Packable]) -> Packing:
        packing.append(Packing(matrices))
        packing[0].start()
        return packing[0]

    monkeypatch.setattr(assembly, "pack_beside", begun)
    folder = written(tmp_path / "source", "llama-gqa-tied", **WIDE)
    engine = assembly.build_engine(Settings.of(model=str(folder), device="cpu", dtype="bfloat16", max_model_len=64))
    assert matrices[1].began.wait(60)
    engine.close()
    matrices[1].goes_on.set()
    packing[0].join()
    assert not matrices[0].began.is_set()


class Watched:
    """A matrix that notes which thread packs it, and by how many of torch's threads."""

    nbytes, packed = 0, False

    def __init__(self, seen: list[tuple[str, int]]) -> None:
        self.seen = seen

    def pack(self) -> None:
        self.seen.append((threading.current_thread().name, torch.get_num_threads()))


def test_an_idle_engine_packs_by_all_threads_each_of_which_computes_alone() -> None:
    before, found, matrices = torch.get_num_threads(), list[int](), [Slow(), Slow()]
    torch.set_num_threads(2)
    packing = pack_beside(matrices)
    assert all(each.began.wait(60) for each in matrices), "at once: neither has ended"
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert torch.get_num_threads() == 2 and found == [2]
    for each in matrices:
        each.goes_on.set()
    packing.join()
    torch.set_num_threads(before)


def test_one_thread_alone_packs_beside_steps() -> None:
    seen = list[tuple[str, int]]()
    packing = Packing([Watched(seen) for _ in range(50)], threads=3)
    with packing.beside_step():
        packing.start()
        packing.join()
    assert seen == [("quire-pack-0", 1)] * 50


def test_what_an_executor_launches_is_a_step_to_packing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "pack_beside", Packing)
    folder = written(tmp_path / "source", "llama-gqa-tied", **WIDE)
    engine = assembly.build_engine(Settings.of(model=str(folder), device="cpu", dtype="bfloat16", max_model_len=64))
    executor: Any = engine.executor
    running, launch = list[int](), executor.runner.launch

    def watched(plan: object) -> object:
        running.append(executor.packing._steps)
        return launch(plan)

    executor.runner.launch = watched
    engine.submit(PROMPT, 2)
    while engine.has_pending_work:
        engine.step()
    assert set(running) == {1} and executor.packing._steps == 0
    engine.close()
