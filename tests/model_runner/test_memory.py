"""The pool's size is computed: from the layers, the budget and what the limits can use."""

from __future__ import annotations

import pytest
import torch

from quire.errors import InvalidConfig
from quire.model_runner.memory import (
    GIB,
    LayerShape,
    activation_bytes,
    allocate,
    block_bytes,
    cpu_budget,
    layer_shapes,
    plan_blocks,
    usable_blocks,
)
from quire.ops.ragged import KVShape
from quire.scheduler.kv_cache import KVCacheManager

LAYERS = layer_shapes((KVShape(3, 64, 64),) * 30, torch.bfloat16)


def test_a_block_is_keys_and_values_of_every_layer() -> None:
    assert block_bytes(LAYERS, 16) == 2 * 16 * 3 * 64 * 2 * 30
    mixed = (LayerShape(1, 200, 312, torch.bfloat16), LayerShape(4, 128, 128, torch.float32))
    assert block_bytes(mixed, 8) == 2 * 8 * (256 * 2 + 4 * 128 * 4)


def test_what_is_allocated_is_what_was_computed_and_reads_zero() -> None:
    mixed = (LayerShape(1, 8, 20, torch.bfloat16), LayerShape(2, 4, 4, torch.float32))
    kv = allocate(mixed, pages=5, page_size=4)
    assert [tuple(each.k.shape) for each in kv] == [(6, 1, 4, 8), (6, 2, 4, 4)]
    assert [tuple(each.v.shape) for each in kv] == [(6, 1, 4, 20), (6, 2, 4, 4)]
    assert sum(t.nbytes for each in kv for t in (each.k, each.v)) == 6 * block_bytes(mixed, 4)
    assert all(not t.any() for each in kv for t in (each.k, each.v))
    assert all(each.k.data_ptr() != each.v.data_ptr() for each in kv)


@pytest.mark.parametrize(("rows", "length", "size"), [(1, 2, 16), (4, 33, 16), (4, 34, 16), (7, 100, 1), (2, 64, 64)])
def test_usable_blocks_are_what_the_scheduler_would_give(rows: int, length: int, size: int) -> None:
    assert usable_blocks(rows, length, size) == rows * KVCacheManager(1, size).blocks_for(length)


def test_a_small_budget_decides_the_blocks_and_includes_the_null_block() -> None:
    each = block_bytes(LAYERS, 16)
    assert plan_blocks(LAYERS, page_size=16, rows=64, max_model_len=1024, budget=100 * each) == 99
    assert plan_blocks(LAYERS, page_size=16, rows=64, max_model_len=1024, budget=101 * each - 1) == 99


def test_a_large_budget_is_capped_at_what_the_limits_use() -> None:
    assert plan_blocks(LAYERS, page_size=16, rows=4, max_model_len=1024, budget=1 << 50) == 4 * 64


def test_too_small_a_budget_says_what_would_fit() -> None:
    budget = 11 * block_bytes(LAYERS, 16)
    with pytest.raises(
        InvalidConfig, match=r"max_model_len 1024 needs 22\.85 MiB: lower max_model_len to 161"
    ) as caught:
        plan_blocks(LAYERS, page_size=16, rows=4, max_model_len=1024, budget=budget)
    assert "holds 161 tokens" in str(caught.value)
    assert plan_blocks(LAYERS, page_size=16, rows=4, max_model_len=161, budget=budget) == 10
    with pytest.raises(InvalidConfig):
        plan_blocks(LAYERS, page_size=16, rows=4, max_model_len=162, budget=budget)


def test_where_not_one_block_fits_no_shorter_context_is_advised() -> None:
    with pytest.raises(InvalidConfig, match="holds no tokens") as caught:
        plan_blocks(LAYERS, page_size=16, rows=4, max_model_len=1024, budget=5)
    assert "lower" not in str(caught.value)


def test_a_pool_that_cannot_be_allocated_says_how_large_it_would_be() -> None:
    with pytest.raises(MemoryError, match=r"1,099,511,627,776 KV blocks of 16 tokens take \d+\.\d\d GiB"):
        allocate(LAYERS, pages=1 << 40, page_size=16)


def test_the_size_of_a_pool_that_cannot_be_allocated_is_that_of_all_its_blocks_and_the_null_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(torch, "zeros", refuse)
    size = 4 * block_bytes(LAYERS, 16)
    with pytest.raises(MemoryError, match=f"3 KV blocks of 16 tokens take {size / (1 << 20):.2f} MiB"):
        allocate(LAYERS, pages=3, page_size=16)


def test_the_default_budget_is_modest() -> None:
    assert cpu_budget(100 * GIB) == 4 * GIB
    assert cpu_budget(8 * GIB) == 2 * GIB


def test_activations_grow_with_the_tokens_fed_until_logits_outweigh_them() -> None:
    sizes = {"hidden": 576, "widest": 3072, "vocab_size": 49152, "dtype": torch.bfloat16}
    prefill = activation_bytes(tokens=2048, logits=1, **sizes)
    assert prefill == 2048 * (3 * 576 + 2 * 3072) * 2
    decode = activation_bytes(tokens=256, logits=256, **sizes)
    assert decode > 256 * 49152 * 8
    assert activation_bytes(tokens=4096, logits=1, **sizes) == 2 * prefill
