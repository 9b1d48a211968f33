"""The two servers that clients are tried against: one has the embedded model, the other one that uses tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import pytest

from tests.clients.zoo import CELLS, SCRIPTED
from tests.live import Live, serving


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Live]]:
    with ExitStack() as stack:
        scripted = stack.enter_context(serving(tmp_path_factory.mktemp("scripted"), module="tests.agent"))
        embedded = stack.enter_context(serving(tmp_path_factory.mktemp("embedded"), "--dtype", "float32"))
        yield {cell: scripted if cell in SCRIPTED else embedded for cell in CELLS}
