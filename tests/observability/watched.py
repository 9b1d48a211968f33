"""A simulated engine with a history and a window, and the frames it would have sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from quire.engine.engine import Engine
from quire.engine.timing import VirtualClock
from quire.observability.history import History
from quire.observability.live_view import EngineLiveView
from quire.scheduler.step_time import StepCost
from quire.sim.run import SimConfig


class Watched:
    """Steps an engine as its process does: a frame may leave after each step."""

    def __init__(self, *, watch: bool = True, **config: Any) -> None:
        self.history = History(keep=config.pop("keep", 512), tokens=config.pop("tokens", 1 << 22))
        self.window = EngineLiveView(self.history)
        self.clock = VirtualClock()
        config = {"pages": 32, "page_size": 4, "max_num_seqs": 4, "cost": StepCost(0.01)} | config
        self.engine: Engine = SimConfig(**config).build(self.clock, [self.history, self.window])
        self.history.attach(self.engine.scheduler.kv)
        self.window.base = 0.0
        self.frames: list[dict[str, Any]] = []
        if watch:
            self.window.watch(True)

    def submit(self, prompt: Sequence[int], new: int = 4, **rest: Any) -> str:
        return self.engine.submit(prompt, new, **rest)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.step()
            idle = not self.engine.can_step
            seen = self.window.frame(self.engine, self.clock.now(), last=idle)
            if seen is not None:
                self.frames.append(json.loads(seen[0]))
                assert seen[1] == ("whole" in self.frames[-1])

    def run(self) -> None:
        """Until nothing is left to do; the blocks of finished requests are sent once more."""
        while self.engine.has_pending_work:
            self.step()
        self.step(3)

    def events(self, *what: str) -> list[list[Any]]:
        """Events of these kinds, in order."""
        return [event for frame in self.frames for event in frame["events"] if event[0] in what]

    def explain(self, id: str) -> Any:
        return json.loads(self.window.explain(id, self.clock.now()))

    def story(self, id: str) -> dict[str, Any]:
        [found] = self.explain(id)["answers"]
        return dict(found)


def pages(frames: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
    """The map a viewer has after these frames: [holders, owner, index] by page, blank ones left out."""
    found: dict[int, list[int]] = {}
    for frame in frames:
        if "whole" in frame:
            found = {}
        for page, *rest in frame["whole"]["pages"] if "whole" in frame else frame["pages"]:
            found[page] = rest
    return {page: about for page, about in found.items() if about[0] >= 0}
