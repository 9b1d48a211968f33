"""Parts of a long suite: `make nightly PART=3/8`, or `--part 3/8`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

RUN = 16
"""Tests in a row that are in one part: neighbours share fixtures, and those of one file are about as slow."""


def part_of(tests: Sequence[T], part: str) -> list[T]:
    """The tests of part `K/N`, K from 1 on: runs of RUN tests are dealt out to N parts. Raises ValueError."""
    given = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if given is None or int(given[1]) > int(given[2]):
        raise ValueError(f"part {part!r}: write K/N with K from 1 to N, such as 3/8")
    number, parts = int(given[1]), int(given[2])
    return [test for i, test in enumerate(tests) if i // RUN % parts == number - 1]
