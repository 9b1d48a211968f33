"""Deltas of a call become what the library returns: vLLM's RequestOutput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from quire.errors import of
from quire.frontend.interface import Call, Delta
from quire.frontend.pooling import embedding, probabilities, similarity, token_embeddings
from quire.tokenization.tokenizer import Tokenizer
from quire.types import (
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    LogprobsByPosition,
    PoolingOutput,
    PoolingRequestOutput,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.weights.pooling import PoolerConfig


def request_output(call: Call, choices: Sequence[Sequence[Delta]], tokenizer: Tokenizer) -> RequestOutput:
    """The answers of a call. choices: the deltas of each answer in order, at least one; those without a finish_reason
    are unfinished. tokenizer: names the tokens of log-probabilities."""
    decode = _Decode(tokenizer)
    scores = next((one.prompt_logprobs for one in choices[0] if one.prompt_logprobs), None)
    return RequestOutput(
        request_id=call.id,
        prompt=call.text,
        prompt_token_ids=call.prompt,
        outputs=tuple(_completion(call, deltas, decode) for deltas in choices),
        finished=all(deltas[-1].finish_reason is not None for deltas in choices),
        prompt_logprobs=LogprobsByPosition(scores, decode) if scores else None,
        num_cached_tokens=max(delta.num_cached for delta in choices[0]),
        metrics=_metrics(choices[0]),
    )


class _Decode:
    """The text of a token."""

    __slots__ = ("_tokenizer",)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token: int) -> str:
        return self._tokenizer.token_text(token)[0]


def _metrics(deltas: Sequence[Delta]) -> RequestMetrics | None:
    report = deltas[-1].report
    if report is None:
        return None
    tokens = sum(len(delta.tokens) for delta in deltas)
    return RequestMetrics(report.queued + report.prefill, tokens, report.queued, report.prefill)


def merge(earlier: Delta, later: Delta) -> Delta:
    """Two deltas of one answer that follow one another, as one."""
    return later._replace(
        text=earlier.text + later.text,
        tokens=earlier.tokens + later.tokens,
        logprobs=earlier.logprobs + later.logprobs,
        prompt_logprobs=earlier.prompt_logprobs or later.prompt_logprobs,
        num_cached=max(earlier.num_cached, later.num_cached),
    )


def _completion(call: Call, deltas: Sequence[Delta], decode: Callable[[int], str]) -> CompletionOutput:
    wanted = call.sampling.logprobs is not None
    logprobs = tuple(one for delta in deltas for one in delta.logprobs)
    return CompletionOutput(
        index=deltas[0].index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.tokens),
        cumulative_logprob=sum(one.logprob for one in logprobs) if wanted else None,
        logprobs=cast(Sequence[PositionLogprobs], LogprobsByPosition(logprobs, decode)) if wanted else None,
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].error or deltas[-1].stop_reason,
    )


def embedding_output(
    call: Call, last: Delta, dimensions: int | None, normalize: bool | None, pooler: PoolerConfig
) -> EmbeddingRequestOutput:
    """The vector of a call. last: its last delta. dimensions: how many numbers, all if None. normalize: None for what
    the model does.

    Raises InvalidRequest for a prompt that could not be computed, and for dimensions there are not.
    """
    numbers = embedding(pooled_of(last), dimensions, normalize, pooler)
    outputs = EmbeddingOutput(tuple(numbers.tolist()))
    return EmbeddingRequestOutput(call.id, call.prompt, outputs, num_cached_tokens=last.num_cached)


def pooled_of(last: Delta) -> bytes:
    """The numbers of a prompt. Raises InvalidRequest, or what it failed with."""
    if not last.pooled:
        raise of(last.status, last.error or "the prompt came to no vector", param=last.param or "prompts")
    return last.pooled


def classification_output(
    call: Call, last: Delta, pooler: PoolerConfig, use_activation: bool | None
) -> ClassificationRequestOutput:
    """What each class got. Raises as `pooled_of`."""
    probs = probabilities(pooled_of(last), pooler, use_activation)
    made = ClassificationOutput(tuple(probs.tolist()))
    label = pooler.classes[int(probs.argmax())]
    return ClassificationRequestOutput(call.id, call.prompt, made, label, num_cached_tokens=last.num_cached)


def scoring_outputs(
    calls: Sequence[tuple[Call, Delta]], pairs: int, pooler: PoolerConfig, use_activation: bool | None
) -> list[ScoringRequestOutput]:
    """The score of each of `pairs`. calls: of a classifier one for each; of others one for each text of the first side,
    then of the second. Raises as `pooled_of`."""
    if pooler.classes:
        return [
            ScoringRequestOutput(
                call.id,
                call.prompt,
                ScoringOutput(float(probabilities(pooled_of(last), pooler, use_activation)[0])),
                num_cached_tokens=last.num_cached,
            )
            for call, last in calls
        ]
    firsts, seconds = calls[: len(calls) - pairs], calls[len(calls) - pairs :]
    made = []
    for i, (call, last) in enumerate(seconds):
        other, before = firsts[i if len(firsts) > 1 else 0]
        score = ScoringOutput(similarity(pooled_of(before), pooled_of(last)))
        ids, cached = (*other.prompt, *call.prompt), before.num_cached + last.num_cached
        made.append(ScoringRequestOutput(call.id, ids, score, num_cached_tokens=cached))
    return made


def pooling_output(
    call: Call, last: Delta, task: str, pooler: PoolerConfig, use_activation: bool | None
) -> PoolingRequestOutput:
    """What `task` makes of a prompt. Raises as `pooled_of`."""
    pooled = pooled_of(last)
    data: tuple[float, ...] | tuple[tuple[float, ...], ...]
    if task == "token_embed":
        table = token_embeddings(pooled, len(call.prompt), use_activation, pooler)
        data = tuple(tuple(row) for row in table.tolist())
    elif task == "classify":
        data = tuple(probabilities(pooled, pooler, use_activation).tolist())
    else:
        data = tuple(embedding(pooled, None, use_activation, pooler).tolist())
    return PoolingRequestOutput(call.id, call.prompt, PoolingOutput(data), num_cached_tokens=last.num_cached)
