"""`python -m benchmarks.pair` keeps what it saw, and compares only what is alike."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from benchmarks.pair import Load, Unlike, command, compared
from benchmarks.servers import through
from quire.frontend.supervisor import free_port

ROOT = Path(__file__).parents[2]
QUICK = ("--concurrency", "2", "--requests", "6", "--new", "3", "5", "--prompt", "4", "8", "--processes", "1")


def pair(out: Path, *args: str) -> Result:
    return CliRunner().invoke(command, [*QUICK, "--repeat", "1", "--out", str(out), *args])


def test_a_server_and_a_quire_in_front_of_it_are_compared_and_everything_is_kept(upstream: str, tmp_path: Path) -> None:
    done = pair(tmp_path, "--direct", upstream, "--gate", "0.05")
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    [level] = summary["levels"]
    assert level["concurrency"] == 2 and level["ratio"] == level["ratios"][0] > 0.05
    assert summary["about"]["environment"]["revision"] and summary["about"]["load"]["seed"] == 7
    raw = [json.loads(line) for line in (tmp_path / "raw.jsonl").read_text().splitlines()]
    assert [(row["side"], row["round"]) for row in raw] == [
        ("direct", -1),
        ("through", -1),
        ("direct", 0),
        ("through", 0),
    ]
    assert all(len(row["parts"][0]["first"]) == 6 and row["failed"] == 0 for row in raw)
    assert raw[2]["inputs"] == raw[3]["inputs"] != raw[0]["inputs"]
    assert len({row["salt"] for row in raw}) == 4
    assert "stub is ready" in (tmp_path / "through.log").read_text() and (tmp_path / "gpu.json").exists()


def test_prompts_are_of_tokens_that_every_model_has() -> None:
    load = Load(levels=(2,), requests=50, prompt=(4, 8), new=(1, 1), seed=7, processes=1, salt=False)
    assert max(token for prompt in load.asked(2, 7)[0] for token in prompt) < 1000


@pytest.mark.nightly
def test_both_are_started_in_turn_where_there_is_a_model(tmp_path: Path) -> None:
    fake = tmp_path / "vllm.py"
    fake.write_text(
        f"import asyncio, sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom benchmarks.stub import main\n"
        "print(*sys.argv[1:], flush=True)\n"
        "asyncio.run(main(int(sys.argv[sys.argv.index('--port') + 1]), 0.002, 0.001))\n"
    )
    args = ("--model", "m", "--vllm-command", f"{sys.executable} {fake}", "--gate", "5", "--", "--seed", "3")
    done = pair(tmp_path, *args)
    assert done.exit_code == 1 and "below the gate of 5.0 at concurrency 2" in done.output, done.output
    for log in ("direct.log", "vllm.log"):
        said = (tmp_path / log).read_text().splitlines()[0]
        assert said.startswith("serve m --host 127.0.0.1 --port") and said.endswith("--seed 3"), log


def test_a_server_that_cannot_start_is_reported_with_its_last_words(tmp_path: Path) -> None:
    said = r"ended with code 2(.|\n)*there is no option --wrong"
    with pytest.raises(click.ClickException, match=said), through(["--wrong"], free_port(), tmp_path / "log"):
        pass


def row(side: str, **changed: Any) -> dict[str, Any]:
    same = {"model": "m", "inputs": "a", "asked": 9, "prompted": 5, "tokens": 9, "failed": 0}
    speed = {"tokens_s": 100.0, "ttft_ms": [1.0, 2.0], "itl_ms": [1.0, 2.0]}
    return {"side": side, "concurrency": 1, "round": 0, **same, **speed, **changed}


@pytest.mark.parametrize(
    ("direct", "other", "says"),
    [
        ({}, {"inputs": "b"}, "inputs differ"),
        ({}, {"prompted": 6}, "prompted differ"),
        ({}, {"tokens": 8, "failed": 1}, "tokens differ"),
        ({}, {"model": "n"}, "model differ"),
        ({"tokens": 8}, {"tokens": 8}, "not every answer came"),
        ({"failed": 1}, {}, "not every answer came"),
    ],
)
def test_what_is_not_alike_is_not_compared(direct: dict[str, Any], other: dict[str, Any], says: str) -> None:
    with pytest.raises(Unlike, match=says):
        compared([row("direct", **direct), row("through", **other)], 1)


def test_the_ratio_is_the_median_over_rounds() -> None:
    rows = [
        row(side, round=n, tokens_s=100.0 if side == "direct" else speed)
        for n, speed in enumerate((90.0, 99.0, 95.0))
        for side in ("direct", "through")
    ]
    found = compared(rows, 1)
    assert found["ratio"] == 0.95 and found["ratios"] == [0.9, 0.99, 0.95] and found["added_ttft_ms"] == 0.0


@pytest.mark.parametrize(
    "args", [(), ("--direct", "http://x", "--model", "m"), ("--model", "m", "--through", "http://x")]
)
def test_it_wants_one_way_of_having_servers(args: tuple[str, ...], tmp_path: Path) -> None:
    done = pair(tmp_path, *args)
    assert done.exit_code == 2 and "--direct" in done.output
