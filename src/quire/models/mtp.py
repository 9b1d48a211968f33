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


class MTPNames(NamedTuple):
    """Names of the layer's tensors below `prefix`. block: the prefix of the block, empty where it is the layer's own.
    repeated: patterns of what the model has, too. normed: drafts after the first read the output after `norm`."""

    prefix: str
    embedding_norm: str
    hidden_norm: str
    project: str
    block: str
    norm: str
    repeated: Sequence[str] = ()
    normed: bool = False


def check_draft_layers(spec: ModelSpec) -> int:
    """1. Raises InvalidModel for a model with none, or with several."""
    if spec.draft_layers != 1:
        has = f"{spec.draft_layers} layers" if spec.draft_layers else "no layer"
        raise InvalidModel(
            f"{spec.architecture} has {has} for multi-token prediction, and speculative_config's method mtp needs one "
            "(num_nextn_predict_layers in config.json): use ngram, or a draft model"
        )
    return 1


def with_one_more(target: Llama) -> Llama:
    """The model as if it had a layer more, which attends as the last one that does, and has experts if others have."""
    spec, like = target.spec, target.spec.last_attention
    per_layer = ("windows", "chunks", "ropes", "layer_heads", "layer_mlp", "ahead")
    longer: dict[str, Any] = {name: (*each, each[like]) for name in per_layer if (each := getattr(spec, name))}
    more = copy(target)
    more.spec = replace(spec, layers=spec.layers + 1, **longer)
    return more


class NextTokenLayer:
    """The layer and what it shares with the model. kv_shapes: K/V that it keeps of a token."""

    def __init__(self, target: Llama, build: ModelBuilder, names: MTPNames) -> None:
        self.kv_shapes = target.spec.draft_kv_shapes
        target = with_one_more(target)
        spec, index = target.spec, target.spec.layers - 1
        layer = build.scope(names.prefix)
        layer.ignore(*names.repeated)
        build.optional.append(f"{names.prefix}.*")
        self.dtype, self.ops, self.embedding, self.head = target.dtype, target.ops, target.embedding, target.head
        self.normed, self.vocab = names.normed, spec.vocab
        self.rotary = target.rotaries[spec.layer_ropes[index]]
        self.embedding_norm = target.make_norm(layer, names.embedding_norm)
        self.hidden_norm = target.make_norm(layer, names.hidden_norm)
        self.project = layer.dense(names.project, 2 * spec.hidden, spec.hidden)
        self.block = target.make_block(layer.scope(names.block) if names.block else layer, index)
        self.nothing = build.norm_layer(None)
        self.norm = build.norm_layer(target.make_norm(layer, names.norm))

    def forward(self, batch: RaggedBatch, hidden: Tensor, kv: Sequence[LayerKV]) -> Tensor:
        """What `logits` and the next draft read, [R, hidden] of `batch.output_indices`, or [T, hidden] of all tokens.

        batch: its tokens are those after the positions that it names. hidden [T, hidden]: of these positions, the
        model's or what this method returned. kv: of the layer alone; takes K/V at the batch's slots.
        """
        batch = self.ops.prepare(batch)
        angles = self.rotary(batch.positions, batch.rope_positions)
        embedded = self.ops.norm(self.embedding(batch.tokens), self.embedding_norm)
        residual = self.project.apply(torch.cat((embedded, self.ops.norm(hidden, self.hidden_norm)), -1))
        x, residual = self.block(
            torch.zeros_like(residual), residual, self.nothing, angles, batch, kv[0], batch.output_indices
        )
        normed, residual = self.norm.add(x, residual, self.block.after_mlp)
        return normed if self.normed else residual

    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` returned, [R, hidden] -> [R, V]."""
        return next_token_logits(self.head, hidden if self.normed else self.norm(hidden))


def make_mtp(target: Llama, build: ModelBuilder, names: MTPNames) -> NextTokenLayer | None:
    """The layer, if it is to be loaded, in the last stage; else its tensors are skipped."""
    if target.spec.draft_layers:
        if build.pipeline.last:
            return NextTokenLayer(target, build, names)
        build.ignore(f"{names.prefix}.*")
        return None
    build.skip_drafts(f"{names.prefix}.*")
    return None


def deepseek_names(layers: int) -> MTPNames:
    """Of DeepSeek V3 and models like it: the layer is numbered after the others."""
    repeated = ("embed_tokens.*", "shared_head.head.*", "self_attn.rotary_emb.inv_freq")
    return MTPNames(f"model.layers.{layers}", "enorm", "hnorm", "eh_proj", "", "shared_head.norm", repeated=repeated)


QWEN_NAMES = MTPNames("mtp", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "layers.0", "norm", normed=True)
"""Of Qwen3-Next and Qwen3.5."""
