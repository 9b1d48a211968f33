"""The kernels for processors with AMX, on ones without: compiled with tiles in plain C, tested as every other level."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire.ops.native.library import LEVELS, best_level

ROOT = Path(__file__).parents[2]
HEADER = Path(__file__).with_name("emulated_tiles.h")
EDITS = {
    "build.sh": (
        "-mamx-tile -mamx-bf16 -mamx-int8",
        f"-D__AMX_TILE__ -D__AMX_BF16__ -D__AMX_INT8__ -include {HEADER}",
    ),
    "library.c": ("return has_amx && tiles_permitted() ? AMX : AVX512_BF16;", "(void)has_amx; return AMX;"),
}
"""What the sources have, and what stands in its place here."""

TESTED = """
import sys
from pathlib import Path
from quire.ops.native import library
library.FILE = Path(sys.argv[1])
assert library.best_level() == "amx"
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", "amx", *sys.argv[2:]]))
"""
HAS_THE_REST = LEVELS.get(best_level() or "", -1) >= LEVELS["avx512_bf16"]


@pytest.mark.nightly
@pytest.mark.skipif(not HAS_THE_REST or shutil.which("gcc") is None, reason="needs gcc and AVX-512 with BF16")
def test_products_by_tiles_are_those_of_other_levels(tmp_path: Path) -> None:
    sources = shutil.copytree(ROOT / "native", tmp_path / "native")
    for name, (before, after) in EDITS.items():
        text = (sources / name).read_text("utf-8")
        assert text.count(before) == 1
        (sources / name).write_text(text.replace(before, after), "utf-8")
    library = tmp_path / "emulated.so"
    subprocess.run(["sh", str(sources / "build.sh"), str(library)], check=True, timeout=1200)
    names = "test_native.py", "test_native_superblocks.py", "test_native_decoder.py"
    files = [str(ROOT / "tests/ops" / name) for name in names]
    made = subprocess.run(
        [sys.executable, "-c", TESTED, str(library), *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert made.returncode == 0, made.stdout[-3000:] + made.stderr[-1000:]
