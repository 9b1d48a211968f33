"""What a stream says, as bytes: everything that does not change is made once, the delta's text goes in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from quire.backends.base import Delta
from quire.server.answers import Usage
from quire.server.calls import Job
from quire.server.logprobs import Score, TextLogprobs, TokenText, chat_logprobs

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_json = msgspec.json.Encoder().encode
_PLAIN_TAIL = b',"logprobs":null,"finish_reason":null'


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


class Chunks(Protocol):
    """The stream of one job, in its API's shape."""

    def opening(self) -> bytes:
        """What comes before the first delta."""

    def of(self, delta: Delta) -> bytes:
        """A delta's events."""

    def closing(self) -> bytes:
        """What comes after the last delta, [DONE] included."""


class _Head:
    """The part of a job's chunks that stays: `data: {"id":...,"choices":[{"index":N,`."""

    def __init__(self, job: Job, kind: str) -> None:
        self.job = job
        self.usage = Usage(job)
        about = {"id": job.id, "object": kind, "created": job.created, "model": job.model}
        self._before = b"data: " + _json(about)[:-1] + b',"choices":['
        self._heads: dict[int, bytes] = {}

    def of(self, index: int) -> bytes:
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = self._before + b'{"index":%d,' % index
        return head

    def tail(self) -> bytes:
        """From the choice's end on."""
        return b"}]" + self._used() + b"}\n\n" if self.job.every_usage else b"}]}\n\n"

    def closing(self) -> bytes:
        return (self._before + b"]" + self._used() + b"}\n\n" if self.job.usage else b"") + DONE

    def _used(self) -> bytes:
        return b',"usage":' + _json(self.usage.of(self.job.n))


class CompletionChunks:
    """text_completion chunks. With `echo`, each choice begins with its prompt."""

    def __init__(self, job: Job, token_text: TokenText) -> None:
        self._job, self._head, self._text = job, _Head(job, "text_completion"), token_text
        self._plain = job.top is None and not job.token_ids
        self._begun: set[int] = set()
        self._tellers: dict[int, TextLogprobs] = {}
        self._scores: dict[int, Sequence[Score]] = {}

    def opening(self) -> bytes:
        return b""

    def of(self, delta: Delta) -> bytes:
        job, index = self._job, delta.index
        echo = b""
        if delta.prompt_logprobs is not None:
            self._scores[index] = delta.prompt_logprobs
        if index not in self._begun:
            self._begun.add(index)
            echo = self._echo(index) if job.echo or job.token_ids else b""
        if job.scored_only:
            delta = Delta(index, "", finish_reason="length")
        self._head.usage.add(delta)
        head = self._head.of(index) + b'"text":' + _json(delta.text)
        if self._plain and delta.finish_reason is None:
            return echo + head + _PLAIN_TAIL + b',"stop_reason":null' + self._head.tail()
        return echo + head + self._rest(delta, delta.tokens, delta.logprobs) + self._head.tail()

    def _echo(self, index: int) -> bytes:
        call = self._job.calls[index // self._job.n]
        prompt = call.prompt if self._job.echo else ()
        text = (call.text or "") if self._job.echo else ""
        head = self._head.of(index) + b'"text":' + _json(text)
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


class ChatChunks:
    """chat.completion.chunk chunks: a role, then content, then how it ended."""

    def __init__(self, job: Job, token_text: TokenText) -> None:
        self._job, self._head, self._text = job, _Head(job, "chat.completion.chunk"), token_text
        self._plain = job.top is None and not job.token_ids

    def opening(self) -> bytes:
        said = [self._opening(index) for index in range(len(self._job.calls) * self._job.n)]
        return b"".join(said)

    def _opening(self, index: int) -> bytes:
        call = self._job.calls[index // self._job.n]
        prompt = b',"prompt_token_ids":' + _json(call.prompt) if self._job.token_ids else b""
        role = self._head.of(index) + b'"delta":{"role":"assistant","content":""}' + _PLAIN_TAIL
        said = role + prompt + self._head.tail()
        if self._job.echo and call.text:
            said += self._head.of(index) + self._content(call.text) + _PLAIN_TAIL + self._head.tail()
        return said

    def of(self, delta: Delta) -> bytes:
        self._head.usage.add(delta)
        head = self._head.of(delta.index) + self._content(delta.text)
        if self._plain and delta.finish_reason is None:
            return head + _PLAIN_TAIL + self._head.tail()
        return head + self._rest(delta) + self._head.tail()

    def _content(self, text: str) -> bytes:
        return b'"delta":{"content":' + _json(text) + b"}" if text else b'"delta":{}'

    def _rest(self, delta: Delta) -> bytes:
        logprobs: Any = None
        if self._job.top is not None:
            logprobs = chat_logprobs(delta.logprobs, self._job.top, self._text, as_ids=self._job.as_ids)
        rest = b',"logprobs":' + _json(logprobs) + b',"finish_reason":' + _json(delta.finish_reason)
        if delta.finish_reason is not None:
            rest += b',"stop_reason":' + _json(delta.stop_reason)
        return rest + (b',"token_ids":' + _json(delta.tokens) if self._job.token_ids else b"")

    def closing(self) -> bytes:
        return self._head.closing()
