"""Log-probabilities of a prompt, put together from those of the steps that fed it, without looking at any."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import overload

from quire.types import LazySequence, TokenLogprobs


class PromptLogprobs(LazySequence[TokenLogprobs | None]):
    """None for the first token, which follows nothing, then those of `chunks`."""

    __slots__ = ("_chunks", "_ends")

    def __init__(self, chunks: Sequence[Sequence[TokenLogprobs]]) -> None:
        self._chunks = chunks
        self._ends = [*accumulate(map(len, chunks), initial=1)]

    def __len__(self) -> int:
        return self._ends[-1]

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        return chain((None,), *self._chunks)

    @overload
    def __getitem__(self, at: int) -> TokenLogprobs | None: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[TokenLogprobs | None]: ...

    def __getitem__(self, at: int | slice) -> TokenLogprobs | Sequence[TokenLogprobs | None] | None:
        if isinstance(at, slice):
            return [*self][at]
        at = range(len(self))[at]
        chunk = bisect_right(self._ends, at) - 1
        return self._chunks[chunk][at - self._ends[chunk]] if at else None
