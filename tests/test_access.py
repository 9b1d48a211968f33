"""TLS, warnings and secrets, with a real server."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

import httpx
import pytest

from quire.cli.serve import warnings
from quire.config import Settings
from quire.config.tls import check_files
from quire.errors import InvalidConfig
from tests.live import serving, tls_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A private key and a certificate of its own for 127.0.0.1."""
    return tls_pair(tmp_path_factory.mktemp("tls"))


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


def test_a_server_on_loopback_without_keys_answers_no_strange_name_and_allowed_pages_only(tmp_path: Path) -> None:
    page = "https://chat.example.com"
    with serving(tmp_path, "--allowed-origins", page) as live:
        evil, here = {"host": "evil.example"}, {"host": "localhost:8000"}
        body = {"prompt": "the", "max_tokens": 4}
        for path in ("/v1/completions", "/v1/files", "/reset_prefix_cache"):
            assert live.http.post(path, json=body, headers=evil).status_code == 403
        assert live.http.get("/v1/requests", headers=evil).status_code == 403
        assert live.http.get("/health", headers=evil).status_code == 200
        assert live.http.get("/v1/requests", headers=here).status_code == 200
        asks = {"access-control-request-method": "POST"}
        assert live.http.options("/v1/completions", headers={"origin": page, **asks}).status_code == 200
        assert (
            live.http.options("/v1/completions", headers={"origin": "https://evil.example", **asks}).status_code == 400
        )
        stream = live.http.post("/v1/completions", json={**body, "stream": True}, headers={"origin": page, **here})
        assert stream.text.endswith("data: [DONE]\n\n")
        assert stream.headers["access-control-allow-origin"] == page


def test_files_that_tls_cannot_use_are_refused_at_once(tmp_path: Path, pair: tuple[str, str]) -> None:
    for values in ({"ssl_keyfile": "k.pem"}, {"ssl_certfile": "c.pem"}):
        with pytest.raises(InvalidConfig, match="both"):
            Settings.of(**values)
    missing, empty, locked = (str(tmp_path / name) for name in ("no.pem", "none.pem", "locked.pem"))
    Path(empty).write_text("nothing")
    Path(locked).write_text(Path(pair[0]).read_text().replace(" PRIVATE KEY", " ENCRYPTED PRIVATE KEY"))
    (tmp_path / "other").mkdir()
    other = tls_pair(tmp_path / "other")
    for key, certificate, words in (
        (missing, pair[1], f"ssl_keyfile: {missing} cannot be read: No such file or directory"),
        (pair[0], missing, f"ssl_certfile: {missing} cannot be read: No such file or directory"),
        (str(tmp_path), pair[1], f"ssl_keyfile: {tmp_path} cannot be read: Is a directory"),
        (empty, pair[1], f"ssl_keyfile: {empty} cannot be used: it holds no private key"),
        (pair[0], empty, f"ssl_certfile: {empty} cannot be used: it holds no certificate"),
        (pair[1], pair[0], f"ssl_certfile: {pair[0]} cannot be used: it holds no certificate"),
        (locked, pair[1], f"ssl_keyfile: {locked} cannot be used: the key has a passphrase"),
        (other[0], pair[1], f"ssl_certfile {pair[1]} and ssl_keyfile {other[0]} cannot be used: the key is not"),
    ):
        with pytest.raises(InvalidConfig, match=re.escape(words)):
            check_files(Settings.of(ssl_keyfile=key, ssl_certfile=certificate).access)
    check_files(Settings.of(ssl_keyfile=pair[0], ssl_certfile=pair[1]).access)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, []),
        ({"host": "::1"}, []),
        ({"host": "0.0.0.0", "uds": "socket"}, []),
        ({"host": "0.0.0.0"}, ["--api-key", "--admin-key", "--ssl-keyfile"]),
        ({"host": "10.0.0.3", "api_key": "k"}, ["--ssl-keyfile"]),
        ({"host": "0.0.0.0", "api_key": "k", "ssl_keyfile": "a", "ssl_certfile": "b"}, []),
    ],
)
def test_a_server_that_is_opened_to_a_network_warns_of_the_risks(values: dict[str, str], words: list[str]) -> None:
    said = warnings(Settings.of(**values))
    assert len(said) == len(words) and all(word in line for word, line in zip(words, said, strict=True))


def test_cached_tokens_tell_a_key_nothing_of_what_another_key_asked(tmp_path: Path) -> None:
    """A prompt of another key is never found in the cache, and never named as what a prompt was compared with."""
    secret = " ".join(f"word{i}" for i in range(120))
    with serving(tmp_path, "--api-key", "one", "--api-key", "two", "--admin-key", "boss") as live:

        def cached(key: str) -> int:
            body = {"prompt": secret, "max_tokens": 1, "temperature": 0}
            asked = live.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            return int(asked.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached("one") == 0 and cached("one") > 0
        assert (cached("two"), cached("boss")) == (0, 0)
        found = live.http.get("/v1/requests", headers={"authorization": "Bearer boss"}).json()["requests"]
        stories = [
            live.http.get(f"/v1/requests/{one['id']}/explain", headers={"authorization": "Bearer boss"}).json()
            for one in found
        ]
        prefixes = [answer["prefix"] for story in stories for answer in story["answers"]]
        assert len(prefixes) == 4 and [prefix["from"] for prefix in prefixes] == [None] * 4
        assert sum(prefix["hit_tokens"] > 0 for prefix in prefixes) == 1
