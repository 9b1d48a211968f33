"""Llama 2, 3, 3.1, 3.2 and models built like them (Touvron et al. 2023; Dubey et al. 2024).

Every decoder with a residual stream is this one with other norms, matrices or numbers: what a model lacks is a value, a
norm that is None, a scale of 1, a layer without rotary embedding, on the same path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from quire.layers.basic import Attention, GatedMLP, Heads, NormLayer, NormReader
from quire.layers.builder import GATED, QK_NORMS, QKV, ExpertNames, ModelBuilder
from quire.layers.delta import GatedDelta
from quire.layers.latent import LatentAttention
from quire.layers.linear import ParallelGroup
from quire.layers.mamba import Mamba2
from quire.layers.quantization.packed import projection_of
from quire.layers.vision import VisionTower
from quire.models.heads import lm_head, next_token_logits, score_head
from quire.models.spec import Config, ModelSpec, read_decoder
from quire.ops.capture import PRECOMPILING
from quire.ops.operands import Angles, Decoder, DecoderLayer, Norm, Norms
from quire.ops.ragged import LayerKV, RaggedBatch, select_rows


def received(batch: RaggedBatch, spec: ModelSpec, dtype: torch.dtype) -> Tensor:
    """Where the residual stream of another stage is put, [T, hidden]."""
    return torch.empty(len(batch.tokens), spec.hidden, dtype=dtype, device=batch.tokens.device)


def outline(part: object) -> object:
    """By what layers differ whose kernels do: their parts, their numbers, and how tensors lie in memory."""
    if isinstance(part, Tensor):
        return part.dtype, part.shape, part.stride(), part.data_ptr() % 16
    if isinstance(part, tuple | list):
        return type(part), *map(outline, part)
    if isinstance(part, str):
        return re.sub("[0-9]+", "#", part)  # as names of tensors differ from layer to layer
    if part is None or isinstance(part, int | float):
        return part
    if type(part).__module__.startswith(("quire.layers.", "quire.models.")):
        names = [*getattr(part, "__slots__", ()), *getattr(part, "__dict__", ())]
        return type(part), *((name, outline(getattr(part, name))) for name in names)
    return type(part)


class MLPFunction(Protocol):
    """An MLP, or experts."""

    @property
    def reader(self) -> NormReader | None:
        """What reads the norm before it; None: a tensor is read. See `NormLayer.add_for`."""

    def __call__(self, x: Tensor, batch: RaggedBatch | None = None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. batch: whose tokens x is of; rows of its null block may be left out."""

    def leave_sum(self) -> ParallelGroup:
        """See `RowParallelLinear.leave_sum`."""


Mixer: TypeAlias = Attention | LatentAttention | GatedDelta | Mamba2
"""What brings tokens together in a layer."""


class BlockNorms(NamedTuple):
    """Names of the norms of a layer, empty for none: of what attention and the MLP read, and of what they add."""

    before_attention: str = ""
    after_attention: str = ""
    before_mlp: str = ""
    after_mlp: str = ""


class Block:
    """One layer: attention and `mlp`, each between two norms, most of which a model does not have.

    leaves_sums: what they return is added up over ranks where it is added to the residual stream.
    """

    leaves_sums: ClassVar[bool] = True

    def __init__(self, norms: Sequence[NormLayer], attention: Mixer, mlp: MLPFunction) -> None:
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = norms
        self.attention = attention
        self.mlp = mlp
        if self.leaves_sums:
            self.after_attention.parallel = attention.out.leave_sum()
            self.after_mlp.parallel = mlp.leave_sum()

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        after: NormLayer,
        angles: Angles,
        batch: RaggedBatch,
        kv: LayerKV,
        output: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(output of the layer before, residual stream without it), both [T, hidden] -> the same after this layer.

        after: the norm of the layer before that its output has still to pass. output: indices of the rows to return,
        None for all.
        """
        read, residual = self.before_attention.add_for(x, residual, after, self.attention.reader, batch)
        x = self.attention(read, angles, batch, kv, output)
        residual, real = select_rows(residual, output), batch if output is None else None
        read, residual = self.before_mlp.add_for(x, residual, self.after_attention, self.mlp.reader, real)
        return self.mlp(read, real), residual

    def describe(self) -> DecoderLayer | None:
        """The layer for `Ops.decoder`; None: it has something that those do not know."""
        attention, mlp = self.attention, self.mlp
        # A subclass computes otherwise.
        if type(self) is not Block or type(attention) is not Attention or type(mlp) is not GatedMLP:
            return None
        before, after = (self.before_attention, self.before_mlp), (self.after_attention, self.after_mlp)
        linears = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
        qkv, out, gate_up, down = (projection_of(each.stored) for each in linears)
        plain = all(each.norm is None and each.gain is None for each in after)
        whole = attention.out.parallel.size == mlp.down.parallel.size == 1
        norms = before[0].norm, before[1].norm
        if not (plain and whole and qkv and out and gate_up and down and norms[0] and norms[1]):
            return None
        return DecoderLayer(
            norms[0],
            qkv,
            attention.heads.count,
            attention.norms,
            attention.scores,
            out,
            after[0].scale,
            norms[1],
            gate_up,
            mlp.gate,
            down,
            after[1].scale,
        )


class AnyBlock(Protocol):
    """A layer, see `Block`."""

    after_mlp: NormLayer

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        after: NormLayer,
        angles: Angles,
        batch: RaggedBatch,
        kv: LayerKV,
        output: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """See `Block`."""


class Llama:
    """A decoder of Llama's structure, see `registry.Model`. Others override `read` and what differs of the rest."""

    architectures: ClassVar[Mapping[str, str]] = MappingProxyType({"LlamaForCausalLM": "llama"})

    block: ClassVar[type[Block]] = Block
    norms: ClassVar[BlockNorms] = BlockNorms("input_layernorm", before_mlp="post_attention_layernorm")
    qkv: ClassVar[Sequence[str]] = QKV
    qk_norms: ClassVar[Sequence[str]] = QK_NORMS
    mlp_names: ClassVar[Sequence[str]] = GATED
    sinks: ClassVar[str] = ""
    attention: ClassVar[type[Attention]] = Attention
    attention_name: ClassVar[str] = "self_attn"
    expert_names: ClassVar[ExpertNames] = ExpertNames()
    vision: VisionTower | None = None

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        self.spec = spec
        self.ops = build.ops
        self.dtype = build.dtype
        self.unpacked = build.unpacked
        body = build.scope("model")
        body.ignore("layers.*.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq")
        self.pipeline, last = build.pipeline, build.pipeline.last
        embeds = spec.embeds(build.pipeline) or (last and (spec.tie or bool(spec.draft_layers)))
        table = body.here(embeds, "embed_tokens")
        self.embedding = table.embedding("embed_tokens", spec.vocab, spec.hidden, scale=spec.embedding_scale)
        self.rotaries = {rope: body.rotary(rope) for rope in dict.fromkeys(spec.layer_ropes)}
        self.blocks = [self.make_block(each, i) for i, each in body.each_layer("layers", spec.layers, spec.own_layers)]
        self.nothing = build.norm_layer(None)
        self.norm = build.norm_layer(self.make_norm(body.here(last, "norm"), "norm"))
        scales = {"soft_cap": spec.logit_cap, "scale": spec.logit_scale}
        self.head = lm_head(spec, build.here(last, "lm_head"), self.embedding, bias=spec.head_bias, **scales)
        self.classify = score_head(spec, build.here(last, "score"))

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        return read_decoder(config, architecture)

    def make_norm(self, build: ModelBuilder, name: str) -> Norm:
        """A norm of the residual stream."""
        return build.rms_norm(name, self.spec.hidden, self.spec.norm_eps, shift=self.spec.norm_shift)

    def make_block(self, build: ModelBuilder, index: int) -> AnyBlock:
        """Layer `index`."""
        norms = []
        for field, name in self.norms._asdict().items():
            scale = self.spec.residual_scale if field.startswith("after") else 1.0
            norms.append(build.norm_layer(self.make_norm(build, name) if name else None, scale))
        return self.block(norms, self.make_attention(build, index), self.make_mlp(build, index))

    def make_attention(self, build: ModelBuilder, index: int) -> Mixer:
        """`self_attn` of layer `index`."""
        spec, scope = self.spec, build.scope(self.attention_name)
        # A norm of all heads at once needs all of them.
        scope = scope.replicated() if spec.qk_norm == "together" else scope
        heads = Heads(
            count=spec.heads,
            kv=spec.kv_heads,
            dim=spec.head_dim,
            scale=spec.scale or spec.head_dim**-0.5,
            window=spec.windows[index],
            soft_cap=spec.score_cap,
            chunk=spec.layer_chunks[index],
            ahead=spec.layer_ahead[index],
        )
        norms = self.make_qk_norms(scope) if spec.qk_norm else None
        return scope.attention(
            spec.hidden,
            heads,
            names=self.qkv,
            bias=spec.qkv_bias,
            out_bias=spec.out_bias,
            norms=norms,
            sinks=self.sinks,
            kind=self.attention,
        )

    def make_qk_norms(self, build: ModelBuilder) -> Norms:
        """The norms of q and k."""
        spec, together = self.spec, self.spec.qk_norm == "together"
        sizes = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim) if together else (spec.head_dim,) * 2
        q, k = (
            build.rms_norm(name, size, spec.norm_eps, shift=spec.norm_shift)
            for name, size in zip(self.qk_norms, sizes, strict=True)
        )
        return Norms(q, k, after_rope=spec.qk_norm == "after_rope")

    def make_mlp(self, build: ModelBuilder, index: int) -> MLPFunction:
        """The MLP of layer `index`, or its experts."""
        spec, scope = self.spec, build.scope("mlp")
        if spec.experts is not None and index not in spec.experts.dense_layers:
            return build.experts(
                spec.hidden, spec.experts, spec.activation, names=self.expert_names, bias=spec.mlp_bias
            )
        return scope.gated_mlp(spec.hidden, spec.mlp, spec.activation, bias=spec.mlp_bias, names=self.mlp_names)

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """See `registry.Model`."""
        batch = self.ops.prepare(batch)
        angles = self.layer_angles([rotary(batch.positions, batch.rope_positions) for rotary in self.rotaries.values()])
        residual = self.enter(batch)
        x, residual, done = self.run_together(batch, kv, angles, residual)
        after, spec = self.blocks[done - 1].after_mlp if done else self.nothing, self.spec
        for i, block in self.numbered_blocks(done):
            output = batch.output_indices if i == spec.layers - 1 else None
            x, residual = block(x, residual, after, angles[i], batch, kv[self.kv_layers[i]], output)
            residual = batch.add_features(i, residual)
            after = block.after_mlp
        return self.leave(batch, x, residual, after)

    def numbered_blocks(self, first: int) -> Sequence[tuple[int, AnyBlock]]:
        """This stage's layers from one on, with their numbers. Where kernels are compiled ahead, only those that may
        launch others than the layers before them: what is computed then is meaningless."""
        blocks = list(zip(self.spec.own_layers, self.blocks, strict=True))
        return blocks[first:] if PRECOMPILING.get() is None else [blocks[at] for at in self.distinct if at >= first]

    @cached_property
    def distinct(self) -> Sequence[int]:
        """Of this stage's layers, by place: the first of each kind, and the last, which computes some rows only."""
        kinds = {
            (self.spec.layer_ropes[i], outline(block)): at
            for at, (i, block) in reversed([*enumerate(zip(self.spec.own_layers, self.blocks, strict=True))])
        }
        return sorted({*kinds.values(), len(self.blocks) - 1})

    # Worked out once: by each layer in each step, they took a tenth of a small model's time.

    @cached_property
    def kv_layers(self) -> Sequence[int]:
        """See `ModelSpec.kv_layers`."""
        return self.spec.kv_layers

    @cached_property
    def rope_numbers(self) -> Sequence[int]:
        """Per layer, which of `rotaries` is its own."""
        number = {rope: i for i, rope in enumerate(self.rotaries)}
        return [number[rope] for rope in self.spec.layer_ropes]

    def layer_angles(self, angles: Sequence[Angles]) -> Sequence[Angles]:
        """Per layer, its angles. angles: of each of `rotaries`."""
        return [angles[number] for number in self.rope_numbers]

    @property
    def decoder(self) -> tuple[Decoder | None, int]:
        """What runs the first layers in one call, and how many: none while some are still to be packed."""
        if self.unpacked:
            self.unpacked = [each for each in self.unpacked if not each.packed]
        return (None, 0) if self.unpacked else self.packed_decoder

    @cached_property
    def packed_decoder(self) -> tuple[Decoder | None, int]:
        """The same, once all are packed."""
        described = [block.describe() if isinstance(block, Block) else None for block in self.blocks]
        layers = [each for each in takewhile(lambda each: each is not None, described) if each is not None]
        return (self.ops.decoder(layers) if layers else None), len(layers)

    def run_together(
        self, batch: RaggedBatch, kv: Sequence[LayerKV], angles: Sequence[Angles], residual: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """What `Block` returns of the first layers, as far as one call runs them, and how many those are."""
        (decoder, most), spec = self.decoder, self.spec
        if decoder is not None and batch.images is None:
            # What follows the last attention is computed for some rows only.
            most -= int(batch.output_indices is not None and most == len(self.blocks))
            own = spec.own_layers[:most]
            made = decoder(residual, batch, [kv[self.kv_layers[i]] for i in own], [angles[i] for i in own])
            if made is not None:
                return *made, most
        return residual.new_zeros(residual.shape), residual, 0

    def enter(self, batch: RaggedBatch) -> Tensor:
        """The residual stream [T, hidden] before this stage's layers."""
        if self.pipeline.first:
            return batch.with_images(self.embedding(batch.tokens))
        return self.pipeline.receive(received(batch, self.spec, self.dtype))

    def leave(self, batch: RaggedBatch, x: Tensor, residual: Tensor, after: NormLayer) -> Tensor:
        """What `forward` returns of the last layer's results, see `Block`: hidden states of the outputs, or in a stage
        before the last, the residual stream, which is sent."""
        if self.pipeline.last:
            return batch.select_outputs(self.norm.add(x, residual, after)[0])
        return self.pipeline.send(self.nothing.add(x, residual, after)[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """See `registry.Model`."""
        return next_token_logits(self.head, hidden)
