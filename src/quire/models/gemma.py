"""The text models of Gemma 1, 2 and 3 (Gemma Team 2024, 2025).

Embeddings are scaled, and norms store their weight minus 1. In Gemma 2 and 3 attention and MLP stand between two norms
each, and local layers with a sliding window alternate with global ones. Gemma 2 has soft caps on scores and logits;
Gemma 3 norms queries and keys instead, and has another RoPE base for local layers.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from quire.errors import InvalidModel
from quire.layers.builder import ModelBuilder
from quire.models.llama import BlockNorms, Llama
from quire.models.multimodal import nested, rename_vision, select_decoder
from quire.models.siglip import SiglipVision, read_siglip
from quire.models.spec import Config, ModelSpec, read_decoder, read_two_ropes, read_windows
from quire.types import UNLIMITED


class Gemma(Llama):
    """What the generations have in common."""

    norms = BlockNorms(
        before_attention="input_layernorm",
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    )

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        select_decoder(build)
        super().__init__(spec, build)


class Gemma1(Gemma):
    """Gemma 1 (Gemma Team 2024): Llama with the norms and embeddings of its successors."""

    architectures = MappingProxyType({"GemmaForCausalLM": "gemma"})
    norms = Llama.norms

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        causal(config)
        spec = read_gemma(config, architecture, every=0)
        # Published config.json files say "gelu", and mean its tanh approximation.
        activation = "gelu_pytorch_tanh" if spec.activation == "gelu" else spec.activation
        return replace(spec, windows=(UNLIMITED,) * spec.layers, scale=0.0, activation=activation)


class Gemma2(Gemma):
    """Gemma 2: soft caps on attention scores and logits."""

    architectures = MappingProxyType({"Gemma2ForCausalLM": "gemma2"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        causal(config)
        spec = read_gemma(config, architecture, every=2)
        return replace(
            spec,
            score_cap=cap(config, "attn_logit_softcapping", 50.0),
            logit_cap=cap(config, "final_logit_softcapping", 30.0),
        )


class Gemma3(Gemma):
    """Gemma 3: normed queries and keys. An image's tokens attend to each other in both directions."""

    architectures = MappingProxyType({"Gemma3ForCausalLM": "gemma3_text", "Gemma3ForConditionalGeneration": "gemma3"})

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        rename_vision(build)
        super().__init__(spec, build)
        build = build.here(spec.embeds(build.pipeline))
        self.vision = None if spec.vision is None else SiglipVision(spec.vision, build)

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        whole = config
        config = nested(config)
        every = config.get(int, "sliding_window_pattern", "_sliding_window_pattern", default=6)
        if cap(config, "attn_logit_softcapping", 0.0):
            raise InvalidModel(
                "config.json: attn_logit_softcapping is not supported for Gemma 3, whose published models have none; "
                "transformers ignores it: set it to null"
            )
        spec = read_gemma(config, architecture, every=every)
        base = config.get(float, "rope_theta", default=1e6)
        local_base = config.get(float, "rope_local_base_freq", default=10_000.0)
        return replace(
            read_two_ropes(config, bidirectional(config, spec), base, local_base, every=every),
            vision=read_siglip(whole, spec),
            qk_norm="each",
            logit_cap=cap(config, "final_logit_softcapping", 0.0),
        )


def read_gemma(config: Config, architecture: str, *, every: int) -> ModelSpec:
    """Fields that Gemma 2 and 3 share. every: each how many-th layer is global, where there is no `layer_types`."""
    spec = read_decoder(config.with_defaults(head_dim=256, tie_word_embeddings=True), architecture)
    share = config.get(float, "query_pre_attn_scalar", default=256.0)
    if share <= 0:
        raise InvalidModel(f"config.json: query_pre_attn_scalar must be above 0, not {share:g}")
    return replace(
        spec,
        windows=read_windows(config, spec.layers, every=every),
        ropes=(spec.rope,) * spec.layers,
        activation=config.get(str, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        scale=share**-0.5,
        norm_shift=1.0,
        embedding_scale=spec.hidden**0.5,
    )


def causal(config: Config) -> None:
    """Raises InvalidModel for bidirectional attention."""
    if config.get(bool, "use_bidirectional_attention", default=False):
        raise InvalidModel("config.json: use_bidirectional_attention is supported for Gemma 3 only")


def bidirectional(config: Config, spec: ModelSpec) -> ModelSpec:
    """`spec` as config.json says: where attention is bidirectional (EmbeddingGemma), half of a window is ahead."""
    if not config.get(bool, "use_bidirectional_attention", default=False):
        return spec
    each = tuple(UNLIMITED if width == UNLIMITED else width // 2 for width in spec.windows)
    return replace(
        spec, ahead=each, windows=tuple(UNLIMITED if half == UNLIMITED else half + 1 for half in each), generates=False
    )


def cap(config: Config, name: str, default: float) -> float:
    """A soft cap: 0 for null, `default` where the field is missing."""
    return 0.0 if name in config.fields and config.fields[name] is None else config.get(float, name, default=default)
