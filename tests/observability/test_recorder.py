"""What is in a recording, what is not, and what becomes of it where disks fill and processes die."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from quire.cli import main
from quire.engine.engine import Engine
from quire.engine.timing import VirtualClock
from quire.errors import ExecutorLost, InvalidConfig
from quire.observability import recording_format
from quire.observability.checkpoint import Anonymizer
from quire.observability.recorder import recorded
from quire.scheduler.step_time import StepCost
from quire.sim.replay import replay
from quire.sim.run import SimConfig, simulate
from quire.sim.workload import uniform
from quire.types import UNLIMITED

SECRET = 1_234_567_890_123
"""A token id that would be found in any file it is written to."""


def run(folder: Path, requests: int = 30, limit: int = 1 << 26) -> Engine:
    config = SimConfig(pages=16, page_size=4, max_num_seqs=4, max_num_batched_tokens=16, chunk=16, cost=StepCost(0.01))
    engine = config.build(VirtualClock(), make=recorded(folder, limit))
    simulate(engine, uniform(requests, prompt=(4, 24), new=(4, 16), shared=8, rate=8.0))
    return engine


def only(folder: Path) -> Path:
    [path] = folder.glob(f"*{recording_format.SUFFIX}")
    return path


def read(path: Path) -> Result:
    return CliRunner().invoke(main, ["replay", str(path)], env={"COLUMNS": "200"})


def test_a_recording_is_bounded_and_can_be_replayed_from_what_is_left(tmp_path: Path) -> None:
    limit = 1 << 20
    engine = run(tmp_path, requests=4000, limit=limit)
    engine.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= limit
    again = replay(recording_format.RecordingReader([tmp_path]))
    assert again.began.number > 0 and again.segments > 2
    assert again.divergence is None and again.engine.stats.num_steps == engine.stats.num_steps


def test_recordings_of_earlier_processes_make_room_too(tmp_path: Path) -> None:
    old = tmp_path / f"2000-{recording_format.SUFFIX}"
    old.write_bytes(bytes(1 << 20))
    (tmp_path / "notes.txt").write_text("mine")
    run(tmp_path, limit=1 << 20).close()
    assert not old.exists() and (tmp_path / "notes.txt").exists()


def test_recordings_that_begin_in_one_second_keep_apart(tmp_path: Path) -> None:
    for _ in range(3):
        ring = recording_format.Ring(tmp_path, 1 << 24)
        ring.begin(b"first")
        ring.close()
    assert len(list(tmp_path.iterdir())) == 3


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    run(tmp_path / "new").close()
    assert stat.S_IMODE(only(tmp_path / "new").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_a_recorder_forgets_requests_however_they_end(tmp_path: Path) -> None:
    engine = SimConfig(pages=16, page_size=4, max_num_seqs=1, depth=1).build(VirtualClock(), make=recorded(tmp_path))
    for i in range(8):
        engine.submit((1, 2, i), 9, id=str(i))
    engine.abort("7")
    engine.step()
    engine.abort("0")
    while engine.has_pending_work:
        engine.step()
    assert engine.recorder.on and engine.recorder._filling == {}  # type: ignore[attr-defined]
    engine.close()


def test_each_failure_is_recorded_with_its_own_cause_and_place(tmp_path: Path) -> None:
    engine = SimConfig(pages=16, page_size=4).build(VirtualClock(), make=recorded(tmp_path))
    recorder = engine.recorder  # type: ignore[attr-defined]
    inner = ValueError("inner")
    for where, error in (("launch", ExecutorLost("gone")), ("result", RuntimeError("outer"))):
        error.__cause__ = inner if where == "result" else None
        with pytest.raises(type(error)), recorder.failing(where):
            raise error
        recorder.reset()
        recorder.reset()
    engine.close()
    reader = recording_format.RecordingReader([tmp_path])
    found = [frame for frame in iter(reader.take, None) if isinstance(frame, recording_format.Reset)]
    assert [(frame.where, frame.kind, frame.lost) for frame in found] == [
        ("launch", "ExecutorLost", True),
        ("masks", "", False),
        ("result", "ValueError", False),
        ("masks", "", False),
    ]


def test_an_engine_that_abandons_its_requests_ends_the_recording_and_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As `LLM.close` does, and `LLM` after a failure: what is asked later is a recording of its own."""
    engine = SimConfig(pages=16, page_size=4, depth=1).build(VirtualClock(), make=recorded(tmp_path))
    for turn in range(2):
        for i in range(3):
            engine.submit((1, 2, i), 9, id=f"{turn} {i}")
        for _ in range(4):
            engine.step()
        engine.abandon()
    engine.close()
    assert "failed" not in caplog.text
    reader = recording_format.RecordingReader([tmp_path])
    runs = []
    while reader.next is not None:
        out = replay(reader)
        assert out.divergence is None and out.crash is None
        runs.append(out.began.run)
    assert len(set(runs)) == 2


def test_names_keep_beginnings_and_nothing_else() -> None:
    one, other = Anonymizer(4), Anonymizer(4)
    tokens = [5, 6, 7, 8, 5, 6, 7, 8, 9]
    names = one.names(tokens, "")[1]
    assert len(set(names)) == 2, "the same page at another place has another name"
    assert one.names([*tokens[:8], 1, 2, 3, 4], "")[1][:2] == names
    assert one.names([4, *tokens[1:]], "")[1][1] != names[1]
    assert set(other.names(tokens, "")[1]).isdisjoint(names), "names of two recordings cannot be compared"
    assert one.salt("tenant") == one.salt("tenant") != other.salt("tenant") and one.salt("") == ""


def test_no_token_salt_or_seed_is_written(tmp_path: Path) -> None:
    config = SimConfig(pages=64, page_size=4)
    engine = config.build(VirtualClock(), make=recorded(tmp_path, 1 << 22))
    engine.description = engine.description.__class__(64, 4, 32, UNLIMITED, 1 << 50)
    engine.submit([SECRET] * 9, 8, stop=[SECRET + 1], id="known")
    engine.step()
    engine._begin()  # type: ignore[attr-defined]
    while engine.has_pending_work:
        engine.step()
    engine.close()
    data = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"known" in data
    for number in (SECRET, SECRET + 1):
        assert number.to_bytes(8, "big") not in data and number.to_bytes(8, "little") not in data


def test_a_process_killed_in_the_middle_leaves_all_it_decided(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from tests.observability.test_recorder import run;"
        "run(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -signal.SIGKILL
    reader = recording_format.RecordingReader([tmp_path])
    again = replay(reader)
    assert "killed" in reader.notes[0] and again.divergence is None
    assert again.engine.stats.num_finished == 30


@pytest.mark.parametrize("cut", [1, 3, 7, 40])
def test_a_frame_cut_short_ends_the_recording_there(tmp_path: Path, cut: int) -> None:
    run(tmp_path).close()
    path = only(tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    done = read(path)
    assert (
        done.exit_code == 0
        and "ends in the middle of a frame" in done.output
        and "every decision is the same" in done.output
    )


def _flip(data: bytes) -> bytes:
    """A bit of the contents of the frame in the middle: one of its length would cut it."""
    head, at, middle = recording_format.HEAD, len(recording_format.MAGIC), len(data) // 2
    while (end := at + head.size + head.unpack_from(data, at)[0]) <= middle:
        at = end
    at += head.size
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _framed(*frames: bytes) -> bytes:
    return recording_format.MAGIC + b"".join(
        recording_format.HEAD.pack(len(f), recording_format.zlib.crc32(f)) + f for f in frames
    )


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_flip, "is damaged: the frame at byte"),
        (lambda data: b"", "is not a Quire recording"),
        (lambda data: b"\x80\x04\x95pickled", "is not a Quire recording"),
        (lambda data: data[: len(recording_format.MAGIC)], "a segment without a header"),
        (lambda data: _framed(b"\xff" * 9), "is damaged"),
        (lambda data: _framed(b"\x91" * 100_000), "is damaged"),
        (lambda data: _framed(recording_format.encode(recording_format.Idled([]))), "an unexpected Idled"),
        (
            lambda data: _framed(
                recording_format.encode(recording_format.Began([], 99, "9", "r", 0, 0.0, 0.0, {}, []))
            ),
            "its format is 99",
        ),
        (
            lambda data: _framed(
                recording_format.encode(
                    recording_format.Began([], recording_format.VERSION, "1", "r", 0, 0.0, 0.0, {}, [])
                )
            ),
            "does not start with an engine's state",
        ),
        (
            lambda data: _framed(
                recording_format.encode(
                    recording_format.Began([], recording_format.VERSION, "1", "r", 0, 0.0, 0.0, {}, [["os.system", []]])
                )
            ),
            "which this version of Quire does not know",
        ),
        (
            lambda data: recording_format.MAGIC + recording_format.HEAD.pack(1 << 30, 0) + bytes(64),
            "a segment without a header",
        ),
    ],
)
def test_what_is_no_recording_is_refused_in_a_line(tmp_path: Path, spoil: Callable[[bytes], bytes], says: str) -> None:
    run(tmp_path).close()
    path = only(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    done = read(path)
    assert done.exit_code == 2 and says in done.output and done.output.count("\n") == 1, done.output


def test_a_recording_made_to_hurt_does_no_harm(tmp_path: Path) -> None:
    """Each is refused in a line, or replayed: to its end, or to where it departs from what is decided."""
    run(tmp_path, requests=8).close()
    path, rng = only(tmp_path), random.Random(4)
    data, place = path.read_bytes(), len(recording_format.MAGIC)
    frames: list[Any] = []
    while place < len(data):
        length, _ = recording_format.HEAD.unpack_from(data, place)
        frames.append(
            msgspec.msgpack.decode(
                data[place + recording_format.HEAD.size : place + recording_format.HEAD.size + length]
            )
        )
        place += recording_format.HEAD.size + length

    def spoilt(value: Any) -> Any:
        if not isinstance(value, list) or not value or rng.random() < 0.1:
            return rng.choice(
                [0, -1, UNLIMITED, 1 << 62, None, "x", [], [5], True, 1.5, float("nan"), float("inf"), {}]
            )
        at = rng.randrange(len(value))
        return [*value[:at], spoilt(value[at]), *value[at + 1 :]]

    ends: Counter[int] = Counter()
    for _ in range(150):
        at = rng.choice([0, rng.randrange(len(frames))])
        made = [*frames[:at], spoilt(frames[at]), *frames[at + 1 :]]
        path.write_bytes(_framed(*map(recording_format.encode, made)))
        done = read(path)
        assert isinstance(done.exception, SystemExit | None), done.output
        ends[done.exit_code] += 1
        if done.exit_code == 2:
            assert done.output.startswith("Error: ") and done.output.count("\n") == 1, done.output
        else:
            last = {0: "every decision is the same", 1: "departs at step "}[done.exit_code]
            assert last in done.output and "Error" not in done.output, done.output
    assert ends.total() == 150 and ends[2] > 100 and ends[0] > 5 and ends[1] > 0, "the faults are of every kind"


def test_prompts_without_end_are_not_made_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimConfig(pages=64, page_size=1 << 18)
    engine = config.build(VirtualClock(), make=recorded(tmp_path, 1 << 22))
    for _ in range(3):
        engine.submit(range(1 << 14), 4)
    for _ in range(3):
        engine.submit([0] * (1 << 17), 4)
    engine.close()
    assert read(only(tmp_path)).exit_code == 0
    monkeypatch.setattr("quire.sim.replay.MAX_STATE_TOKENS", 1 << 18)
    done = read(only(tmp_path))
    assert done.exit_code == 2 and "the recording's sequences have more than 262144 tokens" in done.output


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidConfig, match=r"recording_dir: .*cannot be written to"):
        recorded(tmp_path / "file" / "inside")
    assert "this folder holds no recording" in read(tmp_path).output
    assert read(tmp_path / "nowhere").exit_code == 2


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken = os.posix_fallocate
    calls = []

    def full(file: int, start: int, size: int) -> None:
        calls.append(size)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        taken(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    engine = run(tmp_path, requests=3000, limit=1 << 20)
    engine.close()
    assert engine.stats.num_finished == 3000 and "No space left" in caplog.text
    assert len(calls) == 2, "it tries once"
    assert replay(recording_format.RecordingReader([only(tmp_path)])).divergence is None
