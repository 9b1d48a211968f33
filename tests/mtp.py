"""Tiny checkpoints with a layer for multi-token prediction: written from a model of one layer more, or several, which
are its blocks. `Reference` is what DeepSeek-V3's report says, around that block."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

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
        "mimo-gqa": {"num_hidden_layers": 3},
        "ernie4_5_moe-gqa": {"num_hidden_layers": 3, "moe_layer_end_index": 1},
        "ernie4_5_moe-mha-none-shared": {"num_hidden_layers": 3, "moe_layer_end_index": 1},
        "nemotron_h-experts": {
            "layers_block_type": [
                "linear_attention",
                "moe",
                "full_attention",
                "linear_attention",
                "full_attention",
                "moe",
            ]
        },
        "nemotron_h-gqa": {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "full_attention", "mlp", "mlp"],
            "mtp_layers_block_type": ["full_attention", "mlp", "mlp"],
        },
    }
)
"""Shapes of `tests.checkpoints`, with what makes their last layer, or layers, draft."""


class Form(NamedTuple):
    """How a family stores the layer: names of what is around its blocks, prefixes of these, and of the model's layers.
    An empty norm is the model's own."""

    embedding_norm: str = "model.layers.{n}.enorm"
    hidden_norm: str = "model.layers.{n}.hnorm"
    project: str = "model.layers.{n}.eh_proj"
    norm: str = "model.layers.{n}.shared_head.norm"
    blocks: Sequence[str] = ("model.layers.{n}.",)
    normed: bool = False
    hidden_first: bool = False


QWEN = Form(
    "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", ("mtp.layers.0.",), normed=True
)
ERNIE = Form("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", "", ("model.mtp_block.0.",))
MIMO = Form(
    *(
        f"model.mtp_layers.0.{name}"
        for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    ),
    ("model.mtp_layers.0.",),
    normed=True,
    hidden_first=True,
)


def form_of(family: str, blocks: int) -> Form:
    if family.startswith("qwen"):
        return QWEN
    if family == "nemotron_h":
        at = [f"mtp.layers.{i}." for i in range(blocks)]
        around = (f"{at[0]}enorm", f"{at[0]}hnorm", f"{at[0]}eh_proj", f"{at[-1]}final_layernorm")
        return Form(*around, at, normed=True)
    if family == "mimo":
        return MIMO
    return ERNIE if family == "ernie4_5_moe" else Form()


class Reference:
    """The model without its last layers, and these with what is around them."""

    def __init__(self, model: PreTrainedModel, own: Mapping[str, Tensor], family: str, form: Form) -> None:
        self.model, self.own, self.form = model, own, form
        self.body: Any = model.model
        count = len(form.blocks)
        self.blocks = self.body.layers[-count:]
        self.body.layers = self.body.layers[:-count]
        self.shift = 1.0 if family in SHIFTED else 0.0
        self.eps = getattr(model.config, "rms_norm_eps", None) or model.config.layer_norm_epsilon

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
            embed = self.model.get_input_embeddings()
            embedded = embed(torch.tensor(following))
            both = self.norm(embedded, "embedding_norm"), self.norm(hidden, "hidden_norm")
            x = (torch.cat(both[::-1] if self.form.hidden_first else both, -1) @ self.own["project"].T)[None]
            positions = torch.arange(len(following))[None]
            mask = torch.full((len(following), len(following)), float("-inf")).triu(1)[None, None]
            how = {"attention_mask": mask, "position_ids": positions}
            if hasattr(self.body, "rotary_emb"):
                how["position_embeddings"] = self.body.rotary_emb(x, positions)
            for block in self.blocks:
                made = block(x, **how)
                x = made[0] if isinstance(made, tuple) else made
            final = getattr(self.body, "norm", None)
            normed = self.norm(x[0], "norm") if self.form.norm else final(x[0])
            return (normed if self.form.normed else x[0]), self.model.lm_head(normed)

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
    sizes, family = SHAPES[shape], shape.split("-")[0]
    kinds = sizes.get("mtp_layers_block_type", ["full_attention", "moe"] if family == "nemotron_h" else [""])
    model = make(folder, shape, **sizes, **changes)
    total, width = len(model.model.layers), model.config.hidden_size
    layers, form = total - len(kinds), form_of(family, len(kinds))
    generator = torch.Generator().manual_seed(5)
    names = {
        name: f"{getattr(form, name).format(n=layers)}.weight"
        for name in ("embedding_norm", "hidden_norm", "project", "norm")
        if getattr(form, name)
    }
    own = {
        name: draw(
            name, torch.empty((width, 2 * width) if name == "project" else (width,)), generator, family
        ).contiguous()
        for name in names
    }
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for i, block in enumerate(form.blocks):
        for name in list(tensors):
            _, found, rest = name.partition(f".layers.{layers + i}.")
            if found and not name.startswith("mtp."):
                tensors[block.format(n=layers) + rest] = tensors.pop(name)
    tensors |= {name: own[key] for key, name in names.items()}
    if form == Form():
        # Checkpoints hold both once more.
        for name in ("embed_tokens", "shared_head.head"):
            tensors[f"model.layers.{layers}.{name}.weight"] = torch.zeros(model.config.vocab_size, width)
    save_file(tensors, path, metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    if "num_hidden_layers" in fields:
        fields["num_hidden_layers"] = layers
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        if fields.get(name):
            fields[name] = fields[name][:layers]
    if not family.startswith("qwen"):
        fields["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(fields))
    return Reference(model, own, family, form)
