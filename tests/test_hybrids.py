"""Models with recurrent layers through the whole engine: chunks, preemption and drafts change no answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from quire import LLM, SamplingParams
from quire.assembly.engine import choose_ops
from quire.errors import InvalidConfig
from quire.layers.delta import DeltaConfig, split_by_kind
from quire.ops.batch_invariant import BatchInvariantOps
from quire.ops.operands import DeltaInputs, DeltaWeights, Norm
from quire.ops.ragged import LayerState, StateSlots
from quire.ops.recurrent import gated_delta, slots_of
from quire.ops.reference import ReferenceOps
from quire.weights.locate import embedded
from tests.checkpoints import VOCAB, greedy, make
from tests.models.feeding import prompts
from tests.ops.batches import Pages

SHAPE = "qwen3_next-shared-keys"
NEW = 24
H, K, V, G, W = 4, 12, 10, 2, 4
C = 2 * G * K + H * V


@pytest.fixture(scope="module")
def known() -> dict[tuple[int, ...], list[int]]:
    """transformers' answers by prompt."""
    return {}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("hybrid")
    return make(folder, SHAPE), folder


def answers(folder: Path, asked: Sequence[Sequence[int]], **options: object) -> tuple[list[list[int]], LLM]:
    how = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    with LLM(str(folder), dtype="float32", tokenizer=str(embedded()), max_model_len=128, **options) as llm:
        got = llm.generate([{"prompt_token_ids": list(one)} for one in asked], how)
    return [list(one.outputs[0].token_ids) for one in got], llm


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 4},
        {"num_gpu_blocks_override": 36, "block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 8},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "block_size": 4},
        {"lookahead": 1, "max_num_batched_tokens": 32},
    ],
    ids=["alone", "chunks", "preempted", "drafts", "ahead"],
)
def test_answers_are_those_of_transformers(made: tuple[PreTrainedModel, Path], options: dict[str, object]) -> None:
    reference, folder = made
    asked = [*prompts(VOCAB, seed=3), prompts(VOCAB, seed=3)[0]]
    got, _ = answers(folder, asked, **options)
    assert got == [greedy(reference, tokens, NEW, said) for tokens, said in zip(asked, got, strict=True)]


REUSED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "whole prompts": {},
        "chunks and states between": {"max_num_batched_tokens": 24, "max_num_seqs": 4, "snapshot_interval": 8},
        "preempted": {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 24, "max_num_seqs": 8},
        "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "snapshot_interval": 8},
        "ahead": {"lookahead": 1, "max_num_batched_tokens": 32},
        "few slots": {"state_snapshots": 2},
        "every bit": {"deterministic": True},
        "no slots": {"state_snapshots": 0},
    }
)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            options, marks=() if name in ("chunks and states between", "every bit") else pytest.mark.nightly, id=name
        )
        for name, options in REUSED.items()
    ],
)
def test_answers_from_cached_prefixes_are_those_of_transformers(
    made: tuple[PreTrainedModel, Path], known: dict[tuple[int, ...], list[int]], options: dict[str, Any]
) -> None:
    reference, folder = made
    whole = prompts(VOCAB, seed=3)[0]
    asked = [[*whole[:19], *rest[:13]] for rest in prompts(VOCAB, seed=4)[:4]]
    how = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    sizes = {"dtype": "float32", "tokenizer": str(embedded()), "max_model_len": 128, "block_size": 4}
    with LLM(str(folder), **sizes, **options) as llm:
        cached = list[int | None]()
        for turn in range(3):
            ids = [one + one[:5] * turn for one in asked]
            for group in (ids[:1], ids[1:2], ids[2:]):
                done = llm.generate([{"prompt_token_ids": one} for one in group], how)
                cached += [one.num_cached_tokens for one in done]
                for one, tokens in zip(done, group, strict=True):
                    said = list(one.outputs[0].token_ids)
                    if tuple(tokens) not in known:
                        known[tuple(tokens)] = greedy(reference, tokens, NEW, said)
                    assert said == known[tuple(tokens)]
    if options.get("state_snapshots") == 0:
        assert not any(cached)
    else:
        assert sum(each or 0 for each in cached) > (20 if "state_snapshots" in options else 100)


def inputs(count: int) -> tuple[DeltaInputs, DeltaWeights]:
    torch.manual_seed(count)
    made = [torch.randn(count, n) for n in (C, H * V, H, H)]
    fading, rise = torch.randn(H), torch.randn(H)
    norm = Norm(torch.rand(V) + 0.5, 1e-6)
    x = split_by_kind(DeltaConfig(key_heads=G, value_heads=H, key=K, value=V, width=W), made)
    return x, DeltaWeights(torch.randn(C, W), fading, rise, norm)


def nowhere(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


def states(slots: int) -> LayerState:
    return LayerState(torch.zeros(slots, W - 1, C), torch.zeros(slots, H, K, V))


def test_chunks_of_any_length_make_the_same_results() -> None:
    x, weights = inputs(200)
    whole, cut = states(2), states(2)
    one = lambda n: StateSlots(torch.tensor([1]), torch.tensor([0] * (n - 1) + [1]), nowhere(n))  # noqa: E731
    want = gated_delta(x, weights, whole, torch.tensor([0, 200]), one(200))
    parts, start = [], 0
    for n in (1, 64, 3, 70, 9, 53):
        part = DeltaInputs(*(each[start : start + n] for each in x))
        parts.append(gated_delta(part, weights, cut, torch.tensor([0, n]), one(n)))
        start += n
    assert (torch.cat(parts) - want).abs().max() < 1e-4
    assert (cut.memory - whole.memory).abs().max() < 1e-4
    assert torch.equal(cut.window, whole.window)
    assert not whole.memory[0].any()


def test_the_state_after_each_position_of_a_span_can_be_gone_on_from() -> None:
    x, weights = inputs(6)
    pool = states(8)
    every = StateSlots(torch.tensor([0]), torch.arange(1, 7), nowhere(6))
    want = gated_delta(x, weights, pool, torch.tensor([0, 6]), every)
    for at in range(1, 6):
        rest = DeltaInputs(*(each[at:] for each in x))
        after = StateSlots(torch.tensor([at]), torch.tensor([0] * (5 - at) + [7]), nowhere(6 - at))
        got = gated_delta(rest, weights, pool, torch.tensor([0, 6 - at]), after)
        assert (got - want[at:]).abs().max() < 1e-5


@pytest.mark.parametrize("count", [6, 150])
def test_states_in_the_middle_of_a_span_can_be_gone_on_from(count: int) -> None:
    x, weights = inputs(count)
    starts, zeros = torch.tensor([0, count]), [0] * (count - 1)
    cuts = [1, count // 2, count - 1, count]
    snapshots = nowhere(count)
    snapshots[torch.tensor(cuts) - 1] = torch.arange(2, 2 + len(cuts))
    for ops in (ReferenceOps(), BatchInvariantOps()):
        pool, plain = states(8), states(8)
        batch = replace(Pages(40, 16).batch([(0, 0, [1] * count)]), query_start=starts)
        end = StateSlots(torch.tensor([0]), torch.tensor([*zeros, 1]), nowhere(count))
        want = ops.gated_delta(x, weights, plain, replace(batch, states=end))
        got = ops.gated_delta(x, weights, pool, replace(batch, states=end._replace(snapshot=snapshots)))
        assert (got - want).abs().max() < 1e-4
        assert all(torch.allclose(each[1], each[5], atol=1e-5) for each in pool)
        for i, cut in enumerate(cuts[:3]):
            rest = DeltaInputs(*(each[cut:] for each in x))
            after = StateSlots(torch.tensor([2 + i]), nowhere(count - cut), nowhere(count - cut))
            one = replace(batch, query_start=torch.tensor([0, count - cut]), states=after)
            assert (ops.gated_delta(rest, weights, pool, one) - want[cut:]).abs().max() < 1e-4


def test_batch_invariant_results_have_the_same_bits_in_any_batch_and_chunk() -> None:
    x, weights = inputs(90)
    ops, pages = BatchInvariantOps(), Pages(40, 16)
    alone, shared = states(4), states(4)
    want = ops.gated_delta(x, weights, alone, pages.batch([(0, 0, [1] * 90)]))
    got, start = [], 0
    for n in (5, 70, 15):
        other = inputs(n + 3)[0]
        both = DeltaInputs(*(torch.cat((b, a[start : start + n])) for a, b in zip(x, other, strict=True)))
        batch = pages.batch([(1, 0, [2] * (n + 3)), (0, start, [1] * n)])
        got.append(ops.gated_delta(both, weights, shared, batch)[n + 3 :])
        start += n
    assert torch.equal(torch.cat(got), want)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(alone, shared, strict=True))


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"kv_cache_memory_bytes": 4096}])
def test_what_does_not_go_with_states_is_refused(
    made: tuple[PreTrainedModel, Path], options: dict[str, object]
) -> None:
    with pytest.raises(InvalidConfig, match="recurrent"):
        answers(made[1], [[1, 2, 3]], **options)


def test_a_batch_without_states_is_refused() -> None:
    batch = replace(Pages(4, 16).batch([(0, 0, [1])]), states=None)
    with pytest.raises(ValueError, match="recurrent"):
        slots_of(batch)
    assert choose_ops(torch.device("cpu"), True).prepare(batch).states is None
