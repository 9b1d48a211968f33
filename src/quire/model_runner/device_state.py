"""Row state on the device: one int32 tensor that holds every row and the spans of the step, changed by scatters.

A plan becomes (index, value) pairs in one pinned buffer, and one scatter. In steady decode nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.model_runner.graphs import padding
from quire.model_runner.row_state import RowState, StepShape
from quire.model_runner.sampling.features import COLUMNS, LISTS, NO_EXTRAS, Column, pack_lists
from quire.scheduler.plan import Mask, Plan
from quire.token_masks import MaskTable, mask_table
from quire.types import UNLIMITED

COUNTERS = (
    "known",
    "length",
    "done",
    "state",
    "prompt",
    "first",
    "stream",
    "rope_shift",
    "min_tokens",
    "lists_low",
    "lists_high",
    *LISTS,
)
"""Columns of one int32 per row: tokens of its history; those whose K/V is computed, by the model and by a draft model;
which of its states it goes on from, see `RowState.first_state`; those of its prompt; those whose K/V it found in the
cache; the key of its noise; what is added to positions before tokens are rotated by them; min_tokens; and of the row's
lists (see `pack_lists`) the address on the device, in two halves, and the sizes of their sections. Those of
`sampling.features.COLUMNS` follow."""

Ints32 = npt.NDArray[np.int32]
Update = tuple["int | Ints32", Ints32]
"""(indices, values): the first index of a run, or an index for each value."""


class StepInputs(NamedTuple):
    """What a forward is fed and which of its hidden states are sampled at: those of a step, or of drafting.

    counts [4]: tokens, spans, samples, chains. span_row [S], query_start [S+1], token_span [T]. For each sample [R]:
    sample_indices, the token whose hidden state is used; sample_row, its row; sample_position, the index in the row's
    history of the token that it gives; sample_offset, the number of drafts before it. num_computed: the column of
    tokens whose K/V is computed.
    """

    counts: Tensor
    span_row: Tensor
    query_start: Tensor
    token_span: Tensor
    sample_indices: Tensor
    sample_row: Tensor
    sample_position: Tensor
    sample_offset: Tensor
    num_computed: Tensor


class DeviceState:
    """The tensor, and its parts as views of it. There is one row more than rows: it takes what padding writes.

    spans, tokens: the most that a step has. Letters: S spans, T tokens fed, R samples, P blocks, L tokens of a history.
    A chain is a span that samples: its samples are neighbours, from `chain[c]` to `chain[c + 1]`, and the token of each
    is compared with the draft before the next. wanted_drafts: drafts to make for each chain. state_target,
    state_snapshot [T]: as in `StateSlots`, of a recurrent model. mask_index [R]: for each
    sample the line of `masks` that has the tokens it may be, one bit each; -1: any. mask_words [1]: words of a line.
    """

    def __init__(self, rows: RowState, *, spans: int, tokens: int, vocab_size: int, device: torch.device) -> None:
        self.num_rows, self.spans = rows.num_rows, spans
        self.features = rows.features
        self.device = device
        self.max_history, self.max_drafts, self.recurrent = rows.max_history, rows.max_drafts, rows.recurrent
        self.max_samples = padding(spans * (1 + rows.max_drafts))
        self.num_table_columns = rows.block_table.shape[1]
        self.history_width = rows.tokens.shape[1]
        sizes = {"chain": spans + 1, "wanted": spans, "mask_index": self.max_samples, "mask_words": 1}
        for name, samples in (("step", self.max_samples), ("draft", spans)):
            sizes |= {f"{name}.counts": 4, f"{name}.span_row": spans, f"{name}.query_start": spans + 1}
            sizes |= {f"{name}.token_span": tokens, f"{name}.sample_indices": samples, f"{name}.sample_row": samples}
            sizes |= {f"{name}.sample_position": samples, f"{name}.sample_offset": samples}
        if rows.recurrent:
            sizes |= {"state_target": tokens, "state_snapshot": tokens}
        sizes |= dict.fromkeys((*COUNTERS, *COLUMNS), rows.num_rows + 1)
        sizes["table"] = (rows.num_rows + 1) * self.num_table_columns
        sizes["history"] = (rows.num_rows + 1) * self.history_width
        self.offsets: dict[str, int] = {}
        end = 0
        for name, size in sizes.items():
            self.offsets[name] = end
            end += -(-size // 32) * 32
        self.sizes = sizes
        self.data = torch.zeros(end, dtype=torch.int32, device=device)
        self.column_at = np.array([self.offsets[name] for name in (*COUNTERS, *COLUMNS)], dtype=np.int32)
        self.block_table = self.part("table").view(-1, self.num_table_columns)
        self.history = self.part("history").view(-1, self.history_width)
        self.columns = {name: self.part(name) for name in COUNTERS}
        self.columns |= {name: self._column(name, column) for name, column in COLUMNS.items()}
        self.chain, self.wanted_drafts = self.part("chain"), self.part("wanted")
        self.mask_index, self.mask_words = self.part("mask_index"), self.part("mask_words")
        self.last_snapshots: dict[int, int] = {}
        self.line_words = -(-vocab_size // 32)
        self.masks = torch.zeros(self.max_samples * self.line_words, dtype=torch.int32, device=device)
        self.lists: dict[int, Tensor] = {}
        self.step, self.draft = self._step_inputs("step", "length"), self._step_inputs("draft", "done")
        self.reset()

    def part(self, name: str) -> Tensor:
        """One of the arrays or columns."""
        begin = self.offsets[name]
        return self.data[begin : begin + self.sizes[name]]

    def _step_inputs(self, kind: str, length: str) -> StepInputs:
        parts = {name: self.part(f"{kind}.{name}") for name in StepInputs._fields if name != "num_computed"}
        return StepInputs(**parts, num_computed=self.columns[length])

    def _column(self, name: str, column: Column) -> Tensor:
        return self.part(name) if column.is_integer else self.part(name).view(torch.float32)

    def reset(self) -> None:
        """No rows, and a step of no spans: all that is fed is padding."""
        self.data.zero_()
        self.last_snapshots = {}
        for inputs in (self.step, self.draft):
            inputs.span_row.fill_(self.num_rows)
            inputs.sample_row.fill_(self.num_rows)
        for name, column in COLUMNS.items():
            self.columns[name].fill_(column.off)
        self.mask_index.fill_(-1)
        self.lists.clear()

    def store_lists(self, lists: Mapping[int, Ints32]) -> dict[int, int]:
        """Copy lists of rows to the device, in one copy; returns their addresses.

        They are kept until the row is opened again: by then every step that reads them is in the queue, and memory
        that is freed is reused behind it.
        """
        if not lists:
            return {}
        host = torch.from_numpy(np.concatenate(list(lists.values())))
        if self.device.type == "cuda":
            host = host.pin_memory()
        on_device = host.to(self.device, non_blocking=True)
        addresses, begin = {}, on_device.data_ptr()
        for row, values in lists.items():
            self.lists[row] = on_device
            addresses[row] = begin
            begin += values.nbytes
        return addresses


class MaskUpload:
    """Masks of a step in a pinned buffer, from which a kernel copies them to the device. A step with masks is sampled
    when all before it are complete, so one buffer on the host is enough."""

    def __init__(self, state: DeviceState) -> None:
        self.state = state
        pinned, words = state.device.type == "cuda", state.line_words
        # `mask_index` and, behind it, `mask_words`.
        self.places = state.data[state.offsets["mask_index"] : state.offsets["mask_words"] + 1]
        self.host_places = torch.full_like(self.places, -1, device="cpu", pin_memory=pinned)
        self.host = torch.zeros(state.max_samples * words, dtype=torch.int32, pin_memory=pinned)
        self.lines = self.host.numpy().reshape(-1, words)

    def fill(self, masks: Sequence[Sequence[Mask]], first_samples: list[int], num_samples: int) -> int:
        """Take the masks of spans, and which sample has which. first_samples: of each span. Returns how many lines are
        to be copied."""
        words = self.state.line_words
        table = masks if isinstance(masks, MaskTable) else mask_table(masks, words)
        count, width = len(table.lines), min(table.lines.shape[1], words)
        self.lines[:count, :width] = table.lines[:, :width]
        self.lines[:count, width:] = 0
        host = self.host_places.numpy()
        host[: padding(num_samples)] = -1
        lines, samples = [*chain.from_iterable(table.places)], first_samples
        if len(lines) > len(samples):  # some spans have several
            samples = [at + i for at, span in zip(first_samples, table.places, strict=True) for i in range(len(span))]
        host[samples] = lines
        host[-1] = words
        return count

    def copy(self, lines: int, copied: Callable[[Tensor, Tensor], None]) -> None:
        """Copy so many lines, and which sample has which, by `copied`."""
        words = lines * self.state.line_words
        copied(self.state.masks[:words], self.host[:words])
        copied(self.places, self.host_places)


class Upload(NamedTuple):
    """Changes that a kernel reads where they are: (places, values) in the pinned buffer number `slot`. fixed: whether
    as many of that buffer are always at the same addresses."""

    places: Tensor
    values: Tensor
    slot: int
    fixed: bool


class UploadRing:
    """A plan's changes in pinned buffers in turn, so that one is filled while another is read. They are not copied to
    the device before: starting a copy takes the host several times as long as the kernel takes to read them.

    num_slots: buffers; the oldest must have been read when it is filled again, which the limit of steps in flight
    guarantees. sizes: ascending numbers of pairs; fewer are filled up with the first pair.
    """

    def __init__(self, state: DeviceState, *, num_slots: int, sizes: Sequence[int] = ()) -> None:
        self.state, self.sizes = state, sizes
        self.pinned = state.device.type == "cuda"
        self.slot = 0
        self.fixed: list[Tensor] = [self._buffer(max(sizes, default=0)) for _ in range(num_slots)]
        self.host: list[Tensor] = [self._buffer(1 << 15) for _ in range(num_slots)]
        self.run = np.arange(1 << 16, dtype=np.int32)

    def _buffer(self, pairs: int) -> Tensor:
        return torch.empty(2 * pairs, dtype=torch.int32, pin_memory=self.pinned)

    def pack(self, pieces: Iterable[Update]) -> Upload | None:
        """The changes; None if there are none."""
        runs = list(pieces)
        total = sum(len(values) for _, values in runs)
        if not total:
            return None
        slot, size = self.slot, next((size for size in self.sizes if total <= size), 0)
        # Values, too, begin at a multiple of 32 numbers.
        apart = size or -(-total // 32) * 32
        self._fit(apart)
        buffer = (self.fixed if size else self.host)[slot]
        host = buffer.numpy()
        end = 0
        for begin, values in runs:
            count = len(values)
            np.add(
                self.run[:count] if isinstance(begin, int) else 0, begin, out=host[end : end + count], dtype=np.int32
            )
            host[apart + end : apart + end + count] = values
            end += count
        if size:
            host[end:size], host[size + end : 2 * size] = host[0], host[size]
        self.slot = (slot + 1) % len(self.host)
        return Upload(buffer[: size or end], buffer[apart : apart + (size or end)], slot, size > 0)

    def nothing(self, count: int) -> list[Update]:
        """So many changes that change nothing while there is no step."""
        return [(np.full(count, self.state.offsets["step.counts"], np.int32), np.zeros(count, np.int32))]

    def _fit(self, pairs: int) -> None:
        if len(self.run) < pairs:
            self.run = np.arange(2 * pairs, dtype=np.int32)
        if len(self.host[self.slot]) < 2 * pairs:
            self.host[self.slot] = self._buffer(2 * pairs)


def step_updates(
    state: DeviceState, rows: RowState, plan: Plan, shape: StepShape | None, spans: int, tokens: int
) -> list[Update]:
    """What a plan, which has been applied to the host's `rows`, changes on the device.

    shape: of its spans, None if they are those of the step before. spans, tokens: to how many of them to pad.
    """
    out: list[Update] = []
    table, width = state.offsets["table"], state.num_table_columns
    new = {one.row for one in plan.new_sequences}
    with_lists = [row for row in new if rows.features.extras[row] is not NO_EXTRAS]
    packed = {row: pack_lists(rows.features.extras[row]) for row in with_lists}
    addresses = state.store_lists({row: words for row, (words, _) in packed.items()})
    for row in new:
        history = rows.tokens[row, : int(rows.num_known[row])]
        _, sizes = packed.get(row, NO_LISTS)
        out.append((state.column_at + np.int32(row), columns(rows, row, addresses.get(row, 0), sizes)))
        out.append((table + row * width, rows.block_table[row]))
        out.append((state.offsets["history"] + row * state.history_width, history))
    for row, blocks in plan.new_blocks:
        if row not in new:
            begin = table + row * width + int(rows.num_blocks[row]) - len(blocks)
            out.append((begin, np.array(blocks, dtype=np.int32)))
    if shape is not None:
        out += layout(state, shape, spans)
    if rows.recurrent:
        out += state_updates(state, rows, shape, tokens)
    return out


def state_updates(state: DeviceState, rows: RowState, shape: StepShape | None, tokens: int) -> list[Update]:
    """Which slots take states after which tokens of a step. shape: None if it is that of the step before."""
    out: list[Update] = []
    if shape is not None:
        target = np.zeros(tokens, dtype=np.int32)
        target[: len(shape.token_span)] = rows.state_targets(shape)
        out.append((state.offsets["state_target"], target))
    snapshots = rows.snapshot_slots(rows.shape)
    changed = dict.fromkeys(state.last_snapshots, 0) | snapshots
    state.last_snapshots = snapshots
    if changed:
        places = np.array(list(changed), dtype=np.int32) + np.int32(state.offsets["state_snapshot"])
        out.append((places, np.array(list(changed.values()), dtype=np.int32)))
    return out


NO_LISTS = pack_lists(NO_EXTRAS)


def columns(rows: RowState, row: int, lists: int, sizes: Sequence[int]) -> Ints32:
    """A row's numbers, in the order of COUNTERS and COLUMNS; float32 as their bits. lists: their address; sizes: of
    their sections."""
    features = rows.features
    out = np.empty(len(COUNTERS) + len(COLUMNS), dtype=np.int32)
    stream = features.stream[row : row + 1].view(np.int32)[0]
    known, computed, prompt = rows.num_known[row], rows.num_computed[row], rows.prompt_length[row]
    own = (known, computed, 0, 0, prompt, computed, stream, rows.rope_shift[row])
    halves = np.array([lists], dtype=np.int64).view(np.int32)
    out[: len(COUNTERS)] = (*own, min(int(features.min_tokens[row]), UNLIMITED), *halves, *sizes)
    floats = out.view(np.float32)
    for at, (name, column) in enumerate(COLUMNS.items(), len(COUNTERS)):
        (out if column.is_integer else floats)[at] = features.columns[name][row]
    return out


def layout(state: DeviceState, shape: StepShape, spans: int) -> list[Update]:
    """A shape's arrays, padded to `spans` with spans of no tokens, and with samples of the first token for no row."""
    tokens, samples = int(shape.query_start[-1]), len(shape.sample_indices)

    def padded(values: npt.NDArray[np.generic], size: int, filler: int) -> Ints32:
        out = np.full(size, filler, dtype=np.int32)
        out[: len(values)] = values
        return out

    heads = padding(samples)
    parts = {
        "step.counts": np.array((tokens, len(shape.spans), samples, len(shape.first_sample)), dtype=np.int32),
        "step.span_row": padded(shape.row, spans, state.num_rows),
        "step.query_start": padded(shape.query_start, spans + 1, tokens),
        "step.token_span": shape.token_span.astype(np.int32),
        "step.sample_indices": padded(shape.sample_indices, heads, 0),
        "step.sample_row": padded(shape.sample_row, heads, state.num_rows),
        "step.sample_offset": padded(shape.sample_offset, heads, 0),
        "chain": np.append(shape.first_sample, samples).astype(np.int32),
    }
    return [(state.offsets[name], values) for name, values in parts.items()]
