"""Tensors and metadata of recurrent layers for GGUF files that are written: the inverse of reading in `gguf_model`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from quire.layers.mamba import MambaConfig
from quire.models.spec import Config, ModelSpec
from quire.weights.entries import TensorEntry, rows_of
from quire.weights.gguf_model import key_head_order, rows_moved, sort_value_heads
from quire.weights.gguf_names import QWEN35_NAMES, QWEN_DRAFT_NAMES, VARIANTS, Family

WHOLE = ("ssm_a", "ssm_d")
"""Tensors whose names in a file have no `.weight`."""


def written_family(name: str, family: Family, spec: ModelSpec) -> tuple[str, Family]:
    """The architecture's name in llama.cpp, and its tensors' names as the current converter writes them."""
    if name == "nemotron_h" and spec.experts is not None:
        return "nemotron_h_moe", family
    if spec.architecture.startswith("GraniteMoeHybrid") and spec.experts is not None:
        return name, VARIANTS[name]["expert_count"]
    if name == "qwen3next":
        # Older files have queries, keys, values and gates in one matrix, like checkpoints.
        divided = {part: QWEN35_NAMES[part] for part in ("attn_qkv", "attn_gate")}
        return name, family._replace(names={k: v for k, v in family.names.items() if k != "ssm_in"} | divided)
    return name, family


def to_file(name: str, spec: ModelSpec, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """A checkpoint's tensors split, reordered and numbered as llama.cpp's converter does."""
    found = dict(entries)
    if name == "qwen3next":
        assert spec.delta is not None
        size, values = spec.delta.key_heads * spec.delta.key, spec.delta.value_heads * spec.delta.value
        back = torch.argsort(key_head_order(spec.delta.key_heads, size, values))
        for key in [key for key in found if key.endswith(".in_proj_qkvz.weight")]:
            whole = found.pop(key)
            sorted_rows = whole.transformed(whole.shape, rows_moved(back))
            scope = key.removesuffix("qkvz.weight")
            found[f"{scope}z.weight"] = rows_of(sorted_rows, 0, values)
            found[f"{scope}qkv.weight"] = rows_of(sorted_rows, values, 2 * size + values)
    if name.startswith("qwen35"):
        assert spec.delta is not None
        layer = f"model.layers.{spec.layers}."
        around = {f"mtp.{theirs}.weight": f"{layer}{ours}.weight" for ours, theirs in QWEN_DRAFT_NAMES.items()}
        found = {around.get(key, key.replace("mtp.layers.0.", layer)): entry for key, entry in found.items()}
        sizes = spec.delta.key_heads, spec.delta.value_heads, spec.delta.key, spec.delta.value
        found = sort_value_heads(found, *sizes, back=True)
    return found


def state_to_file(ours: str, spec: ModelSpec, entry: TensorEntry) -> TensorEntry:
    """A tensor of a recurrent layer in its shape in a file. The inverse of `gguf_model.undo_state_conversion`."""
    mamba = spec.mamba
    if ours.endswith(".ssm_a"):
        shape = (*entry.shape, 1) if mamba is not None else entry.shape
        return entry.transformed(shape, lambda whole: -whole.float().exp().view(shape))
    if ours.endswith(".ssm_d"):
        return entry.transformed((*entry.shape, 1), lambda whole: whole[:, None])
    if ours.endswith(".ssm_conv1d.weight"):
        return entry.transformed((entry.shape[0], entry.shape[2]), lambda whole: whole[:, 0])
    if ours.endswith(".ssm_norm.weight") and mamba is not None:
        groups = mamba.groups
        return entry.transformed((groups, entry.shape[0] // groups), lambda whole: whole.view(groups, -1))
    return entry


def recurrent_facts(name: str, spec: ModelSpec, config: Config) -> Iterator[tuple[str, Any]]:
    """Metadata of recurrent layers, and the entries that these architectures write otherwise."""
    delta = spec.delta
    if delta is not None:
        yield from _state_facts(delta.key, delta.key_heads, delta.value_heads, delta.value, delta.width)
        if every := config.get(int, "full_attention_interval", default=0):
            yield "full_attention_interval", every
        if sections := (config.fields.get("rope_parameters") or {}).get("mrope_section"):
            yield "rope.dimension_sections", [*sections, *([0] * (4 - len(sections)))]
        return
    mamba: MambaConfig | None = spec.mamba
    assert mamba is not None
    yield from _state_facts(mamba.key, mamba.groups, mamba.heads, mamba.value, mamba.width)
    kept = [0 if i in spec.recurrent else heads for i, (heads, _) in enumerate(spec.each_heads)]
    yield "attention.head_count_kv", kept
    if not name.startswith("nemotron_h"):
        rope = config.fields.get("rope_parameters") or config.fields
        if (theta := rope.get("rope_theta")) is not None:
            yield "rope.freq_base", float(theta)
        yield "rope.scaling.finetuned", bool(spec.rope.dim)
        yield "feed_forward_length", config.get(int, "intermediate_size", default=spec.mlp)
        if spec.experts is None and spec.architecture.startswith("Granite"):
            yield "expert_shared_feed_forward_length", spec.mlp
        return
    experts = spec.experts
    dense = {*range(spec.layers)} if experts is None else experts.dense_layers
    attends = {i for i, (heads, _) in enumerate(spec.each_heads) if heads}
    widths = [spec.mlp if i in dense or experts is None else experts.width for i in range(spec.layers)]
    yield "feed_forward_length", [0 if i in spec.recurrent | attends else width for i, width in enumerate(widths)]
    if experts is not None:
        yield "expert_shared_feed_forward_length", experts.shared
        yield "expert_weights_norm", experts.normalize_weights
        yield "expert_weights_scale", experts.scale
        if experts.latent:
            yield "moe_latent_size", experts.latent


def no_mlp(spec: ModelSpec) -> bool:
    """Whether no layer is an MLP, in a model whose layers are each attention, Mamba or an MLP: it has no MLP width."""
    attends = {i for i, (heads, _) in enumerate(spec.each_heads) if heads}
    alone = spec.mamba is not None and len(spec.recurrent | attends) < spec.layers
    return alone and spec.experts is not None and spec.experts.dense_layers <= spec.recurrent | attends


def _state_facts(state: int, groups: int, heads: int, value: int, width: int) -> Iterator[tuple[str, Any]]:
    yield "ssm.conv_kernel", width
    yield "ssm.state_size", state
    yield "ssm.group_count", groups
    yield "ssm.time_step_rank", heads
    yield "ssm.inner_size", heads * value
