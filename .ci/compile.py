"""Compile what another process installs while it does, the rest with all cores when it has ended: compile.py PID."""

from __future__ import annotations

import compileall
import os
import re
import sys
import sysconfig
import time
from concurrent.futures import ProcessPoolExecutor

# What no test imports, or few modules of.
UNUSED = re.compile(
    r"/(ray|networkx|fontTools|pip|setuptools|mypyc?|pygments/lexers|tests?|babel|distlib|graphql|identify|opencensus|pre_commit"
    r"|virtualenv|pyasn1_modules|google/(api_core|auth|oauth2)|hypothesis/extra|huggingface_hub/(cli|inference)"
    r"|numpy/(distutils|f2py)|onnxruntime/(transformers|tools)|openai/types/(admin|beta|live|realtime)|playwright/async_api"
    r"|pydantic/v1|sympy/(combinatorics|parsing|physics|stats|vector)|torch/(_inductor|_vendor|ao|testing)"
    r"|transformers/(cli|exporters|models|pipelines))/"
)
SITE = sysconfig.get_path("purelib")


def found() -> set[tuple[str, int, int]]:
    """Modules that are there: path, size and time. One that is still written is another one when it is whole."""
    made = set()
    for folder, folders, names in os.walk(SITE):
        folders[:] = [name for name in folders if name != "__pycache__" and not UNUSED.search(f"{folder}/{name}/")]
        for name in names:
            if name.endswith(".py"):
                path = f"{folder}/{name}"
                stat = os.stat(path)
                made.add((path, stat.st_size, stat.st_mtime_ns))
    return made


def compile_one(path: str) -> None:
    """Some are no modules, which is not said."""
    compileall.compile_file(path, quiet=2)


def runs(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Until it has ended, and once more."""
    pid, done = int(sys.argv[1]), set()
    while runs(pid):
        for each in sorted(found() - done):
            if not runs(pid):
                break
            compile_one(each[0])
            done.add(each)
        time.sleep(0.5)
    with ProcessPoolExecutor() as pool:
        list(pool.map(compile_one, sorted(path for path, _, _ in found() - done), chunksize=20))


if __name__ == "__main__":
    main()
