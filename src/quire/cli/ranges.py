"""Types of options that are numbers within bounds."""

from __future__ import annotations

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A number within bounds that is neither infinite nor NaN, which click's own type lets through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click.ParamType."""
        made = super().convert(value, param, ctx)
        if not math.isfinite(made):
            self.fail(f"{value} is not a finite number", param, ctx)
        return made
