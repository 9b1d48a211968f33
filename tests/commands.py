"""The commands of `quire`, as they are called."""

from __future__ import annotations

from collections.abc import Iterator

import click


def commands(group: click.Group, before: str = "quire") -> Iterator[tuple[str, click.Command]]:
    """Each command by the words that call it; groups are not commands."""
    with click.Context(group) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if isinstance(command, click.Group):
                yield from commands(command, f"{before} {name}")
            elif command is not None:
                yield f"{before} {name}", command
