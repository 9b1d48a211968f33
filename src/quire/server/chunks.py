"""Streams of completions and chat completions, as bytes: what is the same in all chunks is encoded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.frontend.interface import Delta
from quire.frontend.offload import PER_SCORE, PER_TOKEN
from quire.parsers.parts import TextPart
from quire.server import error_responses
from quire.server.calls import Job
from quire.server.outputs import Score, TextLogprobs, TokenText, Usage, chat_logprobs, finish_reason, shown_prompt
from quire.server.stream import DONE, Chunks, event

_json = msgspec.json.Encoder().encode
_PLAIN_TAIL = b',"logprobs":null,"finish_reason":null'


class _ChoiceChunks(Chunks[Delta]):
    """What completions and chat completions have in common: chunks with `choices`, one choice in each.

    _head: the start of a chunk up to its choice, `data: {"id":...,"choices":[{"index":N,`, by choice.
    """

    def __init__(self, job: Job, kind: str, token_text: TokenText) -> None:
        self._job = job
        self._text = token_text
        self._usage = Usage(job, token_text)
        self._plain = job.top is None and not job.token_ids
        self._cost_per_delta = PER_TOKEN + (0 if job.top is None else PER_SCORE * (1 + job.top))
        about = {"id": job.id, "object": kind, "created": job.created, "model": job.model}
        self._before = b"data: " + _json(about)[:-1] + b',"choices":['
        self._head = [self._before + b'{"index":%d,' % index for index in range(len(job.calls) * job.n)]

    def cost(self, ready: Sequence[Delta]) -> int:
        return self._cost_per_delta * len(ready)

    def closing(self) -> bytes:
        params = b',"sampling_params":' + _json(self._job.params) if self._job.params is not None else b""
        last = params + (self._used() if self._job.usage else b"")
        return (self._before + b"]" + last + b"}\n\n" if last else b"") + DONE

    def failed(self, error: Exception) -> bytes:
        return event(error_responses.of(error)) + DONE

    def _tail(self) -> bytes:
        """A chunk from the end of its choice on."""
        return b"}]" + self._used() + b"}\n\n" if self._job.every_usage else b"}]}\n\n"

    def _used(self) -> bytes:
        return b',"usage":' + _json(self._usage.to_json(self._job.n))


class CompletionChunks(_ChoiceChunks):
    """text_completion chunks. With `echo`, each choice begins with its prompt."""

    def __init__(self, job: Job, token_text: TokenText) -> None:
        super().__init__(job, "text_completion", token_text)
        self._echo_cost = shown_prompt(job) * self._cost_per_delta
        self._begun: set[int] = set()
        self._logprobs: dict[int, TextLogprobs] = {}
        self._prompt_scores: dict[int, Sequence[Score]] = {}

    def cost(self, ready: Sequence[Delta]) -> int:
        """The cost of these deltas, and of the prompts that may come before them."""
        return super().cost(ready) + (self._echo_cost if len(self._begun) < len(self._head) else 0)

    def encode(self, delta: Delta) -> bytes:
        """One chunk; before it that of the prompt, if this is the choice's first delta and shows it."""
        job, index = self._job, delta.index
        if delta.prompt_logprobs is not None:
            self._prompt_scores[index] = delta.prompt_logprobs
        before = b"" if index in self._begun else self._begin(index)
        if job.scored_only:
            delta = Delta(index, "", finish_reason="length")
        self._usage.add(delta)
        chunk = before + self._head[index] + b'"text":' + _json(delta.text)
        if self._plain and delta.finish_reason is None:
            return chunk + _PLAIN_TAIL + b',"stop_reason":null' + self._tail()
        return chunk + self._rest(delta, delta.tokens, delta.logprobs) + self._tail()

    def _begin(self, index: int) -> bytes:
        """The chunk of a choice's prompt, if answers show it."""
        self._begun.add(index)
        job = self._job
        if not (job.echo or job.token_ids):
            return b""
        call = job.calls[index // job.n]
        prompt = call.prompt if job.echo else ()
        text = (call.text or "") if job.echo else ""
        rest = self._rest(Delta(index, ""), prompt, self._prompt_scores.get(index - index % job.n, ()))
        if job.token_ids:
            rest += b',"prompt_token_ids":' + _json(call.prompt)
        return self._head[index] + b'"text":' + _json(text) + rest + self._tail()

    def _rest(self, delta: Delta, tokens: Sequence[int], scores: Sequence[Score]) -> bytes:
        """A choice from its logprobs on."""
        logprobs = None
        if self._job.top is not None:
            if delta.index not in self._logprobs:
                self._logprobs[delta.index] = TextLogprobs(self._text, as_ids=self._job.as_ids)
            logprobs = self._logprobs[delta.index].of(tokens, scores)
        rest = b',"logprobs":' + _json(logprobs)
        rest += b',"finish_reason":' + _json(delta.finish_reason)
        rest += b',"stop_reason":' + _json(delta.stop_reason)
        return rest + (b',"token_ids":' + _json(delta.tokens) if self._job.token_ids else b"")


class ChatChunks(_ChoiceChunks):
    """chat.completion.chunk chunks: a role, then content, then the finish reason."""

    def __init__(self, job: Job, token_text: TokenText) -> None:
        super().__init__(job, "chat.completion.chunk", token_text)
        # The chunk of a delta without parts, such as one that holds only a marker of a tool call.
        self._empty = [] if self._plain and not job.every_usage else [b'"delta":{}']
        choices = range(len(self._head))
        self._splitters = [job.splitter() for _ in choices]
        self._called = [False for _ in choices]
        # Made here: its usage is that of before the first delta.
        self._opening = b"".join(map(self._open, choices))

    def opening(self) -> bytes:
        """The role of each choice, and its prompt's last message with `echo`."""
        return self._opening

    def _open(self, index: int) -> bytes:
        call = self._job.calls[index // self._job.n]
        prompt = b',"prompt_token_ids":' + _json(call.prompt) if self._job.token_ids else b""
        role = b'"delta":{"role":"assistant","content":""}' + _PLAIN_TAIL
        chunks = self._head[index] + role + prompt + self._tail()
        if self._job.echo and call.text:
            chunks += self._head[index] + self._body(TextPart("content", call.text), index) + _PLAIN_TAIL + self._tail()
        return chunks

    def encode(self, delta: Delta) -> bytes:
        """A chunk for each part; the last has the delta's other fields."""
        index, ended = delta.index, delta.finish_reason is not None
        self._usage.add(delta)
        bodies = [self._body(part, index) for part in self._job.shown_parts(self._splitters[index], delta)]
        head, tail = self._head[index], self._tail()
        if self._plain and not ended:
            return b"".join([head + body + _PLAIN_TAIL + tail for body in bodies or self._empty])
        *before, last = bodies or [b'"delta":{}']
        chunks = b"".join([head + body + _PLAIN_TAIL + tail for body in before])
        return chunks + head + last + self._rest(delta) + tail

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
        """A choice from its logprobs on."""
        logprobs: Any = None
        if self._job.top is not None:
            logprobs = chat_logprobs(delta.logprobs, self._job.top, self._text, as_ids=self._job.as_ids)
        reason = finish_reason(delta.finish_reason, self._called[delta.index])
        rest = b',"logprobs":' + _json(logprobs) + b',"finish_reason":' + _json(reason)
        if delta.finish_reason is not None:
            rest += b',"stop_reason":' + _json(delta.stop_reason)
        return rest + (b',"token_ids":' + _json(delta.tokens) if self._job.token_ids else b"")
