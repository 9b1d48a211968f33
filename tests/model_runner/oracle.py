"""One row, one token, no arrays: what sampling means, spelled out slowly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from quire.scheduler.plan import Mask
from quire.types import Request, SamplingParams
from tests.model_runner.tiny import Tiny

WORD = 0xFFFFFFFF


def mix(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D & WORD
    x = (x ^ x >> 15) * 0x846CA68B & WORD
    return x ^ x >> 16


def fold(h: int, v: int) -> int:
    return mix(h ^ mix((v + 0x9E3779B9) & WORD))


def unit(h: int) -> float:
    return -math.log(1 - (h + 0.5) / 2**32)


def exponential(seed: int, choice: int, position: int, token: int) -> float:
    key = 0
    for word in (seed & WORD, seed >> 32 & WORD, choice, position):
        key = fold(key, word)
    head = fold(key, 2**30 + token // 32)
    held = fold(head, 0) % 32 == token % 32
    return unit(head) / 32 + (0 if held else unit(fold(key, token)))


def edited(
    logits: Sequence[float],
    s: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop: frozenset[int],
    mask: Mask,
) -> list[float]:
    """Logits as they stand before the temperature."""
    out = []
    for t, x in enumerate(logits):
        if mask is not None and not (t >> 3 < len(mask) and mask[t >> 3] >> (t & 7) & 1):
            x = -math.inf
        if s.allowed_token_ids is not None and t not in s.allowed_token_ids:
            x = -math.inf
        if len(output) < s.min_tokens and t in stop:
            x = -math.inf
        for word in s.bad_words_token_ids:
            if word[-1] == t and tuple(output[len(output) - len(word) + 1 :]) == tuple(word[:-1]):
                x = -math.inf
        x += s.logit_bias.get(t, 0.0)
        whole = [*prompt, *output]
        begin = max(len(whole) - s.repeat_last_n, 0) if s.repeat_last_n >= 0 else 0
        if t in whole[begin:]:
            x = x / s.repetition_penalty if x > 0 else x * s.repetition_penalty
        counted = list(output)[max(begin - len(prompt), 0) :]
        x -= s.frequency_penalty * counted.count(t) + s.presence_penalty * (t in counted)
        out.append(x)
    return out


def kept(logits: Sequence[float], s: SamplingParams) -> list[float]:
    """Scaled logits after min_p, top_k and top_p."""
    x = [v / s.temperature for v in logits]
    peak = max(x)
    low = peak + math.log(s.min_p) if s.min_p else -math.inf
    if 0 < s.top_k < len(x):
        low = max(low, sorted(x, reverse=True)[s.top_k - 1])
    left = sorted((v for v in x if v >= low and v > -math.inf), reverse=True)
    if s.top_p < 1:
        mass = sum(math.exp(v - peak) for v in left)
        before = 0.0
        for v in left:
            if before >= s.top_p * mass:
                break
            low, before = v, before + math.exp(v - peak)
    return [v if v >= low else -math.inf for v in x]


def choose(logits: Sequence[float], s: SamplingParams, seed: int, choice: int, position: int) -> int:
    if s.greedy:
        return max(range(len(logits)), key=lambda t: (logits[t], -t))
    x = kept(logits, s)
    scores = {t: v - math.log(exponential(seed, choice, position, t)) for t, v in enumerate(x) if v > -math.inf}
    return max(scores, key=scores.__getitem__)


def naive(model: Tiny, request: Request, mask_after: Callable[[Sequence[int]], Mask] | None = None) -> list[int]:
    """The answer to a request, one dense forward a token."""
    prompt, tokens = list(request.prompt), list(request.prompt)
    while len(tokens) < len(prompt) + request.max_new_tokens:
        output = tokens[len(prompt) :]
        mask = mask_after(output) if mask_after else None
        logits = edited(model.dense(tokens)[-1].tolist(), request.sampling, prompt, output, request.stop, mask)
        tokens.append(choose(logits, request.sampling, request.seed, request.choice, len(tokens)))
        if tokens[-1] in request.stop:
            break
    return tokens[len(prompt) :]
