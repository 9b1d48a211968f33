"""The engine's process, alone."""

from __future__ import annotations

import os
import socket
import stat
import sys
from pathlib import Path

import pytest

from quire.assembly.engine_child import ends_with_server
from quire.engine.protocol import Configure, encode_frame
from tests.forked import Popen
from tests.live import ROOT, environment

STUCK = """
import threading
from quire.assembly import engine_child
engine_child.build_engine = lambda *_, **__: threading.Event().wait()
engine_child.main()
"""


@pytest.mark.parametrize(
    ("program", "settings"),
    [
        (["-m", "quire.assembly.engine_child"], {}),
        (["-m", "quire.assembly.engine_child"], {"model": "nowhere at all"}),
        (["-c", STUCK], {}),
    ],
)
def test_an_engine_whose_front_went_away_while_it_was_built_ends_at_once_without_a_word(
    program: list[str], settings: dict[str, str], tmp_path: Path
) -> None:
    here, there = socket.socketpair()
    with (tmp_path / "said").open("wb") as said:
        process = Popen(
            [sys.executable, *program, str(there.fileno())],
            pass_fds=[there.fileno()],
            cwd=ROOT,
            env=environment(),
            stdout=said,
            stderr=said,
        )
    there.close()
    here.sendall(encode_frame(Configure(settings)))
    here.close()
    assert process.wait(600) in (0, 2)
    assert (tmp_path / "said").read_text() == ""


def is_pipe(fd: str) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(int(fd)).st_mode)
    except OSError:  # that of the listing itself
        return False


def test_a_server_that_goes_once_the_engine_is_built_is_for_its_loop_to_see(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    here, there = socket.socketpair()
    with ends_with_server(there):
        here.sendall(b"a message")
        pipes = [
            os.dup(int(fd)) for fd in os.listdir("/proc/self/fd") if is_pipe(fd)
        ]  # as a process that is forked has
    for fd in pipes:
        os.close(fd)
    here.close()
    assert not ended
    with ends_with_server(there):
        pass
    assert ended == [0]
    there.close()
