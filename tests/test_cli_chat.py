"""`quire chat` and `quire generate`: what is asked, remembered, forgotten and shown."""

from __future__ import annotations

import io
import json
import re
import socket
import threading
from collections.abc import Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import quire
from quire.cli import conversation, main
from quire.cli.chat import ChatClient
from quire.cli.conversation import CUT, Conversation, Message, Stopwatch, Thought, TokenCount, converse
from quire.config import Settings
from quire.errors import InvalidConfig, InvalidRequest, QuireError, Unauthorized, Unavailable
from quire.parsers.parts import TextPart
from quire.types import SamplingParams, TokenTotal


class Server(ThreadingHTTPServer):
    """OpenAI's chat API as far as it is used here; keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.status, self.lines = 200, chunks("Good", " day")
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


def chunks(*texts: str) -> list[bytes]:
    chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
    chunks += [{"choices": [{"delta": {"content": text}}]} for text in texts]
    chunks += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}, {"choices": []}]
    return [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks] + [b": note\n\n", b"data: [DONE]\n\n"]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self._answer([json.dumps({"data": [{"id": "served"}]}).encode()])

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(self.server.lines)

    def _answer(self, lines: list[bytes]) -> None:
        self.server.keys.append(self.headers["Authorization"])
        self.send_response(self.server.status)
        self.end_headers()
        for line in lines:
            self.wfile.write(line)

    def log_message(self, format: str, *args: Any) -> None:
        """Tests are quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as opened:
        thread = threading.Thread(target=opened.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield opened
        opened.shutdown()
        thread.join()


HELLO: list[Message] = [{"role": "user", "content": "hello"}]


def test_a_remote_answer_comes_in_pieces_from_the_model_that_is_served(server: Server) -> None:
    assert list(ChatClient(server.url + "/v1/").answer(HELLO, temperature=0)) == ["Good", " day"]
    assert server.asked == [{"model": "served", "messages": HELLO, "stream": True, "temperature": 0}]


def test_a_named_model_and_a_key_are_sent(server: Server) -> None:
    list(ChatClient(server.url, key="sesame", model="mine").answer(HELLO))
    list(ChatClient(server.url, model="mine").answer(HELLO))
    assert server.asked[0]["model"] == "mine"
    assert server.keys == ["Bearer sesame", None], "where there is no key none is sent"


@pytest.mark.parametrize(
    ("status", "error"), [(400, InvalidRequest), (401, Unauthorized), (429, Unavailable), (500, Unavailable)]
)
def test_a_servers_refusal_keeps_its_words(server: Server, status: int, error: type[QuireError]) -> None:
    server.status, server.lines = status, [json.dumps({"error": {"message": "because"}}).encode()]
    with pytest.raises(error, match="because"):
        list(ChatClient(server.url, model="m").answer(HELLO))


def test_a_refusal_without_words_shows_the_status(server: Server) -> None:
    server.status, server.lines = 502, [b"<html>"]
    with pytest.raises(Unavailable, match="502"):
        list(ChatClient(server.url, model="m").answer(HELLO))


def test_an_error_in_mid_stream_is_shown(server: Server) -> None:
    server.lines = [*chunks("Go")[:2], b'data: {"error": {"message": "engine died"}}\n\n']
    answer = ChatClient(server.url, model="m").answer(HELLO)
    assert next(answer) == "Go"
    with pytest.raises(Unavailable, match="engine died"):
        next(answer)


def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(server: Server) -> None:
    server.lines = chunks("Go")[:2]
    answer = ChatClient(server.url, model="m").answer(HELLO)
    assert next(answer) == "Go"
    with pytest.raises(Unavailable, match="in the middle of its answer"):
        next(answer)


@pytest.mark.parametrize(
    "line", [b"data: {bad\n\n", b'data: {"choices": [{"text": "a"}]}\n\n', b"data: 5\n\n", b'data: {"choices": 5}\n\n']
)
def test_a_server_that_speaks_otherwise_is_refused_in_a_line(server: Server, line: bytes) -> None:
    server.lines = [line]
    with pytest.raises(Unavailable, match="does not speak OpenAI's API"):
        list(ChatClient(server.url, model="m").answer(HELLO))


def test_a_server_of_another_protocol_is_refused_in_a_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def speak() -> None:
            with other.accept()[0] as taken:
                taken.recv(1 << 16)
                taken.sendall(b"SSH-2.0-other\r\n")

        thread = threading.Thread(target=speak)
        thread.start()
        with pytest.raises(Unavailable, match="the connection failed"):
            list(ChatClient(f"127.0.0.1:{other.getsockname()[1]}").answer(HELLO))
        thread.join()


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(Unavailable, match=r"no server answers at 127\.0\.0\.1:9"):
        list(ChatClient("127.0.0.1:9", model="m").answer(HELLO))


def test_a_server_without_tls_is_not_taken_for_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            peer = listening.accept()[0]
            with peer:
                peer.recv(4096)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        at = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(Unavailable, match=f"It may speak no TLS: try http://{at}$"):
            list(ChatClient(f"https://{at}", model="m").answer(HELLO))
        thread.join()


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:abc", "http://x:99999", "http://[::1", "http://a b"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfig, match="--url"):
        ChatClient(url)


def talk(lines: str, answer: Any, messages: list[Message], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    console = Console(file=io.StringIO(), soft_wrap=True)
    converse(Conversation(console, messages, answer))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_conversation_is_remembered_and_empty_lines_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def answer(messages: list[Message]) -> Iterator[str]:
        seen.append([m["content"] for m in messages])
        yield from ("[b]", str(len(seen)))

    shown = talk("one\n\n  \ntwo\n", answer, [{"role": "system", "content": "s"}], monkeypatch)
    assert seen == [["s", "one"], ["s", "one", "[b]1", "two"]]
    assert shown == "[b]1\n[b]2\n"


def test_an_answer_has_no_colours_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("q\n"))
    said = io.StringIO()
    console = Console(file=said, soft_wrap=True, force_terminal=True, color_system="truecolor", highlight=True)
    converse(Conversation(console, [], lambda messages: iter(["1 and ", "True 'x' /y"])))
    assert "1 and True 'x' /y" in said.getvalue()


def test_what_no_longer_fits_is_forgotten_oldest_first_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again, but never the system message."""
    asked: list[list[str]] = []

    def answer(messages: list[Message]) -> Iterator[str]:
        if len(messages) > 4:
            raise InvalidRequest("longer than this model's context")
        asked.append([message["content"] for message in messages])
        yield messages[-1]["content"].upper()

    messages: list[Message] = [{"role": "system", "content": "s"}]
    shown = talk("one\ntwo\nthree\nfour\n", answer, messages, monkeypatch).splitlines()
    assert asked == [
        ["s", "one"],
        ["s", "one", "ONE", "two"],
        ["s", "two", "TWO", "three"],
        ["s", "three", "THREE", "four"],
    ]
    assert [(m["role"], m["content"]) for m in messages[:2]] == [("system", "s"), ("user", "three")]
    assert [line for line in shown if "forgotten" not in line] == ["ONE", "TWO", "THREE", "FOUR"]
    assert ["forgotten" in line for line in shown] == [False, False, True, False, True, False]


def test_without_words_to_begin_with_the_oldest_question_is_forgotten_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def answer(messages: list[Message]) -> Iterator[str]:
        if len(messages) > 3:
            raise InvalidRequest("longer than this model's context")
        asked.append([message["content"] for message in messages])
        yield "fine"

    talk("one\ntwo\nthree\n", answer, [], monkeypatch)
    assert asked == [["one"], ["one", "fine", "two"], ["two", "fine", "three"]]


def test_a_single_question_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(messages: list[Message]) -> Iterator[str]:
        raise InvalidRequest("too long")
        yield ""

    with pytest.raises(InvalidRequest):
        talk("one\n", answer, [], monkeypatch)


def test_other_refusals_drop_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(messages: list[Message]) -> Iterator[str]:
        if len(messages) > 3:
            raise InvalidRequest("the model 'x' is not served here")
        yield "fine"

    messages: list[Message] = []
    with pytest.raises(InvalidRequest, match="not served"):
        talk("one\ntwo\nthree\n", answer, messages, monkeypatch)
    assert [m["content"] for m in messages] == ["one", "fine", "two", "fine", "three"][: len(messages)]
    assert len(messages) >= 3


def test_who_types_hears_what_failed_and_may_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(messages: list[Message]) -> Iterator[str]:
        yield "so fa"
        if messages[-1]["content"] == "two":
            raise Unavailable("it [broke] off")

    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\nthree\n"))
    console = Console(file=io.StringIO(), soft_wrap=True, force_terminal=True, color_system=None)
    messages: list[Message] = []
    converse(Conversation(console, messages, answer))
    assert [m["content"] for m in messages] == ["one", "so fa", "three", "so fa"]
    assert "it [broke] off" in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_interrupted_answer_is_kept_as_far_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(messages: list[Message]) -> Iterator[str]:
        yield "so fa"
        if len(messages) == 1:
            raise KeyboardInterrupt

    messages: list[Message] = []
    talk("one\ntwo\n", answer, messages, monkeypatch)
    assert [m["content"] for m in messages] == ["one", "so fa", "two", "so fa"]


def run(*args: str, input: str | None = None) -> Result:
    return CliRunner().invoke(main, args, input=input)


def test_chat_with_a_server_needs_no_model(server: Server) -> None:
    result = run("chat", "--url", server.url, "--system", "be kind", "--max-tokens", "5", input="hello\n")
    assert (result.exit_code, result.stdout) == (0, "Good day\n"), result.output
    assert server.asked[0]["max_tokens"] == 5
    assert server.asked[0]["messages"] == [{"role": "system", "content": "be kind"}, *HELLO]


class Echo:
    """Stands in for LLM."""

    ends = "stop"

    def __init__(self, *, settings: Settings) -> None:
        self.settings = settings

    def __enter__(self) -> Echo:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to give back."""

    def default_sampling_params(self, **changed: Any) -> SamplingParams:
        return SamplingParams(**changed)

    def stream(self, prompt: str, params: SamplingParams) -> Generator[str, None, TokenTotal]:
        yield from (f"<{prompt}>", f" {params.max_tokens} {params.stop}", f" {self.settings.model.seed}")
        return TokenTotal(3, self.ends)

    def stream_chat_parts(self, messages: list[Message], params: SamplingParams) -> Generator[TextPart, None, Any]:
        yield TextPart("reasoning", "hm")
        yield from (TextPart("content", message["content"]) for message in messages)
        return TokenTotal(len(messages), self.ends)


@pytest.fixture
def _echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quire, "LLM", Echo, raising=False)


@pytest.mark.usefixtures("_echo")
def test_generate_prints_the_completion() -> None:
    assert run("generate", "hi", "--max-tokens", "7", "--stop", "x", "--seed", "3").stdout == "<hi> 7 ('x',) 3\n"
    assert run("generate", "-", input="from a pipe").stdout == "<from a pipe> None () None\n"


@pytest.mark.usefixtures("_echo")
def test_generate_without_a_prompt_begins_a_story() -> None:
    assert run("generate").stdout == "Once upon a time<Once upon a time> None () None\n"


@pytest.mark.usefixtures("_echo")
def test_chat_in_this_process() -> None:
    assert run("chat", "--system", "s", input="a\nb\n").stdout == "sa\nsasab\n"


@pytest.mark.usefixtures("_echo")
def test_run_asks_once_what_its_words_or_standard_input_say() -> None:
    assert run("run", "--model", "embedded", "embedded", "how", "so").stdout == "how so\n"
    assert run("run", "embedded", input="one\ntwo\n").stdout == "one\ntwo\n\n", "one question, not two"
    assert run("run", "embedded", "Summarise:", "-", input="one").stdout == "Summarise: one\n"
    for words, why in (
        ((), "standard input is empty"),
        (("-",), "standard input is empty"),
        ((" ",), "the prompt is empty"),
    ):
        result = run("run", "embedded", *words, input="\n")
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == f'Error: there is no prompt: {why}. Write quire run MODEL "a question"\n'
    meant = run("run", "Why is it so?", input="")
    assert meant.exit_code == 2
    assert meant.stderr == (
        "Error: the first argument of `quire run` is the model: write quire run embedded 'Why is it so?'\n"
    )


@pytest.mark.usefixtures("_echo")
@pytest.mark.parametrize("command", ["run", "chat"])
def test_verbose_says_tokens_and_times_beside_the_answer(command: str) -> None:
    result = run(command, "embedded", "--verbose", input="a\n")
    assert result.stdout.strip() == "a"
    assert re.fullmatch(r"\(1 token, first after \d+\.\d\d s, \d+\.\d\d s in all\)\n", result.stderr), result.stderr


def test_a_servers_tokens_are_asked_for_where_they_are_shown(server: Server) -> None:
    server.lines.insert(-1, b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n')
    result = run("chat", "--url", server.url, input="a\n/set verbose on\nb\n")
    assert result.stdout == "Good day\nGood day\n" and result.stderr.startswith("(2 tokens, first after")
    assert [one.get("stream_options") for one in server.asked] == [None, {"include_usage": True}]


@pytest.mark.usefixtures("_echo")
def test_an_answer_that_was_cut_is_followed_by_a_line_that_says_so(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On standard error. Not where the user has set max_tokens, and asked for it."""
    server.lines = [line.replace(b'"stop"', b'"length"') for line in server.lines]
    result = run("chat", "--url", server.url, input="a\n/set max_tokens 3\nb\n")
    assert (result.stdout, result.stderr) == ("Good day\nGood day\n", f"{CUT}\n")
    monkeypatch.setattr(Echo, "ends", "length")
    for words in (("run", "embedded", "aa"), ("generate", "aa"), ("chat",)):
        cut, asked = run(*words, input="a\n"), run(*words, "--max-tokens", "2", input="a\n")
        assert (cut.exit_code, cut.stderr) == (0, f"{CUT}\n"), cut.output
        assert (asked.exit_code, asked.stderr) == (0, ""), asked.output


def test_seconds_and_tokens_of_an_answer() -> None:
    watch = Stopwatch(iter([1.0, 1.5, 3.5]).__next__)
    for piece in ("a", Thought("b"), TokenCount(41)):
        watch.take(piece)
    assert watch.summary() == "(41 tokens, first after 0.50 s, 20.0 tokens/s, 2.50 s in all)"
    assert Stopwatch(iter([1.0, 2.0]).__next__).summary() == "(1.00 s in all)"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("chat", "--url", "embedded"), "for a model in this process: quire chat embedded"),
        (("chat", "--history-file", "/dev/null/x"), "/dev/null: is not a folder"),
        (("chat", "--history-file", "/proc/none/x"), "cannot be used: /proc/none: no such file"),
        (("replay", "nowhere"), "there is no file or folder nowhere: `quire serve --recording-dir FOLDER` makes"),
    ],
)
def test_what_is_not_there_is_named_with_what_to_write(words: tuple[str, ...], says: str) -> None:
    result = run(*words, input="hi\n")
    assert result.exit_code in (1, 2)
    assert says in result.stderr and result.stderr.count("\n") == 1


def test_a_history_needs_a_readline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(conversation, "readline", None)
    result = run("chat", "--history-file", str(tmp_path / "h"), input="")
    assert result.exit_code == 2 and "readline, which this Python was built without" in result.stderr


@pytest.mark.usefixtures("_echo")
def test_impossible_sampling_is_one_line() -> None:
    result = run("generate", "hi", "--temperature", "-1")
    assert result.exit_code == 2
    assert result.stderr == "Error: temperature must be between 0.0 and 100.0, not -1.0\n"


@pytest.mark.usefixtures("_echo")
def test_options_of_a_server_are_not_taken_offline() -> None:
    result = run("generate", "hi", "--port", "3")
    assert result.exit_code == 2
    assert "there is no option --port" in result.stderr
