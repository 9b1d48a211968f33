"""Forked processes are to those that start them what started ones are."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import ROOT, Popen, forking, runs
from tests.live import serving

QUIRE = (sys.executable, "-m", "quire")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or Path("/dev/nvidiactl").exists(), reason="processes are forked on Linux without a GPU"
)


def test_output_exit_code_folder_and_variables_are_those_of_a_started_process(tmp_path: Path) -> None:
    (tmp_path / "quire.yaml").write_text("max-num-seqs: 7\n")
    commands = (["config", "--config", "quire.yaml"], ["config", "--max-num-seqz", "3"], ["version"])
    how = {"cwd": tmp_path, "capture_output": True, "text": True}
    for words in commands:
        variables = os.environ | {"QUIRE_MAX_LOGPROBS": "3"}
        started = subprocess.run([*QUIRE, *words], env=variables, check=False, **how)  # type: ignore[call-overload]
        with forking():
            forked = subprocess.run([*QUIRE, *words], env=variables, check=False, **how)  # type: ignore[call-overload]
        assert (forked.returncode, forked.stdout, forked.stderr) == (
            started.returncode,
            started.stdout,
            started.stderr,
        )


def test_a_fork_is_a_child_that_is_waited_for_and_killed() -> None:
    with Popen([*QUIRE, "chat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        parent = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1]
        assert int(parent) == os.getpid() and runs(process.pid, "quire") and process.poll() is None
        process.kill()
        assert process.wait(60) == -9


def test_variables_that_imports_read_are_not_those_of_a_fork() -> None:
    code = [*QUIRE, "version"]
    with Popen(code, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "2"}) as process:
        assert "python" in Path(f"/proc/{process.pid}/comm").read_text()
        process.communicate()


def test_the_engine_of_a_forked_server_is_told_from_what_forks_it(tmp_path: Path) -> None:
    with serving(tmp_path) as live:
        assert runs(live.engine_pid(), "engine_main")


def test_a_fork_ends_with_a_process_that_is_killed() -> None:
    command = [*QUIRE, "serve", "--port", "0"]
    code = f"from tests.forked import Popen\nwith Popen({command}) as process: print(process.pid, flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        fork = int(killed.stdout.readline())
        watch = os.pidfd_open(fork)
        killed.kill()
    [ended, *_] = select.select([watch], [], [], 60)
    if not ended:
        signal.pidfd_send_signal(watch, signal.SIGKILL)
    os.close(watch)
    assert ended, "it goes on"
