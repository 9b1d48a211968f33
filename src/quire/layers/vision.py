"""Encoders of images: what their layers have in common, and the interface by which a runner uses them.

Shape letters: P patches of an image, n tokens that it becomes, each of merge * merge patches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.basic import MLP, GatedMLP
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.ops.base import Ops
from quire.ops.operands import Angles, Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The shape of an encoder of images.

    hidden, layers, heads, mlp: of its layers. patch: pixels along a side of a patch. merge: patches along a side of
    what becomes a token. frames: how many times an image's patches are repeated in time. out: width of the text model.
    image_token: the id that holds the place of each of an image's tokens. positions: trained positions. window: pixels
    along a side of the windows of layers that are not in `full_layers`; 0: all are full. feature_layers: layers after
    which features for the text model's first layers are made. pooled: tokens along a side of every image; 0: as many
    as its size makes. whole_images: an image's tokens attend to each other in both directions. theta: base of the
    rotary embedding. multi_axis: the text model rotates by positions in time, height and width. pad_token: the id whose
    inputs of layers an image's tokens have (Gemma 4). clipped: matrices clip inputs and outputs. standardized: pooled
    patches are shifted and scaled.
    """

    hidden: int
    layers: int
    heads: int
    mlp: int
    patch: int
    out: int
    image_token: int
    merge: int = 1
    frames: int = 1
    activation: str = "gelu_pytorch_tanh"
    eps: float = 1e-6
    positions: int = 0
    window: int = 0
    full_layers: frozenset[int] = frozenset()
    feature_layers: tuple[int, ...] = ()
    pooled: int = 0
    whole_images: bool = False
    theta: float = 10_000.0
    multi_axis: bool = False
    pad_token: int = 0
    clipped: bool = False
    standardized: bool = False

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.hidden // self.heads

    def checked(self) -> VisionConfig:
        """Itself. Raises InvalidModel for sizes that are impossible."""
        sizes = (self.hidden, self.layers, self.heads, self.mlp, self.patch, self.merge, self.frames, self.out)
        if min(sizes) < 1 or max(sizes) > 1 << 24 or self.hidden % self.heads:
            raise InvalidModel("config.json: vision_config: impossible sizes, or heads that do not divide hidden_size")
        return self

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens of an image of so many pixels."""
        if self.pooled:
            return self.pooled, self.pooled
        return height // (self.patch * self.merge), width // (self.patch * self.merge)

    def num_tokens(self, height: int, width: int) -> int:
        """How many tokens an image of so many pixels becomes."""
        rows, columns = self.grid(height, width)
        return rows * columns


@dataclass(slots=True)
class ImageState:
    """An image between two layers: x [P, hidden], what its attention needs, and the features [n, out] made so far.

    lengths: of the runs of patches that attend to each other, in full layers and in others. order: of tokens in x.
    """

    x: Tensor
    angles: Angles | None
    full: Sequence[int]
    windows: Sequence[int]
    order: Tensor | None = None
    features: list[Tensor] = field(default_factory=list)


class VisionTower(Protocol):
    """An encoder, run layer by layer so that a step may do a part of an image."""

    @property
    def config(self) -> VisionConfig:
        """Its shape."""

    def begin(self, pixels: Tensor) -> ImageState:
        """pixels [3, H, W] float32, normalized -> the state before the first layer."""

    def run(self, state: ImageState, first: int, last: int) -> None:
        """Layers first to last - 1."""

    def finish(self, state: ImageState) -> Sequence[Tensor]:
        """After all layers: embeddings [n, out], and features [n, out] for the text model's first layers."""


class VisionBlock:
    """One layer: attention among runs of patches, and an MLP, each behind a norm."""

    def __init__(
        self,
        norms: tuple[Norm, Norm],
        qkv: ColumnParallelLinear,
        out: RowParallelLinear,
        mlp: MLP | GatedMLP,
        heads: int,
        ops: Ops,
    ) -> None:
        self.norms, self.qkv, self.out, self.mlp, self.heads, self.ops = norms, qkv, out, mlp, heads, ops

    def __call__(self, x: Tensor, angles: Angles | None, lengths: Sequence[int]) -> Tensor:
        """x [P, hidden] -> the same shape."""
        first, second = self.norms
        x = x + self.out(self.ops.segment_attention(self.qkv(self.ops.norm(x, first)), self.heads, lengths, angles))
        return x + self.mlp(self.ops.norm(x, second))


class Patches:
    """Cuts an image into patches and embeds each. weight [hidden, 3 * frames * patch * patch], with channels first or
    last among the inputs."""

    def __init__(
        self, config: VisionConfig, weight: Tensor, bias: Tensor | None, ops: Ops, *, channels_last: bool = False
    ) -> None:
        self.config, self.weight, self.bias, self.ops = config, weight, bias, ops
        self.order = (1, 4, 2, 5, 3, 6, 0) if channels_last else (1, 4, 2, 5, 0, 3, 6)

    def __call__(self, pixels: Tensor) -> Tensor:
        """pixels [3, H, W] -> [P, hidden], those that become one token next to each other."""
        merge, patch, frames = self.config.merge, self.config.patch, self.config.frames
        channels, height, width = pixels.shape
        rows, columns = height // (patch * merge), width // (patch * merge)
        cut = pixels.view(channels, rows, merge, patch, columns, merge, patch).permute(self.order)
        flat = cut[..., None, :, :].expand(-1, -1, -1, -1, -1, frames, -1, -1).reshape(-1, self.weight.shape[1])
        return self.ops.linear(flat.to(self.weight.dtype), self.weight, self.bias)


def patch_positions(rows: int, columns: int, merge: int) -> Tensor:
    """[2, P] int64: row and column of each patch of rows * columns tokens, in the order of `Patches`."""
    row, column = torch.meshgrid(torch.arange(rows * merge), torch.arange(columns * merge), indexing="ij")
    both = torch.stack((row, column)).view(2, rows, merge, columns, merge)
    return both.transpose(2, 3).reshape(2, -1)


def axial_angles(positions: Tensor, config: VisionConfig, ops: Ops) -> Angles:
    """positions [2, P] -> angles by which heads are rotated: half of the pairs by the row, half by the column."""
    steps = torch.arange(0, config.head_dim // 2, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / config.theta ** (steps / (config.head_dim // 2))
    by_axis = [ops.angles(each, frequencies) for each in positions]
    cos, sin = (torch.cat(parts, -1) for parts in zip(*by_axis, strict=True))
    return Angles(cos, sin)


def window_order(rows: int, columns: int, side: int) -> tuple[Tensor, list[int]]:
    """(Tokens of a grid in the order of its windows of side * side tokens, tokens of each window)."""
    index = torch.arange(rows * columns).view(rows, columns)
    windows = [
        index[top : top + side, left : left + side].flatten()
        for top in range(0, rows, side)
        for left in range(0, columns, side)
    ]
    return torch.cat(windows), [len(each) for each in windows]


def interpolate_positions(table: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Bilinear sampling of a square grid of trained positions at rows * columns points, corners on corners: (indices
    [4, rows * columns] into the table [N, hidden], weights of the same shape)."""
    side = int(len(table) ** 0.5)
    row, column = (torch.arange(count).float() * (side - 1) / max(1, count - 1) for count in (rows, columns))
    low = [each.long() for each in (row, column)]
    high = [(each + 1).clamp(max=side - 1) for each in low]
    part = [each - each.floor() for each in (row, column)]
    indices, weights = list[Tensor](), list[Tensor]()
    for vertical in (0, 1):
        for horizontal in (0, 1):
            r, c = (high if vertical else low)[0], (high if horizontal else low)[1]
            indices.append((r[:, None] * side + c).flatten())
            weights.append(
                ((part[0] if vertical else 1 - part[0])[:, None] * (part[1] if horizontal else 1 - part[1])).flatten()
            )
    return torch.stack(indices), torch.stack(weights)


Merger = Callable[[Tensor], Tensor]
"""[P, hidden] -> [n, out]."""
