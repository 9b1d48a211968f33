"""Qwen3-Next (Qwen Team 2025) and Qwen3.5 (2026): most layers are of the gated delta rule, every fourth is gated
attention; experts in Qwen3-Next and in some of Qwen3.5."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import ClassVar

from quire.errors import InvalidModel
from quire.layers.basic import GatedAttention
from quire.layers.builder import GATED, ExpertNames, ModelBuilder
from quire.layers.delta import DeltaConfig
from quire.models.bamba import check_convolution
from quire.models.llama import Llama, Mixer
from quire.models.mtp import make_mtp, qwen_names
from quire.models.multimodal import nested
from quire.models.qwen import read_experts
from quire.models.qwen_vl import RENAMED, Qwen3Vision, make_vision, with_qwen3_vision
from quire.models.spec import Config, ModelSpec, read_decoder, read_locals

LINEAR = "linear_attention"
"""Recurrent layers, as `layer_types` names them."""


class Qwen3Next(Llama):
    """Qwen3-Next."""

    architectures = MappingProxyType({"Qwen3NextForCausalLM": "qwen3_next"})
    attention = GatedAttention
    expert_names = ExpertNames(shared=tuple(f"mlp.shared_expert.{name}" for name in GATED))
    by_head: ClassVar[bool] = True

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        super().__init__(spec, build)
        self.mtp = make_mtp(self, build, partial(qwen_names, spec))

    def make_attention(self, build: ModelBuilder, index: int) -> Mixer:
        """`self_attn` or `linear_attn` of layer `index`."""
        spec = self.spec
        if index not in spec.recurrent:
            return super().make_attention(build, index)
        assert spec.delta is not None
        return build.scope("linear_attn").gated_delta(spec.hidden, spec.delta, spec.norm_eps, by_head=self.by_head)

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = read_hybrid(config.with_defaults(norm_topk_prob=True), architecture)
        width = config.get(int, "shared_expert_intermediate_size", default=512)
        experts = read_experts(config.with_defaults(norm_topk_prob=True), spec.layers, used=10)
        return replace(spec, experts=replace(experts, shared=width, gated_shared=True).checked())


class Qwen35(Qwen3Next):
    """Qwen3.5, and its encoder of images where a checkpoint has one."""

    architectures = MappingProxyType(
        {"Qwen3_5ForCausalLM": "qwen3_5_text", "Qwen3_5ForConditionalGeneration": "qwen3_5"}
    )
    by_head = False

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        build.rename(RENAMED)
        super().__init__(spec, build)
        self.vision = make_vision(Qwen3Vision, spec, build)

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        return with_images(config, read_hybrid(nested(config), architecture))


class Qwen35Moe(Qwen35):
    """Qwen3.5 with experts."""

    architectures = MappingProxyType(
        {"Qwen3_5MoeForCausalLM": "qwen3_5_moe_text", "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe"}
    )
    expert_names = ExpertNames(
        matrices=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        shared=tuple(f"mlp.shared_expert.{name}" for name in GATED),
        apart=tuple(f"mlp.experts.#.{name}" for name in GATED),
    )

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        width = nested(config).get(int, "moe_intermediate_size", default=512)
        fields = nested(config).with_defaults(intermediate_size=width, moe_intermediate_size=width, num_experts=256)
        fields = Config({**fields.fields, "norm_topk_prob": True}, fields.where)
        spec = read_hybrid(fields, architecture)
        shared = fields.get(int, "shared_expert_intermediate_size", default=512)
        experts = replace(read_experts(fields, spec.layers, used=8), shared=shared, gated_shared=True)
        return with_images(config, replace(spec, experts=experts.checked()))


def with_images(config: Config, spec: ModelSpec) -> ModelSpec:
    """`spec` with the encoder of a multimodal config.json."""
    if "vision_config" not in config.fields:
        return spec
    return with_qwen3_vision(config, spec, features=(), sections=(11, 11, 10))


def read_hybrid(config: Config, architecture: str) -> ModelSpec:
    """What layers share, but for MLPs and experts. Raises InvalidModel where no layer keeps K/V."""
    config = config.with_defaults(partial_rotary_factor=0.25, head_dim=256)
    spec = read_decoder(config, architecture)
    every = config.get(int, "full_attention_interval", default=4)
    linear = read_locals(config, spec.layers, every=every, local=LINEAR)
    if all(linear):
        raise InvalidModel("config.json: a model of recurrent layers alone is not supported")
    check_convolution("hidden_act", spec.activation)
    delta = DeltaConfig(
        key_heads=config.get(int, "linear_num_key_heads", default=16),
        value_heads=config.get(int, "linear_num_value_heads", default=32),
        key=config.get(int, "linear_key_head_dim", default=128),
        value=config.get(int, "linear_value_head_dim", default=128),
        width=config.get(int, "linear_conv_kernel_dim", default=4),
    ).checked()
    recurrent = frozenset(i for i, each in enumerate(linear) if each)
    # Not every config.json says so, but published checkpoints have one.
    drafts = config.get(int, "mtp_num_hidden_layers", "num_nextn_predict_layers", default=1)
    return replace(spec, norm_shift=1.0, qk_norm="each", delta=delta, recurrent=recurrent, draft_layers=drafts)
