"""The native backend from settings: text here, the engine in a process of its own. Needs no torch."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from quire.assembly.early_engine import ENGINE_ENVIRONMENT, ENGINE_MODULE, engine_command
from quire.assembly.place import for_child
from quire.assembly.text import Text
from quire.config import Settings
from quire.engine.client import EngineClient, EngineProcess
from quire.engine.spawn import Spawned
from quire.frontend.interface import ModelCard
from quire.frontend.native import NativeBackend
from quire.observability import prometheus
from quire.observability.engine_metrics import METRICS
from quire.types import UNLIMITED

STANDBY_DELAY = 10.0
"""Seconds after the engine is ready until a standby process is started."""


def build_backend(settings: Settings, text: Text, engine: EngineClient, **more: Any) -> NativeBackend:
    """A backend that answers with the model's text and this engine. more: further fields of NativeBackend."""
    name, *aliases = model_names(settings)
    card = ModelCard(
        id=name,
        aliases=tuple(aliases),
        has_text=text.tokenizer.has_text,
        eos=text.tokenizer.eos,
        infill_ends=() if text.tokenizer.infill is None else text.tokenizer.infill.ends,
        created=int(time.time()),
        max_model_len=UNLIMITED,
        root=settings.model.model,
        defaults=text.defaults,
        tool_parser=text.tool_parser,
        reasoning_parser=text.reasoning_parser,
        pooler=text.pooler,
        template_arguments=frozenset() if text.template is None else text.template.arguments,
        template_kwargs={} if text.template is None else text.template.kwargs,
    )
    return NativeBackend(engine=engine, tokenizer=text.tokenizer, chat=text.template, card=card, **more)


def model_names(settings: Settings) -> list[str]:
    """What clients may call the model, each name once; answers and metrics have the first."""
    return list(dict.fromkeys(settings.model.served_model_name or (settings.model.model,)))


def engine_process(settings: Settings, child: str = ENGINE_MODULE, begun: Spawned | None = None) -> EngineProcess:
    """The engine that these settings describe, in a process of its own, which gets no secrets.

    child: the module that it runs. begun: the process, if it has been started.
    """
    return EngineProcess(
        engine_command(child),
        for_child(settings),
        partial(prometheus.text, METRICS, model=model_names(settings)[0]),
        environment=ENGINE_ENVIRONMENT,
        standby_after=STANDBY_DELAY if settings.server.standby_engine else None,
        begun=begun,
    )
