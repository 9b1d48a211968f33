"""Divided among ranks and cut into stages, every architecture in every format of weights gives the tokens that one
rank gives.

The ranks are threads. CI has one shape of each family, at 2 ranks or in 2 stages by turns; `make nightly` has all of
them, at 2, 3 and 4, and every format of every family.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from torch import Tensor

from quire.errors import InvalidModel
from quire.models.registry import Model
from quire.weights.load import load_model
from tests.checkpoints import FIRST, SHAPES, VOCAB, make
from tests.gguf_files import write
from tests.models.feeding import Feeder
from tests.quantised import FORMATS, quantise
from tests.ranks import RankThreads
from tests.weights.test_quantised_families import LATENTS, SIZES, Exact

NEW = 5
TURNS = [frozenset(sorted(FIRST)[turn::2]) for turn in range(2)]
"""In CI one half of the families is divided among ranks, the other cut into stages."""
MIXTURES = tuple(shape for shape, fields in SHAPES.items() if any("expert" in name for name in fields))
UNDIVIDED: Mapping[str, str] = MappingProxyType({"gpt_oss-gqa-mxfp4": "a width of 32 in groups of 32 cannot be"})
"""Shapes with fewer groups than ranks, and what says so."""


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in (3, 17, 40, 5)]


def answers(model: Model) -> list[list[int]]:
    """Greedy answers; a step has prompts of several lengths, as the next ones have single tokens."""
    return Feeder(model, page_size=8).greedy(prompts(), NEW, chunked=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a shape's checkpoint."""

    @cache
    def made(shape: str) -> Path:
        folder: Path = tmp_path_factory.mktemp(shape)
        make(folder, shape)
        return folder

    return made


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., RankThreads]]:
    made: dict[tuple[int, int], RankThreads] = {}
    yield lambda size, stages=1: made.get((size, stages)) or made.setdefault((size, stages), RankThreads(size, stages))
    for each in made.values():
        each.close()


class Staged:
    """A stage's model, whose logits are the last stage's, so that every rank feeds the same tokens."""

    def __init__(self, model: Model, ranks: RankThreads, rank: int) -> None:
        self.model, self.meeting, self.rank = model, ranks.meeting, rank
        self.spec, self.dtype, self.forward = model.spec, model.dtype, model.forward

    def logits(self, hidden: Tensor) -> Tensor:
        last = self.model.spec.own_layers.stop == self.model.spec.layers
        return self.meeting.exchange(self.rank, self.model.logits(hidden) if last else None)[-1].clone()


def divided(ranks: RankThreads, folder: Path, **how: Any) -> list[Model]:
    return ranks.run(lambda rank: load_model(folder, dtype="float32", parallel=ranks.groups[rank], **how))


WHOLE: dict[tuple[Path, str], list[list[int]]] = {}
"""Answers of whole models that several divided ones are compared with, by folder and options."""


def of_whole(folder: Path, **how: Any) -> list[list[int]]:
    key = folder, str(sorted(how))
    if key not in WHOLE:
        WHOLE[key] = answers(load_model(folder, dtype="float32", **how))
    return WHOLE[key]


def same_tokens(ranks: RankThreads, folder: Path, **how: Any) -> list[Model]:
    """The ranks' models, whose answers are those of the whole model."""
    whole = of_whole(folder, **{k: v for k, v in how.items() if k != "expert_parallel"})
    assert len({token for answer in whole for token in answer}) > 2
    models = divided(ranks, folder, **how)
    assert ranks.run(lambda rank: answers(Staged(models[rank], ranks, rank))) == [whole] * len(models)
    return models


def cases(shapes: Mapping[str, Any] | tuple[str, ...]) -> list[Any]:
    """(shape, ranks)."""
    return [
        pytest.param(shape, size, marks=() if shape in TURNS[0] | {*UNDIVIDED} and size == 2 else pytest.mark.nightly)
        for shape in shapes
        for size in (2, 3, 4)
    ]


@pytest.mark.parametrize(("shape", "size"), cases(tuple(SHAPES)))
def test_every_architecture_answers_as_on_one_rank(
    shape: str, size: int, ranks: Callable[..., RankThreads], checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint(shape)
    if shape in UNDIVIDED:
        with pytest.raises(InvalidModel, match=UNDIVIDED[shape]):
            divided(ranks(size), folder)
        return
    same_tokens(ranks(size), folder)


STAGES = [
    pytest.param(
        shape, size, stages, marks=() if shape in TURNS[1] and (size, stages) == (1, 2) else pytest.mark.nightly
    )
    for shape in SHAPES
    for size, stages in ((1, 2), (1, 3), (2, 2))
]


@pytest.mark.parametrize(("shape", "size", "stages"), STAGES)
def test_every_architecture_answers_as_in_one_stage(
    shape: str, size: int, stages: int, ranks: Callable[..., RankThreads], checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint(shape)
    if size > 1 and shape in UNDIVIDED:
        return
    spec = load_model(folder, dtype="float32").spec
    if stages > len({*range(spec.layers)} - {*spec.uncut}):
        with pytest.raises(InvalidModel, match="stages are too many"):
            divided(ranks(size, stages), folder)
        return
    models = same_tokens(ranks(size, stages), folder)
    layers = [i for model in models[::size] for i in model.spec.own_layers]
    assert layers == [*range(models[0].spec.layers)], "every layer is on one stage"


@pytest.mark.parametrize(("shape", "size"), cases(MIXTURES))
def test_experts_may_be_spread_over_ranks(
    shape: str, size: int, ranks: Callable[..., RankThreads], checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint(shape)
    spec = load_model(folder, dtype="float32").spec
    if spec.experts is not None and spec.experts.num_experts < size:
        with pytest.raises(InvalidModel, match="cannot be spread over"):
            divided(ranks(size), folder, expert_parallel=True)
        return
    same_tokens(ranks(size), folder, expert_parallel=True)


FORMAT_CASES = [
    pytest.param(family, format, spread, marks=() if family == "llama" and not spread else pytest.mark.nightly)
    for family in ("llama", "qwen3_moe", "deepseek_v3", "deepseek_v32", "phi3", "gemma4_text")
    for format in FORMATS
    for spread in ((False, True) if family in ("qwen3_moe", "deepseek_v3") else (False,))
]


@pytest.mark.parametrize(("family", "format", "spread"), FORMAT_CASES)
def test_every_format_answers_as_on_one_rank(
    family: str, format: str, spread: bool, ranks: Callable[..., RankThreads], tmp_path: Path
) -> None:
    shape = next(shape for shape in SHAPES if shape.split("-")[0] == family)
    fields = SHAPES[shape]
    latents = LATENTS if "kv_lora_rank" in fields else {}
    make(
        tmp_path, shape, **{name: size for name, size in {**SIZES, **latents}.items() if name in fields or name in KEYS}
    )
    quantise(tmp_path, format)
    # Rounding activations depends on the part of a token that a rank has.
    same_tokens(ranks(2), tmp_path, expert_parallel=spread, canary=Exact())
    if not spread:
        same_tokens(ranks(1, 2), tmp_path, canary=Exact())


GGUF_CASES = [
    pytest.param(kind, family, marks=() if family == "llama" else pytest.mark.nightly)
    for family in ("llama", "qwen3_moe", "gemma2")
    for kind in ("F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "IQ4_NL", "MXFP4", "Q4_K", "Q6_K")
]


@pytest.mark.parametrize(("kind", "family"), GGUF_CASES)
def test_every_gguf_type_answers_as_on_one_rank(
    kind: str, family: str, ranks: Callable[..., RankThreads], tmp_path: Path
) -> None:
    shape = next(shape for shape in SHAPES if shape.split("-")[0] == family)
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_attention_heads": 8}
    wide |= {"num_key_value_heads": 2, "num_hidden_layers": 2}
    wide |= {"moe_intermediate_size": 256} if family == "qwen3_moe" else {}
    write(tmp_path / "model.gguf", make(tmp_path / "theirs", shape, **wide), kind)
    for divided_among in (ranks(2), ranks(1, 2)):
        same_tokens(divided_among, tmp_path / "model.gguf")


@pytest.mark.parametrize("ranks_of_mxfp4", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_experts_in_mxfp4_are_cut_between_groups(
    ranks_of_mxfp4: int, ranks: Callable[..., RankThreads], tmp_path: Path
) -> None:
    make(tmp_path, "gpt_oss-gqa-mxfp4", intermediate_size=160)
    models = same_tokens(ranks(ranks_of_mxfp4), tmp_path)
    assert {model.spec.ranks for model in models} == {ranks_of_mxfp4}


KEYS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
