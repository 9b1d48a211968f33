"""An indexer's choice, and attention to what it chose: against a loop over tokens, in every class of operations of a
CPU; and alike to the bit in any batch, where that is promised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest
import torch

from quire.assembly.engine import choose_ops
from quire.ops.base import Ops
from quire.ops.batch_invariant import BatchInvariantOps, SteadyOps
from quire.ops.quantized import E4M3
from quire.ops.ragged import LayerKV
from quire.ops.reference import ReferenceOps, best
from tests.ops.indexing import DIM, LENGTHS, Fed, naive

CPU: Mapping[str, Callable[[], Ops]] = MappingProxyType(
    {
        "reference": ReferenceOps,
        "batch-invariant": BatchInvariantOps,
        "steady": lambda: SteadyOps(64),
        "kernels": lambda: choose_ops(torch.device("cpu")),
        "kernels, deterministic": lambda: choose_ops(torch.device("cpu"), True),
    }
)


@pytest.mark.parametrize("name", CPU)
@pytest.mark.parametrize("count", [1, 8, 40])
def test_choices_and_results_are_those_of_the_formulas(name: str, count: int) -> None:
    fed = Fed(CPU[name](), count)
    got, start = fed.chunks(count), 0
    for s, n in enumerate(LENGTHS):
        seen, want = naive(s, count)
        assert fed.positions(s) == seen
        assert (got[start : start + n] - want).abs().max() < 2e-6
        start += n


@pytest.mark.parametrize(
    ("name", "dtype"), [("batch-invariant", torch.float32), ("kernels, deterministic", torch.bfloat16)]
)
def test_results_do_not_depend_on_batches_and_chunks(name: str, dtype: torch.dtype) -> None:
    wanted = Fed(CPU[name](), 8, dtype=dtype).chunks(0)
    assert wanted.isfinite().all()
    for seed, size in ((1, 4), (2, 16), (3, 1)):
        assert torch.equal(Fed(CPU[name](), 8, size=size, dtype=dtype).chunks(seed), wanted)


def test_of_equal_scores_the_first_are_chosen() -> None:
    scores = torch.tensor([[1.0, 3.0, 1.0, 1.0, 2.0, 1.0, 1.0], [0.0, -0.0, 0.0, -1.0, 0.0, -0.0, 5.0]])
    assert best(scores, 4).tolist() == [[0, 1, 2, 4], [0, 1, 2, 6]]
    assert best(scores, 7).tolist() == [list(range(7))] * 2
    assert best(torch.zeros(3, 9), 4).tolist() == [list(range(4))] * 3


@pytest.mark.parametrize("name", CPU)
def test_a_query_without_any_number_still_has_a_choice(name: str) -> None:
    fed = Fed(CPU[name](), 8)
    fed.inputs[0].index_q[100] = torch.nan
    fed.chunks(5)
    assert fed.positions(0)[100] == list(range(8))
    assert fed.positions(0)[101] == naive(0, 8)[0][101]


def test_a_short_sequence_beside_a_long_one_costs_no_choice() -> None:
    fed = Fed(ReferenceOps(), 8)
    fed.step([(0, 20), (1, 5)])
    fed.step([(0, 1), (1, 1)])
    assert not fed.chosen[1][1].any()
    assert torch.equal(fed.results[1][1], fed.results[1][1].nan_to_num())


def test_float8_keeps_keys_of_an_indexer() -> None:
    exact, rough = (Fed(ReferenceOps(), 40) for _ in range(2))
    rough.kv = LayerKV(
        *(torch.zeros(pool.shape, dtype=E4M3) for pool in (rough.kv.k, rough.kv.v)),
        k_scale=0.05,
        v_scale=0.05,
        index=torch.zeros(200, 1, 4, DIM, dtype=E4M3),
    )
    wanted, got = exact.chunks(0), rough.chunks(0)
    same = [len(set(a) & set(b)) / len(a) for a, b in zip(exact.positions(0), rough.positions(0), strict=True)]
    assert min(same) > 0.7
    assert (got - wanted).abs().mean() < 0.1 * wanted.abs().mean()
