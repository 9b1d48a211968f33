"""Every kernel compiles for every kind of card, within its shared memory, on a machine that has none."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest

from tests.ops.triton.programs import said

SLOW = pytest.mark.nightly

SPILLED = MappingProxyType({"attention_kernel": 600, "block_kernel": 200})
"""Bytes a thread at most where it is not 96: tiles of latents that spill are faster than those that do not (measured,
H200), and rows of Q4_K's blocks spill for Triton 3.9, not for 3.6, with which they were measured."""


@pytest.mark.parametrize(
    ("capability", "kilobytes"),
    [
        pytest.param(80, 163, marks=SLOW, id="ampere"),
        pytest.param(86, 99, marks=SLOW, id="small-ampere"),
        pytest.param(89, 99, marks=SLOW, id="ada"),
        pytest.param(90, 227, marks=SLOW, id="hopper"),
        pytest.param(90, 227, marks=SLOW, id="hopper-float32"),
        pytest.param(100, 227, marks=SLOW, id="blackwell"),
        pytest.param(120, 99, marks=SLOW, id="small-blackwell"),
    ],
)
def test_every_kernel_compiles(capability: int, kilobytes: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    bare = request.node.callspec.id == "hopper"
    kernels = compiled(capability, kilobytes, tmp_path, *["float32"] * (not bare))
    assert kernels >= {"attention_kernel", "cascade_kernel", "vector_kernel", "matrix_kernel", "choose_kernel"}


def test_a_few_kernels_compile(tmp_path: Path) -> None:
    """What CI has of the above, which takes minutes: of one pass over each row, of one output, of latents that
    wait in shared memory, of many rows an expert, of experts in int8, of long prompts, of sums over GPUs, and around a
    step."""
    assert compiled(90, 227, tmp_path, "few") >= {
        "vector_kernel",
        "mma_kernel",
        "tma_kernel",
        "block_kernel",
        "ring_kernel",
        "stationary_kernel",
        "grouped_kernel",
        "span_kernel",
        "experts_kernel",
        "latent_kernel",
        "norm_kernel",
        "sum_kernel",
        "sum_norm_kernel",
        "prepare_inputs_kernel",
        "advance_kernel",
    }


@pytest.mark.nightly
def test_attention_that_sees_later_tokens_compiles(tmp_path: Path) -> None:
    assert compiled(90, 227, tmp_path, "encoders") >= {"attention_kernel", "tiles_kernel", "shares_kernel"}


@pytest.mark.nightly
def test_attention_of_chunks_with_long_contexts_compiles(tmp_path: Path) -> None:
    assert compiled(90, 227, tmp_path, "chunks") == {"parts_kernel", "shares_kernel", "attention_kernel"}


@pytest.mark.nightly
def test_the_choice_of_what_is_attended_to_compiles(tmp_path: Path) -> None:
    assert compiled(90, 227, tmp_path, "indexed") >= {
        "index_store_kernel",
        "index_scores_kernel",
        "index_choice_kernel",
        "latent_kernel",
    }


@pytest.mark.nightly
def test_products_and_attention_of_any_batch_compile(tmp_path: Path) -> None:
    assert compiled(90, 227, tmp_path, "invariant") == {
        "invariant_kernel",
        "attention_kernel",
        "tiles_kernel",
        "cells_kernel",
    }


def compiled(capability: int, kilobytes: int, cache: Path, *arguments: str) -> set[str]:
    """The kernels' names, once each is seen to fit."""
    kernels = said("compiling", str(capability), str(kilobytes << 10), *arguments, cache=cache)
    for name, shared, spilled in kernels:
        assert shared <= kilobytes << 10, name
        assert spilled <= SPILLED.get(name, 96), f"{name} does not fit its registers"
    return {name for name, _, _ in kernels}
