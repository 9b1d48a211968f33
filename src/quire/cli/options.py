"""Click options made from the config fields: no option is spelled here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import click

from quire.config import OPTIONS, Option, load, refuse
from quire.errors import InvalidConfig

SECTIONS = tuple(dict.fromkeys(known.section for known in OPTIONS.values()))
OFFLINE = tuple(section for section in SECTIONS if section not in ("server", "access", "upstream"))

_REST = "quire.rest"
"""Where what follows -- is kept between parsing and running."""


class SettingsCommand(click.Command):
    """A command that takes the options of some sections (and `also` some more), and gets them as `settings`.

    With `positional`, the model may also be named without a flag. `rest` names the option that takes what follows --.
    """

    def __init__(
        self,
        *,
        sections: Sequence[str] = SECTIONS,
        also: Sequence[str] = (),
        positional: bool = False,
        rest: str | None = None,
        params: Iterable[click.Parameter] = (),
        **attributes: Any,
    ) -> None:
        self.rest = rest
        self.taken = [known for known in OPTIONS.values() if known.section in sections or known.name in also]
        own: list[click.Parameter] = [click.Argument(["model_given"], metavar="[MODEL]", required=False)]
        file = click.Option(["--config", "config_file"], metavar="FILE.yaml", help="Settings: 'option: value' lines.")
        made = [_click_option(known) for known in self.taken]
        super().__init__(params=[*(own if positional else []), *params, file, *made], **attributes)
        self.context_settings.setdefault("token_normalize_func", _dashes)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        if self.rest is not None and "--" in args:
            at = args.index("--")
            args, ctx.meta[_REST] = args[:at], tuple(args[at + 1 :])
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            written = next((arg for arg in given if arg.startswith(error.option_name)), error.option_name)
            options = [param for param in self.params if isinstance(param, click.Option)]
            flags = [flag for option in options for flag in (*option.opts, *option.secondary_opts)]
            raise refuse(written.partition("=")[0], "command line", flags) from error

    def invoke(self, ctx: click.Context) -> Any:
        flags = {}
        for known in self.taken:
            value = ctx.params.pop(known.name)
            if value is not None and value != ():
                flags[known.name] = value
        if self.rest is not None and _REST in ctx.meta:
            flags[self.rest] = (*flags.get(self.rest, ()), *ctx.meta[_REST])
        model = ctx.params.pop("model_given", None)
        if model is not None and flags.setdefault("model", model) != model:
            raise InvalidConfig(f"the model is named twice: {model} and --model {flags['model']}", param="model")
        settings = load(flags, file=ctx.params.pop("config_file"), environ=os.environ)
        ctx.find_root().obj = ctx.params["settings"] = settings
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        by_name = {known.name: known.section for known in self.taken}
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                groups.setdefault(by_name.get(param.name or "", "Options"), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _dashes(name: str) -> str:
    return name.replace("_", "-")


def _click_option(known: Option) -> click.Option:
    """Values stay text here: `Option.read` parses them, with the same words whatever their source."""
    help = f"{known.help} [{known.show(known.default)}]"
    if known.kind == "switch":
        spelling = f"{known.flag}/--no-{known.flag.removeprefix('--')}"
        return click.Option([spelling, known.name], default=None, help=help)
    metavar = known.metavar or ("|".join(known.choices) if known.choices else known.kind.upper().rstrip("S"))
    return click.Option(
        [known.flag, known.name], default=None, multiple=known.kind == "texts", metavar=metavar, help=help
    )
