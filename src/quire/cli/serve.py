"""`quire serve`."""

from __future__ import annotations

import os
from importlib import import_module

import click

from quire.assembly import extra
from quire.assembly.early_engine import early_engine
from quire.cli.base import SettingsCommand
from quire.config import OPTIONS, Settings
from quire.config.unknown import unread
from quire.replicas.environment import prepare
from quire.server.hosts import loopback


@click.command("serve", cls=SettingsCommand, positional=True, rest="vllm_args")
def command(settings: Settings) -> None:
    """Serve MODEL over HTTP, in OpenAI's API, until SIGTERM or Ctrl-C."""
    for line in warnings(settings):
        click.secho(f"WARNING: {line}", err=True, fg="red", bold=True)
    for line in unread(os.environ, OPTIONS, reach_vllm=settings.upstream.backend == "vllm"):
        click.echo(line, err=True)
    if settings.replicas.several:
        prepare(os.environ)
        extra("quire.replicas.local", "ray").serve(settings)
    else:
        (serve if settings.upstream.backend == "native" else relay)(settings)


def serve(settings: Settings) -> None:
    """Start the engine's process, and import the server while that imports torch."""
    with early_engine(settings) as (found, begun):
        import_module("quire.assembly.server").serve(found, begun=begun)


def relay(settings: Settings) -> None:
    """Serve other servers."""
    import_module("quire.assembly.proxy").relay(settings)


def warnings(settings: Settings) -> list[str]:
    """What others could do to a server on a network."""
    host, access = settings.server.host, settings.access
    if loopback(host) or settings.server.uds is not None:
        return []
    exposed = []
    if not settings.server.api_key:
        pages = "" if access.allowed_hosts else " (without a key, --allowed-hosts keeps out web pages)"
        exposed.append(f"anyone who can connect to {host} can use this server: set --api-key{pages}")
    if not (settings.server.api_key or access.admin_key):
        exposed.append(f"anyone who can connect to {host} can see the traffic metrics: set --admin-key")
    if access.ssl_keyfile is None:
        exposed.append(
            f"connections to {host} are not encrypted, API keys included: set --ssl-keyfile and --ssl-certfile"
        )
    return exposed
