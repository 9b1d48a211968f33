"""The only mutable record of a request. Owned by the scheduler alone; everything else sees frozen values.

What the host remembers of a plan in flight, and why it was made so.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from quire.errors import InvalidRequest, StepFailed
from quire.scheduler.block_pool import BlockKey, RadixNode
from quire.scheduler.constraint import FREE, Constraint
from quire.scheduler.plan import NO_TOKEN_ALLOWED, NewSequence, Plan, Span
from quire.types import UNLIMITED, FinishReason, Request, RequestStepOutput, TokenLogprobs, error_output

PrefixKey: TypeAlias = tuple[int, BlockKey]
"""A node of the prefix index (by identity) and the page of tokens that would follow it."""

NO_SPAN = Span(-1, 0, 0, 0)


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens known and tokens computed; a step lets the second catch up with the first.

    There is no prefill phase and no decode phase. `pending` is all that look-ahead costs the host: how many
    sampling spans are in flight, each of which will bring 1 to 1 + drafts tokens.
    """

    request: Request
    arrival: int
    """Arrival number: the tie-break of every queue, and the place a preempted sequence returns to."""
    tokens: list[int]
    max_length: int
    """Length at which it ends: prompt + max_new."""
    constraint: Constraint = FREE
    priority: float = 0
    """The scheduling policy's key; lower is sooner, and from BACKGROUND on it runs only while nothing else does."""

    row: int | None = None
    """Its place on the device; None: it has none."""
    blocks: list[int] = field(default_factory=list)
    capacity: int = 0
    """Positions its pages can take; MANY once it can never need another."""
    num_unscheduled: int = 0
    """Tokens the device knows and no plan has fed: the prompt's rest, then always 1, the feedback."""
    num_drafts: int = 0
    """Drafts the device holds for it: 0 until it has sampled once."""
    num_inflight: int = 0
    max_inflight: int = 0
    """Most tokens that the pending spans can bring."""
    num_computed: int = 0
    """Committed: K/V written, and of the right tokens."""
    draft_tokens: list[int] = field(default_factory=list)
    """Told to the host for masked rows only."""
    span: Span = NO_SPAN
    """The last one planned. A decoding row's span never changes, so it is made once."""
    prefix_node: RadixNode | None = None
    """Where its next full page goes in the prefix index..."""
    next_cache_at: int = UNLIMITED
    """...and the length at which it does."""
    num_cached: int = 0
    """Tokens found in the prefix cache when its row was last opened."""
    prompt_logprobs_sent: int = 0
    """Prompt positions whose log-probabilities have been reported."""
    needs_prompt_logits: bool = False
    """Still wants logits of prompt tokens."""
    preemptions: int = 0
    inflight_prefix: PrefixKey | None = None
    """The next page of its prompt, where nobody else has claimed it."""
    waiters: list[tuple[int, Sequence]] = field(default_factory=list)
    """Who waits for pages of this one's prompt, and up to which length: they will hit them."""
    finish_reason: FinishReason | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    def new_sequence(self, row: int) -> NewSequence:
        """What the device is told when it gets its row."""
        request = self.request
        return NewSequence(
            row=row,
            tokens=tuple(self.tokens),
            num_computed=self.num_computed,
            prompt_length=len(request.prompt),
            sampling=request.sampling,
            seed=request.seed,
            choice=request.choice,
            stop_token_ids=request.stop,
            max_length=self.max_length,
        )

    def error_output(self, reason: str) -> RequestStepOutput:
        """What is told of an error in its row. Where nothing was allowed, a field of the request is to blame."""
        sampling = self.request.sampling
        structure, allowed = sampling.structured_outputs, sampling.allowed_token_ids
        field = structure.param if structure else "bad_words" if allowed is None else "allowed_token_ids"
        if reason == NO_TOKEN_ALLOWED and (ended := self.constraint.why()):
            reason = f"{field}: the answer cannot go on by it: {ended}"
            return error_output(self.request.id, InvalidRequest(reason, param=field))
        error = InvalidRequest(reason, param=field) if reason == NO_TOKEN_ALLOWED else StepFailed(reason)
        return error_output(self.request.id, error)

    def __post_init__(self) -> None:
        self.needs_prompt_logits = self.request.sampling.prompt_logprobs is not None and self.prompt_length > 1

    def take_prompt_logprobs(self, rows: Seq[TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
        """Those of `rows`, of prompt positions from computed + 1, that were not told before a preemption."""
        prompt = self.prompt_length
        unsent = tuple(rows[max(0, self.prompt_logprobs_sent - self.num_computed) : prompt - 1 - self.num_computed])
        self.prompt_logprobs_sent = max(self.prompt_logprobs_sent, min(self.num_computed + len(rows), prompt - 1))
        self.needs_prompt_logits = self.prompt_logprobs_sent < prompt - 1
        return unsent

    def truncate_at_stop(self, new_tokens: list[int]) -> tuple[FinishReason, int | None]:
        """End at the first stop token of `got`, the newest tokens, or at the limit; what a verify brought past it goes.

        Why it ended, and the stop token if that was it.
        """
        base, stop = len(self.tokens) - len(new_tokens), self.request.stop
        end = next(j for j, t in enumerate(new_tokens, 1) if t in stop or base + j == self.max_length)
        last = new_tokens[end - 1]
        del new_tokens[end:], self.tokens[base + end :]
        return ("stop", last) if last in stop else ("length", None)


class Decision(NamedTuple):
    """Why something happened to a request. what: opened (n = prefix tokens hit), follows (whose first n tokens it needs
    too), waits, preempted, sat-out.

    by: the request it happened for (who needed the pages, who computes them), or what is missing: seats (the cap on
    sequences), rows (one is still on its way home), pages, budget (tokens a step), gap (others run), grammar (it is
    being compiled).
    """

    kind: str
    request_id: str
    cause: str = ""
    n: int = 0


class InflightStep(NamedTuple):
    """The host's half of a plan in flight: whose spans, which wait for masks, who goes home with it, and why."""

    plan: Plan
    seqs: list[Sequence]
    masked_seqs: list[Sequence]
    deferred_frees: list[Sequence]
    decisions: list[Decision]
