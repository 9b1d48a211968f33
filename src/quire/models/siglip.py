"""SigLIP (Zhai et al. 2023) as the encoder of Gemma 3: squares of one size, pooled to a fixed number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.builder import ModelBuilder
from quire.layers.vision import ImageState, VisionBlock, VisionConfig
from quire.models.spec import Config, ModelSpec, check_layers
from quire.ops.operands import Norm


class SiglipVision:
    """The encoder and Gemma 3's projector."""

    def __init__(self, config: VisionConfig, build: ModelBuilder) -> None:
        self.config, self.ops = config, build.ops
        tower, projector = build.scope("vision_tower"), build.scope("multi_modal_projector")
        self.patches = tower.patches("embeddings.patch_embedding", config, bias=True, frames=False)
        self.positions = tower.tensor("embeddings.position_embedding.weight", (config.positions, config.hidden))
        self.blocks = [self.make_block(tower.scope(f"encoder.layers.{i}")) for i in range(config.layers)]
        self.last = tower.layer_norm("post_layernorm", config.hidden, config.eps)
        self.norm: Norm = projector.rms_norm("mm_soft_emb_norm", config.hidden, config.eps, shift=1.0)
        shape, std = (config.hidden, config.out), config.hidden**-0.5
        self.projection = projector.tensor("mm_input_projection_weight", shape, std=std)

    def make_block(self, build: ModelBuilder) -> VisionBlock:
        """A layer."""
        config = self.config
        norms = [build.layer_norm(name, config.hidden, config.eps) for name in ("layer_norm1", "layer_norm2")]
        qkv, out = build.scope("self_attn").vision_attention(config, ("q_proj", "k_proj", "v_proj"), "out_proj")
        mlp = build.scope("mlp").mlp("fc1", "fc2", config.hidden, config.mlp, config.activation)
        return VisionBlock((norms[0], norms[1]), qkv, out, mlp, config.heads, self.ops)

    def begin(self, pixels: Tensor) -> ImageState:
        """See `VisionTower`."""
        x = self.patches(pixels)
        return ImageState(x + self.positions, None, (len(x),), (len(x),))

    def run(self, state: ImageState, first: int, last: int) -> None:
        """See `VisionTower`."""
        for block in self.blocks[first:last]:
            state.x = block(state.x, state.angles, state.full)

    def finish(self, state: ImageState) -> Sequence[Tensor]:
        """See `VisionTower`."""
        config, x = self.config, self.ops.norm(state.x, self.last)
        side = int(config.positions**0.5) // config.pooled
        pooled = x.view(config.pooled, side, config.pooled, side, -1).mean((1, 3)).flatten(0, 1)
        return (self.ops.linear(self.ops.norm(pooled, self.norm), self.projection.t()),)


def read_siglip(config: Config, spec: ModelSpec) -> VisionConfig | None:
    """The encoder of a multimodal config.json; None of another. Raises InvalidModel."""
    own = config.section("vision_config")
    if not own.fields:
        return None
    layers, tokens = own.get(int, "num_hidden_layers", default=12), config.get(int, "mm_tokens_per_image", default=256)
    check_layers(layers, "vision_config: num_hidden_layers")
    patch, size = own.get(int, "patch_size", default=16), own.get(int, "image_size", default=224)
    side, pooled = size // max(1, patch), int(tokens**0.5)
    if not patch or size % patch or not pooled or pooled**2 != tokens or side % pooled:
        raise InvalidModel(
            f"config.json: images of {size} pixels, in patches of {patch}, cannot become {tokens} tokens evenly"
        )
    return VisionConfig(
        hidden=own.get(int, "hidden_size", default=768),
        layers=layers,
        heads=own.get(int, "num_attention_heads", default=12),
        mlp=own.get(int, "intermediate_size", default=3072),
        patch=patch,
        out=spec.hidden,
        image_token=config.get(int, "image_token_index", "image_token_id", default=262_144),
        activation=own.get(str, "hidden_act", default="gelu_pytorch_tanh"),
        eps=own.get(float, "layer_norm_eps", default=1e-6),
        positions=side**2,
        pooled=pooled,
        whole_images=True,
    ).checked()
