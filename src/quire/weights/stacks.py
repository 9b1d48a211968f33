"""Tensors that hold a matrix of every expert, as one tensor for each expert."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from quire.layers.builder import ExpertStack
from quire.weights.entries import TensorEntry

SUFFIXES = MappingProxyType(
    {
        "": ".weight",
        ".weight": ".weight",
        "_bias": ".bias",
        "_blocks": ".weight_packed",
        "_scales": ".weight_scale",
        "_scale": ".weight_scale",
    }
)
"""What follows a stack's name in a checkpoint, and what follows it and an expert's number in the model."""


def unstack(
    entries: Mapping[str, TensorEntry], stack: ExpertStack, shape: tuple[int, ...] = ()
) -> dict[str, TensorEntry]:
    """The entries with those of a stack divided among experts. shape: of an expert's matrix as the model expects it;
    one that is stored the other way round is transposed (transformers writes both, Qwen3-VL)."""
    found = {name: entries[name] for suffix in SUFFIXES if (name := stack.name + suffix) in entries}
    divided = {name: entry for name, entry in entries.items() if name not in found}
    for name, entry in found.items():
        suffix = SUFFIXES[name.removeprefix(stack.name)]
        divided |= {
            f"{stack.name}.{e}{suffix}": of_expert(entry, e, stack, suffix, shape) for e in range(entry.shape[0])
        }
    return divided


def of_expert(
    entry: TensorEntry, number: int, stack: ExpertStack, suffix: str, shape: tuple[int, ...] = ()
) -> TensorEntry:
    """The part of expert `number`, with two dimensions at most, and rows of gate before those of up."""
    own = entry.part(number)
    if suffix == ".weight" and stack.transposed and own.shape != shape == own.shape[::-1]:
        own = own.transformed(shape, torch.t)
    if len(own.shape) > 2:
        own = own.transformed((own.shape[0], own.shape[1] * own.shape[2]), partial(torch.flatten, start_dim=1))
    if stack.interleaved:
        dim = 1 if stack.transposed and suffix == ".weight" else 0
        own = own.transformed(own.shape, partial(separated, dim=dim))
    return own


def separated(tensor: Tensor, dim: int) -> Tensor:
    """Even indices of a dimension before odd ones."""
    count = tensor.shape[dim]
    return tensor.index_select(dim, torch.cat((torch.arange(0, count, 2), torch.arange(1, count, 2))))
