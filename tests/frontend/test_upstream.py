"""Whether an upstream server is healthy, and which one a request goes to."""

from __future__ import annotations

import pytest

from quire.errors import InvalidConfig
from quire.frontend.http_client import Origin
from quire.frontend.upstream import Upstream, UpstreamBackend, UpstreamDown, prompt_prefix
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


def chosen(backend: UpstreamBackend, begins: bytes = b"", times: int = 6) -> set[str]:
    return {backend._choose(backend.upstreams, begins).origin.host for _ in range(times)}


@pytest.mark.parametrize("load", [0, 3, 50])
async def test_requests_that_begin_alike_stay_on_one_upstream_however_busy_all_are(load: int) -> None:
    backend = backend_of(*HOSTS, affinity=True)
    for upstream in backend.upstreams:
        upstream.outstanding = load
    homes = [chosen(backend, f"prefix {i}".encode()) for i in range(32)]
    assert {len(home) for home in homes} == {1} and set.union(*homes) == chosen(backend_of(*HOSTS))


@pytest.mark.parametrize("load", [0, 3, 50])
async def test_an_upstream_with_the_prefix_is_left_when_it_has_five_requests_more_than_another(load: int) -> None:
    backend = backend_of(*HOSTS, affinity=True)
    for upstream in backend.upstreams:
        upstream.outstanding = load
    home = backend._choose(backend.upstreams, b"a")
    home.outstanding = load + 4
    assert chosen(backend, b"a") == {home.origin.host}
    home.outstanding = load + 5
    assert chosen(backend, b"a") == {one.origin.host for one in backend.upstreams if one is not home}


async def test_without_affinity_the_least_busy_upstream_is_taken_in_turn_among_equals() -> None:
    backend = backend_of(*HOSTS)
    busy, *others = backend.upstreams
    turns = [backend._choose(backend.upstreams, b"a") for _ in range(6)]
    assert [turns.count(one) for one in backend.upstreams] == [2, 2, 2]
    busy.outstanding = 1
    assert chosen(backend, b"a") == {one.origin.host for one in others}


async def test_equals_take_turns_also_while_another_is_busier() -> None:
    backend = backend_of(*HOSTS)
    busy, *others = backend.upstreams
    busy.outstanding = 1
    turns = [backend._choose(backend.upstreams, b"a") for _ in range(6)]
    assert [turns.count(one) for one in others] == [3, 3]


def test_a_prefix_is_the_beginning_of_the_prompt_whatever_stands_before_it() -> None:
    long = b'"' + b"x" * 2000
    plain = prompt_prefix(b'{"prompt": ' + long)
    assert plain == prompt_prefix(b'{"model": "a", "temperature": 0.5, "prompt": ' + long) and len(plain) == 512
    assert plain != prompt_prefix(b'{"prompt": "y' + long)
    for name in (b"messages", b"input"):
        assert prompt_prefix(b'{"%s": [1]}' % name) == b": [1]}"
    assert prompt_prefix(b'{"model": "a"}') == b""


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
