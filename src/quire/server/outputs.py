"""Answers of completions and chat completions, whole and as streams, and the formats of log-probabilities.

Streams are written as bytes: what is the same in all chunks is encoded once.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from quire.frontend.interface import Delta, Timings
from quire.frontend.offload import PER_SCORE, PER_TOKEN
from quire.parsers.parts import TextPart, joined
from quire.parsers.reasoning import ReasoningCounter
from quire.server import error_responses
from quire.server.calls import Job, TokenText
from quire.server.stream import DONE, Chunks, event
from quire.types import PromptReport, TokenLogprobs

Score = TokenLogprobs | None

_json = msgspec.json.Encoder().encode

# The end of a choice in a chunk without log-probabilities, before the answer ends.
_PLAIN_TAIL = b',"logprobs":null,"finish_reason":null'

# The lowest log-probability shown: JSON has no minus infinity.
_FLOOR = -9999.0


class Usage:
    """Counts the tokens of one HTTP request: each prompt once, and all answers.

    first: time.perf_counter() at the first delta, None before. timings: those of the last delta.
    """

    __slots__ = (
        *("_cache_details", "_cached", "_counted", "_details", "_pins", "_reports", "_style", "_text", "_thinking"),
        "_thoughts",
        *("completion", "first", "prompt", "timings"),
    )

    def __init__(self, job: Job) -> None:
        self._text = job.token_text
        self._thinking = job.thinking
        self._style = job.thought_style
        self._thoughts: dict[int, ReasoningCounter] = {}
        self._details: dict[str, Any] = {} if job.truncated is None else {"truncated_tokens": job.truncated}
        if job.removal.text:
            self._details["removed_characters"] = len(job.removal.text)
        if shown := sum(image.length for call in job.calls for image in call.images):
            self._details["multimodal_tokens"] = {"image": shown}
        self._pins = job.calls[0].pins if job.calls else ()
        self._cache_details = job.cache_details
        self._reports: dict[int, PromptReport] = {}
        self._counted = not job.scored_only
        self._cached: dict[int, int] = {}
        self.prompt = sum(len(call.prompt) for call in job.calls)
        self.completion = 0
        self.first: float | None = None
        self.timings: Timings | None = None

    def add(self, delta: Delta) -> None:
        """Count a delta's tokens."""
        if self.first is None:
            self.first = time.perf_counter()
        if self._counted:
            self.completion += len(delta.tokens)
        if delta.num_cached:
            self._cached[delta.index] = delta.num_cached
        self.timings = delta.timings
        if delta.report is not None:
            self._reports[delta.index] = delta.report
        if self._thinking is not None:
            thoughts = self._thoughts.get(delta.index)
            if thoughts is None:
                thoughts = self._thoughts[delta.index] = ReasoningCounter(inside=self._thinking, style=self._style)
            if not thoughts.over:
                thoughts.feed([self._text(token)[0] for token in delta.tokens])

    def cached(self, n: int) -> int:
        """Prompt tokens that were not computed. Of n choices only the first counts: the others share its blocks."""
        return sum(tokens for index, tokens in self._cached.items() if index % n == 0)

    def written(self, n: int) -> int:
        """Prompt tokens that were put into the prefix cache. Of n choices only the first counts, as in `cached`."""
        return sum(report.cache_written for index, report in self._reports.items() if index % n == 0)

    def _from_tiers(self, n: int) -> dict[str, int]:
        """Of `cached`, tokens that came from host memory, from disk, and from a prefill engine if any did."""
        first = [report for index, report in self._reports.items() if index % n == 0]
        remote = sum(each.cached_remote for each in first)
        found = {"host": sum(each.cached_host for each in first), "disk": sum(each.cached_disk for each in first)}
        return {**found, "remote": remote} if remote else found

    def pinned(self, n: int) -> int:
        """Prompt tokens that are pinned in the prefix cache now."""
        return sum(max(report.pinned, default=0) for index, report in self._reports.items() if index % n == 0)

    def created(self) -> dict[float, int]:
        """Tokens of the only prompt that were put into the prefix cache and pinned, by the seconds of their pins."""
        made, counted, left = {}, self.cached(1), self.written(1)
        report = self._reports.get(0, PromptReport())
        # Those that last longer are nearer the beginning.
        for pin, length in sorted(zip(self._pins, report.pinned, strict=False), key=lambda each: -each[0].seconds):
            made[pin.seconds] = min(max(0, length - counted), left)
            left -= made[pin.seconds]
            counted = max(counted, length)
        return made

    def prompt_details(self, n: int) -> dict[str, Any]:
        """OpenAI's prompt_tokens_details, vLLM's name of one of them, and ours."""
        written = self.written(n)
        details: dict[str, Any] = {
            "cached_tokens": self.cached(n),
            "cache_write_tokens": written,
            "created_cache_tokens": written,
        }
        details |= self._details
        if total := sum((tiers := self._from_tiers(n)).values()):
            details["cached_tokens_details"] = {"device": details["cached_tokens"] - total, **tiers}
        if self._pins:
            details["pinned_tokens"] = self.pinned(n)
        if self._cache_details:
            report = self._reports.get(0)
            details["diverged_at"] = None if report is None else report.diverged_at
        return details

    @property
    def reasoning(self) -> int:
        """Reasoning tokens, which `completion` includes."""
        return sum(thoughts.count for thoughts in self._thoughts.values())

    def to_json(self, n: int) -> dict[str, Any]:
        """OpenAI's usage object."""
        usage = {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": self.prompt_details(n),
        }
        if self._thinking is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return usage


class ChoiceBuilder:
    """What is shown of one choice, put together from its deltas."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._splitter = job.splitter()
        self._parts: list[TextPart] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.pooled = b""
        self.timings: Timings | None = None
        self.prompt_logprobs: Sequence[Score] = ()

    def add(self, delta: Delta) -> None:
        """Append a delta of this choice."""
        self.pooled = self.pooled or delta.pooled
        self._parts += self._job.shown_parts(self._splitter, delta)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.timings = delta.timings
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs

    def text(self, kind: Literal["content", "reasoning"] = "content") -> str:
        """The content, or the thoughts."""
        return "".join(part.text for part in self._parts if part.kind == kind)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """(name, arguments) of each tool call."""
        made: list[tuple[str, list[str]]] = []
        for part in self._parts:
            if part.kind == "call":
                made.append((part.text, []))
            elif part.kind == "arguments":
                made[part.call][1].append(part.text)
        return [(name, "".join(arguments)) for name, arguments in made]

    @property
    def parts(self) -> list[TextPart]:
        """All parts in order; neighbours of the same kind are joined."""
        return joined(self._parts)


def cost(job: Job, choices: Sequence[ChoiceBuilder]) -> int:
    """About how many bytes encoding these choices is worth (`frontend.offload`)."""
    top = 1 + max(job.top or 0, job.prompt_top or 0)
    tokens = sum(len(one.tokens) for one in choices)
    scores = sum(len(one.logprobs) + job.n * len(one.prompt_logprobs) for one in choices)
    return (
        PER_TOKEN * (tokens + shown_prompt(job) * job.n)
        + PER_SCORE * top * scores
        + sum(len(one.pooled) for one in choices)
    )


def shown_prompt(job: Job) -> int:
    """Tokens of prompts that answers repeat, once in each choice."""
    return sum(len(call.prompt) for call in job.calls) if job.echo or job.token_ids else 0


def completion(job: Job, choices: Sequence[ChoiceBuilder], usage: Usage) -> dict[str, Any]:
    """A text_completion object."""
    made = [_completion_choice(job, i, one, choices[i - i % job.n].prompt_logprobs) for i, one in enumerate(choices)]
    return _answer("text_completion", job, made, usage, {})


def _completion_choice(job: Job, index: int, made: ChoiceBuilder, prompt_scores: Sequence[Score]) -> dict[str, Any]:
    if job.scored_only:
        made = ChoiceBuilder(job)
        made.finish_reason = "length"
    call = job.calls[index // job.n]
    shown: tuple[Sequence[int], Sequence[Score]] = (made.tokens, made.logprobs)
    if job.echo:
        shown = ([*call.prompt, *made.tokens], [*prompt_scores, *made.logprobs])
    return {
        "index": index,
        "text": (call.text or "") + made.text() if job.echo else made.text(),
        "logprobs": None if job.top is None else TextLogprobs(job.token_text, as_ids=job.as_ids).of(*shown),
        "finish_reason": made.finish_reason,
        "stop_reason": made.stop_reason,
        "token_ids": made.tokens if job.token_ids else None,
        **timings(job, made.timings),
        **_prompt_fields(job, index, prompt_scores),
    }


def _prompt_fields(job: Job, index: int, scores: Sequence[Score]) -> dict[str, Any]:
    """What is shown of the prompt of a choice. scores: of the prompt."""
    return {
        "prompt_logprobs": None if job.prompt_top is None else prompt_logprobs(scores, job.prompt_top, job.token_text),
        "prompt_token_ids": job.calls[index // job.n].prompt if job.token_ids else None,
    }


def chat(job: Job, choices: Sequence[ChoiceBuilder], usage: Usage) -> dict[str, Any]:
    """A chat.completion object."""
    made = [_chat_choice(job, i, one) for i, one in enumerate(choices)]
    return _answer("chat.completion", job, made, usage, _prompt_fields(job, 0, choices[0].prompt_logprobs))


def _chat_choice(job: Job, index: int, made: ChoiceBuilder) -> dict[str, Any]:
    calls = [
        {"id": job.tools.call_id(name, i), "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(made.calls)
    ]
    content = (job.calls[0].text or "") + made.text() if job.echo else made.text()
    thoughts = made.text("reasoning") or None
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": calls,
            "reasoning": thoughts,
            **({} if job.thinking is None else {"reasoning_content": thoughts}),
        },
        "logprobs": chat_logprobs_of(job, made.logprobs),
        "finish_reason": finish_reason(made.finish_reason, bool(calls)),
        "stop_reason": made.stop_reason,
        "token_ids": made.tokens if job.token_ids else None,
        **timings(job, made.timings),
    }


def timings(job: Job, given: Timings | None) -> dict[str, Any]:
    """The field of an answer with its times, if the request asks for them. given: those of its last delta."""
    return {"timings": given and given.to_json()} if job.timed else {}


def bare_details(job: Job, usage: Usage) -> dict[str, Any]:
    """The times and the prompt's details of an answer whose format has no usage, if the request asks for them."""
    details = {"prompt_tokens_details": usage.prompt_details(job.n)} if job.cache_details else {}
    return details | timings(job, usage.timings)


def finish_reason(reason: str | None, called: bool) -> str | None:
    """OpenAI's finish_reason of a chat answer. called: whether it calls tools."""
    return "tool_calls" if called and reason == "stop" else reason


def _answer(kind: str, job: Job, choices: list[dict[str, Any]], usage: Usage, prompt: dict[str, Any]) -> dict[str, Any]:
    """The object around choices. prompt: fields of the prompt that come after usage."""
    return {
        "id": job.id,
        "object": kind,
        "created": job.created,
        "model": job.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": job.system_fingerprint,
        "usage": usage.to_json(job.n),
        **prompt,
        "kv_transfer_params": None,
        "metrics": None,
        **({} if job.params is None else {"sampling_params": job.params}),
    }


def generated(job: Job, choices: Sequence[ChoiceBuilder], usage: Usage) -> dict[str, Any]:
    """The answer of /generate."""
    [made] = choices
    answer = generate_answer(job.id, made.text(), usage.completion, job.began, made.finish_reason, job.model)
    return answer | bare_details(job, usage)


def generate_answer(
    id: str, text: str, num_tokens: int, began: float, finish: str | None, model: str
) -> dict[str, Any]:
    """The answer of /generate, of an engine or of an upstream. began: time.perf_counter() when the request came."""
    return {
        "request_id": id,
        "text": text,
        "generated_tokens": num_tokens,
        "latency_ms": round((time.perf_counter() - began) * 1000, 3),
        "finish_reason": finish,
        "model": model,
    }


# ---------------------------------------------------------------- streams


class _ChoiceChunks(Chunks[Delta]):
    """What completions and chat completions have in common: chunks with `choices`, one choice in each.

    _head: the start of a chunk up to its choice, `data: {"id":...,"choices":[{"index":N,`, by choice.
    """

    def __init__(self, job: Job, kind: str) -> None:
        self._job = job
        self._usage = Usage(job)
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

    def _fields(self, delta: Delta, **fields: object) -> bytes:
        """The last fields of a choice, and its token ids where they are shown."""
        shown: dict[str, Any] = {"token_ids": delta.tokens} if self._job.token_ids else {}
        if delta.finish_reason is not None:
            shown |= timings(self._job, delta.timings)
        return b"," + _json(fields | shown)[1:-1]

    def _used(self) -> bytes:
        return b',"usage":' + _json(self._usage.to_json(self._job.n))


class CompletionChunks(_ChoiceChunks):
    """text_completion chunks. With `echo`, each choice begins with its prompt."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, "text_completion")
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
                self._logprobs[delta.index] = TextLogprobs(self._job.token_text, as_ids=self._job.as_ids)
            logprobs = self._logprobs[delta.index].of(tokens, scores)
        return self._fields(delta, logprobs=logprobs, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)


class GenerateChunks(Chunks[Delta]):
    """Events of /generate: `{"text": ...}` with new text each, the last one with the answer's other fields, too."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._usage = Usage(job)

    def cost(self, ready: Sequence[Delta]) -> int:
        """The cost of these deltas."""
        return PER_TOKEN * len(ready)

    def encode(self, delta: Delta) -> bytes:
        """The event of a delta."""
        job = self._job
        self._usage.add(delta)
        if delta.finish_reason is None:
            return b'data: {"text":' + _json(delta.text) + b"}\n\n"
        made = self._usage.completion
        return event(_json(generate_answer(job.id, delta.text, made, job.began, delta.finish_reason, job.model)))

    def closing(self) -> bytes:
        """The last event."""
        return DONE

    def failed(self, error: Exception) -> bytes:
        """An error, and the last event."""
        return event(error_responses.of(error)) + DONE


class ChatChunks(_ChoiceChunks):
    """chat.completion.chunk chunks: a role, then content, then the finish reason."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, "chat.completion.chunk")
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
        id = _json(self._job.tools.call_id(part.text, part.call))
        return about + b'"id":' + id + b',"type":"function","function":{"name":' + text + b',"arguments":""}}]}'

    def _rest(self, delta: Delta) -> bytes:
        """A choice from its logprobs on."""
        reason = finish_reason(delta.finish_reason, self._called[delta.index])
        stop = {} if delta.finish_reason is None else {"stop_reason": delta.stop_reason}
        return self._fields(delta, logprobs=chat_logprobs_of(self._job, delta.logprobs), finish_reason=reason, **stop)


# ---------------------------------------------------------------- log-probabilities


class TextLogprobs:
    """The format of completions: four parallel lists. One for each choice, since offsets go on from chunk to chunk.

    A token that is part of a character is written `bytes:\\xe2\\x82`, as OpenAI does, so that keys differ.
    """

    __slots__ = ("_as_ids", "_decode", "_offset", "_text")

    def __init__(self, token_text: TokenText, *, as_ids: bool = False) -> None:
        self._text = token_text
        self._as_ids = as_ids
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._offset = 0

    def of(self, tokens: Sequence[int], scores: Sequence[Score]) -> dict[str, list[Any]]:
        """The lists for `tokens`. scores: of each; None where there is none, as for a prompt's first token."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decode(self._text(token)[1]))
        return {
            "text_offset": offsets,
            "token_logprobs": [None if score is None else _finite(score.logprob) for score in scores],
            "tokens": [self._name(token) for token in tokens],
            "top_logprobs": [None if score is None else self._top(score) for score in scores],
        }

    def _top(self, score: TokenLogprobs) -> dict[str, float]:
        named = {self._name(score.token): _finite(score.logprob)}
        return named | {self._name(token): _finite(logprob) for token, logprob in score.top}

    def _name(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        text, data = self._text(token)
        if "�" not in text:
            return text
        return text if text.encode() == data else "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def chat_logprobs(
    scores: Sequence[TokenLogprobs], top: int, token_text: TokenText, *, as_ids: bool = False
) -> dict[str, list[Any]]:
    """The format of chat completions: an object for each token, with its exact bytes and its `top` alternatives."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text, data = token_text(token)
        return {"token": f"token_id:{token}" if as_ids else text, "logprob": _finite(logprob), "bytes": list(data)}

    return {
        "content": [
            one(score.token, score.logprob) | {"top_logprobs": [one(*best) for best in score.top[:top]]}
            for score in scores
        ]
    }


def chat_logprobs_of(job: Job, scores: Sequence[TokenLogprobs]) -> dict[str, list[Any]] | None:
    """The log-probabilities of a chat answer as the request asks for them, None if it does not."""
    return None if job.top is None else chat_logprobs(scores, job.top, job.token_text, as_ids=job.as_ids)


def prompt_logprobs(scores: Sequence[Score], top: int, token_text: TokenText) -> list[dict[str, Any] | None]:
    """vLLM's format for prompts: by token id, the token itself and its `top` alternatives."""
    return [None if score is None else _ranked(score, top, token_text) for score in scores]


def _ranked(score: TokenLogprobs, top: int, token_text: TokenText) -> dict[str, Any]:
    ranked = [(score.token, score.logprob, score.rank)]
    ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(score.top[:top], 1)]
    return {
        str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(token)[0]}
        for token, logprob, rank in ranked
    }


def _finite(logprob: float) -> float:
    # The floor for NaN too.
    return logprob if logprob > _FLOOR else _FLOOR
