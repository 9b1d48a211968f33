"""Multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3): layers of the model that draft the tokens after the next.

At position p the first reads the model's hidden state there, after the final norm, and the embedding of the token at
p + 1: each normed, one behind the other, projected to the width of the residual stream. One block of the model follows,
with K/V of its own at position p, and the model's own head, which gives the token at p + 2. Where there is another, it
reads the first one's output at p and the token at p + 2, and gives the token at p + 3. For more drafts than there are
layers, the last reads its own output. Checkpoints repeat embedding and head in each layer; they are the model's, and
not loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.builder import ModelBuilder
from quire.models.heads import next_token_logits
from quire.models.llama import Llama
from quire.models.spec import ModelSpec
from quire.ops.ragged import LayerKV, RaggedBatch


class DraftBlock(NamedTuple):
    """A decoder block of a layer for multi-token prediction. name: prefix of its tensors below the layer's, or empty.
    like: number of the model's layer whose kind of attention it has. dense: an MLP, even in a model of experts."""

    name: str
    like: int
    dense: bool = False


class MTPNames(NamedTuple):
    """Names of one layer's tensors below `prefix`. Layers that name the same tensor share it. norm: empty for the
    model's final norm. repeated: patterns of copies of the model's own tensors. normed: the next draft reads this
    layer's output after `norm`. hidden_first: the projection's input begins with the hidden state, otherwise with the
    embedding. pattern: of all tensors of all layers, if they do not all begin with `prefix`."""

    prefix: str
    embedding_norm: str
    hidden_norm: str
    project: str
    blocks: Sequence[DraftBlock]
    norm: str
    repeated: Sequence[str] = ()
    normed: bool = False
    hidden_first: bool = False
    pattern: str = ""

    @property
    def all(self) -> str:
        """Pattern of the names of all tensors."""
        return self.pattern or f"{self.prefix}.*"


MOST_LAYERS = 32
"""The most tokens that can be drafted in a step."""


def check_draft_layers(spec: ModelSpec) -> int:
    """The number of layers for multi-token prediction. Raises InvalidModel for 0 and for more than MOST_LAYERS."""
    if not 1 <= spec.draft_layers <= MOST_LAYERS:
        has = f"{spec.draft_layers} layers" if spec.draft_layers else "no layer"
        raise InvalidModel(
            f"{spec.architecture} has {has} for multi-token prediction, and speculative_config's method mtp needs 1 to "
            f"{MOST_LAYERS} (num_nextn_predict_layers in config.json): use ngram, or a draft model"
        )
    return spec.draft_layers


def with_blocks(target: Llama, blocks: Sequence[DraftBlock]) -> Llama:
    """A copy of the model with these blocks as further layers, by which they are built."""
    spec, like = target.spec, [block.like for block in blocks]
    per_layer = ("windows", "chunks", "ropes", "layer_heads", "layer_mlp", "ahead")
    longer: dict[str, Any] = {
        name: (*each, *(each[i] for i in like)) for name in per_layer if (each := getattr(spec, name))
    }
    if spec.experts is not None:
        dense = {spec.layers + i for i, block in enumerate(blocks) if block.dense}
        longer["experts"] = replace(spec.experts, dense_layers=spec.experts.dense_layers | dense)
    more = copy(target)
    more.spec = replace(spec, layers=spec.layers + len(blocks), **longer)
    return more


class NextTokenLayer:
    """A layer for multi-token prediction. Embedding, RoPE and head are the model's. target: a model of `with_blocks`,
    whose layers from number `first` on are this layer's blocks."""

    def __init__(self, target: Llama, build: ModelBuilder, names: MTPNames, first: int) -> None:
        spec, layer = target.spec, build.scope(names.prefix)
        layer.ignore(*names.repeated)
        self.ops, self.embedding, self.head = target.ops, target.embedding, target.head
        self.normed, self.hidden_first = names.normed, names.hidden_first
        self.rotary = target.rotaries[spec.layer_ropes[first]]
        self.embedding_norm = target.make_norm(layer, names.embedding_norm)
        self.hidden_norm = target.make_norm(layer, names.hidden_norm)
        self.project = layer.dense(names.project, 2 * spec.hidden, spec.hidden)
        self.blocks = [
            target.make_block(layer.scope(block.name) if block.name else layer, first + i)
            for i, block in enumerate(names.blocks)
        ]
        self.nothing = build.norm_layer(None)
        self.norm = build.norm_layer(target.make_norm(layer, names.norm)) if names.norm else target.norm

    def forward(self, batch: RaggedBatch, hidden: Tensor, kv: Sequence[LayerKV]) -> Tensor:
        """What `logits` and the next draft read, [R, hidden] of `batch.output_indices`, or [T, hidden] of all tokens.

        batch: its tokens are those after the positions that it names. hidden [T, hidden]: of these positions, the
        model's or what this method returned. kv: of the layer alone; takes K/V at the batch's slots.
        """
        batch = self.ops.prepare(batch)
        angles = self.rotary(batch.positions, batch.rope_positions)
        both = self.ops.norm(self.embedding(batch.tokens), self.embedding_norm), self.ops.norm(hidden, self.hidden_norm)
        residual = self.project.apply(torch.cat(both[::-1] if self.hidden_first else both, -1))
        x, after, last = torch.zeros_like(residual), self.nothing, self.blocks[-1]
        for block in self.blocks:
            output = batch.output_indices if block is last else None
            x, residual = block(x, residual, after, angles, batch, kv[0], output)
            after = block.after_mlp
        normed, residual = self.norm.add(x, residual, after)
        return normed if self.normed else residual

    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` returned, [R, hidden] -> [R, V]."""
        return next_token_logits(self.head, hidden if self.normed else self.norm(hidden))


class NextTokenLayers:
    """A model's layers for multi-token prediction; each makes one draft, the last one all further ones too. kv_shapes:
    K/V shapes of a token, by layer."""

    def __init__(self, target: Llama, build: ModelBuilder, names: Sequence[MTPNames]) -> None:
        spec = target.spec
        self.kv_shapes, self.dtype, self.vocab = spec.draft_kv_shapes, target.dtype, spec.vocab
        build.optional += (each.all for each in names)
        longer = with_blocks(target, [block for each in names for block in each.blocks])
        first = [spec.layers + sum(len(each.blocks) for each in names[:i]) for i in range(len(names))]
        self.layers = [NextTokenLayer(longer, build, each, at) for each, at in zip(names, first, strict=True)]


def make_mtp(target: Llama, build: ModelBuilder, names: Callable[[int], MTPNames]) -> NextTokenLayers | None:
    """The layers, if they are loaded and this is the last stage; else their tensors are skipped. names: by number."""
    spec = target.spec
    every = [names(i) for i in range(max(1, spec.draft_layers, spec.skipped_drafts))]
    if spec.draft_layers and build.pipeline.last:
        return NextTokenLayers(target, build, every)
    for pattern in dict.fromkeys(each.all for each in every):
        (build.ignore if spec.draft_layers else build.skip_drafts)(pattern)
    return None


def deepseek_names(spec: ModelSpec, layer: int) -> MTPNames:
    """Names in DeepSeek V3's and similar checkpoints, where these layers are numbered after the others."""
    repeated = ("embed_tokens.*", "shared_head.head.*", "self_attn.rotary_emb.inv_freq")
    own = ("enorm", "hnorm", "eh_proj", [DraftBlock("", spec.last_attention)], "shared_head.norm")
    return MTPNames(f"model.layers.{spec.layers + layer}", *own, repeated=repeated, normed=True)


def qwen_names(spec: ModelSpec, layer: int) -> MTPNames:
    """Names in Qwen3-Next's and Qwen3.5's checkpoints: layers share all tensors but their blocks."""
    block = DraftBlock(f"layers.{layer}", spec.last_attention)
    return MTPNames("mtp", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", [block], "norm", normed=True)
