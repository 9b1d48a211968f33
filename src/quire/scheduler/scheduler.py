"""The scheduler: which sequences feed how many tokens in this step. No clock, no I/O, no torch; plain ints in and out.

Six rules make look-ahead work: shapes are fixed by the host, values by the device; a sequence that leaves is freed with
the last plan launched; one that is sure to end is not planned; only committed blocks are cached; blocks are reserved
for the furthest position that a step may write; block 0 belongs to no sequence.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from quire.errors import InvalidRequest
from quire.scheduler.constraint import FREE, PENDING, ComputeMasks, Constraint, MaskRequest, one_by_one
from quire.scheduler.encoder_cache import EncoderCache
from quire.scheduler.kv_cache import KVCacheManager
from quire.scheduler.plan import Mask, NewSequence, Plan, Result, Span
from quire.scheduler.policy import SchedulingPolicy, policy_name
from quire.scheduler.sequence import Decision, InflightStep, Sequence
from quire.scheduler.speculation import DraftStats, FixedDrafts, SpeculationPolicy
from quire.scheduler.step_time import StepTimeModel
from quire.types import BACKGROUND, UNLIMITED, FinishReason, PromptReport, Request, RequestStepOutput


class WaitingQueue:
    """A heap by (priority, arrival), so that a preempted sequence returns to its own place.

    Removal is lazy: push, pop and discard stay O(log n) with a hundred thousand waiting. Two kinds wait beside the
    heap: `num_parked` sequences behind one that computes the beginning of their prompts, and those whose grammar is
    still being compiled or whose K/V is coming back from another tier.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._members: set[int] = set()
        self._awaiting_grammar: dict[int, Sequence] = {}
        self._awaiting_blocks: dict[int, Sequence] = {}
        self.num_parked = 0
        self.blocked = False
        """Whether none can run before a copy between K/V tiers has ended: what the last step found."""

    def push(self, seq: Sequence) -> None:
        """Queue it; no effect if it is queued already."""
        self.blocked = False
        if seq.constraint is PENDING:
            self._awaiting_grammar[seq.arrival] = seq
        elif seq.arrival not in self._members:
            self._members.add(seq.arrival)
            heapq.heappush(self._heap, (seq.priority, seq.arrival, seq))

    def constraint_ready(self, seq: Sequence, constraint: Constraint) -> None:
        """Its grammar is compiled: it takes its place in the queue."""
        seq.constrain(constraint)
        if self._awaiting_grammar.pop(seq.arrival, None) is not None:
            self.push(seq)

    def await_blocks(self) -> None:
        """The first one waits beside the queue until its blocks have come back."""
        seq = self._heap[0][2]
        self.pop()
        self._awaiting_blocks[seq.arrival] = seq

    def blocks_ready(self, seq: Sequence) -> None:
        """Its blocks have come back, or will not: it takes its place in the queue."""
        if self._awaiting_blocks.pop(seq.arrival, None) is not None:
            self.push(seq)

    def set_aside(self) -> list[Decision]:
        """A decision for each sequence that waits for its grammar, or for its blocks."""
        kinds = ("grammar", self._awaiting_grammar), ("tier", self._awaiting_blocks)
        return [Decision("waits", seq.request.id, cause) for cause, seqs in kinds for seq in seqs.values()]

    def peek(self) -> Sequence | None:
        """The next one, left in place."""
        heap = self._heap
        while heap and heap[0][1] not in self._members:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def pop(self) -> None:
        """Take out what `peek` returned."""
        self._members.discard(heapq.heappop(self._heap)[1])

    def discard(self, seq: Sequence) -> None:
        """Take it out if it is there; its heap entry is dropped when it comes to the top."""
        self.blocked = False
        self._members.discard(seq.arrival)
        self._awaiting_grammar.pop(seq.arrival, None)
        self._awaiting_blocks.pop(seq.arrival, None)

    def park(self, leader: Sequence, length: int) -> None:
        """The first one waits beside the queue until `leader` has computed `length` tokens."""
        leader.waiters.append((length, self._heap[0][2]))
        self.pop()
        self.num_parked += 1

    def unpark(self, leader: Sequence) -> None:
        """The sequences that waited for `leader` take their places in the queue again."""
        for _, seq in leader.waiters:
            self.num_parked -= 1
            if seq.finish_reason is None:
                self.push(seq)
        leader.waiters = []

    def __contains__(self, seq: Sequence) -> bool:
        return seq.arrival in self._members

    def drain(self) -> list[Sequence]:
        """Take all out, in order."""
        out = [seq for _, order, seq in sorted(self._heap, key=lambda e: e[:2]) if order in self._members]
        self._heap, self._members = [], set()
        return out

    @property
    def num_queued(self) -> int:
        """How many could run if there were room."""
        return len(self._members)

    def __len__(self) -> int:
        return len(self._members) + len(self._awaiting_grammar) + len(self._awaiting_blocks) + self.num_parked


class Scheduler:
    """Plans steps and commits their results.

    rows: places on the device. max_num_seqs: sequences running at once. max_num_batched_tokens: tokens of a step;
    max_background_tokens: of a step of background requests. max_chunk_tokens: prompt tokens of a span (UNLIMITED: whole
    prompts). policy: admission, order, victims and reservations. speculation: how many tokens to draft, for which
    sequences. compute_masks: makes the masks of constrained sequences. encoder_cache: the encoder's work; None: there
    is no encoder, and no request has images. groups: steps in flight that share the decoding rows, one for each stage
    of a pipeline, whose first stage learns what a row has sampled only when the step is committed.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        rows: int = 64,
        max_num_seqs: int = UNLIMITED,
        max_num_batched_tokens: int = UNLIMITED,
        max_background_tokens: int = UNLIMITED,
        max_chunk_tokens: int = UNLIMITED,
        policy: SchedulingPolicy | None = None,
        speculation: SpeculationPolicy | None = None,
        compute_masks: ComputeMasks = one_by_one,
        encoder_cache: EncoderCache | None = None,
        groups: int = 1,
    ) -> None:
        self.kv, self.groups = kv, groups
        self.encoder_cache = EncoderCache() if encoder_cache is None else encoder_cache
        self.compute_masks = compute_masks
        self.max_num_seqs = min(max_num_seqs, rows)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_background_tokens = min(max_background_tokens, max_num_batched_tokens)
        self.max_chunk_tokens = max_chunk_tokens
        self.policy = SchedulingPolicy() if policy is None else policy
        self.speculation: SpeculationPolicy = FixedDrafts(0) if speculation is None else speculation
        self.free_rows = list(range(rows - 1, -1, -1))
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.inflight: deque[InflightStep] = deque()
        self.sequences: dict[str, Sequence] = {}
        self.num_arrived = 0
        self.num_preemptions = 0
        self.discarded_spans: dict[str, int] = {}
        self.draft_stats = DraftStats()
        self._last_spans: tuple[Span, ...] = ()
        self._out_of_blocks = False
        self._reserved_blocks = -1
        self._decisions: list[Decision] = []

    # ---------------------------------------------------------------- requests come and go

    def add(self, request: Request, constraint: Constraint = FREE) -> Sequence:
        """Queue a request. Raises InvalidRequest if it can never run, or its id is taken."""
        max_length = len(request.prompt) + request.max_new_tokens
        if not request.prompt:
            raise InvalidRequest("the prompt is empty: give at least one token", param="prompt")
        if request.max_new_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        self.kv.check_fits(request)
        if request.id in self.sequences:
            raise InvalidRequest(f"a request with id {request.id!r} is already running", param="id")
        seq = Sequence(request, self.num_arrived, list(request.prompt), max_length, constraint, self._priority(request))
        self.num_arrived += 1
        self.sequences[request.id] = seq
        self.waiting.push(seq)
        return seq

    def _priority(self, request: Request) -> float:
        if request.priority >= BACKGROUND:
            return BACKGROUND
        key = self.policy.key(request)
        if not key < BACKGROUND:
            raise ValueError(f"the key of {policy_name(self.policy)} must be a number below {BACKGROUND}, not {key!r}")
        return key

    def abort(self, id: str, reason: FinishReason = "abort") -> Sequence | None:
        """End a request wherever it is. Returns its sequence, or None if it had ended."""
        seq = self.sequences.get(id)
        if seq is None or seq.finish_reason is not None:
            return None
        self._finish(seq, reason)
        return seq

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finish_reason = reason
        del self.sequences[seq.request.id]
        self.speculation.remove(seq)
        self.waiting.unpark(seq)
        if seq.row is None:
            self.waiting.discard(seq)
        elif seq in self.running:
            self.running.remove(seq)
            self._release(seq)
        else:  # its row is freed already with a step in flight; it may have been preempted into the queue
            self.waiting.discard(seq)

    def _release(self, seq: Sequence) -> None:
        """Free row and blocks with the last plan launched: no later one can touch them."""
        self.kv.drop_inflight_prefix(seq)
        self.encoder_cache.close(seq)
        if self.inflight:
            self.inflight[-1].deferred_frees.append(seq)
        else:
            self._free(seq)

    def _free(self, seq: Sequence) -> None:
        assert seq.row is not None
        self.kv.free(seq)
        self.free_rows.append(seq.row)
        seq.row = None

    @property
    def step_times(self) -> StepTimeModel:
        """What steps take, as the engine records it."""
        return self.speculation.step_times

    @property
    def is_decoding(self) -> bool:
        """Whether a running sequence waits for tokens after the step that is planned last."""
        return any(
            seq.num_unscheduled == 1 and len(seq.tokens) + seq.num_inflight < seq.max_length for seq in self.running
        )

    @property
    def prompt_context(self) -> int:
        """Tokens before the next ones of the prompt that was begun last. Of one that waits all: how many it will find
        in the prefix cache is not known."""
        if self.running and (last := self.running[-1]).num_unscheduled > 1:
            return len(last.tokens) - last.num_unscheduled
        waiting = self.waiting.peek()
        return len(waiting.tokens) if waiting else 0

    def poll_offload(self, now: float) -> SequenceOf[Sequence]:
        """Take the copies between tiers that have ended. Returns the sequences that take their places in the queue
        again."""
        ready = self.kv.offload.poll(now)
        for seq in ready:
            self.waiting.blocks_ready(seq)
        return ready

    # ---------------------------------------------------------------- plan

    def plan(self, max_tokens: int = UNLIMITED) -> Plan | None:
        """The next step, of at most `max_tokens` tokens; None when no sequence can run.

        Sequences are planned from the first and preempted from the last: a victim never has a span in the same plan.
        """
        spans, seqs, new_sequences = list[Span](), list[Sequence](), list[NewSequence]()
        masked, drafts_by_span, new_blocks = list[int](), list[int](), list[tuple[int, tuple[int, ...]]]()
        running, slots, i, others = self.running, UNLIMITED, 0, self._other_groups()
        self._out_of_blocks, self._reserved_blocks = False, -1
        self._decisions = [d for d in self._decisions if d.kind == "preempted"] + self.waiting.set_aside()
        tokens_left, speculation = min(self._preempt_background(), max_tokens), self.speculation
        speculation.begin_plan(min(self.max_num_seqs, len(running) + len(self.waiting)))
        max_drafts, max_chunk = speculation.max_drafts, self.max_chunk_tokens
        self.encoder_cache.begin_plan()
        while tokens_left > 0:
            if i >= len(running):
                if slots == UNLIMITED:
                    slots = self.policy.admit(running, self.max_num_seqs)
                if not self._admit_next(slots, tokens_left, bool(spans), new_sequences):
                    break
                slots -= 1
            seq = running[i]
            length = len(seq.tokens)
            if length + seq.num_inflight >= seq.max_length:  # sure to end with what is in flight
                del running[i]
                self._release(seq)
                continue
            num_tokens = seq.num_unscheduled + seq.num_drafts
            if num_tokens > max_chunk or num_tokens > tokens_left:
                num_tokens = min(max_chunk, tokens_left)
            if seq in others or (seq.pending_images and not (num_tokens := self._limit_to_images(seq, num_tokens))):
                i += 1
                continue
            num_samples = num_tokens - seq.num_unscheduled + 1 if num_tokens >= seq.num_unscheduled else 0
            num_drafts = speculation.num_drafts(seq) if max_drafts and num_samples else 0
            # the furthest position, whatever is accepted before it; a draft model writes there once it has sampled
            target = length + seq.max_inflight - seq.num_unscheduled + num_tokens + num_drafts
            i += 1
            if target > seq.capacity and not self._allocate(seq, target, i, new_blocks):
                if i > len(running) or running[i - 1] is not seq:  # it was preempted itself
                    i -= 1
                continue
            if num_samples:
                seq.num_inflight += 1
                seq.max_inflight += num_samples
                seq.num_unscheduled, seq.num_drafts = 1, num_drafts
                if seq.constraint is not FREE:
                    masked.append(len(spans))
            else:
                seq.num_unscheduled -= num_tokens
            if (span := seq.span) != (seq.row, num_tokens, num_samples, num_samples) or seq.needs_prompt_logits:
                span = self._span(seq, num_tokens, num_samples)
            spans.append(span)
            seqs.append(seq)
            drafts_by_span.append(seq.num_drafts)
            tokens_left -= num_tokens
        drafts = tuple(drafts_by_span) if max_drafts else ()
        return self._planned(spans, seqs, masked, drafts, tuple(new_sequences), tuple(new_blocks))

    def _planned(
        self,
        spans: list[Span],
        seqs: list[Sequence],
        masked: list[int],
        drafts: tuple[int, ...],
        opened: tuple[NewSequence, ...],
        grown: tuple[tuple[int, tuple[int, ...]], ...],
    ) -> Plan | None:
        """The plan of these spans, of the sequences `seqs`, which is in flight now; None: there is nothing to do."""
        dropped, encode = self.encoder_cache.work()
        if not spans and not encode:
            return None
        if self._last_spans != (current := tuple(spans)):
            self._last_spans = current  # while spans stay equal, the object stays the same
        snapshots = self.kv.snapshots.plan(seqs, spans)
        plan = Plan(opened, grown, self._last_spans, tuple(masked), drafts, snapshots, dropped, encode)
        self.inflight.append(InflightStep(plan, seqs, [seqs[j] for j in masked], [], self._decisions))
        self._decisions = []
        return plan

    def _other_groups(self) -> Collection[Sequence]:
        """Running sequences that sit this step out: those that steps in flight sample, and of the others that decode
        all but an even share, so that each group has as many."""
        if self.groups == 1:
            return ()
        share = -(-len(self.running) // self.groups)
        decoding = [seq for seq in self.running if not seq.num_inflight and seq.num_unscheduled == 1]
        return {*decoding[share:], *(seq for seq in self.running if seq.num_inflight)}

    def _limit_to_images(self, seq: Sequence, num_tokens: int) -> int:
        """How many of its next tokens are before an image that is not encoded yet."""
        limited = self.encoder_cache.limit(seq, len(seq.tokens) - seq.num_unscheduled, num_tokens)
        if not limited:
            self._decisions.append(Decision("waits", seq.request.id, "image"))
        return limited

    def _span(self, seq: Sequence, num_tokens: int, num_samples: int) -> Span:
        """The last one if it is equal: a decoding row's span never changes."""
        span, num_logits = seq.span, num_tokens if seq.needs_prompt_logits else num_samples
        if (
            span.num_tokens != num_tokens
            or span.num_samples != num_samples
            or span.row != seq.row
            or span.num_logits != num_logits
        ):
            assert seq.row is not None
            span = seq.span = Span(seq.row, num_tokens, num_samples, num_logits)
        return span

    def _preempt_background(self) -> int:
        """Preempt background sequences as soon as another request could run. Returns the tokens of this step."""
        running, first = self.running, self.waiting.peek()
        if running and running[0].priority >= BACKGROUND and first is not None and first.priority < BACKGROUND:
            for seq in running[:]:
                self._preempt(seq, first)
        head = running[0] if running else first
        return self.max_num_batched_tokens if head is None or head.priority < BACKGROUND else self.max_background_tokens

    def _preempt(self, victim: Sequence, by: Sequence) -> None:
        """Back into the queue, with the committed tokens."""
        self.running.remove(victim)
        self._release(victim)
        self.waiting.unpark(victim)
        self.waiting.push(victim)
        victim.preemptions += 1
        self.num_preemptions += 1
        self._decisions.append(Decision("preempted", victim.request.id, by.request.id, victim.num_computed))

    def _admit_next(self, slots: int, tokens_left: int, has_spans: bool, new_sequences: list[NewSequence]) -> bool:
        """Admit the next waiting sequence that nothing blocks. False: none can be."""
        while (seq := self.waiting.peek()) is not None and not self._out_of_blocks:
            reason = self._blocked_by(seq, slots)
            if reason is not None:
                return self._note_waiting(seq, reason)
            inflight = self.kv.find_inflight_prefix(seq)
            if inflight is None:
                if not self.kv.fetch(seq, self.step_times, self.max_num_batched_tokens, self.waiting.num_queued):
                    return self._admit(seq, tokens_left, has_spans, new_sequences)
                self.waiting.await_blocks()  # those behind it may go first
                self._decisions.append(Decision("waits", seq.request.id, "tier"))
                continue
            self.waiting.park(*inflight)
            self._decisions.append(Decision("follows", seq.request.id, inflight[0].request.id, inflight[1]))
        return False

    def _blocked_by(self, seq: Sequence, slots: int) -> str | None:
        if seq.priority >= BACKGROUND and self.running and self.running[0].priority < BACKGROUND:
            return "gap"
        rows = self.free_rows and seq.row is None  # a preempted one's last step may be in flight
        return "seats" if slots <= 0 else None if rows else "rows"

    def _admit(self, seq: Sequence, tokens_left: int, has_spans: bool, new_sequences: list[NewSequence]) -> bool:
        kv = self.kv
        kv.match_prefix(seq)
        num_tokens = min(seq.num_unscheduled, self.max_chunk_tokens, tokens_left)
        # without chunks a prompt that is too long for this step waits for a step of its own
        too_long = has_spans and num_tokens < seq.num_unscheduled and self.max_chunk_tokens == UNLIMITED
        if self._reserved_blocks < 0:
            self._reserved_blocks = sum(map(self._num_blocks_reserved, self.running))
        needed = max(
            kv.num_blocks_needed(seq, seq.num_computed + num_tokens + self.speculation.max_drafts),
            reserved := self._num_blocks_reserved(seq),
        )
        if too_long or needed > kv.block_pool.num_free - self._reserved_blocks:
            kv.free(seq)
            return self._note_waiting(seq, "budget" if too_long else "pages")
        kv.record_admission(seq)
        self._reserved_blocks += reserved
        self.waiting.pop()
        seq.row = self.free_rows.pop()
        self.running.append(seq)
        self.encoder_cache.open(seq)
        new_sequences.append(seq.new_sequence(seq.row))
        self._decisions.append(Decision("opened", seq.request.id, n=seq.num_cached))
        return True

    def _note_waiting(self, seq: Sequence, reason: str) -> bool:
        self._decisions.append(Decision("waits", seq.request.id, reason))
        return False

    def _allocate(self, seq: Sequence, target: int, i: int, new_blocks: list[tuple[int, tuple[int, ...]]]) -> bool:
        """Blocks for `target` positions. False: it is skipped in this step.

        i: where the running sequences that are not yet planned begin.
        """
        needed, pool = self.kv.num_blocks_needed(seq, target), self.kv.block_pool
        while needed > pool.num_free:
            self._out_of_blocks = True
            deferred = sum(len(g.blocks) for step in self.inflight for g in step.deferred_frees)
            if needed <= pool.num_free + deferred:
                self._decisions.append(Decision("sat-out", seq.request.id, "pages"))
                return False
            victim = self._choose_victim(seq, i)
            self._preempt(victim, seq)
            if victim is seq:
                return False
        assert seq.row is not None
        # Of these, what was set aside for it: a negative sum would be taken for an unknown one.
        self._reserved_blocks -= min(needed, self._num_blocks_reserved(seq))
        new_blocks.append((seq.row, self.kv.allocate(seq, needed)))
        return True

    def _num_blocks_reserved(self, seq: Sequence) -> int:
        """Blocks that `seq` lacks of those it has before others are admitted."""
        return self.kv.num_blocks_needed(seq, self.policy.reserve(seq, self.kv.block_size))

    def _choose_victim(self, seq: Sequence, i: int) -> Sequence:
        """The policy's choice among the rows without a span; `seq` itself if there is none."""
        candidates = self.running[i:]
        if not candidates:
            return seq
        victim = self.policy.victim(candidates, seq)
        if victim is not seq and victim not in candidates:
            raise ValueError(f"the victim of {policy_name(self.policy)} must be one of the candidates, not {victim!r}")
        return victim

    # ---------------------------------------------------------------- masks and results

    @property
    def masks_ready(self) -> bool:
        """Whether every token before the newest step's samples is committed. Groups share no row."""
        return self.groups > 1 or len(self.inflight) == 1

    def masks(self) -> SequenceOf[SequenceOf[Mask]]:
        """For the newest step in flight, by masked span, when they are ready."""
        step = self.inflight[-1]
        spans, drafted = step.plan.spans, bool(step.plan.num_drafts)
        requests: list[MaskRequest] = [
            (
                FREE if seq.finish_reason else seq.constraint,
                seq.tokens,
                len(seq.request.prompt),
                seq.draft_tokens[: spans[j].num_samples - 1] if drafted else (),
            )
            for seq, j in zip(step.masked_seqs, step.plan.masked_spans, strict=True)
        ]
        return self.compute_masks(requests)

    def commit(self, result: Result) -> list[RequestStepOutput]:
        """Take the oldest step's result. Returns what each request got; spans of ended ones count as discarded."""
        step = self.inflight.popleft()
        outputs: list[RequestStepOutput] = []
        for j, (seq, span, new_tokens) in enumerate(zip(step.seqs, step.plan.spans, result.tokens, strict=True)):
            if span.num_samples:
                seq.num_inflight -= 1
                seq.max_inflight -= span.num_samples
            if seq.finish_reason is not None:  # it ended while this was in flight
                self.discarded_spans[seq.finish_reason] = self.discarded_spans.get(seq.finish_reason, 0) + 1
            elif new_tokens or j not in result.errors:
                self._advance(seq, span, new_tokens, j, result, outputs)
            if seq.finish_reason is None and j in result.errors:  # errors after the sequence finished are ignored
                self._finish(seq, "error")
                outputs.append(seq.error_output(result.errors[j]))
        for seq, drafts in zip(step.masked_seqs, result.draft_tokens, strict=True):
            seq.draft_tokens = drafts
        for seq in step.deferred_frees:
            self._free(seq)
        return outputs

    def _advance(
        self, seq: Sequence, span: Span, new_tokens: list[int], j: int, result: Result, outputs: list[RequestStepOutput]
    ) -> None:
        """One span of a live sequence: prompt chunk, decode or verification, running or preempted since."""
        prompt_logprobs = seq.take_prompt_logprobs(result.prompt_logprobs.get(j, ())) if seq.needs_prompt_logits else ()
        finish: FinishReason | None = None
        if not span.num_samples:
            seq.num_computed += span.num_tokens
            if prompt_logprobs:
                outputs.append(RequestStepOutput(seq.request.id, (), prompt_logprobs=prompt_logprobs))
        else:
            tokens, request, stop = seq.tokens, seq.request, None
            prompt = len(request.prompt)
            first = len(tokens) == prompt + seq.num_begun
            if span.num_samples > 1:
                self.speculation.record_acceptance(seq, span.num_samples - 1, len(new_tokens) - 1)
                self.draft_stats.record(span.num_samples - 1, len(new_tokens) - 1)
            tokens += new_tokens
            if len(tokens) >= seq.max_length or not request.stop.isdisjoint(new_tokens):
                finish, stop = seq.truncate_at_stop(new_tokens)
            seq.num_computed = len(tokens) - 1
            logprobs = tuple(result.logprobs[j][: len(new_tokens)]) if j in result.logprobs else ()
            output = RequestStepOutput(request.id, tuple(new_tokens), finish, stop, logprobs, prompt_logprobs)
            if first:
                cached = min(seq.num_cached, prompt)
                output = output._replace(
                    tokens=tuple(tokens[prompt:]), num_cached=cached, report=self._prompt_report(seq)
                )
            if j in result.pooled:
                output = output._replace(pooled=result.pooled[j])
            outputs.append(output)
        if seq.num_computed >= seq.next_cache_at:
            self.kv.cache_blocks(seq)
        if seq.waiters and seq.num_computed >= min(upto for upto, _ in seq.waiters):
            self.waiting.unpark(seq)
        if finish:
            self._finish(seq, finish)

    def _prompt_report(self, seq: Sequence) -> PromptReport:
        """With a sequence's first token: what became of its prompt, whose full blocks are cached and pinned now."""
        self.kv.cache_blocks(seq)
        pinned = self.kv.pin(seq) if seq.request.choice == 0 else ()
        return PromptReport(
            seq.diverged_at,
            pinned,
            cache_written=seq.num_cache_written,
            cached_host=seq.num_from_host,
            cached_disk=seq.num_from_disk,
            cached_remote=seq.num_from_remote,
        )

    # ---------------------------------------------------------------- after a failed step

    def recover(self) -> list[Sequence]:
        """The device lost everything: free all rows and queue their sequences again from committed tokens.

        Returns the sequences that were on the device, oldest first.
        """
        lost = {id(s): s for step in self.inflight for s in (*step.seqs, *step.deferred_frees) if s.row is not None}
        lost |= {id(s): s for s in self.running}
        self.inflight.clear()
        self.running.clear()
        self._last_spans = ()
        for seq in lost.values():
            seq.num_inflight = seq.max_inflight = 0
            self.encoder_cache.close(seq)
            self.waiting.unpark(seq)
            self._free(seq)
            if seq.finish_reason is None:
                self.waiting.push(seq)
        self.kv.reset()
        self.encoder_cache.reset()
        return sorted((s for s in lost.values() if s.finish_reason is None), key=lambda s: s.arrival)

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs, or a step is in flight."""
        return bool(self.waiting or self.running or self.inflight)
