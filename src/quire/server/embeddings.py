"""OpenAI's Embeddings: the served model's hidden states of a text, pooled into one vector."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quire.errors import InvalidRequest
from quire.frontend.embeddings import check, vector
from quire.frontend.interface import Backend, Call, ModelCard
from quire.frontend.request_builder import hashed_salt
from quire.server.calls import Job
from quire.server.limits import Limits, check_answers, check_priority_and_timeout
from quire.server.outputs import ChoiceBuilder, Usage
from quire.server.prompts import encoded, model, prompts
from quire.server.schemas import Prompt
from quire.types import Pooling, SamplingParams

FORMATS = ("float", "base64")


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/embeddings`."""

    input: Prompt
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None


def embedding(asked: EmbeddingsRequest, backend: Backend, limits: Limits) -> Job:
    """One call a text. Raises InvalidRequest or UnknownModel naming the field."""
    card = model(asked.model, backend)
    check(asked.dimensions, pools=card.pools)
    if asked.encoding_format not in (None, *FORMATS):
        raise InvalidRequest(f"encoding_format must be one of {', '.join(FORMATS)}", param="encoding_format")
    check_priority_and_timeout(asked.priority, asked.timeout, limits)
    several = _read(asked, backend, card, limits)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, pooling=_pooling(asked))
    salt = hashed_salt(asked.cache_salt or "")
    calls = [
        Call(
            id=f"embd-{uuid.uuid4().hex}",
            prompt=ids,
            sampling=sampling,
            priority=asked.priority or 0,
            cache_salt=salt,
            timeout=limits.timeout if asked.timeout is None else asked.timeout,
        )
        for ids in several
    ]
    return Job(id=calls[0].id, model=card.id, calls=calls)


def _pooling(asked: EmbeddingsRequest) -> Pooling:
    if asked.pooling in (None, "mean"):
        return "mean"
    if asked.pooling == "last":
        return "last"
    raise InvalidRequest("pooling must be one of mean, last", param="pooling")


def _read(asked: EmbeddingsRequest, backend: Backend, card: ModelCard, limits: Limits) -> list[tuple[int, ...]]:
    """The token ids of every text. Raises InvalidRequest naming `input`."""
    try:
        given = prompts(asked.input, card, limits)
        check_answers(len(given), 1, limits)
        several = encoded(given, asked.add_special_tokens is not False, backend, card.max_model_len)
    except InvalidRequest as error:
        raise InvalidRequest(str(error).replace("prompt", "input"), param="input", code=error.code) from error
    return [ids for _, ids in several]


def embeddings(asked: EmbeddingsRequest, job: Job, made: Sequence[ChoiceBuilder], usage: Usage) -> dict[str, Any]:
    """OpenAI's list of embeddings. Raises InvalidRequest for more dimensions than the model has."""
    data = [
        {"object": "embedding", "index": i, "embedding": _told(each, asked)}
        for i, each in enumerate(
            vector(one.pooled, asked.dimensions, normalize=asked.normalize is not False) for one in made
        )
    ]
    counted = {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt}
    return {"object": "list", "data": data, "model": job.model, "usage": counted}


def _told(vector: npt.NDArray[np.float32], asked: EmbeddingsRequest) -> str | list[float]:
    if asked.encoding_format == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
