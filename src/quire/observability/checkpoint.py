"""The engine's state as plain data, and back: each segment of a recording begins with it.

It is a graph of objects of known classes, so that shared objects are shared when it is restored. All fields are
written, so that a new one needs nothing here; a field that an older recording lacks keeps its value of a new engine.

Token ids are not written, but names of blocks. Decisions depend on token ids in two ways only: whether blocks are equal
from the beginning on, and whether a token ends its request. So a block is named by a keyed hash of all tokens up to its
end (as in Mooncake's traces, USENIX FAST'25, but with a key); the key is drawn for each recording and never written.
What is hashed is the key of the block on K/V tiers, so that files of earlier engines, of unknown tokens, have names.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from hashlib import blake2b
from types import MappingProxyType, SimpleNamespace
from typing import Any

from quire.engine import events, recovery, timing
from quire.errors import InvalidConfig
from quire.scheduler import (
    block_pool,
    kv_cache,
    kv_offload,
    kv_transfer,
    pins,
    scheduler,
    sequence,
    snapshots,
    speculation,
    step_time,
)
from quire.scheduler.constraint import FREE, PENDING, Constraint
from quire.scheduler.kv_offload import first_key, next_key
from quire.scheduler.plan import NewSequence, Plan, Span
from quire.scheduler.policy import POLICIES, SchedulingPolicy, policy_name
from quire.scheduler.sequence import Decision, InflightStep, Transfer
from quire.types import Pin, Request, SamplingParams

STOP = 1
"""Stands for a token that ends its request. A block's last token is the block's name, any other token is 0."""


NAME_BYTES = 8


class Anonymizer:
    """Replaces the tokens and salts of one recording. block_size: in tokens; UNLIMITED: no block is ever full."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._secret = secrets.token_bytes(32)

    def name(self, key: bytes) -> int:
        """The name of the block that has this key on K/V tiers; 2 or more."""
        return int.from_bytes(blake2b(key, digest_size=NAME_BYTES, key=self._secret).digest(), "little") >> 1 | 2

    def names(self, tokens: Sequence[int], salt: str) -> tuple[bytes, list[int]]:
        """The key of the last full block of a sequence that begins with these tokens, and the names of all."""
        size, key, names = self.block_size, first_key(salt), list[int]()
        for end in range(size, len(tokens) + 1, size):
            names.append(self.name(key := next_key(key, tokens[end - size : end])))
        return key, names

    def salt(self, salt: str) -> str:
        """A keyed hash of a cache salt; an empty salt stays empty."""
        return blake2b(salt.encode(), digest_size=8, key=self._secret, person=b"salt").hexdigest() if salt else ""


def anonymized_tokens(count: int, names: Sequence[int], block_size: int) -> list[int]:
    """`count` tokens whose full blocks have these names."""
    tokens = [0] * count
    for i, name in enumerate(names, 1):
        tokens[i * block_size - 1] = name
    return tokens


def named_key(_: bytes, tokens: Sequence[int]) -> bytes:
    """The key on K/V tiers of an anonymized block: its name stands for all tokens up to its end."""
    return tokens[-1].to_bytes(NAME_BYTES, "little")


Classes = Mapping[str, Any]

ENGINE_STATE = (
    "scheduler",
    "step_budget",
    "recovery",
    "stats",
    "lookahead",
    "failures",
    "_deadlines",
    "_last_commit",
    "_masks_due",
)
"""Attributes of an engine that its decisions depend on; steps in flight are written beside them."""

_NO_REQUEST = Request(id="", prompt=(0,), max_new_tokens=1)
_NO_STORE: Any = SimpleNamespace(num_slots=0, block_bytes=0, max_files=0, files=tuple)

FRESH: Mapping[str, Callable[[Classes], Any]] = MappingProxyType(
    {
        "Scheduler": lambda known: known["Scheduler"](known["KVCacheManager"](1, 1)),
        "KVCacheManager": lambda known: known["KVCacheManager"](1, 1),
        "BlockPool": lambda known: known["BlockPool"](1, known["NoPrefixCache"]()),
        "Pins": lambda known: known["Pins"](known["Lru"]()),
        "RadixPrefixCache": lambda known: known["RadixPrefixCache"](1),
        "HybridPrefixCache": lambda known: known["HybridPrefixCache"](1, 0),
        "StateSnapshots": lambda known: known["StateSnapshots"](
            known["HybridPrefixCache"](1, 0), known["Pins"](known["Lru"]())
        ),
        "Sequence": lambda known: known["Sequence"](_NO_REQUEST, 0, [], 0),
        "AdaptiveDrafts": lambda known: known["AdaptiveDrafts"](1),
        "LatencyController": lambda known: known["LatencyController"](0.0),
        "Recovery": lambda known: known["Recovery"](known["Scheduler"](known["KVCacheManager"](1, 1))),
        "EngineStats": lambda known: known["EngineStats"](0),
        "RequestTimes": lambda known: known["RequestTimes"](known["Sequence"](_NO_REQUEST, 0, [], 0), 0.0),
        "KVOffload": lambda known: known["KVOffload"](_NO_STORE, 1),
        "PrefillOffload": lambda known: known["PrefillOffload"](_NO_STORE, 1, None),
        "HostBlock": lambda known: known["HostBlock"](b"", 0, False),
        "PendingCopy": lambda known: known["PendingCopy"]("save", []),
        "Export": lambda known: known["Export"](0, 0),
    }
)
"""How to construct classes whose constructors need arguments. Fields are set afterwards."""

_KINDS = (
    *(scheduler.Scheduler, scheduler.WaitingQueue, sequence.Sequence, step_time.StepTimeModel, kv_cache.KVCacheManager),
    *(block_pool.BlockPool, block_pool.Lru, block_pool.Fifo, block_pool.NoPrefixCache, block_pool.RadixPrefixCache),
    *(pins.Pins, snapshots.HybridPrefixCache, snapshots.NoSnapshots, snapshots.StateSnapshots),
    *(speculation.DraftStats, speculation.FixedDrafts, speculation.AdaptiveDrafts, timing.LatencyController),
    *(recovery.Recovery, events.EngineStats, events.RequestTimes, step_time.LineFit),
    *(
        kv_offload.NoOffload,
        kv_offload.KVOffload,
        kv_offload.HostBlock,
        kv_offload.PendingCopy,
        kv_offload.OffloadStats,
    ),
    *(kv_transfer.PrefillOffload, kv_transfer.Export),
)
CLASSES: Classes = MappingProxyType({kind.__name__: kind for kind in _KINDS})
"""The classes of a state, by name."""

_TUPLES = MappingProxyType(
    {kind.__name__: kind for kind in (Plan, Span, NewSequence, InflightStep, Decision, Transfer)}
)
_TREES = frozenset({"RadixPrefixCache", "HybridPrefixCache"})
_PLAIN = (int, float, str, bool, type(None))
_SPECIAL: Mapping[str, frozenset[str]] = {
    "KVCacheManager": frozenset({"inflight_prefixes"}),
    "BlockPool": frozenset({"on_evict"}),
    "KVOffload": frozenset({"store", "prefill", "pool", "pins"}),
    "PrefillOffload": frozenset({"store", "prefill", "server", "pool", "pins"}),
    "PendingCopy": frozenset({"tokens", "salt"}),
    "EngineStats": frozenset({"completed"}),
    "RadixPrefixCache": frozenset({"edges"}),
    "HybridPrefixCache": frozenset({"edges"}),
    "Scheduler": frozenset({"compute_masks", "encoder_cache"}),
    "Sequence": frozenset(
        {
            *("request", "tokens", "constraint", "inflight_prefix", "draft_tokens", "pending_images", "prefix_prompt"),
            "block_keys",
        }
    ),
}
"""Fields that are written in another way, rebuilt from others, or that no decision depends on."""

MAX_STATE_TOKENS = 1 << 27
"""Most tokens of all sequences of a state that is read."""


@dataclass(frozen=True, slots=True)
class ReplayedConstraint:
    """Stands for a recorded constraint: its masks need no replay, the recorded tokens show what they allowed. begun:
    its beginning, anonymized."""

    begun: Sequence[int] = ()

    def masks(self, output: Any, drafts: Any) -> list[Any]:
        """No mask for any position."""
        return [None] * (1 + len(drafts))

    def why(self) -> str:
        """There is nothing to explain."""
        return ""

    def beginning(self) -> Sequence[int]:
        """What the output began with."""
        return self.begun


def replayed_constraint(prompt: int, begun: int, names: Sequence[int], block_size: int) -> ReplayedConstraint:
    """Of an output that began with so many tokens. prompt: tokens before them; names: of the full blocks of both."""
    count = prompt + begun
    return ReplayedConstraint(anonymized_tokens(count, names[: count // block_size], block_size)[prompt:])


REPLAYED = ReplayedConstraint()
CONSTRAINTS: tuple[Constraint, ...] = (FREE, REPLAYED, PENDING)


def constraint_of(seq: Any) -> int:
    """Index into CONSTRAINTS of what stands for a sequence's constraint."""
    return 0 if seq.constraint is FREE else 2 if seq.constraint is PENDING else 1


def recorded_request(fields: Any, block_size: int) -> Request:
    """The anonymized request of `request_fields`, as `Arrived` and states have them."""
    id, num_tokens, names, max_new, priority, deadline, salt, choice, stops, prompt_logprobs, pooling, *pinned = fields
    pins, owner = pinned or ((), "")
    return Request(
        id=id,
        prompt=tuple(anonymized_tokens(num_tokens, names, block_size)),
        max_new_tokens=max_new,
        sampling=SamplingParams(prompt_logprobs=0 if prompt_logprobs else None, pooling=pooling),
        stop=frozenset({STOP} if stops else ()),
        choice=choice,
        priority=priority,
        deadline=deadline,
        cache_salt=salt,
        pins=tuple(Pin(*each) for each in pins),
        owner=owner,
    )


def request_fields(request: Request, names: list[int], salt: str) -> tuple[Any, ...]:
    """What is recorded of a request: sizes, block names and options, never its text or tokens."""
    sampling = request.sampling
    return (
        *(request.id, len(request.prompt), names, request.max_new_tokens, request.priority, request.deadline, salt),
        *(request.choice, bool(request.stop), sampling.prompt_logprobs is not None, sampling.pooling),
        *(request.pins, request.owner),
    )


def pack(roots: dict[str, Any], anonymizer: Anonymizer) -> list[Any]:
    """Plain data for msgpack: a list of nodes, the roots first."""
    return _Packer(roots, anonymizer).nodes


class _Packer:
    """numbers: of nodes, by identity. names: of the block that leads to a node of the prefix tree, by identity."""

    def __init__(self, roots: dict[str, Any], anonymizer: Anonymizer) -> None:
        self.anonymizer = anonymizer
        self.numbers, self.names = dict[int, int](), dict[int, int]()
        self.todo, self.nodes = deque[Any](), list[Any]()
        self._name_prefix_nodes(roots["scheduler"])
        self._value(roots)
        while self.todo:
            self.nodes.append(self._node(self.todo.popleft()))

    def _name_prefix_nodes(self, scheduler: Any) -> None:
        """Name nodes below the root, below the nodes of sequences, and those cut off from both but not yet evicted."""
        cache = scheduler.kv.prefix_cache
        if type(cache).__name__ not in _TREES:
            return
        self._walk(cache.root, [], "")
        inflight = [s for step in scheduler.inflight for s in (*step.seqs, *step.deferred_frees)]
        for seq in (*inflight, *scheduler.sequences.values()):
            if seq.prefix_node is not None:
                known = seq.tokens[: seq.next_cache_at - cache.block_size]
                self._walk(seq.prefix_node, known, seq.request.cache_salt)
        for node, _ in cache.edges.values():
            self._walk(node, [id(node)] * cache.block_size, "")

    def _walk(self, node: Any, tokens: list[int], salt: str) -> None:
        """Name the nodes below one to which these tokens lead, unless it has a name."""
        if id(node) in self.names:
            return
        anonymizer = self.anonymizer
        size, todo = anonymizer.block_size, [(node, anonymizer.names(tokens, salt)[0], 0)]
        while todo:
            node, before, name = todo.pop()
            seen = self.names.get(id(node))
            self.names[id(node)] = seen or name  # 0: another walk began there
            if seen is None:
                for key, (_, child) in node.items():
                    own = next_key(first_key(key[0]) if len(key) > size else before, key[-size:])
                    todo.append((child, own, anonymizer.name(own)))

    def _node(self, it: Any) -> list[Any]:
        kind = type(it).__name__
        if id(it) in self.names:
            return ["place", [self._edge(key, block, child) for key, (block, child) in it.items()]]
        if isinstance(it, dict):
            return [kind, [[self._value(k), self._value(v)] for k, v in it.items()]]
        if isinstance(it, list | set | deque):
            values = [self._value(v) for v in it]
            return [kind, [it.maxlen, values] if isinstance(it, deque) else values]
        if kind not in CLASSES:
            return ["unknown", kind]
        special = _SPECIAL.get(kind, ())
        fields = [[name, self._value(value)] for name, value in _fields(it) if name not in special]
        if kind == "Sequence":
            fields += self._sequence(it)
        elif kind == "PendingCopy":
            names = self.anonymizer.names(it.tokens, it.salt)[1]
            fields += [["prefix", [len(it.tokens), names, self.anonymizer.salt(it.salt)]]]
        elif kind in _TREES:
            fields.append(["edges", [[block, *self._value(node)] for block, (node, _) in it.edges.items()]])
        return [kind, fields]

    def _edge(self, key: Any, block: int, child: Any) -> list[Any]:
        salted = len(key) > self.anonymizer.block_size
        return [block, self.names[id(child)], self.anonymizer.salt(key[0]) if salted else "", *self._value(child)]

    def _sequence(self, seq: Any) -> list[Any]:
        names = self.anonymizer.names(seq.tokens, seq.request.cache_salt)[1]
        prompt_names = names[: len(seq.request.prompt) // self.anonymizer.block_size]
        request = request_fields(seq.request, prompt_names, self.anonymizer.salt(seq.request.cache_salt))
        return [
            ["request", request],
            ["tokens", [len(seq.tokens), names]],
            ["constraint", constraint_of(seq)],
            ["inflight_prefix", seq.inflight_prefix is not None],
        ]

    def _value(self, it: Any) -> Any:
        """A scalar as it is, what may be shared as [number], anything else as [kind, parts]."""
        if isinstance(it, _PLAIN):
            return it
        kind = type(it).__name__
        if isinstance(it, bytes):
            return ["key", self.anonymizer.name(it)]
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
    """(name, value) of an object's fields, without wrapped methods."""
    names = [field.name for field in fields(it)] if is_dataclass(it) else list(vars(it))
    for name in names:
        value = getattr(it, name)
        if not callable(value) or name not in vars(type(it)):
            yield name, value


def restore(nodes: Any, known: Classes = CLASSES) -> dict[str, Any]:
    """The roots that were packed. known: classes by name. Raises InvalidConfig for data that is no engine's state."""
    try:
        return _Restorer(nodes, known).roots
    except InvalidConfig:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError, OverflowError, StopIteration) as error:
        raise InvalidConfig(f"the recording does not start with an engine's state: {error!r}") from error


class _Restorer:
    """Makes all objects first, then fills them, then the prefix tree and the sequences, which need filled ones."""

    def __init__(self, nodes: Any, known: Classes) -> None:
        self.known, self.tokens = known, 0
        self.made = [self._make(*node) for node in nodes]
        self._fill_all(nodes)
        self.roots: dict[str, Any] = self.made[0]
        self.kv = self.roots["scheduler"].kv
        self.block_size = self.kv.prefix_cache.block_size
        self.kv.block_pool.on_evict = self.kv.offload.evict
        for it, (kind, data) in zip(self.made, nodes, strict=True):
            if kind == "place":
                self._link(it, data)
        for it, (kind, data) in zip(self.made, nodes, strict=True):
            if kind == "Sequence":
                self._sequence(it, dict(data))
            elif kind == "PendingCopy":
                count, names, it.salt = dict(data)["prefix"]
                it.tokens = self._tokens(count, names)
            elif kind in _TREES:
                self._index(it, dict(data)["edges"])

    def _make(self, kind: str, data: Any) -> Any:
        if kind == "unknown":
            return None
        if kind == "deque":
            return deque(maxlen=data[0])
        containers = {"list": list, "set": set, "dict": dict, "OrderedDict": OrderedDict, "place": dict}
        if kind in containers:
            return containers[kind]()
        if kind not in self.known:
            raise InvalidConfig(f"the recording's engine has a {kind!r}, which this version of Quire does not know")
        return FRESH[kind](self.known) if kind in FRESH else self.known[kind]()

    def _fill_all(self, nodes: Any) -> None:
        for it, (kind, data) in zip(self.made, nodes, strict=True):
            if kind in ("dict", "OrderedDict"):
                it.update((self._value(k), self._value(v)) for k, v in data)
            elif kind in ("list", "deque"):
                it.extend(map(self._value, data if kind == "list" else data[1]))
            elif kind == "set":
                it.update(map(self._value, data))
            elif kind not in ("place", "unknown"):
                self._fill(it, kind, data)

    def _fill(self, it: Any, kind: str, data: Any) -> None:
        known = {name for name, _ in _fields(it)} | set(vars(type(it)))
        for name, value in data:
            if name in known and name not in _SPECIAL.get(kind, ()):
                setattr(it, name, self._value(value))

    def _value(self, data: Any) -> Any:
        if not isinstance(data, list):
            return data
        if isinstance(data[0], int):
            return self.made[data[0]]
        kind, parts = data
        if kind == "policy":
            return self._policy(*parts)
        if kind == "key":
            return named_key(b"", [parts])
        values = map(self._value, parts)
        return tuple(values) if kind == "tuple" else _TUPLES[kind](*values)

    def _policy(self, name: str, batching: Any, pressure: Any) -> SchedulingPolicy:
        """A policy of a user's class only if the class was passed in: a file must not choose what is imported."""
        kind = POLICIES.get(name) or self.known.get(name)
        if kind is None:
            raise InvalidConfig(
                f"the recording was made with a custom scheduling policy: give --scheduling-policy {name}"
            )
        policy: SchedulingPolicy = kind(batching=batching, pressure=pressure)
        return policy

    def _link(self, node: Any, edges: Any) -> None:
        """The edges below a node of the prefix tree."""
        for block, name, salt, child in edges:
            key = anonymized_tokens(self.block_size, [name], self.block_size)
            node[(salt, *key) if salt else tuple(key)] = (block, self.made[child])

    def _index(self, cache: Any, edges: Any) -> None:
        """The prefix cache's (node, key) by block."""
        nodes = {number: self.made[number] for _, number in edges}
        keys = {block: key for node in nodes.values() for key, (block, _) in node.items()}
        cache.edges.update((block, (self.made[number], keys[block])) for block, number in edges)

    def _tokens(self, count: int, names: Any) -> list[int]:
        """See `anonymized_tokens`. Raises InvalidConfig for more than any engine holds."""
        self.tokens += count
        if self.tokens > MAX_STATE_TOKENS:
            raise InvalidConfig(f"the recording's sequences have more than {MAX_STATE_TOKENS} tokens")
        return anonymized_tokens(count, names, self.block_size)

    def _sequence(self, seq: Any, fields: dict[str, Any]) -> None:
        count, names = fields["tokens"]
        self.tokens += fields["request"][1]
        seq.tokens = self._tokens(count, names)
        seq.request = recorded_request(fields["request"], self.block_size)
        seq.prefix_prompt = seq.request.prompt
        seq.constraint = CONSTRAINTS[fields["constraint"]]
        if fields["inflight_prefix"]:
            start = seq.next_cache_at - self.block_size
            key = self.kv.prefix_cache.key(seq.tokens, start, seq.request.cache_salt)
            seq.inflight_prefix = id(seq.prefix_node), key
            self.kv.inflight_prefixes[seq.inflight_prefix] = seq
