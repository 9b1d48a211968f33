"""Tiny checkpoints with a layer for multi-token prediction: written from a model of one layer more, or several, which
are its blocks. `Reference` is what DeepSeek-V3's report says, around that block."""

from __future__ import annotations

import itertools
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
    """How a family stores layer {i} that drafts, behind {n} others: names of what is around its blocks, prefixes of
    these, and of the model's layers. An empty norm is the model's own."""

    embedding_norm: str = "model.layers.{n}.enorm"
    hidden_norm: str = "model.layers.{n}.hnorm"
    project: str = "model.layers.{n}.eh_proj"
    norm: str = "model.layers.{n}.shared_head.norm"
    blocks: Sequence[str] = ("model.layers.{n}.",)
    normed: bool = True
    hidden_first: bool = False


QWEN = Form("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", ("mtp.layers.{i}.",))
ERNIE = Form(
    "model.mtp_emb_norm.{i}",
    "model.mtp_hidden_norm.{i}",
    "model.mtp_linear_proj.{i}",
    "",
    ("model.mtp_block.{i}.",),
    normed=False,
)
MIMO = Form(
    "model.mtp_layers.{i}.token_layernorm",
    "model.mtp_layers.{i}.hidden_layernorm",
    "model.mtp_layers.{i}.input_proj",
    "model.mtp_layers.{i}.final_layernorm",
    ("model.mtp_layers.{i}.",),
    hidden_first=True,
)
AROUND = ("embedding_norm", "hidden_norm", "project", "norm")


def form_of(family: str, blocks: int) -> Form:
    if family.startswith("qwen"):
        return QWEN
    if family == "nemotron_h":
        at = [f"mtp.layers.{i}." for i in range(blocks)]
        return Form(f"{at[0]}enorm", f"{at[0]}hnorm", f"{at[0]}eh_proj", f"{at[-1]}final_layernorm", at)
    if family == "mimo":
        return MIMO
    return ERNIE if family == "ernie4_5_moe" else Form()


class Reference:
    """The model without its last layers, and these with what is around them. own: of each layer that drafts."""

    def __init__(self, model: PreTrainedModel, own: Sequence[Mapping[str, Tensor]], family: str, form: Form) -> None:
        self.model, self.own, self.form, self.family = model, own, form, family
        self.body: Any = model.model
        size, count = len(form.blocks), len(form.blocks) * len(own)
        last = self.body.layers[-count:]
        self.blocks = [last[i : i + size] for i in range(0, count, size)]
        self.body.layers = self.body.layers[:-count]
        self.shift = 1.0 if family in SHIFTED else 0.0
        self.eps = getattr(model.config, "rms_norm_eps", None) or model.config.layer_norm_epsilon

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], weight + self.shift, self.eps)

    def hidden(self, tokens: list[int]) -> Tensor:
        """[T, hidden] of the model, after its final norm."""
        with torch.no_grad():
            made: Tensor = self.body(torch.tensor([tokens])).last_hidden_state[0]
        return made

    def layer(self, i: int, following: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Layer i, tokens after each position, and hidden states there -> (what the next draft reads, logits)."""
        own = self.own[i]
        with torch.no_grad():
            embed = self.model.get_input_embeddings()
            embedded = embed(torch.tensor(following))
            both = self.norm(embedded, own["embedding_norm"]), self.norm(hidden, own["hidden_norm"])
            x = (torch.cat(both[::-1] if self.form.hidden_first else both, -1) @ own["project"].T)[None]
            positions = torch.arange(len(following))[None]
            mask = torch.full((len(following), len(following)), float("-inf")).triu(1)[None, None]
            how = {"attention_mask": mask, "position_ids": positions}
            if hasattr(self.body, "rotary_emb"):
                # Of Qwen3.5 it takes positions in text, rows and columns; newer releases also one of them for all.
                turned = positions.expand(3, 1, -1) if self.family.startswith("qwen3_5") else positions
                how["position_embeddings"] = self.body.rotary_emb(x, turned)
            for block in self.blocks[i]:
                made = block(x, **how)
                x = made[0] if isinstance(made, tuple) else made
            final = getattr(self.body, "norm", None)
            normed = self.norm(x[0], own["norm"]) if self.form.norm else final(x[0])
            return (normed if self.form.normed else x[0]), self.model.lm_head(normed)

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """The likeliest `count` drafts after `tokens`, of which the last is the one that was sampled last: each layer
        reads what the one before made and the tokens one further; the last one goes on with what it made itself."""
        tokens = list(tokens)
        following, hidden, out = tokens[1:], self.hidden(tokens[:-1]), []
        for i in range(count):
            made, logits = self.layer(min(i, len(self.own) - 1), following, hidden)
            out.append(int(logits[-1].argmax()))
            following = [*following, out[-1]]
            if i + 1 < len(self.own):
                following, hidden = following[1:], made
            else:
                hidden = torch.cat((hidden, made[-1:]))
        return out


def with_layers(shape: str, drafts: int) -> dict[str, Any]:
    """The sizes of a shape that has so many layers that draft."""
    sizes = dict(SHAPES[shape])
    if "num_hidden_layers" in sizes:
        sizes["num_hidden_layers"] += drafts - 1
    if "layer_types" in sizes:
        sizes["layer_types"] = sizes["layer_types"] + ["full_attention"] * (drafts - 1)
    return sizes


def make_mtp(folder: Path, shape: str, drafts: int = 1, **changes: Any) -> Reference:
    """Write the checkpoint `shape` to `folder`, with `drafts` layers for multi-token prediction."""
    sizes, family = with_layers(shape, drafts), shape.split("-")[0]
    kinds = sizes.get("mtp_layers_block_type", ["full_attention", "moe"] if family == "nemotron_h" else [""])
    model = make(folder, shape, **sizes, **changes)
    total, width = len(model.model.layers), model.config.hidden_size
    layers, form = total - drafts * len(kinds), form_of(family, len(kinds))
    generator = torch.Generator().manual_seed(5)
    around: dict[str, Tensor] = {}
    own: list[dict[str, Tensor]] = [{} for _ in range(drafts)]
    for i, part in itertools.product(range(drafts), AROUND):
        if name := getattr(form, part).format(n=layers + i, i=i):
            made = draw(part, torch.empty((width, 2 * width) if part == "project" else (width,)), generator, family)
            own[i][part] = around.setdefault(f"{name}.weight", made.contiguous())
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for i in range(total - layers):
        block = form.blocks[i % len(kinds)].format(n=layers + i, i=i)
        for name in list(tensors):
            _, found, rest = name.partition(f".layers.{layers + i}.")
            if found and not name.startswith("mtp."):
                tensors[block + rest] = tensors.pop(name)
        if form == Form():
            # Checkpoints hold both once more.
            for name in ("embed_tokens", "shared_head.head"):
                tensors[f"{block}{name}.weight"] = torch.zeros(model.config.vocab_size, width)
    tensors |= around
    save_file(tensors, path, metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    if "num_hidden_layers" in fields:
        fields["num_hidden_layers"] = layers
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        if fields.get(name):
            fields[name] = fields[name][:layers]
    if family.startswith("qwen"):
        fields["mtp_num_hidden_layers"] = drafts
    else:
        fields["num_nextn_predict_layers"] = drafts
    (folder / "config.json").write_text(json.dumps(fields))
    return Reference(model, own, family, form)
