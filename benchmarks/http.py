"""`python -m benchmarks.http`: a server under streams at fixed concurrency, from several client processes.

Run it with `--nothing` first: the same clients against a server that does nothing show what they can take.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from benchmarks.card import needed
from benchmarks.gpu import peer
from benchmarks.servers import spawned
from benchmarks.shapes import SHAPES, write
from benchmarks.workloads import prompts
from quire.bench.load_client import LoadJob, run_clients, summarize
from quire.bench.monitor import GPUMonitor, environment

COUNTS: Mapping[int, int] = {1: 20, 16: 100, 64: 384, 256: 1536}
"""Requests at a concurrency; others: six each."""

IDLE_SERVER = "import asyncio, sys; from benchmarks.http import nothing; asyncio.run(nothing(int(sys.argv[1])))"


@click.command("http")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen3-0.6b", show_default=True)
@click.option("--concurrency", "levels", multiple=True, type=int, default=(1, 16, 64, 256), show_default=True)
@click.option("--processes", default=4, show_default=True, help="Client processes at most.")
@click.option("--port", default=18321, show_default=True)
@click.option("--nothing", is_flag=True, help="Measure the clients: the server answers at once.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Also store figures and traces there.")
def command(shape: str, levels: tuple[int, ...], processes: int, port: int, nothing: bool, path: Path | None) -> None:
    """Serve random weights of a public shape and measure: tokens/s, time to first token, time between tokens."""
    if not nothing:
        needed("for a server on a CPU there are `python -m benchmarks.http_cpu` and `quire bench serve`")
    found: list[dict[str, Any]] = []
    with ExitStack() as open_:
        place = write(Path(open_.enter_context(tempfile.TemporaryDirectory())), shape)
        ready = open_.enter_context(idle(port) if nothing else serving(place, shape, port))
        found.append({"workload": f"ready {shape}", "seconds": ready})
        click.echo(json.dumps(found[-1]))
        measure(shape, 8, 32, processes, port, seed=3)  # warms caches and connections
        for level in levels:
            with GPUMonitor() as watch:
                row = measure(shape, level, COUNTS.get(level, 6 * level), processes, port, seed=7)
            recorded = peer()
            for what, name in (("peer", "http"), ("target", "http_target")):
                row[what] = recorded[name].get(shape, {}).get(str(level))
            found.append({**row, "trace": watch.samples})
            click.echo(json.dumps(row))
            if path is not None:
                path.write_text(json.dumps({"environment": environment(), "nothing": nothing, "rows": found}))


@contextmanager
def serving(place: Path, shape: str, port: int, *more: str) -> Iterator[float]:
    """A server of random weights; seconds until it is ready. more: arguments of `quire serve`."""
    arguments = ["serve", "--model", str(place), "--served-model-name", shape, "--load-format", "dummy", *more]
    arguments += ["--max-model-len", "1024" if shape == "gpt2" else "4096", "--max-num-seqs", "256"]
    arguments += ["--port", str(port), "--disable-log-stats", "--uvicorn-log-level", "warning"]
    began = time.perf_counter()
    with spawned([sys.executable, "-m", "quire", *arguments], port):
        yield time.perf_counter() - began


@contextmanager
def idle(port: int) -> Iterator[float]:
    """A server of one process that answers any request at once, a token an event."""
    process = subprocess.Popen([sys.executable, "-c", IDLE_SERVER, str(port)])
    try:
        time.sleep(1.0)
        yield 0.0
    finally:
        process.terminate()
        process.wait()


def measure(model: str, level: int, count: int, processes: int, port: int, *, seed: int) -> dict[str, Any]:
    """One level of concurrency, its streams shared out among processes."""
    ids, new = prompts(count, (128, 256), (32, 64), seed=seed)
    job = LoadJob(host="127.0.0.1", port=port, model=model, streams=level, prompts=ids, output_lens=new)
    found = summarize(run_clients(job, processes))
    figures = {name: found[name] for name in ("failed", "tokens_an_event", "ttft_ms", "itl_ms", "ms_a_token_mean")}
    row = {"workload": f"http {model}", "concurrency": level, "requests": count, "ours": found["tokens_s"]}
    return row | figures


async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Whatever is asked: `max_tokens` events and the usage, without a thought."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            asked = json.loads(await reader.readexactly(size))
            new, prompt = asked["max_tokens"], len(asked["prompt"])
            event = b'data: {"id":"x","object":"text_completion","choices":[{"index":0,"text":" word"}]}\n\n'
            counts = f'{{"prompt_tokens":{prompt},"completion_tokens":{new}}}'
            usage = f'data: {{"choices":[],"usage":{counts}}}\n\ndata: [DONE]\n\n'.encode()
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(new):
                writer.write(b"%x\r\n%s\r\n" % (len(event), event))
                await asyncio.sleep(0)
            writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(usage), usage))
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def nothing(port: int) -> None:
    server = await asyncio.start_server(reply, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    command()
