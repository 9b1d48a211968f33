"""How load tests' arguments are written. Each raises click.BadParameter on what it cannot read."""

from __future__ import annotations

import click


def span(value: str) -> tuple[int, int]:
    """`128` or `64:256`: from and to, both included."""
    low, _, high = value.partition(":")
    if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low)):
        raise click.BadParameter(f"{value!r} is neither a number nor two like 64:256")
    return int(low), int(high or low)


def counts(value: str) -> tuple[int, ...]:
    """`1,2,4`."""
    found = value.split(",")
    if not all(each.isdecimal() and 0 < int(each) <= 65536 for each in found):
        raise click.BadParameter(f"{value!r} is not a list of numbers above 0, like 1,2,4")
    return tuple(int(each) for each in found)


def rates(value: str) -> tuple[float, ...]:
    """`0.5,2`."""
    try:
        found = tuple(float(each) for each in value.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < each < 1e6 for each in found):
        raise click.BadParameter(f"{value!r} is not a list of numbers above 0, like 0.5,2")
    return found


def goals(value: str) -> dict[str, float]:
    """`ttft:200,tpot:50`, as vLLM has it: milliseconds that a request may take."""
    found = {}
    for each in value.split(",") if value else ():
        what, _, limit = each.partition(":")
        if what not in ("ttft", "tpot", "e2el") or not limit.replace(".", "", 1).isdecimal():
            raise click.BadParameter(f"{each!r} is none of ttft:MS, tpot:MS, e2el:MS")
        found[what] = float(limit)
    return found
