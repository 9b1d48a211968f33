"""Whether an upstream server is healthy, and which one a request goes to."""

from __future__ import annotations

import pytest

from quire.errors import InvalidConfig
from quire.frontend.http_client import Origin
from quire.frontend.upstream import Upstream, UpstreamBackend, UpstreamDown, prompt_chunks
from quire.scheduler.routing import make_routing_policy
from tests.server.relayed import backend_of

pytestmark = pytest.mark.anyio
HOSTS = [f"http://upstream-{i}:8000" for i in range(3)]


class Scripted(Upstream):
    """Answers each check with the next status; None: no answer at all."""

    def __init__(self, *statuses: int | None) -> None:
        super().__init__(Origin.parse("http://127.0.0.1:1"), [])
        self.statuses = list(statuses)

    async def get(self, path: str, *, timeout: float = 0.0) -> tuple[int, bytes]:
        status = self.statuses.pop(0)
        if status is None:
            raise UpstreamDown("no answer")
        return status, b""

    async def history(self) -> list[bool]:
        """Whether it counts as healthy after each check."""
        seen = []
        while self.statuses:
            await self.check()
            seen.append(self.healthy)
        return seen


async def test_one_failed_check_is_forgiven_however_often_it_happens() -> None:
    assert await Scripted(200, None, 200, 500, 200, None).history() == [True] * 6


async def test_two_failed_checks_in_a_row_take_a_server_away_until_it_answers() -> None:
    server = Scripted(200, None, 503, None, 200, None, None)
    assert await server.history() == [True, True, False, False, True, True, False]
    assert server.why == "no answer"


async def test_a_server_without_a_health_page_is_healthy_if_it_says_so() -> None:
    server = Scripted(404, 499, 500, 500)
    assert await server.history() == [True, True, True, False]
    assert server.why == "its /health says 500"


async def test_a_failed_request_takes_a_server_away_at_once_and_one_check_brings_it_back() -> None:
    server = Scripted(200, 200, None)
    await server.check()
    server.record_failure("refused", surely=True)
    assert not server.healthy and server.why == "refused"
    assert await server.history() == [True, True] and server.why == "no answer"


def routed(policy: str, load: int = 0) -> UpstreamBackend:
    """A backend with three healthy upstreams that have `load` requests each."""
    backend = backend_of(*HOSTS, routing=make_routing_policy(policy))
    for upstream in backend.upstreams:
        upstream.healthy = True
        for _ in range(load):
            backend.routing.sent(upstream.name)
    return backend


def turns_of(backend: UpstreamBackend, begins: bytes = b"", times: int = 6) -> list[str]:
    """Which upstreams short requests go to that begin so."""
    seen = []
    for _ in range(times):
        upstream = backend._choose((begins,))
        assert upstream is not None
        backend.routing.sent(upstream.name, (begins,))
        backend.routing.finished(upstream.name)
        seen.append(upstream.name)
    return seen


@pytest.mark.parametrize("policy", ["prefix_hash", "longest_prefix"])
@pytest.mark.parametrize("load", [0, 3, 50])
async def test_requests_that_begin_alike_stay_on_one_upstream_however_busy_all_are(load: int, policy: str) -> None:
    backend = routed(policy, load)
    homes = [set(turns_of(backend, f"prefix {i}".encode())) for i in range(32)]
    assert {len(home) for home in homes} == {1} and set.union(*homes) == set(HOSTS)


@pytest.mark.parametrize("policy", ["prefix_hash", "longest_prefix"])
@pytest.mark.parametrize("load", [0, 3, 50])
async def test_an_upstream_with_the_prefix_is_left_when_it_has_five_requests_more_than_another(
    load: int, policy: str
) -> None:
    backend = routed(policy, load)
    [home] = set(turns_of(backend, b"a"))
    for _ in range(4):
        backend.routing.sent(home)
    assert set(turns_of(backend, b"a")) == {home}
    backend.routing.sent(home)
    assert home not in turns_of(backend, b"a", 1)


async def test_without_affinity_the_least_busy_upstream_is_taken_in_turn_among_equals() -> None:
    backend = routed("least_loaded")
    turns = turns_of(backend)
    assert [turns.count(host) for host in HOSTS] == [2, 2, 2]
    backend.routing.sent(HOSTS[0])
    assert set(turns_of(backend)) == set(HOSTS[1:])


async def test_equals_take_turns_also_while_another_is_busier() -> None:
    backend = routed("least_loaded")
    backend.routing.sent(HOSTS[0])
    turns = turns_of(backend)
    assert [turns.count(host) for host in HOSTS[1:]] == [3, 3]


async def test_an_upstream_that_is_away_gets_nothing_until_it_answers_again() -> None:
    backend = routed("round_robin")
    backend.upstreams[1].healthy = False
    assert set(turns_of(backend)) == {HOSTS[0], HOSTS[2]}
    backend.upstreams[1].healthy = True
    assert set(turns_of(backend)) == set(HOSTS)
    for upstream in backend.upstreams:
        upstream.healthy = False
    assert backend._choose((b"a",)) is None


def test_a_prefix_is_the_beginning_of_the_prompt_whatever_stands_before_it() -> None:
    long = b'"' + b"x" * 2000
    plain = prompt_chunks(b'{"prompt": ' + long)
    assert plain == prompt_chunks(b'{"model": "a", "temperature": 0.5, "prompt": ' + long)
    assert [len(chunk) for chunk in plain] == [512, 512, 512, 2003 - 3 * 512]  # type: ignore[arg-type]
    assert plain[0] != prompt_chunks(b'{"prompt": "y' + long)[0]
    assert len(prompt_chunks(b'{"prompt": "' + b"x" * 1_000_000)) == 128
    for name in (b"messages", b"input"):
        assert prompt_chunks(b'{"%s": [1]}' % name) == (b": [1]}",)
    assert prompt_chunks(b'{"model": "a"}') == ()


STRANGE = [
    *(None, b"<html>", b"{}", b'{"data": []}', b'{"data": 3}', b"[]", b'{"data": [3]}', b'{"data": [{"id": 3}]}'),
    b'{"data": [{"id": "\xff"}]}',
    b'{"data": ' + b"[" * 100_000,
    b'{"more": ' + b"[" * 100_000,
]


@pytest.mark.parametrize("body", STRANGE, ids=lambda body: repr(body)[:30])
async def test_a_start_names_an_upstream_whose_list_of_models_makes_no_sense(body: bytes | None) -> None:
    backend = backend_of(*HOSTS[:1])
    upstream = backend.upstreams[0]

    async def get(path: str, *, timeout: float = 0.0) -> tuple[int, bytes]:
        if path == "/v1/models" and body is None:
            raise UpstreamDown("no answer")
        return 200, body or b""

    upstream.get = get  # type: ignore[method-assign]
    with pytest.raises(InvalidConfig, match="upstream-0:8000 does not speak OpenAI's API: its /v1/models"):
        await backend.start()
