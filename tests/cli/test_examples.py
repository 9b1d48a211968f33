"""Every command has examples, and they are made of options and commands that there are."""

from __future__ import annotations

import re
import shlex
from collections import Counter

import pytest
from click.testing import CliRunner

from quire.cli import main
from quire.cli.examples import EXAMPLES
from quire.config import OPTIONS
from tests.commands import commands


def test_every_command_has_examples_and_no_other() -> None:
    assert {f"quire {path}" for path in EXAMPLES} == {path for path, _ in commands(main)}


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_can_be_typed(path: str) -> None:
    shown = CliRunner().invoke(main, [*path.split(), "--help"])
    assert shown.exit_code == 0
    assert "Examples:" in shown.output
    for line, _ in EXAMPLES[path]:
        assert f"  {line}\n" in shown.output
        words = shlex.split(line.partition(" < ")[0])
        assert words[: 1 + len(path.split())] == ["quire", *path.split()]
        flags = [word for word in words if word.startswith("--")]
        assert all(flag in shown.output for flag in flags)


def test_help_begins_with_the_options_used_most() -> None:
    shown = CliRunner().invoke(main, ["serve", "--help"]).output
    headings = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[:3] == ["Options:", "used most:", "model:"]
    listed = re.findall(r"^  (?:-[a-z]+, )?(--[a-z0-9-]+)", shown, re.MULTILINE)
    assert Counter(listed) == Counter({known.flag for known in OPTIONS.values()} | {"--config", "--help"})
    assert CliRunner().invoke(main, ["serve", "-h"]).output == shown
    assert shown.index("--max-model-len") < shown.index("\nmodel:\n") < shown.index("--tokenizer ")


def test_the_version_is_an_option_too() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == CliRunner().invoke(main, ["version"]).output
