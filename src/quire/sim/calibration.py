"""What steps of a model take on a machine: measured, fitted, kept in a file, read by `quire simulate`.

A sample is one step: what it fed and read, and how long it was until the next one could begin. A line is fitted through
samples by least squares of relative errors, with no negative coefficient, and what it leaves unexplained is kept as
noise: factors that steps of a simulation are drawn from.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.engine.events import Observer, StepRecord
from quire.errors import InvalidConfig
from quire.scheduler.step_time import StepCost

Table = npt.NDArray[np.float64]

FORMAT = "quire calibration"
VERSION = 1
MIN_SAMPLES = 8
_ROUNDS = 16
"""Of finding out which steps of a pipeline waited, and for how long."""
_NUM_NOISE = 41
"""Factors that noise is kept as: quantiles, evenly spaced."""


class StepSample(NamedTuple):
    """One step: tokens fed, positions read, rows of logits, pairs of prompts' tokens and earlier positions, seconds.

    latency: seconds since it was launched, on its way through all stages of a pipeline.
    """

    tokens: int
    kv: int
    rows: int
    pairs: float
    seconds: float
    latency: float = 0.0


class StepSampler(Observer):
    """Takes a sample of each step of an engine that runs or is replayed.

    A step's seconds are from the last commit, or from its plan where the engine was idle, to its own commit: all that
    keeps the next one from beginning, the host's work included.
    """

    def __init__(self) -> None:
        self.samples: list[StepSample] = []
        self.times: list[float] = []
        """When each step was committed."""
        self._lengths: dict[int, int] = {}
        self._last_commit = -math.inf

    def restart(self) -> None:
        """What comes next is another engine's."""
        self._lengths, self._last_commit = {}, -math.inf

    def on_step(self, record: StepRecord) -> None:
        """See Observer."""
        lengths = self._lengths
        for opened in record.plan.new_sequences:
            lengths[opened.row] = opened.num_computed
        tokens = kv = rows = 0
        pairs = 0.0
        for span in record.plan.spans:
            length = lengths.get(span.row, 0) + span.num_tokens
            lengths[span.row] = length
            tokens, kv, rows = tokens + span.num_tokens, kv + length, rows + span.num_samples
            if span.num_tokens > 1:
                pairs += span.num_tokens * (length - (span.num_tokens - 1) / 2)
        # where rows verify drafts their lengths depend on how many were right
        for seq, span in zip(record.seqs, record.plan.spans, strict=True):
            if span.num_samples > 1:
                lengths[span.row] = seq.num_computed
        seconds = record.committed - max(record.planned, self._last_commit)
        self._last_commit = record.committed
        if seconds > 0:
            self.samples.append(StepSample(tokens, kv, rows, pairs, seconds, record.committed - record.launched))
            self.times.append(record.committed)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Step times of a model on a device. about: model, device, versions, when. error: mean relative error of the fit.

    first_token: seconds that a client waits beyond the engine, for each request. noise: factors of a step's time.
    stages: of the pipeline; `cost` is their mean. shares: of layers, of each stage, relative to their mean; logits are
    the last one's then. Empty: stages are alike. hop: seconds from a stage to the next. copies: of K/V blocks, by kind:
    seconds of a block of any size, and of each of its bytes.
    """

    cost: StepCost
    noise: tuple[float, ...] = ()
    first_token: float = 0.0
    error: float = 0.0
    samples: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    stages: int = 1
    hop: float = 0.0
    copies: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    shares: tuple[float, ...] = ()

    def costs(self) -> tuple[StepCost, ...]:
        """Of a step in each stage."""
        last = self.stages - 1
        shared = enumerate(self.shares)
        unlike = tuple(self.cost.scaled(share, self.stages * (stage == last)) for stage, share in shared)
        return unlike or (self.cost,) * self.stages

    def write(self, path: Path) -> None:
        """Write the file, readable by its owner alone: it names hardware. Raises OSError."""
        fields = {"format": FORMAT, "version": VERSION, **asdict(self), "cost": self.cost._asdict()}
        descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            os.fchmod(descriptor, 0o600)
            out.write(json.dumps(fields, indent=1) + "\n")


def read_calibration(path: Path) -> Calibration:
    """Raises InvalidConfig for a file that is none, or of another version."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {str(error.strerror).lower()}", param="calibration") from error
    except ValueError as error:
        raise InvalidConfig(f"{path} is no calibration: it is not JSON ({error})", param="calibration") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise InvalidConfig(
            f"{path} is no calibration: `quire calibrate --output FILE` writes one", param="calibration"
        )
    if fields.get("version") != VERSION:
        raise InvalidConfig(
            f"{path}: its format is {fields.get('version')}, and this quire reads {VERSION}: calibrate again",
            param="calibration",
        )
    try:
        known: dict[str, Any] = {name: _number(fields["cost"][name], name) for name in StepCost._fields}
        known |= {name: int(known[name]) for name in ("experts", "used_experts")}
        cost = StepCost(**known)
        noise = tuple(_number(each, "noise") for each in fields["noise"])
        numbers = (_number(fields["first_token"], "first_token"), _number(fields["error"], "error"))
        stages, hop = int(_number(fields.get("stages", 1), "stages")), _number(fields.get("hop", 0.0), "hop")
        copies = dict[str, tuple[float, float]]()
        for kind, (base, each) in fields.get("copies", {}).items():
            copies[kind] = _number(base, kind), _number(each, kind)
        count, about = int(fields["samples"]), dict(fields["about"])
        shares = tuple(_number(each, "shares") for each in fields.get("shares", ()))
        if shares and len(shares) != stages:
            raise ValueError(f"shares must be of {stages} stages")
        return Calibration(cost, noise, *numbers, count, about, max(1, stages), hop, copies, shares)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidConfig(f"{path} is damaged: {type(error).__name__}: {error}", param="calibration") from error


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a number of at least 0, not {value!r}")
    return float(value)


# ---------------------------------------------------------------- fitting


def fit(
    samples: Sequence[StepSample],
    about: Mapping[str, Any] = {},
    *,
    noise: bool = True,
    stages: int = 1,
    shares: Sequence[float] = (),
) -> Calibration:
    """The line through samples. Raises InvalidConfig for fewer than `MIN_SAMPLES`.

    Their mean is met exactly, so that a simulation of the same steps takes as long as they did. stages: of the pipeline
    that ran them: of its steps those count that waited for no other one, or at the last stage alone, which a few rounds
    find out. shares: see `Calibration`.
    """
    if len(samples) < MIN_SAMPLES:
        raise InvalidConfig(f"{len(samples)} steps are too few for a calibration: {MIN_SAMPLES} are needed")
    table = np.asarray(samples, dtype=np.float64)
    columns = np.column_stack([np.ones(len(table)), *table.T[:4], np.zeros(len(table))])
    seconds = table[:, 4]
    if stages > 1:
        found, columns, seconds = _fit_stage(columns, seconds, table[:, 5], _parts(stages, shares))
    else:
        found = _relative(columns, seconds)
        found *= seconds.sum() / np.maximum(columns @ found, 1e-9).sum()
    fitted = dict(zip(StepCost._fields, map(float, found), strict=False))
    cost = StepCost(
        base=fitted["base"],
        per_token=fitted["per_token"],
        per_kv=fitted["per_kv"],
        per_row=fitted["per_row"],
        per_pair=fitted["per_pair"],
    )
    predicted = np.maximum(columns @ found, 1e-9)
    # Of a pipeline, a late commit takes from the next gap what it adds to its own: as many steps together.
    whole = len(seconds) // stages * stages
    ratios = seconds[:whole].reshape(-1, stages).sum(1) / predicted[:whole].reshape(-1, stages).sum(1)
    error = float(np.mean(np.abs(ratios - 1.0)))
    kept: tuple[float, ...] = ()
    if noise:
        middle = (np.arange(_NUM_NOISE) + 0.5) / _NUM_NOISE
        drawn = np.quantile(ratios, middle)
        kept = tuple(float(each) for each in drawn / drawn.mean())
    hop, parts = float(found[-1]), tuple(shares)
    return Calibration(cost, kept, 0.0, error, len(samples), dict(about), stages, hop, shares=parts)


def _parts(stages: int, shares: Sequence[float]) -> Table:
    """[stages, 6]: what each stage has of the mean stage's coefficients, of which the last is the hop's."""
    parts = np.ones((stages, 6))
    if shares:
        parts *= np.asarray(shares)[:, None]
        parts[:, 3] = [0.0] * (stages - 1) + [stages]
    parts[:, 5] = 0.0
    return parts


def _relative(columns: Table, seconds: Table) -> Table:
    """Least squares of relative errors. columns [N, K], seconds [N]. Returns [K]."""
    return non_negative(columns / seconds[:, None], np.ones(len(seconds)))


def _fit_stage(columns: Table, gaps: Table, latency: Table, parts: Table) -> tuple[Table, Table, Table]:
    """What a step takes in a mean stage [6], and columns [N, 6] and seconds [N] of the steps whose times say it.

    parts [stages, 6]: see `_parts`. gaps [N]: seconds since the step before was committed, or since the step's
    plan. latency [N]: since its launch. A step that waits for no other takes its latency for all stages and the
    hops between them; one that the last stage begins as soon as it has ended the one before takes its gap for that
    stage; and where an earlier stage does so, and neither waits after it, the gap is what it takes there and how
    much longer it is on its way from there. Of others nothing is known.

    A commit that comes late makes one gap long and the next one short: errors are relative to what is predicted,
    and all gaps together are met.
    """
    stages = len(parts)
    ends, hops = np.cumsum(gaps), (stages - 1) / stages  # idle times between steps change nothing
    found = non_negative(columns, gaps / stages)
    rows, seconds, predicted = list[Table](), list[float](), 0.0
    for number in range(_ROUNDS):
        rows, seconds, predicted = [], [], 0.0
        guess = np.maximum(columns @ (found * parts).T, 1e-9)
        hop, free = float(found[-1]), [-math.inf] * stages
        last, held_before = columns[0], stages
        for each, own, gap, taken, end in zip(columns, guess, gaps, latency, ends, strict=True):
            at = arrived = end - taken
            held, before = -1, end - gap
            for stage in range(stages):
                held, arrived = (stage if free[stage] > at else held), at
                free[stage] = max(at, free[stage]) + own[stage]
                at = free[stage] + hop
            if held < 0:
                rows.append(np.array([*each[:-1], hops]))
                seconds.append(taken / stages)
            elif arrived <= before:
                rows.append(each * parts[-1])
                seconds.append(gap)
            elif held_before <= held < stages - 1:  # both went on from there without waiting
                row = each * parts[held] + (each - last) * parts[held + 1 :].sum(0)
                if row @ found > own[held] / 2:  # relative errors of small differences say nothing
                    rows.append(row)
                    seconds.append(gap)
            last, held_before = each, held
            predicted += max(0.0, free[-1] - before)
            free[-1] = end
        if len(rows) < MIN_SAMPLES:
            raise InvalidConfig(f"{len(rows)} steps that say what a stage takes are too few: {MIN_SAMPLES} are needed")
        if number < _ROUNDS // 2:
            scale = np.maximum(np.array(rows) @ found, 1e-9)
            found = non_negative(np.array(rows) / scale[:, None], np.array(seconds) / scale)
        else:  # which steps wait for others changes with it
            found = found * min(2.0, max(0.5, gaps.sum() / max(predicted, 1e-9)))
    return found, np.array(rows), np.array(seconds)


def fit_copies(copies: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, tuple[float, float]]:
    """The line through copies of each kind, of (bytes, seconds). Of copies that were all alike, it has no base."""
    found = dict[str, tuple[float, float]]()
    for kind, samples in copies.items():
        table = np.asarray(samples, dtype=np.float64)
        sizes, seconds = table[:, 0], np.maximum(table[:, 1], 1e-9)
        columns = np.column_stack([np.full(len(table), float(len(set(sizes)) > 1)), sizes])
        base, each = _relative(columns, seconds)
        found[kind] = float(base), float(each)
    return found


def non_negative(columns: Table, wanted: Table) -> Table:
    """Least squares without negative coefficients, by coordinate descent on the normal equations.

    columns [N, K], wanted [N]. Returns [K]. Columns are scaled first: they differ by orders of magnitude.
    """
    norms = np.linalg.norm(columns, axis=0)
    norms[norms == 0] = 1.0
    scaled = columns / norms
    gram, target = scaled.T @ scaled, scaled.T @ wanted
    found = np.zeros(columns.shape[1])
    for _ in range(20_000):
        before = found.copy()
        for k in range(len(found)):
            if gram[k, k] > 0:
                found[k] = max(0.0, found[k] + (target[k] - gram[k] @ found) / gram[k, k])
        if np.abs(found - before).max() <= 1e-10 * max(1.0, float(np.abs(found).max())):
            break
    out: Table = found / norms
    return out
