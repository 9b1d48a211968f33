"""`python -m tests.mutation`: plants single-line faults one by one and says which the nearest tests notice."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutation.faults import Fault, drawn, read
from tests.mutation.marks import measure
from tests.mutation.trial import CAUGHT, NOT_APPLIED, Bench, Limits, Result, copied

ROOT = Path(__file__).parents[2]
ROOMS = ["scheduler", "engine", "model_runner", "server", "tokenization", "parsers"]


def main(arguments: list[str] | None = None) -> int:
    """Runs, prints a line a fault and the score, writes --json; 1 where less than --at-least were caught."""
    options = _parser().parse_args(arguments)
    if options.measure:
        with tempfile.TemporaryDirectory(prefix="quire-marks-") as place:
            return measure(ROOT, copied(ROOT, Path(place) / "tree"), options.tests or ["tests"], options.measure)
    faults = read(options.faults) if options.faults else drawn(ROOT, options.paths, options.count, options.seed)
    if options.list:
        print(json.dumps([fault._asdict() for fault in faults], indent=1, ensure_ascii=False))
        return 0
    limits = Limits(options.seconds, options.test_seconds)
    bench = Bench(ROOT, options.jobs, limits, options.tests, most=options.files, marks=options.marks)
    results = tried(faults, options.jobs, bench, options.json)
    for result in results:
        if result.verdict != CAUGHT:
            print(_line(result))
    counts = Counter(_room(result) for result in results if result.verdict != NOT_APPLIED)
    caught = Counter(_room(result) for result in results if result.verdict == CAUGHT)
    for room, count in sorted(counts.items()):
        print(f"{room:12} {caught[room]:4} of {count:4} caught")
    total = sum(counts.values())
    share = 100 * sum(caught.values()) / total if total else 100.0
    print(f"{'all':12} {sum(caught.values()):4} of {total:4} caught, {share:.0f} %")
    return int(share < options.at_least)


def tried(faults: list[Fault], jobs: int, bench: Bench, out: Path | None = None) -> list[Result]:
    """Every fault tried, in the order given; `out` is written anew after each, so that a run may be broken off."""
    results: dict[int, Result] = {}

    def one(i: int) -> None:
        results[i] = bench.tried(faults[i])
        print(f"[{len(results)}/{len(faults)}] {_line(results[i])}", flush=True)
        if out:
            out.write_text(
                json.dumps([_as_json(results[j]) for j in sorted(results)], indent=1, ensure_ascii=False) + "\n"
            )

    try:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, range(len(faults))))
    finally:
        bench.close()
    return [results[i] for i in range(len(faults))]


def _as_json(result: Result) -> dict[str, object]:
    return {
        **result.fault._asdict(),
        "verdict": result.verdict,
        "by": result.by,
        "tests": result.ran,
        "seconds": round(result.seconds, 1),
    }


def _room(result: Result) -> str:
    return result.fault.path.removeprefix("src/quire/").partition("/")[0]


def _line(result: Result) -> str:
    fault = result.fault
    change = f"{fault.old.strip()}  ->  {fault.new.strip() or 'pass'}"
    by = f"  [{result.by}]" if result.by else ""
    return f"{result.verdict:9} {fault.path}:{fault.line}  {change}{by}  {result.ran} tests, {result.seconds:.0f} s"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="which faults are drawn")
    parser.add_argument("--count", type=int, default=100, help="how many faults are drawn")
    parser.add_argument("--paths", nargs="+", default=ROOMS, help="folders or modules of src/quire to draw from")
    parser.add_argument("--faults", type=Path, help='faults given instead: JSON, a list of {"path", "old", "new"}')
    parser.add_argument("--tests", nargs="+", help="test files or ids to run, instead of the nearest of each fault")
    parser.add_argument(
        "--files", type=int, help="most test files that are run for a fault, the nearest (default: all)"
    )
    parser.add_argument(
        "--measure", type=Path, help="run --tests (default: all) once and append to this file what each executes"
    )
    parser.add_argument("--marks", type=Path, help="what --measure wrote: run the tests that execute the line first")
    parser.add_argument("--jobs", type=int, default=2, help="faults tried side by side")
    parser.add_argument("--seconds", type=float, default=600, help="time for the tests of one fault")
    parser.add_argument(
        "--test-seconds", type=float, default=120, help="time for one test, which then counts as hanging"
    )
    parser.add_argument("--at-least", type=float, default=0, help="percent that must be caught")
    parser.add_argument("--json", type=Path, help="where the results are written")
    parser.add_argument("--list", action="store_true", help="print the faults and try none")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
