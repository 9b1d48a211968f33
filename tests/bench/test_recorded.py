"""What charts show, what `quire bench cpu` computes and what is noted of the machine, as written down."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quire.bench import charts, cpu, monitor
from quire.bench.late import cpu as bench_cpu
from tests.expected import check

EXPECTED = Path(__file__).parent / "expected"


def near(values: Any) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def axes_lines(axes: Axes) -> Iterator[str]:
    """Everything in a pair of axes that carries a number or a text."""
    yield f"axes {axes.get_title(loc='left')!r} x {axes.get_xlabel()!r} {axes.get_xscale()} {axes.get_yscale()}"
    yield f"  limits {near(axes.get_xlim())} / {near(axes.get_ylim())}"
    for line in axes.lines:
        x, y = (near(values) for values in (line.get_xdata(), line.get_ydata()))
        style = f"{line.get_color()} {line.get_linestyle()} {line.get_linewidth():.3g} {line.get_drawstyle()}"
        yield f"  line {line.get_label()!r} {style} [{x}] [{y}]"
    for bar in axes.patches:
        left, bottom, width, height = bar.get_bbox().bounds
        yield f"  bar {near((left, bottom, width, height))} {near(bar.get_facecolor())}"
    for text in axes.texts:
        yield f"  text {text.get_text()!r} {near(text.xy)}"  # type: ignore[attr-defined]
    if legend := axes.get_legend():
        yield f"  legend {[text.get_text() for text in legend.get_texts()]}"
    for axis in (axes.xaxis, axes.yaxis):
        shown = (axis.get_major_formatter(), axis.get_minor_formatter())
        yield f"  ticks {[[formatter(value, 0) for value in (0.5, 3.0, 2000.0)] for formatter in shown]}"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []

    def svg(figure: Figure) -> str:
        lines.append(f"figure {near(figure.get_size_inches())}")
        lines.extend(line for axes in figure.axes for line in axes_lines(axes))
        return "<svg/>"

    monkeypatch.setattr(charts, "svg", svg)
    return lines


def level(name: str, users: int, rate: float | None, scale: float) -> dict[str, Any]:
    """A level of a load test as `quire bench serve` saves it; the last two requests failed."""
    asked = [[i * scale, i * scale + 0.1 * (i + 1), i * scale + 0.3 * (i + 1), 4, 8, 200] for i in range(3)]
    gauges = [
        {"s": -1.0, "running": 9, "waiting": 9, "kv": 0.9, "tokens": 0},
        {"s": -0.25, "running": 1, "waiting": 2, "kv": 0.25, "tokens": 10},
        {"s": 0.75, "running": 3, "tokens": 30},
        {"s": 0.75, "running": 4, "waiting": 1, "kv": 0.5, "tokens": 35},
        {"s": 2.0, "running": 5, "waiting": 0, "kv": 0.75},
        {"s": 3.0, "running": 2, "waiting": 0, "kv": 0.5, "tokens": 90},
        {"s": 5.0, "running": 2, "waiting": 0, "kv": 0.5, "tokens": 130},
    ]
    return {
        "level": name,
        "users": users,
        "rate": rate,
        "ok": 3,
        "tokens_s": 100 * scale,
        "good_s": 2 * scale,
        "ms": {"ttft": [10 * scale, 15, 20 * scale], "tpot": [3 * scale, 4, None], "e2el": [1, 2, 3]},
        "asked": [*asked, [9.0, None, 9.5, 0, 8, 200], [9.0, 9.1, 9.5, 0, 8, 503]],
        "gauges": gauges,
        "gpu": [[0.0, 50.0], [1.0, 75.0]] if scale > 1 else [],
        "seconds": 4.0 * scale,
    }


def test_charts_of_loads_show_what_is_written_down(drawn: list[str]) -> None:
    users = {
        "about": {"label": "a"},
        "goals": {"ttft": 1000},
        "levels": [
            level("8 users", 8, None, 2.0),
            level("2 users", 2, None, 1.0),
            {**level("", 4, None, 1.0), "ok": 0},
        ],
    }
    rate = {"about": {"label": "b"}, "goals": {}, "levels": [level("5 a second", 0, 5.0, 3.0)]}
    for runs in ([users, rate], [rate], [{**users, "goals": {}}]):
        drawn.append(f"-- {[run['about']['label'] for run in runs]}")
        drawn.append(f"{len(charts.charts(runs))} charts")  # type: ignore[arg-type]
    check(EXPECTED / "charts.txt", "\n".join(drawn))


ROWS: tuple[Mapping[str, Any], ...] = (
    {"workload": "decode", "batch": 8, "ours": 1234.5, "peer": 1000.0, "target": 1500.0, "ceiling": 4000.0},
    {"workload": "latency", "batch": 1, "ours": 12.344, "peer": 10.0, "target": 8.0, "ms_a_token": True},
    {"workload": "prompts", "batch": 0, "ours": 99.96, "peer": 200.0},
    {"workload": "chat", "concurrency": 64, "ours": 500.0, "peer": 500.0, "target": 450.0},
    {"workload": "not run", "batch": 1, "ours": None, "peer": 500.0},
    {"workload": "no peer", "batch": 1, "ours": 5.0, "peer": None},
)


def test_charts_beside_a_peer_show_what_is_written_down(drawn: list[str]) -> None:
    for rows in (ROWS, ROWS[4:]):
        assert charts.bars(rows) == ["<svg/>"]
    check(EXPECTED / "bars.txt", "\n".join(drawn))


def test_speeds_are_medians_over_interleaved_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubles answer as if a prompt took a second and a token 1/4 or 1/2 s, the middle round twice as long."""
    asked: list[str] = []
    before = torch.get_num_threads()

    def double(name: str, each: float) -> Any:
        class Engine:
            version = "1"
            calls = 0

            def __init__(self, *given: object) -> None:
                words = [str(word) for word in given if not isinstance(word, Path)]
                asked.append(f"{name} of {['PYTHON' if word == sys.executable else word for word in words]}")

            def __call__(self, prompts: list[list[int]], new: int) -> float:
                slow = 2.0 if (self.calls - 1) // 2 % 3 == 1 else 1.0
                self.calls += 1
                asked.append(f"{name} {len(prompts)} x {len(prompts[0])} tokens, {new} new: {prompts[0][:2]}")
                return 1.0 + (new - 1) * each * slow

            def layer_cost(self, prompts: list[list[int]], layers: int) -> dict[str, float]:
                asked.append(f"{name} layers of {len(prompts)} x {len(prompts[0])} tokens, {layers}")
                return {"us": 12.5, "calls": 0.25}

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                """Nothing to end."""

        return Engine

    monkeypatch.setattr(cpu, "SHAPES", {"smollm2-135m": {**cpu.SHAPES["smollm2-135m"], "num_hidden_layers": 1}})
    monkeypatch.setattr(cpu.checkpoints, "write_folder", lambda folder, shape, dtype: folder.mkdir() or folder)
    monkeypatch.setattr(cpu, "bandwidth", lambda now: 1e9)
    monkeypatch.setattr(cpu, "_Quire", double("quire", 0.25))
    monkeypatch.setattr(cpu, "Peer", double("transformers", 0.5))
    try:
        words = ("--batch", "4", "--prompt", "3", "--new", "9", "--repeat", "3", "--threads", "1", "--long-prompt", "0")
        monkeypatch.setattr(cpu, "_size", lambda model: 10**9)
        found = CliRunner().invoke(bench_cpu, [*words, "--json"])
    finally:
        torch.set_num_threads(before)
    assert found.exit_code == 0, found.output
    made = {row["what"]: row for row in json.loads(found.output)["rows"]}
    assert made["prompt"]["speed"] == {"quire": 12.0, "transformers": 12.0}
    assert made["decode"]["speed"] == {"quire": 16.0, "transformers": 8.0}
    assert made["all"]["speed"] == {"quire": 12.0, "transformers": 7.2}
    assert made["decode"]["ratio"] == {"transformers": 2.0}
    assert made["decode"]["layer"] == {"us": 12.5, "calls": 0.25}
    check(EXPECTED / "cpu.txt", "\n".join(asked))


def test_what_is_noted_of_the_machine_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(monitor.os.environ):
        if name.startswith(("VLLM_", "QUIRE_", "CUDA_")):
            monkeypatch.delenv(name)
    for name in (
        "VLLM_API_KEY",
        "QUIRE_ADMIN_KEY",
        "OTHER_KEY",
        "PATHS",
        "QUIRE_PORT",
        "CUDA_VISIBLE_DEVICES",
        "VLLM_X",
    ):
        monkeypatch.setenv(name, f"value of {name}")
    monkeypatch.setattr(sys, "argv", ["quire", "bench", "serve", "--api-key=sesame", "sesame", "open"])
    noted = monitor.environment("sesame")
    assert noted["variables"] == {name: f"value of {name}" for name in ("QUIRE_PORT", "CUDA_VISIBLE_DEVICES", "VLLM_X")}
    assert noted["argv"] == ["bench", "serve", "--api-key=...", "...", "open"]
    assert monitor.environment()["argv"] == sys.argv[1:]
    assert noted["torch"] == torch.__version__ and noted["cores"] and noted["python"] in sys.version
