"""Drafters and depth policies from settings: ngram, a draft model, or neither."""

from __future__ import annotations

import logging

import torch

from quire.config import Settings
from quire.config.speculative import SpeculativeConfig, parse
from quire.engine.executor import Description
from quire.errors import InvalidConfig
from quire.model_runner.graphs import GraphKey, bucket_seqs, bucket_tokens, padding
from quire.model_runner.memory import LayerShape, allocate, layer_shapes
from quire.model_runner.sampling.features import RANDOM, TRUNCATED
from quire.model_runner.speculative import (
    Drafter,
    ModelDrafter,
    ModelProposer,
    NgramDrafter,
    NgramProposer,
    NoDrafts,
    NoProposer,
    Proposer,
)
from quire.models.base import Model
from quire.ops.base import Ops
from quire.scheduler.speculation import AdaptiveDrafts, FixedDrafts, SpeculationPolicy, draft_counts
from quire.weights.load import load_model
from quire.weights.locate import EMBEDDED, embedded, locate

log = logging.getLogger(__name__)

VERIFIED = 512
"""Tokens up to which verifying is captured before it is asked for. Beyond, it is arithmetic that bounds, and drafts do
not pay."""

WIDTHS = tuple(1 << i for i in range(9))
"""Rows at which a step's time is taken by depth of drafts."""


def build_speculation(settings: Settings, about: Description) -> SpeculationPolicy:
    """The policy for an executor that drafts `about.drafts` tokens at most."""
    asked = parse(settings.scheduler.speculative_config)
    if asked is None or not asked.adaptive:
        return FixedDrafts(about.num_drafts)
    return AdaptiveDrafts(
        about.num_drafts, about.step_times, catch_up_seconds=about.draft_catch_up_seconds, kv_share=about.draft_kv_share
    )


def load_draft(settings: Settings, target: Model, device: torch.device, ops: Ops) -> Model | None:
    """The draft model asked for, if one is. Raises InvalidConfig when it does not speak the target's tokens."""
    asked = parse(settings.scheduler.speculative_config)
    if asked is None:
        return None
    model = settings.model
    if asked.synthetic_acceptance_rate is not None and (model.load_format != "dummy" or device.type == "cpu"):
        raise InvalidConfig(
            "speculative_config: synthetic_acceptance_rate makes answers wrong: it is for --load-format dummy on a GPU",
            param="speculative_config",
        )
    if asked.method != "draft_model":
        return None
    if asked.model is None and model.model != EMBEDDED:
        raise InvalidConfig(
            "speculative_config needs a model: the folder or hub id of a draft", param="speculative_config"
        )
    folder = embedded() / "draft" if asked.model is None else locate(asked.model, cache=model.download_dir)
    draft = load_model(
        folder,
        dtype=model.dtype,
        device=device,
        ops=ops,
        load_format=model.load_format,
        quantization=asked.quantization,
        seed=(model.seed + 1) % (1 << 64),
        draft=True,
    )
    if draft.spec.vocab != target.spec.vocab:
        raise InvalidConfig(
            f"the draft has {draft.spec.vocab} tokens and the model {target.spec.vocab}: they need the same tokenizer",
            param="speculative_config",
        )
    if draft.spec.context < target.spec.context:
        log.warning(
            "the draft was made for %d tokens and the model for %d: drafts will be worse past that",
            *(draft.spec.context, target.spec.context),
        )
    return draft


def draft_layers(draft: Model | None) -> tuple[LayerShape, ...]:
    """What a page costs for the draft beside the target."""
    return () if draft is None else layer_shapes(draft.spec.kv_shapes, draft.dtype)


def build_drafter(settings: Settings, draft: Model | None, *, pages: int, page_size: int, rows: int) -> Drafter:
    """The drafter these settings ask for, on a CPU; `draft` is what `load_draft` found."""
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
        num_drafts=asked.num_speculative_tokens,
        rows=rows,
        device=torch.device("cpu"),
    )


def build_proposer(
    settings: Settings, draft: Model | None, *, pages: int, page_size: int, rows: int, device: torch.device
) -> Proposer:
    """The same for a device that drafts by itself."""
    asked: SpeculativeConfig | None = parse(settings.scheduler.speculative_config)
    if asked is None:
        return NoProposer()
    depth = asked.num_speculative_tokens
    if draft is None:
        return NgramProposer(depth, longest=asked.prompt_lookup_max, shortest=asked.prompt_lookup_min)
    kv = allocate(draft_layers(draft), pages=pages, page_size=page_size, device=device)
    return ModelProposer(draft, kv, num_drafts=depth, rows=rows, device=device)


def speculative(cap: int, tokens: int, drafts: int, model: bool) -> list[GraphKey]:
    """The steps that drafting adds: verification as deep as can pay, drafts, and what a draft model catches up with.

    cap: sequences at once. tokens: up to which steps are captured. model: a draft model's.
    """
    wide = sorted({padding(n) for n in range(1, cap + 1)}, reverse=True)
    deep = [(n, d) for d in draft_counts(drafts) if d for n in wide if n * (1 + d) <= VERIFIED]
    rows = sorted({padding(n * (1 + d)) for n, d in deep} - set(wide), reverse=True)
    keys = [GraphKey(padding(n * (1 + d)), n, 1 + d) for n, d in deep]
    keys += [GraphKey.head(n, asked) for asked in (0, RANDOM, RANDOM | TRUNCATED) for n in rows]
    if not model:
        return keys + [GraphKey(n, n, drafts, 0, "draft") for n in sorted({n for n, _ in deep})]
    keys += [GraphKey(padding(2 * n), n, d, asked, "draft") for asked in (0, RANDOM | TRUNCATED) for n, d in deep]
    behind = sorted({bucket_tokens(n) for n in range(1, tokens + 1)}, reverse=True)
    return keys + [GraphKey(t, s, t, 0, "follow") for t in behind for s in {bucket_seqs(1), bucket_seqs(cap)}]
