"""Scores of pairs of texts, and documents in the order of their scores: vLLM's /score, and Jina's and Cohere's rerank.

A classifier with one class reads both texts together. A model that embeds gives the cosine of their vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InvalidRequest
from quire.frontend.interface import Backend, ModelCard
from quire.frontend.pooling import (
    EncodedInput,
    check_task,
    encode_pairs,
    kept_tokens,
    matched,
    probabilities,
    similarity,
    with_prompt,
)
from quire.server.calls import Job
from quire.server.embeddings import PoolingFields, answer, encode_inputs, input_limit, naming, pooled_job, pooled_usage
from quire.server.limits import Limits, check_answers
from quire.server.outputs import ChoiceBuilder, Usage
from quire.server.prompts import model


class ScoreFields(PoolingFields, kw_only=True):
    """Fields of endpoints that score."""

    use_activation: bool | None = None
    instruction: str | None = None


class ScoreRequest(ScoreFields, kw_only=True):
    """`POST /v1/score`: text_1 with each of text_2, or one with one; they have other names, too, see `FORMS`."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None


FORMS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""What vLLM calls the two sides."""


class RerankRequest(ScoreFields, kw_only=True):
    """`POST /v1/rerank`."""

    query: str
    documents: list[str | dict[str, Any]]
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None


def score(request: ScoreRequest, backend: Backend, limits: Limits) -> Job:
    """The job of `/v1/score`. Raises InvalidRequest or UnknownModel naming the field."""
    first, second, names = _sides(request)
    return _job("score-", matched(first, second, names), len(first), request, backend, limits, names)


def _sides(request: ScoreRequest) -> tuple[list[str], list[str], tuple[str, str]]:
    """The texts of both sides, and the names of their fields."""
    given = {name for form in FORMS for name in form if getattr(request, name) is not None}
    names = next((form for form in FORMS if {*form} == given), None)
    if names is None:
        raise InvalidRequest(f"give {', or '.join(map(' and '.join, FORMS))}", param="text_1")
    first, second = (_texts(getattr(request, name), name) for name in names)
    return first, second, names


def _texts(given: str | list[str], name: str) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    for i, text in enumerate(texts):
        if not text:
            raise InvalidRequest(f"{name}[{i}] is empty: give text", param=name)
    return texts


def rerank(request: RerankRequest, backend: Backend, limits: Limits) -> Job:
    """The job of `/v1/rerank`. Raises InvalidRequest or UnknownModel naming the field."""
    if request.top_n is not None and request.top_n < 0:
        raise InvalidRequest("top_n must be at least 1, or 0 for all", param="top_n")
    if request.max_tokens_per_doc:
        raise InvalidRequest(
            "max_tokens_per_doc is not supported: send truncate_prompt_tokens, which bounds query and document",
            param="max_tokens_per_doc",
            code="unsupported_field",
        )
    names = "query", "documents"
    pairs = matched(_texts(request.query, "query"), _texts(_documents(request), "documents"), names)
    return _job("rerank-", pairs, 1, request, backend, limits, names)


def _documents(request: RerankRequest) -> list[str]:
    """The documents' texts: each is text, or an object with one."""
    texts = []
    for i, one in enumerate(request.documents):
        text = one.get("text") if isinstance(one, dict) else one
        if not isinstance(text, str):
            raise InvalidRequest(f"documents[{i}] must be text, or an object with a text", param="documents")
        texts.append(text)
    return texts


def _job(
    prefix: str,
    pairs: Sequence[tuple[str, str]],
    firsts: int,
    request: ScoreFields,
    backend: Backend,
    limits: Limits,
    names: tuple[str, str],
) -> Job:
    """A call for each pair, or for each text of either side. firsts: texts of the first side."""
    card = model(request.model, backend)
    check_task(card.pooler, "score", pools=card.pools)
    naming(names[1], check_answers, len(pairs), 1, limits)
    if card.pooler.classes:
        inputs = _encoded_pairs(pairs, request, backend, card, names)
        return pooled_job(prefix, inputs, "classify", request, backend, limits, param=names[1])
    if request.instruction is not None or request.use_activation is not None:
        name = "use_activation" if request.instruction is None else "instruction"
        raise InvalidRequest(f"{name} is for classifiers: here scores are cosines of embeddings", param=name)
    texts = [pair[0] for pair in pairs[:firsts]] + [pair[1] for pair in pairs]
    inputs = encode_inputs([with_prompt(text, None, card.pooler) for text in texts], request, backend, card)
    return pooled_job(prefix, inputs, card.pooler.pooling, request, backend, limits, param=names[1])


def _encoded_pairs(
    pairs: Sequence[tuple[str, str]], request: ScoreFields, backend: Backend, card: ModelCard, names: tuple[str, str]
) -> list[EncodedInput]:
    """Token ids of what a cross-encoder reads. Raises InvalidRequest for a pair that is too long."""
    limit = input_limit(card)
    most = kept_tokens(request.truncate_prompt_tokens, limit)
    render = _render(backend) if card.pooler.by_chat else None
    if written := card.pooler.by_template or render is not None:
        _check_written(pairs, request.instruction or "", names)
    inputs = encode_pairs(
        pairs,
        backend.encode_inputs,
        card.pooler,
        card.vocab_size,
        special=request.add_special_tokens is not False,
        # Cut even where it is then refused: a long query must not be kept whole for every document.
        most=limit if most is None and not written else most,
        instruction=request.instruction,
        render=render,
    )
    for i, one in enumerate(inputs):
        if most is None and one.truncated:
            raise InvalidRequest(
                f"{names[1]}[{i}] makes a pair of {len(one.ids) + one.truncated} tokens, and this model takes "
                f"{limit}: send shorter texts, or truncate_prompt_tokens -1, which leaves out the end of the longer",
                param=names[1],
                code="context_length_exceeded",
            )
    return inputs


MOST_WRITTEN = 1 << 24
"""Most characters of all pairs of a request, where both texts are written into one: tokenizing takes about a
microsecond each."""


def _check_written(pairs: Sequence[tuple[str, str]], instruction: str, names: tuple[str, str]) -> None:
    """Raises InvalidRequest where what is written once for every pair makes far more text than the request has."""
    count = sum(len(first) + len(second) + len(instruction) for first, second in pairs)
    if count > MOST_WRITTEN:
        raise InvalidRequest(
            f"{names[0]} is read again with each of {len(pairs)} {names[1]}: {count:,} characters in all, and at most "
            f"{MOST_WRITTEN:,} are read in a request: send fewer at once",
            param=names[1],
        )


def _render(backend: Backend) -> Any:
    """A pair by the chat template, as vLLM's templates for scores expect it."""

    def render(query: str, document: str) -> str:
        return backend.render(
            [{"role": "query", "content": query}, {"role": "document", "content": document}],
            add_generation_prompt=False,
        )

    return render


def values(job: Job, choices: Sequence[ChoiceBuilder], pairs: int) -> list[float]:
    """The score of each pair."""
    if job.pooler.classes:
        active = job.request.use_activation
        return [float(probabilities(one.pooled, job.pooler, active)[0]) for one in choices]
    firsts = len(choices) - pairs
    return [similarity(choices[i if firsts > 1 else 0].pooled, choices[firsts + i].pooled) for i in range(pairs)]


def scores(job: Job, choices: Sequence[ChoiceBuilder], usage: Usage) -> dict[str, Any]:
    """vLLM's list of scores."""
    first, second, _ = _sides(job.request)
    made = values(job, choices, max(len(first), len(second)))
    return answer(job, [{"index": i, "object": "score", "score": one} for i, one in enumerate(made)], usage)


def ranked(job: Job, choices: Sequence[ChoiceBuilder], usage: Usage) -> dict[str, Any]:
    """Documents in the order of their scores, the best first."""
    request: RerankRequest = job.request
    documents = _documents(request)
    made = values(job, choices, len(documents))
    order = sorted(range(len(made)), key=lambda i: (-made[i], i))[: request.top_n or None]

    def result(i: int) -> Mapping[str, Any]:
        whole: dict[str, Any] = {"index": i, "relevance_score": made[i]}
        return whole if request.return_documents is False else {**whole, "document": {"text": documents[i]}}

    return {
        "id": job.id,
        "model": job.model,
        "usage": pooled_usage(job, usage),
        "results": [result(i) for i in order],
    }
