"""Qwen2.5-VL and Qwen3-VL (Qwen Team 2025): Qwen 2.5 and 3 that read images. Qwen3.5's encoder is Qwen3-VL's.

Text tokens have one position and image tokens three, in time, height and width. Qwen2.5-VL's encoder attends within
windows in most layers; that of Qwen3-VL adds trained positions, and features of some layers go to the text model's
first layers (Meng et al. 2024, DeepStack).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.basic import MLP
from quire.layers.builder import ExpertNames, ModelBuilder
from quire.layers.vision import (
    ImageState,
    Merger,
    VisionBlock,
    VisionConfig,
    VisionTower,
    axial_angles,
    interpolate_positions,
    patch_positions,
    window_order,
)
from quire.models.multimodal import nested
from quire.models.qwen import Qwen2, Qwen3, Qwen3Moe
from quire.models.spec import Config, ModelSpec, check_layers

RENAMED = MappingProxyType({"model.language_model.": "model.", "model.visual.": "visual."})
"""Names of tensors, whichever release of transformers wrote them."""


class Qwen25Vision:
    """Qwen2.5-VL's encoder."""

    patch_bias = False

    def __init__(self, config: VisionConfig, build: ModelBuilder) -> None:
        self.config, self.ops, self.device = config, build.ops, build.device
        self.patches = build.patches("patch_embed.proj", config, bias=self.patch_bias)
        self.blocks = [self.make_block(build.scope(f"blocks.{i}")) for i in range(config.layers)]
        self.merge = self.make_merger(build.scope("merger"))

    def make_block(self, build: ModelBuilder) -> VisionBlock:
        """A layer."""
        config = self.config
        norms = [build.rms_norm(name, config.hidden, config.eps) for name in ("norm1", "norm2")]
        qkv, out = build.vision_attention(config, ("attn.qkv",), "attn.proj")
        mlp = build.scope("mlp").gated_mlp(config.hidden, config.mlp, config.activation, bias=True)
        return VisionBlock((norms[0], norms[1]), qkv, out, mlp, config.heads, self.ops)

    def make_merger(self, build: ModelBuilder) -> Merger:
        """What makes tokens of patches."""
        norm = build.rms_norm("ln_q", self.config.hidden, self.config.eps)
        project = self.make_projection(build, "mlp.0", "mlp.2")
        return lambda x: project(self.ops.norm(x, norm).view(-1, self.config.hidden * self.config.merge**2))

    def make_projection(self, build: ModelBuilder, up: str, down: str) -> MLP:
        """Two matrices, from the patches of a token to the text model's width."""
        wide = self.config.hidden * self.config.merge**2
        rise = build.column_parallel((up,), wide, ((wide, 1),), bias=True)
        return MLP(rise, build.row_parallel(down, (wide, 1), self.config.out, bias=True), self.ops.gelu_erf)

    def begin(self, pixels: Tensor) -> ImageState:
        """See `VisionTower`."""
        config, unit = self.config, self.config.merge**2
        rows, columns = config.grid(*pixels.shape[1:])
        order, counts = window_order(rows, columns, config.window // config.merge // config.patch)
        by_token = torch.arange(rows * columns * unit).view(-1, unit)[order].flatten()
        x = self.patches(pixels)[by_token.to(self.device)]
        positions = patch_positions(rows, columns, config.merge)[:, by_token].to(self.device)
        angles = axial_angles(positions, config, self.ops)
        return ImageState(x, angles, (len(x),), [count * unit for count in counts], order.to(self.device))

    def run(self, state: ImageState, first: int, last: int) -> None:
        """See `VisionTower`."""
        for i in range(first, last):
            lengths = state.full if i in self.config.full_layers else state.windows
            state.x = self.blocks[i](state.x, state.angles, lengths)

    def finish(self, state: ImageState) -> Sequence[Tensor]:
        """See `VisionTower`."""
        assert state.order is not None
        merged = self.merge(state.x)
        return (torch.empty_like(merged).index_copy_(0, state.order, merged),)


class Qwen3Vision(Qwen25Vision):
    """Qwen3-VL's encoder."""

    patch_bias = True

    def __init__(self, config: VisionConfig, build: ModelBuilder) -> None:
        super().__init__(config, build)
        self.positions = build.tensor("pos_embed.weight", (config.positions, config.hidden))
        scopes = (build.scope(f"deepstack_merger_list.{i}") for i in range(len(config.feature_layers)))
        self.features = [self.make_feature(scope) for scope in scopes]

    def make_block(self, build: ModelBuilder) -> VisionBlock:
        """A layer."""
        config = self.config
        norms = [build.layer_norm(name, config.hidden, config.eps) for name in ("norm1", "norm2")]
        qkv, out = build.vision_attention(config, ("attn.qkv",), "attn.proj")
        mlp = build.scope("mlp").mlp("linear_fc1", "linear_fc2", config.hidden, config.mlp, config.activation)
        return VisionBlock((norms[0], norms[1]), qkv, out, mlp, config.heads, self.ops)

    def make_merger(self, build: ModelBuilder) -> Merger:
        """What makes tokens of patches."""
        norm = build.layer_norm("norm", self.config.hidden, self.config.eps)
        project = self.make_projection(build, "linear_fc1", "linear_fc2")
        return lambda x: project(self.ops.norm(x, norm).view(-1, self.config.hidden * self.config.merge**2))

    def make_feature(self, build: ModelBuilder) -> Merger:
        """What makes features of patches: the patches of a token are normed together."""
        wide = self.config.hidden * self.config.merge**2
        norm = build.layer_norm("norm", wide, self.config.eps)
        project = self.make_projection(build, "linear_fc1", "linear_fc2")
        return lambda x: project(self.ops.norm(x.view(-1, wide), norm))

    def begin(self, pixels: Tensor) -> ImageState:
        """See `VisionTower`."""
        config = self.config
        rows, columns = config.grid(*pixels.shape[1:])
        places = patch_positions(rows, columns, config.merge)
        indices, weights = interpolate_positions(self.positions, rows * config.merge, columns * config.merge)
        raster = places[0] * columns * config.merge + places[1]
        indices, weights = (each[:, raster].to(self.device) for each in (indices, weights))
        trained = (self.positions[indices] * weights[..., None]).sum(0)
        x = self.patches(pixels)
        x = x + trained.to(x.dtype)
        return ImageState(x, axial_angles(places.to(self.device), config, self.ops), (len(x),), (len(x),))

    def run(self, state: ImageState, first: int, last: int) -> None:
        """See `VisionTower`."""
        for i in range(first, last):
            state.x = self.blocks[i](state.x, state.angles, state.full)
            if i in self.config.feature_layers:
                state.features.append(self.features[self.config.feature_layers.index(i)](state.x))

    def finish(self, state: ImageState) -> Sequence[Tensor]:
        """See `VisionTower`."""
        return (self.merge(state.x), *state.features)


class Qwen25VL(Qwen2):
    """Qwen2.5-VL."""

    architectures = MappingProxyType({"Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl"})

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        build.rename(RENAMED)
        super().__init__(spec, build)
        self.vision = make_vision(Qwen25Vision, spec, build)

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = Qwen2.read(nested(config), architecture)
        own = config.section("vision_config")
        window = own.get(int, "window_size", default=112)
        vision = replace(
            read_vision(config, spec, depth=32, patch=14),
            activation=own.get(str, "hidden_act", default="silu"),
            window=window,
            full_layers=frozenset(read_list(own, "fullatt_block_indexes", [7, 15, 23, 31])),
        )
        if window < vision.patch * vision.merge:
            raise InvalidModel("config.json: vision_config: window_size is smaller than a token")
        return replace(with_axes(spec, [16, 24, 24], by_turns=False), vision=vision)


class Qwen3VL(Qwen3):
    """Qwen3-VL."""

    architectures = MappingProxyType({"Qwen3VLForConditionalGeneration": "qwen3_vl"})

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        build.rename(RENAMED)
        super().__init__(spec, build)
        self.vision = make_vision(Qwen3Vision, spec, build)

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        return with_qwen3_vision(config, Qwen3.read(nested(config), architecture))


class Qwen3VLMoe(Qwen3VL):
    """Qwen3-VL with a mixture of experts in some layers or all."""

    architectures = MappingProxyType({"Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe"})
    expert_names = ExpertNames(matrices=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), transposed=True)

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        fields = nested(config)
        # They are normalized whatever config.json says.
        fields = Config({**fields.fields, "norm_topk_prob": True}, fields.where)
        return with_qwen3_vision(config, Qwen3Moe.read(fields, architecture))


def make_vision(kind: type[Qwen25Vision], spec: ModelSpec, build: ModelBuilder) -> VisionTower | None:
    """The encoder, unless the model is used without."""
    build = build.here(spec.vision is not None and spec.embeds(build.pipeline), "visual")
    return None if spec.vision is None else kind(spec.vision, build.scope("visual"))


def read_vision(config: Config, spec: ModelSpec, *, depth: int, patch: int) -> VisionConfig:
    """What both generations' encoders have in common. depth, patch: where config.json does not say."""
    own = config.section("vision_config")
    layers = own.get(int, "depth", default=depth)
    check_layers(layers, "vision_config: depth")
    out = own.get(int, "out_hidden_size", default=spec.hidden)
    if out != spec.hidden:
        raise InvalidModel(f"config.json: vision_config: out_hidden_size is {out}, and hidden_size is {spec.hidden}")
    return VisionConfig(
        hidden=own.get(int, "hidden_size", default=1152),
        layers=layers,
        heads=own.get(int, "num_heads", default=16),
        mlp=own.get(int, "intermediate_size", default=4304),
        patch=own.get(int, "patch_size", "spatial_patch_size", default=patch),
        merge=own.get(int, "spatial_merge_size", default=2),
        frames=own.get(int, "temporal_patch_size", default=2),
        out=out,
        image_token=config.get(int, "image_token_id", default=151_655),
        multi_axis=True,
        theta=own.section("rope_parameters").get(float, "rope_theta", default=10_000.0),
    ).checked()


def with_qwen3_vision(
    config: Config, spec: ModelSpec, *, features: Sequence[int] = (8, 16, 24), sections: Sequence[int] = (24, 20, 20)
) -> ModelSpec:
    """`spec` with Qwen3-VL's encoder. features, sections: `deepstack_visual_indexes` and `mrope_section` where
    config.json does not say."""
    own = config.section("vision_config")
    vision = read_vision(config, spec, depth=27, patch=16)
    layers = tuple(read_list(own, "deepstack_visual_indexes", list(features)))
    if len(layers) >= spec.layers or any(each >= vision.layers for each in layers) or list(layers) != sorted({*layers}):
        raise InvalidModel(
            "config.json: vision_config: deepstack_visual_indexes must be layers of the encoder, in order, and fewer "
            "than the text model has"
        )
    vision = replace(
        vision,
        activation=own.get(str, "hidden_act", default="gelu_pytorch_tanh"),
        positions=own.get(int, "num_position_embeddings", default=2304),
        feature_layers=layers,
    )
    if int(vision.positions**0.5) ** 2 != vision.positions or not vision.positions:
        raise InvalidModel("config.json: vision_config: num_position_embeddings must be a square")
    return replace(with_axes(spec, list(sections), by_turns=True), vision=vision)


def with_axes(spec: ModelSpec, sections: list[int], *, by_turns: bool) -> ModelSpec:
    """`spec` with a rotary embedding of three positions. sections: where config.json does not say; by_turns: always."""
    axes = spec.rope.axes
    counts = [axes.count(axis) for axis in range(3)] if axes else sections
    pairs = spec.rope.dim // 2
    if sum(counts) != pairs:
        raise InvalidModel(f"config.json: mrope_section has {sum(counts)} pairs of dimensions in all, not {pairs}")
    if by_turns:
        axes = tuple(i % 3 if i < 3 * counts[i % 3] else 0 for i in range(pairs))
    elif not axes:
        axes = tuple(axis for axis, count in enumerate(counts) for _ in range(count))
    return replace(spec, rope=replace(spec.rope, axes=axes))


def read_list(config: Config, name: str, default: list[int]) -> list[int]:
    """A list of layers."""
    found = config.fields.get(name, default)
    if not isinstance(found, list) or any(type(each) is not int or each < 0 for each in found):
        raise InvalidModel(f"{config.where}: {name} must be a list of layers")
    return found
