"""The engine's state as plain data, and back: what a segment of a recording begins with.

A graph of known classes: what several parts share they still share when it is restored. Fields are taken as they are,
so that a new one needs nothing here; one that an older recording lacks has the value it has in an engine just made.
Token ids do not get in: sequences and the prefix index are written under the names of their pages.
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from quire.engine import recovery, stats, timing
from quire.errors import InvalidConfig
from quire.scheduler import block_pool, kv_cache, prefix_cache, queue, scheduler, sequence, speculation, step_time
from quire.scheduler.constraint import FREE, PENDING, Constraint
from quire.scheduler.plan import NewSequence, Plan, Span
from quire.scheduler.policy import POLICIES, SchedulingPolicy, policy_name
from quire.scheduler.sequence import Decision, InflightStep
from quire.types import Request, SamplingParams

STOP = 1
"""The disguise of a token that ends its request; 0 is that of any other but a page's last, which is the page's name."""


class HashChain:
    """The pages of one sequence, named one after another."""

    __slots__ = ("_hash",)

    def __init__(self, hash: blake2b) -> None:
        self._hash = hash

    def name(self, tokens: Sequence[int]) -> int:
        """Of the next page, which has these tokens; 2 or more."""
        hash = self._hash
        hash.update(array("q", tokens))
        return int.from_bytes(hash.copy().digest(), "little") >> 1 | 2

    def copy(self) -> HashChain:
        return HashChain(self._hash.copy())


class Anonymizer:
    """Of one recording. page_size in tokens; MANY: pages are never full, and need no names."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._key = secrets.token_bytes(32)
        self._root = blake2b(digest_size=8, key=self._key)

    def chain(self) -> HashChain:
        """Of a sequence none of whose pages has a name."""
        return HashChain(self._root.copy())

    def begun(self, tokens: Sequence[int]) -> tuple[HashChain, list[int]]:
        """Of a sequence that begins with these tokens, and the names of their full pages."""
        size, chain = self.page_size, self.chain()
        return chain, [chain.name(tokens[end - size : end]) for end in range(size, len(tokens) + 1, size)]

    def pages(self, tokens: Sequence[int]) -> list[int]:
        """Names of the full pages of these tokens, which are a sequence's from its beginning."""
        return self.begun(tokens)[1]

    def salt(self, salt: str) -> str:
        """Of a salt; an empty one stays so."""
        return blake2b(salt.encode(), digest_size=8, key=self._key, person=b"salt").hexdigest() if salt else ""


def anonymized_tokens(tokens: int, names: Sequence[int], page_size: int) -> list[int]:
    """So many tokens whose full pages have these names."""
    out = [0] * tokens
    for i, name in enumerate(names, 1):
        out[i * page_size - 1] = name
    return out


Classes = Mapping[str, Any]

ENGINE_STATE = ("scheduler", "step_budget", "recovery", "stats", "lookahead", "failures", "_deadlines", "_last_commit")
"""What an engine's decisions depend on, by its attributes; what flies is beside them."""

_NOBODY = Request(id="", prompt=(0,), max_new_tokens=1)

FRESH: Mapping[str, Callable[[Classes], Any]] = MappingProxyType(
    {
        "Scheduler": lambda known: known["Scheduler"](known["KVCacheManager"](1, 1)),
        "KVCacheManager": lambda known: known["KVCacheManager"](1, 1),
        "BlockPool": lambda known: known["BlockPool"](1, known["NoPrefixCache"]()),
        "RadixPrefixCache": lambda known: known["RadixPrefixCache"](1),
        "Sequence": lambda known: known["Sequence"](_NOBODY, 0, [], 0),
        "AdaptiveDrafts": lambda known: known["AdaptiveDrafts"](1),
        "LatencyController": lambda known: known["LatencyController"](0.0),
        "Recovery": lambda known: known["Recovery"](known["Scheduler"](known["KVCacheManager"](1, 1))),
        "EngineStats": lambda known: known["EngineStats"](0),
        "RequestTimes": lambda known: known["RequestTimes"](known["Sequence"](_NOBODY, 0, [], 0), 0.0),
    }
)
"""How to make one of a class whose fields are then set; others are made of nothing."""

CLASSES: Classes = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (
            scheduler.Scheduler,
            kv_cache.KVCacheManager,
            block_pool.BlockPool,
            block_pool.Lru,
            block_pool.Fifo,
            prefix_cache.NoPrefixCache,
            prefix_cache.RadixPrefixCache,
            queue.WaitingQueue,
            sequence.Sequence,
            speculation.DraftStats,
            speculation.FixedDrafts,
            speculation.AdaptiveDrafts,
            step_time.StepTimeModel,
            timing.LatencyController,
            recovery.Recovery,
            stats.EngineStats,
            stats.RequestTimes,
        )
    }
)
"""What a state is made of."""

_TUPLES = MappingProxyType({kind.__name__: kind for kind in (Plan, Span, NewSequence, InflightStep, Decision)})
_PLAIN = (int, float, str, bool, type(None))
_MADE_ANEW = MappingProxyType(
    {"KVCacheManager": {"inflight_prefixes"}, "EngineStats": {"completed"}, "RadixPrefixCache": {"edges"}}
)
"""Of the rest; or no part of any decision."""
_OF_SEQUENCE = frozenset({"request", "tokens", "constraint", "inflight_prefix", "draft_tokens"})

MAX_STATE_TOKENS = 1 << 27
"""Tokens of all sequences of a state that is read."""


class ReplayedConstraint:
    """A constraint that was there: what its masks allowed is told by the tokens that came."""

    def masks(self, output: Any, drafts: Any) -> list[Any]:
        return [None] * (1 + len(drafts))

    def why(self) -> str:
        return ""


REPLAYED = ReplayedConstraint()
CONSTRAINTS: tuple[Constraint, ...] = (FREE, REPLAYED, PENDING)


def constraint_of(seq: Any) -> int:
    """Which of CONSTRAINTS stands for a sequence's."""
    return 0 if seq.constraint is FREE else 2 if seq.constraint is PENDING else 1


def recorded_request(told: Any, page_size: int) -> Request:
    """A request under its disguise: as `Arrived`, and as `told` in a state."""
    id, tokens, names, max_new, priority, deadline, salt, choice, stops, asks, pooling = told
    return Request(
        id=id,
        prompt=tuple(anonymized_tokens(tokens, names, page_size)),
        max_new_tokens=max_new,
        sampling=SamplingParams(prompt_logprobs=0 if asks else None, pooling=pooling),
        stop=frozenset({STOP} if stops else ()),
        choice=choice,
        priority=priority,
        deadline=deadline,
        cache_salt=salt,
    )


def request_fields(request: Request, names: list[int], salt: str) -> tuple[Any, ...]:
    """What is recorded of a request: nothing that was said in it."""
    sampling = request.sampling
    return (
        *(request.id, len(request.prompt), names, request.max_new_tokens, request.priority, request.deadline, salt),
        *(request.choice, bool(request.stop), sampling.prompt_logprobs is not None, sampling.pooling),
    )


def pack(roots: dict[str, Any], disguise: Anonymizer) -> list[Any]:
    """Plain data for msgpack: a list of nodes, the first one the roots."""
    return _Packer(roots, disguise).nodes


class _Packer:
    """numbers: of nodes, by identity. names: of the page that leads to a place of the prefix index, by identity."""

    def __init__(self, roots: dict[str, Any], disguise: Anonymizer) -> None:
        self.disguise = disguise
        self.numbers, self.names = dict[int, int](), dict[int, int]()
        self.todo, self.nodes = deque[Any](), list[Any]()
        self._name_places(roots["scheduler"])
        self._value(roots)
        while self.todo:
            self.nodes.append(self._node(self.todo.popleft()))

    def _name_places(self, scheduler: Any) -> None:
        """From the root, from where sequences stand, and what is cut off from both and waits to be overwritten."""
        index = scheduler.kv.prefix_cache
        if type(index).__name__ != "RadixPrefixCache":
            return
        self._walk(index.root, self.disguise.chain())
        flying = [s for step in scheduler.inflight for s in (*step.seqs, *step.deferred_frees)]
        for seq in (*flying, *scheduler.sequences.values()):
            if seq.prefix_node is not None and id(seq.prefix_node) not in self.names:
                self._walk(seq.prefix_node, self.disguise.begun(seq.tokens[: seq.next_cache_at - index.block_size])[0])
        for node, _ in index.edges.values():
            if id(node) not in self.names:
                chain = self.disguise.chain()
                chain.name([id(node)])
                self._walk(node, chain)

    def _walk(self, node: Any, chain: HashChain) -> None:
        size, todo = self.disguise.page_size, [(node, chain, 0)]
        while todo:
            node, chain, name = todo.pop()
            if id(node) not in self.names:
                self.names[id(node)] = name
                for key, (_, below) in node.items():
                    on = chain.copy()
                    todo.append((below, on, on.name(key[-size:])))

    def _node(self, it: Any) -> list[Any]:
        kind = type(it).__name__
        if id(it) in self.names:
            return ["place", [self._edge(key, page, below) for key, (page, below) in it.items()]]
        if isinstance(it, dict):
            return [kind, [[self._value(k), self._value(v)] for k, v in it.items()]]
        if isinstance(it, deque):
            return [kind, [it.maxlen, [self._value(v) for v in it]]]
        if isinstance(it, list | set):
            return [kind, [self._value(v) for v in it]]
        if kind not in CLASSES:
            return ["unknown", kind]
        out = _MADE_ANEW.get(kind, _OF_SEQUENCE if kind == "Sequence" else ())
        told = [[name, self._value(value)] for name, value in _fields(it) if name not in out]
        if kind == "Sequence":
            told += self._sequence(it)
        elif kind == "RadixPrefixCache":
            told.append(["edges", [[page, *self._value(node)] for page, (node, _) in it.edges.items()]])
        return [kind, told]

    def _edge(self, key: Any, page: int, below: Any) -> list[Any]:
        salted = len(key) > self.disguise.page_size
        return [page, self.names[id(below)], self.disguise.salt(key[0]) if salted else "", *self._value(below)]

    def _sequence(self, seq: Any) -> list[Any]:
        names = self.disguise.pages(seq.tokens)
        of_prompt = names[: len(seq.request.prompt) // self.disguise.page_size]
        request = request_fields(seq.request, of_prompt, self.disguise.salt(seq.request.cache_salt))
        return [
            ["request", request],
            ["tokens", [len(seq.tokens), names]],
            ["constraint", constraint_of(seq)],
            ["inflight_prefix", seq.inflight_prefix is not None],
        ]

    def _value(self, it: Any) -> Any:
        """A scalar as it is; what may be shared as [number]; what may not as [what, parts]."""
        if isinstance(it, _PLAIN):
            return it
        kind = type(it).__name__
        if isinstance(it, NewSequence):
            return ["NewSequence", [it.row, ["tuple", []], it.num_computed, it.prompt_length]]
        if isinstance(it, tuple):
            return [kind if kind in _TUPLES else "tuple", [self._value(v) for v in it]]
        if isinstance(it, SchedulingPolicy):
            return ["policy", [policy_name(it), it.batching, it.pressure]]
        number = self.numbers.get(id(it))
        if number is None:
            number = self.numbers[id(it)] = len(self.numbers)
            self.todo.append(it)
        return [number]


def _fields(it: Any) -> Iterator[tuple[str, Any]]:
    """What it has, but for methods that somebody has wrapped."""
    names = [field.name for field in fields(it)] if is_dataclass(it) else list(vars(it))
    for name in names:
        value = getattr(it, name)
        if not callable(value) or name not in vars(type(it)):
            yield name, value


def restore(nodes: Any, known: Classes = CLASSES) -> dict[str, Any]:
    """The roots that were packed. known: the classes to make them of.

    Raises InvalidConfig for what is no state.
    """
    try:
        return _Restorer(nodes, known).roots
    except InvalidConfig:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError, OverflowError, StopIteration) as error:
        raise InvalidConfig(f"the recording begins with no state of an engine: {error!r}") from error


class _Restorer:
    def __init__(self, nodes: Any, known: Classes) -> None:
        self.known, self.tokens = known, 0
        self.made = [self._make(*node) for node in nodes]
        self.block_size = next(
            it.prefix_cache.block_size for it in self._filled(nodes) if isinstance(it, known["KVCacheManager"])
        )
        for it, node in zip(self.made, nodes, strict=True):
            if node[0] == "place":
                self._place(it, node[1])
        for it, node in zip(self.made, nodes, strict=True):
            if node[0] == "Sequence":
                self._sequence(it, dict(node[1]))
            elif node[0] == "RadixPrefixCache":
                self._where(it, dict(node[1])["edges"])
        self.roots: dict[str, Any] = self.made[0]
        self._claims()

    def _make(self, kind: str, told: Any) -> Any:
        if kind == "unknown":
            return None
        if kind == "deque":
            return deque(maxlen=told[0])
        plain = {"list": list, "set": set, "dict": dict, "OrderedDict": OrderedDict, "place": dict}
        if kind in plain:
            return plain[kind]()
        if kind not in self.known:
            raise InvalidConfig(f"the recording's engine has a {kind!r}, which this quire does not know")
        return FRESH[kind](self.known) if kind in FRESH else self.known[kind]()

    def _filled(self, nodes: Any) -> list[Any]:
        for it, (kind, told) in zip(self.made, nodes, strict=True):
            if kind in ("dict", "OrderedDict"):
                it.update((self._value(k), self._value(v)) for k, v in told)
            elif kind in ("list", "deque"):
                it.extend(map(self._value, told if kind == "list" else told[1]))
            elif kind == "set":
                it.update(map(self._value, told))
            elif kind not in ("place", "unknown"):
                self._fill(it, kind, told)
        return self.made

    def _fill(self, it: Any, kind: str, told: Any) -> None:
        known = {name for name, _ in _fields(it)} | set(vars(type(it)))
        special = _OF_SEQUENCE if kind == "Sequence" else _MADE_ANEW.get(kind, ())
        for name, value in told:
            if name in known and name not in special:
                setattr(it, name, self._value(value))

    def _value(self, told: Any) -> Any:
        if not isinstance(told, list):
            return told
        if isinstance(told[0], int):
            return self.made[told[0]]
        kind, parts = told
        if kind == "policy":
            return self._policy(*parts)
        values = map(self._value, parts)
        return tuple(values) if kind == "tuple" else _TUPLES[kind](*values)

    def _policy(self, name: str, batching: Any, pressure: Any) -> SchedulingPolicy:
        """Of a class of the user's: only if it was handed in, for a file must not choose what is imported."""
        kind = POLICIES.get(name) or self.known.get(name)
        if kind is None:
            raise InvalidConfig(
                f"the recording was made with a scheduling policy of its own: give --scheduling-policy {name}"
            )
        policy: SchedulingPolicy = kind(batching=batching, pressure=pressure)
        return policy

    def _place(self, place: Any, edges: Any) -> None:
        for page, name, salt, below in edges:
            key = anonymized_tokens(self.block_size, [name], self.block_size)
            place[(salt, *key) if salt else tuple(key)] = (page, self.made[below])

    def _where(self, index: Any, told: Any) -> None:
        keys = {
            page: key for place in {id(p): p for p in self._places(told)}.values() for key, (page, _) in place.items()
        }
        index.edges.update((page, (self.made[place], keys[page])) for page, place in told)

    def _places(self, told: Any) -> Iterator[Any]:
        return (self.made[place] for _, place in told)

    def _sequence(self, seq: Any, told: dict[str, Any]) -> None:
        count, names = told["tokens"]
        self.tokens += count + told["request"][1]
        if self.tokens > MAX_STATE_TOKENS:
            raise InvalidConfig(f"the recording's sequences have more than {MAX_STATE_TOKENS} tokens")
        seq.request = recorded_request(told["request"], self.block_size)
        seq.tokens = anonymized_tokens(count, names, self.block_size)
        seq.constraint = CONSTRAINTS[told["constraint"]]
        seq.inflight_prefix = told["inflight_prefix"] or None

    def _claims(self) -> None:
        pages = self.roots["scheduler"].kv
        for seq in self.made:
            if isinstance(seq, self.known["Sequence"]) and seq.inflight_prefix is not None:
                start = seq.next_cache_at - pages.block_size
                seq.inflight_prefix = (
                    id(seq.prefix_node),
                    pages.prefix_cache.key(seq.tokens, start, seq.request.cache_salt),
                )
                pages.inflight_prefixes[seq.inflight_prefix] = seq
