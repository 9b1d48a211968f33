"""What tokens a sequence may have next. Structured output is a Constraint; having none is FREE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.errors import InvalidRequest
from quire.scheduler.plan import Mask
from quire.types import Request


class Constraint(Protocol):
    """Asked once a sampling step, while the forward pass of that very step runs."""

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[Mask]:
        """The mask after `output`, then after each of `drafts` in turn: 1 + len(drafts) masks.

        `output` are the tokens made so far, all committed. A draft that breaks the constraint ends the walk;
        masks past it are never used and may be None.
        """

    def why(self) -> str:
        """Why the last mask allows nothing, where the constraint itself came to an end; empty where it did not."""


class NoConstraint:
    """No constraint: the scheduler recognises FREE and plans no masks at all."""

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[Mask]:
        return [None] * (1 + len(drafts))

    def why(self) -> str:
        return ""


FREE = NoConstraint()


class Pending:
    """A constraint in the making: who has it waits, and holds nobody up. It is never asked."""

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[Mask]:
        raise AssertionError("a sequence was planned before its constraint was made")

    def why(self) -> str:
        return ""


PENDING = Pending()


class Constraints(Protocol):
    """Makes constraints beside the engine's loop, which never waits for one."""

    def constraint_for(self, request: Request) -> Constraint:
        """FREE where nothing is asked for, PENDING where it takes a while: `made` brings it. Raises InvalidRequest."""

    def poll(self) -> list[tuple[str, Constraint | InvalidRequest]]:
        """By request id, what has become of those that were pending, since the last call."""

    def wait_fds(self) -> Sequence[int]:
        """File descriptors that can be read from when `made` has something."""

    def timeout(self) -> float | None:
        """Seconds after which `made` has something to say whatever happens; None: nothing is pending."""


class NoConstraints:
    """An engine that obeys none; `Engine.add` refuses who asks for one."""

    def constraint_for(self, request: Request) -> Constraint:
        return FREE

    def poll(self) -> list[tuple[str, Constraint | InvalidRequest]]:
        return []

    def wait_fds(self) -> Sequence[int]:
        return ()

    def timeout(self) -> float | None:
        return None
