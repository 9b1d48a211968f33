"""Ranks as actors of a Ray cluster, which may have several hosts. Ray places, starts and ends them; plans and results
go over a connection of each rank to the engine, as they do on one host. Needs the extra `ray`.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quire.assembly.rank_process import run
from quire.errors import InvalidConfig, RankLost
from quire.executors.rank_loop import RankLink
from quire.executors.ranks import Activity, Rank, RankPlace, RankShape, StartRanks

PLACED = 60.0
"""Seconds within which the cluster must have room."""

STARTED = 120.0
"""Seconds within which all actors must have connected: they import torch first."""

SECRET = 32
"""Bytes by which the engine knows its ranks' connections from others."""

PASSED_ON = ("GLOO_", "NCCL_", "OMP_", "HF_HOME", "HF_HUB_CACHE")
"""Beginnings of the names of variables that ranks get from the engine."""


class RayRank:
    """An actor's process, which is this rank until it ends."""

    def run(self, host: str, port: int, secret: bytes, number: int) -> None:
        """Connect to the engine, twice: the second connection only says that the process lives."""
        with socket.create_server((get_node_ip_address(), 0)) as listener:
            hello = secret + number.to_bytes(2, "big")
            link = socket.create_connection((host, port))
            link.sendall(hello + listener.getsockname()[1].to_bytes(2, "big"))
            alive = socket.create_connection((host, port))
            alive.sendall(hello + bytes(2))
            there = RankLink(link)
            run(there, there.first(), listener.detach() if number == 0 else None)


class RayProcess:
    """A `RankProcess` of an actor. alive: the connection that closes with it."""

    def __init__(self, group: PlacementGroup, actor: Any, host: str, alive: socket.socket) -> None:
        self.group, self.actor, self.alive = group, actor, alive
        self.name = f"Ray actor {actor._actor_id.hex()[:12]} on {host}"

    def exit_code(self) -> str:
        """See `RankProcess`."""
        return "has ended, or its host was lost"

    def exit_fd(self) -> int:
        """See `RankProcess`."""
        return os.dup(self.alive.fileno())

    def activity(self) -> Activity:
        """See `RankProcess`. Ray does not report it."""
        return Activity()

    def kill(self) -> None:
        """See `RankProcess`."""
        with suppress(Exception):  # it or the cluster is gone
            ray.kill(self.actor)
        with suppress(Exception):  # one of its ranks has done so
            remove_placement_group(self.group)

    def wait(self) -> None:
        """Ray ends it."""
        self.alive.close()


def ray_actors(cuda: bool) -> StartRanks:
    """Ranks as actors, the ranks of a stage on one host, stages on as few as have room. cuda: with a GPU each, else
    with a core each. Raises InvalidConfig where the cluster has no room, RankLost where actors do not start."""

    def start(shape: RankShape) -> Iterator[tuple[Rank, RankPlace]]:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if not ray.is_initialized():
            ray.init(include_dashboard=False)
        each = {"GPU": 1, "CPU": 1} if cuda else {"CPU": 1}
        group = placement_group([dict.fromkeys(each, shape.tensor)] * shape.stages, strategy="PACK")
        try:
            if not group.wait(PLACED):
                raise InvalidConfig(
                    f"--distributed-executor-backend ray: the cluster has no room for {shape.stages} times "
                    f"{shape.tensor} {' and '.join(each)} on one host each: it has {resources(each)}",
                    param="distributed_executor_backend",
                )
            yield from connected(shape, group, each)
        except BaseException:
            remove_placement_group(group)
            raise

    return start


def resources(names: Mapping[str, int]) -> str:
    """What the nodes of the cluster have."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return "; ".join(", ".join(f"{node.get(name, 0):g} {name}" for name in names) for node in nodes)


def connected(shape: RankShape, group: PlacementGroup, each: Mapping[str, int]) -> Iterator[tuple[Rank, RankPlace]]:
    """The ranks, once all have connected."""
    secret, here = secrets.token_bytes(SECRET), get_node_ip_address()
    variables = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    actors = []
    with socket.create_server((here, 0)) as listener:
        for number in range(shape.size):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number // shape.tensor)
            how = {"num_cpus": 1, "num_gpus": each.get("GPU", 0), "scheduling_strategy": where}
            actor = ray.remote(RayRank).options(**how, runtime_env={"env_vars": variables}).remote()
            actor.run.remote(here, listener.getsockname()[1], secret, number)
            actors.append(actor)
        links, alive, ports, hosts = accepted(listener, secret, shape.size)
    shared = Counter(hosts.values())
    for number, actor in enumerate(actors):
        process = RayProcess(group, actor, hosts[number], alive[number])
        yield Rank(process, links[number]), RankPlace(hosts[0], ports[0], shared[hosts[number]])


Accepted = tuple[dict[int, socket.socket], dict[int, socket.socket], dict[int, int], dict[int, str]]


def accepted(listener: socket.socket, secret: bytes, count: int) -> Accepted:
    """By rank: its link, the connection that only lives, the port on which it would be found by others, its host.
    Connections that do not know the secret are closed. Raises RankLost where some do not come."""
    links, alive = dict[int, socket.socket](), dict[int, socket.socket]()
    ports, hosts = dict[int, int](), dict[int, str]()
    deadline = time.monotonic() + STARTED
    while len(links) < count or len(alive) < count:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            sock, (host, *_) = listener.accept()
            sock.settimeout(5.0)
            hello = sock.recv(SECRET + 4, socket.MSG_WAITALL)
        except OSError as error:
            if time.monotonic() < deadline:
                continue
            missing = sorted({*range(count)} - {*links})
            raise RankLost(f"ranks {missing} did not connect within {STARTED:.0f} s: see Ray's log") from error
        if not secrets.compare_digest(hello[:SECRET], secret) or len(hello) != SECRET + 4:
            sock.close()
            continue
        sock.settimeout(None)
        number, port = (int.from_bytes(part, "big") for part in (hello[SECRET:-2], hello[-2:]))
        if port:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            links[number], ports[number], hosts[number] = sock, port, host
        else:
            alive[number] = sock
    return links, alive, ports, hosts
