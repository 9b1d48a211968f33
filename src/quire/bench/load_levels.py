"""The levels of a load test: how many requests of which lengths come when, and how its options are written."""

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
"""Range of random token ids: in every vocabulary, and beyond most special tokens."""

USERS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of users where none are given."""


@dataclass(frozen=True, kw_only=True)
class LoadLevel:
    """One measurement's requests. prompts and output_lens as in LoadJob; due: seconds from the start, empty for users.

    users: requests at once at most.
    """

    name: str
    users: int
    prompts: list[list[int]]
    output_lens: list[int]
    due: list[float]

    @property
    def rate(self) -> float | None:
        """Requests a second on average; None for users."""
        return len(self.due) / self.due[-1] if self.due and self.due[-1] else None


def load_levels(
    *,
    users: Sequence[int] | None,
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
) -> list[LoadLevel]:
    """Make each level's requests, the same for the same arguments.

    Levels are numbers of `users`, each of whom sends again when answered, by default those of USERS for which there are
    enough requests; or `rates`, with gamma-distributed gaps; or one recorded `trace`. length, new: lengths of prompts
    and answers, from and to. shared: length of a prefix that all prompts have. Raises click.UsageError for a trace with
    a rate and for more users than requests, InvalidRequest for a trace that cannot be read.
    """
    rng = random.Random(seed)
    if trace is not None and rates is not None:
        raise click.UsageError("--trace has a rate of its own: leave out --request-rate")
    if trace is not None:
        return [trace_level(trace, speed, shrink, num_prompts, rng)]
    prefix = [rng.randrange(*TOKENS) for _ in range(shared)]

    def level(name: str, count: int, at_once: int, due: list[float]) -> LoadLevel:
        prompts = [prefix + [rng.randrange(*TOKENS) for _ in range(rng.randint(*length))] for _ in range(count)]
        output_lens = [rng.randint(*new) for _ in prompts]
        return LoadLevel(name=name, users=at_once, prompts=prompts, output_lens=output_lens, due=due)

    if rates is None:
        users = [n for n in USERS if num_prompts is None or n <= num_prompts] if users is None else users
        if num_prompts is not None and (most := max(users)) > num_prompts:
            raise click.UsageError(
                f"{num_prompts} requests keep no {most} users busy: raise --num-prompts, or lower --max-concurrency"
            )
        return [level(f"{n} users" if n > 1 else "1 user", num_prompts or max(20, 4 * n), n, []) for n in users]
    levels = []
    for rate in rates:
        count = num_prompts or 200
        gaps = [rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count)]
        levels.append(level(f"{rate:g} requests/s", count, count, list(accumulate(gaps))))
    return levels


def trace_level(path: Path, speed: float, shrink: float, limit: int | None, rng: random.Random) -> LoadLevel:
    """The first `limit` requests of a trace, `speed` times as fast, prompts `shrink` times as short.

    Raises InvalidRequest naming the line that cannot be read.
    """
    due = []
    prompts = []
    output_lens = []
    with path.open(newline="", encoding="utf-8") as lines:
        for number, row in enumerate(csv.DictReader(lines)):
            if limit is not None and number == limit:
                break
            try:
                due.append(datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp())
                count = max(1, int(int(row["ContextTokens"]) / shrink))
                output_lens.append(max(1, int(row["GeneratedTokens"])))
            except (KeyError, ValueError, TypeError) as error:
                raise InvalidRequest(
                    f"{path}, line {number + 2}: not TIMESTAMP,ContextTokens,GeneratedTokens ({error})", param="trace"
                ) from None
            prompts.append([rng.randrange(*TOKENS) for _ in range(count)])
    if not due:
        raise InvalidRequest(f"{path} has no requests", param="trace")
    due = [(at - due[0]) / speed for at in due]
    name = f"{path.stem} x {speed:g}"
    return LoadLevel(name=name, users=len(due), prompts=prompts, output_lens=output_lens, due=due)


# ---------------------------------------------------------------- option values; each raises click.BadParameter


def parse_range(value: str) -> tuple[int, int]:
    """Read `128` or `64:256`: from and to, both included."""
    low, _, high = value.partition(":")
    if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low)):
        raise click.BadParameter(f"{value!r} is neither a number nor two like 64:256")
    return int(low), int(high or low)


def parse_counts(value: str) -> tuple[int, ...]:
    """Read `1,2,4`."""
    found = value.split(",")
    if not all(each.isdecimal() and 0 < int(each) <= 65536 for each in found):
        raise click.BadParameter(f"{value!r} is not a list of numbers above 0, like 1,2,4")
    return tuple(int(each) for each in found)


def parse_rates(value: str) -> tuple[float, ...]:
    """Read `0.5,2`."""
    try:
        found = tuple(float(each) for each in value.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < each < 1e6 for each in found):
        raise click.BadParameter(f"{value!r} is not a list of numbers above 0, like 0.5,2")
    return found


def parse_goodput(value: str) -> dict[str, float]:
    """Read `ttft:200,tpot:50`, as vLLM writes it: milliseconds that a request may take."""
    found = {}
    for each in value.split(",") if value else ():
        what, _, limit = each.partition(":")
        if what not in ("ttft", "tpot", "e2el") or not limit.replace(".", "", 1).isdecimal():
            raise click.BadParameter(f"{each!r} is none of ttft:MS, tpot:MS, e2el:MS")
        found[what] = float(limit)
    return found
