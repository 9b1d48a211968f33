"""`quire chat`: the same conversation with a model in this process or behind a server's address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    """Talk to a model; an empty line is ignored, Ctrl-C stops an answer, Ctrl-D ends."""
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
    """Ask, show, remember, until the input ends."""
    fixed = len(messages)
    while True:
        try:
            asked = console.input("[bold green]you[/] " if console.is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            return
        if not asked.strip():
            continue
        messages.append({"role": "user", "content": asked})
        said = ""
        try:
            for piece in remembering(console, messages, fixed, answer):
                said += piece
                console.out(piece, end="", highlight=False)
        except QuireError as error:
            if not console.is_terminal:
                raise
            messages.pop()  # whoever types can ask again, or something else
            console.print(f"\n{escape(str(error))}", style="red")
            continue
        console.print()
        messages.append({"role": "assistant", "content": said})


def remembering(console: Console, messages: list[Message], fixed: int, answer: Answer) -> Iterator[str]:
    """The answer's pieces. What no longer fits the model's context is forgotten, oldest first, and that is said."""
    while True:
        try:
            yield from answer(messages)
            return
        except KeyboardInterrupt:
            return
        except InvalidRequest as error:
            if (
                "context" not in str(error) or len(messages) < fixed + 3
            ):  # no word is in every server's message but this
                raise
            del messages[fixed : fixed + 2]
            console.print("(too long for the model: the oldest question and its answer are forgotten)", style="dim")
