"""Copies of blocks between a pool, host memory and files: the same bits, whatever is copied meanwhile; bad files."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from quire.executors import block_store
from quire.executors.block_files import HEADER, BadBlock, BlockFiles
from quire.executors.block_store import (
    DeviceCopies,
    HostCopies,
    PoolCopies,
    TieredBlockStore,
    TorchMover,
    block_bytes,
    digest_of,
    host_lines,
    pool_tensors,
)
from quire.model_runner.graphs import CudaQueue, WorkQueue
from quire.model_runner.memory import LayerShape, allocate
from quire.ops.ragged import LayerKV
from quire.ops.triton.blocks import BlockCopies
from quire.scheduler.kv_offload import CopyDone

PAGES, SLOTS, SIZE = 150, 200, 4
KEYS = [bytes([i]) * 32 for i in range(PAGES + 1)]

LAYERS = {
    "float32": (LayerShape(2, 8, 8, torch.float32),) * 2,
    "bfloat16 of odd widths": (LayerShape(1, 3, 5, torch.bfloat16), LayerShape(2, 6, 6, torch.bfloat16)),
    "float8 and bfloat16": (LayerShape(2, 8, 8, torch.float8_e4m3fn), LayerShape(2, 8, 8, torch.bfloat16)),
    "latents": (LayerShape(1, 4, 16, torch.bfloat16),) * 3,
    "latents with an indexer's keys": (LayerShape(1, 4, 16, torch.bfloat16, index_dim=6),) * 3,
    "a layer without K/V of its own": (LayerShape(2, 8, 8, torch.float16), LayerShape(0, 8, 8, torch.float16)),
}


def pool(layers: Sequence[LayerShape], device: str = "cpu") -> list[LayerKV]:
    """A pool in which no two blocks are alike."""
    kv = allocate(layers, pages=PAGES, page_size=SIZE, device=device)
    for layer in kv:
        for each in layer.pools:
            if each.numel():
                bits = torch.randint(0, 100, each.view(torch.uint8).shape, dtype=torch.uint8, device=device)
                each.view(torch.uint8).copy_(bits)
    return kv


def contents(kv: Sequence[LayerKV]) -> list[torch.Tensor]:
    return [each.view(torch.uint8).reshape(len(each), -1).cpu().clone() for la in kv for each in la.pools]


def on_host(kv: Sequence[LayerKV]) -> tuple[PoolCopies, torch.Tensor]:
    lines = host_lines(SLOTS, block_bytes(kv), pinned=False)
    return HostCopies(kv, lines), lines


def as_on_a_device(kv: Sequence[LayerKV]) -> tuple[PoolCopies, torch.Tensor]:
    lines = host_lines(SLOTS, block_bytes(kv), pinned=False)
    return DeviceCopies(lines, TorchMover(pool_tensors(kv)), WorkQueue(), torch.device("cpu")), lines


def on_gpu(kv: Sequence[LayerKV]) -> tuple[PoolCopies, torch.Tensor]:
    device = torch.device("cuda", 0)
    lines = host_lines(SLOTS, block_bytes(kv), pinned=True)
    return DeviceCopies(lines, BlockCopies(pool_tensors(kv)), CudaQueue(device, 0), device), lines


CARD = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
Make = Callable[[Sequence[LayerKV]], tuple[PoolCopies, torch.Tensor]]
EVERY = pytest.mark.parametrize("make", [on_host, as_on_a_device, pytest.param(on_gpu, marks=CARD)])


def ended(store: TieredBlockStore, count: int = 1) -> list[CopyDone]:
    """The next copies to end."""
    done: list[CopyDone] = []
    until = time.monotonic() + 100
    while len(done) < count:
        assert time.monotonic() < until, "a copy does not end"
        store.wait(60)
        done += store.poll()
    return done


@EVERY
@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_blocks_come_back_bit_by_bit_into_other_places(layers: Sequence[LayerShape], make: Make) -> None:
    kv = pool(layers, "cuda" if make is on_gpu else "cpu")
    copies, lines = make(kv)
    store = TieredBlockStore(copies, lines)
    before, half = contents(kv), PAGES // 2
    assert block_bytes(kv) == sum(each.shape[1] for each in before)
    # More than is gathered at once, in no order.
    blocks = [(7 * i) % half + 1 for i in range(half)]
    store.save(1, [(KEYS[block], block, SLOTS - 1 - i) for i, block in enumerate(blocks)], False)
    assert ended(store)[0][:3] == ("save", 1, {})
    for layer in kv:
        for each in layer.pools:
            each.view(torch.uint8)[1 : half + 1] = 255
    store.load(2, [(KEYS[block], SLOTS - 1 - i, block + half) for i, block in enumerate(blocks)])
    assert ended(store)[0][:3] == ("load", 2, {})
    for old, new in zip(before, contents(kv), strict=True):
        assert torch.equal(new[half + 1 : 2 * half + 1], old[1 : half + 1])
        assert torch.equal(new[2 * half + 1 :], old[2 * half + 1 :]) and torch.equal(new[0], old[0])
    store.close()
    store.close()


@EVERY
@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_blocks_that_go_out_and_those_that_take_their_places_pass_each_other(
    layers: Sequence[LayerShape], make: Make
) -> None:
    kv = pool(layers, "cuda" if make is on_gpu else "cpu")
    copies, lines = make(kv)
    store, count = TieredBlockStore(copies, lines), PAGES // 2
    mine = contents(kv)
    store.save(1, [(KEYS[block], block, SLOTS - block) for block in range(1, count + 1)], False)
    ended(store)
    # Blocks 1, 2, ... become others, go out to slots 0, 1, ... and come back from where they were.
    for layer in kv:
        for each in layer.pools:
            each.view(torch.uint8)[1 : count + 1] += 1
    changed = contents(kv)
    places = [(7 * i) % count + 1 for i in range(count)]
    store.save(2, [(KEYS[block], block, block - 1) for block in places[: count - 9]], True)
    store.load(3, [(KEYS[block], SLOTS - block, block) for block in places])
    done = ended(store, 2)
    assert {(each.kind, each.ticket, len(each.failed)) for each in done} == {("save", 2, 0), ("load", 3, 0)}
    for old, new in zip(mine, contents(kv), strict=True):
        assert torch.equal(new, old)
    kept = torch.cat([each for each in changed if each.numel()], dim=1)
    for block in places[: count - 9]:
        assert torch.equal(lines[block - 1], kept[block])
    store.close()


def filed(folder: Path, fingerprint: bytes = b"f" * 32) -> tuple[TieredBlockStore, torch.Tensor, BlockFiles]:
    kv = pool(LAYERS["float32"])
    copies, lines = on_host(kv)
    lines.copy_(torch.randint(0, 255, lines.shape, dtype=torch.uint8))
    files = BlockFiles(folder, fingerprint, block_bytes(kv))
    return TieredBlockStore(copies, lines, files, 1000), lines, files


def test_files_are_private_and_come_back_in_the_order_of_use(tmp_path: Path) -> None:
    store, lines, files = filed(tmp_path)
    kept = lines.clone()
    for i in range(5):
        store.write(i + 1, KEYS[i], i)
    assert {each.kind for each in ended(store, 5)} == {"write"}
    path = files.path(KEYS[0])
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    lines.zero_()
    store.read(9, [(KEYS[i], 10 + i) for i in range(5)])
    assert [(each.kind, dict(each.failed)) for each in ended(store)] == [("read", {})]
    assert torch.equal(lines[10:15], kept[:5])
    for i in range(5):
        os.utime(files.path(KEYS[i]), ns=(0, 10**9 * (5 - i)))
    assert store.files() == [KEYS[i] for i in (4, 3, 2, 1, 0)]
    store.remove([KEYS[0], KEYS[3]])
    store.write(20, KEYS[7], 7)
    ended(store)
    assert set(store.files()) == {KEYS[i] for i in (1, 2, 4, 7)}
    store.close()


def change(at: int) -> Callable[[Path], None]:
    def work(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return work


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of the contents": (change(HEADER.size + 77), "checksum"),
    "the last bit": (change(-1), "checksum"),
    "a bit of the checksum": (change(HEADER.size - 1), "checksum"),
    "a bit of the key": (change(60), "checksum"),
    "a bit of the fingerprint": (change(30), "fingerprint"),
    "another version": (change(8), "format"),
    "no file of a block": (change(0), "format"),
    "another size in the header": (change(17), "format"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "truncated"),
    "cut in the header": (lambda path: path.write_bytes(path.read_bytes()[:20]), "truncated"),
    "empty": (lambda path: path.write_bytes(b""), "truncated"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "truncated"),
    "gone": (Path.unlink, "missing"),
    "another block": (
        lambda path: path.write_bytes((path.parent.parent / "01" / f"{'01' * 32}.kv").read_bytes()),
        "checksum",
    ),
    "a link": (lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")), "io"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "io"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_file_is_named_and_never_read(tmp_path: Path, name: str) -> None:
    spoil, reason = FAULTS[name]
    _, lines, files = filed(tmp_path)
    block = memoryview(lines.numpy()[0])
    files.write(KEYS[1], memoryview(lines.numpy()[1]))
    files.write(KEYS[2], block)
    spoil(files.path(KEYS[2]))
    with pytest.raises(BadBlock) as caught:
        files.read(KEYS[2], memoryview(bytearray(len(block))))
    assert caught.value.reason == reason
    files.read(KEYS[1], memoryview(bytearray(len(block))))


def test_blocks_of_another_fingerprint_or_size_are_not_read(tmp_path: Path) -> None:
    _, lines, files = filed(tmp_path)
    files.write(KEYS[1], memoryview(lines.numpy()[0]))
    other = BlockFiles(tmp_path, b"g" * 32, files.block_bytes)
    with pytest.raises(BadBlock, match="fingerprint"):
        other.read(KEYS[1], memoryview(bytearray(files.block_bytes)))
    files.write(KEYS[1], memoryview(lines.numpy()[0]))
    assert BlockFiles(tmp_path, b"f" * 32, files.block_bytes + 8).scan() == [] and files.scan() == []


def test_what_cannot_be_written_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    store, _, files = filed(tmp_path)
    files.path(KEYS[3]).parent.write_text("in the way")
    store.write(1, KEYS[3], 3)
    assert [dict(each.failed) for each in ended(store)] == [{KEYS[3]: "io"}]
    store.close()


KILLED = """
import sys
from pathlib import Path
from quire.executors.block_files import BlockFiles

files = BlockFiles(Path(sys.argv[1]), b"f" * 32, 1 << 20)
n = 0
while True:
    n += 1
    files.write(n.to_bytes(32, "little"), memoryview(n.to_bytes(4, "little") * (1 << 18)))
    if n == 20:
        print("begun", flush=True)
"""


def test_a_process_that_is_killed_while_writing_leaves_whole_blocks_alone(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, b"f" * 32, 1 << 20)
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        child.wait(60)
        child.stdout.close()
        keys = files.scan()
        assert len(keys) >= 19
        assert not list(tmp_path.rglob("*.part"))
        block = bytearray(1 << 20)
        for key in keys:
            files.read(key, memoryview(block))
            assert block == key[:4] * (1 << 18)


def test_a_store_is_not_closed_under_a_thread_that_wakes_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, *_ = filed(tmp_path)
    writing, go, found = threading.Event(), threading.Event(), list[bool]()
    waker, write = store._waker, os.write

    def slow(fd: int, data: bytes) -> int:
        if fd == waker:
            writing.set()
            assert go.wait(60)
            found.append(is_pipe(fd))
        return write(fd, data)

    monkeypatch.setattr(block_store.os, "write", slow)
    waking, closing = threading.Thread(target=store.wake), threading.Thread(target=store.close)
    waking.start()
    assert writing.wait(60)
    closing.start()
    closing.join(0.05)  # so long it would have taken, did it not wait
    go.set()
    for thread in (waking, closing):
        thread.join()
    assert found == [True] and not is_pipe(waker)
    store.wake()
    assert found == [True], "it writes nothing any more"


def is_pipe(fd: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


def test_work_that_fails_does_not_end_its_thread() -> None:
    workers, done = block_store.Workers("test", 1), threading.Event()
    workers.put(lambda: [].pop())
    workers.put(done.set)
    workers.close(60.0)
    assert done.is_set()


def test_the_digest_of_weights_shows_each_change() -> None:
    weights = [torch.arange(1000.0), torch.arange(7, dtype=torch.uint8), torch.ones(3, 5, dtype=torch.bfloat16)]
    digest = digest_of(weights)
    assert digest_of([each.clone() for each in weights]) == digest
    for i, place in ((0, 517), (1, 6), (2, 1)):
        changed = [each.clone() for each in weights]
        changed[i].view(-1)[place] += 1
        assert digest_of(changed) != digest
    assert digest_of([weights[0].view(10, 100), *weights[1:]]) != digest
