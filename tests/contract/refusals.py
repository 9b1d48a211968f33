"""How soon a server that is full says so, to clients that all ask at the same time.

`python -m tests.contract.refusals [--clients 4096] [--within 1.0] [--json FILE] [serve's options]` opens all
connections, then sends one streaming completion on each as quickly as it can, and prints the time from a request's own
sending to the first bytes of its answer. It exits with 1 if half of the refusals (429, 503) take longer than `within`
seconds, or a request is not answered. The client takes a core of its own: on a machine with two, both times are bounds
from above, and the server's processor time says what it did.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import selectors
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from quire.server import connection
from tests.contract.wire import HOST, request
from tests.live import serving

HANGS = 300.0
"""Seconds after which the requests still unanswered count as hung."""

REFUSED = (429, 503)

BODY = {"prompt": "Once upon a time", "max_tokens": 16, "stream": True, "temperature": 0}


@dataclass
class Figures:
    """Seconds from a request's sending to its first bytes, by status, and of processor time: the server's until the
    last refusal came, and the client's. sending: seconds until all requests were sent. load: of the machine, before."""

    load: float = 0.0
    sending: float = 0.0
    last: float = 0.0
    server: float = 0.0
    client: float = 0.0
    first: dict[int, list[float]] = field(default_factory=dict)
    unanswered: int = 0

    @property
    def refused(self) -> list[float]:
        return sorted(seconds for status in REFUSED for seconds in self.first.get(status, ()))

    def failures(self, within: float) -> list[str]:
        """What is not as it must be."""
        bad = [f"{self.unanswered} requests were not answered"] if self.unanswered else []
        if not self.refused:
            bad.append("nothing was refused")
        elif (half := statistics.median(self.refused)) > within:
            bad.append(f"half of the refusals took more than {half:.2f} s, not {within:g} s")
        return bad


def processor(pid: int) -> float:
    """Seconds of processor time that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def refusals(port: int, pid: int, clients: int) -> Figures:
    """So many clients at once; each leaves when it has heard how its answer begins."""
    connection.raise_descriptor_limit()
    figures, asked = Figures(load=os.getloadavg()[0]), request("POST", "/v1/completions", BODY)
    waiting = selectors.DefaultSelector()
    sockets = [socket.create_connection((HOST, port)) for _ in range(clients)]
    sent: dict[socket.socket, float] = {}
    statuses: Counter[int] = Counter()
    try:
        time.sleep(0.5)  # until the last of them is accepted
        server, client, began = processor(pid), own(), time.monotonic()
        for each in sockets:
            each.setblocking(False)
            sent[each] = time.monotonic()
            each.send(asked)
        figures.sending = time.monotonic() - began
        for each in sockets:
            waiting.register(each, selectors.EVENT_READ)
        while sent and time.monotonic() - began < HANGS:
            for key, _ in waiting.select(1.0):
                now, one = time.monotonic(), key.fileobj
                assert isinstance(one, socket.socket)
                waiting.unregister(one)
                seconds = now - sent.pop(one)
                try:
                    status = int(one.recv(1 << 16)[9:12] or b"0")
                except ConnectionError:
                    status = 0
                statuses[status] += 1
                figures.first.setdefault(status, []).append(seconds)
                if status in REFUSED:
                    figures.last = now - began
                    figures.client = own() - client
                if status in REFUSED and statuses[status] % 64 == 0:
                    figures.server = processor(pid) - server
                if status in (0, *REFUSED):
                    one.close()
        figures.unanswered = len(sent) + statuses[0]
    finally:
        waiting.close()
        for each in sockets:
            each.close()
    return figures


def table(figures: Figures, within: float) -> str:
    """What it came to."""
    lines = [f"load {figures.load:.1f}; all requests sent within {figures.sending:.2f} s"]
    for status, seconds in sorted(figures.first.items()):
        tenth, half, ninth = (sorted(seconds)[int(len(seconds) * share)] for share in (0.1, 0.5, 0.9))
        lines.append(
            f"{status}: {len(seconds):5d}; first bytes after {tenth:.2f}, {half:.2f}, {ninth:.2f} s (10, 50, 90 %)"
        )
    count = max(1, len(figures.refused))
    lines.append(f"the last refusal after {figures.last:.2f} s")
    lines.append(
        f"processor time until then: server {figures.server:.2f} s, client {figures.client:.2f} s;"
        f" a refusal {1e6 * figures.server / count:.0f} us of the server"
    )
    bad = figures.failures(within)
    return "\n".join([*lines, *(f"FAILED: {why}" for why in bad), "" if bad else "all well"])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=4096)
    parser.add_argument("--within", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    asked, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), "--deterministic", *options) as live:
        figures = refusals(live.port, live.process.pid, asked.clients)
    if asked.json is not None:
        asked.json.write_text(json.dumps(asdict(figures), indent=1) + "\n")
    print(table(figures, asked.within))
    return 1 if figures.failures(asked.within) else 0


if __name__ == "__main__":
    sys.exit(main())
