"""A scripted engine behind the port: tests say what each step brings, or let it answer by a rule."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.engine.client import OnDeath, OnTokens
from quire.engine.executor import Description
from quire.types import FinishReason, Request, RequestStepOutput, TokenLogprobs

Script = Callable[[Request], Sequence[int]]
"""What the engine will say to a request, end tokens included; the fake stops where an engine would."""


class FakePort:
    """Records its calls. With a `script` it steps by itself, one token a request a step."""

    def __init__(self, script: Script | None = None, *, pages: int = 1000, max_model_len: int = 128) -> None:
        self.about = Description(
            num_blocks=pages, block_size=16, num_rows=64, max_model_len=max_model_len, vocab_size=512, lookahead=0
        )
        self.script = script
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.reasons: list[FinishReason] = []
        self.running: dict[str, tuple[Request, list[int]]] = {}
        self.up = False
        self.closed = False
        self.resets = 0
        self.stats: dict[str, Any] = {}
        self.stepping = asyncio.Event()
        self.stepping.set()
        self.on_tokens: OnTokens = lambda batch: None
        self.died: OnDeath = lambda reason: None
        self._task: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------- the port

    async def start(self) -> Description:
        self.up = True
        return self.about

    async def close(self) -> None:
        self.closed = True
        self.up = False
        if self._task is not None:
            self._task.cancel()

    def submit(self, requests: Sequence[Request]) -> None:
        self.submitted += requests
        for request in requests:
            said = list(self.script(request)) if self.script else []
            self.running[request.id] = request, said
        if self.script and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._go())

    def abort(self, ids: Sequence[str], why: FinishReason = "abort") -> None:
        self.aborted += ids
        self.reasons += [why] * len(ids)
        for id in ids:
            self.running.pop(id, None)

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def subscribe(self, on_tokens: OnTokens, on_death: OnDeath) -> None:
        self.on_tokens, self.died = on_tokens, on_death

    def snapshot(self) -> Mapping[str, Any]:
        return self.stats

    def prometheus(self) -> bytes:
        return b"# HELP fake_steps Steps.\n# TYPE fake_steps counter\nfake_steps_total 1.0\n"

    def alive(self) -> bool:
        return self.up

    def ready(self) -> bool:
        return self.up

    # ---------------------------------------------------------------- what tests make it do

    def say(self, request: Request | str, *tokens: int, **rest: Any) -> None:
        """One step that brings something to one request only."""
        id = request if isinstance(request, str) else request.id
        self.on_tokens([RequestStepOutput(id, tokens, **rest)])

    def die(self, reason: str) -> None:
        self.up = False
        self.running.clear()
        self.died(reason)

    async def _go(self) -> None:
        while self.running:
            await self.stepping.wait()
            await asyncio.sleep(0)
            batch = [self._one(*seat) for seat in list(self.running.values())]
            for event in batch:
                if event.finish is not None:
                    self.running.pop(event.id, None)
            if batch:
                self.on_tokens(batch)

    def _one(self, request: Request, said: list[int]) -> RequestStepOutput:
        asks = request.sampling
        first = len(said) == len(self.script(request)) if self.script else False
        token = said.pop(0)
        made = len(self.script(request)) - len(said) if self.script else 0
        finish = stop = None
        if token in request.stop and made > asks.min_tokens:
            finish, stop = "stop", token
        elif made >= request.max_new_tokens or not said:
            finish = "length"
        return RequestStepOutput(
            request.id,
            (token,),
            finish,  # type: ignore[arg-type]
            stop,
            logprobs=(scored(token, asks.logprobs),) if asks.logprobs is not None else (),
            prompt_logprobs=tuple(scored(t, asks.prompt_logprobs) for t in request.prompt[1:])
            if first and asks.prompt_logprobs is not None
            else (),
            num_cached=16 if first and len(request.prompt) > 16 else 0,
        )


def scored(token: int, top: int | None) -> TokenLogprobs:
    """Log-probabilities that anyone can check: the token is the second most likely, after its neighbours."""
    likely = tuple((t, -0.25 * (i + 1)) for i, t in enumerate([token + 1, token, token + 2][: top or 0]))
    return TokenLogprobs(token, -0.5, 2, likely)


def fire(timer: asyncio.TimerHandle | None) -> None:
    """What a timer does when it is due, now: what must happen before that may take a busy machine any time."""
    assert timer is not None
    callback, args = timer._callback, timer._args  # type: ignore[attr-defined]
    timer.cancel()
    callback(*args)
