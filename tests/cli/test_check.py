"""`quire check`: every family answers, and what does not is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from quire.cli import main
from quire.cli.check import OWN, TINY, Answer, checked, families, family
from quire.config import Settings
from quire.errors import InvalidConfig, InvalidModel
from quire.models.registry import ARCHITECTURES, read_spec


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["check", *words])


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_tiny_model_of_every_family_answers_alone_and_in_a_batch_alike(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In CI of every fifth: `tests/test_every_architecture.py` has answers of all."""
    every = list(families())
    monkeypatch.setattr("quire.cli.check.families", lambda: every[::step])
    result = run("--all", "--deterministic", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    *lines, last = result.stdout.splitlines()
    assert [line.split()[3] for line in lines] == every[::step]
    assert last == f"{len(lines)} of {len(lines)} answered"
    assert {type(ARCHITECTURES[name]) for name in families()} == {type(each) for each in ARCHITECTURES.values()}


def test_the_tiny_configuration_of_every_family_can_be_read() -> None:
    specs = [read_spec({**TINY, **OWN.get(name, {}), "architectures": [name]}) for name in families()]
    assert {spec.vocab for spec in specs} == {TINY["vocab_size"]}


def test_a_model_is_checked_by_its_name() -> None:
    result = run("embedded")
    assert result.exit_code == 0 and "1 of 1 answered" in result.stdout


def test_what_fails_is_named_and_the_exit_code_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(str(tmp_path))
    assert result.exit_code == 1
    assert "FAILED: " in result.stdout and "0 of 1 answered" in result.stdout
    with pytest.raises(InvalidConfig, match="--all creates its own models: leave out the model"):
        family(Settings.of(model="embedded"), "LlamaForCausalLM")
    ones, twos = Answer((1,) * 8), Answer((2,) * 8)
    answered: list[Any] = [[ones], [ones], [twos], [ones] * 3]
    monkeypatch.setattr("quire.cli.check.answers", lambda engine, prompts, sampling: answered.pop(0))
    settings = family(Settings.of(deterministic=True), "LlamaForCausalLM")
    assert checked("LlamaForCausalLM", settings).error == "answers differ alone and in a batch"
    short = Answer((1,))
    answered = [[short], [short], [short], [short] * 3]
    assert checked("LlamaForCausalLM", settings).error == "an answer is not 8 tokens of the vocabulary"

    def failing(engine: Any, prompts: Any, sampling: Any) -> Any:
        raise InvalidModel("no")

    monkeypatch.setattr("quire.cli.check.answers", failing)
    assert checked("LlamaForCausalLM", settings).error == "no"
