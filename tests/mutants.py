"""Planted bugs, and the core built with one of them in it. The lattice must notice every one."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import NamedTuple

from tests.lattice import CoreClasses

_REBUILT = (
    "quire.scheduler.block_pool",
    "quire.scheduler.pins",
    "quire.scheduler.sequence",
    "quire.scheduler.snapshots",
    "quire.scheduler.kv_offload",
    "quire.scheduler.kv_cache",
    "quire.scheduler.scheduler",
    "quire.engine.events",
    "quire.engine.recovery",
    "quire.engine.engine",
)


class Bug(NamedTuple):
    """What is planted: in `module`, `old` becomes `new`."""

    name: str
    module: str
    old: str
    new: str


_LEAVE = """        if self.inflight:
            self.inflight[-1].deferred_frees.append(seq)
        else:
            self._free(seq)"""

_MASKS = """        while not self.scheduler.masks_ready:
            self._commit()
        _as_step_failure(self.inflight[-1][2].sample, _as_step_failure(self.scheduler.masks))"""

S, K, B, Q = "scheduler.scheduler", "scheduler.kv_cache", "scheduler.block_pool", "scheduler.sequence"
P, N, T = "scheduler.pins", "scheduler.snapshots", "scheduler.kv_offload"
E, V = "engine.engine", "engine.recovery"

BUGS = [
    Bug("pages freed at once, not with the last plan launched", S, _LEAVE, "        self._free(seq)"),
    Bug(
        "blocks are freed with the oldest plan in flight",
        S,
        "self.inflight[-1].deferred_frees.append",
        "self.inflight[0].deferred_frees.append",
    ),
    Bug(
        "reserve forgets steps in flight",
        S,
        "length + seq.max_inflight - seq.num_unscheduled + num_tokens",
        "length - seq.num_unscheduled + num_tokens",
    ),
    Bug(
        "reserve counts one token per step in flight, not 1+k",
        S,
        "length + seq.max_inflight",
        "length + seq.num_inflight",
    ),
    Bug("end by count not predicted", S, "if length + seq.num_inflight >= seq.max_length:", "if False:"),
    Bug(
        "end by count predicted one step early",
        S,
        "length + seq.num_inflight >= seq.max_length:",
        "length + seq.num_inflight + 1 >= seq.max_length and seq.num_inflight:",
    ),
    Bug("tokens after a stop inside a verify kept", Q, "        del new_tokens[end:], self.tokens[base + end :]\n", ""),
    Bug(
        "published one token too far",
        K,
        "while seq.next_cache_at <= seq.num_computed and",
        "while seq.next_cache_at <= seq.num_computed + 1 and",
    ),
    Bug(
        "chunk published when planned, not when committed",
        S,
        "                seq.num_unscheduled -= num_tokens\n",
        "                seq.num_unscheduled -= num_tokens\n                seq.num_computed += num_tokens\n                self.kv.cache_blocks(seq)\n                seq.num_computed -= num_tokens\n",
    ),
    Bug(
        "preempted row opened while still in flight",
        S,
        "rows = self.free_rows and seq.row is None",
        "rows = self.free_rows",
    ),
    Bug(
        "a background request is not preempted",
        S,
        "if running and running[0].priority >= BACKGROUND and",
        "if running and running[0].priority > BACKGROUND and",
    ),
    Bug(
        "gaps are not waited for",
        S,
        "if seq.priority >= BACKGROUND and self.running and",
        "if seq.priority > BACKGROUND and",
    ),
    Bug(
        "abort forgets the waiting queue",
        S,
        "        if seq.row is None:\n            self.waiting.discard(seq)",
        "        if seq.row is None:\n            pass",
    ),
    Bug(
        "abort forgets a preempted row with a step in flight",
        S,
        "        else:  # its row is freed already with a step in flight; it may have been preempted into the queue\n            self.waiting.discard(seq)\n",
        "",
    ),
    Bug(
        "masks made before the step ahead is committed",
        E,
        _MASKS,
        "        self.inflight[-1][2].sample(self.scheduler.masks())",
    ),
    Bug("masks do not walk the drafts", S, "seq.draft_tokens[: spans[j].num_samples - 1] if drafted else (),", "(),"),
    Bug(
        "masks asked for after the depth check",
        E,
        "self._masks_due = bool(plan and plan.masked_spans)",
        "self._masks_due = bool(plan and plan.masked_spans and len(flight) == 1)",
    ),
    Bug(
        "row number given back at once",
        S,
        "            self.inflight[-1].deferred_frees.append(seq)",
        "            self.inflight[-1].deferred_frees.append(seq)\n            self.rows.append(seq.row)",
    ),
    Bug("decode span reused though the row moved", S, " or span.row != seq.row", ""),
    Bug("span reused though a verify is not a chunk", S, " or span.num_samples != num_samples", ""),
    Bug(
        "'same spans' compares lengths only",
        S,
        "if self._last_spans != (current :=",
        "if len(self._last_spans) != len(current :=",
    ),
    Bug("prefix hits not sent", K, "num_sent = seq.capacity // self.block_size", "num_sent = len(seq.blocks)"),
    Bug(
        "an open row keeps its old draft count",
        K,
        "seq.num_unscheduled, seq.num_drafts, seq.capacity = len(seq.tokens) - seq.num_computed, 0, 0",
        "seq.num_unscheduled, seq.capacity = len(seq.tokens) - seq.num_computed, 0",
    ),
    Bug("spare page in the pool", B, "list(range(num_blocks, 0, -1))", "list(range(num_blocks, -1, -1))"),
    Bug("the last token's place: one too few", K, "min(length, seq.max_length - 1)", "min(length, seq.max_length - 2)"),
    Bug(
        "pending not given back when a row ended",
        S,
        "            if span.num_samples:\n                seq.num_inflight -= 1",
        "            if span.num_samples and not seq.finish_reason:\n                seq.num_inflight -= 1",
    ),
    Bug("a taken page stays in the index", B, "            self.prefix_cache.remove(block)\n", ""),
    Bug("whole prompt matched, last token not fed", K, "seq.prefix_tokens[:-1]", "seq.tokens"),
    Bug(
        "prefix hits taken although prompt logits are wanted",
        K,
        "whole = seq.needs_prompt_logits or ",
        "whole = ",
    ),
    Bug(
        "prompt log-probabilities reported twice after a preemption",
        Q,
        "max(0, self.prompt_logprobs_sent - self.num_computed)",
        "0",
    ),
    Bug(
        "followers forgotten when their leader ends",
        S,
        "        self.waiting.unpark(seq)\n        if seq.row is None",
        "        if seq.row is None",
    ),
    Bug("followers forgotten when their leader is preempted", S, "        self.waiting.unpark(victim)\n", ""),
    Bug(
        "followers forgotten when a step fails",
        S,
        "            self.waiting.unpark(seq)\n            self._free",
        "            self._free",
    ),
    Bug("a finished request still claims a block", S, "        self.kv.drop_inflight_prefix(seq)\n", ""),
    Bug(
        "a shared block leaves the eviction policy twice",
        B,
        "        if self.ref_counts[block] == 0:\n            self.eviction_policy.remove(block)\n        self.ref_counts",
        "        self.ref_counts",
    ),
    Bug("a dropped cached page counts as blank", B, "if self.prefix_cache.contains(block):", "if False:"),
    Bug("the bound of pins is not kept", P, "if len(self.pinned) >= self.max_blocks and", "if False and"),
    Bug("an evicted block stays pinned", P, '        self._unpin(block, "evicted")\n', ""),
    Bug(
        "a pin that is extended keeps its first end on the heap of ends",
        P,
        "        heapq.heappush(ends, (end, -place, block))\n",
        "        if known is None:\n            heapq.heappush(ends, (end, -place, block))\n",
    ),
    Bug(
        "only the first owner's pins expire", P, "for owner in list(self._ends):", "for owner in list(self._ends)[:1]:"
    ),
    Bug("an emptied prefix cache keeps its pins", K, "UNLIMITED\n        self.pins.clear()\n", "UNLIMITED\n"),
    Bug("recovery keeps the prefix index", S, "        self.kv.reset()\n", ""),
    Bug("recovery keeps pending spans", S, "            seq.num_inflight = seq.max_inflight = 0\n", ""),
    Bug(
        "recovery forgets rows with a step in flight",
        S,
        "        lost = {id(s): s for step in self.inflight for s in (*step.seqs, *step.deferred_frees) if s.row is not None}\n",
        "        lost: dict[int, Sequence] = {}\n",
    ),
    Bug(
        "recovery blames a failure in a batch",
        V,
        "        if len(lost) == 1 and beside <= {id(lost[0])}:\n",
        "        if lost:\n",
    ),
    Bug(
        "recovery forgets those it held back",
        V,
        "everyone = [*waiting.drain(), *self.parked]",
        "everyone = waiting.drain()",
    ),
    Bug(
        "an abort during a trial holds the rest for ever",
        E,
        "            if self.recovery.active:\n                self.recovery.on_step_passed(())\n",
        "",
    ),
    Bug(
        "a sick row takes its batch along",
        S,
        '                self._finish(seq, "error")\n',
        '                for other in list(step.sequences):\n                    if other.finish_reason is None:\n                        self._finish(other, "error")\n',
    ),
    Bug(
        "short row preempts although blocks are about to be freed",
        S,
        "if needed <= pool.num_free + deferred:",
        "if False:",
    ),
]

STATES = [
    Bug("K/V is found that has no state", N, "found = self._resumable(path)", "found = len(path)"),
    Bug(
        "a block is evicted without its snapshot",
        N,
        "        if block in self.snapshots:\n            self.num_evicted += 1\n            self._drop(block)\n",
        "",
    ),
    Bug(
        "an evicted snapshot can still be found",
        N,
        "append(self.snapshots.pop(block))",
        "append(self.snapshots[block])",
    ),
    Bug(
        "the state of a shallower block",
        N,
        "self.cache.use(seq.blocks[-1])",
        "next(iter(self.cache.snapshots.values()))",
    ),
    Bug("the state one token too early", N, "(j, length - start, slot)", "(j, max(1, length - start - 1), slot)"),
    Bug(
        "a snapshot is attached to the block before",
        N,
        "block = path[-1][0] if len(path) * self.block_size == len(tokens) else None",
        "block = path[-2:][0][0] if path else None",
    ),
    Bug(
        "a snapshot without its block goes to the last one there",
        N,
        "if len(path) * self.block_size == len(tokens) else None",
        "if path else None",
    ),
    Bug(
        "snapshots of tokens that may be dropped",
        N,
        "if seq.max_inflight == seq.num_inflight and (slot :=",
        "if (slot :=",
    ),
    Bug(
        "a slot is given back while a step may write it",
        N,
        "        for block in list(self.snapshots):\n            self._drop(block)\n",
        "        self.snapshots.clear()\n        self.free_slots = list(range(self.num_snapshots, 0, -1))\n",
    ),
    Bug(
        "snapshots survive a reset",
        N,
        "        for block in list(self.snapshots):\n            self._drop(block)\n",
        "",
    ),
    Bug(
        "a preempted sequence forgets its slots",
        N,
        "        self.cache.free_slots += (slot for _, slot in seq.snapshots_inflight)\n",
        "",
    ),
    Bug("the last row's snapshot is used again", N, "if cached else 0", "if cached else seq.snapshot"),
    Bug("a row is not told from which state it goes on", Q, "snapshot=self.snapshot", "snapshot=0"),
]
"""Bugs of recurrent states, which combinations without them do not show."""

AHEAD = [
    Bug("blocks that are being saved are overwritten", T, "self._overwritten.append(block)", "pass"),
]
"""Of tiers whose host memory holds more than the device."""

TIERS = [
    Bug("a block is loaded that has not arrived", T, "if entry.ready or key in self._lookup:", "if True:"),
    Bug(
        "what failed to arrive is found",
        T,
        "                if entry.key in done.failed:\n                    break\n",
        "",
    ),
    Bug("a failed copy is kept", T, "if entry.key in done.failed and not entry.dropped:", "if False:"),
    Bug("saves are forgotten after a reset", T, '            if copy.kind == "save":\n', "            if False:\n"),
    Bug("a slot is given away while a copy uses it", T, "if each.ready and not each.users", "if each.ready"),
    Bug(
        "a dropped slot is given away while a copy uses it",
        T,
        "        if not entry.users:\n            self.free_slots.append(entry.slot)\n\n    def _release",
        "        self.free_slots.append(entry.slot)\n\n    def _release",
    ),
    Bug("slots of dropped blocks leak", T, "if entry.dropped and not entry.users:", "if False:"),
    Bug("the prefix is not held while more of it comes", T, "            pool.incref(block)\n", "            pass\n"),
    Bug("blocks that came back are never free", T, "            pool.decref(block)\n", "            pass\n"),
    Bug("evicted blocks keep their keys", T, "key = self.keys.pop(block, None)", "key = self.keys.get(block)"),
    Bug(
        "evicted blocks count as come back",
        T,
        "        self.arrived.pop(block, None)\n        self._ahead",
        "        self._ahead",
    ),
    Bug("more files than allowed", T, "        self._make_room_on_disk(1)\n", ""),
    Bug("a waiting sequence is forgotten", T, "            freed += copy.waiters\n        for", "        for"),
    Bug(
        "a suspect that waited for blocks is held back from its own trial",
        V,
        "if self.active and not on_trial and seq",
        "if self.active and seq",
    ),
    Bug(
        "the wrong block of a prefix comes back",
        T,
        "[len(held) : len(known) // size]",
        "[len(held) + 1 : len(known) // size]",
    ),
]
"""Bugs of K/V tiers."""

PREFILLS = [
    Bug(
        "blocks of a prefill engine are counted from the wrong one",
        T,
        "size, first = self.block_size, num_held + len(run)",
        "size, first = self.block_size, len(run)",
    ),
    Bug("a block is received into a second slot", T, "if key in self.host or (slot :=", "if (slot :="),
    Bug(
        "blocks that are received are found before they come",
        T,
        'if copy.kind in ("load", "read", "receive"):',
        'if copy.kind in ("load", "read"):',
    ),
    Bug(
        "a block that did not come is used",
        T,
        "if entry.key in done.failed and not entry.dropped:",
        'if entry.key in done.failed and not entry.dropped and copy.kind != "receive":',
    ),
]
"""Bugs of blocks that a prefill engine sends."""

HARMLESS = [
    Bug("span reused though prompt logits are wanted", S, " or span.num_logits != num_logits", ""),
    Bug(
        "preempted row's token in flight dropped",
        S,
        "            elif new_tokens or j not in result.errors:",
        "            elif seq in self.waiting:\n                pass\n            elif new_tokens or j not in result.errors:",
    ),
]
"""These only cost work: every answer stays right. Kept to show that the lattice fails only for bugs."""


def plant(bug: Bug) -> CoreClasses:
    """The core with `bug` in it. The real modules are untouched."""
    saved = {name: sys.modules.pop(name) for name in _REBUILT}
    try:
        for name in _REBUILT:
            if name == f"quire.{bug.module}":
                _load(name, str(saved[name].__file__), bug)
            else:
                importlib.import_module(name)
        new = {name: sys.modules[name] for name in _REBUILT}
    finally:
        for name, module in saved.items():
            sys.modules[name] = module
            package, _, leaf = name.rpartition(".")
            setattr(sys.modules[package], leaf, module)
    reuse = new["quire.scheduler.block_pool"]
    return CoreClasses(
        KVCacheManager=new["quire.scheduler.kv_cache"].KVCacheManager,
        Scheduler=new["quire.scheduler.scheduler"].Scheduler,
        Engine=new["quire.engine.engine"].Engine,
        NoPrefixCache=reuse.NoPrefixCache,
        RadixPrefixCache=reuse.RadixPrefixCache,
        HybridPrefixCache=new["quire.scheduler.snapshots"].HybridPrefixCache,
        KVOffload=new["quire.scheduler.kv_offload"].KVOffload,
    )


def _load(name: str, path: str, bug: Bug) -> None:
    source = Path(path).read_text()
    assert source.count(bug.old) == 1, f"{bug.name}: its place is there {source.count(bug.old)} times"
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    exec(compile(source.replace(bug.old, bug.new), f"<{bug.name}>", "exec"), module.__dict__)
    package, _, leaf = name.rpartition(".")
    setattr(sys.modules[package], leaf, module)
