"""Mutation runs: single-line faults are planted in a copy of the tree, and the nearest tests must notice each."""

from __future__ import annotations
