"""What a load test asks: by how many users, at which rate, or along a recorded trace."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path

import click

from quire.errors import InvalidRequest

TOKENS = (100, 1000)
"""Ids that prompts are made of: in every vocabulary, and past most of what is special."""


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What one level asks. prompts and new as `Job`; due: seconds from the start, empty for users."""

    name: str
    users: int
    prompts: list[list[int]]
    new: list[int]
    due: list[float]


def asked(
    *,
    users: Sequence[int],
    rates: Sequence[float] | None,
    burstiness: float,
    trace: Path | None,
    speed: float,
    shrink: float,
    num_prompts: int | None,
    length: tuple[int, int],
    new: tuple[int, int],
    shared: int,
    seed: int,
) -> list[Asking]:
    """Every level's requests. The same arguments make the same requests."""
    rng = random.Random(seed)
    if trace is not None and rates is not None:
        raise click.UsageError("--trace has a rate of its own: leave out --request-rate")
    if trace is not None:
        return [recorded(trace, speed, shrink, num_prompts, rng)]
    head = [rng.randrange(*TOKENS) for _ in range(shared)]

    def made(name: str, count: int, at_once: int, due: list[float]) -> Asking:
        prompts = [head + [rng.randrange(*TOKENS) for _ in range(rng.randint(*length))] for _ in range(count)]
        return Asking(name=name, users=at_once, prompts=prompts, new=[rng.randint(*new) for _ in prompts], due=due)

    if rates is None:
        return [made(f"{n} users" if n > 1 else "1 user", num_prompts or max(20, 4 * n), n, []) for n in users]
    levels = []
    for each in rates:
        count = num_prompts or 200
        gaps = [rng.gammavariate(burstiness, 1 / (each * burstiness)) for _ in range(count)]
        levels.append(made(f"{each:g} requests/s", count, count, list(accumulate(gaps))))
    return levels


def recorded(path: Path, speed: float, shrink: float, most: int | None, rng: random.Random) -> Asking:
    """A trace's first requests, `speed` times as fast, with its prompts' lengths divided. Raises InvalidRequest."""
    due, prompts, new = [], [], []
    with path.open(newline="", encoding="utf-8") as lines:
        for number, row in enumerate(csv.DictReader(lines)):
            if most is not None and number == most:
                break
            try:
                due.append(datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp())
                count = max(1, int(int(row["ContextTokens"]) / shrink))
                new.append(max(1, int(row["GeneratedTokens"])))
            except (KeyError, ValueError, TypeError) as error:
                raise InvalidRequest(
                    f"{path}, line {number + 2}: not TIMESTAMP,ContextTokens,GeneratedTokens ({error})", param="trace"
                ) from None
            prompts.append([rng.randrange(*TOKENS) for _ in range(count)])
    if not due:
        raise InvalidRequest(f"{path} has no requests", param="trace")
    due = [(each - due[0]) / speed for each in due]
    return Asking(name=f"{path.stem} x {speed:g}", users=len(due), prompts=prompts, new=new, due=due)


def rate(level: Asking) -> float | None:
    """Requests a second that were to come."""
    return len(level.due) / level.due[-1] if level.due and level.due[-1] else None
