"""ModernBERT (Warner et al. 2024): an encoder with rotary embeddings, gated MLPs and windows in most layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.basic import Heads
from quire.layers.builder import ModelBuilder
from quire.layers.linear import LMHead
from quire.models.heads import Classify, next_token_logits
from quire.models.spec import FULL, SLIDING, Config, ModelSpec, read_decoder, read_rope
from quire.ops.operands import Angles, Norm
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.types import UNLIMITED


class Layer:
    """One layer: attention and an MLP of the normed residual stream; the first layer's attention reads it as it is."""

    def __init__(self, spec: ModelSpec, build: ModelBuilder, index: int) -> None:
        heads = Heads(
            count=spec.heads,
            kv=spec.kv_heads,
            dim=spec.head_dim,
            scale=spec.head_dim**-0.5,
            window=spec.windows[index],
            ahead=spec.ahead[index],
        )
        self.before_attention = build.norm_layer(norm(spec, build, "attn_norm") if index else None)
        self.attention = build.scope("attn").attention(
            spec.hidden, heads, names=("Wqkv",), out="Wo", bias=spec.qkv_bias, out_bias=spec.out_bias
        )
        self.before_mlp = build.norm_layer(norm(spec, build, "mlp_norm"))
        self.mlp = build.scope("mlp").gated_mlp(
            spec.hidden, spec.mlp, spec.activation, bias=spec.mlp_bias, names=("Wi", "Wo")
        )

    def __call__(self, x: Tensor, angles: Angles, batch: RaggedBatch, kv: LayerKV) -> Tensor:
        """The residual stream [T, hidden] before and after this layer."""
        x = x + self.attention(self.before_attention(x), angles, batch, kv)
        return x + self.mlp(self.before_mlp(x))


def norm(spec: ModelSpec, build: ModelBuilder, name: str) -> Norm:
    """A layer norm."""
    return build.layer_norm(name, spec.hidden, spec.norm_eps, bias=False)


class ModernBert:
    """ModernBERT, see `registry.Model`."""

    architectures: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"ModernBertModel": "modernbert", "ModernBertForMaskedLM": "", "ModernBertForSequenceClassification": ""}
    )

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        self.spec = spec
        self.ops = build.ops
        self.dtype = build.dtype
        body = build.scope("model")
        self.embedding = body.embedding("embeddings.tok_embeddings", spec.vocab, spec.hidden)
        self.embedding_norm = body.norm_layer(norm(spec, body, "embeddings.norm"))
        self.rotaries = {rope: body.rotary(rope) for rope in dict.fromkeys(spec.layer_ropes)}
        self.layers = [Layer(spec, body.scope(f"layers.{i}"), i) for i in range(spec.layers)]
        self.norm = body.norm_layer(norm(spec, body, "final_norm"))
        self.head: LMHead | None = None
        self.classify = self.make_classifier(build) if spec.classes else None
        build.ignore(*("decoder.*",) if spec.classes else ("head.*", "decoder.*", "classifier.*"))

    def make_classifier(self, build: ModelBuilder) -> Classify:
        """The classifier: a layer, gelu, a norm, and a matrix."""
        spec, ops = self.spec, self.ops
        first = build.dense("head.dense", spec.hidden, spec.hidden)
        second = build.norm_layer(norm(spec, build, "head.norm"))
        last = build.dense("classifier", spec.hidden, spec.classes, bias=True)
        return lambda x: last.apply(second(ops.gelu_erf(first.apply(x))))

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        usual = {"norm_bias": False, "classifier_bias": False, "classifier_activation": "gelu"}
        for name, value in usual.items():
            if config.fields.get(name, value) != value:
                raise InvalidModel(f"config.json: {name} {config.fields[name]!r} is not supported for ModernBERT")
        config = config.with_defaults(hidden_act=config.get(str, "hidden_activation", default="gelu"), norm_eps=1e-5)
        plain = Config({k: v for k, v in config.fields.items() if not k.startswith("rope")}, config.where)
        spec, local = read_decoder(plain, architecture), read_local_layers(config)
        own = config.section("rope_parameters")
        full, sliding = (
            read_rope(config, spec.head_dim, own.section(kind), theta=config.get(float, name, default=theta))
            for kind, name, theta in ((FULL, "global_rope_theta", 160_000.0), (SLIDING, "local_rope_theta", 10_000.0))
        )
        half = config.get(int, "local_attention", default=128) // 2
        return replace(
            spec,
            rope=full,
            ropes=tuple(sliding if each else full for each in local),
            windows=tuple(half + 1 if each else UNLIMITED for each in local),
            ahead=tuple(half if each else UNLIMITED for each in local),
            generates=False,
            classifier_pooling=config.get(str, "classifier_pooling", default="cls"),
        )

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """See `registry.Model`."""
        batch = self.ops.prepare(batch)
        angles = {rope: rotary(batch.positions) for rope, rotary in self.rotaries.items()}
        x = self.embedding_norm(self.embedding(batch.tokens))
        for layer, rope in zip(self.layers, self.spec.layer_ropes, strict=True):
            x = layer(x, angles[rope], batch, kv[0])
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `registry.Model`."""
        return next_token_logits(None, hidden)


def read_local_layers(config: Config) -> tuple[bool, ...]:
    """Which layers have windows: by `layer_types`, else all but each third. Raises InvalidModel."""
    layers = config.get(int, "num_hidden_layers")
    every = max(1, config.get(int, "global_attn_every_n_layers", default=3))
    kinds = config.fields.get("layer_types") or [SLIDING if i % every else FULL for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {SLIDING, FULL}:
        raise InvalidModel(f"config.json: layer_types must be num_hidden_layers ({layers}) names: {SLIDING} or {FULL}")
    return tuple(kind == SLIDING for kind in kinds)
