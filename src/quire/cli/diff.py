"""`quire diff`: activations layer by layer beside transformers', and the first that departs. Needs the `dev` extra."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

from quire.assembly.tokenizer import build_tokenizer, require_text
from quire.cli.tables import print_pairs
from quire.config import Settings
from quire.errors import InvalidConfig, InvalidModel, InvalidRequest
from quire.models import llama
from quire.models.registry import Model
from quire.weights.canary import PROBE, feed, pages, probe
from quire.weights.files import read_config
from quire.weights.load import load_model
from quire.weights.locate import locate

FAR = 1e-3
"""Largest difference, as a share of the layer's deviation, that float32 rounding can explain."""


class Layer(NamedTuple):
    """One comparison: the largest difference, and it as a share of the deviation of transformers' numbers."""

    name: str
    most: float
    share: float


def run(settings: Settings) -> None:
    """`quire diff`, see `quire.cli.late`."""
    require_text(settings, "quire diff")
    folder = locate(settings.model.model, revision=settings.model.revision, cache=settings.model.download_dir)
    try:
        encoded = build_tokenizer(settings).encode(PROBE)
    except (InvalidModel, InvalidRequest):
        encoded = ()
    model = load_model(folder, dtype="float32")
    found = list(compare(model, folder, probe(model.spec.vocab, encoded)))
    print_pairs([(layer.name, f"{layer.most:.2e}  ({layer.share:.1e} of its standard deviation)") for layer in found])
    first = departs(found)
    if first is not None:
        raise InvalidModel(f"{first.name} is the first that differs: by {first.share:.1e} of its standard deviation")
    click.echo(f"no layer differs: {FAR:g} of its standard deviation would be beyond rounding")


def departs(layers: Sequence[Layer]) -> Layer | None:
    """The first too far off, if one is."""
    return next((layer for layer in layers if not layer.share < FAR), None)


def compare(model: Model, folder: Path, tokens: Sequence[int]) -> Iterator[Layer]:
    """The embedding, every layer, and the logits. Raises InvalidConfig where transformers is not installed."""
    ours, theirs = own(model, tokens), reference(folder, tokens)
    for (name, mine), wanted in zip(ours, theirs, strict=True):
        most = float((mine - wanted).abs().max())
        yield Layer(name, most, most / max(float(wanted.std()), 1e-30))


@torch.inference_mode()
def own(model: Any, tokens: Sequence[int]) -> list[tuple[str, Tensor]]:
    """The residual stream after each layer, and the logits."""
    cpu, kept = torch.device("cpu"), list[Tensor]()
    blocks = list(model.blocks)
    try:
        model.blocks = [Recorded(block, kept) for block in blocks]
        hidden = model.forward(feed(tokens, 0, len(tokens), cpu), pages(model, len(tokens), cpu))
    finally:
        model.blocks = blocks
    return [*((f"layer {i}", x) for i, x in enumerate(kept)), ("logits", model.logits(hidden))]


class Recorded:
    """A layer that keeps what leaves it."""

    def __init__(self, block: Any, kept: list[Tensor]) -> None:
        self.block, self.kept = block, kept
        self.after_mlp = block.after_mlp if isinstance(block, llama.Block) else None  # left to the layer behind it

    def __call__(self, *args: Any) -> Any:
        """The layer's output, which is kept for the comparison."""
        out = self.block(*args)
        if self.after_mlp:
            added, residual = out
            self.kept.append(residual + self.after_mlp(added) * self.after_mlp.scale)
        else:
            self.kept.append(out.clone())
        return out


@torch.inference_mode()
def reference(folder: Path, tokens: Sequence[int]) -> list[Tensor]:
    """The same, by transformers."""
    try:
        library = import_module("transformers")
    except ImportError:
        raise InvalidConfig(
            "quire diff compares with transformers: pip install 'quire-llm[hf]' (in a clone: pip install -e '.[hf]')"
        ) from None
    vision = folder.is_dir() and "vision_config" in read_config(folder)
    auto = library.AutoModelForImageTextToText if vision else library.AutoModelForCausalLM
    where = {"gguf_file": folder.name} if folder.is_file() else {}
    if not sys.stderr.isatty():
        library.utils.logging.disable_progress_bar()
    try:
        theirs = auto.from_pretrained(
            folder.parent if folder.is_file() else folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            trust_remote_code=False,
            **where,
        ).eval()
    except Exception as error:  # whatever it raises: it is not ours
        raise InvalidModel(f"transformers cannot load it, so there is nothing to compare with: {error}") from error
    kept: list[Tensor] = []
    body = theirs.model if "model" in dict(theirs.named_children()) else theirs.transformer
    body = getattr(body, "language_model", body)
    layers = body.layers if "layers" in dict(body.named_children()) else body.h
    for layer in layers:
        layer.register_forward_hook(lambda module, args, out: kept.append(out[0] if isinstance(out, tuple) else out))
    logits = theirs(torch.tensor([list(tokens)])).logits[0]
    return [*(x.view(len(tokens), -1) for x in kept), logits]
