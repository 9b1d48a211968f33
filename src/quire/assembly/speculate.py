"""Speculative decoding from settings: drafters, proposers, the policy of how many tokens to draft, and the graphs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from quire.config import Settings
from quire.config.speculative import parse
from quire.engine.executor import Description
from quire.errors import InvalidConfig
from quire.layers.linear import ONE_RANK, ParallelGroup
from quire.model_runner.graphs import GraphKey, bucket_seqs, bucket_tokens, padding
from quire.model_runner.memory import LayerShape, allocate, layer_shapes
from quire.model_runner.mtp import MTPDrafter, MTPProposer
from quire.model_runner.sampling.features import RANDOM, TRUNCATED
from quire.model_runner.speculative import Drafter, ModelDrafter, ModelProposer, NgramDrafter, NgramProposer, Proposer
from quire.models.mtp import NextTokenLayers
from quire.models.registry import Model, mtp_of
from quire.ops.base import Ops
from quire.scheduler.speculation import AdaptiveDrafts, FixedDrafts, SpeculationPolicy, draft_counts
from quire.scheduler.step_time import StepTimeModel
from quire.weights.load import load_model
from quire.weights.locate import EMBEDDED, embedded, locate

log = logging.getLogger(__name__)

MAX_VERIFIED_TOKENS = 512
"""Most tokens of a verification step that is captured. Larger steps are bound by arithmetic, and drafts do not pay."""

STEP_TIME_WIDTHS = tuple(1 << i for i in range(9))
"""Numbers of sequences for which the time of a step is measured, by the number of drafts."""


def build_speculation(settings: Settings, description: Description) -> SpeculationPolicy:
    """The policy for an executor that drafts at most `description.num_drafts` tokens."""
    config = parse(settings.scheduler.speculative_config)
    if config is None or not config.adaptive:
        return FixedDrafts(description.num_drafts)
    return AdaptiveDrafts(
        description.num_drafts,
        StepTimeModel(description.step_times, kv_share=description.draft_kv_share),
        catch_up_seconds=description.draft_catch_up_seconds,
    )


Draft: TypeAlias = Model | NextTokenLayers
"""A draft model, or the model's own layers for multi-token prediction."""


def most_drafts(settings: Settings) -> int:
    """Drafts a sequence at most; 0 without speculation."""
    config = parse(settings.scheduler.speculative_config)
    return 0 if config is None else config.num_speculative_tokens


def wants_mtp(settings: Settings) -> bool:
    """Whether the model is loaded with its layers for multi-token prediction."""
    config = parse(settings.scheduler.speculative_config)
    return config is not None and config.method == "mtp"


def load_draft(
    settings: Settings, target: Model, device: torch.device, ops: Ops, parallel: ParallelGroup = ONE_RANK
) -> Draft | None:
    """What drafts by `speculative_config`, None where that is no model. A model is divided as its target is, so all
    ranks draft the same tokens, by logits that are gathered. Raises InvalidConfig if its vocabulary differs."""
    config = parse(settings.scheduler.speculative_config)
    if config is None:
        return None
    model = settings.model
    if config.synthetic_acceptance_rate is not None and (model.load_format != "dummy" or device.type == "cpu"):
        raise InvalidConfig(
            "speculative_config: synthetic_acceptance_rate makes answers wrong: it is for --load-format dummy on a GPU",
            param="speculative_config",
        )
    if config.method == "mtp":
        return own_layers(target)
    if config.method != "draft_model":
        return None
    if config.model is None and model.model != EMBEDDED:
        raise InvalidConfig(
            "speculative_config needs a model: the folder or hub id of a draft", param="speculative_config"
        )
    folder = embedded() / "draft" if config.model is None else locate(config.model, cache=model.download_dir)
    draft = load_model(
        folder,
        dtype=model.dtype,
        device=device,
        ops=ops,
        parallel=parallel,
        load_format=model.load_format,
        quantization=config.quantization,
        seed=(model.fixed_seed + 1) % (1 << 64),
        draft=True,
        max_model_len=model.max_model_len,
    )
    if draft.spec.recurrent:
        raise InvalidConfig(
            f"{draft.spec.architecture} has recurrent layers, which are not supported in a draft model",
            param="speculative_config",
        )
    if draft.spec.vocab != target.spec.vocab:
        raise InvalidConfig(
            f"the draft has {draft.spec.vocab} tokens and the model {target.spec.vocab}: they need the same tokenizer",
            param="speculative_config",
        )
    if draft.spec.context < target.spec.context:
        log.warning(
            "the draft model has a context of %d tokens and the model one of %d: fewer drafts will "
            "be accepted beyond that",
            draft.spec.context,
            target.spec.context,
        )
    return draft


def own_layers(target: Model) -> NextTokenLayers:
    """The model's layers for multi-token prediction. Raises InvalidConfig where it was loaded without."""
    layers = mtp_of(target)
    if layers is None:
        raise InvalidConfig(
            "speculative_config: method mtp needs Quire's own layers (--executor local): use ngram, or leave it out",
            param="speculative_config",
        )
    return layers


def draft_layers(draft: Draft | None) -> tuple[LayerShape, ...]:
    """The K/V that each layer of what drafts adds to a block."""
    if draft is None:
        return ()
    return layer_shapes(draft.kv_shapes if isinstance(draft, NextTokenLayers) else draft.spec.kv_shapes, draft.dtype)


def build_drafter(
    settings: Settings, draft: Draft | None, *, pages: int, page_size: int, rows: int, device: torch.device
) -> Drafter | None:
    """The drafter of an executor whose steps run as they are launched. draft: from `load_draft`."""
    config = parse(settings.scheduler.speculative_config)
    if config is None:
        return None
    num_drafts = config.num_speculative_tokens
    if draft is None:
        return NgramDrafter(num_drafts, longest=config.prompt_lookup_max, shortest=config.prompt_lookup_min)
    kv = allocate(draft_layers(draft), pages=pages, page_size=page_size, device=device)
    sizes: dict[str, Any] = {"num_drafts": num_drafts, "rows": rows, "device": device}
    if isinstance(draft, NextTokenLayers):
        return MTPDrafter(draft.layers, kv, vocab_size=draft.vocab, **sizes)
    return ModelDrafter(draft, kv, vocab_size=draft.spec.vocab, **sizes)


def build_proposer(
    settings: Settings, draft: Draft | None, *, pages: int, page_size: int, rows: int, device: torch.device
) -> Proposer | None:
    """The drafter on a device that drafts without the host. draft: from `load_draft`."""
    config = parse(settings.scheduler.speculative_config)
    if config is None:
        return None
    num_drafts = config.num_speculative_tokens
    if draft is None:
        return NgramProposer(num_drafts, longest=config.prompt_lookup_max, shortest=config.prompt_lookup_min)
    kv = allocate(draft_layers(draft), pages=pages, page_size=page_size, device=device)
    if isinstance(draft, NextTokenLayers):
        return MTPProposer(draft.layers, kv, num_drafts=num_drafts, rows=rows, device=device)
    return ModelProposer(draft, kv, num_drafts=num_drafts, rows=rows, device=device)


def speculative_graph_keys(
    max_num_seqs: int, tokens: int, drafts: int, model: bool, forwards: Sequence[GraphKey] = ()
) -> list[GraphKey]:
    """The steps that speculation adds: verification, drafting, and the draft model's forward over missed tokens.

    tokens: most of a captured step. drafts: most a sequence, 0 for no speculation. model: whether a model drafts.
    forwards: for multi-token prediction, whose layers are fed after each of them.
    """
    widths = sorted({padding(n) for n in range(1, max_num_seqs + 1)}, reverse=True)
    verified = [(n, d) for d in draft_counts(drafts) if d for n in widths if n * (1 + d) <= MAX_VERIFIED_TOKENS]
    rows = sorted({padding(n * (1 + d)) for n, d in verified} - set(widths), reverse=True)
    keys = [GraphKey(padding(n * (1 + d)), n, 1 + d) for n, d in verified]
    keys += [GraphKey.head(n, features) for features in (0, RANDOM, RANDOM | TRUNCATED) for n in rows]
    if forwards:
        fed = [key._replace(kind="follow") for key in (*forwards, *keys) if key.kind == "feed"]
        return keys + fed + [GraphKey(n, n, d, f, "draft") for f in (0, RANDOM | TRUNCATED) for n, d in verified]
    if not model:
        return keys + [GraphKey(n, n, drafts, 0, "draft") for n in sorted({n for n, _ in verified})]
    keys += [GraphKey(padding(2 * n), n, d, f, "draft") for f in (0, RANDOM | TRUNCATED) for n, d in verified]
    missed = sorted({bucket_tokens(n) for n in range(1, tokens + 1)}, reverse=True)
    return keys + [GraphKey(t, s, t, 0, "follow") for t in missed for s in {bucket_seqs(1), bucket_seqs(max_num_seqs)}]
