"""What a server is put together from follows from its settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.assembly import server
from quire.config import Settings
from quire.server.limits import Limits


def limits_of(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Limits:
    """The bounds on requests of a server with these options, which is not started."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(server, "create_app", lambda backend, **parts: seen.update(parts))
    monkeypatch.setattr(server, "listen", lambda host, port: SimpleNamespace())
    monkeypatch.setattr(server, "run", lambda *args, **rest: None)
    server.serve(Settings.of(**options))
    found = seen["limits"]
    assert isinstance(found, Limits)
    return found


@pytest.mark.parametrize(("queued", "most"), [(2048, 1024), (1024, 1024), (7, 7)])
def test_no_request_asks_for_more_answers_than_the_queue_could_ever_hold(
    queued: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused as too busy, it would be sent again for ever."""
    assert limits_of(monkeypatch, max_num_queued_reqs=queued).max_answers == most


@pytest.mark.parametrize(("policy", "used"), [("fcfs", False), ("priority", True)])
def test_priorities_are_taken_where_the_policy_uses_them(
    policy: str, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert limits_of(monkeypatch, scheduling_policy=policy).priorities is used


def test_bodies_and_answers_are_bounded_as_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    found = limits_of(monkeypatch, max_body_bytes=12_345, max_n=3)
    assert (found.max_body_bytes, found.max_n) == (12_345, 3)
