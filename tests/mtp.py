"""Tiny checkpoints with a layer for multi-token prediction, which transformers does not run: written from a model of
one layer more, whose last layer is the block. `Reference` is what DeepSeek-V3's report says, around that block."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.checkpoints import SHIFTED, draw, make

HYBRID: Mapping[str, Any] = MappingProxyType(
    {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
)

SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "deepseek_v3-groups-yarn": {"num_hidden_layers": 3},
        "deepseek_v3-plain-queries": {"num_hidden_layers": 3},
        "deepseek_v32-groups-yarn": {"num_hidden_layers": 3},
        "glm4_moe-groups": {"num_hidden_layers": 3},
        "glm4_moe_lite-gqa": {"num_hidden_layers": 3},
        "qwen3_next-shared-keys": dict(HYBRID),
        "qwen3_5_text-shared-keys": dict(HYBRID),
        "qwen3_5_moe_text-shared-keys": dict(HYBRID),
    }
)
"""Shapes of `tests.checkpoints`, with the number of layers: the last one drafts."""


class Reference:
    """The model without its last layer, and that layer with what is around it."""

    def __init__(self, model: PreTrainedModel, own: Mapping[str, Tensor], family: str) -> None:
        self.model, self.own = model, own
        self.body: Any = model.model
        self.block = self.body.layers[-1]
        self.body.layers = self.body.layers[:-1]
        self.shift = 1.0 if family in SHIFTED else 0.0
        self.normed = family.startswith("qwen")
        self.eps = model.config.rms_norm_eps

    def norm(self, x: Tensor, name: str) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.own[name] + self.shift, self.eps)

    def hidden(self, tokens: list[int]) -> Tensor:
        """[T, hidden] of the model, after its final norm."""
        with torch.no_grad():
            made: Tensor = self.body(torch.tensor([tokens])).last_hidden_state[0]
        return made

    def layer(self, following: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens after each position, and hidden states there -> (what the next draft reads, logits)."""
        with torch.no_grad():
            embedded = self.body.embed_tokens(torch.tensor(following))
            both = torch.cat((self.norm(embedded, "embedding_norm"), self.norm(hidden, "hidden_norm")), -1)
            x = (both @ self.own["project"].T)[None]
            positions = torch.arange(len(following))[None]
            mask = torch.full((len(following), len(following)), float("-inf")).triu(1)[None, None]
            made = self.block(
                x,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=self.body.rotary_emb(x, positions),
            )
            made = (made[0] if isinstance(made, tuple) else made)[0]
            normed = self.norm(made, "norm")
            return (normed if self.normed else made), self.model.lm_head(normed)

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """The likeliest `count` drafts after `tokens`, of which the last is the one that was sampled last."""
        following, hidden = tokens[1:], self.hidden(tokens[:-1])
        out = []
        for _ in range(count):
            made, logits = self.layer(following, hidden)
            out.append(int(logits[-1].argmax()))
            following, hidden = [*following, out[-1]], torch.cat((hidden, made[-1:]))
        return out


def make_mtp(folder: Path, shape: str, **changes: Any) -> Reference:
    """Write the checkpoint `shape` to `folder`, with a layer for multi-token prediction."""
    sizes = SHAPES[shape]
    model, family = make(folder, shape, **sizes, **changes), shape.split("-")[0]
    layers, width = sizes["num_hidden_layers"] - 1, model.config.hidden_size
    generator = torch.Generator().manual_seed(5)
    sizes_of = {"embedding_norm": (width,), "hidden_norm": (width,), "project": (width, 2 * width), "norm": (width,)}
    own = {n: draw(n, torch.empty(size), generator, family).contiguous() for n, size in sizes_of.items()}
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    last, prefix = f"model.layers.{layers}.", f"model.layers.{layers}."
    block = prefix
    if family.startswith("qwen"):
        names, prefix, block = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "mtp.", "mtp.layers.0."
    path = folder / "model.safetensors"
    tensors = {
        block + name.removeprefix(last) if name.startswith(last) else name: each
        for name, each in load_file(path).items()
    }
    tensors |= {f"{prefix}{name}.weight": own[key] for key, name in zip(sizes_of, names, strict=True)}
    if prefix == last:
        # Checkpoints hold both once more.
        tensors[f"{prefix}embed_tokens.weight"] = torch.zeros(model.config.vocab_size, width)
        tensors[f"{prefix}shared_head.head.weight"] = torch.zeros(model.config.vocab_size, width)
    save_file(tensors, path, metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    fields["num_hidden_layers"] = layers
    for name in ("layer_types", "mlp_layer_types"):
        if fields.get(name):
            fields[name] = fields[name][:layers]
    if not family.startswith("qwen"):
        fields["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(fields))
    return Reference(model, own, family)
