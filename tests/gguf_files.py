"""GGUF files written by the gguf package: names, quantised blocks and layout are its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

ARCHITECTURES: Mapping[str, gguf.MODEL_ARCH] = MappingProxyType(
    {
        "llama": gguf.MODEL_ARCH.LLAMA,
        "mistral": gguf.MODEL_ARCH.LLAMA,
        "mixtral": gguf.MODEL_ARCH.LLAMA,
        "qwen2": gguf.MODEL_ARCH.QWEN2,
        "qwen3": gguf.MODEL_ARCH.QWEN3,
        "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
        "gemma2": gguf.MODEL_ARCH.GEMMA2,
        "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
        "gpt2": gguf.MODEL_ARCH.GPT2,
        "gemma": gguf.MODEL_ARCH.GEMMA,
        "phi3": gguf.MODEL_ARCH.PHI3,
        "olmo2": gguf.MODEL_ARCH.OLMO2,
        "olmo3": gguf.MODEL_ARCH.OLMO2,
        "granite": gguf.MODEL_ARCH.GRANITE,
        "glm4": gguf.MODEL_ARCH.GLM4,
        "smollm3": gguf.MODEL_ARCH.SMOLLM3,
        "cohere": gguf.MODEL_ARCH.COMMAND_R,
        "cohere2": gguf.MODEL_ARCH.COHERE2,
        "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
        "exaone4": gguf.MODEL_ARCH.EXAONE4,
        "nemotron": gguf.MODEL_ARCH.NEMOTRON,
        "arcee": gguf.MODEL_ARCH.ARCEE,
        "starcoder2": gguf.MODEL_ARCH.STARCODER2,
        "hunyuan_v1_dense": gguf.MODEL_ARCH.HUNYUAN_DENSE,
        "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
        "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
        "olmoe": gguf.MODEL_ARCH.OLMOE,
        "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
        "granitemoeshared": gguf.MODEL_ARCH.GRANITE_MOE,
        "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
        "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
        "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
        "phimoe": gguf.MODEL_ARCH.PHIMOE,
        "llama4_text": gguf.MODEL_ARCH.LLAMA4,
        "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
        "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
        "ministral3": gguf.MODEL_ARCH.MISTRAL3,
        "apertus": gguf.MODEL_ARCH.APERTUS,
        "glm": gguf.MODEL_ARCH.CHATGLM,
        "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
        "bamba": gguf.MODEL_ARCH.GRANITE_HYBRID,
        "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H,
        "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
        "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
        "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    }
)
SHIFTED = ("gemma", "gemma2", "gemma3_text", "nemotron", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Models whose converter adds 1 to the weights of norms."""
INTERLEAVED = (
    *("llama", "mistral", "mixtral", "granite", "smollm3", "arcee", "granitemoe", "granitemoeshared"),
    *("granitemoehybrid", "bamba", "ministral3"),
)
"""Models whose converter is Llama's, which interleaves the halves of q's and k's heads."""
TYPES: Mapping[str, gguf.GGMLQuantizationType] = MappingProxyType(
    {
        name: gguf.GGMLQuantizationType[name]
        for name in (
            *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
            *("IQ4_NL", "IQ4_XS", "MXFP4"),
        )
    }
)


def write(
    path: Path,
    model: PreTrainedModel,
    kind: str | Callable[[str], str] = "F32",
    *,
    facts: Mapping[str, Any] | None = None,
    drafting: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Convert as llama.cpp's converter does; -> what the file means, under transformers' names.

    kind: of all tensors, or of each by the name. Vectors, and rows a block does not fit in, stay F32. drafting: tensors
    of Qwen3.5's layer that drafts, which is counted among the model's.
    """
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    if config.model_type == "nemotron_h" and "moe" in config.layers_block_type:
        arch = gguf.MODEL_ARCH.NEMOTRON_H_MOE
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    describe(writer, config)
    if config.model_type == "apertus":
        for name, add in (
            ("alpha_n", writer.add_xielu_alpha_n),
            ("alpha_p", writer.add_xielu_alpha_p),
            ("beta", writer.add_xielu_beta),
            ("eps", writer.add_xielu_eps),
        ):
            add([getattr(layer.mlp.act_fn, name).float().item() for layer in model.model.layers])
    for name, value in (facts or {}).items():
        {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32, list: writer.add_array}[type(value)](
            name, value
        )
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for key, tensor in (drafting or {}).items():
        block, last = key.removeprefix("mtp.layers.0."), config.num_hidden_layers - 1
        around = DRAFTS.get(key.removeprefix("mtp.").removesuffix(".weight"))
        name = around or names.get_name(f"model.layers.{last}.{block}", try_suffixes=(".weight", ".bias"))
        name = f"blk.{last}.nextn.{around}.weight" if around else name
        writer.add_tensor(name, changed(config, name if around else key, tensor).numpy())
    meant = {}
    tied = config.tie_word_embeddings
    for key, tensor in experts_stacked(model).items():
        if tied and key == "lm_head.weight":
            continue
        name = (
            fused_name(key)
            or GEMMA4.get(key.partition("layers.")[2].partition(".")[2])
            or state_name(config, key)
            or names.get_name(key, try_suffixes=(".weight", ".bias"))
            or names.get_name(key.replace("model.", "backbone."), try_suffixes=(".weight", ".bias"))
        )
        assert name is not None, key
        name = name.replace("#", key.partition("layers.")[2].partition(".")[0])
        data, kept = stored(changed(config, key, tensor).float().numpy(), kind if isinstance(kind, str) else kind(key))
        writer.add_tensor(name, data, raw_dtype=kept)
        back = torch.from_numpy(gguf.quants.dequantize(data, kept).astype(np.float32))
        meant[key] = unchanged(config, key, back)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


DRAFTS = MappingProxyType(
    {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
)
"""What is around the block of Qwen3.5's layer that drafts, which llama.cpp numbers after the others."""

GEMMA4 = MappingProxyType(
    {"router.scale": "blk.#.ffn_gate_inp.scale", "router.per_expert_scale": "blk.#.ffn_down_exps.scale"}
)
"""What the package's table lacks."""


def fused_name(key: str) -> str:
    """The name of GLM's matrix of queries, keys and values; empty for others."""
    layer, fused, kind = key.partition(".self_attn.query_key_value.")
    return f"blk.{layer.rpartition('.')[2]}.attn_qkv.{kind}" if fused else ""


def describe_gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    fields = config.to_dict()
    own = {str(i): each for i, each in (fields["per_layer_config"] or {}).items()}
    local = [kind == "sliding_attention" for kind in fields["layer_types"]]
    layers = [fields | own.get(str(i), {}) for i in range(len(local))]
    shared, width = fields["num_kv_shared_layers"], fields["intermediate_size"]
    wide = [width * (2 if i >= len(local) - shared else 1) for i in range(len(local))]
    writer.add_feed_forward_length(wide if fields["use_double_wide_mlp"] else width)
    writer.add_head_count_kv([each["num_key_value_heads"] for each in layers])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(fields["hidden_size_per_layer_input"])
    writer.add_sliding_window(fields["sliding_window"])
    writer.add_sliding_window_pattern(local)
    full = layers[local.index(False)]["head_dim"]
    writer.add_key_length(full)
    writer.add_key_length_swa(layers[local.index(True)]["head_dim"])
    writer.add_rope_dimension_count(full)
    rope = fields["rope_parameters"]
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    turning = int(full * rope["full_attention"]["partial_rotary_factor"] / 2)
    factors = np.array([1.0] * turning + [1e30] * (full // 2 - turning), dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", factors)
    if fields["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(fields["final_logit_softcapping"])
    if fields["enable_moe_block"]:
        writer.add_expert_count(fields["num_experts"])
        writer.add_expert_used_count(fields["top_k_experts"])
        writer.add_expert_feed_forward_length(fields["moe_intermediate_size"])


def describe(writer: gguf.GGUFWriter, config: Any) -> None:
    heads = config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(heads)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    if config.model_type == "gemma4_text":
        describe_gemma4(writer, config)
        return
    if config.model_type in RECURRENT:
        describe_recurrent(writer, config)
        return
    writer.add_feed_forward_length(getattr(config, "intermediate_size_mlp", config.intermediate_size))
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        names = ("layer_norm_eps", "norm_eps", "norm_epsilon")
        writer.add_layer_norm_eps(next(getattr(config, name) for name in names if hasattr(config, name)))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_key_length(head_dim)
    describe_scales(writer, config)
    rope = config.rope_parameters
    share = rope.get("full_attention", rope).get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(head_dim * share))
    theta = rope.get("full_attention", rope)["rope_theta"]
    if "alpha" in rope:
        # Hunyuan's converter writes the stretched base.
        theta *= rope["alpha"] ** (head_dim / (head_dim - 2))
    writer.add_rope_freq_base(theta)
    for own in (rope.get("full_attention", rope),):
        if own["rope_type"] in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(own["rope_type"]))
            writer.add_rope_scaling_factor(own["factor"])
            if own.get("original_max_position_embeddings"):
                writer.add_rope_scaling_orig_ctx_len(own["original_max_position_embeddings"])
            if "llama_4_scaling_beta" in own:
                writer.add_rope_scaling_yarn_beta_fast(own["beta_fast"])
                writer.add_rope_scaling_yarn_beta_slow(own["beta_slow"])
                writer.add_rope_scaling_yarn_log_mul(own["mscale_all_dim"])
                writer.add_attn_temperature_scale(own["llama_4_scaling_beta"])
        if own["rope_type"] == "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_factors(own, config))
        if own["rope_type"] == "longrope":
            for name in ("long", "short"):
                factors = np.array(own[f"{name}_factor"], dtype=np.float32)
                writer.add_tensor(f"rope_factors_{name}.weight", factors)
            writer.add_rope_scaling_orig_ctx_len(own["original_max_position_embeddings"])
            if own.get("attention_factor"):
                writer.add_rope_scaling_attn_factors(own["attention_factor"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
        if config.model_type in ("olmo3", "exaone4"):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if getattr(config, name, None):
            getattr(writer, f"add_{name}")(getattr(config, name))
    describe_experts(writer, config)


QWENS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
RECURRENT = ("granitemoehybrid", "bamba", "nemotron_h", *QWENS)


def describe_recurrent(writer: gguf.GGUFWriter, config: Any) -> None:
    own = config.to_dict()

    def has(*names: str) -> Any:
        return next((found for name in names if (found := own.get(name)) is not None), None)

    heads, kinds = config.num_attention_heads, config.layer_types
    writer.add_key_length(has("head_dim") or config.hidden_size // heads)
    writer.add_layer_norm_rms_eps(has("rms_norm_eps", "layer_norm_epsilon"))
    kv = [config.num_key_value_heads * (kind == "full_attention") for kind in kinds]
    writer.add_head_count_kv(config.num_key_value_heads if config.model_type in QWENS else kv)
    writer.add_ssm_conv_kernel(has("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"))
    writer.add_ssm_state_size(has("linear_key_head_dim", "mamba_d_state", "ssm_state_size"))
    writer.add_ssm_group_count(has("linear_num_key_heads", "mamba_n_groups", "n_groups"))
    count = has("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads")
    size = has("linear_value_head_dim", "mamba_d_head", "mamba_head_dim")
    writer.add_ssm_time_step_rank(count)
    writer.add_ssm_inner_size(count * size)
    if config.model_type == "nemotron_h":
        width = has("moe_intermediate_size") if "moe" in kinds else config.intermediate_size
        writer.add_feed_forward_length([width if kind in ("mlp", "moe") else 0 for kind in kinds])
        if "moe" not in kinds:
            return
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        if config.moe_latent_size is not None:
            writer.add_moe_latent_size(config.moe_latent_size)
        describe_experts(writer, config)
        return
    if has("intermediate_size"):
        writer.add_feed_forward_length(config.intermediate_size)
    rope = config.rope_parameters or {}
    if rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_finetuned(config.model_type == "bamba")
    if config.model_type in QWENS:
        writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    describe_scales(writer, config)
    if has("num_local_experts", "num_experts"):
        describe_experts(writer, config)
    elif has("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


STATES = MappingProxyType({"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias", "norm.weight": "ssm_norm.weight"})
"""Parts of recurrent layers, whose names in checkpoints the package's table does not have."""


def state_name(config: Any, key: str) -> str | None:
    """The name in the file of a tensor of a recurrent layer; None for another."""
    layer, _, part = key.partition("layers.")[2].partition(".")
    mixer, _, rest = part.partition(".")
    if config.model_type not in RECURRENT or mixer not in ("mamba", "linear_attn", "mixer"):
        return None
    if mixer == "mixer" and config.layer_types[int(layer)] != "linear_attention":
        return None
    own = STATES.get(rest) or f"ssm_{rest.removeprefix('in_proj_').replace('conv1d', 'conv1d')}"
    own = {"ssm_in_proj.weight": "ssm_in.weight", "ssm_in_proj.bias": "ssm_in.bias"}.get(own, own)
    own = {"ssm_out_proj.weight": "ssm_out.weight", "ssm_out_proj.bias": "ssm_out.bias"}.get(own, own)
    kinds = {"ssm_qkv.": "attn_qkv.", "ssm_z.": "attn_gate.", "ssm_b.": "ssm_beta.", "ssm_a.": "ssm_alpha."}
    for theirs, ours in kinds.items():
        own = own.replace(theirs, ours)
    return f"blk.{layer}.{own}"


def tiled(config: Any, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Qwen3.5's heads of values as its converter sorts them: the first of every head of keys, then the second."""
    part = key.partition(".linear_attn.")[2]
    if not config.model_type.startswith("qwen3_5") or not part or part == "norm.weight":
        return tensor
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    before = 2 * keys * config.linear_key_head_dim if part.startswith(("in_proj_qkv", "conv1d")) else 0
    moved = tensor.t() if part.startswith("out_proj") else tensor
    rest = moved[before:].unflatten(0, (keys, values // keys, -1)).transpose(0, 1).flatten(0, 2)
    moved = torch.cat([moved[:before], rest])
    return moved.t().contiguous() if part.startswith("out_proj") else moved


def by_kind(config: Any, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Qwen3-Next's queries, keys and values, and gates, of a matrix that is sorted by heads of keys."""
    keys, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    parts = whole.view(keys, -1, whole.shape[-1]).split([size, size, values, values], 1)
    query, key, value, gate = (part.reshape(-1, whole.shape[-1]) for part in parts)
    return torch.cat([query, key, value]), gate


def describe_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    def has(*names: str) -> Any:
        return next((found for name in names if (found := getattr(config, name, None)) is not None), None)

    if not has("num_experts_per_tok", "moe_k"):
        return
    writer.add_expert_count(has("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts"))
    writer.add_expert_used_count(has("num_experts_per_tok", "moe_k"))
    narrow = config.intermediate_size if config.model_type in ("llama4_text", "gpt_oss", "minimax_m2") else None
    for value, add in (
        (narrow or has("moe_intermediate_size"), writer.add_expert_feed_forward_length),
        (has("n_shared_experts", "moe_num_shared_experts"), writer.add_expert_shared_count),
        (
            has("shared_expert_intermediate_size", "shared_intermediate_size"),
            writer.add_expert_shared_feed_forward_length,
        ),
        (has("first_k_dense_replace", "moe_layer_start_index"), writer.add_leading_dense_block_count),
        (has("moe_layer_interval", "interleave_moe_layer_step"), writer.add_interleave_moe_layer_step),
        (has("routed_scaling_factor"), writer.add_expert_weights_scale),
        (has("n_group"), writer.add_expert_group_count),
        (has("topk_group"), writer.add_expert_group_used_count),
    ):
        if value is not None:
            add(value)
    if config.model_type == "glm4_moe":
        writer.add_expert_weights_norm(config.norm_topk_prob)


def describe_scales(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.model_type in ("granite", "granitemoe", "granitemoeshared", "granitemoehybrid"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type.startswith("cohere"):
        writer.add_logit_scale(config.logit_scale)


def llama3_factors(rope: Mapping[str, Any], config: Any) -> np.ndarray:
    """As llama.cpp's converter computes them."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    length = rope["original_max_position_embeddings"]
    found = []
    for frequency in 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim):
        wave = 2 * np.pi / frequency
        if wave < length / high:
            found.append(1.0)
        elif wave > length / low:
            found.append(rope["factor"])
        else:
            smooth = (length / wave - low) / (high - low)
            found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(found, dtype=np.float32)


def experts_stacked(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state with experts as converters stack them: names of one matrix for all experts of a layer."""
    found, family = dict[str, torch.Tensor](), model.config.model_type
    for key, tensor in model.state_dict().items():
        key = key.replace("block_sparse_moe", "mlp").replace("mlp.gate.moe_statics", "mlp.moe_statics")
        key = key.replace("e_score_correction_bias", "e_score_correction.bias")
        if family == "granitemoehybrid" and "shared_mlp" in key and not model.config.num_local_experts:
            scope = key.partition("shared_mlp")[0] + "mlp."
            if "output" in key:
                found[f"{scope}down_proj.weight"] = tensor
            else:
                found |= zip((f"{scope}gate_proj.weight", f"{scope}up_proj.weight"), tensor.chunk(2), strict=True)
            continue
        if family == "nemotron_h" and ".experts." in key:
            found[key.replace("mixer.experts", "mlp.experts") + ".weight"] = tensor
            continue
        if family == "apertus" and ".act_fn." in key:
            continue
        fused = re.search(r"^(.*self_attn)\.([qkv])_proj\.(weight|bias)$", key)
        if family == "glm" and fused:
            parts = [model.state_dict()[f"{fused[1]}.{part}_proj.{fused[3]}"] for part in "qkv"]
            found[f"{fused[1]}.query_key_value.{fused[3]}"] = torch.cat(parts)
            continue
        if key.endswith("in_proj_qkvz.weight"):
            scope = key.removesuffix("qkvz.weight")
            found |= zip((f"{scope}qkv.weight", f"{scope}z.weight"), by_kind(model.config, tensor), strict=True)
            continue
        if family == "gemma4_text":
            found[f"{key}.weight" if key.endswith(("gate_up_proj", "down_proj", "layer_scalar")) else key] = tensor
            continue
        across, interleaved = family in ("llama4_text", "gpt_oss"), family == "gpt_oss"
        part = re.search(r"(experts\.|shared_mlp\.|mlp\.)(gate_up_proj|input_linear)(_bias|\.weight|)$", key)
        if part and (tensor.dim() == 3 or "_mlp" in key or "_bias" in key):
            if across and not part[3]:
                tensor = tensor.transpose(1, 2)
            dim = 0 if "shared_mlp" in key else 1
            gate, up = (tensor[:, ::2], tensor[:, 1::2]) if interleaved else tensor.chunk(2, dim)
            scope = key[: part.start(2)].replace("shared_mlp", "mlp.shared_experts")
            scope = scope if "experts" in scope else f"{scope}experts."
            suffix = ".bias" if part[3] == "_bias" else ".weight"
            found |= {f"{scope}gate_proj{suffix}": gate, f"{scope}up_proj{suffix}": up}
        elif key.endswith(("experts.down_proj", "experts.down_proj_bias")):
            moved = tensor.transpose(1, 2) if across and tensor.dim() == 3 else tensor
            found[key.removesuffix("_bias") + (".bias" if key.endswith("_bias") else ".weight")] = moved
        elif key.endswith("output_linear.weight"):
            scope = "mlp.shared_experts" if "shared_mlp" in key else "mlp.experts"
            found[re.sub(r"(shared_mlp|mlp)\.output_linear", f"{scope}.down_proj", key)] = tensor
        else:
            key = f"{key}.weight" if key.endswith("sinks") else key
            found[key] = tensor[0] if key.endswith("shared_expert_gate.weight") else tensor
    return found


def changed(config: Any, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """What llama.cpp's converter does to it."""
    tensor = tiled(config, key, tensor)
    if key.endswith(".A_log"):
        return -tensor.exp() if config.model_type in QWENS else -tensor.exp()[:, None]
    if key.endswith(("mamba.D", "mixer.D")):
        return tensor[:, None]
    if key.endswith("conv1d.weight"):
        return tensor.squeeze(1)
    if key.endswith("mamba.norm.weight") or (key.endswith("mixer.norm.weight") and config.model_type == "nemotron_h"):
        return tensor.view(getattr(config, "mamba_n_groups", None) or config.n_groups, -1)
    if key.endswith("linear_attn.norm.weight"):
        return tensor
    if config.model_type in INTERLEAVED and any(p in key for p in ("q_proj", "k_proj")):
        heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
        return (
            tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
            .swapaxes(1, 2)
            .reshape(tensor.shape)
        )
    if config.model_type in SHIFTED and key.endswith("norm.weight"):
        return tensor + 1
    if config.model_type == "gpt2" and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return tensor.T.contiguous()
    return tensor


def unchanged(config: Any, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """The way back."""
    if config.model_type in INTERLEAVED and any(p in key for p in ("q_proj", "k_proj")):
        heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
        return (
            tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
            .swapaxes(1, 2)
            .reshape(tensor.shape)
        )
    if config.model_type in SHIFTED and key.endswith("norm.weight"):
        return tensor - 1
    if config.model_type == "gpt2" and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return tensor.T
    return tensor


def stored(data: np.ndarray, kind: str) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """(bytes or numbers, their type)."""
    wanted = TYPES[kind]
    block = gguf.GGML_QUANT_SIZES[wanted][0]
    if data.ndim < 2 or data.shape[-1] % block:
        return data.astype(np.float32), gguf.GGMLQuantizationType.F32
    if kind in ("Q4_K", "Q5_K", "Q6_K"):
        return {"Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k}[kind](data), wanted
    if kind in HALVES:
        return drawn(kind, data), wanted
    return gguf.quants.quantize(data, wanted), wanted


HALVES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"Q2_K": (80, 82), "Q3_K": (108,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
)
"""Types that nothing here quantises to: where the scales of a block are."""


def drawn(kind: str, data: np.ndarray) -> np.ndarray:
    """Random blocks, whose numbers are as large as those of `data`."""
    _, size = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    count = data.size // gguf.GGML_QUANT_SIZES[TYPES[kind]][0]
    blocks = np.random.default_rng(count).integers(0, 256, (count, size), dtype=np.uint8)
    wanted = 1.0
    for scale in (1e-2, None):
        scale = 1e-2 * data.std() / wanted if scale is None else scale
        for at in HALVES[kind]:
            blocks[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
        wanted = gguf.quants.dequantize(blocks, TYPES[kind]).std()
    return blocks.reshape(*data.shape[:-1], -1)


def q4_k(data: np.ndarray) -> np.ndarray:
    """A plain quantiser, for the package has none: 8 groups of 32 with 6-bit scales and minima."""
    head, q = grouped(data, 15)
    packed = (q[:, ::2] | q[:, 1::2] << 4).reshape(len(q), -1)
    return np.concatenate([*head, packed], 1).reshape(*data.shape[:-1], -1)


def q5_k(data: np.ndarray) -> np.ndarray:
    """The same with 5-bit numbers, whose fifth bits come first."""
    head, q = grouped(data, 31)
    fifth = np.zeros((len(q), 32), np.uint8)
    for group in range(8):
        fifth |= (q[:, group] >> 4) << group
    packed = (q[:, ::2] & 15 | (q[:, 1::2] & 15) << 4).reshape(len(q), -1)
    return np.concatenate([*head, fifth, packed], 1).reshape(*data.shape[:-1], -1)


def grouped(data: np.ndarray, most: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Bytes of scales and minima, and numbers 0 to `most` [N, 8, 32]."""
    rows = data.reshape(-1, 8, 32).astype(np.float32)
    low, high = np.minimum(rows.min(-1), 0), rows.max(-1)
    scale, least = (high - low) / most, -low
    d = (scale.max(-1) / 63).astype(np.float16)
    dmin = (least.max(-1) / 63).astype(np.float16)
    s = np.clip(np.rint(scale / d.astype(np.float32)[:, None]), 1, 63).astype(np.uint8)
    m = np.clip(np.rint(least / dmin.astype(np.float32)[:, None]), 0, 63).astype(np.uint8)
    step = d.astype(np.float32)[:, None, None] * s[..., None]
    q = np.rint((rows + dmin.astype(np.float32)[:, None, None] * m[..., None]) / step)
    about = np.zeros((len(rows), 12), np.uint8)
    about[:, :4] = s[:, :4] | (s[:, 4:] >> 4) << 6
    about[:, 4:8] = m[:, :4] | (m[:, 4:] >> 4) << 6
    about[:, 8:] = (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    return [d[:, None].view(np.uint8), dmin[:, None].view(np.uint8), about], np.clip(q, 0, most).astype(np.uint8)


def q6_k(data: np.ndarray) -> np.ndarray:
    """16 groups of 16 with int8 scales."""
    rows = data.reshape(-1, 16, 16).astype(np.float32)
    scale = np.abs(rows).max(-1) / 31
    d = (scale.max(-1) / 127).astype(np.float16)
    s = np.clip(np.rint(scale / d.astype(np.float32)[:, None]), 1, 127).astype(np.int8)
    step = d.astype(np.float32)[:, None, None] * s[..., None]
    q = (np.clip(np.rint(rows / step), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.concatenate((q[:, :, 0] & 15 | (q[:, :, 2] & 15) << 4, q[:, :, 1] & 15 | (q[:, :, 3] & 15) << 4), -1)
    high = q[:, :, 0] >> 4 | q[:, :, 1] >> 4 << 2 | q[:, :, 2] >> 4 << 4 | q[:, :, 3] >> 4 << 6
    blocks = [low.reshape(len(rows), -1), high.reshape(len(rows), -1), s.view(np.uint8), d[:, None].view(np.uint8)]
    return np.concatenate(blocks, 1).reshape(*data.shape[:-1], -1)
