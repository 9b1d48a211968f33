"""MkDocs hooks: add generated pages and files outside of docs/ to the site, and benchmarks to its navigation."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",
    "THIRD_PARTY_NOTICES.md": "third-party.md",
    "training/README.md": "training.md",
    "benchmarks/README.md": "performance/benchmarks.md",
}
"""A file's path from the root: the page of the site, in docs/, that it becomes."""
SEARCH_BOOST = {"installation.md": 2.0, "troubleshooting.md": 2.0, "benchmarks/": 0.1, "changelog.md": 0.1}
"""How much more the search values what it finds on these pages: help before records of measurements and of changes."""
PAGE_OF = OUTSIDE | {"examples/README.md": "examples.md"}
"""Links to these files become links to their pages."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace `benchmarks/` in the navigation with the pages of that folder, the latest first."""
    for section in config.nav or []:
        for pages in section.values():
            for number, page in enumerate(pages):
                if isinstance(page, dict) and "benchmarks/" in page.values():
                    pages[number] = {next(iter(page)): list(_benchmarks())}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of `OUTSIDE` and those of `tools/reference.py`."""
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # here, since MkDocs undoes it after it has loaded this module
    for target, made in importlib.import_module("tools.reference").PAGES.items():
        files.append(File.generated(config, target, content=made()))
    for source, target in OUTSIDE.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links to and from the files of `OUTSIDE` links between pages of the site, and set `SEARCH_BOOST`."""
    target = page.file.src_uri
    boost = next((value for path, value in SEARCH_BOOST.items() if target.startswith(path)), 1.0)
    page.meta["search"] = {"boost": boost}
    sources = {page_of: source for source, page_of in OUTSIDE.items()}
    here = PurePosixPath(sources.get(target, f"docs/{target}")).parent

    def relative(link: re.Match[str]) -> str:
        path = os.path.normpath(here / link[1])
        linked = PAGE_OF.get(path, path.removeprefix("docs/"))
        return f"]({os.path.relpath(linked, PurePosixPath(target).parent)}"

    return re.sub(r"\]\((?![a-z]+:)([^)#\s]+)", relative, markdown)


def _benchmarks() -> Iterator[str]:
    yield "benchmarks/README.md"
    pages = (ROOT / "docs/benchmarks").glob("*-20*.md")
    for page in sorted(pages, key=lambda page: page.stem[-10:], reverse=True):
        yield f"benchmarks/{page.name}"
