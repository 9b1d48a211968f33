"""The only mutable record of a request. Owned by the scheduler alone; everything else sees frozen values."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TypeAlias

from quire.core.constraint import FREE, Constraint
from quire.core.plan import STUCK, Open, Span
from quire.core.reuse import Key, Node
from quire.errors import InvalidRequest, StepFailed
from quire.values import MANY, FinishReason, Request, TokenLogprobs, Tokens, failed

Place: TypeAlias = tuple[int, Key]
"""A node of the prefix index (by identity) and the page of tokens that would follow it."""

NOWHERE = Span(-1, 0, 0, 0)


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens known and tokens computed; a step lets the second catch up with the first.

    There is no prefill phase and no decode phase. `pending` is all that look-ahead costs the host: how many
    sampling spans are in flight, each of which will bring 1 to 1 + drafts tokens.
    """

    request: Request
    order: int
    """Arrival number: the tie-break of every queue, and the place a preempted sequence returns to."""
    tokens: list[int]
    limit: int
    """Length at which it ends: prompt + max_new."""
    constraint: Constraint = FREE
    priority: int = 0
    """As the policy sees it: the request's under 'priority', 0 under 'fcfs', but for those that run in the gaps."""

    row: int | None = None
    """Its place on the device; None: it has none."""
    blocks: list[int] = field(default_factory=list)
    room: int = 0
    """Positions its pages can take; MANY once it can never need another."""
    unfed: int = 0
    """Tokens the device knows and no plan has fed: the prompt's rest, then always 1, the feedback."""
    drafting: int = 0
    """Drafts the device holds for it: 0 until it has sampled once."""
    pending: int = 0
    reach: int = 0
    """Most tokens that the pending spans can bring."""
    computed: int = 0
    """Committed: K/V written, and of the right tokens."""
    drafts: list[int] = field(default_factory=list)
    """Told to the host for masked rows only."""
    span: Span = NOWHERE
    """The last one planned. A decoding row's span never changes, so it is made once."""
    node: Node | None = None
    """Where its next full page goes in the prefix index..."""
    mark: int = MANY
    """...and the length at which it does."""
    hits: int = 0
    """Tokens found in the prefix cache when its row was last opened."""
    told: int = 0
    """Prompt positions whose log-probabilities have been reported."""
    asks: bool = False
    """Still wants logits of prompt tokens."""
    preemptions: int = 0
    claim: Place | None = None
    """The next page of its prompt, where nobody else has claimed it."""
    followers: list[tuple[int, Sequence]] = field(default_factory=list)
    """Who waits for pages of this one's prompt, and up to which length: they will hit them."""
    finish: FinishReason | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    def opening(self, row: int) -> Open:
        """What the device is told when it gets its row."""
        request = self.request
        return Open(
            row=row,
            tokens=tuple(self.tokens),
            start=self.computed,
            prompt=len(request.prompt),
            sampling=request.sampling,
            seed=request.seed,
            choice=request.choice,
            stop=request.stop,
            limit=self.limit,
        )

    def failed(self, why: str) -> Tokens:
        """What is told of an error in its row. Where nothing was allowed, a field of the request is to blame."""
        sampling = self.request.sampling
        structure, allowed = sampling.structured_outputs, sampling.allowed_token_ids
        field = structure.param if structure else "bad_words" if allowed is None else "allowed_token_ids"
        if why == STUCK and (ended := self.constraint.why()):
            why = f"{field}: the answer cannot go on by it: {ended}"
            return failed(self.request.id, InvalidRequest(why, param=field))
        blame = InvalidRequest(why, param=field) if why == STUCK else StepFailed(why)
        return failed(self.request.id, blame)

    def __post_init__(self) -> None:
        self.asks = self.request.sampling.prompt_logprobs is not None and self.prompt_length > 1

    def tell(self, rows: Seq[TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
        """Those of `rows`, of prompt positions from computed + 1, that were not told before a preemption."""
        prompt = self.prompt_length
        fresh = tuple(rows[max(0, self.told - self.computed) : prompt - 1 - self.computed])
        self.told = max(self.told, min(self.computed + len(rows), prompt - 1))
        self.asks = self.told < prompt - 1
        return fresh

    def cut(self, got: list[int]) -> tuple[FinishReason, int | None]:
        """End at the first stop token of `got`, the newest tokens, or at the limit; what a verify brought past it goes.

        Why it ended, and the stop token if that was it.
        """
        base, stop = len(self.tokens) - len(got), self.request.stop
        end = next(j for j, t in enumerate(got, 1) if t in stop or base + j == self.limit)
        last = got[end - 1]
        del got[end:], self.tokens[base + end :]
        return ("stop", last) if last in stop else ("length", None)
