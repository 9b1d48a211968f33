"""An engine process for tests: `quire.assembly.engine_child` with a synthetic executor. `bad` in the settings: refuse.

step, token: seconds a step costs, and a token. budget: tokens of a step. timeout: seconds any step may take.
sticks: hang on some requests. window: frames are sent while it is watched.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

from quire.engine.engine import Engine
from quire.engine.executor import Executor, StepHandle
from quire.engine.process import EngineLoop
from quire.engine.protocol import BuildFailed, Configure, FrameReader, Ready, encode_frame
from quire.engine.step_watch import StepWatch
from quire.observability.engine_metrics import EngineMetrics
from quire.scheduler.plan import Plan
from quire.scheduler.step_time import StepCost
from quire.sim.run import SimConfig


class Sticking:
    """An executor that hangs for a minute on any request with this seed."""

    SEED = 666

    def __init__(self, inner: Executor) -> None:
        self.describe, self.reset, self.close, self.inner = inner.describe, inner.reset, inner.close, inner

    def launch(self, plan: Plan) -> StepHandle:
        if any(opened.seed == self.SEED for opened in plan.new_sequences):
            time.sleep(60)
        return self.inner.launch(plan)


class Frames:
    """A frame a step while it is watched."""

    on = False

    def watch(self, on: bool) -> None:
        self.on = on

    def frame(self, engine: Engine, now: float, *, last: bool) -> tuple[bytes, bool] | None:
        return (b"{}", True) if self.on else None

    def explain(self, id: str, now: float) -> bytes:
        return b"null"


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    (said,) = FrameReader(Configure).feed(link.recv(1 << 16))
    if said.settings.get("bad"):
        link.sendall(encode_frame(BuildFailed("InvalidModel", "no such model: try 'embedded'")))
        sys.exit(2)
    if said.settings.get("dies"):
        os._exit(3)
    if lives := said.settings.get("lives"):
        threading.Timer(lives, os._exit, [4]).start()
    metrics = EngineMetrics()
    watch = StepWatch(timeout=said.settings.get("timeout"))
    cost = StepCost(said.settings.get("step", 0.0), said.settings.get("token", 0.0))
    budget = said.settings.get("budget", 512)
    engine = SimConfig(pages=64, page_size=4, cost=cost, max_num_batched_tokens=budget).build(
        observers=[metrics, watch]
    )
    if said.settings.get("sticks"):
        engine.executor = Sticking(engine.executor)
    watch.install_signal_handler(engine)
    link.sendall(encode_frame(Ready(engine.description)))
    window = Frames() if said.settings.get("window") else None
    EngineLoop(engine, link, lambda: metrics.snapshot(engine), watch, live_view=window).run()


if __name__ == "__main__":
    main()
