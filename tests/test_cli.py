"""The command line: options made from the settings, errors that fit one line, and a quick start."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from quire import __version__
from quire.cli import main
from quire.cli.base import Root, SettingsCommand
from quire.config import OPTIONS, Settings
from quire.errors import InvalidConfig, InvalidModel, InvalidRequest, QuireError, Unavailable

SOURCE = Path(__file__).parents[1] / "src"


def quire(*args: str, environ: dict[str, str] | None = None) -> Result:
    return CliRunner(env=environ or {}).invoke(main, args)


def shown(result: Result) -> dict[str, list[str]]:
    """`quire config`'s table: option -> [value, from]."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()[1:]]
    return {row[0]: row[1:] for row in rows}


def test_config_shows_values_and_where_they_came_from(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("dtype: float32\nport: 1")
    result = quire("config", "some/model", "--config", str(file), "--max-model-len", "32k", environ={"QUIRE_PORT": "2"})
    assert result.exit_code == 0, result.output
    table = shown(result)
    assert len(table) == len(OPTIONS)
    assert table["model"] == ["some/model", "flag --model"]
    assert table["max-model-len"] == ["32000", "flag --max-model-len"]
    assert table["dtype"] == ["float32", f"file {file}"]
    assert table["port"] == ["2", "environment QUIRE_PORT"]
    assert table["seed"] == ["auto", "default"]


def test_switches_have_a_no_form_and_underscores_are_dashes() -> None:
    table = shown(quire("config", "--no-enable-prefix-caching", "--enforce_eager", "--max_num_seqs=3"))
    assert table["enable-prefix-caching"][0] == "false"
    assert table["enforce-eager"][0] == "true"
    assert table["max-num-seqs"][0] == "3"


def test_keys_are_repeatable_and_never_printed() -> None:
    result = quire("config", "--api-key", "sesame", "--api-key", "open")
    assert shown(result)["api-key"][0] == "(set)"
    assert "sesame" not in result.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--max-num-sqs", "3"], "'--max-num-seqs'"),
        (["--max-num-sqs=3"], "'--max-num-seqs'"),
        (["--nnodes", "2"], "see --tensor-parallel-size"),
        (["-tp", "two"], "tensor_parallel_size (flag --tensor-parallel-size)"),
        (["-O3"], "-O3 is not supported: there is no compile step"),
        (["--ctx-size", "4096"], "here it is --max-model-len"),
        (["--max-waiting-requests", "16"], "here it is --max-num-queued-reqs"),
        (["--mem-fraction-static=0.8"], "here it is --gpu-memory-utilization"),
        (["--disable-radix-cache"], "here it is --no-enable-prefix-caching"),
        (["--port", "http"], "port (flag --port): must be a whole number"),
        (["a", "--model", "b"], "named twice"),
        (["--deterministic", "true"], "'true' is no model: a switch has no value on the command line"),
        (["a", "--enforce-eager", "False"], "extra argument (False): a switch has no value on the command line"),
        (["--config", "nowhere.yaml"], "cannot read the settings file nowhere.yaml"),
        (["--max-num-seqs", "8", "--max-num-batched-tokens", "4"], "max_num_seqs (8)"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(args: list[str], words: str) -> None:
    result = quire("config", *args)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_wrong_variable_is_refused_by_name() -> None:
    result = quire("config", environ={"QUIRE_PROT": "1"})
    assert (result.exit_code, result.stdout) == (2, "")
    assert "'QUIRE_PORT'" in result.stderr


def test_an_unknown_command_hints_at_the_nearest() -> None:
    result = quire("sreve")
    assert result.exit_code == 2
    assert "'serve'" in result.stderr


@pytest.mark.parametrize("args", [["run-batch", "-i", "x"], ["complete"], ["collect-env"]])
def test_vllms_commands_are_answered_with_ours(args: list[str]) -> None:
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 2
    assert "Here it is `quire " in result.stderr


def failing(error: Exception) -> Root:
    @click.command("fail", cls=SettingsCommand)
    def fail(settings: Settings) -> None:
        raise error

    return Root(name="quire", members={"fail": fail})


@pytest.mark.parametrize(
    ("error", "code"),
    [(InvalidConfig("a\nb"), 2), (InvalidModel("x"), 2), (InvalidRequest("x"), 2), (Unavailable("x"), 1)],
)
def test_an_error_becomes_one_line_and_an_exit_code(error: QuireError, code: int) -> None:
    result = CliRunner().invoke(failing(error), ["fail"])
    assert result.exit_code == code
    assert result.stderr == "Error: " + " ".join(str(error).split()) + "\n"


def test_a_path_that_cannot_be_used_becomes_one_line_too() -> None:
    result = CliRunner().invoke(failing(FileNotFoundError(2, "No such file or directory", "/no/where")), ["fail"])
    assert (result.exit_code, result.stderr) == (1, "Error: /no/where: No such file or directory\n")
    assert isinstance(CliRunner().invoke(failing(OSError("of nothing")), ["fail"]).exception, OSError)


def test_debug_shows_the_traceback_too() -> None:
    result = CliRunner().invoke(failing(Unavailable("gone")), ["fail", "--debug"])
    assert result.exit_code == 1
    assert "Traceback" in result.stderr


def test_help_names_every_option_once_with_its_default() -> None:
    help = CliRunner(env={"COLUMNS": "200"}).invoke(main, ["config", "--help"], terminal_width=200).stdout
    for known in OPTIONS.values():
        assert len(re.findall(rf"^ {{2}}(?:-[a-z]+, )?{known.flag}\b(?!-)", help, re.MULTILINE)) == 1, known.flag
    assert "[127.0.0.1]" in help


def test_version_names_quire_and_what_it_runs_on() -> None:
    assert quire("version").stdout.startswith(f"quire {__version__} (torch ")
