"""What a config.json is read as, by every architecture: each field left out, changed, impossible or of another type.

`expected` has the spec of one config, and then what each change of one field does to it, or why it is refused.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from quire.errors import InvalidModel
from quire.models.registry import ARCHITECTURES, idle_parameters, read_spec
from quire.models.spec import Config, ModelSpec
from tests.expected import check

HERE = Path(__file__).parent / "expected"
FIELDS: Mapping[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-4,
    "sliding_window": 16,
    "torch_dtype": "bfloat16",
    "eos_token_id": [1, 2],
}
EXPERTS: Mapping[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GRANITE = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 20}
GEMMA4 = {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 16,
    "per_layer_config": {"0": {"head_dim": 12, "num_key_value_heads": 3}, "4": {"head_dim": 16}},
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
    },
}
DEEPSEEK = {
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "kv_lora_rank": 20,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    },
}
OWN: Mapping[str, Mapping[str, Any]] = {
    "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 8, "moe_k": 3, "moe_layer_end_index": 3},
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": {"text_config": {**FIELDS, **GEMMA4}},
    "DeepseekV2ForCausalLM": {**DEEPSEEK, "q_lora_rank": None},
    "DeepseekV3ForCausalLM": {**DEEPSEEK, "q_lora_rank": 24, "first_k_dense_replace": 2, "routed_scaling_factor": 2.5},
    "Qwen3NextForCausalLM": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "GPT2LMHeadModel": {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 64},
    "GptOssForCausalLM": {"num_local_experts": 4},
    "Glm4MoeForCausalLM": {"n_routed_experts": 6, "num_experts_per_tok": 2},
    "GraniteMoeForCausalLM": GRANITE,
    "GraniteMoeHybridForCausalLM": {**GRANITE, "num_local_experts": 0, "layer_types": ["full_attention"] * 5},
    "GraniteMoeSharedForCausalLM": GRANITE,
    "MiniMaxM2ForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "PhiMoEForCausalLM": {"num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 20},
}
EXTRA = (
    *("layer_types", "no_rope_layers", "moe_layers", "mlp_only_layers", "eos_token_id", "moe_layer_end_index"),
    *("sliding_window_pattern", "attn_logit_softcapping", "final_logit_softcapping", "mlp_layer_types"),
)
"""Fields that are read without `Config.get`."""

ROPES: Mapping[str, Mapping[str, Any]] = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0, "truncate": False},
    "dynamic": {"factor": 2.0, "alpha": 100.0},
    "linear": {"factor": 2.0},
    "proportional": {"partial_rotary_factor": 0.5},
    "longrope": {"long_factor": [2.0] * 4, "short_factor": [1.5] * 4, "original_max_position_embeddings": 32},
    "factors": {"factors": [1.0, 2.0, 3.0, 4.0], "factor": 1.0},
    "none": {},
}


def values(now: object) -> Iterator[object]:
    """What a field with this value is changed to."""
    if isinstance(now, bool):
        yield from (not now, 1)
    elif isinstance(now, int):
        yield from (0, 1, now + 1, -1, float(now), 1 << 25, 1 << 70)
    elif isinstance(now, float):
        yield from (0.0, 1, now * 2, -1.0, "1")
    elif isinstance(now, str):
        yield from ("unknown", 1)
    elif isinstance(now, list):
        yield from ([], now[:-1], [*now[:-1], "x"], [*now[:-1], -1], now[0], [True])
    elif now is None:
        yield from (True, 0, 1, 3, 0.5, "gelu", [], [0, 1, 1, 0, 1], ["full_attention"] * 5)
    else:
        yield from ([], "x")


def brief(value: object) -> str:
    """`repr`, but of a dataclass only what is not its default: a field that is new changes no text."""
    if isinstance(value, tuple) and any(map(is_dataclass, value)):
        return f"({', '.join(map(brief, value))})"
    if not is_dataclass(value):
        return repr(value)
    return f"{type(value).__name__}({', '.join(f'{name}={one}' for name, one in own(value).items())})"


def own(value: Any) -> dict[str, str]:
    """The fields that are not their default, one level deep."""
    found: dict[str, str] = {}
    for field in fields(value):
        now = getattr(value, field.name)
        if is_dataclass(now):
            found |= {f"{field.name}.{name}": one for name, one in own(now).items()}
        elif now != field.default:
            found[field.name] = brief(now)
    return found


def named(spec: ModelSpec) -> dict[str, str]:
    return own(spec) | {
        "K/V layers": repr(spec.kv_layers),
        "K/V bytes": repr(spec.kv_bytes(2)),
        "idle parameters": repr(idle_parameters(spec)),
    }


def outcome(fields: Mapping[str, Any], base: Mapping[str, str]) -> str:
    """What is different from `base`, or the error."""
    try:
        spec = read_spec(fields)
    except InvalidModel as error:
        return f"refused: {error}".replace("\n", " ")[:150]
    found = named(spec)
    return ", ".join(
        f"{name} {found.get(name, 'default')}" for name in base | found if found.get(name) != base.get(name)
    )[:300]


def changes(fields: Mapping[str, Any], name: str, base: Mapping[str, str], inside: str = "") -> Iterator[str]:
    """Lines of one field: its values, those that do the same together, and what they do."""
    outer = fields[inside] if inside else fields
    results: dict[str, list[str]] = {}
    without = {k: v for k, v in outer.items() if k != name}
    tried = [
        ("missing", without),
        *((json.dumps(v), outer | {name: v}) for v in values(outer.get(name))),
    ]
    for said, changed in tried:
        whole = {**fields, inside: changed} if inside else changed
        results.setdefault(outcome(whole, base), []).append(said if len(said) < 60 else f"{said[:60]}...")
    results.pop("", None)
    for result, each in results.items():
        yield f"{inside}{'.' * bool(inside)}{name} {' | '.join(each)}: {result}"


NAMES = (
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "Cohere2ForCausalLM",
    "CohereForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Ernie4_5_ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Exaone4ForCausalLM",
    "GPT2LMHeadModel",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma4ForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GlmForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "InternLM3ForCausalLM",
    "Llama4ForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "NemotronForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoeForCausalLM",
    "Phi3ForCausalLM",
    "PhiMoEForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3MoeForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM",
)
"""One name of each class but Llama's."""


@contextlib.contextmanager
def asked(patch: pytest.MonkeyPatch) -> Iterator[dict[str, None]]:
    """The names of the fields that are asked for."""
    names: dict[str, None] = dict.fromkeys(EXTRA)
    get = Config.get

    def noting(self: Config, kind: Any, *several: str, default: Any = None) -> Any:
        names.update(dict.fromkeys(several))
        return get(self, kind, *several, default=default)

    with patch.context() as inner:
        inner.setattr(Config, "get", noting)
        yield names


def lines_of(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The spec of an architecture's config, and what each change of it does."""
    fields = {"architectures": [name], **FIELDS, **(EXPERTS if "moe" in name.lower() else {}), **OWN.get(name, {})}
    with asked(monkeypatch) as names:
        spec = read_spec(fields)
    base = named(spec)
    lines = [f"{field}: {value}" for field, value in base.items()]
    for field in sorted(names):
        lines += changes(fields, field, base)
    for outer in ("per_layer_config", "rope_parameters"):
        for field in fields.get(outer, ()):
            lines += changes(fields, field, base, outer)
    return lines


def test_every_field_of_llama_is_read_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    check(HERE / "read-llama.txt", "\n".join(lines_of("LlamaForCausalLM", monkeypatch)))


@pytest.mark.parametrize("name", NAMES)
def test_every_field_is_read_as_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is different from Llama."""
    llama, own = (lines_of(each, monkeypatch) for each in ("LlamaForCausalLM", name))
    ours, theirs = {*own}, {*llama}
    text = [f"+ {line}" for line in own if line not in theirs] + [
        f"- {line[:60]}" for line in llama if line not in ours
    ]
    check(HERE / f"read-{ARCHITECTURES[name].__name__.lower()}.txt", "\n".join(text))


@pytest.mark.parametrize("kind", ROPES)
def test_every_field_of_rope_is_read_as_recorded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"architectures": ["LlamaForCausalLM"], **FIELDS}
    if kind != "none":
        fields["rope_scaling"] = {"rope_type": kind, **ROPES[kind]}
    with asked(monkeypatch) as names:
        base = named(read_spec(fields))
    lines = [f"{field}: {value}" for field, value in base.items() if field.startswith("rope") or field == "context"]
    for field in sorted({*names} - {*FIELDS, *EXTRA}) if kind != "none" else ():
        lines += changes(fields, field, base, "rope_scaling")
    for field in ("rope_theta", "partial_rotary_factor", "max_position_embeddings", "rope_scaling", "rope_parameters"):
        lines += changes(fields, field, base)
    check(HERE / f"rope-{kind}.txt", "\n".join(lines))
