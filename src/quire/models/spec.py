"""ModelSpec: the shape of a model, read from a config.json."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from quire.errors import InvalidModel
from quire.layers.basic import NO_ROPE, RopeConfig
from quire.layers.delta import DeltaConfig
from quire.layers.latent import LatentConfig
from quire.layers.linear import heads_divide
from quire.layers.mamba import MambaConfig
from quire.layers.moe import MoEConfig
from quire.layers.stages import Pipeline
from quire.layers.vision import VisionConfig
from quire.ops.ragged import KVShape, StateShape
from quire.types import UNLIMITED

T = TypeVar("T", int, float, str, bool)

SLIDING, CHUNKED, FULL = "sliding_attention", "chunked_attention", "full_attention"

QKNorm = Literal["", "each", "together", "after_rope"]
"""How queries and keys are normed: not at all, head by head, all heads at once, or head by head after RoPE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder's shape.

    hidden: width of the residual stream. mlp: inner width of an MLP. context: longest sequence it was made for, in
    tokens. windows: per layer, how many positions a query sees (UNLIMITED: all). chunks: per layer, positions of the
    chunks of which a query sees its own; empty where it sees all. ropes: per layer, where they differ; empty where all
    are `rope`. tie: the head is the embedding's table. norm_shift: what the weights of norms lack.
    qk_norm: see `QKNorm`. norm_values: v is normed head by head, without weights. layer_heads: per layer (K/V heads,
    head_dim), where they differ; empty where all are `kv_heads` and `head_dim`. layer_mlp: `mlp` of each layer, where
    they differ. keys_are_values: layers whose v is made by the matrix of k. shared_kv: how many of the last layers read
    K/V of earlier ones. layer_inputs: width of what each layer reads of the tokens themselves, 0: nothing. scale: of
    attention's scores, 0 for 1 / sqrt(head_dim); scales_by_layer: layer i divides it by i + 1. embedding_scale,
    residual_scale, logit_scale: what embeddings, what attention and MLP add, and logits are multiplied by. score_cap,
    logit_cap: soft caps, 0 for none. experts: None where every layer has one MLP. latent: None where keys and values
    are kept as they are, of `kv_heads` heads.
    delta, mamba: sizes of layers of the gated delta rule, or of Mamba 2, which `recurrent` numbers; they keep states in
    place of K/V.
    ahead: per layer, how many later positions a query sees; empty where attention is causal. generates: whether it has
    logits of a next token. classes: outputs of its classifier, 0 for none. token_types: kinds of segments; a token of
    kind t is fed as its id plus t times `vocab`. first_position: the row of learned positions for the first token.
    classifier_pooling: which hidden states the classifier reads: cls, mean or last.
    draft_layers: layers for multi-token prediction to be loaded, see `models/mtp.py`. skipped_drafts: those that are
    not. draft_blocks: of each block of such a layer, the number of the model's layer that it is like; empty for one
    block like the last that attends. dtype: the checkpoint's, as config.json names it, or empty. stop: its end-of-text
    ids. vision: its encoder of images; None where it has none, or is to be used without. ranks: among how many layers
    are divided. stage: the layers of this stage of a pipeline; None: all.
    """

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    context: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int, ...]
    chunks: tuple[int, ...] = ()
    activation: str = "silu"
    tie: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    norm_shift: float = 0.0
    qk_norm: QKNorm = ""
    norm_values: bool = False
    layer_heads: tuple[tuple[int, int], ...] = ()
    layer_mlp: tuple[int, ...] = ()
    keys_are_values: frozenset[int] = frozenset()
    shared_kv: int = 0
    layer_inputs: int = 0
    ropes: tuple[RopeConfig, ...] = ()
    scale: float = 0.0
    scales_by_layer: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    experts: MoEConfig | None = None
    latent: LatentConfig | None = None
    delta: DeltaConfig | None = None
    mamba: MambaConfig | None = None
    recurrent: frozenset[int] = frozenset()
    ahead: tuple[int, ...] = ()
    generates: bool = True
    classes: int = 0
    token_types: int = 1
    first_position: int = 0
    classifier_pooling: str = "last"
    draft_layers: int = 0
    skipped_drafts: int = 0
    draft_blocks: tuple[int, ...] = ()
    dtype: str = ""
    stop: tuple[int, ...] = ()
    vision: VisionConfig | None = None
    ranks: int = 1
    stage: range | None = None

    @property
    def own_layers(self) -> range:
        """The layers of this stage."""
        return range(self.layers) if self.stage is None else self.stage

    def for_length(self, length: int | None) -> ModelSpec:
        """The same for sequences of at most `length` tokens, None for its context: LongRoPE has other factors for short
        ones, and an indexer that would choose every token is left out."""
        length, latent = length or self.context, self.latent

        def shortened(rope: RopeConfig) -> RopeConfig:
            if not rope.short_factors or length > rope.original:
                return rope
            return replace(rope, factors=rope.short_factors, gain=rope.short_gain)

        if latent is not None and latent.index is not None and length <= latent.index.top:
            latent = replace(latent, index=None)
        return replace(self, rope=shortened(self.rope), ropes=tuple(map(shortened, self.ropes)), latent=latent)

    @property
    def near(self) -> int:
        """Tokens of a sequence up to which an indexer chooses all of them; 0: there is none."""
        return 0 if self.latent is None or self.latent.index is None else self.latent.index.top

    @property
    def bidirectional(self) -> bool:
        """Whether tokens see later ones, so that a prompt is computed at once and nothing of it is kept."""
        return any(self.ahead)

    @property
    def layer_ahead(self) -> tuple[int, ...]:
        """Per layer, later positions that a query sees."""
        return self.ahead or (0,) * self.layers

    @property
    def layer_ropes(self) -> tuple[RopeConfig, ...]:
        """Per layer, its rotary embedding."""
        return self.ropes or (self.rope,) * self.layers

    @property
    def layer_chunks(self) -> tuple[int, ...]:
        """Per layer, positions of its chunks."""
        return self.chunks or (UNLIMITED,) * self.layers

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """Per layer that stores K/V: its shape, of one of `ranks`, without heads where it is another stage's. One
        layer's serves all where attention is bidirectional: it is read in the layer that writes it, and never again."""
        layers = 1 if self.bidirectional else self.layers - self.shared_kv
        return tuple(self._kv_shape(i, i in self.own_layers) for i in range(layers))

    def _kv_shape(self, layer: int, here: bool) -> KVShape:
        """K/V of a layer, of no heads where it is recurrent, or another stage's."""
        if self.latent is not None:
            index = self.latent.index
            return KVShape(int(here), self.latent.rotated, self.latent.latents, index.dim if index else 0)
        heads, dim = self.each_heads[layer]
        return KVShape(self._rank_heads(heads) if here and layer not in self.recurrent else 0, dim, dim)

    def _rank_heads(self, kv_heads: int) -> int:
        """K/V heads of a layer that one of `ranks` has."""
        if not kv_heads:
            return 0
        divided = self.qk_norm != "together" and heads_divide(self.heads, kv_heads, self.ranks)
        return max(1, kv_heads // self.ranks) if divided else kv_heads

    @property
    def last_attention(self) -> int:
        """The number of the last layer that keeps K/V."""
        return max(set(range(self.layers)) - self.recurrent)

    @property
    def draft_kv_shapes(self) -> tuple[KVShape, ...]:
        """K/V of the layers for multi-token prediction, which attend as the last layer that does; none without them."""
        if not self.draft_layers:
            return ()
        return (self._kv_shape(self.kv_layers[self.last_attention], True),) * self.draft_layers

    @property
    def state_shapes(self) -> tuple[StateShape | None, ...]:
        """Per layer that `kv_shapes` has, what it keeps of a sequence; None where that is K/V."""
        shape = next((each.state for each in (self.delta, self.mamba) if each is not None), None)
        here = self.recurrent & {*self.own_layers}
        return tuple(shape if i in here else None for i in range(len(self.kv_shapes)))

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of a sequence's states, all layers, at `itemsize` bytes a number of the model's dtype."""
        return sum(shape.nbytes(itemsize) for shape in self.state_shapes if shape)

    @property
    def each_heads(self) -> tuple[tuple[int, int], ...]:
        """Per layer: (K/V heads, head dim), of the whole model."""
        return self.layer_heads or ((self.kv_heads, self.head_dim),) * self.layers

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Per layer, the number of that whose K/V it reads: its own, or the last one of the same window and heads."""
        if self.bidirectional:
            return (0,) * self.layers
        own, kinds = self.layers - self.shared_kv, tuple(zip(self.windows, self.each_heads, strict=True))
        last = {kind: i for i, kind in enumerate(kinds[:own])}
        return tuple(i if i < own else last[kind] for i, kind in enumerate(kinds))

    @property
    def uncut(self) -> frozenset[int]:
        """Layers before which no stage may begin: later ones read K/V of those before, or features of images."""
        featured = range(1, len(self.vision.feature_layers) if self.vision else 0)
        return frozenset(cut for i, own in enumerate(self.kv_layers) for cut in range(own + 1, i + 1)) | {*featured}

    def embeds(self, pipeline: Pipeline) -> bool:
        """Whether a stage embeds tokens and images: the first, and where layers have inputs, all."""
        return pipeline.first or bool(self.layer_inputs)

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of K/V a token takes, all layers, at `itemsize` bytes a number."""
        return sum(shape.numbers * itemsize for shape in self.kv_shapes)


LARGEST, MOST_LAYERS = 1 << 24, 1 << 12
"""Larger sizes are damage, and would overflow later."""


class Config:
    """A config.json being read. Errors name the field that is missing or of the wrong type."""

    def __init__(self, fields: Mapping[str, Any], where: str = "config.json") -> None:
        self.fields, self.where = fields, where

    def get(self, kind: type[T], *names: str, default: T | None = None) -> T:
        """The first of `names` that is there and not null. Raises InvalidModel."""
        for name in names:
            value = self.fields.get(name)
            if value is None:
                continue
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise InvalidModel(
                    f"{self.where}: {name} must be {kind.__name__}, not {type(value).__name__} ({value!r})"
                )
            if kind is int and int(value) < 0:
                raise InvalidModel(f"{self.where}: {name} must not be negative ({value})")
            if kind is int and int(value) > UNLIMITED:
                raise InvalidModel(f"{self.where}: {name} is implausibly large ({value:.0e})")
            return value
        if default is None:
            raise InvalidModel(f"{self.where}: {names[0]} is missing")
        return default

    def with_defaults(self, **fields: Any) -> Config:
        """The same with values for fields that are not there."""
        return Config({**fields, **self.fields}, self.where)

    def section(self, *names: str) -> Config:
        """A nested object, empty where there is none."""
        for name in names:
            value = self.fields.get(name)
            if value is not None:
                if not isinstance(value, Mapping):
                    raise InvalidModel(f"{self.where}: {name} must be an object")
                return Config(value, f"{self.where}: {name}")
        return Config({}, f"{self.where}: {names[0]}")


def check_sizes(spec: ModelSpec) -> ModelSpec:
    """Return `spec`. Raises InvalidModel naming a size that is impossible."""
    sizes = {
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.mlp,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.context,
    }
    if spec.experts is not None:
        sizes |= {"the experts' width": spec.experts.width, "the number of experts": spec.experts.num_experts}
    for name, size in sizes.items():
        if not 1 <= size <= LARGEST:
            raise InvalidModel(f"config.json: {name} must be from 1 to {LARGEST:,}, not {size:,}")
    return spec


def check_layers(count: int, name: str) -> None:
    """Raise InvalidModel where the field `name` has a number of layers that is implausibly large, or none."""
    if not 1 <= count <= MOST_LAYERS:
        raise InvalidModel(f"config.json: {name} must be from 1 to {MOST_LAYERS}, not {count}")


def read_decoder(config: Config, architecture: str) -> ModelSpec:
    """Read the fields that Llama and its successors share; architectures replace what differs."""
    hidden = config.get(int, "hidden_size")
    layers = config.get(int, "num_hidden_layers")
    heads = config.get(int, "num_attention_heads")
    if min(hidden, layers, heads) < 1:
        raise InvalidModel("config.json: hidden_size, num_hidden_layers and num_attention_heads must be above 0")
    check_layers(layers, "num_hidden_layers")
    head_dim = config.get(int, "head_dim", default=hidden // heads)
    kv_heads = config.get(int, "num_key_value_heads", default=heads)
    if not kv_heads or heads % kv_heads:
        raise InvalidModel(f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads evenly")
    bias = config.get(bool, "attention_bias", default=False)
    rope = read_rope(config, head_dim, read_scaling(config))
    return ModelSpec(
        architecture=architecture,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=config.get(int, "intermediate_size"),
        vocab=config.get(int, "vocab_size"),
        context=read_context(config, rope),
        norm_eps=config.get(float, "rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", default=1e-6),
        rope=rope,
        windows=(UNLIMITED,) * layers,
        activation=config.get(str, "hidden_act", default="silu"),
        tie=config.get(bool, "tie_word_embeddings", default=False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.get(bool, "mlp_bias", default=False),
        dtype=config.get(str, "dtype", "torch_dtype", default=""),
        stop=read_stop(config),
    )


def read_scaling(config: Config) -> Config:
    """`rope_scaling` if it says anything, otherwise `rope_parameters`, as transformers chooses where there are both."""
    return config.section("rope_scaling" if config.fields.get("rope_scaling") else "rope_parameters")


def read_context(config: Config, rope: RopeConfig) -> int:
    """`max_position_embeddings`, or the length that YaRN extends to where that is longer."""
    context = config.get(int, "max_position_embeddings", default=2048)
    return max(context, int(rope.original * rope.factor)) if rope.kind == "yarn" else context


def read_rope(config: Config, head_dim: int, scaling: Config, *, theta: float = 0.0) -> RopeConfig:
    """Read `rope_parameters`, or the older `rope_theta` and `rope_scaling`; `scaling` is either section.

    theta: the base where `scaling` has none; 0 for config's own.
    """
    share = scaling.get(float, "partial_rotary_factor", default=0.0)
    share = share or config.get(float, "partial_rotary_factor", default=1.0)
    theta = scaling.get(float, "rope_theta", default=theta) or config.get(float, "rope_theta", default=10_000.0)
    kind, dim = scaling.get(str, "rope_type", "type", default="default"), int(head_dim * share)
    if kind == "proportional":
        scaling, dim = scaling.with_defaults(factor=1.0), head_dim
    if kind in ("longrope", "su"):
        return read_longrope(config, scaling, RopeConfig(dim=dim, theta=theta, kind="factors"))
    if kind == "dynamic":
        # With `alpha` (Hunyuan) the base is stretched once; without, only beyond max_position_embeddings.
        kind, alpha = "default", scaling.get(float, "alpha", default=0.0)
        theta *= alpha ** (dim / (dim - 2)) if alpha > 0 and dim > 2 else 1.0
    kind = "default" if kind == "mrope" else kind
    factor = 1.0 if kind == "default" else scaling.get(float, "factor")
    rope = RopeConfig(
        dim=dim,
        theta=theta,
        kind=kind,
        axes=read_axes(scaling, dim // 2),
        factor=factor,
        low=scaling.get(float, "low_freq_factor", default=1.0),
        high=scaling.get(float, "high_freq_factor", default=4.0),
        original=read_original(config, scaling, kind),
        fast=scaling.get(float, "beta_fast", default=32.0),
        slow=scaling.get(float, "beta_slow", default=1.0),
        full_dim=scaling.get(bool, "truncate", default=True),
        gain=read_gain(scaling, factor) if kind == "yarn" else 1.0,
        factors=read_factors(scaling, "factors", dim) if kind == "factors" else (),
        query_beta=scaling.get(float, "llama_4_scaling_beta", default=0.0),
        share=share if kind == "proportional" else 1.0,
    )
    if rope.dim % 2 or theta <= 0 or rope.factor <= 0 or rope.gain <= 0 or min(rope.fast, rope.slow) <= 0:
        raise InvalidModel(f"{scaling.where}: invalid numbers ({rope})")
    if (kind in ("llama3", "yarn") or rope.query_beta) and (rope.original < 1 or rope.high < rope.low):
        raise InvalidModel(
            f"{scaling.where}: {kind} scaling needs original_max_position_embeddings and "
            "low_freq_factor of at most high_freq_factor"
        )
    return rope


def read_axes(scaling: Config, pairs: int) -> tuple[int, ...]:
    """`mrope_section`: how many pairs of dimensions turn by each of three positions, in runs or by turns."""
    sections = scaling.fields.get("mrope_section")
    if sections is None:
        return ()
    if not isinstance(sections, list) or any(type(each) is not int or each < 0 for each in sections):
        raise InvalidModel(f"{scaling.where}: mrope_section must be a list of numbers")
    if not scaling.get(bool, "mrope_interleaved", default=False):
        axes = [i % 3 for i, count in enumerate(sections) for _ in range(min(count, LARGEST))]
    else:
        ends = [3 * count for count in sections]
        axes = [i % 3 if len(ends) == 3 and i < ends[i % 3] else 0 for i in range(pairs)]
    if len(axes) != pairs:
        raise InvalidModel(f"{scaling.where}: mrope_section has {len(axes)} pairs of dimensions in all, not {pairs}")
    return tuple(axes)


def read_longrope(config: Config, scaling: Config, rope: RopeConfig) -> RopeConfig:
    """LongRoPE: a factor for each pair of dimensions, others for sequences of up to the length of training."""
    names = "original_max_position_embeddings", "max_position_embeddings"
    original = config.get(int, names[0], default=0) or scaling.get(int, names[0], default=0)
    original = original or config.get(int, names[1], default=0)
    context = config.get(int, names[1], default=original)
    long, short = (read_factors(scaling, name, rope.dim) for name in ("long_factor", "short_factor"))
    gain = scaling.get(float, "attention_factor", default=0.0)
    if not gain and original < 2:
        raise InvalidModel(f"{scaling.where}: longrope needs original_max_position_embeddings")
    stretch = scaling.get(float, "factor", default=context / original)
    gain = gain or (math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0)
    gains = [scaling.get(float, name, default=gain) for name in ("short_mscale", "long_mscale")]
    factors, gain = (long, gains[1]) if context > original else (short, gains[0])
    whole = replace(rope, factors=factors, factor=stretch, original=original, gain=gain)
    return replace(whole, short_factors=short, short_gain=gains[0])


def read_factors(scaling: Config, name: str, dim: int) -> tuple[float, ...]:
    """A list of numbers above 0, one for each pair of `dim` dimensions."""
    found = scaling.fields.get(name)
    if not isinstance(found, list | tuple) or not all(isinstance(x, int | float) and x > 0 for x in found):
        raise InvalidModel(f"{scaling.where}: {name} must be a list of numbers above 0")
    if len(found) != dim // 2:
        raise InvalidModel(f"{scaling.where}: {name} has {len(found)} numbers for {dim // 2} pairs of dimensions")
    return tuple(map(float, found))


def read_original(config: Config, scaling: Config, kind: str) -> int:
    """The length of training: of the whole config.json, or of `scaling`, or `max_position_embeddings`."""
    name = "original_max_position_embeddings"
    if kind not in ("yarn", "llama3"):
        return scaling.get(int, name, default=0)
    return (
        config.get(int, name, default=0)
        or scaling.get(int, name, default=0)
        or config.get(int, "max_position_embeddings", default=0)
    )


def read_gain(scaling: Config, factor: float) -> float:
    """YaRN's attention factor: as given, or from the two `mscale`, or 0.1 ln(factor) + 1."""

    def gain(strength: float) -> float:
        return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = scaling.get(float, "attention_factor", default=0.0)
    own, whole = (scaling.get(float, name, default=0.0) for name in ("mscale", "mscale_all_dim"))
    return given or (gain(own) / gain(whole) if own and whole else gain(1.0))


def read_windows(config: Config, layers: int, *, every: int = 0) -> tuple[int, ...]:
    """Windows per layer: `sliding_window` for local layers, see `read_locals`; none where it is null."""
    width = config.get(int, "sliding_window", default=0) or UNLIMITED
    return tuple(width if local else UNLIMITED for local in read_locals(config, layers, every=every))


def read_two_ropes(config: Config, spec: ModelSpec, theta: float, local_theta: float, *, every: int) -> ModelSpec:
    """`spec` with the rotary embeddings of global and of local layers: `rope_parameters` has a section for each; the
    older `rope_scaling` is of global ones. theta, local_theta: the bases where they are not named."""
    own = config.section("rope_parameters")
    full = own.section(FULL) if FULL in own.fields else config.section("rope_scaling")
    rope = read_rope(config, spec.head_dim, full, theta=theta)
    local = read_rope(config, spec.head_dim, own.section(SLIDING), theta=local_theta)
    locals = read_locals(config, spec.layers, every=every)
    return replace(
        spec, rope=rope, ropes=tuple(local if each else rope for each in locals), context=read_context(config, rope)
    )


def without_rope(spec: ModelSpec, layers: Iterable[bool]) -> ModelSpec:
    """The same with no rotary embedding in `layers`."""
    return replace(spec, ropes=tuple(NO_ROPE if none else spec.rope for none in layers))


def interleave(spec: ModelSpec) -> ModelSpec:
    """The same with rotary embeddings of neighbours, see `RopeConfig`."""
    return replace(spec, rope=replace(spec.rope, interleaved=True))


def read_locals(config: Config, layers: int, *, every: int, local: str = SLIDING) -> tuple[bool, ...]:
    """Which layers are `local`, by `layer_types`; without it all but each `every`-th, or all where that is 0."""
    default = [FULL if every and not (i + 1) % every else local for i in range(layers)]
    kinds = config.fields.get("layer_types") or default
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise InvalidModel(f"{config.where}: layer_types must be a list of num_hidden_layers ({layers}) names")
    for kind in kinds:
        if kind not in (local, FULL):
            raise InvalidModel(f"{config.where}: layer type {kind!r} is not supported (known: {local}, {FULL})")
    return tuple(kind == local for kind in kinds)


def read_stop(config: Config) -> tuple[int, ...]:
    """`eos_token_id`: one id, a list of them, or nothing."""
    value = config.fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise InvalidModel(f"{config.where}: eos_token_id must be an integer or a list of integers")
    return tuple(ids)
