"""The engine of one replica: a process of its own, beside the actor that Ray Serve runs, watches and restarts."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray import serve

from quire.assembly.backend import engine_process
from quire.assembly.early_engine import ENGINE_MODULE
from quire.config import Settings
from quire.errors import QuireError
from quire.replicas import messages
from quire.replicas.messages import Addressed, Prompt, Report
from quire.types import FinishReason, RequestStepOutput

log = logging.getLogger("ray.serve")

_MAX_FRAMES = 64
"""Frames of the live page that wait for a viewer."""
_UNWATCHED = 5.0
"""Seconds without a viewer until no more frames are made."""


class _Stream:
    """The requests of one call, and what their caller has not been sent."""

    def __init__(self, ids: set[str]) -> None:
        self.open = ids
        self.ready: list[RequestStepOutput] = []
        self.news = asyncio.Event()


class EngineReplica:
    """One engine, started with the replica. Where it ends, the replica ends with it, and Ray Serve starts another: a
    replica that cannot answer is a replica that is gone, whatever the reason.

    options: settings by name. child: the module that the engine's process runs.
    """

    async def __init__(self, options: Mapping[str, Any], child: str = ENGINE_MODULE) -> None:  # type: ignore[misc]
        context = serve.get_replica_context()
        self._name = str(context.replica_tag)
        self._rank = 0 if context.rank is None else int(context.rank.rank)
        self._engine = engine_process(_own_folder(Settings.of(**options), self._rank), child)
        self._engine.subscribe(self._on_tokens, self._on_death)
        self._engine.on_frames(self._on_frame)
        self._streams: dict[str, _Stream] = {}
        self._queued: dict[str, int] = {}
        """Prompt tokens by request, until its first token."""
        self._frames: list[tuple[bytes, bool]] = []
        self._unwatch: asyncio.TimerHandle | None = None
        try:
            self._about = await self._engine.start()
        except QuireError as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        log.info("engine of replica %d runs as process %d", self._rank, self._engine_pid())

    # ---------------------------------------------------------------- requests

    async def generate(self, prompt: Prompt, message: bytes) -> AsyncGenerator[bytes, None]:
        """Answer requests: first this replica's name, then outputs as they come. Closing it aborts what is left."""
        requests = list(messages.asked(message))
        ids = {request.id for request in requests}
        stream = _Stream(set(ids))
        self._streams |= dict.fromkeys(ids, stream)
        self._queued[requests[0].id] = len(requests[0].prompt)
        try:
            self._engine.submit(requests)
            yield self._name.encode()
            while stream.open or stream.ready:
                await stream.news.wait()
                stream.news.clear()
                ready, stream.ready = stream.ready, []
                if ready:
                    yield messages.encode(ready)
        finally:
            for id in ids:
                self._streams.pop(id, None)
                self._queued.pop(id, None)
            if stream.open:
                self._engine.abort(list(stream.open))

    async def abort(self, to: Addressed, ids: list[str], why: FinishReason) -> None:
        """End these for this reason; unknown ids are ignored."""
        self._engine.abort(ids, why)
        for id in ids:
            if (stream := self._streams.get(id)) is not None:
                stream.open.discard(id)
                stream.news.set()

    def _on_tokens(self, batch: Sequence[RequestStepOutput]) -> None:
        for output in batch:
            if output.tokens or output.finish is not None:
                self._queued.pop(output.id, None)
            stream = self._streams.get(output.id)
            if stream is not None:
                stream.ready.append(output)
                if output.finish is not None:
                    stream.open.discard(output.id)
                stream.news.set()

    def _on_death(self, reason: str) -> None:
        log.error("%s: this replica ends, and another one is started", reason)
        logging.shutdown()
        os._exit(1)

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        self._engine.reset_prefix_cache()

    # ---------------------------------------------------------------- its state

    async def describe(self) -> bytes:
        """The engine's `Description`."""
        return messages.encode(self._about)

    async def report(self, metrics: bool) -> bytes:
        """Its `Report`. metrics: with those of /metrics."""
        return messages.encode(
            Report(
                replica=self._name,
                rank=self._rank,
                node=os.uname().nodename,
                pid=os.getpid(),
                engine_pid=self._engine_pid(),
                alive=self._engine.alive(),
                queued_tokens=sum(self._queued.values()),
                stats=dict(self._engine.snapshot()),
                metrics=dict(self._engine.metrics()) if metrics else {},
            )
        )

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaler decides by, for Ray Serve."""
        return {"queued_tokens": float(sum(self._queued.values()))}

    def check_health(self) -> None:
        """For Ray Serve, which replaces a replica that raises here several times in a row."""
        if not self._engine.alive():
            raise RuntimeError("the engine makes no progress")

    def _engine_pid(self) -> int:
        return -1 if self._engine.process is None else self._engine.process.pid

    # ---------------------------------------------------------------- live page

    async def frames(self, to: Addressed, whole: bool) -> bytes:
        """Frames of the live page since the last call, (JSON, whether it is whole) each. whole: begin with one."""
        loop = asyncio.get_running_loop()
        if self._unwatch is None or whole:
            self._frames.clear()
            self._engine.watch(True)
        if self._unwatch is not None:
            self._unwatch.cancel()
        self._unwatch = loop.call_later(_UNWATCHED, self._stop_watching)
        frames, self._frames = self._frames, []
        return messages.encode(frames)

    def _on_frame(self, frame: bytes, whole: bool) -> None:
        if len(self._frames) < _MAX_FRAMES:
            self._frames.append((frame, whole))

    def _stop_watching(self) -> None:
        self._unwatch = None
        self._engine.watch(False)

    async def explain(self, id: str) -> bytes:
        """What happened to an answer, as JSON: see `LiveViewClient`."""
        return await self._engine.explain(id)


def _own_folder(settings: Settings, rank: int) -> Settings:
    """The settings with folders of this replica's own, by its rank, so that the next one of this rank finds them."""
    folder = settings.cache.kv_offloading_dir
    if folder is None:
        return settings
    return settings.changed(kv_offloading_dir=str(Path(folder).expanduser() / f"replica-{rank}"))
