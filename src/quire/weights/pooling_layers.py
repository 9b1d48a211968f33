"""Layers after pooling, from sentence-transformers' folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.errors import InvalidModel
from quire.ops.batch_invariant import BatchInvariantOps
from quire.weights.files import Checkpoint
from quire.weights.pooling import DenseLayer

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"Identity": lambda x: x, "Tanh": torch.tanh, "ReLU": F.relu, "GELU": F.gelu, "Sigmoid": torch.sigmoid}
)


class Dense:
    """act(x W^T + b), in the model's dtype. A row has the same bits in any batch."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Callable[[Tensor], Tensor]) -> None:
        self.weight, self.bias, self.activation, self.ops = weight, bias, activation, BatchInvariantOps()

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]."""
        return self.activation(self.ops.linear(x.to(self.weight.dtype), self.weight, self.bias))


def read_dense_layers(
    layers: Sequence[DenseLayer], dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """The layers one after the other, float32 [N, in] -> [N, out]. Raises InvalidModel for tensors that do not fit."""
    made = [read_dense_layer(each, dtype, device) for each in layers]

    def through(x: Tensor) -> Tensor:
        for layer in made:
            x = layer(x)
        return x

    return through


def read_dense_layer(layer: DenseLayer, dtype: torch.dtype, device: torch.device) -> Dense:
    """One layer."""
    entries = Checkpoint(layer.folder).entries
    shapes = {"linear.weight": (layer.outputs, layer.inputs)} | (
        {"linear.bias": (layer.outputs,)} if layer.bias else {}
    )
    tensors = {}
    for name, shape in shapes.items():
        if name not in entries or entries[name].shape != shape:
            raise InvalidModel(f"{layer.folder.name} has no tensor {name} of shape {list(shape)}")
        tensors[name] = entries[name].read(()).to(device, dtype)
    return Dense(tensors["linear.weight"], tensors.get("linear.bias"), ACTIVATIONS[layer.activation])
