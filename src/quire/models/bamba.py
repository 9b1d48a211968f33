"""Bamba (IBM, Princeton, CMU and UIUC 2024): layers of Mamba 2, and of attention in some places; what hybrids of Mamba
share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from quire.errors import InvalidModel
from quire.layers.builder import ModelBuilder
from quire.layers.mamba import MambaConfig
from quire.models.llama import BlockNorms, Llama, Mixer, MLPFunction
from quire.models.spec import FULL, Config, ModelSpec, read_decoder

LINEAR = "linear_attention"
"""Recurrent layers, as transformers names them."""

KINDS: Mapping[str, str] = MappingProxyType({"mamba": LINEAR, "attention": FULL})
"""Older names of kinds of layers."""


class Bamba(Llama):
    """Bamba."""

    architectures = MappingProxyType({"BambaForCausalLM": "bamba"})
    norms = BlockNorms("input_layernorm", before_mlp="pre_ff_layernorm")

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        build.rename({"model.final_layernorm.": "model.norm."})
        super().__init__(spec, build)

    def make_attention(self, build: ModelBuilder, index: int) -> Mixer:
        """`self_attn` or `mamba` of layer `index`."""
        return make_mixer(self.spec, build, index) or super().make_attention(build, index)

    def make_mlp(self, build: ModelBuilder, index: int) -> MLPFunction:
        """`feed_forward` of layer `index`."""
        spec = self.spec
        return build.scope("feed_forward").gated_mlp(spec.hidden, spec.mlp, spec.activation, bias=spec.mlp_bias)

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        fields = config.with_defaults(num_key_value_heads=8, rms_norm_eps=1e-5)
        spec = read_decoder(Config({**fields.fields, "partial_rotary_factor": 0.5}, config.where), architecture)
        places = config.fields.get("attn_layer_indices") or []
        if not isinstance(places, list):
            raise InvalidModel("config.json: attn_layer_indices must be a list of layers")
        return read_mamba(config, spec, [FULL if i in places else LINEAR for i in range(spec.layers)])


def make_mixer(spec: ModelSpec, build: ModelBuilder, index: int) -> Mixer | None:
    """`mamba` of layer `index`; None where that is no recurrent layer."""
    if index not in spec.recurrent:
        return None
    assert spec.mamba is not None
    return build.scope("mamba").mamba(spec.hidden, spec.mamba, spec.norm_eps)


def read_kinds(config: Config, layers: int) -> list[str]:
    """`layer_types` (or `layers_block_type`), LINEAR or FULL for each layer. Raises InvalidModel for others."""
    kinds = config.fields.get("layer_types") or config.fields.get("layers_block_type") or [LINEAR] * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise InvalidModel(f"config.json: layer_types must be a list of num_hidden_layers ({layers}) names")
    known = [KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    for kind in known:
        if kind not in (LINEAR, FULL):
            raise InvalidModel(f"config.json: layer type {kind!r} is not supported (known: mamba, attention)")
    return known


def read_mamba(config: Config, spec: ModelSpec, kinds: Sequence[str]) -> ModelSpec:
    """`spec` with the fields of Mamba layers, which are called mamba_*. kinds: LINEAR or FULL for each layer.

    Raises InvalidModel where no layer keeps K/V.
    """
    if FULL not in kinds:
        raise InvalidModel("config.json: a model of recurrent layers alone is not supported")
    recurrent = frozenset(i for i, kind in enumerate(kinds) if kind == LINEAR)
    if not recurrent:
        return spec
    check_convolution("hidden_act", spec.activation)
    inner = config.get(int, "mamba_expand", default=2) * spec.hidden
    heads = config.get(int, "mamba_n_heads", default=128)
    given = config.fields.get("mamba_d_head", "auto")
    value = inner // max(1, heads) if given in (None, "auto") else config.get(int, "mamba_d_head")
    if heads * value != inner:
        raise InvalidModel(
            f"config.json: {heads} Mamba heads of {value} numbers are not mamba_expand times hidden_size ({inner})"
        )
    mamba = MambaConfig(
        heads=heads,
        value=value,
        groups=config.get(int, "mamba_n_groups", default=1),
        key=config.get(int, "mamba_d_state", default=256),
        width=config.get(int, "mamba_d_conv", default=4),
        conv_bias=config.get(bool, "mamba_conv_bias", default=True),
        bias=config.get(bool, "mamba_proj_bias", default=False),
        step_limit=read_step_limit(config),
    )
    return replace(spec, mamba=mamba.checked(), recurrent=recurrent)


def check_convolution(field: str, activation: str) -> None:
    """Raises InvalidModel where what follows the convolution of recurrent layers is not SiLU."""
    if activation not in ("silu", "swish"):
        raise InvalidModel(
            f"config.json: {field} {activation!r} is not supported in recurrent layers: they have silu alone"
        )


def read_step_limit(config: Config) -> tuple[float, float]:
    """`time_step_limit`: the least and the largest step, from 0 where it is not there."""
    given = config.fields.get("time_step_limit") or (0.0, float("inf"))
    try:
        # JSON has no infinity: transformers writes {"__float__": "Infinity"}.
        least, most = (float(each["__float__"] if isinstance(each, dict) else each) for each in given)
    except (TypeError, ValueError, KeyError):
        raise InvalidModel(f"config.json: time_step_limit must be two numbers, not {given!r}") from None
    return least, most
