"""Ray Serve's router of requests, which asks a routing policy: the one that proxies and simulations have, too."""

from __future__ import annotations

from asyncio import Future
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quire.replicas.messages import Addressed, Prompt
from quire.scheduler.routing import LongestPrefix, RoutingPolicy, make_routing_policy


class PolicyRouter(RequestRouter):  # type: ignore[misc]
    """Sends calls with a `Prompt` where the policy says, with an `Addressed` to that replica, and others anywhere.

    A replica counts a call from when it is chosen, so that calls of one moment are spread, until the call ends.
    """

    policy: RoutingPolicy

    def initialize_state(self, *, policy: str, max_imbalance: int) -> None:
        """Make the policy: called by Ray Serve with `request_router_kwargs`."""
        self.policy = make_routing_policy(policy, max_imbalance=max_imbalance)
        self._sent: dict[str, str] = {}
        """By internal id of a call, the replica that counts it."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica for a call: one list with one replica."""
        there = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        about = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if isinstance(about, Addressed):
            return [[there.get(about.replica, candidate_replicas[0])]]
        if pending_request is None or not isinstance(about, Prompt):
            return [candidate_replicas]
        policy, id = self.policy, pending_request.metadata.internal_request_id
        for gone in [name for name in policy.replicas if name not in there]:
            policy.remove(gone)
        for name in there:
            policy.add(name)
        if isinstance(policy, LongestPrefix):
            policy.max_chunks = max(about.num_blocks, 1)
        self._end(id)  # a choice before, of a replica that did not take it
        chosen = policy.choose(about.chunks)
        assert chosen is not None, "there are candidates, and each was added"
        policy.sent(chosen, about.chunks)
        self._sent[id] = chosen

        def on_assigned(future: Future[Any]) -> None:
            if future.cancelled():
                self._end(id)

        pending_request.future.add_done_callback(on_assigned)
        return [[there[chosen]]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A call ended, however it did."""
        self._end(internal_request_id)

    def _end(self, id: str) -> None:
        replica = self._sent.pop(id, None)
        if replica is not None:
            self.policy.finished(replica)
