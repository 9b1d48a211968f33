"""Options of who may ask, how much, and over what kind of line."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from quire.config.option import option
from quire.errors import InvalidConfig
from quire.values import MANY


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Keys beyond the clients' own, what each key may ask for, and TLS."""

    admin_key: tuple[str, ...] = option(
        (),
        "A key that opens everything. Where there is one, only it opens what tells of other people's requests: "
        "/stats, /metrics, /v1/requests and the live page.",
        secret=True,
        unset="none",
    )
    max_requests_per_minute: int | None = option(
        None, "Requests that each key may make in a minute; none: as many as it likes.", low=1, high=MANY, unset="none"
    )
    max_tokens_per_minute: int | None = option(
        None,
        "Tokens, of prompts and answers together, that each key may use in a minute; none: as many as it likes.",
        low=1,
        high=MANY,
        unset="none",
    )
    ssl_keyfile: str | None = option(None, "Private key for TLS, a PEM file; none: plain HTTP.", unset="none")
    ssl_certfile: str | None = option(None, "Certificate for TLS, a PEM file with its chain.", unset="none")


def check(config: AccessConfig, backend: str) -> None:
    """Raises InvalidConfig for options that cannot go together."""
    if (config.ssl_keyfile is None) != (config.ssl_certfile is None):
        missing = "ssl_keyfile" if config.ssl_keyfile is None else "ssl_certfile"
        raise InvalidConfig(f"TLS needs both ssl_keyfile and ssl_certfile: set {missing} too", param=missing)
    if config.max_tokens_per_minute is not None and backend != "native":
        raise InvalidConfig(
            f"max_tokens_per_minute counts our own engine's tokens, and backend is {backend}: "
            "use max_requests_per_minute",
            param="max_tokens_per_minute",
        )


def check_files(config: AccessConfig) -> None:
    """Raises InvalidConfig unless TLS can be spoken with these files."""
    if config.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile, lambda: "")
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or str(error)
        raise InvalidConfig(f"ssl_certfile and ssl_keyfile cannot be used: {why}", param="ssl_certfile") from error
