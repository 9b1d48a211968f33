"""ERNIE 4.5 (Baidu 2025): Llama whose heads are rotated by neighbours, and with experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MappingProxyType

from quire.layers.builder import ExpertNames, ModelBuilder
from quire.layers.moe import MoEConfig
from quire.models.llama import Llama
from quire.models.mtp import DraftBlock, MTPNames, make_mtp
from quire.models.spec import Config, ModelSpec, interleave, read_decoder


class Ernie45(Llama):
    """ERNIE 4.5 without experts."""

    architectures = MappingProxyType({"Ernie4_5_ForCausalLM": "ernie4_5", "Ernie4_5ForCausalLM": "ernie4_5"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        bias = config.get(bool, "use_bias", default=False)
        spec = read_decoder(config.with_defaults(head_dim=128, tie_word_embeddings=True), architecture)
        return interleave(replace(spec, qkv_bias=bias, out_bias=bias, mlp_bias=bias))


class Ernie45Moe(Ernie45):
    """ERNIE 4.5 with a mixture of experts in most layers."""

    architectures = MappingProxyType({"Ernie4_5_MoeForCausalLM": "ernie4_5_moe"})
    expert_names = ExpertNames(correction="mlp.moe_statics.e_score_correction_bias")

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        super().__init__(spec, build)
        self.mtp = make_mtp(self, build, partial(mtp_names, spec))

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        size = config.get(int, "hidden_size") // max(1, config.get(int, "num_attention_heads"))
        spec = Ernie45.read(config.with_defaults(head_dim=size, rms_norm_eps=1e-5, rope_theta=5e5), architecture)
        first, step = (config.get(int, f"moe_layer_{name}", default=1) for name in ("start_index", "interval"))
        open_ended = config.fields.get("moe_layer_end_index", -1) == -1
        last = spec.layers - 1 if open_ended else config.get(int, "moe_layer_end_index")
        width = config.get(int, "moe_intermediate_size", default=1536)
        experts = MoEConfig(
            num_experts=config.get(int, "moe_num_experts", "num_experts", default=64),
            num_experts_per_token=config.get(int, "moe_k", "num_experts_per_tok", default=6),
            width=width,
            corrected=True,
            floor=config.get(float, "moe_norm_min", default=1e-12),
            shared=width * config.get(int, "moe_num_shared_experts", default=2),
            dense_layers=frozenset(i for i in range(spec.layers) if not (first <= i <= last) or (i + 1) % max(1, step)),
        )
        drafts = config.get(int, "num_nextn_predict_layers", default=0)
        return replace(spec, experts=experts.checked(), draft_layers=drafts, head_bias=spec.mlp_bias)


def mtp_names(spec: ModelSpec, layer: int) -> MTPNames:
    """Of a layer that drafts, which has no experts, and no norm of its own before the head."""
    before = f"mtp_emb_norm.{layer}", f"mtp_hidden_norm.{layer}", f"mtp_linear_proj.{layer}"
    block = DraftBlock(f"mtp_block.{layer}", spec.last_attention, dense=True)
    return MTPNames("model", *before, [block], "", pattern="model.mtp_*")
