"""`quire serve`."""

from __future__ import annotations

import ipaddress

import click

from quire.build.front import serve
from quire.build.relay import relay
from quire.cli.options import SettingsCommand
from quire.config import Settings


@click.command("serve", cls=SettingsCommand, positional=True, rest="vllm_args")
def command(settings: Settings) -> None:
    """Serve MODEL over HTTP, in OpenAI's API, until SIGTERM or Ctrl-C."""
    if not settings.server.api_key and not _loopback(settings.server.host):
        click.echo(f"warning: anyone who reaches {settings.server.host} can use this server: set --api-key", err=True)
    (serve if settings.upstream.backend == "native" else relay)(settings)


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
