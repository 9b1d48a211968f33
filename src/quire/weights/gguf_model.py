"""A GGUF file as a config.json and a checkpoint: its facts in the words of config.json, its tensors under the names
of transformers and turned back to where a converter found them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from quire.errors import InvalidModel, nearest
from quire.weights.entries import CopiedEntry, FileTensor, SliceEntry, TensorEntry, read_tensor
from quire.weights.gguf import Gguf, GgufTensorInfo
from quire.weights.gguf_blocks import BLOCKS

PLAIN: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class GgufTensor(CopiedEntry):
    """A tensor stored in blocks, read as float32, whole rows at a time."""

    gguf: Gguf
    held: GgufTensorInfo
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.held.shape

    @property
    def order(self) -> tuple[str, int]:
        return self.gguf.path.name, self.held.start

    @property
    def kind(self) -> str:
        return self.held.kind.name

    @property
    def size(self) -> int:
        return self.held.size

    def read(self, cut: tuple[slice, ...]) -> Tensor:
        kind, shape = self.held.kind, self.shape
        first, last, _ = (cut[0] if cut else slice(None)).indices(shape[0])
        row = self.size // shape[0]
        raw = torch.empty((last - first) * row // kind.size, kind.size, dtype=torch.uint8)
        read_tensor(self.gguf.path, self.held.start + first * row, raw)
        whole = BLOCKS[kind.name](raw).view(last - first, *shape[1:])
        return whole[(slice(None), *cut[1:])]


@dataclass(frozen=True, slots=True)
class TransformedEntry(CopiedEntry):
    """A tensor a converter has changed, changed back as it is read."""

    whole: TensorEntry
    shape: tuple[int, ...]
    change: Change

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def order(self) -> tuple[str, int]:
        return self.whole.order

    @property
    def kind(self) -> str:
        return self.whole.kind

    @property
    def size(self) -> int:
        return self.whole.size

    def read(self, cut: tuple[slice, ...]) -> Tensor:
        return self.change(self.whole.read(()))[cut]


LLAMA_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.#.gate_proj",
        "ffn_up_exps": "mlp.experts.#.up_proj",
        "ffn_down_exps": "mlp.experts.#.down_proj",
    }
)
MIXTRAL_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **LLAMA_NAMES,
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.#.w1",
        "ffn_up_exps": "block_sparse_moe.experts.#.w3",
        "ffn_down_exps": "block_sparse_moe.experts.#.w2",
    }
)
GEMMA_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **LLAMA_NAMES,
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
GPT2_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    }
)
OUTER: Mapping[str, str] = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
GPT2_OUTER: Mapping[str, str] = MappingProxyType(
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    }
)
NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def gguf_entries(gguf: Gguf) -> dict[str, TensorEntry]:
    """The file's tensors as transformers would have saved them."""
    entries: dict[str, TensorEntry] = {}
    for name, held in gguf.tensors.items():
        if held.kind.name in PLAIN:
            entry: TensorEntry = FileTensor(gguf.path, held.start, PLAIN[held.kind.name], held.shape, held.kind.name)
        else:
            entry = GgufTensor(gguf, held)
        if name == "rope_freqs.weight":
            continue
        theirs = transformers_name(gguf, name)
        entry = restored(gguf, name, theirs, entry)
        if "#" in theirs:
            entries |= {theirs.replace("#", str(e)): SliceEntry(entry, e) for e in range(entry.shape[0])}
        else:
            entries[theirs] = entry
    return entries


def transformers_name(gguf: Gguf, name: str) -> str:
    """'blk.0.attn_q.weight' -> 'model.layers.0.self_attn.q_proj.weight'; what is not known stays as it is."""
    found = NAME.fullmatch(name)
    if not found:
        return name
    layer, part, kind = found.groups()
    family, prefix, outer = LLAMA_NAMES, "model.layers", OUTER
    if gguf.architecture == "gpt2":
        family, prefix, outer = GPT2_NAMES, "transformer.h", GPT2_OUTER
    elif gguf.architecture.startswith("gemma"):
        family = GEMMA_NAMES
    elif gguf.architecture == "llama" and gguf.get("expert_count"):
        family = MIXTRAL_NAMES
    known = outer if layer is None else family
    if part not in known:
        return name
    return f"{known[part]}.{kind}" if layer is None else f"{prefix}.{layer}.{known[part]}.{kind}"


def restored(gguf: Gguf, name: str, theirs: str, entry: TensorEntry) -> TensorEntry:
    """What converters do to a tensor, undone: Llama's heads in pairs, Gemma's norms from 1, GPT-2's matrices turned."""
    if gguf.architecture == "llama" and re.search(r"\.attn_[qk]\.", name):
        heads = gguf.get("attention.head_count") if ".attn_q." in name else kv_heads(gguf)
        return TransformedEntry(entry, entry.shape, lambda whole: halves(whole, heads))
    if gguf.architecture.startswith("gemma") and name.endswith("norm.weight"):
        return TransformedEntry(entry, entry.shape, lambda whole: whole.float() - 1.0)
    if gguf.architecture == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", theirs):
        return TransformedEntry(entry, entry.shape[::-1], lambda whole: whole.t())
    return entry


def halves(whole: Tensor, heads: int) -> Tensor:
    """Rows of each head from pairs that turn together to halves that do."""
    return whole.view(heads, whole.shape[0] // heads // 2, 2, *whole.shape[1:]).transpose(1, 2).reshape(whole.shape)


def kv_heads(gguf: Gguf) -> int:
    return int(gguf.get("attention.head_count_kv") or gguf.get("attention.head_count"))


def gguf_config(gguf: Gguf) -> dict[str, Any]:
    """The file's facts as a config.json. Raises InvalidModel for an architecture we cannot map."""
    name, get = gguf.architecture, gguf.get
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InvalidModel(
            f"{gguf.path.name} holds a model of architecture {name!r}, which is not supported (known: {known})."
            f"{nearest(name, ARCHITECTURES)}"
        )
    heads, hidden = get("attention.head_count", 0), get("embedding_length", 0)
    head_dim = get("attention.key_length") or hidden // max(1, heads)
    fields = {
        "architectures": [ARCHITECTURES[name]],
        "hidden_size": hidden,
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads(gguf),
        "head_dim": head_dim,
        "intermediate_size": get("feed_forward_length"),
        "vocab_size": len(gguf.facts.get("tokenizer.ggml.tokens", ())) or get("vocab_size"),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base"),
        "rope_scaling": scaling(gguf),
        "sliding_window": get("attention.sliding_window"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "eos_token_id": gguf.facts.get("tokenizer.ggml.eos_token_id"),
        "final_logit_softcapping": get("final_logit_softcapping"),
        "attn_logit_softcapping": get("attn_logit_softcapping"),
        "num_experts": get("expert_count"),
        "num_local_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }
    if name.startswith("gemma"):  # the widest of each generation scales scores by the width of a head's share
        share = hidden // max(1, heads) if get("block_count") == (46 if name == "gemma2" else 62) else head_dim
        fields |= {"query_pre_attn_scalar": share}
    if name == "gpt2":
        fields |= {
            "n_embd": hidden,
            "n_head": heads,
            "n_layer": get("block_count"),
            "n_positions": get("context_length"),
        }
        fields |= {"n_inner": get("feed_forward_length"), "layer_norm_epsilon": get("attention.layer_norm_epsilon")}
    if name == "llama" and get("expert_count"):
        fields |= {"architectures": ["MixtralForCausalLM"]}
    if name == "llama" and get("attention.sliding_window"):
        fields |= {"architectures": ["MistralForCausalLM"]}
    return {key: value for key, value in fields.items() if value is not None}


def scaling(gguf: Gguf) -> dict[str, Any] | None:
    """rope_scaling: what Llama 3.1 does is in a tensor of factors, all else in facts."""
    held = gguf.tensors.get("rope_freqs.weight")
    if held is not None:
        entry = FileTensor(gguf.path, held.start, torch.float32, held.shape)
        return {"rope_type": "factors", "factor": 1.0, "factors": entry.read(()).tolist()}
    kind = gguf.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    length = gguf.get("rope.scaling.original_context_length")
    found = {"rope_type": kind, "factor": gguf.get("rope.scaling.factor"), "original_max_position_embeddings": length}
    return {name: value for name, value in found.items() if value is not None}


ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3moe": "Qwen3MoeForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3": "Gemma3ForCausalLM",
        "gpt2": "GPT2LMHeadModel",
    }
)
