"""Embeddings, classes and scores of every family, beside those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.llm import LLM
from tests import encoders
from tests.encoders import FAMILIES

ATOL = 1e-5


def expected_embeddings(model: Any, texts: list[str], how: str) -> Any:
    core = encoders.tokenizer()
    made = [encoders.pooled(encoders.states(model, core.encode(text).ids), how) for text in texts]
    return torch.nn.functional.normalize(torch.stack(made), dim=1).numpy()


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_are_those_of_transformers_alone_and_in_a_crowd(name: str, tmp_path: Path) -> None:
    model = encoders.write(tmp_path, name)
    texts = encoders.texts()
    wanted = expected_embeddings(model, texts, FAMILIES[name].pooling)
    with LLM(str(tmp_path), dtype="float32") as llm:
        crowd = [one.outputs.embedding for one in llm.embed(texts)]
        alone = [llm.embed(text)[0].outputs.embedding for text in texts[:6]]
    np.testing.assert_allclose(crowd, wanted, atol=ATOL)
    np.testing.assert_allclose(alone, wanted[:6], atol=ATOL)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.classifier])
def test_classes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = encoders.write(tmp_path, name, labels=3)
    texts, core = encoders.texts(), encoders.tokenizer()
    wanted = torch.stack([encoders.logits(model, core.encode(text).ids) for text in texts])
    with LLM(str(tmp_path), dtype="float32") as llm:
        made = [one.outputs.probs for one in llm.classify(texts)]
        raw = [one.outputs.probs for one in llm.classify(texts, use_activation=False)]
    np.testing.assert_allclose(made, wanted.softmax(-1).numpy(), atol=ATOL)
    np.testing.assert_allclose(raw, wanted.numpy(), atol=ATOL)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.classifier])
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = encoders.write(tmp_path, name, labels=1)
    query, documents, core = "what dog runs", encoders.texts(12), encoders.tokenizer()
    pairs = [core.encode(query, document) for document in documents]
    typed = FAMILIES[name].model_type == "bert"
    wanted = torch.stack([encoders.logits(model, one.ids, one.type_ids if typed else None) for one in pairs])
    with LLM(str(tmp_path), dtype="float32") as llm:
        made = [one.outputs.score for one in llm.score(query, documents)]
    np.testing.assert_allclose(made, wanted.sigmoid()[:, 0].numpy(), atol=ATOL)
