"""The interface of a model, and which class implements which architecture, by the names that checkpoints use."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from quire import models
from quire.errors import InvalidModel
from quire.layers.builder import ModelBuilder
from quire.layers.linear import LMHead, ParallelGroup
from quire.layers.vision import VisionTower
from quire.models.defaults import with_defaults
from quire.models.heads import Classify
from quire.models.labels import class_count
from quire.models.mtp import NextTokenLayers, check_draft_layers
from quire.models.spec import Config, ModelSpec, check_sizes
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.ops.reference import ReferenceOps


class Model(Protocol):
    """A decoder: its shape and its layers. It knows nothing of requests, blocks and sampling."""

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""

    @property
    def dtype(self) -> torch.dtype:
        """dtype of activations, and of K/V by default."""

    @property
    def classify(self) -> Classify | None:
        """Its classifier, if any."""

    @property
    def head(self) -> LMHead | None:
        """The language model's head, if any."""

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Compute hidden states [T, hidden] after the final norm, or those of `batch.output_indices` alone.

        kv: one LayerKV a layer; the batch's K/V is written to its slots.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] -> logits [R, V], in the model's dtype or float32."""


class Architecture(Protocol):
    """A class of models. A class in this folder that has `architectures` is registered."""

    architectures: Mapping[str, str]
    """Names in config.json's `architectures`, each with the `model_type` that stands for it."""

    def __call__(self, spec: ModelSpec, build: ModelBuilder) -> Model:
        """Build the layers, without weights."""

    def read(self, config: Config, architecture: str) -> ModelSpec:
        """Read config.json. Raises InvalidModel naming the field."""


def _classes() -> Iterator[Architecture]:
    """Every class of this folder's modules with `architectures` of its own."""
    for found in pkgutil.iter_modules(models.__path__, f"{models.__name__}."):
        if found.name != __name__:
            module = importlib.import_module(found.name)
            for value in vars(module).values():
                if isinstance(value, type) and value.__module__ == found.name and "architectures" in vars(value):
                    yield cast(Architecture, value)


ARCHITECTURES: Mapping[str, Architecture] = {name: c for c in _classes() for name in c.architectures}
MODEL_TYPES: Mapping[str, str] = {
    model_type: name for c in ARCHITECTURES.values() for name, model_type in c.architectures.items() if model_type
}
"""Architectures by `model_type`, for a config.json that names none."""


def _derived() -> Iterator[tuple[str, str]]:
    """Architectures of decoders without a language model's head, and those that they are built as."""
    for name in ARCHITECTURES:
        for ending in ("ForCausalLM", "LMHeadModel"):
            if name.endswith(ending):
                stem = name.removesuffix(ending)
                yield from ((stem + "Model", name), (stem + CLASSIFIER, name))


CLASSIFIER = "ForSequenceClassification"

DERIVED: Mapping[str, str] = {
    **dict(_derived()),
    "Gemma3TextModel": "Gemma3ForCausalLM",
    "Gemma3Text" + CLASSIFIER: "Gemma3ForCausalLM",
}
"""Architectures that pool, with the decoder that each is without its head."""


def read_spec(fields: Mapping[str, Any], *, pools: bool = False, mtp: bool = False) -> ModelSpec:
    """The shape that a config.json describes. pools: a decoder is served without its language model's head. mtp: with
    its layers for multi-token prediction.

    Raises InvalidModel for an architecture or a field that is unknown, and for a model without such layers.
    """
    name = architecture_name(fields)
    known = find_architecture(name)
    model_type = known.architectures.get(DERIVED.get(name, name)) or str(fields.get("model_type"))
    spec = known.read(Config(with_defaults(fields, model_type)), name)
    found = spec.draft_layers
    spec = replace(spec, draft_layers=check_draft_layers(spec) if mtp else 0, skipped_drafts=0 if mtp else found)
    if name.endswith(CLASSIFIER):
        spec = replace(spec, generates=False, classes=class_count(fields))
    elif pools or name in DERIVED:
        spec = replace(spec, generates=False)
    return check_sizes(spec)


def architecture_name(fields: Mapping[str, Any]) -> str:
    """The architecture that a config.json names, its `model_type` where it names none. Raises InvalidModel."""
    names = fields.get("architectures") or [MODEL_TYPES.get(str(fields.get("model_type")), "")]
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise InvalidModel("config.json: architectures must be a list of names")
    name = names[0] or str(fields.get("model_type", ""))
    if not name:
        raise InvalidModel("config.json names no architecture: it has neither `architectures` nor `model_type`")
    return name


def build_model(spec: ModelSpec, build: ModelBuilder) -> Model:
    """Build a model's layers, unfilled: `build.slots` says where checkpoint tensors go."""
    return find_architecture(spec.architecture)(spec, build)


def vision_of(model: Model) -> VisionTower | None:
    """A model's encoder of images; None where it has none, or was built without."""
    return cast("VisionTower | None", getattr(model, "vision", None))


def mtp_of(model: Model) -> NextTokenLayers | None:
    """A model's layers for multi-token prediction; None where it has none, or was built without."""
    return cast("NextTokenLayers | None", getattr(model, "mtp", None))


def parameters(spec: ModelSpec) -> int:
    """Number of parameters of the checkpoint; a tied head counts once."""
    build = ModelBuilder(
        ops=ReferenceOps(), parallel=ParallelGroup(), dtype=torch.bfloat16, device=torch.device("meta")
    )
    build_model(spec, build)
    # A tensor that fills two places, as k that is v, too, counts once.
    return sum(
        min(sum(slot.target.numel() for slot in slots), math.prod(slots[0].shape)) for slots in build.slots.values()
    )


def idle_parameters(spec: ModelSpec) -> int:
    """Number of parameters of the experts that one token does not use."""
    if spec.experts is None:
        return 0
    experts = spec.experts
    biases = spec.hidden + 2 * experts.width if experts.biased else 0
    each = (2 + experts.gated) * (experts.latent or spec.hidden) * experts.width + biases
    idle = (experts.num_experts - experts.num_experts_per_token) * each
    return idle * (spec.layers - len(spec.experts.dense_layers))


def find_architecture(name: str) -> Architecture:
    """The class of an architecture. Raises InvalidModel for one that there is none for."""
    name = DERIVED.get(name, name)
    if name not in ARCHITECTURES:
        raise InvalidModel(
            f"architecture {name!r} is not supported: none of the {len(ARCHITECTURES)} of docs/guides/models.md. "
            "transformers may run it, slowly, with --executor hf: pip install 'quire-llm[hf]'"
        )
    return ARCHITECTURES[name]
