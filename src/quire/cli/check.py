"""`quire check`: a model, or a tiny one of each family, answers alone and in a batch, through what would serve it."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import click
import numpy as np

from quire.assembly.engine import build_engine
from quire.assembly.tokenizer import pooler_of
from quire.config import Settings
from quire.engine.engine import Engine
from quire.errors import InvalidConfig, InvalidModel, QuireError
from quire.frontend.pooling import pooling_params
from quire.models.registry import ARCHITECTURES
from quire.types import GREEDY, SamplingParams

TINY: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 320,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "max_position_embeddings": 256,
        "sliding_window": 16,
        "num_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 128,
        "shared_intermediate_size": 256,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "kv_lora_rank": 48,
        "v_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
)
"""Sizes of the models of `--all`, as most families name them."""

AXES: Mapping[str, Any] = MappingProxyType(
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
)
"""Pairs of a head of 32 numbers that are rotated by time, height and width."""

OWN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "GPT2LMHeadModel": {"n_embd": 128, "n_head": 4, "n_layer": 4, "n_positions": 256},
        "GraniteMoeHybridForCausalLM": {"num_local_experts": 0, "layer_types": ["attention"] * 4},
        "BambaForCausalLM": {"attn_layer_indices": [1]},
        "NemotronHForCausalLM": {
            "layers_block_type": ["mamba", "attention", "mlp", "moe"],
            "moe_shared_expert_intermediate_size": 128,
        },
        "Qwen2_5_VLForConditionalGeneration": AXES,
        "Qwen3VLForConditionalGeneration": AXES,
        "Qwen3VLMoeForConditionalGeneration": AXES,
        "RobertaModel": {"max_position_embeddings": 258, "pad_token_id": 1},
        "MixtralForCausalLM": {"num_local_experts": 4},
        "NomicBertModel": {"num_experts": 0},
    }
)
"""Fields of families that name them otherwise."""

PROMPTS = tuple(tuple((31 * i + 7 * at) % 300 for at in range(5 + 11 * i)) for i in range(3))
NEW = 8


class Checked(NamedTuple):
    """What a family answered. error: what went wrong, empty if nothing did."""

    name: str
    seconds: float
    error: str


def run(settings: Settings, every: bool) -> None:
    """`quire check`, see `quire.cli.late`."""
    names = list(families()) if every else [settings.model.model]
    failed = 0
    for i, name in enumerate(names, 1):
        found = checked(name, family(settings, name) if every else settings)
        failed += bool(found.error)
        status = f"FAILED: {found.error}" if found.error else f"{found.seconds:.1f} s"
        click.echo(f"{i} of {len(names)}  {found.name}  {status}")
    click.echo(f"{len(names) - failed} of {len(names)} answered")
    click.get_current_context().exit(1 if failed else 0)


def families() -> Iterator[str]:
    """One architecture of each class of the registry."""
    seen = set[int]()
    for name, kind in ARCHITECTURES.items():
        if id(kind) not in seen:
            seen.add(id(kind))
            yield name


def family(settings: Settings, name: str) -> Settings:
    """The settings for a tiny model of an architecture. Raises InvalidConfig if they name a model."""
    if settings.source("model") != "default":
        raise InvalidConfig("--all creates its own models: leave out the model", param="model")
    return settings.changed(load_format="dummy", max_model_len=256)


def checked(name: str, settings: Settings) -> Checked:
    """Build an engine, and let it answer."""
    began = time.perf_counter()
    try:
        if settings.model.load_format == "dummy" and name in ARCHITECTURES:
            with tempfile.TemporaryDirectory() as folder:
                fields = {**TINY, **OWN.get(name, {}), "architectures": [name]}
                (Path(folder) / "config.json").write_text(json.dumps(fields))
                error = answered(settings.changed(model=folder))
        else:
            error = answered(settings)
    except (QuireError, RuntimeError) as failure:
        error = str(failure).split("\n")[0]
    return Checked(name, time.perf_counter() - began, error)


def answered(settings: Settings) -> str:
    """What is wrong with the answers, empty if nothing is. Raises InvalidModel."""
    pooler = pooler_of(settings)
    sampling = GREEDY if pooler.generates else pooling_params("classify" if pooler.classes else pooler.pooling)
    with closing(build_engine(settings)) as engine:
        vocab = engine.description.vocab_size
        prompts = [tuple(token % vocab for token in prompt) for prompt in PROMPTS]
        alone = [answer for prompt in prompts for answer in answers(engine, [prompt], sampling)]
        together = answers(engine, prompts, sampling)
    if not pooler.generates:
        vectors = [np.frombuffer(answer.pooled, dtype="<f4") for answer in (*alone, *together)]
        if not all(len(each) and np.isfinite(each).all() for each in vectors):
            raise InvalidModel("a prompt gives no vector of finite numbers")
    elif any(len(each.tokens) != NEW or not all(0 <= t < vocab for t in each.tokens) for each in (*alone, *together)):
        raise InvalidModel(f"an answer is not {NEW} tokens of the vocabulary")
    differ = settings.execution.deterministic and alone != together
    return "answers differ alone and in a batch" if differ else ""


class Answer(NamedTuple):
    """Tokens, or the numbers of a pooling model as bytes."""

    tokens: tuple[int, ...] = ()
    pooled: bytes = b""


def answers(engine: Engine, prompts: list[tuple[int, ...]], sampling: SamplingParams) -> list[Answer]:
    """Answers to prompts at once. Raises InvalidModel for one that fails."""
    new = NEW if sampling.pooling is None else 1
    made = {engine.submit(prompt, new, sampling=sampling): Answer() for prompt in prompts}
    while engine.has_pending_work:
        for event in engine.step():
            if event.error is not None:
                raise InvalidModel(str(event.error))
            before = made[event.id]
            made[event.id] = Answer(before.tokens + tuple(event.tokens), before.pooled + event.pooled)
    return list(made.values())
