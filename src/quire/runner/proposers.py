"""Drafting on the device: as `drafts`, but for rows that the host knows a step late: it says what, the device does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.core.plan import Plan
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.runner.arena import Arena
from quire.runner.device import DeviceSteps
from quire.runner.graphs import Key, coarse, crowd, padding
from quire.runner.results import Model
from quire.runner.rows import Ints, Rows, Shape
from quire.runner.traits import CUT, HOT


class Desk(NamedTuple):
    """What a proposer works with. batch: of the largest step; a forward is fed its beginning."""

    arena: Arena
    steps: DeviceSteps
    batch: RaggedBatch
    longest: int


class Proposer(Protocol):
    """Puts drafts behind histories, there. depth: the most tokens it drafts."""

    depth: int

    def admit(self, plan: Plan, shape: Shape, rows: Rows) -> None:
        """A plan's rows are opened and its spans will sample."""

    def keys(self, shape: Shape, wanted: Ints, asked: int, room: int) -> list[Key]:
        """What to run once a step has sampled. wanted [Q]: drafts for each chain, some above 0. room: tokens a forward
        can feed."""

    def run(self, key: Key, desk: Desk) -> None:
        """What a key stands for: depends on nothing else but the arena."""

    def kv_bytes(self) -> int:
        """Of a page."""

    def reset(self) -> None:
        """The device's rows and K/V are lost."""


class NoProposer:
    """No speculation."""

    depth = 0

    def admit(self, plan: Plan, shape: Shape, rows: Rows) -> None:
        """Nothing is kept."""

    def keys(self, shape: Shape, wanted: Ints, asked: int, room: int) -> list[Key]:
        return []

    def run(self, key: Key, desk: Desk) -> None:
        """Nothing is asked for."""

    def kv_bytes(self) -> int:
        return 0

    def reset(self) -> None:
        """Nothing is kept."""


class NgramProposer(NoProposer):
    """Prompt look-up: see `ngram`."""

    def __init__(self, depth: int, *, longest: int = 4, shortest: int = 2) -> None:
        self.depth, self.longest, self.shortest = depth, longest, shortest

    def keys(self, shape: Shape, wanted: Ints, asked: int, room: int) -> list[Key]:
        return [Key(padding(len(wanted)), padding(len(wanted)), self.depth, 0, "draft")]

    def run(self, key: Key, desk: Desk) -> None:
        desk.steps.lookup(desk.arena, key.spans, key.most, self.longest, self.shortest)


class ModelProposer:
    """A draft model over the same page tables: see `drafter.ModelDrafter`.

    Each draft is sampled with the settings and the noise that its place will be sampled with. A row's column `done`
    counts the tokens whose K/V the draft has; the host keeps a bound on how many it lacks, for it fixes shapes. After
    drafting without a break that is two at most: one sampled and, where all drafts were right, the last of them.
    """

    def __init__(self, model: Model, kv: Sequence[LayerKV], *, depth: int, rows: int, device: torch.device) -> None:
        """kv: one LayerKV a layer of the draft, as many pages as the target's. rows: places on the device."""
        self.model, self.kv, self.depth = model, kv, depth
        self.behind = np.zeros(rows, dtype=np.intp)
        self.tokens = torch.zeros(padding(rows), dtype=torch.int32, device=device)
        self.picked: Tensor | None = None

    def admit(self, plan: Plan, shape: Shape, rows: Rows) -> None:
        for one in plan.opened:
            self.behind[one.row] = len(one.tokens)
        row = shape.sampled_row
        self.behind[row] = np.maximum(self.behind[row] + shape.rows[shape.samples], 1)

    def keys(self, shape: Shape, wanted: Ints, asked: int, room: int) -> list[Key]:
        row, spans, out = shape.sampled_row[wanted > 0], len(wanted), []
        if (self.behind[row] > 2).any():
            missing = int((self.behind[row] - 1).sum())
            while missing > 0:
                fed = coarse(min(missing, room))
                out.append(Key(fed, crowd(spans), fed, 0, "follow"))
                missing -= fed
        self.behind[row] = 1 - wanted[wanted > 0]
        asked |= HOT | CUT if asked else 0  # few kinds to capture; who asks for less is answered the same
        return [*out, Key(padding(2 * padding(spans)), padding(spans), int(wanted.max()), asked, "draft")]

    def run(self, key: Key, desk: Desk) -> None:
        if key.kind == "follow":
            self._feed(key, desk, key.tokens, -1, key.most)
            return
        tokens, lane = self.tokens[: key.spans], desk.arena.draft
        for i in range(key.most):
            hidden = self._feed(key, desk, key.spans if i else key.tokens, i, 1 if i else 2)
            desk.steps.choose(desk.arena, lane, self.model.logits(hidden), tokens, key.asked)
            desk.steps.place(desk.arena, tokens)

    def _feed(self, key: Key, desk: Desk, tokens: int, at: int, most: int) -> Tensor:
        """[S, hidden] behind each row's last token fed."""
        arena, whole, spans = desk.arena, desk.batch, key.spans
        desk.steps.route(arena, spans, tokens, at)
        batch = replace(
            whole,
            tokens=whole.tokens[:tokens],
            positions=whole.positions[:tokens],
            slots=whole.slots[:tokens],
            query_start=arena.draft.query_start[: spans + 1],
            kv_len=whole.kv_len[:spans],
            page_table=whole.page_table[:spans],
            max_query=most,
        )
        desk.steps.stage(arena, arena.draft, batch, desk.longest)
        hidden = self.model.forward(batch, self.kv)
        if self.picked is None:
            self.picked = hidden.new_zeros(len(self.tokens), hidden.shape[1])
        picked = self.picked[: min(spans, tokens)]
        desk.steps.settle(arena, arena.draft, spans, hidden, picked)
        return picked

    def kv_bytes(self) -> int:
        return sum(2 * each.k[0].nbytes for each in self.kv)

    def reset(self) -> None:
        self.behind[:] = 0
