"""TLS, warnings and secrets, with a real server."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from quire.cli.serve import warnings
from quire.config import Settings
from quire.config.access import check_files
from quire.errors import InvalidConfig
from tests.live import serving


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A private key and a certificate of its own for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = str(folder / "key.pem"), str(folder / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


def test_tls_is_spoken_and_no_secret_is_logged(tmp_path: Path, pair: tuple[str, str]) -> None:
    key, certificate = pair
    options = ("--ssl-keyfile", key, "--ssl-certfile", certificate, "--api-key", "sesame", "--admin-key", "opensaysme")
    with serving(tmp_path, *options, "--uvicorn-log-level", "debug", "--enable-log-requests") as live:
        assert live.url.startswith("https://127.0.0.1:")
        with httpx.Client(
            base_url=live.url, verify=ssl.create_default_context(cafile=certificate), trust_env=False
        ) as client:
            body = {"prompt": "the", "max_tokens": 4}
            for given, status in (("sesame", 200), ("opensaysme", 200), ("guess123", 401)):
                headers = {"authorization": f"Bearer {given}"}
                assert client.post("/v1/completions", json=body, headers=headers).status_code == status
            assert client.get("/stats", headers={"x-api-key": "sesame"}).status_code == 401
        for secret in ("sesame", "opensaysme", "guess123"):
            assert secret not in live.log


def test_files_that_tls_cannot_use_are_refused_at_once(tmp_path: Path, pair: tuple[str, str]) -> None:
    for values in ({"ssl_keyfile": "k.pem"}, {"ssl_certfile": "c.pem"}):
        with pytest.raises(InvalidConfig, match="both"):
            Settings.of(**values)
    (tmp_path / "none.pem").write_text("nothing")
    for key, certificate in ((str(tmp_path / "no.pem"), pair[1]), (pair[0], str(tmp_path / "none.pem"))):
        with pytest.raises(InvalidConfig, match="cannot be used"):
            check_files(Settings.of(ssl_keyfile=key, ssl_certfile=certificate).access)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, []),
        ({"host": "::1"}, []),
        ({"host": "0.0.0.0"}, ["--api-key", "--admin-key", "--ssl-keyfile"]),
        ({"host": "10.0.0.3", "api_key": "k"}, ["--ssl-keyfile"]),
        ({"host": "0.0.0.0", "api_key": "k", "ssl_keyfile": "a", "ssl_certfile": "b"}, []),
    ],
)
def test_whoever_opens_a_server_to_a_network_is_told_what_that_means(values: dict[str, str], words: list[str]) -> None:
    said = warnings(Settings.of(**values))
    assert len(said) == len(words) and all(word in line for word, line in zip(words, said, strict=True))
