"""Options of who may ask, how much, and over what kind of line."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass

from quire.config.option import option
from quire.errors import InvalidConfig
from quire.types import UNLIMITED


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Keys beyond the clients' own, what each key may ask for, and TLS."""

    admin_key: tuple[str, ...] = option(
        (),
        "A key that opens everything. Where there is one, only it opens what tells of other people's requests: "
        "/stats, /metrics, /v1/requests and the live page. Where there is none, /v1/requests, /v1/recording, the live "
        "page's events and /reset_prefix_cache are for the machine that the server runs on.",
        secret=True,
        unset="none",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Names by which clients may ask, beside localhost and IP addresses: quire.example.com, *.example.com, or * for "
        "any. Unset: no others where the server listens on loopback and wants no --api-key, which keeps web pages out "
        "that rebind their name; any elsewhere.",
        unset="none",
        metavar="NAME",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origins of web pages that may use the server from a browser (CORS): https://chat.example.com, or * for any.",
        unset="none",
        metavar="ORIGIN",
    )
    max_requests_per_minute: int | None = option(
        None,
        "Requests that each key may make in a minute; none: as many as it likes.",
        low=1,
        high=UNLIMITED,
        unset="none",
    )
    max_tokens_per_minute: int | None = option(
        None,
        "Tokens, of prompts and answers together, that each key may use in a minute; none: as many as it likes.",
        low=1,
        high=UNLIMITED,
        unset="none",
    )
    ssl_keyfile: str | None = option(None, "Private key for TLS, a PEM file; none: plain HTTP.", unset="none")
    ssl_certfile: str | None = option(None, "Certificate for TLS, a PEM file with its chain.", unset="none")


_NAME = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?|\[?[0-9a-f:.]*:[0-9a-f:.]*:[0-9a-f:.]*\]?", re.IGNORECASE)
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d+)?", re.IGNORECASE)


def check(config: AccessConfig, backend: str) -> None:
    """Raises InvalidConfig for what is no host or origin, and for options that cannot go together."""
    for name in config.allowed_hosts:
        if not _NAME.fullmatch(name):
            raise InvalidConfig(
                f"allowed_hosts: {name!r} is not the name of a host: write quire.example.com or *.example.com, without "
                "a scheme and without a port, names that are not ASCII in Punycode",
                param="allowed_hosts",
            )
    for origin in config.allowed_origins:
        if not _ORIGIN.fullmatch(origin):
            raise InvalidConfig(
                f"allowed_origins: {origin!r} is not an origin: write https://chat.example.com, with a scheme, with "
                "the port unless it is the scheme's own, and with no path; several with commas; or * for any",
                param="allowed_origins",
            )
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
