"""An engine process for tests: as quire.build.child, with a synthetic executor. `bad` in the settings: refuse."""

from __future__ import annotations

import os
import socket
import sys

from quire.engine.process import EngineLoop
from quire.engine.wire import Configure, Frames, Ready, Refused, frame
from quire.executors.costs import StepCost
from quire.observe.engine_metrics import EngineMetrics
from quire.sim.run import House


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    (said,) = Frames(Configure).feed(link.recv(1 << 16))
    if said.settings.get("bad"):
        link.sendall(frame(Refused("InvalidModel", "no such model: try 'embedded'")))
        sys.exit(2)
    if said.settings.get("dies"):
        os._exit(3)
    metrics = EngineMetrics()
    engine = House(pages=64, page_size=4, cost=StepCost(said.settings.get("step", 0.0))).build(observers=[metrics])
    link.sendall(frame(Ready(engine.about)))
    EngineLoop(engine, link, lambda: metrics.snapshot(engine.ledger, engine.gauges())).run()


if __name__ == "__main__":
    main()
