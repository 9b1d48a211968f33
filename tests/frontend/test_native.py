from __future__ import annotations

import asyncio
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from quire.errors import (
    DeadlineExceeded,
    Interrupted,
    InvalidRequest,
    Overloaded,
    QuireError,
    StepFailed,
    TooLarge,
    Unavailable,
)
from quire.frontend.interface import Backend, Call, Delta, ModelCard, iterate
from quire.frontend.native import NativeBackend
from quire.observability.observer import ObserverGroup
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.tokenizer import Tokenizer
from quire.types import BACKGROUND, FinishedRequest, RequestStepOutput, SamplingParams
from tests.frontend.ports import FakePort, fire
from tests.tokenization.vocabulary import CHATML, byte_level

pytestmark = pytest.mark.anyio

TOKENIZER = Tokenizer(byte_level(), {"eos_token": "<|end|>"})
CARD = ModelCard(id="tiny", created=1, max_model_len=128)


class Watching:
    """Records what the backend reports."""

    def __init__(self) -> None:
        self.ends: list[FinishedRequest] = []
        self.firsts = self.gaps = self.surplus = 0
        self.refused: list[str] = []

    def on_first(self, seconds: float) -> None:
        assert seconds >= 0
        self.firsts += 1

    def on_gap(self, seconds: float, tokens: int, answers: int = 1) -> None:
        self.gaps += tokens * answers

    def on_end(self, ended: FinishedRequest) -> None:
        self.ends.append(ended)

    def on_refused(self, reason: str) -> None:
        self.refused.append(reason)

    def on_surplus(self, tokens: int) -> None:
        self.surplus += tokens

    def text(self) -> bytes:
        return b"frontend_things_total 2.0\n"


async def start_backend(port: FakePort, observer: Watching | None = None, **rest: Any) -> NativeBackend:
    made = NativeBackend(
        engine=port, tokenizer=TOKENIZER, card=CARD, observer=ObserverGroup() if observer is None else observer, **rest
    )
    await made.start()
    return made


def call(prompt: str = "the", *, id: str = "c", timeout: float = 1e9, **fields: Any) -> Call:
    sampling = SamplingParams(**{"max_tokens": None, **fields})
    return Call(id=id, prompt=TOKENIZER.encode(prompt), sampling=sampling, timeout=timeout)


async def collect(backend: NativeBackend, one: Call) -> list[Delta]:
    with closing(backend.answer(one)) as said:
        return [delta async for ready in iterate(said) for delta in ready]


def says(text: str) -> list[int]:
    return [*TOKENIZER.encode(text), 1]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_it_is_a_backend() -> None:
    backend: Backend = await start_backend(FakePort())
    assert backend.ready()
    assert backend.alive()


async def test_an_answer_comes_as_text_with_its_tokens() -> None:
    watching = Watching()
    backend = await start_backend(FakePort(lambda _: says("a dog and a boat")), watching)
    deltas = await collect(backend, call())
    assert "".join(d.text for d in deltas) == "a dog and a boat"
    assert sum((d.tokens for d in deltas), ()) == tuple(says("a dog and a boat"))
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["stop"]
    tokens = len(says("a dog and a boat"))
    assert (watching.firsts, watching.gaps) == (1, tokens - 1)
    assert watching.ends[0].reason == "stop"
    assert watching.ends[0].tokens == tokens


async def test_gaps_are_counted_for_each_of_the_answers_that_get_tokens_in_one_step() -> None:
    port, watching = FakePort(), Watching()
    backend = await start_backend(port, watching)
    calls = [backend.answer(call(id=f"c{i}", n=2)) for i in range(3)]
    ids = list(port.running)
    for _ in range(3):
        port.on_tokens([RequestStepOutput(id, TOKENIZER.encode("dog")[:1]) for id in ids])
    assert (watching.firsts, watching.gaps) == (6, 12)
    for one in calls:
        one.close()


async def test_many_answers_do_not_mix() -> None:
    backend = await start_backend(FakePort(lambda r: says("dog " * (1 + int(r.id[1:].split("-")[0]) % 7) + r.id)))
    texts = await asyncio.gather(*(collect(backend, call(id=f"c{i}", n=2)) for i in range(64)))
    for i, deltas in enumerate(texts):
        for choice in (0, 1):
            text = "".join(d.text for d in deltas if d.index == choice)
            assert text == "dog " * (1 + i % 7) + f"c{i}-{choice}"
    assert backend._active == {}
    assert not backend._requests


async def test_what_is_ready_together_comes_together() -> None:
    port = FakePort()
    backend = await start_backend(port)
    with closing(backend.answer(call())) as said:
        stream = iterate(said)
        first = asyncio.ensure_future(anext(stream))
        await settle()
        for token in TOKENIZER.encode("the dog"):
            port.say("c-0", token)
        assert "".join(d.text for d in await first) == "the dog"


async def test_a_stop_string_ends_the_row_at_once_and_surplus_is_counted() -> None:
    port, watching = FakePort(), Watching()
    backend = await start_backend(port, watching)
    task = asyncio.ensure_future(collect(backend, call(stop=["dog"])))
    await settle()
    tokens = TOKENIZER.encode("the dog and")
    port.say("c-0", *tokens)
    assert (port.aborted, port.reasons) == (["c-0"], ["stop"])
    port.say("c-0", *TOKENIZER.encode("more"))
    deltas = await task
    assert ("".join(d.text for d in deltas), deltas[-1].stop_reason) == ("the ", "dog")
    used = sum(len(d.tokens) for d in deltas)
    assert watching.surplus == len(tokens) - used + len(TOKENIZER.encode("more"))
    assert port.aborted == ["c-0"]


async def test_a_reader_that_leaves_ends_its_answers() -> None:
    port, watching = FakePort(), Watching()
    backend = await start_backend(port, watching)
    said = backend.answer(call(n=2))
    first = asyncio.ensure_future(anext(iterate(said)))
    await settle()
    port.say("c-1", *TOKENIZER.encode("the"))
    await first
    said.close()
    assert sorted(port.aborted) == ["c-0", "c-1"] and port.reasons == ["abort", "abort"]
    assert [e.reason for e in watching.ends] == ["abort", "abort"]


async def test_a_reader_that_is_cancelled_ends_its_answers() -> None:
    port = FakePort()
    backend = await start_backend(port)
    task = asyncio.ensure_future(collect(backend, call()))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert port.aborted == ["c-0"]


async def test_what_a_reader_does_not_read_is_bounded() -> None:
    port = FakePort()
    backend = await start_backend(port, max_unread=10)
    with closing(backend.answer(call())) as said:
        stream = iterate(said)
        first = asyncio.ensure_future(anext(stream))
        await settle()
        [request] = port.submitted
        port.say(request, *TOKENIZER.encode("dog"))
        await first
        for count in range(20):
            assert bool(port.aborted) == (count > 10)
            port.say(request, *TOKENIZER.encode("cat"))
        rest = [delta async for ready in stream for delta in ready]
    assert port.aborted == [request.id]
    assert len(rest) == 12 and rest[-1].finish_reason == "abort"
    assert "".join(delta.text for delta in rest) == "cat" * 11


async def test_an_answer_that_cannot_be_put_into_words_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    port = FakePort()
    backend = await start_backend(port)
    bad, good = (asyncio.ensure_future(collect(backend, call(id=id))) for id in ("bad", "good"))
    await settle()
    both = {request.id: request for request in port.submitted}
    port.on_tokens([RequestStepOutput("bad-0", ("x",)), RequestStepOutput("good-0", tuple(TOKENIZER.encode("dog")))])  # type: ignore[arg-type]
    port.say(both["good-0"], 1, finish="stop", stop_token=1)
    with pytest.raises(StepFailed, match=r"could not be put into words \(TypeError\)"):
        await bad
    assert "".join(delta.text for delta in await good) == "dog"
    assert port.aborted == ["bad-0"] and port.reasons == ["error"] and "Traceback" in caplog.text


async def test_a_full_queue_refuses_with_a_time_to_wait() -> None:
    port, watching = FakePort(), Watching()
    backend = await start_backend(port, watching, max_queued=2)
    port.stats = {"active_requests": 1}
    readers = [asyncio.ensure_future(collect(backend, call(id=f"c{i}"))) for i in range(3)]
    await settle()
    with pytest.raises(Overloaded, match="2 answers wait and 1 more are asked for, but at most 2 may wait") as caught:
        await collect(backend, call(id="late"))
    assert caught.value.retry_after >= 1
    assert watching.refused == ["max_num_queued_reqs"]
    port.say("c0-0", 1, finish="stop", stop_token=1)
    await settle()
    port.stats = {"active_requests": 1}
    last = asyncio.ensure_future(collect(backend, call(id="later")))
    await settle()
    assert port.submitted[-1].id == "later-0"
    for reader in [*readers, last]:
        reader.cancel()
    await asyncio.gather(*readers, last, return_exceptions=True)


@pytest.mark.parametrize("how", ["finish", "close", "abort", "die"])
async def test_the_queue_is_as_long_after_background_requests_have_ended_as_before(how: str) -> None:
    port = FakePort()
    backend = await start_backend(port, max_queued=2)
    lines = [backend.answer(replace(call(id=f"line{i}", n=2), priority=BACKGROUND)) for i in range(2)]
    backend.admit(2)
    if how == "finish":
        for request in list(port.running.values()):
            port.say(request[0], 1, finish="stop", stop_token=1)
    elif how == "abort":
        for line in lines:
            backend.end(line, "abort")
    elif how == "die":
        port.die("signal 9")
        port.up = True
    for line in lines:
        line.close()
    people = [backend.answer(call(id=f"c{i}")) for i in range(2)]
    with pytest.raises(Overloaded, match="2 answers wait and 1 more"):
        backend.admit(1)
    for one in people:
        one.close()


async def test_more_answers_than_the_queue_holds_can_never_be() -> None:
    with pytest.raises(InvalidRequest, match="exceeds the size of this server's queue"):
        await collect(await start_backend(FakePort(), max_queued=2), call(n=3))


async def test_a_deadline_ends_with_what_there_is() -> None:
    port = FakePort()
    backend = await start_backend(port)
    task = asyncio.ensure_future(collect(backend, call(timeout=1000, n=2)))
    await settle()
    port.say("c-0", *TOKENIZER.encode("the"))
    [live] = backend._requests
    fire(live.timer)
    deltas = await task
    assert "".join(d.text for d in deltas) == "the"
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["timeout", "timeout"]
    assert sorted(port.aborted) == ["c-0", "c-1"]


async def test_a_deadline_before_any_token_is_an_error() -> None:
    with pytest.raises(DeadlineExceeded, match=r"nothing was made within 0\.01 s"):
        await collect(await start_backend(FakePort()), call(timeout=0.01))


async def test_a_deadline_that_the_engine_saw_first_counts_too() -> None:
    port = FakePort()
    backend = await start_backend(port)
    task = asyncio.ensure_future(collect(backend, call(timeout=1000)))
    await settle()
    port.say("c-0", finish="timeout")
    with pytest.raises(DeadlineExceeded):
        await task


async def test_the_engines_death_fails_what_is_in_flight_and_refuses_the_rest() -> None:
    port = FakePort()
    backend = await start_backend(port)
    tasks = [asyncio.ensure_future(collect(backend, call(id=f"c{i}"))) for i in range(2)]
    await settle()
    port.die("signal 9")
    for task in tasks:
        with pytest.raises(Interrupted, match="signal 9"):
            await task
    with pytest.raises(Unavailable, match="not ready"):
        await collect(backend, call(id="new"))
    port.up = True
    port.script = lambda _: says("back")
    assert "".join(d.text for d in await collect(backend, call(id="again"))) == "back"
    assert port.aborted == []


async def test_readers_may_close_their_streams_when_they_are_told_of_the_engines_death() -> None:
    port = FakePort()
    backend = await start_backend(port)
    said = [backend.answer(call(id=f"c{i}")) for i in range(3)]
    for one in said:
        one.subscribe(one.close)
    port.die("signal 9")
    assert backend.load() == 0 and all(one.error is not None for one in said)


async def test_a_call_that_cannot_be_followed_is_not_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("no detokenizer")

    port = FakePort()
    backend = await start_backend(port)
    monkeypatch.setattr("quire.frontend.native.output_processor", fails)
    with pytest.raises(RuntimeError):
        backend.answer(call())
    assert port.submitted == [] and backend.load() == 0


async def test_a_failed_request_fails_alone() -> None:
    port = FakePort()
    backend = await start_backend(port)
    bad, good = (asyncio.ensure_future(collect(backend, call(id=id))) for id in ("bad", "good"))
    await settle()
    port.say("bad-0", finish="error", error="no such page")
    port.say("good-0", *says("fine"), finish="stop", stop_token=1)
    with pytest.raises(StepFailed, match="no such page"):
        await bad
    assert "".join(d.text for d in await good) == "fine"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, InvalidRequest), (413, TooLarge), (500, StepFailed), (503, Interrupted), (418, StepFailed)],
)
async def test_whose_mistake_a_failure_is_comes_with_it_whether_or_not_a_field_is_to_blame(
    status: int, kind: type[QuireError]
) -> None:
    for param in (None, "prompt"):
        port = FakePort()
        backend = await start_backend(port)
        bad = asyncio.ensure_future(collect(backend, call(id="bad")))
        await settle()
        port.on_tokens([RequestStepOutput("bad-0", (), "error", error="no such page", param=param, status=status)])
        with pytest.raises(kind, match="no such page") as caught:
            await bad
        assert type(caught.value) is kind and caught.value.param == param


async def test_draining_refuses_the_new_and_finishes_the_old() -> None:
    port = FakePort()
    backend = await start_backend(port)
    task = asyncio.ensure_future(collect(backend, call()))
    await settle()
    drain = asyncio.ensure_future(backend.drain(5))
    await settle()
    assert not backend.ready()
    with pytest.raises(Unavailable, match="shutting down"):
        await collect(backend, call(id="new"))
    assert not drain.done()
    port.say("c-0", 1, finish="stop", stop_token=1)
    await task
    await drain
    await backend.close()
    assert port.closed


async def test_draining_aborts_what_takes_too_long() -> None:
    port = FakePort()
    backend = await start_backend(port)
    task = asyncio.ensure_future(collect(backend, call()))
    await settle()
    await backend.drain(0.01)
    assert (await task)[-1].finish_reason == "abort"
    assert port.aborted == ["c-0"]


async def test_an_idle_backend_drains_at_once() -> None:
    backend = await start_backend(FakePort())
    await asyncio.wait_for(backend.drain(1000), 100)


async def test_seeds_are_drawn_here_when_the_call_brings_none() -> None:
    port = FakePort(lambda _: says("a"))
    backend = await start_backend(port)
    for i in range(2):
        await collect(backend, call(id=f"c{i}"))
    await collect(backend, call(id="mine", seed=5))
    seeds = [r.seed for r in port.submitted]
    assert seeds[0] != seeds[1]
    assert seeds[2] == 5


async def test_the_context_is_what_the_engine_can_hold() -> None:
    backend = await start_backend(FakePort(lambda _: says("a"), pages=4))
    assert backend.model().max_model_len == 64
    assert backend.model().vocab_size == 512
    with pytest.raises(InvalidRequest, match="holds 64"):
        await collect(backend, call(max_tokens=64))


async def test_chat_without_a_template_says_what_to_do() -> None:
    backend = await start_backend(FakePort())
    with pytest.raises(InvalidRequest, match="--chat-template"):
        backend.render([{"role": "user", "content": "hi"}])


async def test_chat_messages_become_tokens() -> None:
    backend = await start_backend(FakePort(), chat=ChatTemplate(CHATML))
    text = backend.render([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert backend.encode(text, add_special_tokens=False)[0] == 2


async def test_stats_have_all_fields_before_the_first_step() -> None:
    port = FakePort()
    backend = await start_backend(port)
    before = backend.stats()
    assert before["running"] is True
    assert before["model"] == "tiny"
    assert before["cache"]["free_pages"] == before["cache"]["max_pages"] == 1000
    port.stats = {"decode_steps": 3}
    assert backend.stats()["decode_steps"] == 3


async def test_metrics_are_the_engines_and_the_rims() -> None:
    assert (
        b"fake_steps_total 1.0\nfrontend_things_total 2.0\n" in (await start_backend(FakePort(), Watching())).metrics()
    )


async def test_errors_are_the_known_ones() -> None:
    backend = await start_backend(FakePort())
    for bad in (call(prompt=""), call(max_tokens=1000)):
        with pytest.raises(QuireError):
            await collect(backend, bad)


async def test_a_token_costs_the_frontend_little_more_than_its_text() -> None:
    """What a frontend linear in text length, or with a task a token, would break; both are timed in turn."""
    made: list[str] = []
    loop = asyncio.get_running_loop()

    def task(loop: asyncio.AbstractEventLoop, coro: Any, **rest: Any) -> asyncio.Task[Any]:
        made.append(coro.__qualname__)
        return asyncio.Task(coro, loop=loop, **rest)

    port = FakePort(max_model_len=1024)
    backend = NativeBackend(engine=port, tokenizer=TOKENIZER, card=replace(CARD, max_model_len=1024))
    await backend.start()
    tasks = [asyncio.ensure_future(collect(backend, call(id=f"c{i}", max_tokens=1000))) for i in range(64)]
    await settle()
    ids = list(port.running)
    token = TOKENIZER.encode("the")[0]
    plain = [TOKENIZER.detokenizer() for _ in ids]
    spent, control = [], []
    loop.set_task_factory(task)
    for _ in range(20):
        began = time.thread_time()
        for _ in range(25):
            port.on_tokens([RequestStepOutput(id, (token,)) for id in ids])
            await asyncio.sleep(0)
        half = time.thread_time()
        for _ in range(25):
            for one in plain:
                one.feed((token,))
        spent.append(half - began)
        control.append(time.thread_time() - half)
    loop.set_task_factory(None)
    port.on_tokens([RequestStepOutput(id, (token,), "length") for id in ids])
    await asyncio.gather(*tasks)
    assert not made
    ratio = [took / text for took, text in zip(spent, control, strict=True)]  # a busy machine slows both down
    assert min(ratio) < 50  # 16, as built: a quarter of a microsecond is what a token's text takes
    assert min(ratio[15:]) < 2 * min(ratio[:5])  # after 375 tokens as before 125: linear in the text would be 3
