"""The scheduler: who feeds how many tokens this step. No clock, no I/O, no torch; plain ints in and out.

Six rules carry look-ahead: shapes from the host, values from the device; whoever leaves is buried with the last plan
launched; sure to end is not planned; published means committed; reserve the furthest reach; page 0 is nobody's.
"""

from __future__ import annotations

from collections import deque

from quire.core.constraint import FREE, Constraint
from quire.core.kv import KV
from quire.core.plan import Mask, Open, Plan, Result, Span
from quire.core.policy import Admission, Order, continuous, fcfs
from quire.core.queue import Waiting
from quire.core.sequence import Sequence
from quire.core.speculate import Drafted, Fixed, Speculation
from quire.core.step import Decision, Step
from quire.errors import InvalidRequest
from quire.values import IDLE, MANY, FinishReason, Request, Tokens


class Scheduler:
    """Plans steps and commits their results.

    kv: the pages. rows: places on the device. cap: sequences running at once. budget: tokens a step; gap: of those in
    the gaps. chunk: prompt tokens a span (MANY: whole prompts). speculation: how many tokens to draft, for whom.
    """

    def __init__(
        self,
        kv: KV,
        *,
        rows: int = 64,
        cap: int = MANY,
        budget: int = MANY,
        gap: int = MANY,
        chunk: int = MANY,
        admit: Admission = continuous,
        order: Order = fcfs,
        speculation: Speculation | None = None,
    ) -> None:
        self.kv, self.cap, self.budget, self.gap, self.chunk = kv, min(cap, rows), budget, min(gap, budget), chunk
        self.admit, self.order = admit, order
        self.speculation: Speculation = Fixed(0) if speculation is None else speculation
        self.rows = list(range(rows - 1, -1, -1))
        self.waiting = Waiting()
        self.running: list[Sequence] = []
        self.flight: deque[Step] = deque()
        self.seqs: dict[str, Sequence] = {}
        self.arrived = 0
        self.preempted = 0
        self.wasted: dict[str, int] = {}
        self.drafted = Drafted()
        self._same: tuple[Span, ...] = ()
        self._short = False
        self._promised = -1
        self._decisions: list[Decision] = []

    # ---------------------------------------------------------------- requests come and go

    def add(self, request: Request, constraint: Constraint = FREE) -> Sequence:
        """Queue a request. Raises InvalidRequest if it could never run, or its id is taken."""
        limit = len(request.prompt) + request.max_new
        if not request.prompt:
            raise InvalidRequest("the prompt is empty: give at least one token", param="prompt")
        if request.max_new < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        self.kv.check(request)
        if request.id in self.seqs:
            raise InvalidRequest(f"a request with id {request.id!r} is already running", param="id")
        seq = Sequence(request, self.arrived, list(request.prompt), limit, constraint, self.order(request))
        self.arrived += 1
        self.seqs[request.id] = seq
        self.waiting.push(seq)
        return seq

    def abort(self, id: str, why: FinishReason = "abort") -> Sequence | None:
        """End a request wherever it is: waiting, running, or on its way out. Returns it unless it had ended."""
        seq = self.seqs.get(id)
        if seq is None or seq.finish is not None:
            return None
        self._end(seq, why)
        return seq

    def _end(self, seq: Sequence, why: FinishReason) -> None:
        seq.finish = why
        del self.seqs[seq.request.id]
        self.speculation.forget(seq)
        self.waiting.release(seq)
        if seq.row is None:
            self.waiting.discard(seq)
        elif seq in self.running:
            self.running.remove(seq)
            self._leave(seq)
        else:  # its row is on the way home already; it may have been preempted into the queue
            self.waiting.discard(seq)

    def _leave(self, seq: Sequence) -> None:
        """Row and pages go home with the last plan launched, for no later one can touch them."""
        self.kv.unclaim(seq)
        if self.flight:
            self.flight[-1].graves.append(seq)
        else:
            self._bury(seq)

    def _bury(self, seq: Sequence) -> None:
        assert seq.row is not None
        self.kv.close(seq)
        self.rows.append(seq.row)
        seq.row = None

    # ---------------------------------------------------------------- plan

    def plan(self, budget: int = MANY) -> Plan | None:
        """The next step, or None when nobody can be fed. budget: tokens, below the scheduler's own if smaller.

        Planned head first, preempted tail first: a victim never has a span in the plan being made.
        """
        spans, seqs, opened = list[Span](), list[Sequence](), list[Open]()
        late, drafts, grown = list[int](), list[int](), list[tuple[int, tuple[int, ...]]]()
        running, slots, i = self.running, MANY, 0
        self._short, self._promised = False, -1
        untold = [each for each in self._decisions if each.what == "preempted"]
        self._decisions = untold + self.waiting.unready()
        left, speculation = min(self._make_way(), budget), self.speculation
        speculation.begin(min(self.cap, len(running) + len(self.waiting)))
        while left > 0:
            if i >= len(running):
                if slots == MANY:
                    slots = self.admit(len(running), self.cap)
                if not self._open(slots, left, bool(spans), opened):
                    break
                slots -= 1
            seq = running[i]
            known = len(seq.tokens)
            if known + seq.pending >= seq.limit:  # sure to end with what is in flight
                del running[i]
                self._leave(seq)
                continue
            n = seq.unfed + seq.drafting
            if n > self.chunk or n > left:
                n = min(self.chunk, left)
            rows = max(0, n - seq.unfed + 1)
            depth = speculation.depth(seq) if rows and speculation.most else 0
            # its furthest reach, whatever is accepted before it; a draft model writes there as soon as it has sampled
            upto = known + seq.reach - seq.unfed + n + depth
            i += 1
            if upto > seq.room and not self._grow(seq, upto, i, grown):
                i = min(i, len(running))
                continue
            if rows:
                seq.pending += 1
                seq.reach += rows
                seq.unfed, seq.drafting = 1, depth
                if seq.constraint is not FREE:
                    late.append(len(spans))
            else:
                seq.unfed -= n
            spans.append(self._span(seq, n, rows))
            seqs.append(seq)
            drafts.append(seq.drafting)
            left -= n
        if not spans:
            return None
        if self._same != (same := tuple(spans)):
            self._same = same  # steady decoding is not a mode, it is an equality
        plan = Plan(tuple(opened), tuple(grown), self._same, tuple(late), tuple(drafts) if speculation.most else ())
        self.flight.append(Step(plan, seqs, [seqs[j] for j in late], [], self._decisions))
        self._decisions = []
        return plan

    def _span(self, seq: Sequence, n: int, rows: int) -> Span:
        """The last one if it is equal: a decoding row's span never changes, so it is made once."""
        span, logits = seq.span, n if seq.asks else rows
        if span.n != n or span.rows != rows or span.row != seq.row or span.logits != logits:
            assert seq.row is not None
            span = seq.span = Span(seq.row, n, rows, logits)
        return span

    def _make_way(self) -> int:
        """Who runs in the gaps leaves as soon as anybody else could run. Tokens that who is left may feed."""
        running, first = self.running, self.waiting.first()
        if running and running[0].priority >= IDLE and first is not None and first.priority < IDLE:
            for seq in running[:]:
                self._preempt(seq, first)
        on = running[0] if running else first
        return self.budget if on is None or on.priority < IDLE else self.gap

    def _preempt(self, victim: Sequence, by: Sequence) -> None:
        """Back into the queue, with what was committed."""
        self.running.remove(victim)
        self._leave(victim)
        self.waiting.release(victim)
        self.waiting.push(victim)
        victim.preemptions += 1
        self.preempted += 1
        self._decisions.append(Decision("preempted", victim.request.id, by.request.id, victim.computed))

    def _open(self, slots: int, left: int, others: bool, opened: list[Open]) -> bool:
        """Let in the next one that has no reason to wait."""
        while (seq := self.waiting.first()) is not None and not self._short:
            missing = self._missing(seq, slots)
            if missing is not None:
                return self._wait(seq, missing)
            coming = self.kv.coming(seq)
            if coming is None:
                return self._admit(seq, left, others, opened)
            self.waiting.hold(*coming)  # and whoever is behind it may go first
            self._decisions.append(Decision("follows", seq.request.id, coming[0].request.id, coming[1]))
        return False

    def _missing(self, seq: Sequence, slots: int) -> str | None:
        if seq.priority >= IDLE and self.running and self.running[0].priority < IDLE:
            return "gap"
        rows = self.rows and seq.row is None  # a preempted one's last step may be in flight
        return "seats" if slots <= 0 else None if rows else "rows"

    def _admit(self, seq: Sequence, left: int, others: bool, opened: list[Open]) -> bool:
        kv = self.kv
        kv.open(seq)
        n = min(seq.unfed, self.chunk, left)
        whole = others and n < seq.unfed and self.chunk == MANY  # whole prompts wait for a step of their own
        if self._promised < 0:
            self._promised = sum(map(kv.wants, self.running))
        need = max(kv.need(seq, seq.computed + n + self.speculation.most), wants := kv.wants(seq))
        if whole or need > kv.pool.free - self._promised:
            kv.close(seq)
            return self._wait(seq, "budget" if whole else "pages")
        kv.claim(seq)
        self._promised += wants
        self.waiting.pop()
        seq.row = self.rows.pop()
        self.running.append(seq)
        opened.append(seq.opening(seq.row))
        self._decisions.append(Decision("opened", seq.request.id, n=seq.hits))
        return True

    def _wait(self, seq: Sequence, missing: str) -> bool:
        self._decisions.append(Decision("waits", seq.request.id, missing))
        return False

    def _grow(self, seq: Sequence, upto: int, i: int, grown: list[tuple[int, tuple[int, ...]]]) -> bool:
        """Pages for `upto` positions; `i` is where the rows not yet planned begin. False: it sits this step out."""
        need, pool = self.kv.need(seq, upto), self.kv.pool
        while need > pool.free:
            self._short = True
            coming = sum(len(g.blocks) for step in self.flight for g in step.graves)
            if need <= pool.free + coming:
                self._decisions.append(Decision("sat-out", seq.request.id, "pages"))
                return False
            victim = self._victim(seq, i)
            self._preempt(victim, seq)
            if victim is seq:
                return False
        assert seq.row is not None
        self._promised -= need
        grown.append((seq.row, self.kv.extend(seq, need)))
        return True

    def _victim(self, seq: Sequence, i: int) -> Sequence:
        """The least urgent, then the one that loses least work, among rows without a span; `seq` itself if none."""
        rest = self.running[i:]
        return max(rest, key=lambda s: (s.priority, -s.computed, s.order)) if rest else seq

    # ---------------------------------------------------------------- masks and results

    def masks(self) -> list[list[Mask]]:
        """For the oldest step in flight, by masked span: every token before its samples is known."""
        step = self.flight[0]
        return [self._walk(s, step.plan.spans[j].rows) for s, j in zip(step.late, step.plan.masked, strict=True)]

    def _walk(self, seq: Sequence, rows: int) -> list[Mask]:
        if seq.finish:
            return [None] * rows
        masks = seq.constraint.masks(seq.tokens[seq.prompt_length :], seq.drafts[: rows - 1])
        return masks + [None] * (rows - len(masks))

    def commit(self, result: Result) -> list[Tokens]:
        """The oldest step came home. What each live request got; discarded spans are counted in `wasted`."""
        step = self.flight.popleft()
        out: list[Tokens] = []
        for j, (seq, span, got) in enumerate(zip(step.seqs, step.plan.spans, result.tokens, strict=True)):
            if span.rows:
                seq.pending -= 1
                seq.reach -= span.rows
            if seq.finish is not None:  # it ended while this was in flight
                self.wasted[seq.finish] = self.wasted.get(seq.finish, 0) + 1
            elif got or j not in result.errors:
                self._advance(seq, span, got, j, result, out)
            if seq.finish is None and j in result.errors:  # what fails past a limit or a stop is nobody's
                self._end(seq, "error")
                out.append(seq.failed(result.errors[j]))
        for seq, drafts in zip(step.late, result.drafts, strict=True):
            seq.drafts = drafts
        for seq in step.graves:
            self._bury(seq)
        return out

    def _advance(self, seq: Sequence, span: Span, got: list[int], j: int, result: Result, out: list[Tokens]) -> None:
        """Decode, last chunk, verify (any acceptance), running or preempted since: the same lines."""
        told = seq.tell(result.prompt_logprobs.get(j, ())) if seq.asks else ()
        finish: FinishReason | None = None
        if not span.rows:
            seq.computed += span.n
            if told:
                out.append(Tokens(seq.request.id, (), prompt_logprobs=told))
        else:
            tokens, request, stop, pooled = seq.tokens, seq.request, None, result.pooled.get(j, b"")
            first = len(tokens) == len(request.prompt)
            if span.rows > 1:
                self.speculation.learn(seq, span.rows - 1, len(got) - 1)
                self.drafted.learn(span.rows - 1, len(got) - 1)
            tokens += got
            if len(tokens) >= seq.limit or not request.stop.isdisjoint(got):
                finish, stop = seq.cut(got)
            seq.computed = len(tokens) - 1
            logprobs = tuple(result.logprobs[j][: len(got)]) if j in result.logprobs else ()
            out.append(Tokens(request.id, tuple(got), finish, stop, logprobs, told, seq.hits * first, pooled=pooled))
        if seq.computed >= seq.mark:
            self.kv.publish(seq)
        if seq.followers and seq.computed >= min(upto for upto, _ in seq.followers):
            self.waiting.release(seq)
        if finish:
            self._end(seq, finish)

    # ---------------------------------------------------------------- after a failed step

    def recover(self) -> list[Sequence]:
        """The device lost everything: take all rows home and queue them again from committed tokens.

        Returns the sequences that were on the device, oldest first: the suspects.
        """
        lost = {id(s): s for step in self.flight for s in (*step.seqs, *step.graves) if s.row is not None}
        lost |= {id(s): s for s in self.running}
        self.flight.clear()
        self.running.clear()
        self._same = ()
        for seq in lost.values():
            seq.pending = seq.reach = 0
            self.waiting.release(seq)
            self._bury(seq)
            if seq.finish is None:
                self.waiting.push(seq)
        self.kv.clear()
        return sorted((s for s in lost.values() if s.finish is None), key=lambda s: s.order)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self.flight)
