"""Models that Quire has no layers for, run by transformers: its own greedy answers, in every way that steps are cut."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quire.assembly.engine import build_engine, choose_executor
from quire.config import Settings
from quire.engine.engine import Engine
from quire.errors import InvalidConfig, InvalidModel
from quire.executors.hf import HfModel
from quire.types import SamplingParams
from tests.answers import reference

VOCAB, NEW = 211, 12

PLAIN = MappingProxyType(
    {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
    }
)
SMALL = MappingProxyType({"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256})
BLOCKS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gptj": {**SMALL, "rotary_dim": 8},
        "gpt_neox": PLAIN,
        "gpt_neo": {"hidden_size": 48, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
        | {"window_size": 8, "max_position_embeddings": 256},
        "opt": {"hidden_size": 48, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"word_embed_proj_dim": 48, "max_position_embeddings": 256},
        "bloom": {"hidden_size": 48, "n_layer": 2, "n_head": 4},
        "falcon": {**PLAIN, "multi_query": True, "new_decoder_architecture": False, "alibi": False},
        "mpt": {"d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
        "stablelm": PLAIN,
        "phi": PLAIN,
    }
)
"""Models all of whose layers keep K/V: positions by rotation, by a table and by ALiBi, windows, one head for all."""

STATES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "mamba": {"hidden_size": 48, "num_hidden_layers": 2, "state_size": 8},
        "mamba2": {"hidden_size": 48, "num_hidden_layers": 2, "state_size": 8}
        | {"num_heads": 12, "head_dim": 8, "n_groups": 2},
        "lfm2": {**PLAIN, "layer_types": ["conv", "full_attention"]},
        "falcon_h1": {**PLAIN, "head_dim": 16, "mamba_n_heads": 12, "mamba_d_head": 8}
        | {"mamba_d_state": 8, "mamba_d_ssm": 96},
        "rwkv": {"hidden_size": 48, "num_hidden_layers": 2, "attention_hidden_size": 48, "context_length": 256},
        "openai-gpt": SMALL,
    }
)
"""Models with states of their own: recurrent, mixed with attention, one sequence at a time, and nothing at all."""

CUTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "together": {},
        "chunked": {"max_num_seqs": 3, "max_num_batched_tokens": 24, "long_prefill_token_threshold": 7},
        "ahead": {"lookahead": 2, "batching": "static"},
    }
)
BLOCK_CUTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        **CUTS,
        "tight": {"num_gpu_blocks_override": 24, "block_size": 8, "max_model_len": 128, "pressure_policy": "preempt"},
        "drafted": {
            "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3, "adaptive": false, "prompt_lookup_min": 1}',
            "block_size": 4,
        },
    }
)


def make(name: str) -> PreTrainedModel:
    torch.manual_seed(5)
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(name, vocab_size=VOCAB, **ends, **{**BLOCKS, **STATES}[name])
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for each in model.parameters():
            if each.dim() > 1:
                each.normal_(0, 2 / each.shape[-1] ** 0.5)
    return model


def prompts() -> list[tuple[int, ...]]:
    """Fifteen, three of which share a beginning."""
    rng = random.Random(3)
    draw = lambda n: tuple(rng.randrange(5, VOCAB) for _ in range(n))  # noqa: E731
    shared = draw(40)
    return [(shared if i % 5 == 0 else ()) + draw(rng.randrange(2, 50)) for i in range(15)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(name: str) -> tuple[Path, list[tuple[int, ...]]]:
        folder = tmp_path_factory.mktemp(name)
        model = make(name)
        model.save_pretrained(folder)
        return folder, [reference(model, prompt, NEW) for prompt in prompts()]

    return made


def ask(engine: Engine, asked: list[tuple[int, ...]], **sampling: Any) -> list[tuple[int, ...]]:
    params = SamplingParams(**{"temperature": 0.0} | sampling)
    ids = [engine.submit(prompt, NEW, sampling=params) for prompt in asked]
    said: dict[str, tuple[int, ...]] = dict.fromkeys(ids, ())
    while engine.has_pending_work:
        for event in engine.step():
            assert event.error is None, event.error
            said[event.id] += event.tokens
    assert engine.gauges().used_blocks == 0
    return [said[id] for id in ids]


def built(folder: Path, **options: Any) -> Engine:
    return build_engine(Settings.of(model=str(folder), executor="hf", dtype="float32", **options))


@pytest.mark.parametrize(
    ("name", "cut"), [(n, c) for n in BLOCKS for c in BLOCK_CUTS] + [(n, c) for n in STATES for c in CUTS]
)
def test_the_answers_are_transformers_own_however_steps_are_cut(name: str, cut: str, checkpoint: Any) -> None:
    folder, want = checkpoint(name)
    engine = built(folder, **BLOCK_CUTS[cut])
    assert ask(engine, prompts()) == want
    assert ask(engine, prompts()[:1]) == want[:1], "alone, and warm"
    if cut == "tight":
        assert engine.gauges().preemptions > 0
    if cut == "drafted":
        assert engine.gauges().draft_totals[1] > 0
    assert len({token for answer in want for token in answer}) > 20
    engine.close()
