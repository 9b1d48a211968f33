"""min_p, top_k and top_p as one threshold a row: what lies below it cannot be drawn.

Being thresholds on the logits, they keep every token that ties with the last one kept (as vLLM does), so the answer
depends neither on the order of equal logits nor on who else is in the batch. Nothing is sorted but the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.model_runner.sampling.noise import Floats, Ids

_HEAD = 64
"""How many of the greatest logits are looked at first. Most nuclei are smaller."""


class Truncation(NamedTuple):
    """Settings of rows that truncate, each [R, 1]; a row without one of them has the value that keeps everything."""

    temperature: Floats
    margin: Floats
    """How far below the greatest logit min_p reaches: temperature * log(min_p), -inf for off."""
    top_k: Ids
    """The vocabulary's size for off."""
    top_p: npt.NDArray[np.float64]
    """2 for off: no mass is as much."""

    @staticmethod
    def of(columns: Mapping[str, npt.NDArray[Any]], rows: Ids, vocab_size: int) -> Truncation:
        """Settings of `rows` from the columns of `features.COLUMNS`."""
        temperature = columns["temperature"][rows, None]
        with np.errstate(divide="ignore"):
            margin = temperature * np.log(columns["min_p"][rows, None])
        return Truncation(
            temperature, margin, np.minimum(columns["top_k"][rows, None], vocab_size), columns["top_p"][rows, None]
        )

    def rows(self, which: Ids) -> Truncation:
        """The settings of some of these rows."""
        return Truncation(self.temperature[which], self.margin[which], self.top_k[which], self.top_p[which])


def truncate(logits: Floats, cut: Truncation) -> None:
    """Set to -inf, in place, what min_p, then top_k, then top_p exclude, each of what the ones before left.

    logits [R, V], not yet divided by the temperature.
    """
    vocab = logits.shape[1]
    longest = int(cut.top_k[cut.top_k < vocab].max(initial=1))
    nuclei = bool((cut.top_p < 1).any())
    low = _thresholds(logits, cut, max(longest, _HEAD) if nuclei else longest)
    np.copyto(logits, -np.inf, where=logits < low)


def _thresholds(logits: Floats, cut: Truncation, width: int) -> Floats:
    """The least logit that each row keeps, [R, 1], looking at its `width` greatest first."""
    vocab = logits.shape[1]
    width = min(width, vocab)
    head = np.partition(logits, vocab - width, 1)[:, vocab - width :]
    head.sort(1)
    head = head[:, ::-1]
    kth = np.take_along_axis(head, np.minimum(cut.top_k, width) - 1, 1)
    low: Floats = np.maximum(head[:, :1] + cut.margin, np.where(cut.top_k < vocab, kth, -np.inf))
    nuclei = np.flatnonzero(cut.top_p < 1)
    if len(nuclei):
        low[nuclei] = _nuclei(logits, head, low, cut, nuclei)
    return low


def _nuclei(logits: Floats, head: Floats, low: Floats, cut: Truncation, which: Ids) -> Floats:
    """Thresholds of the rows `which` that have top_p, given those of min_p and top_k.

    A nucleus is as few of the likeliest tokens as have `top_p` of the mass of all that are not below `low`.
    """
    head, low, cut = head[which], low[which], cut.rows(which)
    weight = np.exp((head - head[:, :1]) / cut.temperature, dtype=np.float64)
    weight[head < low] = 0.0
    upto = weight.cumsum(1)
    mass = upto[:, -1:].copy()
    own = np.clip(np.where(cut.top_k < logits.shape[1], cut.top_k, 1), _HEAD, head.shape[1])  # whatever others ask for
    wide = np.flatnonzero(np.take_along_axis(head, own - 1, 1) >= low)  # what it is a share of reaches beyond the head
    if len(wide):
        rows = logits[which[wide]]
        beyond = np.exp((rows - head[wide, :1]) / cut.temperature[wide])
        beyond[rows < low[wide]] = 0.0
        mass[wide] = beyond.sum(1, keepdims=True)
    inside = ((upto - weight < cut.top_p * mass) & (head >= low)).sum(1, keepdims=True)
    low = np.maximum(low, np.take_along_axis(head, np.maximum(inside, 1) - 1, 1))
    width, vocab = head.shape[1], logits.shape[1]
    more = np.flatnonzero(inside == width)
    if width < vocab and len(more):
        low[more] = _thresholds(logits[which[more]], cut.rows(more), width * 8)
    return low
