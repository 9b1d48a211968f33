"""Stages of a pipeline (Huang et al. 2019, GPipe): consecutive layers of a model, each on ranks of its own.

Hidden states go from stage to stage, and nothing comes back: what the last stage samples reaches the others with later
plans. Without pipeline parallelism there is one stage, which has all layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from quire.errors import InvalidModel, StepFailed


class Pipeline:
    """A stage, by its number. This one is alone, or only looked at: it receives nothing and sends nothing."""

    def __init__(self, stage: int = 0, stages: int = 1) -> None:
        self.stage, self.stages = stage, stages
        self.first, self.last = stage == 0, stage == stages - 1

    @contextmanager
    def step(self, feeds: bool = True) -> Iterator[None]:
        """Around a forward. feeds: whether the step has tokens to feed."""
        yield

    def receive(self, into: Tensor) -> Tensor:
        """`into`, filled by the stage before. Raises StepFailed where that failed."""
        return into

    def send(self, x: Tensor) -> Tensor:
        """Give x to the next stage. Returns x."""
        return x


class LinkedPipeline(Pipeline, ABC):
    """A stage that has neighbours.

    In each step a stage receives once and sends once, also where it fails: the next stage would wait for ever.
    """

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        self._received = self._sent = True

    @contextmanager
    def step(self, feeds: bool = True) -> Iterator[None]:
        """See `Pipeline`. What it has not received by its end is dropped, and where it has not sent, the next stage
        learns that the step failed."""
        self._received, self._sent = self.first or not feeds, self.last or not feeds
        try:
            yield
        finally:
            if not self._received and (size := self._header()):
                self._take(torch.empty(size, dtype=torch.uint8))
            if not self._sent:
                self._put(None)

    def receive(self, into: Tensor) -> Tensor:
        """See `Pipeline`."""
        self._received = True
        if not self._header():
            raise StepFailed("an earlier stage could not run the step")
        self._take(into)
        return into

    def send(self, x: Tensor) -> Tensor:
        """See `Pipeline`."""
        self._sent = True
        self._put(x)
        return x

    @abstractmethod
    def _header(self) -> int:
        """Bytes of what follows; 0: the stage before failed."""

    @abstractmethod
    def _take(self, into: Tensor) -> None:
        """Receive what follows."""

    @abstractmethod
    def _put(self, x: Tensor | None) -> None:
        """Send a header and x; None: this stage failed."""


ONE_STAGE = Pipeline()


def cut_layers(sizes: Sequence[int], ends: tuple[int, int], stages: int, uncut: Collection[int] = ()) -> list[range]:
    """The layers of each stage, so that the largest stage is as small as can be.

    sizes: bytes of each layer. ends: bytes of what the first stage has before its layers, and the last behind them.
    uncut: layers before which no stage may begin. Raises InvalidModel where there are fewer places to cut than needed.
    """
    count = len(sizes)
    places = [i for i in range(count + 1) if i not in uncut]
    if len(places) <= stages:
        most = f"this model of {count} layers can be cut into {len(places) - 1}"
        why = "; later layers read K/V or features of images of earlier ones" if uncut else ""
        raise InvalidModel(f"{stages} stages are too many: {most}{why}: lower --pipeline-parallel-size")
    before = [0]
    for size in sizes:
        before.append(before[-1] + size)
    # Of the cheapest ways to cut off the first layers: the largest stage so far, and where stages begin.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
    for stage in range(stages):
        extra = ends[0] * (stage == 0) + ends[1] * (stage == stages - 1)
        ways: dict[int, tuple[int, tuple[int, ...]]] = {}
        for end in places:
            found = [
                (max(most, before[end] - before[begin] + extra), (*cuts, end))
                for begin, (most, cuts) in best.items()
                if begin < end
            ]
            if found:
                ways[end] = min(found)
        best = ways
    return [range(*pair) for pair in pairwise(best[count][1])]
