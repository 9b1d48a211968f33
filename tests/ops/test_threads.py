"""Threads that compute beside each other with one thread of torch's each."""

from __future__ import annotations

import threading

import pytest
import torch

from quire.ops.threads import single_threads


def test_each_thread_computes_alone_and_others_as_before() -> None:
    before = torch.get_num_threads()
    together = threading.Barrier(3)

    def own(_: int) -> int:
        together.wait(60)
        return torch.get_num_threads()

    with single_threads(3, "some") as pool:
        assert list(pool.map(own, range(3))) == [1, 1, 1]
        assert torch.get_num_threads() == before
    later = list[int]()
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [before]


def test_what_has_not_begun_is_cancelled_by_an_error() -> None:
    begun, go = list[int](), threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise ValueError("zero")
        go.wait(60)

    def all_of_them() -> None:
        with single_threads(1, "one") as pool:
            try:
                list(pool.map(work, range(50)))
            finally:
                go.set()

    with pytest.raises(ValueError, match="zero"):
        all_of_them()
    assert len(begun) < 50
