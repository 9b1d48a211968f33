"""One fault tried: planted in a copy of the tree, its nearest tests run there until one fails."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.mutation.faults import DoesNotApply, Fault, planted
from tests.mutation.marks import Marks
from tests.mutation.nearest import Nearness

_STUCK = 30.0
"""Seconds for which a test must have run, when time is up, to be looked at as one that hangs."""

CAUGHT, SURVIVED, NOT_APPLIED = "caught", "survived", "does not apply"


class Result(NamedTuple):
    """What became of `fault`: `by` is the test that caught it or the reason why it did not apply."""

    fault: Fault
    verdict: str
    by: str
    ran: int
    seconds: float


class Limits(NamedTuple):
    """Seconds of wall time: for all tests of one fault, and for one test before it counts as hanging."""

    fault: float
    test: float


class Ended(NamedTuple):
    """How a run of pytest ended: the test that failed or hung, or none; tests that were run; whether time was up.

    hung: seconds for which `failed` had run when it was stopped, 0 where it ended by itself. longest: seconds of the
    longest test that ended.
    """

    failed: str | None
    hung: float
    ran: int
    out_of_time: bool
    longest: float = 0.0


def copied(root: Path, to: Path) -> Path:
    """A copy of what git tracks or would track in `root`; of everything where it is no checkout."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, check=False) if (root / ".git").exists() else None
    if listed is None or listed.returncode:
        return Path(shutil.copytree(root, to, ignore=shutil.ignore_patterns(".*", "__pycache__")))
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    return to


class Bench:
    """The places where faults are tried: a clean copy of the tree, and one for each of `jobs` that run side by side.

    tests: files or ids that are run for each fault; None: those that execute its line by the file `marks`, then the
    `most` nearest files, or all that reach the module.
    """

    def __init__(
        self,
        root: Path,
        jobs: int,
        limits: Limits,
        tests: list[str] | None = None,
        *,
        most: int | None = None,
        marks: Path | None = None,
    ) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="quire-mutation-", ignore_cleanup_errors=True)
        place = Path(self._place.name)
        self.clean = copied(root, place / "clean")
        self._free = [copied(root, place / f"job{i}") for i in range(jobs)]
        self._limits = limits
        self._given, self._most = tests, most
        self._tests = Nearness(self.clean)
        self._marks = Marks(marks, self.clean) if marks else None
        self._lock = threading.Lock()
        self._clean_runs: dict[str, float | None] = {}

    def close(self) -> None:
        self._place.cleanup()

    def tried(self, fault: Fault) -> Result:
        """`fault` planted, tested and taken out again."""
        began = time.monotonic()
        with self._lock:
            tree = self._free.pop()
        try:
            path, source, line = planted(tree, fault)
        except DoesNotApply as error:
            with self._lock:
                self._free.append(tree)
            return Result(fault, NOT_APPLIED, str(error), 0, 0.0)
        fault = fault._replace(path=str(path.relative_to(tree)), line=line)
        before = path.read_text()
        try:
            _write(path, source)
            verdict, by, ran = self._verdict(tree, self._chosen(fault), began)
        finally:
            _write(path, before)
            with self._lock:
                self._free.append(tree)
        return Result(fault, verdict, by, ran, time.monotonic() - began)

    def _chosen(self, fault: Fault) -> list[list[str]]:
        """The tests to run for `fault`, in groups, the first first."""
        if self._given:
            return [[one] for one in self._given]
        nearest = self._tests.nearest(fault.path, fault.line)
        marked = self._marks.tests(fault.path, fault.line) if self._marks else None
        if self._marks and marked is not None:
            nearest = [file for file in nearest if file not in self._marks.files]
        return [*(marked or []), *([file] for file in nearest[: self._most])]

    def _verdict(self, tree: Path, groups: list[list[str]], began: float) -> tuple[str, str, int]:
        """A failure counts when it comes again with the fault and not without it; if not, that test is left out.

        Few groups at first, then ever more at once: all files that are named are imported before the first test runs.
        """
        without = {test for test, seconds in self._clean_runs.items() if seconds is None}
        ran, few = 0, 3
        while groups:
            left = self._limits.fault - (time.monotonic() - began)
            if left <= 0:
                return SURVIVED, "out of time", ran
            ended = run(
                tree, [test for group in groups[:few] for test in group], without, Limits(left, self._limits.test)
            )
            ran += ended.ran
            if ended.failed is not None:
                if self._shows(tree, ended):
                    return CAUGHT, ended.failed + (" (hangs)" if ended.hung else ""), ran
                without.add(ended.failed)
            elif not ended.out_of_time:
                groups, few = groups[few:], 2 * few
        return SURVIVED, "", ran

    def _shows(self, tree: Path, ended: Ended) -> bool:
        """Whether the test fails with the fault once more, and not without; or hangs, and is quick without."""
        assert ended.failed is not None
        alone = Limits(4 * self._limits.test, self._limits.test)
        if not ended.hung and run(tree, [ended.failed], (), alone).failed is None:
            return False
        clean = self._clean(ended.failed)
        return clean is not None and not 0 < ended.hung < 4 * clean

    def _clean(self, test: str) -> float | None:
        """Seconds that `test` takes without a fault; None where it does not pass."""
        if test not in self._clean_runs:
            ended = run(self.clean, [test], (), Limits(4 * self._limits.test, self._limits.test))
            fine = ended.failed is None and not ended.out_of_time
            self._clean_runs[test] = ended.longest if fine else None
        return self._clean_runs[test]


def _write(path: Path, source: str) -> None:
    """Writes the module; what is compiled of it is dropped, for its date and size may be those of the one before."""
    path.write_text(source)
    for old in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        old.unlink()


def run(tree: Path, tests: list[str], without: Iterable[str], limits: Limits) -> Ended:
    """pytest over `tests` (files or ids, in this order) in `tree`, until one fails or hangs."""
    if not tests:
        return Ended(None, 0.0, 0, False)
    with tempfile.TemporaryDirectory(prefix="quire-mutation-log-") as place:
        log = Path(place) / "log"
        log.touch()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "--no-header", "-p", "no:cacheprovider"),
                *("-p", "tests.mutation.heard", "-o", "addopts=--strict-markers", "-m", "not nightly and not gpu"),
                *(word for test in without for word in ("--deselect", test)),
                *tests,
            ],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": f"{tree / 'src'}", "MUTATION_LOG": str(log), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return _watched(process, log, limits, tests[0])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what a test has left behind goes with it
            process.wait()


def _watched(process: subprocess.Popen[bytes], log: Path, limits: Limits, first: str) -> Ended:
    began = since = time.monotonic()
    ran, running, failed, longest, started = 0, "", None, 0.0, began
    with log.open() as events:
        while True:
            code = process.poll()
            for line in events:
                event = json.loads(line)
                failed = failed or event.get("failed")
                if "start" in event:
                    ran, running, since, started = ran + 1, event["start"], time.monotonic(), event["at"]
                elif "end" in event:
                    running, longest = "", max(longest, event["at"] - started)
            if failed is not None:
                return Ended(failed, 0.0, ran, False)
            if code is not None:
                # 0: all passed. 5: no test was left. Otherwise it broke before a test could: while importing, say.
                return Ended(None if code in (0, 5) else running or first, 0.0, ran, False, longest)
            now = time.monotonic()
            out = now - began > limits.fault
            if running and now - since > (_STUCK if out else limits.test):
                return Ended(running, now - since, ran, out)
            if out:
                return Ended(None, 0.0, ran, True)
            time.sleep(0.1)
