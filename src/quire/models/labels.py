"""The classes of a classifier, read without torch: the server needs them, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import InvalidModel


def class_count(fields: Mapping[str, Any]) -> int:
    """Number of a classifier's classes of a config.json: `num_labels`, or entries of `id2label`, or two.

    Raises InvalidModel.
    """
    labels = fields.get("id2label")
    given = fields.get("num_labels") or (len(labels) if isinstance(labels, Mapping) else 2)
    if type(given) is not int or not 1 <= given <= 1 << 20:
        raise InvalidModel(f"config.json: num_labels must be a number of classes, not {given!r}")
    return given
