"""A scheduling policy of the user's own: the documented example, what is refused; answers never change."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from quire import LLM, SamplingParams
from quire.cli import main
from quire.config import load
from quire.engine.timing import VirtualClock
from quire.errors import InvalidConfig
from quire.observability.recorder import recorded
from quire.scheduler.kv_cache import KVCacheManager
from quire.scheduler.policy import METHODS, POLICIES, SchedulingPolicy, load_policy, make_policy, policy_name
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import Sequence as Seq
from quire.scheduler.step_time import StepCost
from quire.sim.run import SimConfig
from quire.types import BACKGROUND, Request
from tests import lattice
from tests.live import serving
from tests.observability.watched import Watched

ROOT = Path(__file__).parents[1]
EXAMPLE = "shortest:ShortestFirst"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with the documented example in it and not on Python's path."""
    text = (ROOT / "docs/guides/scheduling-policies.md").read_text("utf-8")
    [block] = re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M)
    assert sum(bool(line) for line in block.splitlines()) <= 30
    (tmp_path / "shortest.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != ""])
    yield tmp_path
    for name in [name for name in sys.modules if name in ("shortest", "own")]:
        del sys.modules[name]


def own(folder: Path, source: str) -> str:
    """A policy module with this source."""
    header = "from quire.scheduler.policy import SchedulingPolicy\n"
    (folder / "own.py").write_text(header + source)
    return "own:Own"


# ---------------------------------------------------------------- the documented example


def test_the_example_orders_the_queue_and_chooses_the_victim(folder: Path) -> None:
    def finished(policy: str) -> list[str]:
        engine = SimConfig(pages=16, page_size=4, max_num_seqs=1, scheduling_policy=policy).build(VirtualClock())
        for id, length in (("long", 20), ("middle", 9), ("short", 3)):
            engine.submit([1] * length, 4, id=id)
        while engine.has_pending_work:
            engine.step()
        return [done.id for done in engine.completed_requests]

    assert finished("fcfs") == ["long", "middle", "short"]
    assert finished(EXAMPLE) == ["short", "middle", "long"]


def victims(policy: str) -> list[tuple[str, str]]:
    """(who was preempted, for whom), as /explain tells it."""
    watched = Watched(pages=24, prefix_caching=False, scheduling_policy=policy, pressure_policy="preempt")
    for id, new in (("far", 40), ("near", 30), ("next", 34)):
        watched.submit([1] * 16, new, id=id)
    watched.run()
    out = []
    for id in ("far", "near", "next"):
        story = watched.story(id)
        out += [(id, event["by"]) for event in story["events"] if event["what"] == "preempted"]
        assert bool(story["preemptions"]) == ("preempted" in story["summary"])
    return out


def test_explain_says_for_whom_the_policys_victim_was_preempted(folder: Path) -> None:
    assert {victim for victim, _ in victims("fcfs")} <= {"near", "next"}
    told = victims(EXAMPLE)
    assert told and {victim for victim, _ in told} == {"far"}


def test_the_example_serves_and_explains(folder: Path) -> None:
    """In the engine's process, under pressure, with the request's own priority accepted."""
    paths = os.pathsep.join([str(ROOT / "src"), str(folder)])
    args = ("--dtype", "float32", "--num-gpu-blocks-override", "30", "--scheduling-policy", EXAMPLE)
    with serving(folder, *args, environ={"PYTHONPATH": paths}) as live:
        # Answers to one request, so that they come together however busy the machine is.
        body = {"prompt": "Animal number ", "n": 8, "max_tokens": 160, "ignore_eos": True, "priority": 1}
        answer = live.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        live.settled()
        told = live.http.get(f"/v1/requests/{answer.json()['id']}/explain").json()["answers"]
        assert len(told) == 8
        assert live.stats()["cache"]["pressure_events"] == sum(each["preemptions"] for each in told)
        assert any(each["waits"] for each in told)


def test_the_example_generates_what_fcfs_generates(folder: Path) -> None:
    prompts = ["The cat", "Once upon a time there was", "A"]
    params = SamplingParams(temperature=0, max_tokens=8)
    answers = []
    for policy in ("fcfs", EXAMPLE):
        with LLM("embedded", dtype="float32", max_num_seqs=2, scheduling_policy=policy) as llm:
            answers.append([output.outputs[0].text for output in llm.generate(prompts, params)])
            assert policy_name(llm._engine.scheduler.policy) == policy
    assert answers[0] == answers[1]


def test_the_console_script_finds_a_module_of_the_working_directory(folder: Path) -> None:
    script = Path(sys.executable).with_name("quire")
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    args = ["demo", "--requests", "3", "--scheduling-policy", EXAMPLE]
    done = subprocess.run([script, *args], cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_recording_is_replayed_with_the_policy_given_and_never_imports_it_by_itself(folder: Path) -> None:
    tight = SimConfig(pages=12, page_size=4, max_num_seqs=4, scheduling_policy=EXAMPLE, cost=StepCost(0.01))
    engine = tight.build(VirtualClock(), make=recorded(folder / "recording"))
    rng = random.Random(3)
    for _ in range(30):
        engine.submit([1] * rng.randint(1, 20), rng.randint(4, 20))
    while engine.has_pending_work:
        engine.step()
    engine.close()
    assert engine.gauges().preemptions
    refused = CliRunner().invoke(main, ["replay", str(folder / "recording")])
    assert refused.exit_code == 2 and f"--scheduling-policy {EXAMPLE}" in refused.output
    again = CliRunner().invoke(main, ["replay", str(folder / "recording"), "--scheduling-policy", EXAMPLE])
    assert again.exit_code == 0 and "every decision is the same" in again.output, again.output
    assert f"order {EXAMPLE}" in again.output


# ---------------------------------------------------------------- any policy


class Erratic(SchedulingPolicy):
    """Decides at random, as far as its parameters allow."""

    rng = random.Random(11)

    def admit(self, running: Sequence[Seq], max_num_seqs: int) -> int:
        return self.rng.randint(-1, max_num_seqs)

    def key(self, request: Request) -> float:
        return self.rng.uniform(-9, 9)

    def victim(self, candidates: Sequence[Seq], blocked: Seq) -> Seq:
        return self.rng.choice([*candidates, blocked])

    def reserve(self, seq: Seq, block_size: int) -> int:
        return self.rng.randint(0, seq.max_length)


def test_no_policy_changes_a_token() -> None:
    """Combinations of the lattice whose order, admissions, victims and reservations are drawn at random."""
    rng, preemptions = random.Random(4), 0
    for tight in (1, 1, 2):
        for _ in range(25):
            combo = {axis: rng.choice(values) for axis, values in lattice.AXES.items()}
            combo |= {"order": f"{__name__}:Erratic", "tight": tight, "late": False}
            preemptions += lattice.run(combo).sch.num_preemptions
    assert preemptions > 50


@pytest.mark.parametrize("key", [float("nan"), BACKGROUND, float("inf")])
def test_a_key_that_is_no_place_in_the_queue_fails_the_request(key: float) -> None:
    class Odd(SchedulingPolicy):
        def key(self, request: Request) -> float:
            return key

    scheduler = Scheduler(KVCacheManager(4, 4), policy=Odd())
    with pytest.raises(ValueError, match=r"the key of .*Odd must be a number below"):
        scheduler.add(Request(id="a", prompt=(1,), max_new_tokens=1))
    assert not scheduler.has_work


def test_a_victim_that_is_no_candidate_is_refused() -> None:
    class Odd(SchedulingPolicy):
        def victim(self, candidates: Sequence[Seq], blocked: Seq) -> Seq:
            return Seq(blocked.request, 99, [], 0)

    config = SimConfig(pages=4, page_size=1, prefix_caching=False, pressure_policy="preempt")
    engine = config.build(VirtualClock())
    engine.scheduler.policy = Odd()
    for _ in range(2):
        engine.submit([1], 4)
    with pytest.raises(ValueError, match="must be one of the candidates"):
        [engine.step() for _ in range(20)]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import nowhere_at_all", "own cannot be imported: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def", "own cannot be imported: SyntaxError"),
        ("class Own2(SchedulingPolicy): pass", "own has no 'Own'. Did you mean 'Own2'?"),
        ("Own = 3", "Own is not a subclass of quire.scheduler.policy.SchedulingPolicy"),
        ("class Own: pass", "Own is not a subclass"),
        ("class Own(SchedulingPolicy):\n    def victims(self, a, b): ...", "no 'victims'. Did you mean 'victim'?"),
        ("class Own(SchedulingPolicy):\n    def key(self): ...", "key must be a method with (self, request)"),
        ("class Own(SchedulingPolicy):\n    admit = 3", "admit must be a method with (self, running, max_num_seqs)"),
        (
            "class Own(SchedulingPolicy):\n    def __init__(self): ...",
            "Own(batching=..., pressure=...) failed: TypeError",
        ),
        ("class Own(SchedulingPolicy):\n    def __init__(self, **o): ...", "must call super().__init__(**options)"),
    ],
)
def test_a_class_that_is_no_policy_is_refused_with_what_is_wrong(folder: Path, source: str, says: str) -> None:
    name = own(folder, source)
    with pytest.raises(InvalidConfig, match=re.escape(says)) as refused:
        make_policy(name)
    assert refused.value.param == "scheduling_policy" and name in str(refused.value)


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    for refuse in (lambda: load({"scheduling_policy": "priorty"}), lambda: load_policy("priorty")):
        with pytest.raises(InvalidConfig, match=r"one of fcfs, priority, or module:Class.*Did you mean 'priority'"):
            refuse()


def test_a_module_that_is_not_there_is_named_at_the_start(folder: Path) -> None:
    done = CliRunner().invoke(main, ["generate", "a", "--scheduling-policy", "nowhere:Policy"])
    assert done.exit_code == 2 and "nowhere cannot be imported" in done.output


def test_the_registry_is_what_the_option_knows() -> None:
    assert load({"scheduling_policy": "own:Own"}).scheduler.scheduling_policy == "own:Own"
    for name, kind in POLICIES.items():
        policy = make_policy(name, batching="static", pressure="reserve")
        assert type(policy) is kind and policy_name(policy) == name
        assert (policy.batching, policy.pressure) == ("static", "reserve")
        assert all(callable(getattr(policy, method)) for method in METHODS)
