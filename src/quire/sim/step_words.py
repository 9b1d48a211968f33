"""Plans and the reasons for them in words, as replays show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.scheduler.plan import Plan
from quire.scheduler.sequence import Decision


@dataclass(frozen=True, slots=True)
class StepWords:
    """A plan and why, as recordings have them."""

    opened: Any
    grown: Any
    spans: Any
    masked: Any
    drafts: Any
    why: Sequence[Decision]

    @property
    def plan(self) -> tuple[Any, ...]:
        return (list(self.opened), self.grown, self.spans, self.masked, self.drafts)


def step_words(plan: Plan, ids: Iterable[str], decisions: Sequence[Decision]) -> StepWords:
    """As the recorder writes it. ids: whose spans the plan's are."""
    whose = {span.row: id for id, span in zip(ids, plan.spans, strict=True)}
    opened = [
        (whose[o.row], o.row, len(o.tokens), o.num_computed, o.prompt_length, o.max_length) for o in plan.new_sequences
    ]
    return StepWords(opened, plan.new_blocks, plan.spans, plan.masked_spans, plan.num_drafts, decisions)


def lines(told: StepWords, ids: Sequence[str] = ()) -> list[str]:
    """A plan and why it was made so, a line for each row that opens, feeds or grows. ids: whose the spans are."""
    out = [
        f"open    row {row}: {id}, {tokens} tokens, {start} of them cached, at most {limit}"
        for id, row, tokens, start, _, limit in told.opened
    ]
    drafts = told.drafts or (0,) * len(told.spans)
    for j, ((row, n, rows, logits), draft) in enumerate(zip(told.spans, drafts, strict=False)):
        more = f", drafts {draft}" * bool(draft) + ", masked" * (j in told.masked)
        more += f", logits {logits}" * (logits != rows) + (f"  {ids[j]}" if ids else "")
        out.append(f"feed    row {row}: {n} tokens, sample {rows}{more}")
    out += [f"pages   row {row}: {' '.join(map(str, pages))}" for row, pages in told.grown]
    return out + [f"because {why(decision)}" for decision in told.why]


def why(decision: Sequence[Any]) -> str:
    """A decision as a sentence."""
    what, id, by, n = decision
    return {
        "opened": f"{id} gets a row" + f", {n} tokens found in the prefix cache" * bool(n),
        "follows": f"{id} waits for the first {n} tokens that {by} is computing",
        "waits": f"{id} waits for {by}",
        "preempted": f"{id} is preempted for {by}, with {n} tokens computed",
        "sat-out": f"{id} sits this step out: its {by} are on their way home",
    }.get(what, f"{what} {id} {by} {n}")
