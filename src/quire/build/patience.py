"""How long the server waits for its clients, and how many it takes: the same whoever answers."""

from __future__ import annotations

from quire.config.server import ServerConfig
from quire.server.connection import Patience


def patience(server: ServerConfig) -> Patience:
    """What these settings say of connections."""
    return Patience(
        connections=server.max_connections,
        header_bytes=server.max_header_bytes,
        keep_alive=server.timeout_keep_alive,
        read=server.read_timeout,
        write=server.write_timeout,
    )
