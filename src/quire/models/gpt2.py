"""GPT-2 (Radford et al. 2019): learned positions, layer norms, biases everywhere, matrices stored [in, out]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.basic import NO_ROPE, Heads
from quire.layers.builder import ModelBuilder
from quire.models.heads import lm_head, next_token_logits, score_head
from quire.models.llama import received
from quire.models.spec import Config, ModelSpec, check_layers, read_stop
from quire.ops.operands import Angles
from quire.ops.ragged import LayerKV, RaggedBatch, select_rows
from quire.types import UNLIMITED


class Block:
    """One layer: attention and an MLP, each after a norm of the residual stream."""

    def __init__(self, spec: ModelSpec, build: ModelBuilder, scale: float) -> None:
        self.before_attention = build.norm_layer(build.layer_norm("ln_1", spec.hidden, spec.norm_eps))
        self.attention = build.scope("attn").attention(
            spec.hidden,
            Heads(count=spec.heads, kv=spec.kv_heads, dim=spec.head_dim, scale=scale),
            names=("c_attn",),
            out="c_proj",
            bias=True,
            out_bias=True,
            transposed=True,
        )
        self.before_mlp = build.norm_layer(build.layer_norm("ln_2", spec.hidden, spec.norm_eps))
        self.mlp = build.scope("mlp").mlp("c_fc", "c_proj", spec.hidden, spec.mlp, spec.activation, transposed=True)

    def __call__(self, x: Tensor, angles: Angles, batch: RaggedBatch, kv: LayerKV, output: Tensor | None) -> Tensor:
        """The residual stream [T, hidden] before and after this layer; after it the rows of `output` only."""
        x = select_rows(x, output) + self.attention(self.before_attention(x), angles, batch, kv, output)
        return x + self.mlp(self.before_mlp(x))


class GPT2:
    """GPT-2, see `registry.Model`."""

    architectures: ClassVar[Mapping[str, str]] = MappingProxyType({"GPT2LMHeadModel": "gpt2"})

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        self.spec = spec
        self.ops = build.ops
        self.dtype = build.dtype
        body = build.scope("transformer")
        body.ignore("h.*.attn.bias", "h.*.attn.masked_bias")
        self.pipeline = build.pipeline
        first, last = self.pipeline.first, self.pipeline.last
        self.embedding = body.here(first or (last and spec.tie), "wte").embedding("wte", spec.vocab, spec.hidden)
        self.positions = body.here(first, "wpe").replicated().embedding("wpe", spec.context, spec.hidden)
        self.no_rope = body.rotary(spec.rope)
        self.blocks = [
            Block(spec, each, spec.scale / (i + 1 if spec.scales_by_layer else 1))
            for i, each in body.each_layer("h", spec.layers, spec.own_layers)
        ]
        self.norm = build.norm_layer(body.here(last, "ln_f").layer_norm("ln_f", spec.hidden, spec.norm_eps))
        self.head = lm_head(spec, build.here(last, "lm_head"), self.embedding)
        self.classify = score_head(spec, build.here(last, "score"))

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        hidden = config.get(int, "n_embd")
        heads = config.get(int, "n_head")
        layers = config.get(int, "n_layer")
        check_layers(layers, "n_layer")
        if not heads or hidden % heads:
            raise InvalidModel(f"config.json: n_embd ({hidden}) must be a multiple of n_head ({heads})")
        scaled = config.get(bool, "scale_attn_weights", default=True)
        return ModelSpec(
            architecture=architecture,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            mlp=config.get(int, "n_inner", default=4 * hidden),
            vocab=config.get(int, "vocab_size"),
            context=config.get(int, "n_positions", "n_ctx", default=1024),
            norm_eps=config.get(float, "layer_norm_epsilon", default=1e-5),
            rope=NO_ROPE,
            windows=(UNLIMITED,) * layers,
            scale=max(1, hidden // heads) ** -0.5 if scaled else 1.0,
            scales_by_layer=config.get(bool, "scale_attn_by_inverse_layer_idx", default=False),
            activation=config.get(str, "activation_function", default="gelu_new"),
            tie=config.get(bool, "tie_word_embeddings", default=True),
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            dtype=config.get(str, "dtype", "torch_dtype", default=""),
            stop=read_stop(config),
        )

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """See `registry.Model`."""
        batch = self.ops.prepare(batch)
        angles = self.no_rope(batch.positions)
        if self.pipeline.first:
            x = self.embedding(batch.tokens) + self.positions(batch.positions)
        else:
            x = self.pipeline.receive(received(batch, self.spec, self.dtype))
        for i, block in zip(self.spec.own_layers, self.blocks, strict=True):
            x = block(x, angles, batch, kv[i], batch.output_indices if i == self.spec.layers - 1 else None)
        return batch.select_outputs(self.norm(x)) if self.pipeline.last else self.pipeline.send(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `registry.Model`."""
        return next_token_logits(self.head, hidden)
