"""What a stream says, as bytes: everything that does not change is made once, the delta's text goes in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from quire.frontend.interface import Delta
from quire.frontend.offload import PER_SCORE, PER_TOKEN
from quire.parsers.parts import TextPart
from quire.server import error_responses
from quire.server.calls import Job
from quire.server.logprobs import Score, TextLogprobs, TokenText, chat_logprobs
from quire.server.outputs import Usage, finish_reason, shown_prompt

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_json = msgspec.json.Encoder().encode
_PLAIN_TAIL = b',"logprobs":null,"finish_reason":null'


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


class Chunks(Protocol):
    """The stream of one job, in its API's shape. Made where the job is, and written by one thread at a time."""

    @property
    def edges(self) -> int:
        """About how many bytes making the opening, or the closing, is worth (backends.offload)."""

    def cost(self, ready: Sequence[Delta]) -> int:
        """About how many bytes making the events of these deltas is worth."""

    def opening(self) -> bytes:
        """What comes before the first delta."""

    def of(self, delta: Delta) -> bytes:
        """A delta's events."""

    def closing(self) -> bytes:
        """What comes after the last delta, [DONE] included."""

    def failed(self, error: Exception) -> bytes:
        """What comes instead, when an error ends the stream."""


def per_delta(job: Job) -> int:
    """About how many bytes an ordinary delta's events are worth."""
    return PER_TOKEN + (0 if job.top is None else PER_SCORE * (1 + job.top))


class _Head:
    """The part of a job's chunks that stays: `data: {"id":...,"choices":[{"index":N,`."""

    def __init__(self, job: Job, kind: str, token_text: TokenText) -> None:
        self.job = job
        self.usage = Usage(job, token_text)
        about = {"id": job.id, "object": kind, "created": job.created, "model": job.model}
        self._before = b"data: " + _json(about)[:-1] + b',"choices":['
        self.of = [self._before + b'{"index":%d,' % index for index in range(len(job.calls) * job.n)]
        """By choice."""

    def tail(self) -> bytes:
        """From the choice's end on."""
        return b"}]" + self._used() + b"}\n\n" if self.job.every_usage else b"}]}\n\n"

    def closing(self) -> bytes:
        params = b',"sampling_params":' + _json(self.job.params) if self.job.params is not None else b""
        last = params + (self._used() if self.job.usage else b"")
        return (self._before + b"]" + last + b"}\n\n" if last else b"") + DONE

    def failed(self, error: Exception) -> bytes:
        return event(error_responses.of(error)) + DONE

    def _used(self) -> bytes:
        return b',"usage":' + _json(self.usage.to_json(self.job.n))


class CompletionChunks:
    """text_completion chunks. With `echo`, each choice begins with its prompt."""

    def __init__(self, job: Job, token_text: TokenText) -> None:
        self._job, self._head, self._text = job, _Head(job, "text_completion", token_text), token_text
        self._plain = job.top is None and not job.token_ids
        self._each = per_delta(job)
        self._first = shown_prompt(job) * self._each
        self._begun: set[int] = set()
        self._tellers: dict[int, TextLogprobs] = {}
        self._scores: dict[int, Sequence[Score]] = {}

    edges = 0

    def cost(self, ready: Sequence[Delta]) -> int:
        return self._each * len(ready) + (self._first if len(self._begun) < len(self._head.of) else 0)

    def opening(self) -> bytes:
        return b""

    def of(self, delta: Delta) -> bytes:
        job, index = self._job, delta.index
        if delta.prompt_logprobs is not None:
            self._scores[index] = delta.prompt_logprobs
        before = b"" if index in self._begun else self._begin(index)
        if job.scored_only:
            delta = Delta(index, "", finish_reason="length")
        self._head.usage.add(delta)
        said = before + self._head.of[index] + b'"text":' + _json(delta.text)
        if self._plain and delta.finish_reason is None:
            return said + _PLAIN_TAIL + b',"stop_reason":null' + self._head.tail()
        return said + self._rest(delta, delta.tokens, delta.logprobs) + self._head.tail()

    def _begin(self, index: int) -> bytes:
        self._begun.add(index)
        return self._echo(index) if self._job.echo or self._job.token_ids else b""

    def _echo(self, index: int) -> bytes:
        call = self._job.calls[index // self._job.n]
        prompt = call.prompt if self._job.echo else ()
        text = (call.text or "") if self._job.echo else ""
        head = self._head.of[index] + b'"text":' + _json(text)
        rest = self._rest(Delta(index, ""), prompt, self._scores.get(index - index % self._job.n, ()))
        if self._job.token_ids:
            rest += b',"prompt_token_ids":' + _json(call.prompt)
        return head + rest + self._head.tail()

    def _rest(self, delta: Delta, tokens: Sequence[int], scores: Sequence[Score]) -> bytes:
        """From the logprobs on."""
        logprobs = None
        if self._job.top is not None:
            teller = self._tellers.get(delta.index)
            if teller is None:
                teller = self._tellers[delta.index] = TextLogprobs(self._text, as_ids=self._job.as_ids)
            logprobs = teller.of(tokens, scores)
        ids = b',"token_ids":' + _json(delta.tokens) if self._job.token_ids else b""
        return (
            b',"logprobs":'
            + _json(logprobs)
            + b',"finish_reason":'
            + _json(delta.finish_reason)
            + b',"stop_reason":'
            + _json(delta.stop_reason)
            + ids
        )

    def closing(self) -> bytes:
        return self._head.closing()

    def failed(self, error: Exception) -> bytes:
        return self._head.failed(error)


class ChatChunks:
    """chat.completion.chunk chunks: a role, then content, then how it ended. What only marks a call says nothing."""

    def __init__(self, job: Job, token_text: TokenText) -> None:
        self._job, self._head, self._text = job, _Head(job, "chat.completion.chunk", token_text), token_text
        self._plain = job.top is None and not job.token_ids
        self._each = per_delta(job)
        self._nothing = [] if self._plain and not job.every_usage else [b'"delta":{}']
        choices = len(job.calls) * job.n
        self._splitters = [job.splitter() for _ in range(choices)]
        self._called = [False] * choices
        self._opened = b"".join(map(self._opening, range(choices)))  # with the usage of before the first delta

    edges = 0
    """It is made where the job is."""

    def cost(self, ready: Sequence[Delta]) -> int:
        return self._each * len(ready)

    def opening(self) -> bytes:
        return self._opened

    def _opening(self, index: int) -> bytes:
        call = self._job.calls[index // self._job.n]
        prompt = b',"prompt_token_ids":' + _json(call.prompt) if self._job.token_ids else b""
        role = self._head.of[index] + b'"delta":{"role":"assistant","content":""}' + _PLAIN_TAIL
        said = role + prompt + self._head.tail()
        if self._job.echo and call.text:
            said += (
                self._head.of[index]
                + self._body(TextPart("content", call.text), index)
                + _PLAIN_TAIL
                + self._head.tail()
            )
        return said

    def of(self, delta: Delta) -> bytes:
        """A chunk for each part; what else the delta says goes with the last."""
        index, ended = delta.index, delta.finish_reason is not None
        splitter = self._splitters[index]
        self._head.usage.add(delta)
        parts = splitter.feed(delta.text)
        if ended:
            parts = [*parts, *splitter.flush()]
        bodies = [self._body(part, index) for part in parts if part.kind != "reasoning" or self._job.reasons]
        head, tail = self._head.of[index], self._head.tail()
        if self._plain and not ended:
            return b"".join([head + body + _PLAIN_TAIL + tail for body in bodies or self._nothing])
        *before, last = bodies or [b'"delta":{}']
        said = b"".join([head + body + _PLAIN_TAIL + tail for body in before])
        return said + head + last + self._rest(delta) + tail

    def _body(self, part: TextPart, index: int) -> bytes:
        text = _json(part.text)
        if part.kind == "content":
            return b'"delta":{"content":' + text + b"}"
        if part.kind == "reasoning":
            return b'"delta":{"reasoning":' + text + b',"reasoning_content":' + text + b"}"
        about = b'"delta":{"tool_calls":[{"index":%d,' % part.call
        if part.kind == "arguments":
            return about + b'"function":{"arguments":' + text + b"}}]}"
        self._called[index] = True
        id = _json(self._job.tools.call_id())
        return about + b'"id":' + id + b',"type":"function","function":{"name":' + text + b',"arguments":""}}]}'

    def _rest(self, delta: Delta) -> bytes:
        logprobs: Any = None
        if self._job.top is not None:
            logprobs = chat_logprobs(delta.logprobs, self._job.top, self._text, as_ids=self._job.as_ids)
        reason = finish_reason(delta.finish_reason, self._called[delta.index])
        rest = b',"logprobs":' + _json(logprobs) + b',"finish_reason":' + _json(reason)
        if delta.finish_reason is not None:
            rest += b',"stop_reason":' + _json(delta.stop_reason)
        return rest + (b',"token_ids":' + _json(delta.tokens) if self._job.token_ids else b"")

    def closing(self) -> bytes:
        return self._head.closing()

    def failed(self, error: Exception) -> bytes:
        return self._head.failed(error)
