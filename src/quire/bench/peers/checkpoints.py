"""Random weights of a public shape: one checkpoint, as a folder that transformers reads and as a GGUF file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.bench.peers.process import HERE
from quire.errors import InvalidConfig

NAMES: Mapping[str, str] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Tensors of a layer, and their names in a GGUF file."""

OUTER: Mapping[str, str] = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}

SPREAD = 0.02
"""Standard deviation of weights."""


def config_of(shape: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """config.json of a Llama with a tied head."""
    known = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    more = {
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return {**shape, **known, **more}


def tensors(shape: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Names in a checkpoint and weights in float32, of a fixed seed."""
    draw = torch.Generator().manual_seed(0)
    hidden, wide = shape["hidden_size"], shape["intermediate_size"]
    heads, groups = shape["num_attention_heads"], shape["num_key_value_heads"]
    narrow = hidden // heads * groups
    sizes = dict(
        zip(
            NAMES,
            (
                *((hidden, hidden), (narrow, hidden), (narrow, hidden), (hidden, hidden)),
                *((wide, hidden), (wide, hidden), (hidden, wide), (hidden,), (hidden,)),
            ),
            strict=True,
        )
    )
    every = {"model.embed_tokens": (shape["vocab_size"], hidden), "model.norm": (hidden,)}
    for layer in range(shape["num_hidden_layers"]):
        every |= {f"model.layers.{layer}.{name}": size for name, size in sizes.items()}
    for name, size in every.items():
        made = torch.ones(size) if len(size) == 1 else SPREAD * torch.randn(size, generator=draw)
        yield f"{name}.weight", made


def write_folder(folder: Path, shape: Mapping[str, Any], dtype: str) -> Path:
    """config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    Path(folder, "config.json").write_text(json.dumps(config_of(shape, dtype)), "utf-8")
    kind = getattr(torch, dtype)
    save_file({name: each.to(kind) for name, each in tensors(shape)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_gguf(path: Path, shape: Mapping[str, Any], format: str) -> Path:
    """A GGUF file without a tokenizer, as llama.cpp's converter writes it. format: bf16 or q8_0; vectors stay float32.
    Raises InvalidConfig without the gguf package."""
    try:
        gguf = import_module("gguf")
    except ImportError as error:
        raise InvalidConfig(f"--format {format} needs the gguf package: pip install gguf") from error
    kind = gguf.GGMLQuantizationType[format.upper()]
    writer = gguf.GGUFWriter(path, "llama")
    describe(writer, shape)
    for name, each in tensors(shape):
        # Both ways round the same numbers.
        numbers = interleaved(name, each.bfloat16().float(), shape).numpy()
        if numbers.ndim == 1:
            writer.add_tensor(stored_name(name), numbers)
        else:
            writer.add_tensor(stored_name(name), gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def describe(writer: Any, shape: Mapping[str, Any]) -> None:
    """The metadata of a Llama."""
    dim = shape["hidden_size"] // shape["num_attention_heads"]
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def stored_name(name: str) -> str:
    """A tensor's name in a GGUF file."""
    base = name.removesuffix(".weight")
    if base in OUTER:
        return f"{OUTER[base]}.weight"
    layer, _, part = base.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[part]}.weight"


def interleaved(name: str, weight: Tensor, shape: Mapping[str, Any]) -> Tensor:
    """q and k with the halves of their heads interleaved, as llama.cpp rotates neighbours."""
    for part, count in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if part in name:
            rows, columns = weight.shape
            return weight.view(shape[count], 2, -1, columns).transpose(1, 2).reshape(rows, columns)
    return weight


def quantize(python: str, source: Path, target: Path) -> Path:
    """Q4_K_M of a file in bfloat16, by the llama.cpp of `python`. Raises InvalidConfig where it fails."""
    script = (
        f"import runpy; runpy.run_path({str(HERE / 'llama_cpp.py')!r})['quantize']({str(source)!r}, {str(target)!r})"
    )
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InvalidConfig(
            f"--format q4_k_m is written by llama.cpp, which {python} does not have: {done.stderr[-300:]}"
        )
    return target
