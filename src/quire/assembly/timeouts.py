"""How long the server waits for its clients, and how many it takes: the same whoever answers."""

from __future__ import annotations

from quire.config.server import ServerConfig
from quire.server.connection import Timeouts


def patience(server: ServerConfig, *, relays: bool = False) -> Timeouts:
    """What these settings say of connections. relays: each may need another, to a server behind this one.

    Where there are files, one may be read or written for each connection.
    """
    return Timeouts(
        connections=server.max_connections,
        descriptors=2 if relays or server.batch_dir is not None else 1,
        header_bytes=server.max_header_bytes,
        keep_alive=server.timeout_keep_alive,
        read=server.read_timeout,
        write=server.write_timeout,
    )
