"""Beam search over a backend: each step is a call for each running beam, and the answers come when it is over."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from quire.errors import DeadlineExceeded, Interrupted, Overloaded, QuireError
from quire.frontend.beam_search import Beam, BeamSearch, BeamSearchParams
from quire.frontend.interface import Backend, Call, Delta, ResultStream, iterate
from quire.frontend.offload import PER_SCORE, PER_TOKEN, offload
from quire.types import PromptReport, SamplingParams

_CONTEXT = 8
"""Tokens of the prompt before an answer, of which its text may depend: as white space at its beginning."""

_AGAIN = 0.05
"""Seconds until a step that found the queue full is tried again."""


def begin_answer(backend: Backend, call: Call) -> ResultStream[Delta]:
    """The answers to a call, sampled or searched for. Raises what `Backend.answer` raises."""
    return backend.answer(call) if call.beams is None else BeamStream(backend, call, call.beams)


class BeamStream:
    """A `ResultStream` of one delta for each answer, the best one first, when the search is over.

    A step that finds the queue full, as other requests came meanwhile, waits and is tried again: a search never takes a
    place in the queue that another request has. Where the time of the call ends, or its step is aborted, the best beams
    so far are the answers, with that finish_reason. Closing it ends the beams in the engine.
    """

    def __init__(self, backend: Backend, call: Call, params: BeamSearchParams) -> None:
        """Raises Overloaded where the queue has no place for all beams, and Unavailable."""
        backend.admit(params.beam_width)
        card = backend.model()
        self._backend, self._call, self._params = backend, call, params
        self._eos = card.eos
        self._search = BeamSearch(params, card.eos)
        self._end = time.monotonic() + call.timeout
        self._cached = 0
        self._report: PromptReport | None = None
        self._ready: list[Delta] = []
        self._error: Exception | None = None
        self._news: Callable[[], None] = lambda: None
        self._task = asyncio.ensure_future(self._run())

    def subscribe(self, news: Callable[[], None]) -> None:
        """See ResultStream."""
        self._news = news

    def take(self) -> Sequence[Delta] | None:
        """See ResultStream."""
        ready, self._ready = self._ready, []
        if ready or not self._task.done():
            return ready
        if self._error is not None:
            raise self._error
        return None

    def close(self) -> None:
        """See ResultStream."""
        self._task.cancel()

    async def _run(self) -> None:
        try:
            reason = await self._steps()
            chosen = self._search.best_so_far if reason else self._search.beams
            if not chosen:
                raise QuireError("the model gave no token to begin an answer with")
            size = PER_TOKEN * self._call.sampling.n * (_CONTEXT + len(chosen[0].tokens))
            self._ready = await offload(size, partial(self._deltas, chosen, reason))
        except Exception as error:
            self._error = error
        finally:
            # After this task is done, which `take` looks at.
            asyncio.get_running_loop().call_soon(lambda: self._news())

    async def _steps(self) -> str:
        """Search to the end. Returns why it ended before its end, empty if it did not."""
        search = self._search
        while not search.over:
            found, reason = await self._step(search.running)
            if reason and not search.best_so_far:
                raise (
                    DeadlineExceeded("the first step took too long")
                    if reason == "timeout"
                    else Interrupted("the search was aborted")
                )
            if reason:
                return reason
            await offload(PER_SCORE * len(found) * search.num_candidates, partial(search.extend, found))
        return ""

    async def _step(self, beams: Sequence[Beam]) -> tuple[list[Sequence[tuple[int, float]]], str]:
        """The likeliest tokens behind each beam, or why there are none."""
        asked = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=self._search.num_candidates, detokenize=False, ignore_eos=True
        )
        step = len(beams[0].tokens)
        found: list[Sequence[tuple[int, float]]] = []
        with ExitStack() as stack:
            streams = []
            for i, beam in enumerate(beams):
                left = self._end - time.monotonic()
                if left <= 0:
                    return [], "timeout"
                call = replace(
                    self._call,
                    id=f"{self._call.id}-{step}-{i}",
                    prompt=(*self._call.prompt, *beam.tokens),
                    text=None,
                    sampling=asked,
                    timeout=left,
                    beams=None,
                    omitted_tools=() if step else self._call.omitted_tools,
                    header=None if step else self._call.header,
                )
                stream = await self._admitted(call)
                stack.callback(stream.close)
                streams.append(stream)
            for stream in streams:
                last = await _last(stream)
                if last is None or not last.logprobs:
                    return [], "timeout" if last is None else last.finish_reason or "abort"
                if not step:
                    self._cached, self._report = last.num_cached, last.report
                found.append(last.logprobs[0].top)
        return found, ""

    async def _admitted(self, call: Call) -> ResultStream[Delta]:
        while True:
            with contextlib.suppress(Overloaded):
                return self._backend.answer(call)
            if time.monotonic() > self._end:
                raise DeadlineExceeded(f"the queue was full for {self._call.timeout:g} s", param="timeout")
            await asyncio.sleep(_AGAIN)

    def _deltas(self, beams: Sequence[Beam], reason: str) -> list[Delta]:
        """The answers. reason: why the search ended early. Blocking."""
        shown = []
        for index, beam in enumerate(beams[: self._call.sampling.n]):
            ended = not self._params.ignore_eos and beam.tokens[-1] in self._eos
            keeps = self._params.include_stop_str_in_output
            tokens = beam.tokens[:-1] if ended and not keeps else beam.tokens
            length = len(beam.tokens) == self._params.max_tokens
            why = "stop" if ended else "length" if length else reason or "length"
            delta = Delta(index, self._text(tokens), tokens, finish_reason=why)
            shown.append(delta._replace(num_cached=self._cached, report=self._report))
        return shown

    def _text(self, tokens: tuple[int, ...]) -> str:
        if not self._backend.model().has_text:
            return ""
        skip = self._call.sampling.skip_special_tokens and not self._params.include_stop_str_in_output
        before = self._call.prompt[-_CONTEXT:]
        whole = self._backend.decode((*before, *tokens), skip_special_tokens=skip)
        return whole.removeprefix(self._backend.decode(before, skip_special_tokens=skip))


async def _last(stream: ResultStream[Delta]) -> Delta | None:
    """The last delta of a stream with one answer; None where its time ended before. Raises what ended it."""
    last = None
    try:
        async for ready in iterate(stream):
            last = ready[-1]
    except DeadlineExceeded:
        return None
    return last
