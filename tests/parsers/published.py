"""Chat templates as they were published, out of packages that contain them: `make nightly` fetches these with pip."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "out/templates"
"""Where packages are kept, once for each version."""

PACKAGES = ("llama-cpp-python==0.3.36", "trl==1.16.0")
"""The first one as a source distribution, which has llama.cpp's `models/templates`; the second one has templates for
training, too, which write what no server is sent."""


def templates() -> dict[str, str]:
    """The templates by their names, with the package before them. Skips the test where there is no package index."""
    found = {}
    for package in PACKAGES:
        name = package.partition("==")[0]
        for path, text in _members(_fetched(package)):
            if path.endswith(".jinja") and not path.endswith("_training.jinja"):
                found[f"{name}/{Path(path).stem}"] = text
    return found


def _fetched(package: str) -> Path:
    folder = FOLDER / package.replace("==", "-")
    if not folder.exists():
        name = package.partition("==")[0]
        fetch = ["download", "-q", "--no-deps", "-d", str(folder), package]
        if name == "llama-cpp-python":
            fetch += ["--no-binary", name]
        done = _pip(*fetch)
        if done.returncode and _pip("index", "versions", "pip").returncode:
            pytest.skip("there is no package index to fetch published chat templates from")
        assert done.returncode == 0, done.stderr
    [archive] = folder.iterdir()
    return archive


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(line, check=False, capture_output=True, text=True, timeout=900)


def _members(archive: Path) -> Iterator[tuple[str, str]]:
    """Path and text of each template of a package."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for path in wheel.namelist():
                if path.endswith(".jinja"):
                    yield path, wheel.read(path).decode()
        return
    with tarfile.open(archive) as source:
        for member in source:
            if member.name.endswith(".jinja") and (file := source.extractfile(member)) is not None:
                yield member.name, file.read().decode()
