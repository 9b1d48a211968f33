"""Decoders of multimodal checkpoints: their section of config.json, and the names of their tensors."""

from __future__ import annotations

from types import MappingProxyType

from quire.layers.builder import ModelBuilder
from quire.models.defaults import with_defaults
from quire.models.spec import Config

VISION = (
    "vision_tower.*",
    "multi_modal_projector.*",
    "vision_model.*",
    "embed_vision.*",
    "audio_tower.*",
    "embed_audio.*",
)
"""Tensors that do not belong to the decoder."""

WHOLE = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
"""Fields of a multimodal config.json that hold for the decoder too."""


def nested(config: Config) -> Config:
    """The decoder's section of a multimodal config.json, or the whole of another."""
    if "text_config" not in config.fields:
        return config
    shared = {name: config.fields[name] for name in WHOLE if name in config.fields}
    # The head belongs to the whole model: what its own section says of it is a default that nothing reads.
    tied = {name: value for name, value in shared.items() if name == "tie_word_embeddings"}
    own = config.section("text_config")
    named = own.get(str, "model_type", default=f"{config.get(str, 'model_type', default='')}_text")
    return Config({**shared, **with_defaults(own.fields, named), **tied})


VISION_NAMES = MappingProxyType(
    {
        "model.vision_tower.vision_model.": "vision_tower.",
        "vision_tower.vision_model.": "vision_tower.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "model.embed_vision.": "embed_vision.",
    }
)
"""Names of an encoder's tensors, whichever release of transformers wrote them."""


def rename_vision(build: ModelBuilder) -> None:
    """Names of the encoder's tensors are those of one release. Called before `select_decoder`."""
    build.rename(VISION_NAMES)


def select_decoder(build: ModelBuilder) -> None:
    """Names of the decoder's tensors are those of a checkpoint without vision, and other tensors are not loaded."""
    build.ignore(*VISION)
    build.scope("model").ignore(*VISION)
    build.rename({"language_model.model.": "model.", "model.language_model.": "model.", "language_model.": ""})
