"""Fields and defaults into sampling parameters: the request's word, the checkpoint's, then OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InvalidRequest
from quire.frontend.interface import Backend, ModelCard
from quire.frontend.request_builder import bad_words, max_new_tokens
from quire.server.limits import Limits, check_priority_and_timeout
from quire.server.prompts import in_vocabulary
from quire.server.schemas import Answers, Sampling
from quire.server.structure import structure
from quire.types import NUMERIC_PARAMETERS, UNLIMITED, SamplingParams

_RECOMMENDED = tuple(each.name for each in NUMERIC_PARAMETERS if each.in_checkpoints)
"""Fields whose defaults a checkpoint may set in generation_config.json."""

_PLAIN = (
    *_RECOMMENDED,
    *(each.name for each in NUMERIC_PARAMETERS if each.in_requests and not each.in_checkpoints),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "bad_words"),
    *("allowed_token_ids", "skip_special_tokens"),
)


def alike(asked: Sampling, backend: Backend, card: ModelCard, limits: Limits) -> dict[str, Any]:
    """Fields of SamplingParams that are the same for every prompt of a request, and cost too much to make for each.

    Raises InvalidRequest naming the field.
    """
    _counts(asked, card, limits)
    return {
        "structured_outputs": structure(asked),
        "logit_bias": None if asked.logit_bias is None else _bias(asked.logit_bias, card),
        "bad_words_token_ids": bad_words(asked.bad_words, backend) if asked.bad_words else None,
    }


def sampling(
    asked: Sampling,
    prompt: Sequence[int],
    card: ModelCard,
    limits: Limits,
    most: int | None,
    otherwise: int | None,
    *,
    logprobs: int | None = None,
    echoed: int | None = None,
    name: str = "max_tokens",
    changed: Mapping[str, Any],
) -> SamplingParams:
    """Request, then the checkpoint's recommendation, then OpenAI's defaults.

    name: how `most` was spelled. changed: what `alike` found, and fields that follow from others, over all these.
    """
    given = {field: getattr(asked, field) for field in _PLAIN}
    given |= {field: card.defaults.get(field) for field in _RECOMMENDED if given[field] is None}
    if isinstance(asked, Answers):
        given |= {"n": asked.n, "prompt_logprobs": _prompt_logprobs(asked, echoed, limits)}
    if most is None:
        most, name = card.defaults.get("max_tokens", otherwise), "max_tokens"
        most = None if most is None else max(min(most, card.max_model_len - len(prompt)), 1)
    given |= changed
    chosen = {field: value for field, value in given.items() if value is not None}
    try:
        made = SamplingParams(**chosen, max_tokens=most, logprobs=logprobs)
        max_new_tokens(len(prompt), made, card.max_model_len)
    except InvalidRequest as error:
        raise _for_field(error, name) from error
    return made


def effective_params(asked: Answers, made: SamplingParams, card: ModelCard, name: str | None) -> dict[str, Any] | None:
    """Every sampling field's value and where it came from, if that is asked for. name: how max_tokens was spelled."""
    if not asked.return_sampling_params:
        return None
    rows = {}
    for field in _REPORTED_PARAMS:
        sent = name if field == "max_tokens" else field
        if sent is not None and getattr(asked, sent, None) is not None:
            source = "request"
        else:
            known = field in (*_RECOMMENDED, "max_tokens") and card.defaults.get(field) is not None
            source = "generation_config" if known else "default"
        value = getattr(made, field)
        rows[field] = {
            "value": {str(k): v for k, v in value.items()} if field == "logit_bias" else value,
            "source": source,
        }
    return rows


_REPORTED_PARAMS = ("n", "max_tokens", *_PLAIN, "logit_bias")


def longest(asked: Answers, card: ModelCard) -> int:
    """Tokens from which on a prompt is refused; as many as one likes, if it is to be cut."""
    return card.max_model_len if asked.truncate_prompt_tokens is None else UNLIMITED


def truncated(
    prompt: tuple[int, ...], asked: Answers, card: ModelCard, most: int | None
) -> tuple[tuple[int, ...], int]:
    """The prompt as short as the request wants it, and how many tokens that left out. -1: so that the answer fits."""
    keep, side = asked.truncate_prompt_tokens, asked.truncation_side
    if side not in (None, "left", "right"):
        raise InvalidRequest("truncation_side must be left or right", param="truncation_side")
    if keep is None:
        if side is not None:
            raise InvalidRequest("truncation_side needs truncate_prompt_tokens", param="truncation_side")
        return prompt, 0
    if keep == -1:
        keep = max(1, card.max_model_len - (most or 1))
    if keep < 1:
        raise InvalidRequest("truncate_prompt_tokens must be at least 1, or -1", param="truncate_prompt_tokens")
    kept = prompt[:keep] if side == "right" else prompt[-keep:]
    return kept, len(prompt) - len(kept)


def _for_field(error: InvalidRequest, name: str) -> InvalidRequest:
    """`error` in the words of a client that says `name` for max_tokens."""
    if error.param != "max_tokens" or name == "max_tokens":
        return error
    return InvalidRequest(str(error).replace("max_tokens", name), param=name, code=error.code)


def _counts(asked: Sampling, card: ModelCard, limits: Limits) -> None:
    stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    if len(stops) > limits.max_stop_strings or sum(map(len, stops)) > limits.max_stop_chars:
        most = f"{limits.max_stop_strings} strings and {limits.max_stop_chars} characters"
        raise InvalidRequest(f"stop: at most {most} in all", param="stop")
    if len(asked.bad_words or ()) > limits.max_bad_words:
        raise InvalidRequest(f"bad_words: at most {limits.max_bad_words}", param="bad_words")
    if sum(map(len, asked.bad_words or ())) > limits.max_bad_chars:
        raise InvalidRequest(f"bad_words: at most {limits.max_bad_chars} characters in all", param="bad_words")
    if len(asked.allowed_token_ids or ()) > card.vocab_size > 0:
        raise InvalidRequest(f"allowed_token_ids: the vocabulary has {card.vocab_size}", param="allowed_token_ids")
    for name in ("stop_token_ids", "allowed_token_ids"):
        in_vocabulary(getattr(asked, name) or (), name, card)
    for name in ("stop_token_ids", "logit_bias"):
        if len(getattr(asked, name) or ()) > limits.max_token_ids:
            raise InvalidRequest(f"{name}: at most {limits.max_token_ids} token ids", param=name)
    check_priority_and_timeout(asked.priority, asked.timeout, limits)


def _bias(given: dict[str, float], card: ModelCard) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal()) or len(key) > 10:
            raise InvalidRequest(f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias")
        bias[int(key)] = value
    in_vocabulary(list(bias), "logit_bias", card)
    return bias


def check_logprobs(name: str, count: int | None, limits: Limits) -> None:
    if count is not None and not 0 <= count <= limits.max_logprobs:
        raise InvalidRequest(f"{name} must be between 0 and {limits.max_logprobs}, not {count}", param=name)


def _prompt_logprobs(asked: Answers, echoed: int | None, limits: Limits) -> int | None:
    check_logprobs("prompt_logprobs", asked.prompt_logprobs, limits)
    if asked.prompt_logprobs is not None and asked.stream:
        raise InvalidRequest("prompt_logprobs are not sent in streams: use stream: false", param="prompt_logprobs")
    return max((x for x in (asked.prompt_logprobs, echoed) if x is not None), default=None)
