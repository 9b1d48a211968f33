"""A layer of the gated delta rule (Yang et al. 2025), which keeps a state of fixed size in place of keys and values.

Letters as in `ops/recurrent.py`: H heads of values, G of keys, K and V numbers of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.basic import NormReader
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.ops.base import Ops
from quire.ops.operands import Angles, DeltaInputs, DeltaWeights, NormedRows
from quire.ops.ragged import LayerKV, RaggedBatch, StateShape, select_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """Sizes: G key_heads of K key numbers, H value_heads of V value numbers, inputs of the convolution."""

    key_heads: int
    value_heads: int
    key: int
    value: int
    width: int

    def checked(self) -> DeltaConfig:
        """Itself. Raises InvalidModel for sizes that are impossible."""
        if min(self.key_heads, self.value_heads, self.key, self.value) < 1 or self.width < 2:
            raise InvalidModel(
                "config.json: linear_num_key_heads, linear_num_value_heads, linear_key_head_dim and "
                "linear_value_head_dim must be above 0 and linear_conv_kernel_dim above 1"
            )
        if self.value_heads % self.key_heads:
            raise InvalidModel(
                f"config.json: linear_num_value_heads {self.value_heads} must be a multiple of linear_num_key_heads "
                f"{self.key_heads}"
            )
        return self

    @property
    def channels(self) -> int:
        """C, of the convolution."""
        return 2 * self.key_heads * self.key + self.value_heads * self.value

    @property
    def state(self) -> StateShape:
        """What is kept of a sequence."""
        return StateShape(self.channels, self.width - 1, self.value_heads, self.key, self.value)


def split_by_head(config: DeltaConfig, made: Sequence[Tensor]) -> DeltaInputs:
    """Two products, in which q, k, v and gate, and beta and rise, of a head of keys follow each other (Qwen3-Next)."""
    share = config.value_heads // config.key_heads
    wide, small = (torch.unflatten(each, -1, (config.key_heads, -1)) for each in made)
    sizes = [config.key, config.key, share * config.value, share * config.value]
    return DeltaInputs(*torch.split(wide, sizes, -1), *small.chunk(2, -1))


def split_by_kind(config: DeltaConfig, made: Sequence[Tensor]) -> DeltaInputs:
    """A product each: q, k and v one after the other; gate; beta; rise (Qwen3.5)."""
    mixed, *others = made
    wide = config.key_heads * config.key
    parts = (*torch.split(mixed, [wide, wide, mixed.shape[1] - 2 * wide], -1), *others)
    return DeltaInputs(*(torch.unflatten(each, -1, (config.key_heads, -1)) for each in parts))


class GatedDelta:
    """Project, then `Ops.gated_delta`, project back. project: one matrix, or several that are stored in different ways;
    sizes: of the parts of what they make; split: what those are."""

    def __init__(
        self,
        project: Sequence[ColumnParallelLinear],
        sizes: Sequence[int],
        split: Callable[[DeltaConfig, Sequence[Tensor]], DeltaInputs],
        weights: DeltaWeights,
        out: RowParallelLinear,
        config: DeltaConfig,
        ops: Ops,
    ) -> None:
        self.project, self.sizes, self.split, self.weights, self.out = project, sizes, split, weights, out
        self.config, self.ops = config, ops

    @property
    def reader(self) -> NormReader | None:
        """See `NormLayer.add_for`."""
        return self.project[0].reader if len(self.project) == 1 else None

    def __call__(
        self, x: Tensor | NormedRows, angles: Angles, batch: RaggedBatch, kv: LayerKV, outputs: Tensor | None = None
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden], or the rows `outputs` of it. angles: not used."""
        assert kv.state is not None
        made = [each(x) for each in self.project]
        inputs = self.split(self.config, made if len(made) > 1 else torch.split(made[0], list(self.sizes), -1))
        return self.out(select_rows(self.ops.gated_delta(inputs, self.weights, kv.state, batch), outputs))
