"""`quire bench load`: every level is answered, refusals are counted, and the report holds no secrets."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from quire.backends.keeper import free_port
from quire.bench import load
from quire.bench.chart import lines
from quire.bench.started import fetched
from quire.bench.users import HEAD, cells, measured
from quire.cli import main
from tests.live import environment


@pytest.fixture(scope="module")
def stub() -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([sys.executable, "-m", "quire.bench.stub", str(port), "2", "1"], env=environment())
    try:
        while fetched(url + "/v1/models") is None:
            time.sleep(0.02)
        yield url
    finally:
        process.terminate()
        process.wait()


def test_more_and_more_users_are_answered_and_reported(stub: str, tmp_path: Path) -> None:
    quick = ("--requests", "2", "--new", "3", "5", "--processes", "1", "--users", "12", "--users", "2")
    asked = ["bench", "load", stub, *quick, "--out", str(tmp_path / "new" / "report"), "--api-key", "sesame"]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    kept = (tmp_path / "new" / "report" / "report.json").read_text()
    shown = (tmp_path / "new" / "report" / "report.html").read_text()
    assert "sesame" not in kept + shown + done.output
    levels = json.loads(kept)["levels"]
    assert [(row["users"], row["requests"], row["failed"]) for row in levels] == [(2, 16, 0), (12, 24, 0)]
    assert all(3 * row["requests"] <= row["tokens"] <= 5 * row["requests"] for row in levels)
    assert all(row["answer_ms"][0] >= row["ttft_ms"][0] >= 2.0 for row in levels)
    charts = [ElementTree.fromstring(part + "</svg>") for part in shown.split("</svg>")[:-1] if part.startswith("<svg")]
    assert len(charts) == 5  # and the first, which the table stands before
    assert shown.count("<tr>") == 3 and "http" in shown


class Busy:
    """A server that is full for the first request of each connection, then closed for good."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for head in (b"429 Too Many Requests\r\nRetry-After: 0", b"503 Service Unavailable\r\nConnection: close"):
            size = int((await reader.readuntil(b"\r\n\r\n")).split(b"Content-Length: ")[1])
            await reader.readexactly(size)
            writer.write(b"HTTP/1.1 " + head + b"\r\nContent-Length: 4\r\n\r\nbusy")
        writer.close()
        await writer.wait_closed()


def test_who_is_refused_goes_on_and_is_counted_by_status() -> None:
    async def ask() -> load.Tally:
        server = await asyncio.start_server(Busy().serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            job = load.Job(host="127.0.0.1", port=port, model="m", streams=2, prompts=[[1]] * 5, new=[1] * 5, begin=0.0)
            return await load.run(job)

    tally = asyncio.run(ask())
    assert tally.refused == {"429": 2, "503": 2}
    assert (tally.tokens, tally.whole) == (0, [])
    row = {"users": 2, "requests": 5, **measured([asdict(tally)])}
    assert cells(row)[2].endswith("(2 x 429, 2 x 503)") and len(cells(row)) == len(HEAD)


def test_a_chart_leaves_out_what_is_no_number() -> None:
    drawn = lines("a < b", [1, 2, 4], {"p50": [1.0, float("nan"), 3.0]})
    marks = ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}circle")
    assert [float(mark.attrib["cx"]) for mark in marks] == [58.0, 448.0]


def test_no_server_is_told_in_a_line() -> None:
    done = CliRunner().invoke(main, ["bench", "load", f"http://127.0.0.1:{free_port()}"])
    assert done.exit_code == 1
    assert "does not answer /v1/models" in done.output and done.output.count("\n") == 1
