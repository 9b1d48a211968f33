"""What `quire replay` says of recordings of whole runs, as written down: every part of its report."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quire.cli import main
from quire.observability.recorder import RecordedEngine, Recorder
from quire.observability.recording_format import Ring
from tests.engine.runs import RUNS, Run
from tests.expected import check

EXPECTED = Path(__file__).parent / "expected"


def recorded(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of this name, recorded."""
    ring = Ring(folder, 1 << 26)
    recorder = Recorder(ring)
    monkeypatch.setattr(Run, "make", partial(RecordedEngine, recorder=recorder))
    RUNS[name]()
    ring.close()
    assert recorder.on


def replayed(folder: Path, *words: str) -> str:
    done = CliRunner().invoke(main, ["replay", str(folder), *words])
    text = re.sub(r"quire \S+, from .* on,", "quire VERSION, from TIME on,", done.output)
    return f"quire replay {' '.join(words)}\nexit {done.exit_code}\n{text}"


def test_a_replay_is_written_as_the_live_page_saves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file = tmp_path / "recording", tmp_path / "page.json"
    recorded(folder, "preempted-ahead", monkeypatch)
    [found] = json.loads(replayed(folder, "--json").partition("\n{")[2].join(("{", "")))["recordings"]
    assert replayed(folder, "--page", str(file)).endswith("every decision is the same\n")
    page = json.loads(file.read_text())
    assert (page["format"], page["version"]) == ("quire live page", 1)
    frames = page["frames"]
    assert frames[0]["whole"] and frames[0]["at"] == 0
    assert [frame["at"] for frame in frames] == sorted(frame["at"] for frame in frames)
    assert frames[-1]["now"]["generated"] == found["tokens"]
    assert sum(event[0] == "out" for frame in frames for event in frame["events"]) == found["preemptions"]["count"] > 0
    assert sum(len(frame["steps"]) for frame in frames) == found["steps"][1] - found["steps"][0] + 1
    assert len(page["stories"]) == found["requests"]
    assert all(story["answers"][0]["state"] == "finished" for story in page["stories"].values())
    recorded(tmp_path / "other", "mixed", monkeypatch)
    both = replayed(folder, str(tmp_path / "other"), "--page", str(file))
    assert "--page takes one recording, and there are 2: choose one with --run" in both


@pytest.mark.parametrize("name", ["mixed", "mixed-ahead-drafted", "preempted-ahead", "failing-ahead", "adaptive"])
def test_a_replay_reports_what_is_written_down(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path, name, monkeypatch)
    asked = [(), ("--step", "1"), ("--step", "7"), ("--step", "12"), ("--step", "9999"), ("--run", "2"), ("--run", "1")]
    first = {"mixed": ("back", "late"), "preempted-ahead": ("r3", "r8"), "failing-ahead": ("poison", "good")}
    asked += [("--request", id) for id in (*first.get(name, ("r0", "d")), "unknown")]
    text = "\n\n".join(replayed(tmp_path, *words) for words in asked)
    done = CliRunner().invoke(main, ["replay", str(tmp_path), "--json", "--step", "5"])
    found: Any = json.loads(done.output)
    for each in found["recordings"]:
        for varying in ("quire", "run", "began"):
            each.pop(varying)
    check(EXPECTED / f"replay-{name}.txt", text + "\n\n" + json.dumps(found, indent=1))
