"""Users in sessions: each reads an answer, thinks, and asks again with the conversation so far."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

from quire.errors import InvalidConfig
from quire.sim.executor import answer_token
from quire.sim.trace import Run

_SYSTEM, _ASKED = 1 << 20, 1 << 21
"""Tokens of system prompts and of questions begin here; each has one of its own."""


class Sessions:
    """A closed loop: `users` at once, each with conversations of `turns` turns, one after another, `count` requests in
    all.

    think: seconds between an answer and the next question, on average (exponential). asked, answered: tokens of a
    question and an answer, from and to. system: tokens that all conversations of one of `systems` kinds begin with.
    """

    def __init__(
        self,
        users: int,
        *,
        count: int,
        turns: int = 6,
        think: float = 10.0,
        asked: tuple[int, int] = (50, 400),
        answered: tuple[int, int] = (50, 400),
        system: int = 512,
        systems: int = 4,
        seed: int = 7,
    ) -> None:
        if users < 1 or count < 1 or turns < 1 or think < 0:
            raise InvalidConfig(
                "sessions need at least one user, one turn and one request, and no negative time to think"
            )
        self.users, self.count, self.turns, self.think = users, count, turns, think
        self.asked, self.answered, self.system, self.systems = asked, answered, system, systems
        self.name = f"{users} users in sessions"
        self._random = random.Random(seed)
        self._history: dict[int, tuple[Run, ...]] = {}
        """By request that has not ended, its prompt."""
        self._turn: dict[int, int] = {}
        self.outputs: array[int] = array("q")
        for _ in range(min(users, count)):
            self._ask((), 0)

    def __len__(self) -> int:
        return len(self.outputs)

    def first_arrivals(self) -> Iterator[float]:
        """Seconds at which each user asks for the first time: they come one after another."""
        at = 0.0
        for _ in range(min(self.users, self.count)):
            yield at
            at += self._random.expovariate(1 / max(self.think, 1e-3)) / self.users * 2

    def _ask(self, history: tuple[Run, ...], turn: int) -> int:
        """A new request. Returns its number."""
        number, rng = len(self.outputs), self._random
        if not history and self.system:
            history = ((_SYSTEM + rng.randrange(self.systems), self.system),)
        self._history[number] = (*history, (_ASKED + number, rng.randint(*self.asked)))
        self._turn[number] = turn
        self.outputs.append(rng.randint(*self.answered))
        return number

    def runs(self, number: int) -> tuple[Run, ...]:
        """The prompt of a request."""
        return self._history[number]

    def answer_seed(self, number: int) -> int:
        """The seed of a request's answer."""
        return number

    def next_turn(self, number: int, at: float, tokens: tuple[int, ...]) -> tuple[float, int, int] | None:
        """What the user of a request asks once it has ended: (seconds, prompt tokens, answer tokens), or None.

        tokens: the answer; empty where it was refused, after which the user begins anew.
        """
        history, turn = self._history.pop(number), self._turn.pop(number) + 1
        if len(self.outputs) >= self.count:
            return None
        answer: Run = (answer_token(number), len(tokens))
        again = self._ask((*history, answer), turn) if tokens and turn < self.turns else self._ask((), 0)
        prompt = sum(count for _, count in self._history[again])
        think = self._random.expovariate(1 / self.think) if self.think else 0.0
        return at + think, prompt, self.outputs[again]
