"""`quire bench serve` sends what its options say and saves every timing; `quire bench report` draws it."""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from quire.bench.charts import COLOURS
from quire.bench.load_client import ClientTally, LoadJob, RequestTiming, encode_request, run_job
from quire.bench.load_levels import USERS, load_levels, trace_level
from quire.bench.monitor import fetch, parse_metrics
from quire.bench.serve import measured
from quire.cli import main
from quire.errors import InvalidRequest
from quire.frontend.supervisor import free_port

QUICK = ("--random-output-len", "3:5", "--random-input-len", "4:8", "--processes", "1", "--num-warmups", "2")
GIVEN: dict[str, Any] = {
    "users": (2,),
    "rates": None,
    "burstiness": 1.0,
    "trace": None,
    "speed": 1.0,
    "shrink": 1.0,
    "num_prompts": None,
    "length": (4, 8),
    "new": (3, 5),
    "shared": 0,
    "seed": 7,
}


def quire(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def test_users_are_answered_and_a_report_shows_it_and_no_key(upstream: str, tmp_path: Path) -> None:
    saved, shown = tmp_path / "load.json", tmp_path / "report.html"
    load = ("--max-concurrency", "2,5", "--goodput", "ttft:1000,tpot:500", "--label", "a <b>", "--api-key", "sesame")
    done = quire("bench", "serve", "--base-url", upstream, *QUICK, *load, "--save-result", saved)
    assert done.exit_code == 0, done.output
    found = json.loads(saved.read_text())
    assert [(level["users"], level["requests"], level["ok"], level["good"]) for level in found["levels"]] == [
        (2, 20, 20, 20),
        (5, 20, 20, 20),
    ]
    for level in found["levels"]:
        every = [RequestTiming(*one) for one in level["asked"]]
        assert all(one.since < one.first <= one.ended and 3 <= one.new <= 5 and 4 <= one.prompt <= 8 for one in every)
        assert level["ms"]["ttft"][0] >= 2.0 and level["tokens_s"] > 0
    drawn = quire("bench", "report", saved, saved, "--output", shown)
    assert drawn.exit_code == 0, drawn.output
    page = shown.read_text()
    assert "sesame" not in page + saved.read_text() + done.output and "<b>" not in page
    assert not re.search(
        r"""(?:src|href)=["'](?!#|data:)|@import|url\((?!#|data:)|<script""", page
    )  # all is in the page
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) == 4 + 2 * 3
    assert all(len(list(ElementTree.fromstring(chart).iter())) > 50 for chart in charts)
    assert page.count("<td>5 users</td>") == 4


def test_requests_at_a_rate_come_when_they_are_due_and_wait_from_then_on(upstream: str, tmp_path: Path) -> None:
    saved = tmp_path / "load.json"
    rate = ("--request-rate", "200", "--num-prompts", "40")
    done = quire("bench", "serve", "--base-url", upstream, *QUICK, *rate, "--save-result", saved)
    assert done.exit_code == 0, done.output
    [level] = json.loads(saved.read_text())["levels"]
    assert (level["requests"], level["ok"]) == (40, 40)
    [due] = [each.due for each in load_levels(**{**GIVEN, "rates": (200.0,), "num_prompts": 40})]
    assert [one[0] for one in level["asked"]] == pytest.approx(due, abs=1e-3)
    assert all(one[0] < one[1] <= one[2] for one in level["asked"])


def test_a_rate_is_kept_on_average_and_comes_in_bursts_if_so_wished() -> None:
    def gaps(burstiness: float) -> list[float]:
        [level] = load_levels(**{**GIVEN, "rates": (50.0,), "num_prompts": 4000, "burstiness": burstiness})
        return [b - a for a, b in zip([0.0, *level.due], level.due, strict=False)]

    for burstiness, spread in ((1.0, 1.0), (0.25, 2.0), (100.0, 0.1)):
        found = gaps(burstiness)
        mean = sum(found) / len(found)
        deviation = (sum((x - mean) ** 2 for x in found) / len(found)) ** 0.5
        assert mean == pytest.approx(0.02, rel=0.1) and deviation / mean == pytest.approx(spread, rel=0.15)


def test_a_trace_is_played_as_recorded_and_a_broken_line_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.9799600,4808,10"]
    lines += ["2023-11-16 18:17:04.0319600,320,8", "2023-11-16 18:17:06.9799600,5,0"]
    trace.write_text("\n".join(lines))
    [level] = load_levels(**{**GIVEN, "trace": trace, "speed": 2.0, "shrink": 16.0})
    assert level.due == pytest.approx([0.0, 0.026, 1.5], abs=1e-6)
    assert ([len(prompt) for prompt in level.prompts], level.output_lens) == ([300, 20, 1], [10, 8, 1])
    assert len(load_levels(**{**GIVEN, "trace": trace, "num_prompts": 2})[0].due) == 2
    trace.write_text("\n".join([*lines, "yesterday,1,1"]))
    assert (
        "line 5" in quire("bench", "serve", "--model", "m", "--base-url", "http://127.0.0.1:9", "--trace", trace).output
    )
    trace.write_text(lines[0])
    with pytest.raises(InvalidRequest, match="no requests"):
        trace_level(trace, 1.0, 1.0, None, None)  # type: ignore[arg-type]


@contextmanager
def answering(said: Callable[[str], bytes], asked: list[str] | None = None) -> Iterator[str]:
    """A server that says this on each path; a LookupError is a refusal."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if asked is not None:
                asked.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            try:
                status, body = 200, said(self.path)
            except LookupError as error:
                status, body = 400, str(error.args[0]).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - http.server's own spelling

        def log_message(self, format: str, *args: Any) -> None:
            """Tests are quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_what_is_refused_or_breaks_is_counted_and_the_rest_goes_on() -> None:
    answers = [
        b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n",
        b"",
        b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices":[{}]}\n\ndata: {"error": {"message": "x"}}\n\n0\r\n\r\n',
        b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices":[{}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":1}}\n\n0\r\n\r\n',
    ]
    left = iter(answers)

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (await reader.readuntil(b"\r\n\r\n")) and (said := next(left)):
            writer.write(said)
            await reader.readexactly(10)
        writer.close()

    async def played() -> ClientTally:
        server = await asyncio.start_server(reply, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        job = LoadJob(host="127.0.0.1", port=port, model="m", streams=1, prompts=[[1, 2]] * 4, output_lens=[1] * 4)
        tally = await run_job(job)
        server.close()
        return tally

    tally = asyncio.run(played())
    assert [one.status for one in tally.asked] == [429, 0, 500, 200] and tally.failed == 3
    row = measured([{**tally.__dict__}], {"ttft": 1e4})
    assert (row["ok"], row["good"], row["statuses"]) == (1, 1, {"429": 1, "0": 1, "500": 1, "200": 1})


def test_a_server_that_is_not_there_is_one_line_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ("bench", "serve", "--save-result", "load.json", "--base-url", f"http://127.0.0.1:{free_port()}")
    done = quire(*asked)
    assert done.exit_code == 1 and "is a server running there" in done.output and "Traceback" not in done.output
    assert not list(tmp_path.iterdir())
    (tmp_path / "load.json").write_text("of yesterday")
    quire(*asked)
    assert (tmp_path / "load.json").read_text() == "of yesterday"


def test_a_server_of_another_kind_is_one_line_too() -> None:
    with answering(lambda path: b"<html>") as url:
        done = quire("bench", "serve", "--base-url", url)
    assert done.exit_code == 1 and "does not speak OpenAI's API" in done.output and "Traceback" not in done.output


def test_where_results_cannot_be_kept_is_said_before_the_test(tmp_path: Path) -> None:
    done = quire("bench", "serve", "--base-url", "http://127.0.0.1:9", "--save-result", tmp_path / "no" / "x.json")
    assert done.exit_code == 2 and "--save-result" in done.output and "No such file" in done.output


def test_where_nothing_is_answered_the_server_is_quoted_and_no_more_is_asked(tmp_path: Path) -> None:
    def said(path: str) -> bytes:
        if path == "/v1/models":
            return b'{"data": [{"id": "m"}]}'
        if path == "/version":
            return b"seven"
        raise LookupError('{"error": {"message": "the \\"prompt\\" is too long"}}')

    asked: list[str] = []
    with answering(said, asked) as url:
        address = url.removeprefix("http://")  # as people write it
        options = ("--max-concurrency", "1,2,3", "--num-prompts", "3", "--processes", "1", "--num-warmups", "0")
        done = quire("bench", "serve", "--base-url", address, "--save-result", tmp_path / "x.json", *options)
    assert done.exit_code == 1 and 'answered no request, 3 x 400; it says: the "prompt" is too long' in done.output
    assert asked.count("/v1/completions") == 3 + 1


def test_more_users_than_requests_are_measured_as_no_level() -> None:
    """They would be as many users as there are requests, under another name."""
    default = load_levels(**GIVEN | {"users": None, "num_prompts": 10})
    assert [level.users for level in default] == [1, 2, 4, 8]
    assert [level.users for level in load_levels(**GIVEN | {"users": None})] == list(USERS)
    done = quire("bench", "serve", "--max-concurrency", "4,64", "--num-prompts", "10")
    assert done.exit_code == 2 and "10 requests keep no 64 users busy: raise --num-prompts" in done.output


@pytest.mark.parametrize(("host", "where"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_a_server_may_be_named_by_host_and_port_as_in_vllm(host: str, where: str) -> None:
    done = quire("bench", "serve", "--host", host, "--port", (port := free_port()))
    assert done.exit_code == 1 and f"http://{where}:{port} does not answer" in done.output


@pytest.mark.parametrize(("host", "named"), [("127.0.0.1", b"127.0.0.1:8000"), ("::1", b"[::1]:8000")])
def test_requests_name_the_host_as_urls_do(host: str, named: bytes) -> None:
    """A server refuses an IPv6 address without brackets."""
    job = LoadJob(host=host, port=8000, model="m", streams=1, prompts=[[1]], output_lens=[1])
    assert b"\r\nHost: " + named + b"\r\n" in encode_request(job, 0)


def test_a_table_for_programs_has_no_spaces_at_the_ends_of_lines(upstream: str) -> None:
    done = quire("bench", "serve", "--base-url", upstream, *QUICK, "--max-concurrency", 1, "--num-prompts", 2)
    assert "times in milliseconds" in done.output
    assert not [line for line in done.output.splitlines() if line.endswith(" ")]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-concurrency", "1,0"),
        ("--max-concurrency", "many"),
        ("--request-rate", "nan"),
        ("--random-input-len", "9:3"),
        ("--random-output-len", "-4"),
        ("--goodput", "speed:3"),
        ("--burstiness", "0"),
        ("--base-url", "http://"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(option: str, value: str) -> None:
    done = quire("bench", "serve", option, value)
    assert done.exit_code == 2 and option in done.output


def test_a_report_of_something_else_is_refused(tmp_path: Path) -> None:
    for text in ("{}", "[1]", "no", '{"about": {}, "goals": {}, "levels": [{}]}'):
        (tmp_path / "x.json").write_text(text)
        done = quire("bench", "report", tmp_path / "x.json")
        assert done.exit_code == 2 and "is not what `quire bench serve --save-result`" in " ".join(done.output.split())


def test_a_benchmark_beside_a_peer_is_drawn_with_who_is_ahead(tmp_path: Path) -> None:
    rows = [
        {"workload": "start x", "batch": "", "seconds": 3.0},
        {"workload": "burst-x", "batch": "", "ours": 300.0, "peer": 100, "target": 200, "ceiling": 400.0},
        {
            "workload": "tpot-x",
            "batch": "8",
            "ms_a_token": 4.0,
            "ours": 4.0,
            "peer": 2.0,
            "target": None,
            "ceiling": 1.0,
        },
        {"workload": "http x", "concurrency": 64, "ours": 12.0, "peer": None, "target": None},
    ]
    saved, shown = tmp_path / "gpu.json", tmp_path / "report.html"
    saved.write_text(json.dumps({"environment": {}, "rows": rows}))
    assert quire("bench", "report", saved, "--output", shown).exit_code == 0
    page = shown.read_text()
    [chart] = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    said = "".join(ElementTree.fromstring(chart).itertext())
    assert "burst-x" in said and "tpot-x, batch 8" in said and "http x" not in said
    assert "300 / 100 tokens/s" in said and "4 / 2 ms a token" in said
    assert chart.count(COLOURS[0]) >= 1 <= chart.count(COLOURS[1])
    assert page.count("<tr>") == 1 + len(rows) and "<td>64</td><td>12.000</td><td></td>" in page


def test_gauges_are_read_by_the_names_that_vllm_and_quire_share() -> None:
    text = (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 3.0\n'
        '# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total{engine="0"} 40.0\n'
        '# TYPE vllm:generation_tokens_created gauge\nvllm:generation_tokens_created{engine="0"} 1.7e9\n'
    )
    assert parse_metrics(text) == {"running": 5.0, "tokens": 40.0}
    assert parse_metrics("<html>") == {} and parse_metrics("") == {}


def test_what_is_refused_leaves_no_open_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.14 warns of an HTTPError that nobody has closed."""
    refused = HTTPError("http://x", 404, "Not Found", Message(), io.BytesIO(b"no"))

    def answer(*_: Any, **__: Any) -> None:
        raise refused

    monkeypatch.setattr("urllib.request.urlopen", answer)
    assert fetch("http://x") is None and refused.closed


def test_options_of_vllm_bench_serve_that_change_nothing_are_named() -> None:
    typical = (
        "--backend vllm --endpoint /v1/completions --dataset-name random --ignore-eos --tokenizer a/b --temperature 0"
    )
    shown = CliRunner().invoke(main, ["bench", "serve", *typical.split(), "--base-url", "http://127.0.0.1:1"])
    assert "--backend changes nothing here: requests are OpenAI's" in shown.stderr
    assert shown.stderr.count("changes nothing here") == 6 and "does not answer /v1/models" in shown.stderr
    for other in ("--backend tgi", "--dataset-name sharegpt", "--temperature 1"):
        refused = CliRunner().invoke(main, ["bench", "serve", *other.split()])
        assert refused.exit_code == 2 and f"No such option '{other.split()[0]}'" in refused.stderr
