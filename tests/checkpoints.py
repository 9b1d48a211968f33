"""Tiny checkpoints written by transformers, every parameter random: what our models are compared with.

Norms and biases are drawn too, so that leaving any of them out changes the logits; matrices are scaled so that logits
have a standard deviation of at least 1 and greedy answers wander.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from tests.quantised import mxfp4, pack_experts

VOCAB = 199

LLAMA3_ROPE = MappingProxyType(
    {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    }
)

GEMMA3_ROPE = MappingProxyType(
    {
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
    }
)

LONG_ROPE = MappingProxyType(
    {
        "rope_type": "longrope",
        "rope_theta": 400.0,
        "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
        "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 12.0],
    }
)

MINISTRAL3_ROPE = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 8.0,
        "beta_slow": 0.7,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.5,
    }
)

GPT_OSS_ROPE = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 700.0,
        "factor": 8.0,
        "original_max_position_embeddings": 24,
        "beta_fast": 8.0,
        "beta_slow": 0.7,
        "truncate": False,
    }
)

LLAMA4 = MappingProxyType(
    {
        "intermediate_size": 33,
        "intermediate_size_mlp": 70,
        "no_rope_layer_interval": 3,
        "attention_chunk_size": 24,
        "floor_scale": 11,
        "attn_scale": 0.6,
    }
)

DEEPSEEK_ROPE = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 300.0,
        "factor": 6.0,
        "original_max_position_embeddings": 24,
        "beta_fast": 8.0,
        "beta_slow": 0.7,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    }
)

INDEXER = MappingProxyType({"index_topk": 8, "index_n_heads": 16, "index_head_dim": 16})
"""Few tokens, so that every prompt meets a choice, and many heads: where all of them see nothing in a key its score is
0, and torch chooses among equal scores as it likes."""

LATENTS = MappingProxyType({"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "kv_lora_rank": 20, "v_head_dim": 12})

DELTA = MappingProxyType(
    {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 10,
        "linear_conv_kernel_dim": 4,
    }
)

MAMBA = MappingProxyType(
    {"mamba_n_heads": 6, "mamba_n_groups": 1, "mamba_d_state": 11, "mamba_expand": 2, "mamba_chunk_size": 16}
)

MAMBA_H = MappingProxyType(
    {
        "mamba_num_heads": 6,
        "mamba_head_dim": 10,
        "n_groups": 3,
        "ssm_state_size": 12,
        "chunk_size": 16,
        "time_step_min": 1e-30,
    }
)

GRANITE_SCALES = MappingProxyType(
    {
        "attention_multiplier": 0.25,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 1.4,
        "logits_scaling": 0.8,
    }
)

GRANITE4 = MappingProxyType(
    {
        "num_local_experts": 0,
        "layer_types": ["full_attention"] * 3,
        "shared_intermediate_size": 90,
        "mamba_n_heads": 1,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 1.2,
        "logits_scaling": 0.8,
    }
)

SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama-gqa-tied": {
            "hidden_size": 72,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
        "llama-mqa-biased-odd-dim": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 22,
            "attention_bias": True,
            "mlp_bias": True,
        },
        "llama-mha-llama3-rope": {
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "num_hidden_layers": 2,
            "rope_parameters": dict(LLAMA3_ROPE),
        },
        "llama-relu": {
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "intermediate_size": 50,
            "hidden_act": "relu",
        },
        "llama-linear-rope": {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
        },
        "mistral-window": {
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "sliding_window": 13,
        },
        "mistral-no-window": {
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "sliding_window": None,
        },
        "mistral-gqa-tied": {
            "hidden_size": 80,
            "num_attention_heads": 10,
            "num_key_value_heads": 5,
            "sliding_window": 2,
            "tie_word_embeddings": True,
        },
        "mimo-gqa": {"hidden_size": 84, "num_attention_heads": 7, "num_key_value_heads": 1},
        "mimo-mha": {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 5},
        "mimo-wide-heads": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 14},
        "qwen2-gqa": {"hidden_size": 84, "num_attention_heads": 14, "num_key_value_heads": 2},
        "qwen2-mha-tied": {
            "hidden_size": 36,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
        "qwen2-mixed-windows": {
            "hidden_size": 60,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
        "qwen3-gqa": {"hidden_size": 40, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 18},
        "qwen3-mha-biased": {
            "hidden_size": 63,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "head_dim": 10,
            "attention_bias": True,
        },
        "qwen3-tied-mixed-windows": {
            "hidden_size": 50,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 21,
            "max_window_layers": 2,
        },
        "llama-yarn": {
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 800.0,
                "factor": 4.0,
                "original_max_position_embeddings": 24,
                "beta_fast": 8.0,
                "beta_slow": 0.7,
            },
        },
        "qwen3-yarn-unrounded": {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 400.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 0.8,
                "truncate": False,
            },
        },
        "qwen2-yarn-mscale": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 600.0,
                "factor": 6.0,
                "original_max_position_embeddings": 20,
                "mscale": 1.2,
                "mscale_all_dim": 0.5,
            },
        },
        "gemma3_text-gqa": {
            "hidden_size": 60,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 14,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 9,
            "query_pre_attn_scalar": 10,
            "rope_parameters": dict(GEMMA3_ROPE),
        },
        "gemma3_text-mqa-capped": {
            "hidden_size": 55,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "sliding_window": 17,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 8,
            "final_logit_softcapping": 4.0,
            "rope_parameters": dict(GEMMA3_ROPE),
        },
        "gemma3_text-untied-pattern-of-six": {
            "hidden_size": 42,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "num_hidden_layers": 7,
            "sliding_window": 5,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
        "gemma4_text-mixture": {
            "hidden_size": 60,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 10,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 9,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 5.0,
            "enable_moe_block": True,
            "num_experts": 7,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
        "gemma4_text-inputs-of-layers": {
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "global_head_dim": 20,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "sliding_window": 7,
            "hidden_size_per_layer_input": 10,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
        "gemma4_text-mha-untied": {
            "hidden_size": 42,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "global_head_dim": 24,
            "num_hidden_layers": 7,
            "sliding_window": 5,
            "hidden_size_per_layer_input": 0,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
        "llama4_text-gqa": {
            **LLAMA4,
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 4,
            "intermediate_size": 40,
            "rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0},
        },
        "llama4_text-mha-some-dense": {
            **LLAMA4,
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "head_dim": 12,
            "num_hidden_layers": 4,
            "num_local_experts": 7,
            "attention_chunk_size": 7,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
            "tie_word_embeddings": True,
        },
        "llama4_text-two-experts": {
            **LLAMA4,
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 33,
            "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
            "floor_scale": 7,
        },
        "gemma2-gqa": {
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 10,
            "sliding_window": 11,
            "query_pre_attn_scalar": 14,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
        "gemma2-mqa-uncapped": {
            "hidden_size": 35,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "head_dim": 18,
            "sliding_window": 7,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        "gemma2-mha-four-layers": {
            "hidden_size": 54,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 24,
            "num_hidden_layers": 4,
            "sliding_window": 4,
            "query_pre_attn_scalar": 30,
            "attn_logit_softcapping": 6.0,
            "final_logit_softcapping": 8.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
        "qwen3_moe-gqa": {
            "hidden_size": 40,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 18,
            "moe_intermediate_size": 24,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
        "qwen3_moe-raw-shares-some-dense": {
            "hidden_size": 54,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 14,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 33,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "mlp_only_layers": [0],
            "decoder_sparse_step": 2,
        },
        "qwen3_moe-one-of-many": {
            "hidden_size": 45,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "moe_intermediate_size": 50,
            "num_experts": 16,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
        },
        "mixtral-gqa": {
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 13,
        },
        "mixtral-three-of-six": {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 12,
            "intermediate_size": 37,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
        },
        "mixtral-all-of-three-tied": {
            "hidden_size": 66,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
        },
        "qwen2_moe-gqa": {
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 50,
            "num_experts": 7,
            "num_experts_per_tok": 3,
        },
        "qwen2_moe-normed-shares-some-dense": {
            "hidden_size": 56,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 33,
            "shared_expert_intermediate_size": 20,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "decoder_sparse_step": 2,
        },
        "qwen2_moe-mha-unbiased": {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 64,
            "num_experts": 16,
            "num_experts_per_tok": 1,
            "qkv_bias": False,
        },
        "olmoe-mha": {
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
        "olmoe-gqa-normed-shares": {
            "hidden_size": 60,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "intermediate_size": 44,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        "olmoe-mqa-one-of-many": {
            "hidden_size": 80,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "intermediate_size": 33,
            "num_experts": 16,
            "num_experts_per_tok": 1,
        },
        "granitemoe-gqa": {
            **GRANITE_SCALES,
            "hidden_size": 60,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
        },
        "granitemoe-mha-tied": {
            **GRANITE_SCALES,
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "intermediate_size": 45,
            "num_local_experts": 4,
            "tie_word_embeddings": True,
            "attention_multiplier": 0.5,
        },
        "granitemoe-mqa-all-of-three": {
            **GRANITE_SCALES,
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "residual_multiplier": 0.9,
        },
        "granitemoeshared-gqa": {
            **GRANITE_SCALES,
            "hidden_size": 60,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
        },
        "granitemoeshared-mha-tied": {
            **GRANITE_SCALES,
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "intermediate_size": 61,
            "num_local_experts": 4,
            "shared_intermediate_size": 21,
            "tie_word_embeddings": True,
            "embedding_multiplier": 0.5,
        },
        "granitemoeshared-mqa-none-shared": {
            **GRANITE_SCALES,
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "intermediate_size": 33,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
        },
        "glm4_moe-gqa": {
            "hidden_size": 40,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
        },
        "glm4_moe-groups": {
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "head_dim": 12,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 21,
            "n_routed_experts": 12,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "use_qk_norm": True,
        },
        "glm4_moe-mqa-raw-shares": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "moe_intermediate_size": 30,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.4,
            "first_k_dense_replace": 0,
        },
        "deepseek_v2-plain-queries": {
            "hidden_size": 48,
            "num_attention_heads": 6,
            **LATENTS,
            "q_lora_rank": None,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.4,
        },
        "deepseek_v2-groups-yarn": {
            "hidden_size": 56,
            "num_attention_heads": 7,
            **LATENTS,
            "q_lora_rank": 18,
            "moe_intermediate_size": 21,
            "n_routed_experts": 12,
            "n_shared_experts": 1,
            "num_experts_per_tok": 5,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "rope_parameters": dict(DEEPSEEK_ROPE),
        },
        "deepseek_v2-one-head-wide-values": {
            "hidden_size": 48,
            "num_attention_heads": 1,
            **LATENTS,
            "v_head_dim": 30,
            "kv_lora_rank": 34,
            "q_lora_rank": None,
            "num_hidden_layers": 2,
            "moe_intermediate_size": 33,
            "n_routed_experts": 5,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": True,
        },
        "deepseek_v3-groups-yarn": {
            "hidden_size": 40,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            **LATENTS,
            "q_lora_rank": 22,
            "moe_intermediate_size": 24,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": dict(DEEPSEEK_ROPE),
        },
        "deepseek_v3-plain-queries": {
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            **LATENTS,
            "q_lora_rank": None,
            "moe_intermediate_size": 21,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
        "deepseek_v3-biased-halves": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            **LATENTS,
            "qk_rope_head_dim": 10,
            "kv_lora_rank": 17,
            "q_lora_rank": 25,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 30,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "attention_bias": True,
            "rope_interleave": False,
        },
        "deepseek_v32-groups-yarn": {
            "hidden_size": 40,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            **LATENTS,
            **INDEXER,
            "q_lora_rank": 22,
            "moe_intermediate_size": 24,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": dict(DEEPSEEK_ROPE),
        },
        "deepseek_v32-all-experts": {
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            **LATENTS,
            **INDEXER,
            "index_topk": 21,
            "index_head_dim": 8,
            "q_lora_rank": 30,
            "moe_intermediate_size": 21,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
        },
        "deepseek_v32-biased": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            **LATENTS,
            **INDEXER,
            "index_topk": 5,
            "index_n_heads": 17,
            "kv_lora_rank": 17,
            "q_lora_rank": 25,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 30,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "attention_bias": True,
        },
        "qwen3_5_text-shared-keys": {
            "hidden_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            **DELTA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        },
        "qwen3_5_text-tied-by-interval": {
            "hidden_size": 56,
            "full_attention_interval": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 32,
            **DELTA,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 16,
            "tie_word_embeddings": True,
        },
        "qwen3_5_text-biased-one-key-head": {
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            **DELTA,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
        "qwen3_5_moe_text-shared-keys": {
            "hidden_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            **DELTA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "moe_intermediate_size": 21,
            "shared_expert_intermediate_size": 30,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
        "qwen3_5_moe_text-by-interval": {
            "hidden_size": 56,
            "full_attention_interval": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 32,
            **DELTA,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 18,
            "num_experts": 5,
            "num_experts_per_tok": 2,
        },
        "qwen3_5_moe_text-tied-one-key-head": {
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            **DELTA,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "moe_intermediate_size": 28,
            "shared_expert_intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": True,
        },
        "bamba-gqa": {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            **MAMBA,
            "attn_layer_indices": [1],
        },
        "bamba-groups-biased": {
            "hidden_size": 40,
            "num_hidden_layers": 4,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            **MAMBA,
            "mamba_n_heads": 10,
            "mamba_n_groups": 5,
            "mamba_d_conv": 3,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "mlp_bias": True,
            "attn_layer_indices": [0, 3],
        },
        "bamba-tied-narrow-state": {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            **MAMBA,
            "mamba_n_heads": 16,
            "mamba_d_state": 5,
            "mamba_expand": 1,
            "time_step_limit": [0.2, 2.0],
            "attn_layer_indices": [2],
            "tie_word_embeddings": True,
        },
        "nemotron_h-gqa": {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            **MAMBA_H,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
        },
        "nemotron_h-attention-last": {
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "head_dim": 12,
            **MAMBA_H,
            "n_groups": 1,
            "use_bias": True,
            "mlp_bias": True,
            "layers_block_type": ["linear_attention", "linear_attention", "mlp", "full_attention"],
        },
        "nemotron_h-recurrent-last": {
            "hidden_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 20,
            **MAMBA_H,
            "conv_kernel": 3,
            "use_conv_bias": False,
            "layers_block_type": ["full_attention", "mlp", "linear_attention", "mlp", "linear_attention"],
        },
        "nemotron_h-experts": {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            **MAMBA_H,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 30,
            "moe_shared_expert_intermediate_size": 44,
            "routed_scaling_factor": 2.5,
        },
        "nemotron_h-latent-experts": {
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 12,
            **MAMBA_H,
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 25,
            "moe_shared_expert_intermediate_size": 32,
            "moe_latent_size": 16,
            "norm_topk_prob": False,
            "mlp_bias": True,
        },
        "qwen3_next-shared-keys": {
            "hidden_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            **DELTA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "moe_intermediate_size": 21,
            "shared_expert_intermediate_size": 30,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
        "qwen3_next-biased-dense-between": {
            "hidden_size": 56,
            "full_attention_interval": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 32,
            **DELTA,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 16,
            "attention_bias": True,
            "decoder_sparse_step": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 18,
            "num_experts": 5,
            "num_experts_per_tok": 2,
        },
        "qwen3_next-one-key-head": {
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            **DELTA,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "mlp_only_layers": [1],
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
        "glm4_moe_lite-gqa": {
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            **LATENTS,
            "q_lora_rank": 16,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
        },
        "glm4_moe_lite-every-layer": {
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            **LATENTS,
            "v_head_dim": 24,
            "kv_lora_rank": 26,
            "q_lora_rank": 30,
            "mlp_layer_types": ["sparse"] * 3,
            "moe_intermediate_size": 21,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "tie_word_embeddings": True,
        },
        "glm4_moe_lite-mixed-layers": {
            "hidden_size": 36,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            **LATENTS,
            "qk_nope_head_dim": 24,
            "q_lora_rank": 12,
            "num_hidden_layers": 4,
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "moe_intermediate_size": 33,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.2,
        },
        "minimax_m2-gqa": {
            "hidden_size": 40,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rotary_dim": 8,
            "intermediate_size": 24,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
        },
        "minimax_m2-mha-tied": {
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "head_dim": 12,
            "intermediate_size": 33,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": True,
        },
        "minimax_m2-mqa-one-of-many": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "rotary_dim": 10,
            "intermediate_size": 40,
            "num_local_experts": 16,
            "num_experts_per_tok": 2,
        },
        "ernie4_5_moe-gqa": {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 24,
            "moe_num_experts": 8,
            "moe_k": 3,
        },
        "ernie4_5_moe-mha-none-shared": {
            "hidden_size": 36,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "moe_intermediate_size": 33,
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": False,
        },
        "ernie4_5_moe-mqa-biased": {
            "hidden_size": 40,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "moe_intermediate_size": 21,
            "moe_num_experts": 4,
            "moe_k": 2,
            "use_bias": True,
        },
        "ernie4_5_moe-mqa-every-other-layer": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "num_hidden_layers": 5,
            "moe_intermediate_size": 20,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 4,
            "moe_layer_interval": 2,
        },
        "olmo2-gqa": {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2},
        "olmo2-mha": {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 7},
        "olmo2-mqa-biased-llama3-rope": {
            "hidden_size": 88,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "rope_parameters": dict(LLAMA3_ROPE),
        },
        "phi3-gqa-partly-rotated": {
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.75},
            "sliding_window": 17,
        },
        "phi3-mqa-tied-long-factors": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 1,
            "rope_parameters": {**LONG_ROPE, "original_max_position_embeddings": 1, "attention_factor": 1.3},
        },
        "phi3-mha-short-factors": {
            "hidden_size": 36,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "original_max_position_embeddings": 512,
            "rope_parameters": {**LONG_ROPE, "original_max_position_embeddings": 512, "factor": 4.0},
        },
        "phimoe-gqa": {
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "intermediate_size": 40,
            "num_local_experts": 6,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.12,
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                **LONG_ROPE,
                "short_factor": [1.0, 1.1, 1.6, 2.5],
                "long_factor": [1.0, 2.0, 4.0, 8.0],
                "original_max_position_embeddings": 512,
                "short_mscale": 1.2,
                "long_mscale": 1.7,
            },
        },
        "phimoe-mqa-long": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
            "intermediate_size": 33,
            "num_local_experts": 4,
            "sliding_window": 13,
            "router_jitter_noise": 0.02,
            "original_max_position_embeddings": 1,
            # transformers has no other factors for long sequences, but another scale.
            "rope_parameters": {
                **LONG_ROPE,
                "long_factor": LONG_ROPE["short_factor"],
                "original_max_position_embeddings": 1,
                "attention_factor": 1.0,
                "short_mscale": 0.7,
                "long_mscale": 1.3,
            },
        },
        "phimoe-mha-tied": {
            "hidden_size": 54,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "intermediate_size": 40,
            "num_local_experts": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 900.0},
        },
        "olmo3-gqa-yarn": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "num_hidden_layers": 4,
            "sliding_window": 11,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 800.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 24,
                    "beta_fast": 8.0,
                    "beta_slow": 0.7,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 800.0},
            },
        },
        "olmo3-mha": {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 7, "sliding_window": 6},
        "olmo3-global-first": {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 19,
        },
        "granite-gqa": {
            "hidden_size": 60,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 1.7,
            "logits_scaling": 0.7,
        },
        "granite-mha-tied-biased": {
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "attention_multiplier": 0.5,
            "embedding_multiplier": 0.5,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.5,
        },
        "granite-mqa": {
            "hidden_size": 80,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 2.2,
            "logits_scaling": 0.8,
        },
        "granitemoehybrid-mamba": {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 70,
            **GRANITE_SCALES,
            **MAMBA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        "granitemoehybrid-mamba-experts": {
            "hidden_size": 40,
            "num_hidden_layers": 4,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "shared_intermediate_size": 30,
            **GRANITE_SCALES,
            **MAMBA,
            "mamba_n_heads": 10,
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "position_embedding_type": "rope",
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        },
        "granitemoehybrid-mamba-tied": {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_local_experts": 0,
            "shared_intermediate_size": 50,
            **GRANITE_SCALES,
            **MAMBA,
            "mamba_n_heads": 4,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
        "granitemoehybrid-gqa": {
            **GRANITE4,
            "hidden_size": 60,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "position_embedding_type": "rope",
            "residual_multiplier": 1.4,
        },
        "granitemoehybrid-mqa-tied": {
            **GRANITE4,
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
            "attention_multiplier": 0.4,
        },
        "granitemoehybrid-no-rope": {
            **GRANITE4,
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "shared_intermediate_size": 50,
            "embedding_multiplier": 3.0,
        },
        "glm-gqa": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 12},
        "glm-mha-unbiased": {
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "head_dim": 8,
            "attention_bias": False,
        },
        "glm-mqa-all-rotated": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 1.0},
        },
        "glm4-gqa": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
        "glm4-mha-tied": {
            "hidden_size": 70,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "head_dim": 12,
            "tie_word_embeddings": True,
        },
        "glm4-mqa-unbiased": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "attention_bias": False,
        },
        "smollm3-gqa": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 5},
        "smollm3-mha-every-other": {
            "hidden_size": 54,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "no_rope_layer_interval": 2,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        "smollm3-mqa-windows": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 12,
        },
        "cohere-gqa": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "logit_scale": 1.5},
        "cohere-mha-untied": {
            "hidden_size": 42,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "logit_scale": 0.9,
            "tie_word_embeddings": False,
        },
        "cohere-mqa-biased": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "logit_scale": 2.0,
            "attention_bias": True,
        },
        "cohere-query-norms": {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "use_qk_norm": True,
            "logit_scale": 1.5,
        },
        "cohere2-gqa": {
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_hidden_layers": 5,
            "sliding_window": 13,
            "logit_scale": 1.5,
        },
        "cohere2-mha-global-first": {
            "hidden_size": 42,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 7,
            "logit_scale": 1.2,
            "tie_word_embeddings": False,
        },
        "cohere2-mqa-biased": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 21,
            "attention_bias": True,
            "logit_scale": 2.0,
        },
        "gemma-mqa": {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 14},
        "gemma-mha-untied": {
            "hidden_size": 42,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "tie_word_embeddings": False,
        },
        "gemma-gqa-as-first-published": {
            "hidden_size": 40,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "hidden_act": "gelu",
        },
        "internlm3-gqa": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 12},
        "internlm3-mha-biased": {
            "hidden_size": 63,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "head_dim": 10,
            "attention_bias": True,
            "mlp_bias": True,
        },
        "internlm3-dynamic-rope": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 6.0},
        },
        "ministral-mixed-windows": {
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        "ministral-mqa-window": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "sliding_window": 14,
        },
        "ministral-mha-tied": {
            "hidden_size": 54,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 18,
            "layer_types": ["full_attention"] * 3,
            "tie_word_embeddings": True,
        },
        "ministral3-gqa": {
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "rope_parameters": dict(MINISTRAL3_ROPE),
        },
        "ministral3-mha-tied": {
            "hidden_size": 54,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {**MINISTRAL3_ROPE, "original_max_position_embeddings": 7},
        },
        "ministral3-mqa-window": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "sliding_window": 15,
            "rope_parameters": {**MINISTRAL3_ROPE, "llama_4_scaling_beta": 0.9},
        },
        "seed_oss-gqa": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 12},
        "seed_oss-mha-all-biased": {
            "hidden_size": 54,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "attention_out_bias": True,
            "mlp_bias": True,
        },
        "seed_oss-mqa-unbiased": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "attention_bias": False,
            "attention_out_bias": True,
        },
        "exaone4-gqa": {
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_hidden_layers": 5,
            "sliding_window": 13,
        },
        "exaone4-mqa-all-global": {
            "hidden_size": 50,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 3,
            "rope_parameters": dict(LLAMA3_ROPE),
        },
        "exaone4-mha-global-first": {
            "hidden_size": 36,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        "nemotron-gqa": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2},
        "nemotron-mha-biased": {
            "hidden_size": 60,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 24,
            "attention_bias": True,
            "mlp_bias": True,
        },
        "nemotron-mqa-all-rotated": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "partial_rotary_factor": 1.0,
        },
        "arcee-gqa": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2},
        "arcee-mha-biased": {
            "hidden_size": 60,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "attention_bias": True,
            "mlp_bias": True,
        },
        "arcee-mqa-yarn": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 800.0,
                "factor": 4.0,
                "original_max_position_embeddings": 24,
            },
        },
        "apertus-gqa": {
            "hidden_size": 72,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "rope_parameters": dict(LLAMA3_ROPE),
        },
        "apertus-mha-tied": {
            "hidden_size": 66,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 900.0},
        },
        "apertus-mqa-biased": {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
        "starcoder2-gqa": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 16},
        "starcoder2-mha-untied": {
            "hidden_size": 54,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "tie_word_embeddings": False,
        },
        "starcoder2-mqa-unbiased": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "use_bias": False,
        },
        "hunyuan_v1_dense-gqa": {
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 20.0, "factor": 1.0},
        },
        "hunyuan_v1_dense-mha-tied": {
            "hidden_size": 54,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "tie_word_embeddings": True,
        },
        "hunyuan_v1_dense-mqa-biased": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "attention_bias": True,
        },
        "ernie4_5-gqa": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 12},
        "ernie4_5-mha-untied-biased": {
            "hidden_size": 54,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "use_bias": True,
            "tie_word_embeddings": False,
        },
        "ernie4_5-mqa": {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 20},
        "helium-gqa": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8},
        "helium-mha-biased": {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "attention_bias": True,
        },
        "helium-mqa-tied": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "tie_word_embeddings": True,
        },
        "gpt_oss-gqa": {
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "intermediate_size": 32,
            "sliding_window": 13,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": dict(GPT_OSS_ROPE),
        },
        "gpt_oss-gqa-mxfp4": {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "intermediate_size": 32,
            "sliding_window": 11,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": dict(GPT_OSS_ROPE),
        },
        "gpt_oss-mha-unbiased": {
            "hidden_size": 54,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "intermediate_size": 40,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "sliding_window": 5,
            "num_local_experts": 5,
            "num_experts_per_tok": 1,
            "attention_bias": False,
            "rope_parameters": {**GPT_OSS_ROPE, "original_max_position_embeddings": 40},
        },
        "gpt_oss-mqa-all-global-tied": {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "num_hidden_layers": 2,
            "intermediate_size": 48,
            "layer_types": ["full_attention"] * 2,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 900.0},
        },
        "gpt2-odd-heads": {"hidden_size": 60, "num_attention_heads": 5},
        "gpt2-one-head": {"hidden_size": 32, "num_attention_heads": 1, "num_hidden_layers": 2},
        "gpt2-narrow-mlp-untied": {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "n_inner": 40,
            "tie_word_embeddings": False,
        },
    }
)
"""At least three a family, which differ in every way its members do: see `make`."""

FIRST = frozenset({shape.split("-")[0]: shape for shape in reversed(list(SHAPES))}.values())
"""One of each family."""


_MADE: dict[str, tuple[PreTrainedModel, dict[str, bytes]]] = {}
"""Models of this process and the files of their checkpoints, which are small, by shape and changes."""


def make(folder: Path, shape: str, *, seed: int = 0, shard: str = "5GB", **changes: Any) -> PreTrainedModel:
    """Write the checkpoint `shape` to `folder` and return transformers' model of it, float32, ready to run.

    shard: largest shard, as "20KB". changes: fields of its config. What was made before is copied.
    """
    key = json.dumps([shape, seed, shard, changes], sort_keys=True, default=repr)
    if key not in _MADE:
        if len(_MADE) == 400:  # at night
            _MADE.clear()
        # Or whoever is the first to ask for it would draw other numbers afterwards than others.
        with TemporaryDirectory() as place, torch.random.fork_rng(devices=[]):
            model = _made(Path(place), shape, seed, shard, changes)
            _MADE[key] = model, {path.name: path.read_bytes() for path in Path(place).iterdir()}
    model, files = _MADE[key]
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return copy.deepcopy(model)


def _made(folder: Path, shape: str, seed: int, shard: str, changes: Mapping[str, Any]) -> PreTrainedModel:
    logging.disable_progress_bar()
    fields = {"num_hidden_layers": 3, "intermediate_size": 90, "max_position_embeddings": 512, "vocab_size": VOCAB}
    fields |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    fields |= {"model_type": shape.split("-")[0], **SHAPES[shape], **changes}
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**fields), attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        corrections = (
            (name, buffer) for name, buffer in model.named_buffers() if "correction" in name or "scalar" in name
        )
        for name, parameter in (*model.named_parameters(), *corrections):
            family = fields["model_type"]
            drawn = draw(name, parameter, generator, family)
            if shape.endswith("-mxfp4") and name.endswith((".gate_up_proj", ".down_proj")):
                drawn = mxfp4(drawn.transpose(1, 2))[2].transpose(1, 2)
            parameter.copy_(drawn)
    model.save_pretrained(folder, max_shard_size=shard)
    if shape.endswith("-mxfp4"):
        pack_experts(folder)
    if family == "internlm3":  # transformers has no class of its own for it, and its publishers do
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["InternLM3ForCausalLM"]}))
    return model


class MiMoConfig(Qwen2Config):
    """Published with code of its own, which is Qwen 2's."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig


AutoConfig.register("mimo", MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)

SHIFTED = ("gemma", "gemma2", "gemma3_text", "nemotron", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Norms hold how far they are from 1."""

NORMED_AFTER = ("olmo2", "olmo3", "exaone4")
"""What layers add is normed."""

CALM = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "bamba", "nemotron_h", "granitemoehybrid")
"""Recurrent layers whose matrices are smaller: they would make rounding errors larger from layer to layer."""

UNGATED = ("nemotron", "nemotron_h", "arcee", "starcoder2")
"""MLPs of two matrices, which add little unless these are larger."""


def draw(name: str, parameter: torch.Tensor, generator: torch.Generator, family: str) -> torch.Tensor:
    """A parameter of a model of `family`."""
    shifted, normed_after, ungated = (family in families for families in (SHIFTED, NORMED_AFTER, UNGATED))
    noise = torch.randn(parameter.shape, generator=generator)
    if normed_after and ("post_" in name or "embed" in name):
        # Layers add vectors of length sqrt(hidden): embeddings as large, or answers would repeat themselves.
        return noise + 1.0 if "post_" in name else noise
    if (
        family.startswith("gemma") and "post_" in name
    ):  # Gemma's large embeddings would repeat themselves unless layers add more
        return noise + 7.0
    if shifted and "embed" in name:
        noise = noise * 0.75
    if family.startswith("gemma4") and ("q_norm" in name or "k_norm" in name):
        return 0.2 * noise + 0.5  # scores have no scale of their own
    if "correction" in name:
        return 0.2 * noise
    if name.endswith("linear_attn.norm.weight"):  # of results, the one that holds all of itself
        return 0.3 * noise + 1.0
    if any(part in name for part in ("mamba.", "mixer.in", "mixer.out", "linear_attn.")) and family in CALM:
        noise = 0.6 * noise
    if parameter.dim() == 1:
        return 0.3 * noise + (0.0 if name.endswith("bias") or shifted else 1.0)
    if ungated and ("mlp" in name or "_proj" in name):
        noise = 1.7 * noise
    elif ".c_" in name:  # GPT-2 keeps its matrices the other way round, and repeats itself unless they are larger
        return noise * (3.0 if name.endswith("c_attn.weight") else 2.0) * parameter.shape[0] ** -0.5
    return noise * 1.5 * parameter.shape[-1] ** -0.5


def greedy(model: PreTrainedModel, prompt: Sequence[int], count: int, guess: Sequence[int] = ()) -> list[int]:
    """What transformers says next, `count` tokens, each from the whole sequence without a cache.

    guess: what it may say. As much of it as is right is confirmed in one run; the answer does not depend on it.
    """
    said: list[int] = []
    with torch.no_grad():
        while len(said) < count:
            tried = list(guess[len(said) : count - 1]) if said == list(guess[: len(said)]) else []
            logits = model(torch.tensor([[*prompt, *said, *tried]])).logits[0, len(prompt) + len(said) - 1 :]
            best = logits.argmax(-1).tolist()
            right = next((i for i, (a, b) in enumerate(zip(tried, best, strict=False)) if a != b), len(tried))
            said += best[: right + 1]
    return said
