"""The servers that clients are tried against: of the embedded model, one that uses tools, and one that reads images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import pytest

from tests.clients.zoo import CELLS, SCRIPTED
from tests.live import Live, serving
from tests.vision import make


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Live]]:
    with ExitStack() as stack:
        scripted = stack.enter_context(serving(tmp_path_factory.mktemp("scripted"), module="tests.agent"))
        embedded = stack.enter_context(serving(tmp_path_factory.mktemp("embedded"), "--dtype", "float32"))
        folder = tmp_path_factory.mktemp("vision")
        make(folder, "qwen3-vl")
        log, named = tmp_path_factory.mktemp("log"), ("--served-model-name", "embedded", "--dtype", "float32")
        vision = stack.enter_context(serving(log, str(folder), *named))
        yield {cell: scripted if cell in SCRIPTED else embedded for cell in CELLS} | {"images": vision}
