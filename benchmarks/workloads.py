"""What the GPU benchmarks ask for: token ids, the same for every engine and run, and the least time that it takes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from benchmarks.shapes import AWQ, GPTQ
from quire.models.registry import idle_parameters
from quire.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """batches empty: `count` requests at once, timed as a whole. Else, for each batch, the time of a token after the
    first. Lengths in tokens, from and to; shared: a prefix that all prompts begin with. options: of the engine. config:
    of config.json, what differs from the shape's."""

    model: str
    count: int = 0
    batches: tuple[int, ...] = ()
    prompt: tuple[int, int]
    new: tuple[int, int]
    shared: int = 0
    context: int = 4096
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


def hybrid(model: str, **options: Any) -> Workload:
    """Decoding of a model with recurrent layers."""
    about = MappingProxyType({"canary": "off", **options})
    return Workload(model=model, batches=(1, 16, 64, 256), prompt=(512, 512), new=(128, 128), options=about)


def quantized(model: str, about: Mapping[str, Any] | None = None, **options: Any) -> Workload:
    """Decoding of a quantized model. about: config.json's `quantization_config`; options: those that quantize."""
    return Workload(
        model=model,
        batches=(1, 16, 64),
        prompt=(700, 700),
        new=(100, 100),
        config=MappingProxyType({} if about is None else {"quantization_config": about}),
        options=MappingProxyType({"canary": "off", **options} if options else {}),
    )


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "burst-0.6b": Workload(model="qwen3-0.6b", count=256, prompt=(100, 1024), new=(100, 1024)),
        "burst-3b": Workload(model="llama-3.2-3b", count=256, prompt=(100, 1024), new=(100, 512)),
        "prefix-3b": Workload(model="llama-3.2-3b", count=256, prompt=(16, 128), new=(64, 128), shared=1024),
        "burst-gpt2": Workload(model="gpt2", count=512, prompt=(16, 128), new=(128, 256), context=1024),
        "prefill-8b": Workload(model="llama-3.1-8b", count=64, prompt=(2048, 2048), new=(1, 1)),
        "latency-1b": Workload(model="llama-3.2-1b", batches=(1, 8), prompt=(128, 128), new=(256, 256)),
        "tpot-8b": Workload(model="llama-3.1-8b", batches=(1, 8, 16, 64, 256), prompt=(512, 512), new=(128, 128)),
        "tpot-30b-a3b": Workload(model="qwen3-30b-a3b", batches=(1, 16, 64, 256), prompt=(700, 700), new=(100, 100)),
        "tpot-70b": Workload(model="llama-3.1-70b", batches=(1, 16, 64), prompt=(700, 700), new=(100, 100)),
        "long-8b": Workload(model="llama-3.1-8b", batches=(1, 4), prompt=(32000, 32000), new=(64, 64), context=33000),
        "longest-8b": Workload(
            model="llama-3.1-8b", batches=(1,), prompt=(128000, 128000), new=(33, 33), context=131072
        ),
        "longest-fp8-kv-8b": Workload(
            model="llama-3.1-8b",
            batches=(1,),
            prompt=(128000, 128000),
            new=(33, 33),
            context=131072,
            options=MappingProxyType({"kv_cache_dtype": "fp8", "canary": "warn"}),
        ),
        "tpot-30b-a3b-fp8": quantized("qwen3-30b-a3b", quantization="fp8"),
        "tpot-30b-a3b-int4": quantized("qwen3-30b-a3b", AWQ),
        "tpot-int4-8b": quantized("llama-3.1-8b", AWQ),
        "tpot-gptq-8b": quantized("llama-3.1-8b", GPTQ),
        "tpot-q4_k-8b": quantized("llama-3.1-8b", quantization="q4_k"),
        "tpot-q8_0-8b": quantized("llama-3.1-8b", quantization="q8_0"),
        "tpot-fp8-8b": Workload(
            model="qwen3-8b",
            batches=(1, 64),
            prompt=(512, 512),
            new=(128, 128),
            options=MappingProxyType({"quantization": "fp8", "canary": "off"}),
        ),
        "gpt2-fp32": Workload(
            model="gpt2",
            batches=(1, 8, 64, 256, 512),
            prompt=(64, 64),
            new=(128, 128),
            context=1024,
            options=MappingProxyType({"dtype": "float32", "max_num_seqs": 512}),
        ),
        "tpot-qwen3-next": hybrid("qwen3-next-80b-a3b", quantization="fp8"),
        "tpot-qwen3.5-moe": hybrid("qwen3.5-35b-a3b", quantization="fp8"),
        "tpot-granite-4-h": hybrid("granite-4.0-h-small", quantization="fp8"),
        "tpot-granite-4-h-tiny": hybrid("granite-4.0-h-tiny"),
        "tpot-nemotron-h": hybrid("nemotron-h-8b"),
        "tpot-gemma3-1b": Workload(model="gemma3-1b", batches=(1, 64), prompt=(512, 512), new=(128, 128)),
    }
)


def prompts(
    count: int,
    prompt: tuple[int, int],
    new: tuple[int, int],
    *,
    shared: int = 0,
    seed: int = 0,
    ids: tuple[int, int] = (1000, 50000),
) -> tuple[list[list[int]], list[int]]:
    """Prompts of random tokens, and how many new ones each is to get. ids: the first one, and the one past the last."""
    rng = random.Random(seed)
    head = [rng.randrange(*ids) for _ in range(shared)]
    made = [head + [rng.randrange(*ids) for _ in range(rng.randint(*prompt))] for _ in range(count)]
    return made, [rng.randint(*new) for _ in range(count)]


BANDWIDTH = 4.3e12
"""Bytes a second that an H200 reads, measured as a copy."""

MATRIX = 790e12
"""bf16 operations a second, measured on a matrix product."""


def floor(
    spec: ModelSpec,
    parameters: int,
    lengths: Sequence[tuple[int, int]],
    *,
    seats: int,
    shared: int = 0,
    prompts: bool = True,
    itemsize: int = 2,
    stored: float = 2,
) -> float:
    """Seconds that no engine can go below: for prompts, operations; for new tokens, weights once a step, of experts
    those that random routing uses, K/V of all that came before once a token, and states, which are written, too.

    parameters: of the checkpoint, a tied head counted once. lengths: (prompt, new) of each request. seats: sequences
    at once. shared: prompt tokens computed once for all. prompts: count the time of prompts. itemsize: bytes of a
    number, stored: of one in the body's matrices.
    """
    embedding = 0 if spec.tie else spec.vocab * spec.hidden
    body = parameters - spec.vocab * spec.hidden - embedding
    fed = sum(prompt - shared for prompt, _ in lengths) + shared
    pairs = sum(prompt**2 - shared**2 for prompt, _ in lengths) / 2
    unused = 0.0
    if spec.experts is not None:
        idle = 1 - spec.experts.num_experts_per_token / spec.experts.num_experts
        unused = idle_parameters(spec) * idle ** (min(seats, len(lengths)) - 1)
    work = 2 * (body - idle_parameters(spec)) * fed + 4 * spec.layers * spec.heads * spec.head_dim * pairs
    steps = max(*(new - 1 for _, new in lengths), sum(new - 1 for _, new in lengths) / seats)
    read = sum((new - 1) * (prompt + new / 2) for prompt, new in lengths) * spec.kv_bytes(itemsize)
    states = 2 * sum(each.nbytes(itemsize) for each in spec.state_shapes if each)
    read += states * sum(new - 1 for _, new in lengths)
    weights = (body - unused) * stored + spec.vocab * spec.hidden * itemsize
    return prompts * work / MATRIX + (steps * weights + read) / BANDWIDTH
