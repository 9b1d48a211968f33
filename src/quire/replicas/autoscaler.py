"""How many replicas Ray Serve runs: what the policy of `quire bench simulate` says, of the tokens that are queued."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

from quire.scheduler.autoscaling import FleetLoad, QueuedTokensAutoscaler


class QueuedTokensPolicy:
    """An autoscaling policy of Ray Serve, called in its controller several times a second.

    target: queued tokens of a replica. low, high: replicas. up_delay, down_delay: seconds.
    """

    def __init__(self, target: int, low: int, high: int, up_delay: float, down_delay: float) -> None:
        self.scaler = QueuedTokensAutoscaler(target, low=low, high=high, up_delay=up_delay, down_delay=down_delay)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """How many replicas there should be, and no state for Ray Serve to keep."""
        running, wanted = context.current_num_replicas, context.target_num_replicas
        # Each replica's last word, not its average: the policy has delays of its own.
        reported = context.raw_metrics.get("queued_tokens", {}).values()
        queued = sum(int(series[-1].value) for series in reported if series)
        return self.scaler.desired(FleetLoad(context.current_time, queued, running, wanted - running)), {}
