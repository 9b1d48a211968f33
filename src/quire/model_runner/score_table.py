"""Log-probabilities of a prompt as the device wrote them: values are made where they are read.

A step may score thousands of prompt tokens. Making the values of all of them takes the engine's thread tens of
milliseconds, most of it for garbage collection.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import overload

import numpy as np
import numpy.typing as npt

from quire.model_runner.device_steps import read_scores
from quire.types import LazySequence, TokenLogprobs


class ScoreTable(LazySequence[TokenLogprobs]):
    """Of consecutive tokens [N]. lines [N, SCORE_WIDTH]: their scores. wanted: how many likeliest tokens each has."""

    __slots__ = ("_lines", "_tokens", "_wanted")

    def __init__(self, lines: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32], wanted: int) -> None:
        self._lines, self._tokens, self._wanted = lines, tokens, wanted

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return iter(read_scores(self._lines, self._tokens.tolist(), [self._wanted] * len(self)))

    @overload
    def __getitem__(self, at: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, at: slice) -> ScoreTable: ...

    def __getitem__(self, at: int | slice) -> TokenLogprobs | ScoreTable:
        if isinstance(at, slice):
            return ScoreTable(self._lines[at], self._tokens[at], self._wanted)
        return read_scores(self._lines[at][None], [int(self._tokens[at])], [self._wanted])[0]
