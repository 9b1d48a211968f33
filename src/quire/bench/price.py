"""What deterministic mode costs here: both modes in turns, in one process, over the same requests."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from quire.assembly.engine import make_executor
from quire.assembly.limits import Made
from quire.bench.verified import engine
from quire.config import Settings
from quire.engine.engine import Engine
from quire.models.registry import read_spec
from quire.types import GREEDY, Request
from quire.weights.files import read_config
from quire.weights.locate import locate

PROMPT, NEW, LONG = 32, 48, 480
"""Tokens: of prompts and answers where decode is timed; of the prompt that is timed by itself."""


Timed = Callable[[Engine, int], float]
"""(engine, number of the turn) -> tokens a second."""


class Price(NamedTuple):
    """Tokens a second by workload, medians: off, on, and what is left of it."""

    workload: str
    off: float
    on: float

    @property
    def ratio(self) -> float:
        return self.on / self.off


def prices(settings: Settings, repeat: int) -> list[Price]:
    """Decode at batch 1 and 8, and a prompt. Raises InvalidConfig where there is no such mode; needs the weights
    twice."""
    asked = settings.model
    folder = locate(asked.model, revision=asked.revision, cache=asked.download_dir)
    spec = read_spec(read_config(folder))
    room = min(asked.max_model_len or spec.context, spec.context, PROMPT + NEW + LONG)
    with ExitStack() as stack:
        modes = dict[bool, tuple[Settings, Made]]()
        for on in (True, False):
            modes[on] = (chosen := variant(settings, on, room)), make_executor(chosen)
            stack.enter_context(closing(modes[on][1].executor))
        return [price(name, modes, repeat, timed) for name, timed in workloads(spec.vocab, room)]


def workloads(vocab: int, room: int) -> list[tuple[str, Timed]]:
    some = [(f"decode, {batch} at once", partial(decode, vocab=vocab, batch=batch, room=room)) for batch in (1, 8)]
    return [*some, ("a prompt", partial(fill, vocab=vocab, room=room))]


def variant(settings: Settings, on: bool, longest: int) -> Settings:
    """The mode on or off, alone on the device with few rows, so that both fit."""
    return replace(
        settings,
        execution=replace(settings.execution, deterministic=on),
        model=replace(settings.model, max_model_len=longest),
        cache=replace(settings.cache, num_gpu_blocks_override=None, enable_prefix_caching=False),
        scheduler=replace(settings.scheduler, max_num_seqs=8, max_num_batched_tokens=None, speculative_config=None),
    )


def price(name: str, modes: dict[bool, tuple[Settings, Made]], repeat: int, timed: Timed) -> Price:
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(repeat + 1):
        for mode in (False, True) if turn % 2 else (True, False):
            speeds[mode].append(timed(engine(*modes[mode]), turn))
    return Price(name, *(statistics.median(speeds[mode][1:]) for mode in (False, True)))


def decode(it: Engine, turn: int, *, vocab: int, batch: int, room: int) -> float:
    """Tokens a second, from when all have their first."""
    new = min(NEW, room // 2)
    for i in range(batch):
        prompt = tuple((101 * i + 7 * at + turn) % vocab for at in range(min(PROMPT, room - new)))
        it.add(Request(id=str(i), prompt=prompt, max_new_tokens=new, sampling=GREEDY))
    begun, made, began = set[str](), 0, 0.0
    while it.has_pending_work:
        events = it.step()
        if len(begun) == batch:
            made += sum(len(event.tokens) for event in events)
        else:
            begun.update(event.id for event in events)
            began = time.perf_counter()
    return made / (time.perf_counter() - began)


def fill(it: Engine, turn: int, *, vocab: int, room: int) -> float:
    """Prompt tokens a second."""
    count = min(LONG, room - 1)
    it.add(
        Request(id="0", prompt=tuple((7 * at + turn) % vocab for at in range(count)), max_new_tokens=1, sampling=GREEDY)
    )
    began = time.perf_counter()
    while it.has_pending_work:
        it.step()
    return count / (time.perf_counter() - began)
