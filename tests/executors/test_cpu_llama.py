"""Seeded answers and sick rows on a real architecture with the real operations, in float32."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.engine.engine import Engine
from quire.executors.local import LocalExecutor
from quire.model_runner.row_state import Ints, RowState
from quire.models.registry import Model
from quire.ops.reference import ReferenceOps
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import FixedDrafts
from quire.types import UNLIMITED, Request, SamplingParams
from quire.weights.load import load_model

VOCAB, CONTEXT, SICK = 300, 128, 299
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
}
NEVER_SICK = {SICK: -100.0}
SETTINGS = [
    SamplingParams(temperature=0.0, logit_bias=NEVER_SICK),
    SamplingParams(temperature=0.8, logit_bias=NEVER_SICK),
    SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2, logit_bias=NEVER_SICK),
    SamplingParams(temperature=1.5, top_k=30, min_p=0.02, frequency_penalty=0.4, logit_bias=NEVER_SICK),
]


class SickOps(ReferenceOps):
    """One token's embedding is NaN, and so is every K/V it leads to."""

    def embedding(self, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().embedding(tokens, weight).masked_fill((tokens == SICK)[:, None], torch.nan)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return load_model(folder, dtype="float32", load_format="dummy", seed=3, ops=SickOps())


def requests() -> list[Request]:
    rng = random.Random(11)
    shared = tuple(rng.randrange(SICK) for _ in range(21))
    return [
        Request(
            id=str(i),
            prompt=(shared if i % 2 else ()) + tuple(rng.randrange(SICK) for _ in range(rng.randrange(1, 30))),
            max_new_tokens=20,
            sampling=SETTINGS[i % 4],
            seed=i // 8,
            choice=i % 2,
        )
        for i in range(16)
    ]


class Guess:
    """Repeats the history's beginning: drafts that are sometimes right."""

    num_drafts = 2
    reads_hidden = False

    def follow(self, *step: object) -> None:
        """It knows nothing."""

    def propose(self, rows: RowState, which: Ints, depth: Ints) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        return rows.tokens[which, :2]

    def reset(self) -> None:
        """It knows nothing."""


def answer(
    model: Model, asked: Sequence[Request], *, pages: int = 200, size: int = 8, depth: int = 0, **kw: Any
) -> Any:
    drafter = kw.pop("drafter", None)
    drafts = drafter.num_drafts if drafter else 0
    executor = LocalExecutor(
        model, pages=pages, page_size=size, rows=16, max_model_len=CONTEXT, dtype=torch.float32, drafter=drafter
    )
    scheduler = Scheduler(
        KVCacheManager(pages, size, make_prefix_cache(size, True)),
        rows=16,
        speculation=FixedDrafts(drafts),
        **kw,
    )
    engine = Engine(scheduler, executor, lookahead=depth)
    for request in asked:
        engine.add(request)
    tokens: dict[str, list[int]] = {}
    errors: dict[str, str | None] = {}
    while engine.has_pending_work:
        for event in engine.step():
            tokens.setdefault(event.id, []).extend(event.tokens)
            errors[event.id] = event.error
    return tokens, errors, scheduler


@pytest.fixture(scope="module")
def alone(model: Model) -> dict[str, list[int]]:
    return {r.id: answer(model, [r])[0][r.id] for r in requests()}


@pytest.mark.parametrize(
    "setup",
    [
        {},
        {"max_num_seqs": 5},
        {"max_chunk_tokens": 7, "max_num_batched_tokens": 24},
        {"pages": 10},
        {"depth": 2, "pages": 14, "max_chunk_tokens": 9},
        {"drafter": Guess()},
        {"drafter": Guess(), "pages": 12, "depth": 1, "max_chunk_tokens": 16},
        {"size": CONTEXT, "pages": 16},
    ],
    ids=["batch", "few", "chunked", "preempted", "ahead", "drafts", "drafts-preempted", "contiguous"],
)
def test_a_seeded_answer_is_the_same_with_any_scheduling(
    model: Model, alone: dict[str, list[int]], setup: dict[str, Any]
) -> None:
    tokens, _, scheduler = answer(model, requests(), **setup)
    assert tokens == alone
    if setup.get("pages", UNLIMITED) < 16:
        assert scheduler.num_preemptions > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_pages_that_held_nan_do_not_change_the_next_sequences(model: Model, depth: int) -> None:
    rng = random.Random(2)
    ill = [
        Request(id=f"ill-{i}", prompt=(SICK, *(rng.randrange(9) for _ in range(30))), max_new_tokens=9)
        for i in range(5)
    ]
    well = requests()
    want = answer(model, well)[0]
    mixed = [r for i, r in enumerate(well) for r in ([r, ill[i // 3]] if i % 3 == 0 and i < 15 else [r])]
    tokens, errors, _ = answer(model, mixed, pages=24, depth=depth, max_chunk_tokens=8, max_num_seqs=4)
    assert {r.id: tokens[r.id] for r in well} == want
    assert {errors[r.id] for r in ill} == {"the model produced NaN or infinite logits"}
