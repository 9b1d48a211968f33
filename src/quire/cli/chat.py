"""`quire chat`: the same conversation with a model in this process or behind a server's address."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

import quire
from quire.cli.options import OFFLINE, SettingsCommand
from quire.cli.remote import Remote
from quire.cli.sampling import given, sampling_options
from quire.config import Settings
from quire.errors import InvalidRequest, QuireError

Message = dict[str, str]
Answer = Callable[[list[Message]], Iterator[str]]
"""Messages to the pieces of the assistant's next words."""


@click.command(
    "chat",
    cls=SettingsCommand,
    sections=OFFLINE,
    also=("api_key",),
    params=[
        click.Option(["--url"], help="Talk to the server at this address instead of loading a model."),
        click.Option(["--system"], metavar="TEXT", help="What the model is told first."),
        *sampling_options(),
    ],
)
def command(settings: Settings, url: str | None, system: str | None, **sampling: Any) -> None:
    """Talk to a model; an empty line is ignored, Ctrl-C stops an answer, Ctrl-C or Ctrl-D at the prompt ends."""
    console = Console(highlight=False, soft_wrap=True)
    opening = [{"role": "system", "content": system}] if system else []
    if url is not None:
        keys, named = settings.server.api_key, settings.source("model") != "default"
        remote = Remote(url, key=keys[0] if keys else None, model=settings.model.model if named else None)
        converse(console, opening, lambda messages: remote.answer(messages, **given(sampling)))
        return
    with quire.LLM(settings=settings) as llm:
        params = llm.default_sampling_params(**{"max_tokens": None, **given(sampling)})
        converse(console, opening, lambda messages: llm.stream_chat(messages, params))


def converse(console: Console, messages: list[Message], answer: Answer) -> None:
    """Ask, show, remember, until the input ends, or Ctrl-C comes where no answer is being made."""
    fixed = len(messages)
    with suppress(KeyboardInterrupt, EOFError):
        while True:
            asked = console.input("[bold green]you[/] " if console.is_terminal else "")
            if asked.strip():
                take_turn(console, messages, fixed, asked, answer)


def take_turn(console: Console, messages: list[Message], fixed: int, asked: str, answer: Answer) -> None:
    """One question and its answer, or as much of it as was shown before Ctrl-C."""
    messages.append({"role": "user", "content": asked})
    said = ""
    try:
        with closing(remembering(console, messages, fixed, answer)) as pieces:
            for piece in pieces:
                said += piece
                console.out(piece, end="", highlight=False)
    except KeyboardInterrupt:
        if not said:
            messages.pop()  # a question without an answer is not a turn that templates know
        else:
            messages.append({"role": "assistant", "content": said})
        console.print()
    except QuireError as error:
        if not console.is_terminal:
            raise
        messages.pop()  # whoever types can ask again, or something else
        console.print(f"\n{escape(str(error))}", style="red")
    else:
        messages.append({"role": "assistant", "content": said})
        console.print()


def remembering(console: Console, messages: list[Message], fixed: int, answer: Answer) -> Generator[str, None, None]:
    """The answer's pieces. What no longer fits the model's context is forgotten, oldest first, and that is said."""
    while True:
        try:
            yield from answer(messages)
            return
        except InvalidRequest as error:
            if (
                "context" not in str(error) or len(messages) < fixed + 3
            ):  # no word is in every server's message but this
                raise
            del messages[fixed : fixed + 2]
            console.print("(too long for the model: the oldest question and its answer are forgotten)", style="dim")
