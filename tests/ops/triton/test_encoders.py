"""Encoders, classifiers and models that read images through a GPU's executor: the vectors and answers of a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM
from tests import encoders
from tests.ops.triton.gpu import ON_CARD, gpu_llm

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # hashes wrap around, as they do on a card
    *([pytest.mark.gpu] if ON_CARD else []),
]

TEXTS = encoders.texts(9, longest=60)
SHORT = [text for text in TEXTS if len(text) < 60][:3]
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4}
CI = ("bert", "modernbert", "embeddinggemma")
"""Families that between them have what others have; the rest is nightly, and on a card all of them are tried."""


def families(names: Sequence[str]) -> list[Any]:
    """The names; those that are not for CI are marked."""
    return [pytest.param(name, marks=() if name in CI or ON_CARD else pytest.mark.nightly) for name in names]


def check(llm: LLM, model: Any, texts: Sequence[str], poolings: Sequence[str]) -> None:
    core = encoders.tokenizer()
    states = [encoders.states(model, core.encode(text).ids) for text in texts]
    for pooling in poolings:
        wanted = np.stack([encoders.pooled(each, pooling).numpy() for each in states])
        wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
        made = [one.outputs.embedding for one in llm.embed(list(texts), pooling=pooling)]  # type: ignore[arg-type]
        np.testing.assert_allclose(made, wanted, atol=2e-5)


@pytest.mark.parametrize("name", families(list(encoders.FAMILIES)))
def test_every_family_embeds_as_transformers_does(name: str, tmp_path: Path) -> None:
    model = encoders.write(tmp_path, name)
    with gpu_llm(str(tmp_path), **OPTIONS) as llm:
        check(llm, model, SHORT, (encoders.FAMILIES[name].pooling,))


@pytest.mark.skipif(not ON_CARD, reason="the interpreter does not compute in bfloat16")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", encoders.FAMILIES)
def test_every_family_embeds_in_bfloat16(name: str, deterministic: bool, tmp_path: Path) -> None:
    encoders.write(tmp_path, name)
    vectors = []
    for dtype in ("float32", "bfloat16"):
        with gpu_llm(str(tmp_path), **OPTIONS | {"dtype": dtype}, deterministic=deterministic) as llm:
            vectors.append(np.array([one.outputs.embedding for one in llm.embed(TEXTS)]))
    assert (vectors[0] * vectors[1]).sum(-1).min() > 0.99


@pytest.mark.nightly
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", encoders.FAMILIES)
def test_every_pooling_of_every_family(name: str, deterministic: bool, tmp_path: Path) -> None:
    model = encoders.write(tmp_path, name)
    with gpu_llm(str(tmp_path), **OPTIONS, deterministic=deterministic) as llm:
        check(llm, model, TEXTS, ("cls", "mean", "last"))
        ids = encoders.tokenizer().encode(TEXTS[0]).ids
        [tokens] = llm.encode(TEXTS[0], pooling_task="token_embed", use_activation=False)
        np.testing.assert_allclose(tokens.outputs.data, encoders.states(model, ids), atol=1e-4)


@pytest.mark.parametrize("name", families([name for name, family in encoders.FAMILIES.items() if family.classifier]))
def test_classifiers_give_the_numbers_of_transformers(name: str, tmp_path: Path) -> None:
    model, core = encoders.write(tmp_path, name, labels=3), encoders.tokenizer()
    wanted = np.stack([encoders.logits(model, core.encode(text).ids).numpy() for text in SHORT])
    with gpu_llm(str(tmp_path), **OPTIONS) as llm:
        made = [one.outputs.probs for one in llm.classify(SHORT, use_activation=False)]
    np.testing.assert_allclose(made, wanted, atol=5e-5)
