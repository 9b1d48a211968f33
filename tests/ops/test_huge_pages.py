"""Memory in huge pages: zeros of any shape, which share nothing but what holds them."""

from __future__ import annotations

import mmap
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quire.ops.huge_pages import CHUNK, PAGE, HugePages, huge_zeros


@pytest.mark.parametrize("count", [1, PAGE - 1, PAGE, 3 * PAGE + 5])
def test_they_are_zeros_and_begin_with_a_page(count: int) -> None:
    made = huge_zeros(count, dtype=torch.uint8)
    assert made.shape == (count,)
    assert not made.any()
    assert made.fill_(7).sum(dtype=torch.int64) == 7 * count
    if count >= PAGE and sys.platform == "linux":
        assert made.data_ptr() % PAGE == 0
    assert huge_zeros(3, PAGE, dtype=torch.bfloat16).shape == (3, PAGE)


def test_small_tensors_share_a_chunk_and_no_numbers() -> None:
    memory, sizes = HugePages(), [(3, 5), (1000,), (7, 1 << 20), (2, 2), (0, 4), (CHUNK // 4 + 1,)]
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda size: memory.zeros(*size, dtype=torch.int32), sizes * 9))
    for i, each in enumerate(made):
        assert not each.any()
        each.fill_(i + 1)
    assert all(bool((each == i + 1).all()) for i, each in enumerate(made))
    assert all(each.data_ptr() % 64 == 0 for each in made if each.numel())
    small = [each for each in made if 0 < each.nbytes < 4096]
    assert max(each.data_ptr() for each in small) - min(each.data_ptr() for each in small) < len(sizes) * CHUNK
    assert torch.equal(memory.copy(torch.arange(6).view(2, 3).t()), torch.arange(6).view(2, 3).t())


def test_systems_without_huge_pages_have_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise OSError("invalid argument")

    monkeypatch.setattr(mmap, "mmap", Plain)
    assert huge_zeros(PAGE, dtype=torch.uint8).shape == (PAGE,)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert huge_zeros(PAGE, dtype=torch.uint8).shape == (PAGE,)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system itself")
@pytest.mark.parametrize("size", [1 << 50, 1 << 64])
def test_too_much_is_refused_as_torch_refuses_it(size: int) -> None:
    with pytest.raises(RuntimeError, match=f"no memory for {size:,} bytes"):
        huge_zeros(size, dtype=torch.uint8)
