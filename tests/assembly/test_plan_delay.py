"""Who plans late: engines whose device is here."""

from __future__ import annotations

from quire.assembly.engine import build_plan_delay
from quire.engine.timing import PlanDelay


def test_plans_wait_for_newcomers_only_where_the_device_is_here() -> None:
    assert isinstance(build_plan_delay("local"), PlanDelay)
    assert all(build_plan_delay(executor) is None for executor in ("grpc", "onnx", "hf"))
