"""`python -m tests.lowest`: the oldest version of each dependency that pyproject.toml allows, as pip's constraints.

`make lowest` installs them (torch, and what transformers needs newer, apart) and runs tests with them.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

APART = {"torch", "huggingface-hub", "tokenizers", "numpy", "safetensors"}
"""GPU machines test torch in its oldest version; the tests' transformers needs newer versions of the others."""


def lowest(pyproject: Path) -> list[str]:
    """`name==version` for each dependency with a lower bound, except those in `APART`."""
    dependencies = tomllib.loads(pyproject.read_text())["project"]["dependencies"]
    bounds = [re.match(r"([\w-]+)>=([\w.]+)", dependency) for dependency in dependencies]
    return [f"{bound[1]}=={bound[2]}" for bound in bounds if bound and bound[1] not in APART]


if __name__ == "__main__":
    print("\n".join(lowest(Path(__file__).parents[1] / "pyproject.toml")))
