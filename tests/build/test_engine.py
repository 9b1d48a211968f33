"""An engine from settings that cannot be."""

from __future__ import annotations

import pytest

from quire.build.engine import build_engine
from quire.config import Settings
from quire.errors import InvalidConfig


def test_settings_that_take_more_memory_than_there_is_are_refused_with_what_to_lower() -> None:
    with pytest.raises(InvalidConfig, match=r"not enough memory for this: .* KV blocks .* num_gpu_blocks_override"):
        build_engine(Settings.of(num_gpu_blocks_override=1 << 30))
