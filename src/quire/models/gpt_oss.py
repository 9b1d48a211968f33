"""gpt-oss (OpenAI 2025): experts with biases, attention sinks, and sliding windows in every other layer."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from quire.errors import InvalidModel
from quire.layers.builder import CLAMPED, GATED, ExpertNames
from quire.layers.moe import MoEConfig
from quire.models.llama import Llama
from quire.models.spec import Config, ModelSpec, read_decoder, read_windows
from quire.ops.operands import CLAMP_ALPHA, CLAMP_LIMIT

NAMES = ExpertNames(
    "mlp.router",
    ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    transposed=True,
    interleaved=True,
    apart=tuple(f"mlp.experts.#.{name}" for name in GATED),
)

DEFAULTS = MappingProxyType({"attention_bias": True, "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5})


class GptOss(Llama):
    """gpt-oss 20b and 120b, whose experts are published in MXFP4."""

    architectures = MappingProxyType({"GptOssForCausalLM": "gpt_oss"})
    sinks = "sinks"
    expert_names = NAMES

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        config = config.with_defaults(**DEFAULTS)
        for name, known in (("swiglu_alpha", CLAMP_ALPHA), ("swiglu_limit", CLAMP_LIMIT)):
            if config.get(float, name, default=known) != known:
                raise InvalidModel(f"config.json: {name} must be {known:g}: other gates are not supported")
        spec = read_decoder(config, architecture)
        experts = MoEConfig(
            num_experts=config.get(int, "num_local_experts", "num_experts"),
            num_experts_per_token=config.get(int, "num_experts_per_tok", "experts_per_token", default=4),
            width=spec.mlp,
            biased=True,
        )
        windows = read_windows(config, spec.layers, every=2)
        return replace(spec, windows=windows, experts=experts.checked(), activation=CLAMPED)
