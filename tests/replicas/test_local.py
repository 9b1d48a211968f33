"""Restarts of the replicas of one machine, without Ray."""

from __future__ import annotations

import logging
from threading import Lock
from types import SimpleNamespace

import pytest

from quire.replicas import local

FAILED = """Traceback (most recent call last):
quire.errors.InvalidModel: there is no folder m

The deployment failed."""


@pytest.mark.parametrize(
    ("error", "level", "says"),
    [
        (None, logging.INFO, "all replicas were restarted"),
        (RuntimeError("Deploying application quire failed"), logging.ERROR, "there is no folder m"),
        (TimeoutError("the controller does not answer"), logging.ERROR, "TimeoutError: the controller does not answer"),
    ],
)
def test_a_restart_is_a_line_in_the_log_and_lets_the_next_one_in(
    error: Exception | None, level: int, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deployment = SimpleNamespace(message=FAILED)
    application = SimpleNamespace(deployments={"engines": deployment})
    monkeypatch.setattr(
        local, "ray_serve", SimpleNamespace(status=lambda: SimpleNamespace(applications={"quire": application}))
    )
    turn = Lock()

    def deploy() -> None:
        assert turn.locked(), "one restart at a time"
        if error is not None:
            raise error

    with caplog.at_level(logging.INFO, local.log.name):
        local._redeploy(deploy, turn)
    [record] = caplog.records
    assert record.levelno == level and record.getMessage().endswith(says)
    assert record.exc_info is None and not turn.locked()
