"""Prompts with images through a GPU's executor, look-ahead and kernels: transformers' greedy answers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from quire import SamplingParams
from tests.ops.triton.gpu import ON_CARD, gpu_llm
from tests.pairs import pairwise
from tests.test_images import Family, counted, said
from tests.vision import FAMILIES

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # hashes wrap around, as they do on a card
    *([pytest.mark.gpu] if ON_CARD else []),
]

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "block_size": 16, "max_num_seqs": 4}
AXES: dict[str, tuple[dict[str, Any], ...]] = {
    "tokens": ({}, {"max_num_batched_tokens": 24, "max_num_encoder_input_tokens": 5}),
    "drafts": ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
    "deterministic": ({}, {"deterministic": True}),
    "lookahead": ({}, {"lookahead": 2}),
    "memory": ({}, {"num_gpu_blocks_override": 14, "max_model_len": 200, "pressure_policy": "preempt"}),
}
# The interpreter needs most of a minute for one: there each two options are seen together, on a card all of them.
CHOSEN = product(*AXES.values()) if ON_CARD else (each.values() for each in pairwise(AXES))
COMBINED = [{name: value for part in parts for name, value in part.items()} for parts in CHOSEN]


NIGHTLY = () if ON_CARD else (pytest.mark.nightly,)
BY_DAY = ("gemma3",)


@pytest.fixture(
    scope="module", params=[pytest.param(each, marks=() if each in BY_DAY else NIGHTLY) for each in FAMILIES]
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp(request.param), request.param)


def check(family: Family, options: dict[str, Any], which: slice, new: int) -> None:
    """Together, and again where images are cached."""
    sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    wanted = [tokens[:new] for tokens in family.answers[which]]
    with gpu_llm(str(family.folder), **{**OPTIONS, **options}) as llm:
        inputs = family.inputs()[which]
        assert said(llm.generate(inputs, sampling)) == wanted
        encoded = counted(llm)[2]
        assert said(llm.generate(inputs, sampling)) == wanted
        assert counted(llm)[2] == encoded <= len(family.pictures)
        assert not llm._engine.failures  # a step that failed and was done again would answer as well


def test_an_image_in_chunks(family: Family) -> None:
    check(family, AXES["tokens"][1], slice(0, 1), 2)


@pytest.mark.nightly
def test_prompts_with_images_beside_one_without_and_drafts(family: Family) -> None:
    check(family, AXES["tokens"][1] | AXES["drafts"][1], slice(1, 4, 2), 3)


@pytest.mark.nightly
@pytest.mark.parametrize("options", COMBINED, ids=str)
def test_combinations_of_options(family: Family, options: dict[str, Any]) -> None:
    check(family, options, slice(None), 10)
