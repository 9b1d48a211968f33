"""What is read from a quantization_config, and how one that cannot be read is refused, as written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import InvalidModel
from quire.models.spec import Config
from quire.weights.schemes import ONLINE, choose_format, matches_rule, read_block, read_scheme
from tests.expected import check

EXPECTED = Path(__file__).parent / "expected"


def compressed(
    weights: dict[str, Any] | None = None, acts: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """A config of one group, all linear layers."""
    group = {
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", **(weights or {})},
        "input_activations": acts,
    }
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


PACKED = {"num_bits": 4, "strategy": "group", "group_size": 32}
CONFIGS: list[Any] = [
    {"quant_method": "fp8"},
    {"quant_method": "fp8", "weight_block_size": [128, 64]},
    {"quant_method": "fp8", "weight_block_size": [128]},
    {"quant_method": "fp8", "weight_block_size": [128, 0]},
    {"quant_method": "fp8", "weight_block_size": "x"},
    {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"], "ignored_layers": ["a"]},
    {"quant_method": "fp8", "modules_to_not_convert": None, "ignored_layers": ["a", "b"]},
    {"quant_method": "fp8", "ignored_layers": "a"},
    {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["x"]},
    {"quant_method": "awq"},
    {"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": ["m"]},
    {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"},
    {"quant_method": "awq", "w_bit": 8},
    {"quant_method": "awq", "version": "gemv"},
    {"quant_method": "awq", "group_size": -1},
    {"quant_method": "awq", "group_size": 0},
    {"quant_method": "awq", "group_size": -2},
    {"quant_method": "awq", "group_size": True},
    {"quant_method": "gptq"},
    {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2", "group_size": -1},
    {"quant_method": "gptq", "bits": 8},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    {"quant_method": "bitsandbytes"},
    {},
    {"config_groups": {}},
    {"config_groups": {"a": {}, "b": {}}, "quant_method": "compressed-tensors"},
    compressed(),
    compressed(ignore=["lm_head", "re:.*gate$"]),
    compressed({"type": "float"}),
    compressed({"type": "float", "strategy": "tensor"}),
    compressed({"type": "float", "strategy": "block", "block_structure": [128, 64]}),
    compressed({"type": "float", "strategy": "block", "block_structure": "128x64"}),
    compressed({"type": "float", "strategy": "block", "block_structure": "128xy"}),
    compressed({"type": "float", "strategy": "block"}),
    compressed({"strategy": "token"}),
    compressed({"strategy": "group"}),
    compressed({"strategy": "group", "group_size": 64}),
    compressed({"symmetric": False}),
    compressed({"actorder": "group"}),
    compressed({"actorder": "weight"}),
    compressed({"num_bits": 4}),
    compressed({"num_bits": 4, "type": "float"}),
    compressed(acts={"num_bits": 8}),
    compressed(acts={"num_bits": 4}),
    compressed({"strategy": "tensor"}, {"num_bits": 8}),
    compressed({"strategy": "group"}, {"num_bits": 8}),
    compressed({"type": "float"}, {"num_bits": 8}),
    compressed(PACKED),
    compressed(PACKED, format="pack-quantized"),
    compressed(PACKED, format="pack-quantized", ignore=["lm_head"]),
    compressed(PACKED | {"symmetric": False, "actorder": "group"}, format="pack-quantized"),
    compressed(PACKED | {"strategy": "channel"}, format="pack-quantized"),
    compressed(PACKED | {"strategy": "block", "block_structure": [2, 2]}, format="pack-quantized"),
    compressed({"num_bits": 8}, format="pack-quantized"),
    compressed(PACKED | {"type": "float"}, format="mxfp4-pack-quantized"),
    compressed(PACKED | {"type": "float", "group_size": 16}, format="mxfp4-pack-quantized"),
]


def said(config: dict[str, Any], asked: str = "auto") -> str:
    try:
        if asked != "auto":
            made = choose_format(config, asked, lambda *_: None, {})  # type: ignore[arg-type, return-value]
            return f"{type(made).__name__} {getattr(made, 'scheme', None)}"
        return str(read_scheme(config))
    except InvalidModel as error:
        return f"refused: {error}"


def test_every_quantization_config_is_read_or_refused_as_written_down() -> None:
    lines = []
    for config in CONFIGS:
        lines += [f"{config}", f"  {said({'quantization_config': config})}"]
    lines += [
        said({"compression_config": compressed()}),
        said({"text_config": {"quantization_config": {"quant_method": "fp8"}}}),
    ]
    lines += [
        said({}),
        said({"quantization_config": {"quant_method": "fp8"}, "text_config": {"compression_config": compressed()}}),
    ]
    for asked in ("fp8", "int8", "awq", "fp", "fp8_per_block", "int88"):
        for config in ({}, {"quantization_config": {"quant_method": "fp8"}}, {"quantization_config": compressed()}):
            lines.append(f"{asked} of {list(config)}: {said(config, asked)}")
    lines += [f"{name}: {scheme}" for name, scheme in ONLINE.items()]
    check(EXPECTED / "schemes.txt", "\n".join(lines))


def test_rules_and_blocks_mean_what_is_written_down() -> None:
    name = "model.layers.1.mlp.gate_proj"
    rules = (
        "model",
        "layers.1",
        "layers",
        "1",
        "gate_proj",
        "gate",
        "re:.*gate",
        "re:gate",
        "re:model",
        "model.layers.1.mlp.gate_proj",
        "model.layers.*.mlp",
        "layers.*.self_attn",
        "",
    )
    assert [rule for rule in rules if matches_rule(name, rule)] == [
        *("model", "layers.1", "layers", "1", "gate_proj", "re:.*gate", "re:model", "model.layers.1.mlp.gate_proj"),
        "model.layers.*.mlp",
    ]
    assert read_block(Config({"strategy": "group", "group_size": 7})) == (1, 7)
    assert read_block(Config({"strategy": "channel", "group_size": 7}))[0] == 1
