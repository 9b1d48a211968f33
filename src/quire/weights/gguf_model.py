"""A GGUF file as a config.json and a checkpoint of transformers: names and layouts."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.errors import InvalidModel, nearest
from quire.models.spec import FULL, SLIDING
from quire.ops.gguf_blocks import BLOCKS, PACKED
from quire.weights.entries import Cut, TensorEntry, file_entry, read_tensor, rows_of
from quire.weights.gguf import Gguf, GgufTensorInfo
from quire.weights.gguf_names import FAMILIES, QWEN_DRAFT_NAMES, RECURRENT, VARIANTS, Family

log = logging.getLogger(__name__)

PLAIN: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are facts of the rotary embedding."""
NAME = re.compile(r"(?:blk\.(\d+)\.)?((?:nextn\.)?\w+?)(?:\.(weight|bias|scale))?")
LAYER = re.compile(r"blk\.(\d+)\.")


def block_entry(info: GgufTensorInfo) -> TensorEntry:
    """A tensor stored in quantized blocks, read as float32, whole rows at a time, or as bytes."""
    kind = info.kind
    row = info.size // info.shape[0]

    def read(cut: Cut) -> Tensor:
        first, last, _ = (cut[0] if cut else slice(None)).indices(info.shape[0])
        raw = torch.empty((last - first) * row // kind.size, kind.size, dtype=torch.uint8)
        read_tensor(info.path, info.start + first * row, raw)
        whole = BLOCKS[kind.name](raw).values().view(last - first, *info.shape[1:])
        return whole[(slice(None), *cut[1:])]

    bytes_of_row = info.shape[-1] // kind.block * kind.size
    packed = file_entry(info.path, info.start, torch.uint8, (*info.shape[:-1], bytes_of_row), kind.name)
    stored = packed if kind.name in PACKED else None
    order = info.path.name, info.start
    return TensorEntry(torch.float32, info.shape, order, kind.name, info.size, read, stored=stored)


def gguf_entries(gguf: Gguf) -> dict[str, TensorEntry]:
    """The file's tensors with transformers' names and layouts."""
    found: dict[str, list[TensorEntry]] = {}
    layers = int(gguf_config(gguf).get("num_hidden_layers", 0)) + drafting_layers(gguf)
    if unnamed := [name for name in gguf.tensors if (layer := LAYER.match(name)) and int(layer[1]) >= layers]:
        log.warning("%d tensors of a layer for multi-token prediction are not read (%s)", len(unnamed), unnamed[0])
    # In this order gate comes before up, of which some families have one matrix.
    for name, held in sorted(gguf.tensors.items()):
        if held.kind.name in PLAIN:
            entry = file_entry(held.path, held.start, PLAIN[held.kind.name], held.shape, held.kind.name)
        else:
            entry = block_entry(held)
        if name in FACTORS or name in unnamed:
            continue
        theirs = transformers_name(gguf, name)
        entry = undo_conversion(gguf, name, theirs, entry)
        if "#" in theirs:
            for e in range(entry.shape[0]):
                found.setdefault(theirs.replace("#", str(e)), []).append(entry.part(e))
        else:
            found.setdefault(theirs, []).append(entry)
    whole = {name: concat_entries(parts) for name, parts in found.items()}
    split = {name for name, parts in found.items() if name.endswith("in_proj_qkvz.weight") and len(parts) > 1}
    whole = {name: sort_key_heads(gguf, entry) if name in split else entry for name, entry in whole.items()}
    if gguf.architecture in ("qwen35", "qwen35moe"):
        heads = gguf.get("ssm.group_count"), gguf.get("ssm.time_step_rank")
        whole = sort_value_heads(whole, *heads, gguf.get("ssm.state_size"), gguf.get("ssm.inner_size") // heads[1])
        whole = name_draft_layer(gguf, whole)
    if gguf.architecture == "chatglm":
        whole = split_fused_qkv(gguf, whole)
    return whole | (xielu_entries(gguf) if gguf.architecture == "apertus" else {})


def drafting_layers(gguf: Gguf) -> int:
    """How many layers for multi-token prediction are read: those of architectures that have names for them."""
    named = any(part.startswith("nextn.") for part in family_of(gguf).names)
    return int(gguf.get("nextn_predict_layers", 0)) if named else 0


def name_draft_layer(gguf: Gguf, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The entries, with the layer for multi-token prediction named as in Qwen3.5's checkpoints (`mtp.*`)."""
    prefix, found = f"model.layers.{gguf_config(gguf)['num_hidden_layers']}.", dict[str, TensorEntry]()
    for name, entry in entries.items():
        part, _, kind = name.removeprefix(prefix).rpartition(".")
        if not name.startswith(prefix):
            found[name] = entry
        elif part in QWEN_DRAFT_NAMES:
            found[f"mtp.{QWEN_DRAFT_NAMES[part]}.{kind}"] = entry
        elif part not in ("embed_tokens", "shared_head.head"):  # copies of the model's own
            found[f"mtp.layers.0.{part}.{kind}"] = entry
    return found


def sort_value_heads(
    entries: Mapping[str, TensorEntry], keys: int, values: int, key: int, size: int, *, back: bool = False
) -> dict[str, TensorEntry]:
    """The entries of Qwen3.5's recurrent layers with heads of values sorted by their head of keys. In a file the first
    ones of all heads of keys come first, then the second ones. keys, values: heads, of `key` and `size` numbers. back:
    sorted as in a file."""
    if keys == values:
        return dict(entries)
    both = 2 * keys * key
    heads = torch.arange(values).view(-1, keys).t().flatten()
    heads = torch.argsort(heads) if back else heads

    def order(count: int, before: int = 0) -> Tensor:
        rows = before + heads[:, None] * count + torch.arange(count)
        return torch.cat([torch.arange(before), rows.flatten()])

    orders = {
        **dict.fromkeys(("in_proj_qkv.weight", "conv1d.weight"), order(size, both)),
        "in_proj_z.weight": order(size),
        **dict.fromkeys(("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"), order(1)),
    }
    found = dict[str, TensorEntry]()
    for name, entry in entries.items():
        part = name.partition(".linear_attn.")[2]
        if part in orders:
            entry = entry.transformed(entry.shape, rows_moved(orders[part]), rows_only=True)
        elif part == "out_proj.weight":
            entry = entry.transformed(entry.shape, columns_moved(order(size)))
        found[name] = entry
    return found


def rows_moved(order: Tensor) -> Callable[[Tensor], Tensor]:
    """Row i of the result is row order[i]."""
    return lambda whole: whole[order]


def columns_moved(order: Tensor) -> Callable[[Tensor], Tensor]:
    """Column i of the result is column order[i]."""
    return lambda whole: whole[:, order]


def split_fused_qkv(gguf: Gguf, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The entries with matrices of queries, keys and values divided into three."""
    found = dict[str, TensorEntry]()
    for name, entry in entries.items():
        before, fused, kind = name.partition(".qkv.")
        if not fused:
            found[name] = entry
            continue
        heads, kv = gguf.get("attention.head_count"), kv_heads(gguf)
        row, each = 0, entry.shape[0] // (heads + 2 * kv)
        for part, count in (("q", heads), ("k", kv), ("v", kv)):
            found[f"{before}.{part}_proj.{kind}"] = rows_of(entry, row, count * each)
            row += count * each
    return found


def xielu_entries(gguf: Gguf) -> dict[str, TensorEntry]:
    """The numbers of each layer's xIELU, which are metadata in a file. Raises InvalidModel where there are none."""
    found = {}
    for name in ("alpha_p", "alpha_n", "beta"):
        values = gguf.facts.get(f"xielu.{name}")
        if not isinstance(values, list) or len(values) < gguf.get("block_count", 0):
            raise InvalidModel(f"{gguf.path.name} lacks xielu.{name}, a number for each layer: convert the model again")
        for i, value in enumerate(values):
            found[f"model.layers.{i}.mlp.act_fn.{name}"] = number_entry(gguf, float(value))
    return found


def number_entry(gguf: Gguf, value: float) -> TensorEntry:
    """A tensor of one number, which is metadata."""
    tensor = torch.tensor([value])
    return TensorEntry(torch.float32, (1,), (gguf.path.name, 0), "F32", 4, lambda cut: tensor[cut])


def concat_entries(parts: Sequence[TensorEntry]) -> TensorEntry:
    """One matrix of several, one below the other."""
    if len(parts) == 1:
        return parts[0]
    shape = sum(part.shape[0] for part in parts), *parts[0].shape[1:]
    stored = [part.stored for part in parts if part.stored is not None and part.kind == parts[0].kind]
    return replace(
        parts[0],
        dtype=parts[0].dtype if len({part.dtype for part in parts}) == 1 else torch.float32,
        shape=shape,
        size=sum(part.size for part in parts),
        read=lambda cut: torch.cat([part.read(()) for part in parts])[cut],
        copy=None,
        each=None,
        stored=concat_entries(stored) if len(stored) == len(parts) else None,
    )


def transformers_name(gguf: Gguf, name: str) -> str:
    """'blk.0.attn_q.weight' -> 'model.layers.0.self_attn.q_proj.weight'; what is not known stays as it is."""
    found = NAME.fullmatch(name)
    if not found:
        return name
    layer, part, kind = found.groups()
    family = family_of(gguf)
    known = family.outer if layer is None else family.names
    if f"{part}.{kind}" in known:
        return f"{family.prefix}.{layer}.{known[f'{part}.{kind}']}"
    if part not in known:
        return name
    if kind is None:
        return name if layer is None else f"{family.prefix}.{layer}.{known[part]}"
    return f"{known[part]}.{kind}" if layer is None else f"{family.prefix}.{layer}.{known[part]}.{kind}"


def family_of(gguf: Gguf) -> Family:
    """The family of a file, where its facts say more than its name. Raises InvalidModel for an unknown architecture."""
    name = gguf.architecture
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise InvalidModel(
            f"{gguf.path.name} holds a model of architecture {name!r}, which is not supported (known: {known})."
            f"{nearest(name, FAMILIES)}"
        )
    return next((family for fact, family in VARIANTS.get(name, {}).items() if gguf.get(fact)), FAMILIES[name])


def undo_conversion(gguf: Gguf, name: str, theirs: str, entry: TensorEntry) -> TensorEntry:
    """Undo a converter's changes: interleaved heads, norms plus 1, GPT-2's transposed matrices."""
    family = family_of(gguf)
    if ".ssm_" in name:
        return undo_state_conversion(name, entry)
    if family.interleaved and re.search(r"\.attn_[qk]\.", name):
        heads = gguf.get("attention.head_count") if ".attn_q." in name else kv_heads(gguf)
        return entry.transformed(entry.shape, lambda whole: deinterleave_heads(whole, heads), rows_only=True)
    if name.endswith(".ffn_gate_inp_shexp.weight") and len(entry.shape) == 1:
        return entry.transformed((1, *entry.shape), lambda whole: whole[None])
    if family.shift and name.endswith("norm.weight"):
        return entry.transformed(entry.shape, lambda whole: whole.float() - family.shift)
    if gguf.architecture == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", theirs):
        return entry.transformed(entry.shape[::-1], lambda whole: whole.t())
    return entry


def undo_state_conversion(name: str, entry: TensorEntry) -> TensorEntry:
    """Tensors of a recurrent layer: the decay is a logarithm in a checkpoint, and shapes differ."""
    if name.endswith(".ssm_a"):
        return entry.transformed((entry.shape[0],), lambda whole: (-whole.float().flatten()).log())
    if name.endswith(".ssm_conv1d.weight") and len(entry.shape) == 2:
        channels, width = entry.shape
        return entry.transformed((channels, 1, width), lambda whole: whole[:, None])
    if name.endswith(".ssm_norm.weight"):
        return entry.transformed((math.prod(entry.shape),), torch.flatten)
    return entry


def key_head_order(keys: int, size: int, values: int) -> Tensor:
    """The order that sorts rows by head of keys: of each its query, key, values and gates. Before, rows are the gates,
    queries, keys and values of all heads. keys: number of heads of keys. size: of their rows in all. values: rows of
    values in all."""
    kinds = torch.split(torch.arange(2 * (size + values)), [values, size, size, values])
    gate, query, key, value = (kind.view(keys, -1) for kind in kinds)
    return torch.cat([query, key, value, gate], 1).flatten()


def sort_key_heads(gguf: Gguf, entry: TensorEntry) -> TensorEntry:
    """The matrix as a checkpoint has it: see `key_head_order`."""
    keys = gguf.get("ssm.group_count")
    rows = key_head_order(keys, gguf.get("ssm.state_size") * keys, gguf.get("ssm.inner_size"))
    return entry.transformed(entry.shape, lambda whole: whole[rows], rows_only=True)


def deinterleave_heads(whole: Tensor, heads: int) -> Tensor:
    """Rows of each head, from RoPE's interleaved pairs to halves."""
    return whole.view(heads, whole.shape[0] // heads // 2, 2, *whole.shape[1:]).transpose(1, 2).reshape(whole.shape)


def kv_heads(gguf: Gguf) -> int:
    """Number of key/value heads, of the first layer that has any where they differ."""
    found = gguf.get("attention.head_count_kv") or gguf.get("attention.head_count")
    return int(next(filter(None, found), 0) if isinstance(found, list) else found)


def gguf_config(gguf: Gguf) -> dict[str, Any]:
    """The metadata as fields of config.json. Raises InvalidModel for an unknown architecture, and for damage."""
    if gguf.architecture in NO_MODELS:
        raise InvalidModel(f"{gguf.path.name} is {NO_MODELS[gguf.architecture]}: name the model's own file")
    if str(gguf.facts.get("general.type", "model")) == "adapter":
        raise InvalidModel(f"{gguf.path.name} is a LoRA adapter: merge it into its model first (llama-export-lora)")
    if gguf.get("attention.causal", True) is False:
        raise InvalidModel(
            f"{gguf.path.name} is a model whose tokens see later ones: GGUF files are served for text; name the "
            "checkpoint's folder"
        )
    try:
        return _config(gguf)
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise InvalidModel(f"{gguf.path.name}: the metadata is damaged ({error}): download it again") from error


NO_MODELS: Mapping[str, str] = {"clip": "a projector of images (mmproj)", "imatrix": "an importance matrix"}


def _config(gguf: Gguf) -> dict[str, Any]:
    name, get = gguf.architecture, gguf.get
    family = family_of(gguf)
    heads, hidden = get("attention.head_count", 0), get("embedding_length", 0)
    head_dim = get("attention.key_length") or hidden // max(1, heads)
    fields = {
        "architectures": [family.architecture],
        "hidden_size": hidden,
        # block_count includes layers for multi-token prediction.
        "num_hidden_layers": get("block_count") and get("block_count") - get("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads(gguf),
        "head_dim": head_dim,
        "intermediate_size": get("feed_forward_length"),
        "vocab_size": len(gguf.facts.get("tokenizer.ggml.tokens", ())) or get("vocab_size"),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base"),
        "rope_scaling": rope_fields(gguf),
        "rope_parameters": {},
        "partial_rotary_factor": rotary_factor(gguf, head_dim),
        "sliding_window": get("attention.sliding_window"),
        "layer_types": layer_types(gguf),
        "layer_norm_eps": get("attention.layer_norm_epsilon"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": any(f"blk.0.{part}.bias" in gguf.tensors for part in ("attn_q", "attn_qkv")),
        "use_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in gguf.tensors,
        "lm_head_bias": "output.bias" in gguf.tensors,
        "attention_multiplier": get("attention.scale"),
        "embedding_multiplier": get("embedding_scale"),
        "residual_multiplier": get("residual_scale"),
        # Granite's file divides logits by it, Cohere's multiplies.
        "logits_scaling": get("logit_scale"),
        "logit_scale": get("logit_scale"),
        "eos_token_id": gguf.facts.get("tokenizer.ggml.eos_token_id"),
        "final_logit_softcapping": get("final_logit_softcapping"),
        "attn_logit_softcapping": get("attn_logit_softcapping"),
        "num_nextn_predict_layers": drafting_layers(gguf),
        **expert_fields(gguf),
        **family.known,
    }
    if name.startswith("gemma"):
        # The largest model of each generation scales scores by hidden / heads, others by head_dim.
        share = hidden // max(1, heads) if get("block_count") == (46 if name == "gemma2" else 62) else head_dim
        fields |= {"query_pre_attn_scalar": share}
    if name == "gemma4":
        fields |= gemma4_fields(gguf)
    if name in RECURRENT:
        fields |= recurrent_fields(gguf)
    if name == "gpt2":
        fields |= {
            "n_embd": hidden,
            "n_head": heads,
            "n_layer": get("block_count"),
            "n_positions": get("context_length"),
        }
        fields |= {"n_inner": get("feed_forward_length"), "layer_norm_epsilon": get("attention.layer_norm_epsilon")}
    return {key: value for key, value in fields.items() if value is not None}


def gemma4_fields(gguf: Gguf) -> dict[str, Any]:
    """Fields of Gemma 4, whose local and global layers differ in their heads."""
    get, local = gguf.get, [kind == SLIDING for kind in layer_types(gguf) or ()]
    per_layer = get("attention.head_count_kv")
    heads = per_layer if isinstance(per_layer, list) else [per_layer] * len(local)
    dims = get("attention.key_length"), get("attention.key_length_swa")
    widths = get("feed_forward_length")
    widths = widths if isinstance(widths, list) else [widths]
    own = len(local) - get("attention.shared_kv_layers", 0)
    turning = rope_fields(gguf) or {}
    factors = turning.get("factors", [1.0])
    # A little more than the share, which is rounded down.
    share = (sum(factor < FIXED for factor in factors) + 0.25) / len(factors)
    full = {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": get("rope.freq_base")}
    return {
        "head_dim": dims[1],
        "global_head_dim": dims[0],
        "per_layer_config": {
            str(i): {"num_key_value_heads": count, "head_dim": dims[each]}
            for i, (count, each) in enumerate(zip(heads, local, strict=True))
        },
        "attention_k_eq_v": any(not local[i] and f"blk.{i}.attn_v.weight" not in gguf.tensors for i in range(own)),
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 10_000.0)},
        },
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] > widths[0],
        "hidden_size_per_layer_input": get("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": len(local) - own,
        "enable_moe_block": bool(get("expert_count")),
        "top_k_experts": get("expert_used_count"),
    }


def recurrent_fields(gguf: Gguf) -> dict[str, Any]:
    """Fields of models with recurrent layers. Which layer is what follows from its tensors."""
    get, tensors = gguf.get, gguf.tensors
    layers, heads = get("block_count"), get("ssm.time_step_rank")
    kinds = {"ssm_out": "linear_attention", "attn_q": FULL, "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    own = [
        next((kind for part, kind in kinds.items() if f"blk.{i}.{part}.weight" in tensors), "") for i in range(layers)
    ]
    first = next((i for i, kind in enumerate(own) if kind == "linear_attention"), 0)
    inner, widths = get("ssm.inner_size"), get("feed_forward_length")
    sizes = {
        "groups": get("ssm.group_count"),
        "state": get("ssm.state_size"),
        "width": get("ssm.conv_kernel"),
        "value": inner // heads,
        "bias": f"blk.{first}.ssm_in.bias" in tensors,
        "conv_bias": f"blk.{first}.ssm_conv1d.bias" in tensors,
    }
    if gguf.architecture.startswith("qwen"):
        names = {
            "linear_num_key_heads": sizes["groups"],
            "linear_key_head_dim": sizes["state"],
            "linear_num_value_heads": heads,
            "linear_value_head_dim": sizes["value"],
            "linear_conv_kernel_dim": sizes["width"],
        }
        drafts = {"mtp_num_hidden_layers": drafting_layers(gguf)}
        return names | drafts | {"layer_types": own[: layers - get("nextn_predict_layers", 0)], "norm_topk_prob": True}
    # Granite and Bamba call them otherwise than Nemotron-H.
    mamba = dict.fromkeys(("mamba_n_groups", "n_groups"), sizes["groups"])
    mamba |= dict.fromkeys(("mamba_d_state", "ssm_state_size"), sizes["state"])
    mamba |= dict.fromkeys(("mamba_d_conv", "conv_kernel"), sizes["width"])
    mamba |= dict.fromkeys(("mamba_d_head", "mamba_head_dim"), sizes["value"])
    mamba |= dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), heads)
    mamba |= dict.fromkeys(("mamba_proj_bias", "use_bias"), sizes["bias"])
    mamba |= dict.fromkeys(("mamba_conv_bias", "use_conv_bias"), sizes["conv_bias"])
    rotated = bool(get("rope.scaling.finetuned"))
    width = max(widths) if isinstance(widths, list) else widths
    return mamba | {
        "mamba_expand": inner // get("embedding_length"),
        "layer_types": own,
        "attn_layer_indices": [i for i, kind in enumerate(own) if kind == FULL],
        "position_embedding_type": "rope" if rotated else "nope",
        "num_local_experts": get("expert_count", 0),
        "intermediate_size": width,
        "shared_intermediate_size": get("expert_shared_feed_forward_length") or width,
        "moe_shared_expert_intermediate_size": get("expert_shared_feed_forward_length", 0),
        "moe_latent_size": get("moe_latent_size"),
        "n_routed_experts": get("expert_count"),
        "mlp_bias": any(name.endswith(("ffn_up.bias", "ffn_up_shexp.bias")) for name in tensors),
        "layer_norm_epsilon": get("attention.layer_norm_rms_epsilon") or get("attention.layer_norm_epsilon"),
    }


FIXED = 1e29
"""Factors of wavelengths above this are those of dimensions that do not turn."""


def expert_fields(gguf: Gguf) -> dict[str, Any]:
    """Fields of a mixture."""
    get, width = gguf.get, gguf.get("expert_feed_forward_length")
    fields = {
        "num_experts": get("expert_count"),
        "num_local_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": width,
        "norm_topk_prob": get("expert_weights_norm", True),
        "routed_scaling_factor": get("expert_weights_scale"),
        "n_group": get("expert_group_count"),
        "topk_group": get("expert_group_used_count"),
        "n_shared_experts": get("expert_shared_count"),
        "moe_num_shared_experts": get("expert_shared_count"),
        "shared_expert_intermediate_size": get("expert_shared_feed_forward_length"),
        "shared_intermediate_size": get("expert_shared_feed_forward_length"),
        "first_k_dense_replace": get("leading_dense_block_count"),
        "moe_layer_start_index": get("leading_dense_block_count"),
        "moe_layer_interval": get("interleave_moe_layer_step"),
        "interleave_moe_layer_step": get("interleave_moe_layer_step"),
    }
    if gguf.architecture in ("llama4", "gpt-oss", "minimax-m2") and width:
        fields |= {"intermediate_size": width, "intermediate_size_mlp": get("feed_forward_length")}
    if gguf.architecture == "llama4":
        # Not in the file: the smaller model norms queries and keys, the larger one does not.
        fields |= {"use_qk_norm": get("expert_count") != MAVERICK}
    return fields


MAVERICK = 128
"""Experts of the larger model of Llama 4."""


def rotary_factor(gguf: Gguf, head_dim: int) -> float | None:
    """`partial_rotary_factor`, None where whole heads are rotated. Half a dimension more, since a share is rounded
    down."""
    rotated = gguf.get("rope.dimension_count") or head_dim
    return (rotated + 0.5) / head_dim if rotated < head_dim else None


def layer_types(gguf: Gguf) -> list[str] | None:
    """Names of local and global layers, where the file has a pattern for each layer."""
    pattern = gguf.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list | tuple):
        return None
    return [SLIDING if local else FULL for local in pattern]


def rope_fields(gguf: Gguf) -> dict[str, Any] | None:
    """rope_scaling: Llama 3.1's and LongRoPE's are in tensors of factors, others are in the metadata."""
    length = gguf.get("rope.scaling.original_context_length")
    plain, long, short = (
        None if held is None else file_entry(held.path, held.start, torch.float32, held.shape).read(()).tolist()
        for held in map(gguf.tensors.get, FACTORS)
    )
    if plain is not None:
        return {"rope_type": "factors", "factor": 1.0, "factors": plain}
    if long is not None:
        found = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        found |= {"original_max_position_embeddings": length, "attention_factor": gguf.get("rope.scaling.attn_factor")}
        return {name: value for name, value in found.items() if value is not None}
    # A factor alone is linear scaling, under its older name in files of 2023; so does llama.cpp read it.
    kind, factor = (
        gguf.get("rope.scaling.type", "linear"),
        gguf.get("rope.scaling.factor", gguf.get("rope.scale_linear")),
    )
    if kind == "none" or (kind == "linear" and factor in (None, 0, 1)):
        return None
    metadata: dict[str, Any] = {"rope_type": kind, "factor": factor}
    metadata |= {"original_max_position_embeddings": length}
    metadata |= {"truncate": False} if gguf.architecture == "gpt-oss" else {}
    strength = gguf.get("rope.scaling.yarn_log_multiplier")
    metadata |= {
        "beta_fast": gguf.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": gguf.get("rope.scaling.yarn_beta_slow"),
        # Where the two are the same they cancel each other.
        **dict.fromkeys(("mscale", "mscale_all_dim"), strength),
        "llama_4_scaling_beta": gguf.get("attention.temperature_scale"),
    }
    return {name: value for name, value in metadata.items() if value is not None}
