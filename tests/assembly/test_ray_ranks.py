"""Two stages of two ranks each as actors on the two nodes of a Ray cluster, whose processes are all on this machine."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from quire import LLM, SamplingParams
from quire.assembly import ray_ranks
from quire.errors import InvalidConfig
from tests.assembly.test_ranks import OPTIONS, SIZES

pytestmark = [
    pytest.mark.nightly,
    # Ray leaves sockets of its own to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PROMPTS = ["Once upon a time", "Hello there, how are you? " * 12, "The"]
ON_RAY: dict[str, Any] = {**OPTIONS, **SIZES["both"], "distributed_executor_backend": "ray"}
ASKED = (
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=12, repetition_penalty=1.2),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Of two nodes, as of two hosts, each with room for one stage."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.add_node(num_cpus=2)
    ray.init(address=made.address)
    yield made
    ray.shutdown()
    made.shutdown()


def answers(llm: LLM) -> list[list[list[int]]]:
    return [
        [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, asked, use_tqdm=False)] for asked in ASKED
    ]


def actors() -> list[int]:
    """Processes of ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"RayRank" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return sorted(found)


def lost(llm: LLM) -> str:
    """Why a request ended that ran when a rank was lost."""
    done = llm.generate(PROMPTS[:1], ASKED[0], use_tqdm=False)[0].outputs[0]
    assert done.finish_reason == "error"
    return str(done.stop_reason)


def test_ranks_on_two_nodes_answer_as_one_and_survive_what_is_lost(cluster: Cluster) -> None:
    with LLM(**OPTIONS) as llm:
        wanted = answers(llm)
    others = {*actors()}
    with LLM(**ON_RAY) as llm:
        assert answers(llm) == wanted
        assert len({*actors()} - others) == 4
        os.kill(min({*actors()} - others), signal.SIGKILL)
        assert "of 4 (Ray actor" in lost(llm)
        assert answers(llm) == wanted
        os.kill(min({*actors()} - others), signal.SIGSTOP)
        assert "has not answered for" in lost(llm)
        assert answers(llm) == wanted
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        while len({*actors()} - others) == 4:  # they end a moment after their node
            time.sleep(0.05)
        assert "has ended, or its host was lost" in lost(llm)
        cluster.add_node(num_cpus=2)
        assert answers(llm) == wanted


def test_a_cluster_without_room_is_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_ranks, "PLACED", 2.0)
    with pytest.raises(InvalidConfig, match="has no room for 1 times 3 CPU on one host each: it has 2 CPU; 2 CPU"):
        LLM(**{**ON_RAY, "tensor_parallel_size": 3, "pipeline_parallel_size": 1})


def test_connections_that_do_not_know_the_secret_are_closed() -> None:
    secret = b"s" * ray_ranks.SECRET
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sent = []
        for known, port in ((b"x" * ray_ranks.SECRET, 7), (secret, 9), (secret, 0)):
            sent.append(socket.create_connection(listener.getsockname()))
            sent[-1].sendall(known + (0).to_bytes(2, "big") + port.to_bytes(2, "big"))
        links, alive, ports, hosts = ray_ranks.accepted(listener, secret, 1)
        assert (ports, hosts) == ({0: 9}, {0: "127.0.0.1"})
        assert sent[0].recv(1) == b"", "it is closed"
        for each in (*sent, *links.values(), *alive.values()):
            each.close()
