"""Connections and file descriptors: what is too many is refused in words, and at once."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.assembly.server import connection_timeouts
from quire.config import ServerConfig
from quire.errors import InvalidConfig
from quire.server import connection
from tests.contract.limited import LIMIT
from tests.contract.wire import HOST, answers, ask
from tests.live import serving


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    """As many as this process may have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    connection.raise_descriptor_limit()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_at_1024_descriptors_1100_silent_connections_leave_new_clients_a_503_and_health_an_answer(
    tmp_path: Path,
) -> None:
    """Silent ones beyond the limit get one too; then there are connections reserved for health again."""

    async def story(port: int) -> None:
        silent = [await asyncio.open_connection(HOST, port) for _ in range(1100)]
        refused = 1100 - connection.connection_limits(4096, LIMIT, 1).connections
        heard = await asyncio.gather(*(reader.read() for reader, _ in silent[-refused:]))
        assert {answers(said)[0].status for said in heard} == {503}
        for _ in range(3):
            assert (await ask(port, "GET", "/health/live", seconds=100)).status == 200
            answer = await ask(port, "GET", "/version", seconds=100)
            assert answer.status == 503 and answer.headers["retry-after"] == "5"
            assert "reached its limit of connections" in answer.json()["error"]["message"]
        for _, writer in silent:
            writer.close()
        async with asyncio.timeout(100):
            while (await ask(port, "GET", "/version")).status != 200:
                await asyncio.sleep(0.02)

    with many_descriptors(), serving(tmp_path, module="tests.contract.limited") as live:
        asyncio.run(story(live.port))
        assert "at most 896 clients are connected at once, not 4096" in live.log


def test_the_limit_of_descriptors_is_raised_as_far_as_it_goes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert connection.raise_descriptor_limit() == hard == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_infinite_limit_that_is_not_granted_is_raised_to_a_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    granted: list[int] = []

    def grant(kind: int, limits: tuple[int, int]) -> None:
        if not 0 <= limits[0] <= 10240:
            raise ValueError("not allowed to raise maximum limit")
        granted.append(limits[0])

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", grant)
    assert connection.raise_descriptor_limit() == 10240 and granted == [10240]


def test_a_limit_of_descriptors_that_no_server_can_run_with_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (12, 12))
    with pytest.raises(InvalidConfig, match=r"12 descriptors open, and a server takes 24: .*ulimit -n"):
        connection.raise_descriptor_limit()


@pytest.mark.parametrize("limit", [1, 64, 256, 1024, 20_000, 1 << 20])
@pytest.mark.parametrize("each", [1, 2])
def test_connections_and_those_waiting_to_be_accepted_fit_the_limit(limit: int, each: int) -> None:
    room = connection.connection_limits(4096, limit, each)
    assert 1 <= room.connections <= 4096 and 1 <= room.backlog <= 2048
    if limit > 128:
        assert room.connections * each + room.backlog + 32 <= limit
    assert connection.connection_limits(4096, None, each) == (4096, 2048)


def test_a_connection_with_a_file_or_an_upstream_counts_twice() -> None:
    assert connection_timeouts(ServerConfig()).descriptors == 1
    assert connection_timeouts(ServerConfig(batch_dir="batches")).descriptors == 2
    assert connection_timeouts(ServerConfig(), relays=True).descriptors == 2
