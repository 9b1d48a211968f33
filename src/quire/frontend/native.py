"""The backend of the native engine: tokenize, submit to the engine, detokenize."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from quire import errors
from quire.engine.client import EngineClient
from quire.engine.executor import Description
from quire.errors import DeadlineExceeded, Interrupted, InvalidRequest, Overloaded, TooLarge, Unavailable
from quire.frontend.interface import Call, Delta, DrainingService, ModelCard
from quire.frontend.pooling import longest
from quire.frontend.processor import (
    ActiveRequest,
    OutputProcessor,
    delta_of_error,
    output_processor,
    requests,
    timings,
)
from quire.observability.observer import FrontendObserver
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.detokenizer import StopStrings
from quire.tokenization.no_tokenizer import needs_text
from quire.tokenization.tokenizer import PoolingText, PoolingTokens, Tokenizer
from quire.types import BACKGROUND, UNLIMITED, FinishedRequest, FinishReason, RequestStepOutput


def _image_bytes(call: Call) -> int:
    """Bytes of a call's pixels."""
    return sum(len(image.pixels) for image in call.images)


def _initial_stats(about: Description) -> dict[str, Any]:
    """`/stats` before the engine's first step."""
    counts = ("waiting_requests", "active_requests", "completed_requests", "generated_tokens", "decode_steps")
    cache = {"page_size": about.block_size, "max_pages": about.num_blocks, "used_pages": 0}
    cache |= {"free_pages": about.num_blocks, "active_sequences": 0, "pressure_events": 0, "evictions": 0}
    return {
        **dict.fromkeys(counts, 0),
        "average_batch_size": 0.0,
        "max_batch_observed": 0,
        "cache": {**cache, "utilization": 0.0, "policy": "lru"},
    }


@dataclass(kw_only=True, eq=False)
class NativeBackend(DrainingService):
    """A Backend of one engine.

    card: its max_model_len and vocab_size are the checkpoint's until `start`, then the engine's. max_queued: answers
    that may wait beyond those running. max_image_bytes: of pixels, of all calls that wait or run. max_unread: deltas of
    a call that may wait for their reader; one more aborts the call. clock: in seconds, also the engine's.
    """

    engine: EngineClient
    tokenizer: Tokenizer
    card: ModelCard
    chat: ChatTemplate | None = None
    observer: FrontendObserver = field(default_factory=FrontendObserver)
    max_queued: int = 2048
    max_image_bytes: int = UNLIMITED
    max_unread: int = 1 << 15
    clock: Callable[[], float] = time.monotonic
    seeds: Callable[[], int] = lambda: secrets.randbits(63)
    _active: dict[str, tuple[ActiveRequest, OutputProcessor]] = field(default_factory=dict)
    _num_background: int = 0
    """The number of those with background priority."""
    _requests: dict[ActiveRequest, None] = field(default_factory=dict)
    """Those that have a reader, oldest first."""
    _stats: dict[str, Any] = field(default_factory=dict)
    description: Description | None = None
    """What the engine's executor can do, once it is started."""

    # ---------------------------------------------------------------- life cycle

    async def start(self) -> None:
        """See Service."""
        self.engine.subscribe(self._on_tokens, self._on_death)
        about = await self.engine.start()
        pooler = self.card.pooler
        limit = longest(about, pooler)
        self.card = replace(
            self.card,
            max_model_len=min(self.card.max_model_len, limit),
            vocab_size=about.vocab_size // pooler.token_types,
            pools=about.supports_pooling,
            device=about.device,
        )
        self._stats, self.description = _initial_stats(about), about

    async def close(self) -> None:
        """See Service."""
        self._draining = True
        self._abort_all()
        await self.engine.close()

    def alive(self) -> bool:
        """See Service."""
        return self.engine.alive()

    def ready(self) -> bool:
        """See Service."""
        return self.engine.ready() and not self._draining

    # ---------------------------------------------------------------- text

    def model(self) -> ModelCard:
        """See Backend."""
        return self.card

    def encode(self, text: str, *, add_special_tokens: bool = True, suffix: str = "") -> tuple[int, ...]:
        """See Backend."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, suffix=suffix)

    def encode_inputs(
        self, inputs: Sequence[PoolingText], *, add_special_tokens: bool = True, most: int | None = None
    ) -> list[PoolingTokens]:
        """See Backend."""
        return self.tokenizer.encode_inputs(inputs, add_special_tokens=add_special_tokens, most=most)

    def decode(self, tokens: tuple[int, ...], *, skip_special_tokens: bool = False) -> str:
        """See Backend."""
        return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> tuple[str, bytes]:
        """See Backend."""
        return self.tokenizer.token_text(token)

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """See Backend."""
        if not self.tokenizer.has_text:
            raise needs_text("messages")
        if self.chat is None:
            raise InvalidRequest(
                f"{self.card.id} has no chat template: use /v1/completions, or start the server with --chat-template",
                param="messages",
                code="no_chat_template",
            )
        return self.chat.render(messages, **options)

    # ---------------------------------------------------------------- calls

    def answer(self, call: Call) -> ActiveRequest:
        """See Backend."""
        now = self.clock()
        self._check_ready()
        asked = requests(
            call,
            tokenizer=self.tokenizer,
            limit=self.card.max_model_len,
            seed=self.seeds(),
            deadline=now + call.timeout,
            pooler=self.card.pooler,
        )
        if len(asked) > self.max_queued:
            raise InvalidRequest(
                f"n ({len(asked)}) exceeds the size of this server's queue ({self.max_queued})", param="n"
            )
        self.admit(len(asked))
        self._admit_images(call)
        live = ActiveRequest(call, now, asked[0].max_new_tokens, self._on_reader_closed)
        stops = StopStrings(call.sampling.stop)
        live.processors = {request.id: output_processor(request, self.tokenizer, stops) for request in asked}
        # Nothing that may fail comes after it, or the engine would run requests without a reader.
        self.engine.submit(asked)
        for kind in call.omitted_tools:
            self.observer.on_omitted_tool(kind)
        if call.header is not None:
            self.observer.on_prompt_header(call.header)
        self._active |= {id: (live, made) for id, made in live.processors.items()}
        self._num_background += len(asked) * (call.priority >= BACKGROUND)
        self._requests[live] = None
        if call.timeout < math.inf:
            live.timer = asyncio.get_running_loop().call_later(call.timeout, self.end, live, "timeout")
        return live

    def _admit_images(self, call: Call) -> None:
        """Raises Overloaded where there is no room for a call's pixels, TooLarge where there never will be."""
        size = _image_bytes(call)
        if size > self.max_image_bytes:
            raise TooLarge(
                f"the images have {size:,} bytes of pixels together, and at most {self.max_image_bytes:,} are held "
                "(--max-pending-image-bytes): send fewer",
                param="messages",
            )
        held = sum(map(_image_bytes, (live.call for live in self._requests))) if size else 0
        if held + size > self.max_image_bytes:
            self.observer.on_refused("max_pending_image_bytes")
            raise Overloaded(
                f"requests that wait or run hold {held:,} bytes of pixels, and these are {size:,} more, but at most "
                f"{self.max_image_bytes:,} are held",
                retry_after=self._drain_rate.wait(1, self.clock()),
            )

    def _check_ready(self) -> None:
        """Raises Unavailable while there is no engine, and when the server is shutting down."""
        if not self.ready():
            self.observer.on_refused("draining" if self._draining else "unavailable")
            raise Unavailable("the server is shutting down" if self._draining else "the engine is not ready")

    def admit(self, more: int, coming: int = 0) -> None:
        """See Backend."""
        self._check_ready()
        waiting = len(self._active) + coming - self.engine.snapshot().get("active_requests", 0)
        # Background requests delay no others.
        if waiting + more > self.max_queued:
            waiting = max(0, waiting - self._num_background)
        if waiting + more > self.max_queued:
            self.observer.on_refused("max_num_queued_reqs")
            raise Overloaded(
                f"{waiting} answers wait and {more} more are asked for, but at most {self.max_queued} may wait",
                retry_after=self._drain_rate.wait(waiting, self.clock()),
            )

    def _remove(self, id: str) -> None:
        live, _ = self._active.pop(id)
        self._num_background -= live.call.priority >= BACKGROUND

    # ---------------------------------------------------------------- callbacks of the engine

    def _on_tokens(self, batch: Sequence[RequestStepOutput]) -> None:
        """One step of the engine: each answer gets its delta, and each reader is called once."""
        now = self.clock()
        observer = self.observer
        over: defaultdict[FinishReason, list[str]] = defaultdict(list)
        gaps: defaultdict[tuple[float, int], int] = defaultdict(int)
        woken: list[ActiveRequest] = []
        unread: list[ActiveRequest] = []
        began = time.perf_counter()
        for event in batch:
            active = self._active.get(event.id)
            made = len(event.tokens)
            # It ended here before the engine knew.
            if active is None:
                if made:
                    observer.on_surplus(made)
                continue
            live, one = active
            if made:
                if one.last is None:
                    one.first = now
                    observer.on_first(now - live.arrived)
                else:
                    gaps[one.last, made] += 1
                one.last = now
            counted = one.count
            delta = delta_of_error(one, event)
            if live.call.spend is not None:
                live.call.spend(one.count - counted)
            before, began = began, time.perf_counter()
            one.detokenize_seconds += began - before
            if delta is None:
                continue
            if not live.deltas:
                woken.append(live)
            if delta.finish_reason is not None:
                if event.finish is None:
                    over[cast(FinishReason, delta.finish_reason)].append(event.id)
                self._finish(live, one, delta, now)
            else:
                live.deltas.append(delta)
                if len(live.deltas) > self.max_unread:
                    unread.append(live)
        for (last, made), answers in gaps.items():
            observer.on_gap(now - last, made, answers)
        for live in unread:
            self.end(live, "abort")
        for why, ids in over.items():
            self.engine.abort(ids, why)
        for live in woken:
            live.on_ready()

    def _finish(self, live: ActiveRequest, answer: OutputProcessor, delta: Delta, now: float) -> None:
        """An answer ended. An error ends the whole call, and so does a deadline before any token."""
        reason = delta.finish_reason or ""
        self._remove(answer.id)
        del live.processors[answer.id]
        live.num_tokens += answer.count
        self._drain_rate.record(now)
        if answer.num_surplus:
            self.observer.on_surplus(answer.num_surplus)
        self._report_end(live, answer, reason, now)
        if reason == "error":
            why = delta.error or "the engine could not run this request"
            live.error = errors.of(delta.status, why, param=delta.param)
            return
        live.deltas.append(delta._replace(timings=timings(answer, len(live.call.prompt), live.arrived, now)))
        if reason == "timeout" and not live.processors and not live.num_tokens:
            live.deltas.clear()
            live.error = DeadlineExceeded(f"nothing was made within {live.call.timeout:g} s", param="timeout")

    def _report_end(self, live: ActiveRequest, answer: OutputProcessor, reason: str, now: float) -> None:
        self.observer.on_end(
            FinishedRequest(
                live.call.id,
                answer.index,
                reason,
                live.call.sampling,
                live.call.trace_context,
                prompt=len(live.call.prompt),
                cached=answer.cached,
                tokens=answer.count,
                max_tokens=live.max_new,
                first=None if answer.first is None else answer.first - live.arrived,
                seconds=now - live.arrived,
                detokenize_seconds=answer.detokenize_seconds,
            )
        )

    def _on_death(self, reason: str) -> None:
        """The engine ended, and all its requests with it."""
        for live in list(self._requests):  # a reader may close its stream when it is called
            if self._drop(live, "error"):
                live.error = Interrupted(f"the engine stopped while this request was running: {reason}")
                live.on_ready()

    # ---------------------------------------------------------------- aborts

    def end(self, live: ActiveRequest, reason: FinishReason) -> None:
        """End every answer of a call that has not ended; its stream has what was generated, and this finish_reason."""
        now = self.clock()
        over = list(live.processors.values())
        for answer in over:
            self._finish(live, answer, answer.end(reason), now)
        live.on_ready()
        self.engine.abort([answer.id for answer in over], reason)

    def _drop(self, live: ActiveRequest, reason: FinishReason) -> list[str]:
        """Forget the answers of a call that have not ended. Returns their ids."""
        now = self.clock()
        ids = list(live.processors)
        for answer in live.processors.values():
            self._remove(answer.id)
            self._report_end(live, answer, reason, now)
        live.processors.clear()
        return ids

    def _abort_all(self) -> None:
        for live in list(self._requests):
            if live.processors:
                self.end(live, "abort")

    def _on_reader_closed(self, live: ActiveRequest) -> None:
        """The reader closed the stream: finished, failed, or disconnected. Blocks are free within a step."""
        if live.timer is not None:
            live.timer.cancel()
        if ids := self._drop(live, "abort"):
            self.engine.abort(ids)
        self._requests.pop(live, None)
        if not self._requests:
            self._empty.set()

    # ---------------------------------------------------------------- statistics

    def stats(self) -> dict[str, Any]:
        """See Service."""
        counts = {**self._stats, **self.engine.snapshot()}
        return {
            "running": self.engine.ready(),
            "model": self.card.id,
            **counts,
            "latency_ms": self.observer.latencies(),
        }

    def load(self) -> int:
        """See Service."""
        return len(self._requests)

    def reset_prefix_cache(self) -> None:
        """See Backend."""
        self.engine.reset_prefix_cache()

    def metrics(self) -> bytes:
        """See Service."""
        return self.engine.prometheus() + self.observer.text()
