"""What is shipped: pure Python and the embedded model, small enough for one slow line."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import quire

ROOT = Path(__file__).parents[1]
LIMIT = 20 * 10**6
COMPILED = {".so", ".pyd", ".dll", ".dylib", ".a", ".o"}


def test_the_package_is_pure_and_small() -> None:
    shipped = [path for path in (ROOT / "src/quire").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in shipped) < LIMIT
    assert not {path.suffix for path in shipped} & COMPILED


def test_hints_to_install_an_extra_name_the_distribution_and_an_extra_that_it_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [
        path.read_text() for root, suffix in (("src", "*.py"), ("docs", "*.md")) for path in (ROOT / root).rglob(suffix)
    ]
    hints = [hint for text in texts for hint in re.findall(r"(?<![\w-])(quire(?:-llm)?)\[([\w,]+)\]", text)]
    assert len(hints) > 5
    assert {name for name, _ in hints} == {project["name"]} == {"quire-llm"}
    assert {extra for _, extras in hints for extra in extras.split(",")} <= {*project["optional-dependencies"]}


@pytest.mark.nightly
def test_the_wheel_holds_the_model_and_fits_every_platform(tmp_path: Path) -> None:
    """Needs a package index, for the build back end."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, timeout=3000)
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name == f"quire_llm-{quire.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < LIMIT
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert any(name.endswith(".safetensors") for name in names)
    assert "quire/py.typed" in names
    assert not {Path(name).suffix for name in names} & COMPILED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("quire.values.StructuredOutputs", "quire.types.StructuredOutputsParams"),
        ("quire.values.SamplingParams", "quire.types.SamplingParams"),
        ("quire.build.engine.build_engine", "quire.assembly.engine.build_engine"),
        ("quire.sim.run.House", "quire.sim.run.SimConfig"),
        ("quire.sim.run.drive", "quire.sim.run.simulate"),
    ],
)
def test_what_documentation_once_imported_is_still_there_and_warns(old: str, new: str) -> None:
    (module, name), (home, renamed) = old.rsplit(".", 1), new.rsplit(".", 1)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        found = getattr(importlib.import_module(module), name)
    assert found is getattr(importlib.import_module(home), renamed)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = importlib.import_module(module).nothing
