"""Traces of every kind: what is read of them, what is made of them, and what is said of lines that cannot be read."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from quire.engine.timing import VirtualClock
from quire.errors import InvalidConfig, InvalidRequest
from quire.observability.recorder import recorded
from quire.scheduler.step_time import StepCost
from quire.sim.fleet import prepare
from quire.sim.run import SimConfig, simulate
from quire.sim.trace import azure_code, chats, read_trace
from quire.sim.workload import Load
from tests.sim.fleets import trace_of

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.9799600,3180,8
2023-11-16 18:17:04.4799600,0,27
"""


def written(folder: Path, text: str, name: str = "trace.jsonl") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_azures_rows_are_sorted_and_have_at_least_one_token(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, AZURE, "azure.csv"))
    assert list(trace.arrivals) == pytest.approx([0.0, 0.5, 1.0])
    assert list(trace.prompts) == [4808, 1, 3180] and list(trace.outputs) == [10, 27, 8]
    assert not trace.has_prefixes and [count for _, count in trace.runs(2)] == [3180]
    assert trace.runs(2)[0][0] != trace.runs(1)[0][0], "prompts of which nothing is known have nothing in common"


def test_mooncakes_blocks_are_equal_tokens_where_their_names_are_equal(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [46, 47, 48]},
        {"timestamp": 3000, "input_length": 1030, "output_length": 7, "hash_ids": [46, 47, 99]},
    ]
    trace = read_trace(written(tmp_path, "\n".join(map(json.dumps, lines))))
    one, two = (prepare(trace, number)[1].prompt for number in (0, 1))
    assert (len(one), len(two)) == (1100, 1030) and list(trace.arrivals) == [0.0, 3.0]
    assert one[:1024] == two[:1024] and not set(one[1024:]) & set(two[1024:])
    assert trace.reuse() == pytest.approx(1024 / 2130)


def test_tokens_that_no_name_says_are_a_requests_own() -> None:
    trace = trace_of([(0.0, 20, 1), (0.0, 20, 1)], [(0, 1), (0, 1)])
    one, two = (prepare(trace, number)[1].prompt for number in (0, 1))
    assert one[:16] == two[:16] and not set(one[16:]) & set(two[16:])


def test_lines_of_ones_own_give_seconds(tmp_path: Path) -> None:
    lines = '{"arrival": 1.5, "prompt_tokens": 3, "output_tokens": 4}\n'
    lines += '{"arrival": 4, "prompt_tokens": 5, "output_tokens": 6}'
    trace = read_trace(written(tmp_path, lines))
    assert (list(trace.arrivals), list(trace.prompts), list(trace.outputs)) == ([0.0, 2.5], [3, 5], [4, 6])


def test_a_load_test_is_a_trace_of_its_last_level(tmp_path: Path) -> None:
    asked = [[0.0, 0.1, 0.5, 12, 5, 200], [0.2, 0.0, 0.3, 0, 0, 429], [0.4, 0.5, 0.9, 20, 7, 200]]
    saved = {
        "about": {},
        "goals": {},
        "levels": [{"level": "1 user", "asked": []}, {"level": "2 users", "asked": asked}],
    }
    trace = read_trace(written(tmp_path, json.dumps(saved)))
    assert (list(trace.arrivals), list(trace.prompts), list(trace.outputs)) == ([0.0, 0.4], [12, 20], [5, 7])
    assert trace.name.endswith("2 users")


def test_a_recording_is_a_trace_with_the_blocks_that_its_prompts_share(tmp_path: Path) -> None:
    prompts = [tuple(range(40)), (*range(32), 5, 5), (9,) * 20]
    loads = [Load(at, prompt, new) for at, prompt, new in zip((0.0, 0.5, 0.75), prompts, (7, 3, 5), strict=True)]
    engine = SimConfig(page_size=8, cost=StepCost(0.01)).build(VirtualClock(), make=recorded(tmp_path, 1 << 22))
    simulate(engine, loads)
    engine.close()
    trace = read_trace(tmp_path)
    assert list(trace.prompts) == [40, 34, 20] and list(trace.outputs) == [7, 3, 5] and trace.block_size == 8
    assert list(trace.arrivals) == pytest.approx([0.0, 0.5, 0.75], abs=0.02)
    assert trace.blocks[0][:4] == trace.blocks[1] and not set(trace.blocks[2]) & set(trace.blocks[0])
    assert trace.reuse() == pytest.approx((32 + 8) / 94, abs=0.1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("TIMESTAMP,ContextTokens\n2023-11-16,3\n", "line 1: .*no column GeneratedTokens"),
        ("[1, 2]", "line 1: .*no column TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n\n\n2023-11-16,3\n", "line 4: not TIMESTAMP"),
        ('{"timestamp": 1, "input_length": 3}\n', "line 1: neither timestamp"),
        ('{"timestamp": 1, "input_length": 3, "output_length": 1}\n{"a"\n', "line 2: neither timestamp"),
        ('{"arrival": 1, "prompt_tokens": 3, "output_tokens": 1}\n' * 2, ""),
        (
            '{"timestamp":1,"input_length":3,"output_length":1,"hash_ids":[1]}\n'
            '{"timestamp":1,"input_length":3,"output_length":1}',
            "1 of 2 lines have hash_ids",
        ),
        ("", "has no requests"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    if not said:
        assert len(read_trace(path)) == 2
        return
    with pytest.raises(InvalidRequest, match=said):
        read_trace(path)


def test_a_name_that_is_no_trace_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidRequest, match=r"azure-code, chats.*Did you mean 'azure-code'"):
        read_trace(Path("azure-cod"))


def test_what_is_made_up_has_the_statistics_of_what_it_stands_for() -> None:
    trace = azure_code(8819)
    assert sum(trace.prompts) / len(trace) == pytest.approx(2048, rel=0.03)
    assert sum(trace.outputs) / len(trace) == pytest.approx(27.9, rel=0.1)
    assert trace.seconds / len(trace) == pytest.approx(0.39, rel=0.35)
    assert list(azure_code(50).arrivals) == list(azure_code(50).arrivals)
    talks = chats(2000)
    assert 0.5 < talks.reuse() < 0.98 and all(
        64 * len(b) == p for b, p in zip(talks.blocks, talks.prompts, strict=True)
    )


def test_more_repetitions_than_fit_into_memory_are_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"--repeat 50000001: 100,000,002 requests are more than 100,000,000"):
        trace_of([(0.0, 8, 1), (1.0, 16, 2)]).repeated(50_000_001)


@pytest.mark.parametrize("overlap", [False, True])
def test_repetitions_have_every_request_once_more_and_share_nothing(overlap: bool) -> None:
    trace = trace_of([(0.0, 8, 1), (1.0, 16, 2), (4.0, 8, 3)], [(0,), (0, 1), (2,)])
    twice = trace.repeated(2, overlap=overlap)
    assert len(twice) == 6 and sorted(twice.outputs) == [1, 1, 2, 2, 3, 3]
    assert list(twice.arrivals) == sorted(twice.arrivals)
    assert twice.seconds == pytest.approx(5.0 if overlap else 10.0, abs=1.1)
    assert len({name for blocks in twice.blocks for name in blocks}) == 6
    assert trace.reuse() == pytest.approx(twice.reuse())


def test_parts_begin_at_zero_and_shrinking_needs_prompts_without_names() -> None:
    trace = trace_of([(0.0, 8, 1), (1.0, 16, 2), (4.0, 8, 3)])
    assert list(trace.part(1, 3).arrivals) == [0.0, 3.0] and list(trace.faster(2).arrivals) == [0.0, 0.5, 2.0]
    assert list(trace.shrunk(4).prompts) == [2, 4, 2]
    with pytest.raises(InvalidConfig, match="--shrink"):
        trace_of([(0.0, 8, 1)], [(0,)]).shrunk(2)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"arrival": NaN, "prompt_tokens": 10, "output_tokens": 5}', "nan is no time"),
        ('{"arrival": 1e308, "prompt_tokens": 10, "output_tokens": 5}', "1e.308 is no time"),
        ('{"arrival": 0, "prompt_tokens": 99999999999999999999, "output_tokens": 5}', "no number of tokens"),
        ('{"arrival": 0, "prompt_tokens": 1e999, "output_tokens": 5}', "OverflowError"),
        ('{"arrival": 0, "prompt_tokens": 10, "output_tokens": -4}', "-4 is no number of tokens"),
        ('{"timestamp": 1' + "0" * 400 + ', "input_length": 10, "output_length": 5}', "OverflowError"),
        ('{"levels": []}', "IndexError"),
        ('{"arrival": "0", "prompt_tokens": 10, "output_tokens": 5}', "'0' is no number"),
        ('{"arrival": 0, "prompt_tokens": true, "output_tokens": 5}', "'True' is no number"),
        ('{"arrival": 0, "prompt_tokens": 10, "output_tokens": 5.5}', "5.5 is no whole number"),
        ('{"arrival": 0, "prompt_tokens": 10, "output_tokens": 5, "hash_ids": "12"}', "'1' is no number"),
        ('{"a": ' + "[" * 100_000, "RecursionError"),
    ],
)
def test_a_line_that_no_request_can_be_is_refused_by_its_number(tmp_path: Path, line: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"line 1: .*{why}"):
        read_trace(written(tmp_path, line))


def test_what_is_no_object_is_refused_by_its_number(tmp_path: Path) -> None:
    good = '{"arrival": 0, "prompt_tokens": 10, "output_tokens": 5}\n'
    with pytest.raises(InvalidRequest, match=r"line 2: .*it is no object"):
        read_trace(written(tmp_path, f"{good}[]"))


@pytest.mark.parametrize("start", ["\ufeff", "\n \n", "\ufeff\n"], ids=["mark", "space", "both"])
def test_what_stands_before_the_first_line_does_not_decide_what_a_trace_is(tmp_path: Path, start: str) -> None:
    line = '{"arrival": 2, "prompt_tokens": 3, "output_tokens": 4.0}\n'
    assert list(read_trace(written(tmp_path, start + line * 2)).prompts) == [3, 3]
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,5,4\n"
    assert list(read_trace(written(tmp_path, start[:1].strip() + rows, "azure.csv")).prompts) == [5]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_azure_times_mean_the_same_in_every_zone(tmp_path: Path, zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some have a zone, some a fraction, and one hour of this night is there twice on some machines."""
    times = ("2023-10-29 00:59:59.5", "2023-10-29 01:00:00+00:00", "2023-10-29 01:00:00.250000+00:00")
    rows = "".join(f"{at},5,4\n" for at in (*times, "2023-10-29 03:00:00"))
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        trace = read_trace(written(tmp_path, f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}", "azure.csv"))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert list(trace.arrivals) == pytest.approx([0.0, 0.5, 0.75, 7200.5])


def test_a_trace_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> object:
        raise PermissionError(13, "Permission denied")

    path = written(tmp_path, "{}")
    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(InvalidRequest, match=r"cannot be read: Permission denied"):
        read_trace(path)


@pytest.mark.parametrize("row", ["2023-11-16 18:17:03,99999999999999999999,4", "2023-11-16 18:17:03,5,-4"])
def test_an_azure_row_that_no_request_can_be_is_refused_by_its_number(tmp_path: Path, row: str) -> None:
    with pytest.raises(InvalidRequest, match=r"line 2: .*no number of tokens"):
        read_trace(written(tmp_path, f"TIMESTAMP,ContextTokens,GeneratedTokens\n{row}\n", "azure.csv"))
