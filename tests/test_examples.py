"""Each program of examples/ runs as it is, against a server of the embedded model or without one."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live import Live, serving

FOLDER = Path(__file__).parents[1] / "examples"
SERVER = "http://127.0.0.1:8000"

PRINTS = {
    "chat": r"user: .*\nassistant: (?s:.+)\nuser: .*then\?\nassistant: (?s:.+)\nprompt tokens: \d+ answer tokens: \d+",
    "streaming": r"(?s:.{20,})\n\d+ tokens",
    "tool_loop": r'called weather \{"city": ?"(Paris|Rome)" ?\}\nanswer: (?s:.+)',
    "structured_output": r"\{'name': '.*', 'age': \d+, 'colour': '(brown|black|white)'\}",
    "embeddings_search": r"0\.\d+ The dog ran after the ball\.\n.*\n.*",
    "batch_job": r"completed 3 of 3\nstory-dog .+(?s:.*)story-cat .+(?s:.*)story-bird .+",
    "offline_llm": r"Once upon a time.+(?s:.*)\nThe little dog.+(?s:.*)\nOne day, a girl.+",
    "async_llm": r"(?s:(?=.*boat: '.+')(?=.*bird: '.+').*)",
    "anthropic_agent": r"called read_file \{'name': '(notes|todo)\.txt'\}\nanswer: (?s:.+)",
    "logprobs": r"('.+' +[01]\.\d\d  of '.+' [01]\.\d\d, .+\n){7}.+",
    "scheduling_policy": r"24 tokens: .+(?s:.*)\n12 tokens: .+(?s:.*)\n4 tokens: .+",
    "concurrent_requests": r"8 answers, \d+ tokens in [\d.]+ s: \d+ tokens/s",
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("examples")
    with serving(folder, "--batch-dir", str(folder / "batches")) as live:
        yield live


@pytest.mark.parametrize("name", PRINTS)
def test_each_example_prints_what_it_should(
    name: str, live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (FOLDER / f"{name}.py").read_text("utf-8")
    program = tmp_path / f"{name}.py"
    program.write_text(code.replace(SERVER, live.url), "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "*")
    assert (SERVER in code) == ("from quire import" not in code)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(program), run_name="__main__")
    assert re.fullmatch(PRINTS[name], said.getvalue().strip()), said.getvalue()


def test_every_example_is_run_and_listed() -> None:
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert names == PRINTS.keys()
    assert len(names) >= 10
    listed = re.findall(r"^\| \[`(\w+)\.py`\]\(\1\.py\) \|", (FOLDER / "README.md").read_text("utf-8"), re.MULTILINE)
    assert {*listed} == names
    assert len(listed) == len(names)
