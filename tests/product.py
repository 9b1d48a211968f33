"""Draws from the product of tiny checkpoints of every kind, options of the engine and parameters of requests.

    python -m tests.product --seed 7 --count 200 --kinds gguf    # print what departs, and what is refused

Answers have to be those of the same checkpoint in the same numbers (`NUMBERS`) with all other options as they are by
default; no block may stay in use, and each recording has to replay. What cannot go together is refused by one of
`REFUSALS`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from quire import LLM, SamplingParams
from quire.errors import QuireError
from quire.observability.recording_format import RecordingReader
from quire.sim.replay import replay
from quire.types import RequestOutput
from tests import checkpoints, gguf_files, mtp, quantised, vision

Options = dict[str, Any]
Write = Callable[[Path], Path]


def plain(shape: str, **changes: Any) -> Write:
    def write(folder: Path) -> Path:
        checkpoints.make(folder, shape, **changes)
        return folder

    return write


def drafting(shape: str, layers: int = 1) -> Write:
    def write(folder: Path) -> Path:
        mtp.make_mtp(folder, shape, layers)
        return folder

    return write


def quantised_in(form: str) -> Write:
    def write(folder: Path) -> Path:
        checkpoints.make(folder, quantised.SHAPE, **quantised.SIZES)
        quantised.quantise(folder, form)
        return folder

    return write


def gguf(shape: str, kind: str) -> Write:
    def write(folder: Path) -> Path:
        path = folder / "model.gguf"
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
        wide = {"hidden_size": 256, "intermediate_size": 256, **heads} if kind.endswith("_K") else {}
        gguf_files.write(path, checkpoints.make(folder / "source", shape, **wide), kind)
        return path

    return write


def pickled(folder: Path) -> Path:
    """As pytorch_model.bin."""
    checkpoints.make(folder, "llama-gqa-tied")
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    return folder


def seeing(family: str) -> Write:
    def write(folder: Path) -> Path:
        vision.make(folder, family)
        return folder

    return write


KINDS: Mapping[str, Write] = MappingProxyType(
    {
        **{shape: plain(shape) for shape in sorted(checkpoints.FIRST)},
        **{f"mtp {shape}": drafting(shape) for shape in mtp.SHAPES},
        "mtp deepseek_v3-groups-yarn, three layers": drafting("deepseek_v3-groups-yarn", 3),
        **{f"stored {form}": quantised_in(form) for form in quantised.FORMATS},
        **{
            f"gguf {kind} {shape}": gguf(shape, kind)
            for kind, shape in (
                ("Q8_0", "llama-gqa-tied"),
                ("Q4_K", "llama-gqa-tied"),
                ("Q4_0", "qwen3-gqa"),
                ("Q6_K", "gemma2-gqa"),
                ("F16", "gpt_oss-gqa"),
                ("Q8_0", "qwen3_next-shared-keys"),
                ("BF16", "mixtral-gqa"),
                ("Q8_0", "granitemoehybrid-mamba"),
            )
        },
        "sharded": plain("llama-gqa-tied", shard="20KB"),
        "pickled": pickled,
        **{f"vision {family}": seeing(family) for family in vision.FAMILIES},
    }
)

NUMBERS: Mapping[str, Sequence[Any]] = MappingProxyType(
    {
        "quantization": ("auto", "auto", "auto", "int8", "q8_0", "q4_0", "fp8", "int8_w8a8", "fp8_per_block"),
        "kv_cache_dtype": ("auto", "auto", "auto", "fp8", "fp8_e5m2"),
        "executor": ("auto", "auto", "auto", "auto", "hf"),
    }
)
"""Options that change the numbers."""

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
MTP = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
DRAFT = {"method": "draft_model", "num_speculative_tokens": 2, "adaptive": False}

AXES: Mapping[str, Sequence[Any]] = MappingProxyType(
    {
        "deterministic": ("auto", False, True),
        "cpu_kernels": ("auto", "torch", "avx2"),
        "speculative_config": (None, None, NGRAM, MTP, DRAFT),
        "block_size": ("auto", 1, 3, 16),
        "num_gpu_blocks_override": ("auto", "tight"),
        "max_num_seqs": ("auto", 1, 3),
        "max_num_batched_tokens": ("auto", 7, 33),
        "enable_chunked_prefill": (True, True, False),
        "long_prefill_token_threshold": (0, 5),
        "enable_prefix_caching": (True, False),
        "state_snapshots": ("auto", 0, 2),
        "snapshot_interval": (1024, 8),
        "kv_offloading": (None, "host", "folder"),
        "eviction_policy": ("lru", "fifo"),
        "pressure_policy": ("foresee", "preempt", "reserve"),
        "scheduling_policy": ("fcfs", "priority"),
        "batching": ("continuous", "static"),
        "lookahead": ("auto", 0, 1, 2),
        "max_model_len": ("auto", 128),
        "recording": (False, True),
    }
)
"""Options that change no answer; the first value is the default."""

REFUSALS = re.compile(
    "already quantized by|no layer for multi-token prediction|no weights of its layer for multi-token prediction"
    "|they need the same tokenizer|--kv-offloading-size: (evicted blocks are found by"
    "|this model has recurrent layers)|enable_chunked_prefill is false|transformers (cannot|loads folders)"
    "|does not go with (--executor hf|models with recurrent layers)|model has no recurrent layers"
)
"""Why a combination cannot be."""

LONGEST = 128
NEW = 10


class Asked(NamedTuple):
    prompts: list[dict[str, list[int]]]
    params: list[SamplingParams]


def requests(vocab: int = 190) -> Asked:
    """Prompts of 1 to 90 tokens, some of which begin alike, each with parameters of its own."""
    rng = random.Random(3)
    draw = lambda count: [rng.randrange(3, vocab) for _ in range(count)]  # noqa: E731
    shared = draw(50)
    prompts = [draw(1), shared + draw(7), draw(33), shared + draw(40), draw(9), shared[:48], shared + draw(7), draw(64)]
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": NEW, "detokenize": False}
    params = [
        greedy,
        greedy | {"logprobs": 3},
        greedy | {"min_tokens": 6, "stop_token_ids": list(range(0, vocab, 3))},
        greedy | {"prompt_logprobs": 2},
        greedy | {"temperature": 1.0, "seed": 5, "n": 3},
        greedy | {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 7, "repetition_penalty": 1.3},
        greedy | {"ignore_eos": True, "logit_bias": {5: -100.0, 7: 4.0}, "presence_penalty": 0.5},
        greedy | {"max_tokens": 1, "allowed_token_ids": [4, 8, 15]},
    ]
    return Asked([{"prompt_token_ids": ids} for ids in prompts], [SamplingParams(**each) for each in params])


def compared(outputs: Sequence[RequestOutput], options: Options) -> list[Any]:
    """What answers are compared by: tokens, but where the rounding of activations to 8 bits depends on the batch."""
    if options.get("quantization") == "int8_w8a8":
        return [len(each.outputs) for each in outputs]
    return [[(choice.token_ids, choice.finish_reason) for choice in each.outputs] for each in outputs]


def options_of(case: Mapping[str, Any], folder: Path, draft: Path) -> Options:
    options = {"dtype": "float32", "skip_tokenizer_init": True, "canary": "off", **case}
    offloading, recording = options.pop("kv_offloading", None), options.pop("recording", False)
    if offloading:
        options["kv_offloading_size"] = 0.001
    if offloading == "folder":
        options["kv_offloading_dir"] = str(folder / "blocks")
    if recording:
        options["recording_dir"] = str(folder / "recording")
    if (config := options.pop("speculative_config", None)) is not None:
        options["speculative_config"] = config | ({"model": str(draft)} if config is DRAFT else {})
    size = options.get("block_size", "auto")
    if options.get("num_gpu_blocks_override") == "tight":
        options["num_gpu_blocks_override"] = LONGEST // (16 if size == "auto" else size) + 6
        options["max_model_len"] = LONGEST
    if options.get("max_num_batched_tokens", "auto") != "auto" and options.get("max_num_seqs", "auto") == "auto":
        options["max_num_seqs"] = 4
    return options


def ask(model: Path, options: Options, rounds: int) -> list[list[Any]]:
    """Each round's answers; the second finds prefixes of the first."""
    with LLM(str(model), **options) as llm:
        asked = requests()
        answers = [compared(llm.generate(asked.prompts, asked.params), options) for _ in range(rounds)]
        gauges = llm._engine.gauges()
        assert (gauges.running, gauges.waiting, gauges.used_blocks) == (0, 0, 0), gauges
    return answers


def replayed(folder: Path) -> None:
    """The recording of a run makes the same decisions again."""
    reader = RecordingReader([folder])
    while reader.next is not None:
        out = replay(reader)
        assert out.divergence is None, out.divergence


class Runner:
    """Keeps what was written and what the references answered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models: dict[str, Path] = {}
        self.references: dict[str, Any] = {}
        self.count = 0

    def model(self, kind: str) -> Path:
        if kind not in self.models:
            folder = self.folder / kind.replace(" ", "_")
            folder.mkdir()
            self.models[kind] = KINDS[kind](folder)
        return self.models[kind]

    def reference(self, kind: str, numbers: Options) -> Any:
        """What it answers in those numbers, or the QuireError by which it is refused."""
        key = json.dumps([kind, numbers])
        if key not in self.references:
            try:
                self.references[key] = ask(self.model(kind), options_of(numbers, self.folder, self.folder), 1)[0]
            except QuireError as error:
                self.references[key] = error
        return self.references[key]

    def run(self, kind: str, case: Mapping[str, Any]) -> str | None:
        """What it is refused with, None where it answers. Raises AssertionError where an answer departs, or the refusal
        is not one of `REFUSALS`."""
        self.count += 1
        own = self.folder / f"case{self.count}"
        own.mkdir()
        numbers = {name: case[name] for name in NUMBERS}
        reference = self.reference(kind, numbers)
        try:
            answers = ask(self.model(kind), options_of(case, own, self.model("llama-gqa-tied")), 2)
        except QuireError as error:
            if not REFUSALS.search(str(error)):
                raise AssertionError("refused without need") from error
            return str(error)
        assert not isinstance(reference, QuireError), f"only the reference is refused: {reference}"
        for at, answer in enumerate(answers):
            departs = [i for i, (a, b) in enumerate(zip(answer, reference, strict=True)) if a != b]
            assert not departs, f"round {at}, requests {departs}: {answer[departs[0]]}, not {reference[departs[0]]}"
        if case.get("recording"):
            replayed(own / "recording")
        return None


def draws(seed: int, count: int, kinds: Sequence[str], few: int = 6) -> Iterator[tuple[str, Options]]:
    """Kinds by turns, each with values of at most `few` options that are drawn, and the rest by default."""
    rng, axes = random.Random(seed), {**NUMBERS, **AXES}
    for i in range(count):
        chosen = set(rng.sample(sorted(axes), rng.randrange(2, few + 1)))
        yield (
            kinds[(seed * 37 + i) % len(kinds)],
            {name: rng.choice(values) if name in chosen else values[0] for name, values in axes.items()},
        )


def shown(case: Mapping[str, Any]) -> Options:
    """The options that are not the default."""
    return {name: value for name, value in case.items() if value != {**NUMBERS, **AXES}[name][0]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--kinds", default="", help="a part of the kinds' names")
    parser.add_argument("--few", type=int, default=6, help="most options that are not the default")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder))
        for kind, case in draws(args.seed, args.count, [kind for kind in KINDS if args.kinds in kind], args.few):
            try:
                said = runner.run(kind, case)
                print("refused" if said else "ok", kind, shown(case), said or "", flush=True)
            except Exception as error:
                print("FAILED", kind, shown(case), *traceback.format_exception(error)[-3:], flush=True)


if __name__ == "__main__":
    main()
