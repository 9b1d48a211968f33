"""Qwen 2, 2.5 and 3: Llama with biases on q, k and v (2), or with q and k normed (3), and experts (MoE)."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from quire.errors import InvalidModel
from quire.layers.builder import GATED, ExpertNames, ModelBuilder
from quire.layers.moe import MoEConfig
from quire.models.llama import Llama
from quire.models.mtp import DraftBlock, MTPNames, make_mtp
from quire.models.spec import Config, ModelSpec, read_decoder, read_windows
from quire.types import UNLIMITED


class Qwen2(Llama):
    """Qwen 2 and 2.5 (Yang et al. 2024): biases on q, k and v."""

    architectures = MappingProxyType({"Qwen2ForCausalLM": "qwen2"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = read_decoder(config, architecture)
        return replace(spec, qkv_bias=True, out_bias=False, windows=windows(config, spec.layers))


class MiMo(Qwen2):
    """MiMo 7B (Xiaomi 2025): Qwen 2 with a layer that drafts."""

    architectures = MappingProxyType({"MiMoForCausalLM": "mimo"})

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        super().__init__(spec, build)
        around = ("token_layernorm", "hidden_layernorm", "input_proj", [DraftBlock("", spec.last_attention)])
        names = MTPNames("", *around, "final_layernorm", normed=True, hidden_first=True, pattern="model.mtp_layers.*")
        self.mtp = make_mtp(self, build, lambda i: names._replace(prefix=f"model.mtp_layers.{i}"))

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        drafts = config.get(int, "num_nextn_predict_layers", default=0)
        return replace(Qwen2.read(config, architecture), draft_layers=drafts)


class Qwen3(Llama):
    """Qwen 3 (Yang et al. 2025): q and k of each head are normed."""

    architectures = MappingProxyType({"Qwen3ForCausalLM": "qwen3"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = read_decoder(config, architecture)
        return replace(spec, qk_norm="each", windows=windows(config, spec.layers))


class Qwen3Moe(Qwen3):
    """Qwen 3 with a mixture of experts in some layers or all."""

    architectures = MappingProxyType({"Qwen3MoeForCausalLM": "qwen3_moe"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        config = windows_named(config, "max_window_layers", needed=False).with_defaults(max_window_layers=0)
        spec = Qwen3.read(config, architecture)
        return replace(spec, experts=read_experts(config, spec.layers, used=8).checked())


class Qwen2Moe(Qwen2):
    """Qwen 1.5 and 2 with a mixture of experts, and one that all tokens share."""

    architectures = MappingProxyType({"Qwen2MoeForCausalLM": "qwen2_moe"})
    expert_names = ExpertNames(shared=tuple(f"mlp.shared_expert.{name}" for name in GATED))

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = Qwen2.read(windows_named(config, "layer_types", needed=True), architecture)
        width = config.get(int, "shared_expert_intermediate_size", default=5632)
        experts = replace(read_experts(config, spec.layers, used=4), shared=width, gated_shared=True)
        return replace(spec, qkv_bias=config.get(bool, "qkv_bias", default=True), experts=experts.checked())


def read_experts(config: Config, layers: int, *, used: int) -> MoEConfig:
    """The fields of experts that both generations share. used: experts of a token where config.json does not say."""
    dense = config.fields.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise InvalidModel("config.json: mlp_only_layers must be a list of layers")
    step = max(1, config.get(int, "decoder_sparse_step", default=1))
    return MoEConfig(
        num_experts=config.get(int, "num_experts", "num_local_experts"),
        num_experts_per_token=config.get(int, "num_experts_per_tok", default=used),
        width=config.get(int, "moe_intermediate_size"),
        normalize_weights=config.get(bool, "norm_topk_prob", default=False),
        dense_layers=frozenset(i for i in range(layers) if i in dense or (i + 1) % step),
    )


def windows_named(config: Config, name: str, *, needed: bool) -> Config:
    """`config`. Raises InvalidModel where it has windows and lacks the field `name`, which says in which layers, or, if
    not needed, has it, though transformers does not read it."""
    if config.get(bool, "use_sliding_window", default=False) and (config.fields.get(name) is None) == needed:
        where = f"without {name}" if needed else f"with {name}"
        raise InvalidModel(
            f"config.json: use_sliding_window {where} is not supported: releases of transformers differ in which "
            f"layers have windows. Set it to false, or {'say ' + name if needed else 'leave out ' + name}"
        )
    return config


def windows(config: Config, layers: int) -> tuple[int, ...]:
    """Windows per layer: none unless `use_sliding_window`; without `layer_types` from `max_window_layers` on."""
    if not config.get(bool, "use_sliding_window", default=False):
        return (UNLIMITED,) * layers
    each = read_windows(config, layers)
    first = 0 if config.fields.get("layer_types") else config.get(int, "max_window_layers", default=layers)
    return (UNLIMITED,) * min(first, layers) + each[first:]
