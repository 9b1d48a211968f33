"""`quire chat`: the same conversation with a model in this process or behind a server's address."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

import click
from rich.console import Console
from rich.markup import escape

import quire
from quire.cli.base import OFFLINE, SettingsCommand, given, sampling_options
from quire.config import Settings
from quire.errors import InvalidConfig, InvalidRequest, QuireError, Unauthorized, Unavailable


class ChatClient:
    """A client of OpenAI's chat API at `url` (with or without /v1). model: None asks the server for its first one."""

    def __init__(self, url: str, *, key: str | None = None, model: str | None = None) -> None:
        """Raises InvalidConfig if `url` is not an HTTP address."""
        wrong = InvalidConfig(f"--url must look like http://127.0.0.1:8000, not {url}", param="url")
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError as error:
            raise wrong from error
        if not known or any(map(str.isspace, url)):
            raise wrong
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._place, self._url = parts.netloc.rpartition("@")[2], url
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._model = model

    def answer(self, messages: list[dict[str, str]], **sampling: Any) -> Iterator[str]:
        """Stream the text of the next message.

        Raises InvalidRequest, Unauthorized, or Unavailable, also for an answer that breaks off and for another API.
        """
        try:
            yield from self._answer(messages, sampling)
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self._url}: the connection broke: {error or type(error).__name__}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Unavailable(f"{self._url} does not speak OpenAI's API: {error!r}") from error

    def _answer(self, messages: list[dict[str, str]], sampling: dict[str, Any]) -> Iterator[str]:
        if self._model is None:
            with self._send("GET", "/v1/models", None) as listing:
                self._model = json.loads(listing.read())["data"][0]["id"]
        asked = {"model": self._model, "messages": messages, "stream": True, **sampling}
        with self._send("POST", "/v1/chat/completions", asked) as answer:
            for line in answer:
                if not line.startswith(b"data:"):
                    continue
                if (data := line[5:].strip()) == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise Unavailable(f"{self._url}: {chunk['error'].get('message')}")
                for choice in chunk.get("choices", ()):
                    if text := choice["delta"].get("content"):
                        yield text
        raise Unavailable(f"{self._url} broke off its answer")

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        connection = self._kind(self._place, timeout=600)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, self._path + path, body=sent, headers={**self._headers, "Connection": "close"})
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if isinstance(error, http.client.HTTPException):
                raise
            raise Unavailable(f"no server answers at {self._url}: {error}") from error
        if answer.status != 200:
            with answer:
                raise self._error(answer.status, answer.read())
        return answer

    def _error(self, status: int, body: bytes) -> Exception:
        try:
            message = json.loads(body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"status {status}"
        kind = {400: InvalidRequest, 404: InvalidRequest, 401: Unauthorized}.get(status, Unavailable)
        return kind(f"{self._url}: {message}")


Message = dict[str, str]
Answer = Callable[[list[Message]], Iterator[str]]
"""From messages to the pieces of the assistant's answer."""


@click.command(
    "chat",
    cls=SettingsCommand,
    sections=OFFLINE,
    also=("api_key",),
    positional=True,
    params=[
        click.Option(["--url"], help="Talk to the server at this address instead of loading a model."),
        click.Option(["--system"], metavar="TEXT", help="The system message."),
        *sampling_options(),
    ],
)
def command(settings: Settings, url: str | None, system: str | None, **sampling: Any) -> None:
    """Talk to MODEL; an empty line is ignored, Ctrl-C stops an answer, Ctrl-C or Ctrl-D at the prompt ends."""
    console = Console(highlight=False, soft_wrap=True)
    opening = [{"role": "system", "content": system}] if system else []
    if url is not None:
        keys, named = settings.server.api_key, settings.source("model") != "default"
        remote = ChatClient(url, key=keys[0] if keys else None, model=settings.model.model if named else None)
        converse(console, opening, lambda messages: remote.answer(messages, **given(sampling)))
        return
    with quire.LLM(settings=settings) as llm:
        params = llm.default_sampling_params(**{"max_tokens": None, **given(sampling)})
        converse(console, opening, lambda messages: llm.stream_chat(messages, params))


@click.command(
    "run",
    cls=SettingsCommand,
    sections=OFFLINE,
    positional=True,
    params=[
        click.Argument(["prompt"], nargs=-1),
        click.Option(["--system"], metavar="TEXT", help="The system message."),
        *sampling_options(),
    ],
)
def run(settings: Settings, prompt: tuple[str, ...], system: str | None, **sampling: Any) -> None:
    """Ask MODEL once and print its answer, or talk to it without a PROMPT.

    A model without a chat template completes the prompt.
    """
    opening = [{"role": "system", "content": system}] if system else []
    with quire.LLM(settings=settings) as llm:
        params = llm.default_sampling_params(**{"max_tokens": None, **given(sampling)})
        if not prompt:
            console = Console(highlight=False, soft_wrap=True)
            converse(console, opening, lambda messages: llm.stream_chat(messages, params))
            return
        text = " ".join(prompt)
        asked = [*opening, {"role": "user", "content": text}]
        for piece in answered(llm, asked, text, params):
            click.echo(piece, nl=False)
    click.echo()


def answered(llm: quire.LLM, messages: list[Message], text: str, params: quire.SamplingParams) -> Iterator[str]:
    """The answer to messages, or what follows a text where there is no chat template."""
    try:
        yield from llm.stream_chat(messages, params)
    except InvalidRequest as error:
        if error.code != "no_chat_template":
            raise
        yield from llm.stream(text, params)


def converse(console: Console, messages: list[Message], answer: Answer) -> None:
    """Take turns until the input ends, or until Ctrl-C between answers."""
    fixed = len(messages)
    with suppress(KeyboardInterrupt, EOFError):
        while True:
            asked = console.input("[bold green]you[/] " if console.is_terminal else "")
            if asked.strip():
                take_turn(console, messages, fixed, asked, answer)


def take_turn(console: Console, messages: list[Message], fixed: int, asked: str, answer: Answer) -> None:
    """Answer one question, and append both messages; after Ctrl-C as much of the answer as was shown."""
    messages.append({"role": "user", "content": asked})
    said = ""
    try:
        with closing(answer_within_context(console, messages, fixed, answer)) as pieces:
            for piece in pieces:
                said += piece
                console.out(piece, end="", highlight=False)
    except KeyboardInterrupt:
        if not said:
            # Chat templates need an answer for each question.
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": said})
        console.print()
    except QuireError as error:
        if not console.is_terminal:
            raise
        # At a terminal the user can try again.
        messages.pop()
        console.print(f"\n{escape(str(error))}", style="red")
    else:
        messages.append({"role": "assistant", "content": said})
        console.print()


def answer_within_context(
    console: Console, messages: list[Message], fixed: int, answer: Answer
) -> Generator[str, None, None]:
    """The answer's pieces. If the messages exceed the context, drop the oldest question and answer, and say so."""
    while True:
        try:
            yield from answer(messages)
            return
        except InvalidRequest as error:
            # No other word is in every server's message.
            if "context" not in str(error) or len(messages) < fixed + 3:
                raise
            del messages[fixed : fixed + 2]
            console.print("(too long for the model: the oldest question and its answer are forgotten)", style="dim")


OPENING = "Once upon a time"


@click.command(
    "generate",
    cls=SettingsCommand,
    sections=OFFLINE,
    params=[click.Argument(["prompt"], required=False), *sampling_options()],
)
def generate(settings: Settings, prompt: str | None, **sampling: Any) -> None:
    """Print one completion of PROMPT ('-' reads it from standard input; without one, of an opening of ours)."""
    with quire.LLM(settings=settings) as llm:
        if prompt is None:
            click.echo(OPENING, nl=False)
        text = OPENING if prompt is None else sys.stdin.read() if prompt == "-" else prompt
        params = llm.default_sampling_params(**{"max_tokens": None, **given(sampling)})
        for piece in llm.stream(text, params):
            click.echo(piece, nl=False)
    click.echo()
