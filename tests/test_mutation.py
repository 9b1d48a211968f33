"""The tool that plants faults: what it draws can be planted, and what it says of them is so."""

from __future__ import annotations

import ast
import itertools
import json
import shutil
from pathlib import Path

import pytest

from tests.mutation.__main__ import ROOMS, ROOT, main
from tests.mutation.faults import DoesNotApply, Fault, candidates, drawn, planted, read
from tests.mutation.marks import Marks, marked, measure
from tests.mutation.nearest import Nearness
from tests.mutation.trial import CAUGHT, NOT_APPLIED, SURVIVED, Bench, Limits, copied

SMALL = """\
def limit(a, b):
    return min(a, b)


def unseen(a):
    return a + 1


def until(n):
    while n > 0:
        n -= 1
    return n
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A tree of one module and its tests, one of which fails by itself."""
    (tmp_path / "src/quire/scheduler").mkdir(parents=True)
    for folder in ("src/quire", "src/quire/scheduler"):
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "src/quire/scheduler/little.py").write_text(SMALL)
    shutil.copytree(ROOT / "tests/mutation", tmp_path / "tests/mutation", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests/__init__.py").write_text("")
    (tmp_path / "tests/test_little.py").write_text(
        "from quire.scheduler.little import limit, unseen, until\n\n\n"
        "def test_broken():\n    assert unseen(1) == 99\n\n\n"
        "def test_limit():\n    assert limit(1, 2) == 1\n\n\n"
        "def test_until():\n    assert until(3) == 0\n"
    )
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["gpu", "nightly"]\n')
    return tmp_path


def test_a_fault_is_caught_survives_or_does_not_apply_and_the_tree_is_as_before(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # each of many starts would import them
    path = "src/quire/scheduler/little.py"
    faults = [
        Fault(path, 0, "return min(a, b)", "return max(a, b)"),
        Fault(
            "scheduler/little", 0, "    return a + 1", "    return a + 2"
        ),  # only the test that is broken would see it
        Fault(path, 0, "n -= 1", "n -= 0"),
        Fault(path, 0, "return 7", "return 8"),
    ]
    bench = Bench(small, 1, Limits(fault=600.0, test=2.0))
    results = [bench.tried(fault) for fault in faults]
    assert [result.verdict for result in results] == [CAUGHT, SURVIVED, CAUGHT, NOT_APPLIED]
    assert [result.by for result in results[:3]] == [
        "tests/test_little.py::test_limit",
        "",
        "tests/test_little.py::test_until (hangs)",
    ]
    assert [result.fault.line for result in results[:3]] == [2, 6, 11]
    assert (bench.clean / path).read_text() == (small / path).read_text() == SMALL
    assert [(tree / path).read_text() for tree in bench._free] == [SMALL]
    bench.close()


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Fault("scheduler/little", 0, "return", "pass"), "3 times"),
        (Fault("scheduler/little", 0, "n -= 1", "n -="), "not Python"),
        (Fault("scheduler/little", 0, "n -= 1", "n  -=  1"), "changes nothing"),
        (Fault("scheduler/other", 0, "n -= 1", "n -= 2"), "no such file"),
    ],
)
def test_what_cannot_be_planted_says_why(small: Path, fault: Fault, why: str) -> None:
    with pytest.raises(DoesNotApply, match=why):
        planted(small, fault)


def test_of_equal_lines_the_nearest_is_meant_and_a_line_may_have_moved(small: Path) -> None:
    path = small / "src/quire/scheduler/little.py"
    path.write_text(SMALL + "\n\ndef twice(n):\n    while n > 0:\n        n -= 1\n    return n\n")
    for said, line in ((3, 11), (11, 11), (12, 11), (16, 17), (99, 17)):
        assert planted(small, Fault("scheduler/little", said, "n -= 1", "n -= 2"))[2] == line


@pytest.mark.parametrize("name", ["chosen", "fresh"])
def test_each_fault_that_is_kept_can_be_planted(name: str) -> None:
    """One whose line is no longer there is removed, or written for the line that took its place."""
    gone = []
    for fault in read(ROOT / f"tests/mutation/{name}.json"):
        try:
            planted(ROOT, fault)
        except DoesNotApply as why:
            gone.append(f"{fault.path}: {fault.old.strip()}: {why}")
    assert gone == []


@pytest.mark.parametrize(
    ("rooms", "count"), [(["engine"], 20), pytest.param(ROOMS, 60, marks=pytest.mark.nightly)], ids=["one", "all"]
)
def test_what_is_drawn_follows_from_the_seed_and_can_be_planted(rooms: list[str], count: int) -> None:
    faults, few = drawn(ROOT, rooms, count, seed=3), [rooms[0]]
    again = drawn(ROOT, few, count, seed=3)
    assert again == (faults if rooms == few else drawn(ROOT, few, count, seed=3)) != drawn(ROOT, few, count, seed=4)
    assert len(faults) == count and {fault.path.split("/")[2] for fault in faults} <= set(rooms)
    for room in rooms:
        assert {fault.path.split("/")[2] for fault in drawn(ROOT, [room], 2, seed=3)} == {room}
    for fault in faults:
        path, source, line = planted(ROOT, fault)
        before = path.read_text().splitlines()
        after = source.splitlines()
        assert line == fault.line and [
            i for i, pair in enumerate(zip(before, after, strict=True), 1) if len({*pair}) > 1
        ] == [line]


def test_every_place_of_a_small_module_is_drawn_from() -> None:
    changes = {(fault.line, fault.new.strip()) for _, fault in candidates(SMALL, "x.py")}
    assert {(2, "return max(a, b)"), (2, "return min(b, a)"), (6, "return (a - 1)"), (10, "while n >= 0:")} <= changes
    assert {(11, "n += 1"), (11, "pass"), (11, "n -= 2"), (6, "return a + 2")} <= changes
    assert all(ast.parse(SMALL.replace(fault.old, fault.new)) for _, fault in candidates(SMALL, "x.py"))


def test_faults_are_read_from_a_list_or_line_by_line(tmp_path: Path) -> None:
    rows = [{"path": "a", "old": "b", "new": "c"}, {"path": "a", "old": "b", "new": "c", "line": 3}]
    file = tmp_path / "faults.json"
    want = [Fault("a", 0, "b", "c"), Fault("a", 3, "b", "c")]
    for text in (json.dumps(rows), "\n".join(map(json.dumps, rows))):
        file.write_text(text)
        assert read(file) == want


@pytest.mark.nightly
def test_the_nearest_tests_of_a_module_are_its_own() -> None:
    tests = Nearness(ROOT)
    for module, test in (
        ("scheduler/block_pool", "scheduler/test_block_pool"),
        ("server/stream", "server/test_streams"),
    ):
        assert tests.nearest(f"src/quire/{module}.py")[0] == f"tests/{test}.py"
    assert "tests/test_lattice.py" in tests.nearest("src/quire/scheduler/scheduler.py")[:12]
    assert "tests/config/test_options.py" in tests.nearest("src/quire/config/sources.py")[:2]
    assert tests.nearest("src/quire/executors/onnx.py")[0] == "tests/executors/test_onnx.py", "imported by name"


@pytest.mark.parametrize("folder", ["engine", "ops/triton"])
def test_modules_with_marks_in_them_are_python(folder: str) -> None:
    for file in (ROOT / "src/quire" / folder).glob("*.py"):
        text, spans = marked(file.read_text(), file.name, 7)
        assert text.count("_mutation_hits[") == len(spans) and ast.parse(text)
        assert not spans or f"_mutation_hits[{6 + len(spans)}] = 1\n" in text
        assert all(0 < span.first <= span.last for span in spans)


def test_what_is_no_statement_of_a_function_is_executed_by_those_that_name_it(small: Path) -> None:
    path = "src/quire/scheduler/little.py"
    lines = ["LEAST = 1", "", "@jit", "def kernel(a):", "    return helper(a)", "", "@jit", "def helper(a):"]
    lines += [
        "    return a + LEAST",
        "",
        "def run(a):",
        "    return kernel(a)",
        "",
        "class Kept:",
        "    least: int = 2",
    ]
    head = "def jit(found):\n    return found\n\n"
    (small / path).write_text(head + "\n".join(lines) + "\n\ndef unused():\n    return Kept.least\n")
    (small / "tests/test_little.py").write_text(
        "from quire.scheduler.little import run\n\ndef test_run():\n    assert run(1) == 2\n"
    )
    out = small / "marks.jsonl"
    assert measure(small, copied(small, small / "copy"), ["tests"], out) == 0
    marks, own = Marks(out, small), [["tests/test_little.py::test_run"]]
    text = (small / path).read_text().splitlines()
    found = {line: marks.tests(path, text.index(line) + 1) for line in text if line.strip()}
    by_run = {"LEAST = 1", "    return helper(a)", "    return a + LEAST", "    return kernel(a)"}
    assert {line for line, tests in found.items() if tests == own} >= by_run
    assert found["    least: int = 2"] == [], "named by a statement that no test executes"


@pytest.mark.nightly
def test_marks_name_the_tests_that_execute_a_line_the_cheapest_first(small: Path) -> None:
    tests = small / "tests/test_little.py"
    tests.write_text(
        tests.read_text()
        + "\n\n@pytest.fixture(scope='module')\ndef made():\n    return unseen(2)\n"
        + "\n\ndef test_made(made):\n    assert made\n\n\ndef test_made_again(made):\n    assert made\n"
        + "\n\ndef test_elsewhere():\n    code = 'from quire.scheduler.little import until; until(1)'\n"
        + "    subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    tests.write_text("import subprocess\nimport sys\n\nimport pytest\n" + tests.read_text())
    out, path = small / "marks.jsonl", "src/quire/scheduler/little.py"
    assert measure(small, copied(small, small / "copy"), ["tests/test_little.py"], out) == 1, "one test is broken"
    marks = Marks(out, small)
    by_line = {line: {*itertools.chain(*marks.tests(path, line) or [])} for line in (2, 6, 10, 11, 12)}
    named = {line: {test.partition("::")[2] for test in found} for line, found in by_line.items()}
    looped = {"test_until", "test_elsewhere"}
    assert named == {2: {"test_limit"}, 6: {"test_made", "test_made_again"}, 10: looped, 11: looped, 12: looped}
    assert [*itertools.chain(*marks.tests(path, 11) or [])] == sorted(by_line[11], reverse=True), (
        "a process takes longer"
    )
    assert marks.tests(path, 4) is None, "no statement of a function"
    bench = Bench(small, 1, Limits(fault=600.0, test=60.0), marks=out, most=0)
    result = bench.tried(Fault(path, 0, "return n", "return n - 1"))
    bench.close()
    assert (result.verdict, result.by) == (CAUGHT, "tests/test_little.py::test_until")
    (small / path).write_text(SMALL + "\n")
    assert Marks(out, small).tests(path, 2) is None, "of another source"
    with pytest.raises(ValueError, match="other sources"):
        measure(small, copied(small, small / "other"), ["tests"], out)


@pytest.mark.nightly
def test_most_faults_planted_at_random_are_caught(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Docs say how many of a hundred; a machine that others use too has less time for each."""
    bad = main(
        ["--seed", "1", "--count", "40", "--jobs", "2", "--at-least", "65", "--json", str(tmp_path / "out.json")]
    )
    assert not bad, capsys.readouterr().out
