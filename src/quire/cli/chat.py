"""`quire chat`: the same conversation with a model in this process or behind a server's address."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import ssl
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from rich.console import Console

import quire
from quire.assembly.tokenizer import pooler_of, require_tokenizer
from quire.cli.base import INTERRUPTED, OFFLINE, SettingsCommand, given, sampling_options
from quire.cli.conversation import (
    CUT,
    Answer,
    Conversation,
    Cut,
    Message,
    Thought,
    TokenCount,
    as_text,
    converse,
    history,
    note,
    take_turn,
)
from quire.config import Settings
from quire.errors import InvalidConfig, InvalidRequest, Unauthorized, Unavailable
from quire.frontend.processor import no_text
from quire.parsers.parts import TextPart
from quire.types import TokenTotal
from quire.weights.locate import EMBEDDED

_STARTED = ". `quire serve` starts one"
_NAMED = ". --url takes an address such as http://127.0.0.1:8000; for a model in this process: quire chat {}"


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
        """Stream the next message's text; pieces of reasoning are `Thought`s. A `Cut` and a `TokenCount` may follow.

        Raises InvalidRequest, Unauthorized, or Unavailable, also for an answer that breaks off and for another API.
        """
        with self._errors():
            yield from self._answer(messages, sampling)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self._url}: the connection failed: {error or type(error).__name__}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Unavailable(f"{self._url} does not speak OpenAI's API: {error!r}") from error

    def _answer(self, messages: list[dict[str, str]], sampling: dict[str, Any]) -> Iterator[str]:
        asked = {"model": self._named(), "messages": messages, "stream": True, **sampling}
        with self._send("POST", "/v1/chat/completions", asked) as answer:
            for line in answer:
                if not line.startswith(b"data:"):
                    continue
                if (data := line[5:].strip()) == b"[DONE]":
                    return
                chunk = json.loads(data)
                if usage := chunk.get("usage"):
                    yield TokenCount(usage["completion_tokens"])
                if "error" in chunk:
                    raise Unavailable(f"{self._url}: {chunk['error'].get('message')}")
                for choice in chunk.get("choices", ()):
                    delta = choice["delta"]
                    if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                        yield Thought(thought)
                    if text := delta.get("content"):
                        yield text
                    if choice.get("finish_reason") == "length":
                        yield Cut()
        raise Unavailable(f"{self._url} closed the connection in the middle of its answer")

    def model(self) -> str:
        """The model's name. Raises what `answer` raises."""
        with self._errors():
            return self._named()

    def _named(self) -> str:
        if self._model is None:
            with self._send("GET", "/v1/models", None) as listing:
                self._model = str(json.loads(listing.read())["data"][0]["id"])
        return self._model

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
            hint = _STARTED if re.search(r"[.:]|^localhost$", self._url) else _NAMED.format(self._url)
            if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
                hint = f". It may speak no TLS: try http{self._url.removeprefix('https')}"
            raise Unavailable(f"no server answers at {self._url}: {error.strerror or error}{hint}") from error
        if answer.status != 200:
            with answer:
                raise self._error(answer.status, answer.read())
        return answer

    def _error(self, status: int, body: bytes) -> Exception:
        try:
            message = json.loads(body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            wrong = ": OpenAI's API is not at this address" if status in (404, 405, 501) else ""
            message = f"status {status}{wrong}"
        kind = {400: InvalidRequest, 404: InvalidRequest, 401: Unauthorized}.get(status, Unavailable)
        return kind(f"{self._url}: {message}")


def talk_options() -> list[click.Option]:
    """New options of what may become a conversation."""
    return [
        click.Option(["--system"], metavar="TEXT", help="The system message."),
        click.Option(["--plain"], is_flag=True, help="Show answers as they are, without rendering Markdown."),
        click.Option(["--verbose"], is_flag=True, help="Say after each answer how many tokens a second it had."),
    ]


@click.command(
    "chat",
    cls=SettingsCommand,
    sections=OFFLINE,
    also=("api_key",),
    positional=True,
    params=[
        click.Option(["--url"], help="Talk to the server at this address instead of loading a model."),
        *talk_options(),
        click.Option(
            ["--history-file"],
            type=click.Path(dir_okay=False, path_type=Path),
            help="Keep what is typed in this file, for the arrow keys of the next conversation.",
        ),
        *sampling_options(),
    ],
)
def command(
    settings: Settings,
    url: str | None,
    system: str | None,
    plain: bool,
    verbose: bool,
    history_file: Path | None,
    **sampling: Any,
) -> None:
    """Talk to MODEL; /help lists commands, Ctrl-C stops an answer, Ctrl-D or /bye ends.

    At the prompt, arrow keys bring back what was typed. Nothing is kept in a file unless --history-file names one.
    """
    shown = {"plain": plain, "verbose": verbose}
    with history(history_file):
        if url is None:
            require_tokenizer(settings, "quire chat")
            pooler = pooler_of(settings)
            if not pooler.generates:
                raise no_text(pooler)
            with quire.LLM(settings=settings) as llm:
                talk_here(llm, settings.model.model, system, given(sampling), **shown)
            return
        keys, named = settings.server.api_key, settings.source("model") != "default"
        remote = ChatClient(url, key=keys[0] if keys else None, model=settings.model.model if named else None)
        chosen = given(sampling)

        def answer(messages: list[Message]) -> Iterator[str]:
            counted = {"stream_options": {"include_usage": True}} if talk.verbose else {}
            return remote.answer(messages, **chosen, **counted)

        talk = conversation(system, chosen, answer, **shown)
        if talk.console.is_terminal:
            # A server that is not there is best known before the first question is typed.
            talk.model = f"{remote.model()} at {url}"
        converse(talk)


def talk_here(llm: quire.LLM, model: str, system: str | None, sampling: dict[str, Any], **shown: bool) -> None:
    """Converse with a model in this process. model: its name. sampling: what `/set` changes.

    shown: as of `conversation`.
    """

    def answer(messages: list[Message]) -> Iterator[str]:
        return pieces(llm.stream_chat_parts(messages, llm.default_sampling_params(**{"max_tokens": None, **sampling})))

    # Refused before the first question.
    llm.default_sampling_params(**{"max_tokens": None, **sampling})
    talk = conversation(system, sampling, answer, **shown)
    talk.model = model
    converse(talk)


def pieces(parts: Generator[TextPart | str, None, TokenTotal]) -> Iterator[str]:
    """What a model in this process says, as a conversation takes it."""
    with closing(parts):
        while True:
            try:
                part = next(parts)
            except StopIteration as end:
                if end.value.finish_reason == "length":
                    yield Cut()
                yield TokenCount(end.value)
                return
            kind, text = ("content", part) if isinstance(part, str) else part[:2]
            yield Thought(text) if kind == "reasoning" else text


def conversation(
    system: str | None, sampling: dict[str, Any], answer: Answer, *, plain: bool, verbose: bool
) -> Conversation:
    """A conversation that begins with a system message, if there is one. plain: Markdown is not rendered."""
    opening = [{"role": "system", "content": as_text(system)}] if system else []
    console = Console(highlight=False, soft_wrap=plain or not sys.stdout.isatty())
    return Conversation(console, opening, answer, sampling, markdown=not plain, verbose=verbose)


@click.command(
    "run",
    cls=SettingsCommand,
    sections=OFFLINE,
    positional=True,
    elsewhere={"--url": "A server that runs is asked with `quire chat --url ADDRESS`, also through a pipe."},
    params=[
        click.Argument(["prompt"], nargs=-1),
        *talk_options(),
        *sampling_options(),
    ],
)
def run(
    settings: Settings, prompt: tuple[str, ...], system: str | None, plain: bool, verbose: bool, **sampling: Any
) -> None:
    """Ask MODEL once and print its answer, or talk to it without a PROMPT.

    A PROMPT of - is what standard input has, which is also the prompt where there is none and it is no terminal. A
    model without a chat template completes the prompt.
    """
    require_tokenizer(settings, "quire run")
    text = question(prompt, settings.model.model)
    with quire.LLM(settings=settings) as llm:
        if text is None:
            talk_here(llm, settings.model.model, system, given(sampling), plain=plain, verbose=verbose)
            return
        params = llm.default_sampling_params(**{"max_tokens": None, **given(sampling)})
        answer = partial(answered, llm, text=text, params=params)
        whole = take_turn(conversation(system, given(sampling), answer, plain=plain, verbose=verbose), text)
    if not whole:
        sys.exit(INTERRUPTED)


def question(prompt: tuple[str, ...], model: str) -> str | None:
    """The words of a prompt, with standard input in place of a -; None for a conversation at a terminal.

    Raises InvalidRequest if nothing is asked, or where the model's name is a sentence and so meant as the prompt.
    """
    if not prompt and " " in model.strip() and not Path(model).exists():
        meant = shlex.join(["quire", "run", EMBEDDED, model])
        raise InvalidRequest(f"the first argument of `quire run` is the model: write {meant}", param="model")
    piped = "-" in prompt or not (prompt or sys.stdin.isatty())
    if not (prompt or piped):
        return None
    read = piped_text() if piped else ""
    text = " ".join(read if word == "-" else as_text(word) for word in prompt) if prompt else read
    if not text.strip():
        empty = "standard input is empty" if piped else "the prompt is empty"
        raise InvalidRequest(f'there is no prompt: {empty}. Write quire run MODEL "a question"', param="prompt")
    return text


MOST_PIPED = 8 << 20
"""Characters of a prompt that is piped in: some two million tokens of prose. What never ends would fill the memory."""


def piped_text() -> str:
    """All of standard input. Raises InvalidRequest where that is no text, or has more than MOST_PIPED characters."""
    try:
        text = sys.stdin.read(MOST_PIPED + 1)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"standard input is not text in {error.encoding}: {error.reason}") from error
    if len(text) > MOST_PIPED:
        raise InvalidRequest(f"standard input has more than {MOST_PIPED:,} characters: pipe in a part of it")
    return as_text(text)


def answered(llm: quire.LLM, messages: list[Message], text: str, params: quire.SamplingParams) -> Iterator[str]:
    """The answer to messages, or what follows a text where there is no chat template."""
    try:
        yield from pieces(llm.stream_chat_parts(messages, params))
    except InvalidRequest as error:
        if error.code != "no_chat_template":
            raise
        yield from pieces(llm.stream(text, params))


OPENING = "Once upon a time"


@click.command(
    "generate",
    cls=SettingsCommand,
    sections=OFFLINE,
    params=[click.Argument(["prompt"], required=False), *sampling_options()],
)
def generate(settings: Settings, prompt: str | None, **sampling: Any) -> None:
    """Print one completion of PROMPT. Without one, or with '-', it is what is piped in; and where nothing is, an
    opening of ours.
    """
    require_tokenizer(settings, "quire generate")
    piped = prompt == "-" or (prompt is None and not sys.stdin.isatty())
    text = piped_text() if piped else as_text(prompt or "")
    with quire.LLM(settings=settings) as llm:
        if prompt is None and not text:
            text = OPENING
            click.echo(OPENING, nl=False)
        params = llm.default_sampling_params(**{"max_tokens": None, **given(sampling)})
        cut = False
        for piece in pieces(llm.stream(text, params)):
            click.echo(piece, nl=False)
            cut = cut or isinstance(piece, Cut)
    click.echo()
    if cut and sampling["max_tokens"] is None:
        note(CUT)
