"""Models with recurrent layers in every form of numbers: prefix cache, drafts and preemption change no answer.

Four families, as published, in FP8, in 4 bits, and in GGUF files, llama.cpp's and ours. In each, requests of every kind
run together: greedy, several choices, log-probabilities of answers and prompts, grammars; some prompts begin alike, and
a second round goes on from the first. Answers have to be those of the same checkpoint with one request at a time, and
nothing reused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.types import Logprob, RequestOutput, StructuredOutputsParams
from quire.weights.load import no_progress
from quire.weights.locate import embedded
from quire.weights.quantize import quantize
from tests import gguf_files, mtp
from tests.checkpoints import make
from tests.models.feeding import prompts
from tests.quantised import quantise

SIZES: Mapping[str, Any] = MappingProxyType(
    {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 4096}
)
DELTA: Mapping[str, Any] = MappingProxyType(
    {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "moe_intermediate_size": 32}
)
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "Qwen3-Next": ("qwen3_next-shared-keys", {**DELTA, "shared_expert_intermediate_size": 48}),
        "Qwen3.5": ("qwen3_5_moe_text-shared-keys", {**DELTA, "shared_expert_intermediate_size": 48}),
        "Granite 4-H": (
            "granitemoehybrid-mamba-experts",
            {"intermediate_size": 32, "shared_intermediate_size": 96, "mamba_n_heads": 8, "mamba_d_state": 16}
            | {"position_embedding_type": None},
        ),
        "Nemotron-H": (
            "nemotron_h-experts",
            {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 96, "mamba_num_heads": 8}
            | {"mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "head_dim": 8, "n_group": 1, "topk_group": 1},
        ),
    }
)
FORMS = ("float32", "fp8-blocks", "int4-packed", "gguf Q8_0", "gguf Q4_0", "quantized to q8_0")

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
MTP = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
CHUNKS = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "snapshot_interval": 8}
SITUATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "reused": CHUNKS,
        "drafted": CHUNKS | {"speculative_config": NGRAM},
        "drafted by the model": CHUNKS | {"speculative_config": MTP},
        "preempted": CHUNKS | {"max_num_seqs": 8, "num_gpu_blocks_override": 44, "pressure_policy": "preempt"},
        "preempted while drafted, ahead": CHUNKS
        | {"speculative_config": NGRAM, "max_num_seqs": 8, "num_gpu_blocks_override": 48, "pressure_policy": "preempt"}
        | {"lookahead": 1},
        "every bit": CHUNKS | {"speculative_config": NGRAM, "deterministic": True, "num_gpu_blocks_override": 60},
    }
)
ALONE = {"max_num_seqs": 1, "enable_prefix_caching": False, "state_snapshots": 0}

IN_CI: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "Qwen3-Next gguf Q8_0": ("preempted while drafted, ahead",),
        "Qwen3.5 quantized to q8_0": ("drafted by the model",),
        "Granite 4-H int4-packed": ("every bit",),
        "Nemotron-H fp8-blocks": ("preempted", "drafted by the model"),
    }
)


def write(folder: Path, family: str, form: str) -> Path:
    """A checkpoint; where one is quantised, and the family has it, with a layer for multi-token prediction."""
    shape, sizes = FAMILIES[family]
    if form.startswith("gguf"):
        gguf_files.write(folder / "model.gguf", make(folder / "source", shape, **SIZES, **sizes), form.split()[1])
        return folder / "model.gguf"
    if drafts_itself(family, form):
        mtp.make_mtp(folder, shape, **SIZES, **sizes)
    else:
        make(folder, shape, **SIZES, **sizes)
    if form.startswith("quantized"):
        path = folder / "model.gguf"
        quantize(folder, path, form.split()[-1], vocabulary=False, check=False, progress=no_progress)
        return path
    if form != "float32":
        quantise(folder, form)
    return folder


def drafts_itself(family: str, form: str) -> bool:
    """Whether the checkpoint has a layer for multi-token prediction."""
    stores = family == "Qwen3.5" if form.startswith("quantized") else not form.startswith("gguf")
    return FAMILIES[family][0] in mtp.SHAPES and stores


def asked() -> list[tuple[list[int], SamplingParams]]:
    whole = [[token % 4000 for token in one] for one in prompts(199, seed=3)]
    shared = (whole[0] * 2)[:38]
    digits = StructuredOutputsParams(regex="[0-9]{3}-[0-9]{4}[ab]*")
    one = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    return [
        (shared + whole[1][:9], SamplingParams(**greedy)),
        (shared + whole[2][:5], SamplingParams(**greedy, logprobs=3)),
        (shared + whole[1][:9], SamplingParams(**greedy | {"temperature": 1.0, "seed": 5, "n": 4})),
        (shared[:30] + whole[3][:11], SamplingParams(**greedy, prompt_logprobs=2)),
        (shared + whole[2][:7], SamplingParams(**greedy | {"ignore_eos": False}, structured_outputs=digits)),
        (
            shared[:21],
            SamplingParams(**greedy | {"temperature": 0.7, "seed": 9, "n": 2, "logprobs": 1}, structured_outputs=one),
        ),
    ]


def scores(of: Sequence[Mapping[int, Logprob] | None] | None) -> list[dict[int, float]]:
    return [{token: each.logprob for token, each in (some or {}).items()} for some in of or ()]


def told(output: RequestOutput) -> list[Any]:
    """Tokens of each choice, and log-probabilities of the prompt and of these."""
    choices = [(list(one.token_ids), one.finish_reason) for one in output.outputs]
    return [choices, scores(output.prompt_logprobs), *(scores(one.logprobs) for one in output.outputs)]


def alike(got: list[Any], want: list[Any]) -> bool:
    if got[0] != want[0]:
        return False
    return all(
        mine.keys() == theirs.keys() and all(abs(mine[token] - theirs[token]) < 2e-3 for token in mine)
        for some, others in zip(got[1:], want[1:], strict=True)
        for mine, theirs in zip(some, others, strict=True)
    )


def started(model: Path, options: Mapping[str, Any]) -> LLM:
    own: dict[str, Any] = {"dtype": "float32", "tokenizer": str(embedded()), "max_model_len": 128, "block_size": 4}
    return LLM(str(model), **own, canary="off", **options)


def rounds(llm: LLM, one_by_one: bool) -> Iterator[list[list[Any]]]:
    """All requests, and again after their first answers."""
    each = asked()
    for _ in range(2):
        ids, params = [{"prompt_token_ids": prompt} for prompt, _ in each], [how for _, how in each]
        groups = [slice(i, i + 1) for i in range(len(ids))] if one_by_one else [slice(0, 1), slice(1, None)]
        done = [output for group in groups for output in llm.generate(ids[group], params[group])]
        yield [told(output) for output in done]
        each = [
            (prompt + list(output.outputs[0].token_ids)[:9], how)
            for (prompt, how), output in zip(each, done, strict=True)
        ]


def alone(model: Path) -> list[list[list[Any]]]:
    """What requests are answered one at a time."""
    with started(model, ALONE) as llm:
        return [*rounds(llm, one_by_one=True)]


def check(model: Path, wanted: list[list[list[Any]]], name: str) -> None:
    options = SITUATIONS[name]
    with started(model, options) as llm:
        for turn, (got, want) in enumerate(zip(rounds(llm, one_by_one=False), wanted, strict=True)):
            departs = [i for i, pair in enumerate(zip(got, want, strict=True)) if not alike(*pair)]
            assert not departs, (name, turn, departs, got[departs[0]][0], want[departs[0]][0])
        gauges = llm._engine.gauges()
    assert (gauges.running, gauges.waiting, gauges.used_blocks) == (0, 0, 0), name
    assert gauges.prefix_hit > 100, (name, gauges.prefix_hit)
    if "preempted" in name:
        assert gauges.preemptions > 0, name
    if "speculative_config" in options:
        _, drafted, right = gauges.draft_totals
        assert 0 < right < drafted, (name, drafted, right)


def cases() -> Iterator[Any]:
    """All at night, and some in CI."""
    for family in FAMILIES:
        for form in FORMS:
            name = f"{family} {form}"
            every = [each for each in SITUATIONS if each != "drafted by the model" or drafts_itself(family, form)]
            yield pytest.param(family, form, every, marks=pytest.mark.nightly, id=name)
            if name in IN_CI:
                yield pytest.param(family, form, IN_CI[name], id=f"{name}, {'; '.join(IN_CI[name])}")


@pytest.mark.parametrize(("family", "form", "situations"), [*cases()])
def test_nothing_changes_an_answer(family: str, form: str, situations: Sequence[str], tmp_path: Path) -> None:
    model = write(tmp_path, family, form)
    wanted = alone(model)
    for name in situations:
        check(model, wanted, name)
