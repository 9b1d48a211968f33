"""Calibrations: what is fitted to steps, how it is kept, and what is refused."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from quire.bench import calibrate
from quire.cli import main
from quire.engine.timing import VirtualClock
from quire.errors import InvalidConfig
from quire.scheduler.step_time import StepCost
from quire.sim.calibration import Calibration, StepSample, StepSampler, fit, non_negative, read_calibration
from quire.sim.devices import H200, ModelSizes, find_device, step_cost
from quire.sim.fleet import FleetConfig, prepare, simulate_fleet
from quire.sim.replica import Replica
from quire.sim.results import Results
from tests.sim.fleets import engine_of, trace_of

TRUTH = StepCost(base=3e-3, per_token=4e-5, per_kv=2e-7, per_row=5e-5, per_pair=1e-8)


def steps(noise: tuple[float, ...] = ()) -> list[StepSample]:
    """Steps of an engine that takes what `TRUTH` says."""
    sampler, results = StepSampler(), Results(80)
    replica = Replica(0, engine_of(cost=TRUTH, noise=noise, max_num_seqs=12), results, step_by_step=True)
    replica.engine.observers = (sampler,)
    load = trace_of([(0.11 * n, 1 + 37 * n % 300, 1 + 13 * n % 60) for n in range(80)])
    for number, at in enumerate(load.arrivals):
        replica.send(at, number, prepare(load, number)[1])
    replica.advance(float("inf"))
    return sampler.samples


def test_the_coefficients_of_a_known_cost_are_found() -> None:
    found = fit(steps())
    assert found.cost[:5] == pytest.approx(TRUTH[:5], rel=1e-3)
    assert found.error < 1e-4 and found.samples > 500
    assert max(found.noise) == pytest.approx(min(found.noise), rel=1e-3)


def test_noise_is_kept_as_what_steps_of_a_simulation_are_drawn_from() -> None:
    found = fit(steps(noise=(0.5, 1.0, 1.5)))
    assert min(found.noise) == pytest.approx(0.5, rel=0.1) and max(found.noise) == pytest.approx(1.5, rel=0.1)
    assert np.mean(found.noise) == pytest.approx(1.0)
    samples = steps(noise=(0.5, 1.0, 1.5))
    predicted = sum(found.cost.seconds(*each[:4]) for each in samples)
    assert predicted == pytest.approx(sum(each.seconds for each in samples), rel=1e-6)


def test_a_prediction_from_one_load_holds_for_another() -> None:
    """The other one is heavier: 60 requests at once."""
    load = trace_of([(0.0, 1 + 53 * n % 250, 2 + 11 * n % 40) for n in range(60)])
    truth, _ = simulate_fleet(FleetConfig(engine_of(cost=TRUTH)), load)
    guess, _ = simulate_fleet(FleetConfig(engine_of(cost=fit(steps()).cost)), load)
    assert max(guess.end) == pytest.approx(max(truth.end), rel=1e-3)
    assert list(guess.first) == pytest.approx(list(truth.first), rel=1e-2)


def test_nothing_is_negative_where_the_least_squares_would_be() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative(columns, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0], abs=1e-6)
    assert non_negative(columns, np.array([3.0, 5.0, 7.0])) == pytest.approx([1.0, 2.0], abs=1e-4)


@pytest.mark.parametrize(("error", "warned"), [(0.09, False), (0.22, True)])
def test_a_fit_that_is_far_off_is_written_with_a_warning(
    error: float, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "measure", lambda *_: Calibration(TRUTH, error=error, samples=100))
    done = CliRunner().invoke(main, ["calibrate", "--output", str(tmp_path / "here.json"), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["error"] == error
    assert ("warning: the fit is 22 % off in the mean" in done.stderr) is warned == bool(done.stderr)
    assert read_calibration(tmp_path / "here.json").error == error


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="7 steps are too few"):
        fit(steps()[:7])


def test_a_file_is_read_as_it_was_written_and_only_its_owner_may(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    path.write_text("old")
    path.chmod(0o644)
    made = Calibration(TRUTH._replace(experts=8, used_experts=2), (0.5, 1.5), 0.002, 0.03, 99, {"model": "m"})
    made.write(path)
    assert read_calibration(path) == made
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "its format is 2, and this quire reads 1"),
        ({"format": "x"}, "is no calibration"),
        ({"cost": {}}, "is damaged: KeyError"),
        ({"noise": [-1]}, "noise must be a number of at least 0"),
        ({"error": "x"}, "error must be a number"),
        ({"cost": dict.fromkeys(StepCost._fields, float("nan"))}, "is damaged"),
    ],
)
def test_another_file_is_refused_and_never_misread(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "here.json"
    Calibration(TRUTH).write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InvalidConfig, match=said):
        read_calibration(path)


def test_a_missing_file_and_other_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_calibration(tmp_path / "none")
    for text in ("[1]", "{", "3"):
        (tmp_path / "x").write_text(text)
        with pytest.raises(InvalidConfig, match="is no calibration"):
            read_calibration(tmp_path / "x")


def test_lengths_are_followed_where_an_engine_begins_with_another_request() -> None:
    sampler = StepSampler()
    replica = Replica(0, engine_of(cost=TRUTH), Results(2), step_by_step=True)
    replica.engine.observers = (sampler,)
    load = trace_of([(0.0, 30, 3), (9.0, 5, 2)])
    for number, at in enumerate(load.arrivals):
        replica.send(at, number, prepare(load, number)[1])
    replica.advance(float("inf"))
    assert [each[:4] for each in sampler.samples] == [
        (30, 30, 1, 30 * 15.5),
        (1, 31, 1, 0.0),
        (1, 32, 1, 0.0),
        (5, 5, 1, 5 * 3.0),
        (1, 6, 1, 0.0),
    ]
    assert [each.seconds for each in sampler.samples] == pytest.approx(
        [TRUTH.seconds(*each[:4]) for each in sampler.samples]
    )


DENSE = ModelSizes(16e9, 0.0, 0, 0, 7e9, 5e8, 2, 131072.0, 0.0, 5e5, 32)


def test_a_card_reads_weights_once_and_multiplies_for_every_token() -> None:
    cost = step_cost(H200, DENSE)
    one, many, prompts = (cost.seconds(n, 600 * n, n) for n in (1, 64, 8192))
    assert 16e9 / H200.memory < 1 and one == pytest.approx(16e9 / H200.bandwidth, rel=0.3)
    assert one < many < 3 * one and prompts > 20 * one


def test_experts_are_read_as_often_as_tokens_use_them() -> None:
    cost = step_cost(H200, DENSE._replace(weights=2e9, expert=4e8, experts=128, used_experts=8))
    assert cost.distinct_experts(1) == pytest.approx(8) and cost.distinct_experts(10_000) == pytest.approx(128)
    assert cost.fixed(1) < cost.fixed(4) < cost.fixed(16)
    assert StepCost(experts=0).distinct_experts(5) == 0.0


def test_experts_multiply_prompts_more_slowly_than_other_matrices() -> None:
    dense = step_cost(H200, DENSE)
    half = step_cost(H200, DENSE._replace(expert_parameters=DENSE.parameters / 2))
    assert half.per_token == pytest.approx(dense.per_token * (1 + H200.flops[2] / H200.expert_flops[2]) / 2)


def test_an_unknown_card_is_refused_with_what_to_do() -> None:
    assert find_device("H200") is H200
    assert find_device("h100").bandwidth < H200.bandwidth and find_device("h100").flops == H200.flops
    with pytest.raises(InvalidConfig, match="quire calibrate"):
        find_device("b300")


def test_a_replica_on_a_clock_of_its_own_begins_when_it_is_started() -> None:
    replica = Replica(0, engine_of(), Results(1), started=5.0)
    assert replica.clock.time == VirtualClock(5.0).time and replica.next_time() == replica.horizon() == float("inf")
