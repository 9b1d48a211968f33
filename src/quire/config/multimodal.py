"""The values of `limit_mm_per_prompt` and `mm_processor_kwargs`, which are JSON objects."""

from __future__ import annotations

import json
from typing import Any

from quire.errors import InvalidConfig, nearest

MAX_IMAGES = 16
"""Of a prompt, where `limit_mm_per_prompt` does not say."""

_KINDS = ("image", "video", "audio")


def max_images(limit: str | None) -> int:
    """Most images of a prompt. Raises InvalidConfig."""
    found = MAX_IMAGES
    for kind, count in _object("limit_mm_per_prompt", limit).items():
        if kind not in _KINDS:
            raise InvalidConfig(
                f"limit_mm_per_prompt: {kind!r} is not known (image is).{nearest(kind, _KINDS)}",
                param="limit_mm_per_prompt",
            )
        if type(count) is not int or not 0 <= count <= 4096:
            raise InvalidConfig(
                f"limit_mm_per_prompt: {kind} must be a number from 0 to 4096, not {count!r}",
                param="limit_mm_per_prompt",
            )
        if kind == "image":
            found = count
        elif count:
            raise InvalidConfig(
                f"limit_mm_per_prompt: no model reads {kind} here: leave it out, or set it to 0",
                param="limit_mm_per_prompt",
            )
    return found


def processor_changes(changes: str | None) -> dict[str, Any]:
    """Changes to an image processor, by field; which there are depends on the model. Raises InvalidConfig."""
    return _object("mm_processor_kwargs", changes)


def _object(name: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidConfig(f"{name} must be a JSON object, not {text[:80]!r}", param=name)
    return found
