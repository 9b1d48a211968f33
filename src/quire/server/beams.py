"""The fields of a request that asks for a beam search, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.errors import InvalidRequest
from quire.frontend.beam_search import MAX_BEAMS, BeamSearchParams, num_candidates
from quire.frontend.interface import Call, ModelCard
from quire.server.limits import Limits
from quire.server.schemas import Answers
from quire.types import DRAWING_PARAMETERS, NUMERIC_PARAMETERS

_OTHERS: Mapping[str, float] = {"length_penalty": 1.0, "early_stopping": False}
"""Fields of a search only, and the value that changes nothing without one."""

_NEUTRAL: Mapping[str, float] = {
    "temperature": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "repeat_last_n": -1,
    "min_tokens": 0,
}

_REFUSED = (
    *(each.name for each in NUMERIC_PARAMETERS if each.in_requests and each.name not in DRAWING_PARAMETERS),
    *("stop", "stop_token_ids", "min_tokens", "bad_words", "logit_bias", "allowed_token_ids", "structured_outputs"),
    *("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "logprobs", "top_logprobs"),
    *("prompt_logprobs", "thinking_token_budget", "return_timings", "return_sampling_params", "suffix"),
)


def width(request: Answers) -> int:
    """Answers that are made: `n` of them, or all beams of a search. Raises InvalidRequest naming the field."""
    n = 1 if request.n is None else request.n
    if not request.use_beam_search:
        for name, unset in _OTHERS.items():
            if getattr(request, name) not in (None, unset):
                raise InvalidRequest(f"{name} needs use_beam_search: true", param=name)
        if request.best_of not in (None, n):
            raise InvalidRequest("best_of must equal n: only beams are ranked (use_beam_search)", param="best_of")
        return n
    made = n if request.best_of is None else request.best_of
    if made < n:
        raise InvalidRequest(f"best_of ({made}) beams are fewer than n ({n}) answers", param="best_of")
    if made > MAX_BEAMS:
        raise InvalidRequest(f"at most {MAX_BEAMS} beams are searched, not {made}", param=_width_field(request))
    return made


def searching(call: Call, request: Answers, card: ModelCard, limits: Limits) -> Call:
    """`call` as a beam search, if the request asks for one. Raises InvalidRequest naming the field."""
    if not request.use_beam_search:
        return call
    for name in _REFUSED:
        value = getattr(request, name, None)
        if value not in (None, False, "", [], {}) and value != _NEUTRAL.get(name):
            why = "it must be 0" if name == "temperature" else "beams are ranked by the model's own distribution"
            raise InvalidRequest(f"{name} does not go with use_beam_search: {why}", param=name)
    if (structure := call.sampling.structured_outputs) is not None:
        raise InvalidRequest(
            f"{structure.param} does not go with use_beam_search: beams are free", param=structure.param
        )
    if request.echo and request.max_tokens == 0:
        raise InvalidRequest("max_tokens must be at least 1 for a search", param="max_tokens")
    left = card.max_model_len - len(call.prompt)
    params = BeamSearchParams(
        beam_width=width(request),
        max_tokens=left if call.sampling.max_tokens is None else min(call.sampling.max_tokens, left),
        ignore_eos=bool(request.ignore_eos),
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        early_stopping=bool(request.early_stopping),
    )
    wanted = num_candidates(params, card.eos)
    if wanted > limits.max_logprobs:
        raise InvalidRequest(
            f"{params.beam_width} beams need {wanted} log-probabilities a token, and this server computes at most "
            f"{limits.max_logprobs}: search fewer beams",
            param=_width_field(request),
        )
    if wanted > card.vocab_size > 0:
        raise InvalidRequest(
            f"{params.beam_width} beams need {wanted} tokens to choose from, and the vocabulary has {card.vocab_size}",
            param=_width_field(request),
        )
    return replace(call, beams=params)


def _width_field(request: Answers) -> str:
    return "n" if request.best_of is None else "best_of"
