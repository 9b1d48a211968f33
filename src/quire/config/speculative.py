"""`--speculative-config`: one JSON object, as vLLM's."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from quire.errors import InvalidConfig, nearest

METHODS = ("ngram", "draft_model", "mtp")
OLD_MTP = (
    *("deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "qwen3_5_mtp"),
    *("ernie_mtp", "mimo_mtp", "nemotron_h_mtp"),
)
"""Names that `mtp` has had in vLLM, and in the cards of models."""
ONLINE_FORMATS = (
    *("fp8", "fp8_per_block", "int8", "int8_w8a8"),
    *("q8_0", "q6_k", "q5_k", "q4_k", "q4_0"),
)
"""Formats in which a draft model can be quantised while loading."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How to draft. method: `mtp` by the model's own layers for multi-token prediction. model: folder or hub id of the
    draft; for the embedded model its own draft is the default.

    num_speculative_tokens: the most drafted a step; how many are is measured (0 where drafting does not pay), unless
    adaptive is false. prompt_lookup_max, prompt_lookup_min: lengths of suffixes that ngram looks for. quantization: of
    the draft's plain weights while loading, one of ONLINE_FORMATS. synthetic_acceptance_rate: for
    benchmarks on random weights, whose drafts are never right: the share of drafts that is to be accepted where
    num_speculative_tokens are drafted.
    """

    method: str
    model: str | None = None
    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    adaptive: bool = True
    quantization: str = "auto"
    synthetic_acceptance_rate: float | None = None

    def draft_acceptance(self) -> float | None:
        """The probability that a draft is right after right ones, for `synthetic_acceptance_rate`; None without it.

        Found by bisection: the expected share of accepted drafts is the mean of its powers.
        """
        if self.synthetic_acceptance_rate is None:
            return None
        low, high, most = 0.0, 1.0, self.num_speculative_tokens
        for _ in range(50):
            middle = (low + high) / 2
            enough = sum(middle**i for i in range(1, most + 1)) >= most * self.synthetic_acceptance_rate
            low, high = (low, middle) if enough else (middle, high)
        return high


def parse(text: str | None) -> SpeculativeConfig | None:
    """Parse the JSON object; None for None. Raises InvalidConfig naming the bad key."""
    if text is None:
        return None
    try:
        given = json.loads(text)
    except ValueError as error:
        raise _wrong(f"is not JSON ({error})") from error
    if not isinstance(given, dict):
        raise _wrong('must be an object, such as {"method": "ngram", "num_speculative_tokens": 4}')
    known = {field.name for field in fields(SpeculativeConfig)}
    for key in given:
        if key not in known:
            raise _wrong(f"has an unknown key {key!r}.{nearest(key, known)} Known: {', '.join(sorted(known))}")
    if "method" not in given and "model" in given:
        given["method"] = "draft_model"
    if given.get("method") in OLD_MTP:
        given["method"] = "mtp"
    if given.get("method") not in METHODS:
        raise _wrong(f"needs a method, one of {', '.join(METHODS)}; got {given.get('method')!r}")
    for key in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
        value = given.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 32:
            raise _wrong(f"{key} must be a whole number from 1 to 32, not {value!r}")
    if not isinstance(given.get("adaptive", True), bool):
        raise _wrong(f"adaptive must be true or false, not {given['adaptive']!r}")
    rate = given.get("synthetic_acceptance_rate")
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1):
        raise _wrong(f"synthetic_acceptance_rate must be from 0 to 1, not {rate!r}")
    if given.get("quantization", "auto") not in ("auto", *ONLINE_FORMATS):
        raise _wrong(f"quantization must be one of {', '.join(ONLINE_FORMATS)}; got {given['quantization']!r}")
    if not isinstance(given.get("model"), str | None):
        raise _wrong(f"model must be a name or folder, not {given['model']!r}")
    made = SpeculativeConfig(**given)
    if made.method == "mtp":
        for key in ("model", "quantization"):
            if key in given:
                raise _wrong(f"{key} is of a draft model, and method mtp drafts by layers of the model itself")
    if made.prompt_lookup_min > made.prompt_lookup_max:
        raise _wrong("prompt_lookup_min is above prompt_lookup_max")
    return made


def _wrong(what: str) -> InvalidConfig:
    return InvalidConfig(f"speculative_config {what}", param="speculative_config")
