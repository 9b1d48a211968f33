"""OpenAI's Embeddings: the served model's hidden states of a text, pooled into one vector."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.errors import InvalidRequest
from quire.frontend.interface import Backend, ModelCard
from quire.frontend.processor import check_embedding, embedding_vector
from quire.server.calls import Job, make_call
from quire.server.limits import Limits, check_answers, check_priority_and_timeout
from quire.server.outputs import ChoiceBuilder, Usage
from quire.server.prompts import encode, model, prompts
from quire.server.schemas import Prompt
from quire.types import UNLIMITED, Pooling, SamplingParams

_FORMATS = ("float", "base64")


class Embedding(msgspec.Struct, kw_only=True):
    """Fields of every endpoint that computes embeddings."""

    model: str | None = None
    dimensions: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None


class EmbeddingsRequest(Embedding, kw_only=True):
    """`POST /v1/embeddings`."""

    input: Prompt
    encoding_format: str | None = None


def embedding(request: EmbeddingsRequest, backend: Backend, limits: Limits, *, truncate: bool = False) -> Job:
    """A job with one call for each text. Raises InvalidRequest or UnknownModel naming the field.

    truncate: leave out the end of texts that are longer than the context.
    """
    card = model(request.model, backend)
    check_embedding(request.dimensions, pools=card.pools)
    if request.encoding_format not in (None, *_FORMATS):
        raise InvalidRequest(f"encoding_format must be one of {', '.join(_FORMATS)}", param="encoding_format")
    check_priority_and_timeout(request.priority, request.timeout, limits)
    texts = _encode(request, backend, card, limits, truncate)
    if request.pooling not in (None, "mean", "last"):
        raise InvalidRequest("pooling must be one of mean, last", param="pooling")
    pooling: Pooling = "last" if request.pooling == "last" else "mean"
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, pooling=pooling)
    calls = [make_call("embd-", None, ids, request, params, limits) for ids in texts]
    return Job(id=calls[0].id, model=card.id, calls=calls, token_text=backend.token_text)


def _encode(
    request: EmbeddingsRequest, backend: Backend, card: ModelCard, limits: Limits, truncate: bool
) -> list[tuple[int, ...]]:
    """The token ids of each text. Raises InvalidRequest naming `input`."""
    most = UNLIMITED if truncate else card.max_model_len
    try:
        given = prompts(request.input, card, limits)
        check_answers(len(given), 1, limits)
        encoded = encode(given, request.add_special_tokens is not False, backend, most)
    except InvalidRequest as error:
        raise InvalidRequest(str(error).replace("prompt", "input"), param="input", code=error.code) from error
    return [ids[: card.max_model_len - 1] for _, ids in encoded]


def embeddings(job: Job, choices: Sequence[ChoiceBuilder], usage: Usage) -> dict[str, Any]:
    """OpenAI's list of embeddings. Raises InvalidRequest for more dimensions than the model has."""
    request: EmbeddingsRequest = job.request
    data = []
    for i, one in enumerate(choices):
        values = embedding_vector(one.pooled, request.dimensions, normalize=request.normalize is not False)
        shown = base64.b64encode(values.tobytes()).decode() if request.encoding_format == "base64" else values.tolist()
        data.append({"object": "embedding", "index": i, "embedding": shown})
    counted = {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt}
    return {"object": "list", "data": data, "model": job.model, "usage": counted}
