"""`quire bench throughput`: requests and tokens a second of many prompts at once, as `vllm bench throughput`."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

import quire
from quire.assembly.tokenizer import require_text
from quire.bench.offline import FILE, check_lengths, offline_command, report, time_generate
from quire.cli.base import integer
from quire.cli.ranges import FiniteRange
from quire.config import Settings
from quire.errors import InvalidRequest
from quire.tokenization.tokenizer import Tokenizer

MIN_TOKENS = 4
MAX_PROMPT = 1024
MAX_TOTAL = 2048
"""Conversations of ShareGPT outside of these token counts are left out, as vLLM does."""

DEFAULT_LEN = 128
"""Tokens of random prompts and of answers whose length nothing else says."""


class SampleRequest(NamedTuple):
    """A prompt, and how many tokens each of its answers gets."""

    prompt: Sequence[int]
    output_len: int


@offline_command(
    "throughput",
    [
        click.Option(
            ["--dataset-name"],
            type=click.Choice(["random", "sharegpt", "custom"]),
            help="random: of random tokens; sharegpt: JSON of conversations; custom: JSON lines with `prompt` and, if "
            "wished, `output_tokens`. [sharegpt with --dataset-path, random without]",
        ),
        click.Option(["--dataset-path"], type=FILE, help="The dataset's file."),
        integer("--num-prompts", 1000, "At most."),
        integer("--input-len", None, "Tokens of random prompts. [128]"),
        integer("--output-len", None, "New tokens. [the dataset's, or 128]"),
        click.Option(
            ["--random-range-ratio"],
            type=FiniteRange(0, 1, max_open=True),
            default=0.0,
            show_default=True,
            help="Random lengths are uniform from LEN * (1 - RATIO) to LEN * (1 + RATIO).",
        ),
        integer("--prefix-len", 0, "Tokens that all random prompts begin with, besides.", low=0),
        integer("--n", 1, "Answers to each prompt."),
        integer("--num-warmups", 8, "Requests before, not counted.", low=0),
        click.Option(["--disable-detokenize"], is_flag=True, help="Leave out the time of turning tokens into text."),
    ],
)
def command(
    settings: Settings,
    output_json: Path | None,
    as_json: bool,
    n: int,
    num_warmups: int,
    disable_detokenize: bool,
    **given: Any,
) -> None:
    """Measure offline throughput: all requests are submitted at once, and the time is until the last has ended."""
    name, path = given["dataset_name"], given["dataset_path"]
    given["dataset_name"] = name = name or ("random" if path is None else "sharegpt")
    if (name == "random") != (path is None):
        wrong = "takes no --dataset-path" if path is not None else "needs --dataset-path FILE"
        raise click.BadParameter(f"{name} {wrong}", param_hint="--dataset-name")
    detokenize = not disable_detokenize
    require_text(settings, "quire bench throughput")
    with quire.LLM(settings=settings) as llm:
        requests = sample_requests(llm, settings.model.fixed_seed, **given)
        if num_warmups:
            # Reversed, so that the prefix cache holds nothing of what is measured.
            prompts = [request.prompt[::-1] for request in requests[:num_warmups]]
            time_generate(llm, prompts, [min(16, one.output_len) for one in requests[:num_warmups]], 1, detokenize)
        prompts = [request.prompt for request in requests]
        seconds = time_generate(llm, prompts, [one.output_len for one in requests], n, detokenize)
    result = {"model": settings.model.model, "dataset_name": name, **throughput(requests, n, seconds)}
    text = (
        f"Throughput: {result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:.2f} total tokens/s,"
        f" {result['output_tokens_per_second']:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {result['total_prompt_tokens']}\n"
        f"Total num output tokens:  {result['total_output_tokens']}"
    )
    report(result, text, output_json, as_json)


def throughput(requests: Sequence[SampleRequest], n: int, seconds: float) -> dict[str, Any]:
    """Rates of `requests` with `n` answers each in `seconds`. tokens_per_second counts prompts and answers."""
    num_prompt = sum(len(request.prompt) for request in requests)
    num_output = n * sum(request.output_len for request in requests)
    return {
        "elapsed_time": seconds,
        "num_requests": len(requests),
        "total_num_tokens": num_prompt + num_output,
        "total_prompt_tokens": num_prompt,
        "total_output_tokens": num_output,
        "requests_per_second": len(requests) / seconds,
        "tokens_per_second": (num_prompt + num_output) / seconds,
        "output_tokens_per_second": num_output / seconds,
    }


def sample_requests(
    llm: quire.LLM,
    seed: int,
    *,
    dataset_name: str,
    dataset_path: Path | None,
    num_prompts: int,
    input_len: int | None,
    output_len: int | None,
    random_range_ratio: float,
    prefix_len: int,
) -> list[SampleRequest]:
    """At most `num_prompts` requests, the same for the same arguments. Raises InvalidRequest where there are none."""
    about = llm._engine.description
    rng = random.Random(seed)
    if dataset_path is None:

        def length(mean: int) -> int:
            return rng.randint(max(1, int(mean * (1 - random_range_ratio))), int(mean * (1 + random_range_ratio)))

        prefix = [rng.randrange(about.vocab_size) for _ in range(prefix_len)]
        requests = []
        for _ in range(num_prompts):
            prompt = [rng.randrange(about.vocab_size) for _ in range(length(input_len or DEFAULT_LEN))]
            requests.append(SampleRequest([*prefix, *prompt], length(output_len or DEFAULT_LEN)))
    elif dataset_name == "sharegpt":
        requests = read_sharegpt(dataset_path, llm.get_tokenizer(), num_prompts, output_len, rng, about.max_model_len)
    else:
        requests = read_custom(dataset_path, llm.get_tokenizer(), num_prompts, output_len)
    for request in requests:
        check_lengths(len(request.prompt), request.output_len, about.max_model_len)
    return requests


def read_sharegpt(
    path: Path, tokenizer: Tokenizer, count: int, output_len: int | None, rng: random.Random, limit: int
) -> list[SampleRequest]:
    """The first two turns of conversations in random order: a prompt, and an answer whose length counts.

    Conversations that are too short, too long, or above `limit` tokens are left out. Raises InvalidRequest where the
    file is not ShareGPT's JSON, or nothing is left.
    """
    try:
        turns = [entry["conversations"] for entry in json.loads(path.read_text("utf-8"))]
        pairs = [(str(talk[0]["value"]), str(talk[1]["value"])) for talk in turns if len(talk) >= 2]
    except (ValueError, LookupError, TypeError) as error:
        shape = '[{"conversations": [{"value": TEXT}, {"value": TEXT}]}]'
        raise InvalidRequest(f"{path} is not ShareGPT's JSON, {shape}: {error}", param="dataset_path") from error
    rng.shuffle(pairs)
    requests = []
    for prompt, answer in pairs:
        ids = tokenizer.encode(prompt)
        length = output_len or len(tokenizer.encode(answer))
        too_short = len(ids) < MIN_TOKENS or (output_len is None and length < MIN_TOKENS)
        too_long = len(ids) > MAX_PROMPT or len(ids) + length > min(MAX_TOTAL, limit)
        if not too_short and not too_long:
            requests.append(SampleRequest(ids, length))
        if len(requests) == count:
            break
    if not requests:
        raise InvalidRequest(f"{path} has no conversation that fits into {limit} tokens", param="dataset_path")
    return requests


def read_custom(path: Path, tokenizer: Tokenizer, count: int, output_len: int | None) -> list[SampleRequest]:
    """The first lines of `{"prompt": TEXT, "output_tokens": NUMBER}`. Raises InvalidRequest naming a line."""
    requests: list[SampleRequest] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if len(requests) == count:
                break
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                length = output_len or int(entry.get("output_tokens", DEFAULT_LEN))
                requests.append(SampleRequest(tokenizer.encode(str(entry["prompt"])), length))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise InvalidRequest(
                    f'{path}, line {number}: not {{"prompt": TEXT, "output_tokens": NUMBER}} ({error})',
                    param="dataset_path",
                ) from error
    if not requests:
        raise InvalidRequest(f"{path} has no prompts", param="dataset_path")
    return requests
