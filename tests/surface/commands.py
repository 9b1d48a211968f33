"""Every command of the command line, with arguments that make it short."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import tempfile
from typing import Any

import click
import pytest
from click.testing import CliRunner

from quire.cli import main
from quire.frontend.supervisor import free_port
from quire.scheduler.step_time import StepCost
from quire.sim.calibration import Calibration
from tests.surface.deployment import Deployment
from tests.surface.items import Item

SHORT = ("--max-tokens", 6, "--temperature", 0)
READY = re.compile(r"is ready at 127\.0\.0\.1:(\d+)")


def generate(deployment: Deployment) -> Any:
    answers = [deployment.quire("generate", prompt, *SHORT) for prompt in ("The little dog", "Once upon a time " * 12)]
    return answers, deployment.quire("generate", "-", *SHORT, "--stop", " the", input="One day")


def chat(deployment: Deployment) -> Any:
    return deployment.quire("chat", "--system", "Be kind.", *SHORT, input="Hello!\nTell me about a boat.\n")


def run(deployment: Deployment) -> Any:
    once = deployment.quire("run", "embedded", "Tell", "me", "about a boat.", *SHORT)
    return once, deployment.quire("run", "embedded", "--system", "Be kind.", *SHORT, input="Hello!\n")


def quantize(deployment: Deployment) -> Any:
    """The file answers; where it lies differs."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.gguf"
        said = deployment.quire("quantize", "embedded", path, "--type", "q8_0", "--no-check")
        return said.replace(folder, ""), alone("generate", "The little dog", "--model", path, *SHORT)


def doctor(deployment: Deployment) -> Any:
    """What it finds differs from machine to machine."""
    return [each["name"] for each in json.loads(deployment.quire("doctor", "--json", codes=(0, 1)))][:2]


def chat_elsewhere(deployment: Deployment) -> Any:
    url = deployment.server.url
    return alone("chat", "--url", url, "--max-tokens", 6, input="Hello!\nA boat?\n")


def serve(deployment: Deployment) -> Any:
    """Whole and streamed, over HTTP."""
    http, ask = deployment.server.http, {"model": "embedded", "max_tokens": 4, "temperature": 0}
    whole = http.post("/v1/completions", json={**ask, "prompt": ["Once upon a time", "The little dog"]}).json()
    talk = [{"role": "user", "content": "Tell me about a boat. " * 12}]
    streamed = http.post("/v1/chat/completions", json={**ask, "messages": talk, "stream": True}).text
    seeded = http.post("/v1/completions", json={**ask, "prompt": "One", "temperature": 0.9, "seed": 3, "n": 2}).json()
    pieces = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    said = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces if piece["choices"])
    assert streamed.rstrip().endswith("data: [DONE]")
    return said, [[choice["text"] for choice in body["choices"]] for body in (whole, seeded)]


def executor(deployment: Deployment) -> Any:
    """Another engine's steps are run there."""
    with deployment.process("executor", "--listen", "127.0.0.1:0") as process:
        there = ("--executor", "grpc", "--executor-address", f"127.0.0.1:{ready(process)}")
        few = ("--max-num-seqs", 8, "--max-num-batched-tokens", 64)
        return alone("generate", "The little dog", *SHORT, *there, *few)


def ready(process: subprocess.Popen[str]) -> str:
    """The port of a `quire executor`, once it listens."""
    assert process.stdout is not None
    said = READY.search(process.stdout.readline())
    assert said is not None
    return said[1]


def verify(deployment: Deployment) -> Any:
    """In float32 answers are the same, though not to the last bit."""
    output = deployment.quire("verify", "--requests", 2, "--new", 4, "--repeat", 0, "--json", codes=(0, 1))
    situations = json.loads(output)["situations"]
    assert situations and all(row["tokens"] == 2 * 4 for row in situations if row.get("tokens"))
    return [row["name"] for row in situations[:5]]


def config(deployment: Deployment) -> Any:
    shown = deployment.quire("config")
    for name, value in deployment.environ().items():
        option = name.removeprefix("QUIRE_").lower().replace("_", "-")
        assert re.search(rf"^\s*{option}\s.*environment {name}\s*$", shown, re.M), (option, value, shown)
    return len(shown.splitlines())


def plan(deployment: Deployment) -> Any:
    return "weights" in deployment.quire("plan", "embedded", codes=(0, 1))


def engine(deployment: Deployment) -> Any:
    few = ("--requests", 30, "--virtual", "--step-ms", 5, "--json")
    found = json.loads(deployment.quire("bench", "engine", *few, "--lookahead", deployment.setting.lookahead))
    return found["tokens"]


def simulate(deployment: Deployment) -> Any:
    """What is decided for the same load is the same."""
    where = deployment.folder / f"calibration-{free_port()}.json"
    few = ("--num-prompts", 40, "--shrink", 16, "--lookahead", deployment.setting.lookahead, "--json")
    Calibration(StepCost(0.01, 0.001)).write(where)
    found = json.loads(deployment.quire("simulate", "embedded", "--calibration", where, *few))
    return found["runs"][0]["answered"]


def replay(deployment: Deployment) -> Any:
    where = deployment.folder / f"recordings-{free_port()}"
    few = ("--requests", 30, "--blocks", 24, "--virtual", "--step-ms", 5, "--lookahead", deployment.setting.lookahead)
    deployment.quire("bench", "engine", *few, "--recording-dir", where)
    assert "every decision is the same" in deployment.quire("replay", where)


def demo(deployment: Deployment) -> Any:
    output = deployment.quire("demo", "--lookahead", deployment.setting.lookahead)
    return sorted(re.findall(r"finished: (\w+)", output))


def latency(deployment: Deployment) -> Any:
    few = ("--input-len", 5, "--output-len", 4, "--batch-size", 2, "--num-iters-warmup", 1, "--num-iters", 2)
    return len(json.loads(deployment.quire("bench", "latency", *few, "--json"))["latencies"])


def throughput(deployment: Deployment) -> Any:
    few = ("--input-len", 6, "--output-len", 4, "--num-prompts", 5, "--num-warmups", 2)
    return json.loads(deployment.quire("bench", "throughput", *few, "--json"))["total_num_tokens"]


def startup(deployment: Deployment) -> Any:
    few = ("--num-iters-cold", 1, "--num-iters-warmup", 0, "--num-iters-warm", 0)
    return sorted(json.loads(deployment.quire("bench", "startup", *few, "--json")))


def recorded(deployment: Deployment) -> Any:
    """What a load test of the server keeps, drawn."""
    saved, page = deployment.folder / "load.json", deployment.folder / "report.html"
    few = ("--random-output-len", "3:5", "--random-input-len", "4:8", "--processes", 1, "--num-warmups", 1)
    once = ("--max-concurrency", 2, "--num-prompts", 4, "--save-result", saved)
    url = deployment.server.url
    alone("bench", "serve", "--base-url", url, *few, *once)
    alone("bench", "report", saved, "--output", page)
    assert page.read_text().lstrip().lower().startswith("<!doctype html")
    [level] = json.loads(saved.read_text())["levels"]
    return level["requests"], level["ok"]


def pair(deployment: Deployment) -> Any:
    few = ("--concurrency", 2, "--requests", 4, "--new", 3, 5, "--prompt", 4, 8, "--processes", 1, "--repeat", 1)
    benchmark("pair", "--direct", deployment.server.url, *few, "--gate", 0.01, "--out", deployment.folder / "pair")


def alone(
    *arguments: object, input: str | None = None, codes: tuple[int, ...] = (0,), command: click.Command = main
) -> str:
    """Run a command with settings of its own, outside the engine of the setting."""
    done = CliRunner(env={"COLUMNS": "200"}).invoke(command, [str(one) for one in arguments], input=input)
    assert done.exit_code in codes, (arguments, done.output, done.exception)
    return done.stdout


def benchmark(name: str, *arguments: object) -> None:
    """Run `python -m benchmarks.NAME`, in this process."""
    alone(*arguments, command=importlib.import_module(f"benchmarks.{name}").command)


def bench(name: str, *arguments: object, **more: Any) -> Item:
    """A developers' benchmark with settings of its own: that it ends well."""

    def run(deployment: Deployment) -> None:
        deployment.rest()
        port = ("--port", free_port()) if name in ("front", "batches", "viewers", "http") else ()
        benchmark(name, *arguments, *port)

    return Item(f"python -m benchmarks.{name}", run, executors=(), **more)


def on_card(name: str, *arguments: object) -> Item:
    """A benchmark of a card; without one it says so: tests/benchmarks/test_card.py."""
    return bench(
        name,
        *arguments,
        card=True,
        elsewhere="tests/benchmarks/test_card.py::test_without_a_card_it_is_one_line_at_once",
    )


def export(deployment: Deployment) -> Any:
    where = deployment.folder / f"graphs-{free_port()}"
    alone("export-onnx", "embedded", where)
    return alone("generate", "The little dog", *SHORT, "--model", where, "--executor", "onnx")


def diff(deployment: Deployment) -> Any:
    return alone("diff", "embedded")


def logits(deployment: Deployment) -> None:
    from benchmarks import shapes

    tiny = shapes.qwen(3, 32, 2, (4, 2, 8), 48, 60000, tied=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "SHAPES", {"qwen3-0.6b": tiny})
        benchmark("logits", "qwen3-0.6b", "--dtype", "float32", "--tokens", 24)


def cpu(deployment: Deployment) -> None:
    from quire.bench import cpu

    few = {"hidden_size": 144, "num_hidden_layers": 2, "intermediate_size": 128}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "SHAPES", {"smollm2-135m": {**cpu.SHAPES["smollm2-135m"], **few}})
        alone(
            "bench",
            "cpu",
            "--format",
            "f32",
            "--long-prompt",
            0,
            "--batch",
            1,
            "--prompt",
            4,
            "--new",
            2,
            "--repeat",
            1,
        )


LADDER = "tests/benchmarks/test_ladder.py"

COMMANDS = (
    Item("quire generate", generate),
    Item("quire chat", chat),
    Item("quire run", run),
    Item("quire doctor", doctor, executors=("local",)),
    Item("quire config", config),
    Item("quire plan", plan, executors=("local",)),
    Item("quire bench engine", engine, executors=("local",)),
    Item("quire simulate", simulate, executors=("local",)),
    Item(
        "quire calibrate",
        lambda deployment: None,
        executors=(),
        elsewhere="tests/bench/test_simulate.py::test_a_calibration_of_this_machine_is_what_a_simulation_reads",
    ),
    Item("quire replay", replay, executors=("local",)),
    Item("quire demo", demo, executors=("local",)),
    Item("quire verify", verify, ci=("grpc",)),
    Item("quire executor", executor, executors=("local", "ahead"), ci=("local",), needs=("grpc",)),
    Item("quire quantize", quantize, executors=("local",)),
    Item("quire list", lambda deployment: deployment.quire("list", "--library"), executors=("local",)),
    Item("quire inspect", lambda deployment: deployment.quire("inspect", "embedded"), executors=("local",)),
    Item(
        "quire check",
        lambda deployment: "1 of 1 answered" in deployment.quire("check", "embedded"),
        executors=(),
        elsewhere="tests/cli/test_check.py::test_a_tiny_model_of_every_family_answers_alone_and_in_a_batch_alike",
    ),
    Item("quire version", lambda deployment: deployment.quire("version"), executors=()),
    Item("quire serve", serve, part="server"),
    Item("quire chat --url", chat_elsewhere, part="server", ci=("grpc",)),
    Item("quire bench serve, quire bench report", recorded, part="server", ci=("grpc",)),
    Item("quire bench latency", latency),
    Item("quire bench throughput", throughput),
    Item("quire bench startup", startup, executors=("local",), ci=()),  # tests/bench/test_offline.py has it in CI
    Item("python -m benchmarks.pair", pair, part="server", ci=()),
    Item(
        "quire export-onnx",
        export,
        executors=(),
        needs=("onnx", "onnxruntime"),
        elsewhere="tests/test_cli_executors.py::test_what_export_writes_generates",
    ),
    Item(
        "quire diff",
        diff,
        executors=(),
        needs=("transformers",),
        elsewhere="tests/cli/test_inspect.py::test_a_model_departs_nowhere_from_transformers",
    ),
    bench("drafts", "--batch", 1, "--new", 12, "--repeat", 1, "--json", ci=()),
    bench("front", "--streams", 2, "--new", 4, "--seconds", 0.1, "--rounds", 1, ci=()),
    bench("batches", "--rounds", 1, "--people", 2, "--rate", 8, ci=()),
    bench("viewers", "--viewers", 1, "--streams", 2, "--seconds", 0.3, "--rounds", 1, ci=()),
    bench("structured", "--batch", 2, "--new", 8, "--repeat", 1, "--json"),
    Item("quire bench cpu", cpu, executors=(), ci=(), needs=("transformers",)),
    bench("checkpoint", "--gib", 0.1, "--repeat", 1, ci=()),
    bench(
        "ladder",
        "embedded",
        "--scale",
        0.05,
        "--repeat",
        1,
        "--context",
        256,
        elsewhere=f"{LADDER}::test_every_rung_is_measured_without_and_with_it",
    ),
    Item(
        "python -m benchmarks.logits",
        logits,
        executors=(),
        elsewhere="tests/benchmarks/test_logits.py::test_a_row_for_each_dtype_and_way",
    ),
    bench(
        "profile",
        "--batch",
        2,
        "--prompt",
        16,
        "--new",
        3,
        "--peak",
        1,
        elsewhere="tests/benchmarks/test_profile.py::test_the_embedded_model_is_profiled_and_traced",
    ),
    bench(
        "paging",
        "--dtype",
        "bfloat16",
        "--batch",
        1,
        "--prompt",
        4,
        12,
        "--new",
        2,
        6,
        "--context",
        128,
        "--kv-gib",
        0.0136,
        elsewhere=f"{LADDER}::test_pages_hold_what_a_piece_a_sequence_cannot",
    ),
    bench(
        "doors",
        "--batch",
        2,
        "--prompt",
        4,
        "--new",
        6,
        "--repeat",
        1,
        "--json",
        needs=("grpc", "onnx", "onnxruntime"),
        ci=(),
    ),
    on_card("gpu", "latency-1b", "--repeat", 1),
    on_card(
        "speculate",
        "--model",
        "qwen3-0.6b",
        "--draft",
        "qwen3-0.6b",
        "--batch",
        1,
        "--prompt",
        16,
        "--new",
        8,
        "--repeat",
        1,
    ),
    on_card("http", "--concurrency", 2, "--processes", 1),
    on_card("kernels", "--only", "embed"),
)
