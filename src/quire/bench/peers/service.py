"""The process of a peer: `python service.py PEER.py MODEL THREADS SEQUENCES CONTEXT`, by the Python that has it.

Imports nothing of Quire, so that any Python 3 runs it. The file of a peer has `load(model, threads, sequences,
context)`, which returns what answers prompts, and its version. A line in is `{"prompts": [[token, ...], ...], "new":
tokens}`; a line out is `{"wall": s, "cpu": s, "tokens": [[token, ...], ...]}`, or `{"error": text}`. The first line
out is `{"version": text}`.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts, new tokens) -> greedy answers of so many tokens."""


def main(peer: str, model: str, *sizes: str) -> None:
    """Answer requests until there are no more."""
    # Libraries print, too: what they print goes to the error output.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # This folder has files with the names of packages, which must not be found in their place.
    sys.path.pop(0)
    try:
        generate, version = runpy.run_path(peer)["load"](model, *map(int, sizes))
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out)
        return
    print(json.dumps({"version": version}), file=out)
    for line in sys.stdin:
        print(json.dumps(answer(generate, json.loads(line))), file=out)


def answer(generate: Generate, asked: dict[str, list[list[int]]]) -> dict[str, object]:
    """The reply to one request."""
    try:
        began, used = time.perf_counter(), time.process_time()
        tokens = generate(asked["prompts"], asked["new"])  # type: ignore[arg-type]
        return {"wall": time.perf_counter() - began, "cpu": time.process_time() - used, "tokens": tokens}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(*sys.argv[1:])
