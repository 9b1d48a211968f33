"""`quire executor`."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import click

from quire.assembly import extra
from quire.cli.base import SettingsCommand
from quire.config import Settings
from quire.errors import InvalidConfig
from quire.server.hosts import loopback
from quire.weights.locate import locate


@click.command(
    "executor",
    cls=SettingsCommand,
    positional=True,
    sections=("model", "cache", "execution", "executor"),
    also=("max_num_seqs", "max_num_batched_tokens", "lookahead", "speculative_config"),
    params=[
        click.Option(["--listen"], default="127.0.0.1:50051", metavar="HOST:PORT", help="Where [127.0.0.1:50051]."),
        click.Option(["--tls-cert"], metavar="FILE", help="This executor's certificate (PEM), for TLS."),
        click.Option(["--tls-key"], metavar="FILE", help="Its key (PEM)."),
        click.Option(
            ["--tls-client-ca"], metavar="FILE", help="Who signs engines' certificates (PEM): they must bring one."
        ),
    ],
)
def command(
    settings: Settings, listen: str, tls_cert: str | None, tls_key: str | None, tls_client_ca: str | None
) -> None:
    """Run MODEL's steps for an engine elsewhere: `quire serve --executor grpc --executor-address HOST:PORT`."""
    name, colon, port = listen.rpartition(":")
    if not colon or not name or not port.isdecimal() or int(port) > 65535:
        raise InvalidConfig(f"--listen must look like 127.0.0.1:50051, not {listen}", param="listen")
    if (tls_cert is None) != (tls_key is None) or (tls_client_ca is not None and tls_cert is None):
        raise InvalidConfig("TLS needs both --tls-cert and --tls-key", param="tls_cert")
    if tls_client_ca is None and not loopback(name):
        click.echo(
            f"warning: anyone who can connect to {name} can use this executor: set --tls-cert, "
            "--tls-key and --tls-client-ca",
            err=True,
        )
    build = extra("quire.assembly.grpc", "grpc")
    credentials = None
    if tls_cert is not None and tls_key is not None:
        clients = None if tls_client_ca is None else build.read(tls_client_ca, "tls_client_ca")
        credentials = build.Credentials(build.read(tls_cert, "tls_cert"), build.read(tls_key, "tls_key"), clients)
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    host = build.host(settings, listen, credentials)
    about = host.executor.describe()
    click.echo(
        f"{settings.model.model} is ready at {name}:{host.port}: {about.num_rows} rows, {about.num_blocks} pages of "
        f"{about.block_size} tokens, {about.dtype} on {about.device}"
    )
    over.wait()
    host.stop()
    host.executor.close()


@click.command("export-onnx")
@click.argument("model")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--int8", is_flag=True, help="Matrices in int8, by dynamic quantisation: smaller, faster, less exact.")
def export_onnx(model: str, folder: Path, int8: bool) -> None:
    """Write MODEL into FOLDER as graphs: `quire serve FOLDER --executor onnx` runs them."""
    export = extra("quire.weights.onnx_export", "onnx").export
    export(locate(model), folder, int8=int8)
    click.echo(f"{folder} is written: quire serve {folder} --executor onnx")
