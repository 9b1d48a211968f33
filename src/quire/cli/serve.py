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
    for line in warnings(settings):
        click.secho(f"WARNING: {line}", err=True, fg="red", bold=True)
    (serve if settings.upstream.backend == "native" else relay)(settings)


def warnings(settings: Settings) -> list[str]:
    """What others could do to a server on a network."""
    host, access = settings.server.host, settings.access
    if _loopback(host):
        return []
    said = []
    if not settings.server.api_key:
        said.append(f"anyone who reaches {host} can use this server: set --api-key")
    if not (settings.server.api_key or access.admin_key):
        said.append(f"anyone who reaches {host} can see who asks for what: set --admin-key")
    if access.ssl_keyfile is None:
        said.append(f"what is said to {host}, keys too, can be read on its way: set --ssl-keyfile and --ssl-certfile")
    return said


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
