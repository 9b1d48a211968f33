"""Facts of published config.json files: they are read, their parameters add up, and `inspect` and `plan` know them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from quire.cli.inspect import draft_parameters, read_facts, shapes
from quire.cli.plan import plan_lines
from quire.config import Settings
from quire.config.option import amount
from quire.layers.latent import IndexConfig
from quire.models.registry import ARCHITECTURES, idle_parameters, parameters, read_spec
from quire.models.spec import ModelSpec
from quire.ops.operands import TopK
from quire.types import UNLIMITED


def config(
    name: str, hidden: int, mlp: int, layers: int, heads: tuple[int, int], vocab: int, context: int, **others: Any
) -> dict[str, Any]:
    """heads: of queries, and of keys and values."""
    return {
        "architectures": [name],
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "torch_dtype": "bfloat16",
        **others,
    }


def long_rope(pairs: int) -> dict[str, Any]:
    return {"type": "longrope", "short_factor": [1.0] * pairs, "long_factor": [8.0] * pairs}


NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
NEMOTRON_H: dict[str, Any] = {
    "mlp_hidden_act": "relu2",
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "layer_norm_epsilon": 1e-5,
}
GRANITE = {"embedding_multiplier": 12, "residual_multiplier": 0.22, "rope_theta": 1e7, "tie_word_embeddings": True}
DEEPSEEK_V2_ROPE: dict[str, Any] = {
    "type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
DEEPSEEK_V3: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
MISTRAL3_YARN = {
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
OLMO3_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
EXAONE_ROPE = {
    "rope_type": "llama3",
    "factor": 16.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
THREE_OF_FOUR = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]

LLAMA4_ROPE = {
    "rope_type": "llama3",
    "factor": 16.0,
    "high_freq_factor": 1.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
FIVE_OF_SIX = ["sliding_attention"] * 5 + ["full_attention"]
GEMMA4_ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


def gemma4(hidden: int, mlp: int, layers: int, heads: tuple[int, int], **others: Any) -> dict[str, Any]:
    text = config("", hidden, mlp, layers, heads, 262144, 262144, head_dim=256, global_head_dim=512, **others)
    text |= {"rope_parameters": GEMMA4_ROPE, "final_logit_softcapping": 30.0, "vocab_size_per_layer_input": 262144}
    return {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}


GPT_OSS = {
    "attention_bias": True,
    "head_dim": 64,
    "initial_context_length": 4096,
    "num_experts_per_tok": 4,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    **UNTIED,
}
PACKED = MappingProxyType({"openai/gpt-oss-20b": "12.82 GiB", "openai/gpt-oss-120b": "60.77 GiB"})
"""Of quantised ones, what their weights take."""

PUBLISHED: Mapping[str, tuple[float, dict[str, Any]]] = MappingProxyType(
    {
        "microsoft/Phi-4-mini-instruct": (3.836e9, config(
            "Phi3ForCausalLM", 3072, 8192, 32, (24, 8), 200064, 131072, original_max_position_embeddings=4096,
            partial_rotary_factor=0.75, rope_scaling=long_rope(48), sliding_window=262144, **TIED)),
        "microsoft/phi-4": (14.66e9, config(
            "Phi3ForCausalLM", 5120, 17920, 40, (40, 10), 100352, 16384, rope_theta=250000.0, **UNTIED)),
        "microsoft/Phi-3.5-mini-instruct": (3.821e9, config(
            "Phi3ForCausalLM", 3072, 8192, 32, (32, 32), 32064, 131072, original_max_position_embeddings=4096,
            rope_scaling=long_rope(48), sliding_window=262144, **UNTIED)),
        "microsoft/Phi-3.5-MoE-instruct": (41.87e9, config(
            "PhiMoEForCausalLM", 4096, 6400, 32, (32, 8), 32064, 131072, original_max_position_embeddings=4096,
            attention_bias=True, lm_head_bias=True, num_local_experts=16, num_experts_per_tok=2, rms_norm_eps=1e-5,
            router_jitter_noise=0.01, sliding_window=131072, rope_theta=10000.0,
            rope_scaling={**long_rope(64), "short_mscale": 1.2, "long_mscale": 1.3}, **UNTIED)),
        "swiss-ai/Apertus-8B-Instruct-2509": (8.05e9, config(
            "ApertusForCausalLM", 4096, 21504, 32, (32, 8), 131072, 65536, rope_theta=12000000.0, hidden_act="xielu",
            qk_norm=True, post_norm=False, **UNTIED)),
        "allenai/OLMo-2-1124-7B": (7.30e9, config(
            "Olmo2ForCausalLM", 4096, 11008, 32, (32, 32), 100352, 4096, rope_theta=500000, **UNTIED)),
        "allenai/Olmo-3-1025-7B": (7.30e9, config(
            "Olmo3ForCausalLM", 4096, 11008, 32, (32, 32), 100278, 65536, rope_theta=500000, sliding_window=4096,
            layer_types=THREE_OF_FOUR * 8, rope_scaling=OLMO3_YARN, **UNTIED)),
        "ibm-granite/granite-3.3-8b-instruct": (8.17e9, config(
            "GraniteForCausalLM", 4096, 12800, 40, (32, 8), 49159, 131072, attention_multiplier=0.0078125,
            logits_scaling=16.0, **GRANITE)),
        "ibm-granite/granite-4.0-micro": (3.40e9, config(
            "GraniteMoeHybridForCausalLM", 2560, 8192, 40, (40, 8), 100352, 131072, attention_multiplier=0.015625,
            logits_scaling=10, layer_types=["attention"] * 40, num_local_experts=0, position_embedding_type="rope",
            shared_intermediate_size=8192, **GRANITE)),
        "zai-org/GLM-4-9B-0414": (9.40e9, config(
            "Glm4ForCausalLM", 4096, 13696, 40, (32, 2), 151552, 32768, head_dim=128, partial_rotary_factor=0.5,
            attention_bias=True, rms_norm_eps=1e-5, **UNTIED)),
        "zai-org/glm-4-9b-chat-hf": (9.40e9, config(
            "GlmForCausalLM", 4096, 13696, 40, (32, 2), 151552, 131072, head_dim=128, attention_bias=True, **UNTIED)),
        "HuggingFaceTB/SmolLM3-3B": (3.075e9, config(
            "SmolLM3ForCausalLM", 2048, 11008, 36, (16, 4), 128256, 65536, rope_theta=5e6,
            no_rope_layers=[1, 1, 1, 0] * 9, no_rope_layer_interval=4, use_sliding_window=False)),
        "CohereLabs/c4ai-command-r7b-12-2024": (8.03e9, config(
            "Cohere2ForCausalLM", 4096, 14336, 32, (32, 8), 256000, 8192, layer_norm_eps=1e-5, logit_scale=0.25,
            rope_theta=50000, sliding_window=4096, sliding_window_pattern=4)),
        "CohereLabs/c4ai-command-r-08-2024": (32.3e9, config(
            "CohereForCausalLM", 8192, 24576, 40, (64, 8), 256000, 131072, logit_scale=0.0625, rope_theta=4e6)),
        "CohereLabs/c4ai-command-r-plus": (103.8e9, config(
            "CohereForCausalLM", 12288, 33792, 64, (96, 8), 256000, 131072, logit_scale=0.8333333333333334,
            rope_theta=75000000.0, use_qk_norm=True)),
        "google/gemma-2b": (2.506e9, config(
            "GemmaForCausalLM", 2048, 16384, 18, (8, 1), 256000, 8192, head_dim=256, hidden_act="gelu")),
        "google/gemma-7b": (8.538e9, config(
            "GemmaForCausalLM", 3072, 24576, 28, (16, 16), 256000, 8192, head_dim=256, hidden_act="gelu")),
        "tiiuae/Falcon3-7B-Instruct": (7.456e9, config(
            "LlamaForCausalLM", 3072, 23040, 28, (12, 4), 131072, 32768, head_dim=256, rope_theta=1000042)),
        "internlm/internlm3-8b-instruct": (8.80e9, config(
            "InternLM3ForCausalLM", 4096, 10240, 48, (32, 2), 128512, 32768, head_dim=128, bias=False, qkv_bias=False,
            rope_theta=50000000, rope_scaling={"rope_type": "dynamic", "factor": 6.0})),
        "mistralai/Ministral-3-8B-Instruct-2512": (8.49e9, {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": config("", 4096, 14336, 34, (32, 8), 131072, 262144, head_dim=128,
                                  rope_parameters=MISTRAL3_YARN, sliding_window=None)}),
        "mistralai/Mistral-Small-3.2-24B-Instruct-2506": (23.57e9, {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": config("", 5120, 32768, 40, (32, 8), 131072, 131072, head_dim=128, rope_theta=1e9)}),
        "ByteDance-Seed/Seed-OSS-36B-Instruct": (36.15e9, config(
            "SeedOssForCausalLM", 5120, 27648, 64, (80, 8), 155136, 524288, head_dim=128, attention_bias=True,
            attention_out_bias=False, rope_scaling={"rope_type": "default"}, rope_theta=1e7, **UNTIED)),
        "LGAI-EXAONE/EXAONE-4.0-32B": (32.0e9, config(
            "Exaone4ForCausalLM", 5120, 27392, 64, (40, 8), 102400, 131072, head_dim=128, rope_theta=1000000,
            sliding_window=4096, sliding_window_pattern="LLLG", rope_scaling=EXAONE_ROPE, **UNTIED)),
        "LGAI-EXAONE/EXAONE-4.0-1.2B": (1.28e9, config(
            "Exaone4ForCausalLM", 2048, 4096, 30, (32, 8), 102400, 65536, head_dim=64, rope_theta=1000000,
            sliding_window=None, rope_scaling=EXAONE_ROPE, **TIED)),
        "nvidia/Minitron-4B-Base": (4.19e9, config(
            "NemotronForCausalLM", 3072, 9216, 32, (24, 8), 256000, 4096, head_dim=128, hidden_act="relu2",
            norm_eps=1e-5, partial_rotary_factor=0.5, **UNTIED)),
        "bigcode/starcoder2-7b": (7.17e9, config(
            "Starcoder2ForCausalLM", 4608, 18432, 32, (36, 4), 49152, 16384, hidden_act="gelu_pytorch_tanh",
            norm_epsilon=1e-5, rope_theta=1000000, sliding_window=4096, use_bias=True)),
        "tencent/Hunyuan-7B-Instruct": (7.50e9, config(
            "HunYuanDenseV1ForCausalLM", 4096, 14336, 32, (32, 8), 128167, 32768, head_dim=128, attention_bias=False,
            rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0}, use_qk_norm=True, **TIED)),
        "baidu/ERNIE-4.5-0.3B-PT": (0.361e9, config(
            "Ernie4_5_ForCausalLM", 1024, 3072, 18, (16, 2), 103424, 131072, head_dim=128, rope_theta=500000,
            use_bias=False, **TIED)),
        "arcee-ai/AFM-4.5B": (4.62e9, config(
            "ArceeForCausalLM", 2560, 18432, 36, (20, 4), 128004, 65536, head_dim=128, hidden_act="relu2",
            rope_scaling={"rope_type": "yarn", "factor": 20.0, "original_max_position_embeddings": 4096}, **UNTIED)),
        "kyutai/helium-1-preview-2b": (2.17e9, config(
            "HeliumForCausalLM", 2560, 7040, 24, (20, 20), 48000, 4096, head_dim=128, rope_theta=100000.0,
            rms_norm_eps=1e-8, **UNTIED)),
        "openai/gpt-oss-20b": (20.91e9, config(
            "GptOssForCausalLM", 2880, 2880, 24, (64, 8), 201088, 131072, num_local_experts=32, experts_per_token=4,
            layer_types=["sliding_attention", "full_attention"] * 12, **GPT_OSS)),
        "openai/gpt-oss-120b": (116.83e9, config(
            "GptOssForCausalLM", 2880, 2880, 36, (64, 8), 201088, 131072, num_local_experts=128, experts_per_token=4,
            layer_types=["sliding_attention", "full_attention"] * 18, **GPT_OSS)),
        "Qwen/Qwen2.5-7B-Instruct": (7.616e9, config(
            "Qwen2ForCausalLM", 3584, 18944, 28, (28, 4), 152064, 32768, rope_theta=1000000.0, **UNTIED)),
        "Qwen/Qwen1.5-MoE-A2.7B": (14.32e9, config(
            "Qwen2MoeForCausalLM", 2048, 5632, 24, (16, 16), 151936, 8192, rope_theta=1000000.0, num_experts=60,
            num_experts_per_tok=4, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
            norm_topk_prob=False, use_sliding_window=False, sliding_window=32768, max_window_layers=21, **UNTIED)),
        "Qwen/Qwen2-57B-A14B-Instruct": (57.41e9, config(
            "Qwen2MoeForCausalLM", 3584, 18944, 28, (28, 4), 151936, 32768, rope_theta=1000000.0, num_experts=64,
            num_experts_per_tok=8, moe_intermediate_size=2560, shared_expert_intermediate_size=20480,
            norm_topk_prob=False, use_sliding_window=False, sliding_window=65536, max_window_layers=28, **UNTIED)),
        "allenai/OLMoE-1B-7B-0924": (6.92e9, config(
            "OlmoeForCausalLM", 2048, 1024, 16, (16, 16), 50304, 4096, rope_theta=10000.0, num_experts=64,
            num_experts_per_tok=8, norm_topk_prob=False, clip_qkv=None, **UNTIED)),
        "ibm-granite/granite-3.1-1b-a400m-instruct": (1.335e9, config(
            "GraniteMoeForCausalLM", 1024, 512, 24, (16, 8), 49155, 131072, attention_multiplier=0.015625,
            logits_scaling=6.0, num_local_experts=32, num_experts_per_tok=8, **GRANITE)),
        "ibm-granite/granite-3.1-3b-a800m-instruct": (3.299e9, config(
            "GraniteMoeForCausalLM", 1536, 512, 32, (24, 8), 49155, 131072, attention_multiplier=0.015625,
            logits_scaling=6.0, num_local_experts=40, num_experts_per_tok=8, **GRANITE)),
        "zai-org/GLM-4.5-Air": (106.9e9, config(
            "Glm4MoeForCausalLM", 4096, 10944, 46, (96, 8), 151552, 131072, head_dim=128, attention_bias=True,
            use_qk_norm=False, partial_rotary_factor=0.5, rope_theta=1000000, rms_norm_eps=1e-5, n_routed_experts=128,
            num_experts_per_tok=8, moe_intermediate_size=1408, n_shared_experts=1, first_k_dense_replace=1, n_group=1,
            topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0, num_nextn_predict_layers=1, **UNTIED)),
        "zai-org/GLM-4.6": (353e9, config(
            "Glm4MoeForCausalLM", 5120, 12288, 92, (96, 8), 151552, 202752, head_dim=128, attention_bias=True,
            use_qk_norm=True, partial_rotary_factor=0.5, rope_theta=1000000, rms_norm_eps=1e-5, n_routed_experts=160,
            num_experts_per_tok=8, moe_intermediate_size=1536, n_shared_experts=1, first_k_dense_replace=3, n_group=1,
            topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, num_nextn_predict_layers=1, **UNTIED)),
        "deepseek-ai/DeepSeek-V2-Lite": (15.71e9, config(
            "DeepseekV2ForCausalLM", 2048, 10944, 27, (16, 16), 102400, 163840, rope_theta=10000, kv_lora_rank=512,
            q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64,
            n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1,
            moe_layer_freq=1, n_group=1, topk_group=1, topk_method="greedy", norm_topk_prob=False,
            routed_scaling_factor=1.0, rope_scaling=DEEPSEEK_V2_ROPE, **UNTIED)),
        "deepseek-ai/DeepSeek-V2": (235.7e9, config(
            "DeepseekV2ForCausalLM", 5120, 12288, 60, (128, 128), 102400, 163840, rope_theta=10000, kv_lora_rank=512,
            q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=160,
            n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1536, first_k_dense_replace=1,
            moe_layer_freq=1, n_group=8, topk_group=3, topk_method="group_limited_greedy", norm_topk_prob=False,
            routed_scaling_factor=16.0, rope_scaling=DEEPSEEK_V2_ROPE, **UNTIED)),
        "deepseek-ai/DeepSeek-V3": (671e9, config(
            "DeepseekV3ForCausalLM", 7168, 18432, 61, (128, 128), 129280, 163840, rope_theta=10000,
            n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048,
            n_group=8, topk_group=4, routed_scaling_factor=2.5,
            **DEEPSEEK_V3, rope_scaling=DEEPSEEK_V2_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0}, **UNTIED)),
        "deepseek-ai/DeepSeek-V3.2": (671e9, config(
            "DeepseekV32ForCausalLM", 7168, 18432, 61, (128, 128), 129280, 163840, rope_theta=10000,
            n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, index_head_dim=128,
            index_n_heads=64, index_topk=2048, n_group=8, topk_group=4, routed_scaling_factor=2.5,
            **DEEPSEEK_V3, rope_scaling=DEEPSEEK_V2_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0}, **UNTIED)),
        "moonshotai/Kimi-K2-Instruct": (1026e9, config(
            "DeepseekV3ForCausalLM", 7168, 18432, 61, (64, 64), 163840, 131072, rope_theta=50000.0,
            n_routed_experts=384, num_experts_per_tok=8, moe_intermediate_size=2048,
            n_group=1, topk_group=1, routed_scaling_factor=2.827,
            **DEEPSEEK_V3 | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
            rope_scaling=DEEPSEEK_V2_ROPE | {"factor": 32.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            **UNTIED)),
        "zai-org/GLM-4.7-Flash": (29.9e9, config(
            "Glm4MoeLiteForCausalLM", 2048, 10240, 47, (20, 20), 154880, 202752, rope_theta=1000000, kv_lora_rank=512,
            q_lora_rank=768, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, n_routed_experts=64,
            n_shared_experts=1, num_experts_per_tok=4, moe_intermediate_size=1536, first_k_dense_replace=1,
            norm_topk_prob=True, routed_scaling_factor=1.8, n_group=1, topk_group=1, topk_method="noaux_tc",
            rms_norm_eps=1e-5, num_nextn_predict_layers=1, **UNTIED)),
        "Qwen/Qwen3-Next-80B-A3B-Instruct": (79.7e9, config(
            "Qwen3NextForCausalLM", 2048, 5120, 48, (16, 2), 151936, 262144, head_dim=256, rope_theta=10000000,
            partial_rotary_factor=0.25, full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=128,
            linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128, num_experts=512,
            num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
            decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, **UNTIED)),
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31.58e9, config(
            "NemotronHForCausalLM", 2688, 1856, 52, (32, 2), 131072, 262144, head_dim=128, mamba_num_heads=64,
            mamba_head_dim=64, hybrid_override_pattern=NANO, n_routed_experts=128, num_experts_per_tok=6,
            moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712, **NEMOTRON_H, **UNTIED)),
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": (120.6e9, config(
            "NemotronHForCausalLM", 4096, 2688, 88, (32, 2), 131072, 262144, head_dim=128, mamba_num_heads=128,
            mamba_head_dim=64, hybrid_override_pattern=SUPER, n_routed_experts=512, num_experts_per_tok=22,
            moe_intermediate_size=2688, moe_shared_expert_intermediate_size=5376, moe_latent_size=1024,
            num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E",
            **NEMOTRON_H | {"routed_scaling_factor": 5.0}, **UNTIED)),
        "ibm-granite/granite-4.0-h-tiny": (6.94e9, config(
            "GraniteMoeHybridForCausalLM", 1536, 512, 40, (12, 4), 100352, 131072, attention_multiplier=0.0078125,
            logits_scaling=6, layer_types=["attention" if i % 10 == 5 else "mamba" for i in range(40)],
            num_local_experts=64, num_experts_per_tok=6, position_embedding_type="nope",
            shared_intermediate_size=1024, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128, mamba_expand=2,
            **GRANITE)),
        "ibm-granite/granite-4.0-h-small": (32.2e9, config(
            "GraniteMoeHybridForCausalLM", 4096, 768, 40, (32, 8), 100352, 131072, attention_multiplier=0.0078125,
            logits_scaling=16, layer_types=["attention" if i % 10 == 5 else "mamba" for i in range(40)],
            num_local_experts=72, num_experts_per_tok=10, position_embedding_type="nope",
            shared_intermediate_size=1536, mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128, mamba_expand=2,
            **GRANITE)),
        "MiniMaxAI/MiniMax-M2": (229e9, config(
            "MiniMaxM2ForCausalLM", 3072, 1536, 62, (48, 8), 200064, 196608, head_dim=128, rotary_dim=64,
            rope_theta=5000000, num_local_experts=256, num_experts_per_tok=8, scoring_func="sigmoid",
            use_routing_bias=True, use_qk_norm=True, qk_norm_type="per_layer", **UNTIED)),
        "XiaomiMiMo/MiMo-7B-RL": (7.62e9, config(
            "MiMoForCausalLM", 4096, 11008, 36, (32, 8), 151680, 32768, head_dim=128, rope_theta=640000,
            attention_bias=True, rms_norm_eps=1e-5, num_nextn_predict_layers=1, **UNTIED)),
        "baidu/ERNIE-4.5-21B-A3B-PT": (21.83e9, config(
            "Ernie4_5_MoeForCausalLM", 2560, 12288, 28, (20, 4), 103424, 131072, rope_theta=500000, use_bias=False,
            moe_num_experts=64, moe_k=6, moe_intermediate_size=1536, moe_num_shared_experts=2, moe_layer_interval=1,
            moe_layer_start_index=1, moe_layer_end_index=27, num_nextn_predict_layers=1, **TIED)),
        "baidu/ERNIE-4.5-300B-A47B-PT": (300e9, config(
            "Ernie4_5_MoeForCausalLM", 8192, 28672, 54, (64, 8), 103424, 131072, rope_theta=500000, use_bias=False,
            moe_num_experts=64, moe_k=8, moe_intermediate_size=3584, moe_num_shared_experts=0, moe_layer_interval=1,
            moe_layer_start_index=3, moe_layer_end_index=53, **UNTIED)),
        "meta-llama/Llama-4-Scout-17B-16E-Instruct": (107.8e9, {
            "architectures": ["Llama4ForConditionalGeneration"],
            "text_config": config(
                "", 5120, 8192, 48, (40, 8), 202048, 10485760, head_dim=128, intermediate_size_mlp=16384,
                num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1, use_qk_norm=True,
                attention_chunk_size=8192, no_rope_layers=[1, 1, 1, 0] * 12, rope_theta=500000.0,
                rope_scaling=LLAMA4_ROPE, **UNTIED)}),
        "meta-llama/Llama-4-Maverick-17B-128E-Instruct": (400.7e9, {
            "architectures": ["Llama4ForConditionalGeneration"],
            "text_config": config(
                "", 5120, 8192, 48, (40, 8), 202048, 1048576, head_dim=128, intermediate_size_mlp=16384,
                num_local_experts=128, num_experts_per_tok=1, interleave_moe_layer_step=2, use_qk_norm=False,
                attention_chunk_size=8192, no_rope_layers=[1, 1, 1, 0] * 12, rope_theta=500000.0, **UNTIED)}),
        "google/gemma-4-E2B-it": (4.63e9, gemma4(
            1536, 6144, 35, (8, 1), layer_types=[*THREE_OF_FOUR[:1], *THREE_OF_FOUR] * 7, sliding_window=512,
            hidden_size_per_layer_input=256, num_kv_shared_layers=20, use_double_wide_mlp=True)),
        "google/gemma-4-E4B-it": (7.46e9, gemma4(
            2560, 10240, 42, (8, 2), layer_types=FIVE_OF_SIX * 7, sliding_window=512, hidden_size_per_layer_input=256,
            num_kv_shared_layers=18, use_double_wide_mlp=False)),
        "google/gemma-4-31B-it": (30.7e9, gemma4(
            5376, 21504, 60, (32, 16), layer_types=FIVE_OF_SIX * 10, sliding_window=1024, hidden_size_per_layer_input=0,
            num_global_key_value_heads=4, attention_k_eq_v=True, use_bidirectional_attention="vision")),
        "google/gemma-4-26B-A4B-it": (25.2e9, gemma4(
            2816, 2112, 30, (16, 8), layer_types=FIVE_OF_SIX * 5, sliding_window=1024, hidden_size_per_layer_input=0,
            num_global_key_value_heads=2, attention_k_eq_v=True, use_bidirectional_attention="vision",
            enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704)),
    }
)  # fmt: skip
"""Their parameters, and what config.json says that matters here."""


def spec(name: str) -> ModelSpec:
    return read_spec(PUBLISHED[name][1])


ACTIVE = MappingProxyType(
    {
        "Qwen/Qwen1.5-MoE-A2.7B": 2.7e9,
        "Qwen/Qwen2-57B-A14B-Instruct": 14e9,
        "allenai/OLMoE-1B-7B-0924": 1.3e9,
        "ibm-granite/granite-3.1-1b-a400m-instruct": 0.4e9,
        "ibm-granite/granite-3.1-3b-a800m-instruct": 0.8e9,
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 3.5e9,
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": 12e9,
        "ibm-granite/granite-4.0-h-small": 9e9,
        "deepseek-ai/DeepSeek-V2-Lite": 2.4e9,
        "deepseek-ai/DeepSeek-V2": 21e9,
        "deepseek-ai/DeepSeek-V3": 37e9,
        "moonshotai/Kimi-K2-Instruct": 32e9,
        "zai-org/GLM-4.5-Air": 12e9,
        "zai-org/GLM-4.6": 32e9,
        "Qwen/Qwen3-Next-80B-A3B-Instruct": 3.9e9,
        "MiniMaxAI/MiniMax-M2": 10e9,
        "baidu/ERNIE-4.5-21B-A3B-PT": 3e9,
        "baidu/ERNIE-4.5-300B-A47B-PT": 47e9,
        "google/gemma-4-26B-A4B-it": 3.8e9,
        "meta-llama/Llama-4-Scout-17B-16E-Instruct": 17e9,
        "meta-llama/Llama-4-Maverick-17B-128E-Instruct": 17e9,
    }
)
"""What publishers say that a token uses: some do not count embeddings, which are up to an eighth."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_of_a_published_model_add_up(name: str) -> None:
    count, _ = PUBLISHED[name]
    found = parameters(spec(name))
    assert found == pytest.approx(count, rel=0.005)
    if name in ACTIVE:
        assert found - idle_parameters(spec(name)) == pytest.approx(ACTIVE[name], rel=0.125)


MANY_TENSORS = (
    "deepseek-ai/DeepSeek-V2",
    "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V3.2",
    "moonshotai/Kimi-K2-Instruct",
    "zai-org/GLM-4.6",
    "MiniMaxAI/MiniMax-M2",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    "openai/gpt-oss-120b",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "zai-org/GLM-4.5-Air",
    "baidu/ERNIE-4.5-300B-A47B-PT",
)
"""Models of so many matrices that only `make nightly` makes plans for them."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in MANY_TENSORS else ()) for name in PUBLISHED]
)
def test_inspect_and_plan_know_a_published_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name][1]))
    settings = Settings.of(model=str(tmp_path))
    facts = read_facts(settings)
    said = dict(shapes(facts))
    assert said["architecture"] in ARCHITECTURES
    assert said["context"].endswith(" tokens")
    plan = dict(plan_lines(settings, facts, 1 << 40, torch.device("cpu")))
    assert plan["weights"] == PACKED.get(name, amount(2 * parameters(facts.spec)))


def test_experts_and_heads_of_published_models_are_told(tmp_path: Path) -> None:
    def told(name: str) -> dict[str, str]:
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name][1]))
        return dict(shapes(read_facts(Settings.of(model=str(tmp_path)))))

    ernie = told("baidu/ERNIE-4.5-21B-A3B-PT")
    assert ernie["experts"] == "6 of 64 a token, of width 1536, beside a shared one of width 3072, layers 0 dense"
    gemma = told("google/gemma-4-26B-A4B-it")
    assert gemma["heads"] == (
        "16 of queries, 8 of keys and values, 256 numbers each; 2 of keys and values, 512 numbers each"
    )
    assert gemma["rope"] == "base 10,000 over 256 numbers of a head; base 1,000,000 over 128 numbers of a head"
    scout = told("meta-llama/Llama-4-Scout-17B-16E-Instruct")
    assert scout["attention"] == "36 of 48 layers see their own chunk of 8,192 positions"
    assert scout["context"] == "10,485,760 tokens"
    assert told("google/gemma-4-E2B-it")["KV a token, as activations"].startswith("18,432 bytes")


def test_routers_and_layers_of_published_mixtures_are_as_they_were_published() -> None:
    glm, ernie, scout = map(
        spec, ("zai-org/GLM-4.6", "baidu/ERNIE-4.5-300B-A47B-PT", "meta-llama/Llama-4-Scout-17B-16E-Instruct")
    )
    assert glm.experts and glm.experts.choice == TopK(8, True, sigmoid=True, scale=2.5)
    assert glm.experts.dense_layers == {0, 1, 2}
    assert ernie.experts and ernie.experts.choice == TopK(8, True, floor=1e-12)
    assert ernie.experts.dense_layers == {0, 1, 2}
    assert (scout.context, [rope.dim for rope in scout.layer_ropes[:4]]) == (10485760, [128, 128, 128, 0])
    assert scout.chunks == (8192, 8192, 8192, UNLIMITED) * 12
    maverick = spec("meta-llama/Llama-4-Maverick-17B-128E-Instruct")
    assert maverick.experts and maverick.experts.dense_layers == set(range(0, 48, 2))
    assert spec("MiniMaxAI/MiniMax-M2").rope.dim == 64


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # DeepSeek says 14 B with another embedding and head, which are the model's here.
        pytest.param("deepseek-ai/DeepSeek-V3", 14e9 - 2 * 129280 * 7168, marks=pytest.mark.nightly),
        ("moonshotai/Kimi-K2-Instruct", 0),
        # MiMo says 7.83 B with the layer. ERNIE's has an MLP of the dense layer's width.
        ("XiaomiMiMo/MiMo-7B-RL", 0.21e9),
        ("baidu/ERNIE-4.5-21B-A3B-PT", 2560 * (2 * 2560 + 2 * 2560 + 2 * 512 + 3 * 12288)),
    ],
)
def test_layers_for_multi_token_prediction_are_counted_where_they_are_published(name: str, count: float) -> None:
    assert draft_parameters(PUBLISHED[name][1]) == pytest.approx(count, rel=0.07)


@pytest.mark.parametrize(
    "name",
    [
        "zai-org/GLM-4.7-Flash",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("zai-org/GLM-4.5-Air", "Qwen/Qwen3-Next-80B-A3B-Instruct")
        ),
    ],
)
def test_a_layer_for_multi_token_prediction_is_about_as_large_as_any_other(name: str) -> None:
    layer, whole = draft_parameters(PUBLISHED[name][1]), parameters(spec(name))
    assert 0.5 < layer * spec(name).layers / whole < 1.5


def test_deepseek_v32_has_an_indexer_where_sequences_may_be_longer_than_what_it_chooses() -> None:
    whole, dense = spec("deepseek-ai/DeepSeek-V3.2"), spec("deepseek-ai/DeepSeek-V3")
    assert whole.context == 163840
    assert whole.latent is not None and whole.latent.index == IndexConfig(heads=64, dim=128, top=2048, rotated=64)
    assert whole.kv_bytes(2) == 61 * 2 * (512 + 64 + 128)
    assert whole.for_length(2049) == whole.for_length(None) == whole
    short = whole.for_length(2048)
    assert (short.latent, short.kv_bytes(2)) == (dense.latent, dense.kv_bytes(2))
    indexer = 64 * 128 * 1536 + (128 + 64) * 7168 + 2 * 128
    assert parameters(whole) - parameters(short) == 61 * indexer


def test_layers_without_rotary_embedding_and_windows_are_where_they_were_published() -> None:
    smollm, cohere, exaone = map(
        spec, ("HuggingFaceTB/SmolLM3-3B", "CohereLabs/c4ai-command-r7b-12-2024", "LGAI-EXAONE/EXAONE-4.0-32B")
    )
    assert [rope.dim for rope in smollm.layer_ropes[:4]] == [128, 128, 128, 0]
    assert set(smollm.windows) == {UNLIMITED}
    for each in (cohere, exaone):
        assert [rope.dim for rope in each.layer_ropes[:5]] == [128, 128, 128, 0, 128]
        assert each.windows[:5] == (4096, 4096, 4096, UNLIMITED, 4096)
    assert cohere.layer_ropes[0].interleaved
    olmo = spec("allenai/Olmo-3-1025-7B")
    assert [rope.kind for rope in olmo.layer_ropes[:4]] == ["default", "default", "default", "yarn"]
    assert (olmo.rope.gain, olmo.context) == (1.2079441541679836, 65536)
    assert {rope.dim for rope in spec("LGAI-EXAONE/EXAONE-4.0-1.2B").layer_ropes} == {64}


def test_gpt_oss_has_windows_in_every_other_layer_and_uses_few_of_its_parameters() -> None:
    small, large = spec("openai/gpt-oss-20b"), spec("openai/gpt-oss-120b")
    assert small.windows[:3] == (128, UNLIMITED, 128)
    assert (small.rope.kind, small.rope.full_dim, small.context) == ("yarn", False, 131072)
    assert small.rope.gain == pytest.approx(1.3465736)
    # As published, without the embedding: 3.61 B and 5.13 B.
    used = [parameters(each) - idle_parameters(each) - each.vocab * each.hidden for each in (small, large)]
    assert used == [pytest.approx(3.61e9, rel=0.005), pytest.approx(5.13e9, rel=0.005)]


def test_scales_and_rotations_are_those_published() -> None:
    granite = spec("ibm-granite/granite-3.3-8b-instruct")
    scales = granite.scale, granite.embedding_scale, granite.residual_scale, granite.logit_scale
    assert scales == (0.0078125, 12.0, 0.22, 1 / 16)
    phi = spec("microsoft/Phi-4-mini-instruct")
    assert (phi.rope.dim, phi.rope.factors) == (96, (8.0,) * 48)
    assert phi.rope.gain == pytest.approx(1.1902381)
    assert phi.for_length(4096).rope.factors == (1.0,) * 48
    assert phi.for_length(4097).rope.factors == (8.0,) * 48
    mixture = spec("microsoft/Phi-3.5-MoE-instruct")
    assert (mixture.rope.factors, mixture.rope.gain) == ((8.0,) * 64, 1.3)
    assert (mixture.for_length(4096).rope.factors, mixture.for_length(4096).rope.gain) == ((1.0,) * 64, 1.2)
    assert mixture.experts and mixture.experts.choice == TopK(2, False, margin=0.02)
    assert spec("zai-org/GLM-4-9B-0414").rope.dim == spec("zai-org/glm-4-9b-chat-hf").rope.dim == 64
    assert spec("nvidia/Minitron-4B-Base").rope.dim == 64
    assert spec("tencent/Hunyuan-7B-Instruct").rope.theta == pytest.approx(11158840, rel=1e-4)
    internlm = spec("internlm/internlm3-8b-instruct")
    assert (internlm.rope.kind, internlm.rope.theta, internlm.context) == ("default", 5e7, 32768)
    ministral = spec("mistralai/Ministral-3-8B-Instruct-2512")
    assert (ministral.rope.query_beta, ministral.rope.gain, ministral.context) == (0.1, 1.0, 262144)
    assert spec("mistralai/Mistral-Small-3.2-24B-Instruct-2506").rope.query_beta == 0.0
