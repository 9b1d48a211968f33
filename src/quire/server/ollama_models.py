"""Ollama's list of models: the one that is served, under each of its names, and why none is added or removed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from quire.errors import InvalidRequest, UnknownModel
from quire.frontend.interface import Backend, ModelCard
from quire.server.error_responses import json_response
from quire.server.limits import Limits
from quire.server.live_page import reads_html
from quire.server.prompts import LATEST, model
from quire.weights.details import ModelDetails

API_VERSION = "0.13.0"
"""The version of Ollama whose API this is: clients refuse to work with versions that they know to lack something."""

_NEVER = "9999-12-31T23:59:59Z"
"""When the model is unloaded."""

_ONE_MODEL = "this server serves one model: start another with `quire serve MODEL`"

_NO_PULL = f"pull: models are not pulled here: use `quire pull MODEL`; {_ONE_MODEL}, which fetches it too"

REFUSED_PATHS: Mapping[str, tuple[str, str]] = {
    "/api/create": (
        "POST",
        f"models are not created here; {_ONE_MODEL} and its options, and send `system` in requests",
    ),
    "/api/copy": ("POST", "models are not copied here; a further name is an option: --served-model-name NAME"),
    "/api/delete": ("DELETE", "models are not deleted here; remove the files, or what the hub's cache has of them"),
    "/api/push": ("POST", "models are not pushed from here; upload them with the hub's own tools"),
}
"""Method, and what to do instead."""


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """`POST /api/show`. name: an older name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class OllamaPullRequest(msgspec.Struct, kw_only=True):
    """`POST /api/pull`. name: an older name of `model`. stream, insecure: nothing is fetched."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    insecure: bool | None = None


class OllamaModels:
    """The served model as Ollama's clients see it.

    details: reads them from the checkpoint; called once, when first needed. template: the chat template, '' where it is
    not shown.
    """

    def __init__(self, backend: Backend, details: Callable[[], ModelDetails], template: str = "") -> None:
        self._backend = backend
        self._details = cache(details)
        self._template = template

    def routes(self) -> list[Route]:
        """All paths but those of `show` and `pull`, whose requests have bodies."""
        lists: dict[str, Callable[[], Any]] = {"/api/tags": self.tags, "/api/ps": self.running}
        return [
            Route("/", _root),
            Route("/api/version", partial(_json, lambda: {"version": API_VERSION})),
            *(Route(path, partial(_json, answer)) for path, answer in lists.items()),
            *(
                Route(path, partial(_refuse, path.rpartition("/")[2], why), methods=[method])
                for path, (method, why) in REFUSED_PATHS.items()
            ),
        ]

    def tags(self) -> dict[str, Any]:
        """`GET /api/tags`: the names of the model."""
        card = self._backend.model()
        return {"models": [{**self._entry(card, name), "modified_at": _time(card)} for name in card.names]}

    def running(self) -> dict[str, Any]:
        """`GET /api/ps`: the same; the model is always loaded."""
        card = self._backend.model()
        size = self._details().num_bytes
        loaded = {
            "expires_at": _NEVER,
            "size_vram": 0 if card.device in ("", "cpu") else size,
            "context_length": card.max_model_len,
        }
        return {"models": [{**self._entry(card, name), **loaded} for name in card.names]}

    def show(self, request: OllamaShowRequest, _: Limits) -> dict[str, Any]:
        """`POST /api/show`. Raises UnknownModel."""
        card = model(request.model or request.name, self._backend)
        details = self._details()
        family = details.family or "unknown"
        info = {
            "general.architecture": family,
            "general.parameter_count": details.num_parameters,
            f"{family}.context_length": card.max_model_len,
            f"{family}.embedding_length": details.embedding_length,
            f"{family}.vocab_size": card.vocab_size,
        }
        return {
            "modelfile": f"FROM {card.root or card.id}\n",
            "parameters": "\n".join(f"{name} {value}" for name, value in card.defaults.items()),
            "template": self._template,
            "details": self._shown(),
            "model_info": {name: value for name, value in info.items() if value},
            "capabilities": self._capabilities(card),
            "modified_at": _time(card),
        }

    def pull(self, request: OllamaPullRequest, _: Limits) -> dict[str, str]:
        """`POST /api/pull`: the model that is served is there already, for clients that pull before they ask. Raises
        InvalidRequest for another."""
        try:
            model(request.model or request.name, self._backend)
        except UnknownModel as error:
            raise InvalidRequest(_NO_PULL, param="model", code="unsupported") from error
        return {"status": "success"}

    def _entry(self, card: ModelCard, name: str) -> dict[str, Any]:
        # Names have a tag where Ollama's clients look for one.
        tagged = name if ":" in name.rpartition("/")[2] else name + LATEST
        digest = hashlib.sha256((card.root or card.id).encode()).hexdigest()
        size = self._details().num_bytes
        return {"name": tagged, "model": tagged, "size": size, "digest": digest, "details": self._shown()}

    def _shown(self) -> dict[str, Any]:
        details = self._details()
        return {
            "parent_model": "",
            "format": details.format,
            "family": details.family,
            "families": [details.family] if details.family else [],
            "parameter_size": _size(details.num_parameters),
            "quantization_level": details.precision,
        }

    def _capabilities(self, card: ModelCard) -> list[str]:
        found = {
            "completion": True,
            "tools": "tools" in card.template_arguments,
            "thinking": card.reasoning_parser != "none",
            "insert": self._fills_in(),
            "embedding": card.pools,
        }
        return [name for name, has in found.items() if has]

    def _fills_in(self) -> bool:
        try:
            self._backend.encode("", suffix=" ")
        except InvalidRequest:
            return False
        return True


def _time(card: ModelCard) -> str:
    return datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _size(parameters: int) -> str:
    """A number of parameters as in Ollama's lists, such as 7.6B; '' for 0."""
    for least, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= least:
            return f"{parameters / least:.1f}{unit}"
    return str(parameters or "")


async def _json(value: Callable[[], Any], request: Request) -> Response:
    # In a thread: the details are read from files at first.
    return json_response(await asyncio.to_thread(value))


async def _root(request: Request) -> Response:
    """`GET /`: browsers are led to the page, and clients of Ollama learn that one is here."""
    return RedirectResponse("ui") if reads_html(request.headers) else PlainTextResponse("Ollama is running")


async def _refuse(name: str, why: str, request: Request) -> Response:
    raise InvalidRequest(f"{name}: {why}", code="unsupported")
