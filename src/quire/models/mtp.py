"""Multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3): a layer of the model that drafts the token after the next.

At position p it reads the model's hidden state there, after the final norm, and the embedding of the token at p + 1:
each normed, one behind the other, projected to the width of the residual stream. One block of the model follows, with
K/V of its own at position p, and the model's own head, which gives the token at p + 2. For more drafts it reads its own
output instead of the model's. Checkpoints repeat embedding and head in the layer; they are the model's, and not loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """A block of the layer. name: prefix of its tensors, empty where it is the layer's own. like: the number of the
    model's layer that it attends as. dense: it has an MLP, where the model's other layers may have experts."""

    name: str
    like: int
    dense: bool = False


class MTPNames(NamedTuple):
    """Names of the layer's tensors below `prefix`. norm: empty for the model's own. repeated: patterns of what the
    model has, too. normed: drafts after the first read the output after `norm`. hidden_first: the projection reads the
    hidden state before the embedding. pattern: of all its tensors, where that is not what begins with `prefix`."""

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
        """The pattern of all its tensors."""
        return self.pattern or f"{self.prefix}.*"


def check_draft_layers(spec: ModelSpec) -> int:
    """1. Raises InvalidModel for a model with none, or with several."""
    if spec.draft_layers != 1:
        has = f"{spec.draft_layers} layers" if spec.draft_layers else "no layer"
        raise InvalidModel(
            f"{spec.architecture} has {has} for multi-token prediction, and speculative_config's method mtp needs one "
            "(num_nextn_predict_layers in config.json): use ngram, or a draft model"
        )
    return 1


def with_blocks(target: Llama, blocks: Sequence[DraftBlock]) -> Llama:
    """The model as if it had these blocks, too, as its last layers."""
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
    """The layer and what it shares with the model. kv_shapes: K/V that it keeps of a token."""

    def __init__(self, target: Llama, build: ModelBuilder, names: MTPNames) -> None:
        self.kv_shapes = target.spec.draft_kv_shapes
        first, own_norm = target.spec.layers, target.norm
        target = with_blocks(target, names.blocks)
        spec = target.spec
        layer = build.scope(names.prefix)
        layer.ignore(*names.repeated)
        build.optional.append(names.all)
        self.dtype, self.ops, self.embedding, self.head = target.dtype, target.ops, target.embedding, target.head
        self.normed, self.hidden_first, self.vocab = names.normed, names.hidden_first, spec.vocab
        self.rotary = target.rotaries[spec.layer_ropes[first]]
        self.embedding_norm = target.make_norm(layer, names.embedding_norm)
        self.hidden_norm = target.make_norm(layer, names.hidden_norm)
        self.project = layer.dense(names.project, 2 * spec.hidden, spec.hidden)
        self.blocks = [
            target.make_block(layer.scope(block.name) if block.name else layer, first + i)
            for i, block in enumerate(names.blocks)
        ]
        self.nothing = build.norm_layer(None)
        self.norm = build.norm_layer(target.make_norm(layer, names.norm)) if names.norm else own_norm

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


def make_mtp(target: Llama, build: ModelBuilder, names: MTPNames) -> NextTokenLayer | None:
    """The layer, if it is to be loaded, in the last stage; else its tensors are skipped."""
    if target.spec.draft_layers:
        if build.pipeline.last:
            return NextTokenLayer(target, build, names)
        build.ignore(names.all)
        return None
    build.skip_drafts(names.all)
    return None


def deepseek_names(spec: ModelSpec) -> MTPNames:
    """Of DeepSeek V3 and models like it: the layer is numbered after the others."""
    repeated = ("embed_tokens.*", "shared_head.head.*", "self_attn.rotary_emb.inv_freq")
    own = ("enorm", "hnorm", "eh_proj", [DraftBlock("", spec.last_attention)], "shared_head.norm")
    return MTPNames(f"model.layers.{spec.layers}", *own, repeated=repeated)


def qwen_names(spec: ModelSpec) -> MTPNames:
    """Of Qwen3-Next and Qwen3.5."""
    own = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", [DraftBlock("layers.0", spec.last_attention)], "norm")
    return MTPNames("mtp", *own, normed=True)
