"""The text models of Llama 4 (Meta 2025): experts in some layers or all, and attention in chunks.

Layers with rotary embedding, by neighbours, norm q and k without weights and see their own chunk of tokens. The others
see everything, and their queries grow with their position. A token's expert reads it times the sigmoid of its logit.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch

from quire.errors import InvalidModel
from quire.layers.basic import NO_ROPE, Attention
from quire.layers.builder import GATED, ExpertNames, ModelBuilder
from quire.layers.moe import MoEConfig
from quire.models.llama import Llama, Mixer, MLPFunction
from quire.models.multimodal import nested, select_decoder
from quire.models.spec import CHUNKED, FULL, Config, ModelSpec, interleave, read_decoder, read_locals
from quire.ops.operands import Norm, Norms
from quire.types import UNLIMITED


class Llama4(Llama):
    """Llama 4. Of multimodal checkpoints the decoder is loaded."""

    architectures = MappingProxyType({"Llama4ForCausalLM": "llama4_text", "Llama4ForConditionalGeneration": "llama4"})
    expert_names = ExpertNames(
        router="feed_forward.router",
        matrices=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
        transposed=True,
        apart=tuple(f"feed_forward.experts.#.{name}" for name in GATED),
        shared=tuple(f"feed_forward.shared_expert.{name}" for name in GATED),
    )

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        select_decoder(build)
        super().__init__(spec, build)

    def make_attention(self, build: ModelBuilder, index: int) -> Mixer:
        """`self_attn` of layer `index`, in which nothing is normed without a rotary embedding."""
        made = super().make_attention(build, index)
        if isinstance(made, Attention) and not self.spec.layer_ropes[index].dim:
            made.norms = None
        return made

    def make_qk_norms(self, build: ModelBuilder) -> Norms:
        """Without weights in the checkpoint, so that it makes no difference whether they come before the rotation,
        unless that makes vectors longer."""
        after = self.spec.rope.gain != 1
        norm = Norm(torch.ones(self.spec.head_dim, dtype=build.dtype, device=build.device), self.spec.norm_eps)
        return Norms(norm, norm, after_rope=after)

    def make_mlp(self, build: ModelBuilder, index: int) -> MLPFunction:
        """The MLP of layer `index`, or its experts."""
        spec = self.spec
        assert spec.experts is not None
        if index in spec.experts.dense_layers:
            return build.scope("feed_forward").gated_mlp(spec.hidden, spec.mlp, spec.activation)
        return super().make_mlp(build, index)

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        defaults = {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "num_key_value_heads": 8}
        config = nested(config).with_defaults(attention_chunk_size=8192, **defaults)
        spec = interleave(read_decoder(config, architecture))
        layers = range(spec.layers)
        every = max(1, config.get(int, "no_rope_layer_interval", default=4))
        rotated = read_list(config, "no_rope_layers") or [(i + 1) % every for i in layers]
        if len(rotated) < spec.layers:
            raise InvalidModel("config.json: no_rope_layers must be a list of num_hidden_layers numbers")
        kinds = config.fields.get("layer_types") or [CHUNKED if each else FULL for each in rotated[: spec.layers]]
        locals = read_locals(Config({"layer_types": kinds}), spec.layers, every=0, local=CHUNKED)
        chunk = config.get(int, "attention_chunk_size", default=0) or UNLIMITED
        step = max(1, config.get(int, "interleave_moe_layer_step", default=1))
        mixed = config.fields.get("moe_layers")
        mixed = [i for i in layers if not (i + 1) % step] if mixed is None else read_list(config, "moe_layers")
        tuned = config.get(bool, "attn_temperature_tuning", default=True)
        plain = replace(
            NO_ROPE,
            query_beta=config.get(float, "attn_scale", default=0.1) if tuned else 0.0,
            query_shift=1,
            original=max(1, config.get(int, "floor_scale", default=8192)),
        )
        return replace(
            spec,
            mlp=config.get(int, "intermediate_size_mlp", default=16384),
            chunks=tuple(chunk if local else UNLIMITED for local in locals),
            ropes=tuple(spec.rope if rotated[i] else plain for i in layers),
            qk_norm="each" if config.get(bool, "use_qk_norm", default=True) else "",
            experts=MoEConfig(
                num_experts=config.get(int, "num_local_experts", default=16),
                num_experts_per_token=config.get(int, "num_experts_per_tok", default=1),
                width=spec.mlp,
                normalize_weights=False,
                sigmoid=True,
                weighs_inputs=True,
                shared=spec.mlp,
                dense_layers=frozenset(layers) - frozenset(mixed),
            ).checked(),
        )


def read_list(config: Config, name: str) -> list[int]:
    """A list of numbers, empty where there is none."""
    found = config.fields.get(name) or []
    if not isinstance(found, list) or not all(isinstance(i, int) for i in found):
        raise InvalidModel(f"config.json: {name} must be a list of integers")
    return found
