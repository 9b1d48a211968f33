"""Where a start's model is on this disk: found once, and the same for every process of the start.

A hub may answer otherwise a second time, and a tokenizer of one commit must not go with weights of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.config import OPTIONS, Settings
from quire.weights.locate import locate

_PLACE = "place"


def located(settings: Settings) -> Settings:
    """The same settings, whose model has been found: see `weights.locate`. Raises InvalidModel and Unavailable."""
    return settings if settings.place is not None else replace(settings, place=place_of(settings))


def place_of(settings: Settings) -> Path:
    """The folder or GGUF file of the model. Raises InvalidModel and Unavailable where it has yet to be found."""
    model = settings.model
    return settings.place or locate(model.model, revision=model.revision, cache=model.download_dir)


def may_use_gpu(settings: Settings) -> bool:
    """Whether the engine's own process computes, and on a GPU if there is one."""
    execution = settings.execution
    local = settings.executor.executor in ("auto", "local")
    return local and execution.device != "cpu" and not execution.ranked


def without_secrets(settings: Settings) -> dict[str, Any]:
    """The settings as a process on any host gets them: as plain values by name. It looks for the model itself."""
    return {key: value for key, value in settings.flat().items() if not OPTIONS[key].secret}


def for_child(settings: Settings) -> dict[str, Any]:
    """As `without_secrets`, and where the model is: for a process on this host."""
    options = without_secrets(settings)
    return options if settings.place is None else {**options, _PLACE: str(settings.place)}


def of_parent(sent: Mapping[str, Any]) -> Settings:
    """The settings that `for_child` made these values of."""
    options = {name: value for name, value in sent.items() if name != _PLACE}
    return replace(Settings.of(**options), place=Path(sent[_PLACE]) if _PLACE in sent else None)
