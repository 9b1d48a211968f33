"""What the host remembers of a plan in flight, and why it was made so."""

from __future__ import annotations

from typing import NamedTuple

from quire.core.plan import Plan
from quire.core.sequence import Sequence


class Decision(NamedTuple):
    """Why something happened to a request. what: opened (n = prefix tokens hit), follows (whose first n tokens it needs
    too), waits, preempted, sat-out.

    by: the request it happened for (who needed the pages, who computes them), or what is missing: seats (the cap on
    sequences), rows (one is still on its way home), pages, budget (tokens a step), gap (others run), grammar (it is
    being compiled).
    """

    kind: str
    request_id: str
    cause: str = ""
    n: int = 0


class InflightStep(NamedTuple):
    """The host's half of a plan in flight: whose spans, which wait for masks, who goes home with it, and why."""

    plan: Plan
    seqs: list[Sequence]
    masked_seqs: list[Sequence]
    deferred_frees: list[Sequence]
    decisions: list[Decision]
