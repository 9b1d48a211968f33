"""Gemma 4 (Gemma Team 2026): dense, with experts beside the MLP, and with inputs for each layer. It may read images.

As in Gemma 3, attention and MLP stand between two norms each and local layers alternate with global ones. Values are
normed, too; global layers have larger heads, of which few pairs of dimensions are rotated, and may use keys as values;
each layer multiplies the stream by a number at its end. In the small models the last layers read K/V of earlier ones.
In the large ones an image's tokens see each other in both directions, in local layers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.basic import Attention, Heads, NormLayer
from quire.layers.builder import GELUS, ExpertNames, ModelBuilder
from quire.layers.moe import MoE, MoEConfig
from quire.models.gemma import Gemma, cap
from quire.models.gemma4_vision import Gemma4Vision, read_gemma4_vision
from quire.models.llama import Block, MLPFunction
from quire.models.multimodal import nested, rename_vision
from quire.models.spec import Config, ModelSpec, read_context, read_decoder, read_locals, read_rope, read_windows
from quire.ops.operands import Angles, Norm, Norms
from quire.ops.ragged import LayerKV, RaggedBatch, select_rows
from quire.types import UNLIMITED

FULL = MappingProxyType({"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6})
"""The rotary embedding of global layers where config.json has none."""


class Mixture:
    """An MLP and experts side by side. Experts and router read the residual stream, each by a norm of its own."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec, mlp: MLPFunction, experts: MoE) -> None:
        self.mlp, self.experts, self.ops = mlp, experts, build.ops
        names = "pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"
        before, self.after_mlp, self.after = (build.rms_norm(name, spec.hidden, spec.norm_eps) for name in names)
        asked = Norm(build.vector("router.scale", spec.hidden, mean=1.0), spec.norm_eps)
        self.norms = before, asked
        """Of the residual: what experts and what the router read."""

    def __call__(self, x: Tensor, normed: Sequence[Tensor], batch: RaggedBatch | None) -> Tensor:
        """x: the normed residual [T, hidden], for the MLP. normed: of `norms`. Experts are chosen first, so that their
        matrices may be requested while the MLP computes."""
        read, asked = normed
        routing = self.experts.route(asked, batch)
        made = self.mlp(x)
        routed = self.experts.apply(read, routing._replace(early=True))
        return self.ops.sum_norms(routed, self.after, made, self.after_mlp)


class LayerInput:
    """What a layer adds of its tokens' own inputs [T, n]: they are gated by the stream, and projected."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        width, self.ops, build = spec.layer_inputs, build.ops, build.replicated()
        self.gate = build.column_parallel(("per_layer_input_gate",), spec.hidden, ((width, 1),))
        self.projection = build.row_parallel("per_layer_projection", (width, 1), spec.hidden)

    def __call__(self, residual: Tensor, own: Tensor) -> Tensor:
        """residual [T, hidden], own [T, n] -> [T, hidden]."""
        return self.projection(self.ops.gelu(self.gate(residual)) * own)


class Gemma4Block(Block):
    """One layer. last: the norm of what it returns, and what the stream is multiplied by."""

    leaves_sums = False

    def __init__(
        self,
        norms: Sequence[NormLayer],
        attention: Attention,
        mlp: MLPFunction,
        mixture: Mixture | None,
        last: NormLayer,
        own: LayerInput | None,
    ) -> None:
        super().__init__(norms, attention, mlp)
        self.mixture, self.last, self.own = mixture, last, own
        self.sum = NormLayer(None, last.ops)

    def run(
        self,
        stream: tuple[Tensor, Tensor, NormLayer],
        angles: Angles,
        batch: RaggedBatch,
        kv: LayerKV,
        output: Tensor | None,
        own: Tensor | None,
    ) -> tuple[Tensor, Tensor, NormLayer]:
        """As `Block.__call__`, with the norm in `stream`. own [T, n]: the layer's inputs, if it has any."""
        x, residual = self.before_attention.add(*stream)
        x = self.attention(x, angles, batch, kv, output)
        others = () if self.mixture is None else self.mixture.norms
        residual = select_rows(residual, output)
        x, normed, residual = self.before_mlp.add_norms(x, residual, self.after_attention, others)
        real = batch if output is None else None
        x = self.mlp(x, real) if self.mixture is None else self.mixture(x, normed, real)
        if self.own is None or own is None:
            return x, residual, self.last
        _, residual = self.sum.add(x, residual, self.after_mlp)
        return self.own(residual, select_rows(own, output)), residual, self.last


class Gemma4(Gemma):
    """Gemma 4. Of multimodal checkpoints the decoder and the encoder of images are loaded."""

    architectures = MappingProxyType({"Gemma4ForCausalLM": "gemma4_text", "Gemma4ForConditionalGeneration": "gemma4"})
    expert_names = ExpertNames(
        router="router.proj",
        matrices=("experts.gate_up_proj", "experts.down_proj"),
        gains="router.per_expert_scale",
    )

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        self.layers = list[Gemma4Block]()
        rename_vision(build)
        super().__init__(spec, build)
        here = build.here(spec.embeds(build.pipeline))
        self.vision = None if spec.vision is None else Gemma4Vision(spec.vision, here)
        body, width = build.scope("model"), spec.layer_inputs
        if width:
            whole = spec.layers * width
            self.inputs = body.embedding("embed_tokens_per_layer", spec.vocab, whole, scale=width**0.5)
            names = ("per_layer_model_projection",)
            self.projection = body.replicated().column_parallel(names, spec.hidden, ((whole, 1),))
            self.input_norm = body.rms_norm("per_layer_projection_norm", width, spec.norm_eps)

    def make_block(self, build: ModelBuilder, index: int) -> Block:
        """Layer `index`."""
        spec = self.spec
        gain = build.vector("layer_scalar", 1, mean=1.0, std=0.0)
        norms = [build.norm_layer(self.make_norm(build, name)) for name in self.norms]
        name = "post_per_layer_input_norm" if spec.layer_inputs else self.norms.after_mlp
        last = build.norm_layer(self.make_norm(build, name) if spec.layer_inputs else norms[-1].norm, gain=gain)
        width = (spec.layer_mlp or (spec.mlp,) * spec.layers)[index]
        mlp, mixture = build.scope("mlp").gated_mlp(spec.hidden, width, spec.activation), None
        if spec.experts is not None:
            experts = build.experts(spec.hidden, spec.experts, spec.activation, names=self.expert_names)
            mixture = Mixture(build, spec, mlp, experts)
        own = LayerInput(build, spec) if spec.layer_inputs else None
        self.layers.append(Gemma4Block(norms, self.make_attention(build, index), mlp, mixture, last, own))
        return self.layers[-1]

    def make_attention(self, build: ModelBuilder, index: int) -> Attention:
        """`self_attn` of layer `index`; of one that reads another's K/V, without matrices for k and v."""
        spec, scope = self.spec, build.scope("self_attn")
        reads = spec.kv_layers[index] != index
        if reads:
            # Published checkpoints hold them, and nothing reads them.
            scope.ignore("k_proj.*", "v_proj.*", "k_norm.*")
        kv, dim = spec.layer_heads[index]
        scope = scope.for_heads(spec.heads, kv)
        heads = Heads(count=spec.heads, kv=0 if reads else kv, dim=dim, scale=spec.scale, window=spec.windows[index])
        q = scope.rms_norm("q_norm", dim, spec.norm_eps)
        k = q if reads else scope.rms_norm("k_norm", dim, spec.norm_eps)
        value = "k_proj" if index in spec.keys_are_values else "v_proj"
        names = ("q_proj",) if reads else ("q_proj", "k_proj", value)
        norms = Norms(q, k, v_eps=spec.norm_eps if spec.norm_values else None)
        return scope.attention(spec.hidden, heads, names=names, bias=spec.qkv_bias, out_bias=spec.out_bias, norms=norms)

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """See `registry.Model`."""
        causal = self.ops.prepare(replace(batch, last_visible=None))
        batch = causal if batch.last_visible is None else self.ops.prepare(batch)
        angles = self.layer_angles([rotary(batch.positions) for rotary in self.rotaries.values()])
        residual, spec = self.enter(batch), self.spec
        inputs = self.layer_inputs(batch, residual)
        stream = residual.new_zeros(residual.shape), residual, self.nothing
        for i, block in zip(spec.own_layers, self.layers, strict=True):
            output = batch.output_indices if i == spec.layers - 1 else None
            seen = causal if spec.windows[i] == UNLIMITED else batch
            stream = block.run(stream, angles[i], seen, kv[self.kv_layers[i]], output, inputs[i])
        return self.leave(batch, *stream)

    def own_tokens(self, batch: RaggedBatch) -> Tensor:
        """The tokens [T] of which layers have inputs: that of padding in the places of images."""
        if batch.images is None or self.spec.vision is None:
            return batch.tokens
        return batch.tokens.index_fill(0, batch.images.rows, self.spec.vision.pad_token)

    def layer_inputs(self, batch: RaggedBatch, entered: Tensor) -> Sequence[Tensor | None]:
        """Per layer, its inputs [T, n]. entered: what `enter` returned, which is the embeddings of tokens and images in
        the first stage; others look them up."""
        spec, width = self.spec, self.spec.layer_inputs
        if not width:
            return [None] * spec.layers
        embedded = entered if self.pipeline.first else batch.with_images(self.embedding(batch.tokens))
        made = self.ops.norm((self.projection(embedded) * spec.hidden**-0.5).view(-1, width), self.input_norm)
        whole = (made.view(len(embedded), -1) + self.inputs(self.own_tokens(batch))) * 0.5**0.5
        return list(whole.view(len(embedded), -1, width).unbind(1))

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        whole, config = config, nested(config).with_defaults(head_dim=256, tie_word_embeddings=True)
        if config.get(str, "use_bidirectional_attention", default="vision") != "vision":
            raise InvalidModel("config.json: use_bidirectional_attention must be 'vision' or null")
        spec = read_decoder(config, architecture)
        spec = read_layers(config.with_defaults(sliding_window=512), spec)
        if spec.layer_inputs and config.get(int, "vocab_size_per_layer_input", default=spec.vocab) != spec.vocab:
            raise InvalidModel("config.json: vocab_size_per_layer_input must be vocab_size")
        activation = config.get(str, "hidden_activation", default="gelu_pytorch_tanh")
        if spec.layer_inputs and activation not in GELUS:
            raise InvalidModel(
                f"config.json: hidden_activation {activation!r} is not supported with hidden_size_per_layer_input "
                f"(known: {', '.join(GELUS)})"
            )
        own = spec.layers - spec.shared_kv
        wide = config.get(bool, "use_double_wide_mlp", default=False)
        return replace(
            spec,
            vision=read_gemma4_vision(whole, config, spec),
            activation=activation,
            scale=1.0,
            qk_norm="each",
            norm_values=True,
            embedding_scale=spec.hidden**0.5,
            logit_cap=cap(config, "final_logit_softcapping", 0.0),
            layer_mlp=tuple(spec.mlp * (2 if wide and i >= own else 1) for i in range(spec.layers)),
            experts=read_experts(config, spec) if config.get(bool, "enable_moe_block", default=False) else None,
        )


def read_layers(config: Config, spec: ModelSpec) -> ModelSpec:
    """`spec` with what differs between local and global layers. The last layer is global whatever `layer_types` say."""
    local = (*read_locals(config, spec.layers, every=6)[:-1], False)
    rope = config.section("rope_parameters")
    full = rope.section("full_attention").with_defaults(**FULL)
    keys_are_values = config.get(bool, "attention_k_eq_v", default=False)
    shared = config.get(int, "num_kv_shared_layers", default=0)
    heads = tuple(read_heads(config, spec, i, each) for i, each in enumerate(local))
    kinds, own = [*zip(local, heads, strict=True)], spec.layers - shared
    if own < 1 or not set(kinds[own:]) <= set(kinds[:own]):
        raise InvalidModel("config.json: num_kv_shared_layers leaves no layer of a type whose K/V could be read")
    ropes = tuple(
        read_rope(config, dim, rope.section("sliding_attention"), theta=10_000.0)
        if each
        else read_rope(config, dim, full)
        for (_, dim), each in zip(heads, local, strict=True)
    )
    windows = read_windows(config, spec.layers, every=6)
    return replace(
        spec,
        rope=ropes[-1],
        ropes=ropes,
        context=read_context(config, ropes[-1]),
        windows=(*windows[:-1], UNLIMITED),
        layer_heads=heads,
        keys_are_values=frozenset(i for i, each in enumerate(local) if keys_are_values and not each),
        shared_kv=shared,
        layer_inputs=config.get(int, "hidden_size_per_layer_input", default=256),
    )


def read_heads(config: Config, spec: ModelSpec, index: int, local: bool) -> tuple[int, int]:
    """(K/V heads, head_dim) of a layer: in `per_layer_config`, or in fields for all global layers."""
    own = config.section("per_layer_config").section(str(index))
    heads, dim = spec.kv_heads, spec.head_dim
    if not local:
        dim = config.get(int, "global_head_dim", default=512)
        if config.get(bool, "attention_k_eq_v", default=False):
            heads = config.get(int, "num_global_key_value_heads", default=heads)
    heads, dim = own.get(int, "num_key_value_heads", default=heads), own.get(int, "head_dim", default=dim)
    if not heads or spec.heads % heads or not dim:
        raise InvalidModel(
            f"config.json: {spec.heads} attention heads of layer {index} cannot share {heads} key/value heads evenly"
        )
    return heads, dim


def read_experts(config: Config, spec: ModelSpec) -> MoEConfig:
    """Experts beside the MLP of every layer. Their router reads normed numbers divided by the root of their count."""
    return MoEConfig(
        num_experts=config.get(int, "num_experts"),
        num_experts_per_token=config.get(int, "top_k_experts"),
        width=config.get(int, "moe_intermediate_size"),
        gained=True,
        logit_scale=spec.hidden**-0.5,
    ).checked()
