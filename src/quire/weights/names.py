"""Other names for the same tensors: whoever saved a checkpoint had names of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.errors import InvalidModel
from quire.weights.entries import SliceEntry, TensorEntry

OPENAI = re.compile(r"(?:model/)?(?:h(\d+)/(?:(attn|mlp)/)?(\w+)|(ln_f))/(w|b|g)|(?:model/)?(wte|wpe)")
"""GPT-2's variables as its authors named them: 'model/h0/attn/c_attn/w'."""

SUFFIX: Mapping[str, str] = {"w": "weight", "b": "bias", "g": "weight"}


def translated(entries: Mapping[str, TensorEntry]) -> Mapping[str, TensorEntry]:
    """The same tensors under the names of transformers. Raises InvalidModel for adapters, which are no model."""
    adapters = sorted(name for name in entries if ".lora_" in name or name.startswith("base_model.model."))
    if adapters:
        raise InvalidModel(
            f"this is a LoRA adapter, or a model with one inside ({adapters[0]}): adapters are not applied at run "
            "time; merge it into its model first"
        )
    if not any("/" in name for name in entries):
        return entries
    return {openai(name): SliceEntry(entry) if lone(name, entry) else entry for name, entry in entries.items()}


def openai(name: str) -> str:
    """'model/h0/attn/c_attn/w' -> 'transformer.h.0.attn.c_attn.weight'; any other name is itself."""
    found = OPENAI.fullmatch(name)
    if not found:
        return name
    layer, half, part, last, kind, table = found.groups()
    if table:
        return f"transformer.{table}.weight"
    if last:
        return f"transformer.{last}.{SUFFIX[kind]}"
    return ".".join(("transformer.h", layer, *([half] if half else []), part, SUFFIX[kind]))


def lone(name: str, entry: TensorEntry) -> bool:
    """A convolution's matrix [1, in, out], which is the layer's [in, out]."""
    return name.endswith("/w") and len(entry.shape) == 3 and entry.shape[0] == 1
