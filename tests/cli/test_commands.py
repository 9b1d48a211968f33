"""What commands make of their arguments, and what they print, as written down."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

import quire
from quire.assembly.limits import BuiltExecutor, Limits
from quire.cli import base, chat, diff, executor, main, serve, show, verify
from quire.engine.executor import Description
from quire.errors import InvalidConfig, InvalidModel, InvalidRequest, QuireError
from quire.executors.synthetic import SyntheticExecutor
from quire.parsers.parts import TextPart
from quire.scheduler.plan import Plan, Result
from quire.types import SamplingParams, TokenLogprobs, TokenTotal
from tests.calls import Calls, shown
from tests.expected import check

EXPECTED = Path(__file__).parent / "expected"


def invoked(*words: str, input: str | None = None) -> list[str]:
    found = CliRunner(env={"QUIRE_LOOKAHEAD": "1"}).invoke(main, words, input=input)
    raised = found.exception
    assert raised is None or isinstance(raised, SystemExit), found.output
    return [f"$ quire {' '.join(words)}", f"exit {found.exit_code}", *found.output.splitlines(), ""]


@pytest.fixture
def calls() -> Calls:
    return Calls()


SERVED: tuple[tuple[str, ...], ...] = (
    ("m",),
    ("--model", "m", "m"),
    ("--model", "m", "n"),
    ("m", "--host", "0.0.0.0"),
    ("m", "--host", "0.0.0.0", "--allowed-hosts", "a.b"),
    ("m", "--host", "10.0.0.1", "--api-key", "k"),
    ("m", "--host", "10.0.0.1", "--admin-key", "k", "--ssl-keyfile", "f", "--ssl-certfile", "c"),
    ("m", "--host", "10.0.0.1", "--api-key", "k", "--ssl-keyfile", "f", "--ssl-certfile", "c"),
    ("m", "--backend", "vllm", "--max_model_len", "5", "--", "--one", "-2"),
    ("m", "--vllm-args", "0", "--", "--one"),
    ("m", "--no-enable-prefix-caching", "--deterministic", "--api-key", "a", "--api-key", "b"),
    ("m", "--prot", "5"),
    ("m", "--port=x"),
    ("m", "n"),
    ("--config", "missing.yaml"),
)


def test_servers_are_started_as_written_down(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("serve", "relay"):
        monkeypatch.setattr(
            serve,
            name,
            lambda settings, name=name: click.echo(
                f"{name} { ({each: shown(settings.get(each)) for each in sorted(settings.sources)}) }"
            ),
        )
    lines = [line for words in SERVED for line in invoked("serve", *words)]
    for words in (("srve",), ("complete",), ("bench", "http"), ("run-batch",), ("bench", "ltency"), ("version", "x")):
        lines += invoked(*words)
    lines += invoked("--help") + invoked("bench", "--help")
    failures = (
        InvalidModel("a\n  b"),
        InvalidConfig("c"),
        InvalidRequest("d"),
        QuireError("e"),
        OSError(2, "gone", "f.txt"),
    )
    for failure in failures:
        monkeypatch.setattr(serve, "serve", Calls().to("serve", raises=failure))
        lines += invoked("serve", "m")
    monkeypatch.setattr(base.traceback, "print_exc", lambda: click.echo("a traceback"))
    lines += invoked("serve", "m", "--debug")
    check(EXPECTED / "serve.txt", "\n".join(lines))


HOSTED: tuple[tuple[str, ...], ...] = (
    ("m",),
    ("m", "--listen", "localhost:7", "--max-num-seqs", "3", "--lookahead", "2"),
    ("m", "--listen", "10.0.0.1:7"),
    ("m", "--listen", "10.0.0.1:7", "--tls-cert", "cert", "--tls-key", "key"),
    ("m", "--listen", "10.0.0.1:7", "--tls-cert", "cert", "--tls-key", "key", "--tls-client-ca", "ca"),
    ("m", "--tls-cert", "cert"),
    ("m", "--tls-key", "key"),
    ("m", "--tls-client-ca", "ca"),
    ("m", "--listen", "7"),
    ("m", "--listen", ":7"),
    ("m", "--listen", "a:65536"),
    ("m", "--listen", "a:65535"),
    ("m", "--listen", "a:b"),
    ("m", "--port", "7"),
)


def test_executors_are_started_as_written_down(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    about = Description(40, 16, 64, 2048, 100, dtype="float32", device="there")
    inner = SimpleNamespace(describe=lambda: about, close=calls.to("executor.close"))
    host = SimpleNamespace(executor=inner, port=77, stop=calls.to("host.stop"))
    module = SimpleNamespace(
        read=lambda path, param: f"{param} of {path}",
        Credentials=lambda *given: given,
        host=lambda settings, *rest: calls.to("host", host)(
            settings.model.model, settings.scheduler.max_num_seqs, *rest
        ),
    )
    export = SimpleNamespace(export=calls.to("export"))
    monkeypatch.setattr(executor, "extra", lambda name, kind: module if kind == "grpc" else export)
    monkeypatch.setattr(executor.signal, "signal", lambda number, handler: calls.lines.append(number.name))
    monkeypatch.setattr(executor.threading, "Event", lambda: SimpleNamespace(wait=calls.to("wait")))
    monkeypatch.setattr(executor, "locate", lambda name: f"found {name}")
    for words in HOSTED:
        said = invoked("executor", *words)
        calls.lines += said
    for words in (("m", "f"), ("m", "f", "--int8"), ("m",)):
        said = invoked("export-onnx", *words)
        calls.lines += said
    check(EXPECTED / "executor.txt", "\n".join(calls.lines))


class Spoken:
    """Stands in for LLM."""

    def __init__(self, *, settings: Any) -> None:
        self.seed = settings.model.seed

    def __enter__(self) -> Spoken:
        return self

    def __exit__(self, *_: object) -> None:
        click.echo("(closed)")

    def default_sampling_params(self, **changed: Any) -> SamplingParams:
        return SamplingParams(**{"temperature": 0.25, **changed})

    def stream(self, prompt: str, params: SamplingParams) -> Any:
        yield from (f"<{prompt}>", f" {self.seed} ", shown(params))
        return TokenTotal(3, "stop")

    def stream_chat_parts(self, messages: list[dict[str, str]], params: SamplingParams) -> Any:
        said = (f"{len(messages)} ", f"{messages[0]} {messages[-1]['content']} {shown(params)}")
        yield from (TextPart("content", text) for text in said)
        return TokenTotal(2, "stop")


SAMPLED = ("--max-tokens", "5", "--top-k", "3", "--min-p", "0.5", "--stop", "x", "--stop", "y", "--temperature", "0")


def test_answers_are_asked_for_as_written_down(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quire, "LLM", Spoken, raising=False)
    lines = invoked("generate") + invoked("generate", "--seed", "4", "a b", *SAMPLED)
    lines += invoked("generate", "-", input="typed\n") + invoked("generate", "a", "--port", "1")
    lines += invoked("generate", "a", "--temperature", "warm") + invoked("generate", "a", "--temperature", "-1")
    lines += invoked("chat", input="a\n\nb\n") + invoked("chat", "--system", "s", *SAMPLED, input="a\nb\n")

    class Remote:
        def __init__(self, url: str, **named: Any) -> None:
            click.echo(f"to {url} {named}")

        def answer(self, messages: list[dict[str, str]], **sampling: Any) -> Any:
            yield f"{messages} {sampling}"

    monkeypatch.setattr(chat, "ChatClient", Remote)
    lines += invoked("chat", "--url", "u", input="a\n")
    named = ("--model", "m", "--api-key", "k", "--api-key", "l", "--system", "s")
    lines += invoked("chat", "--url", "u", *named, *SAMPLED, input="a\nb\n")
    check(EXPECTED / "answers.txt", "\n".join(lines))


class Answered:
    """An HTTP connection whose answers are given."""

    def __init__(self, calls: Calls, answers: dict[str, tuple[int, bytes]], kind: str) -> None:
        self.calls, self.answers, self.kind = calls, answers, kind

    def __call__(self, place: str, **named: Any) -> Answered:
        self.calls.lines.append(f"  {self.kind} {place} {named}")
        return self

    def request(self, method: str, path: str, **named: Any) -> None:
        self.calls.lines.append(f"  {method} {path} {named}")
        self.path = path

    def getresponse(self) -> Any:
        status, body = next(each for path, each in self.answers.items() if self.path.endswith(path))
        if status == 0:
            raise ConnectionError("it is gone")

        class Response(list[bytes]):
            def read(self) -> bytes:
                return b"".join(self)

            def __enter__(self) -> Response:
                return self

            def __exit__(self, *_: object) -> None:
                pass

        found = Response(body.splitlines(keepends=True))
        found.status = status  # type: ignore[attr-defined]
        return found

    def close(self) -> None:
        self.calls.lines.append("  closed")


SAID = b"".join(
    b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n" for text in ("a", "", "b")
)
DONE = b"data: [DONE]\n"
LISTING = (200, b'{"data": [{"id": "first"}, {"id": "second"}]}')
REPLIES: tuple[tuple[int, bytes], ...] = (
    (200, b": comment\n\n" + SAID + DONE + SAID),
    (200, SAID),
    (200, b'data: {"choices": [{"delta": {}}, {"delta": {"content": "c"}}]}\n' + DONE),
    (200, b"data:" + DONE[6:]),
    (200, b'data: {"error": {"message": "failed"}}\n'),
    (200, b"data: nonsense\n"),
    (200, b'data: {"choices": [5]}\n'),
    (400, b'{"error": {"message": "longer than the context"}}'),
    (404, b'{"error": {"message": "no such model"}}'),
    (401, b'{"error": {"message": "whose key?"}}'),
    (403, b'{"error": {"message": "not you"}}'),
    (500, b'{"error": {"message": "broken"}}'),
    (503, b"<html>"),
    (400, b'{"error": "plain"}'),
    (0, b""),
)
ADDRESSES = (
    *("127.0.0.1:8000", "http://h", "https://h:1/v1", "http://u:p@h:1/x/v1/", "http://h/v1/v1", "http://[::1]:5/"),
    *("ftp://h", "http://", "http://h:0", "http://h:x", "http://h h", "", "http://[::1"),
)


def test_servers_are_talked_to_as_written_down(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, tuple[int, bytes]] = {"/models": LISTING, "/completions": REPLIES[0]}
    for kind in ("HTTPConnection", "HTTPSConnection"):
        monkeypatch.setattr(chat.http.client, kind, Answered(calls, answers, kind))
    asked = [{"role": "user", "content": "hé"}]

    def tried(title: str, work: Callable[[], Any]) -> None:
        calls.lines.append(title)
        try:
            for piece in work():
                calls.lines.append(f"  says {piece!r}")
        except QuireError as error:
            calls.lines.append(f"  {type(error).__name__}: {error}")

    for url in ADDRESSES:
        tried(url, lambda url=url: chat.ChatClient(url, key="k" if "x" in url else None).answer(asked, top_k=3))
    for reply in REPLIES:
        answers["/completions"] = reply
        tried(str(reply)[:90], lambda: chat.ChatClient("h", model="m").answer(asked))
    for listing in ((200, b'{"data": []}'), (200, b"5"), (401, b""), (0, b"")):
        answers["/models"] = listing
        tried(f"models {listing}", lambda: chat.ChatClient("h").answer(asked))
    answers["/models"] = LISTING
    answers["/completions"] = REPLIES[0]
    client = chat.ChatClient("h")
    tried("first", lambda: client.answer(asked))
    tried("again", lambda: client.answer(asked))
    check(EXPECTED / "talks.txt", "\n".join(calls.lines))


class Rounded(SyntheticExecutor):
    """Scores its tokens by how many rows a step has, where it departs; and preempted requests by another token."""

    departs = False

    def launch(self, plan: Plan) -> Any:
        handle = super().launch(plan)
        made: Result = handle.result()
        scores = {
            s: [TokenLogprobs(one.token, -1.0 - 0.5**20 * len(plan.spans) * self.departs, 1) for one in each]
            for s, each in made.logprobs.items()
        }
        if self.departs and len(plan.spans) > 4:
            scores = {s: [TokenLogprobs(one.token + 1, one.logprob, 1) for one in each] for s, each in scores.items()}
        handle.logprobs = scores
        return handle


def test_verifications_are_reported_as_written_down(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(verify.time, "perf_counter", lambda: next(clock) / 8)
    monkeypatch.setattr(verify.platform, "machine", lambda: "machine")
    monkeypatch.setattr(verify.torch, "__version__", "9")
    monkeypatch.setattr(verify.torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(verify, "require_text", lambda settings, command: None)
    monkeypatch.setattr(verify, "locate", lambda name, **rest: calls.say("located", rest))
    monkeypatch.setattr(verify, "read_config", lambda folder: {})
    monkeypatch.setattr(verify, "read_spec", lambda config: SimpleNamespace(vocab=90, context=700))
    monkeypatch.setattr(verify, "build_tokenizer", lambda settings: SimpleNamespace(encode=lambda text: (5, 6, 7, 8)))

    def built(settings: Any) -> Any:
        kept = ("deterministic", "speculative_config", "max_num_seqs", "max_model_len", "enable_prefix_caching")
        calls.lines.append(f"an executor of { ({name: settings.get(name) for name in kept}) }")
        if settings.scheduler.speculative_config is not None and "ngram" not in settings.scheduler.speculative_config:
            raise InvalidConfig("no draft is here")
        made = Rounded(pages=200, page_size=16, rows=16, max_model_len=700, vocab_size=90)
        made.departs = not settings.execution.deterministic
        made.close = calls.to("close")  # type: ignore[method-assign]
        return BuiltExecutor(made, Limits(700, 16, 8, 16, 0, 64, 64), {})

    monkeypatch.setattr(verify, "make_executor", built)
    for words in (
        ("--deterministic", "--repeat", "2"),
        ("--repeat", "0", "--requests", "5", "--new", "6", "m"),
        ("--repeat", "1", "--requests", "3", "--new", "3", "--json", "m", "--seed", "9", "--max-model-len", "60"),
        ("--speculative-config", '{"method": "ngram"}', "--repeat", "0", "--requests", "2"),
        ("--new", "700"),
    ):
        said = invoked("verify", *words)
        calls.lines += said
    check(EXPECTED / "verify.txt", "\n".join(line.rstrip() for line in calls.lines))


def test_a_comparison_needs_a_package_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff, "import_module", Calls().to("import_module", raises=ImportError("transformers")))
    with pytest.raises(InvalidConfig, match=r"^quire diff compares with transformers: pip install 'quire-llm\[hf\]' "):
        diff.reference(Path("folder"), (5,))


def test_comparisons_are_reported_as_written_down(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff, "require_text", lambda settings, command: None)
    monkeypatch.setattr(diff, "locate", lambda name, **rest: calls.say("located", [name, rest]) or Path("folder"))
    tokens = iter([(5, 6, 7), InvalidModel("no tokenizer"), (5,), (5,)])

    def encode(settings: Any) -> Any:
        found = next(tokens)
        if isinstance(found, Exception):
            raise found
        return SimpleNamespace(encode=lambda text: found)

    monkeypatch.setattr(diff, "build_tokenizer", encode)
    model = SimpleNamespace(spec=SimpleNamespace(vocab=9))
    monkeypatch.setattr(diff, "load_model", calls.to("load_model", model))
    wanted = [torch.arange(6.0).view(2, 3) * (i + 1) for i in range(3)]
    wanted[2] = torch.zeros(2, 3)
    monkeypatch.setattr(diff, "reference", calls.to("reference", wanted))
    names = ("layer 0", "layer 1", "logits")
    for change in (0.0, 1e-3, 1e-2, float("nan")):
        mine = [(name, each + (change if name == "layer 1" else 0)) for name, each in zip(names, wanted, strict=True)]
        monkeypatch.setattr(diff, "own", lambda model, tokens, mine=mine: calls.say("own", list(tokens)) or mine)
        said = invoked("diff", "m", "--revision", "r", "--download-dir", "d")
        calls.lines += said
    monkeypatch.setattr(show.quire, "__version__", "1.2.3")
    monkeypatch.setattr(show.platform, "python_version", lambda: "3.99")
    monkeypatch.setattr(show, "version", lambda name: f"{name} of old")
    calls.lines += invoked("version")
    monkeypatch.setattr(show, "version", Calls().to("version", raises=show.PackageNotFoundError("torch")))
    calls.lines += invoked("version")
    check(EXPECTED / "compared.txt", "\n".join(calls.lines))
