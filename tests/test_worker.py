"""Workers of pytest-xdist, as `make test` has them, in processes of their own."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker import ROOT, CatchingLogs, cards_of, files, share, spread_workers

CONFTEST = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests import worker
worker.ROOT, worker.FOLDERS = Path(__file__).parent, ("",)
def pytest_configure(config):
    if hasattr(config, "workerinput"):
        worker.Ending.at_once = True
        worker.compile_share(config)
"""
TEST = """
import atexit, os, sys, helper
def test_{name}():
    atexit.register(lambda: open(os.devnull if {name!r} == "b" else "ended", "w").close())
    assert helper.one == {one}
"""


def test_each_file_falls_to_one_worker() -> None:
    shares = [share(f"gw{number}", 3) for number in range(3)]
    assert sorted(path for each in shares for path in each) == files()
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert {ROOT / "src/quire/llm.py", Path(__file__)} <= {*files()}


def test_workers_begin_with_different_gpus_and_pairs_stay_pairs() -> None:
    orders = [cards_of(f"gw{worker}", ["0", "1", "2", "3"]) for worker in range(5)]
    assert [order[0] for order in orders] == ["0", "1", "2", "3", "0"]
    assert {frozenset(order[:2]) for order in orders} == {frozenset("01"), frozenset("23")}
    assert sorted(cards_of("gw4", ["a", "b", "c"])) == ["a", "b", "c"]
    assert cards_of("gw4", []) == []


@pytest.mark.parametrize(
    ("worker", "given", "number", "want"),
    [("gw1", "2,5", 2, "5,2"), ("gw1", None, 2, "1,0"), ("gw1", None, 0, None), (None, "2,5", 2, "2,5")],
)
def test_only_workers_choose_gpus(
    monkeypatch: pytest.MonkeyPatch, worker: str | None, given: str | None, number: int, want: str | None
) -> None:
    for name, value in (("PYTEST_XDIST_WORKER", worker), ("CUDA_VISIBLE_DEVICES", given)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    spread_workers(number)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == want


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST.format(root=str(ROOT)))
    (tmp_path / "helper.py").write_text("one = 1\n")
    (tmp_path / "test_a.py").write_text(TEST.format(name="a", one=1))
    (tmp_path / "test_b.py").write_text(TEST.format(name="b", one=2))
    (tmp_path / "test_c.py").write_text("no Python\n")
    return tmp_path


def run(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "2", "-p", "no:cacheprovider", *names]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run(argv, check=False, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def test_workers_end_after_all_that_is_to_be_done_at_their_end_and_failures_are_told(folder: Path) -> None:
    ended = run(folder, "test_a.py", "test_b.py")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "1 failed, 1 passed" in ended.stdout
    assert "assert 1 == 2" in ended.stdout  # an assertion that was rewritten
    assert (folder / "ended").exists()
    made = {path.name.partition(".")[0] for path in folder.rglob("*.pyc")}
    assert made >= {"test_a", "test_b", "helper"}


def test_a_file_that_is_no_python_is_told_of_where_it_is_imported(folder: Path) -> None:
    ended = run(folder)
    assert ended.returncode != 0
    assert "SyntaxError" in ended.stdout


def test_records_are_caught_at_the_level_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.root.level
    with CatchingLogs(caplog.handler, logging.DEBUG):
        logging.getLogger("quire.of.this.test").debug("seen")
    logging.getLogger("quire.of.this.test").debug("unseen")
    assert caplog.messages == ["seen"]
    assert logging.root.level == before


@pytest.mark.parametrize("name", CatchingLogs.OURS)
def test_so_are_those_of_loggers_that_do_not_propagate(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(name), "propagate", False)
    with CatchingLogs(caplog.handler):
        logging.getLogger(f"{name}.below").error("seen")
    logging.getLogger(f"{name}.below").error("unseen")
    assert caplog.messages == ["seen"]
    assert caplog.handler not in logging.getLogger(name).handlers
