"""Models that Quire has no layers for, run by transformers: its own greedy answers, in every way that steps are cut."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quire.assembly.engine import build_engine, choose_executor
from quire.assembly.grpc import host
from quire.assembly.hf import placing
from quire.config import Settings
from quire.engine.engine import Engine
from quire.errors import InvalidConfig, InvalidModel, InvalidRequest, StepFailed
from quire.executors.hf import HfModel, load
from quire.executors.hf_cache import OneByOne, PagedCache, Places
from quire.frontend.pooling import check_task
from quire.types import Request, SamplingParams
from quire.weights.pooling import GENERATES
from tests import checkpoints
from tests.answers import reference
from tests.executors.asked import ask

VOCAB, NEW = 211, 10

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
            "speculative_config": {"method": "ngram", "adaptive": False, "prompt_lookup_min": 1},
            "block_size": 4,
        },
    }
)

LATER = pytest.mark.nightly
SLOW = ("mamba2", "falcon_h1")
"""A chunk takes transformers a step for each token."""


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
    """Ten, two of which share a beginning."""
    rng = random.Random(3)
    draw = lambda n: tuple(rng.randrange(5, VOCAB) for _ in range(n))  # noqa: E731
    shared = draw(40)
    return [(shared if i % 5 == 0 else ()) + draw(rng.randrange(2, 50)) for i in range(10)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(name: str) -> tuple[Path, list[tuple[int, ...]]]:
        folder = tmp_path_factory.mktemp(name)
        model = make(name)
        model.save_pretrained(folder)
        return folder, [reference(model, prompt, NEW) for prompt in prompts()]

    return made


def built(folder: Path, **options: Any) -> Engine:
    return build_engine(Settings.of(model=str(folder), executor="hf", dtype="float32", **options))


def cases() -> list[Any]:
    """Every model in every cut; in CI every model in chunks but the slowest, and each other cut of every third."""
    everything = [(n, c) for n in BLOCKS for c in BLOCK_CUTS] + [(n, c) for n in STATES for c in CUTS]
    models, cuts = [*BLOCKS, *STATES], [*BLOCK_CUTS]
    return [
        pytest.param(
            n,
            c,
            marks=() if (c == "chunked" and n not in SLOW) or (models.index(n) + cuts.index(c)) % 3 == 0 else LATER,
        )
        for n, c in everything
    ]


@pytest.mark.parametrize(("name", "cut"), cases())
def test_the_answers_are_transformers_own_however_steps_are_cut(name: str, cut: str, checkpoint: Any) -> None:
    folder, want = checkpoint(name)
    engine = built(folder, **BLOCK_CUTS[cut])
    assert ask(engine, prompts(), NEW) == want
    assert ask(engine, prompts()[:1], NEW) == want[:1], "alone, and warm"
    if cut == "tight":
        assert engine.gauges().preemptions > 0
    if cut == "drafted":
        assert engine.gauges().draft_totals[1] > 0
    assert len({token for answer in want for token in answer}) > 20
    engine.close()


def test_a_model_that_keeps_states_says_so_and_refuses_what_needs_blocks(
    checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = checkpoint("mamba")
    with caplog.at_level(logging.WARNING):
        built(folder).close()
    assert "is run by transformers, as --executor hf says" in caplog.text
    assert "recurrent states by sequence, and prefixes are not cached; chunks after the first are fed" in caplog.text
    for options in ({"block_size": 16}, {"speculative_config": '{"method": "ngram"}'}, {"num_gpu_blocks_override": 9}):
        with pytest.raises(
            InvalidConfig, match="does not go with --executor hf: this model's past is kept by sequence"
        ):
            built(folder, **options)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"deterministic": True}, "--deterministic does not go with --executor hf: how transformers sums"),
        ({"quantization": "int8"}, "--quantization does not go with --executor hf"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype does not go with --executor hf"),
        ({"max_memory": '{"cpu": "1GiB"}'}, "max_memory says how device_map divides a model: set device_map"),
        ({"num_gpu_blocks_override": 2, "block_size": 16, "max_model_len": 512}, "no sequence of that length"),
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, Any], complaint: str, checkpoint: Any) -> None:
    folder, _ = checkpoint("gpt_neox")
    with pytest.raises(InvalidConfig, match=complaint):
        built(folder, **options)


def test_layers_are_placed_as_the_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("quire.assembly.hf.find_spec", lambda name: None)
        with pytest.raises(InvalidConfig, match=r"device_map needs a package .*accelerate.*quire-llm\[hf\]"):
            placing(Settings.of(device_map="auto"))
    monkeypatch.setattr("quire.assembly.hf.find_spec", lambda name: name)
    limits = '{"0": "20GiB", "cpu": "3MB"}'
    assert placing(Settings.of()) == {}
    assert placing(Settings.of(device_map="auto", max_memory=limits)) == {
        "device_map": "auto",
        "max_memory": {0: 20 << 30, "cpu": 3_000_000},
    }
    assert placing(Settings.of(device_map='{"": "cpu"}')) == {"device_map": {"": "cpu"}, "max_memory": None}
    for options, complaint in (
        ({"device_map": "spread"}, "device_map must be one of auto, .* not 'spread'"),
        ({"device_map": "auto", "max_memory": "[]"}, "max_memory must be a JSON object of devices"),
        ({"device_map": "auto", "max_memory": '{"cpu": "much"}'}, "max_memory: must be a whole number"),
    ):
        with pytest.raises(InvalidConfig, match=complaint):
            placing(Settings.of(**options))
    with pytest.raises(InvalidConfig, match="--device-map does not go with --executor local"):
        build_engine(Settings.of(device_map="auto"))


@pytest.mark.parametrize("options", [{}, {"max_memory": '{"cpu": "100KiB"}'}], ids=["all in memory", "some on disk"])
def test_a_placed_model_answers_alike(options: dict[str, Any], checkpoint: Any) -> None:
    pytest.importorskip("accelerate")
    folder, want = checkpoint("gpt_neox")
    engine = built(folder, device_map="auto", **options)
    assert ask(engine, prompts(), NEW) == want
    engine.close()


def test_an_architecture_that_quire_lacks_is_run_by_transformers_with_a_line_that_says_so(
    checkpoint: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, want = checkpoint("bloom")
    chosen = Settings.of(model=str(folder), dtype="float32")
    assert choose_executor(chosen) == "hf"
    assert choose_executor(Settings.of()) == "local"
    with caplog.at_level(logging.WARNING):
        engine = build_engine(chosen)
    assert "(BloomForCausalLM) is run by transformers, Quire has no layers for it: slower than" in caplog.text
    assert ask(engine, prompts(), NEW) == want
    engine.close()
    advice = r"'BloomForCausalLM' is not supported: .* --executor hf: pip install 'quire-llm\[hf\]'"
    with pytest.raises(InvalidModel, match=advice):
        build_engine(chosen.changed(executor="local"))
    monkeypatch.setattr("quire.assembly.engine.find_spec", lambda name: None)
    with pytest.raises(InvalidModel, match=advice):
        build_engine(chosen)


def test_code_of_a_checkpoint_is_not_run(checkpoint: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("bloom")[0], tmp_path / "own")
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"model_type": "mine", "architectures": ["Mine"], "auto_map": {"AutoConfig": "mine.C"}}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    with pytest.raises(InvalidModel, match="transformers cannot load own"):
        built(folder)
    assert not (tmp_path / "ran").exists()


def test_a_gguf_file_is_refused_by_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidModel, match=r"model.gguf is a file, and transformers loads folders"):
        load(tmp_path / "model.gguf", "float32", torch.device("cpu"))


def test_a_model_that_transformers_cannot_run_is_refused_by_name(tmp_path: Path) -> None:
    """Its products of several matrices need rows of 16 bytes."""
    checkpoints.make(tmp_path, "qwen3_next-shared-keys")
    with pytest.raises(InvalidModel, match="transformers cannot run Qwen3NextForCausalLM here: strides"):
        HfModel(load(tmp_path, "float32", torch.device("cpu")), torch.device("cpu"))


FEATURES: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 7, "top_p": 0.9, "logprobs": 3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "prompt_logprobs": 2, "logprobs": 1},
    {"allowed_token_ids": (7, 8, 9, 30), "min_tokens": 3, "logit_bias": {7: 2.0}},
]


@pytest.mark.parametrize("features", FEATURES, ids=["random", "penalties", "bounds"])
def test_sampling_features_are_those_of_our_own_layers(features: dict[str, Any], tmp_path: Path) -> None:
    """A model that both run: the same tokens and nearly the same log-probabilities, of prompts too."""
    checkpoints.make(tmp_path, "qwen2-gqa")
    said = []
    for executor in ("local", "hf"):
        engine = build_engine(
            Settings.of(model=str(tmp_path), executor=executor, dtype="float32", max_num_batched_tokens=64), keep=20
        )
        found: dict[str, list[Any]] = {}
        for i, prompt in enumerate(prompts()):
            sampling = SamplingParams(**{"temperature": 0.0, **features})
            engine.add(Request(id=str(i), prompt=tuple(t % 199 for t in prompt), max_new_tokens=NEW, sampling=sampling))
        while engine.has_pending_work:
            for event in engine.step():
                assert event.error is None, event.error
                scores = [*(event.logprobs or ()), *(event.prompt_logprobs or ())]
                found.setdefault(event.id, []).extend([*event.tokens, *scores])
        said.append(found)
        engine.close()
    ours, theirs = said
    assert len(ours) == len(prompts()) and all(len(each) >= NEW for each in ours.values())
    for id, each in ours.items():
        for one, other in zip(each, theirs[id], strict=True):
            if isinstance(one, int):
                assert one == other
            else:
                assert (one.token, one.rank) == (other.token, other.rank)
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [t for t, _ in one.top] == [t for t, _ in other.top]


def test_a_request_that_is_aborted_and_a_failed_step_leave_others_as_they_are(checkpoint: Any) -> None:
    for name in ("gpt_neox", "mamba"):
        folder, want = checkpoint(name)
        engine = built(folder, max_num_seqs=4)
        model, calls = engine.executor.runner.model, [0]
        forward = model.forward

        def failing(batch: Any, kv: Any, forward: Any = forward, calls: list[int] = calls) -> Any:
            calls[0] += 1
            if calls[0] == 9:
                raise RuntimeError("once")
            return forward(batch, kv)

        model.forward = failing
        ids = [engine.submit(prompt, NEW, sampling=SamplingParams(temperature=0.0)) for prompt in prompts()]
        said: dict[str, tuple[int, ...]] = dict.fromkeys(ids, ())
        while engine.has_pending_work:
            for event in engine.step():
                assert event.error is None, event.error
                said[event.id] += event.tokens
            if calls[0] == 5:
                engine.abort(ids[1])
        assert calls[0] > 9
        assert [said[id] for i, id in enumerate(ids) if i != 1] == [one for i, one in enumerate(want) if i != 1]
        engine.close()


def test_behind_grpc_it_answers_alike(checkpoint: Any) -> None:
    folder, want = checkpoint("opt")
    server = host(Settings.of(model=str(folder), dtype="float32", max_num_seqs=8), "127.0.0.1:0")
    engine = build_engine(Settings.of(executor="grpc", executor_address=f"127.0.0.1:{server.port}"))
    assert ask(engine, prompts(), NEW) == want
    engine.close()
    server.stop()
    server.executor.close()


def test_vectors_are_refused_by_name(checkpoint: Any) -> None:
    with pytest.raises(InvalidRequest, match="this engine does not support embeddings"):
        check_task(GENERATES, "embed", pools=built(checkpoint("gpt_neox")[0]).description.supports_pooling)


class Forgetful(PagedCache):
    """Masks nothing: what a model that ignores its attention mask would do."""

    def feed(self, places: Places, kv: Any, kept: Any) -> torch.Tensor:
        return super().feed(replace(places, mask=torch.ones_like(places.mask)), kv, kept)


def test_a_way_of_keeping_the_past_that_changes_answers_is_not_taken() -> None:
    model = make("gpt_neox")
    cpu = torch.device("cpu")
    assert isinstance(HfModel(model, cpu).past, PagedCache)
    assert isinstance(HfModel(model, cpu, (Forgetful, OneByOne)).past, OneByOne)
    with pytest.raises(InvalidModel, match="GPTNeoXForCausalLM gives different answers with and without its cache"):
        HfModel(model, cpu, (Forgetful,))


def test_a_sequence_that_is_not_there_has_no_past() -> None:
    def feed_model(*_: object, **__: object) -> Any:
        raise AssertionError("nothing is computed")

    past = OneByOne(feed_model, keeps=True, singly=False)
    tokens = torch.tensor([7, 8])
    with pytest.raises(StepFailed, match="block 5 holds 0 tokens, not 1"):
        past._feed(5, tokens, 1, [0])
    past.tokens[5] = tokens
    with pytest.raises(StepFailed, match="block 5 holds 2 tokens, not 1"):
        past._feed(5, tokens, 1, [0])


def test_a_look_alike_is_not_taken_and_a_missing_tensor_is_named(checkpoint: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("gpt_neox")[0], tmp_path / "copy")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(InvalidModel, match="names MambaForCausalLM, but its model_type 'gpt_neox' is GPTNeoXForCausal"):
        built(folder)
    with pytest.raises(InvalidModel, match="architecture 'MambaForCausalLM' is not supported"):
        build_engine(Settings.of(model=str(folder)))
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = load_file(folder / "model.safetensors")
    del tensors["embed_out.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidModel, match=r"copy lacks 1 tensors of GPTNeoXForCausalLM, such as lm_head.weight"):
        built(folder)
