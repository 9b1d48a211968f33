"""Nomic BERT (Nussbaum et al. 2024): BERT with rotary embeddings in place of those of positions, gated MLPs and no
biases but the norms'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from quire.errors import InvalidModel
from quire.layers.basic import MLP, AnyEmbedding, GatedMLP
from quire.layers.builder import ModelBuilder
from quire.models.bert import Bert, EncoderBlock, Names, read_encoder
from quire.models.spec import Config, ModelSpec, read_rope

FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "layer_norm_epsilon": "layer_norm_eps",
        "max_trained_positions": "max_position_embeddings",
        "rotary_emb_base": "rope_theta",
    }
)
"""Names of fields in published checkpoints, and BERT's."""

FIXED: Mapping[str, object] = MappingProxyType(
    {
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm", "use_rms_norm"), False),
        **dict.fromkeys(("rotary_emb_interleaved", "parallel_block", "causal"), False),
        "rotary_emb_fraction": 1.0,
        "rotary_emb_scale_base": None,
        "num_experts": 0,
        "activation_function": "swiglu",
    }
)
"""Fields that must have these values, where they are."""


class NomicBlock(EncoderBlock):
    """One layer: attention and a gated MLP, each followed by a norm of the sum."""

    def make_mlp(self, spec: ModelSpec, build: ModelBuilder, names: Names) -> MLP | GatedMLP:
        """The MLP."""
        gated = ("fc12", names.up, names.down)
        return build.scope("mlp").gated_mlp(spec.hidden, spec.mlp, spec.activation, names=gated)


class NomicBert(Bert):
    """Nomic BERT, see `registry.Model`. Without experts (v2)."""

    architectures = MappingProxyType(
        {"NomicBertModel": "nomic_bert", "NomicBertForMaskedLM": "", "NomicBertForSequenceClassification": ""}
    )
    names = Names(
        "nomic_bert",
        "encoder.layers",
        ("attn.Wqkv",),
        "attn.out_proj",
        "norm1",
        up="fc11",
        down="fc2",
        mlp_norm="norm2",
    )
    block = NomicBlock

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        build.rename({"emb_ln.": "embeddings.LayerNorm.", "nomic_bert.emb_ln.": "nomic_bert.embeddings.LayerNorm."})
        super().__init__(spec, build)

    def make_positions(self, body: ModelBuilder) -> AnyEmbedding | None:
        """See `Bert`."""
        return None

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        for name, value in FIXED.items():
            if config.fields.get(name) not in (None, value):
                raise InvalidModel(f"config.json: {name} {config.fields[name]!r} is not supported for Nomic BERT")
        named = {ours: config.fields[name] for name, ours in FIELDS.items() if name in config.fields}
        whole = Config({"hidden_act": "silu", "max_position_embeddings": 2048, **config.fields, **named}, config.where)
        spec, base = read_encoder(whole, architecture), whole.get(float, "rope_theta", default=1000.0)
        return replace(
            spec,
            rope=read_rope(whole, spec.head_dim, whole.section("rope_parameters"), theta=base),
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
        )
