"""What benchmarks ask for, read and print, with doubles for what takes the time."""

from __future__ import annotations

import asyncio
import io
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from quire.bench import cpu, engine, load_client, offline, report, serve, startup, throughput
from quire.bench.load_client import ClientTally, LoadJob
from quire.cli import main
from quire.config import Settings
from quire.errors import InvalidModel, InvalidRequest, QuireError
from tests.expected import check

EXPECTED = Path(__file__).parent / "expected"
TIMING = {"began": 10.0, "ended": 14.0, "tokens": 30, "prompted": 12, "events": 20, "failed": 0}
ASKED = [(0.0, 0.5, 2.0, 4, 11, 200), (1.0, 1.25, 3.0, 8, 1, 200), (2.0, 0.0, 2.5, 0, 0, 503), (0.5, 0.0, 1.0, 0, 0, 0)]


class Silent:
    """A monitor that saw one thing."""

    samples: Any = ({"s": 11.0, "running": 1},)

    def __init__(self, *given: object) -> None:
        self.given = given

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""


class Gpu(Silent):
    samples: Any = ((11.5, 50, 900),)


def test_figures_of_the_engine_and_of_decoding_are_printed_as_written_down(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    engine._show({"requests": 1234567, "latency_ms": {"p50": 1.25, "p99": 20.0}, "python": "3.x", "steps": 0.5})
    sizes = {"batch": 1, "prompt": 128, "new": 64}
    speed = {"quire": 12.345, "llama-cpp": 6.0}
    rows = [
        {
            **sizes,
            "what": "decode",
            "speed": speed,
            "ratio": {"llama-cpp": 2.0575},
            "share": 0.5,
            "layer": {"us": 112.55, "calls": 0.3},
        },
        {**sizes, "what": "all", "speed": {"quire": 1e3, "llama-cpp": 2e3}, "ratio": {"llama-cpp": 0.5}},
    ]
    about = {"shape": "s", "format": "bf16", "threads": 2, "clock": "wall", "cpu": "c", "versions": {"torch": "t"}}
    about |= {"bandwidth": 2e10, "floor": 75.0}
    cpu._show({**about, "rows": rows})
    check(EXPECTED / "tables.txt", capsys.readouterr().out)


@pytest.mark.parametrize("ok", [True, False])
def test_a_load_test_asks_and_saves_what_is_written_down(
    ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two levels of users; without an answer the second is not tried."""
    lines: list[str] = []

    def run(job: LoadJob, processes: int, on_progress: Any = None) -> list[Any]:
        lines.append(f"{processes} processes, {job}")
        if on_progress:
            on_progress(1)
        asked = ASKED if ok else ASKED[2:]
        gaps = {"first": [0.5, 0.25], "gaps": [0.1, 0.2, 0.3]}
        return [
            {**TIMING, **gaps, "asked": asked[:2]},
            {**TIMING, **gaps, "began": 10.5, "ended": 15.0, "asked": asked[2:]},
        ]

    async def refused(job: LoadJob) -> str:
        lines.append(f"asked once more: {job.prompts[0][:2]} {job.output_lens[0]}")
        return "no"

    monkeypatch.setattr(serve, "run_clients", run)
    monkeypatch.setattr(serve, "refusal", refused)
    monkeypatch.setattr(serve, "GPUMonitor", Gpu)
    monkeypatch.setattr(serve, "MetricsMonitor", Silent)
    monkeypatch.setattr(serve, "environment", lambda key: {"key": key})
    monkeypatch.setattr(serve, "fetch", lambda url, key: json.dumps({"version": f"{url} {key}"}).encode())
    monkeypatch.setattr(serve.time, "time", lambda: 9.0)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    words = [
        "--model",
        "m",
        "--base-url",
        "http://127.0.0.1:9/v",
        "--api-key",
        "k",
        "--processes",
        "2",
        "--num-warmups",
        "2",
    ]
    words += [
        "--random-output-len",
        "3:5",
        "--random-input-len",
        "2:3",
        "--goodput",
        "ttft:400,e2el:1900",
        "--label",
        "it",
    ]
    words += ["--max-concurrency", "2,3", "--num-prompts", "3", "--save-result", "load.json"]
    done = CliRunner().invoke(main, ["bench", "serve", *words])
    lines += [f"exit {done.exit_code}", *done.stdout.splitlines()]
    saved = json.loads((tmp_path / "load.json").read_text())
    saved["about"].pop("quire")
    lines += [f"{name}: {json.dumps(value)}" for name, value in saved.items() if name != "levels"]
    lines += [f"  {name}: {json.dumps(value)}" for row in saved["levels"] for name, value in row.items()]
    lines += [line for line in done.stderr.splitlines() if line.strip()]
    check(EXPECTED / f"serve-{'answered' if ok else 'refused'}.txt", "\n".join(lines))


def test_a_job_is_divided_among_processes_as_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    done: list[int] = []
    started: list[list[str]] = []

    class Process:
        def __init__(self, argv: list[str], **_: object) -> None:
            assert argv == [sys.executable, "-m", "quire.bench.load_client"]
            self.stdin, self.stdout = io.BytesIO(), io.BytesIO(load_client.READY + b'..{"tokens": %d}' % len(started))
            started.append(argv)
            self.stdin.close = self.begin  # type: ignore[method-assign]

        def begin(self) -> None:
            job, begin = map(json.loads, self.stdin.getvalue().splitlines())
            given.append({**job, "begin": begin})

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(load_client.subprocess, "Popen", Process)
    monkeypatch.setattr(load_client.time, "time", lambda: 100.0)
    prompts = [[i, i + 1] for i in range(7)]
    job = LoadJob(
        host="h", port=1, model="m", streams=5, prompts=prompts, output_lens=[*range(7)], due=[i / 2 for i in range(7)]
    )
    lines = []
    for processes in (3, 9, 1):
        results = load_client.run_clients(job, processes, done.append)
        lines += [f"{processes}: {json.dumps(each)}" for each in given]
        lines.append(f"{results} {sum(done)} done")
        for each in (given, done, started):
            each.clear()
    check(EXPECTED / "shares.txt", "\n".join(lines))


def test_tallies_are_added_up() -> None:
    one, two = (
        {**TIMING, "first": [0.1, 0.3], "gaps": [0.02] * 9},
        {**TIMING, "began": 12.0, "ended": 16.0, "first": [], "gaps": []},
    )
    empty = {**TIMING, "tokens": 0, "events": 0, "first": [], "gaps": []}
    lines = [json.dumps(load_client.summarize(each)) for each in ([one, two], [one], [empty])]  # type: ignore[arg-type]
    check(EXPECTED / "sums.txt", "\n".join(lines))


def stream(*parts: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    for part in parts:
        reader.feed_data(part)
    reader.feed_eof()
    return reader


def test_an_answer_is_read_to_its_end_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    event, usage = (
        b'data: {"choices":[{}]}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n',
    )
    cases = {
        "whole": (head + event, event + usage + b"0\r\n\r\n"),
        "failed": (head + event, b'data: {"error": {}}\n\n0\r\n\r\n'),
        "refused": (b"HTTP/1.1 429 No\r\nretry-after: 0\r\n\r\n",),
        "hung up": (head + event,),
    }
    lines = []
    for name, parts in cases.items():
        clock = iter(range(1, 99))
        monkeypatch.setattr(load_client.time, "perf_counter", lambda clock=clock: float(next(clock)))
        tally = ClientTally()

        async def read(parts: tuple[bytes, ...] = parts, tally: ClientTally = tally) -> Any:
            return await load_client.read_answer(stream(*parts), 0.5, tally)

        try:
            lines.append(f"{name}: {asyncio.run(read())}")
        except ConnectionError as error:
            lines.append(f"{name}: {error}")
        lines.append(f"  {tally}")
    lines += [f"{head!r}: {load_client.retry_after(head)}" for head in (b"\r\nRetry-After: 12\r\n", b"\r\nx: 1\r\n")]
    check(EXPECTED / "read.txt", "\n".join(lines))


class Words:
    """A tokenizer of words, and an LLM's double."""

    def encode(self, text: str) -> list[int]:
        return [*range(len(text.split()))]

    get_tokenizer = lambda self: self  # noqa: E731
    _engine = SimpleNamespace(description=SimpleNamespace(vocab_size=50, max_model_len=40))


def test_datasets_are_read_as_written_down(tmp_path: Path) -> None:
    talks = [
        [{"value": "a " * i}, {"value": "b " * j}]
        for i, j in ((3, 9), (4, 4), (4, 3), (5, 6), (20, 20), (20, 21), (30, 1))
    ]
    path, lines = tmp_path / "d.json", []
    path.write_text(json.dumps([{"conversations": each} for each in [*talks, talks[0][:1]]]))
    for count, length in ((9, None), (2, None), (9, 3), (1, 36)):
        found = throughput.read_sharegpt(path, Words(), count, length, random.Random(3), 40)  # type: ignore[arg-type]
        lines.append(f"sharegpt {count} {length}: {[(len(one.prompt), one.output_len) for one in found]}")
    with pytest.raises(InvalidRequest, match="no conversation that fits into 3 tokens"):
        throughput.read_sharegpt(path, Words(), 9, None, random.Random(3), 3)  # type: ignore[arg-type]
    path.write_text(
        '{"prompt": "a b", "output_tokens": 3}\n\n{"prompt": "c"}\n{"prompt": "d e f", "output_tokens": "7"}\n'
    )
    for count, length in ((9, None), (2, None), (9, 5)):
        found = throughput.read_custom(path, Words(), count, length)  # type: ignore[arg-type]
        lines.append(f"custom {count} {length}: {[(len(one.prompt), one.output_len) for one in found]}")
    path.write_text("\n")
    with pytest.raises(InvalidRequest, match="has no prompts"):
        throughput.read_custom(path, Words(), 1, None)  # type: ignore[arg-type]
    for change in (
        {},
        {"input_len": None, "output_len": 5},
        {"random_range_ratio": 0.9, "prefix_len": 0},
        {"output_len": 40},
    ):
        given = {"dataset_name": "random", "dataset_path": None, "num_prompts": 3, "input_len": 6, "output_len": 4}
        whole: Any = {**given, "random_range_ratio": 0.0, "prefix_len": 2, **change}
        try:
            lines.append(f"random {change}: {throughput.sample_requests(Words(), 7, **whole)}")  # type: ignore[arg-type]
        except InvalidRequest as error:
            lines.append(f"random {change}: {error} ({error.param})")
    lines.append(
        json.dumps(
            throughput.throughput([throughput.SampleRequest([1, 2, 3], 4), throughput.SampleRequest([1], 2)], 3, 2.0)
        )
    )
    check(EXPECTED / "datasets.txt", "\n".join(lines))


def test_an_answer_of_another_length_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    lens = [2, 2]

    def generate(prompts: Any, params: Any, **more: Any) -> Any:
        asked.append(
            (
                prompts,
                [(one.n, one.temperature, one.ignore_eos, one.max_tokens, one.detokenize) for one in params],
                more,
            )
        )
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * n, finish_reason="stop", stop_reason="x")] * 2)
            for n in lens
        ]

    clock = iter((5.0, 7.5, 5.0, 6.0, 1.0, 2.0))
    monkeypatch.setattr(offline.time, "perf_counter", lambda: next(clock))
    llm: Any = SimpleNamespace(generate=generate)
    assert offline.time_generate(llm, ((1,), (2, 3)), [2, 2], 2, False) == 2.5
    assert asked == [([(1,), (2, 3)], [(2, 1.0, True, 2, False)] * 2, {"use_tqdm": False})]
    lens[1] = 1
    with pytest.raises(InvalidRequest, match="an answer has 1 of 2 tokens: stop, x"):
        offline.time_generate(llm, ((1,), (2, 3)), [2, 2], 2, True)
    with pytest.raises(ValueError, match="zip"):
        offline.time_generate(llm, ((1,),), [2], 2, True)
    offline.check_lengths(30, 10, 40)
    with pytest.raises(InvalidRequest, match="come to 41 tokens, but max_model_len is 40"):
        offline.check_lengths(31, 10, 40)


def test_starts_are_timed_in_a_process_that_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = (startup.READY, "noise", startup.FIRST_TOKEN)
    code, given = [0], []

    class Process:
        returncode = 0

        def __init__(self, argv: list[str], *, stderr: Any, env: dict[str, str], **_: object) -> None:
            given.append((argv[1:], {name: env[name] for name in startup.CACHES if name in env}))
            self.stdin, self.stdout, self.returncode = io.StringIO(), iter(f"{line}\n" for line in said), code[0]
            stderr.write("one\ntwo\nlast\n" * 4)

        def __enter__(self) -> Process:
            return self

        __exit__ = lambda self, *_: None  # noqa: E731

    clock = iter(range(0, 900, 3))
    monkeypatch.setattr(startup.subprocess, "Popen", Process)
    monkeypatch.setattr(startup.time, "perf_counter", lambda: float(next(clock)))
    settings = Settings.of()
    warm, cold = startup.start(settings, {}), startup.cold_start(settings, tmp_path)
    names = [measure for _, measure in startup.MEASURES]
    assert (list(warm.values()), list(cold.values())) == ([3.0, 6.0], [3.0, 6.0]) and [*warm] == names
    assert all(argv == ["-m", "quire.bench.startup"] for argv, _ in given)
    folders = {Path(value).parent for value in given[1][1].values()}
    assert {*given[1][1]} == {*startup.CACHES} and len(folders) == 1 and not folders.pop().exists()
    code[0] = 2
    with pytest.raises(InvalidModel, match=r"^last$"):
        startup.start(settings, {})
    code[0] = 1
    with pytest.raises(QuireError) as failed:
        startup.start(settings, {})
    assert str(failed.value).splitlines() == ["no start", *(["two", "last"] + ["one", "two", "last"] * 2)]


def test_a_report_has_the_figures_that_are_written_down(tmp_path: Path) -> None:
    level = {"level": "2 users", "statuses": {"200": 3, "503": 2, "0": 1}, "good": 2, "requests": 6, "ok": 3}
    level |= {"requests_s": 1.234, "prompt_tokens_s": 1e4, "tokens_s": 2345.6, "tokens_an_event": 1.5, "asked": []}
    level["ms"] = {what: [1.0 * i, 20.5, 300.25] for i, what in enumerate(("ttft", "tpot", "itl", "e2el"))}
    run = {
        "about": {"label": "<a>", "model": "m", "environment": {"x": 1}},
        "goals": {"ttft": 5},
        "levels": [level, {**level, "good": None}],
    }
    rows = [
        {"workload": "w", "batch": 2, "ours": 1234.5, "peer": 99.5, "target": None},
        {"workload": "v", "concurrency": 8, "ours": 1.0},
    ]
    check(EXPECTED / "report.txt", report.page([run], rows, ["<svg/>"]) + report.page([], rows, []))
