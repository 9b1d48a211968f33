"""`quire verify` over many checkpoints and options, on this machine's device.

    python -m tests.verified --count 500 --workers 8            # every kind by turns, each with drawn options
    python -m tests.verified --only llama qwen3 --seconds 60    # kinds with such names, those that end by then

Each combination answers greedy and seeded requests alone, in a batch, from a warm cache, in small chunks, preempted and
with drafts, in deterministic mode. Prints a line for each that differs, is refused or fails, and what was seen in all;
the exit code is 1 where any differs or fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.cli.verify import verified
from quire.config import Settings
from quire.errors import QuireError
from tests.product import KINDS, MTP, NGRAM

Options = dict[str, Any]

AXES: Mapping[str, Sequence[Any]] = MappingProxyType(
    {
        "dtype": ("bfloat16", "float32", "float16", "bfloat16"),
        "quantization": ("auto", "auto", "int8", "q8_0", "q4_k", "fp8", "fp8_per_block"),
        "kv_cache_dtype": ("auto", "auto", "fp8", "fp8_e5m2"),
        "speculative_config": (None, None, json.dumps(NGRAM), json.dumps(MTP)),
        "block_size": ("auto", 16, 32),
        "max_num_seqs": ("auto", 3, 16),
        "max_num_batched_tokens": ("auto", 33),
        "lookahead": ("auto", 0, 2),
        "eviction_policy": ("lru", "fifo"),
        "pressure_policy": ("foresee", "preempt", "reserve"),
        "enforce_eager": (True, True, False),
    }
)
"""Options beside `deterministic`; the first value is the default of this program."""

FIXED: Options = {
    "deterministic": True,
    "skip_tokenizer_init": True,
    "canary": "off",
    "max_model_len": 128,
    "num_gpu_blocks_override": 160,
    "seed": 11,
}


def draws(seed: int, count: int, kinds: Sequence[str]) -> Iterator[tuple[int, str, Options]]:
    """Kinds by turns, the first round with the options' defaults, later ones with some of them drawn."""
    rng = random.Random(seed)
    for i in range(count):
        chosen = set(rng.sample(sorted(AXES), rng.randrange(2, 6))) if i >= len(kinds) else set[str]()
        options = {name: rng.choice(values) if name in chosen else values[0] for name, values in AXES.items()}
        yield i, kinds[i % len(kinds)], options


@cache
def folder() -> Path:
    """This process's checkpoints."""
    return Path(tempfile.mkdtemp())


@cache
def model(kind: str) -> Path:
    """A checkpoint of this kind."""
    own = folder() / kind.replace(" ", "_")
    own.mkdir()
    return KINDS[kind](own)


def tried(kind: str, options: Options, device: str, requests: int, new: int) -> tuple[str, Counter[str], str]:
    """What became of a combination: (equal, differs, refused or failed; what was seen, how often; why)."""
    seen = Counter[str]()
    try:
        settings = Settings.of(model=str(model(kind)), device=device, **FIXED, **options)
        for row in verified(settings, count=requests, new=new):
            if row.differ:
                return "differs", seen, f"{row.name}: {row.first}"
            seen[row.name] += bool(row.happened[0])
            seen["tokens"] += row.tokens
    except QuireError as error:
        return "refused", seen, str(error)
    except Exception:
        return "failed", seen, traceback.format_exc()
    return "equal", seen, ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as the arguments say; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--skip", type=int, default=0, help="so many of them, which ran before")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--new", type=int, default=12)
    parser.add_argument("--seconds", type=float, help="after which those count that have ended")
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of names of kinds")
    asked = parser.parse_args(arguments)
    kinds = [kind for kind in KINDS if kind.startswith(tuple(asked.only)) and not kind.startswith("vision")]
    began, ended, seen = time.monotonic(), Counter[str](), Counter[str]()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.workers, mp_context=spawn) as pool:
        runs = {
            pool.submit(tried, kind, options, asked.device, asked.requests, asked.new): (i, kind, options)
            for i, kind, options in islice(draws(asked.seed, asked.count, kinds), asked.skip, None)
        }
        try:
            for run in as_completed(runs, asked.seconds):
                what, occurred, why = run.result()
                ended[what] += 1
                seen += occurred
                if what != "equal":
                    i, kind, options = runs[run]
                    changed = {name: value for name, value in options.items() if value != AXES[name][0]}
                    print(f"{i} {kind} {changed}: {what}: {why}", flush=True)
        except TimeoutError:
            for process in (pool._processes or {}).values():
                process.terminate()
    print(f"{dict(ended)} of {asked.count - asked.skip} in {time.monotonic() - began:.0f} s")
    print(f"seen: {dict(seen)}")
    return 1 if ended["differs"] or ended["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
