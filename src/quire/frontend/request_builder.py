"""A call in the engine's words: text, ends and limits spelled as token ids and numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from quire.errors import InvalidRequest
from quire.frontend.interface import Call
from quire.frontend.output_processor import OutputProcessor, sampling_for_choice
from quire.tokenization.detokenizer import NoText, StopFinder, StopStrings
from quire.tokenization.tokenizer import Tokenizer
from quire.types import Request, SamplingParams

_CONTEXT = 16
"""Tokens before an answer that its first space may depend on."""

_SEEDS = (1 << 64) - 1
"""All 64 bits of a seed count. A negative one is its two's complement, as in PyTorch: -1 is 2^64 - 1."""


def requests(call: Call, *, tokenizer: Tokenizer, limit: int, seed: int, deadline: float = math.inf) -> list[Request]:
    """One Request for each of the `n` answers, the first one leading.

    limit: longest sequence in tokens, prompt included. seed: used when the call brings none. deadline: on the
    engine's clock. Raises InvalidRequest with the counts when prompt and answer cannot fit.
    """
    sampling = call.sampling
    if sampling.bad_words and not sampling.bad_words_token_ids:
        sampling = replace(sampling, bad_words_token_ids=bad_words(sampling.bad_words, tokenizer))
    max_new = max_new_tokens(len(call.prompt), sampling, limit)
    seed = (seed if sampling.seed is None else sampling.seed) & _SEEDS
    eos = frozenset() if sampling.ignore_eos else tokenizer.eos
    salt = hashed_salt(call.cache_salt, call.trace_context.tenant)
    ids = [f"{call.id}-{choice}" for choice in range(sampling.n)]
    others, stop = sampling_for_choice(sampling, 1), eos.union(sampling.stop_token_ids)
    return [
        Request(
            id=id,
            prompt=call.prompt,
            max_new_tokens=max_new,
            sampling=others if choice else sampling,
            stop=stop,
            seed=seed,
            choice=choice,
            priority=call.priority,
            deadline=deadline,
            cache_salt=salt,
        )
        for choice, id in enumerate(ids)
    ]


def output_processor(request: Request, tokenizer: Tokenizer, stops: StopStrings) -> OutputProcessor:
    """What turns the tokens of `request` into text. `stops` are its stop strings, made once for all `n`."""
    sampling = request.sampling
    skip = sampling.skip_special_tokens
    text = tokenizer.detokenizer(skip_special_tokens=skip, context=request.prompt[-_CONTEXT:])
    return OutputProcessor(
        request.id,
        request.choice,
        sampling,
        detokenizer=text if sampling.detokenize else NoText(),
        finder=StopFinder(stops, include=sampling.include_stop_str_in_output),
        eos=tokenizer.eos,
    )


def max_new_tokens(prompt: int, sampling: SamplingParams, limit: int) -> int:
    """How many tokens may follow a prompt of `prompt` tokens. Raises InvalidRequest with the counts when none can."""
    if not prompt:
        raise InvalidRequest("the prompt is empty: give at least one token", param="prompt")
    if prompt + 1 > limit:
        raise InvalidRequest(
            f"the prompt has {prompt} tokens, and this model's context holds {limit}, at least one of them "
            "for the answer: shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    if sampling.max_tokens is None:
        return limit - prompt
    if prompt + sampling.max_tokens > limit:
        raise InvalidRequest(
            f"the prompt has {prompt} tokens and max_tokens is {sampling.max_tokens}: together "
            f"{prompt + sampling.max_tokens}, and this model's context holds {limit}. "
            f"Ask for at most {limit - prompt}, or shorten the prompt",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return sampling.max_tokens


class Encoder(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]: ...


def bad_words(words: Sequence[str], tokenizer: Encoder) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands at a text's beginning and after a space. Raises InvalidRequest for an empty one."""
    spelled: dict[tuple[int, ...], None] = {}
    for word in words:
        for form in (word.lstrip(), " " + word.lstrip()):
            ids = tokenizer.encode(form, add_special_tokens=False)
            if not word.strip() or not ids:
                raise InvalidRequest(f"{word!r} is not a word that could be avoided", param="bad_words")
            spelled[ids] = None
    return tuple(spelled)


def hashed_salt(salt: str, tenant: str = "") -> str:
    """A salt of any length as one of 32 characters: the prefix index and the histories of requests keep it.

    The tenant is hashed under a key of its own, so that no salt that a client chooses is another tenant's.
    """
    if not salt and not tenant:
        return ""
    told = salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(told, digest_size=16, key=tenant.encode()).hexdigest()
