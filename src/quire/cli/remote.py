"""A small client of OpenAI's chat API over the standard library: what `quire chat --url` needs, and no more."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from quire.errors import InvalidConfig, InvalidRequest, Unauthorized, Unavailable


class Remote:
    """A server at `url` (with or without /v1). `model` None asks the server for the one it serves."""

    def __init__(self, url: str, *, key: str | None = None, model: str | None = None) -> None:
        """Raises InvalidConfig if `url` is no address of a web server."""
        wrong = InvalidConfig(f"--url must look like http://127.0.0.1:8000, not {url}", param="url")
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError as error:
            raise wrong from error
        if not known or any(map(str.isspace, url)):
            raise wrong
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._place, self._url = parts.netloc.rpartition("@")[2], url
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._model = model

    def answer(self, messages: list[dict[str, str]], **sampling: Any) -> Iterator[str]:
        """The pieces of the next message as they come. Raises InvalidRequest, Unauthorized or Unavailable, the last
        also for an answer that breaks off, and for a server of another kind."""
        try:
            yield from self._answer(messages, sampling)
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self._url}: the connection broke: {error or type(error).__name__}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Unavailable(f"{self._url} does not speak OpenAI's API: {error!r}") from error

    def _answer(self, messages: list[dict[str, str]], sampling: dict[str, Any]) -> Iterator[str]:
        if self._model is None:
            with self._send("GET", "/v1/models", None) as listing:
                self._model = json.loads(listing.read())["data"][0]["id"]
        asked = {"model": self._model, "messages": messages, "stream": True, **sampling}
        with self._send("POST", "/v1/chat/completions", asked) as answer:
            for line in answer:
                if line.startswith(b"data:"):
                    if (data := line[5:].strip()) == b"[DONE]":
                        return
                    yield from self._pieces(json.loads(data))
        raise Unavailable(f"{self._url} broke off its answer")

    def _pieces(self, chunk: dict[str, Any]) -> Iterator[str]:
        if "error" in chunk:
            raise Unavailable(f"{self._url}: {chunk['error'].get('message')}")
        for choice in chunk.get("choices", ()):
            if text := choice["delta"].get("content"):
                yield text

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        connection = self._kind(self._place, timeout=600)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, self._path + path, body=sent, headers={**self._headers, "Connection": "close"})
            answer = connection.getresponse()
        except http.client.HTTPException:
            connection.close()
            raise
        except OSError as error:
            connection.close()
            raise Unavailable(f"no server answers at {self._url}: {error}") from error
        if answer.status != 200:
            with answer:
                raise self._error(answer.status, answer.read())
        return answer

    def _error(self, status: int, body: bytes) -> Exception:
        try:
            message = json.loads(body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"status {status}"
        kind = {400: InvalidRequest, 404: InvalidRequest, 401: Unauthorized}.get(status, Unavailable)
        return kind(f"{self._url}: {message}")
