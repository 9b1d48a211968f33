"""Drafters and depth policies from settings: ngram, a draft model, or neither."""

from __future__ import annotations

import torch

from quire.config import Settings
from quire.config.speculative import SpeculativeConfig, parse
from quire.core.speculate import Adaptive, Fixed, Speculation
from quire.errors import InvalidConfig
from quire.models.base import Model
from quire.ops.reference import ReferenceOps
from quire.runner.drafter import ModelDrafter
from quire.runner.drafts import Drafter, NoDrafts
from quire.runner.memory import LayerShape, allocate, layer_shapes
from quire.runner.ngram import NgramDrafter
from quire.weights.load import load_model
from quire.weights.locate import EMBEDDED, embedded, locate


def build_speculation(settings: Settings, most: int) -> Speculation:
    """The policy for a drafter that can draft `most` tokens."""
    asked = parse(settings.scheduler.speculative_config)
    return Adaptive(most) if asked is not None and asked.adaptive else Fixed(most)


def load_draft(settings: Settings, target: Model) -> Model | None:
    """The draft model asked for, if one is. Raises InvalidConfig when it does not speak the target's tokens."""
    asked = parse(settings.scheduler.speculative_config)
    if asked is None or asked.method != "draft_model":
        return None
    model = settings.model
    if asked.model is None and model.model != EMBEDDED:
        raise InvalidConfig(
            "speculative_config needs a model: the folder or hub id of a draft", param="speculative_config"
        )
    folder = embedded() / "draft" if asked.model is None else locate(asked.model, cache=model.download_dir)
    draft = load_model(folder, dtype=model.dtype, ops=ReferenceOps(), load_format=model.load_format, seed=model.seed)
    if draft.spec.vocab != target.spec.vocab:
        raise InvalidConfig(
            f"the draft has {draft.spec.vocab} tokens and the model {target.spec.vocab}: they need the same tokenizer",
            param="speculative_config",
        )
    return draft


def draft_layers(draft: Model | None) -> tuple[LayerShape, ...]:
    """What a page costs for the draft beside the target."""
    return () if draft is None else layer_shapes(draft.spec.kv_shapes, draft.dtype)


def build_drafter(settings: Settings, draft: Model | None, *, pages: int, page_size: int, rows: int) -> Drafter:
    """The drafter these settings ask for; `draft` is what `load_draft` found."""
    asked: SpeculativeConfig | None = parse(settings.scheduler.speculative_config)
    if asked is None:
        return NoDrafts()
    if draft is None:
        return NgramDrafter(
            asked.num_speculative_tokens, longest=asked.prompt_lookup_max, shortest=asked.prompt_lookup_min
        )
    kv = allocate(draft_layers(draft), pages=pages, page_size=page_size)
    return ModelDrafter(
        draft,
        kv,
        vocab_size=draft.spec.vocab,
        depth=asked.num_speculative_tokens,
        rows=rows,
        device=torch.device("cpu"),
    )
