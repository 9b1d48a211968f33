"""A layer of Mamba 2 (Dao and Gu 2024), which keeps a state of fixed size in place of keys and values.

Letters as in `ops/recurrent.py`: H heads of V values, G groups of heads that share K keys and queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.basic import NormReader
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.ops.base import Ops
from quire.ops.operands import Angles, NormedRows, ScanInputs, ScanWeights
from quire.ops.ragged import LayerKV, RaggedBatch, StateShape, select_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """Sizes: `heads` of `value` numbers, `groups` of heads that share keys of `key` numbers, `width` inputs of the
    convolution. conv_bias, bias: of the convolution and of the projections. step_limit: least and largest step."""

    heads: int
    value: int
    groups: int
    key: int
    width: int
    conv_bias: bool = True
    bias: bool = False
    step_limit: tuple[float, float] = (0.0, float("inf"))

    def checked(self) -> MambaConfig:
        """Itself. Raises InvalidModel for sizes that are impossible."""
        if min(self.heads, self.value, self.groups, self.key) < 1 or self.width < 2:
            raise InvalidModel(
                "config.json: heads, groups, head size and state size of Mamba layers must be above 0, and their "
                "convolution wider than 1"
            )
        if self.heads % self.groups:
            raise InvalidModel(f"config.json: {self.groups} groups cannot share {self.heads} Mamba heads evenly")
        return self

    @property
    def inner(self) -> int:
        """H V."""
        return self.heads * self.value

    @property
    def channels(self) -> int:
        """C, of the convolution."""
        return self.inner + 2 * self.groups * self.key

    @property
    def state(self) -> StateShape:
        """What is kept of a sequence."""
        return StateShape(self.channels, self.width - 1, self.heads, self.key, self.value)


class Mamba2:
    """Project, then `Ops.selective_scan`, project back."""

    def __init__(
        self,
        project: ColumnParallelLinear,
        weights: ScanWeights,
        out: RowParallelLinear,
        config: MambaConfig,
        ops: Ops,
    ) -> None:
        self.project, self.weights, self.out, self.config, self.ops = project, weights, out, config, ops

    @property
    def reader(self) -> NormReader | None:
        """See `NormLayer.add_for`."""
        return self.project.reader

    def __call__(
        self, x: Tensor | NormedRows, angles: Angles, batch: RaggedBatch, kv: LayerKV, outputs: Tensor | None = None
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden], or the rows `outputs` of it. angles: not used."""
        assert kv.state is not None
        config = self.config
        inputs = ScanInputs(*torch.split(self.project(x), [config.inner, config.channels, config.heads], -1))
        return self.out(select_rows(self.ops.selective_scan(inputs, self.weights, kv.state, batch), outputs))
