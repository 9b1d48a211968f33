"""Planted bugs, and a house built with one of them in it. The lattice must notice every one."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import NamedTuple

from tests.lattice import House

_REBUILT = (
    "quire.core.reuse",
    "quire.core.sequence",
    "quire.core.blocks",
    "quire.core.kv",
    "quire.core.queue",
    "quire.core.step",
    "quire.core.scheduler",
    "quire.engine.events",
    "quire.engine.ledger",
    "quire.engine.recovery",
    "quire.engine.engine",
)


class Bug(NamedTuple):
    """What is planted: in `module`, `old` becomes `new`."""

    name: str
    module: str
    old: str
    new: str


_LEAVE = """        if self.flight:
            self.flight[-1].graves.append(seq)
        else:
            self._bury(seq)"""

_MASKS = """            while len(flight) > 1:
                self._commit()
            _tried(flight[0][2].sample, _tried(scheduler.masks))"""

S, K, B, Q = "core.scheduler", "core.kv", "core.blocks", "core.sequence"
E, V = "engine.engine", "engine.recovery"

BUGS = [
    Bug("pages freed at once, not with the last plan launched", S, _LEAVE, "        self._bury(seq)"),
    Bug(
        "pages go home with the oldest plan in flight",
        S,
        "self.flight[-1].graves.append",
        "self.flight[0].graves.append",
    ),
    Bug("reserve forgets steps in flight", S, "known + seq.reach - seq.unfed + n", "known - seq.unfed + n"),
    Bug("reserve counts one token per step in flight, not 1+k", S, "known + seq.reach", "known + seq.pending"),
    Bug("end by count not foreseen", S, "if known + seq.pending >= seq.limit:", "if False:"),
    Bug(
        "end by count foreseen one step early",
        S,
        "known + seq.pending >= seq.limit:",
        "known + seq.pending + 1 >= seq.limit and seq.pending:",
    ),
    Bug("tokens after a stop inside a verify kept", Q, "        del got[end:], self.tokens[base + end :]\n", ""),
    Bug(
        "published one token too far", K, "while seq.mark <= seq.computed and", "while seq.mark <= seq.computed + 1 and"
    ),
    Bug(
        "chunk published when planned, not when committed",
        S,
        "                seq.unfed -= n\n",
        "                seq.unfed -= n\n                seq.computed += n\n                self.kv.publish(seq)\n"
        "                seq.computed -= n\n",
    ),
    Bug("preempted row opened while still in flight", S, "rows = self.rows and seq.row is None", "rows = self.rows"),
    Bug(
        "who runs in the gaps does not make way",
        S,
        "if running and running[0].priority >= IDLE and",
        "if running and running[0].priority > IDLE and",
    ),
    Bug("gaps are not waited for", S, "if seq.priority >= IDLE and self.running and", "if seq.priority > IDLE and"),
    Bug(
        "abort forgets the waiting queue",
        S,
        "        if seq.row is None:\n            self.waiting.discard(seq)",
        "        if seq.row is None:\n            pass",
    ),
    Bug(
        "abort forgets a preempted row on its way home",
        S,
        "        else:  # its row is on the way home already; it may have been preempted into the queue\n            self.waiting.discard(seq)\n",
        "",
    ),
    Bug(
        "masks made before the step ahead is committed",
        E,
        _MASKS,
        "            scheduler.flight.rotate(1)\n            masks = scheduler.masks()\n            scheduler.flight.rotate(-1)\n            flight[-1][2].sample(masks)",
    ),
    Bug("masks do not walk the drafts", S, "seq.drafts[: rows - 1])\n", "[])\n"),
    Bug(
        "masks asked for after the depth check",
        E,
        "if plan and plan.masked:",
        "if plan and plan.masked and len(flight) == 1:",
    ),
    Bug(
        "row number given back at once",
        S,
        "            self.flight[-1].graves.append(seq)",
        "            self.flight[-1].graves.append(seq)\n            self.rows.append(seq.row)",
    ),
    Bug("decode span reused though the row moved", S, " or span.row != seq.row", ""),
    Bug("span reused though a verify is not a chunk", S, " or span.rows != rows", ""),
    Bug("'same spans' compares lengths only", S, "if self._same != (same :=", "if len(self._same) != len(same :="),
    Bug("prefix hits not sent", K, "sent = seq.room // self.page_size", "sent = len(seq.blocks)"),
    Bug(
        "an open row keeps its old draft count",
        K,
        "seq.unfed, seq.drafting, seq.room = len(seq.tokens) - seq.computed, 0, 0",
        "seq.unfed, seq.room = len(seq.tokens) - seq.computed, 0",
    ),
    Bug("spare page in the pool", B, "list(range(pages, 0, -1))", "list(range(pages, -1, -1))"),
    Bug("the last token's place: one too few", K, "min(upto, seq.limit - 1)", "min(upto, seq.limit - 2)"),
    Bug(
        "pending not given back when a row ended",
        S,
        "            if span.rows:\n                seq.pending -= 1",
        "            if span.rows and not seq.finish:\n                seq.pending -= 1",
    ),
    Bug("a taken page stays in the index", B, "            self.reuse.forget(page)\n", ""),
    Bug("whole prompt matched, last token not fed", K, "seq.tokens[:-1]", "seq.tokens"),
    Bug(
        "prefix hits taken although prompt logits are wanted",
        K,
        "[] if seq.asks or ",
        "[] if ",
    ),
    Bug("prompt log-probabilities told twice after a preemption", Q, "max(0, self.told - self.computed)", "0"),
    Bug(
        "followers forgotten when their leader ends",
        S,
        "        self.waiting.release(seq)\n        if seq.row is None",
        "        if seq.row is None",
    ),
    Bug("followers forgotten when their leader is preempted", S, "        self.waiting.release(victim)\n", ""),
    Bug(
        "followers forgotten when a step fails",
        S,
        "            self.waiting.release(seq)\n            self._bury",
        "            self._bury",
    ),
    Bug("who left still claims a page", S, "        self.kv.unclaim(seq)\n", ""),
    Bug(
        "a shared page leaves the shelf twice",
        B,
        "        if self.refs[page] == 0:\n            self.shelf.remove(page)\n        self.refs",
        "        self.refs",
    ),
    Bug("a dropped cached page counts as blank", B, "if self.reuse.holds(page):", "if False:"),
    Bug("recovery keeps the prefix index", S, "        self.kv.clear()\n", ""),
    Bug("recovery keeps pending spans", S, "            seq.pending = seq.reach = 0\n", ""),
    Bug(
        "recovery forgets rows on their way home",
        S,
        "        lost = {id(s): s for step in self.flight for s in (*step.seqs, *step.graves) if s.row is not None}\n",
        "        lost: dict[int, Sequence] = {}\n",
    ),
    Bug(
        "recovery blames a failure in company",
        V,
        "        if len(lost) == 1 and beside <= {id(lost[0])}:\n",
        "        if lost:\n",
    ),
    Bug(
        "recovery forgets those it held back",
        V,
        "everyone = [*waiting.drain(), *self.held]",
        "everyone = waiting.drain()",
    ),
    Bug(
        "an abort during a trial holds the rest for ever",
        E,
        "            if self.recovery.active:\n                self.recovery.passed(())\n",
        "",
    ),
    Bug(
        "a sick row takes its batch along",
        S,
        '                self._end(seq, "error")\n',
        '                for other in list(step.seqs):\n                    if other.finish is None:\n                        self._end(other, "error")\n',
    ),
    Bug("short row preempts although pages are coming home", S, "if need <= pool.free + coming:", "if False:"),
]

HARMLESS = [
    Bug("span reused though prompt logits are wanted", S, " or span.logits != logits", ""),
    Bug(
        "preempted row's token in flight dropped",
        S,
        "            elif got or j not in result.errors:",
        "            elif seq in self.waiting:\n                pass\n            elif got or j not in result.errors:",
    ),
]
"""These only cost work: every answer stays right. Kept to show that the lattice does not cry wolf."""


def plant(bug: Bug) -> House:
    """The house with `bug` in it. The real modules are untouched."""
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
    reuse = new["quire.core.reuse"]
    return House(
        KV=new["quire.core.kv"].KV,
        Scheduler=new["quire.core.scheduler"].Scheduler,
        Engine=new["quire.engine.engine"].Engine,
        NoReuse=reuse.NoReuse,
        RadixReuse=reuse.RadixReuse,
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
