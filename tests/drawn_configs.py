"""Configurations of every architecture with random values of every field that its config class in transformers has.

A field's values are those that published checkpoints have or might have, in small: `VALUES` draws a field wherever it
occurs, `OWN` those that mean something else in one family. What is left at transformers' default is in `CONSTANT`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from tests.checkpoints import FIRST, VOCAB

CONSTANT = frozenset(
    {
        # Of training, generation and transformers itself.
        *("initializer_range", "initializer_cutoff_factor", "use_cache", "pretraining_tp", "num_logits_to_keep"),
        *("attention_dropout", "residual_dropout", "embedding_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"),
        *("attn_pdrop", "output_router_logits", "router_aux_loss_coef", "z_loss_coefficient", "time_step_max"),
        *("time_step_floor", "rescale_prenorm_residual", "use_mamba_kernels", "input_jitter_noise"),
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
        *("add_cross_attention", "reorder_and_upcast_attn", "ignore_keys_at_rope_validation", "eod_token_id"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
        # Nothing reads them.
        *("expand", "qk_head_dim", "sliding_window_pattern", "mtp_layers_block_type"),
        "num_nextn_predict_layers",
    }
)
"""Fields that keep their default: they change no logits."""


class Draw:
    """One configuration in the making: `fields` of the config class `known`, with sizes that fit each other."""

    def __init__(self, family: str, seed: int) -> None:
        self.family, self.random = family, random.Random(f"{family} {seed}")
        self.known = {*vars(AutoConfig.for_model(family))} - {*vars(PretrainedConfig())}
        self.known = {name for name in self.known if not name.startswith("_")}
        self.layers = self.pick(2, 3, 4, 5)
        self.heads = self.pick(1, 2, 3, 4, 5, 6, 8)
        self.head_dim = self.pick(8, 10, 12, 16, 20, 24, 32)
        own = "head_dim" in self.known and not self.often(3)
        self.hidden = self.heads * (self.pick(8, 11, 15, 20) if own else self.head_dim)
        self.fields: dict[str, Any] = {"model_type": family}
        self.experts = self.pick(2, 3, 4, 6, 8, 12, 16)
        for name in sorted(self.known - CONSTANT):
            draw = OWN.get(family, {}).get(name) or VALUES.get(name)
            if draw is None:
                raise KeyError(f"nothing draws {name} of {family}")
            self.fields[name] = draw(self)
        if not own and family in DERIVED:
            self.fields.pop("head_dim", None)
        self.fields |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        if self.fields.get("hidden_act") == "relu2" and not self.often(4):
            self.fields["hidden_act"] = "silu"
        if self.fields.get("use_sliding_window") or ("layer_types" in self.fields and family != "exaone4"):
            self.fields["sliding_window"] = self.pick(1, 2, 7, 16, 33, 90)
        FINISH.get(family, lambda draw: None)(self)

    def pick(self, *values: Any) -> Any:
        return self.random.choice(values)

    def often(self, times: int) -> bool:
        """Once in `times`."""
        return not self.random.randrange(times)

    def number(self, low: float, high: float) -> float:
        return round(self.random.uniform(low, high), 3)

    def kinds(self, *names: str) -> list[str]:
        """A kind for each layer; each of `names` occurs."""
        drawn = [*names, *(self.pick(*names) for _ in range(self.layers - len(names)))]
        self.random.shuffle(drawn)
        return drawn[: self.layers]

    def divisor(self, number: int) -> int:
        return self.pick(*(each for each in range(1, number + 1) if not number % each))

    def rotated(self) -> int:
        """Dimensions of a head that may be rotated."""
        return self.fields.get("qk_rope_head_dim") or self.head_dim


def rope(draw: Draw, *kinds: str, share: bool = False) -> dict[str, Any]:
    """The parameters of one rotary embedding."""
    kind = draw.pick(*(kinds or ("default", "default", "linear", "dynamic", "yarn", "longrope", "llama3")))
    made: dict[str, Any] = {"rope_type": kind, "rope_theta": draw.pick(10_000.0, 1e6, 300.0, 5000)}
    dim = draw.rotated()
    if share:
        shares = [each for each in (0.25, 0.4, 0.5, 0.75, 1.0) if int(dim * each) % 2 == 0 and int(dim * each) > 2]
        made["partial_rotary_factor"] = draw.pick(*shares)
        dim = int(dim * made["partial_rotary_factor"])
    if kind != "default":
        made["factor"] = draw.pick(1.0, 2.0, 4, 8.0, 40.0)
    if kind in ("yarn", "llama3"):
        made["original_max_position_embeddings"] = draw.pick(8, 16, 32, 64)
    if kind == "llama3":
        low = draw.pick(1.0, 1, 2.0)
        made |= {"low_freq_factor": low, "high_freq_factor": low * draw.pick(2.0, 4)}
    if kind == "yarn":
        optional = {"beta_fast": draw.pick(8, 32.0), "beta_slow": draw.pick(0.7, 1), "truncate": draw.pick(True, False)}
        optional |= {"attention_factor": draw.pick(None, 0.8, 1.3), "mscale": draw.pick(0.7, 1.0, 0)}
        optional |= {"mscale_all_dim": draw.pick(0.9, 1.0, 0)}
        made |= {name: value for name, value in optional.items() if draw.often(2)}
    if kind == "longrope":
        long, short = ([draw.number(1, most) for _ in range(dim // 2)] for most in (12, 3))
        made |= {"long_factor": long, "short_factor": short}
        made["original_max_position_embeddings"] = draw.pick(4, 8, 4096)
        for name, value in (("factor", None), ("attention_factor", draw.pick(0.8, 1.2))):
            if draw.often(2):
                made.pop(name, None) if value is None else made.update({name: value})
    return made


def by_type(draw: Draw) -> dict[str, Any]:
    """A rotary embedding for each type of layers."""
    plain = "default", "linear", "yarn", "llama3"
    return {"full_attention": rope(draw, *plain), "sliding_attention": rope(draw, "default", "default", "linear")}


def unscaled(draw: Draw) -> dict[str, Any]:
    return rope(draw, "default")


def partly(draw: Draw) -> dict[str, Any]:
    return rope(draw, share=True)


def ministral3(draw: Draw) -> dict[str, Any]:
    """Queries grow with their position."""
    made = rope(draw, "yarn")
    return {**made, "llama_4_scaling_beta": draw.pick(0.1, 0.5), "factor": draw.pick(2.0, 16.0)}


def gemma4(draw: Draw) -> dict[str, Any]:
    """Global layers turn a few of their pairs."""
    full = {"rope_type": "proportional", "partial_rotary_factor": draw.pick(0.25, 0.5, 1.0), "rope_theta": 1e6}
    full |= draw.pick({}, {"factor": 2.0})
    return {"full_attention": full, "sliding_attention": rope(draw, "default", "linear")}


def rarely(value: Any) -> Callable[[Draw], Any]:
    """True or False, or `value` more often."""
    return lambda draw: draw.pick(value, value, True, False)


def one_of(*values: Any) -> Callable[[Draw], Any]:
    return lambda draw: draw.pick(*values)


def epsilon(draw: Draw) -> float:
    return draw.pick(1e-6, 1e-5, 1e-8, 0.01, 0.1)


def gain(draw: Draw) -> float:
    return draw.number(0.3, 2.5)


def activation(draw: Draw) -> str:
    return draw.pick("silu", "silu", "silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu", "relu2")


def width(draw: Draw) -> int:
    return draw.pick(17, 24, 32, 45, 64, 90)


def used(draw: Draw) -> int:
    return draw.random.randint(1, draw.experts)


def locals_(draw: Draw) -> list[str] | None:
    return draw.pick(None, draw.kinds("full_attention", "sliding_attention"))


def maybe(field: Callable[[Draw], Any]) -> Callable[[Draw], Any]:
    """None, or as `field` draws it."""
    return lambda draw: None if draw.often(3) else field(draw)


BOOL = one_of(True, False)

VALUES: Mapping[str, Callable[[Draw], Any]] = MappingProxyType(
    {
        "vocab_size": lambda draw: VOCAB,
        "hidden_size": lambda draw: draw.hidden,
        "num_hidden_layers": lambda draw: draw.layers,
        "num_attention_heads": lambda draw: draw.heads,
        "num_key_value_heads": lambda draw: draw.divisor(draw.heads),
        "head_dim": lambda draw: draw.head_dim,
        "intermediate_size": width,
        "moe_intermediate_size": width,
        "shared_intermediate_size": width,
        "shared_expert_intermediate_size": width,
        "intermediate_size_mlp": width,
        "hidden_act": activation,
        "hidden_activation": one_of("gelu_pytorch_tanh", "gelu_pytorch_tanh", "silu", "gelu"),
        "max_position_embeddings": one_of(128, 512, 100),
        "original_max_position_embeddings": one_of(64, 256),
        **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon"), epsilon),
        **dict.fromkeys(
            (
                *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "qkv_bias", "attention_out_bias"),
                *("lm_head_bias", "mamba_conv_bias", "mamba_proj_bias", "use_conv_bias", "use_qk_norm"),
                *("norm_topk_prob", "attn_temperature_tuning", "use_sliding_window", "use_double_wide_mlp"),
            ),
            BOOL,
        ),
        "rope_parameters": rope,
        "rope_interleave": rarely(True),
        "sliding_window": one_of(None, 1, 2, 7, 16, 33, 90),
        "max_window_layers": lambda draw: draw.random.randint(0, draw.layers),
        "layer_types": locals_,
        "query_pre_attn_scalar": one_of(4, 9, 24, 32),
        "final_logit_softcapping": one_of(None, 3.0, 30.0),
        "attn_logit_softcapping": one_of(None, 2.0, 50.0),
        "use_bidirectional_attention": one_of(None),
        "logit_scale": gain,
        **dict.fromkeys(
            ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), gain
        ),
        "routed_scaling_factor": one_of(1.0, 1.4, 2.5),
        "num_experts": lambda draw: draw.experts,
        "num_local_experts": lambda draw: draw.experts,
        "n_routed_experts": lambda draw: draw.experts,
        "moe_num_experts": lambda draw: draw.experts,
        "num_experts_per_tok": used,
        "top_k_experts": used,
        "moe_k": used,
        "n_shared_experts": one_of(1, 2, 3),
        "moe_num_shared_experts": one_of(0, 1, 2),
        "moe_norm_min": one_of(1e-12, 1e-3),
        "n_group": one_of(1),
        "topk_group": one_of(1),
        "topk_method": one_of("greedy"),
        "first_k_dense_replace": lambda draw: draw.random.randint(0, draw.layers),
        "mlp_layer_types": maybe(lambda draw: draw.kinds("dense", "sparse")),
        "mlp_only_layers": lambda draw: draw.pick([], [0], [1], [draw.layers - 1]),
        "decoder_sparse_step": one_of(1, 1, 2, 3),
        "moe_layer_start_index": lambda draw: draw.pick(0, 1),
        "moe_layer_end_index": lambda draw: draw.pick(-1, draw.layers - 1, 1),
        "moe_layer_interval": one_of(1, 1, 2),
        "router_jitter_noise": one_of(0.0, 0.01, 0.2),
        "clip_qkv": one_of(None, None, None, 0.5),
        "q_lora_rank": one_of(None, 12, 30),
        "kv_lora_rank": one_of(12, 20, 34),
        "qk_nope_head_dim": one_of(8, 12, 24),
        "qk_rope_head_dim": one_of(4, 8, 10),
        "v_head_dim": one_of(6, 12, 30),
        "index_topk": one_of(5, 16, 512),
        # Of few heads, whose negative scores are 0, tokens are as good as each other, and any may be chosen.
        "index_n_heads": one_of(16, 17, 24),
        "index_head_dim": one_of(12, 16, 32),
        "no_rope_layers": lambda draw: draw.pick(None, [draw.pick(0, 1) for _ in range(draw.layers)]),
        "no_rope_layer_interval": one_of(1, 2, 3, 4),
        "attention_chunk_size": one_of(5, 16, 33, 512),
        "interleave_moe_layer_step": one_of(1, 2),
        "moe_layers": maybe(lambda draw: sorted(draw.random.sample(range(draw.layers), draw.pick(1, 2)))),
        "floor_scale": one_of(5, 16, 8192),
        "attn_scale": one_of(0.1, 0.5),
        "swiglu_alpha": one_of(1.702),
        "swiglu_limit": one_of(7.0, 7.0, 1.5),
        **dict.fromkeys(("linear_num_key_heads",), one_of(1, 2, 3)),
        "linear_num_value_heads": lambda draw: draw.pick(1, 2, 3) * draw.fields["linear_num_key_heads"],
        "linear_key_head_dim": one_of(8, 12, 16),
        "linear_value_head_dim": one_of(6, 8, 10),
        "linear_conv_kernel_dim": one_of(2, 3, 4),
        "attn_layer_indices": lambda draw: sorted(draw.random.sample(range(draw.layers), draw.pick(1, 2))),
        "mamba_n_heads": one_of(4),
        "mamba_d_head": one_of("auto"),
        "mamba_n_groups": one_of(1, 2, 4),
        "mamba_d_state": one_of(5, 8, 16),
        "mamba_d_conv": one_of(2, 3, 4),
        "mamba_expand": one_of(1, 2, 3),
        "mamba_chunk_size": one_of(8, 16, 256),
        "time_step_limit": one_of((0.0, float("inf")), (0.2, 2.0), (0.0, 0.5)),
        "position_embedding_type": one_of(None, "nope", "rope"),
        # Nemotron-H
        "mlp_hidden_act": one_of("relu2"),
        "mamba_hidden_act": one_of("silu", "silu", "silu", "silu", "gelu"),
        "ssm_state_size": one_of(5, 8, 16),
        "mamba_num_heads": one_of(4, 8),
        "mamba_head_dim": one_of(6, 8, 12),
        "n_groups": one_of(1, 2, 4),
        "conv_kernel": one_of(2, 3, 4),
        "chunk_size": one_of(8, 16, 128),
        "time_step_min": one_of(1e-30),
        "residual_in_fp32": BOOL,
        "moe_shared_expert_intermediate_size": width,
        "moe_latent_size": one_of(None, None, 16, 20),
        "layers_block_type": lambda draw: [
            *draw.kinds("linear_attention", "full_attention"),
            *(draw.pick("linear_attention", "full_attention", "mlp", "moe") for _ in range(3)),
        ],
        # Gemma 4
        "global_head_dim": one_of(16, 24, 32),
        "vocab_size_per_layer_input": lambda draw: VOCAB,
        "hidden_size_per_layer_input": one_of(0, 0, 10, 16),
        "num_global_key_value_heads": lambda draw: draw.pick(None, draw.divisor(draw.heads)),
        "attention_k_eq_v": BOOL,
        "num_kv_shared_layers": one_of(0, 0, 1),
        "enable_moe_block": BOOL,
        # GPT-2
        "n_positions": one_of(128, 512),
        "n_embd": lambda draw: draw.heads * draw.head_dim,
        "n_layer": lambda draw: draw.layers,
        "n_head": lambda draw: draw.heads,
        "n_inner": maybe(width),
        "activation_function": one_of("gelu_new", "gelu_new", "gelu", "relu", "silu"),
        "scale_attn_weights": one_of(True, True, True, False),
        "scale_attn_by_inverse_layer_idx": one_of(False, False, False, True),
    }
)

DERIVED = ("arcee", "llama", "mistral", "mixtral", "olmo2", "phi3")
"""Families in which heads without a named size are as large as hidden_size allows."""

PARTLY = ("glm", "glm4", "glm4_moe", "nemotron", "phi3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families that rotate a part of each head."""

OWN: Mapping[str, Mapping[str, Callable[[Draw], Any]]] = MappingProxyType(
    {
        **{family: {"rope_parameters": partly} for family in PARTLY},
        "bamba": {"rope_parameters": partly, "hidden_act": one_of("silu", "silu", "silu", "silu", "gelu")},
        "granitemoehybrid": {
            "hidden_act": one_of("silu", "silu", "silu", "silu", "gelu"),
            "layer_types": lambda draw: draw.kinds("full_attention", "linear_attention"),
            "num_local_experts": lambda draw: draw.pick(0, draw.experts),
        },
        # Others bound steps by time_step_limit, which transformers ignores for time_step_min: docs/guides/models.md.
        "nemotron_h": {"time_step_limit": one_of((0.0, float("inf")))},
        "granitemoeshared": {"shared_intermediate_size": one_of(0, 24, 45)},
        "deepseek_v32": {
            "q_lora_rank": one_of(12, 30),
            "layer_types": lambda draw: ["indexed_attention"] * draw.layers,
        },
        "ministral3": {"rope_parameters": ministral3},
        "mistral3": {"rope_parameters": ministral3},
        "gemma4_text": {"rope_parameters": gemma4},
        # transformers never normalizes: see `quire.models.deepseek.DeepseekV2`.
        "deepseek_v2": {"norm_topk_prob": one_of(False)},
        "phimoe": {"num_experts_per_tok": one_of(2, 2, 2, 2, 1)},
        "gemma3_text": {
            "rope_parameters": by_type,
            "attn_logit_softcapping": one_of(None, None, None, None, None, 50.0),
        },
        "internlm3": {"rope_parameters": lambda draw: rope(draw, "default", "dynamic", "linear")},
        **{
            family: {
                "hidden_act": one_of("silu", "silu", "silu", "silu", "gelu"),
                "rope_parameters": partly,
                "layer_types": lambda draw: draw.kinds("full_attention", "linear_attention"),
            }
            for family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
        },
        "olmo3": {"rope_parameters": by_type},
    }
)


def finish_groups(draw: Draw) -> None:
    """Groups of experts that divide them."""
    groups = draw.pick(1, 2, 4)
    if draw.experts % groups or draw.experts // groups < 2:
        return
    most = draw.random.randint(1, groups)
    draw.fields |= {"n_group": groups, "topk_group": most}
    draw.fields["num_experts_per_tok"] = draw.random.randint(1, most * draw.experts // groups)
    if "topk_method" in draw.known:
        draw.fields["topk_method"] = draw.pick("greedy", "group_limited_greedy")


def finish_latent(draw: Draw) -> None:
    """Groups, and no fewer heads of keys, which are all made of one latent."""
    finish_groups(draw)
    draw.fields |= {"num_key_value_heads": draw.heads, "head_dim": draw.fields["qk_rope_head_dim"]}
    dim = draw.head_dim = draw.fields["qk_rope_head_dim"]
    draw.fields["rope_parameters"] = rope(draw, "default", "linear", "yarn", "llama3") if dim > 2 else {}


def finish_mamba(draw: Draw) -> None:
    """Heads that make up the inner width, which groups divide."""
    inner = draw.fields["mamba_expand"] * draw.hidden
    heads = draw.pick(*(each for each in range(1, 17) if not inner % each))
    groups = draw.pick(*(each for each in (1, 2, 3, 4) if not heads % each))
    sizes = draw.pick("auto", inner // heads)
    draw.fields |= {"mamba_n_heads": heads, "mamba_n_groups": groups, "mamba_d_head": sizes}


def finish_gemma4(draw: Draw) -> None:
    """Experts where the field says so, a global layer at the end, and K/V to share of each type of layer."""
    kinds = [*draw.kinds("full_attention", "sliding_attention"), "sliding_attention", "full_attention"]
    draw.fields |= {"layer_types": kinds, "num_hidden_layers": len(kinds), "sliding_window": draw.pick(1, 5, 17)}
    if not draw.fields["enable_moe_block"]:
        draw.fields |= dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size"))
    draw.fields["num_kv_shared_layers"] = draw.pick(0, 0, 1, 2)


def finish_phi(draw: Draw) -> None:
    """LongRoPE or none."""
    parameters = rope(draw, "default", "longrope", share=draw.family == "phi3")
    if draw.family == "phimoe" and parameters["rope_type"] == "longrope":
        parameters |= {"short_mscale": 1.2, "long_mscale": draw.pick(1.2, 0.7)}
        # transformers rotates by the short factors, however long a sequence is.
        parameters["long_factor"] = parameters["short_factor"]
    draw.fields["rope_parameters"] = parameters
    if "original_max_position_embeddings" in parameters and draw.family == "phi3":
        draw.fields["original_max_position_embeddings"] = parameters["original_max_position_embeddings"]


def finish_llama4(draw: Draw) -> None:
    """Kinds of layers that `no_rope_layers` allows."""
    draw.fields["layer_types"] = draw.pick(None, draw.kinds("full_attention", "chunked_attention"))


def finish_internlm(draw: Draw) -> None:
    """All biases or none, as transformers needs."""
    draw.fields["mlp_bias"] = draw.fields["attention_bias"]


def finish_windows(draw: Draw) -> None:
    """No local layers where the windows are turned off: nobody agrees on what that means."""
    if not draw.fields["use_sliding_window"]:
        draw.fields |= {"layer_types": None, "sliding_window": None}


def finish_helium(draw: Draw) -> None:
    """Heads as wide as the residual stream together, as transformers needs."""
    draw.fields |= {"hidden_size": draw.heads * draw.head_dim, "head_dim": draw.head_dim}


FINISH: Mapping[str, Callable[[Draw], None]] = MappingProxyType(
    {
        **dict.fromkeys(("glm4_moe", "nemotron_h"), finish_groups),
        **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), finish_latent),
        **dict.fromkeys(("bamba", "granitemoehybrid"), finish_mamba),
        **dict.fromkeys(("phi3", "phimoe"), finish_phi),
        "gemma4_text": finish_gemma4,
        "llama4_text": finish_llama4,
        "helium": finish_helium,
        "internlm3": finish_internlm,
        **dict.fromkeys(("qwen2", "qwen3", "mimo", "smollm3", "qwen2_moe"), finish_windows),
    }
)

FAMILIES = tuple(sorted({shape.split("-")[0] for shape in FIRST}))


def draw_config(family: str, seed: int) -> dict[str, Any]:
    """Fields of a config.json of `family`, those that its class in transformers has."""
    return Draw(family, seed).fields
