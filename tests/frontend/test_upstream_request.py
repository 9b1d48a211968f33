"""What observers learn of a request that an upstream answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quire.frontend.http_client import Origin
from quire.frontend.upstream import RequestInfo, UpstreamBackend, _UpstreamRequest
from quire.observability.live_view import RequestTimeline
from quire.observability.observer import ObserverGroup
from quire.scheduler.routing import RoutingPolicy
from quire.types import FinishedRequest, TraceContext


class Seen(ObserverGroup):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.firsts: list[float] = []
        self.gaps: list[tuple[float, int]] = []
        self.ended: list[FinishedRequest] = []

    def on_first(self, seconds: float) -> None:
        self.firsts.append(seconds)

    def on_gap(self, seconds: float, tokens: int, answers: int = 1) -> None:
        self.gaps.append((seconds, tokens))

    def on_end(self, ended: FinishedRequest) -> None:
        self.ended.append(ended)


def test_times_are_those_between_tokens_and_tokens_those_that_the_upstream_reports() -> None:
    now, seen = [10.0], Seen()
    backend = UpstreamBackend(
        [Origin.parse("127.0.0.1:1")],
        supervisor=None,
        observer=seen,
        request_observer=RequestTimeline("upstreams", clock=lambda: now[0]),
        kind="openai",
        headers=[],
        max_outstanding=8,
        routing=RoutingPolicy(),
        start_timeout=1,
        clock=lambda: now[0],
    )
    spent: list[int] = []
    request = _UpstreamRequest(backend, RequestInfo(TraceContext("r"), 64, on_usage=spent.append))
    backend._under_way += 1
    for at, tokens in ((13.0, 1), (15.0, 2), (19.0, 1)):
        now[0] = at
        request.on_tokens(tokens)
    now[0] = 20.0
    about = {"status": 200, "finish": "length", "prompt_tokens": 5, "tokens": 7, "num_events": 4, "id": "cmpl-1"}
    response: Any = SimpleNamespace(**about)
    request.on_end(response, None)
    assert seen.firsts == [3.0]
    assert seen.gaps == [(2.0, 2), (4.0, 1)]
    [ended] = seen.ended
    assert (ended.id, ended.reason, ended.prompt, ended.tokens) == ("cmpl-1", "length", 5, 7)
    assert (ended.first, ended.seconds) == (3.0, 10.0)
    assert spent == [12]
    assert backend.stats()["generated_tokens"] == 7 and backend.load() == 0
