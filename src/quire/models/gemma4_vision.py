"""Gemma 4's encoder of images (Gemma Team 2026): images keep their proportions, and each token is a square of patches.

As in the text model, norms stand before and after attention and MLP, and queries, keys and values are normed. Half of
a head is rotated by a patch's column and half by its row, which have trained positions, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.builder import GELUS, ModelBuilder, activation_of
from quire.layers.vision import ImageState, Patches, VisionConfig, axial_angles, patch_positions
from quire.models.spec import Config, ModelSpec, check_layers
from quire.ops.operands import Angles, Norm


class ClippedLinear:
    """A matrix whose inputs and outputs are clipped to ranges that the checkpoint holds, if it does."""

    def __init__(self, build: ModelBuilder, inputs: int, outputs: int, *, clipped: bool) -> None:
        self.linear = build.replicated().column_parallel(("linear",), inputs, ((outputs, 1),))
        ends = (("input_min", -inf), ("input_max", inf), ("output_min", -inf), ("output_max", inf))
        # Without a dimension, so that a bound does not change the dtype of what it is compared with.
        self.bounds = [build.vector(name, 1, mean=end, std=0.0, exact=True)[0] for name, end in ends if clipped]

    def __call__(self, x: Tensor) -> Tensor:
        """x [P, in] -> [P, out]."""
        if not self.bounds:
            return self.linear(x)
        low, high, least, most = self.bounds
        return self.linear(x.clamp(low, high)).clamp(least, most)


class Gemma4VisionBlock:
    """One layer."""

    def __init__(self, config: VisionConfig, build: ModelBuilder) -> None:
        def linear(name: str, inputs: int, outputs: int) -> ClippedLinear:
            return ClippedLinear(build.scope(name), inputs, outputs, clipped=config.clipped)

        def norm(name: str, size: int = config.hidden) -> Norm:
            return build.rms_norm(name, size, config.eps)

        self.config, self.ops, hidden = config, build.ops, config.hidden
        self.before_attention, self.after_attention = norm("input_layernorm"), norm("post_attention_layernorm")
        self.before_mlp, self.after_mlp = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
        self.q, self.k, self.v, self.out = (linear(f"self_attn.{name}_proj", hidden, hidden) for name in "qkvo")
        self.q_norm, self.k_norm = (norm(f"self_attn.{name}_norm", config.head_dim) for name in "qk")
        self.v_norm = unweighted(config.head_dim, config.eps, build)
        self.gate, self.up = (linear(f"mlp.{name}_proj", hidden, config.mlp) for name in ("gate", "up"))
        self.down = linear("mlp.down_proj", config.mlp, hidden)

    def __call__(self, x: Tensor, angles: Angles | None, lengths: Sequence[int]) -> Tensor:
        """x [P, hidden] -> the same shape."""
        x = x + self.ops.norm(
            self.attend(self.ops.norm(x, self.before_attention), angles, lengths), self.after_attention
        )
        normed = self.ops.norm(x, self.before_mlp)
        made = self.down(self.ops.gelu(self.gate(normed)) * self.up(normed))
        return x + self.ops.norm(made, self.after_mlp)

    def attend(self, x: Tensor, angles: Angles | None, lengths: Sequence[int]) -> Tensor:
        """x [P, hidden], normed -> the same shape."""
        heads, dim = self.config.heads, self.config.head_dim
        q, k, v = (
            self.ops.norm(made(x).view(-1, heads, dim), norm)
            for made, norm in ((self.q, self.q_norm), (self.k, self.k_norm), (self.v, self.v_norm))
        )
        # Both halves of what the column turns, then of what the row does, become first halves, then second ones.
        q, k = (each.view(-1, heads, 2, 2, dim // 4).transpose(2, 3).reshape(-1, heads, dim) for each in (q, k))
        qkv = torch.cat((q, k, v), 1).flatten(1)
        return self.out(self.ops.segment_attention(qkv, heads, lengths, angles, scale=1.0))


class Gemma4Vision:
    """The encoder, and the projection to the text model's width."""

    def __init__(self, config: VisionConfig, build: ModelBuilder) -> None:
        self.config, self.ops, self.device = config, build.ops, build.device
        tower, hidden, size = build.scope("vision_tower"), config.hidden, 3 * config.patch**2
        weight = tower.tensor("patch_embedder.input_proj.weight", (hidden, size), std=size**-0.5)
        self.patches = Patches(config, weight, None, build.ops, channels_last=True)
        self.positions = tower.tensor("patch_embedder.position_embedding_table", (2, config.positions, hidden))
        scopes = (tower.scope(f"encoder.layers.{i}") for i in range(config.layers))
        self.blocks = [Gemma4VisionBlock(config, scope) for scope in scopes]
        self.standard = [tower.vector(name, hidden) for name in ("std_bias", "std_scale") if config.standardized]
        self.norm = unweighted(hidden, config.eps, build)
        shape = (config.out, hidden)
        self.projection = build.tensor("embed_vision.embedding_projection.weight", shape, std=hidden**-0.5)

    def begin(self, pixels: Tensor) -> ImageState:
        """See `VisionTower`."""
        rows, columns = self.config.grid(*pixels.shape[1:])
        row, column = patch_positions(rows, columns, self.config.merge).to(self.device)
        x = self.patches(pixels) + (self.positions[0, column] + self.positions[1, row])
        return ImageState(x, axial_angles(torch.stack((column, row)), self.config, self.ops), (len(x),), (len(x),))

    def run(self, state: ImageState, first: int, last: int) -> None:
        """See `VisionTower`."""
        for block in self.blocks[first:last]:
            state.x = block(state.x, state.angles, state.full)

    def finish(self, state: ImageState) -> Sequence[Tensor]:
        """See `VisionTower`. In float32 as far as a float16 could overflow."""
        hidden, dtype = self.config.hidden, state.x.dtype
        x = state.x.float().view(-1, self.config.merge**2, hidden).mean(1).to(dtype).float() * hidden**0.5
        if self.standard:
            shift, scale = (each.float() for each in self.standard)
            x = (x - shift) * scale
        return (self.ops.linear(self.ops.norm(x.to(dtype), self.norm), self.projection),)


def unweighted(size: int, eps: float, build: ModelBuilder) -> Norm:
    """An RMS norm without a weight of its own."""
    return Norm(torch.ones(size, dtype=build.dtype, device=build.device), eps)


def read_gemma4_vision(config: Config, text: Config, spec: ModelSpec) -> VisionConfig | None:
    """The encoder of a multimodal config.json, whose section of the text model is `text`; None of another. Raises
    InvalidModel."""
    own = config.section("vision_config")
    if not own.fields:
        return None
    layers = own.get(int, "num_hidden_layers", default=16)
    check_layers(layers, "vision_config: num_hidden_layers")
    made = VisionConfig(
        hidden=own.get(int, "hidden_size", default=768),
        layers=layers,
        heads=own.get(int, "num_attention_heads", default=12),
        mlp=own.get(int, "intermediate_size", default=3072),
        patch=own.get(int, "patch_size", default=16),
        merge=own.get(int, "pooling_kernel_size", default=3),
        out=spec.hidden,
        image_token=config.get(int, "image_token_id", default=258_880),
        pad_token=text.get(int, "pad_token_id", default=0),
        activation=own.get(str, "hidden_activation", default="gelu_pytorch_tanh"),
        eps=own.get(float, "rms_norm_eps", default=1e-6),
        positions=own.get(int, "position_embedding_size", default=10_240),
        theta=own.section("rope_parameters").get(float, "rope_theta", default=100.0),
        whole_images=text.get(str, "use_bidirectional_attention", default="") == "vision",
        clipped=own.get(bool, "use_clipped_linears", default=False),
        standardized=own.get(bool, "standardize", default=False),
    ).checked()
    activation_of(made.activation, dict.fromkeys(GELUS, True))
    given = own.get(int, "num_key_value_heads", default=made.heads), own.get(int, "head_dim", default=made.head_dim)
    if given != (made.heads, made.head_dim) or made.head_dim % 4 or not made.positions:
        raise InvalidModel(
            "config.json: vision_config: num_key_value_heads must be num_attention_heads, and head_dim hidden_size / "
            "num_attention_heads and a multiple of 4"
        )
    return made
