"""BERT (Devlin et al. 2019), RoBERTa, XLM-RoBERTa and DistilBERT: encoders that norm sums, after attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.basic import MLP, NO_ROPE, AnyEmbedding, GatedMLP, Heads
from quire.layers.builder import ModelBuilder
from quire.layers.linear import LMHead
from quire.models.heads import Classify, next_token_logits
from quire.models.spec import Config, ModelSpec, check_layers
from quire.ops.operands import Angles
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.types import UNLIMITED


class Names(NamedTuple):
    """Names of a layer's matrices and norms, of the layers, and of the body."""

    body: str = "bert"
    layers: str = "encoder.layer"
    qkv: Sequence[str] = ("attention.self.query", "attention.self.key", "attention.self.value")
    out: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"


class EncoderBlock:
    """One layer: attention and an MLP, each followed by a norm of the sum."""

    def __init__(self, spec: ModelSpec, build: ModelBuilder, names: Names) -> None:
        heads = Heads(count=spec.heads, kv=spec.kv_heads, dim=spec.head_dim, scale=spec.head_dim**-0.5, ahead=UNLIMITED)
        self.attention = build.attention(
            spec.hidden, heads, names=names.qkv, out=names.out, bias=spec.qkv_bias, out_bias=spec.out_bias
        )
        self.nothing = build.norm_layer(None)
        self.attention_norm = build.norm_layer(build.layer_norm(names.attention_norm, spec.hidden, spec.norm_eps))
        self.mlp = self.make_mlp(spec, build, names)
        self.mlp_norm = build.norm_layer(build.layer_norm(names.mlp_norm, spec.hidden, spec.norm_eps))

    def make_mlp(self, spec: ModelSpec, build: ModelBuilder, names: Names) -> MLP | GatedMLP:
        """The MLP."""
        return build.mlp(names.up, names.down, spec.hidden, spec.mlp, spec.activation)

    def __call__(self, x: Tensor, angles: Angles, batch: RaggedBatch, kv: LayerKV) -> Tensor:
        """x [T, hidden] -> the same after this layer; x is overwritten."""
        x, _ = self.attention_norm.add(self.attention(x, angles, batch, kv), x, self.nothing)
        return self.mlp_norm.add(self.mlp(x), x, self.nothing)[0]


class Bert:
    """BERT, see `registry.Model`. Others override `read`, names and the classifier."""

    architectures: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"BertModel": "bert", "BertForMaskedLM": "", "BertForSequenceClassification": ""}
    )
    names: ClassVar[Names] = Names()
    block: ClassVar[type[EncoderBlock]] = EncoderBlock
    ignored: ClassVar[Sequence[str]] = ("cls.*", "lm_head.*", "vocab_*", "dropout.*")
    """Of heads for pre-training."""

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        self.spec = spec
        self.ops = build.ops
        self.dtype = build.dtype
        build.ignore(*self.ignored)
        body = build.scope(self.names.body)
        body.ignore("embeddings.position_ids", "embeddings.token_type_ids")
        self.embedding = body.embedding("embeddings.word_embeddings", spec.vocab, spec.hidden)
        self.first_position = spec.first_position
        self.positions = self.make_positions(body.replicated())
        self.segments = self.make_segments(body)
        self.norm = body.norm_layer(body.layer_norm("embeddings.LayerNorm", spec.hidden, spec.norm_eps))
        self.rotary = body.rotary(spec.rope)
        layers = body.scope(self.names.layers)
        self.blocks = [self.block(spec, layers.scope(str(i)), self.names) for i in range(spec.layers)]
        self.head: LMHead | None = None
        self.classify: Classify | None = self.make_classifier(build, body) if spec.classes else None
        if not spec.classes:
            body.ignore("pooler.*")
            build.ignore("classifier.*", "pre_classifier.*")

    def make_positions(self, body: ModelBuilder) -> AnyEmbedding | None:
        """Embeddings of positions; None without any."""
        count = self.spec.context + self.spec.first_position
        return body.embedding("embeddings.position_embeddings", count, self.spec.hidden)

    def make_segments(self, body: ModelBuilder) -> AnyEmbedding | None:
        """Embeddings of token types; None without any."""
        return body.replicated().embedding("embeddings.token_type_embeddings", self.spec.token_types, self.spec.hidden)

    def make_classifier(self, build: ModelBuilder, body: ModelBuilder) -> Classify:
        """The classifier: the pooler's layer, tanh, and a matrix."""
        hidden = self.spec.hidden
        first = body.dense("pooler.dense", hidden, hidden, bias=True)
        last = build.dense("classifier", hidden, self.spec.classes, bias=True)
        return lambda x: last.apply(torch.tanh(first.apply(x)))

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        return read_encoder(config, architecture)

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """See `registry.Model`."""
        batch = self.ops.prepare(batch)
        angles = self.rotary(batch.positions)
        vocab = self.spec.vocab
        x = self.embedding(batch.tokens % vocab)
        x = x if self.positions is None else x + self.positions(batch.positions + self.first_position)
        x = self.norm(x if self.segments is None else x + self.segments(batch.tokens // vocab))
        for block in self.blocks:
            x = block(x, angles, batch, kv[0])
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """See `registry.Model`."""
        return next_token_logits(None, hidden)


class Roberta(Bert):
    """RoBERTa and XLM-RoBERTa (Liu et al. 2019; Conneau et al. 2020): positions begin after the padding's."""

    architectures = MappingProxyType(
        {
            "RobertaModel": "roberta",
            "RobertaForMaskedLM": "",
            "RobertaForSequenceClassification": "",
            "XLMRobertaModel": "xlm-roberta",
            "XLMRobertaForMaskedLM": "",
            "XLMRobertaForSequenceClassification": "",
        }
    )
    names = Names("roberta")

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        return read_encoder(config, architecture, first_position=config.get(int, "pad_token_id", default=1) + 1)

    def make_classifier(self, build: ModelBuilder, body: ModelBuilder) -> Classify:
        """The classifier: a layer, tanh, and a matrix."""
        body.ignore("pooler.*")
        hidden = self.spec.hidden
        first = build.dense("classifier.dense", hidden, hidden, bias=True)
        last = build.dense("classifier.out_proj", hidden, self.spec.classes, bias=True)
        return lambda x: last.apply(torch.tanh(first.apply(x)))


DISTILBERT: Mapping[str, str] = MappingProxyType(
    {
        "dim": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "hidden_dim": "intermediate_size",
        "activation": "hidden_act",
    }
)
"""DistilBERT's names of fields, and BERT's."""


class DistilBert(Bert):
    """DistilBERT (Sanh et al. 2019): BERT without token types and pooler."""

    architectures = MappingProxyType(
        {"DistilBertModel": "distilbert", "DistilBertForMaskedLM": "", "DistilBertForSequenceClassification": ""}
    )
    names = Names(
        "distilbert",
        "transformer.layer",
        ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention.out_lin",
        "sa_layer_norm",
        "ffn.lin1",
        "ffn.lin2",
        "output_layer_norm",
    )

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        named = {ours: config.fields[name] for name, ours in DISTILBERT.items() if name in config.fields}
        return read_encoder(Config({**config.fields, **named, "type_vocab_size": 1}, config.where), architecture)

    def make_segments(self, body: ModelBuilder) -> AnyEmbedding | None:
        """See `Bert`."""
        return None

    def make_classifier(self, build: ModelBuilder, body: ModelBuilder) -> Classify:
        """The classifier: a layer, the positive part, and a matrix."""
        hidden = self.spec.hidden
        first = build.dense("pre_classifier", hidden, hidden, bias=True)
        last = build.dense("classifier", hidden, self.spec.classes, bias=True)
        return lambda x: last.apply(torch.relu(first.apply(x)))


def read_encoder(config: Config, architecture: str, *, first_position: int = 0) -> ModelSpec:
    """Fields of BERT. first_position: the row of position embeddings for the first token. Raises InvalidModel."""
    hidden, heads = config.get(int, "hidden_size"), config.get(int, "num_attention_heads")
    layers = config.get(int, "num_hidden_layers")
    check_layers(layers, "num_hidden_layers")
    if not heads or hidden % heads:
        raise InvalidModel(f"config.json: hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})")
    kind = config.get(str, "position_embedding_type", default="absolute")
    if kind != "absolute":
        raise InvalidModel(f"config.json: position_embedding_type {kind!r} is not supported, only 'absolute'")
    if config.get(bool, "is_decoder", default=False):
        raise InvalidModel(f"config.json: is_decoder: {architecture} is supported as an encoder only")
    return ModelSpec(
        architecture=architecture,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        mlp=config.get(int, "intermediate_size"),
        vocab=config.get(int, "vocab_size"),
        context=config.get(int, "max_position_embeddings", default=512) - first_position,
        norm_eps=config.get(float, "layer_norm_eps", default=1e-12),
        rope=NO_ROPE,
        windows=(UNLIMITED,) * layers,
        activation=config.get(str, "hidden_act", default="gelu"),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        ahead=(UNLIMITED,) * layers,
        generates=False,
        token_types=max(1, config.get(int, "type_vocab_size", default=2)),
        first_position=first_position,
        classifier_pooling="cls",
        dtype=config.get(str, "dtype", "torch_dtype", default=""),
    )
