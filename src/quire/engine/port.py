"""The engine's surface as the front sees it, wherever the engine runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from quire.engine.executor import Description
from quire.values import FinishReason, Request, RequestStepOutput

OnTokens = Callable[[Sequence[RequestStepOutput]], None]
OnDeath = Callable[[str], None]
OnFrame = Callable[[bytes, bool], None]


class EngineClient(Protocol):
    """Used from one event loop. Nothing here blocks; answers come through `subscribe`."""

    async def start(self) -> Description:
        """Return when requests are taken. Raises InvalidModel, InvalidConfig or Unavailable."""

    async def close(self) -> None: ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. One that can never run comes back as Tokens with finish 'error'."""

    def abort(self, ids: Sequence[str], why: FinishReason = "abort") -> None:
        """End these, for this reason; their pages are free within a step. Unknown ids are fine."""

    def reset_prefix_cache(self) -> None:
        """Requests submitted from now on find nothing computed before. Raises Unavailable where there is no engine."""

    def subscribe(self, on_tokens: OnTokens, on_death: OnDeath) -> None:
        """`on_tokens` hears once a step, or once of several; `on_death` when everything in flight was lost, with the
        reason."""

    def snapshot(self) -> Mapping[str, Any]:
        """The engine's latest counters: `Engine.metrics_snapshot`, plain JSON."""

    def prometheus(self) -> bytes:
        """The engine's share of /metrics."""

    def alive(self) -> bool:
        """Progress: nothing is outstanding, or steps are being committed."""

    def ready(self) -> bool: ...


class LiveViewClient(Protocol):
    """The front's side of an engine's window."""

    def watch(self, on: bool) -> None:
        """Frames from now on, a whole one first; or none any more. Lasts over the engine's restarts."""

    def on_frames(self, on_frame: OnFrame) -> None:
        """`on_frame` hears every frame, as JSON, and whether it is a whole picture."""

    async def explain(self, id: str) -> bytes:
        """What happened to a request (to all known, if `id` is empty), as JSON. Raises Unavailable."""
