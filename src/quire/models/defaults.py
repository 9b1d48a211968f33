"""What transformers takes for a field that a config.json leaves out, where most architectures take something else, or
need the field. A field that is null is not left out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

APERTUS_ROPE = MappingProxyType(
    {
        "rope_type": "llama3",
        "rope_theta": 12_000_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
)

GPT_OSS_ROPE = MappingProxyType(
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    }
)

MINISTRAL3_ROPE = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 16_384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
)

LATENTS: Mapping[str, Any] = MappingProxyType({"n_shared_experts": 1, "q_lora_rank": 1536})
GROUPS: Mapping[str, Any] = MappingProxyType({"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5})
LOCAL: Mapping[str, Any] = MappingProxyType({"sliding_window": 4096})
EPS: Mapping[str, Any] = MappingProxyType({"rms_norm_eps": 1e-5})


def of(context: int, kv_heads: int = 0, **others: Any) -> Mapping[str, Any]:
    """Fields: max_position_embeddings, num_key_value_heads (0: as many as heads), `others`."""
    kv = {"num_key_value_heads": kv_heads} if kv_heads else {}
    return MappingProxyType({"max_position_embeddings": context, **kv, **others})


DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "apertus": of(65_536, rope_parameters=APERTUS_ROPE),
        "arcee": of(4096, **EPS),
        "bamba": of(262_144),
        "cohere": of(8192, rope_theta=5e5),
        "cohere2": of(8192, **LOCAL),
        "deepseek_v2": of(2048, n_shared_experts=2, q_lora_rank=1536),
        "deepseek_v3": of(4096, first_k_dense_replace=3, **LATENTS, **GROUPS),
        "deepseek_v32": of(163_840, **LATENTS, **GROUPS),
        "ernie4_5": of(131_072, 2, rope_theta=5e5, **EPS),
        "ernie4_5_moe": of(131_072, 4),
        "exaone4": of(2048, **LOCAL, **EPS),
        "gemma": of(8192),
        "gemma2": of(8192, 4, **LOCAL),
        "gemma3_text": of(131_072, 4, num_attention_heads=8, vocab_size=262_208, **LOCAL),
        "gemma4_text": of(131_072, 4),
        "glm": of(131_072, 2, rms_norm_eps=1.5625e-07),
        "glm4": of(131_072, 2, rms_norm_eps=1.5625e-07),
        "glm4_moe": of(131_072, 8),
        "glm4_moe_lite": of(202_752, n_shared_experts=1, q_lora_rank=768, routed_scaling_factor=1.8, **EPS),
        "gpt_oss": of(131_072, 8, rope_theta=150_000.0, rope_parameters=GPT_OSS_ROPE),
        "helium": of(4096, rms_norm_eps=1e-8, rope_theta=1e5),
        "hunyuan_v1_dense": of(2048, **EPS),
        "internlm3": of(32_768, 2, **EPS),
        "llama4_text": of(131_072),
        "mimo": of(32_768),
        "minimax_m2": of(196_608, 8),
        "ministral": of(131_072, 8, **LOCAL),
        "ministral3": of(262_144, 8, rope_parameters=MINISTRAL3_ROPE, **EPS),
        "mistral": of(131_072, 8, **LOCAL),
        "mixtral": of(131_072, 8, rope_theta=1e6, **EPS),
        "modernbert": of(8192, tie_word_embeddings=True),
        "nemotron": of(4096),
        "nemotron_h": of(4096, 8, intermediate_size=21_504),
        "olmo2": of(2048, **EPS),
        "olmo3": of(2048, **LOCAL, **EPS),
        "olmoe": of(4096),
        "phi3": of(4096, **EPS),
        "phimoe": of(131_072, 8),
        "qwen2": of(32_768),
        "qwen2_moe": of(32_768),
        "qwen3": of(32_768),
        "qwen3_5_moe_text": of(32_768, 2),
        "qwen3_5_text": of(32_768, 4),
        "qwen3_moe": of(32_768, 4),
        "qwen3_next": of(32_768, 2),
        "seed_oss": of(524_288, 8),
        "smollm3": of(32_768, 4, rope_theta=2e6),
        "starcoder2": of(4096, 2),
    }
)
"""By `model_type`."""


def with_defaults(fields: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """`fields` of a config.json with those of `model_type` that it leaves out."""
    own = DEFAULTS.get(model_type, {})
    made = {**own, **fields}
    if made.get("rope_parameters") is None or fields.get("rope_scaling"):
        # Here null is as good as nothing, and `rope_scaling` comes first.
        made["rope_parameters"] = None if fields.get("rope_scaling") else own.get("rope_parameters")
    return made
