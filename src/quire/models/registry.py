"""Which module implements which architecture, by the names checkpoints use."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch

from quire.errors import InvalidModel, nearest
from quire.layers.builder import ModelBuilder
from quire.layers.linear import SingleRank
from quire.models.base import Model
from quire.models.gemma import Gemma2, Gemma3
from quire.models.gpt2 import GPT2
from quire.models.llama import Llama
from quire.models.mistral import Mistral, Mixtral
from quire.models.qwen import Qwen2, Qwen3, Qwen3Moe
from quire.models.spec import Config, ModelSpec, check_sizes
from quire.ops.reference import ReferenceOps


class Architecture(Protocol):
    """A class that reads its own spec and builds itself."""

    def __call__(self, spec: ModelSpec, build: ModelBuilder) -> Model: ...

    def read(self, config: Config, architecture: str) -> ModelSpec:
        """config.json -> spec. Raises InvalidModel naming the field."""


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "GPT2LMHeadModel": GPT2,
        "LlamaForCausalLM": Llama,
        "MistralForCausalLM": Mistral,
        "MixtralForCausalLM": Mixtral,
        "Qwen2ForCausalLM": Qwen2,
        "Qwen3ForCausalLM": Qwen3,
        "Qwen3MoeForCausalLM": Qwen3Moe,
        "Gemma2ForCausalLM": Gemma2,
        "Gemma3ForCausalLM": Gemma3,
        "Gemma3ForConditionalGeneration": Gemma3,
    }
)
MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "gpt2": "GPT2LMHeadModel",
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "gemma3": "Gemma3ForConditionalGeneration",
    }
)
"""For a config.json that names no architecture."""


def read_spec(fields: Mapping[str, Any]) -> ModelSpec:
    """The spec a config.json describes. Raises InvalidModel for an architecture or a field we cannot use."""
    names = fields.get("architectures") or [MODEL_TYPES.get(str(fields.get("model_type")), "")]
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise InvalidModel("config.json: architectures must be a list of names")
    name = names[0] or str(fields.get("model_type", "of no name"))
    return check_sizes(find(name).read(Config(fields), name))


def build_model(spec: ModelSpec, build: ModelBuilder) -> Model:
    """The spec's layers, unfilled: `build.places` says where checkpoint tensors go, `build.seal` ends the filling."""
    return find(spec.architecture)(spec, build)


def parameters(spec: ModelSpec) -> int:
    """How many numbers the checkpoint holds, a tied head counted once."""
    build = ModelBuilder(ops=ReferenceOps(), parallel=SingleRank(), dtype=torch.bfloat16, device=torch.device("meta"))
    build_model(spec, build)
    return sum(place.target.numel() for places in build.slots.values() for place in places)


def active_parameters(spec: ModelSpec) -> int:
    """Of them, those that a token meets."""
    if spec.experts is None:
        return parameters(spec)
    idle = (spec.experts.num_experts - spec.experts.num_experts_per_token) * 3 * spec.hidden * spec.experts.width
    return parameters(spec) - idle * (spec.layers - len(spec.experts.dense_layers))


def find(name: str) -> Architecture:
    known = ARCHITECTURES
    if name not in known:
        raise InvalidModel(f"architecture {name!r} is not supported (known: {', '.join(known)}).{nearest(name, known)}")
    return known[name]
