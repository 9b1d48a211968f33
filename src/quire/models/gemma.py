"""The text models of Gemma 2 and 3 (Gemma Team 2024, 2025).

Attention and MLP stand between two norms each, embeddings are scaled, and local layers with a sliding window alternate
with global ones. Norms store their weight minus 1. Gemma 2 has soft caps on scores and logits; Gemma 3 norms queries
and keys instead, and has another RoPE base for local layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.basic import RMSNorm, ScaledEmbedding
from quire.layers.builder import ModelBuilder
from quire.models.llama import build_attention
from quire.models.spec import FULL, SLIDING, Config, ModelSpec, read_decoder, read_locals, read_rope
from quire.ops.base import Angles
from quire.ops.ragged import LayerKV, RaggedBatch, select_rows
from quire.types import UNLIMITED

VISION = ("vision_tower.*", "multi_modal_projector.*", "vision_model.*", "embed_vision.*")
"""Tensors of multimodal checkpoints that do not belong to the decoder."""


class Block:
    """One layer: attention and a gated MLP, each between two norms."""

    def __init__(self, spec: ModelSpec, build: ModelBuilder, index: int) -> None:
        def norm(name: str) -> RMSNorm:
            return build.rms_norm(name, spec.hidden, spec.norm_eps, shift=1.0)

        self.before_attention = norm("input_layernorm")
        self.attention = build_attention(spec, build, index, norm_shift=1.0)
        self.after_attention = norm("post_attention_layernorm")
        self.before_mlp = norm("pre_feedforward_layernorm")
        self.mlp = build.scope("mlp").gated_mlp(spec.hidden, spec.mlp, spec.activation)
        self.after_mlp = norm("post_feedforward_layernorm")

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        after: RMSNorm | None,
        angles: Angles,
        batch: RaggedBatch,
        kv: LayerKV,
        output: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(output of the layer before, residual stream without it), both [T, hidden] -> the same after this layer.

        after: the norm of the layer before that its output has still to pass. output: indices of the rows to return.
        """
        x, residual = self.before_attention.add(x, residual, after)
        x = self.attention(x, angles, batch, kv, output)
        x, residual = self.before_mlp.add(x, select_rows(residual, output), self.after_attention)
        return self.mlp(x), residual


class Gemma:
    """What both generations have in common, see `registry.Model`."""

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        self.spec = spec
        self.ops = build.ops
        self.dtype = build.dtype
        build.ignore(*VISION)
        build.rename({"language_model.model.": "model.", "model.language_model.": "model.", "language_model.": ""})
        body = build.scope("model")
        body.ignore(*VISION)
        table = body.embedding("embed_tokens", spec.vocab, spec.hidden)
        self.embedding = ScaledEmbedding(table, spec.hidden**0.5)
        self.rotaries = {rope: body.rotary(rope) for rope in dict.fromkeys(spec.ropes)}
        self.blocks = [Block(spec, body.scope(f"layers.{i}"), i) for i in range(spec.layers)]
        self.norm = body.rms_norm("norm", spec.hidden, spec.norm_eps, shift=1.0)
        self.head = build.head("lm_head", spec.hidden, spec.vocab, table if spec.tie else None, soft_cap=spec.logit_cap)

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """See `registry.Model`."""
        batch = self.ops.prepare(batch)
        angles = {rope: rotary(batch.positions) for rope, rotary in self.rotaries.items()}
        residual = self.embedding(batch.tokens)
        x = residual.new_zeros(residual.shape)
        after: RMSNorm | None = None
        for block, rope, cache in zip(self.blocks, self.spec.ropes, kv, strict=True):
            output = batch.output_indices if block is self.blocks[-1] else None
            x, residual = block(x, residual, after, angles[rope], batch, cache, output)
            after = block.after_mlp
        return batch.select_outputs(self.norm.add(x, residual, after)[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """See `registry.Model`."""
        return self.head(hidden)


class Gemma2(Gemma):
    """Gemma 2: soft caps on attention scores and logits."""

    architectures: ClassVar[Mapping[str, str]] = MappingProxyType({"Gemma2ForCausalLM": "gemma2"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = read_gemma(config, architecture, every=2)
        return replace(
            spec,
            score_cap=cap(config, "attn_logit_softcapping", 50.0),
            logit_cap=cap(config, "final_logit_softcapping", 30.0),
        )


class Gemma3(Gemma):
    """Gemma 3: normed queries and keys. Of multimodal checkpoints the decoder is loaded."""

    architectures: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"Gemma3ForCausalLM": "gemma3_text", "Gemma3ForConditionalGeneration": "gemma3"}
    )

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        config = Config({**DEFAULTS, **nested(config).fields})
        every = config.get(int, "sliding_window_pattern", "_sliding_window_pattern", default=6)
        spec = read_gemma(config, architecture, every=every)
        own = config.section("rope_parameters")
        full = own.section(FULL) if FULL in own.fields else config.section("rope_scaling")
        local_base = config.get(float, "rope_local_base_freq", default=10_000.0)
        base = config.get(float, "rope_theta", default=1e6)
        both = {
            False: read_rope(config, spec.head_dim, full, theta=base),
            True: read_rope(config, spec.head_dim, own.section(SLIDING), theta=local_base),
        }
        return replace(
            spec,
            rope=both[False],
            ropes=tuple(both[local] for local in read_locals(config, spec.layers, every=every)),
            qk_norm=True,
            score_cap=cap(config, "attn_logit_softcapping", 0.0),
            logit_cap=cap(config, "final_logit_softcapping", 0.0),
        )


DEFAULTS = MappingProxyType(
    {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    }
)
"""Fields that Gemma 3's published config.json files leave out."""


WHOLE = ("dtype", "torch_dtype", "eos_token_id")
"""Fields of a multimodal config.json that hold for the decoder too."""


def nested(config: Config) -> Config:
    """The decoder's section of a multimodal config.json, or the whole of another."""
    if "text_config" not in config.fields:
        return config
    shared = {name: config.fields[name] for name in WHOLE if name in config.fields}
    return Config({**shared, **config.section("text_config").fields})


def read_gemma(config: Config, architecture: str, *, every: int) -> ModelSpec:
    """Fields that Gemma 2 and 3 share. every: each how many-th layer is global, where there is no `layer_types`."""
    if config.get(bool, "use_bidirectional_attention", default=False):
        raise InvalidModel("config.json: use_bidirectional_attention: only causal attention is supported")
    spec = read_decoder(Config({"head_dim": 256, "tie_word_embeddings": True, **config.fields}), architecture)
    width = config.get(int, "sliding_window", default=0) or UNLIMITED
    share = config.get(float, "query_pre_attn_scalar", default=256.0)
    if share <= 0:
        raise InvalidModel(f"config.json: query_pre_attn_scalar must be above 0, not {share:g}")
    return replace(
        spec,
        windows=tuple(width if local else UNLIMITED for local in read_locals(config, spec.layers, every=every)),
        ropes=(spec.rope,) * spec.layers,
        activation=config.get(str, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        scale=share**-0.5,
    )


def cap(config: Config, name: str, default: float) -> float:
    """A soft cap: 0 for null, `default` where the field is missing."""
    return 0.0 if name in config.fields and config.fields[name] is None else config.get(float, name, default=default)
