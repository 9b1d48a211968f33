"""Ranks that are started once and are one model's after another's: the side of the engine, see `rank_series`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quire.assembly.engine_start import ENVIRONMENT
from quire.assembly.place import for_child
from quire.config import Settings
from quire.executors.ranks import Rank, RankedExecutor, RankPlace, RankProcess, Ranks, RankShape, child_processes


class Lent:
    """A `RankProcess` that outlives the executor to which it is lent."""

    def __init__(self, process: RankProcess) -> None:
        self.name, self.exit_code, self.exit_fd = process.name, process.exit_code, process.exit_fd
        self.activity = process.activity

    def kill(self) -> None:
        """Nothing: it is needed again."""

    def wait(self) -> None:
        """Nothing: it does not end."""


class RankSeries:
    """The processes of so many ranks, by the number of ranks, and whose they are now. Those of which one was lost are
    ended: the others may wait for it for ever. environment: more of their variables."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = {**ENVIRONMENT, **os.environ, **environment}
        self.started: dict[int, list[tuple[Rank, RankPlace]]] = {}
        self.lent: dict[int, Ranks] = {}

    def executor(self, settings: Settings) -> RankedExecutor:
        """Of the settings' model, until the next one of so many ranks."""
        shape = RankShape(settings.execution.tensor_parallel_size, settings.execution.pipeline_parallel_size)

        def start() -> Ranks:
            made = self.lent[shape.size] = Ranks(self._lent, for_child(settings), shape)
            return made

        return RankedExecutor(start)

    def _lent(self, shape: RankShape) -> Iterator[tuple[Rank, RankPlace]]:
        before = self.lent.get(shape.size)
        if before is not None and before.lost is not None:
            end(self.started.pop(shape.size))
        if shape.size not in self.started:
            start: Any = child_processes([sys.executable, "-m", "tests.assembly.rank_series"], self.environment)
            self.started[shape.size] = list(start(shape))
        for rank, place in self.started[shape.size]:
            yield Rank(Lent(rank.process), rank.sock.dup()), place

    def close(self) -> None:
        """End all processes."""
        for each in self.started.values():
            end(each)


def end(ranks: Iterable[tuple[Rank, RankPlace]]) -> None:
    """End these processes."""
    for rank, _ in ranks:
        rank.process.kill()
        rank.process.wait()
        rank.sock.close()
