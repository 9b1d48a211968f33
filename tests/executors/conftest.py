"""Which tests need newer packages than there are."""

from __future__ import annotations

from importlib.metadata import version

OLDEST = (5, 6)
"""transformers with the caches that `executors.hf_cache` takes: the bound of the extra `hf`."""

collect_ignore = [] if tuple(map(int, version("transformers").split(".")[:2])) >= OLDEST else ["test_hf.py"]
