"""OpenAI's Embeddings, and what every endpoint has in common that makes vectors, classes or scores of texts."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.errors import InvalidRequest
from quire.frontend.interface import Backend, ModelCard
from quire.frontend.pooling import (
    EncodedInput,
    check_dimensions,
    check_task,
    embedding,
    encode_texts,
    kept_tokens,
    pooling_params,
    with_prompt,
)
from quire.frontend.processor import check_pooled, max_new_tokens
from quire.multimodal.inputs import NoImages
from quire.server.calls import Job, make_call, new_request_id
from quire.server.limits import Limits, check_answers, check_priority_and_timeout
from quire.server.outputs import ChoiceBuilder, Usage
from quire.server.prompts import check_length, model, prompts, render
from quire.server.schemas import Prompt
from quire.types import Pooling, call_id

_FORMATS = ("float", "base64")
TEXT_ONLY = NoImages("embeddings and classes are made of text")
POOLINGS: Sequence[Pooling] = ("mean", "last", "cls")


class PoolingFields(msgspec.Struct, kw_only=True):
    """Fields of every endpoint that pools."""

    model: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None


class Embedding(PoolingFields, kw_only=True):
    """Fields of every endpoint that computes embeddings."""

    dimensions: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    prompt_name: str | None = None


class EmbeddingsRequest(Embedding, kw_only=True):
    """`POST /v1/embeddings`, of texts or token ids, or of a conversation by the model's chat template."""

    input: Prompt | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    encoding_format: str | None = None


class ClassifyRequest(PoolingFields, kw_only=True):
    """`POST /classify`, of what `EmbeddingsRequest` takes."""

    input: Prompt | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    use_activation: bool | None = None


def embed(request: EmbeddingsRequest, backend: Backend, limits: Limits, *, truncate: bool = False) -> Job:
    """A job with one call for each text. Raises InvalidRequest or UnknownModel naming the field.

    truncate: leave out the end of texts that are longer than the context.
    """
    card = model(request.model, backend)
    check_task(card.pooler, "embed", pools=card.pools)
    check_dimensions(request.dimensions, card.pooler)
    check_format(request.encoding_format)
    if request.pooling not in (None, *POOLINGS):
        raise InvalidRequest(f"pooling must be one of {', '.join(POOLINGS)}", param="pooling")
    if truncate:
        request.truncate_prompt_tokens = -1
    inputs = read_inputs(request, request.prompt_name, backend, card, limits)
    pooling: Pooling = request.pooling or card.pooler.pooling
    return pooled_job("embd-", inputs, pooling, request, backend, limits)


def check_format(given: str | None) -> None:
    """Raises InvalidRequest for an encoding_format there is not."""
    if given not in (None, *_FORMATS):
        raise InvalidRequest(f"encoding_format must be one of {', '.join(_FORMATS)}", param="encoding_format")


def pooled_job(
    prefix: str,
    inputs: Sequence[EncodedInput],
    pooling: Pooling,
    request: PoolingFields,
    backend: Backend,
    limits: Limits,
    *,
    param: str = "input",
) -> Job:
    """A job with a call for each input. prefix: of its id. param: the field that the inputs are from."""
    card = backend.model()
    check_priority_and_timeout(request.priority, request.timeout, limits)
    naming(param, check_answers, len(inputs), 1, limits)
    params = pooling_params(pooling)
    for one in inputs:
        if card.pooler.generates:
            naming(param, max_new_tokens, len(one.ids), params, card.max_model_len)
        else:
            naming(param, check_pooled, len(one.ids), pooling, input_limit(card), card.pooler)
    id = new_request_id(prefix)
    calls = [make_call(call_id(id, i), None, one.ids, request, params, limits) for i, one in enumerate(inputs)]
    truncated = None if request.truncate_prompt_tokens is None else sum(one.truncated for one in inputs)
    return Job(
        id=calls[0].id,
        model=card.id,
        calls=calls,
        token_text=backend.token_text,
        truncated=truncated,
        pooler=card.pooler,
    )


def naming(param: str, check: Any, *arguments: Any) -> None:
    """Run a check whose errors name a field `param`."""
    try:
        check(*arguments)
    except InvalidRequest as error:
        named = re.sub(r"\bprompts?\b", param, str(error))
        raise InvalidRequest(named, param=param, code=error.code) from error


def input_limit(card: ModelCard) -> int:
    """Most tokens of an input."""
    return card.max_model_len - card.pooler.generates


def read_inputs(
    request: EmbeddingsRequest | ClassifyRequest,
    prompt_name: str | None,
    backend: Backend,
    card: ModelCard,
    limits: Limits,
) -> list[EncodedInput]:
    """The token ids of `input`, or of `messages`. Raises InvalidRequest."""
    if (request.input is None) == (request.messages is None):
        raise InvalidRequest("give either input or messages", param="input")
    most = kept_tokens(request.truncate_prompt_tokens, input_limit(card))
    if request.messages is not None:
        if request.add_generation_prompt is None:
            request.add_generation_prompt = False
        shown = render(request.messages, request, backend, TEXT_ONLY, context=input_limit(card) + 1)
        return [cut(shown.ids, most)]
    try:
        given = prompts(request.input or [], card, limits)
        texts = [with_prompt(one, prompt_name, card.pooler) for one in given if isinstance(one, str)]
        return encode_inputs(texts or given, request, backend, card)
    except InvalidRequest as error:
        if error.param != "prompt":
            raise
        raise InvalidRequest(str(error).replace("prompt", "input"), param="input", code=error.code) from error


def encode_inputs(
    given: Sequence[str | tuple[int, ...]], request: PoolingFields, backend: Backend, card: ModelCard
) -> list[EncodedInput]:
    """Texts, or token ids, of which a vector is made each. Raises InvalidRequest."""
    most = kept_tokens(request.truncate_prompt_tokens, input_limit(card))
    texts = [one for one in given if isinstance(one, str)]
    if not texts:
        return [cut(one, most) for one in given if isinstance(one, tuple)]
    if most is None:
        check_length(texts, backend, input_limit(card))
    special = request.add_special_tokens is not False
    return encode_texts(texts, backend.encode_inputs, card.pooler, card.vocab_size, special=special, most=most)


def cut(ids: tuple[int, ...], most: int | None) -> EncodedInput:
    """The first `most` token ids, all if None."""
    return EncodedInput(ids[:most], 0 if most is None else max(0, len(ids) - most))


def pooled_usage(job: Job, usage: Usage) -> dict[str, Any]:
    """The usage of a request that pools: what was left out is counted where it was asked for."""
    counted: dict[str, Any] = {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt}
    return (
        counted if job.truncated is None else {**counted, "prompt_tokens_details": {"truncated_tokens": job.truncated}}
    )


def answer(job: Job, data: Sequence[Mapping[str, Any]], usage: Usage) -> dict[str, Any]:
    """vLLM's list of what was made of the inputs."""
    whole = {"id": job.id, "object": "list", "created": job.created, "model": job.model}
    return {**whole, "data": data, "usage": pooled_usage(job, usage)}


def shown(values: Any, encoding_format: str | None) -> Any:
    """A float32 array as JSON: nested lists, or base64 of its bytes, little-endian."""
    return base64.b64encode(values.tobytes()).decode() if encoding_format == "base64" else values.tolist()


def embeddings(job: Job, choices: Sequence[ChoiceBuilder], usage: Usage) -> dict[str, Any]:
    """OpenAI's list of embeddings. Raises InvalidRequest for more dimensions than the model has."""
    request: EmbeddingsRequest = job.request
    data = []
    for i, one in enumerate(choices):
        values = embedding(one.pooled, request.dimensions, request.normalize, job.pooler)
        data.append({"object": "embedding", "index": i, "embedding": shown(values, request.encoding_format)})
    return {"object": "list", "data": data, "model": job.model, "usage": pooled_usage(job, usage)}
