"""Starts an engine's process. Imports little: a server does this first."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Spawned(NamedTuple):
    """A process that builds an engine once it is sent settings, and our end of its socket. configured: it was sent
    them."""

    process: subprocess.Popen[bytes]
    sock: socket.socket
    configured: bool = False


def spawn(argv: Sequence[str], environment: Mapping[str, str]) -> Spawned:
    """Start a process of the command `argv`, which imports what an engine needs and waits. See
    `client.EngineProcess`."""
    here, there = socket.socketpair()
    try:
        process = subprocess.Popen(
            [*argv, str(there.fileno())],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            env={**environment, **os.environ},
            start_new_session=True,  # Ctrl-C is for the front: it drains first
        )
    except BaseException:
        here.close()
        raise
    finally:
        there.close()
    return Spawned(process, here)
