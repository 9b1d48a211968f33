"""Compiling beside the loop: which requests wait, what they get, what is cached, and what a timeout does."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from quire.errors import InvalidModel, InvalidRequest
from quire.scheduler.constraint import FREE, PENDING
from quire.scheduler.plan import Mask
from quire.structured_output.compiler import CompiledGrammar, CompileFunction, GrammarCompiler
from quire.types import Request, SamplingParams, StructuredOutputsParams


class Named:
    def __init__(self, source: str) -> None:
        self.source = source

    def masks(self, output: object, drafts: object) -> list[Mask]:
        return []

    def why(self) -> str:
        return ""

    def beginning(self) -> Sequence[int]:
        return ()


class Bench:
    """A compiler that counts, waits when asked to, and refuses what says so."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.gates: dict[str, threading.Event] = {}

    def hold(self, source: str) -> threading.Event:
        self.gates[source] = threading.Event()
        return self.gates[source]

    def __call__(self, structure: StructuredOutputsParams) -> CompiledGrammar:
        source = structure.regex or ""
        if source in self.gates:
            assert self.gates[source].wait(200)
        self.done.append(source)
        if source.startswith("bad"):
            raise InvalidRequest(f"{structure.param}: {source} is bad", param=structure.param)
        if source.startswith("odd"):
            raise {"odd": ZeroDivisionError("secret"), "odd model": InvalidModel("no end")}[source]
        return lambda: Named(source)


def ask(id: str, regex: str, param: str = "structured_outputs") -> Request:
    structure = StructuredOutputsParams(regex=regex, param=param)
    return Request(id=id, prompt=(1,), max_new_tokens=4, sampling=SamplingParams(structured_outputs=structure))


@contextmanager
def grammar_compiler(bench: CompileFunction, **rest: object) -> Iterator[GrammarCompiler]:
    shop = GrammarCompiler(bench, **rest)  # type: ignore[arg-type]
    try:
        yield shop
    finally:
        shop.close()


def hear(shop: GrammarCompiler, count: int = 1) -> dict[str, str]:
    """What has become of the next `count`: their sources, or the errors' words."""
    out: dict[str, str] = {}
    while len(out) < count:
        assert select.select(shop.wait_fds(), [], [], 20)[0], "not called"
        for id, made in shop.poll():
            out[id] = str(made) if isinstance(made, InvalidRequest) else made.source  # type: ignore[attr-defined]
    return out


def test_a_request_without_structure_is_free_at_once() -> None:
    with grammar_compiler(Bench()) as shop:
        request = Request(id="a", prompt=(1,), max_new_tokens=1)
        assert shop.constraint_for(request) is FREE and shop.get_or_compile(request) is FREE
        assert shop.timeout() is None and shop.poll() == []


def test_who_asks_for_the_same_waits_for_one_compilation_and_later_ones_do_not_wait() -> None:
    bench = Bench()
    with grammar_compiler(bench) as shop:
        gate = bench.hold("a")
        assert [shop.constraint_for(ask(str(i), "a")) for i in range(3)] == [PENDING] * 3
        assert 0 < (shop.timeout() or 0) <= 10
        gate.set()
        assert hear(shop, 3) == {"0": "a", "1": "a", "2": "a"}
        assert shop.constraint_for(ask("3", "a", "guided_regex")).source == "a"  # type: ignore[attr-defined]
        assert bench.done == ["a"] and shop.timeout() is None and shop.poll() == []


def test_each_request_has_a_constraint_of_its_own() -> None:
    with grammar_compiler(Bench()) as shop:
        shop.constraint_for(ask("x", "a"))
        hear(shop)
        assert shop.constraint_for(ask("y", "a")) is not shop.constraint_for(ask("z", "a"))


def test_a_refusal_names_each_clients_own_field_and_is_cached() -> None:
    bench = Bench()
    with grammar_compiler(bench) as shop:
        gate = bench.hold("bad")
        shop.constraint_for(ask("1", "bad"))
        shop.constraint_for(ask("2", "bad", "guided_regex"))
        gate.set()
        assert hear(shop, 2) == {"1": "structured_outputs: bad is bad", "2": "guided_regex: bad is bad"}
        with pytest.raises(InvalidRequest, match=r"^response_format: bad is bad$") as caught:
            shop.constraint_for(ask("3", "bad", "response_format"))
        assert caught.value.param == "response_format" and bench.done == ["bad"]
        with pytest.raises(InvalidRequest, match="bad"):
            shop.get_or_compile(ask("4", "bad"))


def test_a_surprise_in_the_compiler_costs_its_request_only_and_is_not_shown() -> None:
    with grammar_compiler(Bench()) as shop:
        shop.constraint_for(ask("1", "odd"))
        assert hear(shop) == {"1": "structured_outputs: it does not compile: ZeroDivisionError"}
        shop.constraint_for(ask("2", "odd model"))
        assert "no end" in hear(shop)["2"]
        shop.constraint_for(ask("3", "fine"))
        assert hear(shop) == {"3": "fine"}


def test_one_that_takes_too_long_is_refused_in_time_and_the_next_ones_are_compiled() -> None:
    now = [0.0]
    bench = Bench()
    with grammar_compiler(bench, timeout=5.0, clock=lambda: now[0]) as shop:
        gate = bench.hold("slow")
        shop.constraint_for(ask("1", "slow"))
        while bench.done == [] and not shop._jobs[StructuredOutputsParams(regex="slow")].started:
            pass
        now[0] = 4.0
        shop.constraint_for(ask("2", "quick"))
        assert shop.timeout() == 1.0 and shop.poll() == []
        now[0] = 5.0
        assert shop.timeout() == 0.0
        [(id, error)] = shop.poll()
        assert id == "1" and "longer than 5 s" in str(error)
        assert isinstance(error, InvalidRequest) and error.param == "structured_outputs"
        assert hear(shop) == {"2": "quick"}, "another worker took over"
        gate.set()
        while "slow" not in bench.done:
            pass
        assert select.select(shop.wait_fds(), [], [], 20)[0] and shop.poll() == []
        assert shop.constraint_for(ask("3", "slow")).source == "slow", "what came late is kept"  # type: ignore[attr-defined]


def test_so_many_workers_are_replaced_at_a_time() -> None:
    now = [0.0]
    bench = Bench()
    with grammar_compiler(bench, timeout=1.0, spare_workers=2, clock=lambda: now[0]) as shop:
        gates = [bench.hold(f"slow {i}") for i in range(5)]
        before = threading.active_count()
        for i in range(5):
            shop.constraint_for(ask(str(i), f"slow {i}"))
            job = shop._jobs[StructuredOutputsParams(regex=f"slow {i}")]
            while i < 3 and not job.started:
                pass
            now[0] += 1.0
            assert [id for id, _ in shop.poll()] == [str(i)], "reported in time, compiled or not"
        assert threading.active_count() - before <= 3
        for gate in gates:
            gate.set()


def test_a_worker_that_is_done_at_last_can_be_spared_again() -> None:
    now, others = [0.0], set(threading.enumerate())
    bench = Bench()
    with grammar_compiler(bench, timeout=1.0, spare_workers=1, clock=lambda: now[0]) as shop:
        for i in range(6):
            gate = bench.hold(f"slow {i}")
            shop.constraint_for(ask("slow", f"slow {i}"))
            while not shop._jobs[StructuredOutputsParams(regex=f"slow {i}")].started:
                pass
            now[0] += 1.0
            assert [id for id, _ in shop.poll()] == ["slow"]
            shop.constraint_for(ask("quick", f"quick {i}"))
            assert hear(shop) == {"quick": f"quick {i}"}
            gate.set()
            while f"slow {i}" not in bench.done or not shop._done:
                pass
            assert shop.poll() == []
        assert shop._workers == 1
    while any(thread.name == "grammars" for thread in {*threading.enumerate()} - others):
        pass


def test_what_was_used_last_is_kept_and_the_rest_forgotten() -> None:
    bench = Bench()
    with grammar_compiler(bench, max_entries=2) as shop:
        for source in ("a", "b", "a", "c", "a", "b"):
            shop.get_or_compile(ask("x", source))
        assert bench.done == ["a", "b", "c", "b"]


def test_the_sources_kept_are_bounded_together() -> None:
    bench = Bench()
    with grammar_compiler(bench, max_chars=10) as shop:
        for source in ("a" * 6, "b" * 6, "a" * 6, "c" * 30, "c" * 30):
            shop.get_or_compile(ask("x", source))
        assert [source[0] for source in bench.done] == ["a", "b", "a", "c"]


def test_as_much_is_kept_after_many_grammars_as_at_first() -> None:
    bench = Bench()
    with grammar_compiler(bench, max_chars=10) as shop:
        for source in ("aaaa", "bbbb", "cccc", "bad", "dddd", "eeee"):
            with contextlib.suppress(InvalidRequest):
                shop.get_or_compile(ask("x", source))
        bench.done.clear()
        for source in ("dddd", "eeee", "dddd", "eeee"):
            shop.get_or_compile(ask("x", source))
        assert bench.done == [], "two of four characters fit into ten"


def test_grammars_that_are_ready_together_are_all_told_at_once() -> None:
    bench = Bench()
    gates = [bench.hold(source) for source in ("one", "two", "bad three")]
    with grammar_compiler(bench, workers=3) as compiler:
        for id, source in (("a", "one"), ("b", "two"), ("c", "bad three"), ("d", "one")):
            assert compiler.constraint_for(ask(id, source)) is PENDING
        for gate in gates:
            gate.set()
        while len(compiler._done) < 3:
            select.select(compiler.wait_fds(), [], [], 0.01)
        told = dict(compiler.poll())
        assert sorted(told) == ["a", "b", "c", "d"] and isinstance(told["c"], InvalidRequest)
        assert compiler.poll() == [] and not compiler._jobs and compiler.timeout() is None
