"""The embedded model as graphs of ONNX, and which tests need newer packages than there are."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from quire.weights.locate import embedded
from quire.weights.onnx_export import export
from tests import interpreter

OLDEST = (5, 6)
"""transformers with the caches that `executors.hf_cache` takes: the bound of the extra `hf`."""

collect_ignore = [] if tuple(map(int, version("transformers").split(".")[:2])) >= OLDEST else ["test_hf.py"]

interpreter.install()


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("onnx") / "embedded"
    export(embedded(), folder)
    return folder
