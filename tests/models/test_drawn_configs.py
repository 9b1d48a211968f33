"""Random configurations against transformers: a few in CI, more at night, any with `python -m tests.fuzz_models`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from transformers import AutoConfig

from quire.errors import InvalidModel
from quire.models.registry import read_spec
from quire.models.spec import ModelSpec
from tests.drawn_configs import FAMILIES, draw_config
from tests.fuzz_models import CRASH, DIFFERENT, EQUAL, REFUSED, examine

SIZES = MappingProxyType(
    {
        "vocab_size": 199,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 128,
    }
)
WINDOWS = MappingProxyType({"use_sliding_window": True, "sliding_window": 7})

RARE: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "gelu between the halves of an MLP": ("llama", {"hidden_act": "gelu"}),
        "windows in layers without RoPE": ("smollm3", {**WINDOWS, "no_rope_layers": [1, 0, 1]}),
        "windows in layers that are named": (
            "smollm3",
            {**WINDOWS, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        ),
        "windows in all layers": (
            "qwen3_moe",
            {**WINDOWS, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        ),
        "scores of GPT-2 divided by layer": (
            "gpt2",
            {"n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 128, "scale_attn_by_inverse_layer_idx": True},
        ),
        "scores of GPT-2 as they are": (
            "gpt2",
            {"n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 128, "scale_attn_weights": False},
        ),
        "a router without noise": (
            "phimoe",
            {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.0},
        ),
        "queries normed after a rotation that makes them longer": (
            "llama4_text",
            {
                "head_dim": 12,
                "num_local_experts": 3,
                "intermediate_size_mlp": 40,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 32,
                },
            },
        ),
        "no biases in MLPs, whatever the field says": (
            "deepseek_v32",
            {
                "num_key_value_heads": 4,
                "q_lora_rank": 12,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "v_head_dim": 8,
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "index_topk": 512,
                "mlp_bias": True,
            },
        ),
    }
)
"""What random configurations have found."""

REFUSALS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "attn_logit_softcapping is not supported for Gemma 3": ("gemma3_text", {"attn_logit_softcapping": 50.0}),
        "num_experts_per_tok must be 2": ("phimoe", {"num_experts_per_tok": 1}),
        "use_sliding_window without layer_types": ("qwen2_moe", {**WINDOWS, "layer_types": None}),
        "use_sliding_window with max_window_layers": ("qwen3_moe", {**WINDOWS, "max_window_layers": 2}),
        "hidden_act 'gelu' is not supported in recurrent layers": ("qwen3_next", {"hidden_act": "gelu"}),
        "mamba_hidden_act 'gelu' is not supported": ("nemotron_h", {"mamba_hidden_act": "gelu"}),
        "hidden_activation 'silu' is not supported with hidden_size_per_layer_input": (
            "gemma4_text",
            {"hidden_activation": "silu"},
        ),
    }
)

PLACES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "bamba": {"attn_layer_indices": [1]},
        "granitemoehybrid": {"layer_types": ["full_attention", *["linear_attention"] * 31]},
        "deepseek_v2": {"num_experts_per_tok": 2},
        "glm4_moe": {"head_dim": 128},
    }
)
"""Fields whose default no model can have."""

NEEDED = frozenset({"attn_layer_indices", "layers_block_type", "architectures"})


@pytest.mark.parametrize("what", RARE)
def test_rare_configurations_give_the_logits_of_transformers(what: str) -> None:
    family, changed = RARE[what]
    result = examine(family, 1, {"model_type": family, **SIZES, **changed})
    assert result.verdict == EQUAL, result.said


@pytest.mark.parametrize("said", REFUSALS)
def test_what_would_differ_is_refused_by_the_name_of_its_field(said: str) -> None:
    family, changed = REFUSALS[said]
    whole = json.loads(AutoConfig.for_model(family).to_json_string(use_diff=False))
    with pytest.raises(InvalidModel, match=said):
        read_spec({**whole, "architectures": None, **changed})


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        pytest.param(family, seed, marks=() if (family, seed) in (("qwen3", 3), ("gemma2", 3)) else pytest.mark.nightly)
        for family in FAMILIES
        for seed in range(1, 7)
    ],
)
def test_drawn_configurations_are_equal_or_refused(family: str, seed: int) -> None:
    result = examine(family, seed)
    assert result.verdict not in (DIFFERENT, CRASH), result.said
    assert result.verdict != REFUSED or "tensors" not in result.said, "a field is to blame, not a tensor"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_transformers_is_drawn_or_known_to_change_nothing(family: str) -> None:
    assert draw_config(family, 1)["model_type"] == family


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_is_left_out_is_what_transformers_makes_of_it(family: str) -> None:
    """Or is refused as missing."""
    config = AutoConfig.for_model(family, **PLACES.get(family, {}))
    whole = {**json.loads(config.to_json_string(use_diff=False)), "architectures": None}
    wanted = facts(read_spec(whole))
    for name in whole.keys() - NEEDED - {"model_type"} - PLACES.get(family, {}).keys():
        less = {other: value for other, value in whole.items() if other != name}
        with contextlib.suppress(Missing):
            assert facts(read(less)) == wanted, name


class Missing(Exception):
    """A field is needed."""


def read(fields: Mapping[str, Any]) -> ModelSpec:
    try:
        return read_spec(fields)
    except InvalidModel as error:
        raise Missing if "is missing" in str(error) else error from None


def facts(spec: ModelSpec) -> ModelSpec:
    """What changes logits."""
    return dataclasses.replace(spec, dtype="", stop=(), skipped_drafts=0)
