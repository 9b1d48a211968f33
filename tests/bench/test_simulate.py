"""`quire simulate` and `quire calibrate`, as a user calls them."""

from __future__ import annotations

import json
import re
import shlex
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quire.bench.simulate import search
from quire.cli import main
from quire.scheduler.step_time import StepCost
from quire.sim.calibration import Calibration, read_calibration
from tests.live import ROOT


def quire(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, list(map(str, words)))
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.json"
    Calibration(StepCost(0.002, 0.0001, 1e-7), noise=(0.9, 1.0, 1.1), first_token=0.004).write(path)
    return path


@pytest.fixture
def runs(calibration: Path) -> Callable[..., list[dict[str, Any]]]:
    def run(*words: object, code: int = 0, few: int = 120) -> list[dict[str, Any]]:
        given = ("--calibration", calibration, "--num-prompts", few, "--json")
        found: list[dict[str, Any]] = json.loads(quire("simulate", *given, *words, code=code))["runs"]
        return found

    return run


SHORT = ("--shrink", 16)


def test_the_same_question_has_the_same_answer_and_step_by_step_too(runs: Callable[..., list[dict[str, Any]]]) -> None:
    [one], [two], [slow] = runs(*SHORT), runs(*SHORT), runs(*SHORT, "--step-by-step")
    assert one == two and one["digest"] == slow["digest"]
    [other] = runs(*SHORT, "--seed", 5)
    assert other["digest"] != one["digest"], "noise follows the seed"
    assert one["answered"] == one["requests"] == 120 and 0 < one["utilisation"] < 1


def test_every_value_of_an_option_is_tried_against_every_other(runs: Callable[..., list[dict[str, Any]]]) -> None:
    rows = runs(*SHORT, "--set", "max_num_seqs=1,32", "--set", "speed=1,40")
    assert [row["set"] for row in rows] == [
        {"max_num_seqs": seqs, "speed": speed} for seqs in ("1", "32") for speed in ("1", "40")
    ]
    p99 = [row["ms"]["ttft"]["p99"] for row in rows]
    assert p99[1] > 5 * p99[3], "one sequence at a time makes a crowd wait"


def test_the_fewest_replicas_for_a_target_are_found_and_priced(runs: Callable[..., list[dict[str, Any]]]) -> None:
    ask = (*SHORT, "--speed", 60, "--goodput", "ttft:400", "--price-per-hour", 2)
    rows = runs(*ask, "--target", "ttft_p99=400ms")
    [chosen] = [row for row in rows if row["chosen"]]
    assert chosen["replicas"] > 1 and chosen["ms"]["ttft"]["p99"] <= 400
    [fewer] = runs(*ask, "--replicas", chosen["replicas"] - 1)
    assert fewer["ms"]["ttft"]["p99"] > 400 and fewer["good"] < chosen["good"]
    assert chosen["cost"] == pytest.approx(2 * chosen["replica_hours"])


def test_where_no_number_of_replicas_is_enough_the_exit_status_says_so(calibration: Path) -> None:
    ask = ("--calibration", calibration, "--num-prompts", 60, *SHORT, "--max-replicas", 4)
    output = quire("simulate", *ask, "--target", "ttft_p50=1ms", code=1)
    assert "No number of replicas up to 4 has ttft p50 1 ms" in output


@pytest.mark.parametrize("need", [1, 2, 3, 7, 8, 63, 64])
@pytest.mark.parametrize("first", [1, 5, 64])
def test_the_search_finds_the_least_number_with_few_runs(need: int, first: int) -> None:
    rows = search(lambda count: {"meets": count >= need, "replicas": count}, first, 64)
    assert [row["replicas"] for row in rows if row["chosen"]] == [need] and len(rows) <= 14
    assert not any(row["chosen"] for row in search(lambda count: {"meets": False, "replicas": count}, first, 64))


def test_speculation_pays_by_its_acceptance(runs: Callable[..., list[dict[str, Any]]]) -> None:
    def config(rate: float) -> str:
        given = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
        return json.dumps(given | {"synthetic_acceptance_rate": rate})

    [none], [low], [high] = runs(*SHORT), *(runs(*SHORT, "--speculative-config", config(rate)) for rate in (0.1, 0.9))
    assert low["draft_acceptance"] == pytest.approx(0.1, abs=0.05)
    assert high["draft_acceptance"] == pytest.approx(0.9, abs=0.05)
    assert high["ms"]["tpot"]["mean"] < 0.6 * none["ms"]["tpot"]["mean"] and high["steps"] < low["steps"]


def test_sessions_hit_what_their_earlier_turns_left(runs: Callable[..., list[dict[str, Any]]]) -> None:
    small = ("--input-len", "20:60", "--output-len", "10:30", "--turns", 3, "--think", 1)
    [row] = runs("--sessions", 8, *small)
    assert row["answered"] == 120 and row["hit_rate"] > 0.5
    [cold] = runs("--sessions", 8, *small, "--no-enable-prefix-caching")
    assert cold["hit_rate"] == 0 and cold["ms"]["ttft"]["mean"] > row["ms"]["ttft"]["mean"]


def test_a_page_shows_all_runs_without_fetching_anything(calibration: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    ask = ("--calibration", calibration, "--num-prompts", 60, *SHORT, "--price-per-hour", 2, "--goodput", "ttft:300")
    output = quire("simulate", *ask, "--set", "replicas=1,2", "--output", page)
    text = page.read_text()
    assert "open it in a browser" in output and text.count("<svg") == 3
    assert "cost against requests a second" in text and "replicas 2" in text and "ttft" in text
    assert not re.search(r"""(src|href)=["']http|@import|<script""", text)


def test_charts_join_what_differs_in_replicas_alone() -> None:
    charts = pytest.importorskip("quire.bench.charts")
    times = {what: {"p50": 1.0, "p99": 2.0} for what in ("ttft", "itl")}
    rows = [
        {
            "set": {"policy": policy, "replicas": str(count)},
            "replicas": count,
            "replica_hours": float(count),
            "good_s": 5.0,
            "ms": times,
            "sizes": [(0.0, count)],
            "chosen": True,
        }
        for policy in ("least_loaded", "round_robin")
        for count in (1, 4)
    ]
    assert {name: [row["replicas"] for row in group] for name, group in charts.in_groups(rows).items()} == {
        "policy least_loaded": [1, 4],
        "policy round_robin": [1, 4],
    }
    axes = charts.cost_and_goodput(rows).axes[0]
    assert axes.get_xlim() == (0, 5.4) and axes.get_ylim() == (0, 4.32), "no point lies on the edge"
    assert "*" not in "".join(text.get_text() for text in axes.texts), "all are what was asked for"
    assert len(charts.simulated(rows)) == 3


def test_a_card_is_asked_about_without_having_one() -> None:
    [row] = json.loads(quire("simulate", "--gpu", "h200", "--num-prompts", 40, *SHORT, "--json"))["runs"]
    assert row["answered"] == 40 and row["describes"][0] == ["weights", "14.01 MiB"]


def test_the_table_says_what_was_refused_and_what_is_not_known(calibration: Path) -> None:
    output = quire("simulate", "--calibration", calibration, "--num-prompts", 60)
    assert "are too long to ever run" in output and "does not say which prompts begin alike" in output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "say where steps run, by one of --gpu and --calibration"),
        (("--gpu", "h2000"), "--gpu must be one of h200, h100, not 'h2000'. Did you mean 'h200'"),
        (("--gpu", "h200", "--trace", "azure-code", "--sessions", "3"), "two loads"),
        (("--gpu", "h200", "--set", "max_num_seq=3"), "no such option of an engine or a deployment"),
        (("--gpu", "h200", "--set", "max_num_seqs"), "must be NAME=VALUE"),
        (("--gpu", "h200", "--set", "max_num_seqs=none"), "--set max_num_seqs"),
        (("--gpu", "h200", "--set", "replicas=0"), "--set replicas: 0 is not in the range 1<=x<=100000"),
        (("--gpu", "h200", "--set", "speed=nan"), "--set speed: nan is not a finite number"),
        (("--gpu", "h200", "--set", "prefill_replicas=1000000"), "--set prefill_replicas: 1000000 is not in the range"),
        (("--gpu", "h200", "--prefill-replicas", "1000000"), "1000000 is not in the range"),
        (("--gpu", "h200", "--autoscale", "1:1000000"), "1000000 replicas are more than 100000"),
        (("--gpu", "h200", "--think", "2"), "--think changes nothing without --sessions"),
        (("--gpu", "h200", "--startup-time", "2"), "--startup-time changes nothing without --autoscale"),
        (("--gpu", "h200", "--set", "autoscale_tokens=1,2"), "--autoscale-tokens changes nothing without --autoscale"),
        (("--gpu", "h200", "--prefill-timeout", "2"), "--prefill-timeout changes nothing without --prefill-replicas"),
        (("--gpu", "h200", "--max-replicas", "2"), "--max-replicas changes nothing without --target"),
        (("--gpu", "h200", "--sessions", "2", "--speed", "2"), "--speed is of a trace, and --sessions has none"),
        (("--gpu", "h200", "--set", "policy=best"), "--set policy: 'best' is not one of 'least-loaded'"),
        (("--gpu", "h200", "--target", "ttft=500"), "must be such as ttft_p99=500ms"),
        (("--gpu", "h200", "--target", "ttft_p99=5ms", "--autoscale", "1:2"), "which --autoscale changes"),
        (("--gpu", "h200", "--num-prompts", "99999"), "the trace has 8819 requests, not 99999"),
        (("--gpu", "h200", "--trace", "none.csv"), "there is no trace none.csv"),
        (("--gpu", "h200", "--memory", "1MiB"), "the model does not fit"),
        (("--gpu", "h200", "--trace", "chats", "--shrink", "2"), "--shrink does not go with a trace that names blocks"),
        (("--gpu", "h200", "--runner", "pooling"), "only answers are simulated"),
        (("--gpu", "h200", "--set", "runner=generate,pooling", "--num-prompts", "3"), "only answers are simulated"),
        (("--calibration", "none.json"), "none.json cannot be read"),
        (("--gpu", "h200", "--speed", "nan"), "nan is not a finite number"),
        (("--gpu", "h200", "--sessions", "2", "--think", "nan"), "nan is not a finite number"),
        (("--gpu", "h200", "--startup-time", "inf"), "inf is not a finite number"),
        (("--gpu", "h200", "--price-per-hour", "nan"), "nan is not a finite number"),
        (("--gpu", "h200", "--replicas", "1000000000"), "1000000000 is not in the range"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(words: tuple[str, ...], said: str) -> None:
    output = " ".join(quire("simulate", *words, code=2).split())
    assert said in output


@pytest.mark.parametrize(
    "values", ["max_imbalance=0,8", "prefill_replicas=0,1", "speed=1e3,2e3", "policy=least-loaded,prefix_hash"]
)
def test_whatever_an_option_takes_can_be_tried_by_set(values: str) -> None:
    found = json.loads(quire("simulate", "--gpu", "h200", "--num-prompts", 3, *SHORT, "--set", values, "--json"))
    assert len(found["runs"]) == 2


def test_a_calibration_of_this_machine_is_what_a_simulation_reads(tmp_path: Path) -> None:
    path, recordings = tmp_path / "here.json", tmp_path / "recordings"
    quire("calibrate", "--seconds", 1, "--max-num-seqs", 4, "--output", path)
    made = read_calibration(path)
    assert made.samples > 20 and made.cost.seconds(1, 10, 1) > 0 and made.about["model"] == "embedded"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    quire("simulate", "--calibration", path, "--num-prompts", 20, *SHORT)
    quire(
        "bench",
        "engine",
        "--requests",
        60,
        "--virtual",
        "--step-ms",
        5,
        "--token-us",
        20,
        "--recording-dir",
        recordings,
    )
    quire("calibrate", "--recording", recordings, "--output", path)
    cost = read_calibration(path).cost
    assert (cost.base, cost.per_token) == pytest.approx((0.005, 2e-5), rel=0.05)


def test_mixed_and_split_deployments_are_compared(runs: Callable[..., list[dict[str, Any]]], calibration: Path) -> None:
    mixed, split = runs(*SHORT, "--speed", 10, "--replicas", 2, "--set", "prefill_replicas=0,1", few=60)
    assert mixed["prefill_replicas"] == 0 and not mixed["tiers"] and mixed["answered"] == split["answered"] == 60
    assert split["tiers"]["remote_tokens"] > 0 and 0 < split["prefill_utilisation"] < 1
    assert split["replica_hours"] > 1.4 * mixed["replica_hours"], "prefill engines are paid for"
    less, more = runs(*SHORT, "--prefill-replicas", 1, "--set", "prefill_max_slowdown=0.1,1e9", few=60)
    assert less["tiers"].get("remote_tokens", 0) < more["tiers"]["remote_tokens"]
    ask = ("simulate", "--calibration", calibration, "--num-prompts", 30, *SHORT, "--prefill-replicas", 1)
    said = quire(*ask, "--prefill-calibration", calibration, "--prefill-min-tokens", 20)
    assert "prefills done" in said and "prefill engines 1, busy" in said
    assert "leave --routers and --autoscale out" in quire(*ask, "--autoscale", "1:2", code=2)


def test_stages_take_a_share_each_and_are_for_cpus(runs: Callable[..., list[dict[str, Any]]]) -> None:
    one, two = runs(*SHORT, "--speed", 1000, "--set", "pipeline_parallel_size=1,2")
    assert one["answered"] == two["answered"] == 120 and two["tokens_s"] > 1.2 * one["tokens_s"]
    refused = quire("simulate", "--gpu", "h200", "--num-prompts", 4, "--pipeline-parallel-size", 2, code=2)
    assert "--pipeline-parallel-size 2 works on a CPU only for now" in refused


GUIDE = (ROOT / "docs/guides/simulate.md").read_text("utf-8").replace("\\\n", " ")
LINES = [line for line in GUIDE.splitlines() if line.startswith("quire simulate ")]


@pytest.mark.parametrize("line", LINES)
def test_the_commands_of_the_guide_answer(line: str, calibration: Path, tmp_path: Path) -> None:
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,48,10\n2023-11-16 18:17:04.9,30,8\n"
    (tmp_path / "trace.csv").write_text(azure)
    places = {"FOLDER": "embedded", "trace.csv": tmp_path / "trace.csv", "here.json": calibration}
    places |= {"plan.html": tmp_path / "plan.html"}
    words = [places.get(word, word) for word in shlex.split(line)[1:]]
    if "plan.html" in line:
        pytest.importorskip("matplotlib")
    rows = json.loads(quire(*words, "--json"))["runs"]
    assert all(row["answered"] + row["too_long"] == row["requests"] < 3 * row["answered"] for row in rows)
