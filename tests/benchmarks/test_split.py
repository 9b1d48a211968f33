"""`python -m benchmarks.split` starts both arrangements, and counts as good what meets both targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.split import command, judged, level, summary

SMALL = ("--max-model-len", "512", "--num-gpu-blocks-override", "96", "--max-num-seqs", "4", "--threads", "1")
ASKED = ("--rate", "4", "--seconds", "1", "--prompt", "260:300", "--new", "4:8", "--processes", "2", "--check", "2")


@pytest.mark.nightly
def test_both_arrangements_answer_the_same_requests(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    target = "ttft:60000,tpot:60000"
    more = ("--goodput", target, "--host-gib", "0.0625", "--connections", "2", "--json", str(path))
    done = CliRunner().invoke(command, ["embedded", *ASKED, *more, "--", *SMALL], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "2 of 2 answers have equal tokens" in done.output
    rows = {row["arrangement"]: row for row in json.loads(path.read_text())["rows"] if "rate" in row}
    for row in rows.values():
        assert row["answered"] == row["requests"] == 4 and row["goodput"] == {target: 4.0}
    assert rows["mixed"]["transfer"]["outcomes"] == {}
    assert rows["split"]["transfer"]["outcomes"]["done"] >= 4 and rows["split"]["transfer"]["seconds"] > 0


def test_loads_are_the_same_every_time_and_unlike_at_each_rate() -> None:
    one, same, other = (level(rate, 5, (3, 9), (2, 4)) for rate in (2.0, 2.0, 4.0))
    assert one == same and one.prompts != other.prompts and one.due[-1] > 0


def result(*asked: tuple[float, float, float]) -> dict[str, Any]:
    """Of a client. asked: seconds to the first token and to the last of 11, and when it was due."""
    timings = [(due, due + first, due + last, 100, 11, 200) for first, last, due in asked]
    first = [first for first, _, _ in asked]
    return {"asked": timings, "first": first, "gaps": [0.1], "tokens": 22, "prompted": 200, "events": 22} | {
        "failed": 0,
        "began": 0.0,
        "ended": 4.0,
    }


def test_a_request_is_good_when_both_targets_are_met() -> None:
    goals = {"loose": {"ttft": 500.0, "tpot": 100.0}, "tight": {"ttft": 500.0, "tpot": 9.0}}
    row = judged([result((0.1, 0.2, 0.0), (0.6, 0.65, 1.0)), result((0.4, 0.48, 2.0), (0.2, 1.5, 3.0))], 8.0, goals)
    assert row["good_share"] == {"loose": 0.5, "tight": 0.25} and row["goodput"] == {"loose": 4.0, "tight": 2.0}


def test_the_best_rate_of_each_arrangement_is_compared() -> None:
    def row(name: str, rate: float, share: float) -> dict[str, Any]:
        return {"arrangement": name, "rate": rate, "good_share": {"t": share}, "goodput": {"t": rate * share}}

    found = [{"arrangement": "mixed", "tokens": [[1, 2], [3]]}, row("mixed", 2, 1.0), row("mixed", 4, 0.25)]
    found += [{"arrangement": "split", "tokens": [[1, 2], [4]]}, row("split", 2, 1.0), row("split", 4, 0.75)]
    assert [*summary(found, ["t"])] == [
        "1 of 2 answers have equal tokens",
        "t: goodput mixed 2.00, split 3.00 (1.50 times); nine tenths are good up to 2 and 2 requests/s",
    ]
