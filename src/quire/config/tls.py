"""The files of TLS. Apart from the settings, which every command reads: few need what this imports."""

from __future__ import annotations

import ssl
from pathlib import Path

from quire.config.settings import AccessConfig
from quire.errors import InvalidConfig

_CONTENTS = (("ssl_certfile", "CERTIFICATE", "certificate"), ("ssl_keyfile", "PRIVATE KEY", "private key"))


def check_files(config: AccessConfig) -> None:
    """Raise InvalidConfig unless the TLS certificate and key can be loaded. It names the file that is wrong."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    for name, label, what in _CONTENTS:
        file = getattr(config, name)
        try:
            text = Path(file).read_text("latin-1")
        except OSError as error:
            raise InvalidConfig(f"{name}: {file} cannot be read: {error.strerror or error}", param=name) from error
        if f"{label}-----" not in text:
            raise InvalidConfig(f"{name}: {file} cannot be used: it holds no {what} in PEM", param=name)
        if name == "ssl_keyfile" and "ENCRYPTED" in text:
            why = "the key has a passphrase, which `openssl pkey` can remove"
            raise InvalidConfig(f"{name}: {file} cannot be used: {why}", param=name)
    files = (config.ssl_certfile, config.ssl_keyfile)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*files, lambda: "")
    except (OSError, ssl.SSLError) as error:
        mismatch = getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
        why = "the key is not the certificate's" if mismatch else error.strerror or str(error)
        raise InvalidConfig(
            f"ssl_certfile {files[0]} and ssl_keyfile {files[1]} cannot be used: {why}", param="ssl_certfile"
        ) from error
