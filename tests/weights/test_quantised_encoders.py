"""Encoders and classifiers in every format of quantised checkpoints, and quantised while they are loaded."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quire import LLM
from quire.weights.files import SINGLE
from quire.weights.schemes import ONLINE
from tests import encoders
from tests.quantised import FORMATS, plain, quantise

MATRICES = re.compile(
    r"(_proj|_lin|lin1|lin2|query|key|value|Wqkv|Wo|Wi|fc1\d|fc2|(output|intermediate)\.dense)\.weight$"
)
"""Those of attention and MLPs, by all families' names."""

SIZES: dict[str, dict[str, Any]] = {"distilbert": {"hidden_dim": 48}}
NAMES = ("bert", "distilbert", "modernbert", "nomic", "embeddinggemma")
EVERY = [*product(NAMES, FORMATS)]
FEW = [(name, form) for i, (name, form) in enumerate(EVERY) if i % 5 == i // len(FORMATS) % 5]


def vectors(folder: Path, **options: Any) -> Any:
    with LLM(str(folder), dtype="float32", canary="off", **options) as llm:
        return np.array([one.outputs.embedding for one in llm.embed(encoders.texts(4, longest=20))])


@pytest.mark.parametrize(
    ("name", "form"),
    [pytest.param(*each, marks=() if each in FEW else pytest.mark.nightly) for each in EVERY],
)
def test_a_quantised_encoder_is_the_plain_one_that_it_stands_for(name: str, form: str, tmp_path: Path) -> None:
    for place in ("stored", "plain"):
        encoders.write(tmp_path / place, name, **SIZES.get(name, {"intermediate_size": 48}))
    before = load_file(tmp_path / "stored" / SINGLE)
    means = quantise(tmp_path / "stored", form, MATRICES)
    assert sum(not torch.equal(means[key], before[key]) for key in means) >= 12, "little was quantised"
    plain(tmp_path / "plain", means)
    # Formats that round activations, too, are as far off as that makes them.
    atol = 0.02 if "w8a8" in form or form.startswith(("fp8", "fbgemm")) else 2e-3
    made = vectors(tmp_path / "stored")
    np.testing.assert_allclose(made, vectors(tmp_path / "plain"), atol=atol)


@pytest.mark.parametrize("method", ["int8", *(pytest.param(each, marks=pytest.mark.nightly) for each in ONLINE)])
@pytest.mark.parametrize("name", ["bert", "nomic"])
def test_an_encoder_is_quantised_while_it_is_loaded(name: str, method: str, tmp_path: Path) -> None:
    encoders.write(tmp_path, name)
    cosines = (vectors(tmp_path, quantization=method) * vectors(tmp_path)).sum(1)
    assert cosines.min() > (0.9 if method == "q4_0" else 0.97)
