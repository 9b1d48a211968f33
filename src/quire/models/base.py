"""What every architecture is to the rest of the house."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.models.spec import ModelSpec
from quire.ops.ragged import LayerKV, RaggedBatch


class Model(Protocol):
    """A decoder. Knows shapes and layers; pages, rows and sampling belong to others."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, and of K/V unless told otherwise."""

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Feed the batch -> hidden states [T, hidden], final norm on; where it says so only those `wanted`.

        Writes K/V into its slots, a LayerKV a layer.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Chosen hidden states [R, hidden] -> [R, V], in the model's numbers or float32."""
