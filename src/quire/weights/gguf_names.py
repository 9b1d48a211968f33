"""What llama.cpp calls architectures and their tensors, and what transformers does."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

LLAMA_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}_exps": f"mlp.experts.#.{part}_proj" for part in ("gate", "up", "down")},
}
MIXTRAL_NAMES: Mapping[str, str] = {
    **LLAMA_NAMES,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.#.w1",
    "ffn_up_exps": "block_sparse_moe.experts.#.w3",
    "ffn_down_exps": "block_sparse_moe.experts.#.w2",
}
GPT2_NAMES: Mapping[str, str] = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
SANDWICH_NAMES: Mapping[str, str] = {
    **LLAMA_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED_NAMES: Mapping[str, str] = {**LLAMA_NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
SHARED_NAMES: Mapping[str, str] = {
    f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
QWEN2_MOE_NAMES: Mapping[str, str] = {
    **LLAMA_NAMES,
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
GRANITE_MOE_NAMES: Mapping[str, str] = {
    **LLAMA_NAMES,
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"ffn_{part}_exps": f"block_sparse_moe.experts.#.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": "shared_mlp.input_linear" for part in ("gate", "up")},
    "ffn_down_shexp": "shared_mlp.output_linear",
}
NEXTN_NAMES: Mapping[str, str] = {
    **{f"nextn.{part}": part for part in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    **{f"nextn.shared_head_{part}": f"shared_head.{part}" for part in ("norm", "head")},
}
"""Names of a layer for multi-token prediction, which is numbered after the others."""
GLM4_MOE_NAMES: Mapping[str, str] = {
    # Where two names stand for one tensor, the first is written.
    "post_attention_norm": "post_attention_layernorm",
    **LLAMA_NAMES,
    **SHARED_NAMES,
    **NEXTN_NAMES,
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
ERNIE_MOE_NAMES: Mapping[str, str] = {
    **LLAMA_NAMES,
    **SHARED_NAMES,
    "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
}
MINIMAX_NAMES: Mapping[str, str] = {
    **MIXTRAL_NAMES,
    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
}
LLAMA4_NAMES: Mapping[str, str] = {
    **{part: name.replace("mlp.", "feed_forward.") for part, name in LLAMA_NAMES.items()},
    **{f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "feed_forward.router",
}
GPT_OSS_NAMES: Mapping[str, str] = {
    **LLAMA_NAMES,
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
}
GLM4_NAMES: Mapping[str, str] = {
    **FUSED_NAMES,
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
SEED_NAMES: Mapping[str, str] = {**LLAMA_NAMES, "post_attention_norm": "post_attention_layernorm"}
HUNYUAN_NAMES: Mapping[str, str] = {
    **LLAMA_NAMES,
    **{f"attn_{part}_norm": f"self_attn.{word}_layernorm" for part, word in (("q", "query"), ("k", "key"))},
}
STARCODER_NAMES: Mapping[str, str] = {**LLAMA_NAMES, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
OUTER: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
GPT2_OUTER: Mapping[str, str] = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
GEMMA_NAMES: Mapping[str, str] = {**SANDWICH_NAMES, "ffn_norm": "pre_feedforward_layernorm"}
GEMMA4_NAMES: Mapping[str, str] = {
    **GEMMA_NAMES,
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps": "experts.gate_up_proj.#",
    "ffn_down_exps": "experts.down_proj.#",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    **{f"post_ffw_norm_{i}": f"post_feedforward_layernorm_{i}" for i in (1, 2)},
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
GEMMA4_OUTER: Mapping[str, str] = {
    **OUTER,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}


SSM_NAMES: Mapping[str, str] = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
"""Of layers of Mamba 2."""
GRANITE_HYBRID_NAMES: Mapping[str, str] = {
    **LLAMA_NAMES,
    **SSM_NAMES,
    **{f"ffn_{part}": "shared_mlp.input_linear" for part in ("gate", "up")},
    "ffn_down": "shared_mlp.output_linear",
}
GRANITE_HYBRID_MOE_NAMES: Mapping[str, str] = {**GRANITE_MOE_NAMES, **SSM_NAMES}
BAMBA_NAMES: Mapping[str, str] = {
    **LLAMA_NAMES,
    **SSM_NAMES,
    "ffn_norm": "pre_ff_layernorm",
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
}
NEMOTRON_H_NAMES: Mapping[str, str] = {
    "attn_norm": "norm",
    **{part: name.replace("mamba.", "mixer.") for part, name in SSM_NAMES.items()},
    **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
    "attn_output": "mixer.o_proj",
    **{f"ffn_{part}": f"mixer.{part}_proj" for part in ("up", "down")},
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    **{f"ffn_{part}_exps": f"mixer.experts.#.{part}_proj" for part in ("up", "down")},
    **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
QWEN_NEXT_NAMES: Mapping[str, str] = {
    # Where two names stand for one tensor, the first is written.
    "post_attention_norm": "post_attention_layernorm",
    **QWEN2_MOE_NAMES,
    **{part: name.replace("mamba.", "linear_attn.") for part, name in SSM_NAMES.items()},
    # Files have either the matrix as it is, or its rows by kind in two.
    **dict.fromkeys(("ssm_in", "attn_qkv", "attn_gate"), "linear_attn.in_proj_qkvz"),
    "ssm_ba": "linear_attn.in_proj_ba",
}
QWEN35_NAMES: Mapping[str, str] = {
    **QWEN_NEXT_NAMES,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    **NEXTN_NAMES,
}
QWEN_DRAFT_NAMES: Mapping[str, str] = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
"""Names of Qwen3.5's tensors for multi-token prediction outside of the layer's block, in a file and in a checkpoint."""
APERTUS_NAMES: Mapping[str, str] = {
    **LLAMA_NAMES,
    "attn_norm": "attention_layernorm",
    "ffn_norm": "feedforward_layernorm",
}
GLM_NAMES: Mapping[str, str] = {**FUSED_NAMES, "attn_qkv": "self_attn.qkv"}


class Family(NamedTuple):
    """What llama.cpp calls an architecture. architecture: in config.json. names: of a layer's tensors, in the file and
    in the checkpoint; outer: of the others; prefix: of layers. interleaved: the converter interleaves the halves of
    heads of q and k, whose rotation llama.cpp knows by neighbours. shift: what it adds to the weights of norms. known:
    fields of config.json that files of the family do not have.
    """

    architecture: str
    names: Mapping[str, str] = LLAMA_NAMES
    outer: Mapping[str, str] = OUTER
    prefix: str = "model.layers"
    interleaved: bool = False
    shift: float = 0.0
    known: Mapping[str, Any] = MappingProxyType({})


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", interleaved=True),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM"),
    "qwen3moe": Family("Qwen3MoeForCausalLM"),
    "qwen2moe": Family("Qwen2MoeForCausalLM", QWEN2_MOE_NAMES, known={"norm_topk_prob": False}),
    "olmoe": Family("OlmoeForCausalLM", known={"norm_topk_prob": False}),
    "granitemoe": Family("GraniteMoeForCausalLM", GRANITE_MOE_NAMES, interleaved=True),
    "glm4moe": Family("Glm4MoeForCausalLM", GLM4_MOE_NAMES),
    "ernie4_5-moe": Family("Ernie4_5_MoeForCausalLM", ERNIE_MOE_NAMES),
    "minimax-m2": Family("MiniMaxM2ForCausalLM", MINIMAX_NAMES),
    "phimoe": Family("PhimoeForCausalLM", MIXTRAL_NAMES),
    "llama4": Family("Llama4ForCausalLM", LLAMA4_NAMES),
    "gpt-oss": Family("GptOssForCausalLM", GPT_OSS_NAMES),
    "gemma": Family("GemmaForCausalLM", shift=1.0),
    "gemma2": Family("Gemma2ForCausalLM", GEMMA_NAMES, shift=1.0),
    "gemma3": Family("Gemma3ForCausalLM", GEMMA_NAMES, shift=1.0),
    "gemma4": Family("Gemma4ForCausalLM", GEMMA4_NAMES, GEMMA4_OUTER),
    "gpt2": Family("GPT2LMHeadModel", GPT2_NAMES, GPT2_OUTER, "transformer.h"),
    "phi3": Family("Phi3ForCausalLM", FUSED_NAMES),
    "olmo2": Family("Olmo2ForCausalLM", SANDWICH_NAMES),
    "granite": Family("GraniteForCausalLM", interleaved=True),
    "glm4": Family("Glm4ForCausalLM", GLM4_NAMES),
    "smollm3": Family("SmolLM3ForCausalLM", interleaved=True),
    "command-r": Family("CohereForCausalLM"),
    "cohere2": Family("Cohere2ForCausalLM"),
    "seed_oss": Family("SeedOssForCausalLM", SEED_NAMES),
    "exaone4": Family("Exaone4ForCausalLM", SANDWICH_NAMES),
    "nemotron": Family("NemotronForCausalLM", shift=1.0),
    "arcee": Family("ArceeForCausalLM", interleaved=True),
    "starcoder2": Family("Starcoder2ForCausalLM", STARCODER_NAMES),
    "hunyuan-dense": Family("HunYuanDenseV1ForCausalLM", HUNYUAN_NAMES),
    "ernie4_5": Family("Ernie4_5ForCausalLM"),
    "mistral3": Family("Ministral3ForCausalLM", interleaved=True),
    "apertus": Family("ApertusForCausalLM", APERTUS_NAMES),
    "chatglm": Family("GlmForCausalLM", GLM_NAMES),
    "granitehybrid": Family("GraniteMoeHybridForCausalLM", GRANITE_HYBRID_NAMES, interleaved=True),
    "nemotron_h": Family("NemotronHForCausalLM", NEMOTRON_H_NAMES),
    "nemotron_h_moe": Family("NemotronHForCausalLM", NEMOTRON_H_NAMES),
    "qwen3next": Family("Qwen3NextForCausalLM", QWEN_NEXT_NAMES, shift=1.0, known={"num_nextn_predict_layers": 0}),
    "qwen35": Family("Qwen3_5ForCausalLM", QWEN35_NAMES, shift=1.0),
    "qwen35moe": Family("Qwen3_5MoeForCausalLM", QWEN35_NAMES, shift=1.0),
}
"""By llama.cpp's names, as its converter and the gguf package have them."""

VARIANTS: Mapping[str, Mapping[str, Family]] = {
    "llama": {
        "expert_count": Family("MixtralForCausalLM", MIXTRAL_NAMES, interleaved=True),
        "attention.sliding_window": Family("MistralForCausalLM", interleaved=True),
    },
    "granitemoe": {
        "expert_shared_feed_forward_length": Family("GraniteMoeSharedForCausalLM", GRANITE_MOE_NAMES, interleaved=True),
    },
    "granitehybrid": {
        "expert_count": Family("GraniteMoeHybridForCausalLM", GRANITE_HYBRID_MOE_NAMES, interleaved=True),
        "rope.scaling.finetuned": Family("BambaForCausalLM", BAMBA_NAMES, interleaved=True),
    },
    "olmo2": {"attention.sliding_window": Family("Olmo3ForCausalLM", SANDWICH_NAMES)},
}
"""What files of one name are, by the fact that only they have."""

RECURRENT = ("granitehybrid", "nemotron_h", "nemotron_h_moe", "qwen3next", "qwen35", "qwen35moe")
"""Architectures with recurrent layers."""

PATTERNS = ("olmo2", "exaone4", "gpt-oss")
"""Architectures whose files say which layers have a window."""
