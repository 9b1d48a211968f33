"""A Llama in plain torch, with the module names of transformers so that its weights load there unchanged.

Only what training needs: dropout, a forward pass over whole rows, and a key-value cache for sampling. Rows
hold one document each and start at position 0, as a request does when it is served.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

Cache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model, named as in a transformers configuration."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, each (positions, head_dim) with the two halves repeated."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = torch.outer(torch.arange(config.max_position_embeddings).double(), config.rope_theta**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the half-split layout of Hugging Face's Llama."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.config, self.dropout = config, dropout
        query = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor] | None, at: int) -> Tensor:
        rows, length, _ = x.shape
        shape = (rows, length, -1, self.config.head_dim)
        q = rotate(self.q_proj(x).view(shape).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(shape).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        if cache is not None:
            cache[0][:, :, at : at + length], cache[1][:, :, at : at + length] = k, v
            k, v = cache[0][:, :, : at + length], cache[1][:, :, : at + length]
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(
            q,
            k.to(q.dtype),
            v.to(q.dtype),
            is_causal=length > 1,
            dropout_p=self.dropout if self.training else 0.0,
        )
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        return projected


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(config, dropout)
        self.mlp = FeedForward(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor] | None, at: int) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin, cache, at))
        out: Tensor = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return out


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, dropout) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)


class Llama(nn.Module):
    """The whole model; the output layer is the embedding, so a small model spends its weights elsewhere."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, dropout)
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                depth = 2 * config.num_hidden_layers if into_residual else 1
                nn.init.normal_(weight, std=0.02 / math.sqrt(depth))

    def hidden(self, tokens: Tensor, cache: Cache | None = None, at: int = 0) -> Tensor:
        """The normed state behind every token of `tokens`, which stand at positions `at` and up."""
        x = self.model.dropout(self.model.embed_tokens(tokens))
        span = slice(at, at + tokens.shape[1])
        device = x.device.type
        inner = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        cos, sin = self.cos[span].to(inner), self.sin[span].to(inner)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, cache[index] if cache is not None else None, at)
        out: Tensor = self.model.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.hidden(tokens))

    def parameter_count(self) -> int:
        return sum(weight.numel() for weight in self.parameters())

    @torch.no_grad()
    def sample(
        self, prompts: list[list[int]], stop: int, new_tokens: int, temperature: float, seed: int = 0
    ) -> list[list[int]]:
        """Continue every prompt until `stop` (kept when it came) or for `new_tokens` tokens.

        Rows advance together one position a step and take their prompt's token where they have one, so
        prompts of different lengths need neither padding nor masks.
        """
        if not prompts:
            return []
        device = self.cos.device
        generator = torch.Generator(device=device).manual_seed(seed)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        limit = min(max(len(prompt) for prompt in prompts) + new_tokens, self.config.max_position_embeddings)
        given = torch.zeros(len(prompts), limit, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            given[row, : len(prompt)] = torch.tensor(prompt)
        tokens = given.to(device)
        shape = (len(prompts), self.config.num_key_value_heads, limit, self.config.head_dim)
        dtype = self.model.embed_tokens.weight.dtype
        cache = [
            (torch.empty(shape, device=device, dtype=dtype), torch.empty(shape, device=device, dtype=dtype))
            for _ in self.model.layers
        ]
        done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        for at in range(limit - 1):
            logits = self.logits(self.hidden(tokens[:, at : at + 1], cache, at))[:, 0].float()
            if temperature > 0:
                noise = torch.empty_like(logits).exponential_(generator=generator)
                chosen = (torch.softmax(logits / temperature, dim=-1) / noise).argmax(dim=-1)
            else:
                chosen = logits.argmax(dim=-1)
            sampling = at + 1 >= lengths
            tokens[:, at + 1] = torch.where(sampling, chosen, tokens[:, at + 1])
            done |= sampling & (tokens[:, at + 1] == stop)
            if at % 16 == 0 and bool(done.all()):
                break
        rows = zip(tokens.tolist(), prompts, strict=True)
        continuations = [row[len(prompt) : len(prompt) + new_tokens] for row, prompt in rows]
        return [row[: row.index(stop) + 1] if stop in row else row for row in continuations]


def save_model(model: Llama, folder: Path, end_of_text: int, end: int) -> None:
    """The folder of a transformers LlamaForCausalLM: bf16 weights and both configuration files."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: w.detach().to("cpu", torch.bfloat16).contiguous() for name, w in model.named_parameters()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    rope = {"rope_type": "default", "rope_theta": model.config.rope_theta}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(model.config),
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": end_of_text,
        "eos_token_id": [end_of_text, end],
        "pad_token_id": end_of_text,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    generation = {
        "bos_token_id": end_of_text,
        "eos_token_id": [end_of_text, end],
        "pad_token_id": end_of_text,
        "do_sample": True,
        "temperature": 0.7,
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_model(folder: Path, device: str = "cpu") -> Llama:
    """A model that `save_model` wrote, in float32 and without dropout."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = Llama(ModelConfig(**{name: content[name] for name in asdict(ModelConfig())}))
    weights = load_file(str(folder / "model.safetensors"))
    model.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=True)
    return model.to(device).eval()
