"""What is shipped: Python, the embedded model and one library of kernels, small enough for one slow line."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import quire
from tools.release import notes

ROOT = Path(__file__).parents[1]
NOTICES = ROOT / "THIRD_PARTY_NOTICES.md"
LIMIT = 22 * 10**6
"""Bytes: of weights 16, of the library 1, of sources 4."""
COMPILED = {".so", ".pyd", ".dll", ".dylib", ".a", ".o"}


COMPILED_HERE = ["src/quire/ops/native/libquire_cpu.so"]
"""With a C interface and for Linux alone; without it the same is computed by torch."""


def test_the_package_is_small_and_has_one_compiled_library() -> None:
    shipped = [path for path in (ROOT / "src/quire").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in shipped) < LIMIT
    assert [str(path.relative_to(ROOT)) for path in shipped if path.suffix in COMPILED] == COMPILED_HERE


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
def test_the_wheel_and_the_sdist_are_whole(tmp_path: Path) -> None:
    """The wheel is built from the sdist; installed in an environment of its own it answers. Needs a package index."""
    dist, place = tmp_path / "dist", tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "build", "--outdir", dist, ROOT], check=True, timeout=3000)
    [wheel], [_] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    assert wheel.name == f"quire_llm-{quire.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < LIMIT
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert any(name.endswith(".safetensors") for name in names)
    assert "quire/py.typed" in names
    assert {name.rpartition("/")[2] for name in names if "/licenses/" in name} == {"LICENSE", NOTICES.name}
    assert [f"src/{name}" for name in names if Path(name).suffix in COMPILED] == COMPILED_HERE
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=600)
    [packages] = place.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "--python", place, "install", "--quiet", "--no-deps", wheel]
    subprocess.run(install, check=True, timeout=600)
    command = [place / "bin/quire", "generate", "Once upon a time", "--max-tokens", "4"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, check=True, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip()


def test_each_library_is_in_the_notices_with_its_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = {"always": project["dependencies"]} | {
        f"extra `{name}`": libraries for name, libraries in project["optional-dependencies"].items() if name != "dev"
    }
    wanted = {(re.split(r"[><=;\[ ]", each)[0], when) for when, libraries in installed.items() for each in libraries}
    listed = re.findall(r"^\| ([\w-]+) \| [^|]+ \| (always|extra `\w+`) \|$", NOTICES.read_text(), re.MULTILINE)
    assert {*listed} == wanted
    assert NOTICES.name in project["license-files"]


def test_the_versions_of_python_are_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = project["classifiers"]
    versions = [each.rpartition(" ")[2] for each in named if each.startswith("Programming Language :: Python :: 3.")]
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))["jobs"]
    assert jobs["check"]["strategy"]["matrix"]["python"] == versions
    listed = f"{', '.join(versions[:-1])} and {versions[-1]}"
    assert f"CI runs on Python {listed}." in (ROOT / "docs/installation.md").read_text("utf-8")
    assert f"Python {versions[0]} to {versions[-1]}" in (ROOT / "README.md").read_text("utf-8")
    assert project["requires-python"] == f">={versions[0]}"


def test_each_extra_is_tried_every_night() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert {*jobs["extras"]["strategy"]["matrix"]["extra"]} == {*project["optional-dependencies"]}
    known = re.findall(r"^    (\w+)\) echo", (ROOT / ".ci/package").read_text(), re.MULTILINE)
    assert {*known} == {*project["optional-dependencies"]}


def test_what_is_tried_of_an_extra_is_in_the_package() -> None:
    tried = re.findall(r"^    \w+\) echo 'import (.*)'", (ROOT / ".ci/package").read_text(), re.MULTILINE)
    modules = [name for line in tried for name in line.split(", ") if name.startswith("quire.")]
    assert len(modules) > 3
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


CHANGES = "# Changelog\n\n## 0.3.0 (2027-01-31)\n\n- One.\n\n## 0.2.0 (2026-12-01)\n\n- Two.\n"


def test_a_release_has_the_notes_of_its_version() -> None:
    assert notes("v0.3.0", "0.3.0", CHANGES) == "- One.\n"
    assert notes("v0.2.0", "0.2.0", CHANGES) == "- Two.\n"


@pytest.mark.parametrize(
    ("tag", "version", "changes", "why"),
    [
        ("v0.3.1", "0.3.0", CHANGES, "the tag is v0.3.1, and .* has version 0.3.0"),
        ("v0.4.0", "0.4.0", CHANGES, "no entry '## 0.4.0"),
        ("v0.3.0", "0.3.0", CHANGES.replace("2027-01-31", "unreleased"), "'unreleased' is none"),
        ("v0.3.0", "0.3.0", CHANGES.replace("- One.\n", ""), "says nothing of 0.3.0"),
    ],
)
def test_a_release_that_does_not_agree_with_itself_is_refused(tag: str, version: str, changes: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        notes(tag, version, changes)


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
