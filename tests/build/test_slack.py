"""Who plans late: engines whose device is here."""

from __future__ import annotations

from quire.build.engine import build_slack
from quire.engine.slack import MeasuredSlack, NoSlack


def test_plans_wait_for_newcomers_only_where_the_device_is_here() -> None:
    assert isinstance(build_slack("local"), MeasuredSlack)
    assert all(isinstance(build_slack(executor), NoSlack) for executor in ("grpc", "onnx", "hf"))
