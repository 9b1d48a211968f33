"""What `quire bench latency`, `throughput` and `startup` share: options, prompts, percentiles and results' files.

Names of options and of JSON fields are those of `vllm bench`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from quire.cli.base import OFFLINE, SettingsCommand
from quire.errors import InvalidRequest
from quire.types import SamplingParams

if TYPE_CHECKING:
    from quire.llm import LLM

PERCENTAGES = (10, 25, 50, 75, 90, 99)
FILE = click.Path(dir_okay=False, path_type=Path)


def offline_command(name: str, params: Sequence[click.Parameter]) -> Callable[[Callable[..., Any]], click.Command]:
    """A decorator for a benchmark that builds its own engine: takes the options of `LLM`, `params`, and output options.

    The function is called with `settings`, `output_json` and `as_json`, and the values of `params`.
    """
    output = [
        click.Option(
            ["--output-json"], type=FILE, callback=writable, metavar="FILE", help="Save the results there, as JSON."
        ),
        click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object."),
    ]
    return click.command(name, cls=SettingsCommand, sections=OFFLINE, positional=True, params=[*params, *output])


def writable(context: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Callback of an option for a file to write. Raises BadParameter if it cannot be written; creates no file."""
    if path is None:
        return None
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}", param_hint=param.opts[0]) from error
    if not existed:
        path.unlink()
    return path


def report(result: Mapping[str, Any], text: str, output_json: Path | None, as_json: bool) -> None:
    """Print `result` as JSON or as `text`, and save it."""
    if output_json is not None:
        output_json.write_text(json.dumps(result, indent=4) + "\n", encoding="utf-8")
    click.echo(json.dumps(result) if as_json else text)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """PERCENTAGES of `values`, interpolated linearly, by the percentage as text."""
    return {str(q): float(np.percentile(values, q)) for q in PERCENTAGES}


def check_lengths(prompt_len: int, output_len: int, limit: int) -> None:
    """Raise InvalidRequest naming --input-len where a prompt and its answer are longer than `limit`."""
    if prompt_len + output_len > limit:
        raise InvalidRequest(
            f"--input-len and --output-len come to {prompt_len + output_len} tokens, but max_model_len is {limit}:"
            " lower one of them",
            param="input_len",
        )


def time_generate(
    llm: LLM, prompts: Sequence[Sequence[int]], output_lens: Sequence[int], n: int, detokenize: bool
) -> float:
    """Seconds until all prompts have `n` answers of exactly `output_lens` tokens, sampled at temperature 1.

    Raises InvalidRequest where an answer ended early.
    """
    params = [
        SamplingParams(n=n, temperature=1.0, ignore_eos=True, max_tokens=length, detokenize=detokenize)
        for length in output_lens
    ]
    began = time.perf_counter()
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    seconds = time.perf_counter() - began
    for output, length in zip(outputs, output_lens, strict=True):
        for answer in output.outputs:
            if len(answer.token_ids) != length:
                reason = f"{answer.finish_reason}, {answer.stop_reason}"
                raise InvalidRequest(f"an answer has {len(answer.token_ids)} of {length} tokens: {reason}")
    return seconds
