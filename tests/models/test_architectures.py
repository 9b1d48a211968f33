"""Every architecture against transformers, on tiny checkpoints whose every parameter is random.

CI compares logits of every shape, by steps of single tokens and of chunks side by side, and the rest for the first
shape of each architecture, greedy answers of every eighth; `make nightly` compares everything. Greedy answers of every
architecture are compared in `tests/test_every_architecture.py`, too.
"""

from __future__ import annotations

import random
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from quire.assembly.engine import choose_ops
from quire.model_runner.memory import block_bytes, layer_shapes
from quire.models.registry import Model
from quire.weights.load import load_model
from tests.checkpoints import FIRST, SHAPES, greedy, make
from tests.models.feeding import Feeder, prompts

NEW = 64
"""Tokens of an answer."""

Pair = tuple[PreTrainedModel, Path]

EVERY = pytest.mark.parametrize("pair", SHAPES, indirect=True, scope="module")
HALF = [pytest.param(shape, marks=() if shape in sorted(FIRST)[::2] else pytest.mark.nightly) for shape in SHAPES]
FOURTH = [pytest.param(shape, marks=() if shape in sorted(FIRST)[::4] else pytest.mark.nightly) for shape in SHAPES]
EIGHTH = [pytest.param(shape, marks=() if shape in sorted(FIRST)[::8] else pytest.mark.nightly) for shape in SHAPES]


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """transformers' model of a shape, and its checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    return make(folder, request.param), folder


def theirs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def same_logits(pair: Pair, page_size: int) -> None:
    reference, folder = pair
    model: Model = load_model(folder, dtype="float32")
    asked = prompts(model.spec.vocab)
    for tokens, ours in zip(
        asked, Feeder(model, page_size=page_size).prompts(asked, random.Random(page_size)), strict=True
    ):
        wanted = theirs(reference, tokens)
        assert wanted.std() >= 1, "a flat model would hide errors"
        assert (ours - wanted).abs().max() < 1e-4


@EVERY
def test_logits_are_those_of_transformers_in_ragged_chunks(pair: Pair) -> None:
    same_logits(pair, page_size=16)


@pytest.mark.parametrize("pair", FOURTH, indirect=True, scope="module")
def test_logits_are_those_of_transformers_with_a_token_a_page(pair: Pair) -> None:
    same_logits(pair, page_size=1)


@pytest.mark.parametrize("pair", ["deepseek_v32-groups-yarn"], indirect=True, scope="module")
@pytest.mark.parametrize("deterministic", [False, True])
def test_an_indexer_that_has_no_choice_is_left_out_and_changes_no_bit(pair: Pair, deterministic: bool) -> None:
    ops = choose_ops(torch.device("cpu"), deterministic)
    whole, dense = (load_model(pair[1], dtype="bfloat16", ops=ops, max_model_len=length) for length in (None, 8))
    assert block_bytes(layer_shapes(dense.spec.kv_shapes, torch.bfloat16), 16) == 16 * 3 * 2 * (8 + 20)
    assert block_bytes(layer_shapes(whole.spec.kv_shapes, torch.bfloat16), 16) == 16 * 3 * 2 * (8 + 20 + 16)
    asked = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3]]
    answers = [
        Feeder(each, page_size=4, dtype=torch.bfloat16).prompts(asked, random.Random(2)) for each in (whole, dense)
    ]
    assert all(torch.equal(*each) for each in zip(*answers, strict=True))


@pytest.mark.parametrize("pair", EIGHTH, indirect=True, scope="module")
def test_greedy_answers_are_those_of_transformers(pair: Pair) -> None:
    reference, folder = pair
    asked = prompts(load_model(folder).spec.vocab, seed=1)[:3]
    ours = Feeder(load_model(folder, dtype="float32"), page_size=4).greedy(asked, NEW)
    assert ours == [greedy(reference, tokens, NEW, said) for tokens, said in zip(asked, ours, strict=True)]
    assert all(len(set(answer)) >= 16 for answer in ours), "an answer that repeats itself would hide errors"


@pytest.mark.parametrize("pair", HALF, indirect=True, scope="module")
def test_bfloat16_stays_near_float32(pair: Pair) -> None:
    reference, folder = pair
    asked = prompts(load_model(folder).spec.vocab)
    model = load_model(folder, dtype="bfloat16")
    ours = torch.cat(Feeder(model, page_size=16, dtype=torch.bfloat16).prompts(asked, random.Random(0)))
    wanted = torch.cat([theirs(reference, tokens) for tokens in asked])
    assert ours.dtype is torch.float32
    errors = (ours - wanted).std(-1) / wanted.std(-1)
    if model.spec.latent is not None and model.spec.latent.index is not None:
        # Rounding changes what an indexer of random weights chooses, about as often as in transformers: of four sets of
        # prompts of each shape, its mean error is 0.6 to 1.6 times theirs.
        rough = deepcopy(reference).to(torch.bfloat16)
        own = (torch.cat([theirs(rough, tokens) for tokens in asked]).float() - wanted).std(-1) / wanted.std(-1)
        assert errors.mean() < 2 * own.mean()
        sees_all = torch.cat([torch.arange(len(tokens)) < model.spec.latent.index.top for tokens in asked])
        errors = errors[sees_all]
    assert errors.median() < 0.08
    assert model.spec.experts or (ours - wanted).std() < 0.08 * wanted.std(), "only a router may change its mind"
