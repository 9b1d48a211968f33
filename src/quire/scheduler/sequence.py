"""The scheduler's record of a request, its decisions, and what it remembers of a step in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, TypeAlias

from quire.errors import InvalidRequest, StepFailed
from quire.scheduler.block_pool import BlockKey, RadixNode
from quire.scheduler.constraint import FREE, Constraint
from quire.scheduler.encoder_cache import PendingImage
from quire.scheduler.plan import NO_TOKEN_ALLOWED, ImageSpan, NewSequence, Plan, Span
from quire.types import UNLIMITED, FinishReason, Request, RequestStepOutput, TokenLogprobs, error_output

PrefixKey: TypeAlias = tuple[int, BlockKey]
"""A node of the prefix cache (by identity) and the block of tokens that would follow it."""

NO_SPAN = Span(-1, 0, 0, 0)


class Transfer(NamedTuple):
    """K/V of a prompt that was to come from a prefill engine. peer: its address; empty: none was asked. tokens: asked
    for. received, num_bytes: tokens and bytes that came. seconds: from asking to the end. failed: why not all came.
    predicted, computing: seconds that it was predicted to take, and that computing the prompt here was; infinite: too
    little was known."""

    peer: str
    tokens: int
    received: int
    num_bytes: int
    seconds: float
    failed: str
    predicted: float = 0.0
    computing: float = math.inf


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens known and tokens computed; each step lets the second catch up with the first. Only the scheduler changes
    it.

    There is no prefill phase and no decode phase. `num_inflight` is all that look-ahead costs the host: how many
    sampling spans are in flight, each of which brings 1 to 1 + num_drafts tokens.
    """

    request: Request
    arrival: int
    """Arrival number: breaks ties in the queue, and is the place to which a preempted sequence returns."""
    tokens: list[int]
    max_length: int
    """Length at which it ends: the prompt and max_new_tokens."""
    constraint: Constraint = FREE
    priority: float = 0
    """The scheduling policy's key; lower is sooner, and from BACKGROUND on it runs only while nothing else does."""

    num_begun: int = 0
    """Tokens that its answer begins with because its constraint allows no others: they are not sampled."""
    row: int | None = None
    """Its row on the device; None: it has none."""
    blocks: list[int] = field(default_factory=list)
    capacity: int = 0
    """Positions for which it has blocks; UNLIMITED once it cannot need another."""
    num_unscheduled: int = 0
    """Tokens that the device knows and no plan has fed: the rest of the prompt, later always 1, the last one
    sampled."""
    num_drafts: int = 0
    """Drafts that the device holds for it; 0 until it has sampled once."""
    num_inflight: int = 0
    max_inflight: int = 0
    """Most tokens that the spans in flight can bring."""
    num_computed: int = 0
    """Committed tokens: their K/V is written."""
    draft_tokens: list[int] = field(default_factory=list)
    """The drafts themselves, known to the host for masked rows only."""
    span: Span = NO_SPAN
    """The last one planned. A decoding row's span never changes, so it is made once."""
    prefix_node: RadixNode | None = None
    """Where its next full block goes in the prefix cache."""
    next_cache_at: int = UNLIMITED
    """The length at which that block is full."""
    num_cached: int = 0
    """Tokens found in the prefix cache when its row was last opened."""
    num_cache_written: int = 0
    """Tokens of its prompt that it put into the prefix cache since then."""
    diverged_at: int | None = None
    """The first token, when its row was last opened, that differed from the nearest cached prefix; None where nothing
    went on otherwise."""
    prompt_logprobs_sent: int = 0
    """Prompt positions whose log-probabilities have been reported."""
    needs_prompt_logits: bool = False
    """Whether log-probabilities of prompt tokens are still wanted."""
    preemptions: int = 0
    inflight_prefix: PrefixKey | None = None
    """The next block of its prompt, where no other sequence has registered it."""
    snapshot: int = 0
    """The slot of the state that its row begins from, see `scheduler/snapshots.py`; 0: none."""
    snapshot_lengths: list[int] = field(default_factory=list)
    """Lengths, ascending, at which its state is to be kept; plans have not reached them."""
    snapshots_inflight: list[tuple[int, int]] = field(default_factory=list)
    """(length, slot) of snapshots in plans that are not committed."""
    num_fed: int = 0
    """Tokens that plans before this one have fed, at most; of a recurrent model."""
    waiters: list[tuple[int, Sequence]] = field(default_factory=list)
    """(length, sequence) of those that wait until it has computed so much of their prompts."""
    finish_reason: FinishReason | None = None
    pending_images: list[PendingImage] = field(default_factory=list)
    """Images of its prompt that are not fed yet, in order, while it has a row."""
    prefix_prompt: tuple[int, ...] = ()
    """The prompt as the prefix cache compares it."""
    block_keys: list[bytes] = field(default_factory=list)
    """Keys of its first blocks, see `scheduler/kv_offload.py`."""
    num_fetches: int = 0
    """What has been tried to bring back its blocks since it was last admitted: 1: reading files, 2: a prefill engine,
    3: all."""
    num_from_host: int = 0
    """Of `num_cached`, tokens that came back from host memory for it."""
    num_from_disk: int = 0
    num_from_remote: int = 0
    transfer: Transfer | None = None
    """What came of the last time that a prefill engine was to compute it; None: there was none."""

    @property
    def prefix_tokens(self) -> list[int]:
        """Its tokens as the prefix cache compares them."""
        if not self.request.images:
            return self.tokens
        return [*self.prefix_prompt, *self.tokens[self.prompt_length :]]

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    def constrain(self, constraint: Constraint) -> None:
        """Give it its constraint, before it runs. Tokens with which each answer begins are fed with the prompt, unless
        something else could forbid them, or is to be said of them; one is left to sample."""
        self.constraint, request, sampling = constraint, self.request, self.request.sampling
        if sampling.logprobs is None and sampling.allowed_token_ids is None and not sampling.bad_words_token_ids:
            begun = [*takewhile(lambda token: token not in request.stop, constraint.beginning())]
            del begun[request.max_new_tokens - 1 :]
            self.num_begun = len(begun)
            self.tokens += begun

    @property
    def answer(self) -> list[int]:
        """What has been generated: nothing before something has been sampled."""
        begun = self.prompt_length + self.num_begun
        return self.tokens[self.prompt_length :] if len(self.tokens) > begun else []

    def new_sequence(self, row: int) -> NewSequence:
        """What the device needs to open its row."""
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
            snapshot=self.snapshot,
            images=self._image_spans(),
        )

    def _image_spans(self) -> tuple[ImageSpan, ...]:
        numbers = {pending.start: pending.image.number for pending in self.pending_images}
        return tuple(
            ImageSpan(each.start, each.length, numbers.get(each.start, 0), each.height, each.width)
            for each in self.request.images
        )

    def error_output(self, reason: str) -> RequestStepOutput:
        """The output for an error in its row. Where no token was allowed, a field of the request is to blame."""
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
        self.prefix_prompt = self.request.prefix_tokens()
        self.constrain(self.constraint)

    def take_prompt_logprobs(self, rows: Seq[TokenLogprobs]) -> Seq[TokenLogprobs]:
        """Those of `rows`, of prompt positions from num_computed + 1, that were not sent before a preemption."""
        prompt = self.prompt_length
        unsent = rows[max(0, self.prompt_logprobs_sent - self.num_computed) : prompt - 1 - self.num_computed]
        self.prompt_logprobs_sent = max(self.prompt_logprobs_sent, min(self.num_computed + len(rows), prompt - 1))
        self.needs_prompt_logits = self.prompt_logprobs_sent < prompt - 1
        return unsent

    def truncate_at_stop(self, new_tokens: list[int]) -> tuple[FinishReason, int | None]:
        """End at the first stop token of `new_tokens`, or at the limit; tokens behind it are dropped.

        Returns why it ended, and the stop token if that was the reason.
        """
        base, stop = len(self.tokens) - len(new_tokens), self.request.stop
        end = next(j for j, t in enumerate(new_tokens, 1) if t in stop or base + j == self.max_length)
        last = new_tokens[end - 1]
        del new_tokens[end:], self.tokens[base + end :]
        return ("stop", last) if last in stop else ("length", None)


class Decision(NamedTuple):
    """Why something happened to a request.

    kind: opened (n: cached tokens), follows (n: tokens of its prompt that `cause` is computing), waits, preempted,
    sat-out. cause: the request for whose sake it happened, or what is missing: seats (max_num_seqs), rows (one is still
    in use by a step in flight), pages (KV blocks), budget (tokens of the step), gap (other requests run), grammar (it
    is being compiled), image (it is being encoded), tier (K/V comes from host memory, disk or a prefill engine).
    """

    kind: str
    request_id: str
    cause: str = ""
    n: int = 0


class InflightStep(NamedTuple):
    """The host's half of a plan in flight: its sequences, those that wait for masks, rows to free with it, and
    decisions."""

    plan: Plan
    seqs: list[Sequence]
    masked_seqs: list[Sequence]
    deferred_frees: list[Sequence]
    decisions: list[Decision]
