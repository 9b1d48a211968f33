"""`quire chat` as it is typed: commands, several lines, Markdown, Ctrl-C and history, through a pipe and a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quire.cli.conversation import Conversation, Message, Thought, block_end, converse
from quire.errors import InvalidRequest
from tests.live import FOREGROUND


def talk(
    typed: str, monkeypatch: pytest.MonkeyPatch, messages: list[Message] | None = None, **options: Any
) -> tuple[Conversation, str]:
    """A conversation whose answers repeat the question, and what it showed."""
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    shown = io.StringIO()
    terminal = options.pop("terminal", False)
    console = Console(file=shown, force_terminal=terminal, color_system=None, width=80)
    made = Conversation(
        console, messages or [], options.pop("answer", lambda said: iter([said[-1]["content"].upper()])), **options
    )
    converse(made)
    return made, shown.getvalue()


def contents(made: Conversation) -> list[str]:
    return [message["content"] for message in made.messages]


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        ("a \\\nb\n", "a \nb"),
        ('"""a\n\nb"""\n', "a\n\nb"),
        ('"""\na\n"""\n', "a"),
        ("/etc/hosts is what?\n", "/etc/hosts is what?"),
        ("//help\n", "/help"),
    ],
)
def test_a_question_may_have_several_lines_or_begin_with_a_slash(
    typed: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = talk(typed, monkeypatch)
    assert contents(made) == [asked, asked.upper()]


def test_turns_are_undone_retried_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = talk("/system s\na\nb\n/undo\n", monkeypatch)
    assert contents(made) == ["s", "a", "A"]
    made, shown = talk("a\n/retry\n/system s\n/system t\n", monkeypatch)
    assert (contents(made), shown) == (["t", "a", "A"], "A\nA\n")
    made, _ = talk("/system s\na\n/clear\nb\n/bye\nc\n", monkeypatch)
    assert contents(made) == ["s", "b", "B"]
    with pytest.raises(InvalidRequest, match="there is no answer yet"):
        talk("/undo\n", monkeypatch)


def test_sampling_is_set_checked_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling: dict[str, Any] = {"top_k": 3}
    typed = "/set temperature 0.5\n/set max-tokens 7\n/set stop END OF IT\n/set top_k\n/set\n/show\n"
    _, shown = talk(typed, monkeypatch, sampling=sampling)
    assert sampling == {"temperature": 0.5, "max_tokens": 7, "stop": ["END OF IT"]}
    assert shown.count("temperature: 0.5\nmax_tokens: 7\n") == 2, "/set alone shows what is set"


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("/set temprature 1", "Did you mean 'temperature'"),
        ("/set temperature -1", "temperature must be between"),
        ("/set temperature warm", "temperature must be"),
        ("/set max_tokens 1.5", "max_tokens must be"),
        ("/set reasoning maybe", "show, or hide"),
        ("/hlep", "Did you mean '/help'"),
        ("/save", "name a file"),
        ("/load", "name a file"),
        ("/load nowhere.json", "cannot read nowhere.json"),
    ],
)
def test_wrong_commands_are_refused_with_what_to_change(
    typed: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        talk(typed + "\n", monkeypatch)
    _, shown = talk(f"{typed}\na\n", monkeypatch, terminal=True)
    assert words in " ".join(shown.split())
    assert shown.endswith("A\n"), "at a terminal one goes on"


def test_a_conversation_is_saved_for_its_owner_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "talk.json"
    made, _ = talk(f"/system s\na\n/save {file}\n", monkeypatch)
    assert json.loads(file.read_text()) == made.messages
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again, _ = talk(f"/load {file}\nb\n", monkeypatch)
    assert contents(again) == ["s", "a", "A", "b", "B"]
    with pytest.raises(InvalidRequest, match="File exists"):
        talk(f"/save {file}\n", monkeypatch)
    for wrong in (
        "{}",
        "5",
        "[5]",
        '[{"role": "user"}]',
        '[{"role": "tool", "content": "x"}]',
        "nonsense",
        "[" * 99999,
    ):
        file.write_text(wrong)
        with pytest.raises(InvalidRequest):
            talk(f"/load {file}\n", monkeypatch)


def test_thoughts_are_shown_at_a_terminal_and_never_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(said: list[Message]) -> Iterator[str]:
        yield from (Thought("hmm"), "yes")

    for terminal, typed, seen in (
        (True, "a\n", True),
        (True, "/set reasoning hide\na\n", False),
        (False, "a\n", False),
    ):
        made, shown = talk(typed, monkeypatch, terminal=terminal, answer=answer)
        assert ("hmm" in shown) is seen
        assert contents(made) == ["a", "yes"]


def test_markdown_is_rendered_at_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "# Title\n\nSome **bold** text.\n\n```python\na = 1\n\nb = 2\n```\n\nend"

    def answer(said: list[Message]) -> Iterator[str]:
        yield from (text[i : i + 3] for i in range(0, len(text), 3))

    made, shown = talk("a\n", monkeypatch, terminal=True, markdown=True, answer=answer)
    assert contents(made) == ["a", text]
    assert "Some bold text." in shown
    assert shown.rstrip().endswith("end")
    assert talk("a\n", monkeypatch, markdown=True, answer=answer)[1] == f"{text}\n"


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("", 0),
        ("a\n", 0),
        ("a\n\nb", 3),
        ("a\n\nb\n\n", 6),
        ("```\na\n\nb", 0),
        ("x\n\n```\na\n\nb", 3),
        ("```\na\n\nb\n```\n\nc", 14),
        ("~~~~\n~~~\n\nb", 0),
    ],
)
def test_a_block_is_complete_after_an_empty_line_outside_code(text: str, end: int) -> None:
    assert block_end(text) == end


# ---------------------------------------------------------------- through a terminal


class Slow(BaseHTTPRequestHandler):
    """OpenAI's chat API, which says its question, and goes on without end after `forever`."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)  # type: ignore[attr-defined]
        said = asked["messages"][-1]["content"]
        self.send_response(200)
        self.end_headers()
        self._say(f"**heard** {said}")
        try:
            while said == "forever":
                self._say(" on")
                time.sleep(0.02)
        except OSError:
            self.server.left.set()  # type: ignore[attr-defined]
            return
        self.wfile.write(b"data: [DONE]\n\n")

    def _say(self, text: str) -> None:
        self.wfile.write(b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Tests are quiet."""


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *words: str, **environ: str) -> None:
        self._end, other = pty.openpty()
        self.seen = self.shown = ""
        self.process = subprocess.Popen(
            # A session's first terminal becomes the one whose Ctrl-C is a signal, which jobs in the background ignore.
            [*FOREGROUND, "setsid", "--ctty", sys.executable, "-m", "quire", *words],
            stdin=other,
            stdout=other,
            stderr=other,
            env={**os.environ, "TERM": "xterm-256color", **environ},
        )
        os.close(other)

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C, once readline waits for keys: it misses signals in the moment before."""
        time.sleep(0.5)
        self.type("\x03")

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Read until `text` is shown; what came before is not looked at again."""
        ends = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < ends, self.seen
            if select.select([self._end], [], [], 0.2)[0]:
                said = os.read(self._end, 1 << 16).decode(errors="replace")
                self.seen, self.shown = self.seen + said, self.shown + said
        self.seen = self.seen.partition(text)[2]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._end)


@contextmanager
def served() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        server.asked, server.left = [], threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_terminal_edits_pastes_stops_answers_and_keeps_history_where_asked(tmp_path: Path) -> None:
    file = tmp_path / "kept" / "history"
    with served() as server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        terminal = Terminal("chat", "--url", url, "--history-file", str(file))
        try:
            terminal.wait_for("you ")
            terminal.type("hello\r")
            terminal.wait_for("hello")
            terminal.wait_for("heard")
            terminal.wait_for("you ")
            terminal.type("\x1b[A\r")  # the arrow brings the question back
            terminal.wait_for("heard")
            terminal.wait_for("you ")
            terminal.type("forever\r")
            terminal.wait_for("on on")
            terminal.interrupt()
            terminal.wait_for("you ")
            assert server.left.wait(60), "an answer that is stopped is not generated further"  # type: ignore[attr-defined]
            terminal.type("\x1b[200~one\ntwo\x1b[201~\r")
            terminal.wait_for("heard")
            terminal.wait_for("you ")
            terminal.interrupt()
            terminal.wait_for("Ctrl-C again")
            terminal.wait_for("you ")
            terminal.interrupt()
            assert terminal.process.wait(60) == 0
        finally:
            terminal.close()
        asked = [[one["content"] for one in each["messages"]] for each in server.asked]  # type: ignore[attr-defined]
    assert [each[-1] for each in asked] == ["hello", "hello", "forever", "one\ntwo"]
    assert asked[-1][-2].startswith("**heard** forever on on"), "what was said is kept"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert file.read_text().splitlines()[-4:][0] == "hello"


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"COLUMNS": "20"}])
def test_odd_terminals_show_answers(environ: dict[str, str]) -> None:
    with served() as server:
        terminal = Terminal("chat", "--url", f"http://127.0.0.1:{server.server_address[1]}", **environ)
        try:
            terminal.wait_for("you ")
            terminal.type("hello\r")
            terminal.wait_for("heard")
            terminal.wait_for("you ")
            terminal.type("/bye\r")
            assert terminal.process.wait(60) == 0
            coloured = re.findall(r"\x1b\[[\d;]*3[0-7]m", terminal.shown)
            assert bool(coloured) is ("COLUMNS" in environ)
        finally:
            terminal.close()


def test_a_pipe_has_the_answers_alone() -> None:
    with served() as server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        found = subprocess.run(
            [sys.executable, "-m", "quire", "chat", "--url", url],
            input="a\n/set top_p 0.5\nb\n",
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    assert (found.stdout, found.stderr) == ("**heard** a\n**heard** b\n", "")
    assert [each.get("top_p") for each in server.asked] == [None, 0.5]  # type: ignore[attr-defined]
