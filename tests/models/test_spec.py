"""config.json in, spec out: every spelling, and one clear line for what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import InvalidModel
from quire.layers.basic import RopeConfig
from quire.layers.moe import MoEConfig
from quire.models.registry import parameters, read_spec
from quire.ops.ragged import KVShape
from quire.types import UNLIMITED

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 100,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
    "eos_token_id": [1, 2],
}


def test_a_config_is_read_with_the_defaults_of_its_architecture() -> None:
    spec = read_spec(CONFIG)
    assert (spec.head_dim, spec.kv_heads, spec.context, spec.dtype, spec.stop) == (16, 2, 128, "bfloat16", (1, 2))
    assert spec.rope == RopeConfig(dim=16, theta=10_000.0)
    assert spec.windows == (UNLIMITED, UNLIMITED)
    assert not spec.tie
    assert read_spec(CONFIG | {"num_key_value_heads": None}).kv_heads == 4
    assert read_spec(CONFIG | {"architectures": None, "model_type": "llama"}) == spec


def test_kv_and_parameters_are_counted() -> None:
    spec = read_spec(CONFIG)
    assert spec.kv_shapes == (KVShape(2, 16, 16),) * 2
    assert spec.kv_bytes(2) == 2 * 2 * 2 * 16 * 2
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 100 + 2 * 64
    assert parameters(spec) == 2 * layer + 64 + 2 * 300 * 64
    assert parameters(read_spec(CONFIG | {"tie_word_embeddings": True})) == 2 * layer + 64 + 300 * 64


def test_old_and_new_spellings_of_rope_are_one() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    wanted = RopeConfig(dim=16, theta=5e5, kind="llama3", factor=8.0, low=1.0, high=4.0, original=32)
    for old in ("rope_type", "type"):
        assert read_spec(CONFIG | {"rope_theta": 500000, "rope_scaling": {old: "llama3", **scaling}}).rope == wanted
    new = {"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    assert read_spec(CONFIG | {"rope_parameters": new}).rope == wanted
    assert read_spec(CONFIG | {"rope_theta": 7.0, "rope_scaling": None}).rope == RopeConfig(dim=16, theta=7.0)
    assert read_spec(CONFIG | {"partial_rotary_factor": 0.5}).rope.dim == 8


def test_windows_are_read_per_layer_and_per_architecture() -> None:
    def windows(name: str, **change: object) -> tuple[int, ...]:
        return read_spec(
            CONFIG | {"architectures": [name], "num_hidden_layers": 3, "sliding_window": 8, **change}
        ).windows

    mixed = ["full_attention", "sliding_attention", "full_attention"]
    assert windows("LlamaForCausalLM") == (UNLIMITED,) * 3
    assert windows("MistralForCausalLM") == (8, 8, 8)
    assert windows("MistralForCausalLM", layer_types=mixed) == (UNLIMITED, 8, UNLIMITED)
    assert windows("MistralForCausalLM", sliding_window=None) == (UNLIMITED,) * 3
    for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert windows(name) == (UNLIMITED,) * 3
        assert windows(name, use_sliding_window=True, max_window_layers=2) == (UNLIMITED, UNLIMITED, 8)
        assert windows(name, use_sliding_window=True, layer_types=mixed) == (UNLIMITED, 8, UNLIMITED)
    for wrong, said in (({"layer_types": mixed[:2]}, "list of num_hidden_layers"), ({"layer_types": ["x"] * 3}, "'x'")):
        with pytest.raises(InvalidModel, match=said):
            windows("MistralForCausalLM", **wrong)


def test_gpt2_has_its_own_spelling() -> None:
    config = {"model_type": "gpt2", "n_embd": 12, "n_head": 3, "n_layer": 2, "vocab_size": 50, "n_positions": 16}
    spec = read_spec(config)
    assert (spec.architecture, spec.head_dim, spec.mlp, spec.context, spec.tie) == ("GPT2LMHeadModel", 4, 48, 16, True)
    assert (read_spec(config | {"scale_attn_weights": False}).scale, spec.scale) == (1.0, 0.5)
    with pytest.raises(InvalidModel, match="multiple of n_head"):
        read_spec(config | {"n_head": 5})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be int, not str"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be int, not bool"),
        ({"num_attention_heads": -4}, "num_attention_heads must not be negative"),
        ({"num_attention_heads": 0}, "must be above 0"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "invalid numbers"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 5.0}},
            "llama3 scaling needs .* low_freq_factor of at most high_freq_factor",
        ),
        ({"eos_token_id": "</s>"}, "eos_token_id must be an integer"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
        (
            {"architectures": ["LlamaForCasualLM"]},
            "'LlamaForCasualLM' is not supported: .* transformers may .* --executor hf",
        ),
        ({"architectures": None}, "config.json names no architecture"),
    ],
)
def test_what_cannot_be_is_named(change: dict, said: str) -> None:
    with pytest.raises(InvalidModel, match=said.replace("?", r"\?")):
        read_spec(CONFIG | change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_scaling": {"type": "lama3", "factor": 8.0}}, "Did you mean 'llama3'"),
        ({"hidden_act": "elu"}, "activation 'elu' is not supported"),
    ],
)
def test_what_no_layer_can_do_is_named_when_the_model_is_built(change: dict, said: str) -> None:
    with pytest.raises(InvalidModel, match=said):
        parameters(read_spec(CONFIG | change))


def test_gemma3_is_read_as_published_nested_and_with_its_defaults() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 7, "sliding_window": 1024}
    scaling = {"rope_type": "linear", "factor": 8.0}
    config = {"model_type": "gemma3", "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "vision_config": {}}
    spec = read_spec(config | {"text_config": text | {"rope_scaling": scaling, "model_type": "gemma3_text"}})
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab, spec.context) == (8, 4, 256, 262_208, 131_072)
    assert (spec.tie, spec.activation, spec.scale, spec.stop) == (True, "gelu_pytorch_tanh", 1 / 16, (1, 106))
    assert spec.windows == (1024,) * 5 + (UNLIMITED, 1024)
    assert spec.ropes[5] == spec.rope == RopeConfig(dim=256, theta=1e6, kind="linear", factor=8.0)
    assert spec.ropes[0] == RopeConfig(dim=256, theta=1e4)
    assert (spec.score_cap, spec.logit_cap) == (0.0, 0.0)


def test_gemma2_caps_unless_config_says_null() -> None:
    config = CONFIG | {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 3, "sliding_window": 8}
    spec = read_spec(config)
    assert (spec.score_cap, spec.logit_cap, spec.windows) == (50.0, 30.0, (8, UNLIMITED, 8))
    off = read_spec(config | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (off.score_cap, off.logit_cap) == (0.0, 0.0)


def test_yarn_is_read_with_its_gain_and_its_longer_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96}
    spec = read_spec(CONFIG | {"rope_scaling": yarn})
    assert spec.context == 384
    assert spec.rope.gain == pytest.approx(1.1386294)
    assert read_spec(CONFIG | {"rope_scaling": yarn | {"attention_factor": 0.5}}).rope.gain == 0.5
    both = read_spec(CONFIG | {"rope_scaling": yarn | {"mscale": 2.0, "mscale_all_dim": 1.0}})
    assert both.rope.gain == pytest.approx(1.2772589 / 1.1386294)


def test_longrope_has_a_gain_and_factors_by_its_lengths() -> None:
    """(length of training, context, more fields) -> which factors, which below what length, stretch and gain."""
    lists = {"long_factor": [2.0] * 8, "short_factor": [1.5] * 8}
    found = {}
    for original, context, more in (
        (64, 128, {}),
        (128, 128, {}),
        (64, 128, {"attention_factor": 1.3}),
        (64, 128, {"factor": 4.0}),
        (64, 128, {"factor": 4.0, "attention_factor": 0.7}),
        (64, 128, {"factor": 1.0}),
        (1, 128, {"attention_factor": 1.3}),
    ):
        scaling = {"rope_type": "longrope", **lists, **more, "original_max_position_embeddings": original}
        spec = read_spec(CONFIG | {"rope_scaling": scaling, "max_position_embeddings": context})
        by_length = [spec.for_length(length).rope.factors[0] for length in (1, original, original + 1, context + 1)]
        rope = spec.rope
        found[original, *more.values()] = (rope.factors[0], by_length, rope.factor, round(rope.gain, 6))
    assert found == {
        (64,): (2.0, [1.5, 1.5, 2.0, 2.0], 2.0, round((7 / 6) ** 0.5, 6)),
        (128,): (1.5, [1.5, 1.5, 1.5, 1.5], 1.0, 1.0),
        (64, 1.3): (2.0, [1.5, 1.5, 2.0, 2.0], 2.0, 1.3),
        (64, 4.0): (2.0, [1.5, 1.5, 2.0, 2.0], 4.0, round((8 / 6) ** 0.5, 6)),
        (64, 4.0, 0.7): (2.0, [1.5, 1.5, 2.0, 2.0], 4.0, 0.7),
        (64, 1.0): (2.0, [1.5, 1.5, 2.0, 2.0], 1.0, 1.0),
        (1, 1.3): (2.0, [1.5, 1.5, 2.0, 2.0], 128.0, 1.3),
    }
    with pytest.raises(InvalidModel, match="longrope needs original_max_position_embeddings"):
        read_spec(CONFIG | {"rope_scaling": {"rope_type": "longrope", **lists, "original_max_position_embeddings": 1}})


def test_layers_of_ernie_with_experts_are_those_between_two_numbers_each_so_many() -> None:
    """(first, last, interval) -> the layers without experts, of six."""
    base = CONFIG | {"architectures": ["Ernie4_5_MoeForCausalLM"], "num_hidden_layers": 6, "moe_num_experts": 8}
    for (first, last, step), dense in {
        (1, -1, 1): {0},
        (1, None, 1): {0},
        (0, 3, 1): {4, 5},
        (2, 4, 1): {0, 1, 5},
        (0, 5, 2): {0, 2, 4},
        (1, 4, 3): {0, 1, 3, 4, 5},
    }.items():
        fields = {"moe_layer_start_index": first, "moe_layer_interval": step}
        given = fields if last is None else fields | {"moe_layer_end_index": last}
        experts = read_spec(base | given).experts
        assert experts is not None and experts.dense_layers == dense, given


LATENTS = {"kv_lora_rank": 20, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
INDEXED = CONFIG | LATENTS | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
INDEXED |= {"architectures": ["DeepseekV32ForCausalLM"], "index_n_heads": 3, "index_head_dim": 16, "index_topk": 5}
INDEXED |= {"n_group": 1, "topk_group": 1}


def test_an_indexer_is_kept_where_it_has_a_choice() -> None:
    spec = read_spec(INDEXED)
    assert spec.kv_shapes == (KVShape(1, 8, 20, 16),) * 2
    assert spec.kv_bytes(2) == 2 * 2 * (8 + 20 + 16)
    assert spec.for_length(6) == spec
    assert spec.for_length(5).kv_shapes == (KVShape(1, 8, 20),) * 2
    drafting = read_spec(INDEXED | {"num_nextn_predict_layers": 2}, mtp=True)
    assert drafting.draft_kv_shapes == spec.kv_shapes
    assert drafting.for_length(5).draft_kv_shapes == spec.for_length(5).kv_shapes


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"index_topk": 0}, r"index_topk must be above 0.*not 3, 0 and 16"),
        ({"index_n_heads": 0}, "index_n_heads and index_topk must be above 0"),
        ({"index_head_dim": 7}, r"index_head_dim at least qk_rope_head_dim \(8\), not 3, 5 and 7"),
    ],
)
def test_an_impossible_indexer_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidModel, match=said):
        read_spec(INDEXED | fields)


def test_experts_are_read_and_impossible_ones_refused() -> None:
    config = CONFIG | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "moe_intermediate_size": 20}
    spec = read_spec(config | {"num_experts_per_tok": 2, "mlp_only_layers": [1]})
    assert spec.experts == MoEConfig(
        num_experts=8, num_experts_per_token=2, width=20, normalize_weights=False, dense_layers=frozenset({1})
    )
    assert parameters(spec) - parameters(read_spec(config | {"num_experts": 9, "mlp_only_layers": [1]})) == -64 - 3840
    with pytest.raises(InvalidModel, match="9 of 8 experts"):
        read_spec(config | {"num_experts_per_tok": 9})
