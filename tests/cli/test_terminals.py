"""What is piped, typed and printed: disks that are full, other encodings, Ctrl-C, completion of values."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from quire.cli import main
from quire.cli.base import INTERRUPTED, SettingsCommand
from quire.cli.conversation import as_text
from quire.errors import InvalidRequest
from tests.live import FOREGROUND, environment

QUIRE = (sys.executable, "-m", "quire")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("words", [("config",), ("generate", "Once", "--max-tokens", "4"), ("serve", "--help")])
def test_a_full_disk_is_one_line(words: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*QUIRE, *words], stdout=full, stderr=subprocess.PIPE, env=environment(), timeout=120, check=False
        )
    assert (done.returncode, done.stderr) == (1, b"Error: cannot write: No space left on device\n")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps a folder that is used")
def test_a_folder_that_was_removed_is_one_line(tmp_path: Path) -> None:
    """MKL's error named a library of torch's that was there."""
    gone = tmp_path / "gone"
    gone.mkdir()
    argv = ["sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", *QUIRE, "generate", "Once"]
    done = subprocess.run(argv, cwd=gone, capture_output=True, env=environment(), timeout=120, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        b"Error: the current folder was removed: change to one that is there\n",
    )


def test_streams_that_the_parent_closed_are_open_and_inherited() -> None:
    """Of a server that was started without stderr the engine's socket had its number, and got the engine's log."""
    started = (
        "import subprocess, sys; from quire.cli import base; base._open_standard_streams();"
        "sys.exit(subprocess.call(['sh', '-c', ': <&0 >&1 2>&2']) or sys.stderr.fileno() - 2)"
    )
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", started]
    assert subprocess.run(closed, env=environment(), timeout=120, check=False).returncode == 0


def test_ctrl_c_ends_a_command_as_shells_have_it() -> None:
    argv = [*FOREGROUND, *QUIRE, "demo", "--delay", "5"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        # Rendering imports; after a step, which is written at once, it sleeps.
        assert any(line.startswith(b"step 1") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (INTERRUPTED, b"\n")


def test_ctrl_c_while_a_command_is_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(ctx: click.Context) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SettingsCommand, "invoke", lambda self, ctx: interrupted(ctx))
    done = CliRunner().invoke(main, ["config"])
    assert (done.exit_code, done.output) == (INTERRUPTED, "\n")


def test_bytes_of_another_encoding_are_refused_and_utf_8_is_read_whatever_the_locale() -> None:
    assert as_text("caf\u00e9") == "caf\u00e9"
    assert as_text(os.fsdecode("caf\u00e9".encode()) + "\udcc3\udca9") == "caf\u00e9\u00e9"
    with pytest.raises(InvalidRequest, match=r"'caf\\udcff' is not text in UTF-8"):
        as_text("caf\udcff")
    done = CliRunner().invoke(main, ["generate", "caf\udcff"])
    assert (done.exit_code, done.stderr) == (2, "Error: 'caf\\udcff' is not text in UTF-8\n")


@pytest.mark.parametrize("words", [("run", "embedded"), ("generate", "-"), ("chat",)])
def test_what_is_piped_in_and_no_text_is_refused(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, words, input=b"\xff\xfe\x00")
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: ") and "is not text in" in done.stderr


def test_what_is_piped_into_generate_is_its_prompt() -> None:
    argv = ["generate", "--max-tokens", "4", "--temperature", "0"]
    piped = CliRunner().invoke(main, argv, input="The dog ran")
    given = CliRunner().invoke(main, [*argv, "The dog ran"])
    opening = CliRunner().invoke(main, argv, input="")
    assert piped.output == given.output != "" and piped.exit_code == 0
    assert opening.output.startswith("Once upon a time")


@pytest.mark.parametrize("words", [("generate",), ("run", "embedded", "Sum up:", "-")], ids=" ".join)
def test_a_pipe_without_end_is_refused_before_it_fills_the_memory(words: tuple[str, ...]) -> None:
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless:
        asked = subprocess.Popen([*QUIRE, *words], stdin=endless.stdout, stderr=subprocess.PIPE, env=environment())
        _, said = asked.communicate(timeout=300)
        endless.kill()
    assert asked.returncode == 2 and b"standard input has more than 8,388,608 characters" in said


def test_text_that_an_encoding_lacks_is_printed_with_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding="latin-1", write_through=True))
    monkeypatch.setattr(SettingsCommand, "invoke", lambda self, ctx: click.echo("caf\u00e9 \u2615"))
    main.main(["config"], standalone_mode=False)
    assert printed.getvalue() == b"caf\xe9 ?\n"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("quire serve --dtype b", "plain,bfloat16"),
        ("quire serve --pressure-policy r", "plain,reserve"),
        ("quire serve em", "plain,embedded"),
        ("quire run ./mod", "file,./mod"),
        ("quire serve --recording-dir rec", "file,rec"),
        ("quire plan --model ./m", "file,./m"),
    ],
)
def test_values_of_options_are_completed(typed: str, offered: str) -> None:
    environ = {"_QUIRE_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    done = CliRunner().invoke(main, prog_name="quire", env=environ)
    assert done.output.strip() == offered


def test_arguments_are_in_the_line_of_usage_and_not_among_options() -> None:
    usage, _, rest = CliRunner().invoke(main, ["run", "--help"]).output.partition("\n")
    assert usage == "Usage: quire run [OPTIONS] [MODEL] [PROMPT]..."
    assert "[MODEL]" not in rest and "[PROMPT]" not in rest


def test_an_option_of_chat_is_explained_where_run_lacks_it() -> None:
    done = CliRunner().invoke(main, ["run", "--url", "http://127.0.0.1:1", "hi"])
    assert done.exit_code == 2 and "`quire chat --url ADDRESS`" in done.stderr


def test_a_gguf_file_that_is_not_there_is_no_repository() -> None:
    done = CliRunner().invoke(main, ["inspect", "models/none.gguf"])
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: there is no file models/none.gguf, and no GGUF file in models")
