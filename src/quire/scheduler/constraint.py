"""Which tokens a sequence may have next. Structured output is a `Constraint`; without one a sequence has FREE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from quire.errors import InvalidRequest
from quire.scheduler.plan import Mask
from quire.types import Request


class Constraint(Protocol):
    """Asked once for each sampling step, while that step's forward pass runs; see `ComputeMasks`."""

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[Mask]:
        """The masks after `output` and after each of `drafts` in turn: 1 + len(drafts).

        output: the tokens generated so far, all committed. Masks behind a draft that breaks the constraint are not used
        and may be None.
        """

    def why(self) -> str:
        """Why the last mask allows no token, where the constraint itself has ended; otherwise empty."""

    def beginning(self) -> Sequence[int]:
        """The tokens with which every output begins, of those that are known beforehand: no other is allowed there."""


MaskRequest = tuple[Constraint, Sequence[int], int, Sequence[int]]
"""(constraint, tokens, begin, drafts): the output is `tokens[begin:]`, which is long and not copied for each step."""

ComputeMasks = Callable[[Sequence[MaskRequest]], Sequence[Sequence[Mask]]]
"""Makes the masks of a step's constrained sequences: for each request 1 + len(drafts)."""


def one_by_one(requests: Sequence[MaskRequest]) -> list[list[Mask]]:
    """The masks of each request in turn."""
    return [filled(constraint.masks(tokens[begin:], drafts), drafts) for constraint, tokens, begin, drafts in requests]


def filled(masks: list[Mask], drafts: Sequence[int]) -> list[Mask]:
    """`masks` with None behind a draft that breaks the constraint: 1 + len(drafts)."""
    return masks + [None] * (1 + len(drafts) - len(masks))


class NoConstraint:
    """All tokens are allowed. The scheduler compares with FREE and plans no masks."""

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[Mask]:
        """None for each: all tokens are allowed."""
        return [None] * (1 + len(drafts))

    def why(self) -> str:
        """Empty: it never ends."""
        return ""

    def beginning(self) -> Sequence[int]:
        """None: an output may begin with any."""
        return ()


FREE = NoConstraint()


class Pending:
    """A constraint that is still being compiled. Its sequence waits beside the queue and is not planned."""

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[Mask]:
        """Raises AssertionError: a sequence that waits for its grammar has no step."""
        raise AssertionError("a sequence was planned before its constraint was ready")

    def why(self) -> str:
        """Empty: nothing is known yet."""
        return ""

    def beginning(self) -> Sequence[int]:
        """None: nothing is known yet."""
        return ()


PENDING = Pending()


class Constraints(Protocol):
    """Compiles constraints beside the engine's loop, which never waits for one."""

    def constraint_for(self, request: Request) -> Constraint:
        """FREE for a request without one; PENDING while it is compiled, see `poll`. Raises InvalidRequest."""

    def poll(self) -> list[tuple[str, Constraint | InvalidRequest]]:
        """By request id, the constraints compiled since the last call, and errors of those that cannot be."""

    def wait_fds(self) -> Sequence[int]:
        """File descriptors that become readable when `poll` has something."""

    def timeout(self) -> float | None:
        """Seconds after which `poll` has a result in any case; None: nothing is pending."""
