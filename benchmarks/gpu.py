"""`python -m benchmarks.gpu`: workloads of real size on a GPU, random weights, beside a recorded peer."""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.card import needed, prepare_all
from benchmarks.shapes import SHAPES, write
from benchmarks.workloads import WORKLOADS, Workload, floor, prompts
from quire import heap
from quire.bench.monitor import GPUMonitor, environment
from quire.errors import InvalidModel
from quire.llm import LLM
from quire.models.registry import parameters, read_spec
from quire.types import SamplingParams

Row = dict[str, Any]


@click.command("gpu")
@click.argument("names", nargs=-1, type=click.Choice(list(WORKLOADS)))
@click.option("--repeat", default=3, show_default=True, help="Runs of each; bursts show the best, others the median.")
@click.option("--eager", is_flag=True, help="Without CUDA graphs.")
@click.option("--deterministic", is_flag=True, help="Answers that do not depend on the batch.")
@click.option("--tensor-parallel-size", default=1, show_default=True, help="GPUs that the model is divided among.")
@click.option("--max-num-batched-tokens", default=0, help="Tokens a step; 0: the default.")
@click.option("--latency-target-ms", default=0.0, show_default=True, help="Bound on what prompts may cost others.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Also store figures and traces there.")
def command(
    names: tuple[str, ...],
    repeat: int,
    eager: bool,
    deterministic: bool,
    tensor_parallel_size: int,
    max_num_batched_tokens: int,
    latency_target_ms: float,
    path: Path | None,
) -> None:
    """Run workloads offline, through `LLM`, and print their speed."""
    needed("for a CPU there is `quire bench cpu`")
    found: list[Row] = []
    options = {
        "enforce_eager": eager,
        "deterministic": deterministic,
        "latency_target_ms": latency_target_ms,
        "tensor_parallel_size": tensor_parallel_size,
    } | ({"max_num_batched_tokens": max_num_batched_tokens} if max_num_batched_tokens else {})
    with tempfile.TemporaryDirectory() as folder:
        for model, group in grouped(names or tuple(WORKLOADS)):
            for row in measured(Path(folder), model, group, repeat, options):
                found.append(row)
                click.echo(json.dumps({k: v for k, v in row.items() if k != "trace"}))
                if path is not None:
                    path.write_text(json.dumps({"environment": environment(), "options": options, "rows": found}))
    show(found)


def grouped(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Workloads by model and its options, so that each is loaded once."""
    while names:
        first = WORKLOADS[names[0]]
        same = [n for n in names if started_with(WORKLOADS[n]) == started_with(first)]
        yield first.model, same
        names = [name for name in names if name not in same]


def started_with(work: Workload) -> tuple[object, ...]:
    """What an engine is started with."""
    return work.model, work.options, work.config


def measured(folder: Path, model: str, names: Sequence[str], repeat: int, options: Mapping[str, Any]) -> Iterator[Row]:
    gc.unfreeze()
    gc.collect()  # the model before
    torch.cuda.empty_cache()
    began = time.perf_counter()
    config = WORKLOADS[names[0]].config
    place = write(folder, model, config=config)
    try:
        spec = read_spec({**SHAPES[model], **config})
    except InvalidModel as error:
        yield {"workload": names[0], "batch": "", "error": str(error)}
        return
    context = WORKLOADS[names[0]].context
    options = {"max_num_seqs": 256, **options, **WORKLOADS[names[0]].options}
    stored = stored_bytes(options, config)
    written = time.perf_counter()
    with LLM(str(place), load_format="dummy", max_model_len=context, **options) as llm:
        ready = time.perf_counter() - written
        yield {"workload": f"start {model}", "batch": "", "seconds": ready, "shape_written_s": written - began}
        answer(llm, *prompts(8, (32, 64), (8, 8), seed=99))
        prepare_all(llm)
        heap.settled()  # as in a server: see docs/guides/offline-inference.md
        count = parameters(spec)
        for name in names:
            for batch, row in timed(llm, WORKLOADS[name], repeat):
                lengths = row.pop("lengths")
                least = floor(
                    *(spec, count, lengths),
                    seats=options["max_num_seqs"],
                    shared=WORKLOADS[name].shared,
                    prompts="ms_a_token" not in row,
                    itemsize=max(2, int(stored)),
                    stored=stored,
                )
                ranks = options["tensor_parallel_size"]
                label = name if ranks == 1 else f"{name} on {ranks}"
                yield judged({"workload": label, "batch": batch, **row}, lengths, least / ranks)


def stored_bytes(options: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Of a number of the body's matrices; of GGUF's types with scales."""
    if "quantization_config" in config:
        return float(config["quantization_config"]["bits"]) / 8
    whole = 4.0 if options.get("dtype") == "float32" else 2.0
    return {"fp8": 1.0, "q8_0": 34 / 32, "q4_k": 144 / 256}.get(options.get("quantization", ""), whole)


def timed(llm: LLM, work: Workload, repeat: int) -> Iterator[tuple[str, Row]]:
    if not work.batches:
        runs = [burst(llm, work, seed) for seed in range(repeat)]
        seconds, fed, new = min(runs)
        with GPUMonitor() as watch:  # polling slows the card down: a run of its own
            burst(llm, work, repeat)
        lengths = list(zip(fed, new, strict=True))
        yield "", {"seconds": seconds, "runs": [r[0] for r in runs], "lengths": lengths, "trace": watch.samples}
        return
    for batch in work.batches:
        runs_of = [decode(llm, work, batch, turn) for turn in range(repeat)]
        with GPUMonitor() as watch:
            decode(llm, work, batch, repeat)
        yield (
            str(batch),
            {
                "ms_a_token": 1e3 * statistics.median(token for token, _ in runs_of),
                "first_ms": 1e3 * statistics.median(first for _, first in runs_of),
                "runs": [token for token, _ in runs_of],
                "lengths": [(work.prompt[0], work.new[0])] * batch,
                "trace": watch.samples,
            },
        )


def burst(llm: LLM, work: Workload, seed: int) -> tuple[float, list[int], list[int]]:
    """(seconds, prompt lengths, new tokens) of all requests at once."""
    ids, new = prompts(work.count, work.prompt, work.new, shared=work.shared, seed=seed)
    return answer(llm, ids, new), [len(i) for i in ids], new


def decode(llm: LLM, work: Workload, batch: int, turn: int) -> tuple[float, float]:
    """(seconds a token after the first, seconds to the first) of `batch` sequences together."""
    ids, _ = prompts(batch, work.prompt, (1, 1), seed=100 + turn + batch)
    first = answer(llm, ids, [1] * batch)
    ids, new = prompts(batch, work.prompt, work.new, seed=200 + turn + batch)
    return (answer(llm, ids, new) - first) / (new[0] - 1), first


def answer(llm: LLM, ids: list[list[int]], new: Sequence[int]) -> float:
    """Seconds for all of them."""
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in new]
    began = time.perf_counter()
    done = llm.generate(ids, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    made = sum(len(each.outputs[0].token_ids) for each in done)
    if made != sum(new):
        raise click.ClickException(f"{made} tokens came of {sum(new)} asked for")
    return seconds


def judged(row: Row, lengths: Sequence[tuple[int, int]], least: float) -> Row:
    """With the peer's figure, the target and the ceiling: tokens a second for bursts, else milliseconds a token."""
    recorded = peer()
    name, batch = row["workload"], row["batch"]
    if "ms_a_token" in row:
        row["ours"], row["ceiling"] = row["ms_a_token"], 1e3 * least / (lengths[0][1] - 1)
    else:
        count = sum(new if max(n for _, n in lengths) > 1 else prompt for prompt, new in lengths)
        row["ours"], row["ceiling"] = count / row["seconds"], count / least
    for what in ("offline", "target"):
        row["peer" if what == "offline" else what] = recorded[what].get(name, {}).get(batch)
    return row


def peer() -> dict[str, Any]:
    """What the peer was measured at on the same card."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("data").joinpath("peer-h200.json").read_text())
    return found


def show(found: Sequence[Row]) -> None:
    table = Table(title="offline, random weights", title_justify="left")
    for column in ("workload", "batch", "ours", "peer", "ratio", "target", "ceiling"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    for row in found:
        if "ours" not in row:
            table.add_row(row["workload"], "", row.get("error") or f"{row['seconds']:.1f} s")
            continue
        ours, theirs = row["ours"], row["peer"]
        faster = "" if not theirs else f"{theirs / ours if 'ms_a_token' in row else ours / theirs:.2f}"
        figures = (f"{x:,.3f}" if "ms_a_token" in row else f"{x:,.0f}" for x in (row["target"] or 0, row["ceiling"]))
        table.add_row(row["workload"], row["batch"], f"{ours:,.3f}", f"{theirs or ''}", faster, *figures)
    Console().print(table)


if __name__ == "__main__":
    command()
