"""Shell completion: each shell's script is given, and commands and options are completed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHELLS = {
    "bash": ("complete -o nosort -F _quire_completion quire", "_QUIRE_COMPLETE=bash_complete"),
    "zsh": ("#compdef quire", "_QUIRE_COMPLETE=zsh_complete"),
    "fish": ("complete --no-files --command quire", "_QUIRE_COMPLETE=fish_complete"),
}


def completed(shell: str, **environ: str) -> str:
    """What `quire` prints for a shell."""
    code = "from quire.cli import main; main(prog_name='quire')"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "_QUIRE_COMPLETE": shell, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stderr == ""
    return found.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_given(shell: str) -> None:
    script = completed(f"{shell}_source")
    assert all(line in script for line in SHELLS[shell])


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("quire ch", {"chat", "check"}),
        ("quire bench re", {"report"}),
        ("quire chat --hist", {"--history-file"}),
        ("quire serve --max-num-s", {"--max-num-seqs"}),
    ],
)
def test_commands_and_options_are_completed(typed: str, offered: set[str]) -> None:
    words = typed.split()
    bash = completed("bash_complete", COMP_WORDS=typed, COMP_CWORD=str(len(words) - 1))
    assert {line.partition(",")[2] for line in bash.splitlines()} == offered
    zsh = completed("zsh_complete", COMP_WORDS=typed, COMP_CWORD=str(len(words) - 1))
    assert set(zsh.splitlines()[1::3]) == offered
    fish = completed("fish_complete", COMP_WORDS=" ".join(words[:-1]), COMP_CWORD=words[-1])
    assert offered <= {each.strip('"') for each in fish.replace(",", "\n").replace("\t", "\n").split()}


def test_names_are_completed_without_importing_the_commands() -> None:
    code = "import atexit, sys; atexit.register(lambda: print(*sys.modules)); "
    code += "from quire.cli import main; main(prog_name='quire')"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "_QUIRE_COMPLETE": "bash_complete", "COMP_WORDS": "quire ", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "plain,serve" in found.stdout and "quire.cli.base" in found.stdout.split()
    assert not {"torch", "quire.cli.serve"} & set(found.stdout.split())


def test_bash_completes_once_its_script_is_read(tmp_path: Path) -> None:
    command = tmp_path / "quire"
    command.write_text(f"#!{sys.executable}\nfrom quire.cli import main\nmain(prog_name='quire')\n")
    command.chmod(0o755)
    typed = 'eval "$SCRIPT"; COMP_WORDS=(quire che); COMP_CWORD=1; _quire_completion quire; echo "${COMPREPLY[@]}"'
    found = subprocess.run(
        ["bash", "-c", typed],
        env={
            **os.environ,
            "SCRIPT": completed("bash_source"),
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (found.stdout, found.stderr) == ("check\n", "")
