"""Scheduling policies: how many requests are admitted, in which order, with how many blocks, and who is preempted.

A policy is one class with four methods. Those of `POLICIES` are known by name, and `--scheduling-policy module:Class`
loads any other subclass of `SchedulingPolicy`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Literal

from quire.errors import InvalidConfig, nearest
from quire.scheduler.sequence import Sequence
from quire.types import Request

Batching = Literal["continuous", "static"]
"""continuous: sequences join and leave between steps (Orca, OSDI 2022); static: a batch runs to its end."""

Pressure = Literal["foresee", "preempt", "reserve"]
"""For which length a sequence has blocks before others are admitted. foresee: for the tokens it has and one block more,
so that few are preempted soon after admission; preempt: for the next step; reserve: to its end, so that nothing is ever
preempted."""


class SchedulingPolicy:
    """First come, first served (`fcfs`); subclasses override any of the four methods.

    The options `--batching` and `--pressure-policy` arrive as `batching` and `pressure`. All methods run in the
    engine's process, between steps, and must be fast. They must not change the sequences that they are given.
    """

    def __init__(self, *, batching: Batching = "continuous", pressure: Pressure = "preempt") -> None:
        self.batching: Batching = batching
        self.pressure: Pressure = pressure

    def admit(self, running: Seq[Sequence], max_num_seqs: int) -> int:
        """How many waiting requests may be admitted to this step, where slots, rows and blocks allow it."""
        if self.batching == "static" and running:
            return 0
        return max_num_seqs - len(running)

    def key(self, request: Request) -> float:
        """A request's place in the waiting queue: lower is sooner, arrival breaks ties. Asked once, on arrival.

        Must be below `quire.types.BACKGROUND`. Background requests (lines of batches) are not asked for.
        """
        return 0

    def victim(self, candidates: Seq[Sequence], blocked: Sequence) -> Sequence:
        """The sequence to preempt because `blocked` lacks blocks: one of `candidates`, or `blocked` itself.

        candidates: the running sequences that are not in this step yet; at least one. Here: the least urgent, then the
        one with the fewest computed tokens to lose.
        """
        return max(candidates, key=lambda seq: (seq.priority, -seq.num_computed, seq.arrival))

    def reserve(self, seq: Sequence, block_size: int) -> int:
        """The length in tokens for which `seq` has blocks, or has them set aside, before others are admitted."""
        if self.pressure == "preempt":
            return 0
        return seq.max_length if self.pressure == "reserve" else len(seq.tokens) + block_size


class PriorityPolicy(SchedulingPolicy):
    """By the request's own `priority`; lower is sooner."""

    def key(self, request: Request) -> float:
        """The request's priority."""
        return request.priority


POLICIES: Mapping[str, type[SchedulingPolicy]] = {"fcfs": SchedulingPolicy, "priority": PriorityPolicy}
"""The policies that `--scheduling-policy` knows by name."""

METHODS = ("admit", "key", "victim", "reserve")


def policy_name(policy: SchedulingPolicy) -> str:
    """The option's value that stands for a policy: a name of `POLICIES`, or module:Class."""
    kind = type(policy)
    return next((name for name, each in POLICIES.items() if each is kind), class_path(kind))


def class_path(kind: type) -> str:
    """module:Class, as `--scheduling-policy` takes it."""
    return f"{kind.__module__}:{kind.__qualname__}"


def make_policy(name: str, *, batching: Batching = "continuous", pressure: Pressure = "preempt") -> SchedulingPolicy:
    """The policy that the options describe. Raises InvalidConfig, as `load_policy` does."""
    kind = load_policy(name)
    try:
        policy = kind(batching=batching, pressure=pressure)
    except Exception as error:
        raise _invalid(name, f"{kind.__name__}(batching=..., pressure=...) failed: {_line(error)}") from error
    if missing := [attribute for attribute in ("batching", "pressure") if not hasattr(policy, attribute)]:
        raise _invalid(name, f"it has no {missing[0]!r}: its __init__ must call super().__init__(**options)")
    return policy


def load_policy(name: str) -> type[SchedulingPolicy]:
    """The class that a value of `--scheduling-policy` names; modules are also looked for in the working directory.

    Raises InvalidConfig for an unknown name, a module that cannot be imported, and a class that is no policy.
    """
    module_name, colon, class_name = name.partition(":")
    if not colon:
        if name not in POLICIES:
            known = ", ".join(POLICIES)
            raise _invalid(name, f"must be one of {known}, or module:Class.{nearest(name, POLICIES)}")
        return POLICIES[name]
    if "" not in sys.path:  # a console script's path lacks the working directory, which `python -m` has
        sys.path.append("")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise _invalid(name, f"{module_name} cannot be imported: {_line(error)}") from error
    kind = getattr(module, class_name, None)
    if kind is None:
        classes = [each for each in vars(module) if isinstance(getattr(module, each), type)]
        raise _invalid(name, f"{module_name} has no {class_name!r}.{nearest(class_name, classes)}")
    if not isinstance(kind, type) or not issubclass(kind, SchedulingPolicy):
        raise _invalid(name, f"{class_name} is not a subclass of quire.scheduler.policy.SchedulingPolicy")
    _check_methods(name, kind)
    return kind


def _check_methods(name: str, kind: type[SchedulingPolicy]) -> None:
    """Raises InvalidConfig for methods with other parameters, and for names that look like a method misspelled."""
    for method in METHODS:
        expected = list(inspect.signature(getattr(SchedulingPolicy, method)).parameters)
        try:
            inspect.signature(getattr(kind, method)).bind(*expected)
        except TypeError as error:
            raise _invalid(name, f"{method} must be a method with ({', '.join(expected)}): {error}") from error
    for attribute in vars(kind):
        if attribute not in METHODS and not attribute.startswith("_") and (hint := nearest(attribute, METHODS)):
            raise _invalid(name, f"a scheduling policy has no {attribute!r}.{hint} (helpers may begin with _)")


def _invalid(name: str, why: str) -> InvalidConfig:
    return InvalidConfig(f"scheduling_policy {name}: {why}", param="scheduling_policy")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
