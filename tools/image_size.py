"""`python -m tools.image_size`: compressed bytes of the CPU image, as a sum, for where no container engine is at hand.

The base image, and the wheels that pip would install into it, which compress as well as layers do. Exits with 1 above
the limit. pip's options and variables, such as PIP_EXTRA_INDEX_URL for PyTorch's CPU build, are pip's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

BASE = 48 * 10**6
"""python:3.12-slim for amd64, compressed, rounded up."""

LIMIT = 400 * 10**6


def wheels(folder: Path) -> dict[str, int]:
    """Bytes of Quire's wheel and of all that it needs, by file."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(folder), str(root)]
    subprocess.run(command, check=True)
    return {path.name: path.stat().st_size for path in folder.glob("*.whl")}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"python:3.12-slim": BASE, **wheels(Path(folder))}
    cuda = [name for name in sizes if name.startswith("nvidia")]
    for name, size in sorted(sizes.items(), key=lambda pair: -pair[1]):
        if size > 5 * 10**6:
            print(f"{size / 1e6:8.1f} MB  {name}")
    total = sum(sizes.values())
    print(f"{total / 1e6:8.1f} MB  in all, {len(sizes) - 1} wheels; the limit is {LIMIT / 1e6:.0f} MB")
    if cuda:
        sys.exit(f"this is PyTorch for CUDA ({len(cuda)} of its wheels): set PIP_EXTRA_INDEX_URL to its CPU build's")
    if total > LIMIT:
        sys.exit("the image is too large")


if __name__ == "__main__":
    main()
