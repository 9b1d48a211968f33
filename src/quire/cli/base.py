"""The parts of the command line: groups, commands that take settings, errors as exit codes."""

from __future__ import annotations

import errno
import importlib
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import click
from click.shell_completion import CompletionItem

from quire import heap
from quire.cli.examples import examples_of
from quire.config import OPTIONS, Option, Settings, load, refuse
from quire.config.option import SHORT
from quire.config.vllm import without_unneeded
from quire.errors import InvalidConfig, InvalidModel, InvalidRequest, QuireError, nearest
from quire.types import NUMERIC_PARAMETERS

Member = tuple[str, str] | click.Command
"""A command, or ("module" or "module:name" of the command, by default `command`, one line of help)."""


DEVELOPER_BENCHMARKS = (
    *("batches", "checkpoint", "doors", "drafts", "front", "gpu", "http", "kernels", "ladder", "logits", "paging"),
    *("pair", "profile", "speculate", "structured", "viewers"),
)
"""Commands that `quire bench` had and that are now in the folder `benchmarks` of a checkout."""

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "complete": "`quire generate`",
        "help": "`quire --help`, and `quire COMMAND --help`",
        "ls": "`quire list`",
        "remove": "`quire rm`",
        "download": "`quire pull`",
        "start": "`quire serve`",
        "launch": "`quire serve`",
        "stop": "Ctrl-C in the terminal of `quire serve`",
        "create": "`quire serve` with options, and `system` in requests",
        "show": "`quire inspect`",
        "ps": "GET /api/ps of a server",
        "run-batch": "`quire serve --batch-dir FOLDER`, which has OpenAI's Batches",
        "collect-env": "`quire version`",
        **{
            name: f"`python -m benchmarks.{name}` in a checkout of Quire (see benchmarks/README.md)"
            for name in DEVELOPER_BENCHMARKS
        },
    }
)
"""Where commands of vLLM and Ollama, and commands that moved, are found."""


INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a write fails with where nothing is wrong with Quire."""

_SWITCHED = ("true", "false", "on", "off", "yes", "no", "auto")
"""What switches of other programs are given, which would be taken for a model here."""

_SWITCHES = "a switch has no value on the command line: write --NAME or --no-NAME"

HELP: Mapping[str, Any] = MappingProxyType({"help_option_names": ["--help", "-h"]})
"""Settings of every command's context."""


class Failure(click.ClickException):
    """An error as one line on stderr, without a traceback."""

    def __init__(self, error: QuireError) -> None:
        super().__init__(" ".join(str(error).split()))


class Refusal(Failure):
    """A failure caused by the input: the same command will fail again."""

    exit_code = 2


class LazyGroup(click.Group):
    """A group that imports a member's module when the member is called, and not to list it. prefix: what is written
    between `quire` and a member's name."""

    def __init__(self, *, members: Mapping[str, Member], prefix: str = "", **attributes: Any) -> None:
        super().__init__(context_settings=dict(HELP), **attributes)
        self.members, self.prefix = members, prefix

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the members."""
        return list(self.members)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a member's module."""
        member = self.members.get(cmd_name)
        if not isinstance(member, tuple):
            return member
        module, _, name = member[0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name or "command")
        command.epilog = examples_of(f"{self.prefix}{cmd_name}")
        command.context_settings.update(HELP)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Raises UsageError for an unknown command, with the nearest one."""
        if args[0] not in self.members and not args[0].startswith("-"):
            hint = f" Here it is {ELSEWHERE[args[0]]}." if args[0] in ELSEWHERE else nearest(args[0], self.members)
            known = ", ".join(self.members)
            raise click.UsageError(f"There is no command {args[0]!r}.{hint} There are: {known}.", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the members without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(self._short_help())

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names of members, without importing them, and of options."""
        found = [CompletionItem(name, help=text) for name, text in self._short_help() if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def _short_help(self) -> list[tuple[str, str]]:
        """Each member's name and line of help."""
        return [
            (name, member[1] if isinstance(member, tuple) else member.get_short_help_str())
            for name, member in self.members.items()
        ]


class Root(LazyGroup):
    """The command `quire`. `ctx.obj` holds the settings once a subcommand has loaded them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run as the command of this process."""
        heap.in_process_of_its_own()
        return super().__call__(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a subcommand; errors become a line on stderr and an exit code."""
        _open_standard_streams()
        _check_folder()
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            # A model may say what a terminal's encoding lacks.
            sys.stdout.reconfigure(errors="replace")
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None
        except OSError as error:
            # Click handles others, such as a broken pipe.
            if error.filename is None and error.errno not in UNWRITABLE:
                raise
            _print_traceback(ctx)
            if error.filename is None:
                _discard_output()
            raise Failure(QuireError(f"{error.filename or 'cannot write'}: {error.strerror}")) from error
        except QuireError as error:
            _print_traceback(ctx)
            asked_for = isinstance(error, InvalidConfig | InvalidModel | InvalidRequest)
            raise (Refusal if asked_for else Failure)(error) from error


def _open_standard_streams() -> None:
    """Open those that the parent closed: a socket would have their numbers, and get what is written to them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w"))


def _check_folder() -> None:
    """Raise Refusal where the current folder was removed: libraries cannot be loaded there, and name another cause."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise Refusal(InvalidConfig("the current folder was removed: change to one that is there")) from None


def _discard_output() -> None:
    """Let nothing be written when the interpreter flushes standard output at its end, which would fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_traceback(ctx: click.Context) -> None:
    """Print the traceback of the error being handled if `--debug` is on."""
    if isinstance(ctx.obj, Settings) and ctx.obj.execution.debug:
        traceback.print_exc()


SECTIONS = tuple(dict.fromkeys(known.section for known in OPTIONS.values()))
FIRST = (
    *("model", "served_model_name", "host", "port", "api_key", "dtype", "quantization", "max_model_len"),
    *("max_num_seqs", "gpu_memory_utilization", "speculative_config"),
)
"""Options that a command's help begins with."""

OFFLINE = tuple(section for section in SECTIONS if section not in ("server", "access", "upstream", "replicas"))

_FLAG = re.compile("--?[A-Za-z]")
"""How a word that is an option begins; -1 is a value."""

_REST = "quire.rest"
"""Key of `ctx.meta` for the arguments after --."""


class SettingsCommand(click.Command):
    """A command that takes the options of some sections, and gets them as `settings`.

    also: further options. positional: the model may be an argument. rest: the option that takes arguments after --.
    elsewhere: by an option that another command has, what to do instead.
    """

    def __init__(
        self,
        *,
        sections: Sequence[str] = SECTIONS,
        also: Sequence[str] = (),
        positional: bool = False,
        rest: str | None = None,
        elsewhere: Mapping[str, str] = MappingProxyType({}),
        params: Iterable[click.Parameter] = (),
        **attributes: Any,
    ) -> None:
        self.rest = rest
        self.elsewhere = elsewhere
        self.taken = [known for known in OPTIONS.values() if known.section in sections or known.name in also]
        own: list[click.Parameter] = [model_argument(required=False)]
        file = click.Option(["--config", "config_file"], metavar="FILE.yaml", help="Settings: 'option: value' lines.")
        made = [_click_option(known) for known in self.taken]
        super().__init__(params=[*(own if positional else []), *params, file, *made], **attributes)
        self.context_settings.setdefault("token_normalize_func", _dashes)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises InvalidConfig for an unknown option, with the nearest one."""
        given = list(args)
        if self.rest is not None and "--" in args:
            at = args.index("--")
            args, ctx.meta[_REST] = args[:at], tuple(args[at + 1 :])
        args = say_unneeded(*without_unneeded(args))
        try:
            return super().parse_args(ctx, list(args))
        except click.NoSuchOption as error:
            *others, last = self._unknown(_written(error.option_name, given), args)
            for other in others:
                click.echo(f"Error: {other}", err=True)
            raise last from error
        except click.UsageError as error:
            extra = re.search(r"extra argument \((\w+)\)", error.message)
            if extra is not None and extra[1].lower() in _SWITCHED:
                raise InvalidConfig(f"{error.message}: {_SWITCHES}") from error
            several = [known.flag for known in self.taken if known.flag in given and known.kind == "texts"]
            if "extra argument" not in error.message or not several:
                raise
            raise InvalidConfig(
                f"{error.message}: {several[0]} takes several values with commas (a,b), or once for each"
            ) from error

    def _unknown(self, first: str, args: Sequence[str]) -> list[InvalidConfig]:
        """An error for each unknown option among the words of a command, first for the one where parsing ended."""
        options = [param for param in self.params if isinstance(param, click.Option)]
        known = {flag: option for option in options for flag in (*option.opts, *option.secondary_opts)}
        written, is_value = [first], False
        for word in args:
            flag, joined, _ = word.partition("=")
            option = None if is_value else known.get(_dashes(flag))
            if option is None and not is_value and _FLAG.match(word):
                written.append(word)
            is_value = option is not None and not option.is_flag and not joined
        flags = dict.fromkeys(word.partition("=")[0] for word in written)
        refused = [(flag, refuse(flag, "command line", known)) for flag in flags]
        return [
            InvalidConfig(f"{error} {self.elsewhere[flag]}", param=error.param) if flag in self.elsewhere else error
            for flag, error in refused
        ]

    def invoke(self, ctx: click.Context) -> Any:
        """Load the settings, and run the command with them."""
        flags = {}
        for known in self.taken:
            value = ctx.params.pop(known.name)
            if value is not None and value != ():
                flags[known.name] = value
        if self.rest is not None and _REST in ctx.meta:
            flags[self.rest] = (*flags.get(self.rest, ()), *ctx.meta[_REST])
        model = ctx.params.pop("model_given", None)
        if str(model).lower() in _SWITCHED:
            raise InvalidConfig(f"{model!r} is no model: {_SWITCHES}", param="model")
        if model is not None and flags.setdefault("model", model) != model:
            raise InvalidConfig(f"the model is named twice: {model} and --model {flags['model']}", param="model")
        settings = load(flags, file=ctx.params.pop("config_file"), environ=os.environ)
        ctx.find_root().obj = ctx.params["settings"] = settings
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the options by section, those that most people need first."""
        by_name = {known.name: known.section for known in self.taken} | dict.fromkeys(FIRST, "used most")
        groups: dict[str, list[tuple[str, str]]] = {"Options": [], "used most": []}
        for param in self.get_params(ctx):
            # Arguments are in the line of usage.
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                groups.setdefault(by_name.get(param.name or "", "Options"), []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def say_unneeded(kept: list[str], left: Mapping[str, str]) -> list[str]:
    """`kept`, once the options that were left out are named; see `without_unneeded`."""
    for flag, why in left.items():
        click.echo(f"{flag} changes nothing here: {why}", err=True)
    return kept


def _written(unknown: str, given: Sequence[str]) -> str:
    """The word with an unknown option: -hf for its letter -f."""
    letter = unknown.removeprefix("-") if len(unknown) == 2 else ""
    short = (arg for arg in given if letter and arg.startswith("-") and not arg.startswith("--") and letter in arg)
    return next((arg for arg in given if arg.startswith(unknown)), next(short, unknown))


def _dashes(name: str) -> str:
    return name.replace("_", "-")


def model_argument(**attributes: Any) -> click.Argument:
    """The argument MODEL, which shells complete with folders and files."""
    return click.Argument(["model_given"], metavar="[MODEL]", shell_complete=_complete_model, **attributes)


def _complete_model(_: click.Context, __: click.Parameter, typed: str) -> list[CompletionItem]:
    embedded = OPTIONS["model"].show(OPTIONS["model"].default)
    return [CompletionItem(embedded)] if typed and embedded.startswith(typed) else [CompletionItem(typed, type="file")]


def _completing(known: Option) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]] | None:
    """What completes an option's value: its choices, or files and folders where it names one."""
    if known.choices:
        return lambda _, __, typed: [CompletionItem(one) for one in known.choices if one.startswith(typed)]
    if known.name == "model":
        return _complete_model
    if known.name.endswith(("_dir", "file", "template", "certs")):
        return lambda _, __, typed: [CompletionItem(typed, type="file")]
    return None


_METAVARS: Mapping[str, str] = MappingProxyType(
    {"text": "TEXT", "texts": "TEXT", "whole": "INTEGER", "number": "FLOAT", "switch": ""}
)
"""What help shows for a value of an option's kind, as click names its own types."""


def _click_option(known: Option) -> click.Option:
    """A flag whose value stays text: `Option.read` parses it, as it parses variables and files."""
    help = f"{known.help} [{known.show(known.default)}]"
    if known.kind == "switch":
        spelling = f"{known.flag}/--no-{known.flag.removeprefix('--')}"
        return click.Option([spelling, known.name], default=None, help=help)
    short = [SHORT[known.name]] if known.name in SHORT else []
    metavar = known.metavar or ("|".join(known.choices) if known.choices else _METAVARS[known.kind])
    return click.Option(
        [*short, known.flag, known.name],
        default=None,
        multiple=known.kind == "texts",
        metavar=metavar,
        help=help,
        shell_complete=_completing(known),
    )


def integer(flag: str, default: int | None, help: str, *, low: int = 1, high: int | None = None) -> click.Option:
    """An option for a whole number from `low` to `high`."""
    return click.Option([flag], type=click.IntRange(low, high), default=default, show_default=True, help=help)


def sampling_options() -> list[click.Option]:
    """New options, named as the fields of SamplingParams; `--seed` is an option of the engine's configuration."""
    numeric = [each for each in NUMERIC_PARAMETERS if each.help]
    return [
        click.Option(["--max-tokens"], type=int, help="Longest answer, in tokens."),
        *(click.Option([f"--{_dashes(each.name)}"], type=type(each.low), help=each.help) for each in numeric),
        click.Option(["--stop"], multiple=True, help="End where this text appears; may be repeated."),
    ]


def given(sampling: dict[str, Any]) -> dict[str, Any]:
    """The options that were set."""
    return {name: value for name, value in sampling.items() if value is not None and value != ()}
