"""vLLM's /classify and /pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.errors import InvalidRequest
from quire.frontend.interface import Backend
from quire.frontend.pooling import check_dimensions, check_task, embedding, probabilities, token_embeddings
from quire.server.calls import Job
from quire.server.embeddings import (
    ClassifyRequest,
    EmbeddingsRequest,
    answer,
    check_format,
    pooled_job,
    read_inputs,
    shown,
)
from quire.server.limits import Limits
from quire.server.outputs import ChoiceBuilder, Usage
from quire.server.prompts import model
from quire.types import Pooling

TASKS = ("embed", "token_embed", "classify")


class PoolingRequest(EmbeddingsRequest, kw_only=True):
    """`POST /pooling`. task: of `TASKS`; by default the first that the model has."""

    task: str | None = None
    use_activation: bool | None = None


def classify(request: ClassifyRequest, backend: Backend, limits: Limits) -> Job:
    """The job of `/classify`. Raises InvalidRequest or UnknownModel naming the field."""
    card = model(request.model, backend)
    check_task(card.pooler, "classify", pools=card.pools)
    return pooled_job(
        "classify-", read_inputs(request, None, backend, card, limits), "classify", request, backend, limits
    )


def classes(job: Job, choices: Sequence[ChoiceBuilder], usage: Usage) -> dict[str, Any]:
    """vLLM's list of classes: of each input the likeliest, and what every class got."""
    data = []
    for i, one in enumerate(choices):
        probs = probabilities(one.pooled, job.pooler, job.request.use_activation)
        label = job.pooler.classes[int(np.argmax(probs))]
        data.append({"index": i, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
    return answer(job, data, usage)


def pool(request: PoolingRequest, backend: Backend, limits: Limits) -> Job:
    """The job of `/pooling`. Raises InvalidRequest or UnknownModel naming the field."""
    card = model(request.model, backend)
    if request.task not in (None, *TASKS):
        raise InvalidRequest(f"task must be one of {', '.join(TASKS)}", param="task")
    check_task(card.pooler, task_of(request, card.pooler.tasks), pools=card.pools)
    check_dimensions(request.dimensions, card.pooler)
    check_format(request.encoding_format)
    if request.pooling is not None:
        raise InvalidRequest("pooling is for /v1/embeddings: here task says what is made", param="pooling")
    inputs = read_inputs(request, request.prompt_name, backend, card, limits)
    how: dict[str, Pooling] = {"embed": card.pooler.pooling, "token_embed": "all", "classify": "classify"}
    pooling = how[task_of(request, card.pooler.tasks)]
    if pooling != "classify" and request.use_activation is not None:
        request.normalize = request.use_activation if request.normalize is None else request.normalize
    if pooling == "all" and request.dimensions is not None:
        raise InvalidRequest("dimensions: vectors of tokens are not cut", param="dimensions")
    return pooled_job("pool-", inputs, pooling, request, backend, limits)


def task_of(request: PoolingRequest, tasks: Sequence[str]) -> str:
    """What is asked for."""
    return request.task or tasks[0]


def pooled(job: Job, choices: Sequence[ChoiceBuilder], usage: Usage) -> dict[str, Any]:
    """vLLM's list of pooled numbers."""
    request: PoolingRequest = job.request
    task, data = task_of(request, job.pooler.tasks), []
    for i, (one, call) in enumerate(zip(choices, job.calls, strict=True)):
        if task == "classify":
            made = probabilities(one.pooled, job.pooler, request.use_activation)
        elif task == "token_embed":
            made = token_embeddings(one.pooled, len(call.prompt), request.normalize, job.pooler)
        else:
            made = embedding(one.pooled, request.dimensions, request.normalize, job.pooler)
        data.append({"index": i, "object": "pooling", "data": shown(made, request.encoding_format)})
    return answer(job, data, usage)
