"""`quire export-onnx`."""

from __future__ import annotations

from pathlib import Path

import click

from quire.assembly.extras import extra
from quire.weights.locate import locate


@click.command("export-onnx")
@click.argument("model")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--int8", is_flag=True, help="Matrices in int8, by dynamic quantisation: smaller, faster, less exact.")
def command(model: str, folder: Path, int8: bool) -> None:
    """Write MODEL into FOLDER as graphs: `quire serve FOLDER --executor onnx` runs them."""
    export = extra("quire.weights.onnx_export", "onnx").export
    export(locate(model), folder, int8=int8)
    click.echo(f"{folder} is written: quire serve {folder} --executor onnx")
