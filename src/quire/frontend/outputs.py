"""Deltas of a call become what the library returns: vLLM's RequestOutput."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import InvalidRequest
from quire.frontend.interface import Call, Delta
from quire.frontend.processor import embedding_vector
from quire.types import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, RequestOutput


def request_output(call: Call, choices: Sequence[Sequence[Delta]]) -> RequestOutput:
    """The answers of a call. choices: the deltas of each answer in order, at least one; those without a finish_reason
    are unfinished."""
    return RequestOutput(
        request_id=call.id,
        prompt=call.text,
        prompt_token_ids=call.prompt,
        outputs=tuple(_completion(call, deltas) for deltas in choices),
        finished=all(deltas[-1].finish_reason is not None for deltas in choices),
        prompt_logprobs=next((one.prompt_logprobs for one in choices[0] if one.prompt_logprobs), None),
        num_cached_tokens=max(delta.num_cached for delta in choices[0]),
    )


def merge(earlier: Delta, later: Delta) -> Delta:
    """Two deltas of one answer that follow one another, as one."""
    return later._replace(
        text=earlier.text + later.text,
        tokens=earlier.tokens + later.tokens,
        logprobs=earlier.logprobs + later.logprobs,
        prompt_logprobs=earlier.prompt_logprobs or later.prompt_logprobs,
        num_cached=max(earlier.num_cached, later.num_cached),
    )


def _completion(call: Call, deltas: Sequence[Delta]) -> CompletionOutput:
    wanted = call.sampling.logprobs is not None
    logprobs = tuple(one for delta in deltas for one in delta.logprobs)
    return CompletionOutput(
        index=deltas[0].index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.tokens),
        cumulative_logprob=sum(one.logprob for one in logprobs) if wanted else None,
        logprobs=logprobs if wanted else None,
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].error or deltas[-1].stop_reason,
    )


def embedding_output(call: Call, last: Delta, dimensions: int | None, *, normalize: bool) -> EmbeddingRequestOutput:
    """The vector of a call. last: its last delta. dimensions: how many numbers, all if None.

    Raises InvalidRequest for a prompt that could not be computed, and for dimensions there are not.
    """
    if not last.pooled:
        raise InvalidRequest(last.error or "the prompt came to no vector", param="prompts")
    numbers = embedding_vector(last.pooled, dimensions, normalize=normalize)
    outputs = EmbeddingOutput(tuple(numbers.tolist()))
    return EmbeddingRequestOutput(call.id, call.prompt, outputs, num_cached_tokens=last.num_cached)
