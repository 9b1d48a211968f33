"""What the native backend does with calls from their arrival to their end: what readers get, what observers are told,
what the engine is asked, and what is left, at times that a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from quire.errors import QuireError
from quire.frontend.interface import Call, ModelCard
from quire.frontend.native import NativeBackend
from quire.frontend.processor import ActiveRequest
from quire.types import BACKGROUND, FinishedRequest, Request, SamplingParams, TokenLogprobs, TraceContext
from tests.expected import check
from tests.frontend.ports import FakePort
from tests.server.doubles import TOKENIZER

pytestmark = pytest.mark.anyio


class Port(FakePort):
    """Writes down what it is asked."""

    def __init__(self, lines: list[str], **more: Any) -> None:
        super().__init__(None, **more)
        self.lines = lines

    def submit(self, requests: Any) -> None:
        super().submit(requests)
        self.lines += [f"  engine gets {_request(one)}" for one in requests]

    def abort(self, ids: Any, why: Any = "abort") -> None:
        super().abort(ids, why)
        self.lines.append(f"  engine ends {list(ids)}: {why}")


class Observer:
    """Writes down what it is told."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def on_end(self, ended: FinishedRequest) -> None:
        fields = dict(ended._asdict(), sampling=ended.sampling.n, detokenize_seconds=ended.detokenize_seconds > 0)
        self.lines.append(f"  ended {fields}")

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *said: self.lines.append(f"  {name} {said}")


def _request(one: Request) -> str:
    rest = f"seed {one.seed} choice {one.choice} priority {one.priority} until {one.deadline} salt {one.cache_salt!r}"
    scores = f"{one.sampling.logprobs} {one.sampling.prompt_logprobs} {one.sampling.bad_words_token_ids}"
    return f"{one.id}: {one.prompt} +{one.max_new_tokens} stop {sorted(one.stop)} {rest} scores {scores}"


class Calls:
    """A backend, its clock and the streams of its calls, by name."""

    def __init__(self, **settings: Any) -> None:
        self.lines: list[str] = []
        self.now = 100.0
        self.port = Port(self.lines)
        self.streams: dict[str, ActiveRequest] = {}
        seeds = iter(range(1000, 2000))
        self.backend = NativeBackend(
            engine=self.port,
            tokenizer=TOKENIZER,
            card=ModelCard(id="tiny", created=1, max_model_len=64),
            observer=Observer(self.lines),  # type: ignore[arg-type]
            clock=lambda: self.now,
            seeds=lambda: next(seeds),
            **settings,
        )

    def ask(self, id: str, text: str = "the dog", *, timeout: float = float("inf"), **more: Any) -> None:
        context = TraceContext("r-" + id, "parent", "state", more.pop("tenant", ""))
        call_fields = {name: more.pop(name) for name in ("priority", "cache_salt") if name in more}
        call = Call(
            id=id,
            prompt=TOKENIZER.encode(text),
            text=text,
            sampling=SamplingParams(**more),
            timeout=timeout,
            trace_context=context,
            spend=lambda tokens: self.lines.append(f"  {id} is charged {tokens}"),
            **call_fields,
        )
        self.lines.append(f"ask {id}")
        try:
            self.streams[id] = self.backend.answer(call)
        except QuireError as error:
            more_ = getattr(error, "retry_after", None)
            self.lines.append(f"  refused: {type(error).__name__} {error} {error.param} {error.code} {more_}")
        else:
            self.streams[id].subscribe(lambda: self.lines.append(f"  {id} is woken"))
        self.lines.append(f"  load {self.backend.load()}, active {len(self.backend._active)}")

    def say(self, id: str, text: str | tuple[int, ...], seconds: float = 0.25, **rest: Any) -> None:
        """A step that brings tokens, after some time."""
        self.now += seconds
        tokens = TOKENIZER.encode(text) if isinstance(text, str) else text
        self.lines.append(f"step {id} {text!r} {rest}")
        self.port.say(id, *tokens, **rest)

    def read(self, *ids: str) -> None:
        for id in ids:
            try:
                taken = self.streams[id].take()
            except QuireError as error:
                taken = f"{type(error).__name__} {error} {error.param} {error.status}"  # type: ignore[assignment]
            shown = taken if not isinstance(taken, list) else [tuple(delta) for delta in taken]
            self.lines.append(f"read {id}: {shown}")

    def close(self, id: str) -> None:
        self.lines.append(f"close {id}")
        self.streams[id].close()


async def _ordinary(calls: Calls) -> None:
    calls.ask("a", n=2, logprobs=1, prompt_logprobs=0, seed=-1)
    calls.ask("b", stop=("boat", "zzz"), cache_salt="pepper", tenant="7", stop_token_ids=(9,))
    calls.ask("c", ignore_eos=True, bad_words=("dog", "a"), max_tokens=30, priority=-4)
    prompt = (TokenLogprobs(5, -1.0, 1), TokenLogprobs(6, -2.0, 2))
    calls.say("a-0", "a", prompt_logprobs=prompt, logprobs=(TokenLogprobs(68, -0.5, 1),), num_cached=16)
    calls.say("a-1", " dog", 0.5, logprobs=(TokenLogprobs(276, -0.5, 1),))
    calls.read("a", "a")
    calls.say("b-0", "a b")
    calls.say("b-0", "o")
    calls.read("b")
    calls.say("b-0", "at and more", 1.0)
    calls.read("b", "b")
    calls.say("b-0", "late")
    calls.close("b")
    calls.say("c-0", (*TOKENIZER.encode("é")[:1], 1))
    calls.say("c-0", (9,), finish="stop", stop_token=9)
    calls.read("c", "c")
    calls.say("a-0", (1,), finish="stop", stop_token=1)
    calls.say("a-1", " and a boat", finish="length")
    calls.read("a", "a")
    calls.close("a")
    calls.close("c")


async def _failing(calls: Calls) -> None:
    calls.ask("two", n=2)
    calls.say("two-1", "a")
    calls.say("two-0", (), finish="error", error="it broke", param="prompt", status=400)
    calls.read("two", "two")
    calls.close("two")
    calls.say("two-1", "b")
    calls.ask("strange")
    calls.say("strange-0", (99999999,))
    calls.read("strange")
    calls.close("strange")
    calls.ask("dies")
    calls.ask("dies too", n=2)
    calls.say("dies-0", "a")
    calls.say("dies too-1", "a", finish="length")
    calls.now += 1
    calls.port.die("it was killed")
    calls.read("dies", "dies", "dies too", "dies too")
    calls.ask("after")
    calls.close("dies")
    calls.close("dies too")


async def _late(calls: Calls) -> None:
    calls.ask("nothing", timeout=0.001)
    calls.ask("something", timeout=0.001, n=2)
    calls.ask("one ended", timeout=0.001, n=2)
    calls.say("something-1", "a dog")
    calls.say("one ended-0", (1,), finish="stop", stop_token=1)
    calls.say("one ended-1", "b", finish="length")
    await asyncio.sleep(0.03)
    calls.read("nothing", "something", "something", "one ended", "one ended")
    for id in calls.streams:
        calls.close(id)


async def _crowded(calls: Calls) -> None:
    calls.ask("many", n=5)
    calls.ask("a", n=2)
    calls.ask("back", n=2, priority=BACKGROUND)
    calls.ask("b", n=3)
    calls.ask("c")
    calls.port.stats = {"active_requests": 3}
    calls.ask("d", n=2)
    calls.ask("e", n=4)
    calls.say("a-0", (1,), finish="stop", stop_token=1)
    calls.say("a-1", (1,), 2.0, finish="stop", stop_token=1)
    calls.port.stats = {"active_requests": 0}
    calls.ask("f", n=4)
    calls.close("back")
    calls.ask("too long", "a " * 70)
    calls.ask("too many", max_tokens=63)
    calls.ask("all of it", "the", max_tokens=None, priority=BACKGROUND)
    for id in list(calls.streams):
        calls.close(id)
    calls.lines.append(f"background {calls.backend._num_background}")


async def _unread(calls: Calls) -> None:
    calls.ask("slow", n=1)
    for word in ("a", " dog", " and", " a", " boat"):
        calls.say("slow-0", word)
    calls.read("slow", "slow")
    calls.close("slow")


async def _draining(calls: Calls) -> None:
    calls.ask("a")
    calls.ask("b")
    calls.say("a-0", "a")
    draining = asyncio.ensure_future(calls.backend.drain(0.02))
    await asyncio.sleep(0)
    calls.ask("c")
    calls.lines.append(f"ready {calls.backend.ready()} alive {calls.backend.alive()}")
    calls.say("b-0", (1,), finish="stop", stop_token=1)
    calls.close("b")
    await draining
    calls.read("a", "a")
    calls.close("a")
    await calls.backend.close()
    calls.lines.append(f"closed {calls.port.closed} {calls.backend.stats()}")


SCENES: dict[str, tuple[Callable[[Calls], Coroutine[Any, Any, None]], dict[str, Any]]] = {
    "ordinary": (_ordinary, {}),
    "failing": (_failing, {}),
    "late": (_late, {}),
    "crowded": (_crowded, {"max_queued": 4}),
    "unread": (_unread, {"max_unread": 3}),
    "draining": (_draining, {}),
}


@pytest.mark.parametrize("name", SCENES)
async def test_calls_go_step_by_step_as_written_down(name: str, caplog: pytest.LogCaptureFixture) -> None:
    scene, settings = SCENES[name]
    calls = Calls(**settings)
    await calls.backend.start()
    await scene(calls)
    backend = calls.backend
    left = f"left: {len(backend._active)} {len(backend._requests)} {backend._num_background}"
    logged = [f"{record.levelname}: {record.getMessage().splitlines()[0]}" for record in caplog.records]
    check(Path(__file__).parent / "expected" / f"native-{name}.txt", "\n".join([*calls.lines, left, *logged]))
