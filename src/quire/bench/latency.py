"""`quire bench latency`: the time of one batch of requests, as `vllm bench latency`."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import click

import quire
from quire.assembly.tokenizer import require_text
from quire.bench.offline import check_lengths, offline_command, percentiles, report, time_generate
from quire.cli.base import integer
from quire.config import Settings


@offline_command(
    "latency",
    [
        integer("--input-len", 32, "Prompt tokens."),
        integer("--output-len", 128, "New tokens."),
        integer("--batch-size", 8, "Prompts at once."),
        integer("--n", 1, "Answers to each prompt."),
        integer("--num-iters-warmup", 10, "Batches before, not counted.", low=0),
        integer("--num-iters", 30, "Batches measured."),
        click.Option(["--disable-detokenize"], is_flag=True, help="Leave out the time of turning tokens into text."),
    ],
)
def command(settings: Settings, output_json: Path | None, as_json: bool, **given: Any) -> None:
    """Measure the time of one batch: all prompts are submitted at once, and answers have exactly --output-len tokens.

    Prompts are random, and new in each iteration, so that none is found in the prefix cache.
    """
    require_text(settings, "quire bench latency")
    with quire.LLM(settings=settings) as llm:
        result = {"model": settings.model.model, **given, **measure(llm, settings.model.fixed_seed, **given)}
    lines = [f"Avg latency: {result['avg_latency']:.4f} seconds"]
    lines += [f"{q}% percentile latency: {seconds:.4f} seconds" for q, seconds in result["percentiles"].items()]
    report(result, "\n".join(lines), output_json, as_json)


def measure(
    llm: quire.LLM,
    seed: int,
    *,
    input_len: int,
    output_len: int,
    batch_size: int,
    n: int,
    num_iters_warmup: int,
    num_iters: int,
    disable_detokenize: bool,
) -> dict[str, Any]:
    """avg_latency, latencies (seconds of each iteration) and their percentiles. Raises InvalidRequest."""
    about = llm._engine.description
    check_lengths(input_len, output_len, about.max_model_len)
    rng = random.Random(seed)
    latencies = []
    for _ in range(num_iters_warmup + num_iters):
        prompts = [[rng.randrange(about.vocab_size) for _ in range(input_len)] for _ in range(batch_size)]
        latencies.append(time_generate(llm, prompts, [output_len] * batch_size, n, not disable_detokenize))
    del latencies[:num_iters_warmup]
    return {
        "avg_latency": statistics.fmean(latencies),
        "latencies": latencies,
        "percentiles": percentiles(latencies),
    }
