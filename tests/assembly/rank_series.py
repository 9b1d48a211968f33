"""A rank of one model after another: `python -m tests.assembly.rank_series FD`. Its process starts and meets the others
once, which would be most of the time of a test of a small model."""

from __future__ import annotations

import gc
import os
import socket
import sys

import torch
import torch.distributed as dist

from quire.assembly.rank_process import join, use_card
from quire.assembly.ranks import build_rank
from quire.errors import QuireError
from quire.executors.rank_loop import RankLink, RankLoop, die_with
from quire.executors.ranks import BuildRank, RankReady, RankRefused, ToRank


class Another(Exception):
    """The rank is to be `asked` from now on."""

    def __init__(self, asked: BuildRank) -> None:
        super().__init__(asked.rank)
        self.asked = asked


class SeriesLoop(RankLoop):
    """Runs until it is to be another. Raises Another."""

    def _handle(self, message: ToRank) -> None:
        if isinstance(message, BuildRank):
            raise Another(message)
        super()._handle(message)


def be(link: RankLink, asked: BuildRank) -> BuildRank:
    """The rank that is asked for. Returns the next one."""

    def meet() -> None:
        use_card(asked)
        if not dist.is_initialized():
            join(asked, asked.place.listener)

    try:
        built = build_rank(asked, meet)
    except QuireError as error:
        link.send(RankRefused(type(error).__name__, str(error)))
        return link.first()
    link.send(RankReady(built.executor.describe(), built.limits._asdict(), built.static_gauges))
    try:
        SeriesLoop(built.executor, link, asked.rank, asked.shape).run()
    except Another as next_one:
        return next_one.asked
    finally:
        built.executor.close()
    raise AssertionError("a loop ends with another rank")


def main() -> None:
    parent = os.getppid()
    link = RankLink(socket.socket(fileno=int(sys.argv[1])))
    asked = link.first()
    die_with(parent)
    use_card(asked)
    while True:
        asked = be(link, asked)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
