"""The size of the KV pool: computed from shapes, not found by trial, and never more than the limits can use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire.errors import InvalidConfig
from quire.ops.huge_pages import huge_zeros
from quire.ops.ragged import KVShape, LayerKV, LayerState, StateShape
from quire.types import UNLIMITED

GIB = 1 << 30


class LayerShape(NamedTuple):
    """K/V of one layer per token, as `KVShape`, in `dtype`, in units of their scales.

    device: where the layer is, if a model is on several; empty: where the pool is. state: of a recurrent layer.
    index_dim: of the indexer's keys, which have no scale.
    """

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    k_scale: float = 1.0
    v_scale: float = 1.0
    device: str = ""
    state: StateShape | None = None
    index_dim: int = 0


def layer_shapes(
    shapes: Sequence[KVShape], dtype: torch.dtype, states: Sequence[StateShape | None] = ()
) -> tuple[LayerShape, ...]:
    """The same dtype for all layers. shapes, states: as `ModelSpec.kv_shapes` and `state_shapes`; no states: none."""
    each = states or (None,) * len(shapes)
    return tuple(
        LayerShape(shape.heads, shape.key_dim, shape.value_dim, dtype, state=state, index_dim=shape.index_dim)
        for shape, state in zip(shapes, each, strict=True)
    )


def state_bytes(layers: Sequence[LayerShape]) -> int:
    """Bytes of one slot: the states of one sequence in every recurrent layer; 0 without any."""
    return sum(each.state.nbytes(each.dtype.itemsize) for each in layers if each.state)


def plan_snapshots(
    layers: Sequence[LayerShape], wanted: int | None, *, sequences: int, states: int, budget: int
) -> int:
    """Slots for snapshots beside the `states` of rows. wanted: None for two a sequence, in at most half of what the
    rows' states leave of `budget` bytes; 0 without recurrent layers."""
    each = state_bytes(layers)
    if not each or wanted is not None:
        return wanted or 0 if each else 0
    return max(0, min(2 * sequences, (budget - (states + 1) * each) // (2 * each)))


def block_bytes(layers: Sequence[LayerShape], block_size: int) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in every layer."""
    shapes = ((KVShape(each.heads, each.key_dim, each.value_dim, each.index_dim), each.dtype) for each in layers)
    return sum(block_size * shape.numbers * dtype.itemsize for shape, dtype in shapes)


def usable_blocks(rows: int, max_model_len: int, page_size: int) -> int:
    """The most blocks that `rows` sequences of `max_model_len` tokens can hold. A sequence's last token is never
    fed."""
    return rows * -(-(max_model_len - 1) // page_size)


def plan_blocks(
    layers: Sequence[LayerShape], *, page_size: int, rows: int, max_model_len: int, budget: int, states: int = 0
) -> int:
    """Blocks for `budget` bytes, at most what the limits can use; the null block is paid from the budget too, and
    first of all `states` slots of recurrent layers and slot 0.

    Raises InvalidConfig if not even one sequence of `max_model_len` fits, and names a length that does.
    """
    each, held = block_bytes(layers, page_size), (states + 1) * state_bytes(layers)
    if held and held > budget:
        raise InvalidConfig(
            f"{_gib(budget)} of KV memory does not hold the {_gib(held)} of {states} states of recurrent layers: lower "
            "max_num_seqs or state_snapshots, or give more memory"
        )
    budget -= held
    # A stage of a pipeline may have recurrent layers alone.
    pages = min(budget // each - 1 if each else UNLIMITED, usable_blocks(rows, max_model_len, page_size))
    need = usable_blocks(1, max_model_len, page_size)
    if pages < need:
        fits, less = "no", "give"
        if pages > 0:
            fits = str(pages * page_size + 1)
            less = f"lower max_model_len to {fits} or give"
        raise InvalidConfig(
            f"{_gib(budget)} of KV memory holds {fits} tokens, and max_model_len {max_model_len} "
            f"needs {_gib((need + 1) * each)}: {less} more memory"
        )
    return pages


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / (1 << 20):.2f} MiB"


def activation_bytes(*, tokens: int, logits: int, hidden: int, widest: int, vocab_size: int, dtype: torch.dtype) -> int:
    """An upper estimate of the bytes that a step of `tokens` needs beside weights and K/V.

    At once there are the residual, its normed copy and an output [tokens, hidden] each, the widest projection's result
    [tokens, widest] twice (before and after its activation), then float32 logits [logits, vocab_size] with one copy for
    sampling.
    """
    body = tokens * (3 * hidden + 2 * widest) * dtype.itemsize
    head = logits * (hidden * dtype.itemsize + 2 * 4 * vocab_size)
    return max(body, tokens * hidden * dtype.itemsize + head)


def cpu_budget(available: int) -> int:
    """Default bytes of K/V on a CPU with `available` bytes of free memory: a quarter, at most 4 GiB."""
    return min(4 * GIB, available // 4)


def allocate(
    layers: Sequence[LayerShape], *, pages: int, page_size: int, device: torch.device | str = "cpu", states: int = 0
) -> list[LayerKV]:
    """The pool: `pages` blocks and the null block, zeros; of recurrent layers `states` slots and slot 0. On a CPU large
    tensors take memory only as blocks are written.

    Raises MemoryError if there is not that much.
    """

    def zeros(each: LayerShape, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        try:
            if torch.device(each.device or device).type == "cpu":
                return huge_zeros(*shape, dtype=dtype or each.dtype)
            return torch.zeros(shape, dtype=dtype or each.dtype, device=each.device or device)
        except RuntimeError as error:
            # On a CPU torch has no exception class of its own for it.
            size = (pages + 1) * block_bytes(layers, page_size) + (states + 1) * state_bytes(layers)
            held = f" and {states:,} states" if state_bytes(layers) else ""
            raise MemoryError(f"{pages:,} KV blocks of {page_size} tokens{held} take {_gib(size)}") from error

    def state(each: LayerShape) -> LayerState | None:
        if each.state is None:
            return None
        channels, width, heads, keys, values = each.state
        memory = zeros(each, states + 1, heads, keys, values, dtype=torch.float32)
        return LayerState(zeros(each, states + 1, width, channels), memory)

    def layer(each: LayerShape) -> LayerKV:
        shape = pages + 1, each.heads, page_size
        k, v = zeros(each, *shape, each.key_dim), zeros(each, *shape, each.value_dim)
        index = zeros(each, *shape, each.index_dim) if each.index_dim else None
        return LayerKV(k, v, k_scale=each.k_scale, v_scale=each.v_scale, state=state(each), index=index)

    return [layer(each) for each in layers]
