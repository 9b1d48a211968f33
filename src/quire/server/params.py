"""Request fields as sampling parameters: the request's values, then the checkpoint's defaults, then OpenAI's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from quire.errors import InvalidRequest, nearest
from quire.frontend.interface import Backend, ModelCard
from quire.frontend.processor import bad_words, max_new_tokens
from quire.server.limits import Limits, check_priority_and_timeout
from quire.server.prompts import in_vocabulary
from quire.server.schemas import Answers, ResponseFormat, Sampling
from quire.types import NUMERIC_PARAMETERS, UNLIMITED, SamplingParams, StructuredOutputsParams

# Fields whose defaults a checkpoint may set in generation_config.json.
_RECOMMENDED = tuple(each.name for each in NUMERIC_PARAMETERS if each.in_checkpoints)

# Fields that SamplingParams has by the same name and type.
_SAME = (
    *_RECOMMENDED,
    *(each.name for each in NUMERIC_PARAMETERS if each.in_requests and not each.in_checkpoints),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "bad_words"),
    *("allowed_token_ids", "skip_special_tokens"),
)
_REPORTED_PARAMS = ("n", "max_tokens", *_SAME, "logit_bias")


def shared_params(request: Sampling, backend: Backend, card: ModelCard, limits: Limits) -> dict[str, Any]:
    """The fields of SamplingParams that all prompts of a request share, and that take time to make.

    Checks the counts and ranges of `request` too. Raises InvalidRequest naming the field.
    """
    _check_counts(request, card, limits)
    return {
        "structured_outputs": _structured_outputs(request),
        "logit_bias": None if request.logit_bias is None else _logit_bias(request.logit_bias, card),
        "bad_words_token_ids": bad_words(request.bad_words, backend) if request.bad_words else None,
    }


def sampling_params(
    request: Sampling,
    prompt: Sequence[int],
    card: ModelCard,
    limits: Limits,
    max_tokens: int | None,
    default_max_tokens: int | None,
    *,
    logprobs: int | None = None,
    echoed: int | None = None,
    name: str = "max_tokens",
    shared: Mapping[str, Any],
) -> SamplingParams:
    """The sampling parameters of one prompt. Raises InvalidRequest naming the field.

    echoed: log-probabilities of a prompt that the answer repeats. name: the request's name for max_tokens. shared:
    what `shared_params` returned, which overrides the fields of the request.
    """
    given = {field: getattr(request, field) for field in _SAME}
    given |= {field: card.defaults.get(field) for field in _RECOMMENDED if given[field] is None}
    if isinstance(request, Answers):
        given |= {"n": request.n, "prompt_logprobs": _prompt_logprobs(request, echoed, limits)}
    if max_tokens is None:
        name = "max_tokens"
        max_tokens = card.defaults.get("max_tokens", default_max_tokens)
        if max_tokens is not None:
            max_tokens = max(min(max_tokens, card.max_model_len - len(prompt)), 1)
    given |= shared
    chosen = {field: value for field, value in given.items() if value is not None}
    try:
        made = SamplingParams(**chosen, max_tokens=max_tokens, logprobs=logprobs)
        max_new_tokens(len(prompt), made, card.max_model_len)
    except InvalidRequest as error:
        if error.param != "max_tokens" or name == "max_tokens":
            raise
        raise InvalidRequest(str(error).replace("max_tokens", name), param=name, code=error.code) from error
    return made


def effective_params(
    request: Answers, made: SamplingParams, card: ModelCard, name: str | None
) -> dict[str, Any] | None:
    """The value and the source of each sampling field, if the request asks for them. name: of its max_tokens."""
    if not request.return_sampling_params:
        return None
    rows = {}
    for field in _REPORTED_PARAMS:
        sent = name if field == "max_tokens" else field
        if sent is not None and getattr(request, sent, None) is not None:
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


def max_prompt_tokens(request: Answers, card: ModelCard) -> int:
    """Prompts of this many tokens and more are refused. UNLIMITED where the prompt is to be truncated."""
    return card.max_model_len if request.truncate_prompt_tokens is None else UNLIMITED


def truncate(prompt: tuple[int, ...], request: Answers, card: ModelCard, max_tokens: int | None) -> tuple[int, ...]:
    """The prompt with at most truncate_prompt_tokens; -1: as many as leave space for the answer.

    Raises InvalidRequest naming the field.
    """
    keep, side = request.truncate_prompt_tokens, request.truncation_side
    if side not in (None, "left", "right"):
        raise InvalidRequest("truncation_side must be left or right", param="truncation_side")
    if keep is None:
        if side is not None:
            raise InvalidRequest("truncation_side needs truncate_prompt_tokens", param="truncation_side")
        return prompt
    if keep == -1:
        keep = max(1, card.max_model_len - (max_tokens or 1))
    if keep < 1:
        raise InvalidRequest("truncate_prompt_tokens must be at least 1, or -1", param="truncate_prompt_tokens")
    return prompt[:keep] if side == "right" else prompt[-keep:]


def _check_counts(request: Sampling, card: ModelCard, limits: Limits) -> None:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > limits.max_stop_strings or sum(map(len, stops)) > limits.max_stop_chars:
        most = f"{limits.max_stop_strings} strings and {limits.max_stop_chars} characters"
        raise InvalidRequest(f"stop: at most {most} in all", param="stop")
    if len(request.bad_words or ()) > limits.max_bad_words:
        raise InvalidRequest(f"bad_words: at most {limits.max_bad_words}", param="bad_words")
    if sum(map(len, request.bad_words or ())) > limits.max_bad_chars:
        raise InvalidRequest(f"bad_words: at most {limits.max_bad_chars} characters in all", param="bad_words")
    if len(request.allowed_token_ids or ()) > card.vocab_size > 0:
        raise InvalidRequest(f"allowed_token_ids: the vocabulary has {card.vocab_size}", param="allowed_token_ids")
    for name in ("stop_token_ids", "allowed_token_ids"):
        in_vocabulary(getattr(request, name) or (), name, card)
    for name in ("stop_token_ids", "logit_bias"):
        if len(getattr(request, name) or ()) > limits.max_token_ids:
            raise InvalidRequest(f"{name}: at most {limits.max_token_ids} token ids", param=name)
    check_priority_and_timeout(request.priority, request.timeout, limits)


def _logit_bias(given: dict[str, float], card: ModelCard) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal()) or len(key) > 10:
            raise InvalidRequest(f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias")
        bias[int(key)] = value
    in_vocabulary(list(bias), "logit_bias", card)
    return bias


def check_logprobs(name: str, count: int | None, limits: Limits) -> None:
    """Raises InvalidRequest for a number of log-probabilities out of range. name: of the field."""
    if count is not None and not 0 <= count <= limits.max_logprobs:
        raise InvalidRequest(f"{name} must be between 0 and {limits.max_logprobs}, not {count}", param=name)


def _prompt_logprobs(request: Answers, echoed: int | None, limits: Limits) -> int | None:
    check_logprobs("prompt_logprobs", request.prompt_logprobs, limits)
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest("prompt_logprobs are not sent in streams: use stream: false", param="prompt_logprobs")
    return max((x for x in (request.prompt_logprobs, echoed) if x is not None), default=None)


# ---------------------------------------------------------------- structured outputs


def _structured_outputs(request: Sampling) -> StructuredOutputsParams | None:
    """The structure that the answer must have, by any of its fields. Raises InvalidRequest naming the field."""
    given = [name for name in _STRUCTURES if _is_set(getattr(request, name))]
    if len(given) > 1:
        raise InvalidRequest(f"{given[0]} and {given[1]} exclude each other: send one", param=given[1])
    if request.guided_whitespace_pattern is not None and given != ["guided_json"]:
        raise InvalidRequest("guided_whitespace_pattern needs guided_json", param="guided_whitespace_pattern")
    return _STRUCTURES[given[0]](request) if given else None


def _is_set(value: Any) -> bool:
    return value is not None and not (isinstance(value, ResponseFormat) and value.type == "text")


def _from_response_format(request: Sampling) -> StructuredOutputsParams:
    form, param = request.response_format, "response_format"
    assert form is not None
    inner = form.json_schema.schema if form.json_schema is not None else None
    if form.type not in ("json_object", "json_schema"):
        hint = nearest(form.type[:64], ("text", "json_object", "json_schema"))
        raise InvalidRequest(f"{param}.type must be text, json_object or json_schema.{hint}", param=f"{param}.type")
    if inner is not None and form.schema is not None:
        raise InvalidRequest(f"{param}: the schema is given twice", param=param)
    schema = form.schema if inner is None else inner
    if schema is not None:
        return StructuredOutputsParams(json=schema, param=param)
    if form.type == "json_schema":
        raise InvalidRequest(f"{param}.json_schema.schema is required", param=f"{param}.json_schema.schema")
    return StructuredOutputsParams(json_object=True, param=param)


def _from_structured_outputs(request: Sampling) -> StructuredOutputsParams:
    given = request.structured_outputs
    assert given is not None
    return StructuredOutputsParams(
        json=given.json,
        json_object=given.json_object,
        regex=given.regex,
        choice=None if given.choice is None else tuple(given.choice),
        grammar=given.grammar,
        whitespace_pattern=given.whitespace_pattern,
        disable_any_whitespace=bool(given.disable_any_whitespace),
    )


def _from_guided(kind: str) -> Callable[[Sampling], StructuredOutputsParams]:
    name = f"guided_{kind}"

    def make(request: Sampling) -> StructuredOutputsParams:
        value = getattr(request, name)
        one: dict[str, Any] = {kind: tuple(value) if isinstance(value, list) else value}
        return StructuredOutputsParams(**one, whitespace_pattern=request.guided_whitespace_pattern, param=name)

    return make


_STRUCTURES: Mapping[str, Callable[[Sampling], StructuredOutputsParams]] = MappingProxyType(
    {
        "response_format": _from_response_format,
        "structured_outputs": _from_structured_outputs,
        **{f"guided_{kind}": _from_guided(kind) for kind in ("json", "regex", "choice", "grammar")},
    }
)
