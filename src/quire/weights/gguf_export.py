"""A checkpoint's tensors and shape with the names that GGUF files have for them: the opposite of `gguf_model`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.basic import RopeConfig, frequencies
from quire.models.spec import Config, ModelSpec
from quire.types import UNLIMITED
from quire.weights.entries import Cut, TensorEntry, rows_of
from quire.weights.files import listed
from quire.weights.gguf_names import FAMILIES, PATTERNS, RECURRENT, VARIANTS, Family
from quire.weights.gguf_recurrent import (
    WHOLE,
    no_mlp,
    recurrent_facts,
    state_to_file,
    to_file,
    written_family,
)

LAYER_NORMS = ("gpt2", "command-r", "cohere2", "nemotron", "starcoder2", "phimoe")
"""Architectures whose norms subtract the mean: their epsilon has another name."""

NARROW = ("llama4", "gpt-oss", "minimax-m2")


class Export(NamedTuple):
    """What a file of a model holds: llama.cpp's name of the architecture, metadata without it, tensors in order."""

    architecture: str
    facts: Mapping[str, Any]
    tensors: Sequence[tuple[str, TensorEntry, bool]]
    """Names, numbers, and whether they are read at once: see `NewTensor`."""


def family_of(architecture: str) -> tuple[str, Family]:
    """llama.cpp's name and tables of a config.json's architecture. Raises InvalidModel where it has none."""
    for name, family in FAMILIES.items():
        if family.architecture == architecture:
            return name, family
    for name, variants in VARIANTS.items():
        for family in variants.values():
            if family.architecture == architecture:
                return name, family
    known = ", ".join(sorted({family.architecture for family in FAMILIES.values()}))
    raise InvalidModel(
        f"{architecture} has no name in GGUF that is known here: not written (known: {known}); "
        "`quire serve --quantization` quantizes a model while it is loaded"
    )


def names_drafts(spec: ModelSpec) -> bool:
    """Whether files of a model have names for its layers that draft. Qwen3.5's share what is around their blocks, which
    files have for each: so there are names for one."""
    name, family = family_of(spec.architecture)
    several = spec.skipped_drafts > 1 and name in RECURRENT
    return any(part.startswith("nextn.") for part in family.names) and not several


def export(spec: ModelSpec, config: Config, entries: Mapping[str, TensorEntry]) -> Export:
    """What a GGUF file of a model holds. entries: the checkpoint's tensors, under the names that the model knows.

    Raises InvalidModel for a model that GGUF has no names for, and for one that is quantized already.
    """
    name, family = written_family(*family_of(spec.architecture), spec)
    packed = [key for key, entry in entries.items() if not entry.dtype.is_floating_point or entry.dtype.itemsize < 2]
    if packed:
        raise InvalidModel(f"the checkpoint is quantized already ({listed(packed)}): write GGUF of the original one")
    tensors = list(_tensors(name, family, spec, entries))
    return Export(name, dict(_facts(name, spec, config)), [*_factors(spec.rope), *tensors])


# ---------------------------------------------------------------- tensors


def _tensors(
    name: str, family: Family, spec: ModelSpec, entries: Mapping[str, TensorEntry]
) -> Iterator[tuple[str, TensorEntry, bool]]:
    """Every tensor once. Raises InvalidModel where one has no name."""
    left = to_file(name, spec, split_experts(entries))
    if spec.tie:
        left.pop("lm_head.weight", None)
    outer = [(part, "", theirs) for part, theirs in family.outer.items()]
    inner = [
        (part, f"blk.{i}.", f"{family.prefix}.{i}.{theirs}")
        for i in range(spec.layers + spec.draft_layers)
        for part, theirs in family.names.items()
    ]
    for part, before, theirs in (*outer[:-1], *inner, *outer[-1:]):
        for suffix in _suffixes(part):
            found = _take(left, theirs, part, suffix, spec)
            if found is not None:
                ours = f"{before}{part}{suffix}"
                yield ours, *_converted(name, family, spec, ours, found)
    if left:
        raise InvalidModel(f"{spec.architecture}: {listed(sorted(left))} has no name in GGUF that is known here")


def _suffixes(part: str) -> Sequence[str]:
    return ("",) if part.endswith((".weight", ".bias", ".scale")) or part in WHOLE else (".weight", ".bias")


def _take(left: dict[str, TensorEntry], theirs: str, part: str, suffix: str, spec: ModelSpec) -> TensorEntry | None:
    """The tensor of a part, which is taken out of `left`; those of all experts as one."""
    if "#" in theirs:
        count = 0 if spec.experts is None else spec.experts.num_experts
        names = [theirs.replace("#", str(e)) + suffix for e in range(count)]
        if not names or names[0] not in left:
            return None
        return stacked([left.pop(name) for name in names])
    key = theirs + suffix
    if key not in left:
        return None
    # Gate and up are one matrix of the checkpoint, and two of the file.
    if theirs.endswith("input_linear"):
        whole, half = left[key], left[key].shape[0] // 2
        first = part.startswith("ffn_gate")
        if not first:
            left.pop(key)
        return rows_of(whole, 0 if first else half, half)
    return left.pop(key)


GRANITE_EXPERT = re.compile(r"(.*block_sparse_moe\.)(input|output)_linear\.(\d+)\.weight")


def split_experts(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The entries with Granite's matrices of each expert, of gate and up in one, named as those of other families."""
    found = dict[str, TensorEntry]()
    for key, entry in entries.items():
        expert = GRANITE_EXPERT.fullmatch(key)
        if expert is None:
            found[key] = entry
            continue
        scope, half = f"{expert[1]}experts.{expert[3]}.", entry.shape[0] // 2
        if expert[2] == "output":
            found[f"{scope}down_proj.weight"] = entry
        else:
            found[f"{scope}gate_proj.weight"] = rows_of(entry, 0, half)
            found[f"{scope}up_proj.weight"] = rows_of(entry, half, half)
    return found


def stacked(entries: Sequence[TensorEntry]) -> TensorEntry:
    """The matrices of all experts as one tensor."""

    def read(cut: Cut) -> Tensor:
        first, last, _ = (cut[0] if cut else slice(None)).indices(len(entries))
        return torch.stack([entry.read(cut[1:]) for entry in entries[first:last]])

    shape = (len(entries), *entries[0].shape)
    return replace(entries[0], shape=shape, read=read, copy=None, each=None, stored=None)


def _converted(name: str, family: Family, spec: ModelSpec, ours: str, entry: TensorEntry) -> tuple[TensorEntry, bool]:
    """The tensor as llama.cpp's converter stores it: see `gguf_model.undo_conversion`."""
    if ".ssm_" in ours:
        return state_to_file(ours, spec, entry), True
    if family.interleaved and (".attn_q." in ours or ".attn_k." in ours):
        heads = spec.heads if ".attn_q." in ours else spec.kv_heads
        return entry.transformed(entry.shape, lambda whole: interleaved(whole, heads)), True
    if ours.endswith(".ffn_gate_inp_shexp.weight"):
        return entry.transformed(entry.shape[1:], lambda whole: whole[0]), True
    if family.shift and ours.endswith("norm.weight"):
        return entry.transformed(entry.shape, lambda whole: whole.float() + family.shift), True
    if (
        name == "gpt2"
        and ours.split(".")[-2] in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
        and len(entry.shape) == 2
    ):
        return entry.transformed(entry.shape[::-1], lambda whole: whole.t()), True
    return entry, False


def interleaved(whole: Tensor, heads: int) -> Tensor:
    """Rows of each head, from RoPE's halves to interleaved pairs."""
    return whole.view(heads, 2, whole.shape[0] // heads // 2, *whole.shape[1:]).transpose(1, 2).reshape(whole.shape)


def constant(values: Sequence[float]) -> TensorEntry:
    """A float32 vector."""
    held = torch.tensor(values, dtype=torch.float32)
    return TensorEntry(
        torch.float32, (len(values),), ("", 0), "F32", held.nbytes, lambda cut: held[cut] if cut else held
    )


def _factors(rope: RopeConfig) -> Iterator[tuple[str, TensorEntry, bool]]:
    """Factors of wavelengths, which llama.cpp reads from tensors."""
    if rope.kind == "llama3":
        plain = frequencies(RopeConfig(dim=rope.dim, theta=rope.theta))
        yield "rope_freqs.weight", constant((plain / frequencies(rope)).tolist()), False
    elif rope.short_factors:
        yield "rope_factors_long.weight", constant(rope.factors), False
        yield "rope_factors_short.weight", constant(rope.short_factors), False
    elif rope.kind == "factors":
        yield "rope_freqs.weight", constant(rope.factors), False


# ---------------------------------------------------------------- metadata


def _facts(name: str, spec: ModelSpec, config: Config) -> Iterator[tuple[str, Any]]:
    yield "block_count", spec.layers + spec.draft_layers
    if spec.draft_layers:
        yield "nextn_predict_layers", spec.draft_layers
    yield "context_length", config.get(int, "max_position_embeddings", "n_positions", default=spec.context)
    yield "embedding_length", spec.hidden
    yield "feed_forward_length", _width(name, spec, config)
    yield "attention.head_count", spec.heads
    yield "attention.head_count_kv", spec.kv_heads
    yield "attention.key_length", spec.head_dim
    yield "attention.value_length", spec.head_dim
    yield "vocab_size", spec.vocab
    yield f"attention.layer_norm{'' if name in LAYER_NORMS else '_rms'}_epsilon", spec.norm_eps
    if name != "gpt2" and (spec.rope.dim or spec.ropes):
        yield from _rope_facts(spec)
    width = min(spec.windows)
    if width < UNLIMITED:
        yield "attention.sliding_window", width
        if name in PATTERNS:
            yield "attention.sliding_window_pattern", [window < UNLIMITED for window in spec.windows]
    if spec.logit_cap:
        yield "final_logit_softcapping", spec.logit_cap
    if spec.score_cap:
        yield "attn_logit_softcapping", spec.score_cap
    yield from _scale_facts(name, spec, config)
    if spec.experts is not None:
        yield from _expert_facts(name, spec, config)
    if name in RECURRENT:
        # Some of these are lists in place of a number above.
        yield from recurrent_facts(name, spec, config)


def _width(name: str, spec: ModelSpec, config: Config) -> int:
    return config.get(int, "intermediate_size_mlp", default=spec.mlp) if name == "llama4" else spec.mlp


def _rope_facts(spec: ModelSpec) -> Iterator[tuple[str, Any]]:
    rope = next((rope for rope in (spec.rope, *spec.ropes) if rope.dim), spec.rope)
    yield "rope.dimension_count", rope.dim
    yield "rope.freq_base", rope.theta
    if rope.kind in ("linear", "yarn"):
        yield "rope.scaling.type", rope.kind
        yield "rope.scaling.factor", rope.factor
    if rope.original and (rope.kind == "yarn" or rope.short_factors):
        yield "rope.scaling.original_context_length", rope.original
    if rope.short_factors:
        yield "rope.scaling.attn_factor", rope.gain


def _scale_facts(name: str, spec: ModelSpec, config: Config) -> Iterator[tuple[str, Any]]:
    if name in ("granite", "granitemoe") or spec.architecture.startswith("GraniteMoeHybrid"):
        yield "attention.scale", spec.scale
        yield "embedding_scale", spec.embedding_scale
        yield "residual_scale", spec.residual_scale
        yield "logit_scale", config.get(float, "logits_scaling", default=1.0)
    if name in ("command-r", "cohere2"):
        yield "logit_scale", spec.logit_scale


def _expert_facts(name: str, spec: ModelSpec, config: Config) -> Iterator[tuple[str, Any]]:
    experts = spec.experts
    assert experts is not None
    yield "expert_count", experts.num_experts
    yield "expert_used_count", experts.num_experts_per_token
    own = ("moe_intermediate_size",) if name not in NARROW else ("intermediate_size",)
    width = config.get(int, *own, default=0)
    if width:
        yield "expert_feed_forward_length", width
    for key, *theirs in (
        ("expert_shared_count", "n_shared_experts", "moe_num_shared_experts"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size", "shared_intermediate_size"),
        ("leading_dense_block_count", "first_k_dense_replace", "moe_layer_start_index"),
        ("interleave_moe_layer_step", "moe_layer_interval", "interleave_moe_layer_step"),
        ("expert_group_count", "n_group"),
        ("expert_group_used_count", "topk_group"),
    ):
        if any(config.fields.get(each) is not None for each in theirs):
            yield key, config.get(int, *theirs)
    if experts.scale != 1.0:
        yield "expert_weights_scale", experts.scale
    if name == "glm4moe":
        yield "expert_weights_norm", experts.normalize_weights


# ---------------------------------------------------------------- whether the file means the same


def differences(ours: ModelSpec, theirs: ModelSpec) -> list[str]:
    """Fields of two shapes that do not mean the same: numbers of float32, and rotary embeddings by their angles. Layers
    that draft may be left out, of which there is a warning."""
    return [
        field.name
        for field in fields(ModelSpec)
        if field.name not in ("architecture", "dtype", "stop", "context", "rope", "ropes", "skipped_drafts")
        and not (field.name == "mlp" and no_mlp(ours))
        and not _same(getattr(ours, field.name), getattr(theirs, field.name))
    ] + (["rope"] if not all(map(_same_rope, ours.layer_ropes, theirs.layer_ropes)) else [])


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-5)
    if is_dataclass(one) and is_dataclass(other):
        return all(_same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return bool(one == other)


def _same_rope(one: RopeConfig, other: RopeConfig) -> bool:
    if (one.dim, one.interleaved) != (other.dim, other.interleaved) or not one.dim:
        return (one.dim, one.interleaved) == (other.dim, other.interleaved)
    alike = torch.allclose(frequencies(one), frequencies(other), rtol=1e-4)
    return alike and math.isclose(one.gain, other.gain, rel_tol=1e-4) and one.query_beta == other.query_beta
