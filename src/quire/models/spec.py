"""ModelSpec: the shape of a model, read from a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.errors import InvalidModel
from quire.layers.basic import RopeConfig
from quire.layers.moe import MoEConfig
from quire.types import UNLIMITED

T = TypeVar("T", int, float, str, bool)

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder's shape.

    hidden: width of the residual stream. mlp: inner width of an MLP. context: longest sequence it was made for, in
    tokens. windows: per layer, how many positions a query sees (UNLIMITED: all). ropes: per layer, where they differ;
    empty where all are `rope`. tie: the head is the embedding's table. qk_norm: each head's query and key is normed
    before RoPE. scale: of attention's scores, 0 for 1 / sqrt(head_dim). score_cap, logit_cap: soft caps, 0 for none.
    experts: None where every layer has one MLP. dtype: the checkpoint's, as config.json names it, or empty. stop: its
    end-of-text ids.
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
    activation: str = "silu"
    tie: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    ropes: tuple[RopeConfig, ...] = ()
    scale: float = 0.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    experts: MoEConfig | None = None
    dtype: str = ""
    stop: tuple[int, ...] = ()

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """Per layer: (K/V heads, head dim), of the whole model."""
        return ((self.kv_heads, self.head_dim),) * self.layers

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of K/V a token takes, all layers, at `itemsize` bytes a number."""
        return sum(2 * heads * dim * itemsize for heads, dim in self.kv_shapes)


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
                raise InvalidModel(f"{self.where}: {name} is too large to be meant ({value:.0e})")
            return value
        if default is None:
            raise InvalidModel(f"{self.where}: {names[0]} is missing")
        return default

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


def read_decoder(config: Config, architecture: str) -> ModelSpec:
    """Read the fields that Llama and its successors share; architectures replace what differs."""
    hidden = config.get(int, "hidden_size")
    layers = config.get(int, "num_hidden_layers")
    heads = config.get(int, "num_attention_heads")
    if min(hidden, layers, heads) < 1:
        raise InvalidModel("config.json: hidden_size, num_hidden_layers and num_attention_heads must be above 0")
    if layers > MOST_LAYERS:
        raise InvalidModel(f"config.json: num_hidden_layers must be at most {MOST_LAYERS}, not {layers}")
    head_dim = config.get(int, "head_dim", default=hidden // heads)
    kv_heads = config.get(int, "num_key_value_heads", default=heads)
    if not kv_heads or heads % kv_heads:
        raise InvalidModel(f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads evenly")
    bias = config.get(bool, "attention_bias", default=False)
    rope = read_rope(config, head_dim, config.section("rope_parameters", "rope_scaling"))
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
        norm_eps=config.get(float, "rms_norm_eps", default=1e-6),
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
    kind = scaling.get(str, "rope_type", "type", default="default")
    plain = kind == "default"
    factor = 1.0 if plain else scaling.get(float, "factor")
    rope = RopeConfig(
        dim=int(head_dim * share),
        theta=theta,
        kind=kind,
        factor=factor,
        low=scaling.get(float, "low_freq_factor", default=1.0),
        high=scaling.get(float, "high_freq_factor", default=4.0),
        original=read_original(config, scaling, kind),
        fast=scaling.get(float, "beta_fast", default=32.0),
        slow=scaling.get(float, "beta_slow", default=1.0),
        full_dim=scaling.get(bool, "truncate", default=True),
        gain=read_gain(scaling, factor) if kind == "yarn" else 1.0,
        factors=tuple(scaling.fields.get("factors", ())) if kind == "factors" else (),
    )
    if rope.dim % 2 or theta <= 0 or rope.factor <= 0 or rope.gain <= 0 or min(rope.fast, rope.slow) <= 0:
        raise InvalidModel(f"{scaling.where}: impossible numbers ({rope})")
    if kind in ("llama3", "yarn") and (rope.original < 1 or rope.high <= rope.low):
        raise InvalidModel(
            f"{scaling.where}: {kind} scaling needs original_max_position_embeddings and "
            "low_freq_factor < high_freq_factor"
        )
    return rope


def read_original(config: Config, scaling: Config, kind: str) -> int:
    """The length of training; YaRN without one means `max_position_embeddings`."""
    named = scaling.get(int, "original_max_position_embeddings", default=0)
    if named or kind != "yarn":
        return named
    return config.get(int, "original_max_position_embeddings", "max_position_embeddings", default=0)


def read_gain(scaling: Config, factor: float) -> float:
    """YaRN's attention factor: as given, or from the two `mscale`, or 0.1 ln(factor) + 1."""

    def gain(strength: float) -> float:
        return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = scaling.get(float, "attention_factor", default=0.0)
    own, whole = (scaling.get(float, name, default=0.0) for name in ("mscale", "mscale_all_dim"))
    return given or (gain(own) / gain(whole) if own and whole else gain(1.0))


def read_windows(config: Config, layers: int) -> tuple[int, ...]:
    """Windows per layer: `sliding_window` for the local layers of `layer_types`, or for all; none where it is null."""
    width = config.get(int, "sliding_window", default=0) or UNLIMITED
    return tuple(width if local else UNLIMITED for local in read_locals(config, layers, every=0))


def read_locals(config: Config, layers: int, *, every: int) -> tuple[bool, ...]:
    """Which layers are local, by `layer_types`; without it all but each `every`-th, or all where that is 0."""
    default = [FULL if every and not (i + 1) % every else SLIDING for i in range(layers)]
    kinds = config.fields.get("layer_types") or default
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise InvalidModel(f"{config.where}: layer_types must be a list of num_hidden_layers ({layers}) names")
    for kind in kinds:
        if kind not in (SLIDING, FULL):
            raise InvalidModel(f"{config.where}: layer type {kind!r} is not supported (known: {SLIDING}, {FULL})")
    return tuple(kind == SLIDING for kind in kinds)


def read_stop(config: Config) -> tuple[int, ...]:
    """`eos_token_id`: one id, a list of them, or nothing."""
    value = config.fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise InvalidModel(f"{config.where}: eos_token_id must be an integer or a list of integers")
    return tuple(ids)
