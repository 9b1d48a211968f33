"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 (NVIDIA 2025): layers of Mamba 2, attention, an MLP or experts alone, each
after a norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.basic import NO_ROPE, NormLayer
from quire.layers.builder import ExpertNames, ModelBuilder
from quire.layers.mamba import MambaConfig
from quire.layers.moe import MoEConfig
from quire.models.bamba import KINDS, LINEAR, check_convolution, read_step_limit
from quire.models.llama import BlockNorms, Llama, Mixer, MLPFunction
from quire.models.mtp import DraftBlock, MTPNames, make_mtp
from quire.models.spec import FULL, Config, ModelSpec, read_decoder
from quire.ops.operands import Angles
from quire.ops.ragged import LayerKV, RaggedBatch, select_rows

LETTERS: Mapping[str, str] = MappingProxyType({"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"})
"""Kinds of layers in `hybrid_override_pattern`."""

HF = "transformers runs others, slowly: --executor hf"


class SingleBlock:
    """One layer: a norm, then attention, Mamba 2 or an MLP."""

    def __init__(self, norm: NormLayer, after: NormLayer, mixer: Mixer | None, mlp: MLPFunction | None) -> None:
        self.norm, self.after_mlp, self.mixer, self.mlp = norm, after, mixer, mlp
        if mixer is not None:
            after.parallel = mixer.out.leave_sum()
        elif mlp is not None:
            after.parallel = mlp.leave_sum()

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
        """See `llama.Block`."""
        x, residual = self.norm.add(x, residual, after)
        if self.mixer is not None:
            return self.mixer(x, angles, batch, kv, output), select_rows(residual, output)
        assert self.mlp is not None
        return self.mlp(select_rows(x, output), batch if output is None else None), select_rows(residual, output)


class NemotronH(Llama):
    """Nemotron-H. Experts, of Nemotron 3, have no gate, and in some models read fewer numbers than there are."""

    architectures = MappingProxyType({"NemotronHForCausalLM": "nemotron_h"})
    norms = BlockNorms("norm")
    attention_name = "mixer"
    expert_names = ExpertNames(
        router="mixer.gate",
        matrices=("mixer.experts.up_proj", "mixer.experts.down_proj"),
        correction="mixer.gate.e_score_correction_bias",
        shared=("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
        latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
        apart=("mixer.experts.#.up_proj", "mixer.experts.#.down_proj"),
    )

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        body = {"embeddings.": "embed_tokens.", "norm_f.": "norm.", "": ""}
        build.rename(
            {f"{top}.{theirs}": f"model.{ours}" for top in ("backbone", "model") for theirs, ours in body.items()}
        )
        super().__init__(spec, build)
        self.mtp = make_mtp(self, build, partial(mtp_names, spec))

    def make_block(self, build: ModelBuilder, index: int) -> SingleBlock:
        """Layer `index`."""
        spec = self.spec
        norm, nothing = build.norm_layer(self.make_norm(build, self.norms.before_attention)), build.norm_layer(None)
        if index in spec.recurrent:
            assert spec.mamba is not None
            return SingleBlock(norm, nothing, build.scope("mixer").mamba(spec.hidden, spec.mamba, spec.norm_eps), None)
        if spec.each_heads[index][0]:
            return SingleBlock(norm, nothing, self.make_attention(build, index), None)
        return SingleBlock(norm, nothing, None, self.make_mlp(build, index))

    def make_mlp(self, build: ModelBuilder, index: int) -> MLPFunction:
        """The MLP that is layer `index`, or its experts."""
        spec, names = self.spec, ("up_proj", "down_proj")
        if spec.experts is not None and index not in spec.experts.dense_layers:
            return super().make_mlp(build, index)
        return build.scope("mixer").mlp(*names, spec.hidden, spec.mlp, spec.activation, bias=spec.mlp_bias)

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        kinds = read_pattern(config)
        fields = {
            "num_hidden_layers": len(kinds),
            "rms_norm_eps": config.get(float, "layer_norm_epsilon", default=1e-5),
            "head_dim": config.get(int, "head_dim", "attention_head_dim", default=128),
            "hidden_act": config.get(str, "mlp_hidden_act", default="relu2"),
            "attention_bias": False,
            "tie_word_embeddings": False,
        }
        fields["intermediate_size"] = config.get(int, "intermediate_size", "moe_intermediate_size")
        spec = read_decoder(Config({**config.fields, **fields}, config.where), architecture)
        bias = config.get(bool, "use_bias", default=False)
        check_convolution("mamba_hidden_act", config.get(str, "mamba_hidden_act", default="silu"))
        mamba = MambaConfig(
            heads=config.get(int, "mamba_num_heads", default=128),
            value=config.get(int, "mamba_head_dim", default=64),
            groups=config.get(int, "n_groups", "mamba_n_groups", default=8),
            key=config.get(int, "ssm_state_size", default=128),
            width=config.get(int, "conv_kernel", "mamba_d_conv", default=4),
            conv_bias=config.get(bool, "use_conv_bias", default=True),
            bias=bias,
            step_limit=read_step_limit(config),
        )
        drafts = config.get(int, "num_nextn_predict_layers", default=0)
        return replace(
            spec,
            rope=NO_ROPE,
            draft_layers=drafts,
            draft_blocks=read_draft_blocks(config, kinds) if drafts else (),
            layer_heads=tuple((spec.kv_heads if kind == FULL else 0, spec.head_dim) for kind in kinds),
            mamba=mamba.checked(),
            recurrent=frozenset(i for i, kind in enumerate(kinds) if kind == LINEAR),
            experts=read_experts(config, frozenset(i for i, kind in enumerate(kinds) if kind != "moe")),
        )


def read_experts(config: Config, others: frozenset[int]) -> MoEConfig | None:
    """Experts, None where no layer has any. others: layers of other kinds."""
    if len(others) == len(read_pattern(config)):
        return None
    return MoEConfig(
        num_experts=config.get(int, "n_routed_experts", default=8),
        num_experts_per_token=config.get(int, "num_experts_per_tok", default=2),
        width=config.get(int, "moe_intermediate_size", default=7688),
        normalize_weights=config.get(bool, "norm_topk_prob", default=True),
        sigmoid=True,
        corrected=True,
        groups=config.get(int, "n_group", default=1),
        used_groups=config.get(int, "topk_group", default=1),
        scale=config.get(float, "routed_scaling_factor", default=1.0),
        shared=config.get(int, "moe_shared_expert_intermediate_size", default=7688),
        gated=False,
        latent=config.get(int, "moe_latent_size", default=0),
        dense_layers=others,
    ).checked()


def read_kinds(config: Config, lists: Sequence[str], pattern: str) -> list[str] | None:
    """The kind of each layer by the first of `lists` that is there, or by the letters of `pattern`."""
    given = next((found for name in lists if (found := config.fields.get(name))), None)
    letters = config.fields.get(pattern)
    if isinstance(letters, str) and not given:
        given = [LETTERS.get(letter, letter) for letter in letters]
    if not isinstance(given, list):
        return None
    return [KINDS.get(kind, kind) if isinstance(kind, str) else str(kind) for kind in given]


def read_draft_blocks(config: Config, kinds: Sequence[str]) -> tuple[int, ...]:
    """Of each block of the layer that drafts, the number of the model's layer that it is like. Raises InvalidModel for
    blocks that are not supported. kinds: of the model's layers."""
    found = read_kinds(config, ("mtp_layers_block_type",), "mtp_hybrid_override_pattern") or [FULL, "moe"]
    if found.count(FULL) != 1 or set(found) - ({*kinds} - {LINEAR}):
        raise InvalidModel(
            "config.json: of what drafts (mtp_layers_block_type), one layer of attention beside MLPs or experts as "
            f"the model has is supported, not {', '.join(found)}; set num_nextn_predict_layers to 0 to serve without it"
        )
    return tuple(kinds.index(kind) for kind in found)


def mtp_names(spec: ModelSpec, layer: int) -> MTPNames:
    """Of the layer that drafts: the norms and the matrix before it are of its first block, the norm after it of the
    last. Raises InvalidModel for several that are to be loaded, for which no checkpoint has names."""
    if spec.draft_layers > 1 and layer:
        raise InvalidModel(
            "config.json: of Nemotron-H, one layer that drafts is supported with speculative_config's method mtp, not "
            f"{spec.draft_layers} (num_nextn_predict_layers)"
        )
    like = spec.draft_blocks or (spec.last_attention,)
    dense = spec.experts.dense_layers if spec.experts is not None else frozenset()
    blocks = [DraftBlock(str(i), layer, dense=layer in dense) for i, layer in enumerate(like)]
    after = f"{len(like) - 1}.final_layernorm"
    return MTPNames("mtp.layers", "0.enorm", "0.hnorm", "0.eh_proj", blocks, after, normed=True, pattern="mtp.*")


def read_pattern(config: Config) -> list[str]:
    """The kind of each layer. Raises InvalidModel for those that are not supported."""
    kinds = read_kinds(config, ("layers_block_type", "layer_types"), "hybrid_override_pattern")
    if kinds is None:
        raise InvalidModel("config.json: layers_block_type or hybrid_override_pattern must say what each layer is")
    for kind in kinds:
        if kind not in (LINEAR, FULL, "mlp", "moe"):
            raise InvalidModel(
                "config.json: of Nemotron-H, layers of Mamba, attention, MLPs and experts are supported, not "
                f"{kind!r}; {HF}"
            )
    if FULL not in kinds or LINEAR not in kinds:
        raise InvalidModel(f"config.json: of Nemotron-H, models with Mamba and attention are supported; {HF}")
    return kinds
