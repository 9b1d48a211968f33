"""The host's sampler: logits in, tokens out. A pure function of (seed, choice, position) and a row's logits.

Order, as in vLLM: grammar mask, allowed_token_ids, bad words and min_tokens, logit_bias, penalties; then temperature,
min_p, top_k, top_p; then Gumbel-max with hashed noise (noise.py). What no row asks for is not run, so a greedy batch is
one argmax. Logits on another device are copied to the host first.

A logits processor changes the logits of the rows that it is given, in place. Its settings are the row's, and what
depends on the output so far is read from the row's history, including drafts fed before the row: there is no other
state, so a preempted row that is opened again is penalised as before.

Truncation is one threshold per row: what lies below cannot be drawn. A threshold keeps every token that ties with the
last one kept (as in vLLM), so the answer depends neither on the order of equal logits nor on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.model_runner.sampling.features import (
    ALLOWED,
    BANNED,
    BIASED,
    PENALISED,
    RANDOM,
    SCORED,
    SCORED_WIDE,
    TRUNCATED,
    SamplingFeatures,
)
from quire.model_runner.sampling.noise import Draw, Floats, Ids, keys
from quire.scheduler.plan import NO_TOKEN_ALLOWED, Mask
from quire.types import TokenLogprobs


class SampledRows(Protocol):
    """What sampling reads of rows: a `RowState`, or a view of rows on a device."""

    @property
    def features(self) -> SamplingFeatures:
        """How each row is sampled."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """[rows, L] histories and the drafts behind them."""

    @property
    def num_known(self) -> npt.NDArray[Any]:
        """[rows] tokens of each history."""

    @property
    def prompt_length(self) -> npt.NDArray[Any]:
        """[rows] tokens of each prompt."""

    @property
    def epoch(self) -> int:
        """Changes when rows are opened."""


class Samples(Protocol):
    """Which rows are sampled, and how far behind their histories: a `StepShape`, or those of drafts."""

    @property
    def sample_row(self) -> Ids:
        """[R] row of each sample."""

    @property
    def sample_offset(self) -> Ids:
        """[R] drafts before each sample."""


LogitsProcessor = Callable[[Floats, SampledRows, Samples, Ids], None]
"""(logits [R, V], rows, samples, which of the R rows)."""


def mask(logits: Floats, masks: Iterable[tuple[int, Mask]]) -> None:
    """Forbid what each (row, bit string) does not allow; a mask shorter than the vocabulary allows nothing after its
    end."""
    some = [(r, allowed) for r, allowed in masks if allowed is not None]
    if not some:
        return
    vocab = logits.shape[1]
    width = -(-vocab // 8)
    joined = b"".join([allowed[:width].ljust(width, b"\0") for _, allowed in some])
    forbidden = ~np.frombuffer(joined, np.uint8).reshape(len(some), width)
    bits = np.unpackbits(forbidden, axis=1, count=vocab, bitorder="little").view(np.bool_)
    for (r, _), where in zip(some, bits, strict=True):
        # Several times as fast as indexing with a bool array.
        np.copyto(logits[r], -np.inf, where=where)


def allow(logits: Floats, rows: SampledRows, shape: Samples, which: Ids) -> None:
    """allowed_token_ids."""
    mask(logits, ((r, rows.features.extras[shape.sample_row[r]].allowed) for r in which.tolist()))


def ban(logits: Floats, rows: SampledRows, shape: Samples, which: Ids) -> None:
    """No stop token before min_tokens; no token that would complete a bad word of the output."""
    vocab = logits.shape[1]
    for r, row, output in _outputs(rows, shape, which):
        extras = rows.features.extras[row]
        if len(output) < rows.features.min_tokens[row]:
            logits[r, extras.stop[extras.stop < vocab]] = -np.inf
        for *head, tail in extras.bad_words:
            if tail < vocab and output[len(output) - len(head) :].tolist() == head:
                logits[r, tail] = -np.inf


def bias(logits: Floats, rows: SampledRows, shape: Samples, which: Ids) -> None:
    """logit_bias."""
    vocab = logits.shape[1]
    for r in which.tolist():
        tokens, amounts = rows.features.extras[shape.sample_row[r]].bias
        logits[r, tokens[tokens < vocab]] += amounts[tokens < vocab]


def penalise(logits: Floats, rows: SampledRows, shape: Samples, which: Ids) -> None:
    """Repetition (prompt and output: positive logits divided, negative multiplied), frequency, presence (output), each
    of the last repeat_last_n tokens."""
    columns = rows.features.columns
    for r, row, output in _outputs(rows, shape, which):
        line = logits[r]
        start = rows.prompt_length[row]
        end = start + len(output)
        begin = max(end - columns["repeat_last_n"][row], 0)
        seen = rows.tokens[row, begin:end]
        repeated = line[seen]
        by = columns["repetition_penalty"][row]
        line[seen] = np.where(repeated > 0, repeated / by, repeated * by)
        generated, times = np.unique(rows.tokens[row, max(begin, start) : end], return_counts=True)
        line[generated] -= (
            columns["frequency_penalty"][row] * times.astype(np.float32) + columns["presence_penalty"][row]
        )


def _outputs(rows: SampledRows, shape: Samples, which: Ids) -> Iterator[tuple[int, int, npt.NDArray[np.int32]]]:
    """(logits row, state row, the output before it: sampled tokens and the drafts that the row takes as accepted)."""
    for r in which.tolist():
        row = int(shape.sample_row[r])
        end = int(rows.num_known[row] + shape.sample_offset[r])
        yield r, row, rows.tokens[row, rows.prompt_length[row] : end]


LOGITS_PROCESSORS: tuple[tuple[int, LogitsProcessor], ...] = (
    (ALLOWED, allow),
    (BANNED, ban),
    (BIASED, bias),
    (PENALISED, penalise),
)
"""By trait, in the order they are run."""


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
    """The least logit that each row keeps, [R, 1], from its `width` greatest first."""
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
    # The width that the row itself asks for, whatever others do.
    own = np.clip(np.where(cut.top_k < logits.shape[1], cut.top_k, 1), _HEAD, head.shape[1])
    # Rows whose mass is not all within the head.
    wide = np.flatnonzero(np.take_along_axis(head, own - 1, 1) >= low)
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


def score_tokens(logits: Tensor, tokens: Ids, wanted: Ids) -> list[TokenLogprobs]:
    """One TokenLogprobs per row, of the raw distribution: natural log, before any processing. logits [R, V] float32;
    tokens [R] the chosen ones; wanted [R]: how many of the likeliest to add, -1 for all. Equal logits are ordered by
    token id; a chosen token's rank counts those above it."""
    vocab = logits.shape[1]
    out: list[TokenLogprobs | None] = [None] * len(tokens)
    counts = np.minimum(np.where(wanted < 0, vocab, wanted), vocab)
    for count in np.unique(counts).tolist():
        which = np.flatnonzero(counts == count)
        rows = logits if len(which) == len(tokens) else logits[torch.from_numpy(which)]
        chosen = rows.gather(1, torch.from_numpy(tokens[which])[:, None].to(torch.int64))
        # Row by row: torch sums several rows at once in another order than one.
        total = torch.stack([row.logsumexp(0) for row in rows])[:, None]
        ranks = (rows > chosen).sum(1).add_(1).tolist()
        own = (chosen - total).squeeze(1).tolist()
        values, ids = _likeliest(rows, count)
        tops = (values - total).tolist()
        for i, r in enumerate(which.tolist()):
            top = tuple(zip(ids[i], tops[i], strict=True))
            out[r] = TokenLogprobs(int(tokens[r]), own[i], ranks[i], top)
    return [each for each in out if each is not None]


def _likeliest(logits: Tensor, count: int) -> tuple[Tensor, list[list[int]]]:
    """The greatest `count` logits of each row, best first, and their tokens; equal ones by token id."""
    ids = logits.topk(count, 1).indices.sort(1).values
    values, order = logits.gather(1, ids).sort(stable=True, dim=1, descending=True)
    return values, ids.gather(1, order).tolist()


BROKEN = "the model produced NaN or infinite logits"


class Sampled(NamedTuple):
    """tokens [R]; bad [R]: rows without an answer; errors: why, by row; logprobs by row, where requested."""

    tokens: Ids
    bad: npt.NDArray[np.bool_]
    errors: dict[int, str]
    logprobs: dict[int, TokenLogprobs]


class SamplingPlan(NamedTuple):
    """What the rows of a batch ask for. The same in every step of steady decode."""

    processors: tuple[tuple[LogitsProcessor, Ids], ...]
    scored: Ids
    random_rows: Ids
    truncated: Ids
    """Indices into `random_rows`."""
    temperature: Floats
    """[H, 1]"""
    streams: npt.NDArray[np.uint32]
    settings: Truncation


class Sampler:
    """Samples rows over a vocabulary of `vocab_size`. scores: say how likely tokens were, where a row asks for it."""

    def __init__(self, vocab_size: int, *, scores: bool = True) -> None:
        self.draw = Draw(vocab_size)
        self.vocab_size, self.scores = vocab_size, scores
        self._plan: SamplingPlan | None = None
        # Epoch and rows that the plan is for: a drafter samples some of the rows only.
        self._plan_for: tuple[int, bytes] = (-1, b"")

    def __call__(
        self, logits: Tensor, rows: SampledRows, shape: Samples, masks: Sequence[tuple[int, Mask]] = ()
    ) -> Sampled:
        """logits [R, V] of the shape's sampled rows, which may be changed; masks: (row, allowed) of rows with a
        grammar."""
        x = np.ascontiguousarray(logits.float().cpu().numpy())
        key = rows.epoch, shape.sample_row.tobytes()
        if self._plan_for != key or self._plan is None:
            self._plan, self._plan_for = sampling_plan(rows, shape, self.vocab_size), key
        processors, scored, random_rows = self._plan[:3]
        raw = torch.from_numpy(x[scored]) if self.scores and len(scored) else None
        tokens, peak = _best(x)
        bad = ~np.isfinite(peak)
        errors = dict.fromkeys(np.flatnonzero(bad).tolist(), BROKEN)
        if errors:
            # What is drawn there is not used, and NaN would need care below.
            x[bad] = 0.0
        if masks or processors:
            mask(x, masks)
            for process, which in processors:
                process(x, rows, shape, which)
            tokens, peak = _best(x)
            masked_out = np.isneginf(peak) & ~bad
            errors |= dict.fromkeys(np.flatnonzero(masked_out).tolist(), NO_TOKEN_ALLOWED)
            bad |= masked_out
            x[masked_out] = 0.0
        if len(random_rows):
            tokens[random_rows] = self._random(x, rows, shape, self._plan)
        logprobs: dict[int, TokenLogprobs] = {}
        if raw is not None:
            wanted = rows.features.logprobs[shape.sample_row[scored]]
            logprobs = dict(zip(scored.tolist(), score_tokens(raw, tokens[scored], wanted), strict=True))
        return Sampled(tokens, bad, errors, logprobs)

    def _random(self, x: Floats, rows: SampledRows, shape: Samples, plan: SamplingPlan) -> Ids:
        random_rows, truncated = plan.random_rows, plan.truncated
        drawn = x if len(random_rows) == len(x) else x[random_rows]
        if len(truncated):
            part = drawn if len(truncated) == len(random_rows) else drawn[truncated]
            truncate(part, plan.settings)
            if part is not drawn:
                drawn[truncated] = part
        position = rows.num_known[shape.sample_row[random_rows]] + shape.sample_offset[random_rows]
        return self.draw(drawn, plan.temperature, keys(plan.streams, position))


def sampling_plan(rows: SampledRows, shape: Samples, vocab_size: int) -> SamplingPlan:
    """What the sampled rows of a shape ask for."""
    features = rows.features
    bits = features.bits[shape.sample_row]
    random_rows = np.flatnonzero(bits & RANDOM)
    truncated = np.flatnonzero(bits[random_rows] & TRUNCATED)
    random_row = shape.sample_row[random_rows]
    truncated_row = random_row[truncated]
    each = ((process, np.flatnonzero(bits & bit)) for bit, process in LOGITS_PROCESSORS)
    return SamplingPlan(
        processors=tuple((process, which) for process, which in each if len(which)),
        scored=np.flatnonzero(bits & (SCORED | SCORED_WIDE)),
        random_rows=random_rows,
        truncated=truncated,
        temperature=features.columns["temperature"][random_row][:, None],
        streams=features.stream[random_row],
        settings=Truncation.of(features.columns, truncated_row, vocab_size),
    )


def _best(x: Floats) -> tuple[Ids, Floats]:
    """The greatest logit of each row and its token: NaN wins, and among equals the first."""
    best = x.argmax(1)
    return best, x[np.arange(len(best)), best]
