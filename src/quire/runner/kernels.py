"""The small steps around a forward by Triton kernels, sampling included: see `device` for what they mean."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.ragged import RaggedBatch
from quire.ops.triton import draft, step
from quire.ops.triton.launch import Card
from quire.ops.triton.sampler import sample
from quire.ops.triton.settings import Asked, Settings
from quire.runner.arena import Arena, Lane
from quire.runner.device import DROPPED
from quire.runner.traits import CUT, HOT, PENALISED


class Views(NamedTuple):
    """An arena as the kernels see it."""

    arena: Arena
    step: step.Rows
    draft: step.Rows
    settings: Settings


class TritonSteps:
    """See `DeviceSteps`. Rows with lists of their own (bias, bans, allowed tokens) and masks are the host's."""

    def __init__(self, device: torch.device, *, dependent: bool = True, offers: int = HOT | CUT | PENALISED) -> None:
        """dependent: use programmatic dependent launch where the card has it. offers: as `DeviceSteps`, or fewer."""
        self.card, self.offers = Card.of(device, dependent), offers
        self.views: Views | None = None
        self.tally = torch.zeros(0, 0, dtype=torch.int32, device=device)

    def scatter(self, data: Tensor, places: Tensor, values: Tensor) -> None:
        step.scatter(data, places, values)

    def stage(self, arena: Arena, lane: Lane, batch: RaggedBatch, longest: int) -> None:
        step.stage(self._rows(arena, lane), batch, longest, self.card)

    def settle(self, arena: Arena, lane: Lane, spans: int, hidden: Tensor, out: Tensor) -> None:
        step.settle(self._rows(arena, lane), spans, hidden, out, self.card)

    def choose(self, arena: Arena, lane: Lane, logits: Tensor, tokens: Tensor, asked: int) -> None:
        rows, settings = self._rows(arena, lane), self._views(arena).settings
        count, prompt = len(tokens), arena.columns["prompt"]
        if asked & PENALISED and not len(self.tally):
            self.tally = self.tally.new_zeros(arena.picks, logits.shape[1])
        sample(
            *(logits, rows.pick_row[:count], rows.pick_at[:count], arena.history, prompt, settings, self.card),
            Asked(hot=bool(asked & HOT), cut=bool(asked & CUT), edited=bool(asked & PENALISED)),
            tally=self.tally,
            out=tokens,
        )

    def verify(self, arena: Arena, tokens: Tensor) -> None:
        step.verify(self._views(arena).step, tokens, DROPPED, self.card)

    def lookup(self, arena: Arena, chains: int, depth: int, longest: int, shortest: int) -> None:
        draft.lookup(self._views(arena).step, chains, depth, longest, shortest, self.card)

    def route(self, arena: Arena, chains: int, tokens: int, at: int) -> None:
        views = self._views(arena)
        draft.route(views.step, views.draft, chains, tokens, at, self.card)

    def place(self, arena: Arena, tokens: Tensor) -> None:
        draft.place(self._views(arena).draft, tokens, self.card)

    def _rows(self, arena: Arena, lane: Lane) -> step.Rows:
        views = self._views(arena)
        return views.draft if lane is arena.draft else views.step

    def _views(self, arena: Arena) -> Views:
        """The arena as the kernels see it, worked out once: its memory stays where it is."""
        if self.views is None or self.views.arena is not arena:
            self.views = Views(arena, rows_of(arena, arena.step), rows_of(arena, arena.draft), settings_of(arena))
        return self.views


class ForcedSteps(TritonSteps):
    """For random weights, whose drafts are never right: each counts as right with a chance of `rate`, by its place."""

    def __init__(self, device: torch.device, rate: float, *, dependent: bool = True) -> None:
        super().__init__(device, dependent=dependent)
        self.rate = rate

    def verify(self, arena: Arena, tokens: Tensor) -> None:
        draft.force(self._views(arena).step, tokens, self.rate, self.card)
        super().verify(arena, tokens)


def rows_of(arena: Arena, lane: Lane) -> step.Rows:
    return step.Rows(
        **lane._asdict(),
        known=arena.columns["known"],
        table=arena.table,
        history=arena.history,
        chain=arena.chain,
        wanted=arena.wanted,
        ceiling=arena.ceiling,
        drafts=arena.drafts,
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
