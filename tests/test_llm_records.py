"""What `LLM` asks its engine for, and what callers get, for every kind of call, as written down."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams, llm
from quire.assembly.prompts import ReadPrompt
from quire.config import Settings
from quire.engine.executor import Description
from quire.engine.thread import Listener
from quire.errors import QuireError
from quire.frontend.interface import Call, Delta
from quire.frontend.outputs import request_output
from quire.scheduler.constraint import Constraint
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.tokenizer import Tokenizer
from quire.types import Request, RequestOutput, RequestStepOutput, StructuredOutputsParams, TokenLogprobs
from quire.weights.pooling import GENERATES
from tests.calls import Calls, shown
from tests.expected import check
from tests.test_llm import CONTEXT, tokenizer

EXPECTED = Path(__file__).parent / "expected" / "llm.txt"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}[{{ tools | length }}]{% endif %}{% if add_generation_prompt %}<a>{% endif %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
)


class Thread:
    """An engine's thread that answers at once: two letters in one step, the end in the next."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.fails: QuireError | None = None
        self.pooled = np.arange(4, dtype="<f4").tobytes()
        self.spoken = ["hi", "."]

    def submit(self, each: list[tuple[Request, Constraint, Listener]]) -> None:
        for request, constraint, listener in each:
            self.calls.lines.append(f"  {shown(request)} {shown(constraint)}")
            if self.fails is not None:
                listener.lost(self.fails)
                continue
            self._answer(request, listener)

    def _answer(self, request: Request, listener: Listener) -> None:
        wanted = request.sampling.logprobs is not None
        prompt = tuple(TokenLogprobs(token, -1.0, 1) for token in request.prompt[1:])
        scores = prompt if request.sampling.prompt_logprobs is not None else ()
        pooled = self.pooled if request.sampling.pooling is not None else b""
        for i, text in enumerate(self.spoken):
            tokens = tokenizer().encode(text)
            logprobs = tuple(TokenLogprobs(token, -0.25, 1 + i) for token in tokens) if wanted else ()
            last = i == len(self.spoken) - 1
            event = RequestStepOutput(
                request.id,
                tokens,
                "length" if last else None,
                logprobs=logprobs,
                prompt_logprobs=() if i else scores,
                num_cached=0 if i else request.choice + 2,
                pooled=b"" if i else pooled,
            )
            ended = listener.take(event)
            self.calls.lines.append(f"  {request.id} takes {text!r}: {ended}")
            if ended is not None:
                return

    def end(self, ids: list[str], *, wait: bool) -> None:
        self.calls.lines.append(f"  end {ids} wait {wait}")

    def check(self) -> None:
        self.calls.lines.append("  check")

    def reset_prefix_cache(self) -> None:
        self.calls.lines.append("  reset_prefix_cache")

    def leave(self) -> None:
        """Called when the process ends."""

    def close(self) -> None:
        self.calls.lines.append("  close")


class Grammars:
    """Compiles nothing."""

    def __init__(self, compiler: Any, calls: Calls) -> None:
        self.calls = calls

    def warm_up(self) -> None:
        self.calls.lines.append("  warm_up")

    def get_or_compile(self, request: Request) -> str:
        return f"a grammar of {request.sampling.structured_outputs}"

    def close(self) -> None:
        self.calls.lines.append("  grammars are closed")


class Made:
    """An `LLM` and what stands in for its parts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, template: str | None = TEMPLATE, **options: Any) -> None:
        self.calls, self.threads = Calls(), list[Thread]()
        about = Description(9, 4, 8, CONTEXT, 300, supports_pooling=options.pop("pools", True))
        defaults = {"temperature": 0.5, "max_tokens": 7}
        text = SimpleNamespace(
            pooler=GENERATES,
            tokenizer=tokenizer(),
            template=None if template is None else ChatTemplate(template),
            defaults=defaults,
            reasoning_parser="qwen3",
        )
        device = options.pop("device", "cpu")

        def thread(engine: Any, begin: Callable[[], None]) -> Thread:
            self.calls.lines.append(f"  a thread begins with {shown(begin)}")
            self.threads.append(Thread(self.calls))
            return self.threads[-1]

        def prepared_last(work: Callable[[], None]) -> None:
            self.calls.lines.append("  to be prepared last:")
            work()

        graphs = [False, True, True]

        def prepared() -> bool:
            self.calls.lines.append("  prepared")
            return graphs.pop()

        def build(settings: Settings) -> Any:
            self.calls.lines.append(f"  an engine of {settings.model.model} with seed {settings.model.seed}")
            return SimpleNamespace(description=about, prepare=prepared, prepare_last=prepared_last)

        monkeypatch.setattr(llm, "located", lambda settings: settings)
        monkeypatch.setattr(llm, "build_text", lambda settings: text)
        monkeypatch.setattr(llm, "build_engine", build)
        monkeypatch.setattr(llm, "EngineThread", thread)
        monkeypatch.setattr(llm, "choose_device", lambda name: SimpleNamespace(type=device))
        monkeypatch.setattr(llm, "GrammarCompiler", lambda compiler: Grammars(compiler, self.calls))
        self.llm = LLM(**options)
        self.thread = self.threads[0]

    def told(self, title: str, work: Callable[[LLM], object]) -> None:
        lines = self.calls.lines
        lines += ["", title]
        try:
            found = work(self.llm)
            if isinstance(found, Iterator):
                found = [*found]
            lines += [f"  -> {shown(one)}" for one in (found if isinstance(found, list) else [found])]
        except QuireError as error:
            lines.append(f"  {type(error).__name__} ({getattr(error, 'param', None)}): {error}")


JSON = StructuredOutputsParams(regex="a+", param="form")
HELLO = [{"role": "user", "content": "yo"}]
BEGUN = [*HELLO, {"role": "assistant", "content": "w<think>"}]
LISTED = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]

GENERATE: dict[str, Callable[[LLM], object]] = {
    "text": lambda it: it.generate("ab"),
    "texts": lambda it: it.generate(["ab", "c"], use_tqdm=False),
    "ids": lambda it: it.generate([5, 6]),
    "a tuple of ids, a text and mappings": lambda it: it.generate(
        [(5, 6), "a", {"prompt": "b"}, {"prompt_token_ids": [7]}, {"prompt": "told", "prompt_token_ids": [8, 9]}]
    ),
    "nothing": lambda it: it.generate([]),
    "an empty text": lambda it: it.generate(""),
    "an empty mapping": lambda it: it.generate({}),
    "a mapping of too much": lambda it: it.generate({"prompt": "a", "more": 1}),
    "a number": lambda it: it.generate(5),  # type: ignore[arg-type]
    "bytes": lambda it: it.generate(b"a"),  # type: ignore[arg-type]
    "a mapping of a number": lambda it: it.generate({"prompt": 5}),
    "ids that are none": lambda it: it.generate([[5, "a"]]),  # type: ignore[list-item]
    "several answers with all scores": lambda it: it.generate(
        "ab", SamplingParams(n=2, logprobs=1, prompt_logprobs=0, seed=4, max_tokens=5, stop=(".",))
    ),
    "scores of one prompt of two": lambda it: it.generate(
        ["ab", "c"], [SamplingParams(prompt_logprobs=1, max_tokens=3), SamplingParams(logprobs=0, max_tokens=3)]
    ),
    "a stop string": lambda it: it.generate("ab", SamplingParams(stop=("i",), max_tokens=4)),
    "no limit": lambda it: it.generate("abc", SamplingParams(max_tokens=None)),
    "too long": lambda it: it.generate("a" * 40),
    "as many tokens as blocks hold": lambda it: it.generate("abc", SamplingParams(max_tokens=34)),
    "structure": lambda it: it.generate("ab", SamplingParams(structured_outputs=JSON, max_tokens=3)),
    "too few params": lambda it: it.generate(["a", "b"], [SamplingParams()]),
    "no params": lambda it: it.generate("a", [5]),  # type: ignore[list-item]
    "more defaults": lambda it: it.default_sampling_params(top_k=3),
    "tokenizer": lambda it: it.get_tokenizer().vocab_size,
    "reset": lambda it: it.reset_prefix_cache(),
}
CHAT: dict[str, Callable[[LLM], object]] = {
    "one": lambda it: it.chat(HELLO),
    "two": lambda it: it.chat([HELLO, [*HELLO, *HELLO]], use_tqdm=False),
    "two with params": lambda it: it.chat([HELLO, HELLO], [SamplingParams(max_tokens=2), SamplingParams(seed=1)]),
    "none": lambda it: it.chat([]),
    "begun": lambda it: it.chat(BEGUN, add_generation_prompt=False, continue_final_message=True),
    "begun and begin": lambda it: it.chat(BEGUN, continue_final_message=True),
    "no generation prompt": lambda it: it.chat(HELLO, add_generation_prompt=False),
    "tools": lambda it: it.chat(HELLO, tools=TOOLS),
    "tools that are none": lambda it: it.chat(HELLO, tools=[{"function": 5}]),
    "thinking off": lambda it: it.chat(
        HELLO, SamplingParams(structured_outputs=JSON), chat_template_kwargs={"enable_thinking": False}
    ),
    "thinking on": lambda it: it.chat(
        HELLO, SamplingParams(structured_outputs=JSON), chat_template_kwargs={"enable_thinking": True}
    ),
    "structure": lambda it: it.chat(HELLO, SamplingParams(structured_outputs=JSON)),
    "structure in a begun answer": lambda it: it.chat(
        BEGUN, SamplingParams(structured_outputs=JSON), add_generation_prompt=False, continue_final_message=True
    ),
    "content in parts": lambda it: it.chat(LISTED),
    "text": lambda it: it.chat("yo"),  # type: ignore[arg-type]
    "numbers": lambda it: it.chat([5]),  # type: ignore[list-item]
    "no role": lambda it: it.chat([{"content": "a"}]),
}
STREAMS: dict[str, Callable[[LLM], object]] = {
    "text": lambda it: it.stream("ab"),
    "with params": lambda it: it.stream([5, 6], SamplingParams(max_tokens=2, n=2)),
    "of a mapping": lambda it: it.stream({"prompt": "a"}),
    "of a number": lambda it: it.stream(5),  # type: ignore[arg-type]
    "chat": lambda it: it.stream_chat(HELLO),
    "structured chat": lambda it: it.stream_chat(HELLO, SamplingParams(structured_outputs=JSON)),
    "left early": lambda it: next(it.stream("ab")),
}
VECTORS: dict[str, Callable[[LLM], object]] = {
    "of text": lambda it: it.embed("ab"),
    "of two, the last": lambda it: it.embed(["ab", "c"], pooling="last", normalize=False, use_tqdm=False),
    "short": lambda it: it.embed("ab", dimensions=2),
    "too long": lambda it: it.embed("ab", dimensions=9),
    "of nothing long": lambda it: it.embed("ab", dimensions=0),
}


def test_calls_are_asked_and_answered_as_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, seed=3)
    for kind in (GENERATE, CHAT, STREAMS, VECTORS):
        for title, work in kind.items():
            made.told(title, work)
    made.thread.pooled = b""
    made.told("a vector that never came", lambda it: it.embed("ab"))
    made.thread.spoken = [""]
    made.told("nothing said", lambda it: it.stream("ab"))
    made.thread.fails = QuireError("the engine is lost")
    made.told("a lost engine", lambda it: it.generate(["a", "b"]))
    made.told("a lost engine in a stream", lambda it: it.stream("ab"))
    with made.llm as same:
        assert same is made.llm
    for title, more in (
        ("no template", {"template": None}),
        ("no vectors, on a card", {"pools": False, "device": "cuda"}),
    ):
        other = Made(monkeypatch, model="named", **more)
        other.told(f"{title}: chat", lambda it: it.chat(HELLO))
        other.told(f"{title}: a stream", lambda it: it.stream_chat(HELLO))
        other.told(f"{title}: a vector", lambda it: it.embed("a"))
        other.told(f"{title}: text", lambda it: it.generate("a"))
        made.calls.lines += ["", title, *other.calls.lines]
    check(EXPECTED, "\n".join(made.calls.lines))


def test_a_caller_that_is_gone_has_its_request_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch)
    job = made.llm._job(ReadPrompt("a", (5,)), SamplingParams(max_tokens=3))
    (reader,) = made.llm._readers(job, lambda error: None)
    event = RequestStepOutput(reader.request.id, (5,))
    assert reader.take(event) is None
    del job
    assert reader.take(event) == "abort"


def test_an_output_is_put_together_once_when_its_answers_have_ended_and_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last answer of the second prompt waits for the first prompt's output, which is not waited for at the end."""
    made, put_together, while_running = Made(monkeypatch), list[str](), list[list[str]]()
    first, make, thread = threading.Event(), request_output, made.thread

    def output(call: Call, choices: Sequence[Sequence[Delta]], tokenizer: Tokenizer) -> RequestOutput:
        put_together.append(call.id)
        first.set()
        return make(call, choices, tokenizer)

    def submit(each: list[tuple[Request, Constraint, Listener]]) -> None:
        def run() -> None:
            for request, _, listener in each[:3]:
                thread._answer(request, listener)
            first.wait(60)
            while_running.append([*put_together])
            thread._answer(each[3][0], each[3][2])

        threading.Thread(target=run).start()

    monkeypatch.setattr(llm, "request_output", output)
    monkeypatch.setattr(thread, "submit", submit)
    outputs = made.llm.generate(["a", "b"], SamplingParams(n=2, max_tokens=9), use_tqdm=False)
    assert while_running == [["llm-0"]] and put_together == ["llm-0", "llm-1"]
    assert [[each.text for each in one.outputs] for one in outputs] == [["hi.", "hi."]] * 2
