"""The small steps around a forward by Triton kernels, sampling included: see `device` for what they mean."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.ragged import RaggedBatch
from quire.ops.triton import step
from quire.ops.triton.launch import Card
from quire.ops.triton.sampler import sample
from quire.ops.triton.settings import Asked, Settings
from quire.runner.arena import Arena
from quire.runner.traits import CUT, HOT, PENALISED


class TritonSteps:
    """See `DeviceSteps`. Rows with lists of their own (bias, bans, allowed tokens) and masks are the host's."""

    offers = HOT | CUT | PENALISED

    def __init__(self, device: torch.device, *, dependent: bool = True) -> None:
        """dependent: use programmatic dependent launch where the card has it."""
        self.card = Card.of(device, dependent)
        self.views: tuple[Arena, step.Rows, Settings] | None = None
        self.tally = torch.zeros(0, 0, dtype=torch.int32, device=device)

    def scatter(self, data: Tensor, places: Tensor, values: Tensor) -> None:
        step.scatter(data, places, values)

    def stage(self, arena: Arena, batch: RaggedBatch, longest: int) -> None:
        step.stage(self._views(arena)[0], batch, longest, self.card)

    def settle(self, arena: Arena, spans: int, hidden: Tensor, out: Tensor) -> None:
        step.settle(self._views(arena)[0], spans, hidden, out, self.card)

    def choose(self, arena: Arena, logits: Tensor, tokens: Tensor, asked: int) -> None:
        rows, settings = self._views(arena)
        count, prompt = len(tokens), arena.columns["prompt"]
        if asked & PENALISED and not len(self.tally):
            self.tally = self.tally.new_zeros(arena.spans, logits.shape[1])
        which, at = rows.pick_row[:count], rows.pick_at[:count]
        drawn = sample(
            *(logits, which, at, arena.history, prompt, settings, self.card),
            Asked(hot=bool(asked & HOT), cut=bool(asked & CUT), edited=bool(asked & PENALISED)),
            tally=self.tally,
        )
        step.append(rows, drawn.tokens, drawn.state, tokens, self.card)

    def append(self, arena: Arena, tokens: Tensor) -> None:
        step.append(self._views(arena)[0], tokens, None, tokens, self.card)

    def _views(self, arena: Arena) -> tuple[step.Rows, Settings]:
        """The arena as the kernels see it, worked out once: its memory stays where it is."""
        if self.views is None or self.views[0] is not arena:
            self.views = arena, rows_of(arena), settings_of(arena)
        return self.views[1:]


def rows_of(arena: Arena) -> step.Rows:
    spans = arena.spans
    return step.Rows(
        counts=arena.part("counts", 3),
        span_row=arena.part("span_row", spans),
        query_start=arena.part("query_start", spans + 1),
        token_span=arena.part("token_span", 1),
        picked=arena.part("picked", spans),
        pick_row=arena.part("pick_row", spans),
        pick_at=arena.part("pick_at", spans),
        length=arena.columns["length"],
        known=arena.columns["known"],
        table=arena.table,
        history=arena.history,
        ceiling=arena.ceiling,
    )


def settings_of(arena: Arena) -> Settings:
    """No row has a mask or a list."""
    c = arena.columns
    none = torch.full((arena.count + 1,), -1, dtype=torch.int32, device=arena.device)
    empty = torch.zeros(arena.count + 2, dtype=torch.int32, device=arena.device)
    return Settings(
        temperature=c["temperature"],
        stream=c["stream"],
        top_k=c["top_k"],
        top_p=c["top_p"],
        min_p=c["min_p"],
        repetition=c["repetition"],
        frequency=c["frequency"],
        presence=c["presence"],
        masked=none,
        masks=empty[:1].view(1, 1),
        listed=empty,
        token=empty[:1],
        amount=empty[:1].float(),
        until=empty[:1],
    )
