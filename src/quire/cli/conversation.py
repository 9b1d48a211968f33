"""A conversation in a terminal: what is typed, its commands, and how answers are shown."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.markup import escape

from quire.errors import InvalidConfig, InvalidRequest, QuireError, nearest
from quire.types import NUMERIC_PARAMETERS, SamplingParams

try:
    import readline
except ImportError:
    # Windows, and a Python built without it.
    readline = None  # type: ignore[assignment]

Message = dict[str, str]
Answer = Callable[[list[Message]], Iterator[str]]
"""From messages to the pieces of the assistant's answer."""

ROLES = ("system", "user", "assistant")
MAX_HISTORY = 1000
"""Questions kept in a history file."""

MAX_SAVED_BYTES = 1 << 24
"""The largest conversation that is read from a file."""


class Thought(str):
    """A piece of reasoning among the pieces of an answer. It is shown, and not part of the next question."""

    __slots__ = ()


class TokenCount(str):
    """How many tokens an answer had, as a piece without text."""

    tokens: int

    def __new__(cls, tokens: int) -> Self:
        """Of an answer of so many tokens."""
        made = super().__new__(cls)
        made.tokens = tokens
        return made


class Cut(str):
    """That an answer ended at a limit of tokens, as a piece without text."""

    __slots__ = ()


@dataclass
class Conversation:
    """What has been said, and how the next answer is made.

    sampling: fields of SamplingParams that were set; `answer` reads it at each turn. markdown: answers are rendered
    where the console is a terminal. reasoning: whether thoughts are shown. verbose: whether an answer is followed by
    its tokens and times, on standard error. model: its name, for the first line at a terminal.
    """

    console: Console
    messages: list[Message]
    answer: Answer
    sampling: dict[str, Any] = field(default_factory=dict)
    markdown: bool = False
    reasoning: bool = True
    verbose: bool = False
    model: str = ""

    @property
    def fixed(self) -> int:
        """Messages at the beginning that are never dropped: 1 with a system message."""
        return int(bool(self.messages) and self.messages[0]["role"] == "system")

    def say(self, text: str) -> None:
        """A line of the program's own, dimmed on a terminal."""
        self.console.print(escape(text), style="dim")


def converse(talk: Conversation) -> None:
    """Take turns until the input ends, `/bye`, or Ctrl-C twice at the prompt."""
    if talk.console.is_terminal:
        talk.say(f"{talk.model}: /help lists commands, Ctrl-D ends".removeprefix(": "))
    interrupted = False
    while True:
        asked = ""
        try:
            asked = read_question(talk.console)
        except EOFError:
            return
        except InvalidRequest as error:
            if not talk.console.is_terminal:
                raise
            talk.console.print(escape(str(error)), style="red")
        except KeyboardInterrupt:
            if interrupted or not talk.console.is_terminal:
                return
            interrupted = True
            talk.say("\n(Ctrl-C again, Ctrl-D or /bye ends)")
            continue
        interrupted = False
        try:
            if asked.strip() and not take(talk, asked):
                return
        except QuireError as error:
            if not talk.console.is_terminal:
                raise
            # At a terminal the user can try again.
            talk.console.print(f"\n{escape(str(error))}", style="red")


# ---------------------------------------------------------------- input


def as_text(given: str) -> str:
    """Text from outside. Bytes that are not in the terminal's encoding arrive as surrogates: UTF-8 is tried for them.

    Raises InvalidRequest where that is not it either.
    """
    try:
        return os.fsencode(given).decode("utf-8") if any("\ud800" <= one <= "\udfff" for one in given) else given
    except UnicodeError as error:
        shown = ascii(given[:40]) + "..." * (len(given) > 40)
        raise InvalidRequest(f"{shown} is not text in UTF-8") from error


def read_question(console: Console) -> str:
    """One question: a line, lines joined by a backslash at their ends, or what stands between two lines of \"\"\".

    Raises EOFError and KeyboardInterrupt.
    """
    line = _line(console, "you ")
    if line.lstrip().startswith('"""'):
        return _quoted(console, line.lstrip()[3:])
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_line(console, "... "))
    return "\n".join(lines)


def _quoted(console: Console, line: str) -> str:
    lines = []
    while '"""' not in line:
        lines.append(line)
        line = _line(console, "... ")
    lines.append(line.partition('"""')[0])
    return "\n".join(lines).strip("\n")


def _line(console: Console, prompt: str) -> str:
    """A line of standard input. On a terminal readline edits it, and a pasted text may have several."""
    shown = ""
    if console.is_terminal:
        # Between \001 and \002 is what takes no column. NO_COLOR leaves other styles, as rich does.
        style = "1" if console.no_color else "1;32"
        shown = f"\001\033[{style}m\002{prompt}\001\033[0m\002" if console.color_system else prompt
    try:
        return as_text(input(shown))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"what was typed is not text in {error.encoding}: {error.reason}") from error


@contextmanager
def history(file: Path | None) -> Iterator[None]:
    """Keep questions in `file`, readable by its owner alone; with None they are forgotten at the end.

    Raises InvalidConfig where the file cannot be made or read, and where this Python has no readline.
    """
    if file is None:
        yield
        return
    if readline is None:
        raise InvalidConfig("--history-file needs the module readline, which this Python was built without")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        file.chmod(0o600)
        readline.clear_history()
        readline.set_history_length(MAX_HISTORY)
        readline.read_history_file(file)
    except OSError as error:
        why = "is not a folder" if isinstance(error, FileExistsError) else str(error.strerror).lower()
        where = error.filename or file
        raise InvalidConfig(f"--history-file {file} cannot be used: {where}: {why}", param="history_file") from error
    try:
        yield
    finally:
        readline.write_history_file(file)


# ---------------------------------------------------------------- commands

Command = Callable[[Conversation, str], bool]
"""Runs a command with the rest of its line; whether the conversation goes on."""

_COMMAND = re.compile(r"/[a-z?]+$")


def take(talk: Conversation, asked: str) -> bool:
    """Run a command, or ask. A path such as /etc/hosts is no command; // at the beginning stands for one /.

    Returns whether the conversation goes on. Raises InvalidRequest for an unknown command, with the nearest.
    """
    name, _, rest = asked.strip().partition(" ")
    name = ALIASES.get(name, name)
    if not _COMMAND.match(name):
        take_turn(talk, asked[1:] if asked.startswith("//") else asked)
        return True
    if name not in COMMANDS:
        raise InvalidRequest(f"there is no command {name}.{nearest(name, COMMANDS)} /help lists them; // sends a /")
    return COMMANDS[name][0](talk, rest.strip())


def _help(talk: Conversation, _: str) -> bool:
    for name, (_run, usage, does) in COMMANDS.items():
        talk.console.print(f"{escape(f'{name} {usage}'):<24} {does}")
    talk.console.print('A backslash at the end of a line, or """ before and after several, makes one question of them.')
    return True


def _system(talk: Conversation, text: str) -> bool:
    if not text:
        talk.say(talk.messages[0]["content"] if talk.fixed else "(no system message)")
        return True
    talk.messages[: talk.fixed] = [{"role": "system", "content": text}]
    return True


SETTABLE = (*(each.name for each in NUMERIC_PARAMETERS if each.in_requests), "max_tokens", "stop")
"""Sampling parameters that `/set` takes."""

SHOWN: Mapping[str, tuple[str, str]] = MappingProxyType({"reasoning": ("show", "hide"), "verbose": ("on", "off")})
"""What else `/set` takes, and its two values: what is shown of an answer."""


def _set(talk: Conversation, rest: str) -> bool:
    if not rest:
        return _show(talk, "")
    name, _, value = rest.partition(" ")
    name, value = name.replace("-", "_"), value.strip()
    if name in SHOWN:
        on, off = SHOWN[name]
        if value not in (on, off):
            raise InvalidRequest(f"/set {name} {on}, or {off}", param=name)
        setattr(talk, name, value == on)
        return True
    if name not in SETTABLE:
        known = (*SETTABLE, *SHOWN)
        raise InvalidRequest(f"/set has no {name!r}.{nearest(name, known)} It has: {', '.join(known)}", param=name)
    if not value:
        talk.sampling.pop(name, None)
        talk.say(f"({name} is the model's own)")
        return True
    number: Any = value
    if name != "stop":
        with suppress(ValueError):
            number = json.loads(value)
    SamplingParams(**{name: number})
    talk.sampling[name] = [value] if name == "stop" else number
    return True


def _show(talk: Conversation, _: str) -> bool:
    turns = sum(message["role"] == "user" for message in talk.messages)
    talk.say(f"system: {talk.messages[0]['content'] if talk.fixed else '(none)'}\nquestions: {turns}")
    for name, value in talk.sampling.items():
        talk.say(f"{name}: {value}")
    for name, (on, off) in SHOWN.items():
        talk.say(f"{name}: {on if getattr(talk, name) else off}")
    return True


def _clear(talk: Conversation, _: str) -> bool:
    del talk.messages[talk.fixed :]
    return True


def _drop_turn(talk: Conversation) -> str:
    """Remove the last question and what follows it; returns the question. Raises InvalidRequest if there is none."""
    asked = [i for i, message in enumerate(talk.messages) if message["role"] == "user"]
    if not asked:
        raise InvalidRequest("there is no answer yet")
    question = talk.messages[asked[-1]]["content"]
    del talk.messages[asked[-1] :]
    return question


def _undo(talk: Conversation, _: str) -> bool:
    talk.say(f"(forgotten: {_drop_turn(talk)[:60]})")
    return True


def _retry(talk: Conversation, _: str) -> bool:
    take_turn(talk, _drop_turn(talk))
    return True


def _save(talk: Conversation, name: str) -> bool:
    path = _path(name)
    made = False
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            made = True
            json.dump(talk.messages, file, ensure_ascii=False, indent=1)
    except OSError as error:
        if made:
            # A part of a conversation is of no use, and its name would be taken.
            path.unlink(missing_ok=True)
        raise InvalidRequest(f"cannot write {path}: {error.strerror}") from error
    talk.say(f"(saved {len(talk.messages)} messages to {path})")
    return True


def _load(talk: Conversation, name: str) -> bool:
    path = _path(name)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SAVED_BYTES + 1)
        found = json.loads(data) if len(data) <= MAX_SAVED_BYTES else None
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON: {error}") from error
    if not isinstance(found, list) or not all(map(_is_message, found)):
        roles = ", ".join(ROLES)
        raise InvalidRequest(f"{path} is not a list of messages, each with a role ({roles}) and a content that is text")
    talk.messages[:] = [{"role": one["role"], "content": one["content"]} for one in found]
    talk.say(f"(loaded {len(found)} messages)")
    return True


def _path(name: str) -> Path:
    if not name:
        raise InvalidRequest("name a file")
    return Path(name).expanduser()


def _is_message(given: object) -> bool:
    return isinstance(given, Mapping) and given.get("role") in ROLES and isinstance(given.get("content"), str)


COMMANDS: Mapping[str, tuple[Command, str, str]] = MappingProxyType(
    {
        "/help": (_help, "", "List the commands."),
        "/system": (_system, "[TEXT]", "Set the system message, or show it."),
        "/set": (
            _set,
            "NAME [VALUE]",
            "Set a sampling parameter, reasoning show|hide, verbose on|off; no VALUE: back.",
        ),
        "/show": (_show, "", "Show the system message and what is set."),
        "/clear": (_clear, "", "Forget all but the system message."),
        "/undo": (_undo, "", "Forget the last question and its answer."),
        "/retry": (_retry, "", "Answer the last question again."),
        "/save": (_save, "FILE", "Write the messages to a new file, as JSON."),
        "/load": (_load, "FILE", "Go on from the messages of a file."),
        "/bye": (lambda talk, _: False, "", "End, as /exit and /quit do."),
    }
)
"""By name: the function, its argument and what it does."""

ALIASES: Mapping[str, str] = MappingProxyType({"/exit": "/bye", "/quit": "/bye", "/?": "/help"})
"""Other names of commands, as other programs have them."""


# ---------------------------------------------------------------- answers


def take_turn(talk: Conversation, asked: str) -> bool:
    """Answer one question, and append both messages; after Ctrl-C as much of the answer as was shown.

    Returns whether the answer came to its end.

    Raises what the answer raises, and then the question is not kept where a user may ask again.
    """
    talk.messages.append({"role": "user", "content": asked})
    said, watch, cut = "", Stopwatch(), False
    try:
        with _display(talk) as display, closing(answer_within_context(talk)) as pieces:
            for piece in pieces:
                watch.take(piece)
                cut = cut or isinstance(piece, Cut)
                if isinstance(piece, Thought):
                    if talk.reasoning:
                        display.think(piece)
                    continue
                said += piece
                display.write(piece)
    except KeyboardInterrupt:
        if not said:
            # Chat templates need an answer for each question.
            talk.messages.pop()
        else:
            talk.messages.append({"role": "assistant", "content": said})
        talk.console.print()
        return False
    except QuireError:
        if talk.console.is_terminal:
            talk.messages.pop()
        raise
    talk.messages.append({"role": "assistant", "content": said})
    if cut and "max_tokens" not in talk.sampling:
        note(CUT)
    if talk.verbose:
        note(watch.summary())
    return True


CUT = "(cut: the answer reached the limit of tokens, of the context or of new ones)"


def note(text: str) -> None:
    """A line about an answer, on standard error: a pipe has the answer alone."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, style="dim")


class Stopwatch:
    """How many tokens an answer had, and how long they took. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._first: float | None = None
        self._tokens = 0

    def take(self, piece: str) -> None:
        """A piece of the answer came."""
        if isinstance(piece, TokenCount):
            self._tokens = piece.tokens
        elif self._first is None and not isinstance(piece, Cut):
            self._first = self._clock()

    def summary(self) -> str:
        """In one line: tokens, seconds to the first one, tokens a second after it, seconds in all."""
        now = self._clock()
        said = [f"{self._tokens} token{'s' * (self._tokens != 1)}"] if self._tokens else []
        if self._first is not None:
            said.append(f"first after {self._first - self._began:.2f} s")
            if self._tokens > 1 and now > self._first:
                said.append(f"{(self._tokens - 1) / (now - self._first):.1f} tokens/s")
        return f"({', '.join([*said, f'{now - self._began:.2f} s in all'])})"


def answer_within_context(talk: Conversation) -> Generator[str, None, None]:
    """The answer's pieces. If the messages exceed the context, drop the oldest question and answer, and say so."""
    messages, fixed = talk.messages, talk.fixed
    while True:
        try:
            yield from talk.answer(messages)
            return
        except InvalidRequest as error:
            # No other word is in every server's message.
            if "context" not in str(error) or len(messages) < fixed + 3:
                raise
            del messages[fixed : fixed + 2]
            talk.say("(too long for the model: the oldest question and its answer are forgotten)")


class Display(Protocol):
    """Shows one answer while it comes."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Show what is left."""

    def think(self, piece: str) -> None:
        """Show a piece of reasoning."""

    def write(self, piece: str) -> None:
        """Show a piece of the answer."""


def _display(talk: Conversation) -> Display:
    return MarkdownDisplay(talk.console) if talk.markdown and talk.console.is_terminal else PlainDisplay(talk.console)


class PlainDisplay:
    """Text as it comes; thoughts on a terminal only, dimmed, so that a pipe has the answer alone."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._thinking = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._console.print()

    def think(self, piece: str) -> None:
        """See Display."""
        if self._console.is_terminal:
            self._console.print(escape(piece), style="dim italic", end="")
            self._thinking = True

    def write(self, piece: str) -> None:
        """See Display."""
        if self._thinking:
            self._console.print("\n")
            self._thinking = False
        self._console.out(piece, end="", highlight=False)


class MarkdownDisplay:
    """Markdown, rendered a block at a time: the last block is drawn anew as it grows, the others are final.

    So no more than a block is drawn again, and an answer longer than the screen scrolls as other text does.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._plain = PlainDisplay(console)
        self._block = ""
        self._live: Live | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._final(self._block)

    def think(self, piece: str) -> None:
        """See Display."""
        self._plain.think(piece)

    def write(self, piece: str) -> None:
        """See Display."""
        self._plain.write("")
        self._block += piece
        end = block_end(self._block)
        if end:
            done, self._block = self._block[:end], self._block[end:]
            self._final(done)
        if self._live is None:
            self._live = Live(console=self._console, transient=True, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
        # The end of a block that is longer than the screen.
        lines = self._block.splitlines()[-max(1, self._console.height - 2) :]
        self._live.update(Markdown("\n".join(lines)), refresh=True)

    def _final(self, text: str) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if text.strip():
            self._console.print(Markdown(text), end="\n")


_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})", re.MULTILINE)


def block_end(text: str) -> int:
    """Where the last complete block ends: after an empty line that is not within a fenced block of code; 0: none."""
    end = text.rfind("\n\n")
    while end >= 0:
        fence = ""
        for found in _FENCE.finditer(text, 0, end):
            mark = found[1]
            if not fence:
                fence = mark
            elif mark.startswith(fence):
                fence = ""
        if not fence:
            return end + 2
        end = text.rfind("\n\n", 0, end)
    return 0
