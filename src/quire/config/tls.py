"""The files of TLS. Apart from the settings, which every command reads: few need what this imports."""

from __future__ import annotations

import ssl

from quire.config.settings import AccessConfig
from quire.errors import InvalidConfig


def check_files(config: AccessConfig) -> None:
    """Raise InvalidConfig unless the TLS certificate and key can be loaded."""
    if config.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile, lambda: "")
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or str(error)
        raise InvalidConfig(f"ssl_certfile and ssl_keyfile cannot be used: {why}", param="ssl_certfile") from error
