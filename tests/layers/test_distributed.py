"""Which way a group's sums take, in a group of one process; what several give is in `tests/assembly`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quire.layers.distributed import DistributedGroup, SmallReduce
from quire.ops.capture import PRECOMPILING
from quire.ops.operands import Norm
from quire.ops.reference import ReferenceOps


class Doubled:
    """Says that it was called."""

    most = 16

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * x

    def add_norm(self, x: Tensor, residual: Tensor, *how: object) -> tuple[Tensor, Tensor]:
        return x, residual + 2 * x

    def gather(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def group(make: object, *, in_rank_order: bool = True) -> DistributedGroup:
    made = DistributedGroup(
        0,
        1,
        1,
        in_rank_order=in_rank_order,
        timeout=timedelta(seconds=60),
        neighbours=1,
        make_small_reduce=make,  # type: ignore[arg-type]
    )
    made.connect()
    return made


def test_sums_up_to_so_many_bytes_are_small() -> None:
    made = group(lambda group, rank: Doubled())
    assert made.all_reduce(torch.ones(4)).tolist() == [2.0] * 4
    assert made.all_reduce(torch.ones(5)).tolist() == [1.0] * 5


@pytest.mark.parametrize(
    ("columns", "widths", "by"), [(4, [4], 2.0), (5, [5], 1.0), (2, [1, 2], 1.0)], ids=["small", "large", "uneven"]
)
def test_rows_up_to_so_many_bytes_are_gathered_as_small_sums_are_where_all_are_as_wide(
    columns: int, widths: list[int], by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = group(lambda group, rank: Doubled())
    monkeypatch.setattr(made, "_gathered", lambda x: torch.stack([x] * len(widths)))
    assert made.all_gather(torch.ones(9, columns), widths).tolist() == [[by] * sum(widths)] * 9


@pytest.mark.parametrize(("numbers", "in_rank_order", "added"), [(4, False, 2.0), (5, False, 1.0), (4, True, 2.0)])
def test_small_sums_are_added_and_normed_in_one_kernel(numbers: int, in_rank_order: bool, added: float) -> None:
    made = group(lambda group, rank: Doubled(), in_rank_order=in_rank_order)
    x, norm = torch.ones(1, numbers), Norm(torch.ones(numbers), 0.0)
    normed, residual = made.add_norm(ReferenceOps(), x, torch.ones(1, numbers), norm, None, 1.0, None)
    assert residual.tolist() == [[1.0 + added] * numbers]
    alone = numbers == 4 and not in_rank_order
    assert (normed is x) == alone, "deterministic norms are those of any number of rows"


def test_where_memory_is_not_reached_sums_are_the_librarys() -> None:
    def make(group: dist.ProcessGroup, rank: int) -> SmallReduce:
        raise RuntimeError("no peer access")

    assert group(make).all_reduce(torch.ones(4)).tolist() == group(None).all_reduce(torch.ones(4)).tolist() == [1.0] * 4


def test_nothing_is_exchanged_while_kernels_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    made = group(lambda group, rank: Doubled())
    monkeypatch.setattr(made, "_reduce", None)
    monkeypatch.setattr(made, "_gathered", None)
    recording = PRECOMPILING.set(lambda *launch: None)
    try:
        assert made.all_reduce(torch.ones(5)).shape == (5,)
        assert made.all_reduce(torch.ones(4)).tolist() == [2.0] * 4, "its launch is recorded"
        assert made.all_gather(torch.ones(3, 4), [4]).tolist() == [[2.0] * 4] * 3, "so is this one"
        assert made.all_gather(torch.ones(3, 5), [5]).shape == (3, 5)
    finally:
        PRECOMPILING.reset(recording)
