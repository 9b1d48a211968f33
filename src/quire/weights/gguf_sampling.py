"""Sampling parameters that a GGUF file recommends, in `general.sampling`, and a checkpoint's as such metadata."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.errors import InvalidModel, InvalidRequest
from quire.tokenization.tokenizer import as_sampling, sampling_defaults
from quire.types import NUMERIC_PARAMETERS

log = logging.getLogger(__name__)

PREFIX = "general.sampling."

_RENAMED: Mapping[str, str] = MappingProxyType({"temperature": "temp", "repetition_penalty": "penalty_repeat"})

NAMES: Mapping[str, str] = MappingProxyType(
    {each.name: _RENAMED.get(each.name, each.name) for each in NUMERIC_PARAMETERS if each.in_checkpoints}
)
"""What llama.cpp calls each."""

_OFF: Mapping[str, float] = MappingProxyType({"mirostat": 0, "xtc_probability": 0.0, "penalty_last_n": 0})
"""Values of others that ask for nothing."""

_PARTS = ("mirostat_tau", "mirostat_eta", "xtc_threshold")
"""Numbers of those."""


def sampling_facts(folder: Path) -> dict[str, Any]:
    """The sampling parameters of generation_config.json as metadata."""
    found = sampling_defaults(folder)
    return {PREFIX + NAMES[name]: value for name, value in found.items() if name in NAMES}


def sampling_of(file: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams that a file's metadata sets. Raises InvalidModel for values that no request may
    have. What has no effect here is logged."""
    given = {key.removeprefix(PREFIX): value for key, value in facts.items() if key.startswith(PREFIX)}
    found = {name: _plain(given[own]) for name, own in NAMES.items() if own in given}
    left = sorted(
        name for name in given.keys() - {*NAMES.values(), *_PARTS} if name not in _OFF or given[name] != _OFF[name]
    )
    if left:
        log.warning("%s: without effect here: %s%s", file.name, PREFIX, f", {PREFIX}".join(left))
    try:
        return as_sampling(found)
    except InvalidRequest as error:
        raise InvalidModel(f"{file.name}: {PREFIX.rstrip('.')}: {error}") from error


def _plain(value: Any) -> Any:
    """A 32-bit number as it was written."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
