"""How long a thread of OpenMP that waits for another keeps its core busy: to be said before torch is imported."""

from __future__ import annotations

import os

OWN_CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables by which the process that starts this one says it."""

SPINS = "200"
"""Some microseconds, about what threads that share a product wait for each other on cores of their own. libgomp's own
choice is some milliseconds: where another program has one of the cores, a thread spins as long at each of the hundreds
of products of a step for one that is not running, and uses up the time in which it could."""


def limit_spinning() -> None:
    """Let threads sleep soon, unless the environment says otherwise. For this process, and those it starts."""
    if not any(name in os.environ for name in OWN_CHOICES):
        os.environ["GOMP_SPINCOUNT"] = SPINS
