"""How long a waiting OpenMP thread spins before it sleeps. Must be set before torch is imported."""

from __future__ import annotations

import os

OWN_CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Environment variables that set it. Where one is set, it is left as it is."""

SPINS = "200"
"""Iterations: a few microseconds, about as long as threads wait for each other in a matrix product on idle cores.
libgomp's default is some milliseconds. Where another program runs on one of the cores, a thread then spins that long in
each of the hundreds of products of a step, waiting for a thread that is not scheduled."""


def limit_spinning() -> None:
    """Make threads of this process and its children sleep soon, unless the environment sets it otherwise."""
    if not any(name in os.environ for name in OWN_CHOICES):
        os.environ["GOMP_SPINCOUNT"] = SPINS
