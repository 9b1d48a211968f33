"""Quantised checkpoints written by the definitions of their formats, number by number; and what they stand for.

Each writer takes a matrix [out, in] and gives the tensors of its format and the floats those mean. Nothing here is
shared with what reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.weights.files import SINGLE

Written = tuple[dict[str, Tensor], Tensor]
GROUP = 16
SHAPE = "llama-mqa-biased-odd-dim"
SIZES: Mapping[str, Any] = MappingProxyType(
    {"hidden_size": 144, "head_dim": 16, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 240}
)
"""No multiple of a block of 128, every one of 8 and of a group."""


def fp8_blocks(w: Tensor) -> Written:
    rows, columns = w.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    stored, means = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = w[at].abs().max() / 448
            stored[at] = (w[at] / scales[i, j]).to(torch.float8_e4m3fn)
            means[at] = stored[at].float() * scales[i, j]
    return {"weight": stored, "weight_scale_inv": scales}, means


def fp8_tensor(w: Tensor) -> Written:
    scale = w.abs().max() / 448
    stored = (w / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, stored.float() * scale


def fp8_rows(w: Tensor) -> Written:
    scale = (w.abs().amax(1) / 448)[:, None]
    stored = (w / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def int8_rows(w: Tensor) -> Written:
    scale = (w.abs().amax(1) / 127)[:, None]
    stored = (w / scale).round().to(torch.int8)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def int8_packed(w: Tensor) -> Written:
    tensors, means = int8_rows(w)
    numbers = tensors["weight"].int() + 128
    words = pack(numbers, 8, range(4))
    return {
        "weight_packed": words,
        "weight_scale": tensors["weight_scale"],
        "weight_shape": torch.tensor(w.shape),
    }, means


def pack(numbers: Tensor, bits: int, order: Any) -> Tensor:
    """[a, b] of small numbers -> int32 [a, b / n]: number order[i] of each n at bits i * bits."""
    count = 32 // bits
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // count, dtype=torch.int64)
    for i, place in enumerate(order):
        words |= numbers[:, place::count].long() << (bits * i)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def grouped(w: Tensor, group_of: Tensor, most: int = 15) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers 0 to `most` [out, in], scales and zero points [out, groups], and what they mean."""
    count = int(group_of.max()) + 1
    scales, zeros = torch.empty(len(w), count), torch.empty(len(w), count, dtype=torch.int32)
    numbers, means = torch.empty_like(w, dtype=torch.int32), torch.empty_like(w)
    for g in range(count):
        own = w[:, group_of == g]
        low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
        scale = ((high - low) / most).half().float()
        zero = (-low / scale).round().clamp(1, most)
        scales[:, g], zeros[:, g] = scale, zero.int()
        q = (own / scale[:, None] + zero[:, None]).round().clamp(0, most)
        numbers[:, group_of == g] = q.int()
        means[:, group_of == g] = (q - zero[:, None]) * scale[:, None]
    return numbers, scales, zeros, means


def awq(w: Tensor) -> Written:
    numbers, scales, zeros, means = grouped(w, torch.arange(w.shape[1]) // GROUP)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": pack(numbers.t(), 4, order), "qzeros": pack(zeros.t(), 4, order)}
    return {**tensors, "scales": scales.t().half().contiguous()}, means


def gptq(w: Tensor, shuffled: bool = False, bits: int = 4) -> Written:
    columns = w.shape[1]
    # Columns of any order may share a group; the order is that of the input, so q, k and v have one.
    order = (
        torch.randperm(columns, generator=torch.Generator().manual_seed(columns)) if shuffled else torch.arange(columns)
    )
    group_of = torch.empty(columns, dtype=torch.int64)
    group_of[order] = torch.arange(columns) // GROUP
    numbers, scales, zeros, means = grouped(w, group_of, (1 << bits) - 1)
    # Packed along the inputs.
    words = pack(numbers, bits, range(32 // bits)).t().contiguous()
    return {
        "qweight": words,
        "qzeros": pack(zeros.t() - 1, bits, range(32 // bits)),
        "scales": scales.t().half().contiguous(),
        "g_idx": group_of.int(),
    }, means


def gptq_shuffled(w: Tensor) -> Written:
    return gptq(w, shuffled=True)


def gptq_of_bytes(w: Tensor) -> Written:
    return gptq(w, shuffled=True, bits=8)


def int4_packed(w: Tensor) -> Written:
    """Symmetric: zero is 8."""
    own = w.view(len(w), -1, GROUP)
    scale = (own.abs().amax(2) / 7).half().float()
    q = (own / scale[..., None]).round().clamp(-8, 7)
    tensors = {"weight_packed": pack((q + 8).int().flatten(1), 4, range(8)), "weight_scale": scale.half()}
    return {**tensors, "weight_shape": torch.tensor(w.shape)}, (q * scale[..., None]).flatten(1)


def packed_with_zeros(w: Tensor, bits: int = 4) -> Written:
    numbers, scales, zeros, means = grouped(w, torch.arange(w.shape[1]) // GROUP, (1 << bits) - 1)
    tensors = {"weight_packed": pack(numbers, bits, range(32 // bits)), "weight_scale": scales.half()}
    return {**tensors, "weight_zero_point": pack(zeros.t(), bits, range(32 // bits)).t().contiguous()}, means


def int8_packed_with_zeros(w: Tensor) -> Written:
    return packed_with_zeros(w, 8)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def mxfp4(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[.., in] -> bytes [.., in / 32, 16], two numbers in each, the first in the low bits; exponents [.., in / 32]; and
    what they mean."""
    blocks = w.unflatten(-1, (-1, 32))
    exponents = blocks.abs().amax(-1).log2().floor() - 2
    scales = torch.exp2(exponents)[..., None]
    codes = (blocks[..., None] / scales[..., None] - E2M1).abs().argmin(-1)
    packed = (codes[..., ::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    return packed, (exponents + 127).to(torch.uint8), (E2M1[codes] * scales).flatten(-2)


def mxfp4_packed(w: Tensor) -> Written:
    packed, scales, means = mxfp4(w)
    return {"weight_packed": packed.flatten(1), "weight_scale": scales}, means


def pack_experts(folder: Path) -> None:
    """Rewrite the experts of a gpt-oss checkpoint as it is published: their numbers have to be such that MXFP4 holds
    them."""
    tensors = load_file(folder / SINGLE)
    for name in [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]:
        whole = tensors.pop(name).transpose(1, 2)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"], means = mxfp4(whole)
        assert torch.equal(means, whole)
    save_file(tensors, folder / SINGLE)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    facts = json.loads((folder / "config.json").read_text())
    facts["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps(facts))


def compressed(bits: int, kind: str, strategy: str, format: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False}
    own = {k: v for k, v in more.items() if k != "acts"}
    acts = {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True} if more.get("acts") else None
    group = {"targets": ["Linear"], "weights": weights | own, "input_activations": acts, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


FORMATS: Mapping[str, tuple[Callable[[Tensor], Written], dict[str, Any]]] = MappingProxyType(
    {
        "fp8-blocks": (fp8_blocks, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
        "fp8-tensor": (fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
        "fp8-rows": (fp8_rows, compressed(8, "float", "channel", "float-quantized", acts=True)),
        "fbgemm-fp8": (fp8_rows, {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}),
        "int8-w8a8": (int8_rows, compressed(8, "int", "channel", "int-quantized", acts=True)),
        "int8-w8a16": (int8_rows, compressed(8, "int", "channel", "int-quantized")),
        "int8-w8a16-packed": (int8_packed, compressed(8, "int", "channel", "pack-quantized")),
        "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
        "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
        "gptq-act-order": (gptq_shuffled, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
        "int4-packed": (int4_packed, compressed(4, "int", "group", "pack-quantized", group_size=GROUP)),
        "int4-packed-zeros": (
            packed_with_zeros,
            compressed(4, "int", "group", "pack-quantized", group_size=GROUP, symmetric=False),
        ),
        "gptq-8": (gptq_of_bytes, {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": True}),
        "int8-packed-zeros": (
            int8_packed_with_zeros,
            compressed(8, "int", "group", "pack-quantized", group_size=GROUP, symmetric=False),
        ),
    }
)


MXFP4 = mxfp4_packed, compressed(4, "float", "group", "mxfp4-pack-quantized", group_size=32)
"""Not of FORMATS, for it takes multiples of 32 columns."""


MATRICES = re.compile(r"(_proj|_with_mqa|\.w[123]|\.wq_b|\.wk|_linear|\.c_fc)\.weight$")
"""What tools quantise of the layers of any family: no routers, and no tensors that hold many matrices."""


def quantise(folder: Path, name: str, matrices: re.Pattern[str] | None = None) -> dict[str, Tensor]:
    """Rewrite the checkpoint in `folder` in the format `name`; -> what it now stands for, under its old names.
    matrices: those that are quantised, None for MATRICES."""
    writer, config = MXFP4 if name == "mxfp4" else FORMATS[name]
    held, means = load_file(folder / SINGLE), {}
    tensors: dict[str, Tensor] = {}
    for key, tensor in held.items():
        module = key.removesuffix(".weight")
        if not (matrices or MATRICES).search(key) or tensor.dim() > 2:
            tensors[key] = means[key] = tensor
            continue
        written, means[key] = writer(tensor)
        tensors |= {f"{module}.{suffix}": value for suffix, value in written.items()}
    save_file(tensors, folder / SINGLE)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"quantization_config": config}))
    return means


def plain(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write `tensors` as the checkpoint of `folder`, not quantised."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE)
    facts = json.loads((folder / "config.json").read_text())
    facts.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(facts))
