"""What is tried: an item is one thing a user can do, and what it answered, to be compared between settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.surface.deployment import EXECUTORS, Deployment


@dataclass(frozen=True)
class Item:
    """name: a command, "LLM." and a method, or a block's; several with commas between them.

    run: does it, and returns what has to be the same under every setting.
    executors: those that it makes sense with; none where no engine of the setting takes part, so that it is done once.
    part: what of the deployment it needs. What needs the same is done in a row.
    elsewhere: the test that does it in CI; here it is done every night, and on a card.
    ci: with which of these executors CI does it, where that is not each of them; none: at night and on a card only.
    needs: packages that not every machine has.
    card: it needs a card.
    """

    name: str
    run: Callable[[Deployment], Any]
    executors: tuple[str, ...] = EXECUTORS
    part: str = "alone"
    elsewhere: str = ""
    ci: tuple[str, ...] | None = None
    needs: tuple[str, ...] = ()
    card: bool = False


@dataclass(frozen=True)
class Named:
    """What is listed and not tried here: why, and the test that holds it."""

    name: str
    why: str
    elsewhere: str
