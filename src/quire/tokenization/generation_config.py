"""The sampling defaults a checkpoint ships in generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import InvalidModel, InvalidRequest
from quire.tokenization.tokenizer import read_json
from quire.types import NUMERIC_PARAMETERS, SamplingParams

_FIELDS: Mapping[str, str] = {
    **{each.name: each.name for each in NUMERIC_PARAMETERS if each.in_checkpoints},
    "max_new_tokens": "max_tokens",
}
"""The field of SamplingParams for each of the file's."""


def sampling_defaults(folder: str | Path) -> dict[str, Any]:
    """SamplingParams fields as the checkpoint's authors recommend them; absent ones are left out.

    Raises InvalidModel for values that no request may have.
    """
    config = read_json(Path(folder) / "generation_config.json")
    found = {ours: config[theirs] for theirs, ours in _FIELDS.items() if config.get(theirs) is not None}
    try:
        SamplingParams(**found)
    except (InvalidRequest, TypeError) as error:
        raise InvalidModel(f"generation_config.json: {error}") from error
    return found
