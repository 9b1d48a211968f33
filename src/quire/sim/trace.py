"""Requests of a simulation: when they arrive, how long they are, and what their prompts have in common.

Four kinds of files are read: a CSV as Azure publishes its LLM inference traces, JSON lines as Mooncake publishes its
own (`hash_ids` name blocks of prompts), what `quire bench serve --save-result` saved, and recordings. A prompt is a
list of runs, (token, count) pairs: equal runs are equal tokens, so that prefixes are shared as they were.
"""

from __future__ import annotations

import csv
import json
import math
import random
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from quire.engine.events import Observer, StepRecord
from quire.errors import InvalidConfig, InvalidRequest, nearest
from quire.observability import recording_format
from quire.sim.replay import replay
from quire.types import Request

Run = tuple[int, int]
"""(token, how many times)."""

_FIRST_NAME = 1000
"""Tokens from here on are names of blocks; those below are answers' and padding."""
_MOONCAKE_BLOCK = 512
"""Tokens that one of Mooncake's hash_ids names."""
_MOST_TOKENS, _MOST_SECONDS = 10**8, 10**12
"""Bounds of what a trace may say of a request. What is beyond is damage."""
_MOST_REQUESTS = 10**8
"""Of a trace that is repeated: more would not fit into memory."""
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""Columns of Azure's CSV that are read."""

_DAMAGED = (KeyError, IndexError, ValueError, TypeError, AttributeError, OverflowError, RecursionError)
"""What lines raise that are not what they should be."""


@dataclass(slots=True)
class Trace:
    """Requests by number, sorted by arrival. arrivals: seconds from the first one. prompts, outputs: tokens.

    blocks: by request, names of the blocks of its prompt, of `block_size` tokens each (the last one may be shorter), as
    far as they are known; empty: nothing is known of any prompt but its length.
    """

    name: str
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    prompts: array[int] = field(default_factory=lambda: array("q"))
    outputs: array[int] = field(default_factory=lambda: array("q"))
    blocks: list[tuple[int, ...]] = field(default_factory=list)
    block_size: int = _MOONCAKE_BLOCK

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def has_prefixes(self) -> bool:
        """Whether it says which prompts begin alike."""
        return bool(self.blocks)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.arrivals[-1] if self.arrivals else 0.0

    def add(self, arrival: float, prompt: int, output: int, blocks: tuple[int, ...] | None = None) -> None:
        """Append a request. At least one token each: a request without is counted as one of one token.

        Raises ValueError for what no request can be.
        """
        for tokens in (prompt, output):
            if not 0 <= tokens <= _MOST_TOKENS:
                raise ValueError(f"{tokens} is no number of tokens: from 0 to {_MOST_TOKENS:,} are")
        if not abs(arrival) <= _MOST_SECONDS:
            raise ValueError(f"{arrival} is no time: seconds from -{_MOST_SECONDS:,} to {_MOST_SECONDS:,} are")
        self.arrivals.append(arrival)
        self.prompts.append(max(1, prompt))
        self.outputs.append(max(1, output))
        if blocks is not None:
            self.blocks.append(blocks)

    def runs(self, number: int) -> tuple[Run, ...]:
        """The prompt of a request."""
        left = self.prompts[number]
        if not self.blocks:
            return ((_FIRST_NAME + self._unnamed + number, left),)
        out = []
        for name in self.blocks[number]:
            out.append((_FIRST_NAME + name, min(left, self.block_size)))
            left -= out[-1][1]
            if left <= 0:
                return tuple(out)
        # what no name says is this request's own
        return (*out, (_FIRST_NAME + self._unnamed + number, left))

    @property
    def _unnamed(self) -> int:
        return 1 << 29

    def repeated(self, count: int, *, overlap: bool = False) -> Trace:
        """The trace `count` times: one after another, or at once, shifted evenly against each other.

        Repetitions share no prefixes with each other.
        """
        if count == 1:
            return self
        if count * len(self) > _MOST_REQUESTS:
            raise InvalidConfig(
                f"--repeat {count}: {count * len(self):,} requests are more than {_MOST_REQUESTS:,}", param="repeat"
            )
        names = 1 + max((name for blocks in self.blocks for name in blocks), default=0)
        if names * count >= self._unnamed:
            raise InvalidConfig(f"--repeat {count}: this trace names too many blocks to be repeated so often")
        period = self.seconds + self.seconds / max(1, len(self) - 1)
        own = np.frombuffer(self.arrivals)
        shifts = np.arange(count, dtype=np.float64)[:, None]
        arrivals = ((own + shifts * (period / count)) % period if overlap else own + shifts * period).ravel()
        order = np.argsort(arrivals, kind="stable")
        whose = order % len(self)
        out = Trace(f"{self.name} x {count}", block_size=self.block_size)
        out.arrivals = array("d", arrivals[order].tobytes())
        out.prompts = array("q", np.frombuffer(self.prompts, dtype=np.int64)[whose].tobytes())
        out.outputs = array("q", np.frombuffer(self.outputs, dtype=np.int64)[whose].tobytes())
        if self.blocks:
            out.blocks = [
                tuple([name + turn * names for name in self.blocks[number]])
                for turn, number in zip((order // len(self)).tolist(), whose.tolist(), strict=True)
            ]
        return out

    def faster(self, speed: float) -> Trace:
        """The same requests, `speed` times as fast."""
        out = Trace(self.name, array("d", [at / speed for at in self.arrivals]), self.prompts, self.outputs)
        out.blocks, out.block_size = self.blocks, self.block_size
        return out

    def shrunk(self, factor: float) -> Trace:
        """The same requests with prompts so many times as short. Raises InvalidConfig where blocks are named."""
        if self.blocks:
            raise InvalidConfig("--shrink does not go with a trace that names blocks of prompts: leave it out")
        prompts = array("q", [max(1, int(each / factor)) for each in self.prompts])
        return Trace(self.name, self.arrivals, prompts, self.outputs)

    def part(self, first: int, last: int) -> Trace:
        """Requests `first` to `last`, the last one not included."""
        begin = self.arrivals[first] if first < last else 0.0
        arrivals = array("d", [at - begin for at in self.arrivals[first:last]])
        out = Trace(self.name, arrivals, self.prompts[first:last], self.outputs[first:last])
        out.blocks, out.block_size = self.blocks[first:last], self.block_size
        return out

    def reuse(self) -> float:
        """The share of prompt tokens whose block an earlier prompt had in the same place, after the same beginning."""
        seen: set[int] = set()
        shared = 0
        for number, blocks in enumerate(self.blocks):
            key, left, found = 0, self.prompts[number], True
            for name in blocks:
                key = hash((key, name))
                found = found and key in seen
                shared += min(left, self.block_size) if found else 0
                left -= self.block_size
                seen.add(key)
        return shared / max(1, sum(self.prompts))


# ---------------------------------------------------------------- files


def read_trace(path: Path) -> Trace:
    """Read a trace of any kind, or one of `BUILT_IN`. Raises InvalidRequest naming the line that cannot be read."""
    if str(path) in BUILT_IN:
        return BUILT_IN[str(path)]()
    if path.is_dir() or path.suffix == ".quirerec":
        return _recording(path)
    if not path.is_file():
        known = ", ".join(BUILT_IN)
        raise InvalidRequest(
            f"there is no trace {path}: give a file, or one of {known}.{nearest(str(path), BUILT_IN)}", param="trace"
        )
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            first = next((char for char in iter(lambda: lines.read(1), "") if not char.isspace()), "")
            lines.seek(0)
            trace = _json_lines(path, lines) if first == "{" else _azure(path, lines)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidRequest(f"{path} is neither CSV nor JSON lines", param="trace") from error
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror or error}", param="trace") from error
    if not len(trace):
        raise InvalidRequest(f"{path} has no requests", param="trace")
    return _sorted(trace)


def _sorted(trace: Trace) -> Trace:
    """By arrival, from 0 on."""
    order = sorted(range(len(trace)), key=trace.arrivals.__getitem__)
    out = Trace(trace.name, block_size=trace.block_size)
    for n in order:
        blocks = trace.blocks[n] if trace.blocks else None
        out.add(trace.arrivals[n] - trace.arrivals[order[0]], trace.prompts[n], trace.outputs[n], blocks)
    return out


def _azure(path: Path, lines: Any) -> Trace:
    """Times without a zone are UTC, so that a trace is the same on every machine."""
    trace, rows = Trace(path.stem), csv.DictReader(lines)
    lacking = [name for name in _AZURE if rows.fieldnames and name not in rows.fieldnames]
    if lacking:
        raise InvalidRequest(f"{path}, line 1: not {','.join(_AZURE)} (no column {lacking[0]})", param="trace")
    for row in rows:
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"])
            at = at if at.tzinfo else at.replace(tzinfo=UTC)
            trace.add(at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except _DAMAGED as error:
            raise InvalidRequest(
                f"{path}, line {rows.line_num}: not {','.join(_AZURE)} ({error})", param="trace"
            ) from None
    return trace


def _number(value: Any) -> float:
    """A number as JSON has it. Raises TypeError for a string of digits, too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{str(value)[:40]!r} is no number")
    return value


def _whole(value: Any) -> int:
    """A whole number, which may be written with a fraction of 0. Raises TypeError."""
    number = _number(value)
    if number != int(number):
        raise TypeError(f"{value} is no whole number")
    return int(number)


def _json_lines(path: Path, lines: Any) -> Trace:
    """Mooncake's lines, or what `quire bench serve` saved: one object."""
    trace, named, number = Trace(path.stem), 0, 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError("it is no object")
            if number == 1 and "levels" in row:
                return _load_test(path, row)
            blocks = row.get("hash_ids")
            named += blocks is not None
            at = _number(row["timestamp"]) / 1e3 if "timestamp" in row else _number(row["arrival"])
            prompt = row.get("input_length", row.get("prompt_tokens"))
            output = row.get("output_length", row.get("output_tokens"))
            trace.add(float(at), _whole(prompt), _whole(output), None if blocks is None else tuple(map(_whole, blocks)))
        except _DAMAGED as error:
            raise InvalidRequest(
                f"{path}, line {number}: neither timestamp (milliseconds), input_length, output_length, nor arrival "
                f"(seconds), prompt_tokens, output_tokens ({type(error).__name__}: {error})",
                param="trace",
            ) from None
    if named not in (0, len(trace)):
        raise InvalidRequest(f"{path}: {named} of {len(trace)} lines have hash_ids: all or none must", param="trace")
    names = {name: i for i, name in enumerate(sorted({name for blocks in trace.blocks for name in blocks}))}
    trace.blocks = [tuple(names[name] for name in blocks) for blocks in trace.blocks]
    return trace


def _load_test(path: Path, saved: Mapping[str, Any]) -> Trace:
    """The last level of a load test, its answered requests."""
    level = saved["levels"][-1]
    trace = Trace(f"{path.stem}, {level['level']}")
    for since, _, _, prompt, new, status in level["asked"]:
        if status == 200:
            trace.add(float(since), int(prompt), int(new))
    return trace


class _Requests(Observer):
    """The requests of a recording as it is replayed. blocks: of prompts, in tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.asked: dict[str, tuple[float, tuple[int, ...]]] = {}
        self.made: dict[str, int] = {}

    def on_submit(self, request: Request, now: float) -> None:
        """See Observer."""
        self.asked[request.id] = now, request.prompt

    def on_step(self, record: StepRecord) -> None:
        """See Observer."""
        for event in record.events:
            self.made[event.id] = self.made.get(event.id, 0) + len(event.tokens)


def _recording(path: Path) -> Trace:
    """The requests of recordings, with the blocks that they share. Answers are as long as they became."""
    reader, trace = recording_format.RecordingReader([path]), Trace(path.stem)
    names: dict[tuple[int, ...], int] = {}
    start = 0.0
    while (began := reader.next) is not None:
        assert isinstance(began, recording_format.Began)
        size, seen = int(began.about["page_size"]), _Requests(int(began.about["page_size"]))
        if len(trace) and size != trace.block_size:
            raise InvalidRequest(f"{path}: its recordings have different block sizes: give one alone", param="trace")
        trace.block_size = size
        replay(reader, [seen])
        for id, (at, prompt) in seen.asked.items():
            blocks = [
                names.setdefault(prompt[i : i + size], len(names)) for i in range(0, len(prompt) - size + 1, size)
            ]
            trace.add(start + at - began.clock, len(prompt), seen.made.get(id, 1), tuple(blocks))
        start = trace.seconds
    if not len(trace):
        raise InvalidRequest(f"{path} has no requests", param="trace")
    return _sorted(trace)


# ---------------------------------------------------------------- made up

_CODE_QUANTILES = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 1)
"""Shares of requests at which the three tables below have their values."""
_CODE_PROMPTS = (
    3,
    75,
    147,
    385.6,
    770,
    1075,
    1469,
    1909,
    2433,
    3192,
    3920,
    5188,
    7303,
    7436,
    7436,
    7436,
    7436,
    7437,
    7437,
)
_CODE_OUTPUTS = (6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 39, 55, 90, 170.9, 251.5, 359.4, 669.6, 825.3, 1899)
_CODE_GAPS = (
    1e-05,
    8.8e-05,
    0.000209,
    0.00118,
    0.00329,
    0.0151,
    0.0638,
    0.095,
    0.1,
    0.16,
    0.199,
    0.273,
    0.401,
    0.799,
    2.21,
    9.98,
    41.4,
    79.2,
    217,
)


def azure_code(requests: int = 8819, seed: int = 7) -> Trace:
    """Requests drawn from the quantiles of Azure's trace of coding (2023): 2,048 tokens in, 28 out, 2.6 a second.

    Lengths and gaps between arrivals are independent of each other, which they are not in the trace itself.
    """
    rng = random.Random(seed)
    trace = Trace("azure-code")
    at = 0.0
    for _ in range(requests):
        trace.add(at, int(_draw(_CODE_PROMPTS, rng)), int(_draw(_CODE_OUTPUTS, rng)))
        at += _draw(_CODE_GAPS, rng)
    return trace


def chats(requests: int = 4000, seed: int = 7) -> Trace:
    """Conversations with prefixes to share: 20 system prompts of 1,024 tokens, one to eight turns of a few hundred
    tokens each, four requests a second."""
    rng = random.Random(seed)
    trace = Trace("chats", block_size=64)
    weights = [1 / (1 + i) for i in range(20)]
    steps = list(accumulate(weights))
    name = 20 * 16
    rows: list[tuple[float, int, int, tuple[int, ...]]] = []
    at = 0.0
    while len(rows) < requests:
        system = bisect_right(steps, rng.random() * steps[-1])
        blocks = tuple(range(system * 16, system * 16 + 16))
        now = at
        for _ in range(rng.randint(1, 8)):
            asked = rng.randint(1, 8)
            blocks += tuple(range(name, name + asked))
            name += asked
            answer = rng.randint(32, 320)
            rows.append((now, 64 * len(blocks), answer, blocks))
            whole = answer // 64  # the answer's whole blocks are in the next prompt
            blocks += tuple(range(name, name + whole))
            name += whole
            now += rng.expovariate(1 / 20.0) + 5.0
        at += rng.expovariate(4.0 / 4.5)
    for row in sorted(rows)[:requests]:
        trace.add(*row)
    return trace


BUILT_IN: Mapping[str, Callable[[], Trace]] = MappingProxyType({"azure-code": azure_code, "chats": chats})
"""Traces that need no file."""


def _draw(values: tuple[float, ...], rng: random.Random) -> float:
    """By inversion, geometric between the quantiles: these distributions have long tails."""
    at = rng.random()
    i = min(bisect_right(_CODE_QUANTILES, at), len(values) - 1)
    low, high = _CODE_QUANTILES[i - 1], _CODE_QUANTILES[i]
    return values[i - 1] * math.pow(values[i] / values[i - 1], (at - low) / (high - low))
