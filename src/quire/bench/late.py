"""Commands that measure this machine, without what they do: their modules import torch, which help does without."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import click

from quire.bench.offline import FILE, writable
from quire.bench.shapes import CLOCKS, DTYPES, SHAPES
from quire.cli.base import OFFLINE, SettingsCommand
from quire.cli.ranges import FiniteRange

_COUNT = click.IntRange(1, 1 << 20)


@click.command(
    "calibrate",
    cls=SettingsCommand,
    sections=OFFLINE,
    positional=True,
    params=[
        click.Option(
            ["--output"], type=FILE, required=True, callback=writable, metavar="FILE", help="Where the result goes."
        ),
        click.Option(
            ["--seconds"],
            type=FiniteRange(1),
            default=45.0,
            show_default=True,
            help="To measure, besides loading.",
        ),
        click.Option(
            ["--recording"],
            type=click.Path(path_type=Path),
            help="Fit the steps of a recording (file or folder), made under your own load, in place of measuring.",
        ),
        click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object."),
    ],
)
def calibrate(**given: Any) -> None:
    """Measure what steps of MODEL take here: by tokens fed, K/V read, rows and prompts; and write it to a file.

    A recording of a server (`--recording-dir`) says more than a measurement: its steps took what they take under that
    load, with the server's other work beside them.
    """
    import_module("quire.bench.calibrate").run(**given)


@click.command("cpu")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="smollm2-135m", show_default=True)
@click.option(
    "--format",
    "kind",
    type=click.Choice([*DTYPES, "q8_0", "q4_k_m"]),
    default="bf16",
    show_default=True,
    help="Weights: a checkpoint's, or a GGUF file's.",
)
@click.option("--vs", default="transformers", show_default=True, help="Peers: llama-cpp, openvino, transformers.")
@click.option("--peer-python", "named", multiple=True, metavar="PEER=PATH", help="The Python of a peer's environment.")
@click.option("--batch", "batches", multiple=True, type=_COUNT, default=(1, 8), show_default=True)
@click.option("--prompt", type=_COUNT, default=128, show_default=True, help="Prompt tokens a sequence.")
@click.option("--new", type=_COUNT, default=64, show_default=True, help="New tokens a sequence.")
@click.option(
    "--long-prompt",
    type=click.IntRange(0, 1 << 20),
    default=512,
    show_default=True,
    help="Tokens of one prompt more, alone; 0: none.",
)
@click.option("--repeat", type=_COUNT, default=5, show_default=True, help="Interleaved rounds; medians are shown.")
@click.option("--threads", type=click.IntRange(0, 4096), default=0, help="CPU threads; 0: as many as there are cores.")
@click.option(
    "--clock",
    type=click.Choice(list(CLOCKS)),
    default="wall",
    show_default=True,
    help="cpu: the processor's time, with --threads 1 on a machine that is busy with something else.",
)
@click.option("--cpu-kernels", default="auto", show_default=True, help="As of `quire serve`.")
@click.option("--quantization", default="auto", show_default=True, help="Of Quire's weights, as of `quire serve`.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def cpu(**given: Any) -> None:
    """Measure prompts and decoding side by side with other engines."""
    import_module("quire.bench.cpu").run(**given)
