"""The engine's process, alone."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from quire.engine.protocol import Configure, encode_frame
from tests.forked import Popen
from tests.live import ROOT, environment


@pytest.mark.parametrize(("settings", "code"), [({}, 0), ({"model": "nowhere at all"}, 2)])
def test_an_engine_whose_front_went_away_while_it_was_built_ends_without_a_word(
    settings: dict[str, str], code: int, tmp_path: Path
) -> None:
    here, there = socket.socketpair()
    with (tmp_path / "said").open("wb") as said:
        process = Popen(
            [sys.executable, "-m", "quire.assembly.engine_child", str(there.fileno())],
            pass_fds=[there.fileno()],
            cwd=ROOT,
            env=environment(),
            stdout=said,
            stderr=said,
        )
    there.close()
    here.sendall(encode_frame(Configure(settings)))
    here.close()
    assert process.wait(600) == code
    assert (tmp_path / "said").read_text() == ""
