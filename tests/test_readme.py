"""Each example of the README works as printed, against a server started as printed but for the port."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live import Live, environment, serving

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(name: str) -> str:
    """The code under `<!-- name -->`."""
    found = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert found, f"the README has no block called {name}"
    return found[1]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    assert block("serve").strip().endswith("&& quire serve")
    with serving(tmp_path_factory.mktemp("readme")) as live:
        yield live


def at(live: Live, code: str) -> str:
    assert "http://127.0.0.1:8000/v1" in code
    return code.replace("http://127.0.0.1:8000", live.url)


def run(*command: str) -> str:
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1200, env=environment() | {"PATH": tools}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_curl_example_answers(live: Live) -> None:
    answer = run("bash", "-euc", at(live, block("curl")))
    assert '"finish_reason":' in answer
    assert re.search(r'"content": ?"[^"]{20,}', answer), answer


def test_the_openai_example_streams_a_story(live: Live) -> None:
    assert len(run(sys.executable, "-W", "error", "-c", at(live, block("openai")))) > 20


def test_the_offline_example_prints_a_line_for_each_prompt() -> None:
    lines = run(sys.executable, "-W", "error", "-c", block("offline")).splitlines()
    assert [line.startswith(start) for line, start in zip(lines, ("Once upon a time", "The little dog"), strict=True)]


def test_the_test_command_is_the_one_ci_runs() -> None:
    assert block("test").strip() == 'pip install -e ".[dev]" && make check'
    assert "<!-- test -->" in (ROOT / ".ci/run").read_text()
    assert re.search(r"^check:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_first_words_fit_five_lines() -> None:
    opening = README.split("\n\n")[1]
    assert len(opening.splitlines()) <= 5
