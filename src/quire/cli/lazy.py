"""Click groups whose members are named, not imported, and the one place where errors become an exit code."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import click

from quire.config import Settings
from quire.errors import InvalidConfig, InvalidModel, InvalidRequest, QuireError, nearest

Member = tuple[str, str] | click.Command
"""A command, or (module that exports it as `command`, one line of help)."""


DEVELOPER_BENCHMARKS = (
    *("batches", "checkpoint", "doors", "drafts", "front", "gpu", "http", "kernels", "ladder", "logits", "paging"),
    *("pair", "profile", "speculate", "structured", "viewers"),
)
"""Commands that `quire bench` had and that are now in the folder `benchmarks` of a checkout."""

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "complete": "`quire generate`",
        "run-batch": "`quire serve --batch-dir FOLDER`, which has OpenAI's Batches",
        "collect-env": "`quire version`",
        **{
            name: f"`python -m benchmarks.{name}` in a checkout of Quire (see benchmarks/README.md)"
            for name in DEVELOPER_BENCHMARKS
        },
    }
)
"""Where commands of vLLM, and commands that moved, are found."""


class Failure(click.ClickException):
    """An error the user can do something about: one line on stderr, no traceback."""

    def __init__(self, error: QuireError) -> None:
        super().__init__(" ".join(str(error).split()))


class Refusal(Failure):
    """A failure that was asked for: the same words will fail again."""

    exit_code = 2


class LazyGroup(click.Group):
    """A group that imports a member's module when the member is called, and not to list it."""

    def __init__(self, *, members: Mapping[str, Member], **attributes: Any) -> None:
        super().__init__(**attributes)
        self.members = members

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.members)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        member = self.members.get(cmd_name)
        if not isinstance(member, tuple):
            return member
        command: click.Command = importlib.import_module(member[0]).command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] not in self.members and not args[0].startswith("-"):
            hint = f" Here it is {ELSEWHERE[args[0]]}." if args[0] in ELSEWHERE else nearest(args[0], self.members)
            known = ", ".join(self.members)
            raise click.UsageError(f"There is no command {args[0]!r}.{hint} There are: {known}.", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [
            (name, member[1] if isinstance(member, tuple) else member.get_short_help_str())
            for name, member in self.members.items()
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class Root(LazyGroup):
    """The top of the command line. `ctx.obj` holds the settings once a command has loaded them."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.filename is None:  # a pipe that broke, say: click knows about those
                raise
            _shown(ctx)
            raise Failure(QuireError(f"{error.filename}: {error.strerror}")) from error
        except QuireError as error:
            _shown(ctx)
            asked_for = isinstance(error, InvalidConfig | InvalidModel | InvalidRequest)
            raise (Refusal if asked_for else Failure)(error) from error


def _shown(ctx: click.Context) -> None:
    """Where the error that is being handled comes from, for who asked to see that."""
    if isinstance(ctx.obj, Settings) and ctx.obj.execution.debug:
        traceback.print_exc()
