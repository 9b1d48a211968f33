"""Types of options that are numbers within bounds, and sizes."""

from __future__ import annotations

import math
from typing import Any

import click

from quire.config import OPTIONS
from quire.errors import InvalidConfig


class FiniteRange(click.FloatRange):
    """A number within bounds that is neither infinite nor NaN, which click's own type lets through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click.ParamType."""
        made = super().convert(value, param, ctx)
        if not math.isfinite(made):
            self.fail(f"{value} is not a finite number", param, ctx)
        return made


LENGTHS = (click.IntRange(1, 1 << 20), click.IntRange(1, 1 << 20))
"""Tokens, from and to."""


def ascending(context: click.Context, param: click.Parameter, value: tuple[int, int]) -> tuple[int, int]:
    """Callback of an option of two numbers, from and to. Raises BadParameter where the first is the larger one."""
    if value[0] > value[1]:
        raise click.BadParameter(f"{value[0]} {value[1]}: the first number may not be above the second", context, param)
    return value


def size_of(memory: str) -> int:
    """Raises InvalidConfig."""
    try:
        return int(OPTIONS["kv_cache_memory_bytes"].read(memory, "--memory"))
    except (InvalidConfig, TypeError):
        raise InvalidConfig(f"--memory must be a size such as 24GiB, not {memory!r}", param="memory") from None
