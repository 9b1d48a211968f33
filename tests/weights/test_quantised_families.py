"""Every family in every format of quantised checkpoints says what the numbers in it stand for.

CI has the first of each kind: fused matrices, experts in tensors of their own and in one, beside shared ones, with
biases. `make nightly` has all.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from quire.layers.quantization.base import WeightStorage
from quire.models.registry import Model
from quire.weights.canary import Canary
from quire.weights.files import SINGLE
from quire.weights.load import load_model
from tests.checkpoints import FIRST, SHAPES, make
from tests.models.feeding import Feeder
from tests.quantised import FORMATS, plain, quantise

SIZES: Mapping[str, int] = MappingProxyType(
    {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 96,
        "intermediate_size_mlp": 96,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "shared_intermediate_size": 96,
        "moe_shared_expert_intermediate_size": 96,
        "moe_latent_size": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
    }
)
"""Of whatever a family has: every number a multiple of a group."""

LATENTS: Mapping[str, int] = MappingProxyType(
    {
        "num_key_value_heads": 8,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 32,
        "v_head_dim": 16,
        "index_head_dim": 32,
    }
)
"""Of families with latent attention."""

UNGATED = ("nemotron_h-experts", "nemotron_h-latent-experts")
"""Experts of two matrices, beside the first of their family, which has none."""

FAMILIES = tuple(shape for shape in SHAPES if shape in FIRST | {*UNGATED} and not shape.startswith("gpt2"))

APART = "llama4_text-gqa apart"
"""Llama 4 as tools write it that quantise linear layers only: a matrix of each expert by itself."""

IN_CI = MappingProxyType(
    {
        "phi3-gqa-partly-rotated": ("awq", "fp8-tensor"),
        "glm4-gqa": ("gptq-act-order", "fp8-blocks"),
        "qwen2_moe-gqa": ("gptq",),
        "glm4_moe-gqa": ("int8-w8a8", "fp8-rows"),
        "deepseek_v2-plain-queries": ("awq",),
        "deepseek_v3-groups-yarn": ("fp8-blocks",),
        "deepseek_v32-groups-yarn": ("fp8-blocks",),
        "minimax_m2-gqa": ("fp8-blocks",),
        "phimoe-gqa": ("int4-packed-zeros",),
        "granitemoeshared-gqa": ("int4-packed",),
        "gemma4_text-mixture": ("fbgemm-fp8",),
        "gpt_oss-gqa": ("int8-w8a16",),
        "starcoder2-gqa": ("gptq-8",),
        "nemotron_h-experts": ("fp8-blocks",),
        "llama4_text-gqa": ("int8-packed-zeros",),
        APART: ("int8-w8a16-packed", "fp8-rows"),
    }
)


def cases() -> Iterator[Any]:
    for shape in (*FAMILIES, APART):
        for name in FORMATS:
            marks = () if name in IN_CI.get(shape, ()) else pytest.mark.nightly
            yield pytest.param(shape, name, marks=marks, id=f"{shape}-{name}")


@pytest.fixture(scope="module")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape, folder = request.param.split()[0], tmp_path_factory.mktemp("family")
    own = {"model_type": shape.split("-")[0], **SHAPES[shape]}
    known = AutoConfig.for_model(own["model_type"]).to_dict()
    wanted = {**SIZES, **LATENTS} if "kv_lora_rank" in own else SIZES
    sizes = {name: size for name, size in wanted.items() if name in own or known.get(name) is not None}
    make(folder, shape, **sizes)
    if request.param == APART:
        save_file(apart(load_file(folder / SINGLE)), folder / SINGLE)
    return folder


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with [E, in, out] of all experts as [out, in] of each."""
    spread = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 3:
            spread[name] = tensor
            continue
        experts = name.rpartition(".")[0]
        gate_up = name.endswith("gate_up_proj")
        for e, matrix in enumerate(tensor):
            parts = (
                zip(("gate_proj", "up_proj"), matrix.chunk(2, 1), strict=True) if gate_up else [("down_proj", matrix)]
            )
            spread |= {f"{experts}.{e}.{part}.weight": own.t().contiguous() for part, own in parts}
    return spread


def together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `apart` was made of."""
    if not any(".feed_forward.experts.0." in name for name in tensors):
        return tensors
    found = {name: tensor for name, tensor in tensors.items() if ".feed_forward.experts." not in name}
    for first in (name for name in tensors if name.endswith(".feed_forward.experts.0.gate_proj.weight")):
        experts = first.removesuffix(".0.gate_proj.weight")
        numbers = range(sum(name.startswith(experts) and name.endswith(".down_proj.weight") for name in tensors))
        gate, up, down = (
            torch.stack([tensors[f"{experts}.{e}.{part}.weight"].t() for e in numbers])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        found |= {f"{experts}.gate_up_proj": torch.cat((gate, up), 2), f"{experts}.down_proj": down}
    return found


class Exact(Canary):
    """Has activations stay as they are where a format rounds them."""

    def check(self, model: Model, matrices: Sequence[WeightStorage], *rest: object) -> None:
        for each in matrices:
            if each.quantized is not None:
                each.quantized.exact = True


def said(model: Model) -> tuple[Tensor, list[list[int]]]:
    """Logits of a prompt, and greedy tokens after two."""
    prompts = [[7 * i % 199 for i in range(40)], [5, 3]]
    (logits,) = Feeder(model, page_size=16).step([(9, prompts[0])])
    return logits, Feeder(model, page_size=16).greedy(prompts, 6)


@pytest.mark.parametrize(("source", "name"), [*cases()], indirect=["source"], scope="module")
def test_a_quantised_family_says_what_its_numbers_stand_for(source: Path, name: str, tmp_path: Path) -> None:
    folder, before = shutil.copytree(source, tmp_path / "model"), load_file(source / SINGLE)
    means = quantise(folder, name)
    logits, tokens = said(load_model(folder, dtype="float32", canary=Exact()))
    plain(folder, together(means))
    wanted, right = said(load_model(folder, dtype="float32"))
    assert sum(not torch.equal(means[key], before[key]) for key in means) >= 8, "little was quantised"
    assert wanted.std() > 0.5
    assert (logits - wanted).abs().max() < 1e-3
    assert tokens == right


def test_experts_in_one_float8_tensor_are_read_as_meta_publishes_them(tmp_path: Path) -> None:
    """Llama 4: [E, in, out], with a scale for each expert and output; all else is left plain."""
    folder = tmp_path / "model"
    make(folder, "llama4_text-gqa", **{name: size for name, size in SIZES.items() if not name.startswith("moe")})
    held, means = load_file(folder / SINGLE), {}
    written = dict(held)
    for key in [key for key in held if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensor = held[key]
        scale = tensor.abs().amax(1, keepdim=True) / 448
        written[key] = (tensor / scale).to(torch.float8_e4m3fn)
        written[f"{key}_scale"] = scale
        means[key] = written[key].float() * scale
    save_file(written, folder / SINGLE)
    facts = json.loads((folder / "config.json").read_text())
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    config["modules_to_not_convert"] = ["self_attn", "shared_expert", "feed_forward.router", "lm_head", "embed_tokens"]
    (folder / "config.json").write_text(json.dumps(facts | {"quantization_config": config}))
    assert len(means) >= 2
    logits, tokens = said(load_model(folder, dtype="float32", canary=Exact()))
    plain(folder, held | means)
    wanted, right = said(load_model(folder, dtype="float32"))
    assert (logits - wanted).abs().max() < 1e-3
    assert tokens == right


def test_queries_and_latents_may_be_stored_in_different_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools leave out matrices whose rows are no multiple of their groups: of DeepSeek's, what makes latents."""
    folder = tmp_path / "model"
    make(folder, "deepseek_v3-groups-yarn", **{**SIZES, **LATENTS})
    monkeypatch.setattr("tests.quantised.MATRICES", re.compile(r"(q_a|kv_b|o|gate|up|down)_proj\.weight$"))
    means = quantise(folder, "awq")
    assert not any("kv_a_proj" in name and name.endswith("qweight") for name in load_file(folder / SINGLE))
    logits, tokens = said(load_model(folder, dtype="float32", canary=Exact()))
    plain(folder, means)
    wanted, right = said(load_model(folder, dtype="float32"))
    assert (logits - wanted).abs().max() < 1e-3
    assert tokens == right
